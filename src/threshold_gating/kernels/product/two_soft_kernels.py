"""The two gated halves (1 - g) x and g x of a matrix, and their gradients, as Triton kernels.

Imported when one first runs. Columns may have gates of their own; tau is tau0 exp(rho), theta is
theta0 + dtheta where these are learned. In the backward pass a program goes down several tiles of
rows with its sums in registers and writes them once: nothing is atomic.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM108
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.formulas import two_gates
from threshold_gating.kernels.blend.parameters import BOUND


@triton.jit
def _column(pointer, columns, inside, PER_COLUMN: tl.constexpr):
    if PER_COLUMN:
        w = tl.load(pointer + columns, mask=inside, other=0.0)
    else:
        w = tl.load(pointer)
    return w


@triton.jit
def _gate(
    tau0, rho, theta0, dtheta, c, inside,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """tau, theta and d tau / d rho (d tau / d tau0 where there is no rho)."""
    t = _column(tau0, c, inside, PER_COLUMN)
    slope = t * 0 + 1
    if SHARPENED:
        r = _column(rho, c, inside, PER_COLUMN)
        t = t * tl.exp(tl.minimum(tl.maximum(r, -BOUND), BOUND))
        slope = tl.where((r >= -BOUND) & (r <= BOUND), t, 0.0)
    at = _column(theta0, c, inside, PER_COLUMN)
    if MOVED:
        at += _column(dtheta, c, inside, PER_COLUMN)
    return t, at, slope


@triton.jit
def two_soft_forward(
    x, low, tau0, rho, theta0, dtheta, rows, width, stride, apart,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(1 - g) x at low and g x, `apart` from it; both have rows `stride` apart."""
    across = tl.cdiv(width, COLUMNS)
    here = tl.program_id(0)
    r = (here // across) * ROWS + tl.arange(0, ROWS)
    c = (here % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < width)  # (ROWS, COLUMNS)
    t, at, _ = _gate(tau0, rho, theta0, dtheta, c, c < width, SHARPENED, MOVED, PER_COLUMN)
    r = r.to(tl.int64)
    z = tl.load(x + r[:, None] * width + c[None, :], mask=inside, other=0.0).to(tl.float32)
    lower, upper = two_gates(z, (t,), (at,))  # (ROWS, COLUMNS)
    place = low + r[:, None] * stride + c[None, :]
    tl.store(place + apart, (z * upper).to(low.dtype.element_ty), mask=inside)
    tl.store(place, (z * lower).to(low.dtype.element_ty), mask=inside)


@triton.jit
def two_soft_backward(
    x, dlow, dx, sums, tau0, rho, theta0, dtheta, rows, width, stride, apart, iters,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx, and for each program its share of the gradients of (rho or) tau and theta."""
    across = tl.cdiv(width, COLUMNS)
    here = tl.program_id(0)
    part = here // across
    c = (here % across) * COLUMNS + tl.arange(0, COLUMNS)
    t, at, slope = _gate(tau0, rho, theta0, dtheta, c, c < width, SHARPENED, MOVED, PER_COLUMN)
    # added up over the rows of a tile at the end only: that goes from thread to thread
    moved = tl.zeros((ROWS, COLUMNS), tl.float32)
    along = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(iters):
        r = (part * iters + i) * ROWS + tl.arange(0, ROWS)
        inside = (r[:, None] < rows) & (c[None, :] < width)  # (ROWS, COLUMNS)
        r = r.to(tl.int64)
        place = dlow + r[:, None] * stride + c[None, :]
        z = tl.load(x + r[:, None] * width + c[None, :], mask=inside, other=0.0).to(tl.float32)
        lo = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        hi = tl.load(place + apart, mask=inside, other=0.0).to(tl.float32)
        swing = hi - lo
        lower, upper = two_gates(z, (t,), (at,))  # (ROWS, COLUMNS)
        m = lower * upper * z * swing
        d = lower * lo + upper * hi + t * m
        tl.store(dx + r[:, None] * width + c[None, :], d.to(dx.dtype.element_ty), mask=inside)
        moved += m
        along += m * (z - at)
    moved, along = tl.sum(moved, 0), tl.sum(along, 0)  # (COLUMNS,)
    if PER_COLUMN:
        tl.store(sums + part * 2 * width + c, slope * along, mask=c < width)
        tl.store(sums + (part * 2 + 1) * width + c, -t * moved, mask=c < width)
    else:
        tl.store(sums + here * 2, slope * tl.sum(along, 0))
        tl.store(sums + here * 2 + 1, -t * tl.sum(moved, 0))
