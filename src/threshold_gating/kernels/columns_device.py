"""A matrix of K branches times one vector under hard gates, as a Triton kernel.

Imported when it first runs. Of each input's K columns the one of its region is read, the others are
not: as many bytes as one matrix has.
"""

# mypy: ignore-errors
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chosen_columns(
    x, theta, owner, shift, columns, sums, inner, outer, chunk,
    J: tl.constexpr, PER_COLUMN: tl.constexpr, SHIFTED: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """sums[part, o] = sum over the inputs i of a part, in region k, of (x_i + c_ki) w[k, i, o]."""
    part = tl.program_id(1)
    o = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    total = tl.zeros((INNER, OUTER), tl.float32)
    for start in range(0, chunk, INNER):
        i = part * chunk + start + tl.arange(0, INNER)
        inside = (i < inner) & (start + tl.arange(0, INNER) < chunk)
        z = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        region = tl.zeros((INNER,), tl.int64)
        for j in tl.static_range(J):
            at = tl.load(
                theta + (j * inner + i if PER_COLUMN else j + 0 * i), mask=inside, other=0.0
            )
            above = tl.where(tl.load(owner + j) != 0, z >= at, z > at)
            region += above.to(tl.int64)
        place = region * inner + i
        if SHIFTED:
            z += tl.load(shift + (place if PER_COLUMN else region), mask=inside, other=0.0)
        both = inside[:, None] & (o[None, :] < outer)
        w = tl.load(columns + (place * outer)[:, None] + o[None, :], mask=both, other=0.0)
        total += w.to(tl.float32) * z[:, None]
    tl.store(sums + part * outer + o, tl.sum(total, 0), mask=o < outer)
