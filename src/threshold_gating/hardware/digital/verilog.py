"""The gate unit and the softmax tree's cell as Verilog: one text each, and registers as words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from threshold_gating.hardware.digital import tree
from threshold_gating.hardware.digital.format import Registers, Unit
from threshold_gating.hardware.digital.segments import Segments, table

SOURCE, TREE = (Path(__file__).with_name(name) for name in ("unit.v", "tree.v"))


class Circuit(NamedTuple):
    """A module as tools take it: two codes in, one out, and registers."""

    text: str
    top: str
    parameters: dict[str, int]
    registers: dict[str, int]  # their bits, in the order of a word
    inputs: tuple[str, str]
    bits: int  # of codes
    latency: int  # cycles; 0 for a unit that takes a start and says when it is done

    @property
    def instance(self) -> str:
        """The module with its parameters and ports, as a line of Verilog."""
        given = ", ".join(f".{key}({value})" for key, value in self.parameters.items())
        wires = ["clk", *self.inputs, *self.registers, "y"]
        wires += [] if self.latency else ["start", "done"]
        joined = ", ".join(f".{key}({key})" for key in wires)
        return f"{self.top} #({given}) dut ({joined});"


def circuit(unit: Unit, small: int = 0, pipeline: bool = True) -> Circuit:
    """The unit; `small` is the digit of the one that uses a multiplier again, 0 for stages."""
    own = small_parameters(unit, small) if small else parameters(unit, pipeline)
    top, cycles = ("tg_unit_small", 0) if small else ("tg_unit", latency(unit))
    return Circuit(text(unit), top, own, ports(unit), ("x", "v"), unit.bits, cycles)


def cell(unit: Unit, pipeline: bool = True) -> Circuit:
    """The cell of a softmax tree whose gates are this unit."""
    log, width = tree.log_of(unit), tree.width(unit)
    own = {"WIDTH": width, "PLACES": tree.furthest(unit).bit_length(), "ODDS": log.bits + 1}
    own |= {"LOG": log.out, "PIPELINE": int(pipeline)}
    whole = "\n".join([text(unit), TREE.read_text("utf-8")])
    return Circuit(whole, "tg_pair", own, {"r": own["PLACES"]}, ("a", "b"), width, 2)


def text(unit: Unit) -> str:
    """Everything that synthesis reads of a unit: itself, and its segments."""
    parts = [SOURCE.read_text("utf-8")]
    if unit.gate is not None:
        parts.append(segments_module(unit.gate, "tg_sigmoid"))
        if unit.log is not None:
            parts.append(segments_module(unit.log, "tg_softplus"))
    return "\n".join(parts)


def parameters(unit: Unit, pipeline: bool = True) -> dict[str, int]:
    """What the Verilog calls the widths of a unit."""
    gate = unit.gate
    return {
        "BITS": unit.bits,
        "BRANCHES": max(unit.branches, 2),
        "TAU": unit.tau,
        "SLOPE": unit.slope,
        "FIRST": unit.bits if unit.square else unit.slope,
        "SHIFT": unit.shift,
        "GUARD": unit.guard,
        "SUM": unit.sum_bits,
        "FINER": unit.finer,
        "SQUARE": int(unit.square),
        "SOFT": int(gate is not None),
        "ODDS": gate.bits + 1 if gate else 2,
        "GATE": gate.out if gate else 2,
        "LOG": unit.log.out if unit.log else 1,
        "PIPELINE": int(pipeline),
    }


def small_parameters(unit: Unit, digit: int) -> dict[str, int]:
    """Of the small unit, whose multiplier takes `digit` bits in each cycle."""
    p = parameters(unit)
    wide = max(p["BITS"] + p["FINER"] + 1, p["SUM"] + 1)
    second = max(p["TAU"] + 1, p["SLOPE"], p["FIRST"], p["GATE"] + 2)
    del p["PIPELINE"]
    return {**p, "DIGIT": digit, "WIDE": wide, "DIGITS": max(-(-second // digit), 2)}


def latency(unit: Unit) -> int:
    """Cycles from x to y in the pipelined unit, which takes an x in every cycle."""
    return 2 + 4 * (max(unit.branches, 2) - 1)


# Registers


def ports(unit: Unit) -> dict[str, int]:
    """The registers of a unit and their bits, in the order of a word."""
    p = parameters(unit)
    k = p["BRANCHES"]
    each = {"theta": (k - 1) * (unit.bits + unit.finer), "tau_m": (k - 1) * unit.tau}
    each |= {"tau_e": (k - 1) * unit.shift, "s_m": k * p["FIRST"], "s_e": k * unit.shift}
    each |= {"c": k * unit.sum_bits, "q_m": k * unit.slope, "q_e": k * unit.shift}
    return {**each, "hard": 1, "closed": k - 1, "on": k - 1, "low": unit.bits, "high": unit.bits}


def word(r: Registers, unit: Unit) -> int:
    """All registers of a unit as one integer, the first in its highest bits."""
    p = parameters(unit)
    n = len(r.theta)
    values = {
        "theta": _row(r.theta, unit.bits + unit.finer),
        "tau_m": _row([t.m for t in r.tau], unit.tau),
        "tau_e": _row([t.e for t in r.tau], unit.shift),
        "s_m": _row([s.m for s in r.s], p["FIRST"]),
        "s_e": _row([s.e for s in r.s], unit.shift),
        "c": _row(r.c, unit.sum_bits),
        "q_m": _row([q.m for q in r.q], unit.slope),
        "q_e": _row([q.e for q in r.q], unit.shift),
        "hard": int(r.hard),
        "closed": _row(r.closed, 1),
        "on": 2**n - 1,
        "low": _row([r.low], unit.bits),
        "high": _row([r.high], unit.bits),
    }
    total = 0
    for name, width in ports(unit).items():
        total = total << width | values[name]
    return total


def _row(codes: Sequence[int], width: int) -> int:
    """Codes beside each other, the first in the lowest bits."""
    return sum((int(code) & (1 << width) - 1) << k * width for k, code in enumerate(codes))


# Segments


def segments_module(s: Segments, name: str) -> str:
    """A function by segments as a module without a clock."""
    found = table(s)
    size, width = s.bits, s.bits - s.count
    product = s.slope + s.step
    rows = "\n".join(
        f"            {s.count}'d{i}: {{k, b}} = {{{s.slope}'d{k}, {s.out}'d{b}}};"
        for i, (k, b) in enumerate(zip(found.slopes.tolist(), found.bases.tolist(), strict=True))
    )
    if s.exact:
        sign = (
            f"    wire [{size}:0] turned = u[{size}] ? -u : u;\n"
            f"    wire [{size - 1}:0] a = turned[{size}] ? {{{size}{{1'b1}}}} "
            f": turned[{size - 1}:0];"
        )
    else:
        sign = f"    wire [{size - 1}:0] a = u[{size - 1}:0] ^ {{{size}{{u[{size}]}}}};"
    return _MODULE.format(
        name=name,
        what="1 / (1 + exp(-u))" if not s.falls else "log(1 + exp(-|u|))",
        segments=s,
        size=size,
        out="g" if not s.falls else "y",
        out_high=s.out if not s.falls else s.out - 1,
        sign=sign,
        slope=s.slope - 1,
        base=s.out - 1,
        top=size - 1,
        cut=width,
        rows=rows,
        step_high=width - 1,
        step_low=width - s.step,
        step=s.step - 1,
        product=product - 1,
        value=_value(s, product),
        unused=_unused(s, width),
    )


def _value(s: Segments, product: int) -> str:
    """The base with the product beside it, and for the sigmoid both halves."""
    n = s.out
    kept = product - max(s.shift, 0)
    part = f"p[{product - 1}:{max(s.shift, 0)}]" + (f", {-s.shift}'d0" if s.shift < 0 else "")
    kept += max(-s.shift, 0)
    padded = f"{{{n - kept}'d0, {part}}}" if kept < n else f"{{{part}}}"
    if kept > n:
        raise ValueError(f"{s}: the product is wider than the value.")
    if s.falls:
        return f"    assign y = b - {padded};"
    lines = [f"    wire [{n - 1}:0] h = b + {padded};"]
    if s.exact:
        lines.append(f"    wire [{n}:0] half = {{2'b01, {n - 1}'d0}};")
        lines.append(f"    assign g = u[{s.bits}] ? half - {{1'b0, h}} : half + {{1'b0, h}};")
    else:
        lines.append(
            f"    assign g = {{1'b0, ~u[{s.bits}], h[{n - 2}:0] ^ {{{n - 1}{{u[{s.bits}]}}}}}};"
        )
    return "\n".join(lines)


def _unused(s: Segments, width: int) -> str:
    """Bits that are cut off, named, so that a linter knows."""
    cut = []
    if width > s.step:
        cut.append(f"a[{width - s.step - 1}:0]")
    if s.shift > 0:
        cut.append(f"p[{s.shift - 1}:0]")
    if not s.exact and not s.falls:
        cut.append(f"h[{s.out - 1}]")
    return f"    wire unused = ^{{{', '.join(cut)}}};\n" if cut else ""


_MODULE = """
// {what} by segments: {segments}
module {name} (input signed [{size}:0] u, output [{out_high}:0] {out});
{sign}
    reg [{slope}:0] k;
    reg [{base}:0] b;
    always @*
        case (a[{top}:{cut}])
{rows}
        endcase
    wire [{step}:0] f = a[{step_high}:{step_low}];
    wire [{product}:0] p = k * f;
{value}
{unused}endmodule
"""
