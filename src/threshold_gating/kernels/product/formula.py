"""Tier W in plain torch: the gated inputs times the branch weights, one product or convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels.backend import backend, engine
from threshold_gating.kernels.blend.function import blend
from threshold_gating.kernels.blend.kept import kept
from threshold_gating.kernels.structure import Rows, Shape, Structure, Tensors, viewed
from threshold_gating.primitive.graphs import keeps_gates

Grads = list[Tensor | None]


class Conv(NamedTuple):
    """How a convolution runs over its gated inputs, which are padded, never `x` itself."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pad: tuple[int, ...] = ()  # what `padding` cannot say: uneven, or not with zeros
    mode: str = "constant"


def check_factor(x: Tensor, factor: Tensor) -> None:
    """A factor of another shape would multiply other inputs than it is meant for."""
    if factor.shape != x.shape:
        raise ValueError(
            f"factor: one number for each of x, shape {tuple(x.shape)}; "
            f"got shape {tuple(factor.shape)}."
        )


class Operands(NamedTuple):
    """The tensors of one product."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    tensors: Tensors


class Formula(NamedTuple):
    """Everything about a product that is not a tensor; `shape` broadcasts against x."""

    structure: Structure
    shape: Shape
    conv: Conv | None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
        """Differentiable as often as one likes."""
        return self.product(self.inputs(x, rows), weight, bias)

    def rows(self, tensors: Tensors) -> Rows:
        return viewed(self.structure.rows(tensors), self.shape)

    def inputs(self, x: Tensor, rows: Rows, factor: Tensor | None = None) -> Tensor:
        """The gated inputs, times `factor`, padded where the convolution itself cannot."""
        axis, groups = (-1, 1) if self.conv is None else (1, self.conv.groups)
        if keeps_gates():
            phi = primitive.beside(self._nodes(x, rows), axis, groups)
        elif self._has_kernel(x):
            phi = primitive.beside(self._launched(x, rows), axis, groups).to(x.dtype)
        else:
            tau, theta, s, c = rows
            phi = primitive.features(
                x,
                tau if len(tau) > 1 else tau[0],
                theta,
                s,
                c,
                axis=axis,
                groups=groups,
                form=self.structure.form,
                owner=self.structure.owner,
                straight=self.structure.may_jump and torch.is_grad_enabled(),
            )
        if factor is not None:
            at = axis % x.dim()
            before, after = x.shape[:at], x.shape[at + 1 :]
            each = (*before, groups, 1, x.shape[at] // groups, *after)  # one for all branches
            branches = (*before, groups, self.structure.K, x.shape[at] // groups, *after)
            phi = (phi.reshape(branches) * factor.reshape(each)).reshape(phi.shape)
        if self.conv is None or not self.conv.pad:
            return phi
        return F.pad(phi, self.conv.pad, self.conv.mode)

    def _nodes(self, x: Tensor, rows: Rows) -> list[Tensor]:
        """The gated inputs in a graph that keeps gates."""
        known = self.structure._replace(q=None, anchor=None, clamp=None)
        return [kept(x, None, known, each) for each in _one_by_one(rows)]

    def _has_kernel(self, x: Tensor) -> bool:
        """Whether soft gates of x are one launch of Triton: in torch they are dozens of passes."""
        known = self.structure
        soft = known.K > 1 and known.fused and not known.hard
        return soft and not torch.compiler.is_compiling() and engine(x, backend()) == "triton"

    def _launched(self, x: Tensor, rows: Rows) -> list[Tensor]:
        # the gradients of 16-bit inputs are sums over branches, to be rounded once
        z = primitive.wide(x) if torch.is_grad_enabled() else x
        form = self.structure.form
        return [
            blend(z, tau if len(tau) > 1 else tau[0], theta, s, c, form=form, known=True)
            for tau, theta, s, c in _one_by_one(rows)
        ]

    def product(self, phi: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.conv is None:
            return F.linear(phi, weight.flatten(1), bias)
        run = (F.conv1d, F.conv2d, F.conv3d)[len(self.conv.stride) - 1]
        y: Tensor = run(phi, weight.flatten(1, 2), bias, *self.conv[:4])
        return y

    def product_gradients(
        self, dy: Tensor, phi: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `product` in phi, weight and bias, in the dtype of dy."""
        if self.conv is None:
            rows, flat = dy.reshape(-1, dy.shape[-1]), weight.flatten(1).to(dy.dtype)
            return (
                dy @ flat if wanted[0] else None,
                (rows.t() @ phi.reshape(-1, phi.shape[-1]).to(dy.dtype)).view_as(weight)
                if wanted[1]
                else None,
                rows.sum(0) if wanted[2] else None,
            )
        flat = weight.flatten(1, 2).to(dy.dtype)
        dphi, dw, db = self.convolution_gradients(dy, phi.to(dy.dtype), flat, wanted)
        return dphi, None if dw is None else dw.view_as(weight), db

    def convolution_gradients(
        self, dy: Tensor, phi: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of a convolution with a weight as torch's; None for those that are not wanted."""
        assert self.conv is not None
        stride, padding, dilation, groups = self.conv[:4]
        dphi, dw, db = torch.ops.aten.convolution_backward.default(
            dy, phi, weight, [weight.shape[0]], stride, padding, dilation, False,
            [0] * len(stride), groups, list(wanted),
        )  # fmt: skip
        return dphi, dw, db

    def has_two_soft(self) -> bool:
        """Whether these are two soft gates over x itself."""
        known = self.structure
        return known.K == 2 and not known.hard and (known.s, known.c) == ((1, 1), (0, 0))

    def per_channel(self, dim: int) -> bool:
        """Whether an input of `dim` axes has one gate, or one for each channel."""
        axis = dim - 1 if self.conv is None else 1
        varies = [dim - len(self.shape) + d for d, n in enumerate(self.shape) if n > 1]
        return varies in ([], [axis])


def _one_by_one(rows: Rows) -> list[Rows]:
    """Of each gated input the gate that it is: the other branches are 0."""

    def only(row: Sequence[Any], k: int) -> list[Any]:
        return [w if j == k else 0.0 for j, w in enumerate(row)]

    tau, theta, s, c = rows
    return [Rows(tau, theta, only(s, k), only(c, k)) for k in range(len(s))]


class Plan(Protocol):
    """A way to compute a product and its gradients; it keeps the operands only."""

    @property
    def formula(self) -> Formula: ...

    def forward(self, given: Operands) -> Tensor: ...

    def backward(self, dy: Tensor, given: Operands, wanted: Sequence[bool]) -> Grads:
        """The gradients in x, weight, bias and the tensors."""
