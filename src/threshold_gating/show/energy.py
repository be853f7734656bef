"""Stacked bars of an energy budget: the designs, their areas, and the layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from threshold_gating.hardware.counting import DESIGNS
from threshold_gating.hardware.energy import Report
from threshold_gating.hardware.figure import Figure as Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#ee6677", "#228833")


def picture(report: Report, path: Path, title: str) -> None:
    """Write the bars to `path`, .svg or .png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2)
    node = report.assumptions.node
    designs, areas, layers = (figure.add_subplot(grid[k]) for k in ((0, 0), (0, 1), (1, slice(2))))
    stacked(designs, {d: report.energies[d]["median"] for d in DESIGNS}, 1e-6)
    for k, design in enumerate(DESIGNS):
        low, high = (report.total(design, w).value / 1e6 for w in ("low", "median"))
        designs.vlines(k, low, high, color="black", lw=3)
    designs.set_ylabel(f"uJ a run, {node:g} nm")
    designs.set_title("energy; black: ADC from the survey's p10 to its median", fontsize=9)
    stacked(areas, report.areas, 1e-6)
    areas.set_ylabel(f"mm$^2$, {node:g} nm")
    areas.set_title("area", fontsize=9)
    stacked(layers, report.layer_energies["digital"], 1e-6)
    layers.set_ylabel(f"uJ a run, {node:g} nm")
    layers.set_title("layers, with digital activations and the median ADC", fontsize=9)
    layers.tick_params(axis="x", rotation=60, labelsize=7)
    designs.legend(frameon=False, fontsize=8)
    figure.suptitle(title.replace("$", r"\$"), fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def stacked(ax: Axes, bars: Mapping[str, Mapping[str, Number]], scale: float) -> None:
    """One bar for each name, its parts on top of each other."""
    names = list(bars)
    below = [0.0] * len(names)
    for part, colour in zip(bars[names[0]], COLOURS, strict=True):
        sizes = [bars[name][part].value * scale for name in names]
        ax.bar(range(len(names)), sizes, bottom=below, label=part, color=colour)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    ax.set_xticks(range(len(names)), names)
