# mypy: ignore-errors
# ruff: noqa: N803
"""Triton kernels of attention, backward: the gates again from the log-sum-exp, S x S never formed.

    dZ = P (dP - D),   P = exp(Z - LSE) the gates,   dP = dO V^T,   D = rowsum(dO O)

Of a gate's slope p (1 - p) and of dtheta_i/dz_j = p_j / (1 - p_i) the factor 1 - p cancels, so both
forms of the forward have this backward. `queries_gradient` goes along the rows and leaves D for
`keys_gradient`, which goes along the columns and adds up the heads that share a key: no atomics.
d tau = scale sum_ij dZ_ij (q_i k_j) = scale sum_i q_i (sum_j dZ_ij k_j) falls off the first.
"""

import triton
import triton.language as tl

from threshold_gating.kernels.attention.tiles import (
    ADD,
    INF,
    NONE,
    exponent_of,
    factor_of,
    key_range,
    load_mask,
    load_rows,
    store_rows,
    visible,
)
from threshold_gating.kernels.instructions import LOG2E


@triton.jit
def load_levels(base, plane, rows, queries, BOUND: tl.constexpr, MASK: tl.constexpr):
    """The log-sum-exp of rows, in two parts under an added mask; +inf past the end."""
    if BOUND or MASK == ADD:
        level = tl.load(base + rows, mask=rows < queries, other=INF)
    else:
        level = tl.load(base + rows)
    if MASK == ADD:
        return level, tl.load(base + plane + rows, mask=rows < queries, other=0.0)
    return level, level


@triton.jit
def probabilities(
    z, level, spread, rows, columns, queries, keys, mask, mask_row, mask_column, factor,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The gates of a tile from its bare products; `rows` and `columns` broadcast to it."""
    if MASK == ADD:
        seen = visible(rows, columns, queries, keys, CAUSAL)
        added = load_mask(mask, mask_row, mask_column, rows, columns, seen)
        p = tl.exp2(z * factor + exponent_of(added) - level - spread)
    else:
        p = tl.exp2(z * factor - level)
    if EDGE or MASK != NONE:
        seen = visible(rows, columns, queries, keys, CAUSAL)
        if MASK != NONE and MASK != ADD:
            seen = seen & (load_mask(mask, mask_row, mask_column, rows, columns, seen) != 0)
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def queries_sweep(
    dq, q, do, level, spread, delta, k_base, k_row, v_base, v_row, rows, lo, hi, queries, keys,
    mask, mask_row, mask_column, factor,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, k_row, start, keys, BLOCK_N, D, BLOCK_D, EDGE).to(DOT)
        v = load_rows(v_base, v_row, start, keys, BLOCK_N, DV, BLOCK_DV, EDGE).to(DOT)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        p = probabilities(
            z, level[:, None], spread[:, None], rows[:, None], columns[None, :], queries, keys,
            mask, mask_row, mask_column, factor, EDGE, CAUSAL, MASK,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dz = p * (dp - delta[:, None])
        dq = tl.dot(dz.to(DOT), k, dq, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
    return dq


@triton.jit
def queries_gradient(
    q, k, v, mask, tau, out, do, lse, delta, dq, dtau,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, do_batch, do_head, do_row, dq_batch, dq_head, dq_row,
    mask_batch, mask_head, mask_row, mask_column, heads, group, queries, keys, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, TAU: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dq and D of a block of rows, and its share of d tau."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    at = tl.program_id(1).to(tl.int64)
    batch, head = at // heads, at % heads
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < queries
    q_tile = load_rows(
        q + batch * q_batch + head * q_head, q_row, start, queries, BLOCK_M, D, BLOCK_D, True
    ).to(DOT)
    do_base = do + batch * do_batch + head * do_head
    do_tile = load_rows(do_base, do_row, start, queries, BLOCK_M, DV, BLOCK_DV, True)
    o_base = out + batch * o_batch + head * o_head
    o_tile = load_rows(o_base, o_row, start, queries, BLOCK_M, DV, BLOCK_DV, True)
    d = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)  # (BLOCK_M,)
    tl.store(delta + at * queries + rows, d, mask=inside)
    do_tile = do_tile.to(DOT)
    plane = tl.num_programs(1).to(tl.int64) * queries
    level, spread = load_levels(lse + at * queries, plane, rows, queries, True, MASK)
    factor = factor_of(scale, tau, head, TAU)
    k_base = k + batch * k_batch + head // group * k_head
    v_base = v + batch * v_batch + head // group * v_head
    mask_base = mask + batch * mask_batch + head * mask_head if MASK != NONE else mask
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full, end = key_range(block, keys, CAUSAL, BLOCK_M, BLOCK_N)
    for edge in tl.static_range(2):
        acc = queries_sweep(
            acc, q_tile, do_tile, level, spread, d, k_base, k_row, v_base, v_row, rows,
            full if edge else 0, end if edge else full, queries, keys,
            mask_base, mask_row, mask_column, factor, edge, CAUSAL, MASK,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
    if TAU:
        share = scale * tl.sum(tl.sum(q_tile.to(tl.float32) * acc, 1), 0)
        tl.store(dtau + at * tl.num_programs(0) + block, share)
    store_rows(
        dq + batch * dq_batch + head * dq_head, dq_row, start, queries,
        acc * (factor / LOG2E), BLOCK_M, D, BLOCK_D,
    )  # fmt: skip


@triton.jit
def keys_sweep(
    dk, dv, k, v, q_base, q_row, do_base, do_row, level_base, plane, delta_base, columns, lo,
    hi, queries, keys, mask, mask_row, mask_column, factor,
    BOUND: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    for start in tl.range(lo, hi, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_base, q_row, start, queries, BLOCK_M, D, BLOCK_D, BOUND).to(DOT)
        do = load_rows(do_base, do_row, start, queries, BLOCK_M, DV, BLOCK_DV, BOUND).to(DOT)
        level, spread = load_levels(level_base, plane, rows, queries, BOUND, MASK)
        if BOUND:
            delta = tl.load(delta_base + rows, mask=rows < queries, other=0.0)
        else:
            delta = tl.load(delta_base + rows)
        z = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M): keys first
        p = probabilities(
            z, level[None, :], spread[None, :], rows[None, :], columns[:, None], queries, keys,
            mask, mask_row, mask_column, factor, False, CAUSAL, MASK,
        )  # fmt: skip
        if CAUSAL:  # in all tiles: a second loop for those off the diagonal is slower
            p = tl.where(rows[None, :] >= columns[:, None], p, 0.0)
        dv = tl.dot(p.to(DOT), do, dv, input_precision=PRECISION)  # (BLOCK_N, BLOCK_DV)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        dz = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
        dk = tl.dot(dz.to(DOT), q, dk, input_precision=PRECISION)  # (BLOCK_N, BLOCK_D)
    return dk, dv


@triton.jit
def keys_gradient(
    q, k, v, mask, tau, do, lse, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    mask_batch, mask_head, mask_row, mask_column, heads, queries, keys, scale,
    GROUP: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    TAU: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the GROUP of heads that shares them."""
    block = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64)
    key_heads = heads // GROUP
    batch, key_head = at // key_heads, at % key_heads
    start = block * BLOCK_N
    columns = start + tl.arange(0, BLOCK_N)
    k_tile = load_rows(
        k + batch * k_batch + key_head * k_head, k_row, start, keys, BLOCK_N, D, BLOCK_D, True
    ).to(DOT)
    v_tile = load_rows(
        v + batch * v_batch + key_head * v_head, v_row, start, keys, BLOCK_N, DV, BLOCK_DV, True
    ).to(DOT)
    plane = tl.num_programs(1).to(tl.int64) * GROUP * queries
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    first = block * BLOCK_N // BLOCK_M * BLOCK_M if CAUSAL else 0  # rows before see none of them
    for g in range(GROUP):
        head = key_head * GROUP + g
        row = (batch * heads + head) * queries
        factor = factor_of(scale, tau, head, TAU)
        q_base = q + batch * q_batch + head * q_head
        do_base = do + batch * do_batch + head * do_head
        mask_base = mask + batch * mask_batch + head * mask_head if MASK != NONE else mask
        dk_head_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32) if TAU and GROUP > 1 else dk_tile
        dk_head_tile, dv_tile = keys_sweep(
            dk_head_tile, dv_tile, k_tile, v_tile, q_base, q_row, do_base, do_row, lse + row,
            plane, delta + row, columns, first, queries, queries, keys, mask_base, mask_row,
            mask_column, factor, not EVEN, CAUSAL, MASK,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, PRECISION, DOT,
        )  # fmt: skip
        if TAU and GROUP > 1:  # each head has its own temperature
            dk_tile += dk_head_tile * factor
        else:
            dk_tile = dk_head_tile
    if not (TAU and GROUP > 1):
        dk_tile = dk_tile * factor_of(scale, tau, key_head, TAU)
    store_rows(
        dk + batch * dk_batch + key_head * dk_head, dk_row, start, keys,
        dk_tile * (1.0 / LOG2E), BLOCK_N, D, BLOCK_D,
    )  # fmt: skip
    store_rows(
        dv + batch * dv_batch + key_head * dv_head, dv_row, start, keys, dv_tile,
        BLOCK_N, DV, BLOCK_DV,
    )  # fmt: skip
