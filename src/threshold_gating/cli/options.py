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
    for add in (_evaluate, _prove, _spice, _simulate, _energy, _export, _env, _demo):
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
    parser.add_argument(
        "--all", action="store_true", help="every row, then the functions without a row, and why"
    )
    words = "form of the table (default: text)"
    parser.add_argument("--format", type=_format, choices=TABLES, default="text", help=words)


def _explain(commands: Any) -> None:
    words = "show family, fits and theory of any activation, and draw them"
    parser = _command(commands, "explain", words)
    parser.epilog = dedent(_EXPLAIN_EXAMPLES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a name (gelu), an expression in x, or FILE.py:NAME for a function or module of your "
        "own (FILE.py is imported, which runs what it says)",
    )
    words = "numbers of branches to fit with, after WHAT (default: 2 3 4 5)"
    _branches(parser, nargs="+", default=[2, 3, 4, 5], help=words)
    parser.add_argument(
        "--at", type=_finite, default=0.0, metavar="X", help="centre of the theory (default: 0)"
    )
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
    parser.add_argument("--gates-only", action="store_true", help="save the gates, no weights")
    _site(parser)
    _tol(parser)


def _calibrate(commands: Any) -> None:
    parser = _of_network(commands, "calibrate", "fit a network's gates to its own inputs")
    _saved(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="samples along the first axis: a tensor, or several by name (.pt, .safetensors, .npz)",
    )
    _count(parser, "--batch-size", "samples at a time", 32)
    either = parser.add_mutually_exclusive_group()
    _branches(either, help="branches of every site (default: as convert chooses)")
    either.add_argument(
        "--max-error", type=float, metavar="E", help="the fewest branches whose error is below E"
    )
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
    words, all_of_them = f"some of {','.join(COLUMNS)} (default: all)", list(COLUMNS)
    parser.add_argument(
        "--columns", type=_columns, default=all_of_them, metavar="NAMES", help=words
    )
    _site(parser)
    _device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="type of the weights (default: float32)"
    )
    parser.add_argument(
        "--finished", type=Path, metavar="FILE", help="keep finished windows here; go on from it"
    )


def _prove(commands: Any) -> None:
    words = "compare a gate with its function on every finite float32, float16, bfloat16"
    parser = _command(commands, "prove", words)
    parser.add_argument(
        "what",
        nargs="+",
        metavar="WHAT",
        help="rows of the taxonomy (silu), all (every exact row), or one network: "
        f"{SPECS}, or a folder that tg convert -o wrote",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        type=_dtype,
        default=list(DTYPES),
        metavar="TYPE",
        help=f"some of {', '.join(DTYPES)} (default: all; float32 takes minutes on a CPU)",
    )
    _count(parser, "--sample", "about N inputs, of every exponent: no proof")
    _count(parser, "--jobs", "processes, on a CPU", 1)
    _device(parser)
    words = "what evaluates the gates (default: reference)"
    parser.add_argument("--backend", choices=BACKENDS, default="reference", help=words)
    of_network = parser.add_argument_group("of a network")
    _gates(of_network)
    _weights(of_network)


def _spice(commands: Any) -> None:
    parser = _command(commands, "spice", "write gates as transistors, and measure them by ngspice")
    parser.epilog = dedent(_SPICE_EXAMPLES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="an activation (silu), pair, lse, families (Table 3), tradeoff or presets",
    )
    parser.add_argument("--run", action="store_true", help="measure: needs ngspice and TG_PDK")
    _out(parser, "FILE", "write the netlist there (presets: their JSON)", type=Path)
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw what was measured, .png or .svg"
    )
    parser.add_argument(
        "--tail", choices=TAILS, help="of current sources or mirrors (default: real; pair: ideal)"
    )
    parser.add_argument(
        "--bias",
        metavar="A",
        help="current of a pair or branch, as 100n (default: 100n; pair: 10n)",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--tau", type=_finite, metavar="T", help="pair: find the bias for T per volt"
    )
    either.add_argument(
        "--swing",
        type=_finite,
        metavar="V",
        help="volts at a gate for the largest |x| (default: 0.2; pair: 0.4)",
    )
    parser.add_argument(
        "--supply", type=_finite, metavar="V", help="supply (default: the process's)"
    )
    parser.add_argument(
        "--transistor", choices=TRANSISTORS, default="nfet", help="of the pairs (default: nfet)"
    )
    parser.add_argument(
        "--models", metavar="SET", help="set of models (default: sky130; pair: sky130-binned)"
    )
    parser.add_argument(
        "--corner",
        default="",
        metavar="NAME",
        help="corner of the process: tt, ff, ss, ... (default: tt; gf180: typical)",
    )
    parser.add_argument(
        "--celsius", type=_finite, default=27.0, metavar="C", help="temperature (default: 27)"
    )
    parser.add_argument(
        "--draws", type=int, metavar="N", help="of mismatch (default: 100; presets: 1000)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of mismatch (default: 1)")


_SPICE_EXAMPLES = """
    examples:
      tg spice silu -o silu.cir                 the netlist; ngspice reads it
      tg spice silu --run                       error over x, temperature and mismatch
      tg spice pair --bias 1u --run             tau, curve, spread, speed and noise of a pair
      tg spice tradeoff --run --plot t.svg      what tau costs, from 1 nA to 100 uA
"""


def _simulate(commands: Any) -> None:
    words = "run a network on simulated analog gates and crossbars, chip by chip"
    parser = _of_network(commands, "simulate", words)
    parser.add_argument(
        "--preset", required=True, metavar="NAME", help="differential pair, as sky130-weak"
    )
    parser.add_argument(
        "--draws", type=int, default=8, metavar="N", help="chips to simulate (default: 8)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of devices and noise (default: 0)"
    )
    parser.add_argument(
        "--share",
        choices=SHARED_GATES,
        default="channel",
        help="what one physical gate serves (default: channel)",
    )
    parser.add_argument(
        "--celsius", type=_finite, default=27.0, metavar="C", help="temperature (default: 27)"
    )
    parser.add_argument(
        "--level",
        type=_finite,
        metavar="V",
        help="volts of a hard gate's largest input, by default the preset's swing",
    )
    parser.add_argument(
        "--rail",
        type=_finite,
        metavar="V",
        help="largest voltage of an input, by default half of the supply",
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="try each site alone, and sort them"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page there")
    cells = parser.add_argument_group(
        "crossbars", "linear and convolution layers are on crossbars if one of these is given"
    )
    for name, words in _CROSSBAR.items():
        kind = _finite if name in ("programming", "seconds", "wire") else int
        cells.add_argument(
            f"--{name}", type=kind, metavar="X" if kind is _finite else "N", help=words
        )


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


def _energy(commands: Any) -> None:
    words = "count conversions, energy and area of a network on crossbars"
    parser = _of_network(commands, "energy", words)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="stacked bars, .svg or .png")
    for name, (default, words) in BUDGET.items():
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        parser.add_argument(
            f"--{name}",
            type=_finite if isinstance(default, float) else type(default),
            default=default,
            metavar="NAME" if isinstance(default, str) else "X",
            help=f"{words} (default: {shown})",
        )


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
    parser = _command(commands, "export", "write a network as gates for other tools, and compare")
    parser.epilog = dedent(_EXPORT_EXAMPLES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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


def _command(commands: Any, name: str, words: str) -> argparse.ArgumentParser:
    about = f"{words[0].upper()}{words[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words, description=about)
    parser.set_defaults(command=name)
    return parser


def _of_network(
    commands: Any, name: str, words: str, what: str = f"{SPECS} (a function that makes it)"
) -> argparse.ArgumentParser:
    parser = _command(commands, name, words)
    parser.add_argument("network", metavar="NETWORK", help=what)
    _weights(parser)
    return parser


def _weights(parser: Any) -> None:
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights to load")
    parser.add_argument(
        "--trust", action="store_true", help="run code that a pickled checkpoint asks for"
    )
    parser.add_argument("--pretrained", action="store_true", help="let timm fetch its own weights")
    parser.add_argument(
        "--inputs",
        metavar="WHAT",
        help="a shape (1,3,224,224), a file of tensors (.safetensors, .pt) or FILE.py:FUNCTION",
    )


def _count(parser: Any, name: str, words: str, default: int | None = None) -> None:
    words += "" if default is None else f" (default: {default})"
    parser.add_argument(name, type=int, default=default, metavar="N", help=words)


def _gates(parser: Any) -> None:
    parser.add_argument(
        "--gates", type=Path, metavar="DIR", help="use the gates that tg convert -o wrote"
    )


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
    parser.add_argument("--tol", type=_bound, metavar="E", help=words)


def _device(parser: Any) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


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
