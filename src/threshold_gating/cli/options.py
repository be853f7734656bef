"""Options of every command, without torch; an option means the same in each command.

`--json FILE`, or `-` for standard output, is an option of every command; `-o/--out` names what else
is written, `-K` a number of branches.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

from threshold_gating._version import __version__

STDOUT = "-"  # no `Path`: that of "-" is that of "./-", which is a file
SPECS = "timm:NAME, hf:FOLDER_OR_ID or FILE.py:FACTORY"
WIKITEXT = "wikitext2-raw"
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
    top = _Parser(prog="tg", description="Neural nonlinearities as one tunable gate.")
    top.add_argument("--version", action="version", version=f"tg {__version__}")
    commands = top.add_subparsers(metavar="COMMAND")
    for add in (_table, _explain, _convert, _calibrate, _audit, _verify):
        add(commands)
    for add in (_evaluate, _prove, _spice, _simulate, _energy, _rtl, _export, _env, _demo):
        add(commands)
    words = "write the result to FILE as JSON; - prints JSON in place of the text"
    for each in commands.choices.values():
        each.add_argument("--json", type=_json, metavar="FILE|-", help=words)
    return top


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what `--json` takes: it once took nothing."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message == "argument --json: expected one argument":
            message = "argument --json: give a FILE, or - for standard output"
        elif "--json" in self._words[:-1] and "are required" in message:
            took = self._words[self._words.index("--json") + 1]
            message += f" (--json took {took!r} as its FILE; - is standard output)"
        super().error(message)


class _Renamed(argparse.Action):
    """An option that has another name now, which is `const`."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is now {self.const}")


# The commands


def _table(commands: Any) -> None:
    parser = _command(commands, "table", "show activations as instances, with their errors")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to show (default: Table 2)")
    _flag(parser, "--all", "every row, then the functions without a row, and why")
    _option(parser, "--format", "form of the table", "text", type=_format, choices=TABLES)


def _explain(commands: Any) -> None:
    words = "show family, fits and theory of any activation, and draw them"
    parser = _command(commands, "explain", words, _EXPLAIN_EXAMPLES)
    words = (
        "a name (gelu), an expression in x, or FILE.py:NAME for a function or module of your own "
        "(FILE.py is imported, which runs what it says)"
    )
    parser.add_argument("what", metavar="WHAT", help=words)
    words = "numbers of branches to fit with, after WHAT (default: 2 3 4 5)"
    _branches(parser, nargs="+", default=[2, 3, 4, 5], help=words)
    _option(parser, "--at", "centre of the theory", 0.0, metavar="X")
    _out(parser, "FILE", "write a picture there, .png or .svg", type=_picture)


_EXPLAIN_EXAMPLES = """
    examples:
      tg explain gelu
      tg explain "x*sigmoid(1.3*x)" -o swish.png
      tg explain "(-x)*sigmoid(x)" -K 3 5 --at 1   (one that begins with - needs the brackets)
      tg explain activations.py:MyActivation --json -
"""


def _convert(commands: Any) -> None:
    parser = _of_network(commands, "convert", "convert a network to gates and certify every site")
    _saved(parser)
    _flag(parser, "--gates-only", "save the gates, no weights")
    _site(parser)
    _tol(parser)


def _calibrate(commands: Any) -> None:
    parser = _of_network(commands, "calibrate", "fit a network's gates to its own inputs")
    _saved(parser)
    words = "samples along the first axis: a tensor, or several by name (.pt, .safetensors, .npz)"
    _option(parser, "--data", words, type=Path, metavar="FILE")
    _count(parser, "--batch-size", "samples at a time", 32)
    either = parser.add_mutually_exclusive_group()
    _branches(either, help="branches of every site (default: as convert chooses)")
    words = "the fewest branches whose error is below E"
    _option(either, "--max-error", words, type=float, metavar="E")
    either.add_argument("--recipe", choices=("paper",), help="App. F: K = 3 by Nelder-Mead; slow")
    _tol(parser)


def _audit(commands: Any) -> None:
    parser = _of_network(commands, "audit", "list the nonlinearities that a network executes")
    _gates(parser)


def _verify(commands: Any) -> None:
    words = "compare a saved conversion with its network, or with another one"
    parser = _of_network(commands, "verify", words, f"{SPECS}, or a saved conversion")
    parser.add_argument("gates", metavar="DIR", help="a saved conversion, as of tg convert -o")
    _tol(parser)


def _evaluate(commands: Any) -> None:
    parser = _command(commands, "evaluate", "measure perplexity before and after conversion")
    parser.add_argument("network", metavar="NETWORK", help="hf:FOLDER_OR_ID or hf:FILE.gguf")
    words = f"the text: FILE.txt, FILE.parquet, or {WIKITEXT} (its test part)"
    parser.add_argument("--data", required=True, metavar="FILE", help=words)
    _count(parser, "--context", "tokens of a window", 1024)
    _count(parser, "--stride", "tokens between windows (default: as --context)")
    _count(parser, "--limit", "read the first N tokens only")
    words, every = f"some of {','.join(COLUMNS)} (default: all)", list(COLUMNS)
    parser.add_argument("--columns", type=_columns, default=every, metavar="NAMES", help=words)
    _site(parser)
    _device(parser)
    _option(parser, "--dtype", "type of the weights", "float32", type=str, choices=DTYPES)
    words = "keep finished windows here; go on from it"
    _option(parser, "--finished", words, type=Path, metavar="FILE")


def _prove(commands: Any) -> None:
    words = "compare a gate with its function on every finite float32, float16, bfloat16"
    parser = _command(commands, "prove", words)
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
    _count(parser, "--sample", "about N inputs, of every exponent: no proof")
    _count(parser, "--jobs", "processes, on a CPU", 1)
    _device(parser)
    words = "what evaluates the gates"
    _option(parser, "--backend", words, "reference", type=str, choices=BACKENDS)
    of_network = parser.add_argument_group("of a network")
    _gates(of_network)
    _weights(of_network)


def _spice(commands: Any) -> None:
    words = "write gates as transistors, and measure them by ngspice"
    parser = _command(commands, "spice", words, _SPICE_EXAMPLES)
    words = "an activation (silu), pair, lse, families (Table 3), tradeoff or presets"
    parser.add_argument("what", metavar="WHAT", help=words)
    _flag(parser, "--run", "measure: needs ngspice and TG_PDK")
    _out(parser, "FILE", "write the netlist there (presets: their JSON)", type=Path)
    words = "draw what was measured, .png or .svg"
    _option(parser, "--plot", words, type=_picture, metavar="FILE")
    words = "of current sources or mirrors (default: real; pair: ideal)"
    parser.add_argument("--tail", choices=TAILS, help=words)
    words = "current of a pair or branch, as 100n (default: 100n; pair: 10n)"
    parser.add_argument("--bias", metavar="A", help=words)
    either = parser.add_mutually_exclusive_group()
    _option(either, "--tau", "pair: find the bias for T per volt", metavar="T")
    words = "volts at a gate for the largest |x| (default: 0.2; pair: 0.4)"
    _option(either, "--swing", words, metavar="V")
    _option(parser, "--supply", "supply (default: the process's)", metavar="V")
    _option(parser, "--transistor", "of the pairs", "nfet", type=str, choices=TRANSISTORS)
    words = "cell: no bias but a class-AB branch, at rest A, as 10n"
    parser.add_argument("--class-ab", metavar="A", help=words)
    words = "set of models (default: sky130; pair: sky130-binned)"
    parser.add_argument("--models", metavar="SET", help=words)
    words = "corner of the process: tt, ff, ss, ... (default: tt; gf180: typical)"
    parser.add_argument("--corner", default="", metavar="NAME", help=words)
    _option(parser, "--celsius", "temperature", 27.0, metavar="C")
    _count(parser, "--draws", "of mismatch (default: 100; presets: 1000)")
    _count(parser, "--seed", "of mismatch", 1)


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
    parser = _of_network(commands, "simulate", words)
    words = "differential pair, as sky130-weak"
    parser.add_argument("--preset", required=True, metavar="NAME", help=words)
    _count(parser, "--draws", "chips to simulate", 8)
    _count(parser, "--seed", "seed of devices and noise", 0)
    words = "what one physical gate serves"
    _option(parser, "--share", words, "channel", type=str, choices=SHARED_GATES)
    _option(parser, "--celsius", "temperature", 27.0, metavar="C")
    words = "volts of a hard gate's largest input, by default the preset's swing"
    _option(parser, "--level", words, metavar="V")
    words = "largest voltage of an input, by default half of the supply"
    _option(parser, "--rail", words, metavar="V")
    _flag(parser, "--sensitivity", "try each site alone, and sort them")
    _option(parser, "--html", "write a page there", type=Path, metavar="FILE")
    words = "linear and convolution layers are on crossbars if one of these is given"
    cells = parser.add_argument_group("crossbars", words)
    for name, words in _CROSSBAR.items():
        if name in ("programming", "seconds", "wire"):
            _option(cells, f"--{name}", words, metavar="X")
        else:
            _count(cells, f"--{name}", words)


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
    parser = _of_network(commands, "rtl", words, what)
    parser.epilog = dedent(_RTL_EXAMPLES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--run",
        action="store_true",
        help="simulate every code, synthesise: iverilog, yosys, TG_PDK",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="a network: float, integers, Verilog and transistors on the same inputs",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page of --check there")
    _out(parser, "FILE", "write the Verilog there", type=Path)
    _count(parser, "--bits", "bits of x and y, from 4 to 16", 16)
    parser.add_argument(
        "--reach", type=_finite, metavar="X", help="largest |x| of an activation, by default 8"
    )
    _count(parser, "--small", "digit of the small unit's multiplier, instead of the pipeline", 0)
    _count(parser, "--slope", "bits of a slope's mantissa; 2 for powers of two")
    _count(parser, "--tau", "bits of a tau's mantissa; 1 for powers of two")
    parser.add_argument(
        "--simulator",
        choices=("iverilog", "verilator", "both"),
        help="by default both, for --check iverilog",
    )
    _count(parser, "--codes", "--check: most codes of a site, 0 for all", 2000)


_RTL_EXAMPLES = """
    examples:
      tg rtl silu -o silu.v                     the unit as Verilog, and its registers
      tg rtl silu --run                         every code, lint, area, delay, FPGA
      tg rtl table2 --bits 8 --run              all of Table 2 in one unit
      tg rtl timm:resnet18 --check --html r.html
"""


def _energy(commands: Any) -> None:
    words = "count conversions, energy and area of a network on crossbars"
    parser = _of_network(commands, "energy", words)
    _option(parser, "--plot", "stacked bars, .svg or .png", type=Path, metavar="FILE")
    for name, (default, words) in BUDGET.items():
        kind = _finite if isinstance(default, float) else type(default)
        metavar = "NAME" if isinstance(default, str) else "X"
        _option(parser, f"--{name}", words, default, type=kind, metavar=metavar)


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
    parser = _command(commands, "export", words, _EXPORT_EXAMPLES)
    parser.add_argument("network", nargs="?", metavar="NETWORK", help=f"{SPECS}")
    words = "FILE.onnx, or FILE.pt2 for a program of torch.export"
    parser.add_argument("out", nargs="?", type=Path, metavar="FILE", help=words)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--gates", action="store_true", help="evaluate every gate (the default)")
    words = "torch's own op where a frozen gate is exactly that, gates elsewhere"
    either.add_argument("--native-where-exact", dest="native", action="store_true", help=words)
    words = "gates as thresholds (QONNX) with inputs and gates of N bits"
    parser.add_argument("--bits", type=int, metavar="N", help=words)
    words = "put the gates onto NETWORK that tg convert -o wrote"
    parser.add_argument("--saved", type=Path, metavar="DIR", help=words)
    words = "do not export and time the original"
    parser.add_argument("--no-speed", action="store_true", help=words)
    words = "show the gates of an exported FILE.onnx; no NETWORK then"
    parser.add_argument("--read", type=Path, metavar="FILE", help=words)
    _weights(parser)
    _site(parser)
    _tol(parser)


_EXPORT_EXAMPLES = """
    examples:
      tg export timm:vit_tiny_patch16_224 vit.onnx
      tg export timm:resnet18 net.onnx --native-where-exact
      tg export --read vit.onnx
"""


def _env(commands: Any) -> None:
    _command(commands, "env", "show versions and devices, and try out each backend")


def _demo(commands: Any) -> None:
    parser = _command(commands, "demo", "train five small networks, convert them, compare")
    _out(parser, "DIR", "write the report there (default: here)", type=Path, default=Path())
    _count(parser, "--seed", "seed of the training", 0)


# What several of them take


def _command(commands: Any, name: str, words: str, examples: str = "") -> argparse.ArgumentParser:
    about = f"{words[0].upper()}{words[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words, description=about)
    parser.set_defaults(command=name)
    if examples:
        parser.epilog = dedent(examples)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _of_network(
    commands: Any, name: str, words: str, what: str = f"{SPECS} (a function that makes it)"
) -> argparse.ArgumentParser:
    parser = _command(commands, name, words)
    parser.add_argument("network", metavar="NETWORK", help=what)
    _weights(parser)
    return parser


def _option(parser: Any, name: str, words: str, default: Any = None, **more: Any) -> None:
    """An option, a finite number if no type is given; its default is said behind the words."""
    shown = f"{default:g}" if isinstance(default, float) else default
    words += "" if default is None else f" (default: {shown})"
    parser.add_argument(name, default=default, help=words, **{"type": _finite, **more})


def _count(parser: Any, name: str, words: str, default: int | None = None) -> None:
    _option(parser, name, words, default, type=int, metavar="N")


def _flag(parser: Any, name: str, words: str) -> None:
    parser.add_argument(name, action="store_true", help=words)


def _weights(parser: Any) -> None:
    _option(parser, "--checkpoint", "weights to load", type=Path, metavar="FILE")
    _flag(parser, "--trust", "run code that a pickled checkpoint asks for")
    _flag(parser, "--pretrained", "let timm fetch its own weights")
    words = "a shape (1,3,224,224), a file of tensors (.safetensors, .pt) or FILE.py:FUNCTION"
    parser.add_argument("--inputs", metavar="WHAT", help=words)


def _gates(parser: Any) -> None:
    words = "use the gates that tg convert -o wrote"
    _option(parser, "--gates", words, type=Path, metavar="DIR")


def _out(parser: Any, metavar: str, words: str, **options: Any) -> None:
    parser.add_argument("-o", "--out", metavar=metavar, help=words, **options)


def _saved(parser: Any) -> None:
    _out(parser, "DIR", "save the converted network there", type=Path)


def _branches(parser: Any, **options: Any) -> None:
    parser.add_argument("-K", type=_number_of_branches, metavar="N", **options)
    parser.add_argument("--k", action=_Renamed, nargs="*", const="-K", help=argparse.SUPPRESS)


def _site(parser: Any) -> None:
    words = "what to put at a site (or re:pattern): a row, a number of branches, or none"
    parser.add_argument("--site", action="append", default=[], metavar="NAME=CHOICE", help=words)


def _tol(parser: Any) -> None:
    words = "largest max|d|/max|y| allowed at each output; inf accepts any, and says so"
    _option(parser, "--tol", words, type=_bound, metavar="E")


def _device(parser: Any) -> None:
    _option(parser, "--device", "cpu or cuda", "cpu", type=str)


# What a word means


def _refuse(wanted: str, word: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{wanted}; got {word!r}")


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _number_of_branches(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 2 <= int(word) <= 8):
        _refuse("the number of branches must be from 2 to 8", word)
    return int(word)


def _finite(word: str) -> float:
    value = _number(word)
    return value if math.isfinite(value) else _refuse("X must be a finite number", word)


def _bound(word: str) -> float:
    value = _number(word)
    return value if value >= 0 else _refuse("E must be a number from 0 on, or inf", word)


def _json(word: str) -> Path | str:
    return STDOUT if word == STDOUT else Path(word)


def _picture(word: str) -> Path:
    if Path(word).suffix.lower() not in (".png", ".svg"):
        _refuse("FILE must end in .png or .svg", word)
    return Path(word)


def _format(word: str) -> str:
    if word == "json":
        raise argparse.ArgumentTypeError("JSON is now --json FILE, or --json - for standard output")
    return word


def _columns(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in COLUMNS:
            _refuse(f"a column must be one of {', '.join(COLUMNS)}", name)
    return names


def _dtype(word: str) -> str:
    name = word.removeprefix("torch.")
    if name not in DTYPES:
        _refuse(f"TYPE must be one of {', '.join(DTYPES)}, whose numbers can all be tried", word)
    return name
