"""The page of a simulation: chips, sites and layers on analog hardware, in one HTML file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from threshold_gating.hardware.report import (
    LAYER_HEADER,
    SITE_HEADER,
    ChipRow,
    Report,
    layer_cells,
    site_cells,
)
from threshold_gating.show import details, page
from threshold_gating.show.seen import Seen

_ALONE = 30  # sites whose error by themselves is drawn
LEGEND = {
    "gates": "physical gates on one chip; errors are drawn once for each",
    "RMS": "of the site's input in calibration",
    "mV/unit": "volts that stand for one unit of the input",
    "max mV": "the largest input that was seen; * is beyond the rails, where it is cut off",
    "tau RMS": "sharpness: how many times the width of the gate the RMS is",
    "dtheta": "standard deviation of a threshold over the RMS of the input",
}


def summary(report: Report, chips: Sequence[ChipRow]) -> list[str]:
    """The outcome in sentences."""
    errors = sorted(row.error for row in chips)
    gates = sum(row.gates for row in report.sites)
    plural = "" if len(chips) == 1 else "s"
    said = [
        f"{len(report.sites)} sites, {gates:,} physical gates of {report.preset} on each of "
        f"{len(chips)} chip{plural}.",
        f"RMS error of the output over its RMS: median {statistics.median(errors):.2%}, from "
        f"{errors[0]:.2%} to {errors[-1]:.2%}.",
    ]
    same = [row.same for row in chips if row.same is not None]
    if same:
        said.append(
            f"Rows whose largest output is the ideal network's: {min(same):.2%} to {max(same):.2%}."
        )
    if clipped := [row.name for row in report.sites if row.clipped]:
        said.append(f"Inputs beyond the rails at {len(clipped)} sites, first {clipped[0]}.")
    return said


def html(
    name: str,
    report: Report,
    chips: Sequence[ChipRow],
    alone: Mapping[str, float],
    seen: Sequence[Seen],
    **about: Any,
) -> str:
    """The whole document; `about` has its facts, its warnings and its JSON."""
    layers = page.plain(LAYER_HEADER, [layer_cells(row) for row in report.layers])
    sites = details.table(SITE_HEADER, [site_cells(row) for row in report.sites], LEGEND, seen)
    return page.report(
        "simulation.html",
        title=f"{name} on {report.preset}",
        sentences=summary(report, chips),
        chips=bars({f"chip {row.chip}": row.error for row in chips}),
        alone=bars(dict(list(alone.items())[:_ALONE])) if alone else "",
        others=max(0, len(alone) - _ALONE),
        sites=sites,
        layers=layers if report.layers else None,
        aside="What is not simulated",
        beside=_left(report),
        **about,
    )


def bars(values: Mapping[str, float]) -> str:
    """Horizontal bars with their numbers, as an SVG element."""
    most = max(values.values()) or 1.0
    words = "; ".join(f"{name} {value:.2%}" for name, value in values.items())
    lines = [
        f'<svg viewBox="0 0 720 {20 * len(values) + 6}" role="img" '
        f'aria-label="{escape(words, quote=True)}">'
    ]
    for k, (name, value) in enumerate(values.items()):
        y = 20 * k + 6
        lines.append(
            f'<text x="214" y="{y + 10}" text-anchor="end">{escape(_short(name))}</text>'
            f'<path class="g0" d="M220 {y + 6}h{430 * value / most:.1f}" stroke-width="9"/>'
            f'<text x="{226 + 430 * value / most:.1f}" y="{y + 10}">{value:.2%}</text>'
        )
    return "".join([*lines, "</svg>"])


def _short(name: str) -> str:
    return name if len(name) <= 38 else f"…{name[-37:]}"


def _left(report: Report) -> dict[str, str]:
    groups = {
        "sites that stay ideal": report.ideal,
        "ideal as asked": report.chosen_ideal,
        "weights on no crossbar": report.digital if report.layers else ("all of them",),
    }
    facts = {what: ", ".join(names) for what, names in groups.items() if names}
    return {**facts, "never": "normalisation, pooling, additions, products of activations"}
