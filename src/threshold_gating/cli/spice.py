"""`tg spice`: gates as netlists of transistors, and what ngspice measures of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threshold_gating.cli import spice_cell, spice_pair
from threshold_gating.cli.printing import UsageError, missing, progress, say, show
from threshold_gating.cli.spice_tables import (
    Answer,
    Row,
    amperes,
    cell_of,
    conditions,
    families,
    log_sum_exp,
    presets,
    tradeoff,
)
from threshold_gating.hardware import lse, steering
from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.cells import pair
from threshold_gating.hardware.spice import INSTALL, Netlist, SpiceError, ngspice
from threshold_gating.taxonomy import key_of

DRAWS = 10_000  # hours of simulation
SEEDS = 10**9  # batches of a cell count on from there


def spice(args: argparse.Namespace) -> int:
    """`tg spice`."""
    for name, low, high in (("draws", 2, DRAWS), ("seed", 1, SEEDS)):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"--{name} must be from {low} to {high}; got {value}.")
    if args.plot and not args.run:
        raise UsageError("--plot draws what was measured: give --run too.")
    for name in ("swing", "supply", "tau"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UsageError(f"--{name} must be above 0; got {getattr(args, name):g}.")
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"{option} {path} cannot be written; give a file in a directory.")
    _check_options(args)
    try:
        netlist, run = _task(args)
        if netlist is not None and (args.out or not args.run):
            _write(args, netlist)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not args.run:
        say(_how_to_run())
        return 0
    try:
        with progress(f"spice {args.what}") as tell:
            answer = run(tell)
    except (SpiceError, pdk.ModelsMissingError) as error:
        if netlist is not None and not args.out and args.json is None:
            print(netlist.text(), end="")
        raise UsageError(f"{error} The netlist needs no simulator: leave out --run.") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.plot:
        _picture(answer, args.plot)
    show(args, answer.result, "\n\n".join(_text(*table) for table in answer.tables))
    return 0


# What each task takes beside --run, -o, --plot and --json; any other option would be ignored.
_CELL = {"tail", "bias", "swing", "supply", "transistor"}
_AT = {"corner", "celsius"}
_DRAWN = {"draws", "seed"}
_ALL = {*_CELL, *_AT, *_DRAWN, "models", "tau", "class-ab"}
_TAKEN = {
    "presets": {"draws"},
    "tradeoff": {*_DRAWN, "models"},
    "families": _CELL,
    "lse": {"bias", "supply", *_AT, *_DRAWN},
    "pair": _ALL - {"class-ab"},
}
_UNSET = {"transistor": "nfet", "corner": "", "celsius": 27.0, "seed": 1}


def _check_options(args: argparse.Namespace) -> None:
    taken = _TAKEN.get(args.what, _ALL)
    for name in sorted(_ALL - taken):
        if getattr(args, name.replace("-", "_")) != _UNSET.get(name):
            raise UsageError(
                f"--{name} has no effect on {args.what}, which takes "
                f"{', '.join(f'--{each}' for each in sorted(taken))}."
            )


def _task(args: argparse.Namespace) -> tuple[Netlist | None, Callable[[Any], Answer]]:
    """The netlist of what was asked for, and what to measure of it."""
    if args.what == "presets":
        return None, lambda tell: presets(args, tell)
    if args.what == "tradeoff":
        return None, lambda tell: tradeoff(args, tell)
    if args.what == "families":
        cell_of(args, "silu")  # what cannot be is refused before anything runs
        return None, lambda tell: families(args, tell)
    if args.what == "lse":
        tree = lse.Tree(tail=amperes(args, "bias", 10e-9), supply=args.supply or 1.8)
        return lse.netlist(tree, **conditions(args)), lambda tell: log_sum_exp(args, tree, tell)
    if args.what == "pair":
        spec = spice_pair.asked(args)
        return pair(spec, **conditions(args)), lambda tell: spice_pair.answer(args, spec, tell)
    if args.tau:
        raise ValueError("--tau is of a pair; the tau of a cell is that of its activation.")
    cell = cell_of(args, key_of(args.what))
    netlist = steering.netlist(cell, **conditions(args))
    return netlist, lambda tell: spice_cell.answer(args, cell, tell)


def _how_to_run() -> str:
    lacking = [] if ngspice() else [INSTALL]
    try:
        pdk.paths("sky130", "tt")
    except pdk.ModelsMissingError as error:
        lacking.append(str(error))
    return "; ".join(["Run it with ngspice FILE, or measure it with --run", *lacking]) + "."


def _write(args: argparse.Namespace, netlist: Netlist) -> None:
    if args.out is None:
        show(args, {"netlist": netlist.text(), "devices": netlist.count()}, netlist.text().rstrip())
        return
    try:
        args.out.write_text(netlist.text(), "utf-8")
    except OSError as error:
        raise UsageError(f"{args.out} cannot be written: {error.strerror}.") from error
    say(f"wrote {args.out}")


# Showing


def _text(title: str, rows: Sequence[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _picture(answer: Answer, path: Path) -> None:
    if answer.draw is None:
        raise UsageError(
            "there is no picture of this; --plot is of a cell, a pair or the tradeoff."
        )
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(missing("--plot needs", "matplotlib", "plot")) from error
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    answer.draw(axes)
    for ax in axes:
        ax.legend(frameon=False)
        ax.grid(alpha=0.3)
    figure.suptitle(answer.tables[0][0], fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    say(f"wrote {path}")
