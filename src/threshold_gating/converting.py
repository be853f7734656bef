"""The commands `tg convert`, `tg calibrate`, `tg audit` and `tg verify`."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from threshold_gating import conversion, networks, taxonomy
from threshold_gating.conversion.audit import jsonable
from threshold_gating.conversion.plan import arguments
from threshold_gating.networks import SPECS, Network, UsageError, network


def add_commands(commands: Any) -> None:
    """Add the four commands to the parser of `tg`."""
    convert = _command(commands, "convert", "a network to gates, with a certificate")
    convert.add_argument("-o", "--out", type=Path, metavar="DIR", help="where to save the result")
    convert.add_argument("--gates-only", action="store_true", help="save no weights")
    convert.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="NAME=CHOICE",
        help="what to put at a site (or re:pattern): a row, a number of branches, or none",
    )
    calibrate = _command(commands, "calibrate", "fit a network's gates to its own inputs")
    calibrate.add_argument("-o", "--out", type=Path, metavar="DIR", help="where to save the result")
    calibrate.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="samples along the first axis: a tensor or named ones (.pt, .safetensors, .npz)",
    )
    calibrate.add_argument("--batch-size", type=int, default=32, metavar="N", help="at a time")
    branches = calibrate.add_mutually_exclusive_group()
    branches.add_argument("-K", type=int, metavar="N", help="branches of every site")
    branches.add_argument("--max-error", type=float, metavar="E", help="the smallest K that does")
    branches.add_argument("--recipe", choices=("paper",), help="App. F: K = 3 by Nelder-Mead; slow")
    audit = _command(commands, "audit", "what nonlinearities a network executes")
    audit.add_argument("--gates", type=Path, metavar="DIR", help="with the gates saved there")
    verify = _command(commands, "verify", "a saved conversion against its network")
    verify.add_argument("gates", type=Path, metavar="DIR", help="what tg convert -o wrote")


def _command(commands: Any, name: str, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words)
    parser.set_defaults(command=name)
    parser.add_argument("network", metavar="NETWORK", help=f"{SPECS} (a function that makes it)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights to load")
    parser.add_argument("--trust", action="store_true", help="run code that a pickle asks for")
    parser.add_argument("--pretrained", action="store_true", help="let timm fetch its own weights")
    parser.add_argument(
        "--inputs",
        metavar="WHAT",
        help="a shape (1,3,224,224), a file of tensors (.safetensors, .pt) or FILE.py:FUNCTION",
    )
    parser.add_argument("--json", action="store_true", help="for other programs")
    if name != "audit":
        parser.add_argument(
            "--tol",
            type=_bound,
            metavar="E",
            help="your own bound on max|d|/max|y| of each output; inf accepts any, and says so",
        )
    return parser


def _bound(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"E is a number from 0 on, or inf; got {word!r}")
    return value


def command(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run` with its errors printed as one line."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (UsageError, conversion.ConversionError, conversion.CheckpointError) as error:
            name = run.__name__
            said = " ".join(str(error).split())
            print(f"tg {name}: {said.removeprefix(f'{name}: ')}", file=sys.stderr)
            return 2

    return guarded


@command
def convert(args: argparse.Namespace) -> int:
    """`tg convert`."""
    chosen = choices(args.site)
    _check_out(args.out)
    named = network(args)
    with _working(args, f"{args.network}, {_size(named.model)} parameters: converting"):
        gated = conversion.convert(named.model, chosen, inputs=named.inputs, strict=False)
    return _proven(args, named, gated)


def _check_out(path: Path | None) -> None:
    """Whether something can be saved there, before work is done for it."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"-o {path} is a file; give a directory, which may be a new one.")
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"-o {path} cannot be written: {there} is no directory that lets you.")


def _proven(
    args: argparse.Namespace, named: Network, gated: nn.Module, first: str = "", **more: Any
) -> int:
    """Verify, show what was found after `first`, and save what is proven."""
    positional, keywords = arguments(named.inputs)
    with _working(args, "verifying with the gates evaluated"):
        certificate = conversion.verify(named.model, gated, *positional, tol=args.tol, **keywords)
        audit = conversion.audit(gated, *positional, **keywords)
    ok = certificate.ok and not [op for op in audit.left if not op.asked]
    report = {"certificate": certificate.to_dict(), "audit": audit.to_dict(), "ok": ok}
    text = f"{first}{certificate.table()}\n\n{str(audit).splitlines()[-1]}"
    _show(args, {**more, **report}, text, named)
    if not ok:
        print(f"tg {args.command}: not {_done(args)}, see above.", file=sys.stderr)
        return 1
    if args.out is not None:
        conversion.save(gated, args.out, gates_only=getattr(args, "gates_only", False))
        random = ", with random weights" if named.random_weights else ""
        _say(args, f"Written to {args.out.resolve()}{random}")
    return 0


def _done(args: argparse.Namespace) -> str:
    return "proven" if args.out is None else "written"


@command
def calibrate(args: argparse.Namespace) -> int:
    """`tg calibrate`."""
    _check_out(args.out)
    batches = None if args.data is None else networks.batches(args.data, args.batch_size)
    named = network(args, batches[0] if batches else None)
    model, inputs = named.model, named.inputs
    options = {"K": args.K, "max_error": args.max_error, "recipe": args.recipe}
    silent = (lambda text: None) if args.json else None
    try:
        found = conversion.calibrate(model, batches or [inputs], progress=silent, **options)
    except conversion.ConversionError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    gated = conversion.convert(model, found, inputs=inputs, strict=False)
    random = named.random_inputs
    note = (
        "Inputs are random, so the fits are to noise; --data is for your own.\n\n" if random else ""
    )
    report = {"calibration": found.to_dict(), "random": random}
    return _proven(args, named, gated, f"{found}\n\n{note}", **report)


@command
def audit(args: argparse.Namespace) -> int:
    """`tg audit`."""
    named = network(args)
    if args.gates is not None:
        conversion.load(args.gates, named.model)
    positional, keywords = arguments(named.inputs)
    found = conversion.audit(named.model, *positional, **keywords)
    _show(args, found.to_dict(), str(found), named)
    return 0


@command
def verify(args: argparse.Namespace) -> int:
    """`tg verify`: what was saved, with the weights saved there, against the network named."""
    named = network(args)
    gated = conversion.load(args.gates, copy.deepcopy(named.model))
    positional, keywords = arguments(named.inputs)
    with _working(args, "verifying with the gates evaluated"):
        certificate = conversion.verify(named.model, gated, *positional, tol=args.tol, **keywords)
    _show(args, certificate.to_dict(), certificate.table(), named)
    if "weights" in certificate.failed:
        print(
            f"tg verify: {args.gates} has other weights than {args.network}"
            f"{', which are random' if named.random_weights else ''}; name the network that was "
            "converted, with the weights it had (--checkpoint, --pretrained).",
            file=sys.stderr,
        )
    return 0 if certificate.ok else 1


def choices(given: list[str]) -> dict[str, Any] | None:
    """--site NAME=CHOICE as `convert` takes it."""
    chosen: dict[str, Any] = {}
    for text in given:
        name, equals, choice = text.rpartition("=")
        if not equals:
            raise UsageError(f"--site {text!r} is not NAME=CHOICE.")
        if name in chosen:
            raise UsageError(f"--site {name!r} is given twice; one choice is wanted for a site.")
        try:
            re.compile(name)
            chosen[name] = _choice(choice)
        except re.error as error:
            raise UsageError(f"--site {text!r} is no pattern ({error}).") from error
        except ValueError as error:
            raise UsageError(f"--site {text!r}: {error}") from error
    return chosen or None


def _choice(text: str) -> str | int | None:
    if text.lower() == "none":
        return None
    if not (text.isascii() and text.isdigit()):
        return taxonomy.key_of(text)
    if not 2 <= int(text) <= 8:
        raise ValueError(f"a number of branches is from 2 to 8; got {text}.")
    return int(text)


def _size(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,}"


@contextmanager
def _working(args: argparse.Namespace, what: str) -> Iterator[None]:
    """Say on stderr what is being done and, on a terminal, for how long already."""
    done = threading.Event()

    def tick() -> None:
        start = time.monotonic()
        while not done.wait(0.5):
            print(
                f"\r{what} ... {time.monotonic() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
        print(file=sys.stderr)

    ticking = threading.Thread(target=tick, daemon=True)
    if args.json or not sys.stderr.isatty():
        _say(args, f"{what} ...")
    else:
        ticking.start()
    try:
        yield
    finally:
        done.set()
        if ticking.is_alive():
            ticking.join()


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, file=sys.stderr, flush=True)


def _show(args: argparse.Namespace, report: Mapping[str, Any], text: str, named: Network) -> None:
    """The report, and what was random in what it is about."""
    if args.json:
        text = json.dumps(jsonable({**report, **named.to_dict()}), indent=2, allow_nan=False)
    print(text, flush=True)
    for note in named.notes:
        _say(args, note)
