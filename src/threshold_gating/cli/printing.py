"""Output of every command: the result on stdout, all else on stderr, errors in one line."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from threshold_gating.cli.options import STDOUT
from threshold_gating.conversion import CheckpointError, ConversionError
from threshold_gating.conversion.text import jsonable


class UsageError(ValueError):
    """What the command line asks for cannot be had; the message says what would work."""


EXPECTED = (UsageError, ConversionError, CheckpointError)  # their messages say it all


def say(text: str) -> None:
    """A note beside the result."""
    print(text, file=sys.stderr, flush=True)


def missing(what: str, package: str, extra: str) -> str:
    """That a package is needed, and how to get it."""
    return f"{what} {package}, which is not installed: pip install 'threshold-gating[{extra}]'"


# The result


def check_json(args: argparse.Namespace) -> None:
    """Whether --json can be written, before work is done for it."""
    path = args.json
    if path not in (None, STDOUT) and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"--json {path} cannot be written; give a file in a directory, or -.")


def show(args: argparse.Namespace, result: Mapping[str, Any] | str, text: str) -> None:
    """The result as text, or as JSON, or both, as --json says; `result` may be JSON already."""
    if args.json != STDOUT:
        print(text, flush=True)
    if args.json is not None:
        write_json(args, result)


def write_json(args: argparse.Namespace, result: Mapping[str, Any] | str) -> None:
    """Where --json says; a number that JSON has not (inf, nan) is a text."""
    if not isinstance(result, str):
        result = json.dumps(jsonable(dict(result)), indent=2, allow_nan=False)
    if args.json == STDOUT:
        print(result, file=args.stdout, flush=True)
        return
    try:
        args.json.write_text(f"{result}\n", "utf-8")
    except OSError as error:
        raise UsageError(f"--json {args.json} cannot be written: {error.strerror}.") from error


# How far it is

Tell = Callable[..., None]  # tell(text="", share=None): what is done now, and how much is done

_WIDEST = 80  # of what stands beside the bar
_TIME = 10  # columns of the time after it
_TICK = 0.5  # seconds


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Show what is done on stderr, with a bar once a share is told; gone at the end.

    By tqdm, on a terminal. Where one of the two is not there, nothing is shown.
    """
    bar = _bar(what)
    if bar is None:
        yield _tell_nobody
        return

    def tell(text: str = "", share: float | None = None) -> None:
        bar.set_description_str(_cut(": ".join(filter(None, (what, text)))), refresh=False)
        if share is not None:
            bar.bar_format = "{desc} {percentage:3.0f}% |{bar:20}| {elapsed}, {remaining} left"
            bar.n = share
        bar.refresh()

    try:
        yield tell
    finally:
        bar.close()


def _tell_nobody(text: str = "", share: float | None = None) -> None:
    pass


def _bar(what: str) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    form = "{desc} {elapsed}"
    return tqdm(total=1.0, desc=_cut(what), bar_format=form, leave=False, file=sys.stderr)


def _cut(text: str) -> str:
    """As much as one line of the terminal has room for; tqdm could not wipe a second."""
    return text[: min(_WIDEST, shutil.get_terminal_size().columns - _TIME)]


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what is done that takes long, and on a terminal for how long already."""
    with progress(what) as tell:
        if tell is _tell_nobody:
            say(f"{what} ...")
            yield
            return
        done = threading.Event()

        def tick() -> None:
            while not done.wait(_TICK):
                tell()

        ticking = threading.Thread(target=tick, daemon=True)
        ticking.start()
        try:
            yield
        finally:
            done.set()
            ticking.join()
