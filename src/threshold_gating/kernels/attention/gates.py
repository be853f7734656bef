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
    logits,
    queries_of_program,
    rows_of_head,
    store_rows,
    weigh,
)
from threshold_gating.kernels.instructions import INTERPRETED, inverse, inverses


@triton.jit
def product_above(x, y):
    """x y rounded up, so that fma(x, y, -product_above(x, y)) is not above 0."""
    if INTERPRETED:
        return x * y  # its fma rounds the product as well: the difference is 0
    return tl.inline_asm_elementwise(
        "mul.rp.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1
    )


@triton.jit
def excess(x, y):
    """x - y, but not below 0, for numbers up to 1: one instruction."""
    if INTERPRETED:
        return tl.maximum(x - y, 0.0)
    return tl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1
    )


@triton.jit
def gates_at(z, level, peak, rel, unit, MASK: tl.constexpr):
    """sigma(z_i - theta_i) = e_i / (e_i + exp(theta_i)) for every i, all in units of exp(level).

    exp(theta_i) is what all others sum up to, rel + peak - e_i, with e at the maximum the `peak`:
    there the last two are the same number, and rel is left. Straight from a product, neighbours in
    a thread are columns of one row and share a reciprocal; a mask may move them to other threads,
    and rows must not share one: NaN would pass from row to row.
    """
    e = tl.exp2(tl.fma(z, unit, -level[:, None]))  # (BLOCK_M, BLOCK_N)
    whole = e + (rel[:, None] + excess(peak[:, None], e))
    return e * (inverses(whole) if MASK == NONE else inverse(whole))


@triton.jit
def gates_sweep(
    acc, level, peak, rel, q, k_base, k_row, v_base, v_row, rows, lo, hi, queries, keys,
    mask, mask_row, mask_column, factor, unit,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gates of keys `lo` to `hi` times values, added to acc."""
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        z = logits(
            q, k_base, k_row, start, rows, queries, keys, mask, mask_row, mask_column, factor,
            EDGE, CAUSAL, MASK, D, BLOCK_D, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
        acc = weigh(
            acc, gates_at(z, level, peak, rel, unit, MASK), v_base, v_row, start, keys,
            DV, BLOCK_DV, BLOCK_N, EDGE, PRECISION, DOT,
        )  # fmt: skip
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
    k_base = rows_of_head(k, batch, head // group, k_batch, k_head)
    v_base = rows_of_head(v, batch, head // group, v_batch, v_head)
    mask_base = mask + batch * mask_batch + head * mask_head if MASK != NONE else mask
    inside = rows < queries
    plane = tl.num_programs(1).to(tl.int64) * queries
    row = levels + at * queries + rows
    m1 = finite(tl.load(row, mask=inside, other=0.0))  # (BLOCK_M,), as all that follow
    m2 = tl.load(row + plane, mask=inside, other=-INF)
    level = product_above(m1, unit)
    peak = tl.exp2(tl.fma(m1, unit, -level))  # hardly less than 1
    T = tl.load(row + 2 * plane, mask=inside, other=0.0)
    rel = T * tl.exp2((m2 - m1) * unit) * peak
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    full, end = key_range(block, keys, CAUSAL, BLOCK_M, BLOCK_N)
    for edge in tl.static_range(2):
        acc = gates_sweep(
            acc, level, peak, rel, q_tile, k_base, k_row, v_base, v_row, rows,
            full if edge else 0, end if edge else full, queries, keys,
            mask_base, mask_row, mask_column, factor, unit, edge, CAUSAL, MASK,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
    store_rows(
        out + batch * o_batch + head * o_head, o_row, block * BLOCK_M, queries, acc,
        BLOCK_M, DV, BLOCK_DV,
    )  # fmt: skip
