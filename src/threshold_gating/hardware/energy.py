"""`energy`: energy and area of converters, crossbars, gates and activation units of a network.

    report = energy(model, inputs)
    print(report)

One run is counted for four designs. "digital": every column is converted, and activations are
digital. "analog": gates are analog, and what feeds a gate is not converted. In both, a sum over
several tiles is converted tile by tile and added digitally; in "digital+" and "analog+" the
currents of the tiles add up on a wire. Every figure is brought to one process;
`Assumptions.figures` has each with its unit, node, rate and source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

from torch import nn

from threshold_gating.hardware.assumptions import NOT_COUNTED, Assumptions
from threshold_gating.hardware.conversions import Trace, trace
from threshold_gating.hardware.counting import DESIGNS, INPUTS, Counts, count, layers, tiles_of
from threshold_gating.hardware.energy_text import text
from threshold_gating.hardware.figure import Figure

DEFAULT = Assumptions()
ADCS = {"low": "ADC, survey low", "median": "ADC, survey median", "regression": "ADC, regression"}


@dataclass(frozen=True)
class LayerRow:
    """A layer, its tiles, and its conversions in each design."""

    name: str
    rows: int
    columns: int
    groups: int
    tiles: int
    macs: int
    adc: dict[str, int]
    dac: dict[str, int]


@dataclass(frozen=True)
class Report:
    """The budget of one run."""

    assumptions: Assumptions
    layers: tuple[LayerRow, ...]
    energies: dict[str, dict[str, dict[str, Figure]]]  # by design, by ADC figure, by part
    areas: dict[str, dict[str, Figure]]  # by design, by part
    layer_energies: dict[str, dict[str, dict[str, Figure]]]  # by design, layer and part; median ADC
    digital_ops: dict[str, int]
    digital_macs: int

    def total(self, design: str, which: str = "median") -> Figure:
        """Of one run, in pJ."""
        return _sum(self.energies[design][which].values())

    def area(self, design: str) -> Figure:
        """Of what is counted, in um^2."""
        return _sum(self.areas[design].values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "assumptions": asdict(self.assumptions),
            "figures": {k: f.to_dict() for k, f in self.assumptions.figures().items()},
            "layers": [asdict(row) for row in self.layers],
            "energies": {
                design: {w: {p: f.value for p, f in parts.items()} for w, parts in kinds.items()}
                for design, kinds in self.energies.items()
            },
            "layer_energies": {
                design: {n: {p: f.value for p, f in parts.items()} for n, parts in each.items()}
                for design, each in self.layer_energies.items()
            },
            "areas": {d: {p: f.value for p, f in parts.items()} for d, parts in self.areas.items()},
            "units": {"energies": "pJ", "areas": "um^2"},
            "digital_ops": self.digital_ops,
            "digital_macs": self.digital_macs,
            "not_counted": NOT_COUNTED,
        }

    def __str__(self) -> str:
        return text(self)


def _sum(figures: Iterable[Figure]) -> Figure:
    return reduce(add, figures)


def energy(model: nn.Module, inputs: Any, assumptions: Assumptions = DEFAULT) -> Report:
    """The energy and area of a network on crossbars, from one run on `inputs`.

    Args:
        model: any network, converted or not.
        inputs: as `tg.convert` takes them.
        assumptions: process, tiles, converters and the pair of a gate.
    """
    return budget(trace(model, inputs), assumptions)


def budget(run: Trace, settings: Assumptions) -> Report:
    """The same of a run that was traced before."""
    counts = {design: count(run, settings, design) for design in DESIGNS}
    figures = settings.figures()
    found = layers(run)
    rows = tuple(
        LayerRow(
            *(name, p.rows, p.columns, p.groups, tiles_of(p, settings), p.macs),
            {d: int(c.adc[name]) for d, c in counts.items()},
            {d: int(c.dac[name]) for d, c in counts.items()},
        )
        for name, p in found.items()
    )
    cells = sum(2 * p.rows * p.columns * p.groups for p in found.values())
    tiles = sum(row.tiles for row in rows)
    places = [*found, *([INPUTS] if counts["digital"].activations[INPUTS] else [])]
    return Report(
        settings,
        rows,
        {d: {w: _energies(c, figures, w) for w in ADCS} for d, c in counts.items()},
        {d: _areas(c, figures, cells, tiles) for d, c in counts.items()},
        {
            d: {name: _energies(c.of(name), figures, "median") for name in places}
            for d, c in counts.items()
        },
        run.digital_ops(),
        sum(node.macs for node in run.nodes if node.kind == "digital"),
    )


def _energies(c: Counts, figures: dict[str, Figure], which: str) -> dict[str, Figure]:
    cells = figures["crossbar, converted"] * sum(c.crossbar.values())
    return {
        "ADC": figures[ADCS[which]] * sum(c.adc.values()),
        "DAC": figures["DAC"] * sum(c.dac.values()),
        "crossbar": cells + figures["crossbar, gated"] * sum(c.gated.values()),
        "gates": figures["gate"] * sum(c.decisions.values()),
        "activation units": figures["activation unit"] * sum(c.activations.values()),
    }


def _areas(c: Counts, figures: dict[str, Figure], cells: int, tiles: int) -> dict[str, Figure]:
    units = 2 * math.ceil(tiles / 96) if c.activations else 0
    return {
        "ADC": figures["ADC area"] * c.converted_tiles,
        "DAC": figures["DAC area"] * c.drivers,
        "crossbar": figures["cell area"] * cells,
        "gates": figures["gate area"] * c.gates,
        "activation units": figures["activation unit area"] * units,
    }
