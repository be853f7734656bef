"""Tier W with two soft gates on a GPU: the gated halves of x in one pass, then two products.

Two products that add up are faster than one of twice the inner size (cuBLAS on an H200), and only
`x` is kept for the backward pass. Few rows take one product: there launches, and what Python has to
do for each, count.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.launch import Launch, interpreting, readable, total
from threshold_gating.kernels.traced import BOUND

_FEW_ROWS = 256
_TILE, _ITERS = (4, 512), 16
_clamp = torch.ops.aten.clamp.default
_unflatten = torch._C._nn.unflatten_dense_tensors


class Gates(NamedTuple):
    """The tensors of two soft gates: tau = tau0 exp(rho) and theta = theta0 + dtheta, if these are.

    All have one element or one for each column.
    """

    tau0: Tensor
    rho: Tensor | None
    theta0: Tensor
    dtheta: Tensor | None

    def read(self) -> tuple[Tensor, ...]:
        """As the kernels read them: in float32, with a stand-in for what is not there."""
        tau0, rho, theta0, dtheta = self
        shift = theta0 if dtheta is None else dtheta
        return readable((tau0, tau0 if rho is None else rho, theta0, shift))

    def kind(self) -> tuple[bool, bool, bool]:
        return self.rho is not None, self.dtheta is not None, self.tau0.numel() > 1

    def values(self, shape: tuple[int, ...]) -> list[Tensor]:
        """tau and theta, differentiable."""
        tau0, rho, theta0, dtheta = self
        tau = tau0 if rho is None else tau0 * _clamp(rho, -BOUND, BOUND).exp()
        theta = theta0 if dtheta is None else theta0 + dtheta
        return [tau.reshape(shape), theta.reshape(shape)]


def split(x: Tensor, gates: Gates, beside: bool) -> Tensor:
    """(1 - g) x and g x of a matrix: `beside` each other (N, 2 I), or apart (2, N, I)."""
    n, width = x.shape
    out = x.new_empty((n, 2 * width) if beside else (2, n, width))
    if n:
        _forward(n, width, beside, gates.kind())((x, out, *gates.read()))
    return out


def joined(x: Tensor, gates: Gates, dhalves: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `split` in x, and in (rho or) tau and theta one behind the other."""
    n, width = x.shape
    dx, kind = torch.empty_like(x), gates.kind()
    group = width if kind[2] else 1
    if not n:
        return dx, x.new_zeros(2 * group, dtype=torch.float32)
    run, parts = _backward(n, width, dhalves.dim() == 2, kind)
    sums = x.new_empty((parts, 2 * group), dtype=torch.float32)
    run((x, dhalves, dx, sums, *gates.read()))
    return dx, total(sums, 0)


def _tile() -> tuple[int, int]:
    return (8, 32) if interpreting() else _TILE


def _steps(n: int, width: int, beside: bool) -> tuple[int, ...]:
    """Rows, columns, from one row of a half to the next, from one half to the other."""
    return (n, width, 2 * width, width) if beside else (n, width, width, n * width)


@functools.lru_cache(1024)
def _forward(n: int, width: int, beside: bool, kind: tuple[bool, ...]) -> Launch:
    from threshold_gating.kernels.halves_device import halves_forward

    rows, columns = _tile()
    programs = -(-n // rows) * -(-width // columns)
    rest = (*_steps(n, width, beside), *kind, rows, columns)
    return Launch(halves_forward, (programs,), 4, rest)


@functools.lru_cache(1024)
def _backward(n: int, width: int, beside: bool, kind: tuple[bool, ...]) -> tuple[Launch, int]:
    """The kernel, and how many rows of sums it writes."""
    from threshold_gating.kernels.halves_device import halves_backward

    rows, columns = _tile()
    down, across = -(-n // (rows * _ITERS)), -(-width // columns)
    rest = (*_steps(n, width, beside), _ITERS, *kind, rows, columns)
    run = Launch(halves_backward, (down * across,), 4, rest)
    return run, down if kind[2] else down * across


def product(plan: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gates: Gates) -> Tensor:
    """Tier W with two soft gates over x itself, where x `takes` it.

    `plan` is that of `products`: how to convolve, if at all, and the plain formula.
    """
    image = plan.conv is not None
    z = x if image or x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y: Tensor = Halved.apply(plan, z, weight, bias, *gates)  # type: ignore[no-untyped-call]
    else:
        y = _value(plan, z, weight, bias, gates)
    # out here, because a view that a function made itself could not be overwritten
    return y if image or x.dim() == 2 else y.view(*x.shape[:-1], len(weight))


def _value(plan: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gates: Gates) -> Tensor:
    z = _matrix(plan, x)
    if _is_one(plan, z):
        y: Tensor = plan.product(_beside(plan, x, split(z, gates, True)), weight, bias)
        return y
    low, high = split(z, gates, False).unbind(0)
    first, second = weight[:, 0].t(), weight[:, 1].t()
    y = low @ first if bias is None else torch.addmm(bias, low, first)
    return y.addmm_(high, second)


class Halved(torch.autograd.Function):
    """`product` of a matrix or an image; keeps x and the weights only."""

    @staticmethod
    def forward(
        ctx: Any, plan: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *gates: Tensor | None
    ) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, weight, bias, *gates)
        return _value(plan, x, weight, bias, Gates(*gates))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        x, weight, bias, *given = ctx.saved_tensors
        gates, wanted = Gates(*given), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # someone differentiates twice
            from threshold_gating.kernels.products import twice

            return None, *twice(plan, dy, (x, weight, bias, *given), _values(plan, gates), wanted)
        z, inside = _matrix(plan, x), wanted[0] or any(wanted[3:])
        if _is_one(plan, z):
            phi = _beside(plan, x, split(z, gates, True)) if wanted[1] or plan.conv else z
            dhalves, dw, db = plan.product_gradients(dy, phi, weight, (inside, *wanted[1:3]))
            if plan.conv is not None and inside:
                dhalves = _rows(dhalves, z)
        else:
            dw = _weight_gradient(z, gates, weight, dy) if wanted[1] else None
            db = dy.sum(0) if wanted[2] else None
            dhalves = _half_gradients(weight, dy, z) if inside else None
        if not inside:
            return None, None, dw, db, None, None, None, None
        dx, sums = joined(z, gates, dhalves)
        return None, _back(plan, dx, x), dw, db, *_dealt(sums, gates, wanted[3:])


def _dealt(sums: Tensor, gates: Gates, wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """The two gradients of `joined`, each to the one tensor of the gate that is learned."""
    tau, theta = int(gates.rho is not None), 2 + int(gates.dtheta is not None)
    learned = [t for t in (gates[tau], gates[theta]) if t is not None]
    found: list[Tensor | None] = [None] * 4
    for place, like, grad in zip((tau, theta), learned, _unflatten(sums, learned), strict=True):
        if wanted[place]:
            found[place] = grad.to(like.dtype)
    return found


def takes(plan: Any, x: Tensor, gates: Gates) -> bool:
    """Whether x is a matrix in memory here that these gates fit: images are in channels_last."""
    if plan.conv is None:
        channels, lies = x.shape[-1], x.is_contiguous()
    else:
        plain = x.dim() == 4 and plan.conv.groups == 1 and not plan.conv.pad
        lies = plain and x.is_contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
    sizes = {gates.tau0.numel(), gates.theta0.numel()}
    return lies and channels > 0 and sizes in ({1}, {channels})


def _is_one(plan: Any, z: Tensor) -> bool:
    """Whether one product of both halves is better than two."""
    return plan.conv is not None or len(z) <= _FEW_ROWS


def _matrix(plan: Any, x: Tensor) -> Tensor:
    """x as rows of channels, without a copy."""
    return x if plan.conv is None else x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _values(plan: Any, gates: Gates) -> list[Tensor]:
    each = gates.tau0.numel() > 1
    return gates.values((-1, *(() if plan.conv is None else (1, 1))) if each else ())


def _beside(plan: Any, x: Tensor, both: Tensor) -> Tensor:
    """The halves, made beside each other, as what the product reads."""
    if plan.conv is None:
        return both
    n, channels, height, across = x.shape
    return both.view(n, height, across, 2 * channels).permute(0, 3, 1, 2)


def _rows(dphi: Tensor, z: Tensor) -> Tensor:
    rows = dphi.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    return rows.reshape(len(z), 2 * z.shape[1])


def _back(plan: Any, dx: Tensor, x: Tensor) -> Tensor:
    if plan.conv is None:
        return dx
    n, channels, height, across = x.shape
    return dx.view(n, height, across, channels).permute(0, 3, 1, 2)


def _weight_gradient(z: Tensor, gates: Gates, weight: Tensor, dy: Tensor) -> Tensor:
    dw = torch.empty_like(weight)
    for k, half in enumerate(split(z, gates, False).unbind(0)):
        torch.mm(dy.t(), half, out=dw[:, k])
    return dw


def _half_gradients(weight: Tensor, dy: Tensor, z: Tensor) -> Tensor:
    dhalves = z.new_empty(2, *z.shape)
    for k in (0, 1):
        torch.mm(dy, weight[:, k], out=dhalves[k])
    return dhalves
