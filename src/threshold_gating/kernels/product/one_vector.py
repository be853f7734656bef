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

from threshold_gating.kernels.product.formula import Formula
from threshold_gating.kernels.runtime import Launch, interpreting, readable
from threshold_gating.kernels.structure import Structure, Tensors

# Inputs of 16 bits and outputs of a tile. Swept on an H200 against torch's product with one matrix:
# 1.00 of it at 4096 x 4096, 1.09 at 8192 x 8192, where two warps and six stages are slower.
_TILE = (64, 64)
_SMALL, _LARGE = (2, 6), (4, 4)  # warps, and stages: one more than tiles on their way
_PROGRAMS = 528  # four for each processor of an H200, so that all run at once; parts make up to it
_MOST_PARTS = 64
_COUNTERS = 1024  # strips of outputs that are cut into parts are fewer: half the programs at most


class _Copy(NamedTuple):
    weight: weakref.ref[Tensor]
    state: tuple[int, int]
    columns: Tensor


_PLAIN = (Tensor, torch.nn.Parameter)  # whose memory is what they say
_COPIES: dict[int, _Copy] = {}
_SCRATCH: dict[tuple[int, int], Tensor] = {}


def takes(formula: Formula, x: Tensor, weight: Tensor, tensors: Tensors) -> bool:
    """Whether x is one vector, with one threshold for all elements or one for each.

    And whether a copy of the weights can follow them: inference tensors do not say that they
    changed, and a graph that is recorded now would read the copy after they did.
    """
    theta0, c, inner = tensors.theta0, tensors.c, x.shape[-1]
    if formula.conv is not None or theta0 is None or c is None or set(formula.structure.s) != {1.0}:
        return False
    one = x.numel() == inner == weight.shape[-1] > 0 and x.dtype == weight.dtype
    if not one or not x.is_contiguous() or theta0.dim() != 2 or theta0.shape[1] not in (1, inner):
        return False
    plain = type(x) in _PLAIN and type(weight) in _PLAIN
    followed = plain and not weight.is_inference()
    return followed and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class _Known(NamedTuple):
    """What the kernel knows when it is compiled."""

    thresholds: int
    owners: int  # a bit for each threshold that belongs to the region above it
    moved: bool
    per_column: bool
    shifted: bool  # constants are not all 0
    anchored: bool
    biased: bool


def product(
    structure: Structure, x: Tensor, tensors: Tensors, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """sum_i W_k (x_i + c_k) + b, x_i in region k, for I elements and weights (O, K, I).

    Without derivatives. Constants of anchored gates are the values of x + c_k at the threshold of
    branch k.
    """
    theta0, dtheta, c = tensors.theta0, tensors.dtheta, tensors.c
    assert theta0 is not None and c is not None  # `takes`
    outer, K, inner = weight.shape
    owners = sum([2**j for j, o in enumerate(structure.owner or ()) if o == "hi"])
    shifted = set(structure.c) != {0.0}
    wide = theta0.shape[1] > 1
    known = _Known(
        K - 1, owners, dtheta is not None, wide, shifted, structure.anchored, bias is not None
    )
    run, parts = _ready(x.dtype, outer, inner, known)
    levels = readable((theta0, theta0 if dtheta is None else dtheta, c))
    y = x.new_empty(*x.shape[:-1], outer)
    last = y if bias is None else bias.contiguous()
    scratch = y if parts == 1 else _scratch(x)
    run((x, *levels, transposed(weight), last, y, scratch), last.dtype)
    return y


def _scratch(x: Tensor) -> Tensor:
    """Counters at zero and room for parts: one for each stream, whose kernels run in turn."""
    device = x.get_device()
    key = device, torch._C._cuda_getCurrentRawStream(device) if x.is_cuda else 0
    kept = _SCRATCH.get(key)
    if kept is None:
        size = _COUNTERS + _PROGRAMS * _TILE[1]
        kept = torch.zeros(size, dtype=torch.float32, device=x.device)
        _SCRATCH[key] = kept
    return kept


def transposed(weight: Tensor) -> Tensor:
    """The weights as (K, I, O), copied when they have changed."""
    kept = _COPIES.get(id(weight))
    state = weight._version, weight.data_ptr()
    if kept is not None and kept.weight() is weight and kept.state == state:
        return kept.columns
    copy = weight.detach().permute(1, 2, 0).contiguous()
    if weight.is_cuda:  # a graph recorded later takes the formulas, and cannot make it then
        # whose context has to be the current one, or torch warns; kernels launched past it do not
        # see to that
        with torch.cuda.device(weight.device):
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    forget = functools.partial(_forget, id(weight))
    _COPIES[id(weight)] = _Copy(weakref.ref(weight, forget), state, copy)
    return copy


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    kept = _COPIES.get(key)
    if kept is not None and kept.weight is dead:  # else another tensor has come to lie there
        del _COPIES[key]


@functools.lru_cache(1024)
def _ready(dtype: torch.dtype, outer: int, inner: int, known: _Known) -> tuple[Launch, int]:
    """The kernel for weights of this size, and into how many parts it cuts their inputs."""
    from threshold_gating.kernels.product.one_vector_kernels import chosen_columns

    tile = _tile(dtype)
    across, chunk, parts = _cut(outer, inner, tile)
    even = inner % tile[0] == 0 and outer % tile[1] == 0
    rest = (inner, outer, chunk, parts, _COUNTERS, *known, even)
    added = 1 << (parts - 1).bit_length()
    warps, stages = _SMALL if outer * inner <= 2**24 else _LARGE
    return Launch(chosen_columns, (across, parts), warps, (*rest, added, *tile, stages)), parts


def _tile(dtype: torch.dtype) -> tuple[int, int]:
    """Inputs and outputs of a tile, as many bytes of either type."""
    return (16, 32) if interpreting() else (_TILE[0] * 2 // dtype.itemsize, _TILE[1])


def _cut(outer: int, inner: int, tile: tuple[int, int]) -> tuple[int, int, int]:
    """Programs across the outputs, inputs of a part, parts."""
    across, tiles = -(-outer // tile[1]), -(-inner // tile[0])
    parts = min(tiles, max(1, _PROGRAMS // across), _MOST_PARTS)
    chunk = -(-tiles // parts) * tile[0]
    return across, chunk, -(-inner // chunk)
