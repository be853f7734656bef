"""Soft gates on a CPU in one pass over memory, by C code that is compiled here, where it can be.

It takes what nearly always comes: two to eight soft branches, float32 or 16 bits, weights that fit
float32, finite results, and tensors that are plain memory, of which C can be given the address.
`cpu.Plan` goes on with `tiles` where a function here gives None. The environment variable TG_CPU
says what evaluates gates on a CPU: "torch" leaves this module out, "c" makes it an error where
there is no compiler, "auto" (the default) takes it where it runs.

Threads are those of the OpenMP library that torch has loaded, called by address: a second one in
the process would have threads of its own. A process that was forked has none of them and takes one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels import host
from threshold_gating.kernels.backend import BackendError
from threshold_gating.kernels.compiler import CompilerError, library
from threshold_gating.kernels.layout import Sizes, like
from threshold_gating.kernels.structure import Gate, Held, Structure, Tensors
from threshold_gating.kernels.weights import Weights

_SOURCE = Path(__file__).with_name("blend.c")
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MIRRORED = 5
# Largest exponent of two of a weight. With a tau for each threshold tau (x - theta) is the sum of
# two, whose roundings are as large as they are.
_WIDEST, _WIDEST_OF_SUMS = 60.0, 24.0
_CHUNK = 2**14  # elements that a thread takes at once
_GROUPS = 32  # of a chunk, at most, where each is a run of elements
_COLUMNS = 256  # of a chunk whose sums are for each column
_FEW_SUMS = 2**14  # numbers for which the code has room by itself, FEW in `blend.c`
CHOICES = ("auto", "torch", "c")
_NOTHING = Tensors()


def chosen() -> str:
    """What the environment wants."""
    name = os.environ.get("TG_CPU") or "auto"
    if name not in CHOICES:
        raise BackendError(f"TG_CPU is one of {', '.join(CHOICES)}; got {name!r}.")
    return name


_wanted = chosen()
_may_start = ctypes.c_int(True)  # threads; never another object, for C++ has its address


def _forked() -> None:
    _may_start.value = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _team() -> int:
    """The address of what starts threads in torch's OpenMP; 0 where it has no such function."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


_TEAM = _team()


@dataclass(frozen=True, eq=False)
class Code:
    """The functions of `blend.c` for one kind of gates."""

    blend: Any
    fold: Any
    half: bool  # whether the compiler has float16
    K: int
    taus: int
    folded: int  # rows of folded parameters
    widest: float  # largest exponent of two of a weight

    @functools.cached_property
    def rows(self) -> tuple[int, int, int, int]:
        """Rows of tau, theta, s and c, and of their gradients."""
        return self.taus, self.K - 1, self.K, self.K

    @functools.cached_property
    def count(self) -> int:
        return sum(self.rows)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each of `Tensors`."""
        return *self.rows, *self.rows[:2]


@functools.cache
def code(K: int, gate: int) -> Code | str:
    """The compiled functions, or why there are none."""
    try:
        made = _functions(K, gate)
    except CompilerError as error:
        if _wanted == "c":
            raise BackendError(f"TG_CPU=c asks for compiled gates, but {error}.") from error
        return str(error)
    return _wrong(made) or made


def _functions(K: int, gate: int) -> Code:
    made = library(_SOURCE, (f"K={K}", f"GATE={gate}"))
    try:
        blend, fold, has_half = made.blend, made.fold, made.has_half
    except AttributeError as error:
        raise CompilerError(f"what the compiler made lacks a function ({error})") from None
    address, long = ctypes.c_void_p, ctypes.c_long
    blend.argtypes = [*[address] * 10, *[ctypes.c_int] * 3, ctypes.c_uint, address]
    fold.argtypes, fold.restype = [*[address] * 7, long, address], ctypes.c_double
    taus = K - 1 if gate in (Gate.OWN_TAUS, _MIRRORED) else 1
    widest = 0.0 if K == 2 else _WIDEST if taus == 1 else _WIDEST_OF_SUMS
    return Code(blend, fold, bool(has_half()), K, taus, folded_rows(K, taus), widest)


def folded_rows(K: int, taus: int) -> int:
    """Numbers that are read for each group."""
    return 3 * taus + 6 * K + 1


def _wrong(made: Code) -> str:
    """What is wrong with what the compiler made, or nothing: a few points against float64."""
    K = made.K
    taus = [1.3 + 0.1 * min(m, K - 2 - m) for m in range(made.taus)]
    thetas, slopes = [m - K / 2 + 0.7 for m in range(K - 1)], [(-1.0) ** k for k in range(K)]
    rows = [_row(row) for row in (taus, thetas, slopes, [1.0, *slopes[:-1]])]
    for dtype in _TYPES if made.half else (torch.float32, torch.bfloat16):
        for group in (1, 3):  # a run of elements, and columns
            each = [torch.stack([row + 0.1 * g for g in range(group)], 1) for row in rows]
            x = _row([0.3 * n - 6 for n in range(39)]).to(dtype).view(-1, group)
            error = _error(made, x, each)
            # an argument is off by a rounding of K tau x, a result of 16 bits by its own
            narrow = torch.finfo(dtype).eps if x.element_size() < 4 else 0.0
            if not error <= 20 * K * torch.finfo(torch.float32).eps + 4 * narrow:
                return f"the code that the compiler made is off by {error:.1e} in {dtype}"
    return ""


def _row(numbers: Sequence[float]) -> Tensor:
    """Whatever the defaults of the process are."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _error(made: Code, x: Tensor, rows: Sequence[Tensor]) -> float:
    """How far y, dx and the gradients of tau, theta, s and c (rows, G) are off, at x (N, G).

    Against differences in float64, of parameters all at once: autograd may not run in a process
    that was forked. They are off by 1e-8.
    """
    group, z = x.shape[1], x.double()
    sizes = (1, 1, len(x)) if group == 1 else (len(x), group, 1)
    known = _doubles([None] * made.count)
    held = Tensors(None, None, *rows[2:], *rows[:2])
    ready = _filled(Kind(made, known, True), held, group)
    if ready is None:
        return math.inf
    y, found = ready.forward(x, sizes), ready.backward(x, x, sizes, rows)
    if y is None or found is None:
        return math.inf
    along = [torch.linspace(1, 0.5, len(w), dtype=z.dtype, device="cpu")[:, None] for w in rows]

    def value(dx: float, step: float) -> Tensor:
        tau, *rest = (list(w + step * d) for w, d in zip(rows, along, strict=True))
        return primitive.blend(z + dx, tau if len(tau) > 1 else tau[0], *rest)

    h, moved = 1e-4, torch.zeros_like(z[0])
    for grad, d in zip(found[1], along, strict=True):
        assert grad is not None  # all are asked for
        moved += (grad * d).sum(0)
    pairs = (
        (y, value(0, 0)),
        (found[0], (value(h, 0) - value(-h, 0)) / (2 * h) * z),
        (moved, ((value(0, h) - value(0, -h)) / (2 * h) * z).sum(0)),
    )
    errors = [(have - want).abs().max() / (1 + want.abs().max() / 7) for have, want in pairs]
    return float(torch.stack(errors).max())  # NaN if one is


def status() -> tuple[bool, str]:
    """Whether soft gates run compiled here, and how or why not, in words."""
    if _wanted == "torch":
        return False, "not compiled: TG_CPU=torch"
    made = code(2, int(Gate.TWO))
    if isinstance(made, str):
        return False, f"not compiled: {made}"
    threads = "threads of torch's OpenMP" if _TEAM else "one thread, for torch has no GOMP_parallel"
    return True, f"compiled C, {threads}" + ("" if made.half else ", not for float16")


def takes(K: int, gate: int, dtype: torch.dtype) -> bool:
    """Whether soft gates of this kind run compiled here."""
    if _wanted == "torch" or gate == Gate.HARD or dtype not in _TYPES:
        return False
    made = code(K, gate)
    return not isinstance(made, str) and (made.half or dtype != torch.float16)


class Ready(NamedTuple):
    """Code with the parameters that it reads, (rows, G) of float32."""

    code: Code
    parameters: Any
    constants: bool  # whether a branch has one

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor | None:
        """y, or None where it is not all finite."""
        y, cut = torch.empty_like(x), _cut(sizes, False)
        at = x.data_ptr(), None, y.data_ptr(), self.parameters, None, None, None, None, None
        return None if self._is_strange(at, x.dtype, cut) else y

    def backward(
        self, dy: Tensor, x: Tensor, sizes: Sizes, learned: Held
    ) -> tuple[Tensor, list[Tensor | None]] | None:
        """dx and the gradients of what is `learned` of tau, theta, s and c, in memory of their own:
        views of one would take longer than the arithmetic. None where they are not all finite, or
        a tensor has another shape than when it was read."""
        if torch._C._len_torch_dispatch_stack() > 0 or not (_is_plain(x) and _is_plain(dy)):
            return None
        grads: list[Tensor | None] = []
        places: list[int | None] = []
        for w, rows in zip(learned, self.code.rows, strict=True):
            if w is None:
                grads.append(None)
                places.append(None)
            elif w.numel() != rows * sizes[1] or (rows > 1 and w.size(0) != rows):
                return None
            else:
                grads.append(new := _room_for(w))
                places.append(new.data_ptr())
        dx = self.backward_into(like(dy, x), x, sizes, places)
        return None if dx is None else (dx, grads)

    def backward_into(
        self, dy: Tensor, x: Tensor, sizes: Sizes, places: Sequence[int | None]
    ) -> Tensor | None:
        """dx; the gradients of tau, theta, s and c that have an address are written there. None
        where they are not all finite."""
        dx, cut, room = torch.empty_like(x), _cut(sizes, any(places)), None
        if (count := cut.slots * self.code.count * sizes[1]) > _FEW_SUMS:
            room = torch.empty(count, dtype=torch.float32)
        sums = None if room is None else room.data_ptr()
        at = x.data_ptr(), dy.data_ptr(), dx.data_ptr(), self.parameters, sums, *places
        return None if self._is_strange(at, x.dtype, cut) else dx

    def _is_strange(self, at: tuple[Any, ...], dtype: torch.dtype, cut: _Cut) -> int:
        """Run; whether anything that came out is not finite."""
        threads = 1
        if cut.chunks > 1 and _TEAM and _may_start.value:
            threads = min(torch.get_num_threads(), cut.chunks)
        back = at[1] is not None
        strange: int = self.code.blend(
            *at, cut.sizes, _TYPES[dtype], self.constants, back, threads, _TEAM
        )
        return strange


class _Cut(NamedTuple):
    """How work is cut into chunks; `sizes` as `blend.c` takes it, `slots` for sums if there are."""

    sizes: Any
    chunks: int
    slots: int


@functools.lru_cache(4096)
def _cut(sizes: Sizes, summed: bool) -> _Cut:
    outer, group, inner = sizes
    lane = inner == 1 and group > 1
    width = group if lane else inner
    columns = min(width, _COLUMNS if lane and summed else _CHUNK)
    groups = 1 if lane else max(1, min(group, _GROUPS, _CHUNK // columns))
    rows = min(outer, max(1, _CHUNK // (columns * groups)))
    blocks, pieces = -(-outer // rows), -(-width // columns)
    slots = blocks if lane else blocks * pieces
    blocks = blocks if lane else blocks * -(-group // groups)
    slots = slots if summed else 0
    found = (ctypes.c_long * 9)(outer, group, inner, rows, groups, columns, blocks, pieces, slots)
    return _Cut(found, blocks * pieces, slots)


class Kind(NamedTuple):
    """The code for a structure, and its numbers as C reads them."""

    code: Code
    known: Any  # numbers, NaN for what is in a tensor
    constants: bool

    def read(self, at: Sequence[int | None], group: int) -> Ready | None:
        """The code with `Tensors` at these addresses, or None where it does not take them."""
        # memory of ctypes: a small tensor takes longer to make than its numbers to compute
        parameters = _floats(self.code.folded * group)()
        widest: float = self.code.fold(*at, self.known, group, parameters)
        fits = widest <= self.code.widest  # NaN does not
        return Ready(self.code, parameters, self.constants) if fits else None

    def for_host(self, dtype: torch.dtype, sizes: Sizes) -> dict[str, Any]:
        """What `host_one_pass.h` is to know, for memory of these sizes."""
        code = self.code
        cuts = [
            (tuple(c.sizes), c.chunks, c.slots) for c in (_cut(sizes, False), _cut(sizes, True))
        ]
        return {
            "blend": host.address(code.blend),
            "fold": host.address(code.fold),
            "team": _TEAM,
            "may start": ctypes.addressof(_may_start),
            "known": tuple(self.known),
            "count": code.count,
            "folded": code.folded,
            "widest": code.widest,
            "constants": self.constants,
            "type": _TYPES[dtype],
            "few": _FEW_SUMS,
            "plain": cuts[0],
            "summed": cuts[1],
        }


def ready(x: Tensor, structure: Structure, tensors: Held, group: int) -> Ready | None:
    """What evaluates these gates at x, or None where that is left to `tiles`."""
    # whoever looks at every op of torch is to see those of the gates
    if torch._C._len_torch_dispatch_stack() > 0 or x.is_neg():
        return None
    _, _, s, c, tau0, theta0 = tensors
    if s is None and c is None and tau0 is None and theta0 is None:
        return _known(structure, x.dtype)
    kind = kind_of(structure, x.dtype)
    return None if kind is None else _filled(kind, tensors, group)


@functools.lru_cache(4096)
def _known(structure: Structure, dtype: torch.dtype) -> Ready | None:
    """For a structure with all its numbers."""
    kind = kind_of(structure, dtype)
    return None if kind is None else _filled(kind, _NOTHING, 1)


@functools.lru_cache(4096)
def kind_of(structure: Structure, dtype: torch.dtype) -> Kind | None:
    gate, taus = int(structure.gate), structure.tau
    palindrome = None not in taus and taus == taus[::-1]
    if gate == Gate.OWN_TAUS and (palindrome or structure.weights == Weights.MIRRORED):
        gate = _MIRRORED
    if not takes(structure.K, gate, dtype):
        return None
    made = code(structure.K, gate)
    assert isinstance(made, Code)  # `takes` has seen that it is
    numbers = [w for row in (taus, structure.theta, structure.s, structure.c) for w in row]
    constants = any(c != 0 for c in structure.c)  # None is in a tensor
    return Kind(made, _doubles(numbers), constants)


def _doubles(numbers: Sequence[float | None]) -> Any:
    each = [math.nan if w is None else w for w in numbers]
    return (ctypes.c_double * len(each))(*each)


def _filled(kind: Kind, tensors: Held, group: int) -> Ready | None:
    """The code with these parameters, or None where it does not take them."""
    at: list[int | None] = []
    float32 = torch.float32
    for w, count in zip(tensors, kind.code.counts, strict=True):
        if w is None:
            at.append(None)
        elif (
            type(w) not in _PLAIN
            or not w.is_cpu
            or w.numel() != count * group
            or (count > 1 and w.size(0) != count)
        ):
            return None
        elif w.dtype is float32 and w.is_contiguous() and not w.is_neg():
            at.append(w.data_ptr())
        else:
            return _filled(kind, _copied(tensors), group)
    # one at 0 is a tensor without memory
    return None if 0 in at else kind.read(at, group)


@functools.lru_cache(256)
def _floats(count: int) -> Any:
    """The type of so many, which takes longer to make than they do."""
    return ctypes.c_float * count


_PLAIN = (torch.nn.Parameter, Tensor)


def _room_for(w: Tensor) -> Tensor:
    """Memory for the gradient of w, in float32, one number after the other."""
    if w.dtype is torch.float32 and w.is_contiguous():
        return torch.empty_like(w)
    return torch.empty(w.shape, dtype=torch.float32)


def _is_plain(t: Tensor) -> bool:
    """Whether t is memory that C may read as it is. One without any has the address 0."""
    return type(t) in _PLAIN and t.is_cpu and t.layout is torch.strided and not t.is_neg()


def _copied(tensors: Held) -> Tensors:
    """The same as float32, one number after the other."""
    each = [None if w is None else w.detach().float().contiguous().resolve_neg() for w in tensors]
    return Tensors(*each)
