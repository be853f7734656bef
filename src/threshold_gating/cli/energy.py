"""`tg energy`: conversions, energy and area of a network on crossbars."""

from __future__ import annotations

import argparse
from pathlib import Path

from threshold_gating.cli.options import BUDGET
from threshold_gating.cli.printing import UsageError, missing, say, show, working
from threshold_gating.cli.spec import network
from threshold_gating.conversion.aten_ops import tensors
from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.energy import Report
from threshold_gating.hardware.energy import energy as budget


def energy(args: argparse.Namespace) -> int:
    """`tg energy`."""
    if args.plot is not None and (args.plot.is_dir() or not args.plot.parent.is_dir()):
        raise UsageError(f"--plot {args.plot} cannot be written; give a file in a directory.")
    names = [name.replace("-", "_") for name in BUDGET]
    try:
        settings = Assumptions(**{name: getattr(args, name) for name in names})
    except ValueError as error:
        raise UsageError(str(error)) from error
    named = network(args)
    with working(f"{args.network}: running once"):
        try:
            report = budget(named.model, named.inputs, settings)
        except ValueError as error:
            raise UsageError(str(error)) from error
    shapes = ["x".join(map(str, t.shape)) for t in tensors(named.inputs)]
    show(args, {**report.to_dict(), "inputs": shapes, **named.to_dict()}, str(report))
    if args.plot is not None:
        _plot(report, args.plot, args.network)
    say(f"One run on {', '.join(shapes)}.")
    for note in named.notes:
        say(note)
    return 0


def _plot(report: Report, path: Path, title: str) -> None:
    from threshold_gating.show.energy import picture

    try:
        picture(report, path, title)
    except ModuleNotFoundError as error:
        raise UsageError(missing("--plot needs", "matplotlib", "plot")) from error
    except ValueError as error:  # of matplotlib: a kind of file that it does not write
        raise UsageError(f"--plot {path}: {error}") from error
    say(f"Written to {path.resolve()}")
