"""The engine for eager mode on a CPU: one pass of compiled code over memory (`one_pass`), or steps
of torch over tiles that stay in a core's cache (`tiles`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.blend import one_pass, tiles
from threshold_gating.kernels.blend.arithmetic import Scratch, Sums
from threshold_gating.kernels.layout import Sizes, flat, like, placed
from threshold_gating.kernels.structure import (
    MOST_BRANCHES,
    Held,
    Role,
    Rows,
    Shape,
    Structure,
    Wanted,
    check_fits,
    rho_bound,
)

# Elements of a tile: K = 2 has some eight tiles in flight, more branches some twenty. Smaller ones
# would fit a nearer cache, but then calling torch costs more than the arithmetic.
_TILE = {True: 2**18, False: 2**17}
_MOST_KEPT = 2**16  # numbers of folded parameters that are kept however small x is
_MOST_ROWS = one_pass.folded_rows(MOST_BRANCHES, MOST_BRANCHES - 1)

Part = tuple[slice, slice, slice]


class Given(NamedTuple):
    """What was given, and the parameters as compiled code reads them, where it takes them."""

    tensors: Held
    ready: one_pass.Ready | None


@dataclass(frozen=True, eq=False)  # known by itself: to compare structures takes longer than a call
class Plan:
    """One structure for inputs of one shape and layout."""

    structure: Structure
    shape: Shape
    sizes: Sizes
    copies: bool
    role: Role = Role.READ  # of another input, if there is one

    def read(self, x: Tensor, tensors: Held) -> Given:
        return Given(tensors, None if self.reads_again() else self._ready(x, tensors))

    def _ready(self, x: Tensor, tensors: Held) -> one_pass.Ready | None:
        return one_pass.ready(x, self.structure, tensors, self.sizes[1])

    def reads_again(self) -> bool:
        """Whether what code reads is not kept until the backward pass: it is larger than x."""
        outer, group, inner = self.sizes
        if group * _MOST_ROWS <= _MOST_KEPT:
            return False
        rows = one_pass.folded_rows(self.structure.K, len(self.structure.tau))
        return group * rows > _MOST_KEPT and rows > outer * inner

    def _rows(self, x: Tensor, tensors: Held) -> Rows:
        """The parameters as they are now: numbers, or (1, G, 1) each."""
        structure = self.structure
        check_fits(structure, tensors, self.sizes[1])
        if self.sizes[1] == 1:
            return structure.numbers(tensors)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        K, many = structure.K, len(structure.tau) > 1
        tau = (K - 1, 1, -1, 1) if many else (1, -1, 1)  # one tau has no axis of rows
        theta, branches = (K - 1, 1, -1, 1), (K, 1, -1, 1)
        shapes = (tau, theta, branches, branches, tau, theta)
        each = [
            None if w is None else w.detach().to(dtype).reshape(shape)
            for w, shape in zip(tensors, shapes, strict=True)
        ]
        return structure.rows(each)

    def forward(self, x: Tensor, v: Tensor | None, given: Given) -> Tensor:
        ready = self._ready(x, given.tensors) if self.reads_again() else given.ready
        if ready is not None and v is None:
            done = ready.forward(x, self.sizes)
            if done is not None:
                return done
        work = self._tiles(x, v, self._rows(x, given.tensors))
        y = torch.empty_like(x)
        out = flat(y, self.sizes)
        for part in work.parts:
            here = out if part is None else out[part]
            made = tiles.forward(*work.read(part), here if x.element_size() >= 4 else None)
            if made is not here:
                here.copy_(made)
        return y

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        v: Tensor | None,
        tensors: Held,
        given: Given,
        wanted: Wanted,
    ) -> list[Tensor | None]:
        """The gradients of x, v, tau, theta, s and c."""
        ready = self._ready(x, tensors) if self.reads_again() else given.ready
        if ready is not None and v is None:
            learned = _learned(tensors, wanted)
            done = ready.backward(dy, x, self.sizes, learned)
            if done is not None:
                return [done[0], None, *map(_as_its_own, done[1], learned)]
        rows = self._rows(x, tensors)
        work, slopes = self._tiles(x, v, rows), flat(like(dy, x), self.sizes)
        if work.parts == [None]:
            here = work.read(None)
            found = tiles.backward(work.wide(slopes), *here, wanted)
            inputs = [_laid(d, x) if w else None for d, w in zip(found[:2], wanted, strict=False)]
            return [*inputs, *self._parameters(found.sums, tensors, rows, wanted)]
        inputs = [torch.empty_like(x) if w else None for w in wanted[:2]]
        outs = [None if d is None else flat(d, self.sizes) for d in inputs]
        totals: Sums | None = None
        for part in work.parts:
            here = work.read(part)
            found = tiles.backward(work.wide(slopes[part]), *here, wanted)
            for out, new in zip(outs, found[:2], strict=True):
                if out is not None and new is not None:
                    out[part] = new
            totals = self._added(totals, found.sums, part)
        assert totals is not None
        return [*inputs, *self._parameters(totals, tensors, rows, wanted)]

    def _tiles(self, x: Tensor, v: Tensor | None, rows: Rows) -> _Tiles:
        most, small = _TILE[self.structure.K == 2], x.numel() <= _TILE[self.structure.K == 2]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return _Tiles(
            self.structure,
            rows,
            flat(x, self.sizes),
            None if v is None else flat(like(v, x), self.sizes),
            [None] if small else list(_parts(self.sizes, most)),
            Scratch(None if small else most, dtype),
        )

    def _added(self, totals: Sums | None, new: Sums, part: Any) -> Sums:
        if totals is None:
            group = self.sizes[1]
            totals = Sums(*([s.new_zeros(1, group, 1) for s in row] for row in new))
        for old, row in zip(totals, new, strict=True):
            for total, one in zip(old, row, strict=True):
                total[:, part[1]] += one
        return totals

    @staticmethod
    def _parameters(sums: Sums, tensors: Held, now: Rows, wanted: Wanted) -> list[Tensor | None]:
        """The gradients of what is learned from those of tau, theta, s and c as they are now."""
        rho, learned = tensors[0], _learned(tensors, wanted)
        taus, *others = sums
        if rho is not None and wanted.tau:
            taus = [total * tau for total, tau in zip(taus, now.tau, strict=True)]
        grads = [
            None if w is None else _gathered(row, w)
            for row, w in zip((taus, *others), learned, strict=True)
        ]
        if rho is not None and grads[0] is not None:
            grads[0] = torch.where(rho.abs() <= rho_bound(), grads[0], 0.0)
        return grads


class _Tiles(NamedTuple):
    """What `tiles` is given for each part of an input; None is all of it."""

    structure: Structure
    rows: Rows
    memory: Tensor
    other: Tensor | None
    parts: Sequence[Part | None]
    room: Scratch

    def read(self, part: Part | None) -> tuple[Tensor, Tensor, Structure, Rows, Scratch]:
        memory, other, rows = self.memory, self.other, self.rows
        if part is not None:
            memory, other = memory[part], None if other is None else other[part]
            rows = Rows(*([_cut(w, part) for w in row] for row in rows))
        self.room.clear(memory.shape)
        z = self.wide(memory)
        return z, z if other is None else self.wide(other), self.structure, rows, self.room

    def wide(self, t: Tensor) -> Tensor:
        return self.room.copy(t) if t.element_size() < 4 else t


def _learned(tensors: Held, wanted: Wanted) -> Held:
    """Whose gradients are wanted, for tau, theta, s and c."""
    rho, dtheta, s, c, tau0, theta0 = tensors
    return (
        (tau0 if rho is None else rho) if wanted.tau else None,
        (theta0 if dtheta is None else dtheta) if wanted.theta else None,
        s if wanted.s else None,
        c if wanted.c else None,
    )


def _as_its_own(grad: Tensor | None, w: Tensor | None) -> Tensor | None:
    """A gradient in the type of what is learned."""
    return grad if grad is None or w is None or grad.dtype is w.dtype else grad.to(w.dtype)


def _laid(d: Tensor | None, x: Tensor) -> Tensor | None:
    """A gradient as x lies in memory and in its type; d is memory (outer, G, inner) of its own."""
    if d is None:
        return None
    d = d.to(x.dtype)
    return d.view(x.shape) if x.is_contiguous() else d.as_strided(x.shape, x.stride())


def _cut(w: Any, part: Part) -> Any:
    return w[:, part[1]] if isinstance(w, Tensor) else w


def _gathered(rows: Sequence[Tensor], w: Tensor) -> Tensor:
    """Sums (1, G, 1), one for each row of a parameter, as its gradient."""
    total = rows[0] if len(rows) == 1 else torch.cat(list(rows))
    return total.reshape(w.shape).to(w.dtype)


@functools.lru_cache(4096)
def plan(
    structure: Structure, sizes: Sequence[int], stride: Sequence[int], shape: Shape
) -> Plan | None:
    """The plan for an input of these sizes; None if its groups are not one run of axes."""
    found = placed(sizes, stride, shape)
    return None if found is None else Plan(structure, shape, *found)


def _parts(sizes: Sizes, most: int) -> Iterator[Part]:
    """Tiles of about `most` elements, contiguous in memory."""
    outer, group, inner = sizes
    i = min(inner, most)
    g = min(group, max(1, most // i)) if i == inner else 1
    o = min(outer, max(1, most // (i * g))) if g == group else 1
    for a in range(0, outer, o):
        for b in range(0, group, g):
            for c in range(0, inner, i):
                yield slice(a, a + o), slice(b, b + g), slice(c, c + i)
