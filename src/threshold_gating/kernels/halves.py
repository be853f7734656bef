"""Tier W with two soft gates on a GPU: the gated halves of x in one pass, then two products.

Two products that add up are faster than one of twice the inner size (cuBLAS on an H200), and only
`x` is kept for the backward pass. Small batches take one product: there launches count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FEW_ROWS = 256
_TILE, _ITERS = (4, 512), 16


def _tile() -> tuple[int, int]:
    from threshold_gating.kernels.launch import interpreting

    return (8, 32) if interpreting() else _TILE


def split(x: Tensor, tau: Tensor, theta: Tensor, beside: bool) -> tuple[Tensor, Tensor]:
    """(1 - g) x and g x of a matrix; `beside` each other in one of twice the width, or apart."""
    from threshold_gating.kernels.halves_device import halves_forward

    n, width = x.shape
    rows, columns = _tile()
    if beside:
        low, high = x.new_empty(n, 2, width).unbind(1)
    else:
        low, high = torch.empty_like(x), torch.empty_like(x)
    programs = -(-n // rows) * -(-width // columns)
    if programs:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            halves_forward[programs,](
                x, low, high, *_gates(tau, theta), n, width, low.stride(0), tau.numel() > 1,
                rows, columns, num_warps=4,
            )  # fmt: skip
    return low, high


def joined(
    x: Tensor, tau: Tensor, theta: Tensor, dlow: Tensor, dhigh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `split` in x, tau and theta."""
    from threshold_gating.kernels.halves_device import halves_backward

    n, width = x.shape
    rows, columns = _tile()
    parts = max(1, -(-n // (rows * _ITERS)))
    dx = torch.empty_like(x)
    sums = torch.zeros(parts, 2, width, device=x.device)
    programs = parts * -(-width // columns)
    if x.numel():
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            halves_backward[programs,](
                x, dlow, dhigh, dx, sums, *_gates(tau, theta), n, width, dlow.stride(0), _ITERS,
                tau.numel() > 1, rows, columns, num_warps=4,
            )  # fmt: skip
    moved, along = sums.sum(0)
    if tau.numel() == 1:
        moved, along = moved.sum(), along.sum()
    wide = tau.float().reshape(moved.shape)
    return (
        dx,
        along.view(tau.shape).to(tau.dtype),
        (-wide * moved).view(theta.shape).to(theta.dtype),
    )


def _gates(tau: Tensor, theta: Tensor) -> list[Tensor]:
    return [t.detach().reshape(-1).float().contiguous() for t in (tau, theta)]


class Halved(torch.autograd.Function):
    """Tier W with two soft gates over x itself; keeps x and the weights only.

    `plan` is that of `products`: how to convolve, if at all, and the plain formula.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tau: Tensor,
        theta: Tensor,
    ) -> Tensor:
        ctx.plan, ctx.biased = plan, bias is not None
        ctx.save_for_backward(x, weight, *([] if bias is None else [bias]), tau, theta)
        z = _matrix(plan, x)
        if plan.conv is not None or len(z) <= _FEW_ROWS:
            y: Tensor = plan.product(_beside(plan, x, split(z, tau, theta, True)[0]), weight, bias)
            return y.clone() if y._is_view() else y
        low, high = split(z, tau, theta, beside=False)
        first, second = weight[:, 0].t(), weight[:, 1].t()
        y = low @ first if bias is None else torch.addmm(bias, low, first)
        y = y.addmm_(high, second)
        return (
            y
            if x.dim() == 2
            else y.new_empty(*x.shape[:-1], len(weight)).copy_(y.view(*x.shape[:-1], -1))
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        x, weight, *rest = ctx.saved_tensors
        tau, theta = rest[-2:]
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # someone differentiates twice
            from threshold_gating.kernels.products import twice

            bias = rest[0] if ctx.biased else None
            return None, *twice(plan, dy, x, weight, bias, [tau, theta], wanted)
        z = _matrix(plan, x)
        inside = wanted[0] or wanted[3] or wanted[4]
        if plan.conv is None:
            rows = dy.reshape(-1, dy.shape[-1])
            dw = _weight_gradient(z, tau, theta, weight, rows) if wanted[1] else None
            db = rows.sum(0) if wanted[2] else None
            halves = [rows @ weight[:, k] for k in (0, 1)] if inside else []
        else:
            phi = _beside(plan, x, split(z, tau, theta, True)[0])
            dphi, dw, db = plan.product_gradients(dy, phi, weight, (inside, *wanted[1:3]))
            halves = list(_split_channels(dphi, z)) if inside else []
        if not inside:
            return None, None, dw, db, None, None
        dx, dtau, dtheta = joined(z, tau, theta, *halves)
        return None, _back(plan, dx, x), dw, db, dtau, dtheta


def takes(plan: Any, x: Tensor) -> bool:
    """Whether the memory of x is a matrix here: any for a product, images in channels_last."""
    if plan.conv is None:
        return x.is_contiguous() and x.shape[-1] > 0
    image = x.dim() == 4 and plan.conv.groups == 1 and not plan.conv.pad
    return image and x.is_contiguous(memory_format=torch.channels_last)


def _matrix(plan: Any, x: Tensor) -> Tensor:
    """x as rows of channels, without a copy."""
    last = x if plan.conv is None else x.permute(0, 2, 3, 1)
    return last.reshape(-1, last.shape[-1])


def _beside(plan: Any, x: Tensor, low: Tensor) -> Tensor:
    """The halves, made beside each other, as what the product reads."""
    width = 2 * low.shape[1]
    both = low.as_strided((len(low), width), (width, 1))
    if plan.conv is None:
        return both.view(*x.shape[:-1], width)
    n, _, height, across = x.shape
    return both.view(n, height, across, width).permute(0, 3, 1, 2)


def _split_channels(dphi: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    rows = dphi.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    return rows.reshape(len(z), 2, z.shape[1]).unbind(1)


def _back(plan: Any, dx: Tensor, x: Tensor) -> Tensor:
    if plan.conv is None:
        return dx.view_as(x)
    n, channels, height, across = x.shape
    return dx.view(n, height, across, channels).permute(0, 3, 1, 2)


def _weight_gradient(z: Tensor, tau: Tensor, theta: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    dw = torch.empty_like(weight)
    for k, half in enumerate(split(z, tau, theta, beside=False)):
        torch.mm(dy.t(), half, out=dw[:, k])
    return dw
