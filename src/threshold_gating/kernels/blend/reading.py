"""How kernels go through memory, and 16-bit elements as float32, as Triton functions.

A program has a stretch of tiles, one behind the other. `stretch` says where it begins and how far
apart its tiles lie, so that an address is one sum away from that of the tile before.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals.
# ruff: noqa: N803, N806, SIM300
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.blend.parameters import COLUMNS, ONE
from threshold_gating.kernels.instructions import INTERPRETED

_NEAR = tl.constexpr(2.0**40)  # far beyond every threshold that the short forms take


@triton.jit
def stretch(R, N, iters, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """(place of the first tile, step to the next, tiles, beside, along, left) of a program.

    An element of the i-th of all tiles is inside if it is `beside` the last row or column and
    `along` the stretch plus i tiles is less than what is `left`.
    """
    SIZE: tl.constexpr = RB * CB if LAYOUT == ONE else RB if LAYOUT == COLUMNS else CB
    program = tl.program_id(0)
    r, c = tl.arange(0, RB)[:, None], tl.arange(0, CB)[None, :]
    if LAYOUT == ONE:
        first = program.to(tl.int64) * iters * (RB * CB)
        along = r * CB + c  # (RB, CB)
        place, step = first + along, RB * CB
        beside, left = tl.full((1, 1), True, tl.int1), N - first
    elif LAYOUT == COLUMNS:
        across = tl.cdiv(N, CB)
        first, columns = (program // across).to(tl.int64) * iters * RB, program % across * CB + c
        along = r  # (RB, 1)
        place, step = (first + r) * N + columns, RB * N
        beside, left = columns < N, R - first
    else:
        across = tl.cdiv(R, RB)
        first, rows = (program // across).to(tl.int64) * iters * CB, program % across * RB + r
        along = c  # (1, CB)
        place, step = rows.to(tl.int64) * N + (first + c), CB
        beside, left = rows < R, N - first
    tiles = tl.minimum(tl.cdiv(left, SIZE), iters).to(tl.int32)
    return place, step, tiles, beside, along.to(tl.int64), left


@triton.jit
def inside(i, tiles, beside, along, left, LAYOUT: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """Which elements of the i-th tile there are; beyond the last tile of a program none."""
    found = beside & (i < tiles)
    if LAYOUT == ONE:
        found = found & (along + i * (RB * CB) < left)
    elif LAYOUT != COLUMNS:
        found = found & (along + i * CB < left)
    elif RB > 1:  # a tile of one row is there or not
        found = found & (along + i * RB < left)
    return found  # (RB, CB)


@triton.jit
def held(x):
    """x as it lies in registers: of 16-bit elements two in an int32, (RB, CB / 2).

    What is loaded now and used in the next round would be copied if it were 16-bit numbers.
    """
    if x.dtype == tl.float32:
        found = x
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        low, high = tl.split(tl.reshape(bits, (x.shape[0], x.shape[1] // 2, 2)))
        found = (low & 0xFFFF) | (high << 16)
    return found


@triton.jit
def widened(x, TYPE: tl.constexpr):
    """What is `held` as float32, (RB, CB); of bf16 two in two steps, where casts take three."""
    if TYPE == tl.float32:
        found = x
    else:
        if TYPE == tl.bfloat16:
            low, high = x << 16, x & -0x10000
            low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        else:
            low, high = x.to(tl.int16), (x >> 16).to(tl.int16)
            low = low.to(tl.float16, bitcast=True).to(tl.float32)
            high = high.to(tl.float16, bitcast=True).to(tl.float32)
        found = tl.reshape(tl.join(low, high), (x.shape[0], x.shape[1] * 2))
    return found


@triton.jit
def lessened(x, TYPE: tl.constexpr):
    """What is `held` / 256 as float32: its products with other numbers overflow later."""
    if INTERPRETED or TYPE != tl.bfloat16:
        found = widened(x, TYPE) * 0.00390625
    else:  # two at a time, x 2^-8 + -0
        less = tl.inline_asm_elementwise(
            """{
                .reg .b32 a, b;
                mov.b32 a, 0x3b803b80;
                mov.b32 b, 0x80008000;
                fma.rn.bf16x2 $0, $1, a, b;
            }""",
            "=r,r", [x], tl.int32, True, 1,
        )  # fmt: skip
        found = widened(less, TYPE)
    return found


@triton.jit
def brought_near(x, TYPE: tl.constexpr):
    """What is `held` as float32, of size 2^40 at most (65504 in float16); NaN stays NaN."""
    if INTERPRETED or TYPE == tl.float32:
        found = tl.minimum(widened(x, TYPE), _NEAR, propagate_nan=tl.PropagateNan.ALL)
        found = tl.maximum(found, -_NEAR, propagate_nan=tl.PropagateNan.ALL)
    elif TYPE == tl.bfloat16:  # two at a time: 2^40 is 0x5380
        near = tl.inline_asm_elementwise(
            """{
                .reg .b32 a, b, c;
                mov.b32 a, 0x53805380;
                mov.b32 b, 0xd380d380;
                min.NaN.bf16x2 c, $1, a;
                max.NaN.bf16x2 $0, c, b;
            }""",
            "=r,r", [x], tl.int32, True, 1,
        )  # fmt: skip
        found = widened(near, TYPE)
    else:
        near = tl.inline_asm_elementwise(
            """{
                .reg .b32 a, b, c;
                mov.b32 a, 0x7bff7bff;
                mov.b32 b, 0xfbfffbff;
                min.NaN.f16x2 c, $1, a;
                max.NaN.f16x2 $0, c, b;
            }""",
            "=r,r", [x], tl.int32, True, 1,
        )  # fmt: skip
        found = widened(near, TYPE)
    return found
