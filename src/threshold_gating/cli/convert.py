"""The commands `tg convert`, `tg calibrate`, `tg audit` and `tg verify`."""

from __future__ import annotations

import argparse
import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from torch import nn

from threshold_gating import conversion, taxonomy
from threshold_gating.cli import spec
from threshold_gating.cli.printing import UsageError, progress, say, show, working
from threshold_gating.cli.spec import Network, network
from threshold_gating.conversion.audit import WIDTH
from threshold_gating.conversion.plan import arguments


def convert(args: argparse.Namespace) -> int:
    """`tg convert`."""
    chosen = choices(args.site)
    _check_out(args.out)
    named = network(args)
    with working(f"{args.network}, {_size(named.model)} parameters: converting"):
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
        raise UsageError(
            f"-o {path} cannot be written: {there} is not a directory that you can write to."
        )


def _proven(
    args: argparse.Namespace, named: Network, gated: nn.Module, first: str = "", **more: Any
) -> int:
    """Verify, show what was found after `first`, and save what is proven."""
    positional, keywords = arguments(named.inputs)
    with working("verifying with the gates evaluated"):
        certificate = conversion.verify(named.model, gated, *positional, tol=args.tol, **keywords)
        audit = conversion.audit(gated, *positional, **keywords)
    ok = certificate.ok and not [op for op in audit.left if not op.asked]
    report = {"certificate": certificate.to_dict(), "audit": audit.to_dict(), "ok": ok}
    text = f"{first}{certificate.table()}\n\n{fill(audit.counts, WIDTH)}"
    _show(args, {**more, **report}, text, named)
    if not ok:
        say(f"tg {args.command}: not {_done(args)}, see above.")
        return 1
    if args.out is not None:
        conversion.save(gated, args.out, gates_only=getattr(args, "gates_only", False))
        random = ", with random weights" if named.random_weights else ""
        say(f"Written to {args.out.resolve()}{random}")
    return 0


def _done(args: argparse.Namespace) -> str:
    return "proven" if args.out is None else "written"


def calibrate(args: argparse.Namespace) -> int:
    """`tg calibrate`."""
    _check_out(args.out)
    batches = None if args.data is None else spec.batches(args.data, args.batch_size)
    named = network(args, batches[0] if batches else None)
    model, inputs = named.model, named.inputs
    options = {"K": args.K, "max_error": args.max_error, "recipe": args.recipe}
    try:
        with progress(args.network) as tell:
            found = conversion.calibrate(model, batches or [inputs], progress=tell, **options)
    except conversion.ConversionError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    gated = conversion.convert(model, found, inputs=inputs, strict=False)
    random = named.random_inputs
    note = (
        "Inputs are random, so the fits are to noise; give --data for your own.\n\n"
        if random
        else ""
    )
    report = {"calibration": found.to_dict(), "random": random}
    return _proven(args, named, gated, f"{found}\n\n{note}", **report)


def audit(args: argparse.Namespace) -> int:
    """`tg audit`."""
    named = network(args)
    if args.gates is not None:
        conversion.load(args.gates, named.model)
    positional, keywords = arguments(named.inputs)
    found = conversion.audit(named.model, *positional, **keywords)
    _show(args, found.to_dict(), str(found), named)
    return 0


def verify(args: argparse.Namespace) -> int:
    """`tg verify`: what was saved, with the weights saved there, against the network named."""
    named = network(args)
    gated = conversion.load(args.gates, copy.deepcopy(named.model))
    positional, keywords = arguments(named.inputs)
    with working("verifying with the gates evaluated"):
        certificate = conversion.verify(named.model, gated, *positional, tol=args.tol, **keywords)
    _show(args, certificate.to_dict(), certificate.table(), named)
    if "weights" in certificate.failed:
        say(
            f"tg verify: {args.gates} has other weights than {args.network}"
            f"{', which are random' if named.random_weights else ''}; name the network that was "
            "converted, with the weights it had (--checkpoint, --pretrained)."
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
            raise UsageError(f"--site {name!r} is given twice; a site takes one choice.")
        try:
            re.compile(name)
            chosen[name] = _choice(choice)
        except re.error as error:
            raise UsageError(f"--site {text!r} is not a pattern ({error}).") from error
        except ValueError as error:
            raise UsageError(f"--site {text!r}: {error}") from error
    return chosen or None


def _choice(text: str) -> str | int | None:
    if text.lower() == "none":
        return None
    if not (text.isascii() and text.isdigit()):
        return taxonomy.key_of(text)
    if not 2 <= int(text) <= 8:
        raise ValueError(f"the number of branches must be from 2 to 8; got {text}.")
    return int(text)


def _size(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,}"


def _show(args: argparse.Namespace, report: Mapping[str, Any], text: str, named: Network) -> None:
    """The report, and what was random in what it is about."""
    show(args, {**report, **named.to_dict()}, text)
    for note in named.notes:
        say(note)
