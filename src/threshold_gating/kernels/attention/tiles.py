# mypy: ignore-errors
# ruff: noqa: N803
"""Triton: tiles of queries, keys and logits, which all kernels of attention share.

Logits are kept as the bare product q k and in base 2: `unit` = scale * tau * log2(e) turns a
difference of them into an exponent. With an added mask they are scaled at once and `unit` is 1.
"""

import triton
import triton.language as tl

from threshold_gating.kernels.attention.launch import Mask
from threshold_gating.kernels.instructions import LOG2E, constants

NONE, KEEP, ADD = constants(Mask)
INF: tl.constexpr = tl.constexpr(float("inf"))
LOWEST: tl.constexpr = tl.constexpr(-1e14)  # swallows every logit and is finite


@triton.jit
def rows_of_head(t, batch, head, batch_stride, head_stride):
    """The rows of one head, for `load_rows`: a pointer, or a descriptor and where in it."""
    if isinstance(t, tl.tensor):
        return t + batch * batch_stride + head * head_stride
    else:  # Triton compiles what follows a return
        return t, batch.to(tl.int32), head.to(tl.int32)


@triton.jit
def load_rows(
    rows, stride, start, end,
    COUNT: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """COUNT rows from `start`, with 0 past `end` (if BOUND) and past the head's SIZE.

    A descriptor knows its own length and strides and ignores these: `end` must be its length.
    """
    if isinstance(rows, tl.tensor):
        return load_by_threads(rows, stride, start, end, COUNT, SIZE, PADDED, BOUND)
    else:  # one instruction for all, carried out by the copy engine
        descriptor, batch, head = rows
        return tl.reshape(descriptor.load([batch, head, start, 0]), [COUNT, PADDED])


@triton.jit
def load_by_threads(
    base, stride, start, end,
    COUNT: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, COUNT), tl.arange(0, PADDED)
    at = base + (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]  # (COUNT, PADDED)
    inside = (start + rows < end)[:, None]
    if BOUND and PADDED != SIZE:
        return tl.load(at, mask=inside & (columns < SIZE)[None, :], other=0.0)
    if BOUND:
        return tl.load(at, mask=inside, other=0.0)
    if PADDED != SIZE:
        return tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(
    base, stride, start, end, value, COUNT: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    rows, columns = tl.arange(0, COUNT), tl.arange(0, PADDED)
    at = base + (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]  # (COUNT, PADDED)
    inside = (start + rows < end)[:, None] & (columns < SIZE)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_mask(mask, row_stride, column_stride, rows, columns, inside):
    at = mask + rows.to(tl.int64) * row_stride + columns.to(tl.int64) * column_stride
    return tl.load(at, mask=inside, other=0)


@triton.jit
def exponent_of(added):
    """A mask in base 2: finite where it was, so that a row of finfo.min stays a flat one."""
    added = added.to(tl.float32)
    return tl.where(added == -INF, -INF, tl.maximum(added * LOG2E, LOWEST))


@triton.jit
def visible(rows, columns, queries, keys, CAUSAL: tl.constexpr):
    inside = (rows < queries) & (columns < keys)
    return inside & (rows >= columns) if CAUSAL else inside


@triton.jit
def logits(
    q, k_base, k_row, start, rows, queries, keys, mask, mask_row, mask_column, factor,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Those of a tile of keys from `start`, -inf where one takes no part; scaled only under ADD."""
    k = load_rows(k_base, k_row, start, keys, BLOCK_N, D, BLOCK_D, EDGE).to(DOT)
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
    if EDGE or MASK != NONE:
        columns = start + tl.arange(0, BLOCK_N)
        seen = visible(rows[:, None], columns[None, :], queries, keys, CAUSAL)
        if MASK != NONE:
            m = load_mask(mask, mask_row, mask_column, rows[:, None], columns[None, :], seen)
            if MASK == ADD:
                z = z * factor + exponent_of(m)
            else:
                seen = seen & (m != 0)
        z = tl.where(seen, z, -INF)
    return z


@triton.jit
def weigh(
    acc, p, v_base, v_row, start, keys,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """acc + p v for the values from `start`."""
    v = load_rows(v_base, v_row, start, keys, BLOCK_N, DV, BLOCK_DV, EDGE).to(DOT)
    return tl.dot(p.to(DOT), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_DV)


@triton.jit
def finite(m):
    """A maximum that can be subtracted from -inf."""
    return tl.where(m == -INF, 0.0, m)


@triton.jit
def factor_of(scale, tau, head, TAU: tl.constexpr):
    factor = scale * LOG2E
    return factor * tl.load(tau + head) if TAU else factor


@triton.jit
def queries_of_program(
    q, tau, q_batch, q_head, q_row, heads, queries, scale,
    MASK: tl.constexpr, TAU: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Where a program is, its rows, its tile of queries, and what scales their products.

    The sign of the scale sits in q, because the largest product has to be the largest logit.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the longest first
    at = tl.program_id(1).to(tl.int64)
    batch, head = at // heads, at % heads
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    factor = factor_of(scale, tau, head, TAU)
    sign = tl.where(factor < 0, -1.0, 1.0)
    factor = tl.maximum(factor * sign, 1e-30)  # not 0: it meets -inf
    unit = 1.0 if MASK == ADD else factor
    base = rows_of_head(q, batch, head, q_batch, q_head)
    tile = load_rows(base, q_row, block * BLOCK_M, queries, BLOCK_M, D, BLOCK_D, True)
    return block, at, batch, head, rows, factor, unit, (tile * sign).to(DOT)


@triton.jit
def key_range(block, keys, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where tiles end that all rows of a block see in full, and where keys end for them."""
    if CAUSAL:
        end = tl.minimum(keys, (block + 1) * BLOCK_M)
        return tl.minimum(keys, block * BLOCK_M) // BLOCK_N * BLOCK_N, end
    return keys // BLOCK_N * BLOCK_N, keys
