"""A learned `Activation` by Triton, straight from its parameters.

`blend` is given tau and theta as they are now, one tensor a row: each is a step for autograd, and
in a network of many activations these steps cost more than the kernels. Here one function takes
rho, dtheta, s and c whole and returns their gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels import launch
from threshold_gating.kernels.form import Form, is_run, place_of

Given = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # rho, dtheta, s, c
# tau = tau0 exp(rho) for |rho| up to this; see `layers`.
BOUND = 7.0
_clamp = torch.ops.aten.clamp.default


class Starts(NamedTuple):
    """What does not change with a step: the form, tau0 and theta0, where groups lie in x."""

    form: Form
    tau0: Tensor  # (1 or K - 1, G)
    theta0: Tensor  # (K - 1, G)
    shape: tuple[int, ...]  # that of a group, as it broadcasts against x

    def now(self, rho: Tensor | None, dtheta: Tensor | None) -> tuple[Tensor, Tensor]:
        """tau and theta."""
        tau, theta = self.tau0, self.theta0
        if rho is not None:
            tau = tau * _clamp(rho, -BOUND, BOUND).exp_().view_as(tau)
        return tau, theta if dtheta is None else theta + dtheta.view_as(theta)


def takes(form: Form | None, s: Tensor | None, c: Tensor | None) -> bool:
    """Whether slopes and constants are each learned as a whole or are numbers 0, 1 and -1."""
    if form is None or form.hard:
        return False
    return all((given is None) == (None not in row) for given, row in ((s, form.s), (c, form.c)))


def activation(x: Tensor, starts: Starts, given: Given) -> Tensor | None:
    """y, with gradients for x and what is given; None where x does not lie as a kernel needs it."""
    place = _place(x.shape, x.stride(), starts.shape)
    if place is None:
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *given)):
        y: Tensor = _Learned.apply(x, *given, starts, place)  # type: ignore[no-untyped-call]
        return y
    return _value(x, place, _rows(starts, given), _codes(starts.form))


@functools.lru_cache(4096)
def _place(
    sizes: Sequence[int], stride: Sequence[int], group: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, int, int]] | None:
    found = place_of(sizes, stride, group)
    if found is None or not math.prod(sizes) or not is_run(sizes, stride, found[0]):
        return None
    # Positions have an order of their own, in which the parameters are not.
    turned = sum(n > 1 for n in group) > 1 and list(found[0]) != sorted(found[0])
    return None if turned else found


@functools.lru_cache(256)
def _codes(form: Form) -> list[int]:
    digits = [launch.code_of(row) for row in (form.tau, form.theta, form.s, form.c)]
    return launch.codes_of(form, digits, launch.ALONE)


def _rows(starts: Starts, given: Given) -> list[Tensor]:
    tau, theta = starts.now(*given[:2])
    return [tau, theta, *(tau if w is None else w.detach().flatten(1) for w in given[2:])]


def _value(x: Tensor, place: Any, rows: list[Tensor], codes: list[int]) -> Tensor:
    return launch.forward(x, None, rows, codes, place[1])


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rho: Tensor | None,
        dtheta: Tensor | None,
        s: Tensor | None,
        c: Tensor | None,
        starts: Starts,
        place: Any,
    ) -> Tensor:
        rows = _rows(starts, (rho, dtheta, s, c))
        ctx.save_for_backward(x, rho, dtheta, s, c, *rows[:2])
        ctx.how = starts, place
        return _value(x, place, rows, _codes(starts.form))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *given, tau, theta = ctx.saved_tensors
        starts, place = ctx.how
        needed = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # someone differentiates twice
            return *_by_formulas(dy, x, given, starts, needed), None, None
        rows = [tau, theta, *(tau if w is None else w.flatten(1) for w in given[2:])]
        wanted = [needed[0], False, *needed[1:]]
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        dx, _, sums = launch.backward(
            dy, x, None, rows, _codes(starts.form), wanted, sizes=place[1]
        )
        return dx if needed[0] else None, *_gradients(sums, given, tau, needed[1:]), None, None


def _gradients(
    sums: Tensor, given: Sequence[Tensor | None], tau: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The sums, rows of the wanted among tau, theta, s, c, as gradients of what is learned."""
    grads: list[Tensor | None] = []
    for k, (parameter, need) in enumerate(zip(given, needed, strict=True)):
        if not need or parameter is None:
            grads.append(None)
            continue
        rows = len(tau) if k == 0 else len(parameter)
        d, sums = sums[:rows], sums[rows:]
        if k == 0:  # d tau / d rho = tau, and 0 beyond the bound
            d = (d * tau).view_as(parameter) * (parameter.abs() <= BOUND)
        grads.append(d.view_as(parameter))
    return grads


def _by_formulas(
    dy: Tensor, x: Tensor, given: Sequence[Tensor | None], starts: Starts, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The same gradients, differentiable: through the reference."""
    inputs = [None if t is None else t.view_as(t) for t in (x, *given)]
    z, rho, dtheta, s, c = inputs
    tau, theta = starts.tau0, starts.theta0
    if rho is not None:
        tau = tau * _clamp(rho, -BOUND, BOUND).exp().view_as(tau)
    theta = theta if dtheta is None else theta + dtheta.view_as(theta)

    def rows(w: Tensor) -> list[Tensor]:
        return [row.view(starts.shape) for row in w.flatten(1).unbind(0)]

    taus = rows(tau)
    y = primitive.blend(
        z,  # type: ignore[arg-type]
        taus if len(taus) > 1 else taus[0],
        rows(theta),
        starts.form.s if s is None else rows(s),  # type: ignore[arg-type]
        starts.form.c if c is None else rows(c),  # type: ignore[arg-type]
        centred=starts.form.centred,
    )
    asked = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]
