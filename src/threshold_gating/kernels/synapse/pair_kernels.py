"""Gates that all taps of a kernel share, evaluated once for all of them, as Triton kernels.

Where a gate belongs to a pair of channels, one evaluation at a position serves each tap that sees
it: a special function a tap less, and what is left are the products with the weights of the taps.
The forward pass writes what each tap makes of each position, (taps, across, outputs), and
`synapse_gathered` adds up what a row of y sees of it. Backward, all that is linear in the branches
is summed over the taps first (`line` below), from which `synapse_pair_inputs` has the gradients of
x and of the gates; `synapse_pair_parameters` has those of slopes and constants, and reads what
comes down by each tap, which `synapse_gathered` lays out.
"""

# mypy: ignore-errors
# Constants of a kernel are capitals; tuples grow by +, which Triton understands.
# ruff: noqa: N803, N806, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from threshold_gating.kernels.synapse.arithmetic import (
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
    x, gates, lines, seeing, dy, dx, dgates, rows, across, each, others, inputs, outputs, depth,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TAPS: tl.constexpr, EVEN: tl.constexpr, TURNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx (across, groups * inputs) from dy (groups * outputs, rows); if TURNS, dgates as well,
    (parts, ...) as gates are, a part `depth` tiles of positions.

    gates (groups, outputs, TAUS + K - 1, inputs), lines (groups, outputs, taps, K or 2 K, inputs);
    `seeing` says at [tap, position] which row of y sees it.
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(inputs, COLUMNS)
    here, group = tl.program_id(0), tl.program_id(1)
    groups, part = tl.num_programs(1), here // wide
    c = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    there = c < inputs
    pair = group.to(tl.int64) * outputs
    sums = dgates + (part.to(tl.int64) * groups + group) * outputs * GATES * inputs + c[None, :]
    for step in range(part * depth, tl.minimum(part * depth + depth, tl.cdiv(across, ROWS))):
        p = step * ROWS + tl.arange(0, ROWS)
        tile = (p < across)[:, None] & there[None, :]
        place = p.to(tl.int64)[:, None] * (inputs * groups) + (group * inputs + c)[None, :]
        z = tl.load(x + place, mask=tile, other=0.0).to(tl.float32)
        spots, seen = (), ()
        for t in tl.static_range(TAPS):
            spot, sees = seen_row(seeing, t, p, across, each, others, True)
            spots, seen = spots + (spot,), seen + (sees,)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if TURNS:  # other threads may have written the sums that are read
            tl.debug_barrier()
        for o in tl.range(0, outputs, 2, num_stages=STAGES):
            gate, odds, below = (), (), ()
            for j in tl.static_range(2):
                at = gates + (pair + o + j) * GATES * inputs
                mine = there if EVEN else there & (o + j < outputs)
                g = parameter_rows(at, inputs, c, mine, GATES)
                q, b = opened(z, g, K, TAUS, FAST)
                gate, odds, below = gate + (g,), odds + (q,), below + (b,)
            opens = gates_of(odds, below, K, FAST)
            for j in tl.static_range(2):
                mine = there if EVEN else there & (o + j < outputs)
                first = lines + (pair + o + j) * TAPS * LINES * inputs
                down = dy + (pair + o + j) * rows
                # what the branches share needs no gate, and is added to the sum of all outputs
                line = (total,) if K == 2 else (tl.zeros_like(total),)
                for _ in tl.static_range(LINES - 1):
                    line = line + (tl.zeros_like(total),)
                for t in tl.static_range(TAPS):
                    near = seen[t] if EVEN else seen[t] & (o + j < outputs)
                    d = tl.load(down + spots[t], mask=near, other=0.0).to(tl.float32)[:, None]
                    at = first + t * LINES * inputs
                    w = parameter_rows(at, inputs, c, mine, LINES)
                    line = _added(line, d, branches(w, K, CONSTANTS, FAST), LINES)
                slope = slope_of(z, opens[j], gate[j], line, K, TAUS, CONSTANTS, FAST)
                total = slope if K == 2 else total + slope
                if TURNS:
                    turned = _turned(z, opens[j], gate[j], line, K, TAUS, CONSTANTS, FAST)
                    for k in tl.static_range(GATES):
                        to = sums + ((o + j) * GATES + k) * inputs
                        again = mine & (step > part * depth)
                        before = tl.load(to, mask=again[None, :], other=0.0)
                        tl.store(to, before + turned[k], mask=mine[None, :])
        tl.store(dx + place, total.to(dx.dtype.element_ty), mask=tile)


@triton.jit
def _added(sums, d, parts, COUNT: tl.constexpr):
    """Each of the sums and d times its part."""
    more = ()
    for k in tl.static_range(COUNT):
        more = more + (sums[k] + d * parts[k],)
    return more


@triton.jit
def _turned(
    z, gates, gate, line,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of taus and thetas, summed over a tile, `line` being what `branches` add up to."""
    if K == 2:
        turn = 0.5 - 0.5 * gates[0] * gates[0] if FAST else gates[0] * gates[1]
        turn *= z * line[1] + line[3] if CONSTANTS else z * line[1]
        found = (_down(turn * (z - gate[1])), _down(turn) * -gate[0])
    else:
        turns = outer_turns(z, gates, line, CONSTANTS)
        first, second = turns[0] * (z - gate[TAUS]), turns[1] * (z - gate[TAUS + 1])
        found = (_down(second - first),) if TAUS == 1 else (_down(-first), _down(second))
        found = found + (_down(turns[0]) * gate[0], _down(turns[1]) * -gate[TAUS - 1])
    return found


@triton.jit
def _down(tile):
    return tl.sum(tile, 0, keep_dims=True)


@triton.jit
def synapse_pair_parameters(
    x, gates, dy, dlines, across, inputs, outputs, depth,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TAPS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dlines (parts, ...) as lines are, part by part of `depth` positions.

    x (across, groups * inputs), dy (across, taps, groups * outputs), parameters as in
    `synapse_pair_inputs`.
    """
    GATES: tl.constexpr = TAUS + K - 1
    LINES: tl.constexpr = 2 * K if CONSTANTS else K
    wide = tl.cdiv(inputs, COLUMNS)
    here, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    o = (here // wide) * ROWS + tl.arange(0, ROWS)
    c = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    tile = (o < outputs)[:, None] & (c < inputs)[None, :]
    at = (group * outputs + o).to(tl.int64)[:, None]
    gate = tile_of(gates, inputs, at * GATES * inputs, c[None, :], tile, GATES)
    sums = ()
    for _ in tl.static_range(TAPS * LINES):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    z_place, d_place = x + group * inputs + c, dy + group * outputs + o
    first = part * depth
    last = tl.minimum(first + depth, across)
    for p in tl.range(first, last, 2, num_stages=STAGES):
        z, odds, below = (), (), ()
        for j in tl.static_range(2):
            at_x = z_place + (p + j) * tl.cast(inputs * groups, tl.int64)
            near = c < inputs if EVEN else (c < inputs) & (p + j < last)
            v = tl.load(at_x, mask=near, other=0.0).to(tl.float32)[None, :]
            q, b = opened(v, gate, K, TAUS, FAST)
            z, odds, below = z + (v,), odds + (q,), below + (b,)
        opens = gates_of(odds, below, K, FAST)
        for j in tl.static_range(2):
            there = o < outputs if EVEN else (o < outputs) & (p + j < last)
            down = d_place + (p + j) * tl.cast(TAPS * outputs * groups, tl.int64)
            parts = _parts(z[j], opens[j], K, CONSTANTS, FAST)
            more = ()
            for t in tl.static_range(TAPS):
                d = tl.load(down + t * outputs * groups, mask=there, other=0.0).to(tl.float32)
                for k in tl.static_range(LINES):
                    more = more + (sums[t * LINES + k] + d[:, None] * parts[k],)
            sums = more
    size = groups.to(tl.int64) * outputs * inputs * part
    for k in tl.static_range(TAPS * LINES):
        place = (at * TAPS * LINES + k) * inputs + size * TAPS * LINES + c[None, :]
        tl.store(dlines + place, sums[k], mask=tile)


@triton.jit
def _parts(z, gates, K: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr):
    """What the synapse grows by with each of its slopes and constants: g_k x and g_k."""
    if FAST:
        half = gates[0] * 0.5
        gates = (0.5 - half, 0.5 + half)
    parts = (z * gates[0], z * gates[1])
    if K == 3:
        parts = parts + (z * gates[2],)
    return parts + gates if CONSTANTS else parts
