"""What the kernels of synapses share: gates, means of branches and slopes of one tile, in Triton.

What limits them are special functions, of which a multiprocessor has 16 a clock beside 128 of the
rest. So two denominators share one reciprocal: 1 / a and 1 / b are b r and a r with r = 1 / (a b),
three special functions for two gates. The exponentials are bounded by 2^60 for it: a gate is never
less than 2^-60. Everything is float32.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.instructions import INTERPRETED, LOG2E, exp2, inverse

_MOST = tl.constexpr(60.0)  # of an exponent: the product of two denominators must not overflow
_CROSSED = tl.constexpr(30.0)


@triton.jit
def tanh_approx(x):
    """By one special function: 8e-6 from exact on an H200, where 2^-11 of it is promised."""
    if INTERPRETED:
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def not_above(a, b):
    """The smaller one, and NaN where one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def parameter_rows(pointer, width, columns, inside, COUNT: tl.constexpr):
    """COUNT rows of parameters, one behind the other, each (1, columns)."""
    found = ()
    for k in tl.static_range(COUNT):
        w = tl.load(pointer + k * width + columns, mask=inside, other=0.0)
        found = found + (w[None, :],)
    return found


@triton.jit
def tile_of(pointer, width, step, columns, inside, COUNT: tl.constexpr):
    """COUNT kinds of parameters of a tile of synapses."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(pointer + step + k * width + columns, mask=inside, other=0.0),)
    return found


@triton.jit
def _odds(z, gate, K: tl.constexpr, TAUS: tl.constexpr):
    """What the other branches weigh against the middle one (K = 3) or the upper (K = 2).

    Thresholds that have crossed, with a middle branch that weighs nothing between them, take the
    same off both: no more than 2^-30 of a gate is lost.
    """
    low = (z - gate[TAUS]) * (gate[0] * -LOG2E)
    if K == 2:
        odds = (exp2(not_above(low, _MOST)),)
    else:
        high = (z - gate[TAUS + 1]) * (gate[TAUS - 1] * LOG2E)
        both = tl.maximum(tl.minimum(low, high) - _CROSSED, 0.0)
        odds = (exp2(not_above(low - both, _MOST)), exp2(not_above(high - both, _MOST)))
    return odds


@triton.jit
def branch_less(
    z, line, k: tl.constexpr, less: tl.constexpr, K: tl.constexpr, CONSTANTS: tl.constexpr
):
    """Branch k less another one."""
    found = z * (line[k] - line[less])
    if CONSTANTS:
        found += line[K + k] - line[K + less]
    return found


@triton.jit
def opened(z, gate, K: tl.constexpr, TAUS: tl.constexpr, FAST: tl.constexpr):
    """(odds, their sum with 1); FAST has the gate itself, which needs no reciprocal."""
    if FAST:
        half = gate[0] * 0.5
        below = tanh_approx(z * half - gate[1] * half) * 0.5 + 0.5
        odds = (below,)
    else:
        odds = _odds(z, gate, K, TAUS)
        below = 1.0 + odds[0]
        if K == 3:
            below += odds[1]
    return odds, below


@triton.jit
def shares_of(below, FAST: tl.constexpr):
    """The gates of the upper (K = 2) or middle branch (K = 3) of two synapses."""
    if FAST:
        shares = below
    else:
        r = inverse(below[0] * below[1])
        shares = (r * below[1], r * below[0])
    return shares


@triton.jit
def mean_of(share, odds, line, at: tl.constexpr, K: tl.constexpr):
    """The mean of a row of `line` from `at` on."""
    if K == 2:
        found = line[at] + share * (line[at + 1] - line[at])
    else:
        found = line[at + 1] + (odds[0] * share) * (line[at] - line[at + 1])
        found += (odds[1] * share) * (line[at + 2] - line[at + 1])
    return found


@triton.jit
def outer_turns(z, share, odds, line, CONSTANTS: tl.constexpr):
    """K = 3: the outer gates, and what a unit of their logits adds to the synapse."""
    low, high = odds[0] * share, odds[1] * share
    a = low * branch_less(z, line, 0, 1, 3, CONSTANTS)
    b = high * branch_less(z, line, 2, 1, 3, CONSTANTS)
    return (low, high), (a - low * (a + b), b - high * (a + b))


@triton.jit
def slope_of(
    z, share, odds, gate, line, K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr
):
    """d synapse / d x."""
    if K == 2:
        turn = (share - share * share) * gate[0]
        slope = line[0] + (share + turn * z) * (line[1] - line[0])
        if CONSTANTS:
            slope += turn * (line[3] - line[2])
    else:
        gates, turns = outer_turns(z, share, odds, line, CONSTANTS)
        slope = line[1] + gates[0] * (line[0] - line[1]) + gates[1] * (line[2] - line[1])
        slope += turns[1] * gate[TAUS - 1] - turns[0] * gate[0]
    return slope


@triton.jit
def seen_row(table, tap, n, rows, each, others, TABLE: tl.constexpr):
    """(which of the other rows a tap sees from row n, whether there is one).

    The table is that of one image, of `each` rows and `others` of the other kind.
    """
    inside = n < rows
    at = n
    if TABLE:
        at = tl.load(table + tap * each + n % each, mask=inside, other=-1)
        inside = at >= 0
        at += n // each * others
    return at, inside
