"""Options of every command, without torch; an option means the same in each command.

`--json FILE`, or `-` for standard output, is an option of every command; `-o/--out` names what else
is written, `-K` a number of branches.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from threshold_gating._version import __version__
from threshold_gating.cli.shared import (
    SPECS,
    Parser,
    bound,
    branches,
    command,
    count,
    device,
    finite,
    flag,
    gates,
    html,
    of_network,
    option,
    out,
    picture,
    refuse,
    saved,
    site,
    tol,
    weights,
    whole,
)

STDOUT = "-"  # no `Path`: that of "-" is that of "./-", which is a file
WIKITEXT = "wikitext2-raw"
REPORT = "tg_report.html"
# As the modules have them that run. They need torch, so a test compares instead.
TABLES = ("text", "markdown")
COLUMNS = ("sm", "lse", "act", "both")
DTYPES = ("float32", "float16", "bfloat16")
BACKENDS = ("auto", "reference", "triton")
TAILS = ("ideal", "real")
TRANSISTORS = ("nfet", "npn")
SHARED_GATES = ("layer", "channel", "neuron")


def parser() -> argparse.ArgumentParser:
    """The parser of `tg` and of all its commands."""
    top = Parser(prog="tg", description="Neural nonlinearities as one tunable gate.")
    top.add_argument("--version", action="version", version=f"tg {__version__}")
    commands = top.add_subparsers(metavar="COMMAND")
    for add in (_table, _explain, _convert, _calibrate, _audit, _verify, _insight, _report):
        add(commands)
    for add in (_evaluate, _prove, _spice, _simulate, _energy, _rtl, _export, _explore):
        add(commands)
    for add in (_env, _demo):
        add(commands)
    words = "write the result to FILE as JSON; - prints JSON in place of the text"
    for each in commands.choices.values():
        each.add_argument("--json", type=_json, metavar="FILE|-", help=words)
    return top


# The commands


def _table(commands: Any) -> None:
    parser = command(commands, "table", "show activations as instances, with their errors")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to show (default: Table 2)")
    flag(parser, "--all", "every row, then the functions without a row, and why")
    option(parser, "--format", "form of the table", "text", type=_format, choices=TABLES)


def _explain(commands: Any) -> None:
    words = "show family, fits and theory of any activation, and draw them"
    parser = command(commands, "explain", words, _EXPLAIN_EXAMPLES)
    words = (
        "a name (gelu), an expression in x, or FILE.py:NAME for a function or module of your own "
        "(FILE.py is imported, which runs what it says)"
    )
    parser.add_argument("what", metavar="WHAT", help=words)
    words = "numbers of branches to fit with, after WHAT (default: 2 3 4 5)"
    branches(parser, nargs="+", default=[2, 3, 4, 5], help=words)
    option(parser, "--at", "centre of the theory", 0.0, metavar="X")
    out(parser, "FILE", "write a picture there, .png or .svg", type=picture)


_EXPLAIN_EXAMPLES = """
    examples:
      tg explain gelu
      tg explain "x*sigmoid(1.3*x)" -o swish.png
      tg explain "(-x)*sigmoid(x)" -K 3 5 --at 1   (one that begins with - needs the brackets)
      tg explain activations.py:MyActivation --json -
"""


def _convert(commands: Any) -> None:
    parser = of_network(commands, "convert", "convert a network to gates and certify every site")
    saved(parser)
    html(parser)
    flag(parser, "--gates-only", "save the gates, no weights")
    site(parser)
    tol(parser)


def _calibrate(commands: Any) -> None:
    parser = of_network(commands, "calibrate", "fit a network's gates to its own inputs")
    saved(parser)
    words = "samples along the first axis: a tensor, or several by name (.pt, .safetensors, .npz)"
    option(parser, "--data", words, type=Path, metavar="FILE")
    count(parser, "--batch-size", "samples at a time", 32)
    either = parser.add_mutually_exclusive_group()
    branches(either, help="branches of every site (default: as convert chooses)")
    words = "the fewest branches whose error is below E"
    option(either, "--max-error", words, type=float, metavar="E")
    either.add_argument("--recipe", choices=("paper",), help="App. F: K = 3 by Nelder-Mead; slow")
    tol(parser)
    html(parser)


def _audit(commands: Any) -> None:
    parser = of_network(commands, "audit", "list the nonlinearities that a network executes")
    gates(parser)


def _verify(commands: Any) -> None:
    words = "compare a saved conversion with its network, or with another one"
    parser = of_network(commands, "verify", words, f"{SPECS}, or a saved conversion")
    parser.add_argument("gates", metavar="DIR", help="a saved conversion, as of tg convert -o")
    tol(parser)
    html(parser)


def _report(commands: Any) -> None:
    words = "write one page on a network: every site, its gates, its error and what it sees"
    parser = of_network(commands, "report", words, examples=_REPORT_EXAMPLES)
    words = "write the page there"
    out(parser, "FILE", f"{words} (default: {REPORT})", type=Path, default=Path(REPORT))
    gates(parser)
    site(parser)
    tol(parser)


_REPORT_EXAMPLES = """
    examples:
      tg report timm:resnet18 -o resnet18.html
      tg report net.py:make_model --inputs images.pt --json net.json
      tg report net.py:make_model --inputs 1,3,32,32 --gates saved
"""


def _insight(commands: Any) -> None:
    words = "read what the gates of a network are and do, and what changed"
    what = f"{SPECS}, a saved conversion, or the folder of tg.insight.record"
    parser = of_network(commands, "insight", words, what, _INSIGHT_EXAMPLES)
    gates(parser)
    words = "show what changed since this saved conversion of the same network"
    option(parser, "--against", words, type=Path, metavar="DIR")
    option(parser, "--plot", "write pictures into this folder", type=Path, metavar="DIR")


_INSIGHT_EXAMPLES = """
    examples:
      tg insight timm:resnet18 --pretrained --inputs images.pt --plot pictures/
      tg insight after/ --against before/       numbers of two saved networks; nothing runs
      tg insight runs/a --plot pictures/        a run that tg.insight.record wrote
"""


def _evaluate(commands: Any) -> None:
    parser = command(commands, "evaluate", "measure perplexity before and after conversion")
    parser.add_argument("network", metavar="NETWORK", help="hf:FOLDER_OR_ID or hf:FILE.gguf")
    words = f"the text: FILE.txt, FILE.parquet, or {WIKITEXT} (its test part)"
    parser.add_argument("--data", required=True, metavar="FILE", help=words)
    count(parser, "--context", "tokens of a window", 1024)
    count(parser, "--stride", "tokens between windows (default: as --context)")
    count(parser, "--limit", "read the first N tokens only")
    words, every = f"some of {','.join(COLUMNS)} (default: all)", list(COLUMNS)
    parser.add_argument("--columns", type=_columns, default=every, metavar="NAMES", help=words)
    site(parser)
    device(parser)
    option(parser, "--dtype", "type of the weights", "float32", type=str, choices=DTYPES)
    words = "keep finished windows here; go on from it"
    option(parser, "--finished", words, type=Path, metavar="FILE")


def _prove(commands: Any) -> None:
    words = "compare a gate with its function on every finite float32, float16, bfloat16"
    parser = command(commands, "prove", words)
    words = (
        "rows of the taxonomy (silu), all (every exact row), or one network: "
        f"{SPECS}, or a folder that tg convert -o wrote"
    )
    parser.add_argument("what", nargs="+", metavar="WHAT", help=words)
    words = f"some of {', '.join(DTYPES)} (default: all; float32 takes minutes on a CPU)"
    every = list(DTYPES)
    parser.add_argument(
        "--dtype", nargs="+", type=_dtype, default=every, metavar="TYPE", help=words
    )
    count(parser, "--sample", "about N inputs, of every exponent: no proof")
    count(parser, "--jobs", "processes, on a CPU", 1)
    device(parser)
    words = "what evaluates the gates"
    option(parser, "--backend", words, "reference", type=str, choices=BACKENDS)
    of_network = parser.add_argument_group("of a network")
    gates(of_network)
    weights(of_network)


def _spice(commands: Any) -> None:
    words = "write gates as transistors, and measure them by ngspice"
    parser = command(commands, "spice", words, _SPICE_EXAMPLES)
    words = "an activation (silu), pair, lse, families (Table 3), tradeoff or presets"
    parser.add_argument("what", metavar="WHAT", help=words)
    flag(parser, "--run", "measure: needs ngspice and TG_PDK")
    out(parser, "FILE", "write the netlist there (presets: their JSON)", type=Path)
    words = "draw what was measured, .png or .svg"
    option(parser, "--plot", words, type=picture, metavar="FILE")
    words = "of current sources or mirrors (default: real; pair: ideal)"
    parser.add_argument("--tail", choices=TAILS, help=words)
    words = "current of a pair or branch, as 100n (default: 100n; pair: 10n)"
    parser.add_argument("--bias", metavar="A", help=words)
    either = parser.add_mutually_exclusive_group()
    option(either, "--tau", "pair: find the bias for T per volt", metavar="T")
    words = "volts at a gate for the largest |x| (default: 0.2; pair: 0.4)"
    option(either, "--swing", words, metavar="V")
    option(parser, "--supply", "supply (default: the process's)", metavar="V")
    option(parser, "--transistor", "of the pairs", "nfet", type=str, choices=TRANSISTORS)
    words = "cell: no bias but a class-AB branch, at rest A, as 10n"
    parser.add_argument("--class-ab", metavar="A", help=words)
    words = "set of models (default: sky130; pair: sky130-binned)"
    parser.add_argument("--models", metavar="SET", help=words)
    words = "corner of the process: tt, ff, ss, ... (default: tt; gf180: typical)"
    parser.add_argument("--corner", default="", metavar="NAME", help=words)
    option(parser, "--celsius", "temperature", 27.0, metavar="C")
    count(parser, "--draws", "of mismatch (default: 100; presets: 1000)")
    count(parser, "--seed", "of mismatch", 1)


_SPICE_EXAMPLES = """
    examples:
      tg spice silu -o silu.cir                 the netlist; ngspice reads it
      tg spice silu --run                       error over conditions, mismatch, speed and noise
      tg spice silu --class-ab 10n --run        the same without a bias on every branch
      tg spice pair --bias 1u --run             tau, curve, spread, speed and noise of a pair
      tg spice tradeoff --run --plot t.svg      what tau costs, from 1 nA to 100 uA
"""


def _simulate(commands: Any) -> None:
    words = "run a network on simulated analog gates and crossbars, chip by chip"
    parser = of_network(commands, "simulate", words)
    words = "differential pair, as sky130-weak"
    parser.add_argument("--preset", required=True, metavar="NAME", help=words)
    count(parser, "--draws", "chips to simulate", 8)
    count(parser, "--seed", "seed of devices and noise", 0)
    words = "what one physical gate serves"
    option(parser, "--share", words, "channel", type=str, choices=SHARED_GATES)
    option(parser, "--celsius", "temperature", 27.0, metavar="C")
    words = "volts of a hard gate's largest input, by default the preset's swing"
    option(parser, "--level", words, metavar="V")
    words = "largest voltage of an input, by default half of the supply"
    option(parser, "--rail", words, metavar="V")
    flag(parser, "--sensitivity", "try each site alone, and sort them")
    html(parser)
    words = "linear and convolution layers are on crossbars if one of these is given"
    cells = parser.add_argument_group("crossbars", words)
    for name, words in _CROSSBAR.items():
        if name in ("programming", "seconds", "wire"):
            option(cells, f"--{name}", words, metavar="X")
        else:
            count(cells, f"--{name}", words)


_CROSSBAR = {
    "rows": "rows of a tile, by default those of the layer",
    "columns": "columns of a tile, by default those of the layer",
    "adc-bits": "bits of the converter at each column, by default none",
    "dac-bits": "bits of the converter at each row, by default none",
    "levels": "conductances that a cell can be set to, by default any",
    "programming": "standard deviation of a cell, as a share of the largest conductance",
    "seconds": "time since programming, with the drift of phase-change cells",
    "wire": "ohms of a wire from cell to cell",
}


def _rtl(commands: Any) -> None:
    words = "write activations as Verilog, check them code by code, and measure area and delay"
    what = f"an activation (silu), table2, or a network to --check: {SPECS}"
    parser = of_network(commands, "rtl", words, what, _RTL_EXAMPLES)
    flag(parser, "--run", "simulate every code, synthesise: iverilog, yosys, TG_PDK")
    words = "a network: float, integers, Verilog and transistors on the same inputs"
    flag(parser, "--check", words)
    html(parser, "write the page of --check there")
    out(parser, "FILE", "write the Verilog there", type=Path)
    count(parser, "--bits", "bits of x and y, from 4 to 16", 16)
    option(parser, "--reach", "largest |x| of an activation, by default 8", metavar="X")
    count(parser, "--small", "digit of the small unit's multiplier, instead of the pipeline", 0)
    count(parser, "--slope", "bits of a slope's mantissa; 2 for powers of two")
    count(parser, "--tau", "bits of a tau's mantissa; 1 for powers of two")
    words = "by default both, for --check the faster one"
    parser.add_argument("--simulator", choices=("iverilog", "verilator", "both"), help=words)
    count(parser, "--codes", "--check: most codes of an instance, 0 for all")


_RTL_EXAMPLES = """
    examples:
      tg rtl silu -o silu.v                     the unit as Verilog, and its registers
      tg rtl silu --run                         every code, lint, area, delay, FPGA
      tg rtl table2 --bits 8 --run              all of Table 2 in one unit
      tg rtl timm:resnet18 --check --html r.html
"""


def _energy(commands: Any) -> None:
    words = "count conversions, energy and area of a network on crossbars"
    parser = of_network(commands, "energy", words)
    option(parser, "--plot", "stacked bars, .svg or .png", type=Path, metavar="FILE")
    for name, (default, words) in BUDGET.items():
        kind = {float: finite, int: whole, str: str}[type(default)]
        metavar = "NAME" if isinstance(default, str) else "X"
        option(parser, f"--{name}", words, default, type=kind, metavar=metavar)


# The fields of `hardware.assumptions.Assumptions`, with their defaults.
BUDGET: dict[str, tuple[float | int | str, str]] = {
    "node": (32.0, "process of everything, in nm"),
    "rows": (128, "rows of a tile"),
    "columns": (128, "columns of a tile"),
    "adc-bits": (6, "effective bits of a column's converter"),
    "dac-bits": (6, "bits of a row's converter"),
    "adc-rate": (1.2e9, "conversions a second of one converter"),
    "preset": ("sky130-moderate", "differential pair of a gate"),
    "volts": (0.2, "row voltage of the largest input"),
    "g-max": (25e-6, "largest conductance of a cell, in siemens"),
    "read": (100e-9, "seconds that a tile is on for a conversion"),
}


def _export(commands: Any) -> None:
    words = "write a network as gates for other tools, and compare"
    parser = command(commands, "export", words, _EXPORT_EXAMPLES)
    parser.add_argument("network", nargs="?", metavar="NETWORK", help=SPECS)
    words = "FILE.onnx, or FILE.pt2 for a program of torch.export"
    parser.add_argument("out", nargs="?", type=Path, metavar="FILE", help=words)
    either = parser.add_mutually_exclusive_group()
    flag(either, "--gates", "evaluate every gate (the default)")
    words = "torch's own op where a frozen gate is exactly that, gates elsewhere"
    either.add_argument("--native-where-exact", dest="native", action="store_true", help=words)
    words = "the same, and at approximate sites whose error over the line is at most E"
    option(either, "--native-within", words, dest="within", type=bound, metavar="E")
    words = "gates as thresholds (QONNX) with inputs and gates of N bits"
    count(parser, "--bits", words)
    words = "put the gates onto NETWORK that tg convert -o wrote"
    option(parser, "--saved", words, type=Path, metavar="DIR")
    flag(parser, "--no-speed", "do not export and time the original")
    words = "show the gates of an exported FILE.onnx; no NETWORK then"
    option(parser, "--read", words, type=Path, metavar="FILE")
    weights(parser)
    site(parser)
    tol(parser)


_EXPORT_EXAMPLES = """
    examples:
      tg export timm:vit_tiny_patch16_224 vit.onnx
      tg export timm:resnet18 net.onnx --native-where-exact
      tg export timm:vit_tiny_patch16_224 vit.onnx --native-within 1e-4
      tg export --read vit.onnx
"""


def _explore(commands: Any) -> None:
    words = "turn an activation by hand in a browser, and walk the sites of a network"
    parser = command(commands, "explore", words, _EXPLORE_EXAMPLES)
    words = (
        f"an activation to begin with (gelu), a network ({SPECS}), a saved conversion, or its "
        "tg_config.json (default: silu)"
    )
    parser.add_argument("network", nargs="?", default="silu", metavar="WHAT", help=words)
    words = "write the pages there instead of serving them; any web server or browser takes them"
    option(parser, "--static", words, type=Path, metavar="DIR")
    option(parser, "--preset", "begin on this differential pair, as sky130-weak", type=str)
    count(parser, "--port", "port on this machine, 0 for any that is free", 8765)
    option(parser, "--address", "this machine; no other is served", "127.0.0.1", type=str)
    weights(parser)


_EXPLORE_EXAMPLES = """
    examples:
      tg explore gelu
      tg explore timm:resnet18
      tg explore out/ --static pages/          (out/ of tg convert -o)
"""


def _env(commands: Any) -> None:
    command(commands, "env", "show versions and devices, and try out each backend")


def _demo(commands: Any) -> None:
    parser = command(commands, "demo", "train five small networks, convert them, compare")
    out(parser, "DIR", "write the report there (default: here)", type=Path, default=Path())
    count(parser, "--seed", "seed of the training", 0)


# What a word means


def _json(word: str) -> Path | str:
    return STDOUT if word == STDOUT else Path(word)


def _format(word: str) -> str:
    if word == "json":
        raise argparse.ArgumentTypeError("JSON is now --json FILE, or --json - for standard output")
    return word


def _columns(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in COLUMNS:
            refuse(f"a column must be one of {', '.join(COLUMNS)}", name)
    return names


def _dtype(word: str) -> str:
    name = word.removeprefix("torch.")
    if name not in DTYPES:
        refuse(f"TYPE must be one of {', '.join(DTYPES)}, whose numbers can all be tried", word)
    return name
