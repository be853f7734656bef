"""`tg simulate`: a network on simulated analog hardware."""

from __future__ import annotations

import argparse
import statistics
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from threshold_gating import conversion
from threshold_gating.cli import pages
from threshold_gating.cli.printing import UsageError, progress, say, show, working
from threshold_gating.cli.spec import Network, network
from threshold_gating.hardware import devices
from threshold_gating.hardware.crossbar import Crossbar
from threshold_gating.hardware.report import ChipRow, Report
from threshold_gating.show import simulation as page
from threshold_gating.show.seen import look

if TYPE_CHECKING:
    from threshold_gating.hardware.analog import Simulation

PHASE_CHANGE = {"drift": 0.05, "drift_sigma": 0.02}  # aihwkit has these for its PCM cells
DRAWS = 100_000  # chips are simulated side by side: more would fill any memory
_CELLS = ("rows", "columns", "adc_bits", "dac_bits", "programming", "seconds", "levels", "wire")


def simulate(args: argparse.Namespace) -> int:
    """`tg simulate`."""
    pages.check("--html", args.html)
    if not 1 <= args.draws <= DRAWS:
        raise UsageError(f"--draws must be from 1 to {DRAWS} chips; got {args.draws}.")
    options = _options(args)
    named = network(args)
    notes: list[str] = []
    with working(f"{args.network}: converting"):
        gated = conversion.convert(named.model, inputs=named.inputs, strict=False)
    with progress(args.network) as tell:
        tell("simulating")
        chips = _simulated(gated, named, options, notes)
        torch.manual_seed(args.seed)  # of the noise
        found = chips.compare(gated, named.inputs)
        alone = _alone(gated, named, options, tell) if args.sensitivity else {}
    report = chips.report()
    result = {
        **report.to_dict(),
        "device": devices.to_dict(options["preset"]),
        "chips": [asdict(row) for row in found],
        "alone": alone,
        **named.to_dict(),
    }
    show(args, result, _text(report, found, alone))
    if args.html is not None:
        about = {"facts": _facts(args, report), "warnings": [*notes, *named.notes], "data": result}
        seen = look(gated, named.inputs)
        pages.write(args.html, page.html(args.network, report, found, alone, seen, **about))
    for note in [*notes, *named.notes]:
        say(note)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What `hardware.analog.simulate` is given, checked before a network is loaded."""
    from threshold_gating.hardware.analog import settings  # loads torch's compiler, a second

    try:
        preset = devices.preset(args.preset)
        settings(preset, None, args.share, args.celsius, args.level, None, args.rail)
        given: dict[str, Any] = {k: v for k in _CELLS if (v := getattr(args, k)) is not None}
        if "seconds" in given:
            given |= PHASE_CHANGE
        crossbar = Crossbar(**given) if given else None
    except ValueError as error:
        raise UsageError(str(error).removeprefix("simulate: ")) from error
    return {
        "preset": preset,
        "seed": args.seed,
        "draws": args.draws,
        "share": args.share,
        "temperature": args.celsius,
        "level": args.level,
        "rail": args.rail,
        "crossbar": crossbar,
    }


def _simulated(
    gated: nn.Module, named: Network, options: dict[str, Any], notes: list[str], **more: Any
) -> Simulation:
    """The simulation; what it warns of is a note, what it refuses an error in a line."""
    from threshold_gating.hardware.analog import simulate as simulated

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chips = simulated(gated, inputs=named.inputs, **options, **more)
    except conversion.ConversionError:
        raise
    except ValueError as error:
        raise UsageError(str(error).removeprefix("simulate: ")) from error
    notes += [str(w.message).removeprefix("simulate: ") for w in caught]
    return chips


def _alone(
    gated: nn.Module, named: Network, options: dict[str, Any], tell: Any
) -> dict[str, float]:
    """The mean error of the output with one site analog and everything else ideal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = _simulated(gated, named, {**options, "crossbar": None}, []).report()
    names = list(dict.fromkeys(row.name.partition("/")[0] for row in every.sites))
    sites = list(dict.fromkeys(n if ":" in n else n.partition("#")[0] for n in names))
    found = {}
    for k, name in enumerate(sites):
        tell(f"{name} alone", k / len(sites))
        chips = _simulated(gated, named, {**options, "crossbar": None}, [], only=name)
        rows = chips.compare(gated, named.inputs)
        found[name] = statistics.fmean(row.error for row in rows)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _text(report: Report, chips: list[ChipRow], alone: dict[str, float]) -> str:
    lines = [report.table(), "", *page.summary(report, chips)]
    if alone:
        lines += ["", "error of the output with this site alone analog:"]
        lines += [f"  {error:8.2%}  {name}" for name, error in list(alone.items())[:10]]
        lines += [f"  {len(alone) - 10} smaller ones are in the JSON"] if len(alone) > 10 else []
    return "\n".join(lines)


def _facts(args: argparse.Namespace, report: Report) -> dict[str, str]:
    settings = {k: str(v) for k, v in report.settings.items()}
    about = {"command": pages.command(args), "preset": report.preset}
    return {**about, **settings, "seed": str(report.seed)}
