"""Where the elements that share parameters lie in memory.

A kernel sees x as memory, three axes (outer, G, inner): the parameters vary along G alone. A layer
has G = 1; channels of an image lie at (B, C, H W), in channels_last at (B H W, C, 1); positions of
a neuron are all in G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

Sizes = tuple[int, int, int]


class Layout(IntEnum):
    """How parameters vary over a matrix in memory."""

    ONE = 0  # not at all
    COLUMNS = 1  # tokens, channels_last
    ROWS = 2  # images


def flat(x: Tensor, sizes: Sizes) -> Tensor:
    """Dense x as its memory (outer, G, inner)."""
    if x.is_contiguous():
        return x.view(sizes)
    _, group, inner = sizes
    return x.as_strided(sizes, (group * inner, inner, 1))


def like(t: Tensor, x: Tensor) -> Tensor:
    """t as x lies in memory."""
    return t if t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def as_new(y: Tensor, x: Tensor) -> Tensor:
    """y as a new tensor for values at x would lie in memory."""
    laid = torch.empty_like(x)
    return y if laid.stride() == y.stride() else laid.copy_(y)


def dense(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Sizes]:
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


def placed(
    sizes: Sequence[int], stride: Sequence[int], shape: tuple[int, ...]
) -> tuple[Sizes, bool] | None:
    """(outer, G, inner), and whether x must be copied to lie so; None if groups are no run."""
    found = dense_sizes(sizes, stride, shape)
    if found is not None:
        return found, False
    found = dense_sizes(sizes, (), shape)
    return None if found is None else (found, True)


def dense_sizes(
    sizes: Sequence[int], stride: Sequence[int], shape: tuple[int, ...]
) -> Sizes | None:
    """(outer, G, inner) if x is dense in memory and the groups lie there in their own order.

    `sizes` and `stride` are those of x; no stride means contiguous.
    """
    order = list(range(len(sizes)))
    if stride:
        order = _from_outer(stride)
        if not _is_run(sizes, stride, order):
            return None
    group = [d for d in order if shape and shape[d] > 1]
    if len(shape) > len(sizes) or any(sizes[d] != shape[d] for d in group):
        return None
    if not group:
        return 1, 1, math.prod(sizes)
    # positions have an order of their own, in which x may not lie
    if group != sorted(group):
        return None
    first, last = order.index(group[0]), order.index(group[-1])
    if [d for d in order[first : last + 1] if sizes[d] > 1] != group:
        return None
    # lists: Dynamo does not take a generator here
    parts = (order[:first], group, order[last + 1 :])
    outer, within, inner = (math.prod([sizes[d] for d in part]) for part in parts)
    return outer, within, inner


def _from_outer(stride: Sequence[int]) -> list[int]:
    """The axes, the widest steps first, by comparisons: Dynamo does not sort sizes that vary."""
    order: list[int] = []
    for d in range(len(stride)):
        at = len(order)
        while at and stride[order[at - 1]] < stride[d]:
            at -= 1
        order.insert(at, d)
    return order


def _is_run(sizes: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether memory is dense in this order of axes."""
    step = 1
    for d in reversed(order):
        if sizes[d] > 1 and stride[d] != step:
            return False
        step *= sizes[d]
    return True
