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
from threshold_gating.cli import pages, spec
from threshold_gating.cli.printing import UsageError, progress, say, show, working
from threshold_gating.cli.spec import Network, network
from threshold_gating.conversion.checkpoint import card, compare
from threshold_gating.conversion.checkpoint.files import CONFIG
from threshold_gating.conversion.checkpoint.pretrained import load
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.text import WIDTH


def convert(args: argparse.Namespace) -> int:
    """`tg convert`."""
    chosen = choices(args.site)
    _check_out(args.out)
    pages.check("--html", args.html)
    named = network(args)
    size = sum(p.numel() for p in named.model.parameters())
    with working(f"{args.network}, {size:,} parameters: converting"):
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
    args: argparse.Namespace,
    named: Network,
    gated: nn.Module,
    found: conversion.Calibration | None = None,
    first: str = "",
    **more: Any,
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
        done = "proven" if args.out is None else "written"
        say(f"tg {args.command}: not {done}, see above.")
    elif args.out is not None:
        _write(args, named, gated)
        random = ", with random weights" if named.random_weights else ""
        say(f"Written to {args.out.resolve()}{random}")
    if args.html is not None:
        pages.write(args.html, pages.made(args, named, gated, certificate, audit, found).html())
    return 0 if ok else 1


def _write(args: argparse.Namespace, named: Network, gated: nn.Module) -> None:
    """Save what was converted, with a card; a Hugging Face model beside its own files."""
    gates_only = getattr(args, "gates_only", False)
    pretrained: Any = getattr(gated, "save_pretrained", None)
    if pretrained is not None and not gates_only:
        pretrained(args.out)
    else:
        conversion.save(gated, args.out, gates_only=gates_only)
    command = pages.command(args)
    text = card.card(gated, where=args.out.name, command=command, notes=named.notes)
    card.put(gated, args.out, text)


def calibrate(args: argparse.Namespace) -> int:
    """`tg calibrate`."""
    _check_out(args.out)
    pages.check("--html", args.html)
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
    random = bool(named.random_inputs)
    note = (
        "Inputs are random, so the fits are to noise; give --data for your own.\n\n"
        if random
        else ""
    )
    report = {"calibration": found.to_dict(), "random": random}
    return _proven(args, named, gated, found, f"{found}\n\n{note}", **report)


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
    """`tg verify`: two saved networks, or one against the network that it was made from."""
    folders = [is_folder(word) for word in (args.network, args.gates)]
    if not any(folders) and ":" not in args.network:
        raise UsageError(
            f"neither {args.network!r} nor {args.gates!r} is a folder with a tg_config.json; give "
            "one that tg convert -o, save_pretrained or tg.conversion.save wrote."
        )
    if all(folders):
        return _verify_folders(args)
    if folders[0]:
        args.network, args.gates = args.gates, args.network
    pages.check("--html", args.html)
    folder = Path(args.gates)
    named = network(args)
    found = compare.compare(compare.of_network(named.model), compare.of_folder(folder))
    gated = saved_onto(folder, named.model)
    positional, keywords = arguments(named.inputs)
    with working("verifying with the gates evaluated"):
        certificate = conversion.verify(named.model, gated, *positional, tol=args.tol, **keywords)
    apart = {"differs": {"weights": found.weights, "known": found.weights_known}}
    text = f"{certificate.table()}\n\n{found.table().partition(chr(10) + 'gates:')[0]}"
    _show(args, {**certificate.to_dict(), **apart}, text, named)
    wrong = (
        f"{folder} has other weights than {args.network}"
        f"{', which are random' if named.random_weights else ''}; name the network that was "
        "converted, with the weights it had (--checkpoint, --pretrained)."
    )
    notes = (wrong,) if found.weights else ()
    if args.html is not None:
        seen = conversion.audit(gated, *positional, **keywords)
        page = pages.made(args, named, gated, certificate, seen, notes=notes).html()
        pages.write(args.html, page)
    for note in notes:
        say(f"tg verify: {note}")
    return 0 if certificate.ok and not found.weights else 1


def is_folder(word: str) -> bool:
    """Whether a word of the command line names a saved conversion."""
    return (Path(word) / CONFIG).is_file()


def _verify_folders(args: argparse.Namespace) -> int:
    given = {
        "--checkpoint": args.checkpoint,
        "--trust": args.trust,
        "--pretrained": args.pretrained,
        "--inputs": args.inputs,
        "--tol": args.tol,
        "--html": args.html,
    }
    if unused := [option for option, value in given.items() if value not in (None, False)]:
        raise UsageError(
            f"{unused[0]} is for a network that runs; two folders are compared as they are. Give a "
            "network in place of one of them."
        )
    first, second = (compare.of_folder(Path(word)) for word in (args.network, args.gates))
    found = compare.compare(first, second)
    show(
        args, found.to_dict(), f"{found.table()}\n\n{'the same' if found.same else 'not the same'}"
    )
    return 0 if found.same else 1


def saved_onto(folder: Path, model: nn.Module) -> nn.Module:
    """The saved network, with the weights saved there; gates alone on a copy of `model`."""
    if conversion.load(folder).pretrained is not None:
        return load(folder)
    return conversion.load(folder, copy.deepcopy(model))


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


def _show(args: argparse.Namespace, report: Mapping[str, Any], text: str, named: Network) -> None:
    """The report, and what was random in what it is about."""
    show(args, {**report, **named.to_dict()}, text)
    for note in named.notes:
        say(note)
