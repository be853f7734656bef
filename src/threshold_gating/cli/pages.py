"""Pages of commands: where one can be written, what it is made of, and writing it."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from torch import nn

from threshold_gating.cli.printing import UsageError, say
from threshold_gating.cli.spec import Network
from threshold_gating.conversion import Calibration
from threshold_gating.conversion.audit import Audit
from threshold_gating.conversion.certificate import Certificate
from threshold_gating.show import page
from threshold_gating.show import report as reports


def check(option: str, path: Path | None) -> None:
    """Whether a page can be written there, before work is done for it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory; give a file, as {path / 'page.html'}.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no {path.parent}; make it.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: you may not write there.")
    try:
        page.needed()
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from error


def made(
    args: argparse.Namespace,
    named: Network,
    gated: nn.Module,
    certificate: Certificate | None,
    audit: Audit,
    calibration: Calibration | None = None,
    notes: tuple[str, ...] = (),
) -> reports.Report:
    """What a command found, for its page."""
    facts = {"command": command(args)}
    return reports.of(
        *(args.network, certificate, audit, gated, named.inputs, facts),
        calibration=calibration,
        notes=(*notes, *named.notes),
        more=named.to_dict(),
    )


def command(args: argparse.Namespace) -> str:
    """What was typed."""
    return f"tg {shlex.join(args.words)}"


def write(path: Path, text: str) -> None:
    """Write a page, and say where."""
    try:
        page.write(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    say(f"Written to {path.resolve()}")
