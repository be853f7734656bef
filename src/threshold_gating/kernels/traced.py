"""An `Activation` in a compiled graph: as few nodes as can be, for each is a call in every step.

Its tensors are taken whole, as in `direct`. Two branches and hard gates go forward by formulas,
which the compiler fuses with what is before and behind them; backward, where sums over the whole
input come in, and wherever there are more branches, a kernel is cheaper than what the compiler
makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from threshold_gating.kernels import launch, ops
from threshold_gating.kernels.form import Call, Form
from threshold_gating.kernels.fused import by_formula

# tau = tau0 exp(rho) for |rho| up to this; see `layers`.
BOUND = 7.0
_clamp = torch.ops.aten.clamp.default


def activation(
    x: Tensor, form: Form, codes: launch.Codes, shape: tuple[int, ...], given: Sequence[Any]
) -> Tensor | None:
    """y for a graph, or None where no kernel takes x; `given` is `direct.Given`."""
    if not x.numel():
        return None
    y: Tensor = _Traced.apply(x, *given, (form, codes, shape))  # type: ignore[no-untyped-call]
    return y


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *given, how = rest
        form, codes, shape = how
        ctx.save_for_backward(x, *given)
        ctx.how = how
        if form.hard or form.K == 2:
            return formula(x, form, bool(codes[-1] & 4), shape, given)
        known = list(codes), list(shape), ops.SOURCES
        y: Tensor = ops.forward(x, None, _read(*given), *known)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *given = ctx.saved_tensors
        _, codes, shape = ctx.how
        need = ctx.needs_input_grad
        known = list(codes), list(shape), [need[0], False, *need[1:5]], ops.SOURCES
        # Nothing here asks how a tensor lies in memory: Dynamo would have dy copied for that.
        dx, _, sums = ops.backward(dy, x, None, _read(*given), *known)
        grads: list[Tensor | None] = [dx if need[0] else None]
        at = 0
        for w, needed in zip(given[:4], need[1:5], strict=True):
            rows = w.numel() // sums.shape[1] if needed else 0
            grads.append(sums[at : at + rows].view(w.shape) if needed else None)
            at += rows
        return *grads, None, None, None


def readable(given: Sequence[Any]) -> tuple[Tensor, ...]:
    """What the kernels read: tau, rho, theta, shift, s, c."""
    return launch.readable(tuple(_read(*given)))


def _read(rho: Any, dtheta: Any, s: Any, c: Any, tau0: Any, theta: Any) -> list[Tensor]:
    tau = theta if tau0 is None else tau0
    shift = theta if dtheta is None else dtheta
    return [tau, tau if rho is None else rho, theta, shift, s, c]


def formula(
    x: Tensor, form: Form, anchored: bool, shape: tuple[int, ...], given: Sequence[Any]
) -> Tensor:
    """y in torch's ops, differentiable as often as one likes."""
    rho, dtheta, s, c, tau0, theta0 = given

    def rows(w: Any, numbers: Sequence[float | None]) -> list[Any]:
        pairs = zip(numbers, w.reshape(len(numbers), -1).unbind(0), strict=True)
        return [row.view(shape) if number is None else number for number, row in pairs]

    theta = rows(theta0 if dtheta is None else theta0 + dtheta, form.theta)
    slopes, constants = rows(s, form.s), rows(c, form.c)
    taus: list[Any] = [math.inf]
    if not form.hard:
        sharp = tau0 if rho is None else tau0 * _clamp(rho, -BOUND, BOUND).exp()
        taus = rows(sharp, form.tau)
    elif anchored:
        near = zip(constants, slopes, [theta[0], *theta], strict=True)
        constants = [v if isinstance(m, float) and m == 0 else v - m * at for v, m, at in near]
    values = (*taus, *theta, *slopes, *constants)
    tensors = [w for w in values if isinstance(w, Tensor)]
    numbers = tuple([None if isinstance(w, Tensor) else w for w in constants])
    known = Form(form.tau, form.theta, form.s, numbers, form.owner, form.centred)
    return by_formula(x, Call(known, tensors, (), (0, 0, 0)))  # a formula does not ask for a place
