"""A matrix of K branches times one vector under hard gates, as a Triton kernel.

Imported when it first runs. Of each input's K columns the one of its region is read, the others are
not: as many bytes as one matrix has. Several tiles of weights are on their way at once. Where they
lie is known once x and its thresholds are there, so these are asked for a tile earlier.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, RUF005
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _asked(
    x, theta0, dtheta, i, inner, stop,
    J: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """What decides on the inputs i: x, then each threshold and what moves it if they have own."""
    inside = i < stop
    found = (tl.load(x + i, mask=inside, other=0.0),)
    if PER_COLUMN:
        for j in tl.static_range(J):
            found = found + (tl.load(theta0 + j * inner + i, mask=inside, other=0.0),)
            if MOVED:
                found = found + (tl.load(dtheta + j * inner + i, mask=inside, other=0.0),)
    return found


@triton.jit
def _threshold(
    theta0, dtheta, found, j: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr
):  # fmt: skip
    if PER_COLUMN:
        at = found[1 + 2 * j] + found[2 + 2 * j] if MOVED else found[1 + j]
    else:
        at = tl.load(theta0 + j)
        if MOVED:
            at += tl.load(dtheta + j)
    return at


@triton.jit
def _chosen(
    found, theta0, dtheta, c, columns, i, o, stop, inner, outer,
    J: tl.constexpr, OWNERS: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
    SHIFTED: tl.constexpr, ANCHORED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x_i + c_ki for the inputs i, each in its region k, and w[k, i, o]; zeros outside."""
    inside = i < stop
    z = found[0].to(tl.float32)
    near = _threshold(theta0, dtheta, found, 0, MOVED, PER_COLUMN) + 0 * z
    region = tl.zeros(i.shape, tl.int32)  # (INNER,)
    for j in tl.static_range(J):
        at = _threshold(theta0, dtheta, found, j, MOVED, PER_COLUMN)
        if (OWNERS // (2**j)) % 2:
            region += (z >= at).to(tl.int32)
        else:
            region += (z > at).to(tl.int32)
    place = region * inner + i
    row = place.to(tl.uint32).to(tl.uint64) * tl.cast(outer, tl.uint32)  # one instruction
    where = columns + row[:, None] + o[None, :]  # (INNER, OUTER)
    if EVEN:
        w = tl.load(where)
    else:
        w = tl.load(where, mask=inside[:, None] & (o[None, :] < outer), other=0.0)
    if ANCHORED:  # the branch goes through its value at the threshold it is anchored at
        for j in tl.static_range(1, J):
            at = _threshold(theta0, dtheta, found, j, MOVED, PER_COLUMN)
            near = tl.where(region > j, at, near)
        z -= near
    if SHIFTED:
        z += tl.load(c + (place if PER_COLUMN else region), mask=inside, other=0.0)
    if (SHIFTED or ANCHORED) and not EVEN:
        z = tl.where(inside, z, 0.0)
    return z, w


@triton.jit
def chosen_columns(
    x, theta0, dtheta, c, columns, bias, y, scratch, inner, outer, chunk, parts, room,
    J: tl.constexpr, OWNERS: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
    SHIFTED: tl.constexpr, ANCHORED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[o] = bias[o] + sum over the inputs i, in region k, of (x_i + c_ki) w[k, i, o].

    `chunk` inputs, a multiple of INNER, are a part. If there are several (PARTS, a power of two, is
    as many or more) every program leaves the sums of its own in `scratch`, and the last one done
    with a strip of outputs adds them up, in an order that does not depend on which one that is.
    `scratch` starts with `room` counters, one for each strip, which are 0 before and after. EVEN
    says that the tiles cover the weights without going beyond them.
    """
    strip, part = tl.program_id(0), tl.program_id(1)
    o = strip * OUTER + tl.arange(0, OUTER)
    first = part * chunk
    stop = tl.minimum(first + chunk, inner)
    total = tl.zeros((INNER, OUTER), tl.float32)
    i = first + tl.arange(0, INNER)
    ahead = _asked(x, theta0, dtheta, i, inner, stop, J, MOVED, PER_COLUMN)
    for start in tl.range(first, stop, INNER, num_stages=STAGES):
        i, now = start + tl.arange(0, INNER), ahead
        # Written before the weights: after them, Triton would not ask for it earlier.
        ahead = _asked(x, theta0, dtheta, i + INNER, inner, stop, J, MOVED, PER_COLUMN)
        z, w = _chosen(
            now, theta0, dtheta, c, columns, i, o, stop, inner, outer,
            J, OWNERS, MOVED, PER_COLUMN, SHIFTED, ANCHORED, EVEN,
        )  # fmt: skip
        total += w.to(tl.float32) * z[:, None]
    sums = tl.sum(total, 0)  # (OUTER,)
    inside = o < outer
    if PARTS == 1:
        _finish(sums, bias, y, o, inside, BIASED)
    else:
        left = scratch + room
        tl.store(left + part * outer + o, sums, mask=inside)
        tl.debug_barrier()  # all of it is there before it is counted
        done = tl.atomic_add(scratch + strip, 1.0, sem="acq_rel") + 1
        if done == parts:
            p = tl.arange(0, PARTS)
            both = (p[:, None] < parts) & inside[None, :]
            each = left + p[:, None] * outer + o[None, :]  # (PARTS, OUTER)
            sums = tl.sum(tl.load(each, mask=both, other=0.0, cache_modifier=".cg"), 0)
            _finish(sums, bias, y, o, inside, BIASED)
            tl.store(scratch + strip, 0.0)


@triton.jit
def _finish(sums, bias, y, o, inside, BIASED: tl.constexpr):
    if BIASED:
        sums += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + o, sums.to(y.dtype.element_ty), mask=inside)
