"""The two gated halves (1 - g) x and g x of a matrix, and their gradients, as Triton kernels.

Imported when one first runs. Columns may have gates of their own. In the backward pass a program
goes down several tiles of rows with its sums in registers and writes them once: nothing is atomic.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM108
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _column(pointer, columns, inside, PER_COLUMN: tl.constexpr):
    if PER_COLUMN:
        w = tl.load(pointer + columns, mask=inside, other=0.0)
    else:
        w = tl.load(pointer)
    return w


@triton.jit
def halves_forward(
    x, low, high, tau, theta, rows, width, stride,
    PER_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """low, high = (1 - g) x, g x; both have rows `stride` apart."""
    across = tl.cdiv(width, COLUMNS)
    here = tl.program_id(0)
    r = (here // across) * ROWS + tl.arange(0, ROWS)
    c = (here % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < width)
    t = _column(tau, c, c < width, PER_COLUMN)
    at = _column(theta, c, c < width, PER_COLUMN)
    r = r.to(tl.int64)
    z = tl.load(x + r[:, None] * width + c[None, :], mask=inside, other=0.0).to(tl.float32)
    gated = z * tl.sigmoid((z - at) * t)
    place = r[:, None] * stride + c[None, :]
    tl.store(high + place, gated.to(high.dtype.element_ty), mask=inside)
    tl.store(low + place, (z - gated).to(low.dtype.element_ty), mask=inside)


@triton.jit
def halves_backward(
    x, dlow, dhigh, dx, sums, tau, theta, rows, width, stride, iters,
    PER_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx, and for each program the sums over its rows that tau and theta need."""
    across = tl.cdiv(width, COLUMNS)
    here = tl.program_id(0)
    part = here // across
    c = (here % across) * COLUMNS + tl.arange(0, COLUMNS)
    t = _column(tau, c, c < width, PER_COLUMN)
    at = _column(theta, c, c < width, PER_COLUMN)
    moved = tl.zeros((COLUMNS,), tl.float32)
    along = tl.zeros((COLUMNS,), tl.float32)
    for i in range(iters):
        r = (part * iters + i) * ROWS + tl.arange(0, ROWS)
        inside = (r[:, None] < rows) & (c[None, :] < width)
        r = r.to(tl.int64)
        place = r[:, None] * stride + c[None, :]
        z = tl.load(x + r[:, None] * width + c[None, :], mask=inside, other=0.0).to(tl.float32)
        lo = tl.load(dlow + place, mask=inside, other=0.0).to(tl.float32)
        swing = tl.load(dhigh + place, mask=inside, other=0.0).to(tl.float32) - lo
        g = tl.sigmoid((z - at) * t)
        m = g * (1 - g) * z * swing
        d = lo + g * swing + t * m
        tl.store(dx + r[:, None] * width + c[None, :], d.to(dx.dtype.element_ty), mask=inside)
        moved += tl.sum(m, 0)
        along += tl.sum(m * (z - at), 0)
    tl.store(sums + part * 2 * width + c, moved, mask=c < width)
    tl.store(sums + (part * 2 + 1) * width + c, along, mask=c < width)
