"""An `Activation` or a frozen instance by Triton, straight from its tensors.

`blend` is given tau and theta as they are now, one tensor a row: each is a step for autograd, and
in a network of many activations these steps cost more than the kernels. Here one function takes
rho, dtheta, s and c whole and returns their gradients; the kernels do the steps. What Python has
to do for a call is kept small: on a GPU it often takes longer than the kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.kernels import launch, traced
from threshold_gating.kernels.form import Form, dense_sizes, take_apart


class Given(NamedTuple):
    """The tensors of an activation: those that may be learned, then those that never are.

    s and c have K rows, c the values at the thresholds if hard gates are learned; theta0 and dtheta
    have K - 1.
    """

    rho: Tensor | None
    dtheta: Tensor | None
    s: Tensor
    c: Tensor
    tau0: Tensor | None
    theta0: Tensor


@dataclass(frozen=True, eq=False)
class Kind:
    """What a kernel has to know of an activation before it sees a tensor.

    One is made for each activation and told from others by identity, which costs the least.
    """

    form: Form
    codes: launch.Codes
    names: tuple[str | None, ...]  # of an activation's tensors, in the order of `Given`

    @classmethod
    def of(
        cls, form: Form, learned: Sequence[str], role: int = launch.ALONE, weights: int = 0
    ) -> Kind:
        digits = [launch.code_of(row) for row in (form.tau, form.theta, form.s, form.c)]
        anchored = bool(learned) and form.hard
        steps = ("tau" in learned) + 2 * ("theta" in learned) + 4 * anchored + 8 + 16 * weights
        names = (
            "rho" if "tau" in learned else None,
            "dtheta" if "theta" in learned else None,
            "s",
            "v" if anchored else "c",
            None if form.hard else "tau0",
            "theta0",
        )
        return cls(form, launch.codes(form, digits, role, steps), names)


class _Backward(NamedTuple):
    """A kernel for gradients, its sums, one that adds them up, and whose they are.

    `rows` are those of rho, dtheta, s and c. None adds up what is in one part already.
    """

    run: launch.Launch
    sums: tuple[int, int, int]
    stride: tuple[int, int, int]
    add: launch.Launch | None
    whose: list[int]
    rows: list[int]


class _Plan:
    """The kernels of one kind for inputs of one shape, layout and type."""

    def __init__(self, kind: Kind, sizes: tuple[int, int, int], size: int, shape: Any) -> None:
        self.kind, self.sizes, self.size, self.shape = kind, sizes, size, shape
        self.steps = (sizes[1], int(sizes[1] > 1)) * 4
        self.forward = launch.prepared("blend_forward", sizes, size, kind.codes, self.steps).run

    @functools.lru_cache(4096)  # noqa: B019  (plans are kept anyway)
    def backward(self, needed: tuple[bool, ...]) -> _Backward:
        """The kernel for what `_Direct` needs the gradients of."""
        codes, wanted = self.kind.codes, needed[:6]
        known = (*codes, *wanted)
        run, sums, axis = launch.prepared(
            "blend_backward", self.sizes, self.size, known, self.steps
        )
        whose = [k for k in range(4) if wanted[k + 2]]
        # [tau, theta, s, c]: none for what is not wanted
        rows = [launch.count(codes, [m == k + 2 and wanted[m] for m in range(6)]) for k in range(4)]
        add = launch.adding(sums, axis, rows) if whose else None
        return _Backward(run, sums, (sums[1] * sums[2], sums[2], 1), add, whose, rows)


@functools.lru_cache(4096)
def _plan(
    kind: Kind,
    sizes: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> _Plan | None:
    found = dense_sizes(sizes, stride, shape) if math.prod(sizes) else None
    return None if found is None else _Plan(kind, found, dtype.itemsize, shape)


def activation(
    x: Tensor, kind: Kind, shape: tuple[int, ...], given: Given, up: Tensor | None = None
) -> Tensor | None:
    """y, with gradients for x and what is learned; None where x does not lie as a kernel needs it.

    `shape` is that in which a group's values broadcast against x; `up` multiplies y.
    """
    plan = _plan(kind, x.shape, x.stride(), x.dtype, shape)
    if plan is None or (up is not None and up.stride() != x.stride()):
        return None
    read = traced.readable(given)
    if torch.is_grad_enabled():
        y: Tensor = _apply(x, up, *given[:4], (plan, read))
        return y
    y = torch.empty_like(x)
    plan.forward((x, x if up is None else up, y, *read), x.dtype)
    return y


def constant(t: TG, x: Tensor) -> Tensor | None:
    """A frozen instance at x; its numbers are put on the device once."""
    ready = _ready(t, launch.ALONE, x.device)
    return None if ready is None else activation(x, ready[0], (), ready[1])


def constant_times(t: TG, x: Tensor, up: Tensor) -> Tensor | None:
    """A frozen instance at x, times `up`."""
    ready = _ready(t, launch.TIMES, x.device)
    return None if ready is None else activation(x, ready[0], (), ready[1], up)


@functools.lru_cache(1024)  # a calibrated network has an instance for each site
def _ready(t: TG, role: int, device: torch.device) -> tuple[Kind, Given] | None:
    kind = frozen_kind(t, role)
    if kind is None:
        return None
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    rows = (torch.tensor(w, device=device).view(-1, 1) for w in (t.s, t.c, taus, t.theta))
    return kind, Given(None, None, *rows)


def frozen_kind(t: TG, role: int = launch.ALONE) -> Kind | None:
    """The kind of an instance with nothing learned, or None where there is no kernel."""
    options: dict[str, Any] = {
        name: getattr(t, name) for name in ("form", "owner", "q", "anchor", "clamp")
    }
    call = take_apart(torch.zeros(1), t.tau, t.theta, t.s, t.c, **options)
    if call is None:
        return None
    # numbers that are no structure are read from memory: one kernel serves many instances
    read = call.form._replace(
        tau=call.form.tau if t.hard else (None,) * len(call.form.tau),
        theta=(None,) * (t.K - 1),
        s=tuple(w if w in launch.DIGITS else None for w in t.s),
        c=tuple(w if w in launch.DIGITS else None for w in t.c),
    )
    return Kind.of(read, (), role, _is_mild(t) + 2 * _is_mirrored(t))


def _is_mild(t: TG) -> bool:
    """Whether branches can be counted from the left on both sides (`device_gates._from_below`).

    Where the exponentials stop growing, all gates but the last must be below 2^-24 of it, and the
    last branch must not vanish, or what is left of the others would be seen. With a tau for each
    threshold they are (2^-24.8 for K = 6); with one tau it depends on the weights w_k of `tile`.
    """
    if t.hard or t.K < 3 or (t.s[-1] == 0 and any(t.s)) or list(t.theta) != sorted(t.theta):
        return False
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    # so that no product overflows, and tau x - tau theta is tau (x - theta) to 16 * 2^-23 = 2e-6
    tame = max(map(abs, (*t.s, *t.c))) <= 2 and max(taus) * max(map(abs, t.theta)) <= 16
    if not tame or isinstance(t.tau, tuple):
        return tame and t.K <= 6
    middle, exponent, step = sum(t.theta) / (t.K - 1), 0.0, 124 / (t.K - 1)
    for k, theta in enumerate(t.theta[:-1], 1):
        exponent += t.tau * (middle - theta) * math.log2(math.e)
        if not exponent - (t.K - 1 - k) * step <= -24:
            return False
    return True


def _is_mirrored(t: TG) -> bool:
    """Whether half of the exponentials are enough, because taus are the same from either end.

    Their bounds then leave less room (`device_gates._mirrored`), which must still be 2^24.
    """
    if not isinstance(t.tau, tuple) or t.tau != t.tau[::-1] or not _is_mild(t):
        return False
    pairs = zip(t.tau, t.theta, t.theta[::-1], strict=True)
    gaps = [tau * (high - low) * math.log2(math.e) for tau, low, high in pairs]
    lower = gaps[: (t.K - 1) // 2]
    return min(lower) >= 0 and 124 - sum(lower) >= 24 * (t.K - 1)


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        rho: Tensor | None,
        dtheta: Tensor | None,
        s: Tensor,
        c: Tensor,
        how: tuple[_Plan, tuple[Tensor, ...]],
    ) -> Tensor:
        ctx.save_for_backward(x, up, rho, dtheta, s, c)
        ctx.how = how
        y = torch.empty_like(x)
        plan, read = how
        plan.forward((x, x if up is None else up, y, *read), x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, up, *learned = ctx.saved_tensors
        plan, read = ctx.how
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():  # someone differentiates twice
            return *_by_formulas(dy, x, up, learned, plan, read, needed[:6]), None
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        run, shape, stride, add, whose, rows = plan.backward(needed)
        dx = torch.empty_like(x) if needed[0] else None
        dup = torch.empty_like(x) if needed[1] else None
        # strided, because `new_empty` takes twice as long
        sums = x.new_empty_strided(shape, stride, dtype=torch.float32) if whose else x
        other, to, over = (
            x if up is None else up,
            x if dx is None else dx,
            x if dup is None else dup,
        )
        run((x, other, dy, to, over, sums, *read), x.dtype)
        grads: list[Tensor | None] = [None, None, None, None]
        if add is not None:
            _, rho, _, dtheta, s, c = read
            into = [sums] * 4
            for k in whose:
                grads[k] = into[k] = torch.empty_like((rho, dtheta, s, c)[k])
            add((sums, *into), torch.float32)
        elif whose:
            parts = torch.unsafe_split_with_sizes(sums.view(sum(rows), -1), rows)
            for k in whose:
                grads[k] = parts[k].view_as(learned[k])
        return dx, dup, *grads, None


# `_Direct.apply` without its care for functorch, whose tensors do not come here: `kernels.launches`
_apply: Any = super(torch.autograd.Function, _Direct).apply


def _by_formulas(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    learned: Sequence[Tensor | None],
    plan: _Plan,
    read: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The same gradients, differentiable: through the reference."""
    inputs = [None if t is None else t.view_as(t) for t in (x, up, *learned)]
    z, factor, *own = inputs
    tau0, _, theta0, *_ = read
    form, anchored = plan.kind.form, bool(plan.kind.codes[-1] & 4)
    assert z is not None
    y = traced.formula(z, form, anchored, plan.shape, (*own, tau0, theta0))
    y = y if factor is None else y * factor
    asked = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]
