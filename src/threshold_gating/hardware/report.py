"""What a simulation assumes of each site and each layer, as a table, JSON and numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from threshold_gating.hardware.crossbar import Array
    from threshold_gating.hardware.physical import AnalogGate


@dataclass(frozen=True)
class SiteRow:
    """One site: its gates, its voltages, and its errors in units of what it sees."""

    name: str
    kind: str
    K: int
    gates: int  # physical ones on a chip
    group: tuple[int, ...]
    axis: int
    seen: int  # numbers, in calibration
    rms: float
    largest: float
    volts: float | None  # per unit; None: ideal pairs have no volts
    rms_millivolts: float | None
    largest_millivolts: float | None
    sharpness: float  # tau times the RMS
    sigma_theta: float  # over the RMS
    clipped: bool  # whether inputs that were seen are beyond the rails

    @classmethod
    def of(cls, gate: AnalogGate) -> SiteRow:
        """Of a site that has been calibrated."""
        seen, chip = gate.seen, gate.chip
        tau = math.inf if gate.is_hard else chip.tau * gate.volts * chip.warmth
        volts = None if chip.preset is None else gate.volts
        rms, largest = (volts and 1e3 * volts * size for size in (seen.rms, seen.largest))
        return cls(
            *(gate.name, gate.kind, gate.t.K, math.prod(gate.group), gate.group, seen.axis),
            *(seen.count, seen.rms, seen.largest, volts, rms, largest),
            *(tau * seen.rms, _over(gate.sigma_theta(), seen.rms)),
            # the largest input may be put at the rail, and comes out a rounding beyond it
            gate.volts * seen.largest > chip.rail * (1 + 1e-9),
        )


@dataclass(frozen=True)
class LayerRow:
    """One layer on crossbars."""

    name: str
    kind: str
    rows: int
    columns: int
    groups: int
    tiles: int
    cells: int
    reads: int  # columns read in the run of calibration
    dac_bits: int | None
    adc_bits: int | None
    largest_input: float
    largest_sum: float
    worst_drop: float

    @classmethod
    def of(cls, array: Array, layer: Any) -> LayerRow:
        """Of a layer that has been calibrated."""
        s, (columns, rows) = array.settings, layer.weight.flatten(1).shape
        across = math.ceil(columns / layer.groups / (s.columns or columns))
        return cls(
            *(array.name, type(layer).__name__.removeprefix("Crossbar"), rows, columns),
            *(layer.groups, array.seen.tiles * across * layer.groups, 2 * rows * columns),
            *(array.seen.products, s.bits("dac", array.name), s.bits("adc", array.name)),
            *(array.seen.largest_input, array.seen.largest_sum, array.worst_drop),
        )


@dataclass(frozen=True)
class Report:
    """What is simulated, and what is not."""

    preset: str
    settings: dict[str, Any]
    seed: int
    draws: int
    sites: tuple[SiteRow, ...]
    layers: tuple[LayerRow, ...]
    ideal: tuple[str, ...]  # sites that cannot be analog here, and why
    chosen_ideal: tuple[str, ...]
    digital: tuple[str, ...]  # weights that are on no crossbar

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """At most 100 columns wide."""
        lines = [in_columns(SITE_HEADER, SITE_WIDTHS)]
        lines += [in_columns(site_cells(row), SITE_WIDTHS) for row in self.sites]
        if self.layers:
            lines += ["", in_columns(LAYER_HEADER, LAYER_WIDTHS)]
            lines += [in_columns(layer_cells(row), LAYER_WIDTHS) for row in self.layers]
        for what, names in (
            ("stays ideal", self.ideal),
            ("ideal as asked", self.chosen_ideal),
            ("digital", self.digital if self.layers else ()),
        ):
            if names:
                lines.append(f"{what}: {', '.join(names)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


SITE_HEADER = (
    *("site", "kind", "K", "gates", "RMS", "mV/unit", "RMS mV", "max mV", "tau RMS"),
    "dtheta",
)
SITE_WIDTHS = (-26, -9, 2, 6, 8, 8, 8, 9, 7, 7)


def site_cells(row: SiteRow) -> tuple[str, ...]:
    """A row of the table; * marks inputs beyond the rails."""
    unit = None if row.volts is None else 1e3 * row.volts
    millivolts = [
        "-" if v is None else f"{v:.3g}" for v in (unit, row.rms_millivolts, row.largest_millivolts)
    ]
    millivolts[-1] += "*" if row.clipped else ""
    return (
        *(row.name, row.kind, str(row.K), str(row.gates), f"{row.rms:.3g}"),
        *(*millivolts, f"{row.sharpness:.3g}", f"{row.sigma_theta:.3f}"),
    )


LAYER_HEADER = ("layer", "kind", "rows", "columns", "tiles", "cells", "DAC", "ADC", "IR drop")
LAYER_WIDTHS = (-28, -8, 7, 8, 7, 10, 5, 5, 8)


def layer_cells(row: LayerRow) -> tuple[str, ...]:
    """A row of the table of layers."""
    bits = ["-" if b is None else str(b) for b in (row.dac_bits, row.adc_bits)]
    drop = f"{row.worst_drop:.1%}" if row.worst_drop else "-"
    sizes = (row.rows, row.columns, row.tiles, row.cells)
    return (row.name, row.kind, *map(str, sizes), *bits, drop)


def in_columns(cells: tuple[str, ...], widths: tuple[int, ...]) -> str:
    """Cells in columns; a negative width is flush left, and cut in the middle where it is long."""
    parts = []
    for cell, width in zip(cells, widths, strict=True):
        room = abs(width)
        first = (room - 1) // 2
        short = cell if len(cell) <= room else f"{cell[:first]}…{cell[first + 1 - room :]}"
        parts.append(short.ljust(room) if width < 0 else short.rjust(room))
    return " ".join(parts).rstrip()


@dataclass(frozen=True)
class ChipRow:
    """What one chip gives, against the ideal network on the same inputs."""

    chip: int
    error: float  # RMS of the difference over the RMS of the ideal outputs
    largest: float  # max|d| / max|y|
    same: float | None  # share of rows whose largest entry is the same; None: no rows


def compared(chip: int, output: Any, ideal: Any) -> ChipRow:
    """The floating-point tensors of two outputs; rows lie along the last axis of the first."""
    pairs = [
        (a.detach().double(), b.detach().double())
        for a, b in zip(pytree.tree_leaves(output), pytree.tree_leaves(ideal), strict=True)
        if isinstance(a, Tensor) and a.is_floating_point()
    ]
    if pairs and not any(b.numel() for _, b in pairs):
        raise ValueError("simulate: the outputs are empty; compare on inputs that are not.")
    pairs = [(a, b) for a, b in pairs if b.numel()]
    if not pairs:
        raise ValueError("simulate: the network gives no floating-point tensor to compare.")
    apart = sum((a - b).square().sum().item() for a, b in pairs)
    size = sum(b.square().sum().item() for _, b in pairs)
    most = max((a - b).abs().max().item() for a, b in pairs)
    top = max(b.abs().max().item() for _, b in pairs)
    a, b = pairs[0]
    rows = a.dim() > 1 and a.shape[-1] > 1
    same = (a.argmax(-1) == b.argmax(-1)).double().mean().item() if rows else None
    return ChipRow(chip, _over(math.sqrt(apart), math.sqrt(size)), _over(most, top), same)


def _over(a: float, b: float) -> float:
    return a / b if b else math.inf if a else 0.0
