"""The kernels of `device` as functions of tensors, and as ops that torch.compile can place.

Memory is (outer, G, inner), as `form` says, and contiguous. Triton is imported when one runs.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.form import Form, Numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALONE, READ, TIMES = 0, 1, 2  # what a second input does: nothing, the branches read it, y * it


def interpreting() -> bool:
    """Whether Triton runs its kernels step by step on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class Tiles(NamedTuple):
    """How a kernel is cut up: rows and columns of a tile, tiles of a program, warps, stages."""

    rows: int
    columns: int
    iters: int
    warps: int
    stages: int


class Matrix(NamedTuple):
    """Memory as the kernels see it: R x N and the layout, see `device`."""

    R: int
    N: int
    G: int
    layout: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Matrix:
        outer, G, inner = sizes
        if G == 1:
            return cls(1, outer * inner, 1, 0)
        return cls(outer, G, G, 1) if inner == 1 else cls(outer * G, inner, G, 2)

    def tiles(self, rows: int, columns: int, warps: int, stages: int, programs: int) -> Tiles:
        """Tiles of at most this size, as many to a program as leave about `programs` of them."""
        most = rows * columns
        if self.layout > 0:
            columns = min(_power_of_two(self.N), columns)
        if self.layout == 2:
            rows = min(most // columns, _power_of_two(self.R))
        across, along = self._counts(rows, columns)
        return Tiles(rows, columns, -(-along // max(1, programs // across)), warps, stages)

    def _counts(self, rows: int, columns: int) -> tuple[int, int]:
        """How many tiles there are across, and along the axis of the sums."""
        if self.layout == 0:
            return 1, -(-self.N // (rows * columns))
        down, right = -(-self.R // rows), -(-self.N // columns)
        return (right, down) if self.layout == 1 else (down, right)

    def grid(self, t: Tiles) -> tuple[int, int]:
        """Programs across, and along the axis of the sums."""
        across, along = self._counts(t.rows, t.columns)
        return across, -(-along // t.iters)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tiles_forward(m: Matrix, K: int, size: int) -> Tiles:
    """By layout, branches and bytes of an element; swept on an H200, 16384 x 4096."""
    if interpreting():
        return m.tiles(64, 256, 4, 1, 4)
    if m.layout == 1:
        if K > 2:
            return m.tiles(1, 256, 2, 4 if size == 2 else 3, 16 * 132)
        return m.tiles(8, 512, 2, 1, 10 * 132) if size == 2 else m.tiles(4, 512, 4, 1, 2**31)
    return m.tiles(1, 1024, 4, 1, 2**31 if K == 2 else 64 * 132)


def tiles_backward(m: Matrix, K: int) -> Tiles:
    if interpreting():
        return m.tiles(64, 256, 4, 1, 4)
    if m.layout == 1:
        return m.tiles(1, 512, 4, 4, 8 * 132) if K == 3 else m.tiles(1, 256, 2, 6, 8 * 132)
    return m.tiles(1, 512, 2, 5, 8 * 132)


class Rows(NamedTuple):
    """One parameter: the rows that are tensors, and a base-4 digit for each that is a number."""

    tensor: Tensor  # (rows, G) or (rows, 1), float32
    code: int

    def arguments(self) -> tuple[Tensor, int, int]:
        wide = self.tensor.shape[1] > 1
        return self.tensor, self.tensor.stride(0), self.tensor.stride(1) if wide else 0


_DIGITS = {0.0: 1, 1.0: 2, -1.0: 3}


def code_of(numbers: Numbers) -> int:
    """A base-4 digit for each row: 0 for one in memory, else the number 0, 1 or -1."""
    digits = [0 if number is None else _DIGITS.get(number, 0) for number in numbers]
    return sum(digit * 4**k for k, digit in enumerate(digits))


def packed(numbers: Numbers, tensors: Sequence[Tensor], device: torch.device) -> Rows:
    """A parameter's rows, tensors given flat in memory order, for a kernel to read."""
    rest, loaded, code = iter(tensors), [], code_of(numbers)
    for number in numbers:
        if number is None or number not in _DIGITS:
            loaded.append(next(rest) if number is None else _constant(number, device))
    if not loaded:
        return Rows(_constant(0.0, device).view(1, 1), code)
    return Rows(_stacked(loaded), code)


@functools.lru_cache(256)
def _kept(number: float, device: torch.device) -> Tensor:
    return torch.full((1,), number, device=device)


def _constant(number: float, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.full((1,), number, device=device)
    return _kept(number, device)


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """(rows, G) in float32: the memory the rows were cut from where that can be, else a copy."""
    first, G = rows[0], rows[0].numel()
    if not torch.compiler.is_compiling() and all(
        r.dtype == torch.float32 and r.numel() == G and r.is_contiguous() for r in rows
    ):
        if len(rows) == 1:
            return first.as_strided((1, G), (G, 1))
        places = [r.data_ptr() for r in rows]
        steps = {b - a for a, b in pairwise(places)}
        step = steps.pop() // 4
        if not steps and step > 0 and _lies_in(rows[-1], first):
            return first.as_strided((len(rows), G), (step, 1))
    G = max(r.numel() for r in rows)
    return torch.stack([r.reshape(-1).float().expand(G) for r in rows])


def _lies_in(last: Tensor, first: Tensor) -> bool:
    """Whether two rows are of one tensor."""
    return last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def codes(form: Form, rows: Sequence[Rows], role: int) -> list[int]:
    """What a kernel knows when it is compiled, in the order in which it takes it."""
    return codes_of(form, [r.code for r in rows], role)


def codes_of(form: Form, digits: Sequence[int], role: int) -> list[int]:
    mode = 4 if form.hard else 2 if len(form.tau) == 1 else 3
    if form.K == 2 and not form.hard:
        mode = int(form.centred)
    owners = sum(2**k for k, owner in enumerate(form.owner or ()) if owner == "hi")
    return [*digits, owners, form.K, mode, role]


def forward(
    x: Tensor,
    other: Tensor | None,
    parameters: Sequence[Tensor],
    codes: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """y of (outer, G, inner), the shape of x or `sizes`; `codes` come from `codes`."""
    from threshold_gating.kernels import device

    y = torch.empty_like(x)
    m = Matrix.of(sizes or x.shape)
    tiles = tiles_forward(m, codes[5], x.element_size())
    given = [x, x if other is None else other, y, *_arguments(parameters)]
    _launch(device.blend_forward, m, tiles, given, codes)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    parameters: Sequence[Tensor],
    codes: Sequence[int],
    wanted: Sequence[bool],
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dother, sums per row of a wanted parameter and group), empty where not wanted."""
    from threshold_gating.kernels import device

    m, K = Matrix.of(sizes or x.shape), codes[5]
    tiles = tiles_backward(m, K)
    dx, dother = (torch.empty_like(x) if w else x.new_empty(0) for w in wanted[:2])
    splits, width = m.grid(tiles)[1], (1, m.N, m.R)[m.layout]
    sums = x.new_empty(count(codes, wanted), splits, width, dtype=torch.float32)
    given = [x, x if other is None else other, dy, dx, dother, sums, *_arguments(parameters)]
    _launch(device.blend_backward, m, tiles, given, [*codes, *map(int, wanted)])
    return dx, dother, sums.view(len(sums), splits * (width // m.G), m.G).sum(1)


def count(codes: Sequence[int], wanted: Sequence[bool]) -> int:
    """How many rows of sums the wanted parameters have."""
    K, taus = codes[5], codes[5] - 1 if codes[6] == 3 else 1
    return sum(n for n, w in zip((taus, K - 1, K, K), wanted[2:], strict=True) if w)


def _arguments(parameters: Sequence[Tensor]) -> list[Any]:
    return [a for p in parameters for a in Rows(p, 0).arguments()]


_compiled: dict[Any, Any] = {}


def _launch(
    kernel: Any, m: Matrix, tiles: Tiles, given: Sequence[Tensor | int], known: Sequence[int]
) -> None:
    """Run a kernel; one that is compiled is called past Triton's own, slower look-up."""
    programs = math.prod(m.grid(tiles))
    runtime = [*given, m.R, m.N, m.G, tiles.iters]
    constants = (*known, m.layout, tiles.rows, tiles.columns, tiles.stages)
    first = given[0]
    assert isinstance(first, Tensor)
    if not first.is_cuda:
        kernel[programs,](*runtime, *constants, num_warps=tiles.warps)
        return
    # Triton compiles anew for these properties of its arguments, so they find the kernel.
    key = (kernel, first.device, tiles.warps, constants, *map(_kind, runtime))
    with torch.cuda.device(first.device):
        ready = _compiled.get(key)
        if ready is None:
            _compiled[key] = kernel[programs,](*runtime, *constants, num_warps=tiles.warps)
        else:
            ready[programs, 1, 1](*runtime, *constants)


def _kind(a: Tensor | int) -> Any:
    if isinstance(a, Tensor):
        return a.dtype, a.data_ptr() % 16 == 0
    return 1 if a == 1 else (a % 16 == 0, a >= 2**31)


# For torch.compile, to which a kernel is opaque: an op known by the shapes it gives.
forward_op = torch.library.custom_op(
    "threshold_gating::blend_forward",
    lambda x, other, parameters, codes: forward(x, other, parameters, codes),
    mutates_args=(),
    schema="(Tensor x, Tensor? other, Tensor[] parameters, int[] codes) -> Tensor",
)
backward_op = torch.library.custom_op(
    "threshold_gating::blend_backward",
    lambda *given: backward(*given),
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? other, Tensor[] parameters, int[] codes, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
)


@forward_op.register_fake
def _(x: Tensor, other: Tensor | None, parameters: list[Tensor], codes: list[int]) -> Tensor:
    return torch.empty_like(x)


@backward_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    codes: list[int],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dother = (torch.empty_like(x) if w else x.new_empty(0) for w in wanted[:2])
    group = 1 if x.shape[1] == 1 else x.shape[1]
    return dx, dother, x.new_empty(count(codes, wanted), group, dtype=torch.float32)
