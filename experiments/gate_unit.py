"""What a digital gate costs: the sigmoid by segments, the unit, a softmax cell, and rivals.

    TG_PDK=... PYTHONPATH=src python -m experiments.gate_unit [--out docs/images/segments.svg]

Every area is that of yosys and abc on sky130_fd_sc_hd cells at 25 C and 1.8 V, without wires; every
error is the largest over all codes of x against float64. Takes about fifteen minutes of one core.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from threshold_gating.hardware import fixed_point as fp
from threshold_gating.hardware.digital import search, synthesis, verilog
from threshold_gating.hardware.digital.format import CHOSEN, GATE, Unit
from threshold_gating.taxonomy import TAXONOMY

# Activations with two branches, with slopes that are powers of two.
ROWS = ("relu", "silu", "quick_gelu", "tanh", "sigmoid")
FULL = Unit(log=None)
UNITS = {
    "slopes of 12 bits": FULL,
    "slopes of 8 bits": replace(FULL, slope=8),
    "slopes that are powers of two": replace(FULL, slope=2, shift=4),
    "and gates of 11 bits": replace(
        FULL, slope=2, shift=4, gate=CHOSEN[12][0], guard=1, headroom=1
    ),
    "and tau a power of two": replace(FULL, slope=2, shift=4, tau=1),
    "hard gates, slopes of 8 bits": replace(FULL, slope=8, gate=None),
    "hard gates, powers of two": replace(FULL, slope=2, shift=4, gate=None),
}


def table_of_outputs(entries: int = 1024) -> tuple[str, float]:
    """The sigmoid as a table, half of it, read at the leading bits; and its error."""
    bits = entries.bit_length() - 1
    middle = (torch.arange(entries) + 0.5) * 8 / entries
    codes = (torch.sigmoid(middle.double()) * 2**15).round().long()
    rows = "\n".join(f"            {bits}'d{i}: t = 15'd{c};" for i, c in enumerate(codes.tolist()))
    text = f"""module tabled (input [15:0] u, output [15:0] y);
    wire [14:0] a = u[14:0] ^ {{15{{u[15]}}}};
    reg [14:0] t;
    always @* case (a[14:{15 - bits}])
{rows}
        endcase
    assign y = {{1'b0, t ^ {{15{{u[15]}}}}}};
endmodule"""
    u = torch.arange(-(2**15), 2**15)
    held = codes[torch.where(u < 0, ~u, u) >> (15 - bits)]
    y = torch.where(u < 0, 2**15 - 1 - held, held)
    return text, (y - torch.sigmoid(u.double() / 4096) * 2**15).abs().max().item()


def plan() -> tuple[str, float]:
    """PLAN (Amin, Curtis, Hayes-Gill 1997): four segments whose slopes are powers of two."""
    text = """module plan (input [15:0] u, output [15:0] y);
    wire [14:0] a = u[14:0] ^ {15{u[15]}};
    wire [14:0] h = a >= 15'd20480 ? 15'd32767 : a >= 15'd9728 ? (a >> 2) + 15'd27648
        : a >= 15'd4096 ? a + 15'd20480 : {a[13:0], 1'b0} + 15'd16384;
    assign y = {1'b0, h ^ {15{u[15]}}};
endmodule"""
    u = torch.arange(-(2**15), 2**15)
    a = torch.where(u < 0, ~u, u)
    low = torch.where(a >= 4096, a + 20480, 2 * a + 16384)
    h = torch.where(a >= 20480, 32767, torch.where(a >= 9728, (a >> 2) + 27648, low))
    y = torch.where(u < 0, 2**15 - 1 - h, h)
    return text, (y - torch.sigmoid(u.double() / 4096) * 2**15).abs().max().item()


def front() -> list[tuple[search.Candidate, synthesis.Netlist]]:
    """Segments from cheap to exact, synthesised; only those that nothing smaller beats."""
    found = search.front(search.candidates(outs=tuple(range(9, 16)), exact=(False, True)))
    made = []
    for each in found:
        if 2 <= each.error <= 700:
            text = verilog.segments_module(each.segments, "tg_sigmoid")
            made.append((each, synthesis.synthesise(text, "tg_sigmoid")))
    made.sort(key=lambda pair: pair[1].area)
    kept: list[tuple[search.Candidate, synthesis.Netlist]] = []
    for pair in made:
        if not kept or pair[0].error < kept[-1][0].error:
            kept.append(pair)
    return kept


# Units that are one activation, in the same formats: 16 bits, x and y with 12 fraction bits.
ALONE = {
    "relu": "assign y = x[15] ? 16'sd0 : x;",
    "sigmoid": """wire [15:0] g; tg_sigmoid s (.u({x[15], x}), .g(g));
    assign y = g[15] ? 16'h7fff : g;""",
    "tanh": """wire [15:0] g; tg_sigmoid s (.u({x, 1'b0}), .g(g));
    wire [16:0] t = {g, 1'b0} - 17'h8000; assign y = t == 17'h8000 ? 16'h7fff : t[15:0];""",
    "silu": """wire [15:0] g; tg_sigmoid s (.u({x[15], x}), .g(g));
    wire signed [32:0] p = x * $signed({1'b0, g}) + 33'sd16384; assign y = p[30:15];""",
    "quick_gelu": """wire signed [27:0] u = (x * 12'sd871) >>> 9;
    wire signed [16:0] v; tg_saturate #(28, 17) t (.a(u), .y(v));
    wire [15:0] g; tg_sigmoid s (.u(v), .g(g));
    wire signed [32:0] p = x * $signed({1'b0, g}) + 33'sd16384; assign y = p[30:15];""",
    "hardswish": """wire signed [16:0] h = x + 17'sd12288;
    wire [14:0] c = h[16] ? 15'd0 : h > 17'sd24576 ? 15'd24576 : h[14:0];
    wire signed [31:0] p = x * $signed({1'b0, c});
    wire signed [31:0] q = (p >>> 12) * 32'sd10923; assign y = q[31:16];""",
}
TABLE = """module rewritten (input clk, input write, input [7:0] at, input [15:0] entry,
    input [15:0] x, output [15:0] y);
    reg [15:0] held [0:255];
    always @(posedge clk) if (write) held[at] <= entry;
    assign y = held[x[15:8]];
endmodule"""


def alone(name: str) -> str:
    helper = verilog.SOURCE.read_text("utf-8") + verilog.segments_module(GATE, "tg_sigmoid")
    head = "module alone (input signed [15:0] x, output signed [15:0] y);"
    return f"{helper}\n{head}\n    {ALONE[name]}\nendmodule"


def worst(unit: Unit) -> str:
    """The largest errors of rows that the unit can be, in last bits of y."""
    found = []
    for name in ROWS:
        t = TAXONOMY[name]
        try:
            found.append(f"{name} {fp.error(t, fp.format_for(t), unit):.1f}")
        except fp.FormatError:
            continue
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the picture, .svg or .png")
    args = parser.parse_args()
    rivals = {}
    for name, (text, error) in (("table", table_of_outputs()), ("PLAN", plan())):
        made = synthesis.synthesise(text, "tabled" if name == "table" else "plan")
        rivals[name] = (error, made.area)
        print(f"{name:6} {error:6.1f} LSB  {made.area:7.0f} um^2  {made.delay:5.2f} ns", flush=True)
    kept = front()
    for each, made in kept:
        s = each.segments
        print(
            f"{2**s.count:4} segments, {s.slope} x {s.step} bits, {s.out} out, "
            f"{'exact' if s.exact else 'ones'}: {each.error:6.1f} LSB  {made.area:7.0f} um^2  "
            f"{made.delay:5.2f} ns (OpenSTA {made.by_sta or 0:.2f})",
            flush=True,
        )
    if args.out:
        draw(kept, rivals, args.out)
    for name, unit in UNITS.items():
        text = verilog.text(unit)
        flat = synthesis.synthesise(text, "tg_unit", verilog.parameters(unit, pipeline=False))
        piped = synthesis.synthesise(text, "tg_unit", verilog.parameters(unit))
        small = synthesis.synthesise(text, "tg_unit_small", verilog.small_parameters(unit, 4))
        fpga = synthesis.on_ice40(text, "tg_unit", verilog.parameters(unit))
        print(
            f"{name}: no stages {flat.area:.0f} um^2 {flat.delay:.1f} ns; pipeline "
            f"{piped.area:.0f} um^2 {piped.delay:.1f} ns; small {small.area:.0f} um^2 "
            f"{small.delay:.1f} ns; {fpga}; {worst(unit)}",
            flush=True,
        )
    for bits, (gate, log) in CHOSEN.items():
        keys = Unit(bits, branches=3, gate=gate, log=log)
        flat, piped = (_cell(keys, pipeline) for pipeline in (False, True))
        print(f"softmax cell, {bits} bits: no stages {flat}; pipeline {piped}", flush=True)
    for name in ALONE:
        made = synthesis.synthesise(alone(name), "alone")
        print(f"{name} alone: {made.area:.0f} um^2, {made.delay:.1f} ns", flush=True)
    made = synthesis.synthesise(TABLE, "rewritten")
    print(f"table of 256, rewritten: {made.area:.0f} um^2, {made.flops} flip-flops", flush=True)


def _cell(unit: Unit, pipeline: bool) -> str:
    made = verilog.cell(unit, pipeline)
    found = synthesis.synthesise(made.text, made.top, made.parameters)
    fpga = synthesis.on_ice40(made.text, made.top, made.parameters)
    return f"{found.area:.0f} um^2 {found.delay:.1f} ns, {fpga}"


def draw(
    kept: list[tuple[search.Candidate, synthesis.Netlist]],
    rivals: dict[str, tuple[float, float]],
    path: Path,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    ax = figure.subplots()
    ax.loglog([m.area for _, m in kept], [c.error for c, _ in kept], "o-", ms=3, label="segments")
    for name, (error, area) in rivals.items():
        ax.plot(area, error, "s", label=f"{name}, {area:.0f} um$^2$")
    for (error, area), name in (((27, 2725), "known before: 2,725"), ((4.9, 4377), "4,377")):
        ax.plot(area, error, "kx")
        ax.annotate(f"{name} um$^2$", (area, error), textcoords="offset points", xytext=(5, 3))
    ax.set(xlabel="area of sky130 cells (um$^2$)", ylabel="largest error (2$^{-15}$)")
    ax.grid(alpha=0.3, which="both")
    ax.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
