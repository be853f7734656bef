# mypy: ignore-errors
# ruff: noqa: N803
"""Triton: attention in one pass over the keys, and the statistics of rows of logits.

Online softmax is algebraically the gates' output, sum_j sigma(z_j - theta_j) v_j = (sum_j e_j v_j)
/ (sum_j e_j). With STATISTICS the kernel finds the top-2 statistics of Eq. 11 on the way; without
VALUES it does only that, as the first pass of the literal form. The sign of `unit` sits in q,
because the largest product has to be the largest logit.
"""

import triton
import triton.language as tl

from threshold_gating.kernels.flash_tiles import (
    ADD,
    INF,
    INTERPRETED,
    LOG2E,
    NONE,
    factor_of,
    finite,
    key_range,
    load_rows,
    logits,
    store_rows,
)

COUNT: tl.constexpr = tl.constexpr(65536)  # far above every place in a tile
LANES: tl.constexpr = tl.constexpr(8)  # a thread holds columns 2 l and 2 l + 1 of every 8


@triton.jit
def over_lanes(x):
    """Columns 8 apart side by side: they lie in one thread, so a reduction of axis 1 is local."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES])


@triton.jit
def entries(place):
    """How many have been added to `place`: rounded by adding what leaves no room for a fraction."""
    return (place * (1.0 / COUNT) + 12582912.0) - 12582912.0


@triton.jit
def is_below(x, y):
    """0 where x = y and 1 where x < y: (y - x) 2^80, rounded once and clipped, one instruction."""
    if INTERPRETED:
        return tl.where(x < y, 1.0, 0.0)
    return tl.inline_asm_elementwise(
        "fma.rn.ftz.sat.f32 $0, $1, 0fE7800000, $2;",
        "=f,f,f", [x, y * 1208925819614629174706176.0], tl.float32, True, 1,
    )  # fmt: skip


@triton.jit
def sweep(
    acc, m1, total, q, k_base, k_row, v_base, v_row, rows, lo, hi, queries, keys,
    mask, mask_row, mask_column, factor, unit, rest, second, tile, place,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, VALUES: tl.constexpr,
    STATISTICS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Keys `lo` to `hi` into the running state of some rows: online softmax.

    m1 is the maximum and `total` = sum_j exp(z_j - m1). With STATISTICS there is `rest` instead,
    the same sum without the entries equal to m1, and `second`, its largest term; `tile` is where m1
    was found, and `place` adds for each such entry COUNT and LANES times its group of columns,
    counted from 1. All but m1 and `tile` are kept apart for each lane of columns and joined at the
    end. Products with 0 and 1 stand for selections: multipliers have time, comparers do not.
    """
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, k_row, start, keys, BLOCK_N, D, BLOCK_D, EDGE).to(DOT)
        z = logits(
            q, k, rows, columns, queries, keys, mask, mask_row, mask_column, factor,
            EDGE, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        new = tl.maximum(m1, tl.max(z, 1))
        top = finite(new)
        p = tl.exp2(z * unit - (top * unit)[:, None])
        shrink = tl.exp2((m1 - top) * unit)
        if STATISTICS:
            rises = (new > m1)[:, None]
            other = is_below(z, top[:, None])
            # entries equal to the old maximum are among the others now
            rest = (rest + tl.where(rises, entries(place), 0.0)) * shrink[:, None]
            others = p * other
            rest += tl.sum(over_lanes(others), 1)
            second = tl.where(rises, 1.0, second) * shrink[:, None]
            second = tl.maximum(second, tl.max(over_lanes(others), 1))
            group = ((tl.arange(0, BLOCK_N) & -LANES) + (COUNT + LANES)).to(tl.float32)
            place = tl.where(rises, 0.0, place) + (
                tl.sum(over_lanes(group[None, :]), 1)
                - tl.sum(over_lanes(other * group[None, :]), 1)
            )
            tile = tl.where(new > m1, start, tile)
        else:
            total = total * shrink[:, None] + tl.sum(over_lanes(p), 1)
        if VALUES:
            v = load_rows(v_base, v_row, start, keys, BLOCK_N, DV, BLOCK_DV, EDGE).to(DOT)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(DOT), v, acc, input_precision=PRECISION)
        m1 = new
    return acc, m1, total, rest, second, tile, place


@triton.jit
def merge_tiles(
    m1, i1, m2, T, q, k_base, k_row, rows, lo, hi, queries, keys,
    mask, mask_row, mask_column, factor, unit,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The statistics of keys `lo` to `hi` merged into those of some rows, as `logits.merge` does.

    Right at ties and at any height of a peak, and slower than `sweep`.
    """
    for start in tl.range(lo, hi, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, k_row, start, keys, BLOCK_N, D, BLOCK_D, True).to(DOT)
        z = logits(
            q, k, rows, columns, queries, keys, mask, mask_row, mask_column, factor,
            True, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        peak = tl.max(z, 1)
        rises = peak > m1  # strictly, so the first maximum keeps the index
        first = tl.min(tl.where(z == peak[:, None], columns[None, :], 0x7FFFFFFF), 1)
        # only a new maximum is taken out of the tile: an equal one is among the others
        out = columns[None, :] == tl.where(rises, first, -1)[:, None]
        others = tl.where(out, -INF, z)
        new = tl.maximum(tl.maximum(m2, tl.max(others, 1)), tl.where(rises, m1, -INF))
        second = finite(new)
        T = T * tl.exp2((m2 - second) * unit) + tl.sum(
            tl.exp2((others - second[:, None]) * unit), 1
        )
        T += tl.where(rises, tl.exp2((m1 - second) * unit), 0.0)
        m1, m2 = tl.maximum(m1, peak), new
        i1 = tl.where(rises, first, i1)
    return m1, i1, m2, T


@triton.jit
def forward(
    q, k, v, mask, tau, out, lse, levels, index,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, mask_batch, mask_head, mask_row, mask_column,
    heads, group, queries, keys, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, TAU: tl.constexpr, VALUES: tl.constexpr,
    STATISTICS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of each row (VALUES), m1, m2, T and i1 of each (STATISTICS).

    `levels` (3, B, H, L) are logits if there are VALUES, else bare products for the second pass.
    `lse` (1 plane or, under an added mask, 2) is in base 2.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the longest first
    at = tl.program_id(1).to(tl.int64)
    batch, head = at // heads, at % heads
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    factor = factor_of(scale, tau, head, TAU)
    sign = tl.where(factor < 0, -1.0, 1.0)
    factor = tl.maximum(factor * sign, 1e-30)  # not 0: it meets -inf
    unit = 1.0 if MASK == ADD else factor
    q_tile = load_rows(
        q + batch * q_batch + head * q_head, q_row, block * BLOCK_M, queries,
        BLOCK_M, D, BLOCK_D, True,
    )  # fmt: skip
    q_tile = (q_tile * sign).to(DOT)
    k_base = k + batch * k_batch + head // group * k_head
    v_base = v + batch * v_batch + head // group * v_head
    mask_base = mask + batch * mask_batch + head * mask_head if MASK != NONE else mask
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m1 = tl.full([BLOCK_M], -INF, tl.float32)
    total = tl.zeros([BLOCK_M, LANES], tl.float32)
    rest, second, place, tile = total, total, total, tl.zeros([BLOCK_M], tl.int32)
    full, end = key_range(block, keys, CAUSAL, BLOCK_M, BLOCK_N)
    acc, m1, total, rest, second, tile, place = sweep(
        acc, m1, total, q_tile, k_base, k_row, v_base, v_row, rows, 0, full, queries, keys,
        mask_base, mask_row, mask_column, factor, unit, rest, second, tile, place,
        False, CAUSAL, MASK, VALUES, STATISTICS,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DOT,
    )  # fmt: skip
    acc, m1, total, rest, second, tile, place = sweep(
        acc, m1, total, q_tile, k_base, k_row, v_base, v_row, rows, full, end, queries, keys,
        mask_base, mask_row, mask_column, factor, unit, rest, second, tile, place,
        True, CAUSAL, MASK, VALUES, STATISTICS,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DOT,
    )  # fmt: skip
    inside = rows < queries
    empty = m1 == -INF
    plane = tl.num_programs(1).to(tl.int64) * queries
    row = at * queries + rows
    if STATISTICS:
        tops = entries(place)  # entries equal to m1
        lane = place - tops * COUNT - LANES + tl.arange(0, LANES)[None, :]
        i1 = tile + tl.sum(tl.where(tops > 0, lane, 0.0), 1).to(tl.int32)
        T, second, tops = tl.sum(rest, 1), tl.max(second, 1), tl.sum(tops, 1)
        whole = T + tops
        gap = -tl.log2(second)  # m1 - m2; inf if no other entry is left
        m2 = m1 - gap / unit
        T = T / tl.where(second == 0, 1.0, second)
        # Ties have no one place, and p underflows far below a peak: both are rare.
        if tl.max(tl.where(inside & ((tops > 1) | ((gap > 64) & (tops > 0))), 1, 0)) > 0:
            m1, i1, m2, T = merge_tiles(
                tl.full([BLOCK_M], -INF, tl.float32), tl.zeros([BLOCK_M], tl.int32),
                tl.full([BLOCK_M], -INF, tl.float32), tl.zeros([BLOCK_M], tl.float32),
                q_tile, k_base, k_row, rows, 0, end, queries, keys,
                mask_base, mask_row, mask_column, factor, unit,
                CAUSAL, MASK, D, BLOCK_D, BLOCK_N, PRECISION, DOT,
            )  # fmt: skip
        told = unit * (1.0 / LOG2E) if VALUES else 1.0  # the second pass wants the bare products
        tl.store(levels + row, m1 * told, mask=inside)
        tl.store(levels + plane + row, m2 * told, mask=inside)
        tl.store(levels + 2 * plane + row, T, mask=inside)
        tl.store(index + row, tl.where(empty, 0, i1), mask=inside)
    else:
        whole = tl.sum(total, 1)
    whole = tl.where(empty, 1.0, whole)
    spread = tl.log2(whole)
    if VALUES:
        acc = acc * tl.where(empty, 0.0, 1.0 / whole)[:, None]
        store_rows(
            out + batch * o_batch + head * o_head, o_row, block * BLOCK_M, queries, acc,
            BLOCK_M, DV, BLOCK_DV,
        )  # fmt: skip
    # +inf for a row without keys: the backward finds exp2(z - inf) = 0 there. A large mask would
    # swallow the second term, so both are kept then.
    level = m1 * unit if MASK == ADD else m1 * unit + spread
    tl.store(lse + row, tl.where(empty, INF, level), mask=inside)
    if MASK == ADD:
        tl.store(lse + plane + row, spread, mask=inside)
