"""`tg insight`: what the gates of a network are and do, what changed, and pictures of both."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from threshold_gating import conversion
from threshold_gating import insight as gates
from threshold_gating.cli.convert import is_folder, saved_onto
from threshold_gating.cli.printing import UsageError, missing, say, show, working
from threshold_gating.cli.spec import Network, network
from threshold_gating.conversion.plan import arguments
from threshold_gating.insight.gates import gate_sites
from threshold_gating.insight.recording import FILE
from threshold_gating.theory import layer_report

Pictures = dict[str, Callable[[Path], Any]]


def insight(args: argparse.Namespace) -> int:
    """`tg insight`."""
    _check_plot(args.plot)
    try:
        if (Path(args.network) / FILE).is_file():
            return _run(args)
        return _folder(args) if is_folder(args.network) else _network(args)
    except conversion.ConversionError:
        raise
    except ValueError as error:  # of what is read: its message says it all
        raise UsageError(str(error)) from error


def _check_plot(path: Path | None) -> None:
    if path is not None and path.exists() and not path.is_dir():
        raise UsageError(f"--plot {path} is a file; give a folder, which may be a new one.")


def _run(args: argparse.Namespace) -> int:
    """A run that was recorded."""
    _refuse(args, "a recorded run", "inputs", "gates", "against", "checkpoint", "pretrained")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = gates.history(args.network)
    for each in said:
        say(str(each.message))
    damaged = {"steps": list(found.steps), "damaged": list(found.damaged)}
    show(args, {**damaged, "scalars": found.scalars, "histograms": found.histograms}, str(found))
    whats = sorted({n.rpartition("/")[2].partition("_")[0] for n in found.histograms})
    _draw(args.plot, {f"film_{w}": _film(found, w) for w in whats})
    return 0


def _film(found: gates.History, what: str) -> Callable[[Path], Any]:
    return lambda path: gates.film(found, path, what=what)


def _folder(args: argparse.Namespace) -> int:
    """A saved network, by its numbers; nothing runs."""
    options = ("inputs", "gates", "checkpoint", "pretrained")
    _refuse(args, "a folder, whose network does not run", *options)
    reading = gates.read(args.network)
    _show(args, reading, None if args.against is None else gates.compare(args.against, reading))
    _draw(args.plot, {"ridges": lambda path: gates.ridges(reading, path)})
    return 0


def _network(args: argparse.Namespace) -> int:
    """A network, which runs; one without gates is converted first."""
    named = network(args)
    model = named.model
    if args.gates is not None:
        model = saved_onto(args.gates, named.model)
    elif not gate_sites(model):
        with working(f"{args.network} has no gates: converting it"):
            model = conversion.convert(model, inputs=named.inputs, strict=False)
    positional, keywords = arguments(named.inputs)
    with working("running once, every gate evaluated"):
        reading = gates.read(model, *positional, **keywords)
        changes = None
        if args.against is not None:
            before = gates.read(saved_onto(args.against, named.model), *positional, **keywords)
            changes = gates.compare(before, reading)
    _show(args, reading, changes, named)
    _draw(args.plot, _pictures(reading, model, positional, keywords))
    return 0


def _pictures(reading: gates.Reading, model: nn.Module, positional: Any, named: Any) -> Pictures:
    def chaos(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it skips is named in the picture
            report = layer_report(model, *positional, **named)
        gates.chaos_map(report, path)

    found: Pictures = {"chaos": chaos}
    if reading.sites:
        found["ridges"] = lambda path: gates.ridges(reading, path)
    if reading.heads:
        found["heads"] = lambda path: gates.heads(reading, path)
    return found


def _refuse(args: argparse.Namespace, what: str, *options: str) -> None:
    given = [f"--{name}" for name in options if getattr(args, name) not in (None, False)]
    if given:
        raise UsageError(f"{args.network} is {what}; it takes no {given[0]}.")


def _show(
    args: argparse.Namespace,
    reading: gates.Reading,
    changes: gates.Changes | None,
    named: Network | None = None,
) -> None:
    """The reading, or where something is compared the changes; and what was random."""
    report = reading.to_dict() | (named.to_dict() if named else {})
    if changes is not None:
        report["changes"] = changes.to_dict()
    show(args, report, str(reading) if changes is None else str(changes))
    for note in named.notes if named else ():
        say(note)


def _draw(folder: Path | None, pictures: Pictures) -> None:
    """Write the pictures that can be drawn; of the others, why not."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures.items():
        path = folder / f"{name}.png"
        try:
            draw(path)
        except ModuleNotFoundError as error:
            raise UsageError(missing("--plot needs", "matplotlib", "plot")) from error
        except ValueError as error:
            say(f"{path} is not drawn: {error}")
        else:
            say(f"Written to {path.resolve()}")
