"""Memory for weights that are made for one call of torch's recurrent ops.

cuDNN wants all weights in one buffer and copies them, with a warning, where they are not. Weights
that are written to where it wants them cost no copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.backends.cudnn.rnn
from torch import Tensor


class _Network(NamedTuple):
    """What decides where cuDNN wants each weight."""

    mode: str
    layers: int
    directions: int  # layers times directions
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device


class _Layout(NamedTuple):
    """How to cut a buffer into weights, and into gaps between them."""

    length: int
    sizes: list[int]  # of all pieces, one behind the other
    pieces: list[int]  # of each weight, its piece
    has_gaps: bool


def rooms_for(
    each: Sequence[Sequence[Tensor]], mode: str, layers: int
) -> Sequence[Sequence[Tensor | None]]:
    """Where the folded weights go: parts of one buffer for cuDNN, anywhere (None) elsewhere."""
    n, first = len(each[0]), each[0][0]
    if not _are_in_one_buffer(first):
        return [[None] * n] * len(each)
    all_weights = [w for own in each for w in own]
    shapes = tuple([w.shape for w in all_weights])
    layout = _layout(_Network(mode, layers, len(each), shapes, first.dtype, first.device))
    # cuDNN keeps space for biases even where there are none, and reads it: it must be 0
    make = first.new_zeros if layout.has_gaps else first.new_empty
    # unsafe: writing one part must not count as a change of the others for autograd
    parts = make(layout.length).unsafe_split_with_sizes(layout.sizes)
    found = [parts[k] for k in layout.pieces]
    each_shape = zip(found, shapes, strict=True)
    rooms = [t if len(shape) == 1 else t.view(shape) for t, shape in each_shape]
    return [rooms[k : k + n] for k in range(0, len(rooms), n)]


def _are_in_one_buffer(w: Tensor) -> bool:
    """Whether cuDNN runs torch's op and wants one buffer, which torch's own layers do not see to in
    bfloat16."""
    return w.is_cuda and torch._use_cudnn_rnn_flatten_weight() and torch.cudnn_is_acceptable(w)


@functools.lru_cache(256)
def _layout(network: _Network) -> _Layout:
    """The buffer of a network from `_offsets`."""
    length, starts = _offsets(network)
    counts = [math.prod(shape) for shape in network.shapes]
    sizes, pieces, end = [], [0] * len(starts), 0
    for k in sorted(range(len(starts)), key=starts.__getitem__):
        if starts[k] > end:
            sizes.append(starts[k] - end)
        pieces[k], end = len(sizes), starts[k] + counts[k]
        sizes.append(counts[k])
    if length > end:
        sizes.append(length - end)
    return _Layout(length, sizes, pieces, length > sum(counts))


def _offsets(network: _Network) -> tuple[int, tuple[int, ...]]:
    """How long the buffer is, and where each weight starts in it, as torch itself lays them out."""
    mode, layers, directions, shapes, dtype, device = network
    n = len(shapes) // directions
    projected = shapes[n - 1] if n % 2 else None  # (P, H)
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        likes = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        torch._cudnn_rnn_flatten_weight(
            likes,
            n,
            shapes[0][1],
            torch.backends.cudnn.rnn.get_cudnn_mode(mode),  # type: ignore[no-untyped-call]
            projected[1] if projected else shapes[1][1],
            projected[0] if projected else 0,
            layers,
            False,  # whether batches come first, which says nothing about weights
            directions > layers,
        )
    storage, size = likes[0].untyped_storage(), likes[0].element_size()
    starts = tuple((w.data_ptr() - storage.data_ptr()) // size for w in likes)
    return storage.nbytes() // size, starts
