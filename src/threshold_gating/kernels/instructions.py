# mypy: ignore-errors
"""Triton: constants and single instructions that kernels share; imported when one first runs."""

import math
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(math.log2(math.e))


def constants(kind):
    """The members of an enum, in their order, as kernels read them."""
    return [tl.constexpr(int(member)) for member in kind]


@triton.jit
def exp2(x):
    """2^x; what would be subnormal is 0."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def inverse(x):
    """1 / x to one unit in the last place; 0 for inf."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def inverses(x):
    """1 / x of numbers whose products in pairs are finite and not 0, by one reciprocal a pair.

    r = 1 / (a b) gives 1 / a = b r and 1 / b = a r: a special function takes eight products' time.
    """
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        """{
            .reg .f32 r;
            mul.f32 r, $2, $3;
            rcp.approx.ftz.f32 r, r;
            mul.f32 $0, r, $3;
            mul.f32 $1, r, $2;
        }""",
        "=&f,=&f,f,f", [x], tl.float32, True, 2,
    )  # fmt: skip
