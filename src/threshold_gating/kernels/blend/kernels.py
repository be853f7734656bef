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

from threshold_gating.kernels.blend.formulas import value
from threshold_gating.kernels.blend.gradients import backward_tiles
from threshold_gating.kernels.blend.norms import VERSION
from threshold_gating.kernels.blend.parameters import (
    ALONE,
    COLUMNS,
    FITTING,
    HARD,
    JOINED,
    KEPT,
    MIDDLE,
    NORMED,
    ONE,
    ONE_TAU,
    OWN_TAUS,
    READ,
    ROWS,
    SINGLY,
    TIMES,
    added,
    anchored,
    folded,
    nan_where_thresholds_are,
    rows_of,
    sharpened,
)
from threshold_gating.kernels.blend.places import count, loaded, store_sum, stored, tile
from threshold_gating.kernels.blend.sums import destination, finished, shared_out

# Of norms.py, so that a graph on disk which an earlier one has rewritten is not taken.
_REWRITTEN_BY = tl.constexpr(VERSION)


@triton.jit
def _group(R, N, G, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """Which parameters this program reads: one, a row or a column of indices.

    Those beyond the last column are none, and masked where they are read: bounded by it they would
    not be known to lie side by side, and each would be read by itself.
    """
    rows, columns, _, _ = tile(0, R, N, iters, LAYOUT, RB, CB)
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
        # 1 beyond the last group: a tau of 0 would send all groups of a program the long way
        tau = rows_of(tau_p, G, at, TAU_CODE, TAUS, 1.0)
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
    x_p, other_p, y_p, R, N, iters, tau, theta, s, c, stops, w, ws, wc,
    S_CODE: tl.constexpr, C_CODE: tl.constexpr, OWNERS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, WEIGHTS: tl.constexpr, ROLE: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
    TURN: tl.constexpr, WHOLE: tl.constexpr,
):
    for i in tl.range(0, count(R, N, iters, LAYOUT, RB, CB), TURN, num_stages=STAGES):
        for part in tl.static_range(TURN):
            _, _, place, inside = tile(i + part, R, N, iters, LAYOUT, RB, CB)
            x = loaded(x_p + place, inside, WHOLE)  # (RB, CB)
            v = x
            if ROLE == KEPT:
                stored(other_p + place, x, inside, WHOLE)
            elif ROLE != ALONE:
                other = loaded(other_p + place, inside, WHOLE)
                if ROLE == READ:
                    v = other
            y = value(x, v, tau, theta, s, c, stops, w, ws, wc,
                      S_CODE, C_CODE, OWNERS, K, GATE, WEIGHTS, ROLE)
            if ROLE == TIMES:
                y = y * other
            stored(y_p + place, y, inside, WHOLE)


@triton.jit
def blend_forward(
    x_p, other_p, y_p,
    tau_p, rho_p, theta_p, shift_p, s_p, c_p,
    R, N, G, iters,
    TAU_CODE: tl.constexpr, THETA_CODE: tl.constexpr, S_CODE: tl.constexpr, C_CODE: tl.constexpr,
    OWNERS: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, ROLE: tl.constexpr,
    SHARPENED: tl.constexpr, MOVED: tl.constexpr, ANCHORED: tl.constexpr, WEIGHTS: tl.constexpr,
    LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, STAGES: tl.constexpr,
    TURN: tl.constexpr, WHOLE: tl.constexpr,
):
    """y = blend(x) of R x N values."""
    at = _group(R, N, G, iters, LAYOUT, RB, CB)
    tau, theta, s, c = _parameters(
        at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
        G, TAU_CODE, THETA_CODE, S_CODE, C_CODE, K, GATE, SHARPENED, MOVED, ANCHORED)
    # What else is read may be huge where gates are still open: one by one.
    HOW: tl.constexpr = SINGLY if ROLE == READ and WEIGHTS == FITTING else WEIGHTS
    BOTH: tl.constexpr = K > 5 and HOW == FITTING
    stops, w, ws, wc, singly = folded(tau, theta, s, c, K, GATE, HOW, BOTH)
    if singly:  # a loop of its own, so that neither keeps what only the other one needs
        _forward_tiles(x_p, other_p, y_p, R, N, iters, tau, theta, s, c, stops, w, ws, wc,
                       S_CODE, C_CODE, OWNERS, K, GATE, SINGLY, ROLE,
                       LAYOUT, RB, CB, 1, 1, WHOLE)
    else:
        _forward_tiles(x_p, other_p, y_p, R, N, iters, tau, theta, s, c, stops, w, ws, wc,
                       S_CODE, C_CODE, OWNERS, K, GATE, HOW, ROLE,
                       LAYOUT, RB, CB, STAGES, TURN, WHOLE)


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
    TURN: tl.constexpr, WHOLE: tl.constexpr,
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
    SUMS: tl.constexpr = TAUS + DTHETA * (K - 1) + DS * K + CONSTANTS
    # What else is read may be huge where gates are still open, which `turns` alone bounds.
    HOW: tl.constexpr = SINGLY if ROLE == READ and WEIGHTS == FITTING else WEIGHTS
    POWERS: tl.constexpr = GATE == ONE_TAU and HOW == FITTING
    at = _group(R, N, G, iters, LAYOUT, RB, CB)
    tau, theta, s, c = _parameters(
        at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
        G, TAU_CODE, THETA_CODE, S_CODE, C_CODE, K, GATE, SHARPENED, MOVED, ANCHORED)
    stops, w, ws, wc, singly = folded(tau, theta, s, c, K, GATE, HOW, POWERS)
    sums = (tl.zeros((RB if LAYOUT == ROWS else 1, CB), tl.float32),)  # Triton wants at least one
    for k in tl.static_range(1, SUMS + NORMS):
        sums = sums + (sums[0],)
    centre = sums[0]
    if NORMS:
        centre = tl.load(dother_p + at, mask=at < G, other=0.0).to(tl.float32)
    if singly:
        sums = backward_tiles(
            x_p, other_p, dy_p, dtheta_p, dx_p, dother_p, R, N, iters, tau, theta, s, c,
            stops, w, ws, wc, centre, sums,
            S_CODE, C_CODE, OWNERS, K, GATE, SINGLY, False, ROLE, DX, DOTHER,
            TAUS, DTHETA * (K - 1), DS * K, CONSTANTS, LAYOUT, RB, CB, 1, 1, WHOLE)
    else:
        sums = backward_tiles(
            x_p, other_p, dy_p, dtheta_p, dx_p, dother_p, R, N, iters, tau, theta, s, c,
            stops, w, ws, wc, centre, sums,
            S_CODE, C_CODE, OWNERS, K, GATE, HOW, POWERS, ROLE, DX, DOTHER,
            TAUS, DTHETA * (K - 1), DS * K, CONSTANTS, LAYOUT, RB, CB, STAGES, TURN, WHOLE)
        if POWERS:
            sums = shared_out(sums, theta, stops[MIDDLE], w, K,
                              TAUS, DTHETA * (K - 1), DS * K + CONSTANTS)
    COUNT: tl.constexpr = TAUS + DTHETA * (K - 1) + DS * K + DC * K
    if COUNT > 0:
        # Read again rather than kept: registers are what the loop above is short of.
        tau, theta, s, c = _parameters(
            at, tau_p, rho_p, theta_p, shift_p, s_p, c_p,
            G, TAU_CODE, THETA_CODE, S_CODE, C_CODE, K, GATE, SHARPENED, MOVED, ANCHORED)
        sums = finished(sums, at, tau, theta, s, rho_p, G, S_CODE,
                        K, GATE, SHARPENED, ANCHORED, TAUS, DTHETA * (K - 1), DS * K)
        for k in tl.static_range(COUNT):
            out_p, row = dtau_p, k
            if APART:
                out_p, row = destination(
                    k, dtau_p, dtheta_p, ds_p, dc_p, TAUS, DTHETA * (K - 1), DS * K)
            store_sum(out_p, row, sums[k], R, N, G, iters, COUNT + NORMS, LAYOUT, RB, CB)
    for k in tl.static_range(NORMS):
        total = sums[SUMS + k]
        store_sum(dtau_p, COUNT + k, total, R, N, G, iters, COUNT + NORMS, LAYOUT, RB, CB)
