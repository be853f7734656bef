"""A matrix of K branches times one vector under hard gates, as Triton kernels.

Imported when one first runs. Of each input's K columns the one of its region is read, the others
are not: as many bytes as one matrix has. The weights of a tile are asked for while those of the
tile before are still on their way: the time is that of reading them.
"""

# mypy: ignore-errors
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _threshold(
    theta0, dtheta, j, i, inner, inside, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr
):  # fmt: skip
    if PER_COLUMN:
        at = tl.load(theta0 + j * inner + i, mask=inside, other=0.0)
        if MOVED:
            at += tl.load(dtheta + j * inner + i, mask=inside, other=0.0)
    else:
        at = tl.load(theta0 + j)
        if MOVED:
            at += tl.load(dtheta + j)
    return at


@triton.jit
def _chosen(
    x, theta0, dtheta, c, columns, i, o, stop, inner, outer,
    J: tl.constexpr, OWNERS: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
    SHIFTED: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """x_i + c_ki for the inputs i, each in its region k, and w[k, i, o]."""
    inside = i < stop
    z = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    near = _threshold(theta0, dtheta, 0, i, inner, inside, MOVED, PER_COLUMN) + 0 * z
    region = tl.zeros(i.shape, tl.int32)
    for j in tl.static_range(J):
        at = _threshold(theta0, dtheta, j, i, inner, inside, MOVED, PER_COLUMN)
        if (OWNERS // (2**j)) % 2:
            region += (z >= at).to(tl.int32)
        else:
            region += (z > at).to(tl.int32)
    place = region * inner + i
    both = inside[:, None] & (o[None, :] < outer)
    where = columns + place.to(tl.int64)[:, None] * outer + o[None, :]
    w = tl.load(where, mask=both, other=0.0)
    if ANCHORED:  # the branch goes through its value at the threshold it is anchored at
        for j in tl.static_range(1, J):
            at = _threshold(theta0, dtheta, j, i, inner, inside, MOVED, PER_COLUMN)
            near = tl.where(region > j, at, near)
        z -= near
    if SHIFTED:
        z += tl.load(c + (place if PER_COLUMN else region), mask=inside, other=0.0)
    return tl.where(inside, z, 0.0), w


@triton.jit
def chosen_columns(
    x, theta0, dtheta, c, columns, bias, out, inner, outer, chunk,
    J: tl.constexpr, OWNERS: tl.constexpr, MOVED: tl.constexpr, PER_COLUMN: tl.constexpr,
    SHIFTED: tl.constexpr, ANCHORED: tl.constexpr, BIASED: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """out[part, o] = sum over the inputs i of a part, in region k, of (x_i + c_ki) w[k, i, o].

    `chunk` inputs, a multiple of INNER, are a part. The bias is for a part that is alone.
    """
    part = tl.program_id(1)
    o = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    first = part * chunk
    stop = tl.minimum(first + chunk, inner)
    i = first + tl.arange(0, INNER)
    total = tl.zeros((INNER, OUTER), tl.float32)
    z, w = _chosen(
        x, theta0, dtheta, c, columns, i, o, stop, inner, outer,
        J, OWNERS, MOVED, PER_COLUMN, SHIFTED, ANCHORED,
    )  # fmt: skip
    for start in range(first + INNER, stop, INNER):
        i = start + tl.arange(0, INNER)
        next_z, next_w = _chosen(
            x, theta0, dtheta, c, columns, i, o, stop, inner, outer,
            J, OWNERS, MOVED, PER_COLUMN, SHIFTED, ANCHORED,
        )  # fmt: skip
        total += w.to(tl.float32) * z[:, None]
        z, w = next_z, next_w
    total += w.to(tl.float32) * z[:, None]
    y = tl.sum(total, 0)
    if BIASED:
        y += tl.load(bias + o, mask=o < outer, other=0.0).to(tl.float32)
    tl.store(out + part * outer + o, y.to(out.dtype.element_ty), mask=o < outer)


@triton.jit
def added_parts(
    sums, bias, y, outer, parts,
    BIASED: tl.constexpr, PARTS: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """y = the sum of the parts, and the bias."""
    o = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    p = tl.arange(0, PARTS)
    inside = (p[:, None] < parts) & (o[None, :] < outer)
    each = tl.load(sums + p[:, None] * outer + o[None, :], mask=inside, other=0.0)
    total = tl.sum(each, 0)
    if BIASED:
        total += tl.load(bias + o, mask=o < outer, other=0.0).to(tl.float32)
    tl.store(y + o, total.to(y.dtype.element_ty), mask=o < outer)
