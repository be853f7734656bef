"""How the kernels of synapses are cut into tiles and launched."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.runtime import Launch, interpreting, total

_STAGES = 3
MOST_PROGRAMS = 65535  # on the second axis of a grid, which CUDA limits
_PROGRAMS = 6  # for each multiprocessor, before a sum is split between several
_LEAST = 64  # terms of a sum that is split
_AT_ONCE = 8  # programs of one warp with all registers, on a multiprocessor
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
    """Rows of y and of x, inputs and outputs of a group, taps of the kernel, groups, images."""

    rows: int
    across: int
    inputs: int
    outputs: int
    taps: int
    groups: int
    images: int


class Window(NamedTuple):
    """How a kernel goes over an image; `low` is the padding on the lower side of each axis."""

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
        rows, across, inputs, outputs, taps, groups, _ = self.sizes
        fits = taps * across * max(inputs, outputs) * groups <= _MOST_NUMBERS
        return self.known.shared and fits and taps <= _MOST_TAPS and across <= 2 * rows

    def forward(self) -> Tensor:
        """y, (rows, groups * outputs)."""
        if self.by_pairs():
            return self._forward_of_pairs()
        rows, _, _, outputs, _, groups, _ = self.sizes
        run, parts = _prepared("forward", self.known, self.sizes, self._processors())
        y = self.x.new_empty(parts, rows, groups * outputs)
        gates, lines = (turned(w.flatten(0, 1)) for w in (self.gates, self.lines))
        run((turned(self.x), gates, lines, self._table(0), y))
        return total(y, 0)

    def gradients(
        self, dy: Tensor, of_x: bool, of_parameters: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of x, gates and lines from dy, (rows, groups * outputs); empty ones of what is not asked
        for. Of gates that taps share they are made beside those of x."""
        dx = dgates = dlines = self.x.new_empty(0)
        if self.by_pairs():
            dx, dgates = self._turns_of_pairs(dy, of_parameters)
            dlines = self._lines_of_pairs(dy) if of_parameters else dlines
            return dx, dgates, dlines
        if of_x:
            dx = self._inputs_gradient(dy)
        if of_parameters:
            dgates, dlines = self._parameter_gradients(dy)
        return dx, dgates, dlines

    def _inputs_gradient(self, dy: Tensor) -> Tensor:
        run, parts = _prepared("inputs", self.known, self.sizes, self._processors())
        dx = self.x.new_empty(parts, *self.x.shape)
        run((self._visible(), self.gates, self.lines, self._table(1), turned(dy), dx))
        return total(dx, 0)

    def _parameter_gradients(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        run, parts = _prepared("parameters", self.known, self.sizes, self._processors())
        _, taps, outputs, kinds, inputs = self.lines.shape
        each = (parts, self.sizes.groups, taps, outputs)
        dgates = self.x.new_empty(*each, self.gates.shape[3], inputs)
        dlines = self.x.new_empty(*each, kinds, inputs)
        run((self.x, self.gates, self.lines, self._table(0), dy.contiguous(), dgates, dlines))
        gates, lines = total(dgates, 0), total(dlines, 0)
        return gates.sum(1, keepdim=True) if self.known.shared else gates, lines

    def _forward_of_pairs(self) -> Tensor:
        rows, across, _, outputs, taps, groups, images = self.sizes
        width = groups * outputs
        parts = self.x.new_empty(taps, across, width)
        gates, lines = (turned(w.transpose(1, 2).flatten(2, 3)) for w in (self.gates, self.lines))
        run, _ = _of_pairs("taps", self.known, self.sizes)
        run((turned(self.x), gates, lines, parts))
        y = self.x.new_empty(rows, width)
        _gathered(rows, across, images, width, taps)((parts, self._table(0), y))
        return y

    def _turns_of_pairs(self, dy: Tensor, turns: bool) -> tuple[Tensor, Tensor]:
        """dx, and dgates if `turns`."""
        run, parts = _of_pairs("pair_inputs", self.known, self.sizes, self._processors(), turns)
        dx = self.x.new_empty(self.x.shape)
        dgates = self.x.new_empty(parts if turns else 0, *self.gates.shape)
        lines = self.lines.transpose(1, 2).contiguous()  # (groups, outputs, taps, kind, inputs)
        run((self._visible(), self.gates, lines, self._table(1), turned(dy), dx, dgates))
        return dx, total(dgates, 0) if turns else dgates

    def _lines_of_pairs(self, dy: Tensor) -> Tensor:
        rows, across, inputs, outputs, taps, groups, images = self.sizes
        # what comes down to each position by each tap, (across, taps, groups * outputs): a row for
        # each of them, which sees one row of dy or none
        down = self.x.new_empty(across * taps, groups * outputs)
        gather = _gathered(across * taps, rows, images, groups * outputs, 1)
        gather((dy.contiguous(), self._table(1).t().contiguous(), down))
        run, parts = _of_pairs("pair_parameters", self.known, self.sizes, self._processors())
        dlines = self.x.new_empty(parts, groups, outputs, taps, self.lines.shape[3], inputs)
        run((self._visible(), self.gates, down, dlines))
        return total(dlines, 0).transpose(1, 2)

    def _visible(self) -> Tensor:
        """x with 0 where no tap sees it: a gradient is 0 there, and 0 times infinity is not."""
        if self.window is None or _sees_all(self.window):
            return self.x
        hidden = (self._table(1) < 0).all(0)[:, None]
        return self._by_image(self.x).masked_fill(hidden, 0.0).view_as(self.x)

    def _by_image(self, rows: Tensor) -> Tensor:
        return rows.view(self.sizes.images, -1, rows.shape[1])

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

    rows, across, inputs, outputs, taps, groups, images = sizes
    each, others = rows // images, across // images
    down, wide, terms, second, last = {
        "forward": (rows, outputs, inputs, groups, [rows * outputs * groups]),
        "inputs": (across, inputs, outputs, groups, [across * inputs * groups]),
        "parameters": (outputs, inputs, rows, groups * taps, []),
    }[kind]
    tile, warps = _tile(kind, known, down)
    programs = -(-down // tile) * -(-wide // (32 * warps))
    depth, parts = _split(terms, programs * second, processors)
    if kind == "parameters" and known.table:  # a division for each row would cost more than gates
        terms, parts = each, min(images, parts)
        depth = -(-images // parts)
        parts = -(-images // depth)
    image = (others, each) if kind == "inputs" else (each, others)
    rest: list[Any] = [rows, across, *image, inputs, outputs, taps, depth, *last]
    rest += [*known, terms % 2 == 0, tile, 32 * warps, _STAGES]
    kernel = getattr(kernels, f"synapse_{kind}")
    return Launch(kernel, (programs, second, parts), warps, rest), parts


@functools.lru_cache(1024)
def _of_pairs(
    kind: str, known: Known, sizes: Sizes, processors: int = 1, turns: bool = False
) -> tuple[Launch, int]:
    """As `_prepared`, for gates that all taps share; `turns` asks for dgates beside dx."""
    from threshold_gating.kernels.synapse import pair_kernels

    rows, across, inputs, outputs, taps, groups, images = sizes
    down, wide = {
        "taps": (across, outputs),
        "pair_inputs": (across, inputs),
        "pair_parameters": (outputs, inputs),
    }[kind]
    tile, warps = _tile(kind, known, down)
    tiles, beside, parts = -(-down // tile), -(-wide // (32 * warps)), 1
    grid = tiles * beside, groups, 1
    rest: list[Any] = [across, inputs, outputs]
    about: list[Any] = [known.K, known.taus, known.constants, known.fast, taps]
    if kind == "pair_inputs":
        # as many programs as run at once: each has its own sums of all gates
        most = (2 if interpreting() else _AT_ONCE) * processors
        depth = -(-tiles * beside * groups // most) if turns else 1
        parts = -(-tiles // depth)
        grid = parts * beside, groups, 1
        rest = [rows, across, across // images, rows // images, inputs, outputs, depth]
        about += [outputs % 2 == 0, turns]
    elif kind == "pair_parameters":
        depth, parts = _split(across, tiles * beside * groups, processors)
        grid = tiles * beside, groups, parts
        rest.append(depth)
        about.append(across % 2 == 0)
    rest += [*about, tile, 32 * warps, 2 if kind == "pair_inputs" else _STAGES]
    return Launch(getattr(pair_kernels, f"synapse_{kind}"), grid, warps, rest), parts


@functools.lru_cache(1024)
def _gathered(rows: int, across: int, images: int, width: int, taps: int) -> Launch:
    from threshold_gating.kernels.synapse.pair_kernels import synapse_gathered

    tile, columns = (16, 32) if interpreting() else (32, 64) if width <= 64 else (16, 128)
    programs = -(-rows // tile) * -(-width // columns)
    sizes = rows, across, rows // images, across // images, width, taps
    return Launch(synapse_gathered, (programs,), 4, (*sizes, tile, columns))


def _tile(kind: str, known: Known, rows: int) -> tuple[int, int]:
    """Rows of a tile and warps, which have 32 columns each; swept on an H200."""
    if interpreting():
        return (16 if kind in ("forward", "inputs", "parameters") else 4), 1
    two, plain = known.K == 2, known.K == 2 and not known.constants
    most, warps = {
        "forward": ((128, 4) if known.fast and plain else (64, 2)) if two else (32, 1),
        "inputs": (64, 2) if known.fast and plain else (32 if two else 16, 1),
        "parameters": (16 if known.fast and plain else 8 if two else 4, 2),
        "taps": (16, 2),
        "pair_inputs": (32, 1) if two else (16, 1),
        "pair_parameters": (4 if two else 2, 2),
    }[kind]
    return min(most, max(16, 1 << (rows - 1).bit_length())), warps


def turned(x: Tensor) -> Tensor:
    """(A, B) as (B, A), or (groups, A, kinds, B) as (groups, B, kinds, A), in memory."""
    groups, first, kinds, last = (1, len(x), 1, x.shape[1]) if x.dim() == 2 else x.shape
    y = x.new_empty((last, first) if x.dim() == 2 else (groups, last, kinds, first))
    _turned(groups, first, kinds, last)((x.contiguous(), y))
    return y


@functools.lru_cache(1024)
def _turned(groups: int, first: int, kinds: int, last: int) -> Launch:
    from threshold_gating.kernels.synapse.kernels import synapse_turned

    programs = -(-first // 32) * -(-last // 32)
    return Launch(synapse_turned, (programs, kinds, groups), 4, (first, kinds, last, 32, 32))


def _split(terms: int, programs: int, processors: int) -> tuple[int, int]:
    """How many terms of a sum are one part, and how many parts there are."""
    wanted = max(1, _PROGRAMS * processors // programs)
    least = 4 if interpreting() else _LEAST
    depth = -(-max(least, -(-terms // wanted)) // 2) * 2  # two at once
    return depth, -(-terms // depth)


@functools.lru_cache(1024)
def _sees_all(window: Window) -> bool:
    """Whether each position is seen by a tap: it is where it is on each axis."""
    for size, out, kernel, stride, low, step in zip(*window, strict=True):
        seen = {t * step + n * stride - low for t in range(kernel) for n in range(out)}
        if not seen.issuperset(range(size)):
            return False
    return True


def tables(window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """As `_tables`, which remembers them; those made for a CUDA graph belong to that graph.

    They are filled when it runs, not before, and live in its memory.
    """
    make = _tables.__wrapped__ if _captures(device) else _tables
    found: tuple[Tensor, Tensor] = make(window, device)
    return found


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(1024)
def _tables(window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which position a tap of a row of y sees, (taps, rows of an image); and the other way round.

    -1 where it sees none.
    """
    axes = len(window.size)
    at = torch.zeros((1,) * (2 * axes), dtype=torch.int64, device=device)  # (*kernel, *out)
    for axis, (size, out, kernel, stride, low, step) in enumerate(zip(*window, strict=True)):
        taps, places = (torch.arange(n, device=device) for n in (kernel, out))
        place = taps[:, None] * step + places * stride - low
        shape = [1] * (2 * axes)
        shape[axis], shape[axis + axes] = kernel, out
        place = torch.where((place >= 0) & (place < size), place, -1).view(shape)
        at = torch.where((at < 0) | (place < 0), -1, at * size + place)
    seen = at.reshape(math.prod(window.kernel), -1)
    nowhere = math.prod(window.size)
    seeing = seen.new_full((len(seen), nowhere + 1), -1)
    rows = torch.arange(seen.shape[1], device=device).expand_as(seen)
    seeing.scatter_(1, torch.where(seen < 0, nowhere, seen), rows)
    return seen.int(), seeing[:, :-1].int().contiguous()
