"""The backward pass over the tiles of a program, as Triton functions; see `kernels`."""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005, SIM109
# fmt: off
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.formulas import (
    by_powers,
    hard_gates,
    mean,
    soft_gates,
    turned_from_below,
    turns,
    turns_by_powers,
    two_gates,
    two_means,
    within,
)
from threshold_gating.kernels.blend.parameters import (
    ALONE,
    CENTRED,
    HARD,
    JOINED,
    MIDDLE,
    NORMED,
    OWN_TAUS,
    READ,
    ROWS,
    SMALL,
    TIMES,
    TWO,
)
from threshold_gating.kernels.blend.places import count, loaded, stored, tile
from threshold_gating.kernels.blend.sums import offset


@triton.jit
def _slopes(
    x, v, dy, tau, theta, s, c, stops, w, ws, wc, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr,
):
    """(y, dy times the mean slope, dy by way of the gates, gates times dy, dy T_m of thresholds).

    The last two only if a parameter's gradient may need them: weights that are small are frozen.
    """
    g, weighted, found = (x,), (), (x,)
    if WEIGHTS >= SMALL:
        y, slope, turned = turned_from_below(
            x, v, tau, theta, stops, s, w, ws, wc, S_CODE, C_CODE, K, GATE, WEIGHTS)
        through, turned = slope * dy, turned * dy
    else:
        if GATE == HARD:
            g = hard_gates(x, theta, OWNERS, K)
        elif GATE == TWO or GATE == CENTRED:
            g = two_gates(x, tau, theta)
        else:
            g = soft_gates(x, tau, theta, K, GATE)
        for k in tl.static_range(K):
            weighted = weighted + (g[k] * dy,)
        turned, slope = tl.zeros_like(x), mean(g, s, S_CODE, K)
        if GATE == TWO or GATE == CENTRED:
            bump = weighted[0] * g[1]
            found = (bump * v * (s[1] - s[0]) + bump * (c[1] - c[0]),)
            turned = found[0] * tau[0]
        elif GATE != HARD:
            found = turns(g, v, dy, s, c, S_CODE, C_CODE, K)
            for k in tl.static_range(K - 1):
                turned += found[k] * tau[k if GATE == OWN_TAUS else 0]
        if GATE == CENTRED:
            slope = two_means(x, tau, theta, s, g[0], g[1], S_CODE, GATE)
            y = v * slope + two_means(x, tau, theta, c, g[0], g[1], C_CODE, GATE)
        else:
            y = v * slope + mean(g, c, C_CODE, K)
        # two branches: of what the sums need anyway, without the mean slope
        through = mean(weighted, s, S_CODE, K) if GATE == TWO else slope * dy
    return y, through, turned, weighted, found


@triton.jit
def _plus(total, value, LAYOUT: tl.constexpr):
    """A running sum: of columns, whose rows one thread holds, or element by element."""
    if LAYOUT == ROWS:
        total += value
    else:
        total += tl.sum(value, 0)[None, :]  # (1, CB)
    return total


@triton.jit
def _by_gates(
    sums, x, v, dy, tau, theta, s, c, stops, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, OWNERS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, TAUS: tl.constexpr,
    THETAS: tl.constexpr, SLOPES: tl.constexpr, CONSTANTS: tl.constexpr, LAYOUT: tl.constexpr,
):
    """(y, dy through the branches, dy by way of the gates, the sums with a tile more)."""
    y, through, turned, weighted, found = _slopes(
        x, v, dy, tau, theta, s, c, stops, w, ws, wc, S_CODE, C_CODE, OWNERS, K, GATE, WEIGHTS)
    new = ()
    for k in tl.static_range(TAUS):
        total = found[k] * (x - theta[k])
        if GATE != OWN_TAUS:
            for m in tl.static_range(1, K - 1):
                total += found[m] * (x - theta[m])
        new = new + (_plus(sums[k], total, LAYOUT),)
    for k in tl.static_range(THETAS):
        if GATE != HARD:
            new = new + (_plus(sums[TAUS + k], found[k], LAYOUT),)
        else:
            new = new + (sums[TAUS + k],)
    for k in tl.static_range(SLOPES):
        along = weighted[k] * v
        if GATE == HARD:  # 0 * inf where a branch is not taken
            along = tl.where(weighted[k] != 0, along, 0.0)
        new = new + (_plus(sums[TAUS + THETAS + k], along, LAYOUT),)
    for k in tl.static_range(CONSTANTS):
        new = new + (_plus(sums[TAUS + THETAS + SLOPES + k], weighted[k], LAYOUT),)
    return y, through, turned, new


@triton.jit
def _by_powers(
    sums, x, dy, tau, theta, s, c, stops, w, ws, wc, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    K: tl.constexpr, Y: tl.constexpr, TAUS: tl.constexpr, THETAS: tl.constexpr,
    SLOPES: tl.constexpr, CONSTANTS: tl.constexpr, LAYOUT: tl.constexpr,
):
    """(Y, dx, the sums with a tile more) by `turns_by_powers`; `shared_out` makes of the sums what
    they are to be. Each sum is one product and sum."""
    slope, powers, found = turns_by_powers(x, tau, stops, s, c, w, ws, C_CODE, K)
    turn = found[0]
    for k in tl.static_range(1, K - 1):
        turn += (k + 1.0) * found[k]
    near, new = within(x, stops), ()
    # beyond the stops the gates of the ends alone are open; a product, for dy that is NaN is NaN
    inner = dy * (x == near).to(tl.float32)
    turned = turn * inner
    if TAUS:  # about the middle: the rest follows from the thetas' sums, if there are any
        total = turned * (near - stops[MIDDLE])
        if THETAS == 0:
            total -= offset(found, theta, stops[MIDDLE], K) * inner
        new = new + (_plus(sums[0], total, LAYOUT),)
    for k in tl.static_range(THETAS):
        new = new + (_plus(sums[TAUS + k], found[k] * inner, LAYOUT),)
    along = near * inner
    for k in tl.static_range(SLOPES):
        # of the ends the gate first, for x may be huge
        total = powers[k] * x * dy if k == 0 or k == K - 1 else powers[k] * along
        new = new + (_plus(sums[TAUS + THETAS + k], total, LAYOUT),)
    for k in tl.static_range(CONSTANTS):
        total = powers[k] * (dy if k == 0 or k == K - 1 else inner)
        new = new + (_plus(sums[TAUS + THETAS + SLOPES + k], total, LAYOUT),)
    y = by_powers(x, tau, stops, s, c, w, ws, wc, S_CODE, C_CODE, K) if Y else x
    return y, slope * dy + turned * tau[0], new


@triton.jit
def backward_tiles(
    x_p, other_p, dy_p, more_p, dx_p, dother_p, R, N, iters, tau, theta, s, c,
    stops, w, ws, wc, centre, sums,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, OWNERS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, POWERS: tl.constexpr,
    ROLE: tl.constexpr, DX: tl.constexpr, DOTHER: tl.constexpr,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr, CONSTANTS: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
    TURN: tl.constexpr, WHOLE: tl.constexpr,
):
    """The sums over the tiles of a program: TAUS, THETAS, SLOPES, CONSTANTS of them.

    NORMED, two more for a norm before the gates: of dx, and of dx times its input less `centre`.
    JOINED, dy is the sum of what is at dy_p and at more_p.
    """
    COUNT: tl.constexpr = TAUS + THETAS + SLOPES + CONSTANTS
    for i in tl.range(0, count(R, N, iters, LAYOUT, RB, CB), TURN, num_stages=STAGES):
        for part in tl.static_range(TURN):
            _, _, place, inside = tile(i + part, R, N, iters, LAYOUT, RB, CB)
            x = loaded(x_p + place, inside, WHOLE)  # (RB, CB)
            dy = loaded(dy_p + place, inside, WHOLE)
            if ROLE == JOINED:
                dy += loaded(more_p + place, inside, WHOLE)
            v, outer = x, dy
            if ROLE != ALONE:
                other = loaded(other_p + place, inside, WHOLE)
                if ROLE == READ:
                    v = other
                elif ROLE == TIMES:
                    dy = dy * other
            if POWERS:
                y, dx, new = _by_powers(
                    sums, x, dy, tau, theta, s, c, stops, w, ws, wc, S_CODE, C_CODE,
                    K, DOTHER, TAUS, THETAS, SLOPES, CONSTANTS, LAYOUT)
                dother = outer * y
            else:
                y, through, turned, new = _by_gates(
                    sums, x, v, dy, tau, theta, s, c, stops, w, ws, wc, S_CODE, C_CODE, OWNERS,
                    K, GATE, WEIGHTS, TAUS, THETAS, SLOPES, CONSTANTS, LAYOUT)
                dx, dother = through + turned, outer * y
                if ROLE == READ:
                    dx, dother = turned, through
            if DX:
                stored(dx_p + place, dx, inside, WHOLE)
            if DOTHER:
                stored(dother_p + place, dother, inside, WHOLE)
            if ROLE == NORMED or ROLE == JOINED:
                new = new + (_plus(sums[COUNT], dx, LAYOUT),)
                new = new + (_plus(sums[COUNT + 1], dx * (other - centre), LAYOUT),)
            if len(new) > 0:
                sums = new
    return sums
