"""Gates of each synapse, y_no = sum_c sum_k g_k(x_nc) (w^k_oc x_nc + c^k_oc), as Triton kernels.

Imported when one first runs. A gate is evaluated where it is needed and never stored: the forward
pass goes over the inputs of a tile of outputs, `synapse_inputs` over the outputs for dx,
`synapse_parameters` over the rows for the parameters. Sums stay in registers: nothing is atomic.

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
def synapse_forward(
    x, gates, lines, seen, y, rows, across, each, others, inputs, outputs, taps, depth, apart,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TABLE: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
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
        at, inside = seen_row(seen, tap, n, rows, each, others, TABLE)
        place = x + group.to(tl.int64) * inputs * across + at
        synapse = (group * taps + tap).to(tl.int64) * inputs
        pair = group.to(tl.int64) * inputs if SHARED else synapse
        before = total
        for c in tl.range(first, last, 2, num_stages=STAGES):
            z, line, odds, below = (), (), (), ()
            for j in tl.static_range(2):
                mine, near = there, inside
                if not EVEN:
                    mine, near = there & (c + j < last), inside & (c + j < last)
                v = tl.load(place + (c + j) * tl.cast(across, tl.int64), mask=near, other=0.0)
                v = v.to(tl.float32)[:, None]
                g = parameter_rows(
                    gates + (pair + c + j) * GATES * outputs, outputs, o, mine, GATES
                )
                w = parameter_rows(
                    lines + (synapse + c + j) * LINES * outputs, outputs, o, mine, LINES
                )
                q, b = opened(v, g, K, TAUS, FAST)
                z, odds, below = z + (v,), odds + (q,), below + (b,)
                line = line + (branches(w, K, CONSTANTS, FAST),)
            opens = gates_of(odds, below, K, FAST)
            for j in tl.static_range(2):
                total += z[j] * mean_of(opens[j], line[j], 0, K)
                if CONSTANTS:
                    total += mean_of(opens[j], line[j], K, K)
        if CONSTANTS and TABLE:  # without constants a synapse is 0 at 0
            total = tl.where(inside[:, None], total, before)
    whole = outputs * tl.num_programs(1)
    place = y + part * apart + n.to(tl.int64)[:, None] * whole + (group * outputs + o)[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=(n < rows)[:, None] & there[None, :])


@triton.jit
def synapse_inputs(
    x, gates, lines, seeing, dy, dx,
    rows, across, each, others, inputs, outputs, taps, depth, apart,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TABLE: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
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
        at, inside = seen_row(seeing, tap, p, across, each, others, TABLE)
        down = dy + group.to(tl.int64) * outputs * rows + at
        synapse = (group * taps + tap).to(tl.int64) * outputs
        pair = group.to(tl.int64) * outputs if SHARED else synapse
        for o in tl.range(first, last, 2, num_stages=STAGES):
            d, gate, line, odds, below = (), (), (), (), ()
            for j in tl.static_range(2):
                mine, near = there, inside
                if not EVEN:
                    mine, near = there & (o + j < last), inside & (o + j < last)
                g = parameter_rows(gates + (pair + o + j) * GATES * inputs, inputs, c, mine, GATES)
                w = parameter_rows(
                    lines + (synapse + o + j) * LINES * inputs, inputs, c, mine, LINES
                )
                v = tl.load(down + (o + j) * tl.cast(rows, tl.int64), mask=near, other=0.0)
                q, b = opened(z, g, K, TAUS, FAST)
                d, gate = d + (v.to(tl.float32)[:, None],), gate + (g,)
                line = line + (branches(w, K, CONSTANTS, FAST),)
                odds, below = odds + (q,), below + (b,)
            opens = gates_of(odds, below, K, FAST)
            for j in tl.static_range(2):
                slope = slope_of(z, opens[j], gate[j], line[j], K, TAUS, CONSTANTS, FAST)
                total += d[j] * slope
    tl.store(dx + part * apart + place, total.to(dx.dtype.element_ty), mask=tile)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, CONSTANTS: tl.constexpr):
    """Where the sums of `_moments` and `_turns` start."""
    COUNT: tl.constexpr = 4 + 4 * CONSTANTS if K == 2 else 7 + 3 * CONSTANTS
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    return sums


@triton.jit
def _moments(sums, d, z, gates, from_theta, CONSTANTS: tl.constexpr, FAST: tl.constexpr):
    """K = 2: sums over rows to which the branches are factors: of d g z for both gates, d g' z,
    d g' z (z - theta), and with constants of the same without z. FAST: twice the gates."""
    more = _moment(sums[0], sums[1], sums[2], sums[3], d * z, gates, from_theta, FAST)
    if CONSTANTS:
        more = more + _moment(sums[4], sums[5], sums[6], sums[7], d, gates, from_theta, FAST)
    return more


@triton.jit
def _moment(lower, upper, turns, tilts, d, gates, from_theta, FAST: tl.constexpr):
    if FAST:  # 1 - t and 1 + t are exactly 0 where the gate is closed
        low, high = d - d * gates[0], d + d * gates[0]
        turn = low + low * gates[0]
    else:
        low, high = d * gates[0], d * gates[1]
        turn = low * gates[1]
    return lower + low, upper + high, turns + turn, tilts + turn * from_theta


@triton.jit
def _of_moments(sums, gate, line, CONSTANTS: tl.constexpr, FAST: tl.constexpr):
    """(gradients of tau and theta, of slopes and constants)."""
    SCALE: tl.constexpr = 0.5 if FAST else 1.0
    rise = (line[1] - line[0]) * (SCALE * SCALE)
    theta, tau = rise * sums[2], rise * sums[3]
    dline = (sums[0] * SCALE, sums[1] * SCALE)
    if CONSTANTS:
        jump = (line[3] - line[2]) * (SCALE * SCALE)
        theta, tau = theta + jump * sums[6], tau + jump * sums[7]
        dline = dline + (sums[4] * SCALE, sums[5] * SCALE)
    return (tau, -theta * gate[0]), dline


@triton.jit
def _turns(sums, d, z, gates, turns, gate, TAUS: tl.constexpr, CONSTANTS: tl.constexpr):
    """K = 3: sums over rows of d times the gates and z, of d times what a unit of the outer logits
    adds, of that and x - theta; and with constants of the first without z."""
    low, own, high = d * gates[0], d * gates[1], d * gates[2]
    down, up = d * turns[0], d * turns[1]
    more = (sums[0] + low * z, sums[1] + own * z, sums[2] + high * z, sums[3] + down, sums[4] + up)
    first, second = down * (z - gate[TAUS]), up * (z - gate[TAUS + 1])
    if TAUS == 1:
        more = more + (sums[5] + (second - first), sums[6])
    else:
        more = more + (sums[5] - first, sums[6] + second)
    if CONSTANTS:
        more = more + (sums[7] + low, sums[8] + own, sums[9] + high)
    return more


@triton.jit
def _of_turns(sums, gate, TAUS: tl.constexpr, CONSTANTS: tl.constexpr):
    """(gradients of taus and thetas, of slopes and constants)."""
    dgate = (sums[5],) if TAUS == 1 else (sums[5], sums[6])
    dgate = dgate + (sums[3] * gate[0], -sums[4] * gate[TAUS - 1])
    dline = (sums[0], sums[1], sums[2])
    if CONSTANTS:
        dline = dline + (sums[7], sums[8], sums[9])
    return dgate, dline


@triton.jit
def synapse_parameters(
    x, gates, lines, seen, dy, dgates, dlines,
    rows, across, each, others, inputs, outputs, taps, depth,
    K: tl.constexpr, TAUS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr,
    TABLE: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dgates and dlines (parts, groups, taps, outputs, kind, inputs).

    A part is `depth` rows, or images where there is a table. x (across, groups * inputs), dy (rows,
    groups * outputs), parameters as in `synapse_inputs`.
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
    gate = tile_of(gates, inputs, at_gate, c[None, :], tile, GATES)
    if K == 3:
        line = tile_of(lines, inputs, at_line, c[None, :], tile, LINES)
    groups = tl.num_programs(1) // taps
    image, images, first, last = 0, 1, 0, each
    if TABLE:
        image = part * depth
        images = tl.minimum(image + depth, rows // each)
    else:
        first = part * depth
        last = tl.minimum(first + depth, rows)
    sums = _zeros(ROWS, COLUMNS, K, CONSTANTS)
    for i in range(image, images):
        z_place = x + i * tl.cast(others * inputs * groups, tl.int64) + group * inputs + c
        d_place = dy + i * tl.cast(each * outputs * groups, tl.int64) + group * outputs + o
        for n in tl.range(first, last, 2, num_stages=STAGES):
            d, z, odds, below = (), (), (), ()
            for j in tl.static_range(2):
                at = n + j
                near = True if EVEN else at < last
                if TABLE:
                    at = tl.load(seen + tap * each + n + j, mask=near, other=-1)
                    near = at >= 0
                v = z_place + at * tl.cast(inputs * groups, tl.int64)
                u = d_place + (n + j) * tl.cast(outputs * groups, tl.int64)
                v = tl.load(v, mask=(c < inputs) & near, other=0.0).to(tl.float32)[None, :]
                u = tl.load(u, mask=(o < outputs) & near, other=0.0).to(tl.float32)[:, None]
                q, b = opened(v, gate, K, TAUS, FAST)
                z, d, odds, below = z + (v,), d + (u,), odds + (q,), below + (b,)
            opens = gates_of(odds, below, K, FAST)
            for j in tl.static_range(2):
                if K == 2:
                    sums = _moments(sums, d[j], z[j], opens[j], z[j] - gate[1], CONSTANTS, FAST)
                else:
                    turns = outer_turns(z[j], opens[j], line, CONSTANTS)
                    sums = _turns(sums, d[j], z[j], opens[j], turns, gate, TAUS, CONSTANTS)
    if K == 2:  # the sums do not need them: registers are few
        line = tile_of(lines, inputs, at_line, c[None, :], tile, LINES)
        dgate, dline = _of_moments(sums, gate, line, CONSTANTS, FAST)
    else:
        dgate, dline = _of_turns(sums, gate, TAUS, CONSTANTS)
    size = tl.num_programs(1).to(tl.int64) * outputs * inputs * part
    at_gate = (which * outputs + o).to(tl.int64)[:, None] * GATES * inputs + size * GATES
    at_line += size * LINES
    for k in tl.static_range(GATES):
        tl.store(dgates + at_gate + k * inputs + c[None, :], dgate[k], mask=tile)
    for k in tl.static_range(LINES):
        tl.store(dlines + at_line + k * inputs + c[None, :], dline[k], mask=tile)


@triton.jit
def synapse_turned(
    x, y, first, kinds, last,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x (groups, first, kinds, last) -> y (groups, last, kinds, first), by tiles."""
    wide = tl.cdiv(last, COLUMNS)
    here, kind, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    a = (here // wide) * ROWS + tl.arange(0, ROWS)
    b = (here % wide) * COLUMNS + tl.arange(0, COLUMNS)
    tile = (a < first)[:, None] & (b < last)[None, :]
    whole = group.to(tl.int64) * first * kinds * last
    at = (a.to(tl.int64) * kinds + kind)[:, None] * last + b[None, :]
    to = (b.to(tl.int64) * kinds + kind)[None, :] * first + a[:, None]
    tl.store(y + whole + to, tl.load(x + whole + at, mask=tile), mask=tile)
