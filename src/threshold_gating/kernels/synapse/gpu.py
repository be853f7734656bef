"""How the kernels of synapses are cut into tiles and launched."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.runtime import Launch, interpreting, total

# Rows of a tile and warps, swept on an H200; a warp has 32 columns.
_TILES = {"forward": (32, 4), "inputs": (32, 4), "parameters": (8, 4)}
_STAGES = 3
_PROGRAMS = 6  # for each multiprocessor, before a sum is split between several
_LEAST = 64  # terms of a sum that is split


class Known(NamedTuple):
    """What the kernels know when they are compiled."""

    K: int
    taus: int
    constants: bool
    fast: bool
    table: bool  # the taps of a kernel see rows by a table
    shared: bool  # and have one gate


class Sizes(NamedTuple):
    """Rows of y and of x, inputs and outputs of a group, taps of the kernel, groups."""

    rows: int
    across: int
    inputs: int
    outputs: int
    taps: int
    groups: int


class Window(NamedTuple):
    """How a kernel goes over images; `low` is the padding on the lower side of each axis."""

    batch: int
    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[int, ...]
    dilation: tuple[int, ...]


class Packed(NamedTuple):
    """The operands of one call.

    x (across, groups * inputs); gates: taus, then thetas, and lines: slopes, then constants if
    there are any, (groups, taps, outputs, kind, inputs), the taps of gates 1 where they share them.
    """

    x: Tensor
    gates: Tensor
    lines: Tensor
    known: Known
    sizes: Sizes
    window: Window | None

    def forward(self) -> Tensor:
        """y, (rows, groups * outputs)."""
        rows, _, _, outputs, _, groups = self.sizes
        run, parts = _prepared("forward", self.known, self.sizes, self._processors())
        shape = (parts, rows, groups * outputs)
        y = self.x.new_empty(shape, dtype=torch.float32 if parts > 1 else None)
        across = (self.x.t(), self.gates.transpose(2, 4), self.lines.transpose(2, 4))
        run((*(t.contiguous() for t in across), self._table(0), y))
        return total(y, 0).to(self.x.dtype)

    def inputs_gradient(self, dy: Tensor) -> Tensor:
        """dx from dy, (rows, groups * outputs)."""
        run, parts = _prepared("inputs", self.known, self.sizes, self._processors())
        shape = (parts, *self.x.shape)
        dx = self.x.new_empty(shape, dtype=torch.float32 if parts > 1 else None)
        run((self.x, self.gates, self.lines, self._table(1), dy.t().contiguous(), dx))
        return total(dx, 0).to(self.x.dtype)

    def parameter_gradients(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """dgates and dlines, as these are."""
        run, parts = _prepared("parameters", self.known, self.sizes, self._processors())
        _, taps, outputs, kinds, inputs = self.lines.shape
        each = (parts, self.sizes.groups, taps, outputs)
        dgates = self.x.new_empty((*each, self.gates.shape[3], inputs), dtype=torch.float32)
        dlines = self.x.new_empty((*each, kinds, inputs), dtype=torch.float32)
        run((self.x, self.gates, self.lines, self._table(0), dy.contiguous(), dgates, dlines))
        gates, lines = total(dgates, 0), total(dlines, 0)
        return gates.sum(1, keepdim=True) if self.known.shared else gates, lines

    def _processors(self) -> int:
        if not self.x.is_cuda:
            return 1
        return torch.cuda.get_device_properties(self.x.device).multi_processor_count

    def _table(self, way: int) -> Tensor:
        """A stand-in where rows see themselves."""
        return self.x if self.window is None else tables(self.window, self.x.device)[way]


@functools.lru_cache(1024)
def _prepared(kind: str, known: Known, sizes: Sizes, processors: int) -> tuple[Launch, int]:
    """The kernel, and how many parts its sum has."""
    from threshold_gating.kernels.synapse import kernels

    rows, across, inputs, outputs, taps, groups = sizes
    down, wide, terms = {
        "forward": (rows, outputs, inputs),
        "inputs": (across, inputs, outputs),
        "parameters": (outputs, inputs, rows),
    }[kind]
    tile, warps = (16, 1) if interpreting() else _TILES[kind]
    columns = 32 * warps
    programs = -(-down // tile) * -(-wide // columns)
    second = groups * taps if kind == "parameters" else groups
    wanted = max(1, _PROGRAMS * processors // (programs * second))
    least = 4 if interpreting() else _LEAST
    depth = -(-max(least, -(-terms // wanted)) // 2) * 2  # two at once
    parts = -(-terms // depth)
    rest: list[Any] = [rows, across, inputs, outputs, taps, depth]
    rest += {"forward": [rows * outputs * groups], "inputs": [across * inputs * groups]}.get(
        kind, []
    )
    rest += [*known, tile, columns, _STAGES]
    return Launch(
        getattr(kernels, f"synapse_{kind}"), (programs, second, parts), warps, rest
    ), parts


@functools.lru_cache(64)
def tables(window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which row of x a tap of a row of y sees, (taps, rows); and the other way round. -1: none."""
    axes = len(window.size)
    at = torch.zeros((1,) * (2 * axes), dtype=torch.int64, device=device)  # (*kernel, *out)
    for axis, (size, out, kernel, stride, low, step) in enumerate(zip(*window[1:], strict=True)):
        taps, places = (torch.arange(n, device=device) for n in (kernel, out))
        place = taps[:, None] * step + places * stride - low
        shape = [1] * (2 * axes)
        shape[axis], shape[axis + axes] = kernel, out
        place = torch.where((place >= 0) & (place < size), place, -1).view(shape)
        at = torch.where((at < 0) | (place < 0), -1, at * size + place)
    every = math.prod(window.size)
    first = torch.arange(window.batch, device=device)[:, None] * every
    at = at.reshape(math.prod(window.kernel), 1, -1)
    seen = torch.where(at < 0, -1, at + first).flatten(1)
    nowhere = window.batch * every
    seeing = seen.new_full((len(seen), nowhere + 1), -1)
    rows = torch.arange(seen.shape[1], device=device).expand_as(seen)
    seeing.scatter_(1, torch.where(seen < 0, nowhere, seen), rows)
    return seen.int(), seeing[:, :-1].int().contiguous()
