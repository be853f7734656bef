# mypy: ignore-errors
# ruff: noqa: N803
"""Triton: the second pass of the literal form, every gate of Eq. 11 evaluated at its threshold."""

import triton
import triton.language as tl

from threshold_gating.kernels.attention.tiles import (
    INF,
    NONE,
    finite,
    key_range,
    load_rows,
    logits,
    queries_of_program,
    store_rows,
)
from threshold_gating.kernels.instructions import inverse, log2


@triton.jit
def gates_sweep(
    acc, m1, rel, q, k_base, k_row, v_base, v_row, rows, lo, hi, queries, keys,
    mask, mask_row, mask_column, factor, unit,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        z = logits(
            q, k_base, k_row, start, rows, queries, keys, mask, mask_row, mask_column, factor,
            EDGE, CAUSAL, MASK, D, BLOCK_D, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
        z = (z - m1[:, None]) * unit  # (BLOCK_M, BLOCK_N)
        # log2(1 + rel - e) for every i: at the peak 1 - e is exactly 0, and rel is left
        theta = log2(rel[:, None] + tl.maximum(1.0 - tl.exp2(z), 0.0))
        p = inverse(1.0 + tl.exp2(theta - z))  # sigma(z - theta)
        v = load_rows(v_base, v_row, start, keys, BLOCK_N, DV, BLOCK_DV, EDGE).to(DOT)
        acc = tl.dot(p.to(DOT), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_DV)
    return acc


@triton.jit
def gates(
    q, k, v, mask, tau, levels, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, mask_batch, mask_head, mask_row, mask_column,
    heads, group, queries, keys, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, TAU: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The output from every gate sigma(z - theta), theta from the statistics in `levels`."""
    block, at, batch, head, rows, factor, unit, q_tile = queries_of_program(
        q, tau, q_batch, q_head, q_row, heads, queries, scale, MASK, TAU, D, BLOCK_D, BLOCK_M, DOT
    )
    k_base = k + batch * k_batch + head // group * k_head
    v_base = v + batch * v_batch + head // group * v_head
    mask_base = mask + batch * mask_batch + head * mask_head if MASK != NONE else mask
    inside = rows < queries
    plane = tl.num_programs(1).to(tl.int64) * queries
    row = levels + at * queries + rows
    m1 = finite(tl.load(row, mask=inside, other=0.0))  # (BLOCK_M,), as m2 and rel
    m2 = tl.load(row + plane, mask=inside, other=-INF)
    rel = tl.load(row + 2 * plane, mask=inside, other=0.0) * tl.exp2((m2 - m1) * unit)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    full, end = key_range(block, keys, CAUSAL, BLOCK_M, BLOCK_N)
    for edge in tl.static_range(2):
        acc = gates_sweep(
            acc, m1, rel, q_tile, k_base, k_row, v_base, v_row, rows,
            full if edge else 0, end if edge else full, queries, keys,
            mask_base, mask_row, mask_column, factor, unit, edge, CAUSAL, MASK,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
    store_rows(
        out + batch * o_batch + head * o_head, o_row, block * BLOCK_M, queries, acc,
        BLOCK_M, DV, BLOCK_DV,
    )  # fmt: skip
