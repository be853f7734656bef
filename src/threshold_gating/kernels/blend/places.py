"""Where the tiles of a program lie, and how they are read and written, as Triton functions.

x is a matrix in memory, R x N, as `kernels` says. A program goes through several tiles along the
axis over which parameters do not vary; several of these are a turn of its loop.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; Triton takes no conditional expression here.
# ruff: noqa: N803, SIM108
# fmt: off
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.parameters import COLUMNS, ONE


@triton.jit
def tile(i, R, N, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """(rows, columns, place in memory, whether inside) of the i-th tile of this program."""
    program = tl.program_id(0)
    if LAYOUT == ONE:
        rows = (program.to(tl.int64) * iters + i) * RB + tl.arange(0, RB)
        columns = tl.arange(0, CB).to(tl.int64)
        place = rows[:, None] * CB + columns[None, :]
        inside = place < N  # (RB, CB), as place
    else:
        if LAYOUT == COLUMNS:
            across = tl.cdiv(N, CB)
            rows = ((program // across).to(tl.int64) * iters + i) * RB + tl.arange(0, RB)
            columns = (program % across).to(tl.int64) * CB + tl.arange(0, CB)
        else:
            across = tl.cdiv(R, RB)
            rows = (program % across).to(tl.int64) * RB + tl.arange(0, RB)
            columns = ((program // across).to(tl.int64) * iters + i) * CB + tl.arange(0, CB)
        place = rows[:, None] * N + columns[None, :]
        inside = (rows < R)[:, None] & (columns < N)[None, :]  # (RB, CB), as place
    return rows, columns, place, inside


@triton.jit
def count(R, N, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """How many tiles this program has: `iters`, or what is left of them."""
    program = tl.program_id(0)
    if LAYOUT == ONE:
        first, every = program * iters, tl.cdiv(N, RB * CB)
    elif LAYOUT == COLUMNS:
        first, every = program // tl.cdiv(N, CB) * iters, tl.cdiv(R, RB)
    else:
        first, every = program // tl.cdiv(R, RB) * iters, tl.cdiv(N, CB)
    return tl.minimum(iters, every - first)


@triton.jit
def loaded(pointer, inside, WHOLE: tl.constexpr):
    """What lies there in float32, 0 outside; WHOLE, all tiles are inside, and nobody looks."""
    if WHOLE:
        found = tl.load(pointer)
    else:
        found = tl.load(pointer, mask=inside, other=0.0)
    return found.to(tl.float32)


@triton.jit
def stored(pointer, value, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_sum(
    sums_p, k, total, R, N, G, iters, COUNT: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr,
):
    """A program's k-th sum at its place in sums [program along the sums, COUNT, G].

    For one group they are [COUNT, program], because torch adds neighbours in one step.
    """
    rows, columns, _, _ = tile(0, R, N, iters, LAYOUT, RB, CB)
    program = tl.program_id(0).to(tl.int64)
    if LAYOUT == ONE:
        tl.store(sums_p + k * tl.num_programs(0) + program, tl.sum(tl.sum(total, 1), 0))
    elif LAYOUT == COLUMNS:
        at = (program // tl.cdiv(N, CB) * COUNT + k) * N + columns
        tl.store(sums_p + at, tl.sum(total, 0), mask=columns < N)
    else:  # a row is one of R / G with the same parameters
        along = program // tl.cdiv(R, RB) * (R // G) + rows // G
        tl.store(sums_p + (along * COUNT + k) * G + rows % G, tl.sum(total, 1), mask=rows < R)
