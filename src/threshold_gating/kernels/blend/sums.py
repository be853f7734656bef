"""The sums of a backward pass: as gradients of what is learned, and added up by a second kernel.

Imported when a kernel first runs. A program's sums are one part of [part, row, group]; see
`kernels`.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, RUF005
# fmt: off
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.parameters import BOUND, HARD, OWN_TAUS, ZERO


@triton.jit
def offset(found, theta, middle, K: tl.constexpr):
    """What thresholds that are not in the middle change of tau's gradient, from `found` of
    `formulas.turns_by_powers`, or from sums of it."""
    far = theta[0] - middle
    total = found[0] * far
    for k in tl.static_range(1, K - 1):
        far += theta[k] - middle
        total += found[k] * far
    return total


@triton.jit
def shared_out(
    sums, theta, middle, w, K: tl.constexpr,
    TAUS: tl.constexpr, THETAS: tl.constexpr, BRANCHES: tl.constexpr,
):
    """The sums of `gradients._by_powers` as those of `_by_gates`: with their weights, and with all
    that is above a threshold in its sum."""
    new, above = (), ()
    for k in tl.static_range(THETAS):
        total = sums[TAUS + THETAS - 1 - k]
        above = (total if k == 0 else total + above[0],) + above
    if TAUS:
        total = sums[0]
        if THETAS:
            total -= offset(sums[TAUS:TAUS + THETAS], theta, middle, K)
        new = new + (total,)
    new = new + above
    for k in tl.static_range(BRANCHES):
        total = sums[TAUS + THETAS + k]  # those of the ends are gates already
        new = new + (total if k % K == 0 or k % K == K - 1 else total * w[k % K],)
    return new + sums[TAUS + THETAS + BRANCHES:]


@triton.jit
def finished(
    sums, at, tau, theta, s, rho_p, G, S_CODE: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, SHARPENED: tl.constexpr, ANCHORED: tl.constexpr,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr,
):
    """The sums as gradients of what is learned; all of it is linear, so any part will do."""
    new = ()
    for k in tl.static_range(TAUS):
        total = sums[k]
        if SHARPENED:  # d tau / d rho is tau, and 0 beyond the bound
            rho = tl.load(rho_p + k * G + at, mask=at < G, other=0.0)
            total = total * tl.where(tl.abs(rho) <= BOUND, tau[k], 0.0)
        new = new + (total,)
    for k in tl.static_range(THETAS):
        total = sums[TAUS + k]
        if GATE != HARD:
            total = total * -tau[k if GATE == OWN_TAUS else 0]
        elif ANCHORED:  # branches move with the threshold they stand on
            for m in tl.static_range(K):
                if (S_CODE // (4**m)) % 4 != ZERO and k == (m - 1 if m > 0 else 0):
                    total -= s[m] * sums[TAUS + THETAS + SLOPES + m]
        new = new + (total,)
    for k in tl.static_range(SLOPES):
        total = sums[TAUS + THETAS + k]
        if ANCHORED:
            total -= theta[k - 1 if k > 0 else 0] * sums[TAUS + THETAS + SLOPES + k]
        new = new + (total,)
    for k in tl.static_range(TAUS + THETAS + SLOPES, len(sums)):
        new = new + (sums[k],)
    return new


@triton.jit
def destination(
    k, tau_p, theta_p, s_p, c_p,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr,
):
    """Where the k-th row of all sums goes: the tensor of its gradient, and the row in that."""
    out_p, row = tau_p, k
    if k >= TAUS + THETAS + SLOPES:
        out_p, row = c_p, k - (TAUS + THETAS + SLOPES)
    elif k >= TAUS + THETAS:
        out_p, row = s_p, k - (TAUS + THETAS)
    elif k >= TAUS:
        out_p, row = theta_p, k - TAUS
    return out_p, row


@triton.jit
def add_parts(
    sums_p, tau_p, theta_p, s_p, c_p, parts, G, part_step, row_step,
    TAUS: tl.constexpr, THETAS: tl.constexpr, SLOPES: tl.constexpr, APART: tl.constexpr,
    PB: tl.constexpr, CB: tl.constexpr,
):
    """The second stage: sums of `blend_backward` added up; APART, each row to where it belongs,
    else all of them at tau_p."""
    across = tl.cdiv(G, CB)
    k = (tl.program_id(0) // across).to(tl.int64)
    columns = tl.program_id(0) % across * CB + tl.arange(0, CB)
    total = tl.zeros((PB, CB), tl.float32)  # (parts, columns)
    for first in range(0, parts, PB):
        along = first + tl.arange(0, PB)
        place = along.to(tl.int64)[:, None] * part_step + k * row_step + columns[None, :]
        inside = (along < parts)[:, None] & (columns < G)[None, :]
        total += tl.load(sums_p + place, mask=inside, other=0.0)
    out_p, row = tau_p, k
    if APART:
        out_p, row = destination(k, tau_p, theta_p, s_p, c_p, TAUS, THETAS, SLOPES)
    tl.store(out_p + row * G + columns, tl.sum(total, 0), mask=columns < G)
