"""How the kernels of synapses are cut into tiles and launched."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.runtime import Launch, interpreting, total

# Rows of a tile and warps, which have 32 columns each, swept on an H200.
_TILES = {
    "forward": (64, 2),
    "inputs": (32, 2),
    "parameters": (8, 2),
    "taps": (16, 2),
    "pair_inputs": (16, 2),
    "pair_parameters": (4, 2),
}
_STAGES = 3
MOST_PROGRAMS = 65535  # on the second axis of a grid, which CUDA limits
_PROGRAMS = 6  # for each multiprocessor, before a sum is split between several
_LEAST = 64  # terms of a sum that is split
# Taps that share their gates are summed one beside the other, in registers; what each of them makes
# of each position is laid out in memory, up to this many numbers.
_MOST_TAPS, _MOST_NUMBERS = 9, 2**28


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

    def by_pairs(self) -> bool:
        """Whether gates are evaluated once for all taps: not worth it for positions few see."""
        rows, across, inputs, outputs, taps, groups = self.sizes
        fits = taps * across * max(inputs, outputs) * groups <= _MOST_NUMBERS
        return self.known.shared and fits and taps <= _MOST_TAPS and across <= 2 * rows

    def forward(self) -> Tensor:
        """y, (rows, groups * outputs)."""
        if self.by_pairs():
            return self._forward_of_pairs()
        rows, _, _, outputs, _, groups = self.sizes
        run, parts = _prepared("forward", self.known, self.sizes, self._processors())
        shape = (parts, rows, groups * outputs)
        y = self.x.new_empty(shape, dtype=torch.float32 if parts > 1 else None)
        across = (self.x.t(), self.gates.transpose(2, 4), self.lines.transpose(2, 4))
        run((*(t.contiguous() for t in across), self._table(0), y))
        return total(y, 0).to(self.x.dtype)

    def inputs_gradient(self, dy: Tensor) -> Tensor:
        """dx from dy, (rows, groups * outputs)."""
        if self.by_pairs():
            dx = torch.empty_like(self.x)
            down = _with_zeros(dy.t(), 1)[
                :, self._table(1)
            ].contiguous()  # (groups * outputs, taps, across)
            _of_pairs("pair_inputs", self.known, self.sizes)[0]((*self._pairs(), down, dx))
            return dx
        run, parts = _prepared("inputs", self.known, self.sizes, self._processors())
        shape = (parts, *self.x.shape)
        dx = self.x.new_empty(shape, dtype=torch.float32 if parts > 1 else None)
        run((self.x, self.gates, self.lines, self._table(1), dy.t().contiguous(), dx))
        return total(dx, 0).to(self.x.dtype)

    def parameter_gradients(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """dgates and dlines, as these are."""
        if self.by_pairs():
            return self._gradients_of_pairs(dy)
        run, parts = _prepared("parameters", self.known, self.sizes, self._processors())
        _, taps, outputs, kinds, inputs = self.lines.shape
        each = (parts, self.sizes.groups, taps, outputs)
        dgates = self.x.new_empty((*each, self.gates.shape[3], inputs), dtype=torch.float32)
        dlines = self.x.new_empty((*each, kinds, inputs), dtype=torch.float32)
        run((self.x, self.gates, self.lines, self._table(0), dy.contiguous(), dgates, dlines))
        gates, lines = total(dgates, 0), total(dlines, 0)
        return gates.sum(1, keepdim=True) if self.known.shared else gates, lines

    def _pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, gates and lines, these (groups, outputs, taps, kind, inputs)."""
        return self.x, self.gates, self.lines.transpose(1, 2).contiguous()

    def _forward_of_pairs(self) -> Tensor:
        rows, across, _, outputs, taps, groups = self.sizes
        width = groups * outputs
        parts = self.x.new_empty(taps, across, width)
        gates, lines = self.gates.transpose(2, 4), self.lines.permute(0, 4, 1, 3, 2)
        run, _ = _of_pairs("taps", self.known, self.sizes)
        run((*(t.contiguous() for t in (self.x.t(), gates, lines)), parts))
        y = self.x.new_empty(rows, width)
        _gathered(rows, across, width, taps)((parts, self._table(0), y))
        return y

    def _gradients_of_pairs(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gates, lines = self._pairs()
        run, parts = _of_pairs("pair_parameters", self.known, self.sizes, self._processors())
        down = _with_zeros(dy, 0)[
            self._table(1).t().contiguous()
        ].contiguous()  # (across, taps, groups * outputs)
        dgates, dlines = (w.new_empty(parts, *w.shape) for w in (gates, lines))
        run((x, gates, lines, down, dgates, dlines))
        return total(dgates, 0), total(dlines, 0).transpose(1, 2)

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
    depth, parts = _split(terms, programs * second, processors)
    rest: list[Any] = [rows, across, inputs, outputs, taps, depth]
    rest += {"forward": [rows * outputs * groups], "inputs": [across * inputs * groups]}.get(
        kind, []
    )
    rest += [*known, terms % 2 == 0, tile, columns, _STAGES]
    return Launch(
        getattr(kernels, f"synapse_{kind}"), (programs, second, parts), warps, rest
    ), parts


@functools.lru_cache(1024)
def _of_pairs(kind: str, known: Known, sizes: Sizes, processors: int = 1) -> tuple[Launch, int]:
    """As `_prepared`, for gates that all taps share; only parameters have sums in parts."""
    from threshold_gating.kernels.synapse import pair_kernels

    _, across, inputs, outputs, taps, groups = sizes
    tile, warps = (4, 1) if interpreting() else _TILES[kind]
    down, wide = {
        "taps": (across, outputs),
        "pair_inputs": (across, inputs),
        "pair_parameters": (outputs, inputs),
    }[kind]
    rest: list[Any] = [across, inputs, outputs]
    parts = 1
    if kind == "pair_parameters":
        rows = known.K * (2 if known.constants else 1)  # of a tap: all are in registers, twice
        tile = max(1, 2 * tile // 2 ** (rows - 1).bit_length())
        programs = -(-down // tile) * -(-wide // (32 * warps)) * groups
        depth, parts = _split(across, programs, processors)
        rest.append(depth)
    programs = -(-down // tile) * -(-wide // (32 * warps))
    rest += [known.K, known.taus, known.constants, known.fast, taps, tile, 32 * warps, 2]
    kernel = getattr(pair_kernels, f"synapse_{kind}")
    return Launch(kernel, (programs, groups, parts), warps, rest), parts


@functools.lru_cache(1024)
def _gathered(rows: int, across: int, width: int, taps: int) -> Launch:
    from threshold_gating.kernels.synapse.pair_kernels import synapse_gathered

    tile, columns = (16, 32) if interpreting() else (16, 128)
    programs = -(-rows // tile) * -(-width // columns)
    return Launch(synapse_gathered, (programs,), 4, (rows, across, width, taps, tile, columns))


def _split(terms: int, programs: int, processors: int) -> tuple[int, int]:
    """How many terms of a sum are one part, and how many parts there are."""
    wanted = max(1, _PROGRAMS * processors // programs)
    least = 4 if interpreting() else _LEAST
    depth = -(-max(least, -(-terms // wanted)) // 2) * 2  # two at once
    return depth, -(-terms // depth)


def _with_zeros(t: Tensor, axis: int) -> Tensor:
    """With one more row at the end, which -1 finds."""
    shape = list(t.shape)
    shape[axis] = 1
    return torch.cat((t, t.new_zeros(shape)), axis)


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
