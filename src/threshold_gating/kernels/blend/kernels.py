"""`blend` and its gradients as Triton kernels; imported when one first runs.

The formulas are those of `tiles`, in `formulas`. x is a matrix in memory whose parameters vary
along its columns (LAYOUT COLUMNS: tokens, channels_last) or its rows (ROWS: images) or not at all
(ONE: a layer, N values in rows of a tile's width). A program goes through several tiles along the
other axis, over which a parameter's gradient is summed: it keeps the sums in registers and writes
each once, for a second stage to add up. Nothing is atomic, so every run gives the same bits.

Constants are those of `gpu.Constants`; shapes are those of a tile, (RB, CB), and of parameters,
which are (1, 1), (1, CB) or (RB, 1) as LAYOUT says.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005, B007, SIM109
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
    value,
)
from threshold_gating.kernels.blend.norms import VERSION
from threshold_gating.kernels.blend.parameters import (
    ALONE,
    CENTRED,
    COLUMNS,
    HARD,
    JOINED,
    KEPT,
    NORMED,
    ONE,
    ONE_TAU,
    OVERFLOWING,
    OWN_TAUS,
    READ,
    ROWS,
    SMALL,
    TIMES,
    TWO,
    added,
    anchored,
    folded,
    nan_where_thresholds_are,
    rows_of,
    sharpened,
)
from threshold_gating.kernels.blend.sums import destination, finished

# Of norms.py, so that a graph on disk which an earlier one has rewritten is not taken.
_REWRITTEN_BY = tl.constexpr(VERSION)


@triton.jit
def _tile(i, R, N, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
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
def _group(R, N, G, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """Which parameters this program reads: one, a row or a column of indices.

    Those beyond the last column are none, and masked where they are read: bounded by it they would
    not be known to lie side by side, and each would be read by itself.
    """
    rows, columns, _, _ = _tile(0, R, N, iters, LAYOUT, RB, CB)
    if LAYOUT == ONE:
        at = tl.zeros((1, 1), tl.int32)  # (1, 1)
    elif LAYOUT == COLUMNS:
        at = columns.to(tl.int32)[None, :]  # (1, CB)
    else:
        at = (tl.minimum(rows, R - 1) % G).to(tl.int32)[:, None]  # (RB, 1)
    return at


@triton.jit
def _parameters(
    at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
    G,
    TAU_CODE: tl.constexpr, THETA_CODE: tl.constexpr, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, ANCHORED: tl.constexpr,
):
    """(tau, theta, s, c) as they are now: tuples of rows shaped as `at`."""
    TAUS: tl.constexpr = K - 1 if GATE == OWN_TAUS else 1
    theta = rows_of(theta_p, G, at, THETA_CODE, K - 1)
    if MOVED:
        theta = added(theta, rows_of(shift_p, G, at, 0, K - 1))
    if GATE == HARD:
        tau = (theta[0],)  # there is none
    else:
        tau = rows_of(tau_p, G, at, TAU_CODE, TAUS)
        if SHARPENED:
            tau = sharpened(tau, rows_of(rho_p, G, at, 0, TAUS))
    s = rows_of(s_p, G, at, S_CODE, K)
    c = rows_of(c_p, G, at, C_CODE, K)
    if ANCHORED:
        c = anchored(c, s, theta, S_CODE, K)
    if GATE == HARD:
        c = nan_where_thresholds_are(c, theta, K)
    return tau, theta, s, c


@triton.jit
def _forward_tiles(
    x_p, other_p, y_p, R, N, iters, tau, theta, s, c, middle, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, OWNERS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, ROLE: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    for i in tl.range(iters, num_stages=STAGES):
        _, _, place, inside = _tile(i, R, N, iters, LAYOUT, RB, CB)
        x = tl.load(x_p + place, mask=inside, other=0.0).to(tl.float32)  # (RB, CB)
        v = x
        if ROLE == KEPT:
            tl.store(other_p + place, x.to(other_p.dtype.element_ty), mask=inside)
        elif ROLE != ALONE:
            other = tl.load(other_p + place, mask=inside, other=0.0).to(tl.float32)
            if ROLE == READ:
                v = other
        y = value(x, v, tau, theta, s, c, middle, w, ws, wc,
                  S_CODE, C_CODE, OWNERS, K, GATE, WEIGHTS, ROLE)
        if ROLE == TIMES:
            y = y * other
        tl.store(y_p + place, y.to(y_p.dtype.element_ty), mask=inside)


@triton.jit
def blend_forward(
    x_p, other_p, y_p,
    tau_p, rho_p, theta_p, shift_p, s_p, c_p,
    R, N, G, iters,
    TAU_CODE: tl.constexpr, THETA_CODE: tl.constexpr, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, ROLE: tl.constexpr,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, ANCHORED: tl.constexpr, WEIGHTS: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    """y = blend(x) of R x N values."""
    at = _group(R, N, G, iters, LAYOUT, RB, CB)
    tau, theta, s, c = _parameters(
        at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
        G, TAU_CODE, THETA_CODE, S_CODE, C_CODE, K, GATE, SHARPENED, MOVED, ANCHORED)
    middle, w, ws, wc, overflows = folded(tau, theta, s, c, K, GATE, WEIGHTS, False)
    if overflows:  # a loop of its own, so that neither keeps what only the other one needs
        _forward_tiles(x_p, other_p, y_p, R, N, iters, tau, theta, s, c, middle, w, ws, wc,
                       S_CODE, C_CODE, OWNERS, K, GATE, OVERFLOWING, ROLE, LAYOUT, RB, CB, 1)
    else:
        _forward_tiles(x_p, other_p, y_p, R, N, iters, tau, theta, s, c, middle, w, ws, wc,
                       S_CODE, C_CODE, OWNERS, K, GATE, WEIGHTS, ROLE, LAYOUT, RB, CB, STAGES)


@triton.jit
def _gradient(
    x, v, dy, tau, theta, s, c, middle, w, ws, wc, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr,
    ROLE: tl.constexpr, SUMMED: tl.constexpr,
):
    """(y, dy times the mean slope, dy by way of the gates, gates times dy, dy T_m of thresholds).

    The last two only if a parameter's gradient needs them (SUMMED).
    """
    g, weighted, found = (x,), (), (x,)
    if GATE == ONE_TAU and WEIGHTS >= SMALL and not SUMMED:
        y, slope, turned = by_powers(x, v, tau, middle, w, ws, wc, C_CODE, K)
        through, turned = slope * dy, turned * dy
    elif GATE == OWN_TAUS and WEIGHTS >= SMALL and not SUMMED:
        y, slope, turned = turned_from_below(
            x, v, tau, theta, middle, w, ws, wc, S_CODE, C_CODE, K, WEIGHTS)
        through, turned = slope * dy, turned * dy
    elif GATE == ONE_TAU and WEIGHTS != OVERFLOWING and ROLE != READ:
        # what else is read may be huge where gates are still open: this bounds it
        weighted, found = turns_by_powers(x, v, dy, tau, middle, w, s, c, S_CODE, K)
        y, _, _ = by_powers(x, v, tau, middle, w, ws, wc, C_CODE, K)
        through, turned = mean(weighted, s, S_CODE, K), found[0]
        for k in tl.static_range(1, K - 1):
            turned += found[k]
        turned = turned * tau[0]
    else:
        if GATE == HARD:
            g = hard_gates(x, theta, OWNERS, K)
        elif GATE == TWO or GATE == CENTRED:
            g = two_gates(x, tau, theta)
        else:
            g = soft_gates(x, tau, theta, middle, w, K, GATE, WEIGHTS)
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
def _backward_tiles(
    x_p, other_p, dy_p, more_p, dx_p, dother_p, R, N, iters, tau, theta, s, c,
    middle, w, ws, wc, centre, sums,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, OWNERS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, ROLE: tl.constexpr,
    DX: tl.constexpr, DOTHER: tl.constexpr,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr, CONSTANTS: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    """The sums over the tiles of a program: TAUS, THETAS, SLOPES, CONSTANTS of them.

    NORMED, two more for a norm before the gates: of dx, and of dx times its input less `centre`.
    JOINED, dy is the sum of what is at dy_p and at more_p.
    """
    for i in tl.range(iters, num_stages=STAGES):
        _, _, place, inside = _tile(i, R, N, iters, LAYOUT, RB, CB)
        x = tl.load(x_p + place, mask=inside, other=0.0).to(tl.float32)  # (RB, CB)
        dy = tl.load(dy_p + place, mask=inside, other=0.0).to(tl.float32)
        if ROLE == JOINED:
            dy += tl.load(more_p + place, mask=inside, other=0.0).to(tl.float32)
        v, outer = x, dy
        if ROLE != ALONE:
            other = tl.load(other_p + place, mask=inside, other=0.0).to(tl.float32)
            if ROLE == READ:
                v = other
            elif ROLE == TIMES:
                dy = dy * other
        y, through, turned, weighted, found = _gradient(
            x, v, dy, tau, theta, s, c, middle, w, ws, wc,
            S_CODE, C_CODE, OWNERS, K, GATE, WEIGHTS, ROLE,
            TAUS + THETAS + SLOPES + CONSTANTS > 0)
        dx, dother = through + turned, outer * y  # (RB, CB)
        if ROLE == READ:
            dx, dother = turned, through
        if DX:
            tl.store(dx_p + place, dx.to(x_p.dtype.element_ty), mask=inside)
        if DOTHER:
            tl.store(dother_p + place, dother.to(x_p.dtype.element_ty), mask=inside)
        new = ()
        for k in tl.static_range(TAUS):
            if GATE == OWN_TAUS:
                total = found[k] * (x - theta[k])
            elif GATE == ONE_TAU and WEIGHTS != OVERFLOWING and THETAS > 0:
                total = found[0]  # about the middle: the rest follows from the thetas' sums
                for m in tl.static_range(1, K - 1):
                    total += found[m]
                total = total * (x - middle)
            else:
                total = found[0] * (x - theta[0])
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
        if ROLE == NORMED or ROLE == JOINED:
            FIRST: tl.constexpr = TAUS + THETAS + SLOPES + CONSTANTS
            new = new + (_plus(sums[FIRST], dx, LAYOUT),)
            new = new + (_plus(sums[FIRST + 1], dx * (other - centre), LAYOUT),)
        if len(new) > 0:
            sums = new
    return sums


@triton.jit
def _store_sum(
    sums_p, k, total, R, N, G, iters, COUNT: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr,
):
    """A program's k-th sum at its place in sums [program along the sums, COUNT, G].

    For one group they are [COUNT, program], because torch adds neighbours in one step.
    """
    rows, columns, _, _ = _tile(0, R, N, iters, LAYOUT, RB, CB)
    program = tl.program_id(0).to(tl.int64)
    if LAYOUT == ONE:
        tl.store(sums_p + k * tl.num_programs(0) + program, tl.sum(tl.sum(total, 1), 0))
    elif LAYOUT == COLUMNS:
        at = (program // tl.cdiv(N, CB) * COUNT + k) * N + columns
        tl.store(sums_p + at, tl.sum(total, 0), mask=columns < N)
    else:  # a row is one of R / G with the same parameters
        along = program // tl.cdiv(R, RB) * (R // G) + rows // G
        tl.store(sums_p + (along * COUNT + k) * G + rows % G, tl.sum(total, 1), mask=rows < R)


@triton.jit
def blend_backward(
    x_p, other_p, dy_p, dx_p, dother_p, dtau_p, dtheta_p, ds_p, dc_p,
    tau_p, rho_p, theta_p, shift_p, s_p, c_p,
    R, N, G, iters,
    TAU_CODE: tl.constexpr, THETA_CODE: tl.constexpr, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, ROLE: tl.constexpr,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, ANCHORED: tl.constexpr, WEIGHTS: tl.constexpr,
    DX: tl.constexpr, DOTHER: tl.constexpr,
    DTAU: tl.constexpr, DTHETA: tl.constexpr, DS: tl.constexpr, DC: tl.constexpr,
    APART: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
):
    """Gradients of `blend_forward`; sums [part, row of a parameter, group] for the second stage.

    The rows are those of the wanted among tau, theta, s, c, in this order, all of them at dtau_p;
    APART, if there is one part, each where it belongs. Constants anchored at a threshold are summed
    even if only this or a slope is wanted, for these follow from them. NORMED, the other input is
    what a norm was given, dother_p holds its means, and the norm's two sums come last; JOINED, what
    dtheta_p holds is added to dy.
    """
    tl.static_assert(_REWRITTEN_BY >= 0)
    NORMS: tl.constexpr = 2 if ROLE == NORMED or ROLE == JOINED else 0
    TAUS: tl.constexpr = DTAU * (K - 1 if GATE == OWN_TAUS else 1)
    CONSTANTS: tl.constexpr = K if DC or (ANCHORED and (DTHETA or DS)) else 0
    at = _group(R, N, G, iters, LAYOUT, RB, CB)
    tau, theta, s, c = _parameters(
        at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
        G, TAU_CODE, THETA_CODE, S_CODE, C_CODE, K, GATE, SHARPENED, MOVED, ANCHORED)
    middle, w, ws, wc, overflows = folded(tau, theta, s, c, K, GATE, WEIGHTS, True)
    sums = (tl.zeros((RB if LAYOUT == ROWS else 1, CB), tl.float32),)  # Triton wants at least one
    for k in tl.static_range(1, TAUS + DTHETA * (K - 1) + DS * K + CONSTANTS + NORMS):
        sums = sums + (sums[0],)
    centre = sums[0]
    if NORMS:
        centre = tl.load(dother_p + at, mask=at < G, other=0.0).to(tl.float32)
    if overflows:
        sums = _backward_tiles(
            x_p, other_p, dy_p, dtheta_p, dx_p, dother_p, R, N, iters, tau, theta, s, c,
            middle, w, ws, wc, centre, sums,
            S_CODE, C_CODE, OWNERS, K, GATE, OVERFLOWING, ROLE, DX, DOTHER,
            TAUS, DTHETA * (K - 1), DS * K, CONSTANTS, LAYOUT, RB, CB, 1)
    else:
        sums = _backward_tiles(
            x_p, other_p, dy_p, dtheta_p, dx_p, dother_p, R, N, iters, tau, theta, s, c,
            middle, w, ws, wc, centre, sums,
            S_CODE, C_CODE, OWNERS, K, GATE, WEIGHTS, ROLE, DX, DOTHER,
            TAUS, DTHETA * (K - 1), DS * K, CONSTANTS, LAYOUT, RB, CB, STAGES)
    COUNT: tl.constexpr = TAUS + DTHETA * (K - 1) + DS * K + DC * K
    if COUNT > 0:
        # Read again rather than kept: registers are what the loop above is short of.
        tau, theta, s, c = _parameters(
            at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
            G, TAU_CODE, THETA_CODE, S_CODE, C_CODE, K, GATE, SHARPENED, MOVED, ANCHORED)
        sums = finished(sums, at, overflows, tau, theta, s, rho_p, G, S_CODE,
                        K, GATE, SHARPENED, ANCHORED, TAUS, DTHETA * (K - 1), DS * K)
        for k in tl.static_range(COUNT):
            out_p, row = dtau_p, k
            if APART:
                out_p, row = destination(
                    k, dtau_p, dtheta_p, ds_p, dc_p, TAUS, DTHETA * (K - 1), DS * K)
            _store_sum(out_p, row, sums[k], R, N, G, iters, COUNT + NORMS, LAYOUT, RB, CB)
    for k in tl.static_range(NORMS):
        total = sums[TAUS + DTHETA * (K - 1) + DS * K + CONSTANTS + k]
        _store_sum(dtau_p, COUNT + k, total, R, N, G, iters, COUNT + NORMS, LAYOUT, RB, CB)
