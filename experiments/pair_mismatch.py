"""How sigma(theta) of a differential pair depends on the way theta is read, on the same draws.

    TG_PDK=FOLDER python -m experiments.pair_mismatch

Figures are sigma(theta) sqrt(W L) in mV um. A logistic pair has one theta whatever way it is read;
in strong inversion the curve is not logistic, and the ways part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from threshold_gating.hardware import measure
from threshold_gating.hardware.cells import Pair

PAIRS, SEEDS = 200, range(1, 11)  # 2000 pairs: a standard deviation is known to 1.6 %
TAILS = {"10 nA": 10e-9, "1 uA": 1e-6, "100 uA": 100e-6}


def fitted(v: Tensor, g: Tensor) -> Tensor:
    """theta of the logistic curve that is nearest: what the presets have."""
    return measure.fits(v, g)[1]


def crossing(v: Tensor, g: Tensor) -> Tensor:
    """The input at which both sides carry the same current, between two points of the sweep."""
    above = (g > 0.5).int().argmax(-1)
    low, high = (g.gather(-1, at[:, None])[:, 0] for at in (above - 1, above))
    return v[above - 1] + (0.5 - low) / (high - low) * (v[above] - v[above - 1])


def mean_over_inputs(v: Tensor, g: Tensor) -> Tensor:
    """The area between the curve and a step at zero."""
    return torch.trapezoid(0.5 - g, v)


def at_zero(v: Tensor, g: Tensor) -> Tensor:
    """The log odds at input zero, divided by the tau of the logistic fit."""
    return -torch.logit(g[:, len(v) // 2]) / measure.fits(v, g)[0]


def near(v: Tensor, g: Tensor) -> Tensor:
    """theta of the logistic curve that is nearest within +-0.1 V."""
    inside = v.abs() < 0.1001
    return measure.fits(v[inside], g[:, inside])[1]


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logistic fit over +-0.4 V (presets)": fitted,
    "logistic fit over +-0.1 V": near,
    "where I1 = I2": crossing,
    "area between curve and step": mean_over_inputs,
    "log odds at zero input / tau": at_zero,
}


def drawn(spec: Pair, **conditions: object) -> tuple[Tensor, Tensor]:
    """The curves of all pairs."""
    parts = [measure.mismatched(spec, PAIRS, seed, **conditions) for seed in SEEDS]
    return parts[0][0], torch.cat([g for _, g in parts])


def sigma(spec: Pair, theta: Tensor) -> float:
    """Standard deviation of theta, times the root of the gate area, in mV um."""
    return 1e3 * theta.std().item() * math.sqrt(spec.width * spec.length)


def tabulate(head: str, columns: dict[str, tuple[Pair, tuple[tuple[str, float], ...]]]) -> None:
    """Print every way, for every pair with its parameters of the models."""
    print(f"{head:38}" + "".join(f"{name:>16}" for name in columns), flush=True)
    curves = {name: drawn(spec, parameters=off) for name, (spec, off) in columns.items()}
    for way, read in WAYS.items():
        cells = (sigma(columns[name][0], read(*curves[name])) for name in columns)
        print(f"  {way:36}" + "".join(f"{cell:16.2f}" for cell in cells), flush=True)
    for name, (v, g) in curves.items():
        read = [sigma(columns[name][0], at_zero(v, part)) for part in g.split(PAIRS // 2)]
        print(f"  at zero input, 100 pairs, {name}: {min(read):.2f} to {max(read):.2f}", flush=True)


def main() -> None:
    tabulate("all causes", {name: (Pair(tail=tail), ()) for name, tail in TAILS.items()})
    strong = Pair(tail=100e-6)
    oxide = (("sky130_fd_pr__nfet_01v8__toxe_slope", 0.0),)
    others = {
        "without toxe": (strong, oxide),
        "inputs at 0.9 V": (replace(strong, common=0.9), ()),
        "1/0.5 um": (replace(strong, width=1.0, length=0.5), ()),
        "tail 30 uA": (replace(strong, tail=30e-6), ()),
    }
    tabulate("100 uA, but", others)


if __name__ == "__main__":
    main()
