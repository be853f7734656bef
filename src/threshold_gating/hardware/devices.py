"""Differential pairs as measured: the presets, and the curve of a pair in torch.

The numbers stand in `presets.json`, which `tg spice presets -o FILE` writes: every one comes out of
a simulation and carries its unit, its source and the set of transistor models it was taken with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
PRESETS = Path(__file__).with_name("presets.json")


class Source(NamedTuple):
    """Where a number comes from: its unit, how it was got, and with which transistor models."""

    unit: str
    source: str
    models: str


class Shape(NamedTuple):
    """Log odds of a pair at u = tau (v - theta): slope u + rise (softplus of what is past a knee).

    A logistic gate has slope 1 and rise 0. In strong inversion the losing transistor turns weak at
    the knee, from where the odds rise with the slope of weak inversion.
    """

    slope: float = 1.0
    rise: float = 0.0
    knee: float = 0.0
    bend: float = 1.0


@dataclass(frozen=True)
class Preset:
    """One differential pair at one tail current; `sources` tells of each number whence it is."""

    name: str
    device: str
    tail: float
    supply: float
    tau: float
    shape: Shape
    deviation: float
    temperature: tuple[tuple[float, float], ...]
    sigma_theta: float
    sigma_tau: float
    noise: float
    settling: float
    energy: float
    swing: float
    area: float
    sources: Mapping[str, Source] = field(hash=False, compare=False, repr=False)

    def gate(
        self, v: Tensor, theta: Tensor | float = 0.0, tau: Tensor | float | None = None
    ) -> Tensor:
        """The share of the tail current on the side of `v`; v and theta in volts, tau in 1/V."""
        if isinstance(tau, float | int):
            known = [at for _, at in self.temperature]
            low, high = min(known) / 2, max(known) * 2  # a spread of tau is 1 %, its tail 5 %
            if not low <= tau <= high:
                raise ValueError(
                    f"preset {self.name} has tau {self.tau:g} per volt, {min(known):g} to "
                    f"{max(known):g} over temperature; {tau:g} is not of this pair. Another bias "
                    "has another preset; more volts per unit of x make a larger tau per unit."
                )
        return curve((self.tau if tau is None else tau) * (v - theta), self.shape)

    def tau_at(self, celsius: float) -> float:
        """tau at a temperature, between the measured ones by a straight line in 1/T."""
        low, high = self.temperature[0][0], self.temperature[-1][0]
        if not low <= celsius <= high:
            raise ValueError(
                f"preset {self.name} was measured from {low:g} to {high:g} C; {celsius:g} C is "
                "outside."
            )
        points = [(1 / (t + 273.15), tau) for t, tau in self.temperature]
        x = 1 / (celsius + 273.15)
        k = max(i for i in range(len(points) - 1) if points[i][0] >= x)
        (x0, y0), (x1, y1) = points[k], points[k + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


LOGISTIC = Shape()


def log_odds(u: Tensor, shape: Shape = LOGISTIC) -> Tensor:
    """Of the gate of a pair at u = tau (v - theta); u itself where the gate is logistic."""
    if shape == LOGISTIC:
        return u
    odds = shape.slope * u
    if shape.rise:
        past = [aten.softplus(shape.bend * (side - shape.knee)) for side in (u, -u)]
        odds = odds + shape.rise / shape.bend * (past[0] - past[1])
    return odds


def curve(u: Tensor, shape: Shape = LOGISTIC) -> Tensor:
    """The gate of a pair at u = tau (v - theta), with the shape of its device."""
    out: Tensor = aten.sigmoid(log_odds(u, shape))
    return out


def preset(name: str) -> Preset:
    """The preset of that name; a wrong one is answered with the names there are."""
    every = presets()
    if name not in every:
        near = get_close_matches(name, every, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no preset {name!r}; {hint}There are {', '.join(every)}.")
    return every[name]


def presets(path: Path = PRESETS) -> dict[str, Preset]:
    """Every preset of a file that `tg spice presets` wrote, by name."""
    return {name: from_dict(row) for name, row in json.loads(path.read_text("utf-8")).items()}


def from_dict(row: Mapping[str, Any]) -> Preset:
    """A preset from what `to_dict` made; a number without unit, source or models is refused."""
    values: dict[str, Any] = {}
    sources = {}
    for name in number_names():
        cell = row[name]
        sources[name] = Source(*(cell.get(key, "") for key in Source._fields))
        lacking = [key for key, text in sources[name]._asdict().items() if not text]
        if lacking:
            raise ValueError(f"preset {row['name']}: {name} has no {' and no '.join(lacking)}.")
        values[name] = cell["value"]
    values["shape"] = Shape(*values["shape"])
    values["temperature"] = tuple((t, tau) for t, tau in values["temperature"])
    return Preset(name=row["name"], device=row["device"], **values, sources=sources)


def to_dict(p: Preset) -> dict[str, Any]:
    """As JSON: every number beside its unit, source and models."""
    cells = {n: {"value": getattr(p, n), **p.sources[n]._asdict()} for n in number_names()}
    return {"name": p.name, "device": p.device, **cells}


def number_names() -> list[str]:
    """The fields of a preset that are numbers."""
    return [f.name for f in fields(Preset) if f.name not in ("name", "device", "sources")]
