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

from threshold_gating import primitive
from threshold_gating.instance import TG
from threshold_gating.kernels import launch
from threshold_gating.kernels.form import Form, is_run, place_of, take_apart

# tau = tau0 exp(rho) for |rho| up to this; see `layers`.
BOUND = 7.0
_clamp = torch.ops.aten.clamp.default


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

    @classmethod
    def of(
        cls, form: Form, learned: Sequence[str], role: int = launch.ALONE, mild: bool = False
    ) -> Kind:
        digits = [launch.code_of(row) for row in (form.tau, form.theta, form.s, form.c)]
        anchored = bool(learned) and form.hard
        steps = ("tau" in learned) + 2 * ("theta" in learned) + 4 * anchored + 8 + 16 * mild
        return cls(form, launch.codes(form, digits, role, steps))


class _Plan:
    """The kernels of one kind for inputs of one shape, layout and type."""

    def __init__(self, kind: Kind, sizes: tuple[int, int, int], size: int, shape: Any) -> None:
        self.kind, self.sizes, self.size, self.shape = kind, sizes, size, shape
        self.steps = (sizes[1], int(sizes[1] > 1)) * 4
        self.forward = launch.prepared("blend_forward", sizes, size, kind.codes, self.steps).run

    @functools.lru_cache(4096)  # noqa: B019  (plans are kept anyway)
    def backward(self, wanted: tuple[bool, ...]) -> tuple[launch.Prepared, tuple[int, ...]]:
        """The kernel, and how many rows of its sums each learned tensor has."""
        codes = self.kind.codes
        known = (*codes, *wanted)
        rows = [launch.count(codes, [k == m and wanted[k] for k in range(6)]) for m in range(2, 6)]
        ready = launch.prepared("blend_backward", self.sizes, self.size, known, self.steps)
        return ready, tuple(rows)


@functools.lru_cache(4096)
def _plan(
    kind: Kind,
    sizes: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> _Plan | None:
    found = place_of(sizes, stride, shape)
    if found is None or not math.prod(sizes) or not is_run(sizes, stride, found[0]):
        return None
    # Positions have an order of their own, in which the parameters are not.
    if sum(n > 1 for n in shape) > 1 and list(found[0]) != sorted(found[0]):
        return None
    return _Plan(kind, found[1], dtype.itemsize, shape)


def activation(
    x: Tensor, kind: Kind, shape: tuple[int, ...], given: Given, up: Tensor | None = None
) -> Tensor | None:
    """y, with gradients for x and what is learned; None where x does not lie as a kernel needs it.

    `shape` is that in which a group's values broadcast against x; `up` multiplies y.
    """
    plan = _plan(kind, x.shape, x.stride(), x.dtype, shape)
    if plan is None or (up is not None and up.stride() != x.stride()):
        return None
    read = _read(*given)
    if torch.is_grad_enabled():
        y: Tensor = _apply(x, up, *given[:4], plan, read)
        return y
    y = torch.empty_like(x)
    plan.forward((x, x if up is None else up, y, *read), x.dtype)
    return y


def _read(
    rho: Tensor | None,
    dtheta: Tensor | None,
    s: Tensor,
    c: Tensor,
    tau0: Tensor | None,
    theta: Tensor,
) -> tuple[Tensor, ...]:
    """What the kernels read: tau, rho, theta, shift, s, c."""
    tau = theta if tau0 is None else tau0
    shift = theta if dtheta is None else dtheta
    return launch.readable((tau, tau if rho is None else rho, theta, shift, s, c))


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
    return Kind.of(read, (), role, mild=_is_mild(t))


def _is_mild(t: TG) -> bool:
    """Whether branches can be counted from the left on both sides (`device_gates._from_below`).

    Where the exponentials stop growing, all gates but the last must be below 2^-24 of it, and the
    last branch must not vanish, or what is left of the others would be seen. With a tau for each
    threshold they are (2^-24.8 for K = 6); with one tau it depends on the weights w_k of `tile`.
    """
    tame = max(abs(w) for w in (*t.s, *t.c)) <= 2  # so that no product overflows
    if t.hard or t.K < 3 or not tame or (t.s[-1] == 0 and any(t.s)):
        return False
    if isinstance(t.tau, tuple):
        return t.K <= 6
    middle, exponent, step = sum(t.theta) / (t.K - 1), 0.0, 124 / (t.K - 1)
    for k, theta in enumerate(t.theta[:-1], 1):
        exponent += t.tau * (middle - theta) * math.log2(math.e)
        if not exponent - (t.K - 1 - k) * step <= -24:
            return False
    return True


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, *rest: Any) -> Tensor:
        *learned, plan, read = rest
        ctx.save_for_backward(x, up, *learned)
        ctx.how = plan, read
        y = torch.empty_like(x)
        plan.forward((x, x if up is None else up, y, *read), x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, up, *learned = ctx.saved_tensors
        plan, read = ctx.how
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # someone differentiates twice
            return *_by_formulas(dy, x, up, learned, plan, read, needed), None, None
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        (run, shape), rows = plan.backward(needed)
        dx = torch.empty_like(x) if needed[0] else None
        dup = torch.empty_like(x) if needed[1] else None
        sums = x.new_empty(shape, dtype=torch.float32) if shape[1] else x
        other, to, over = (
            x if up is None else up,
            x if dx is None else dx,
            x if dup is None else dup,
        )
        run((x, other, dy, to, over, sums, *read), x.dtype)
        if not shape[1]:
            return dx, dup, None, None, None, None, None, None
        # all at once, because a view costs as much as a small kernel
        parts = list(sums.sum(0).split_with_sizes(rows))
        for k, w in enumerate(learned):
            if not needed[k + 2]:
                parts[k] = None
            elif w.dim() != 2:
                parts[k] = parts[k].view(w.shape)
        return dx, dup, *parts, None, None


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
    form, shape = plan.kind.form, plan.shape
    inputs = [None if t is None else t.view_as(t) for t in (x, up, *learned)]
    z, factor, rho, dtheta, s, c = inputs
    tau0, _, theta0, *_ = read

    def rows(w: Any, numbers: Sequence[float | None]) -> list[Any]:
        pairs = zip(numbers, w.reshape(len(numbers), -1).unbind(0), strict=True)
        return [row.view(shape) if number is None else number for number, row in pairs]

    theta = rows(theta0 if dtheta is None else theta0 + dtheta, form.theta)
    slopes, constants = rows(s, form.s), rows(c, form.c)
    tau: Any = math.inf
    if not form.hard:
        sharp = tau0 if rho is None else tau0 * _clamp(rho, -BOUND, BOUND).exp()
        taus = rows(sharp, form.tau)
        tau = taus if len(taus) > 1 else taus[0]
    elif plan.kind.codes[-1] & 4:
        near = zip(constants, slopes, [theta[0], *theta], strict=True)
        constants = [v if isinstance(m, float) and m == 0 else v - m * at for v, m, at in near]
    options: Any = {"owner": form.owner, "centred": form.centred}
    assert z is not None
    y = primitive.blend(z, tau, theta, slopes, constants, **options)
    y = y if factor is None else y * factor
    asked = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]
