"""Test benches that check themselves: every code of x against the integers, in two simulators."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.hardware.digital import tree
from threshold_gating.hardware.digital import unit as integers
from threshold_gating.hardware.digital.format import Registers, Unit
from threshold_gating.hardware.digital.verilog import Circuit, word

SIMULATORS = ("iverilog", "verilator")
LONGEST = 900  # seconds that a tool may run
INSTALL = "apt-get install iverilog verilator yosys (Debian), brew install icarus-verilog (macOS)"


class ToolError(RuntimeError):
    """A tool is missing or failed; the message has its own words."""


def tool(name: str) -> str:
    """Where a tool is."""
    found = shutil.which(name)
    if found is None:
        raise ToolError(f"{name} is not installed: {INSTALL}.")
    return found


class Case(NamedTuple):
    """A word of registers, two codes that come in at a time, and the codes of y to come out."""

    name: str
    word: int
    x: Tensor
    v: Tensor
    y: Tensor


def case(name: str, r: Registers, x: Tensor, unit: Unit, v: Tensor | None = None) -> Case:
    """Of a unit, with the codes that the integers give."""
    v = x if v is None else v
    return Case(name, word(r, unit), x, v, integers.run(r, x, unit, v))


def pairs(name: str, a: Tensor, b: Tensor, r: int, unit: Unit) -> Case:
    """Of a cell of a softmax tree."""
    return Case(name, r, a, b, tree.pair(a, b, r, unit))


class Outcome(NamedTuple):
    """How many codes of a case were compared, and how many differed."""

    name: str
    codes: int
    differ: int


def check(made: Circuit, cases: Sequence[Case], simulator: str = "iverilog") -> list[Outcome]:
    """Run every case in a simulator, which is compiled once."""
    if simulator not in SIMULATORS:
        raise ValueError(f"simulator is one of {', '.join(SIMULATORS)}; got {simulator!r}.")
    with tempfile.TemporaryDirectory(prefix="tg-rtl-") as name:
        folder = Path(name)
        write(folder, made, cases)
        said = _RUN[simulator](folder)
    found = [line.split() for line in said.splitlines() if line.startswith("case ")]
    if len(found) != len(cases) or "finished" not in said:
        raise ToolError(f"{simulator} did not finish: {said[-500:].strip()}")
    done = [Outcome(c.name, int(n), int(bad)) for c, (*_, n, bad) in zip(cases, found, strict=True)]
    for c, each in zip(cases, done, strict=True):
        if each.codes != len(c.x):
            raise ToolError(f"{simulator} compared {each.codes} codes of {len(c.x)} of {c.name}.")
    return done


def write(folder: Path, made: Circuit, cases: Sequence[Case]) -> None:
    """The circuit, the bench and its data, as a simulator reads them."""
    (folder / "unit.v").write_text(made.text, "utf-8")
    (folder / "bench.v").write_text(bench(made, cases), "utf-8")
    digits = (sum(made.registers.values()) + 3) // 4
    lines = "".join(f"{c.word:0{digits}x}\n" for c in cases)
    (folder / "registers.hex").write_text(lines)
    given, origins = _given(cases)
    parts = {"x": [c.x for c in given], "v": [c.v for c in given], "y": [c.y for c in cases]}
    for name, codes in parts.items():
        _write(folder / f"{name}.hex", (torch.cat(codes) & (2**made.bits - 1)).tolist())
    _write(folder / "starts.hex", accumulate([0, *(len(c.x) for c in cases)]))
    _write(folder / "origins.hex", origins)


def _given(cases: Sequence[Case]) -> tuple[list[Case], list[int]]:
    """Cases whose inputs are written, and where those of each begin: many have the same ones."""
    first: dict[tuple[int, int], int] = {}
    given, origins, end = [], [], 0
    for c in cases:
        key = (id(c.x), id(c.v))
        if key not in first:
            first[key] = end
            given.append(c)
            end += len(c.x)
        origins.append(first[key])
    return given, origins


def _write(path: Path, numbers: Iterable[int]) -> None:
    path.write_text("".join([f"{n:x}\n" for n in numbers]))


def bench(made: Circuit, cases: Sequence[Case]) -> str:
    """The bench: it reads what comes in and what has to come out, and counts what differs."""
    first, second = made.inputs
    return _BENCH.format(
        bits=made.bits - 1,
        first=first,
        second=second,
        cases=len(cases),
        codes=sum(len(c.x) for c in cases),
        inputs=sum(len(c.x) for c in _given(cases)[0]),
        word=sum(made.registers.values()) - 1,
        declared="\n".join(f"    wire [{w - 1}:0] {n};" for n, w in made.registers.items()),
        names=", ".join(made.registers),
        instance=made.instance,
        turn=(_PIPELINE if made.latency else _SMALL).format(
            latency=made.latency, first=first, second=second
        ),
    )


_BENCH = """module bench;
    reg clk = 0, start = 0;
    wire done;
    reg signed [{bits}:0] {first}, {second};
    wire signed [{bits}:0] y;
    reg [{bits}:0] xs [0:{inputs} - 1], vs [0:{inputs} - 1], ys [0:{codes} - 1];
    reg [{word}:0] words [0:{cases} - 1], now;
    reg [31:0] starts [0:{cases}], origins [0:{cases} - 1];
    integer n, i, at, bad;
{declared}
    assign {{{names}}} = now;
    {instance}
    initial begin
        $readmemh("x.hex", xs); $readmemh("v.hex", vs); $readmemh("y.hex", ys);
        $readmemh("registers.hex", words); $readmemh("starts.hex", starts);
        $readmemh("origins.hex", origins);
        for (n = 0; n < {cases}; n = n + 1) begin
            now = words[n];
            bad = 0;
            at = origins[n] - starts[n];
{turn}
            $display("case %0d %0d %0d", n, starts[n + 1] - starts[n], bad);
        end
        $display("finished");
        $finish;
    end
endmodule
"""
_PIPELINE = """            for (i = starts[n]; i < starts[n + 1] + {latency}; i = i + 1) begin
                if (i < starts[n + 1]) begin {first} = xs[i + at]; {second} = vs[i + at]; end
                #1 clk = 1; #1 clk = 0;
                if (i + 1 >= starts[n] + {latency} && i + 1 < starts[n + 1] + {latency} &&
                    y !== ys[i + 1 - {latency}])
                    bad = bad + 1;
            end"""
_SMALL = """            for (i = starts[n]; i < starts[n + 1]; i = i + 1) begin
                {first} = xs[i + at]; {second} = vs[i + at]; start = 1;
                #1 clk = 1; #1 clk = 0; start = 0;
                #1;
                while (!done) begin #1 clk = 1; #1 clk = 0; #1; end
                if (y !== ys[i]) bad = bad + 1;
            end"""


def run_tool(words: Sequence[str], folder: Path) -> str:
    """What a tool says; an error with its words where it fails."""
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise ToolError(f"{Path(words[0]).name} took longer than {LONGEST} s.") from None
    if done.returncode:
        raise ToolError(
            f"{Path(words[0]).name} failed: {(done.stdout + done.stderr)[-800:].strip()}"
        )
    return done.stdout + done.stderr


def _iverilog(folder: Path) -> str:
    run_tool(
        [tool("iverilog"), "-g2012", "-s", "bench", "-o", "bench", "bench.v", "unit.v"], folder
    )
    return run_tool([tool("vvp"), "-N", "bench"], folder)


def _verilator(folder: Path) -> str:
    words = ["--binary", "--timing", "-O3", "-Wno-fatal", "-Wno-lint", "--top-module", "bench"]
    words += ["-MAKEFLAGS", "OPT_FAST=-O1 OPT_SLOW=-O0 OPT_GLOBAL=-O0", "bench.v", "unit.v"]
    run_tool([tool("verilator"), *words], folder)
    return run_tool(["./obj_dir/Vbench"], folder)


_RUN = {"iverilog": _iverilog, "verilator": _verilator}


def lint(made: Circuit) -> str:
    """What verilator warns of; the one warning left out is of several modules in a file."""
    with tempfile.TemporaryDirectory(prefix="tg-rtl-") as name:
        folder = Path(name)
        (folder / "unit.v").write_text(made.text, "utf-8")
        given = [f"-G{key}={value}" for key, value in made.parameters.items()]
        words = ["--lint-only", "-Wall", "-Wno-DECLFILENAME", "--top-module", made.top, *given]
        done = subprocess.run(
            [tool("verilator"), *words, "unit.v"], cwd=folder, capture_output=True, text=True
        )
        return done.stderr
