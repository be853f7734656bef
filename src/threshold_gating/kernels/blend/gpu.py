"""The engine for GPUs: which kernel of Triton runs for a structure, in which tiles, and its sums.

Memory is (outer, G, inner), as `layout` says. Triton is imported when a kernel first runs. What
Python does for a call is kept small, because on a GPU it often takes longer than the kernels:
everything that does not depend on values is decided once, in a `Plan`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels import runtime
from threshold_gating.kernels.layout import Layout, Sizes, like, placed
from threshold_gating.kernels.runtime import Launch, interpreting
from threshold_gating.kernels.structure import (
    DIGITS,
    Gate,
    Held,
    Numbers,
    Role,
    Shape,
    Structure,
    Wanted,
    check_fits,
)
from threshold_gating.kernels.weights import Weights

MANY_GROUPS = 2**16  # the parameters of more do not stay in a cache
FEW_TILES = 16  # are summed by one program: a second launch takes longer


class Constants(NamedTuple):
    """A structure as kernels are compiled for it, in the order in which they take it.

    Of tau, theta, s and c one base-4 digit a row: 0 if it is in memory, else the number 0, 1 or -1.
    """

    tau: int
    theta: int
    s: int
    c: int
    owners: int  # a bit for each threshold that belongs to the region above it
    K: int
    gate: int
    role: int
    sharpened: int  # tau = tau0 exp(rho)
    moved: int  # theta = theta0 + dtheta
    anchored: int
    weights: int

    @classmethod
    def of(cls, structure: Structure, role: Role) -> Constants:
        owners = [2**k for k, o in enumerate(structure.owner or ()) if o == "hi"]
        return cls(
            _digits(structure.tau),
            _digits(structure.theta),
            _digits(structure.s),
            _digits(structure.c),
            sum(owners),
            structure.K,
            int(structure.gate),
            int(role),
            int("tau" in structure.learned),
            int("theta" in structure.learned and not structure.ordered),  # sorted: moved already
            int(structure.anchored),
            int(structure.weights),
        )

    def rows(self, wanted: Wanted) -> list[int]:
        """How many sums there are for the gradients of tau, theta, s and c."""
        taus = self.K - 1 if self.gate == Gate.OWN_TAUS else 1
        counts = (taus, self.K - 1, self.K, self.K)
        return [n if w else 0 for n, w in zip(counts, wanted[2:], strict=True)]

    def sums(self, wanted: Wanted) -> int:
        """How many sums a program writes: those, and the two of a norm."""
        return sum(self.rows(wanted)) + (2 if self.role in (Role.NORMED, Role.JOINED) else 0)


def _digits(numbers: Numbers) -> int:
    return sum([(DIGITS.index(n) + 1) * 4**k for k, n in enumerate(numbers) if n in DIGITS])


def numbers_of(digits: int, count: int) -> Numbers:
    """What `_digits` was given: numbers where it had them."""
    return tuple([(None, *DIGITS)[digits // 4**k % 4] for k in range(count)])


class Tiles(NamedTuple):
    """How a kernel is cut up: rows and columns of a tile, tiles of a program, warps, stages, tiles
    of a turn of the loop."""

    rows: int
    columns: int
    iters: int
    warps: int
    stages: int
    turn: int


class Matrix(NamedTuple):
    """Memory as the kernels see it: R x N values and how G parameters vary, see `kernels`."""

    R: int
    N: int
    G: int
    layout: Layout

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Matrix:
        outer, G, inner = sizes
        if G == 1:
            return cls(1, outer * inner, 1, Layout.ONE)
        if inner == 1:
            return cls(outer, G, G, Layout.COLUMNS)
        return cls(outer * G, inner, G, Layout.ROWS)

    def tiles(
        self, rows: int, columns: int, warps: int, stages: int, programs: int, turn: int = 1
    ) -> Tiles:
        """Tiles of at most this size, as many to a program as leave about `programs` of them."""
        most = rows * columns
        if self.layout != Layout.ONE:  # few columns make more rows: a thread has as much to do
            columns = min(_power_of_two(self.N), columns)
            rows = min(most // columns, _power_of_two(self.R))
        across, along = self._counts(rows, columns)
        turn = min(turn, _power_of_two(along))
        iters = -(-along // max(1, programs // across))
        return Tiles(rows, columns, _up_to(turn, iters), warps, stages, turn)

    def whole(self, t: Tiles) -> bool:
        """Whether every tile of every turn is inside."""
        if self.layout == Layout.ONE:
            return self.N % (t.rows * t.columns * t.turn) == 0
        down, right = (t.turn, 1) if self.layout == Layout.COLUMNS else (1, t.turn)
        return self.R % (t.rows * down) == 0 and self.N % (t.columns * right) == 0

    def _counts(self, rows: int, columns: int) -> tuple[int, int]:
        """How many tiles there are across, and along the axis of the sums."""
        if self.layout == Layout.ONE:
            return 1, -(-self.N // (rows * columns))
        down, right = -(-self.R // rows), -(-self.N // columns)
        return (right, down) if self.layout == Layout.COLUMNS else (down, right)

    def along(self, t: Tiles) -> int:
        """How many tiles there are along the axis of the sums."""
        return self._counts(t.rows, t.columns)[1]

    def grid(self, t: Tiles) -> tuple[int, int]:
        """Programs across, and along the axis of the sums."""
        across, along = self._counts(t.rows, t.columns)
        return across, -(-along // t.iters)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _up_to(step: int, n: int) -> int:
    return -(-n // step) * step


def tiles_forward(m: Matrix, size: int, known: Constants) -> Tiles:
    """By layout, bytes of an element, branches and what is known of their weights.

    Swept on an H200, 16384 x 4096.
    """
    K, frozen = known.K, known.weights != Weights.UNKNOWN
    if interpreting():
        return m.tiles(32, 256, 4, 1, 4, 2)
    every, narrow = 2**31, size == 2
    if m.layout == Layout.COLUMNS:
        # Where the parameters of all groups do not stay in a cache, each is read by one program.
        once = m.G > MANY_GROUPS
        if K == 2 and once:
            return m.tiles(8, 256, 2, 4, 1)
        if K == 2 and narrow:
            # Hard gates are done before memory is read, and long programs need enough to do.
            if known.gate == Gate.HARD:
                return m.tiles(16, 256, 4, 1, every)
            long = m.R * m.N >= 2**25
            return m.tiles(16, 256, 2, 3, 32 * 132) if long else m.tiles(8, 256, 1, 1, every)
        if K == 2:
            return m.tiles(4, 512, 4, 1, every)
        if narrow:
            return m.tiles(1, 256 if K < 7 else 128, 1, 3, (16 if K == 3 else 8) * 132, 4)
        return m.tiles(1, 128, 1, 3, 1 if once else 256 * 132, 4)
    if K == 2 or frozen:
        return m.tiles(1, 1024, 4, 1, every, 1 if K == 2 else 2)
    return m.tiles(1, 1024, 4, 1, 64 * 132, 2) if narrow else m.tiles(1, 2048, 4, 1, every)


def tiles_backward(m: Matrix, size: int, known: Constants) -> Tiles:
    K, frozen = known.K, known.weights != Weights.UNKNOWN
    if interpreting():
        return m.tiles(32, 256, 4, 1, 4, 2)
    narrow = size == 2
    if m.layout == Layout.COLUMNS:
        if K == 2 and narrow:
            return m.tiles(1, 256, 1, 5, 12 * 132)
        if K == 2:
            return m.tiles(2, 128, 1, 5, 8 * 132)
        # more branches for as many columns have no room in registers
        return m.tiles(1, 128 if K < 7 else 64, 1, 3, (12 if K == 3 and narrow else 8) * 132, 4)
    if frozen:
        return m.tiles(1, 1024, 4, 1, 128 * 132)
    if K == 2:
        return m.tiles(1, 512, 2, 5, 16 * 132)
    programs = (12 if K == 3 else 8) * 132
    if m.layout == Layout.ROWS:
        return m.tiles(1, 256, 1, 5, programs)
    return m.tiles(1, 256, 1, 3, programs, 2)


class Prepared(NamedTuple):
    """A kernel for memory of one shape."""

    run: Launch
    sums: tuple[int, int, int]  # what backward writes: parts, rows of parameters, groups, or
    axis: int  # for one group: rows, groups, parts; this is the axis of the parts


@functools.lru_cache(4096)
def prepared(
    known: Constants, sizes: Sizes, size: int, wanted: Wanted | None = None, apart: bool = False
) -> Prepared:
    """The kernel for elements of `size` bytes: forward, or backward for the wanted gradients.

    Backward writes its sums to four tensors. They are one tensor, four times; but if `apart` and
    there is one part, each is the gradient itself, of tau, theta, s and c.
    """
    from threshold_gating.kernels.blend import kernels

    m = Matrix.of(sizes)
    rows = known.sums(wanted) if wanted else 0
    # Two branches without sums are as much work back as forth.
    light = wanted is None or (known.K == 2 and not rows)
    tiles = (tiles_forward if light else tiles_backward)(m, size, known)
    if rows and m.along(tiles) <= FEW_TILES:
        tiles = tiles._replace(iters=_up_to(tiles.turn, max(1, m.along(tiles))))
    across, along = m.grid(tiles)
    parts = along * (m.R // m.G if m.layout == Layout.ROWS else 1)
    back = () if wanted is None else (*map(int, wanted), int(apart and parts == 1))
    rest = (m.R, m.N, m.G, tiles.iters, *known, *back, int(m.layout))
    sums, axis = ((rows, 1, parts), 2) if m.layout == Layout.ONE else ((parts, rows, m.G), 0)
    kernel = kernels.blend_forward if wanted is None else kernels.blend_backward
    cut = tiles.rows, tiles.columns, tiles.stages, tiles.turn, int(m.whole(tiles))
    return Prepared(Launch(kernel, (across * along,), tiles.warps, (*rest, *cut)), sums, axis)


def adding(
    sums: tuple[int, int, int], axis: int, rows: Sequence[int], apart: bool = True
) -> Launch | None:
    """A kernel for the second stage, from sums to four tensors that get these rows.

    If they are not to be `apart`, the first gets all: a compiler sees one tensor that is written.
    None for a single part: no second launch.
    """
    from threshold_gating.kernels.blend.sums import add_parts

    parts, G = sums[axis], sums[2] if axis == 0 else 1
    if parts == 1:
        return None
    steps = (sum(rows) * G, G) if axis == 0 else (1, parts)
    # narrow ones where wide ones would not give every processor one; all parts at once, if they fit
    tile = (1024, 1) if axis else (64, 64) if sum(rows) * G >= 64 * 132 else (2048, 8)
    tile = min(_power_of_two(parts), tile[0]), tile[1]
    grid = sum(rows) * -(-G // tile[1])
    return Launch(add_parts, (grid,), 8, (parts, G, *steps, *rows[:3], int(apart), *tile))


class _Backward(NamedTuple):
    """A kernel for gradients, its sums and their strides, the kernel that adds them up."""

    run: Launch
    sums: tuple[int, int, int]
    stride: tuple[int, int, int]
    add: Launch | None
    whose: list[int]  # of tau, theta, s, c


class Plan:
    """The kernels of one structure for inputs of one shape, layout and type."""

    def __init__(
        self, structure: Structure, role: Role, sizes: Sizes, copies: bool, size: int, shape: Shape
    ) -> None:
        self.structure, self.role, self.shape, self.copies = structure, role, shape, copies
        self.sizes, self.size = sizes, size
        self.known = Constants.of(structure, role)
        self.run = prepared(self.known, sizes, size).run
        self.over = prepared(self.known._replace(role=int(Role.KEPT)), sizes, size).run
        self.ready: dict[Wanted, _Backward] = {}  # backward passes that ran

    def read(self, x: Tensor, tensors: Held) -> tuple[Tensor, ...]:
        """What the kernels read: tau, rho, theta, shift, s, c."""
        check_fits(self.structure, tensors, self.sizes[1])
        return runtime.readable(read(self.structure, tensors, self.sizes[1], x.device))

    def forward(self, x: Tensor, other: Tensor | None, given: tuple[Tensor, ...]) -> Tensor:
        y = torch.empty_like(x)
        self.run.beside((x, x if other is None else like(other, x)), (y,), given)
        return y

    def overwrite(self, x: Tensor, kept: Tensor | None, given: tuple[Tensor, ...]) -> None:
        """y over x, which is copied to `kept`, if that is there."""
        if kept is None:
            self.run((x, x, x, *given), x.dtype)
        else:
            self.over((x, kept, x, *given), x.dtype)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        other: Tensor | None,
        tensors: Held,
        given: tuple[Tensor, ...],
        wanted: Wanted,
    ) -> list[Tensor | None]:
        """The gradients of x, the other input, tau, theta, s and c."""
        # autograd does not see it when `w.data = ...` puts other memory into a parameter
        check_fits(self.structure, tensors, self.sizes[1])
        given = runtime.readable(given)
        found = self.ready.get(wanted) or self._prepare(wanted)
        dy = like(dy, x)
        dx = torch.empty_like(x) if wanted.x else None
        dother = torch.empty_like(x) if wanted.other else None
        second = x if other is None else like(other, x)
        learned = given[1], *given[3:]  # rho, shift, s, c
        grads: list[Tensor | None] = [None, None, None, None]
        into = [given[1]] * 4  # of float32; nothing is written to what is not wanted
        for k in found.whose:
            grads[k] = into[k] = torch.empty_like(learned[k])
        sums = into
        if found.add is not None:  # strided, because `new_empty` takes twice as long
            sums = [x.new_empty_strided(found.sums, found.stride, dtype=torch.float32)] * 4
        to = x if dx is None else dx, x if dother is None else dother, *sums
        found.run.beside((x, second, dy), to, given)
        if found.add is not None:
            found.add((sums[0], *into), torch.float32)
        return [dx, dother, *grads]

    def _prepare(self, wanted: Wanted) -> _Backward:
        run, sums, axis = prepared(self.known, self.sizes, self.size, wanted, True)
        rows = self.known.rows(wanted)
        whose = [k for k in range(4) if rows[k]]
        add = adding(sums, axis, rows) if whose else None
        stride = sums[1] * sums[2], sums[2], 1
        self.ready[wanted] = made = _Backward(run, sums, stride, add, whose)
        return made


@functools.lru_cache(4096)
def plan(
    structure: Structure,
    role: Role,
    sizes: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    shape: Shape,
) -> Plan | None:
    """The plan for an input of these sizes; None if its groups are not one run of axes."""
    found = placed(sizes, stride, shape)
    return None if found is None else Plan(structure, role, *found, dtype.itemsize, shape)


def read(
    structure: Structure, tensors: Held, group: int, device: torch.device
) -> tuple[Tensor, ...]:
    """tau, rho, theta, shift, s and c; another stands for one that no kernel reads."""
    rho, dtheta, s, c, tau, theta = tensors
    if theta is None:
        theta = known_rows(structure.theta, group, device)
    if structure.gate == Gate.HARD:
        tau = theta
    elif tau is None:
        tau = known_rows(structure.tau, group, device)
    s = known_rows(structure.s, group, device) if s is None else s
    c = known_rows(structure.c, group, device) if c is None else c
    shift = theta if dtheta is None else dtheta
    return tau, tau if rho is None else rho, theta, shift, s, c


def known_rows(numbers: Numbers, group: int, device: torch.device) -> Tensor:
    """Rows that a call has given as numbers."""
    made = _made_rows if torch.compiler.is_compiling() else _kept_rows
    return made(numbers, group, device)


def _made_rows(numbers: Numbers, group: int, device: torch.device) -> Tensor:
    # a product keeps a number that varies in its graph; `torch.full` compiles a graph for each
    ones = torch.ones((1, group), device=device)
    return torch.cat([ones * (0.0 if n is None else n) for n in numbers])


_kept_rows = functools.lru_cache(4096)(_made_rows)
