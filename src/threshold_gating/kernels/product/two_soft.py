"""Tier W with two soft gates on a GPU: the gated halves of x in one pass, then two products.

Two products that add up are faster than one of twice the inner size (cuBLAS on an H200), and only
`x` is kept for the backward pass. Few rows take one product: there launches, and what Python has to
do for each, count. A convolution takes one, too, but for the gradients of its weights: cuDNN needs
2.5 times as long for twice the channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.product.formula import Formula, Grads, Operands
from threshold_gating.kernels.runtime import Launch, interpreting, readable
from threshold_gating.kernels.structure import Tensors

_FEW_ROWS = 256
_LARGE = 2**20  # elements of an image from which products take longer than their launches
# Elements and columns of a tile, swept on an H200: forward all shapes are within 4 %; going back
# three tiles are loaded at once, and smaller ones took 8 to 20 % less.
_TILE, _TILE_BACK = (2048, 512), (1024, 128)
_ITERS = 16  # tiles of a program going back


def _read(tensors: Tensors) -> tuple[Tensor, ...]:
    """tau0, rho, theta0 and dtheta in float32, with a stand-in for what is not there."""
    rho, dtheta, _, _, tau0, theta0 = tensors
    assert tau0 is not None and theta0 is not None  # `takes`
    shift = theta0 if dtheta is None else dtheta
    return readable((tau0, tau0 if rho is None else rho, theta0, shift))


class _Known(NamedTuple):
    """What the kernels know when they are compiled."""

    sharpened: bool  # tau = tau0 exp(rho)
    moved: bool  # theta = theta0 + dtheta
    per_column: bool

    @classmethod
    def of(cls, tensors: Tensors) -> _Known:
        tau0 = tensors.tau0
        wide = tau0 is not None and tau0.numel() > 1
        return cls(tensors.rho is not None, tensors.dtheta is not None, wide)


def split(x: Tensor, tensors: Tensors, beside: bool) -> Tensor:
    """(1 - g) x and g x of a matrix (N, I), or of an image in channels_last, which is one.

    `beside` each other (N, 2 I) or apart (2, N, I); channels in the place of I.
    """
    out, (n, width) = _room(x, beside), _sizes(x)
    if n:
        _forward(n, width, beside, _Known.of(tensors))((x, out, *_read(tensors)))
    return out


def joined(x: Tensor, tensors: Tensors, dhalves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `split` in x, in (rho or) tau, and in theta."""
    n, width = _sizes(x)
    dx, known = torch.empty_like(x), _Known.of(tensors)
    group = width if known.per_column else 1
    if not n:
        none = x.new_zeros((2, group), dtype=torch.float32)
        return dx, none[0], none[1]
    run, add, parts = _backward(n, width, dhalves.dim() == x.dim(), known)
    sums = x.new_empty((parts, 2, group), dtype=torch.float32)
    run((x, dhalves, dx, sums, *_read(tensors)))
    if add is None:
        return dx, sums[0, 0], sums[0, 1]
    dtau, dtheta = x.new_empty((2, group), dtype=torch.float32).unbind(0)
    add((sums, dtau, dtheta, sums, sums))
    return dx, dtau, dtheta


def _sizes(x: Tensor) -> tuple[int, int]:
    """Rows and channels of x, a matrix or an image that lies as one."""
    width = x.shape[1]
    return x.numel() // width, width


def _room(x: Tensor, beside: bool) -> Tensor:
    """Memory for both halves, each as x lies."""
    if not beside:
        return x.new_empty_strided((2, *x.shape), (x.numel(), *x.stride()))
    n, width, *image = x.shape
    steps = [2 * width * math.prod(image[k:]) for k in range(len(image) + 1)]
    return x.new_empty_strided((n, 2 * width, *image), (steps[0], 1, *steps[1:]))


def _tile(width: int, elements: int, columns: int) -> tuple[int, int]:
    """Rows and columns."""
    if interpreting():
        return 8, 32
    columns = min(columns, 1 << (width - 1).bit_length())
    return elements // columns, columns


def _steps(n: int, width: int, beside: bool) -> tuple[int, ...]:
    """Rows, columns, from one row of a half to the next, from one half to the other."""
    return (n, width, 2 * width, width) if beside else (n, width, width, n * width)


@functools.lru_cache(1024)
def _forward(n: int, width: int, beside: bool, known: _Known) -> Launch:
    from threshold_gating.kernels.product.two_soft_kernels import two_soft_forward

    rows, columns = _tile(width, *_TILE)
    programs = -(-n // rows) * -(-width // columns)
    rest = (*_steps(n, width, beside), *known, rows, columns)
    return Launch(two_soft_forward, (programs,), 4, rest)


@functools.lru_cache(1024)
def _backward(n: int, width: int, beside: bool, known: _Known) -> tuple[Launch, Launch | None, int]:
    """The kernel, the one that adds up its sums, and how many parts of them it writes."""
    from threshold_gating.kernels.product.two_soft_kernels import two_soft_backward

    rows, columns = _tile(width, *_TILE_BACK)
    down, across = -(-n // (rows * _ITERS)), -(-width // columns)
    rest = (*_steps(n, width, beside), _ITERS, *known, rows, columns)
    run = Launch(two_soft_backward, (down * across,), 4, rest)
    parts, group = (down, width) if known.per_column else (down * across, 1)
    return run, gpu.adding((parts, 2, group), 0, (1, 1, 0, 0)), parts


class Plan(NamedTuple):
    """The product of a matrix or an image; keeps x and the weights only."""

    formula: Formula

    def forward(self, given: Operands) -> Tensor:
        x, weight, bias, tensors = given
        formula = self.formula
        if _is_one(formula, x):
            return formula.product(split(x, tensors, True), weight, bias)
        low, high = split(x, tensors, False).unbind(0)
        first, second = weight[:, 0].t(), weight[:, 1].t()
        y = low @ first if bias is None else torch.addmm(bias, low, first)
        return y.addmm_(high, second)

    def backward(self, dy: Tensor, given: Operands, wanted: Sequence[bool]) -> Grads:
        x, weight, _, tensors = given
        formula = self.formula
        inside = wanted[0] or any(wanted[3:])
        dhalves: Tensor | None
        if formula.conv is not None and wanted[1] and x.numel() >= _LARGE:
            phi = _room(x, True)  # of the inputs only the shape counts here
            dhalves, _, db = formula.product_gradients(dy, phi, weight, (inside, False, wanted[2]))
            dw: Tensor | None = _kernel_gradient(formula, split(x, tensors, False), weight, dy)
        elif _is_one(formula, x):
            made = wanted[1] or formula.conv is not None
            phi = split(x, tensors, True) if made else x
            dhalves, dw, db = formula.product_gradients(dy, phi, weight, (inside, *wanted[1:3]))
        else:
            dw = _weight_gradient(x, tensors, weight, dy) if wanted[1] else None
            db = dy.sum(0) if wanted[2] else None
            dhalves = _half_gradients(weight, dy, x) if inside else None
        if dhalves is None or not inside:
            return [None, dw, db, *[None] * 6]
        if formula.conv is not None:
            dhalves = dhalves.contiguous(memory_format=torch.channels_last)
        dx, *along = joined(x, tensors, dhalves)
        return [dx, dw, db, *_dealt(along, tensors, wanted[3:])]


def _dealt(along: Sequence[Tensor], tensors: Tensors, wanted: Sequence[bool]) -> Tensors:
    """The gradients in tau and theta, each to the one tensor of the gate that is learned."""
    fields, found = Tensors._fields, {}
    tau, theta = "tau0" if tensors.rho is None else "rho", "theta0"
    theta = theta if tensors.dtheta is None else "dtheta"
    for name, grad in zip((tau, theta), along, strict=True):
        if wanted[fields.index(name)]:
            like: Tensor = getattr(tensors, name)
            found[name] = grad.view_as(like).to(like.dtype)
    return Tensors(**found)


def _kernel_gradient(formula: Formula, halves: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """That of the weights of a convolution, half by half."""
    each = [
        formula.convolution_gradients(dy, half, w, (False, True, False))[1]
        for half, w in zip(halves.unbind(0), weight.unbind(1), strict=True)
    ]
    own = [dw for dw in each if dw is not None]  # all of them
    return torch.stack(own, 1, out=torch.empty_like(weight))


def takes(formula: Formula, x: Tensor, tensors: Tensors) -> bool:
    """Whether x is a matrix in memory here that these gates fit: images are in channels_last."""
    rho, dtheta, _, _, tau0, theta0 = tensors
    if tau0 is None or theta0 is None:
        return False
    # kernels have one gradient for tau and one for theta
    if (rho is not None and tau0.requires_grad) or (dtheta is not None and theta0.requires_grad):
        return False
    if formula.conv is None:
        channels, lies = x.shape[-1], x.is_contiguous()
    else:
        plain = x.dim() == 4 and formula.conv.groups == 1 and not formula.conv.pad
        lies = plain and x.is_contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
    return lies and channels > 0 and {tau0.numel(), theta0.numel()} in ({1}, {channels})


def _is_one(formula: Formula, x: Tensor) -> bool:
    """Whether one product of both halves is better than two."""
    return formula.conv is not None or len(x) <= _FEW_ROWS


def _weight_gradient(x: Tensor, tensors: Tensors, weight: Tensor, dy: Tensor) -> Tensor:
    dw = torch.empty_like(weight)
    for k, half in enumerate(split(x, tensors, False).unbind(0)):
        torch.mm(dy.t(), half, out=dw[:, k])
    return dw


def _half_gradients(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    dhalves = x.new_empty(2, *x.shape)
    for k in (0, 1):
        torch.mm(dy, weight[:, k], out=dhalves[k])
    return dhalves
