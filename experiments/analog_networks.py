"""Trained networks on simulated analog hardware: what each imperfection costs, what tuning gives.

What it should show, if it works: how far thresholds, offsets, noise, sharpness, temperature,
converters and drift may be off before a network that others trained loses accuracy; which of its
sites decide; and how much comes back when tau and theta of the gates alone are tuned.

    python -m experiments.analog_networks [NAME ...] [--only SECTION ...] [--samples N] [--draws N]

Errors in units of a site's RMS are those of ideal pairs, so that they hold for any device; the
sections "presets" and "temperature" are in volts. Gates are evaluated, never torch's own
functions. Each figure is the mean over chips, with the lowest and the highest; a network is judged
on `--samples` samples of its data, the same for every figure. Files are those of
`experiments.evidence`.

Last measured results stand in docs/analog_networks.md.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import threshold_gating as tg
from experiments.evidence.common import ROOT, Loaded
from experiments.evidence.run import CASES, missing
from threshold_gating.hardware import devices
from threshold_gating.hardware.analog import Simulation, simulate
from threshold_gating.hardware.crossbar import Crossbar
from threshold_gating.hardware.physical import Errors
from threshold_gating.hardware.retune import cancel, distance, divergence, retune, storage

SAMPLES = {"resnet20": 1000, "mobilenet-v2": 50, "char-lstm": 20, "memory-gru": 20}
TILE = 128
STEPS = 30  # of tuning, 32 samples each
PCM = {"drift": 0.05, "drift_sigma": 0.02}  # of phase-change cells, as aihwkit has them
TIMES = {"1 hour": 3600.0, "1 day": 86400.0, "1 month": 2.6e6, "1 year": 3.2e7}


class Network(NamedTuple):
    """A converted network, what calibrates it, and its figure."""

    gated: nn.Module
    inputs: tuple[Any, ...]
    batches: list[tuple[Any, ...]]
    figure: Callable[[nn.Module], float]
    metric: str


class Recorder(nn.Module):
    """Keeps what a network is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, *args: Any) -> Any:
        self.seen.append(args)
        return self.model(*args)


def network(name: str, samples: int | None) -> Network:
    case = CASES[name]
    if lost := missing(case, fetch=True):
        raise SystemExit(f"{name}: missing {', '.join(lost)}")
    loaded: Loaded = case.load(samples or SAMPLES.get(name, False))
    recorder = Recorder(loaded.model)
    outcome = loaded.evaluate(recorder)
    (metric, _), *_ = outcome.metrics.items()
    seen = recorder.seen
    inputs = max(seen, key=lambda args: max(t.numel() for t in args))
    if metric == "top-1 %":  # classes come one after the other: some of each
        images = torch.cat([args[0] for args in seen])
        inputs = (images[:: max(1, len(images) // 64)],)
    gated = tg.convert(loaded.model, inputs=inputs)

    def figure(model: nn.Module) -> float:
        with torch.no_grad():
            return loaded.evaluate(model).metrics[metric]

    return Network(gated, inputs, seen, figure, metric)


Row = dict[str, Any]


def measured(net: Network, what: str, draws: int, **options: Any) -> Row:
    simulation = simulate(net.gated, inputs=net.inputs, draws=draws, **options)
    return figures(simulation, net, what)


def figures(simulation: Simulation, net: Network, what: str) -> Row:
    start = time.monotonic()
    values = simulation.measure(net.figure, what).double()
    low, high = values.min().item(), values.max().item()
    row = {"what": what, "mean": values.mean().item(), "low": low, "high": high}
    seconds = time.monotonic() - start
    print(
        f"  {what:<44} {row['mean']:>9.3f}   {low:.3f} to {high:.3f}   {seconds:.0f} s", flush=True
    )
    return row


def ideal(**given: float) -> dict[str, Any]:
    return {"preset": None, "errors": Errors(unit="rms", **given)}


def errors(net: Network, draws: int) -> Iterator[Row]:
    """Each kind of error by itself, in units of what the site sees."""
    yield measured(net, "ideal", 1, **ideal())
    for kind, sizes in (
        ("theta", (0.1, 0.2, 0.4)),
        ("offset", (0.05, 0.1, 0.2)),
        ("noise", (0.05, 0.1, 0.2)),
        ("tail", (0.02, 0.05, 0.1)),
    ):
        for size in sizes:
            yield measured(net, f"{kind} {size:g}", draws, **ideal(**{kind: size}))
    for sharpness in (4, 8, 16):
        yield measured(net, f"tau RMS = {sharpness}", 1, sharpness=sharpness, **ideal())
    for share in ("layer", "neuron"):
        yield measured(
            net, f"theta 0.2, one gate a {share}", draws, share=share, **ideal(theta=0.2)
        )


def attention(net: Network, draws: int) -> Iterator[Row]:
    """Thresholds of the element-wise sites and of attention by themselves, and its trees."""
    sites = simulate(net.gated, None, inputs=net.inputs).report().sites
    keys = [row.name for row in sites if "attention" in row.kind or "softmax" in row.kind]
    if not keys:
        return
    others = [row.name for row in sites if row.name not in keys]
    print("  RMS of z - theta:", ", ".join(f"{r.rms:.2f}" for r in sites if r.name in keys))
    for size in (0.1, 0.2):
        yield measured(
            net, f"theta {size:g}, not attention", draws, only=others, **ideal(theta=size)
        )
    for size in (0.01, 0.03):
        yield measured(net, f"theta {size:g}, attention", draws, only=keys, **ideal(theta=size))
    yield measured(net, "cells of the tree 0.01, attention", draws, only=keys, **ideal(tree=0.01))


def presets(net: Network, draws: int) -> Iterator[Row]:
    """Whole devices, in volts; the swing and the rail as the voltage of the largest input."""
    for name, preset in devices.presets().items():
        for level in (preset.swing, preset.supply / 2):
            given = {"preset": name, "level": level}
            none = Errors(theta=0.0, tau=0.0, noise=0.0, tree=0.0)
            what = f"{name}, {1e3 * level:.0f} mV"
            yield measured(net, f"{what}: curve alone", 1, errors=none, **given)
            yield measured(net, what, draws, **given)


def millivolts(net: Network, draws: int) -> Iterator[Row]:
    """Thresholds off by so many millivolts."""
    for name, preset in devices.presets().items():
        for size in (1e-3, 3e-3, 10e-3):
            given = Errors(theta=size, tau=0.0, noise=0.0)
            what = f"{name}, theta {1e3 * size:g} mV"
            yield measured(net, what, draws, preset=name, level=preset.supply / 2, errors=given)


def temperature(net: Network, draws: int) -> Iterator[Row]:
    none = Errors(theta=0.0, tau=0.0, noise=0.0, tree=0.0)
    for name in ("sky130-weak", "sky130-strong"):
        level = devices.preset(name).supply / 2
        for celsius in (-40.0, 27.0, 85.0, 125.0):
            what = f"{name}, {celsius:g} C, curve alone"
            given = {"preset": name, "temperature": celsius, "level": level}
            yield measured(net, what, 1, errors=none, **given)


def converters(net: Network, draws: int) -> Iterator[Row]:
    """Ideal gates and cells in tiles of 128 rows; converters of so many bits at every tile."""
    for bits in (4, 5, 6, 7, 8):
        bar = Crossbar(rows=TILE, adc_bits=bits)
        yield measured(net, f"ADC {bits} bits", 1, crossbar=bar, **ideal())


def cells(net: Network, draws: int) -> Iterator[Row]:
    """Ideal gates; programming errors, and drift of phase-change cells."""
    for size in (0.01, 0.02, 0.05):
        bar = Crossbar(programming=size)
        yield measured(net, f"programming {size:g} g_max", draws, crossbar=bar, **ideal())
    for name, seconds in TIMES.items():
        bar = Crossbar(programming=0.01, seconds=seconds, **PCM)
        yield measured(net, f"programming 0.01, drift {name}", draws, crossbar=bar, **ideal())


def sensitivity(net: Network, draws: int) -> Iterator[Row]:
    """One site at a time."""
    report = simulate(net.gated, None, inputs=net.inputs).report()
    names = dict.fromkeys(row.name.partition("/")[0] for row in report.sites)
    modules = dict.fromkeys(name.partition("#")[0] if ":" not in name else name for name in names)
    for name in modules:
        yield measured(net, name, draws, only=name, **ideal(offset=0.4))


def tuning(net: Network, draws: int) -> Iterator[Row]:
    """What tau and theta alone give back: trained on inputs without labels, judged on all."""
    loss = divergence if "%" in net.metric else distance
    loss = divergence if net.metric in ("perplexity", "bits/char") else loss
    half = net.batches[: max(1, len(net.batches) // 2)]
    batches = [tuple(_some(t) for t in args) for args in half]
    cases = {
        "offset 0.2 RMS, tau RMS = 8": dict(sharpness=8.0, **ideal(offset=0.2)),
        "theta 0.4 RMS, tau RMS = 8": dict(sharpness=8.0, **ideal(theta=0.4)),
        "sky130-weak at its swing": {"preset": "sky130-weak"},
    }
    for what, given in cases.items():
        simulation = simulate(net.gated, inputs=net.inputs, draws=draws, **given)
        yield figures(simulation, net, what)
        for part in (("theta",), ("tau", "theta")):
            simulation.redraw(0)
            retune(simulation, net.gated, batches, steps=STEPS, what=part, loss=loss)
            row = figures(simulation, net, f"{what}, {' and '.join(part)} tuned")
            yield {**row, **storage(simulation, 8)._asdict()}


def _some(t: Any) -> Any:
    return t[:: max(1, len(t) // 32)] if isinstance(t, Tensor) and t.dim() and len(t) > 32 else t


def bits(net: Network, draws: int) -> Iterator[Row]:
    """Trims of so many bits against each gate's own threshold error, over +-3 sigma."""
    for share in ("layer", "channel", "neuron"):
        for n in (None, 1, 2, 3, 4, 6):
            given = ideal(theta=0.4)
            simulation = simulate(net.gated, inputs=net.inputs, draws=draws, share=share, **given)
            if n is not None:
                cancel(simulation, n)
            what = f"theta 0.4, one gate a {share}, {'no trim' if n is None else f'{n} bits'}"
            yield {**figures(simulation, net, what), **storage(simulation, n or 0)._asdict()}


_EVERY = (errors, attention, presets, millivolts, temperature, converters, cells, sensitivity)
SECTIONS = {section.__name__: section for section in (*_EVERY, tuning, bits)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["resnet20"], metavar="NAME")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--samples", type=int)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    for name in args.names:
        net = network(name, args.samples)
        print(f"{name}: {net.metric} {net.figure(net.gated):.3f} as it is", flush=True)
        path = args.out / f"analog_{name}.json"
        found = json.loads(path.read_text()) if path.is_file() else {}
        for section in args.only:
            print(section, flush=True)
            with tg.kernels.use("auto"):
                found[section] = list(SECTIONS[section](net, args.draws))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
