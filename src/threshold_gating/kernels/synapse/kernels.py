"""Gates of each synapse, y_no = sum_c sum_k g_k(x_nc) (w^k_oc x_nc + c^k_oc), as Triton kernels.

Imported when one first runs. A gate is evaluated where it is needed and never stored: the forward
pass goes over the inputs of a tile of outputs, `synapse_inputs` over the outputs for dx,
`synapse_parameters` over the rows for the parameters. Sums stay in registers: nothing is atomic.

What limits them are special functions, of which a multiprocessor has 16 a clock beside 128 of the
rest. So two denominators share one reciprocal: 1 / a and 1 / b are b r and a r with r = 1 / (a b),
three special functions for two gates. The exponentials are bounded by 2^60 for it: a gate is never
less than 2^-60.

A thread has one column and all rows of its tile (columns are 32 times the warps), so that it reads
a parameter once for all rows, and the other operand four at a time. Convolutions go by a table: at
[tap, row] which row of x the tap sees, -1 where it lies outside, where the synapse is silent.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.instructions import INTERPRETED, LOG2E, exp2, inverse

_MOST = tl.constexpr(60.0)  # of an exponent: the product of two denominators must not overflow
_CROSSED = tl.constexpr(30.0)


@triton.jit
def tanh(x):
    """By one special function, 5e-4 from exact."""
    if INTERPRETED:
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _row(pointer, columns, inside):
    return tl.load(pointer + columns, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rows(pointer, width, columns, inside, COUNT: tl.constexpr):
    """COUNT rows of parameters, one behind the other."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (_row(pointer + k * width, columns, inside),)
    return found


@triton.jit
def _odds(z, gate, K: tl.constexpr, TAUS: tl.constexpr):
    """What the other branches weigh against the middle one (K = 3) or the upper (K = 2).

    Thresholds that have crossed, with a middle branch that weighs nothing between them, take the
    same off both: no more than 2^-30 of a gate is lost.
    """
    low = (z - gate[TAUS]) * (gate[0] * -LOG2E)
    if K == 2:
        odds = (exp2(tl.minimum(low, _MOST)),)
    else:
        high = (z - gate[TAUS + 1]) * (gate[TAUS - 1] * LOG2E)
        both = tl.maximum(tl.minimum(low, high) - _CROSSED, 0.0)
        odds = (exp2(tl.minimum(low - both, _MOST)), exp2(tl.minimum(high - both, _MOST)))
    return odds


@triton.jit
def _line(z, line, k: tl.constexpr, less: tl.constexpr, K: tl.constexpr, CONSTANTS: tl.constexpr):
    """Branch k less another one."""
    found = z * (line[k] - line[less])
    if CONSTANTS:
        found += line[K + k] - line[K + less]
    return found


@triton.jit
def _opened(z, gate, K: tl.constexpr, TAUS: tl.constexpr, FAST: tl.constexpr):
    """(odds, their sum with 1); FAST has the gate itself, which needs no reciprocal."""
    if FAST:
        half = gate[0] * 0.5
        below = tanh(z * half - gate[1] * half) * 0.5 + 0.5
        odds = (below,)
    else:
        odds = _odds(z, gate, K, TAUS)
        below = 1.0 + odds[0]
        if K == 3:
            below += odds[1]
    return odds, below


@triton.jit
def _shares(below, FAST: tl.constexpr):
    """The gates of the upper (K = 2) or middle branch (K = 3) of two synapses."""
    if FAST:
        shares = below
    else:
        r = inverse(below[0] * below[1])
        shares = (r * below[1], r * below[0])
    return shares


@triton.jit
def _mean(share, odds, line, at: tl.constexpr, K: tl.constexpr):
    """The mean of a row of `line` from `at` on."""
    if K == 2:
        found = line[at] + share * (line[at + 1] - line[at])
    else:
        found = line[at + 1] + (odds[0] * share) * (line[at] - line[at + 1])
        found += (odds[1] * share) * (line[at + 2] - line[at + 1])
    return found


@triton.jit
def _seen(seen, tap, n, rows, TABLE: tl.constexpr):
    """(row that is seen, whether there is one)."""
    inside = n < rows
    at = n
    if TABLE:
        at = tl.load(seen + tap * tl.cast(rows, tl.int64) + n, mask=inside, other=-1)
        inside = at >= 0
    return at, inside


@triton.jit
def synapse_forward(
    x, gates, lines, seen, y, rows, across, inputs, outputs, taps, depth, apart,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TABLE: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x (groups * inputs, across) -> y (parts, rows, groups * outputs), a part `depth` inputs.

    gates (groups, taps or 1, inputs, TAUS + K - 1, outputs), lines (groups, taps, inputs, K or
    2 K, outputs).
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(outputs, COLUMNS)
    here, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = (here // wide) * ROWS + tl.arange(0, ROWS)
    o = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    there = o < outputs
    first = part * depth
    last = tl.minimum(first + depth, inputs)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tap in range(taps):
        at, inside = _seen(seen, tap, n, rows, TABLE)
        place = x + group.to(tl.int64) * inputs * across + at
        synapse = (group * taps + tap).to(tl.int64) * inputs
        pair = group.to(tl.int64) * inputs if SHARED else synapse
        before = total
        for c in tl.range(first, last, 2, num_stages=STAGES):
            z, line, odds, below = (), (), (), ()
            for j in tl.static_range(2):
                mine = there & (c + j < last)
                near = inside & (c + j < last)
                v = tl.load(place + (c + j) * tl.cast(across, tl.int64), mask=near, other=0.0)
                v = v.to(tl.float32)[:, None]
                g = _rows(gates + (pair + c + j) * GATES * outputs, outputs, o, mine, GATES)
                w = _rows(lines + (synapse + c + j) * LINES * outputs, outputs, o, mine, LINES)
                q, b = _opened(v, g, K, TAUS, FAST)
                z, line, odds, below = z + (v,), line + (w,), odds + (q,), below + (b,)
            shares = _shares(below, FAST)
            for j in tl.static_range(2):
                total += z[j] * _mean(shares[j], odds[j], line[j], 0, K)
                if CONSTANTS:
                    total += _mean(shares[j], odds[j], line[j], K, K)
        if CONSTANTS and TABLE:  # without constants a synapse is 0 at 0
            total = tl.where(inside[:, None], total, before)
    whole = outputs * tl.num_programs(1)
    place = y + part * apart + n.to(tl.int64)[:, None] * whole + (group * outputs + o)[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(n < rows)[:, None] & there[None, :])


@triton.jit
def _turned(z, share, odds, line, K: tl.constexpr, CONSTANTS: tl.constexpr):
    """(gates of all but the base, what a unit of their logits adds to the synapse)."""
    if K == 2:
        gates = (share,)
        turns = (_line(z, line, 1, 0, K, CONSTANTS) * (share - share * share),)
    else:
        low, high = odds[0] * share, odds[1] * share
        a = low * _line(z, line, 0, 1, K, CONSTANTS)
        b = high * _line(z, line, 2, 1, K, CONSTANTS)
        gates, turns = (low, high), (a - low * (a + b), b - high * (a + b))
    return gates, turns


@triton.jit
def _slope(
    z, share, odds, gate, line, K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr
):
    """d synapse / d x."""
    gates, turns = _turned(z, share, odds, line, K, CONSTANTS)
    if K == 2:
        slope = line[0] + gates[0] * (line[1] - line[0]) + turns[0] * gate[0]
    else:
        slope = line[1] + gates[0] * (line[0] - line[1]) + gates[1] * (line[2] - line[1])
        slope += turns[1] * gate[TAUS - 1] - turns[0] * gate[0]
    return slope


@triton.jit
def synapse_inputs(
    x, gates, lines, seeing, dy, dx, rows, across, inputs, outputs, taps, depth, apart,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TABLE: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx (parts, across, groups * inputs), part by part of `depth` outputs.

    x (across, groups * inputs), dy (groups * outputs, rows), parameters (groups, taps, outputs,
    kind, inputs); `seeing` is the table the other way round.
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(inputs, COLUMNS)
    here, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p = (here // wide) * ROWS + tl.arange(0, ROWS)
    c = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    there = c < inputs
    tile = (p < across)[:, None] & there[None, :]
    whole = inputs * tl.num_programs(1)
    place = p.to(tl.int64)[:, None] * whole + (group * inputs + c)[None, :]
    z = tl.load(x + place, mask=tile, other=0.0).to(tl.float32)
    first = part * depth
    last = tl.minimum(first + depth, outputs)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tap in range(taps):
        at, inside = _seen(seeing, tap, p, across, TABLE)
        down = dy + group.to(tl.int64) * outputs * rows + at
        synapse = (group * taps + tap).to(tl.int64) * outputs
        pair = group.to(tl.int64) * outputs if SHARED else synapse
        for o in tl.range(first, last, 2, num_stages=STAGES):
            d, gate, line, odds, below = (), (), (), (), ()
            for j in tl.static_range(2):
                mine = there & (o + j < last)
                near = inside & (o + j < last)
                g = _rows(gates + (pair + o + j) * GATES * inputs, inputs, c, mine, GATES)
                w = _rows(lines + (synapse + o + j) * LINES * inputs, inputs, c, mine, LINES)
                v = tl.load(down + (o + j) * tl.cast(rows, tl.int64), mask=near, other=0.0)
                q, b = _opened(z, g, K, TAUS, FAST)
                d, gate, line = d + (v.to(tl.float32)[:, None],), gate + (g,), line + (w,)
                odds, below = odds + (q,), below + (b,)
            shares = _shares(below, FAST)
            for j in tl.static_range(2):
                slope = _slope(z, shares[j], odds[j], gate[j], line[j], K, TAUS, CONSTANTS)
                total += d[j] * slope
    tl.store(dx + part * apart + place, total.to(dx.dtype.element_ty), mask=tile)


@triton.jit
def _tile(pointer, width, step, columns, inside, COUNT: tl.constexpr):
    """COUNT kinds of parameters of a tile of synapses."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(pointer + step + k * width + columns, mask=inside, other=0.0),)
    return found


@triton.jit
def synapse_parameters(
    x, gates, lines, seen, dy, dgates, dlines, rows, across, inputs, outputs, taps, depth,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TABLE: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dgates and dlines (parts, groups, taps, outputs, kind, inputs), part by part of `depth` rows.

    x (across, groups * inputs), dy (rows, groups * outputs), parameters as in `synapse_inputs`.
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(inputs, COLUMNS)
    here, which, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, tap = which // taps, which % taps
    o = (here // wide) * ROWS + tl.arange(0, ROWS)
    c = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    tile = (o < outputs)[:, None] & (c < inputs)[None, :]
    at_gate = ((group if SHARED else which) * outputs + o).to(tl.int64)[:, None] * GATES * inputs
    at_line = (which * outputs + o).to(tl.int64)[:, None] * LINES * inputs
    gate = _tile(gates, inputs, at_gate, c[None, :], tile, GATES)
    line = _tile(lines, inputs, at_line, c[None, :], tile, LINES)
    groups = tl.num_programs(1) // taps
    z_place = x + group * inputs + c
    d_place = dy + group * outputs + o
    first = part * depth
    last = tl.minimum(first + depth, rows)
    zero = tl.zeros((ROWS, COLUMNS), tl.float32)
    base, rise, const, tau, theta = zero, zero, zero, zero, zero
    rise1, const1, tau1, theta1 = zero, zero, zero, zero
    sums = tl.zeros((ROWS, 1), tl.float32)
    for n in tl.range(first, last, 2, num_stages=STAGES):
        d, z, odds, below = (), (), (), ()
        for j in tl.static_range(2):
            at = n + j
            near = at < last
            if TABLE:
                at = tl.load(seen + tap * tl.cast(rows, tl.int64) + n + j, mask=near, other=-1)
                near = at >= 0
            v = tl.load(
                z_place + at * tl.cast(inputs * groups, tl.int64),
                mask=(c < inputs) & near,
                other=0.0,
            )
            u = tl.load(
                d_place + (n + j) * tl.cast(outputs * groups, tl.int64),
                mask=(o < outputs) & near,
                other=0.0,
            )
            v = v.to(tl.float32)[None, :]
            q, b = _opened(v, gate, K, TAUS, FAST)
            z, d = z + (v,), d + (u.to(tl.float32)[:, None],)
            odds, below = odds + (q,), below + (b,)
        shares = _shares(below, FAST)
        for j in tl.static_range(2):
            g, t = _turned(z[j], shares[j], odds[j], line, K, CONSTANTS)
            base += d[j] * z[j]
            if CONSTANTS:
                sums += d[j]
            if K == 2:
                m = d[j] * g[0]
                rise += m * z[j]
                if CONSTANTS:
                    const += m
                m = d[j] * t[0]
                theta += m
                tau += m * (z[j] - gate[1])
            else:
                m = d[j] * g[0]
                m1 = d[j] * g[1]
                rise += m * z[j]
                rise1 += m1 * z[j]
                if CONSTANTS:
                    const += m
                    const1 += m1
                m = d[j] * t[0]
                m1 = d[j] * t[1]
                theta += m
                theta1 += m1
                if TAUS == 1:
                    tau += m1 * (z[j] - gate[2]) - m * (z[j] - gate[1])
                else:
                    tau -= m * (z[j] - gate[2])
                    tau1 += m1 * (z[j] - gate[3])
    if K == 2:
        dgate = (tau, -theta * gate[0])
        dline = (base - rise, rise)
        if CONSTANTS:
            dline = dline + (sums - const, const)
    else:
        moved = (theta * gate[0], -theta1 * gate[TAUS - 1])
        dgate = (tau,) + moved if TAUS == 1 else (tau, tau1) + moved
        dline = (rise, base - rise - rise1, rise1)
        if CONSTANTS:
            dline = dline + (const, sums - const - const1, const1)
    size = tl.num_programs(1).to(tl.int64) * outputs * inputs * part
    at_gate = (which * outputs + o).to(tl.int64)[:, None] * GATES * inputs + size * GATES
    at_line += size * LINES
    for k in tl.static_range(GATES):
        tl.store(dgates + at_gate + k * inputs + c[None, :], dgate[k], mask=tile)
    for k in tl.static_range(LINES):
        tl.store(dlines + at_line + k * inputs + c[None, :], dline[k], mask=tile)
