"""The formulas of `tiles` for one tile in registers, as Triton functions; see `kernels`.

x and v are (rows, columns), parameters (1, 1), (1, columns) or (rows, 1), a tuple of them for the
rows of a parameter. With one tau and K >= 3 branches, all gates are powers of one exponential: let
t = tau (x - middle), e = exp(-|t|) and count branches from the one that wins far out on x's side;
then y = v S(e) / D(e) + C(e) / D(e) with polynomials whose coefficients w_k, w_k s_k and w_k c_k
stand in that order. D is never below 1, and nothing overflows.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005, SIM108, SIM109
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.parameters import (
    CENTRED,
    HARD,
    MIRRORED,
    OVERFLOWING,
    OWN_TAUS,
    READ,
    SMALL,
    TWO,
    ZERO,
)
from threshold_gating.kernels.instructions import LOG2E, exp2, inverse

_MOST = tl.constexpr(1e37)  # of an argument: no sum of seven overflows
_LARGEST = tl.constexpr(3.39e38)  # of a branch: no mean of such ones overflows
_FAR = tl.constexpr(1e30)  # of what branches read: none of theirs is infinite


@triton.jit
def _tanh(h):
    """tanh by its series near 0, where (1 - e) / (1 + e) would cancel."""
    e = exp2(tl.abs(h) * (-2.0 * LOG2E))
    far = (1.0 - e) * inverse(1.0 + e)
    z = h * h
    near = h * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(z < 0.0625, near, tl.where(h < 0, -far, far))


@triton.jit
def _coefficient(w, low, K: tl.constexpr, k: tl.constexpr):
    """That of e^k: of the k-th branch from the left or from the right."""
    if 2 * k == K - 1:
        found = tl.broadcast_to(w[k], low.shape)
    else:
        found = tl.where(low, w[k], w[K - 1 - k])
    return found


@triton.jit
def _polynomial(w, low, e, K: tl.constexpr):
    """(value, derivative) at e."""
    value = _coefficient(w, low, K, K - 1)
    slope = tl.zeros_like(value)
    for k in tl.static_range(1, K):
        slope = slope * e + value
        value = value * e + _coefficient(w, low, K, K - 1 - k)
    return value, slope


@triton.jit
def by_powers(x, v, tau, middle, w, ws, wc, C_CODE: tl.constexpr, K: tl.constexpr):
    """(y, mean slope, dy/dx by way of the gates) for K >= 3 and one tau."""
    away = x - middle
    e = exp2(tl.abs(away) * (tau[0] * -LOG2E))
    low = away < 0
    D, D1 = _polynomial(w, low, e, K)  # (RB, CB) each
    share = inverse(D)
    S, S1 = _polynomial(ws, low, e, K)
    slope, fall = S * share, e * share  # far out e is 0, and v times the rest may be infinite
    y, turn = v * slope, v * ((S1 - slope * D1) * fall)
    if C_CODE != (4**K - 1) // 3:  # not all of them the number 0
        C, C1 = _polynomial(wc, low, e, K)
        constant = C * share
        y += constant
        turn += (C1 - constant * D1) * fall
    turn = turn * tau[0]
    return y, slope, tl.where(low, turn, -turn)


@triton.jit
def _rise(x, tau, theta, bound):
    """exp(tau (x - theta)), which stops growing at 2^bound; tau theta must be small."""
    u = x * (tau * LOG2E) - theta * (tau * LOG2E)
    return exp2(tl.minimum(u, bound, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _rises(x, tau, theta, stops, K: tl.constexpr, WEIGHTS: tl.constexpr):
    """That of every threshold; with taus the same from either end half are not needed."""
    found = ()
    for k in tl.static_range(K - 1):
        if WEIGHTS == MIRRORED and 2 * k > K - 2:
            found = found + (found[K - 2 - k],)
        else:
            found = found + (_rise(x, tau[k], theta[k], stops[k + 1]),)
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
    x, v, tau, theta, middle, w, ws, wc,
    C_CODE: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """y with small weights: branches are counted from the left on both sides, without a choice.

    Far out the gates stop changing, to 2^-24 those at infinity; see `structure`.
    """
    if GATE == OWN_TAUS:
        rises = _rises(x, tau, theta, middle, K, WEIGHTS)
    else:
        rises = (_rise(x, tau[0], middle, 124.0 / (K - 1)),)
    share = inverse(_nested(w, rises, K))
    y = v * (_nested(ws, rises, K) * share)
    if C_CODE != (4**K - 1) // 3:
        y += _nested(wc, rises, K) * share
    return y


@triton.jit
def turned_from_below(
    x, v, tau, theta, stops, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """(y, mean slope, dy/dx by way of the gates) with small weights and a tau per threshold.

    The weight of branch k grows as the sum of the taus below it. That of the last is taken off all
    of them, which changes nothing but leaves no large numbers to cancel where the last one wins;
    from where the gates stop they stand still. On the other side they do where the first weight is
    all.
    """
    rises = _rises(x, tau, theta, stops, K, WEIGHTS)
    less = tl.zeros_like(tau[0])
    growth, slopes, constants = (), (), ()
    for k in tl.static_range(1, K):
        less = less - tau[K - 1 - k]
        growth = (w[K - 1 - k] * less,) + growth
        slopes, constants = (ws[K - 1 - k] * less,) + slopes, (wc[K - 1 - k] * less,) + constants
    share = inverse(_nested(w, rises, K))
    slope = _nested(ws, rises, K) * share
    grown = _nested(growth, rises, K - 1)
    y, turn = v * slope, v * ((_nested(slopes, rises, K - 1) - slope * grown) * share)
    if C_CODE != (4**K - 1) // 3:
        constant = _nested(wc, rises, K) * share
        y += constant
        turn += (_nested(constants, rises, K - 1) - constant * grown) * share
    turn = tl.where(x > stops[0], 0.0, turn)
    if S_CODE % 4 != ZERO:
        turn = tl.where(x < theta[0] - 30.0 / (tau[0] * LOG2E), 0.0, turn)
    return y, slope, turn


@triton.jit
def _powers(x, tau, middle, w, K: tl.constexpr):
    """w_k a^k b^(K-1-k) from e = exp(-|t|), which is a or b; the other is 1."""
    away = x - middle
    e = exp2(tl.abs(away) * (tau[0] * -LOG2E))
    low = away < 0
    powers = (e,)
    for k in tl.static_range(K - 2):
        powers = powers + (powers[k] * e,)
    parts = (tl.where(low, 1.0, powers[K - 2]),)
    for k in tl.static_range(1, K - 1):
        if 2 * k == K - 1:
            parts = parts + (powers[k - 1] * w[k],)
        else:
            parts = parts + (tl.where(low, powers[k - 1], powers[K - 2 - k]) * w[k],)
    return parts + (tl.where(low, powers[K - 2], 1.0),)


@triton.jit
def _exponentials(x, tau, theta, K: tl.constexpr, GATE: tl.constexpr):
    """exp(l_k - max l) of the running sums of the arguments; see `soft.relative_logits`."""
    u, left = (), (tl.zeros_like(x),)
    for k in tl.static_range(K - 1):
        z = (x - theta[k]) * (tau[k if GATE == OWN_TAUS else 0] * LOG2E)
        z = _bounded(z, _MOST)
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
def _bounded(z, bound):
    lower = tl.maximum(z, -bound, propagate_nan=tl.PropagateNan.ALL)
    return _least(lower, bound)


@triton.jit
def soft_gates(
    x, tau, theta, middle, w, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr
):
    """The K >= 3 gates."""
    if GATE == OWN_TAUS or WEIGHTS == OVERFLOWING:
        parts = _exponentials(x, tau, theta, K, GATE)
    else:
        parts = _powers(x, tau, middle, w, K)
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
    x, v, tau, theta, s, c, middle, w, ws, wc,
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
    elif WEIGHTS >= SMALL:
        y = _from_below(x, v, tau, theta, middle, w, ws, wc, C_CODE, K, GATE, WEIGHTS)
    elif GATE == OWN_TAUS or WEIGHTS == OVERFLOWING:
        g = soft_gates(x, tau, theta, middle, w, K, GATE, WEIGHTS)
        y = v * mean(g, s, S_CODE, K) + mean(g, c, C_CODE, K)
    else:
        y, _, _ = by_powers(x, v, tau, middle, w, ws, wc, C_CODE, K)
    return y


@triton.jit
def turns(g, v, dy, s, c, S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr):
    """dy T_m for each threshold, K >= 3; see `tiles`."""
    weighed = ()  # dy g_k L_k
    for k in tl.static_range(K):
        # infinity times a gate of 0 would be NaN
        weighed = weighed + (g[k] * _bounded(dy * (v * s[k] + c[k]), _LARGEST),)
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


@triton.jit
def turns_by_powers(x, v, dy, tau, middle, w, s, c, S_CODE: tl.constexpr, K: tl.constexpr):
    """(gates times dy, dy T_m for each threshold) with one tau, in fewer steps than by `turns`.

    T_m is what the branches above a threshold have more than their share of the mean. All of them
    are taken less the one that wins far out on x's side, which changes nothing but leaves no large
    numbers to cancel in the tails. Where a middle one wins, T is off by a rounding of the largest
    branch, so large ones are left to `turns` (`parameters.folded`).
    """
    parts = _powers(x, tau, middle, w, K)
    masses = (parts[K - 1],)  # of the gates above a threshold, not yet shared out
    for k in tl.static_range(1, K):
        masses = (masses[0] + parts[K - 1 - k],) + masses
    share = inverse(masses[0])
    scale, near = dy * share, _bounded(v, _FAR)
    weighted, values, branches = (), (), ()
    for k in tl.static_range(K):
        weighted = weighted + (parts[k] * scale,)
        branches = branches + (_branch(near, s, c, S_CODE, k),)
    wins = tl.where(x < middle, branches[0], branches[K - 1])
    for k in tl.static_range(K):
        value = weighted[K - 1 - k] * (branches[K - 1 - k] - wins)
        if k > 0:
            value += values[0]
        values = (value,) + values
    mean = values[0] * share
    found = ()
    for m in tl.static_range(1, K):
        found = found + (values[m] - masses[m] * mean,)
    return weighted, found
