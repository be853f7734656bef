"""The kernels of `launch` as ops that torch.compile can place: opaque, known by their shapes.

Registered one by one instead of by `torch.library.custom_op`, whose care for autograd and aliases
takes 9 us of every call; ours are called without derivatives and return nothing they were given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from threshold_gating.kernels import launch

_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "blend_forward(Tensor x, Tensor? other, Tensor[] parameters, int[] codes) -> Tensor"
)
_LIBRARY.define(
    "blend_backward(Tensor dy, Tensor x, Tensor? other, Tensor[] parameters, int[] codes, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor)"
)


def _forward(x: Tensor, other: Tensor | None, parameters: list[Tensor], codes: list[int]) -> Tensor:
    p = launch.Parameters.of(parameters)
    return launch.forward(x, other, p, tuple(codes), tuple(x.shape))


def _backward(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    codes: list[int],
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    p, sizes = launch.Parameters.of(parameters), tuple(x.shape)
    *grads, sums = launch.backward(dy, x, other, p, tuple(codes), tuple(wanted), sizes)
    # what is not wanted comes back as x, which an op may not return
    return *[g if w else x.new_empty(0) for g, w in zip(grads, wanted, strict=False)], sums


def _forward_shape(
    x: Tensor, other: Tensor | None, parameters: list[Tensor], codes: list[int]
) -> Tensor:
    return torch.empty_like(x)


def _backward_shape(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    codes: list[int],
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    dx, dother = (torch.empty_like(x) if w else x.new_empty(0) for w in wanted[:2])
    rows = launch.count(codes, wanted)
    return dx, dother, x.new_empty(rows, x.shape[1], dtype=torch.float32)


for name, run, shape in (
    ("blend_forward", _forward, _forward_shape),
    ("blend_backward", _backward, _backward_shape),
):
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threshold_gating::{name}", shape, lib=_LIBRARY)

forward = torch.ops.threshold_gating.blend_forward.default
backward = torch.ops.threshold_gating.blend_backward.default
