"""`blend` and its gradients as Triton kernels; imported when one first runs.

The formulas are those of `tile`. x is a matrix in memory whose parameters vary along its columns
(LAYOUT 1: tokens, channels_last) or its rows (2: images) or not at all (0: a layer, N values in
rows of a tile's width). A program goes through several tiles along the other axis, over which a
parameter's gradient is summed: it keeps the sums in registers and writes each once, for a second
stage to add up. Nothing is atomic, so every run gives the same bits.

A code tells of each parameter row whether it is a tensor (0) or the number 0, 1 or -1 (1, 2, 3),
one base-4 digit a row. OTHER tells what a second input does: nothing (0), the branches read it
instead of x (1), it multiplies y (2). MODE is 0 for K = 2, 1 for K = 2 about the midpoint (tanh),
2 for one tau, 3 for a tau per threshold, 4 for hard gates, whose OWNERS has a bit for "hi".
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005, SIM102, SIM108, SIM114, SIM300, B007
from __future__ import annotations

import os

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_WIDEST = tl.constexpr(115.0)  # of the weights' exponents, see `tile`
_UNDERFLOW = tl.constexpr(150.0)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _exp2(x):
    """2^x in one instruction; what would be subnormal is 0."""
    if _INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _inverse(x):
    """1 / x in one instruction, to one unit in the last place."""
    if _INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _rows(pointer, row, column, at, CODE: tl.constexpr, COUNT: tl.constexpr):
    """The rows of a parameter, as a tuple; only those that are tensors stand in memory."""
    found = ()
    place = 0
    for k in tl.static_range(COUNT):
        if (CODE // (4**k)) % 4 == 0:
            found = found + (tl.load(pointer + place * row + at * column),)
            place = place + 1
        elif (CODE // (4**k)) % 4 == 1:
            found = found + (at.to(tl.float32) * 0.0,)
        elif (CODE // (4**k)) % 4 == 2:
            found = found + (at.to(tl.float32) * 0.0 + 1.0,)
        else:
            found = found + (at.to(tl.float32) * 0.0 - 1.0,)
    return found


@triton.jit
def _tanh(h):
    """tanh by its series near 0, where (1 - e) / (1 + e) would cancel."""
    e = _exp2(tl.abs(h) * (-2.0 * _LOG2E))
    far = (1.0 - e) * _inverse(1.0 + e)
    z = h * h
    near = h * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(z < 0.0625, near, tl.where(h < 0, -far, far))


@triton.jit
def _weights(tau, theta, K: tl.constexpr, MODE: tl.constexpr):
    """(middle, log2 of the inner weights, whether one leaves float32) for one tau."""
    if MODE == 2:
        middle = theta[0]
        for k in tl.static_range(1, K - 1):
            middle = middle + theta[k]
        middle = middle / (K - 1)
        exponents = ((middle - theta[0]) * (tau[0] * _LOG2E),)
        largest = tl.abs(exponents[0])
        for k in tl.static_range(1, K - 2):
            exponents = exponents + (exponents[k - 1] + (middle - theta[k]) * (tau[0] * _LOG2E),)
            largest = tl.maximum(largest, tl.abs(exponents[k]))
        wide = tl.max(tl.max(largest, 1), 0) > _WIDEST
        weights = ()
        for k in tl.static_range(K - 2):
            weights = weights + (_exp2(exponents[k]),)
    else:
        middle, weights, wide = tau[0], (tau[0],), False
    return middle, weights, wide


@triton.jit
def _powers(x, tau, middle, weights, K: tl.constexpr):
    """w_k a^k b^(K-1-k) from e = exp(-|t|), which is a or b; the other is 1."""
    t = (x - middle) * (tau[0] * _LOG2E)
    e = _exp2(-tl.abs(t))
    low = t < 0
    powers = (e,)
    for k in tl.static_range(K - 2):
        powers = powers + (powers[k] * e,)
    parts = (tl.where(low, 1.0, powers[K - 2]),)
    for k in tl.static_range(1, K - 1):
        parts = parts + (tl.where(low, powers[k - 1], powers[K - 2 - k]) * weights[k - 1],)
    return parts + (tl.where(low, powers[K - 2], 1.0),)


@triton.jit
def _exponentials(x, tau, theta, K: tl.constexpr, MODE: tl.constexpr):
    """exp(l_k - max l) of the running sums of the arguments."""
    logits = ()
    top = tl.zeros_like(x)
    for k in tl.static_range(K - 1):
        u = (x - theta[k]) * (tau[k if MODE == 3 else 0] * _LOG2E)
        u = tl.minimum(tl.maximum(u, -_UNDERFLOW), _UNDERFLOW)
        if k > 0:
            u = u + logits[k - 1]
        logits = logits + (u,)
        top = tl.maximum(top, u)
    parts = (_exp2(-top),)
    for k in tl.static_range(K - 1):
        parts = parts + (_exp2(logits[k] - top),)
    return parts


@triton.jit
def _parts(x, tau, theta, middle, weights, wide, K: tl.constexpr, MODE: tl.constexpr):
    """The K >= 3 gates before they are divided by their sum."""
    if MODE == 3:
        parts = _exponentials(x, tau, theta, K, MODE)
    elif wide:
        parts = _exponentials(x, tau, theta, K, MODE)
    else:
        parts = _powers(x, tau, middle, weights, K)
    return parts


@triton.jit
def _total(parts, K: tl.constexpr):
    total = parts[0]
    for k in tl.static_range(1, K):
        total = total + parts[k]
    return total


@triton.jit
def _mean(g, w, CODE: tl.constexpr, K: tl.constexpr):
    """sum_k g_k w_k without the terms that are the number 0."""
    total = tl.zeros_like(g[0])
    for k in tl.static_range(K):
        if (CODE // (4**k)) % 4 != 1:
            total += g[k] * w[k]
    return total


@triton.jit
def _beyond(x, theta, OWNERS: tl.constexpr, k: tl.constexpr):
    if (OWNERS // (2**k)) % 2 == 1:
        beyond = x >= theta[k]
    else:
        beyond = x > theta[k]
    return beyond


@triton.jit
def _branch(v, s, c, S_CODE: tl.constexpr, k: tl.constexpr):
    if (S_CODE // (4**k)) % 4 == 1:  # the number 0 meets no infinity
        y = tl.broadcast_to(c[k], v.shape)
    else:
        y = v * s[k] + c[k]
    return y


@triton.jit
def _value(
    x,
    v,
    tau,
    theta,
    s,
    c,
    middle,
    weights,
    wide,
    S_CODE: tl.constexpr,
    C_CODE: tl.constexpr,
    OWNERS: tl.constexpr,
    K: tl.constexpr,
    MODE: tl.constexpr,
):
    """y at x; v is what the branches read."""
    if MODE == 4:
        y = _branch(v, s, c, S_CODE, 0)
        for k in tl.static_range(K - 1):
            y = tl.where(_beyond(x, theta, OWNERS, k), _branch(v, s, c, S_CODE, k + 1), y)
        y = tl.where(x != x, x, y)
    elif MODE == 0:
        g = _inverse(1.0 + _exp2((x - theta[0]) * (tau[0] * -_LOG2E)))
        y = v * (s[0] + (s[1] - s[0]) * g) + (c[0] + (c[1] - c[0]) * g)
    elif MODE == 1:
        g = 0.5 * _tanh((x - theta[0]) * (tau[0] * 0.5))
        y = v * (0.5 * (s[0] + s[1]) + (s[1] - s[0]) * g) + (
            0.5 * (c[0] + c[1]) + (c[1] - c[0]) * g
        )
    else:
        parts = _parts(x, tau, theta, middle, weights, wide, K, MODE)
        share = _inverse(_total(parts, K))
        y = v * (_mean(parts, s, S_CODE, K) * share)
        if C_CODE != (4**K - 1) // 3:  # not all of them the number 0
            y += _mean(parts, c, C_CODE, K) * share
    return y


@triton.jit
def _tile(i, R, N, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """(rows, columns, place in memory, whether inside) of the i-th tile of this program."""
    program = tl.program_id(0)
    if LAYOUT == 0:
        rows = (program.to(tl.int64) * iters + i) * RB + tl.arange(0, RB)
        columns = tl.arange(0, CB).to(tl.int64)
        place = rows[:, None] * CB + columns[None, :]
        inside = place < N
    else:
        if LAYOUT == 1:
            across = tl.cdiv(N, CB)
            rows = ((program // across).to(tl.int64) * iters + i) * RB + tl.arange(0, RB)
            columns = (program % across).to(tl.int64) * CB + tl.arange(0, CB)
        else:
            across = tl.cdiv(R, RB)
            rows = (program % across).to(tl.int64) * RB + tl.arange(0, RB)
            columns = ((program // across).to(tl.int64) * iters + i) * CB + tl.arange(0, CB)
        place = rows[:, None] * N + columns[None, :]
        inside = (rows < R)[:, None] & (columns < N)[None, :]
    return rows, columns, place, inside


@triton.jit
def _group(R, N, G, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """Which parameters this program reads: one, a row or a column of indices."""
    rows, columns, _, _ = _tile(0, R, N, iters, LAYOUT, RB, CB)
    if LAYOUT == 0:
        at = tl.zeros((1, 1), tl.int32)
    elif LAYOUT == 1:
        at = tl.minimum(columns, N - 1).to(tl.int32)[None, :]
    else:
        at = (tl.minimum(rows, R - 1) % G).to(tl.int32)[:, None]
    return at


@triton.jit
def _added(total, value, LAYOUT: tl.constexpr):
    """A running sum: of columns, whose rows one thread holds, or element by element."""
    if LAYOUT == 2:
        total += value
    else:
        total += tl.sum(value, 0)[None, :]
    return total


@triton.jit
def _store_sum(
    sums_p, k, total, R, N, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr
):
    """A program's k-th sum at its place in sums [k, split, width]."""
    rows, columns, _, _ = _tile(0, R, N, iters, LAYOUT, RB, CB)
    program = tl.program_id(0).to(tl.int64)
    if LAYOUT == 0:
        tl.store(sums_p + k * tl.num_programs(0) + program, tl.sum(tl.sum(total, 1), 0))
    elif LAYOUT == 1:
        across = tl.cdiv(N, CB)
        split = k * (tl.num_programs(0) // across) + program // across
        tl.store(sums_p + split * N + columns, tl.sum(total, 0), mask=columns < N)
    else:
        across = tl.cdiv(R, RB)
        split = k * (tl.num_programs(0) // across) + program // across
        tl.store(sums_p + split * R + rows, tl.sum(total, 1), mask=rows < R)


# fmt: off
@triton.jit
def blend_forward(
    x_p, other_p, y_p,
    tau_p, tau_row, tau_column, theta_p, theta_row, theta_column,
    s_p, s_row, s_column, c_p, c_row, c_column,
    R, N, G, iters,
    TAU_CODE: tl.constexpr, THETA_CODE: tl.constexpr, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, OTHER: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    """y = blend(x) of R x N values."""
    at = _group(R, N, G, iters, LAYOUT, RB, CB)
    tau = _rows(tau_p, tau_row, tau_column, at, TAU_CODE, K - 1 if MODE == 3 else 1)
    theta = _rows(theta_p, theta_row, theta_column, at, THETA_CODE, K - 1)
    s = _rows(s_p, s_row, s_column, at, S_CODE, K)
    c = _rows(c_p, c_row, c_column, at, C_CODE, K)
    middle, weights, wide = _weights(tau, theta, K, MODE)
    for i in tl.range(iters, num_stages=STAGES):
        _, _, place, inside = _tile(i, R, N, iters, LAYOUT, RB, CB)
        x = tl.load(x_p + place, mask=inside, other=0.0).to(tl.float32)
        v = x
        if OTHER > 0:
            other = tl.load(other_p + place, mask=inside, other=0.0).to(tl.float32)
            if OTHER == 1:
                v = other
        y = _value(x, v, tau, theta, s, c, middle, weights, wide, S_CODE, C_CODE, OWNERS, K, MODE)
        if OTHER == 2:
            y = y * other
        tl.store(y_p + place, y.to(y_p.dtype.element_ty), mask=inside)


@triton.jit
def _turns_two(x, v, dy, tau, theta, s, c, MODE: tl.constexpr):
    """(gates, dy T) for K = 2."""
    if MODE == 1:
        h = _tanh((x - theta[0]) * (tau[0] * 0.5))
        g = 0.5 + 0.5 * h
        bump = 0.25 - 0.25 * h * h
    else:
        g = _inverse(1.0 + _exp2((x - theta[0]) * (tau[0] * -_LOG2E)))
        bump = g * (1.0 - g)
    return (1.0 - g, g), (dy * bump * (v * (s[1] - s[0]) + (c[1] - c[0])),)


@triton.jit
def _turns_many(
    x, v, dy, tau, theta, s, c, middle, weights, wide,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr,
):
    """(gates, dy T_m for each threshold) for K >= 3."""
    parts = _parts(x, tau, theta, middle, weights, wide, K, MODE)
    share = _inverse(_total(parts, K))
    g = ()
    for k in tl.static_range(K):
        g = g + (parts[k] * share,)
    weighed = ()  # g_k L_k
    for k in tl.static_range(K):
        if C_CODE == (4**K - 1) // 3:  # every constant is the number 0
            weighed = weighed + (g[k] * (v * s[k]),)
        else:
            weighed = weighed + (g[k] * (v * s[k] + c[k]),)
    masses, values = (g[0],), (weighed[0],)  # up to each threshold
    for k in tl.static_range(1, K - 1):
        masses = masses + (masses[k - 1] + g[k],)
        values = values + (values[k - 1] + weighed[k],)
    above, value = g[K - 1], weighed[K - 1]
    turns = ()
    for j in tl.static_range(K - 1):
        turns = (dy * (masses[K - 2 - j] * value - above * values[K - 2 - j]),) + turns
        above, value = above + g[K - 2 - j], value + weighed[K - 2 - j]
    return g, turns


@triton.jit
def _hard_gates(x, theta, OWNERS: tl.constexpr, K: tl.constexpr):
    g = ()
    before = x == x
    for k in tl.static_range(K - 1):
        beyond = _beyond(x, theta, OWNERS, k)
        g = g + (tl.where(before & (beyond == 0), 1.0, 0.0),)
        before = beyond
    return g + (tl.where(before, 1.0, 0.0),)


@triton.jit
def blend_backward(
    x_p, other_p, dy_p, dx_p, dother_p, sums_p,
    tau_p, tau_row, tau_column, theta_p, theta_row, theta_column,
    s_p, s_row, s_column, c_p, c_row, c_column,
    R, N, G, iters,
    TAU_CODE: tl.constexpr, THETA_CODE: tl.constexpr, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, OTHER: tl.constexpr,
    DX: tl.constexpr, DOTHER: tl.constexpr,
    DTAU: tl.constexpr, DTHETA: tl.constexpr, DS: tl.constexpr, DC: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    """Gradients of `blend_forward`; sums [row of a parameter, split, width] for the second stage.

    The rows are those of the wanted among tau, theta, s, c, in this order; a split is a program
    along the axis of the sums, the width is the other axis.
    """
    at = _group(R, N, G, iters, LAYOUT, RB, CB)
    TAUS: tl.constexpr = K - 1 if MODE == 3 else 1
    tau = _rows(tau_p, tau_row, tau_column, at, TAU_CODE, TAUS)
    theta = _rows(theta_p, theta_row, theta_column, at, THETA_CODE, K - 1)
    s = _rows(s_p, s_row, s_column, at, S_CODE, K)
    c = _rows(c_p, c_row, c_column, at, C_CODE, K)
    middle, weights, wide = _weights(tau, theta, K, MODE)
    COUNT: tl.constexpr = DTAU * TAUS + DTHETA * (K - 1) + DS * K + DC * K
    sums = ()
    for k in tl.static_range(COUNT):
        sums = sums + (tl.zeros((RB if LAYOUT == 2 else 1, CB), tl.float32),)
    for i in tl.range(iters, num_stages=STAGES):
        _, _, place, inside = _tile(i, R, N, iters, LAYOUT, RB, CB)
        x = tl.load(x_p + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_p + place, mask=inside, other=0.0).to(tl.float32)
        v, outer = x, dy
        if OTHER > 0:
            other = tl.load(other_p + place, mask=inside, other=0.0).to(tl.float32)
            if OTHER == 1:
                v = other
            else:
                dy = dy * other
        if MODE == 4:
            g = _hard_gates(x, theta, OWNERS, K)
            turns = ()
        elif MODE < 2:
            g, turns = _turns_two(x, v, dy, tau, theta, s, c, MODE)
        else:
            g, turns = _turns_many(x, v, dy, tau, theta, s, c, middle, weights, wide,
                                   S_CODE, C_CODE, K, MODE)
        slope = _mean(g, s, S_CODE, K)
        if MODE < 2:
            slope = s[0] + (s[1] - s[0]) * g[1]
        turned = tl.zeros_like(x)
        if MODE != 4:
            for k in tl.static_range(K - 1):
                turned += turns[k] * tau[k if MODE == 3 else 0]
        dx = dy * slope + turned
        dother = outer * (v * slope + _mean(g, c, C_CODE, K))
        if OTHER == 1:
            dx, dother = turned, dy * slope
        if DX:
            tl.store(dx_p + place, dx.to(x_p.dtype.element_ty), mask=inside)
        if DOTHER:
            tl.store(dother_p + place, dother.to(x_p.dtype.element_ty), mask=inside)
        new = ()
        if DTAU:
            if MODE == 3:
                for k in tl.static_range(K - 1):
                    new = new + (_added(sums[k], turns[k] * (x - theta[k]), LAYOUT),)
            else:
                total = turns[0] * (x - theta[0])
                for k in tl.static_range(1, K - 1):
                    total += turns[k] * (x - theta[k])
                new = new + (_added(sums[0], total, LAYOUT),)
        if DTHETA:
            for k in tl.static_range(K - 1):
                new = new + (_added(sums[DTAU * TAUS + k], turns[k], LAYOUT),)
        if DS:
            for k in tl.static_range(K):
                total = sums[DTAU * TAUS + DTHETA * (K - 1) + k]
                new = new + (_added(total, dy * v * g[k], LAYOUT),)
        if DC:
            for k in tl.static_range(K):
                total = sums[DTAU * TAUS + DTHETA * (K - 1) + DS * K + k]
                new = new + (_added(total, dy * g[k], LAYOUT),)
        sums = new
    for k in tl.static_range(COUNT):
        total = sums[k]
        if DTHETA:
            if DTAU * TAUS <= k and k < DTAU * TAUS + K - 1:
                total = -total * tau[k - DTAU * TAUS if MODE == 3 else 0]
        _store_sum(sums_p, k, total, R, N, iters, LAYOUT, RB, CB)
# fmt: on
