"""K >= 3 learned gates with one tau, as Triton functions: loops over the tiles of a program.

With t = tau (x - middle) and e = exp(-|t|) the gates are w_k p_k / D, where p_k = e^k or e^(K-1-k)
by the side that x is on, and D = sum_k w_k p_k is never below 1. Weights stand in the coefficients
or are multiplied in behind the loop, and a sum over elements is one product and sum each: what
these loops are short of is instructions, not memory. So they also load the next tiles into
registers, STAGES of them, and go through as many in one round.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005, SIM108
# fmt: off
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.formulas import mean
from threshold_gating.kernels.blend.parameters import ALONE, KEPT, READ, TIMES
from threshold_gating.kernels.blend.reading import (
    brought_near,
    held,
    inside,
    lessened,
    stretch,
    widened,
)
from threshold_gating.kernels.instructions import LOG2E, exp2, inverse


@triton.jit
def _powers(away, tau, K: tl.constexpr):
    """p_k of every branch at x = middle + away."""
    e = exp2(tl.abs(away) * (tau * -LOG2E))
    low = away < 0
    powers = (e,)
    for k in tl.static_range(K - 2):
        powers = powers + (powers[k] * e,)
    parts = (tl.where(low, 1.0, powers[K - 2]),)
    for k in tl.static_range(1, K - 1):
        if 2 * k == K - 1:
            parts = parts + (powers[k - 1],)
        else:
            parts = parts + (tl.where(low, powers[k - 1], powers[K - 2 - k]),)
    return parts + (tl.where(low, powers[K - 2], 1.0),)


@triton.jit
def _masses(parts, w, K: tl.constexpr):
    """Of the gates from each branch on, times D; the first is D."""
    masses = (parts[K - 1],)
    for k in tl.static_range(1, K - 1):
        masses = (masses[0] + parts[K - 1 - k] * w[K - 1 - k],) + masses
    return (masses[0] + parts[0],) + masses


@triton.jit
def _value_by_powers(
    x, v, tau, middle, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr, ROLE: tl.constexpr,
):
    """y at x; v is what the branches read."""
    parts = _powers(x - middle, tau[0], K)
    share = inverse(_masses(parts, w, K)[0])
    slope, constant = mean(parts, ws, S_CODE, K), mean(parts, wc, C_CODE, K)
    if ROLE == READ:  # v may be large where D is, too
        y = v * (slope * share) + constant * share
    else:
        y = (v * slope + constant) * share
    return y


@triton.jit
def forward_by_powers(
    x_p, other_p, y_p, R, N, iters, tau, middle, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr, ROLE: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    TYPE: tl.constexpr = x_p.dtype.element_ty
    place, step, tiles, beside, along, left = stretch(R, N, iters, LAYOUT, RB, CB)
    from_p, y_p, other_p = x_p + place, y_p + place, other_p + place
    ahead = ()
    for j in tl.static_range(STAGES):
        there = inside(j, tiles, beside, along, left, LAYOUT, RB, CB)
        ahead = ahead + (held(tl.load(from_p, mask=there, other=0.0)),)
        from_p += step
    for i in tl.range(0, tiles, STAGES, num_stages=1):
        later = ()
        for j in tl.static_range(STAGES):
            there = inside(i + j, tiles, beside, along, left, LAYOUT, RB, CB)
            x = widened(ahead[j], TYPE)  # (RB, CB)
            soon = inside(i + j + STAGES, tiles, beside, along, left, LAYOUT, RB, CB)
            later = later + (held(tl.load(from_p, mask=soon, other=0.0)),)
            v = x
            if ROLE == KEPT:
                tl.store(other_p, x.to(TYPE), mask=there)
            elif ROLE != ALONE:
                other = widened(held(tl.load(other_p, mask=there, other=0.0)), TYPE)
                if ROLE == READ:
                    v = other
            y = _value_by_powers(x, v, tau, middle, w, ws, wc, S_CODE, C_CODE, K, ROLE)
            if ROLE == TIMES:
                y = y * other
            tl.store(y_p, y.to(TYPE), mask=there)
            from_p, y_p, other_p = from_p + step, y_p + step, other_p + step
        ahead = later


@triton.jit
def _turns_by_powers(away, v, parts, masses, share, tau, w, s, c, K: tl.constexpr):
    """tau D T_m for each threshold; see `tiles`.

    T_m is what the branches above a threshold have more than their share of the mean. All of them
    are taken less the one that wins far out on x's side, which changes nothing but leaves no large
    numbers to cancel in the tails. Where a middle one wins, T is off by a rounding of the largest
    branch, so large ones are left to `turns` (`parameters.folded`).
    """
    last = v * (tau * (s[K - 1] - s[0])) + tau * (c[K - 1] - c[0])  # less the first, as all here
    wins = tl.where(away < 0, 0.0, last)
    values = (parts[K - 1] * (last - wins),)
    for k in tl.static_range(1, K - 1):
        weight = w[K - 1 - k]
        slope, constant = s[K - 1 - k] - s[0], c[K - 1 - k] - c[0]
        branch = v * (tau * weight * slope) + tau * weight * constant - weight * wins
        values = (parts[K - 1 - k] * branch + values[0],) + values
    mean = (values[0] - parts[0] * wins) * share
    found = ()
    for m in tl.static_range(K - 1):
        found = found + (values[m] - masses[m + 1] * mean,)
    return found


@triton.jit
def _gradient_by_powers(
    away, v, dy, tau, w, ws, s, c, S_CODE: tl.constexpr, K: tl.constexpr
):
    """(1 / D, dy / D, p_k, tau D T_m, dy by way of the gates, D times the mean slope)."""
    parts = _powers(away, tau, K)
    masses = _masses(parts, w, K)
    share = inverse(masses[0])
    found = _turns_by_powers(away, v, parts, masses, share, tau, w, s, c, K)
    turned = found[0]
    for m in tl.static_range(1, K - 1):
        turned += found[m]
    scale = dy * share
    return share, scale, parts, found, turned * scale, mean(parts, ws, S_CODE, K)


@triton.jit
def plus(total, value):
    """A running sum: element by element, or of columns, whose rows one thread holds."""
    if total.shape[0] == value.shape[0]:
        total += value
    else:
        total += tl.sum(value, 0)[None, :]  # (1, CB)
    return total


@triton.jit
def _summed(
    sums, away, turned, parts, found, scale, along, gaps,
    K: tl.constexpr, TAUS: tl.constexpr, THETAS: tl.constexpr,
    SLOPES: tl.constexpr, CONSTANTS: tl.constexpr,
):
    """The sums with those of one tile, each of them one product and sum."""
    new = ()
    for k in tl.static_range(TAUS):
        if THETAS > 0:  # about the middle: the rest follows from the thetas' sums
            total = turned * away
        else:
            total = found[0] * scale * (away - gaps[0])
            for m in tl.static_range(1, K - 1):
                total += found[m] * scale * (away - gaps[m])
        new = new + (plus(sums[k], total),)
    for k in tl.static_range(THETAS):
        new = new + (plus(sums[TAUS + k], found[k] * scale),)
    for k in tl.static_range(SLOPES):
        new = new + (plus(sums[TAUS + THETAS + k], parts[k] * along),)
    for k in tl.static_range(CONSTANTS):
        new = new + (plus(sums[TAUS + THETAS + SLOPES + k], parts[k] * scale),)
    return new


@triton.jit
def _weighed(
    sums, w,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr, CONSTANTS: tl.constexpr,
):
    """The sums with what all their terms have in common: weights, and what `lessened` took off."""
    new = ()
    for k in tl.static_range(TAUS + THETAS):
        new = new + (sums[k],)
    for k in tl.static_range(SLOPES):
        new = new + (sums[TAUS + THETAS + k] * (w[k] * 256.0),)
    for k in tl.static_range(CONSTANTS):
        new = new + (sums[TAUS + THETAS + SLOPES + k] * w[k],)
    return new


@triton.jit
def backward_by_powers(
    x_p, other_p, dy_p, dx_p, dother_p, R, N, iters, tau, theta, s, c, middle, w, ws, wc, sums,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, K: tl.constexpr, ROLE: tl.constexpr,
    DX: tl.constexpr, DOTHER: tl.constexpr,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr, CONSTANTS: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    """The sums over the tiles of a program: TAUS, THETAS, SLOPES, CONSTANTS of them.

    Each is (RB, CB), for rows that lie in several threads are added up once, behind the loop. Those
    of tau and theta are of tau T instead of T; see `kernels._finished`.
    """
    TYPE: tl.constexpr = x_p.dtype.element_ty
    COUNT: tl.constexpr = TAUS + THETAS + SLOPES + CONSTANTS
    place, step, tiles, beside, along, left = stretch(R, N, iters, LAYOUT, RB, CB)
    from_p, slope_p, other_p = x_p + place, dy_p + place, other_p + place
    dx_p, dother_p = dx_p + place, dother_p + place
    gaps = ()
    for m in tl.static_range(K - 1):
        gaps = gaps + (theta[m] - middle,)
    ahead = ()
    for j in tl.static_range(STAGES):
        there = inside(j, tiles, beside, along, left, LAYOUT, RB, CB)
        ahead = ahead + (held(tl.load(from_p, mask=there, other=0.0)),)
        ahead = ahead + (held(tl.load(slope_p, mask=there, other=0.0)),)
        from_p, slope_p = from_p + step, slope_p + step
    for i in tl.range(0, tiles, STAGES, num_stages=1):
        later = ()
        for j in tl.static_range(STAGES):
            there = inside(i + j, tiles, beside, along, left, LAYOUT, RB, CB)
            v, outer = ahead[2 * j], widened(ahead[2 * j + 1], TYPE)  # (RB, CB)
            away, dy = brought_near(v, TYPE) - middle, outer
            if ROLE != ALONE:
                other = held(tl.load(other_p, mask=there, other=0.0))
                if ROLE == READ:
                    v = other
                else:
                    dy = outer * widened(other, TYPE)
            near, less = brought_near(v, TYPE), lessened(v, TYPE)
            soon = inside(i + j + STAGES, tiles, beside, along, left, LAYOUT, RB, CB)
            later = later + (held(tl.load(from_p, mask=soon, other=0.0)),)
            later = later + (held(tl.load(slope_p, mask=soon, other=0.0)),)
            share, scale, parts, found, turned, slope = _gradient_by_powers(
                away, near, dy, tau[0], w, ws, s, c, S_CODE, K)
            dx = turned if ROLE == READ else slope * scale + turned
            if DX:
                tl.store(dx_p, dx.to(TYPE), mask=there)
            if DOTHER:
                dother = slope * scale
                if ROLE == TIMES:
                    constant = mean(parts, wc, C_CODE, K)
                    dother = (widened(v, TYPE) * (slope * share) + constant * share) * outer
                tl.store(dother_p, dother.to(TYPE), mask=there)
            if COUNT > 0:
                sums = _summed(sums, away, turned, parts, found, scale, less * scale, gaps,
                               K, TAUS, THETAS, SLOPES, CONSTANTS)
            from_p, slope_p, other_p = from_p + step, slope_p + step, other_p + step
            dx_p, dother_p = dx_p + step, dother_p + step
        ahead = later
    if COUNT > 0:
        sums = _weighed(sums, w, TAUS, THETAS, SLOPES, CONSTANTS)
    return sums
