"""The formulas of `tiles` for one tile in registers, as Triton functions; see `kernels`.

x and v are (rows, columns), parameters (1, 1), (1, columns) or (rows, 1), a tuple of them for the
rows of a parameter. With one tau and K >= 3 branches all gates are powers of one exponential. Let
t = tau (x - middle); y = v S / D + C / D with polynomials in exp(t) whose coefficients are w_k s_k,
w_k and w_k c_k, and x is bounded where the last branch has won, so that D stays below 2^112. Where
that leaves no room (K >= 6), and where gradients of parameters are made of the powers themselves,
branches are counted from that in the midst, with exp(t) above it and exp(-t) below, and x is
bounded to both sides (`parameters.folded`). No coefficient is chosen by the side of x, which is one
more instruction for each.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005, SIM108, SIM109
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.parameters import (
    ABOVE,
    BELOW,
    CENTRED,
    HARD,
    MIDDLE,
    MIRRORED,
    OWN_TAUS,
    READ,
    ROOM,
    SINGLY,
    SMALL,
    TWO,
    ZERO,
)
from threshold_gating.kernels.instructions import LOG2E, exp2, inverse

_MOST = tl.constexpr(1e37)  # of an argument: no sum of seven overflows
_LARGEST = tl.constexpr(3.39e38)  # of a branch: no mean of such ones overflows


@triton.jit
def _tanh(h):
    """tanh by its series near 0, where (1 - e) / (1 + e) would cancel."""
    e = exp2(tl.abs(h) * (-2.0 * LOG2E))
    far = (1.0 - e) * inverse(1.0 + e)
    z = h * h
    near = h * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(z < 0.0625, near, tl.where(h < 0, -far, far))


@triton.jit
def within(x, stops):
    """x, no further out than exponentials have room: from there on the gates stand still."""
    return _bounded(x, stops[BELOW], stops[ABOVE])


@triton.jit
def _both_ways(near, tau, stops):
    """exp(t) and exp(-t), of which neither is one over the other: that takes as long."""
    t = (near - stops[MIDDLE]) * (tau[0] * LOG2E)
    return exp2(t), exp2(-t)


@triton.jit
def _polynomial(w, up, down, K: tl.constexpr):
    """sum_k w_k exp((k - M) t) about M = (K - 1) // 2; w may lack the last of the K."""
    M: tl.constexpr = (K - 1) // 2
    total, below, above = w[M], w[0], w[len(w) - 1]
    for k in tl.static_range(1, M):
        below = below * down + w[k]
    total = below * down + total
    if len(w) > M + 1:
        for k in tl.static_range(2, len(w) - M):
            above = above * up + w[len(w) - k]
        total = above * up + total
    return total


@triton.jit
def by_powers(
    x, tau, stops, s, c, w, ws, wc, S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr
):
    """y for K >= 3 and one tau, from exponentials of both signs."""
    near = within(x, stops)
    up, down = _both_ways(near, tau, stops)
    share = inverse(_polynomial(w, up, down, K))
    y = near * (_polynomial(ws, up, down, K) * share)
    if C_CODE != (4**K - 1) // 3:  # not all of them the number 0
        y += _polynomial(wc, up, down, K) * share
    y = tl.where(x < stops[BELOW], _branch(x, s, c, S_CODE, 0), y)
    return tl.where(x > stops[ABOVE], _branch(x, s, c, S_CODE, K - 1), y)


@triton.jit
def turns_by_powers(x, tau, stops, s, c, w, ws, C_CODE: tl.constexpr, K: tl.constexpr):
    """(mean slope, g_k / w_k for each branch, g_k (L_k - y) for all but the first) with one tau.

    The first and the last are g_k. Branches are taken less the last one, which changes nothing but
    leaves no large numbers to cancel where that wins; where the first one does, the gates of the
    others are small. What is found is off by some roundings of the largest branch, so large ones
    are left to `turns` (`parameters.folded`).
    """
    M: tl.constexpr = (K - 1) // 2
    near = within(x, stops)
    up, down = _both_ways(near, tau, stops)
    share = inverse(_polynomial(w, up, down, K))
    slope = _polynomial(ws, up, down, K) * share
    rest = ()  # w_k (L_k - L_K)
    for k in tl.static_range(K - 1):
        along = near * (w[k] * (s[k] - s[K - 1]))
        rest = rest + (along if C_CODE == (4**K - 1) // 3 else along + w[k] * (c[k] - c[K - 1]),)
    mean = _polynomial(rest, up, down, K) * share
    powers = (share,)
    for _k in tl.static_range(M):
        powers = (powers[0] * down,) + powers
    for k in tl.static_range(M, K - 1):
        powers = powers + (powers[k] * up,)
    if K > 5:  # else these weights are 1
        powers = (powers[0] * w[0],) + powers[1 : K - 1] + (powers[K - 1] * w[K - 1],)
    found = ()
    for k in tl.static_range(1, K - 1):
        found = found + (powers[k] * (rest[k] - w[k] * mean),)
    return slope, powers, found + (powers[K - 1] * -mean,)


@triton.jit
def _rise(x, tau, theta, bound):
    """exp(tau (x - theta)), which stops growing at 2^bound; tau theta must be small."""
    u = x * (tau * LOG2E) - theta * (tau * LOG2E)
    return exp2(_least(u, bound))


@triton.jit
def _rises(x, tau, theta, stops, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr):
    """That of every threshold, of all at once if there is one tau; with taus the same from either
    end half are not needed."""
    found = ()
    if GATE == OWN_TAUS:
        for k in tl.static_range(K - 1):
            if WEIGHTS == MIRRORED and 2 * k > K - 2:
                found = found + (found[K - 2 - k],)
            else:
                found = found + (_rise(x, tau[k], theta[k], stops[k + 1]),)
    else:
        found = (_rise(x, tau[0], stops[MIDDLE], ROOM / (K - 1)),)
    return found


@triton.jit
def _nested(w, rises, COUNT: tl.constexpr):
    """w_0 + r_1 (w_1 + r_2 (w_2 + ...)) of COUNT weights, the r_k from `rises` or all the same."""
    total = w[COUNT - 1]
    for k in tl.static_range(1, COUNT):
        total = total * rises[COUNT - 1 - k if len(rises) > 1 else 0] + w[COUNT - 1 - k]
    return total


@triton.jit
def _from_below(
    x, v, tau, theta, stops, s, c, w, ws, wc, S_CODE: tl.constexpr,
    C_CODE: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """y: branches are counted from the left on both sides, without a choice.

    Far out to the right the gates stop changing. With small weights they are there, to 2^-24, those
    at infinity; else v is x, and y the last branch.
    """
    if WEIGHTS >= SMALL:
        rises = _rises(x, tau, theta, stops, K, GATE, WEIGHTS)
    else:
        v = _least(x, stops[ABOVE])
        rises = (exp2((v - stops[MIDDLE]) * (tau[0] * LOG2E)),)
    share = inverse(_nested(w, rises, K))
    y = v * (_nested(ws, rises, K) * share)
    if C_CODE != (4**K - 1) // 3:  # not all of them the number 0
        y += _nested(wc, rises, K) * share
    if WEIGHTS < SMALL:
        y = tl.where(x > v, _branch(x, s, c, S_CODE, K - 1), y)
    return y


@triton.jit
def _means_from_below(
    w, ws, less, rises, share, grown,
    CODE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """(the mean of the s_k of w_k and w_k s_k, how it grows with x).

    For the growth all are taken less the first, which changes nothing but leaves no large numbers
    to cancel where that wins.
    """
    mean = _nested(ws, rises, K) * share
    rest, along = (ws[0] * 0.0,), (ws[0] * 0.0,)
    for k in tl.static_range(1, K):
        rest = rest + (ws[k] if CODE % 4 == ZERO else ws[k] - w[k] * ws[0],)  # w_0 is 1
        if k < K - 1:
            along = along + (rest[k] * less[k],)
    far = mean if CODE % 4 == ZERO else _nested(rest, rises, K) * share
    return mean, (_nested(along, rises, K - 1) - far * grown) * share


@triton.jit
def turned_from_below(
    x, v, tau, theta, stops, s, w, ws, wc, S_CODE: tl.constexpr,
    C_CODE: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """(y, mean slope, dy/dx by way of the gates) with small weights.

    The weight of branch k grows as the sum of the taus below it. That of the last is taken off all
    of them, which changes nothing but leaves no large numbers to cancel where the last one wins;
    from where the gates stop they stand still.
    """
    rises = _rises(x, tau, theta, stops, K, GATE, WEIGHTS)
    less, growth = (tl.zeros_like(tau[0]),), ()
    for k in tl.static_range(1, K):
        less = (less[0] - tau[K - 1 - k if GATE == OWN_TAUS else 0],) + less
        growth = (w[K - 1 - k] * less[0],) + growth
    share = inverse(_nested(w, rises, K))
    grown = _nested(growth, rises, K - 1)
    slope, turn = _means_from_below(w, ws, less, rises, share, grown, S_CODE, K)
    y, turn = v * slope, v * turn
    if C_CODE != (4**K - 1) // 3:  # not all of them the number 0
        constant, more = _means_from_below(w, wc, less, rises, share, grown, C_CODE, K)
        y, turn = y + constant, turn + more
    far = x > stops[ABOVE]
    return y, tl.where(far, s[K - 1], slope), tl.where(far, 0.0, turn)


@triton.jit
def _exponentials(x, tau, theta, K: tl.constexpr, GATE: tl.constexpr):
    """exp(l_k - max l) of the running sums of the arguments; see `soft.relative_logits`."""
    u, left = (), (tl.zeros_like(x),)
    for k in tl.static_range(K - 1):
        z = (x - theta[k]) * (tau[k if GATE == OWN_TAUS else 0] * LOG2E)
        z = _bounded(z, -_MOST, _MOST)
        u, left = u + (z,), left + (_least(left[k] + z, 0.0),)
    right = tl.zeros_like(x)
    parts = (exp2(left[K - 1]),)
    for k in tl.static_range(K - 1):
        right = _least(right - u[K - 2 - k], 0.0)
        parts = (exp2(_least(left[K - 2 - k], right)),) + parts
    return parts


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bounded(z, least, most):
    return _least(tl.maximum(z, least, propagate_nan=tl.PropagateNan.ALL), most)


@triton.jit
def soft_gates(x, tau, theta, K: tl.constexpr, GATE: tl.constexpr):
    """The K >= 3 gates, one by one."""
    parts = _exponentials(x, tau, theta, K, GATE)
    total = parts[0]
    for k in tl.static_range(1, K):
        total = total + parts[k]
    share = inverse(total)  # (RB, CB)
    g = ()
    for k in tl.static_range(K):
        g = g + (parts[k] * share,)
    return g


@triton.jit
def _side(x, tau, theta):
    """(whether x is above the threshold, what the other side weighs against its own)."""
    away = x - theta[0]
    return away > 0, exp2(tl.abs(away) * (tau[0] * -LOG2E))  # (RB, CB)


@triton.jit
def two_gates(x, tau, theta):
    """(lower gate, upper gate), neither as 1 minus the other."""
    above, e = _side(x, tau, theta)
    large = inverse(1.0 + e)
    small = e * large
    return tl.where(above, small, large), tl.where(above, large, small)


@triton.jit
def _leaning(x, tau, theta):
    """(whether x is above the threshold, twice the gate of the other side, negative if it is)."""
    above, e = _side(x, tau, theta)
    small = e * inverse(0.5 + 0.5 * e)
    return above, tl.where(above, -small, small)


@triton.jit
def _from_own_side(above, lean, w):
    """The mean of two coefficients, in three steps: that of x's own side and what the other adds.

    The other side's gate is at most 1/2, so nothing cancels but what the coefficients themselves
    do. Halves, because the difference of two large ones may overflow.
    """
    return tl.where(above, w[1], w[0]) + lean * (0.5 * w[1] - 0.5 * w[0])


@triton.jit
def two_means(x, tau, theta, w, lower, upper, CODE: tl.constexpr, GATE: tl.constexpr):
    """The mean of two coefficients; about the midpoint by tanh, from the branch of x's own side."""
    if GATE == CENTRED:
        h = _tanh((x - theta[0]) * (tau[0] * 0.5))
        found = tl.where(h > 0, w[1] * h, -w[0] * h) + (w[0] + w[1]) * tl.minimum(lower, upper)
    elif CODE % 4 == ZERO or CODE // 4 == ZERO or w[0].shape[0] * w[0].shape[1] == 1:
        # One gate, or none. Numbers for all of x: 32 registers, and 40 by the other way, with which
        # fewer programs run at a time.
        found = mean((lower, upper), w, CODE, 2)
    else:
        above, lean = _leaning(x, tau, theta)
        found = _from_own_side(above, lean, w)
    return found


@triton.jit
def _region(x, theta, OWNERS: tl.constexpr, K: tl.constexpr):
    """How many thresholds x lies beyond: they may have crossed."""
    region = tl.zeros(x.shape, tl.int32)  # (RB, CB)
    for k in tl.static_range(K - 1):
        if (OWNERS // (2**k)) % 2 == 1:
            region += (x >= theta[k]).to(tl.int32)
        else:
            region += (x > theta[k]).to(tl.int32)
    return region


@triton.jit
def hard_gates(x, theta, OWNERS: tl.constexpr, K: tl.constexpr):
    region = _region(x, theta, OWNERS, K)
    g = ()
    for k in tl.static_range(K):
        g = g + (tl.where(region == k, 1.0, 0.0),)
    return g


@triton.jit
def mean(g, w, CODE: tl.constexpr, K: tl.constexpr):
    """sum_k g_k w_k without the terms that are the number 0."""
    total = tl.zeros_like(g[0])  # (RB, CB)
    for k in tl.static_range(K):
        if (CODE // (4**k)) % 4 != ZERO:
            total += g[k] * w[k]
    return total


@triton.jit
def _branch(v, s, c, S_CODE: tl.constexpr, k: tl.constexpr):
    if (S_CODE // (4**k)) % 4 == ZERO:  # the number 0 meets no infinity
        y = tl.broadcast_to(c[k], v.shape)
    else:
        y = v * s[k] + c[k]
    return y


@triton.jit
def value(
    x, v, tau, theta, s, c, stops, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, OWNERS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    """y at x; v is what the branches read."""
    if GATE == HARD:
        y = _branch(v, s, c, S_CODE, 0)
        region = _region(x, theta, OWNERS, K)
        for k in tl.static_range(1, K):
            y = tl.where(region >= k, _branch(v, s, c, S_CODE, k), y)
        if ROLE == READ or S_CODE % 4 == ZERO:  # else the first branch of an x that is NaN is, too
            y = tl.where(x != x, x, y)
    elif GATE == TWO or GATE == CENTRED:
        lower, upper = two_gates(x, tau, theta)
        slope = two_means(x, tau, theta, s, lower, upper, S_CODE, GATE)
        y = v * slope + two_means(x, tau, theta, c, lower, upper, C_CODE, GATE)
    elif WEIGHTS < SMALL and (GATE == OWN_TAUS or WEIGHTS == SINGLY):
        g = soft_gates(x, tau, theta, K, GATE)
        y = v * mean(g, s, S_CODE, K) + mean(g, c, C_CODE, K)
    elif WEIGHTS < SMALL and K > 5:
        y = by_powers(x, tau, stops, s, c, w, ws, wc, S_CODE, C_CODE, K)
    else:
        y = _from_below(x, v, tau, theta, stops, s, c, w, ws, wc, S_CODE, C_CODE, K, GATE, WEIGHTS)
    return y


@triton.jit
def turns(g, v, dy, s, c, S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr):
    """dy T_m for each threshold, K >= 3; see `tiles`."""
    weighed = ()  # dy g_k L_k
    for k in tl.static_range(K):
        # infinity times a gate of 0 would be NaN
        weighed = weighed + (g[k] * _bounded(dy * (v * s[k] + c[k]), -_LARGEST, _LARGEST),)
    masses, values = (g[0],), (weighed[0],)  # up to each threshold
    for k in tl.static_range(1, K - 1):
        masses = masses + (masses[k - 1] + g[k],)
        values = values + (values[k - 1] + weighed[k],)
    above, value = g[K - 1], weighed[K - 1]
    found = ()
    for j in tl.static_range(K - 1):
        found = (masses[K - 2 - j] * value - above * values[K - 2 - j],) + found
        above, value = above + g[K - 2 - j], value + weighed[K - 2 - j]
    return found
