"""The kernels of `device` as functions of tensors.

Memory is (outer, G, inner), as `form` says, and contiguous. Triton is imported when one runs.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.form import Form, Numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALONE, READ, TIMES = 0, 1, 2  # what a second input does: nothing, the branches read it, y * it
HARD = 4  # a mode of `device`


def interpreting() -> bool:
    """Whether Triton runs its kernels step by step on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_installed() -> bool:
    return _INSTALLED


def _found() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:  # someone forbids it
        return False


_INSTALLED = _found()  # here, for Dynamo may not look


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


def tiles_forward(m: Matrix, K: int, size: int, mode: int = 0, frozen: bool = False) -> Tiles:
    """By layout, branches, bytes of an element, mode and whether an instance is known to be tame.

    Swept on an H200, 16384 x 4096.
    """
    if interpreting():
        return m.tiles(64, 256, 4, 1, 4)
    every, narrow = 2**31, size == 2
    if m.layout == 1:
        # Where the parameters of all groups do not stay in a cache, each is read by one program.
        once = m.G > 2**16
        if K == 2 and once:
            return m.tiles(8, 256, 2, 4, 1)
        if K == 2 and narrow:
            # Long programs need enough to do, and hard gates are done before memory is read anyway.
            long = m.R * m.N >= 2**25 and mode != HARD
            return m.tiles(32, 256, 4, 3, 32 * 132) if long else m.tiles(8, 256, 1, 1, every)
        if K == 2:
            return m.tiles(4, 512, 4, 1, every)
        every = 1 if once else every
        if K == 3:
            return m.tiles(2, 256, 1, 3, 16 * 132) if narrow else m.tiles(8, 128, 1, 1, every)
        return m.tiles(4, 128, 1, 3, 8 * 132) if narrow else m.tiles(4, 256, 2, 3, 16 * 132)
    if K == 2 or frozen:
        return m.tiles(1, 1024, 4, 1, every)
    return m.tiles(2, 1024, 4, 2, 64 * 132) if narrow else m.tiles(1, 2048, 4, 1, every)


def tiles_backward(m: Matrix, K: int, size: int, frozen: bool = False) -> Tiles:
    if interpreting():
        return m.tiles(64, 256, 4, 1, 4)
    narrow = size == 2
    if m.layout == 1:
        if K == 2 and narrow:
            return m.tiles(2, 256, 1, 5, 8 * 132)
        return m.tiles(2, 128, 1, 5, 8 * 132) if K < 4 else m.tiles(1, 128, 1, 4, 8 * 132)
    if frozen:
        return m.tiles(1, 1024, 4, 1, 128 * 132)
    if K == 3 and narrow:
        return m.tiles(1, 1024, 2, 3, 8 * 132)
    return m.tiles(1, 512, 2, 5, (16 if K < 4 else 8) * 132)


Codes = tuple[int, ...]
Steps = tuple[int, ...]


class Parameters(NamedTuple):
    """What the kernels read: tau, rho, theta, shift, s, c, and between rows and groups of each."""

    tensors: tuple[Tensor, ...]
    steps: Steps  # (row, group) of tau, theta, s, c

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Parameters:
        """From tau, theta, s and c of shape (rows, G) or (rows, 1), or all six, whole."""
        if len(tensors) == 6:
            G = tensors[4].numel() // tensors[4].shape[0]
            return cls(tuple(tensors), (G, int(G > 1)) * 4)
        tau, theta, s, c = tensors
        steps = [n for t in tensors for n in (t.stride(0), t.stride(1) if t.shape[1] > 1 else 0)]
        return cls((tau, tau, theta, theta, s, c), tuple(steps))


DIGITS = {0.0: 1, 1.0: 2, -1.0: 3}


def code_of(numbers: Numbers) -> int:
    """A base-4 digit for each row: 0 for one in memory, else the number 0, 1 or -1."""
    digits = [0 if number is None else DIGITS.get(number, 0) for number in numbers]
    return sum(digit * 4**k for k, digit in enumerate(digits))


def packed(numbers: Numbers, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A parameter's rows, tensors given flat in memory order, as (rows, G) for a kernel to read."""
    rest, loaded = iter(tensors), []
    for number in numbers:
        if number is None or number not in DIGITS:
            loaded.append(next(rest) if number is None else _constant(number, device))
    if not loaded:
        return _constant(0.0, device).view(1, 1)
    return _stacked(loaded)


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


def codes(form: Form, digits: Sequence[int], role: int, learned: int = 0) -> Codes:
    """What a kernel knows when it is compiled, in the order in which it takes it."""
    mode = HARD if form.hard else 2 if len(form.tau) == 1 else 3
    if form.K == 2 and not form.hard:
        mode = int(form.centred)
    owners = sum(2**k for k, owner in enumerate(form.owner or ()) if owner == "hi")
    return *digits, owners, form.K, mode, role, learned


def forward(
    x: Tensor, other: Tensor | None, p: Parameters, codes: Codes, sizes: tuple[int, ...]
) -> Tensor:
    """y of x, which lies in memory as `sizes` say: (outer, G, inner)."""
    y = torch.empty_like(x)
    ready = prepared("blend_forward", sizes, x.element_size(), codes, p.steps)
    ready.run((x, x if other is None else other, y, *p.tensors))
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    p: Parameters,
    codes: Codes,
    wanted: tuple[bool, ...],
    sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dother, sums per row of a wanted parameter and group); the first two only if wanted."""
    known = (*codes, *wanted)
    run, shape, axis = prepared("blend_backward", sizes, x.element_size(), known, p.steps)
    dx, dother = [torch.empty_like(x) if w else x for w in wanted[:2]]
    sums = x.new_empty(shape, dtype=torch.float32)
    run((x, x if other is None else other, dy, dx, dother, sums, *p.tensors))
    return dx, dother, total(sums, axis)


def total(sums: Tensor, axis: int) -> Tensor:
    """The second stage: parts added up, where there are several."""
    return sums.sum(axis) if sums.shape[axis] > 1 else sums.select(axis, 0)


def count(codes: Sequence[int], wanted: Sequence[int]) -> int:
    """How many rows of sums the wanted parameters have."""
    K, taus = codes[5], codes[5] - 1 if codes[6] == 3 else 1
    return sum(n for n, w in zip((taus, K - 1, K, K), wanted[2:], strict=True) if w)


def readable(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gate tensors as kernels read them; only mixed precision and odd views are copied for it."""
    for t in tensors:
        if t.dtype != torch.float32 or not t.is_contiguous():
            return tuple([w.detach().float().contiguous() for w in tensors])
    return tensors


_address, _device = Tensor.data_ptr, Tensor.get_device  # mapped, they take two thirds of the time


class Launch:
    """A kernel for a grid, with all but its tensors: to be called with these again and again.

    Once compiled, it is called past Triton's own look-up, which takes longer than small kernels
    run; with the addresses in place of the tensors, which Triton would ask for one by one.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], warps: int, rest: Sequence[Any]) -> None:
        self.kernel, self.warps, self.rest = kernel, warps, tuple(rest)
        self.grid = (*grid, 1, 1)[:3]
        self.ready: dict[Any, Callable[..., None]] = {}

    def __call__(self, tensors: tuple[Tensor, ...], kinds: Any = None) -> None:
        """Run; `kinds` stands for the types of the tensors, if the caller knows them."""
        x = tensors[0]
        if not x.is_cuda or (kinds is None and type(x) not in (Tensor, torch.nn.Parameter)):
            self._ordinary(tensors)
            return
        places = [*map(_address, tensors)]
        odd = functools.reduce(operator.or_, places) & 15
        # Triton compiles anew for other types and for addresses that are no multiples of 16.
        device: int = x.get_device()
        key = device, tuple([t.dtype for t in tensors]) if kinds is None else kinds
        run = self.ready.get(key)
        if {*map(_device, tensors)} != {device}:  # an address does not say where it lies
            devices = ", ".join(sorted({str(t.device) for t in tensors}))
            raise RuntimeError(
                f"gates and input must be on one device, got {devices}; "
                "move the module and its input with .to(device)."
            )
        if run is not None and not odd and torch._C._cuda_getDevice() == device:
            run(*places, *self.rest)
            return
        with torch.cuda.device(x.device):
            compiled = self._ordinary(tensors)
        if not odd:
            self.ready[key] = _runner(compiled, self.grid, device)

    def _ordinary(self, tensors: tuple[Tensor, ...]) -> Any:
        kernel = self.kernel
        if type(tensors[0]) not in (Tensor, torch.nn.Parameter):  # a graph is made: see `ops`
            kernel = torch.library.wrap_triton(kernel)
        return kernel[self.grid](*tensors, *self.rest, num_warps=self.warps)


def _runner(compiled: Any, grid: tuple[int, ...], device: int) -> Callable[..., None]:
    """A compiled kernel as a function of its arguments, on the current stream of its device.

    `compiled[grid]` does more for each launch before it comes to its C function: it asks for the
    device and for memory that our kernels do not need, and describes the launch to absent hooks.
    """
    from triton import knobs

    ordinary: Callable[..., None] = compiled[grid]
    fixed = _fixed(compiled)
    if fixed is None:
        return ordinary
    launch, as_tuple = compiled.run.launch, fixed[-1] is not None
    stream, hooks = torch._C._cuda_getCurrentRawStream, knobs.runtime
    # lists, to which someone may add later
    enter, leave = (
        getattr(hook, "calls", True) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook)
    )

    def direct(*arguments: Any) -> None:
        if enter or leave:  # someone, as Triton's profiler, wants to know of every launch
            ordinary(*arguments)
        elif as_tuple:
            launch(*grid, stream(device), *fixed, arguments)
        else:
            launch(*grid, stream(device), *fixed, *arguments)

    return direct


def _fixed(compiled: Any) -> tuple[Any, ...] | None:
    """What Triton's C function takes between the stream and the arguments of the kernel.

    Triton 3.6 takes these one by one, 3.7 as one tuple and their types before it. None for any
    other and for kernels that need memory of their own: they are launched by Triton's own means.
    """
    from triton import __version__ as version

    run, metadata = compiled.run, compiled.packed_metadata
    known = version.startswith(("3.6.", "3.7.")) and type(run).__name__ == "CudaLauncher"
    if not known or run.global_scratch_size or run.profile_scratch_size:
        return None
    first = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    # The Nones: two memories, what the hooks are told, the two hooks.
    if version.startswith("3.6."):
        return *first, None, None, metadata, None, None, None
    types = run.arg_annotations, run.kernel_signature
    return *first, metadata, None, None, None, None, None, *types


class Prepared(NamedTuple):
    """A kernel for memory of one shape."""

    run: Launch
    sums: tuple[int, int, int]  # what backward writes: parts, rows of parameters, groups, or
    axis: int  # for one group: rows, groups, parts; this is the axis of the parts


@functools.lru_cache(4096)
def prepared(name: str, sizes: tuple[int, ...], size: int, known: Codes, steps: Steps) -> Prepared:
    from threshold_gating.kernels import device

    m, K = Matrix.of(sizes), known[5]
    rows = count(known, known[9:]) if name == "blend_backward" else 0
    mode, frozen = known[6], known[8] >= 16
    # Two branches without sums are as much work back as forth.
    if name == "blend_forward" or (K == 2 and not rows):
        tiles = tiles_forward(m, K, size, mode, frozen)
    else:
        tiles = tiles_backward(m, K, size, frozen)
    layout = (m.layout, tiles.rows, tiles.columns, tiles.stages)
    rest = (*steps, m.R, m.N, m.G, tiles.iters, *map(int, known), *layout)
    across, along = m.grid(tiles)
    parts = along * (m.R // m.G if m.layout == 2 else 1)
    sums, axis = ((parts, rows, m.G), 0) if m.layout else ((rows, 1, parts), 2)
    run = Launch(getattr(device, name), (across * along,), tiles.warps, rest)
    return Prepared(run, sums, axis)


def adding(sums: tuple[int, int, int], axis: int, rows: Sequence[int]) -> Launch | None:
    """A kernel for the second stage, from sums to four tensors that get these rows.

    None for one large part, which is no more than views away. Views of a small one take longer.
    """
    from threshold_gating.kernels import device

    parts, G = sums[axis], sums[2] if axis == 0 else 1
    if parts == 1 and G > 2**16:
        return None
    steps = (sum(rows) * G, G) if axis == 0 else (1, parts)
    # narrow ones where wide ones would not give every processor one
    tile = (1024, 1) if axis else (16, 64) if sum(rows) * G >= 64 * 132 else (256, 8)
    grid = sum(rows) * -(-G // tile[1])
    return Launch(device.add_parts, (grid,), 4, (parts, G, *steps, *rows[:3], *tile))
