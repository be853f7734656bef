"""Trained networks on simulated analog hardware: what each imperfection costs, what tuning gives.

What it should show, if it works: how far thresholds, offsets, noise, sharpness, temperature,
converters and drift may be off before a network that others trained loses accuracy; which of its
sites decide; and how much comes back when tau and theta of the gates alone are tuned.

    python -m experiments.analog_data FOLDER
    python -m experiments.analog_networks FOLDER [NAME ...] [--only SECTION ...] [--device cuda]

Errors in units of a site's RMS are those of ideal pairs, so that they hold for any device; what is
in millivolts is of a preset, with its own curve. Gates are evaluated, never torch's own functions.
A row has the figure of every chip. Rows are written to OUT/NAME.jsonl as they are measured, and
those that are there already are not measured again.

The rows that docs/analog_networks.md quotes stand in docs/analog_networks.json.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import threshold_gating as tg
from experiments.analog_data import CASES, Network, load
from experiments.evidence.common import ROOT
from threshold_gating.hardware import devices
from threshold_gating.hardware.analog import Simulation, simulate
from threshold_gating.hardware.crossbar import Crossbar
from threshold_gating.hardware.physical import Errors
from threshold_gating.hardware.report import SiteRow
from threshold_gating.hardware.retune import cancel, distance, divergence, retune, storage

CHIPS = 5
PRESETS = ("sky130-weak", "sky130-moderate", "sky130-strong", "sky130-npn")
TILE = 128
STEPS = 30  # of tuning
LONGEST = {True: 32, False: 256}  # tokens that recurrent networks and others are tuned on
PCM = {"drift": 0.05, "drift_sigma": 0.02}  # of phase-change cells, as aihwkit has them
TIMES = {"1 hour": 3600.0, "1 day": 86400.0, "1 month": 2.6e6, "1 year": 3.2e7}
CELSIUS = (-40.0, -7.0, 27.0, 60.0, 125.0)
NONE = {"theta": 0.0, "tau": 0.0, "noise": 0.0, "tree": 0.0}


class Ask(NamedTuple):
    """A row: its name, what `simulate` is given, and what is done to the chips."""

    what: str
    options: dict[str, Any]
    chips: int = CHIPS
    tune: tuple[str, ...] = ()
    trim: int | None = None


class Facts(NamedTuple):
    """What the rows that are asked for depend on."""

    sites: tuple[SiteRow, ...]
    is_hard: bool
    has_layers: bool  # most of its weights can be on crossbars
    has_positions: bool  # of images, all of one size

    @property
    def keys(self) -> list[str]:
        return [s.name for s in self.sites if "attention" in s.kind or "softmax" in s.kind]


def ideal(**given: float) -> dict[str, Any]:
    return {"preset": None, "errors": Errors(unit="rms", **given)}


def on(name: str, facts: Facts, **given: Any) -> dict[str, Any]:
    """A device, with the largest input of hard gates at the rail."""
    level = {"level": devices.preset(name).supply / 2} if facts.is_hard else {}
    return {"preset": name, **level, **given}


def errors(facts: Facts) -> Iterator[Ask]:
    """Each kind of error by itself, in units of what the site sees."""
    yield Ask("ideal", ideal(), 1)
    for kind, sizes in (
        ("theta", (0.02, 0.05, 0.1, 0.2, 0.4)),
        ("offset", (0.02, 0.05, 0.1, 0.2)),
        ("noise", (0.05, 0.1, 0.2)),
        ("tail", (0.02, 0.05, 0.1)),
    ):
        for size in sizes:
            yield Ask(f"{kind} {size:g}", ideal(**{kind: size}))
    for sharpness in (4.0, 8.0, 16.0) if facts.is_hard else ():
        yield Ask(f"tau RMS = {sharpness:g}", ideal() | {"sharpness": sharpness}, 1)
    for share in ("layer", "neuron") if facts.has_positions else ("layer",):
        yield Ask(f"theta 0.2, one gate a {share}", ideal(theta=0.2) | {"share": share})


def presets(facts: Facts) -> Iterator[Ask]:
    """Whole devices, in volts; the swing and the rail as the voltage of the largest input."""
    for name in PRESETS:
        preset = devices.preset(name)
        for level in (preset.swing, preset.supply / 2) if facts.is_hard else (None,):
            given = {"preset": name, "level": level}
            what = name if level is None else f"{name}, {1e3 * level:.0f} mV"
            curve = Errors(**NONE)
            yield Ask(f"{what}: curve alone", given | {"errors": curve}, 1)
            yield Ask(what, given)


def tuning(facts: Facts) -> Iterator[Ask]:
    """What tau and theta alone give back: tuned without labels on what is not judged."""
    sharp = {"sharpness": 8.0} if facts.is_hard else {}
    after = ", tau RMS = 8" if facts.is_hard else ""
    cases = {
        f"offset 0.2 RMS{after}": ideal(offset=0.2) | sharp,
        f"theta 0.4 RMS{after}": ideal(theta=0.4) | sharp,
        **{f"{name}, {_swing(facts)}": {"preset": name} for name in _tuned(facts)},
    }
    for what, given in cases.items():
        yield Ask(what, given)
        for part in (("theta",), ("tau", "theta")):
            yield Ask(f"{what}: {' and '.join(part)} tuned", given, tune=part)


def _tuned(facts: Facts) -> Sequence[str]:
    """Every preset; two of them where a run is long."""
    return PRESETS if facts.has_layers else ("sky130-weak", "sky130-strong")


def _swing(facts: Facts) -> str:
    return "400 mV" if facts.is_hard else "all errors"


def millivolts(facts: Facts) -> Iterator[Ask]:
    """Thresholds and inputs off by so many millivolts; the curve of the device, nothing else."""
    sizes = (2, 5, 10, 20, 50) if facts.has_layers else (5, 20, 50)  # of fewer, where a run is long
    for kind in ("theta", "offset"):
        for name in PRESETS:
            for size in sizes:
                given = Errors(**{**NONE, kind: 1e-3 * size})
                yield Ask(f"{name}, {kind} {size} mV", on(name, facts, errors=given))


def temperature(facts: Facts) -> Iterator[Ask]:
    """Whole devices; voltages were chosen at 27 C."""
    for name in PRESETS:
        for celsius in CELSIUS:
            yield Ask(f"{name}, {celsius:g} C", on(name, facts, temperature=celsius))


def attention(facts: Facts) -> Iterator[Ask]:
    """The gates of attention, its trees and the other sites by themselves."""
    keys = facts.keys
    others = [s.name for s in facts.sites if s.name not in keys]
    if not keys:
        return
    for where, names in (("attention", keys), ("not attention", others)):
        for size in (0.01, 0.03, 0.1, 0.2):
            yield Ask(f"theta {size:g}, {where}", ideal(theta=size) | {"only": names})
    for size in (0.001, 0.003, 0.01, 0.03):
        yield Ask(f"cells of the tree {size:g}", ideal(tree=size) | {"only": keys})
    for name in PRESETS:
        for kind in ("tree", "noise", "theta"):
            own = Errors(**{**NONE, kind: None})
            what = f"{name}, {kind} of attention alone"
            yield Ask(what, {"preset": name, "errors": own, "only": keys})
        for size in (1, 2, 5, 10):
            given = Errors(**{**NONE, "tree": 1e-3 * size})
            what = f"{name}, cells of the tree {size} mV"
            yield Ask(what, {"preset": name, "errors": given, "only": keys})


def converters(facts: Facts) -> Iterator[Ask]:
    """Converters of so many bits at every tile of 128 rows: alone, and on whole chips."""
    for bits in (4, 5, 6, 7, 8) if facts.has_layers else ():
        bar = Crossbar(rows=TILE, adc_bits=bits)
        yield Ask(f"ADC {bits} bits", ideal() | {"crossbar": bar}, 1)
        bar = Crossbar(rows=TILE, adc_bits=bits, programming=0.02)
        given = on("sky130-npn", facts, crossbar=bar)
        yield Ask(f"sky130-npn, programming 0.02, ADC {bits} bits", given)


def cells(facts: Facts) -> Iterator[Ask]:
    """Ideal gates; programming errors, and drift of phase-change cells."""
    for size in (0.01, 0.02, 0.05) if facts.has_layers else ():
        yield Ask(f"programming {size:g} g_max", ideal() | {"crossbar": Crossbar(programming=size)})
    for name, seconds in TIMES.items() if facts.has_layers else ():
        bar = Crossbar(programming=0.01, seconds=seconds, **PCM)
        yield Ask(f"programming 0.01, drift {name}", ideal() | {"crossbar": bar})


def sensitivity(facts: Facts) -> Iterator[Ask]:
    """One site at a time."""
    names = dict.fromkeys(site.name.partition("/")[0] for site in facts.sites)
    modules = dict.fromkeys(name if ":" in name else name.partition("#")[0] for name in names)
    for name in modules:
        yield Ask(name, ideal(offset=0.4) | {"only": name})


def bits(facts: Facts) -> Iterator[Ask]:
    """Trims of so many bits against each gate's own threshold error, over +-3 sigma."""
    every = ("layer", "channel", "neuron")
    for share in every if facts.has_positions else every[:2]:
        for n in (None, 1, 2, 3, 4, 6):
            what = f"theta 0.4, one gate a {share}, {'no trim' if n is None else f'{n} bits'}"
            yield Ask(what, ideal(theta=0.4) | {"share": share}, trim=n)


_FIRST: tuple[Callable[[Facts], Iterator[Ask]], ...] = (errors, presets, attention, tuning)
_THEN = (temperature, converters, cells, millivolts, sensitivity, bits)
SECTIONS = {section.__name__: section for section in (*_FIRST, *_THEN)}


# Measuring

Row = dict[str, Any]


class Bench:
    """A network that rows are measured on."""

    def __init__(self, net: Network) -> None:
        self.net, self.way = net, ""
        self.gated = tg.convert(net.model, inputs=net.inputs)
        report = self.simulated(Ask("", ideal(), 1)).report()
        recurrent = any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in net.model.modules())
        is_hard = any(site.sharpness == float("inf") for site in report.sites)
        self.facts = Facts(report.sites, is_hard, not recurrent, net.inputs.dim() == 4)

    def simulated(self, ask: Ask) -> Simulation:
        simulation = simulate(self.gated, inputs=self.net.inputs, draws=ask.chips, **ask.options)
        if ask.chips > 1 and "crossbar" not in ask.options:
            simulation.runs_by = self.way  # once found it is the same for all without a crossbar
        return simulation

    def measured(self, ask: Ask) -> Row:
        start = time.monotonic()
        simulation = self.simulated(ask)
        found: Row = {}
        if ask.tune:
            found["losses"] = self._tuned(simulation, ask.tune)
            found |= storage(simulation, 8)._asdict()
        if ask.trim is not None:
            cancel(simulation, ask.trim)
            found |= storage(simulation, ask.trim)._asdict()
        values = self.net.figures(simulation)
        if ask.chips > 1 and "crossbar" not in ask.options:
            self.way = simulation.runs_by
        return {
            "what": ask.what,
            "mean": values.mean().item(),
            "low": values.min().item(),
            "high": values.max().item(),
            "values": values.tolist(),
            **found,
            "seconds": round(time.monotonic() - start, 2),
            "runs by": simulation.runs_by,
        }

    def _tuned(self, simulation: Simulation, part: Sequence[str]) -> list[float]:
        """The losses of the first and the last step."""
        loss = distance if self.net.metric.endswith("dB") else divergence
        recurrent = not self.facts.has_layers
        batches = [x[:, : LONGEST[recurrent]] for x in self.net.tuning]
        given = {"steps": STEPS, "what": part, "loss": loss, "together": recurrent}
        losses = retune(simulation, self.gated, batches, **given)
        return [losses[0], losses[-1]]

    def sites(self) -> Iterator[Row]:
        """What each device makes of every site: volts, sharpness, errors."""
        for name in PRESETS:
            report = self.simulated(Ask("", on(name, self.facts), 1)).report()
            yield {"what": name, "sites": [asdict(site) for site in report.sites]}


def finished(path: Path) -> set[tuple[str, str]]:
    rows = map(json.loads, path.read_text().splitlines() if path.is_file() else ())
    return {(row["section"], row["what"]) for row in rows if "error" not in row}


def measure(bench: Bench, name: str, args: argparse.Namespace, end: float) -> None:
    path = args.out / f"{name}.jsonl"
    done = finished(path)

    def write(section: str, row: Row) -> None:
        row = {"network": name, "section": section, "metric": bench.net.metric, **row}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    if ("sites", PRESETS[-1]) not in done:
        for row in bench.sites():
            write("sites", {**row, "samples": bench.net.samples, "device": str(args.device)})
    for section in args.only:
        for ask in SECTIONS[section](bench.facts):
            if (section, ask.what) in done:
                continue
            if time.time() > end:
                print(f"{name}: out of time at {section}, {ask.what}", flush=True)
                return
            try:
                row = bench.measured(ask)
            except Exception as error:
                traceback.print_exc()
                row = {"what": ask.what, "error": f"{type(error).__name__}: {error}"}
            write(section, row)
            told = row.get("error") or "{mean:9.3f}   {low:.3f} to {high:.3f}   {seconds} s".format(
                **row
            )
            print(f"{name:<13} {ask.what:<46} {told}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what experiments.analog_data wrote")
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--part", choices=("first", "then"), help="half of the sections")
    parser.add_argument("--samples", type=int, help="that judge a network; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds since 1970")
    parser.add_argument("--smoke", action="store_true", help="two chips, a few rows a section")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "analog")
    args = parser.parse_args()
    if args.part:
        args.only = [s.__name__ for s in (_FIRST if args.part == "first" else _THEN)]
    if args.smoke:
        args.samples = args.samples or 2
        for key, section in list(SECTIONS.items()):
            SECTIONS[key] = _few(section)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.allow_tf32 = False  # what is simulated is finer than its ten bits
    for name in args.names:
        if not (args.folder / f"{name}.xz").is_file():
            print(f"{name}: not packed in {args.folder}, skipped", flush=True)
            continue
        net = load(name, args.folder, args.samples, args.device)
        with tg.kernels.use("reference"):
            bench = Bench(net if not args.smoke else _small(net))
            base = bench.net.figures(lambda x, run=bench.gated: run(x)[None])
            print(f"{name}: {bench.net.metric} {base.item():.3f} as it is", flush=True)
            measure(bench, name, args, args.until)
    return 0


def _few(section: Callable[[Facts], Iterator[Ask]]) -> Callable[[Facts], Iterator[Ask]]:
    """Some of the rows, on two chips."""

    def some(facts: Facts) -> Iterator[Ask]:
        for k, ask in enumerate(section(facts)):
            if k in (1, 5, 17):
                yield ask._replace(chips=min(2, ask.chips))

    return some


def _small(net: Network) -> Network:
    """One short input for everything."""
    x, told = net.batches[0]
    n = 2 if x.dim() == 4 else 1
    short = x[:n, :12]
    if isinstance(told, tuple):  # a spectrum and its sound
        told = told[0][:n, :, :12], told[1][:n, :1760]
    else:
        told = told[:n] if told.dim() == 1 else told[:n, :12]
    return net._replace(inputs=short, tuning=[short], batches=[(short, told)])


if __name__ == "__main__":
    raise SystemExit(main())
