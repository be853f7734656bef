"""A step of an LSTM as a Triton kernel, forth and back: the product with the state, then the gates.

A program has a few units and a few sequences. `a` is (rows + B, 5 H): what goes into i, f, g, o and
the cell's output; `hidden` is (rows + B, H). Their last B rows hold the state at the start. Where
a step lies, and which rows come before and after, it reads from `step`; see `lstm.Course`. Gates
are (5, 6, H): tau, theta, the two constants and the two slopes of each site. In 16 bits results are
rounded where they are stored, and gates see what is stored.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.formulas import two_gates, two_means
from threshold_gating.kernels.blend.parameters import CENTRED, TWO
from threshold_gating.kernels.instructions import INTERPRETED


@triton.jit
def _lstm_numbers(gates, site, unit, inside, H, SLOPED: tl.constexpr):
    """(tau, theta, (c0, c1), (s0, s1)) of a site: (1, BN) each."""
    place = gates + site * 6 * H + unit[None, :]
    at = inside[None, :]
    tau = tl.load(place, mask=at, other=1.0)
    theta = tl.load(place + H, mask=at, other=0.0)
    c = (tl.load(place + 2 * H, mask=at, other=0.0), tl.load(place + 3 * H, mask=at, other=0.0))
    s = c
    if SLOPED:
        s = (tl.load(place + 4 * H, mask=at, other=0.0), tl.load(place + 5 * H, mask=at, other=0.0))
    return tau, theta, c, s


@triton.jit
def _lstm_gate(
    x, gates, site, unit, inside, H,
    MIDDLE: tl.constexpr, SITE: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """(y, dy/dx) of a site; bit SITE of MIDDLE says that it is evaluated about its midpoint."""
    tau, theta, c, s = _lstm_numbers(gates, site, unit, inside, H, SLOPED)
    lower, upper = two_gates(x, (tau,), (theta,))
    KIND: tl.constexpr = CENTRED if (MIDDLE // (2**SITE)) % 2 == 1 else TWO
    y = two_means(x, (tau,), (theta,), c, lower, upper, 0, KIND)
    rise = c[1] - c[0]
    if SLOPED:
        slope = two_means(x, (tau,), (theta,), s, lower, upper, 0, KIND)
        y += x * slope
        dx = slope + tau * (lower * upper) * (x * (s[1] - s[0]) + rise)
    else:
        dx = tau * (lower * upper) * rise
    return y, dx


@triton.jit
def _state_product(x, w, total, PRECISION: tl.constexpr):
    """total + x w; the interpreter has no 16-bit products."""
    if INTERPRETED:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, total, input_precision=PRECISION)


@triton.jit
def lstm_forward(
    hidden, a, weight, gates, step, start, H,
    MIDDLE: tl.constexpr, SLOPED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a += h U', then c' and h of one step; `start` is the row of the state at the start."""
    kind = hidden.dtype.element_ty
    before, had, base, rows = tl.load(step), tl.load(step + 1), tl.load(step + 2), tl.load(step + 3)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    unit = tl.program_id(1) * BN + tl.arange(0, BN)
    known, within = r < rows, unit < H
    inside = known[:, None] & within[None, :]  # (BM, BN)
    came = tl.where(r < had, before + r, start + r).to(tl.int64)
    here = (base + r).to(tl.int64)
    q = tl.arange(0, 4 * BN)  # the four gates of a unit lie side by side
    line = (q % 4) * H + tl.program_id(1) * BN + q // 4
    reads = tl.program_id(1) * BN + q // 4 < H
    total = tl.zeros((BM, 4 * BN), tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        at = k + tl.arange(0, BK)
        h = tl.load(
            hidden + came[:, None] * H + at[None, :],
            mask=known[:, None] & (at < H)[None, :], other=0.0,
        )  # fmt: skip
        u = tl.load(
            weight + line[None, :] * H + at[:, None],
            mask=reads[None, :] & (at < H)[:, None], other=0.0,
        )  # fmt: skip
        total = _state_product(h, u, total, PRECISION)
    even, odd = tl.split(tl.reshape(total, (BM, BN, 2, 2)))  # i and g, f and o
    i, g = tl.split(even)
    f, o = tl.split(odd)
    place = a + here[:, None] * (5 * H) + unit[None, :]
    found = ()
    for k in tl.static_range(4):
        z = (i, f, g, o)[k] + tl.load(place + k * H, mask=inside, other=0.0).to(tl.float32)
        z = z.to(kind)
        tl.store(place + k * H, z, mask=inside)
        y, _ = _lstm_gate(z.to(tl.float32), gates, k, unit, within, H, MIDDLE, k, SLOPED)
        found = found + (y,)
    cell = tl.load(a + came[:, None] * (5 * H) + 4 * H + unit[None, :], mask=inside, other=0.0)
    cell = (found[1] * cell.to(tl.float32) + found[0] * found[2]).to(kind)
    tl.store(place + 4 * H, cell, mask=inside)
    y, _ = _lstm_gate(cell.to(tl.float32), gates, 4, unit, within, H, MIDDLE, 4, SLOPED)
    tl.store(hidden + here[:, None] * H + unit[None, :], (found[3] * y).to(kind), mask=inside)


@triton.jit
def lstm_backward(
    dhidden, a, weight, gates, da, dcell, dgates, last_h, last_c, step, start, H,
    MIDDLE: tl.constexpr, SLOPED: tl.constexpr, LEARNED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of one step: da, the gradient of c before it, and, if LEARNED, those of what gates give."""
    kind = da.dtype.element_ty
    before, had, base, rows = tl.load(step), tl.load(step + 1), tl.load(step + 2), tl.load(step + 3)
    after, on = tl.load(step + 4), tl.load(step + 5)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    unit = tl.program_id(1) * BN + tl.arange(0, BN)
    known, within = r < rows, unit < H
    inside = known[:, None] & within[None, :]  # (BM, BN)
    goes = r < on  # others end here
    came = tl.where(r < had, before + r, start + r).to(tl.int64)
    here, next_ = (base + r).to(tl.int64), (after + r).to(tl.int64)
    d0 = tl.zeros((BM, BN), tl.float32)
    d1, d2, d3 = d0, d0, d0  # apart, because one sum waits for itself
    for k in tl.range(0, H, BK, num_stages=STAGES):
        at = k + tl.arange(0, BK)
        x = da + next_[:, None] * (4 * H) + at[None, :]
        w = weight + at[:, None] * H + unit[None, :]
        read = goes[:, None] & (at < H)[None, :]
        have = (at < H)[:, None] & within[None, :]
        d0 = _state_product(
            tl.load(x, mask=read, other=0.0), tl.load(w, mask=have, other=0.0), d0, PRECISION
        )
        d1 = _state_product(
            tl.load(x + H, mask=read, other=0.0),
            tl.load(w + H * H, mask=have, other=0.0), d1, PRECISION,
        )  # fmt: skip
        d2 = _state_product(
            tl.load(x + 2 * H, mask=read, other=0.0),
            tl.load(w + 2 * H * H, mask=have, other=0.0), d2, PRECISION,
        )  # fmt: skip
        d3 = _state_product(
            tl.load(x + 3 * H, mask=read, other=0.0),
            tl.load(w + 3 * H * H, mask=have, other=0.0), d3, PRECISION,
        )  # fmt: skip
    flows, ends = inside & goes[:, None], inside & (r >= on)[:, None]
    small = r.to(tl.int64)[:, None] * H + unit[None, :]
    of_row = here[:, None] * H + unit[None, :]
    dh = tl.load(dhidden + of_row, mask=inside, other=0.0).to(tl.float32)
    dh += tl.load(last_h + small, mask=ends, other=0.0).to(tl.float32) + ((d0 + d1) + (d2 + d3))
    dc = tl.load(dcell + next_[:, None] * H + unit[None, :], mask=flows, other=0.0).to(tl.float32)
    dc += tl.load(last_c + small, mask=ends, other=0.0).to(tl.float32)
    place = a + here[:, None] * (5 * H) + unit[None, :]
    y, dy = (), ()
    for k in tl.static_range(5):
        z = tl.load(place + k * H, mask=inside, other=0.0).to(tl.float32)
        value, slope = _lstm_gate(z, gates, k, unit, within, H, MIDDLE, k, SLOPED)
        y, dy = y + (value,), dy + (slope,)
    cell = tl.load(a + came[:, None] * (5 * H) + 4 * H + unit[None, :], mask=inside, other=0.0)
    dc += dh * y[3] * dy[4]
    up = (dc * y[2], dc * cell.to(tl.float32), dc * y[0], dh * y[4], dh * y[3])
    tl.store(dcell + of_row, (dc * y[1]).to(kind), mask=inside)
    for k in tl.static_range(4):
        made = (up[k] * dy[k]).to(kind)
        tl.store(da + here[:, None] * (4 * H) + k * H + unit[None, :], made, mask=inside)
    if LEARNED:
        for k in tl.static_range(5):
            to = dgates + here[:, None] * (5 * H) + k * H + unit[None, :]
            tl.store(to, up[k].to(kind), mask=inside)


@triton.jit
def lstm_sums(
    a, dgates, gates, sums, rows, H, iters,
    SLOPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of the gates' numbers over all steps, a share for each part of the rows."""
    across = tl.cdiv(H, BN)
    part, site = tl.program_id(0), tl.program_id(1) // across
    unit = (tl.program_id(1) % across) * BN + tl.arange(0, BN)
    within = unit < H
    tau, theta, c, s = _lstm_numbers(gates, site, unit, within, H, SLOPED)
    moved = tl.zeros((BM, BN), tl.float32)
    along, low, high, low_x, high_x = moved, moved, moved, moved, moved
    for i in range(iters):
        r = (part * iters + i) * BM + tl.arange(0, BM)
        inside = (r < rows)[:, None] & within[None, :]
        place = r.to(tl.int64)[:, None] * (5 * H) + site * H + unit[None, :]
        x = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dgates + place, mask=inside, other=0.0).to(tl.float32)
        lower, upper = two_gates(x, (tau,), (theta,))
        rise = c[1] - c[0]
        if SLOPED:
            rise = rise + x * (s[1] - s[0])
        turned = dy * (lower * upper) * rise
        moved += turned
        along += turned * (x - theta)
        lower, upper = dy * lower, dy * upper
        low, high = low + lower, high + upper
        if SLOPED:
            low_x, high_x = low_x + lower * x, high_x + upper * x
    to = sums + (part * 5 + site) * 6 * H + unit
    tl.store(to, tl.sum(along, 0), mask=within)
    tl.store(to + H, -tl.sum(moved * tau, 0), mask=within)
    tl.store(to + 2 * H, tl.sum(low, 0), mask=within)
    tl.store(to + 3 * H, tl.sum(high, 0), mask=within)
    tl.store(to + 4 * H, tl.sum(low_x, 0), mask=within)
    tl.store(to + 5 * H, tl.sum(high_x, 0), mask=within)
