"""What the kernels of synapses share: gates, means of branches and slopes of one tile, in Triton.

What limits them are special functions, of which a multiprocessor has 16 a clock beside 128 of the
rest. So two denominators share one reciprocal: 1 / a and 1 / b are b r and a r with r = 1 / (a b),
three special functions for two gates. The exponentials are bounded by 2^60 for it: a gate that
would be less than 2^-60 is 0, so that x times it is nothing however large x is. Everything is
float32, and of two gates that sum to 1 neither is taken off 1: where one is nearly 1 the other has
all its digits, and g (1 - g) is their product.

FAST takes one special function for a synapse of two branches, t = tanh(tau (x - theta) / 2), which
is the upper gate less the lower. A mean is the middle of both branches and t times half of what is
between them: neither gate is made. x - theta is made, because tau x - tau theta cancels where both
are large.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.instructions import INTERPRETED, LOG2E, exp2, inverse

_MOST = tl.constexpr(60.0)  # of an exponent: the product of two denominators must not overflow
_FAR = tl.constexpr(2.0**100)  # beyond it an exponent is as good as infinite


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
    """What the other branches weigh against the middle one (K = 3) or the upper (K = 2), and
    whether that one weighs nothing.

    Of the other two of K = 3 the same is taken off where one is beyond the bound: what they weigh
    against each other stays.
    """
    low = (z - gate[TAUS]) * (gate[0] * -LOG2E)
    if K == 2:
        odds = (exp2(not_above(low, _MOST)), low >= _MOST)
    else:
        high = (z - gate[TAUS + 1]) * (gate[TAUS - 1] * LOG2E)
        low, high = not_above(low, _FAR), not_above(high, _FAR)
        most = tl.maximum(low, high)
        off = tl.maximum(most - _MOST, 0.0)
        odds = (exp2(low - off), exp2(high - off), most >= _MOST)
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
def branches(line, K: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr):
    """Slopes and constants as `mean_of` takes them: of K = 2 where it starts, and how far it goes
    with the upper gate, or with FAST's t."""
    found = line
    if K == 2:
        found = _between(line[0], line[1], FAST)
        if CONSTANTS:
            found = found + _between(line[2], line[3], FAST)
    return found


@triton.jit
def _between(low, high, FAST: tl.constexpr):
    rise = high - low
    if FAST:
        rise *= 0.5
        low += rise
    return low, rise


@triton.jit
def opened(z, gate, K: tl.constexpr, TAUS: tl.constexpr, FAST: tl.constexpr):
    """(odds, their sum with 1); FAST has t, which needs no reciprocal."""
    if FAST:
        below = tanh_approx((z - gate[1]) * (gate[0] * 0.5))
        odds = (below,)
    else:
        odds = _odds(z, gate, K, TAUS)
        below = 1.0 + odds[0] if K == 2 else tl.where(odds[2], 0.0, 1.0) + (odds[0] + odds[1])
    return odds, below


@triton.jit
def _gates(odds, share, K: tl.constexpr):
    own = tl.where(odds[K - 1], 0.0, share)
    gates = (odds[0] * share, own)
    if K == 3:
        gates = gates + (odds[1] * share,)
    return gates


@triton.jit
def gates_of(odds, below, K: tl.constexpr, FAST: tl.constexpr):
    """The K gates of each of two synapses; (t,) where FAST."""
    if FAST:
        gates = odds
    else:
        r = inverse(below[0] * below[1])
        gates = (_gates(odds[0], r * below[1], K), _gates(odds[1], r * below[0], K))
    return gates


@triton.jit
def mean_of(gates, line, at: tl.constexpr, K: tl.constexpr):
    """The mean of slopes (at 0) or constants (at K), `line` being their `branches`."""
    if K == 2:
        found = line[at] + gates[-1] * line[at + 1]
    else:
        found = gates[0] * line[at] + gates[1] * line[at + 1] + gates[2] * line[at + 2]
    return found


@triton.jit
def outer_turns(z, gates, line, CONSTANTS: tl.constexpr):
    """K = 3: what a unit of the logits of the outer gates adds to the synapse."""
    across = branch_less(z, line, 0, 2, 3, CONSTANTS)
    low = gates[1] * branch_less(z, line, 0, 1, 3, CONSTANTS) + gates[2] * across
    high = gates[1] * branch_less(z, line, 2, 1, 3, CONSTANTS) - gates[0] * across
    return gates[0] * low, gates[2] * high


@triton.jit
def slope_of(
    z,
    gates,
    gate,
    line,
    K: tl.constexpr,
    TAUS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """d synapse / d x, `line` being the `branches`."""
    if K == 2:
        # of the upper gate, or of t: tau / 2 (1 - t^2)
        turn = (
            (1.0 - gates[0] * gates[0]) * (gate[0] * 0.5) if FAST else gates[0] * gates[1] * gate[0]
        )
        slope = line[0] + (gates[-1] + turn * z) * line[1]
        if CONSTANTS:
            slope += turn * line[3]
    else:
        turns = outer_turns(z, gates, line, CONSTANTS)
        slope = mean_of(gates, line, 0, 3) + turns[1] * gate[TAUS - 1] - turns[0] * gate[0]
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
