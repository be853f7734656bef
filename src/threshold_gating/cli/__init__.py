"""The command `tg`: which module runs each command, and how a command ends.

Only what runs is imported: help must not wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from threshold_gating.cli import options

# The module of each command, in which a function has the command's name.
COMMANDS = {
    "table": "table",
    "explain": "explain",
    "convert": "convert",
    "calibrate": "convert",
    "audit": "convert",
    "verify": "convert",
    "insight": "insight",
    "report": "report",
    "evaluate": "evaluate",
    "prove": "prove",
    "spice": "spice",
    "simulate": "simulate",
    "energy": "energy",
    "rtl": "rtl",
    "export": "export",
    "explore": "explore",
    "env": "env",
    "demo": "demo",
}
# What is no command any more, and what to do instead.
MOVED = {
    "bench": "the benchmarks are not in the package any more but in its repository, under "
    "benchmarks/; there run `make bench`, or `PYTHONPATH=src python -m benchmarks [--smoke] "
    "[--only SECTION ...] [--json FILE]`, which needs no install.",
}
_TRACEBACK = "TG_TRACEBACK"


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where a reader that has gone is caught, not at exit
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at exit; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for a program that the closed pipe ended
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        print(f"tg {_command(words) or ''}: {_in_a_line(error)}", file=sys.stderr)
        return 2
    return code


def _in_a_line(error: Exception) -> str:
    """What went wrong that no command has words of its own for, and how to see where."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}".rstrip(": ") + f" ({_TRACEBACK}=1 shows where)"


def _command(words: Sequence[str]) -> str | None:
    """Options before the command take no value, so the first other word is the command."""
    return next((word for word in words if not word.startswith("-")), None)


def _run(words: Sequence[str]) -> int:
    parser = options.parser()
    command = _command(words)
    if command in MOVED:
        print(f"tg {command}: {MOVED[command]}", file=sys.stderr)
        return 2
    if command is not None and command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}."
        parser.error(f"no command {command!r}; {hint}")
    args = parser.parse_args(words)
    args.words = list(words)
    if command is None:
        parser.print_help()
        return 2
    return _execute(command, args)


def _execute(command: str, args: Namespace) -> int:
    """Run a command; an error that it foresaw is a line."""
    from threshold_gating.cli import printing

    run = getattr(importlib.import_module(f".{COMMANDS[command]}", __name__), command)
    args.stdout = sys.stdout
    # JSON stands there alone, whatever a user's own code prints.
    alone = redirect_stdout(sys.stderr) if args.json == options.STDOUT else nullcontext()
    try:
        printing.check_json(args)
        with alone:
            code: int = run(args)
    except printing.EXPECTED as error:
        said = " ".join(str(error).split()).removeprefix(f"{command}: ")
        printing.say(f"tg {command}: {said}")
        return 2
    return code
