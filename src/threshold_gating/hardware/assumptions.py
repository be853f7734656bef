"""What an energy budget assumes: settings, and each figure with its unit, node, rate and source."""

from __future__ import annotations

from dataclasses import dataclass

from threshold_gating.hardware import adc, devices
from threshold_gating.hardware.cited import cited, source
from threshold_gating.hardware.figure import Figure, check_node

NOT_COUNTED = (
    "memories, routing, clocks, sample-and-hold, digital sums of tiles, digital ops listed below, "
    "and of a gate its load, its mirrors and the lines of its inputs"
)
PROCESSES = {"sky130": 130.0, "gf180": 180.0}  # nm, of a preset by its name


@dataclass(frozen=True)
class Assumptions:
    """What the figures rest on.

    Args:
        node: process of everything, in nm.
        rows, columns: cells of a tile, a weight of two cells counted as one.
        adc_bits, dac_bits: effective bits of converters.
        adc_rate: conversions a second; one converter serves a tile.
        preset: the differential pair of a gate.
        volts: row voltage of the largest input.
        g_max: largest conductance of a cell, in siemens.
        read: how long a tile is on for its columns to be converted, in seconds. In front of an
            analog gate it is on until the gate has settled.
    """

    node: float = 32.0
    rows: int = 128
    columns: int = 128
    adc_bits: int = 6
    dac_bits: int = 6
    adc_rate: float = 1.2e9
    preset: str = "sky130-moderate"
    volts: float = 0.2
    g_max: float = 25e-6
    read: float = 100e-9

    def __post_init__(self) -> None:
        check_node(self.node)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            whole = isinstance(value, int) or not isinstance(low, int)
            if not (low <= value <= high and whole):
                kind = "whole and from" if isinstance(low, int) else "from"
                raise ValueError(
                    f"energy: {name} must be {kind} {low:g} to {high:.7g}; got {value:.7g}."
                )
        adc.energy(self.adc_bits, self.adc_rate, self.node)
        adc.survey(self.adc_bits)
        _process(devices.preset(self.preset))

    @property
    def settling(self) -> float:
        """Seconds that a gate takes; those of the preset's own process."""
        return devices.preset(self.preset).settling

    def figures(self) -> dict[str, Figure]:
        """Every figure that a total is made of, at the node of the assumptions."""
        pair = devices.preset(self.preset)
        low, high = adc.survey(self.adc_bits)
        drivers = source("ISAAC DAC power", "ISAAC DAC area")
        steps = f"{drivers}: 1024 one-bit drivers, every 100 ns; {self.dac_bits} steps or drivers"
        units = 2**self.dac_bits - 1
        area = "an area goes as the square"
        given = "V^2 G t of the settings, times activity: mean x^2 / max x^2 mean |w| / max |w|"
        found = {
            "ADC, survey low": low,
            "ADC, survey median": high,
            "ADC, regression": adc.energy(self.adc_bits, self.adc_rate, self.node),
            "DAC": Figure(
                self.dac_bits * cited("ISAAC DAC power") * 1e3 * 0.1 / 1024,
                *("pJ", 32.0, steps, 1e7, adc.NODE_SLOPE, "taken as that of ADCs"),
            ),
            "crossbar, converted": self._cell(self.read, given),
            "crossbar, gated": self._cell(self.settling, given),
            "gate": Figure(
                pair.energy * 1e12,
                *("pJ", _process(pair), f"preset {pair.name}: {pair.sources['energy'].source}"),
                *(1 / pair.settling, 1.0, "C at equal mismatch goes with the oxide"),
            ),
            "activation unit": Figure(
                cited("ISAAC sigmoid power") * 1e3 / 2 / 1.2e3,
                *("pJ", 32.0, f"{source('ISAAC sigmoid power')}: one result a clock is assumed"),
                *(1.2e9, adc.NODE_SLOPE, "taken as that of ADCs"),
            ),
            "ADC area": adc.area(self.adc_bits, self.adc_rate, self.node),
            "DAC area": Figure(
                units * cited("ISAAC DAC area") / 1024,
                *("um^2", 32.0, f"{drivers}: {units} drivers each"),
                *(1e7, 2.0, area),
            ),
            "cell area": Figure(
                cited("ISAAC array area") / 8 / 128**2,
                *("um^2", 32.0, f"{source('ISAAC array area')}: 8 arrays", None, 2.0, area),
            ),
            "gate area": Figure(
                pair.area,
                *("um^2", _process(pair), f"preset {pair.name}: {pair.sources['area'].source}"),
                *(None, 2.0, "at equal mismatch it goes as the square of the oxide"),
            ),
            "activation unit area": Figure(
                cited("ISAAC sigmoid area") / 2,
                *("um^2", 32.0, f"{source('ISAAC sigmoid area')}: 2 for 96 tiles", None, 2.0, area),
            ),
        }
        return {name: figure.at(self.node) for name, figure in found.items()}

    def _cell(self, seconds: float, source: str) -> Figure:
        value = self.volts**2 * self.g_max * seconds * 1e12
        return Figure(value, "pJ", self.node, source, 1 / seconds)


_RANGES = (
    *(("rows", 1, 2**20), ("columns", 1, 2**20), ("dac_bits", 1, 16), ("volts", 1e-4, 10.0)),
    *(("g_max", 1e-12, 1.0), ("read", 1e-10, 1e-3)),
)


def _process(preset: devices.Preset) -> float:
    for start, node in PROCESSES.items():
        if preset.name.startswith(start):
            return node
    raise ValueError(
        f"energy: the process of preset {preset.name} is not known; those of "
        f"{', '.join(PROCESSES)} are."
    )
