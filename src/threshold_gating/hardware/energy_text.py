"""The budget of a network as text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from threshold_gating.hardware.assumptions import NOT_COUNTED
from threshold_gating.hardware.counting import DESIGNS
from threshold_gating.hardware.figure import Figure
from threshold_gating.hardware.report import in_columns

if TYPE_CHECKING:
    from threshold_gating.hardware.energy import Report

WIDTH = 100
_LAYERS = (-18, 10, 7, 8, 8, 8, 8, 8, 8, 8)
_DACS = tuple(d for d in DESIGNS if d != "digital+")  # wires behind a tile change no DAC there
_LAYER_HEADS = (
    ("", "", "", *("ADC" for _ in DESIGNS), *("DAC" for _ in _DACS)),
    ("layer", "rows x col", "MACs", *DESIGNS, *_DACS),
)
_PARTS = (-18, 12, 12, 12, 12)
_FIGURES = (-21, 10, 5, 6, 9)


def text(report: Report) -> str:
    """Layers, totals and every assumption."""
    a, tiles = report.assumptions, sum(row.tiles for row in report.layers)
    lines = [
        f"Conversions of a run, {tiles} tiles of {a.rows} x {a.columns}. digital: activations are.",
        "analog: gates are analog. +: tiles of a sum add up on a wire; else each is converted.",
        *(in_columns(head, _LAYERS) for head in _LAYER_HEADS),
        *(in_columns(cells, _LAYERS) for cells in _layer_cells(report)),
        "",
        *_totals(report),
        "",
        *_assumptions(report),
        "",
        *textwrap.wrap(f"Not counted: {NOT_COUNTED}.", WIDTH),
    ]
    if report.digital_ops:
        said = ", ".join(f"{op} ({n})" for op, n in report.digital_ops.items())
        lines += textwrap.wrap(f"Digital in every design: {said}.", WIDTH)
    if report.digital_macs:
        lines.append(
            f"{short(report.digital_macs)} MACs multiply data by data, on no crossbar; "
            "not counted as energy."
        )
    return "\n".join(lines)


def _layer_cells(report: Report) -> list[tuple[str, ...]]:
    rows = [
        (
            *(row.name, f"{row.rows}x{row.columns}" + (f"/{row.groups}" * (row.groups > 1))),
            *(short(row.macs), *(short(row.adc[d]) for d in DESIGNS)),
            *(short(row.dac[d]) for d in _DACS),
        )
        for row in report.layers
    ]
    sums = (
        short(sum(row.macs for row in report.layers)),
        *(short(sum(row.adc[d] for row in report.layers)) for d in DESIGNS),
        *(short(sum(row.dac[d] for row in report.layers)) for d in _DACS),
    )
    return [*rows, ("all", "", *sums)]


def _totals(report: Report) -> list[str]:
    node = report.assumptions.node
    lines = [in_columns((f"energy, {node:g} nm", *DESIGNS), _PARTS)]
    whichs = {
        "low": "ADC, survey p10",
        "median": "ADC, survey p50",
        "regression": "ADC, regression",
    }
    for which, name in whichs.items():
        cells = (joules(report.energies[d][which]["ADC"]) for d in DESIGNS)
        lines.append(in_columns((name, *cells), _PARTS))
    for part in report.energies[DESIGNS[0]]["median"]:
        if part != "ADC":
            cells = (joules(report.energies[d]["median"][part]) for d in DESIGNS)
            lines.append(in_columns((part, *cells), _PARTS))
    for which, name in (("low", "total, p10"), ("median", "total, p50")):
        totals = (joules(report.total(d, which)) for d in DESIGNS)
        lines.append(in_columns((name, *totals), _PARTS))
    lines += ["", in_columns((f"area, {node:g} nm", *DESIGNS), _PARTS)]
    for part in report.areas[DESIGNS[0]]:
        cells = (squares(report.areas[d][part]) for d in DESIGNS)
        lines.append(in_columns((part, *cells), _PARTS))
    lines.append(in_columns(("total", *(squares(report.area(d)) for d in DESIGNS)), _PARTS))
    return lines


def _assumptions(report: Report) -> list[str]:
    lines = [in_columns(("figure", "value", "unit", "node", "rate"), _FIGURES) + "  source"]
    for name, f in report.assumptions.figures().items():
        rate = "-" if f.rate is None else hertz(f.rate)
        start = in_columns((name, f"{f.value:.4g}", f.unit, f"{f.node:g} nm", rate), _FIGURES)
        start = start.ljust(sum(map(abs, _FIGURES)) + len(_FIGURES) + 1)
        first, *rest = textwrap.wrap(f.source, WIDTH - len(start))
        lines += [start + first, *(" " * len(start) + more for more in rest)]
    return lines


def short(n: float) -> str:
    """A count in four characters of digits."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if n >= size:
            return f"{n / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{n:.0f}"


def hertz(rate: float) -> str:
    """A rate, readably."""
    found = ((1e9, "GHz"), (1e6, "MHz"), (1e3, "kHz"))
    return next((f"{rate / s:.3g} {u}" for s, u in found if rate >= s), f"{rate:.3g} Hz")


def joules(f: Figure) -> str:
    """A figure in pJ, readably."""
    found = ((1e9, "mJ"), (1e6, "uJ"), (1e3, "nJ"))
    return next((f"{f.value / s:.4g} {u}" for s, u in found if f.value >= s), f"{f.value:.4g} pJ")


def squares(f: Figure) -> str:
    """A figure in um^2, readably."""
    return f"{f.value / 1e6:.4g} mm^2" if f.value >= 1e4 else f"{f.value:.4g} um^2"
