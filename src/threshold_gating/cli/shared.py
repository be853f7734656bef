"""What several commands take, without torch: options, and what the words behind them mean."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

SPECS = "timm:NAME, hf:FOLDER_OR_ID or FILE.py:FACTORY"


class Parser(argparse.ArgumentParser):
    """A parser that takes -1n and -inf for values, and whose errors say what `--json` takes.

    argparse takes -1 for a value but -1n for an option, and would answer that one is lacking.
    """

    _words: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)

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


def command(commands: Any, name: str, words: str, examples: str = "") -> argparse.ArgumentParser:
    about = f"{words[0].upper()}{words[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words, description=about)
    parser.set_defaults(command=name)
    if examples:
        parser.epilog = dedent(examples)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def of_network(
    commands: Any,
    name: str,
    words: str,
    what: str = f"{SPECS} (a function that makes it)",
    examples: str = "",
) -> argparse.ArgumentParser:
    """A command whose first argument is a network."""
    parser = command(commands, name, words, examples)
    parser.add_argument("network", metavar="NETWORK", help=what)
    weights(parser)
    return parser


def option(parser: Any, name: str, words: str, default: Any = None, **more: Any) -> None:
    """An option, a finite number if no type is given; its default is said behind the words."""
    shown = f"{default:g}" if isinstance(default, float) else default
    words += "" if default is None else f" (default: {shown})"
    parser.add_argument(name, default=default, help=words, **{"type": finite, **more})


def count(parser: Any, name: str, words: str, default: int | None = None) -> None:
    option(parser, name, words, default, type=whole, metavar="N")


def flag(parser: Any, name: str, words: str) -> None:
    parser.add_argument(name, action="store_true", help=words)


def weights(parser: Any) -> None:
    option(parser, "--checkpoint", "weights to load", type=Path, metavar="FILE")
    flag(parser, "--trust", "run code that a pickled checkpoint asks for")
    flag(parser, "--pretrained", "let timm fetch its own weights")
    words = "a shape (1,3,224,224), a file of tensors (.safetensors, .pt) or FILE.py:FUNCTION"
    parser.add_argument("--inputs", metavar="WHAT", help=words)


def gates(parser: Any) -> None:
    words = "use the gates that tg convert -o wrote"
    option(parser, "--gates", words, type=Path, metavar="DIR")


def out(parser: Any, metavar: str, words: str, **options: Any) -> None:
    parser.add_argument("-o", "--out", metavar=metavar, help=words, **options)


def saved(parser: Any) -> None:
    out(parser, "DIR", "save the converted network there", type=Path)


def html(parser: Any, words: str = "write a page on every site there") -> None:
    option(parser, "--html", words, type=Path, metavar="FILE")


def branches(parser: Any, **options: Any) -> None:
    parser.add_argument("-K", type=_number_of_branches, metavar="N", **options)
    parser.add_argument("--k", action=_Renamed, nargs="*", const="-K", help=argparse.SUPPRESS)


class _Renamed(argparse.Action):
    """An option that has another name now, which is `const`."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is now {self.const}")


def site(parser: Any) -> None:
    words = "what to put at a site (or re:pattern): a row, a number of branches, or none"
    parser.add_argument("--site", action="append", default=[], metavar="NAME=CHOICE", help=words)


def tol(parser: Any) -> None:
    words = "largest max|d|/max|y| allowed at each output; inf accepts any, and says so"
    option(parser, "--tol", words, type=bound, metavar="E")


def device(parser: Any) -> None:
    option(parser, "--device", "cpu or cuda", "cpu", type=str)


# What a word means


def refuse(wanted: str, word: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{wanted}; got {word!r}")


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _number_of_branches(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 2 <= int(word) <= 8):
        refuse("the number of branches must be from 2 to 8", word)
    return int(word)


def finite(word: str) -> float:
    value = _number(word)
    if math.isfinite(value):
        return value
    refuse("a finite number is needed, without a unit", word)


def whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        refuse("a whole number is needed", word)


def bound(word: str) -> float:
    value = _number(word)
    return value if value >= 0 else refuse("E must be a number from 0 on, or inf", word)


def picture(word: str) -> Path:
    if Path(word).suffix.lower() not in (".png", ".svg"):
        refuse("FILE must end in .png or .svg", word)
    return Path(word)
