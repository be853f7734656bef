# mypy: ignore-errors
# ruff: noqa: N803
"""Triton: attention in one pass over the keys, and the statistics of rows of logits.

Online softmax is algebraically the gates' output, sum_j sigma(z_j - theta_j) v_j = (sum_j e_j v_j)
/ (sum_j e_j). With STATISTICS the kernel finds the top-2 statistics of Eq. 11 on the way, or of
them only what gates need; without VALUES it does only that, as the first pass of the literal form.
"""

import triton
import triton.language as tl

from threshold_gating.kernels.attention.launch import Statistics
from threshold_gating.kernels.attention.tiles import (
    ADD,
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
from threshold_gating.kernels.instructions import INTERPRETED, LOG2E, constants

UNASKED, OTHERS, TOP2 = constants(Statistics)
COUNT: tl.constexpr = tl.constexpr(262144)  # far above every place in a tile
LANES: tl.constexpr = tl.constexpr(4)  # `pairs`: lane l holds columns 2 l and 2 l + 1 of every 8


@triton.jit
def pairs(x):
    """The columns of a lane side by side, in the last axis.

    Straight from a product they lie in one thread, so that a reduction is local.
    """
    x = tl.reshape(x, [x.shape[0], x.shape[1] // (2 * LANES), LANES, 2])
    x = tl.permute(x, [0, 2, 1, 3])
    return tl.reshape(x, [x.shape[0], LANES, x.shape[2] * 2])


@triton.jit
def every_fourth(x):
    """The same where a mask has moved logits to other threads, which `pairs` does not survive."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES])


@triton.jit
def lane_sum(x, PAIRED: tl.constexpr):
    """Of each lane; a third axis is kept: no layout but this one has three, so none is changed."""
    if PAIRED:
        return tl.sum(pairs(x), 2, keep_dims=True)
    return tl.sum(every_fourth(x), 1)[:, :, None]


@triton.jit
def lane_second(e, PAIRED: tl.constexpr):
    """Of each lane the largest e < 0: as integers the least, and three are compared at once.

    The bits of floats < 0 are integers < 0 that grow away from 0; those of the others are >= 0.
    """
    bits = e.to(tl.int32, bitcast=True)
    if PAIRED:
        least = tl.min(pairs(bits), 2, keep_dims=True)
    else:
        least = tl.min(every_fourth(bits), 1)[:, :, None]
    return least.to(tl.float32, bitcast=True)


@triton.jit
def entries(place, STATISTICS: tl.constexpr):
    """How many have been added to `place`: rounded by adding what leaves no room for a fraction."""
    if STATISTICS == OTHERS:
        return place
    return (place * (1.0 / COUNT) + 12582912.0) - 12582912.0


@triton.jit
def spots(BLOCK_N: tl.constexpr, PAIRED: tl.constexpr, STATISTICS: tl.constexpr):
    """What an entry adds to `place`: COUNT and where it is in its lane, 0 amid the tile."""
    if STATISTICS == OTHERS:  # nobody asks where
        return tl.full([BLOCK_N], 1.0, tl.float32)
    column = tl.arange(0, BLOCK_N)
    first = (column & -(2 * LANES)) + (column & 1) if PAIRED else column & -LANES
    return (first + (COUNT - BLOCK_N // 2)).to(tl.float32)


@triton.jit
def product_below(x, y):
    """x y rounded down, so that fma(x, y, -product_below(x, y)) is not below 0."""
    if INTERPRETED:
        return x * y  # its fma rounds the product as well: the difference is 0
    return tl.inline_asm_elementwise(
        "mul.rm.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1
    )


@triton.jit
def is_below_zero(e):
    """1 where e < 0, else 0: -e 2^126, clipped, one instruction."""
    if INTERPRETED:
        return tl.where(e < 0, 1.0, 0.0)
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.sat.f32 $0, $1, 0fFE800000;", "=f,f", [e], tl.float32, True, 1
    )


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
    the same sum without the entries equal to m1, and `place` adds the `spots` of such entries. They
    are those whose exponent is not below 0, for what is subtracted is rounded down; one that is
    lower by less than the rounding passes for a tie. TOP2 has `second`, too, the largest exponent
    of the others, and `tile`, where m1 was found. All but m1 and `tile` are kept apart for each
    lane of columns and joined at the end. Products with 0 and 1 stand for selections: multipliers
    have time, comparers do not.
    """
    for start in tl.range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        z = logits(
            q, k_base, k_row, start, rows, queries, keys, mask, mask_row, mask_column, factor,
            EDGE, CAUSAL, MASK, D, BLOCK_D, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
        new = tl.maximum(m1, tl.max(z, 1))  # (BLOCK_M,)
        top = finite(new)
        level = product_below(top, unit) if STATISTICS != UNASKED else top * unit
        e = tl.fma(z, unit, -level[:, None])  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(e)
        fall = (m1 - top) * unit
        shrink = tl.exp2(fall)
        if STATISTICS == UNASKED:
            total = total * shrink[:, None, None] + lane_sum(p, MASK == NONE)
        else:
            rises = (new > m1)[:, None, None]  # (BLOCK_M, 1, 1)
            other = is_below_zero(e)
            # entries equal to the old maximum are among the others now
            old = tl.where(rises, entries(place, STATISTICS), 0.0)
            rest = (rest + old) * shrink[:, None, None]
            rest += lane_sum(p * other, MASK == NONE)  # (BLOCK_M, LANES, 1), as second and place
            spot = spots(BLOCK_N, MASK == NONE, STATISTICS)[None, :]
            place = tl.where(rises, 0.0, place) + (
                lane_sum(spot, MASK == NONE) - lane_sum(other * spot, MASK == NONE)
            )
            if STATISTICS == TOP2:
                second = tl.where(rises, 0.0, second) + fall[:, None, None]
                second = tl.maximum(second, lane_second(e, MASK == NONE))
                tile = tl.where(new > m1, start, tile)
        if VALUES:
            acc = weigh(
                acc * shrink[:, None], p, v_base, v_row, start, keys,
                DV, BLOCK_DV, BLOCK_N, EDGE, PRECISION, DOT,
            )  # fmt: skip
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
        z = logits(
            q, k_base, k_row, start, rows, queries, keys, mask, mask_row, mask_column, factor,
            True, CAUSAL, MASK, D, BLOCK_D, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
        peak = tl.max(z, 1)  # (BLOCK_M,)
        rises = peak > m1  # strictly, so the first maximum keeps the index
        first = tl.min(tl.where(z == peak[:, None], columns[None, :], 0x7FFFFFFF), 1)
        # only a new maximum is taken out of the tile: an equal one is among the others
        out = columns[None, :] == tl.where(rises, first, -1)[:, None]
        others = tl.where(out, -INF, z)  # (BLOCK_M, BLOCK_N)
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
def joined(
    m1, unit, rest, second, tile, place,
    PAIRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The lanes of `sweep` joined: (T, i1, m2, sum of all, what m1 is in exponents, rare).

    Rare are ties, which have no one place, and peaks so high that exp2 underflows below them.
    """
    rest = tl.reshape(rest, [BLOCK_M, LANES])
    second = tl.reshape(second, [BLOCK_M, LANES])
    place = tl.reshape(place, [BLOCK_M, LANES])
    tops = entries(place, TOP2)  # entries equal to m1
    start = tl.arange(0, LANES) * (2 if PAIRED else 1)
    lane = place - tops * COUNT + (BLOCK_N // 2 + start[None, :])
    i1 = tile + tl.sum(tl.where(tops > 0, lane, 0.0), 1).to(tl.int32)
    T, second, tops = tl.sum(rest, 1), tl.max(second, 1), tl.sum(tops, 1)  # (BLOCK_M,) each
    top = finite(m1)
    level = product_below(top, unit)
    above = tl.fma(top, unit, -level)  # the exponent of entries equal to m1, hardly more than 0
    whole = T + tops * tl.exp2(above)
    m2 = m1 + (second - above) / unit  # -inf if no other entry is left
    T = T / tl.where(second == -INF, 1.0, tl.exp2(second))
    rare = (tops > 1) | ((second < -64) & (tops > 0))
    return T, i1, m2, whole, level, rare


@triton.jit
def joined_others(m1, unit, rest, place, BLOCK_M: tl.constexpr):
    """The lanes of `sweep` joined under OTHERS: (sum of all but the largest in units of exp(m1),
    sum of all, m1 as an exponent).

    Of entries equal to m1 all but one are among the others.
    """
    T = tl.sum(tl.reshape(rest, [BLOCK_M, LANES]), 1)  # (BLOCK_M,)
    tops = tl.sum(tl.reshape(place, [BLOCK_M, LANES]), 1)
    top = finite(m1)
    level = product_below(top, unit)
    peak = tl.exp2(tl.fma(top, unit, -level))
    return T / peak + tl.maximum(tops - 1.0, 0.0), T + tops * peak, level


@triton.jit
def swept(
    q, k_base, k_row, v_base, v_row, rows, block, queries, keys,
    mask, mask_row, mask_column, factor, unit,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, VALUES: tl.constexpr, STATISTICS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state of `sweep` after all keys: first those that every row sees, then those at an edge;
    and where the keys end."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m1 = tl.full([BLOCK_M], -INF, tl.float32)
    total = tl.zeros([BLOCK_M, LANES, 1], tl.float32)
    rest, place, tile = total, total, tl.zeros([BLOCK_M], tl.int32)
    second = total - INF
    full, end = key_range(block, keys, CAUSAL, BLOCK_M, BLOCK_N)
    for edge in tl.static_range(2):
        acc, m1, total, rest, second, tile, place = sweep(
            acc, m1, total, q, k_base, k_row, v_base, v_row, rows,
            full if edge else 0, end if edge else full, queries, keys,
            mask, mask_row, mask_column, factor, unit, rest, second, tile, place,
            edge, CAUSAL, MASK, VALUES, STATISTICS,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
    return acc, m1, total, rest, second, tile, place, end


@triton.jit
def statistics(
    m1, rest, second, tile, place, inside, q, k_base, k_row, rows, end, queries, keys,
    mask, mask_row, mask_column, factor, unit,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(m1, i1, m2, T, sum of all, what m1 is in exponents) of the state of `sweep`; where a row is
    rare, by a second pass."""
    T, i1, m2, whole, level, rare = joined(
        m1, unit, rest, second, tile, place, MASK == NONE, BLOCK_M, BLOCK_N
    )
    if tl.max(tl.where(inside & rare, 1, 0)) > 0:
        m1, i1, m2, T = merge_tiles(
            tl.full([BLOCK_M], -INF, tl.float32), tl.zeros([BLOCK_M], tl.int32),
            tl.full([BLOCK_M], -INF, tl.float32), tl.zeros([BLOCK_M], tl.float32),
            q, k_base, k_row, rows, 0, end, queries, keys,
            mask, mask_row, mask_column, factor, unit,
            CAUSAL, MASK, D, BLOCK_D, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
    return m1, i1, m2, T, whole, level


@triton.jit
def store_statistics(
    levels, index, row, plane, m1, i1, m2, T, empty, inside, unit, VALUES: tl.constexpr
):
    """m1, m2, T and i1 of each row; the second pass, without VALUES, wants the bare products."""
    told = unit * (1.0 / LOG2E) if VALUES else 1.0
    tl.store(levels + row, m1 * told, mask=inside)
    tl.store(levels + plane + row, m2 * told, mask=inside)
    tl.store(levels + 2 * plane + row, T, mask=inside)
    if index is not None:
        tl.store(index + row, tl.where(empty, 0, i1), mask=inside)


@triton.jit
def store_lse(lse, row, plane, level, spread, empty, inside, MASK: tl.constexpr):
    """+inf for a row without keys: the backward finds exp2(z - inf) = 0 there. A large mask would
    swallow the second term, so both are kept then."""
    level = level if MASK == ADD else level + spread
    tl.store(lse + row, tl.where(empty, INF, level), mask=inside)
    if MASK == ADD:
        tl.store(lse + plane + row, spread, mask=inside)


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
    With OTHERS, T is in units of exp(m1), m1 also stands in the place of m2, and there is no i1.
    `lse` (1 plane or, under an added mask, 2) is in base 2.
    """
    block, at, batch, head, rows, factor, unit, q_tile = queries_of_program(
        q, tau, q_batch, q_head, q_row, heads, queries, scale, MASK, TAU, D, BLOCK_D, BLOCK_M, DOT
    )
    k_base = rows_of_head(k, batch, head // group, k_batch, k_head)
    v_base = rows_of_head(v, batch, head // group, v_batch, v_head)
    mask_base = mask + batch * mask_batch + head * mask_head if MASK != NONE else mask
    acc, m1, total, rest, second, tile, place, end = swept(
        q_tile, k_base, k_row, v_base, v_row, rows, block, queries, keys,
        mask_base, mask_row, mask_column, factor, unit, CAUSAL, MASK, VALUES, STATISTICS,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, DOT,
    )  # fmt: skip
    inside = rows < queries
    empty = m1 == -INF
    plane = tl.num_programs(1).to(tl.int64) * queries
    row = at * queries + rows
    if STATISTICS == TOP2:
        m1, i1, m2, T, whole, level = statistics(
            m1, rest, second, tile, place, inside, q_tile, k_base, k_row, rows, end, queries, keys,
            mask_base, mask_row, mask_column, factor, unit,
            CAUSAL, MASK, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DOT,
        )  # fmt: skip
        store_statistics(levels, index, row, plane, m1, i1, m2, T, empty, inside, unit, VALUES)
    elif STATISTICS == OTHERS:
        T, whole, level = joined_others(m1, unit, rest, place, BLOCK_M)
        store_statistics(levels, None, row, plane, m1, 0, m1, T, empty, inside, unit, VALUES)
    else:
        whole = tl.sum(tl.reshape(total, [BLOCK_M, LANES]), 1)  # (BLOCK_M,)
        level = finite(m1) * unit
    whole = tl.where(empty, 1.0, whole)
    spread = tl.log2(whole)
    if VALUES:
        acc = acc * tl.where(empty, 0.0, 1.0 / whole)[:, None]
        store_rows(
            out + batch * o_batch + head * o_head, o_row, block * BLOCK_M, queries, acc,
            BLOCK_M, DV, BLOCK_DV,
        )  # fmt: skip
    store_lse(lse, row, plane, level, spread, empty, inside, MASK)
