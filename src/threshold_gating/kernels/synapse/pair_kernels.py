"""Gates that all taps of a kernel share, evaluated once for all of them, as Triton kernels.

Where a gate belongs to a pair of channels, one evaluation at a position serves each tap that sees
it: a special function a tap less, and what is left are the products with the weights of the taps.
The forward pass writes what each tap makes of each position, (taps, across, outputs), and
`synapse_gathered` adds up what a row of y sees of it; backward, the gradients are laid out by taps
before. All that is linear in the branches is summed over the taps first: `line` below.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.synapse.arithmetic import (
    both_gates,
    branches,
    gates_of,
    mean_of,
    opened,
    outer_turns,
    parameter_rows,
    seen_row,
    slope_of,
    tile_of,
)


@triton.jit
def synapse_taps(
    x, gates, lines, y, across, inputs, outputs,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x (groups * inputs, across) -> y (taps, across, groups * outputs).

    gates (groups, inputs, TAUS + K - 1, outputs), lines (groups, inputs, taps, K or 2 K, outputs).
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(outputs, COLUMNS)
    here, group = tl.program_id(0), tl.program_id(1)
    p = (here // wide) * ROWS + tl.arange(0, ROWS)
    o = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = p < across, o < outputs
    place = x + group.to(tl.int64) * inputs * across + p
    pair = group.to(tl.int64) * inputs
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for c in tl.range(0, inputs, 2, num_stages=STAGES):
        z, odds, below = (), (), ()
        for j in tl.static_range(2):
            near = c + j < inputs
            v = tl.load(place + (c + j) * tl.cast(across, tl.int64), mask=inside & near, other=0.0)
            v = v.to(tl.float32)[:, None]
            at = gates + (pair + c + j) * GATES * outputs
            q, b = opened(v, parameter_rows(at, outputs, o, there & near, GATES), K, TAUS, FAST)
            z, odds, below = z + (v,), odds + (q,), below + (b,)
        opens = gates_of(odds, below, K, FAST)
        for j in tl.static_range(2):
            mine = there & (c + j < inputs)
            first = lines + (pair + c + j) * TAPS * LINES * outputs
            more = ()
            for t in tl.static_range(TAPS):
                line = parameter_rows(first + t * LINES * outputs, outputs, o, mine, LINES)
                line = branches(line, K, CONSTANTS, FAST)
                total = sums[t] + z[j] * mean_of(opens[j], line, 0, K)
                if CONSTANTS:
                    total += mean_of(opens[j], line, K, K)
                more = more + (total,)
            sums = more
    whole = outputs * tl.num_programs(1)
    tile = inside[:, None] & there[None, :]
    for t in tl.static_range(TAPS):
        row = t * tl.cast(across, tl.int64) + p
        tl.store(y + row[:, None] * whole + (group * outputs + o)[None, :], sums[t], mask=tile)


@triton.jit
def synapse_gathered(
    parts, seen, y, rows, across, each, others, width,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """parts (taps, across, width) -> y (rows, width): what each tap of a row sees, added up."""
    wide = tl.cdiv(width, COLUMNS)
    here = tl.program_id(0)
    n = (here // wide) * ROWS + tl.arange(0, ROWS)
    o = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    tile = (n < rows)[:, None] & (o < width)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for t in tl.static_range(TAPS):
        at, inside = seen_row(seen, t, n, rows, each, others, True)
        row = (t * tl.cast(across, tl.int64) + at) * width
        total += tl.load(parts + row[:, None] + o[None, :], mask=tile & inside[:, None], other=0.0)
    place = n.to(tl.int64)[:, None] * width + o[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=tile)


@triton.jit
def synapse_pair_inputs(
    x, gates, lines, seeing, dy, dx, rows, across, each, others, inputs, outputs,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx (across, groups * inputs) from dy (groups * outputs, rows).

    gates (groups, outputs, TAUS + K - 1, inputs), lines (groups, outputs, taps, K or 2 K, inputs).
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(inputs, COLUMNS)
    here, group = tl.program_id(0), tl.program_id(1)
    p = (here // wide) * ROWS + tl.arange(0, ROWS)
    c = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = p < across, c < inputs
    tile = inside[:, None] & there[None, :]
    place = p.to(tl.int64)[:, None] * (inputs * tl.num_programs(1)) + (group * inputs + c)[None, :]
    z = tl.load(x + place, mask=tile, other=0.0).to(tl.float32)
    pair = group.to(tl.int64) * outputs
    spots, seen = (), ()
    for t in tl.static_range(TAPS):
        spot, sees = seen_row(seeing, t, p, across, each, others, True)
        spots, seen = spots + (spot,), seen + (sees,)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for o in tl.range(0, outputs, 2, num_stages=STAGES):
        gate, odds, below = (), (), ()
        for j in tl.static_range(2):
            at = gates + (pair + o + j) * GATES * inputs
            g = parameter_rows(at, inputs, c, there & (o + j < outputs), GATES)
            q, b = opened(z, g, K, TAUS, FAST)
            gate, odds, below = gate + (g,), odds + (q,), below + (b,)
        opens = gates_of(odds, below, K, FAST)
        for j in tl.static_range(2):
            near = o + j < outputs
            first = lines + (pair + o + j) * TAPS * LINES * inputs
            down = dy + (pair + o + j) * rows
            # what the branches share needs no gate, and is added to the sum of all outputs
            line = (total,) if K == 2 else (tl.zeros_like(total),)
            for _ in tl.static_range(LINES - 1):
                line = line + (tl.zeros_like(total),)
            for t in tl.static_range(TAPS):
                d = tl.load(down + spots[t], mask=seen[t] & near, other=0.0).to(tl.float32)[:, None]
                at = first + t * LINES * inputs
                w = parameter_rows(at, inputs, c, there & near, LINES)
                line = _added(line, d, branches(w, K, CONSTANTS, FAST), LINES)
            slope = slope_of(z, opens[j], gate[j], line, K, TAUS, CONSTANTS, FAST)
            total = slope if K == 2 else total + slope
    tl.store(dx + place, total.to(dx.dtype.element_ty), mask=tile)


@triton.jit
def _added(sums, d, parts, COUNT: tl.constexpr):
    """Each of the sums and d times its part."""
    more = ()
    for k in tl.static_range(COUNT):
        more = more + (sums[k] + d * parts[k],)
    return more


@triton.jit
def synapse_pair_parameters(
    x, gates, lines, dy, dgates, dlines, across, inputs, outputs, depth,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dgates and dlines, (parts, ...) as these are, part by part of `depth` positions.

    x (across, groups * inputs), dy (across, taps, groups * outputs), parameters as in
    `synapse_pair_inputs`.
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    TURNED: tl.constexpr = LINES // 2 if K == 2 else LINES
    wide = tl.cdiv(inputs, COLUMNS)
    here, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    o = (here // wide) * ROWS + tl.arange(0, ROWS)
    c = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    tile = (o < outputs)[:, None] & (c < inputs)[None, :]
    at = (group * outputs + o).to(tl.int64)[:, None]
    gate = tile_of(gates, inputs, at * GATES * inputs, c[None, :], tile, GATES)
    weights, sums = (), ()
    for t in tl.static_range(TAPS):
        step = (at * TAPS + t) * LINES * inputs
        each = tile_of(lines, inputs, step, c[None, :], tile, LINES)
        weights = weights + (_turned(each, K, CONSTANTS),)
        for _ in tl.static_range(LINES):
            sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    turns = ()
    for _ in tl.static_range(2 * (K - 1)):
        turns = turns + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    z_place, d_place = x + group * inputs + c, dy + group * outputs + o
    first = part * depth
    last = tl.minimum(first + depth, across)
    for p in tl.range(first, last, 2, num_stages=STAGES):
        z, odds, below = (), (), ()
        for j in tl.static_range(2):
            at_x = z_place + (p + j) * tl.cast(inputs * groups, tl.int64)
            v = tl.load(at_x, mask=(c < inputs) & (p + j < last), other=0.0).to(tl.float32)[None, :]
            q, b = opened(v, gate, K, TAUS, FAST)
            z, odds, below = z + (v,), odds + (q,), below + (b,)
        opens = gates_of(odds, below, K, FAST)
        for j in tl.static_range(2):
            near = (o < outputs) & (p + j < last)
            down = d_place + (p + j) * tl.cast(TAPS * outputs * groups, tl.int64)
            pair = both_gates(opens[j], K, FAST)
            slopes = _parts(z[j], pair, K, CONSTANTS)
            line, more = (), ()
            for _ in tl.static_range(TURNED):
                line = line + (tl.zeros((ROWS, COLUMNS), tl.float32),)
            for t in tl.static_range(TAPS):
                d = tl.load(down + t * outputs * groups, mask=near, other=0.0).to(tl.float32)
                line = _added(line, d[:, None], weights[t], TURNED)
                for k in tl.static_range(LINES):
                    more = more + (sums[t * LINES + k] + d[:, None] * slopes[k],)
            sums = more
            turns = _turning(turns, z[j], pair, gate, line, K, TAUS, CONSTANTS)
    if K == 2:
        dgate = (turns[0], -turns[1] * gate[0])
    else:
        dgate = (turns[0],) if TAUS == 1 else (turns[0], turns[1])
        dgate = dgate + (turns[2] * gate[0], -turns[3] * gate[TAUS - 1])
    size = groups.to(tl.int64) * outputs * inputs * part
    for k in tl.static_range(GATES):
        place = (at * GATES + k) * inputs + size * GATES + c[None, :]
        tl.store(dgates + place, dgate[k], mask=tile)
    for k in tl.static_range(TAPS * LINES):
        place = (at * TAPS * LINES + k) * inputs + size * TAPS * LINES + c[None, :]
        tl.store(dlines + place, sums[k], mask=tile)


@triton.jit
def _parts(z, gates, K: tl.constexpr, CONSTANTS: tl.constexpr):
    """What the synapse grows by with each of its slopes and constants: g_k x and g_k."""
    parts = (z * gates[0], z * gates[1])
    if K == 3:
        parts = parts + (z * gates[2],)
    return parts + gates if CONSTANTS else parts


@triton.jit
def _turned(line, K: tl.constexpr, CONSTANTS: tl.constexpr):
    """What a gate that turns takes from the branches: of two only how far they are apart."""
    found = line
    if K == 2:
        found = (line[1] - line[0],)
        if CONSTANTS:
            found = found + (line[3] - line[2],)
    return found


@triton.jit
def _turning(
    sums, z, gates, gate, line,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Sums of what a unit of a gate's logits adds to the synapses, times x - theta and alone."""
    if K == 2:
        apart = z * line[0] + line[1] if CONSTANTS else z * line[0]
        turn = apart * (gates[0] * gates[1])
        more = (sums[0] + turn * (z - gate[1]), sums[1] + turn)
    else:
        turns = outer_turns(z, gates, line, CONSTANTS)
        first, second = turns[0] * (z - gate[TAUS]), turns[1] * (z - gate[TAUS + 1])
        if TAUS == 1:
            more = (sums[0] + (second - first), sums[1])
        else:
            more = (sums[0] - first, sums[1] + second)
        more = more + (sums[2] + turns[0], sums[3] + turns[1])
    return more
