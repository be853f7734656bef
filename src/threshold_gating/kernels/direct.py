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
_unflatten = torch._C._nn.unflatten_dense_tensors


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


class Kind(NamedTuple):
    """What a kernel has to know of an activation before it sees a tensor."""

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


class _How(NamedTuple):
    """What backward has to know beside the tensors that were saved."""

    kind: Kind
    sizes: tuple[int, int, int]
    shape: tuple[int, ...]
    tau0: Tensor | None
    theta0: Tensor


def activation(
    x: Tensor, kind: Kind, shape: tuple[int, ...], given: Given, up: Tensor | None = None
) -> Tensor | None:
    """y, with gradients for x and what is learned; None where x does not lie as a kernel needs it.

    `shape` is that in which a group's values broadcast against x; `up` multiplies y.
    """
    sizes = _place(x.shape, x.stride(), shape)
    if sizes is None or (up is not None and up.stride() != x.stride()):
        return None
    if torch.is_grad_enabled():
        how = _How(kind, sizes, shape, *given[4:])
        y: Tensor = _Direct.apply(x, up, *given[:4], how)  # type: ignore[no-untyped-call]
        return y
    return launch.forward(x, up, _parameters(given, sizes[1]), kind.codes, sizes)


def constant(t: TG, x: Tensor) -> Tensor | None:
    """A frozen instance at x; its numbers are put on the device once."""
    ready = _ready(t, launch.ALONE, x.device)
    return None if ready is None else activation(x, ready[0], (), ready[1])


def constant_times(t: TG, x: Tensor, up: Tensor) -> Tensor | None:
    """A frozen instance at x, times `up`."""
    ready = _ready(t, launch.TIMES, x.device)
    return None if ready is None else activation(x, ready[0], (), ready[1], up)


@functools.lru_cache(64)
def _ready(t: TG, role: int, device: torch.device) -> tuple[Kind, Given] | None:
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
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    rows = (torch.tensor(w, device=device).view(-1, 1) for w in (t.s, t.c, taus, t.theta))
    return Kind.of(read, (), role, mild=_is_mild(t)), Given(None, None, *rows)


def _is_mild(t: TG) -> bool:
    """Whether the weights w_k of `tile` are so small that e^k can be counted from the left.

    Where e stops growing (`device_gates`), all gates but the last must be below 2^-24 of it, and
    the last branch must not vanish, or what is left of the others would be seen.
    """
    if not 3 <= t.K <= 5 or t.hard or isinstance(t.tau, tuple):
        return False
    middle, exponent, step = sum(t.theta) / (t.K - 1), 0.0, 124 / (t.K - 1)
    for k, theta in enumerate(t.theta[:-1], 1):
        exponent += t.tau * (middle - theta) * math.log2(math.e)
        if not exponent - (t.K - 1 - k) * step <= -24:
            return False
    tame = max(abs(w) for w in (*t.s, *t.c)) <= 2  # so that no product overflows
    return tame and (t.s[-1] != 0 or not any(t.s))


@functools.lru_cache(4096)
def _place(
    sizes: Sequence[int], stride: Sequence[int], group: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """(outer, G, inner) of x's memory."""
    found = place_of(sizes, stride, group)
    if found is None or not math.prod(sizes) or not is_run(sizes, stride, found[0]):
        return None
    # Positions have an order of their own, in which the parameters are not.
    turned = sum(n > 1 for n in group) > 1 and list(found[0]) != sorted(found[0])
    return None if turned else found[1]


def _parameters(given: Sequence[Any], G: int) -> launch.Parameters:
    rho, dtheta, s, c, tau0, theta = given
    tau = theta if tau0 is None else tau0
    read = (tau, tau if rho is None else rho, theta, theta if dtheta is None else dtheta, s, c)
    for t in read:
        if t.dtype != torch.float32 or not t.is_contiguous():  # mixed precision, odd views
            read = tuple([w.detach().float().contiguous() for w in read])
            break
    return launch.Parameters(read, (G, int(G > 1)) * 4)


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
        how: _How,
    ) -> Tensor:
        ctx.save_for_backward(x, up, rho, dtheta, s, c)
        ctx.how = how
        p = _parameters((rho, dtheta, s, c, how.tau0, how.theta0), how.sizes[1])
        return launch.forward(x, up, p, how.kind.codes, how.sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, up, *given = ctx.saved_tensors
        how: _How = ctx.how
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # someone differentiates twice
            return *_by_formulas(dy, x, up, given, how, needed), None
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        p = _parameters((*given, how.tau0, how.theta0), how.sizes[1])
        dx, dup, sums = launch.backward(dy, x, up, p, how.kind.codes, needed, how.sizes)
        grads: list[Tensor | None] = [None] * 4
        places = [k for k in range(4) if needed[k + 2]]
        if places:  # in one call, because a view costs as much as a small kernel
            parts = _unflatten(sums.view(-1), [given[k] for k in places])
            for k, part in zip(places, parts, strict=True):
                grads[k] = part
        return dx if needed[0] else None, dup if needed[1] else None, *grads, None


def _by_formulas(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    given: Sequence[Tensor | None],
    how: _How,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The same gradients, differentiable: through the reference."""
    form, shape = how.kind.form, how.shape
    inputs = [None if t is None else t.view_as(t) for t in (x, up, *given)]
    z, factor, rho, dtheta, s, c = inputs

    def rows(w: Any, numbers: Sequence[float | None]) -> list[Any]:
        pairs = zip(numbers, w.reshape(len(numbers), -1).unbind(0), strict=True)
        return [row.view(shape) if number is None else number for number, row in pairs]

    theta = rows(how.theta0 if dtheta is None else how.theta0 + dtheta, form.theta)
    slopes, constants = rows(s, form.s), rows(c, form.c)
    tau: Any = math.inf
    if not form.hard:
        assert how.tau0 is not None
        sharp = how.tau0 if rho is None else how.tau0 * _clamp(rho, -BOUND, BOUND).exp()
        taus = rows(sharp, form.tau)
        tau = taus if len(taus) > 1 else taus[0]
    elif how.kind.codes[-1] & 4:
        near = zip(constants, slopes, [theta[0], *theta], strict=True)
        constants = [v if isinstance(m, float) and m == 0 else v - m * at for v, m, at in near]
    options: Any = {"owner": form.owner, "centred": form.centred}
    assert z is not None
    y = primitive.blend(z, tau, theta, slopes, constants, **options)
    y = y if factor is None else y * factor
    asked = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]
