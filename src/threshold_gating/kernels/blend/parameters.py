"""The parameters of a gate as a tile reads them, as Triton functions, and the names of its codes.

Parameters are (1, 1), (1, columns) or (rows, 1), a tuple of them for the rows of a parameter; what
is computed of them alone is computed once for a tile.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.instructions import LOG2E, constants, exp2
from threshold_gating.kernels.layout import Layout
from threshold_gating.kernels.structure import Gate, Role, rho_bound
from threshold_gating.kernels.weights import Weights

TWO, CENTRED, ONE_TAU, OWN_TAUS, HARD = constants(Gate)
ALONE, READ, TIMES, KEPT, NORMED, JOINED = constants(Role)
ONE, COLUMNS, ROWS = constants(Layout)
# what is not known is hoped to fit float32 until it is seen that it does not
FITTING, SINGLY, SMALL, MIRRORED = constants(Weights)
# digits of a code (base 4, one for each row): in memory, or a number of `structure.DIGITS`
IN_MEMORY, ZERO, PLUS_ONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

BOUND = tl.constexpr(rho_bound())
# Of the stops that `folded` finds for one tau: above which gates stop changing, the middle of the
# thresholds, and below which they stop. With a tau per threshold each has its own behind the first.
ABOVE, MIDDLE, BELOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Exponents of 2: room of small weights; the most of the sum of all gates before they are shared
# out; the most of a weight; how far below the branch that wins another one is at a stop.
ROOM, _TOP = tl.constexpr(124.0), tl.constexpr(112.0)
_HEAVIEST, _UNSEEN = tl.constexpr(60.0), tl.constexpr(28.0)
_SHARPEST = tl.constexpr(-96.0)  # of the first weight: down to 2^-126 are 2^-30, which is unseen
_LOST = tl.constexpr(2.0**-15)  # of the last weight's exponent: the middle's rounding, else 0


@triton.jit
def rows_of(pointer, G, at, CODE: tl.constexpr, COUNT: tl.constexpr, BEYOND: tl.constexpr = 0.0):
    """The rows of a parameter (COUNT, G) at the groups `at`, as a tuple; BEYOND the last group."""
    found = ()
    for k in tl.static_range(COUNT):
        if (CODE // (4**k)) % 4 == IN_MEMORY:
            row = tl.load(pointer + k * G + at, mask=at < G, other=BEYOND)
            found = found + (row,)  # as `at`: (1, 1), (1, CB) or (RB, 1)
        elif (CODE // (4**k)) % 4 == ZERO:
            found = found + (tl.full(at.shape, 0.0, tl.float32),)
        elif (CODE // (4**k)) % 4 == PLUS_ONE:
            found = found + (tl.full(at.shape, 1.0, tl.float32),)
        else:
            found = found + (tl.full(at.shape, -1.0, tl.float32),)
    return found


@triton.jit
def sharpened(tau, rho):
    """tau0 exp(rho) row by row, exactly tau0 at 0."""
    found = ()
    for k in tl.static_range(len(tau)):
        found = found + (tau[k] * tl.exp(tl.minimum(tl.maximum(rho[k], -BOUND), BOUND)),)
    return found


@triton.jit
def added(a, b):
    """Two tuples, row by row."""
    found = ()
    for k in tl.static_range(len(a)):
        found = found + (a[k] + b[k],)
    return found


@triton.jit
def anchored(v, s, theta, S_CODE: tl.constexpr, K: tl.constexpr):
    """Constants of branches that have the value v at their threshold; see `structure`."""
    found = ()
    for k in tl.static_range(K):
        if (S_CODE // (4**k)) % 4 == ZERO:
            found = found + (v[k],)
        else:
            found = found + (v[k] - s[k] * theta[k - 1 if k > 0 else 0],)
    return found


@triton.jit
def nan_where_thresholds_are(c, theta, K: tl.constexpr):
    """Constants of hard branches: NaN where a threshold is NaN, for no x is above or below that."""
    found = ()
    for k in tl.static_range(K):
        row = c[k]
        for m in tl.static_range(K - 1):
            row = tl.where(theta[m] != theta[m], theta[m], row)
        found = found + (row,)
    return found


@triton.jit
def middle_of(theta, K: tl.constexpr):
    middle = theta[0]
    for k in tl.static_range(1, K - 1):
        middle = middle + theta[k]
    return middle / (K - 1)


@triton.jit
def _mirrored(tau, theta, s, c, K: tl.constexpr):
    """(stops, w, w s, w c) for `_rises` if taus are the same from either end.

    The exponential of a threshold in the upper half is that of its mirror image times a ratio,
    which is put into the weights of all branches above; its bound leaves the same room for all of
    the upper half, and their product below 2^124.
    """
    gaps, room = (), tl.full(tau[0].shape, ROOM, tl.float32)
    weight = tl.full(tau[0].shape, 1.0, tl.float32)
    w, ws, wc = (weight,), (s[0],), (c[0],)
    for k in tl.static_range(K - 1):
        gap = (theta[K - 2 - k] - theta[k]) * (tau[k] * LOG2E)
        gaps = gaps + (gap,)
        if 2 * k < K - 2:
            room = room - gap
        elif 2 * k > K - 2:
            weight = weight * exp2(gap)
        w, ws, wc = w + (weight,), ws + (s[k + 1] * weight,), wc + (c[k + 1] * weight,)
    room = room / (K - 1)
    stops = (theta[K - 2] + room / (tau[K - 2] * LOG2E),)
    for k in tl.static_range(K - 1):
        stops = stops + (room + gaps[k],)
    return stops, w, ws, wc


@triton.jit
def _large(tau, theta, s, c, K: tl.constexpr, BOTH: tl.constexpr):
    """Whether branches are too large for sums of powers, which hold them in float32 times 2^112.

    With exponentials of BOTH signs `turns_by_powers` is off by roundings of the largest branch
    times tau, so the bounds are those of small weights (`weights._are_small`).
    """
    slope, constant, start = tl.abs(s[0]), tl.abs(c[0]), tl.abs(theta[0])
    for k in tl.static_range(1, K):
        slope, constant = tl.maximum(slope, tl.abs(s[k])), tl.maximum(constant, tl.abs(c[k]))
        if k < K - 1:
            start = tl.maximum(start, tl.abs(theta[k]))
    if BOTH:  # less than 0.01: x goes out to 7800 before gates stop, and branches to 2^15.3
        large = (slope > 2) | (tau * tl.maximum(constant, start) > 16) | (tau < 0.01)
    else:  # 2^13
        large = tl.maximum(slope, constant) > 8192
    return large | (tau <= 0)


@triton.jit
def _of_one_tau(tau, theta, s, c, K: tl.constexpr, WEIGHTS: tl.constexpr, BOTH: tl.constexpr):
    """`folded` for one tau. Unless small, the first and the last weight are 2^least: exponentials
    have room from there up to 2^112, and the left tail from there down to 2^-126. For K = 5
    exponentials need more where tau is large, and take it from the tail."""
    M: tl.constexpr = (K - 1) // 2
    LEAST: tl.constexpr = 0.0 if K == 3 or (BOTH and K < 6) else -44.0
    middle, sharp = middle_of(theta, K), tau[0] * LOG2E
    exponents, need = ((middle - theta[0]) * sharp,), tl.zeros_like(tau[0])
    for k in tl.static_range(1, K - 1):
        need = tl.maximum(need, (exponents[k - 1] + _UNSEEN) / (K - 1 - k))
        exponents = exponents + (exponents[k - 1] + (middle - theta[k]) * sharp,)
    if WEIGHTS >= SMALL:
        first, up = tl.full(tau[0].shape, 1.0, tl.float32), ROOM / (K - 1)
    elif BOTH or K != 5:
        first = tl.full(tau[0].shape, 2.0**LEAST, tl.float32)
        up = (_TOP - LEAST) / (K - 1 - M if BOTH else K - 1)
    else:
        least = tl.floor(tl.maximum(tl.minimum(need * (1 - K) + _TOP, LEAST), _SHARPEST))
        first, up = exp2(least), (least - _TOP) / (1 - K)
    down = (_TOP - LEAST) / M
    stops = (middle + up / sharp, middle, middle - down / sharp)
    large = _large(tau[0], theta, s, c, K, BOTH)
    large = large | (tl.abs((stops[ABOVE] - middle) * sharp - up) > 1)  # not where x has no digits
    w, ws, wc = (first,), (s[0] * first,), (c[0] * first,)
    for k in tl.static_range(1, K - 1):
        exponent = exponents[k - 1]
        weight = exp2(exponent) * first  # apart: their sum would lose digits
        w, ws, wc = w + (weight,), ws + (s[k] * weight,), wc + (c[k] * weight,)
        large = large | (tl.abs(exponent) > _HEAVIEST) | (exponent > up * (K - 1 - k) - _UNSEEN)
        if BOTH:
            large = large | (exponent > down * k - _UNSEEN)
    w, ws, wc = w + (first,), ws + (s[K - 1] * first,), wc + (c[K - 1] * first,)
    large = large | (tl.abs(exponents[K - 2]) > _LOST)
    return stops, w, ws, wc, large


@triton.jit
def folded(
    tau, theta, s, c,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """(stops, w, w s, w c, whether gates are taken one by one) for K >= 3.

    Gates are taken one by one where weights or branches are too large for the other way, where
    thresholds are so far out that their middle has not digits enough, and if WEIGHTS say so.

    At its stop a gate has used up its room in float32 and stands still from there on; every gate
    but that of the branch that wins is then below 2^-28, with small weights below 2^-24.
    """
    stops, w, ws, wc, singly = (tau[0],), (tau[0],), (tau[0],), (tau[0],), False
    if GATE == OWN_TAUS and WEIGHTS == MIRRORED:
        stops, w, ws, wc = _mirrored(tau, theta, s, c, K)
    elif GATE == OWN_TAUS:
        bound = tl.full(tau[0].shape, ROOM / (K - 1), tl.float32)
        stops = (theta[K - 2] + bound / (tau[K - 2] * LOG2E),)
        w, ws, wc = (tl.full(tau[0].shape, 1.0, tl.float32),), s, c
        for _k in tl.static_range(1, K):
            stops, w = stops + (bound,), w + (w[0],)
    elif GATE == ONE_TAU and WEIGHTS != SINGLY:
        stops, w, ws, wc, large = _of_one_tau(tau, theta, s, c, K, WEIGHTS, BOTH)
        if WEIGHTS == FITTING:
            singly = tl.max(tl.max(large.to(tl.int32), 1), 0) > 0
    return stops, w, ws, wc, singly
