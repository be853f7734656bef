"""Tier W for one input vector with hard gates on a GPU: each input reads one column of weights.

With the weights as (O, K, I) the columns lie across memory, so a copy as (K, I, O) is kept for each
weight that is used so, until the weight changes. A change behind torch's back, in place through
`weight.data`, is not seen.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.launch import Launch, interpreting, readable

# Inputs and outputs of a tile, its warps. With 32 outputs, 64 bytes of a row, it took 1.3 to 1.6 of
# torch's product with one matrix on an H200; wider ones have not been timed.
_TILE, _WARPS = (64, 128), 8
_ENOUGH = 256  # programs that keep a GPU busy; fewer are split into parts
_MOST_PARTS = 64


class _Copy(NamedTuple):
    weight: weakref.ref[Tensor]
    state: tuple[int, int]
    columns: Tensor


_COPIES: dict[int, _Copy] = {}


def takes(x: Tensor, weight: Tensor, theta0: Tensor) -> bool:
    """Whether x is one vector, with one threshold for all elements or one for each.

    And whether a copy of the weights can follow them: inference tensors do not say that they
    changed, and a graph that is recorded now would read the copy after they did.
    """
    inner = x.shape[-1]
    one = x.numel() == inner == weight.shape[-1] > 0 and x.dtype == weight.dtype
    if not one or not x.is_contiguous() or theta0.dim() != 2 or theta0.shape[1] not in (1, inner):
        return False
    followed = type(weight) in (Tensor, torch.nn.Parameter) and not weight.is_inference()
    return followed and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def product(
    x: Tensor,
    theta0: Tensor,
    dtheta: Tensor | None,
    c: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    owner: tuple[str, ...] | None,
    shifted: bool,
    anchored: bool,
) -> Tensor:
    """sum_i W_k (x_i + c_k) + b, x_i in region k, for I elements and weights (O, K, I).

    Thresholds are theta0 + dtheta (K - 1, G), constants c (K, G), all zero if not `shifted`; if
    `anchored`, c are the values of x + c_k at the threshold of branch k. Without derivatives.
    """
    outer, K, inner = weight.shape
    moved, biased = dtheta is not None, bias is not None
    known = (theta0.shape[1] > 1, shifted, anchored)
    run, parts, added = _ready(outer, K, inner, owner, moved, *known, biased)
    levels = readable((theta0, theta0 if dtheta is None else dtheta, c))
    y = x.new_empty(*x.shape[:-1], outer)
    last = y if bias is None else bias
    if added is None:
        run((x, *levels, transposed(weight), last, y))
        return y
    sums = x.new_empty((parts, outer), dtype=torch.float32)
    run((x, *levels, transposed(weight), last, sums))
    added((sums, last, y))
    return y


def transposed(weight: Tensor) -> Tensor:
    """The weights as (K, I, O), copied when they have changed."""
    kept = _COPIES.get(id(weight))
    state = weight._version, weight.data_ptr()
    if kept is not None and kept.weight() is weight and kept.state == state:
        return kept.columns
    copy = weight.detach().permute(1, 2, 0).contiguous()
    forget = functools.partial(_forget, id(weight))
    _COPIES[id(weight)] = _Copy(weakref.ref(weight, forget), state, copy)
    return copy


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    kept = _COPIES.get(key)
    if kept is not None and kept.weight is dead:  # else another tensor has come to lie there
        del _COPIES[key]


@functools.lru_cache(1024)
def _ready(
    outer: int,
    K: int,
    inner: int,
    owner: tuple[str, ...] | None,
    moved: bool,
    per_column: bool,
    shifted: bool,
    anchored: bool,
    biased: bool,
) -> tuple[Launch, int, Launch | None]:
    """The kernel, into how many parts it adds, and the kernel that adds these, if they are more."""
    from threshold_gating.kernels.columns_device import added_parts, chosen_columns

    tile, across, chunk, parts = _cut(outer, inner)
    owners = sum(2**j for j, o in enumerate(owner or ()) if o == "hi")
    known = (K - 1, owners, moved, per_column, shifted, anchored)
    alone = parts == 1
    rest = (inner, outer, chunk, *known, biased and alone, *tile)
    run = Launch(chosen_columns, (across, parts), _WARPS, rest)
    if alone:
        return run, parts, None
    summing = (outer, parts, biased, 1 << (parts - 1).bit_length(), 64)
    return run, parts, Launch(added_parts, (-(-outer // 64),), 4, summing)


def _cut(outer: int, inner: int) -> tuple[tuple[int, int], int, int, int]:
    """The tile, programs across the outputs, inputs of a part, parts."""
    tile = (16, 32) if interpreting() else _TILE
    across, tiles = -(-outer // tile[1]), -(-inner // tile[0])
    parts = 1 if across >= _ENOUGH else min(tiles, -(-2 * _ENOUGH // across), _MOST_PARTS)
    chunk = -(-tiles // parts) * tile[0]
    return tile, across, chunk, -(-inner // chunk)
