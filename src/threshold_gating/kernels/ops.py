"""The kernels of `launch` as ops that torch.compile can place.

Registered one by one instead of by `torch.library.custom_op`, whose care for autograd and aliases
takes 9 us of every call; ours are called without derivatives and return nothing they were given.
Where all sizes are known they are opened, so that the compiler launches the kernel itself: on a
GPU that takes a fraction of what a call of an op does. With sizes that vary they stay closed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from threshold_gating.kernels import launch
from threshold_gating.kernels.form import dense_sizes

# Handed to each op, so that a graph with opened kernels that torch keeps on disk is not taken once
# they have changed.
SOURCES = zlib.crc32(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py"))))

_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "blend_forward(Tensor x, Tensor? other, Tensor[] parameters, int[] codes, int[] shape, "
    "int sources) -> Tensor"
)
_LIBRARY.define(
    "blend_backward(Tensor dy, Tensor x, Tensor? other, Tensor[] parameters, int[] codes, "
    "int[] shape, bool[] wanted, int sources) -> (Tensor, Tensor, Tensor)"
)


def _dense(x: Tensor, shape: list[int]) -> tuple[Tensor, tuple[int, int, int]]:
    """x, copied if no kernel takes it as it lies, and (outer, G, inner) for groups of `shape`.

    This is not for Dynamo to ask: what it takes for the strides of x need not be those of the graph
    that is made of its own.
    """
    sizes = dense_sizes(x.shape, x.stride(), tuple(shape))
    if sizes is None:
        x = x.contiguous()
        sizes = dense_sizes(x.shape, (), tuple(shape))  # an axis of one may keep an odd stride
    assert sizes is not None
    return x, sizes


def _like(t: Tensor | None, x: Tensor) -> Tensor | None:
    """t as x lies in memory."""
    return t if t is None or t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def _forward(
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    codes: list[int],
    shape: list[int],
    sources: int,
) -> Tensor:
    x, sizes = _dense(x, shape)
    p = launch.Parameters.of(launch.readable(tuple(parameters)))
    return launch.forward(x, _like(other, x), p, tuple(codes), sizes)


def _backward(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    codes: list[int],
    shape: list[int],
    wanted: list[bool],
    sources: int,
) -> tuple[Tensor, ...]:
    x, sizes = _dense(x, shape)
    p = launch.Parameters.of(launch.readable(tuple(parameters)))
    slopes = _like(dy, x)
    assert slopes is not None
    given = (slopes, x, _like(other, x), p, tuple(codes), tuple(wanted), sizes)
    *grads, sums = launch.backward(*given)
    # what is not wanted comes back as x, which an op may not return
    return *[g if w else x.new_empty(0) for g, w in zip(grads, wanted, strict=False)], sums


def _forward_shape(x: Tensor, *rest: Any) -> Tensor:
    *_, shape, _ = rest
    return torch.empty_like(_dense(x, shape)[0])


def _backward_shape(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, codes, shape, wanted, _ = rest
    x, sizes = _dense(x, shape)
    dx, dother = (torch.empty_like(x) if w else x.new_empty(0) for w in wanted[:2])
    return dx, dother, x.new_empty(launch.count(codes, wanted), sizes[1], dtype=torch.float32)


def _opened(run: Callable[..., Any]) -> Callable[..., Any]:
    """The op as what is in it, for a compiler that can launch the kernel itself."""

    def rule(mode: Any, op: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        if any(isinstance(n, torch.SymInt) for n in arguments[0].shape):
            return mode.__torch_dispatch__(op, types, arguments, more)
        with mode:
            return run(*arguments, **(more or {}))

    return rule


for name, run, shape in (
    ("blend_forward", _forward, _forward_shape),
    ("blend_backward", _backward, _backward_shape),
):
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threshold_gating::{name}", shape, lib=_LIBRARY)
    if not launch.interpreting():
        _LIBRARY._register_torch_dispatch_rule(name, FunctionalTensorMode, _opened(run))

forward = torch.ops.threshold_gating.blend_forward.default
backward = torch.ops.threshold_gating.blend_backward.default
