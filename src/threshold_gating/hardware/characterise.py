"""Presets out of simulations: `tg spice presets` measures every number of them."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from threshold_gating.hardware import measure, models
from threshold_gating.hardware.cells import Pair, describe, mirror
from threshold_gating.hardware.devices import Preset, Source
from threshold_gating.hardware.spice import INSTALL, SpiceError, ngspice

PAIRS = 1000  # of a Monte Carlo run: a standard deviation is then known to 2 %
SEED = 1

# What each preset is a pair of. Mismatch is that of the binned models where a process has two
# sets: it is the larger one, and the one that includes the slope of weak inversion.
PRESETS = {
    "sky130-weak": Pair(tail=10e-9),
    "sky130-moderate": Pair(tail=1e-6),
    "sky130-strong": Pair(tail=100e-6),
    "sky130-npn": Pair("sky130", "npn", tail=1e-6),
    "gf180-weak": Pair("gf180", tail=10e-9),
    "gf180-moderate": Pair("gf180", tail=1e-6),
    "gf180-strong": Pair("gf180", tail=100e-6),
}
# Sets that have what a real tail needs, in every size.
WHOLE = {"sky130-binned": "sky130"}


def measured(
    names: Sequence[str] = tuple(PRESETS),
    pairs: int = PAIRS,
    tell: Callable[..., None] = lambda *_: None,
) -> dict[str, Preset]:
    """Measure presets, one after the other."""
    out: dict[str, Preset] = {}
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}.")
        tell(name, len(out) / len(names))
        out[name] = measured_preset(name, PRESETS[name], pairs)
    return out


def measured_preset(name: str, spec: Pair, pairs: int = PAIRS) -> Preset:
    """One preset: the curve with an ideal tail, speed and noise with a real one."""
    moving = replace(spec, models=WHOLE.get(spec.models, spec.models), real=True)
    logistic, own = measure.own_curve(*measure.transfer(spec))
    warm = measure.over_temperature(spec)
    spread = measure.mismatch(spec, pairs, SEED)
    settling = measure.settling(moving, logistic.tau)
    reach = bandwidth(settling)
    wide, long = mirror(spec.tail)
    values: dict[str, Any] = {
        "tail": spec.tail,
        "supply": spec.supply,
        "tau": _digits(logistic.tau),
        "shape": own.shape,
        "deviation": _digits(own.deviation),
        "temperature": tuple(
            (t, _digits(fit.tau)) for t, fit in zip(measure.TEMPERATURES, warm, strict=True)
        ),
        "sigma_theta": _digits(spread.sigma_theta),
        "sigma_tau": _digits(spread.sigma_tau),
        "noise": _digits(measure.noise(moving, reach)),
        "settling": _digits(settling),
        "energy": _digits(settling * spec.tail * spec.supply),
        "swing": measure.SWING,
        "area": spec.area + wide * long,
    }
    sources = _sources(spec, moving, reach, pairs)
    return Preset(name=name, device=describe(spec), **values, sources=sources)


def bandwidth(settling: float) -> float:
    """Of one pole that settles to 1 % in that time, in Hz."""
    return math.log(1 / measure.WITHIN) / (2 * math.pi * settling)


def _digits(value: float) -> float:
    """Four digits: no simulation of a device means more."""
    return float(f"{value:.4g}")


def _sources(spec: Pair, moving: Pair, reach: float, pairs: int) -> dict[str, Source]:
    program, corner = version(), models.chosen(spec.models).corners[0]
    still, real = (f"{models.chosen(p.models).origin}, {corner}" for p in (spec, moving))
    sweep = f"{program}, dc sweep of +-{measure.SWING:g} V at 27 C"
    draws = f"{program}, Monte Carlo mismatch of {pairs} pairs, seed {SEED}"
    step = (
        f"{program}, step of one input over +-{measure.EDGE:g} / tau to {measure.WITHIN:.0%} of "
        f"the tail, slower edge, tail from a mirror with {moving.decoupling * 1e12:g} pF on its "
        "line, no load"
    )
    area = "drawn gates (emitters) of the pair and of its tail transistor"
    rows = {
        "tail": ("A", "chosen"),
        "supply": ("V", "nominal supply of the devices"),
        "tau": ("1/V", f"{sweep}, logistic curve by least squares"),
        "shape": ("1", f"{sweep}, odds over u = tau (v - theta) by least squares"),
        "deviation": ("1", f"{sweep}, largest distance from the curve with this shape"),
        "temperature": ("C, 1/V", f"{program}, the same sweep at each temperature"),
        "sigma_theta": ("V", draws),
        "sigma_tau": ("1", f"{draws}, relative to the mean"),
        "noise": ("V rms", f"{program}, input-referred at balance, 1 Hz to {reach:.3g} Hz"),
        "settling": ("s", step),
        "energy": ("J", "tail x supply x settling"),
        "swing": ("V", "range of the sweep"),
        "area": ("um^2", area),
    }
    moves = ("noise", "settling", "energy")
    return {n: Source(unit, how, real if n in moves else still) for n, (unit, how) in rows.items()}


def version() -> str:
    """The simulator and its version."""
    program = ngspice()
    if program is None:
        raise SpiceError(f"{INSTALL}.")
    said = subprocess.run([program, "-v"], capture_output=True, text=True).stdout
    found = re.search(r"ngspice-[\d.]+", said)
    return found[0] if found else "ngspice"
