"""The page of a co-verification: one network in float, integers, Verilog and transistors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from threshold_gating.hardware.digital.coverify import Report, Row
from threshold_gating.show import details, page
from threshold_gating.show.seen import Seen

HEADER = (
    "site",
    "kind",
    "format",
    "error (LSB)",
    "codes seen",
    "compared",
    "differ",
    "settings",
    "of each",
)
LEGEND = {
    "format": "bits of x and y; a code over 2^n is the number",
    "error (LSB)": "largest distance of the integers from float64, in last bits of y, at the codes "
    "that came",
    "codes seen": "inputs of the site in this run",
    "compared": "codes that went through the Verilog",
    "differ": "where Verilog and integers disagree",
    "settings": "different register values (of channels, of keys) that the Verilog had, of those "
    "that came; a cell of a softmax tree has one",
    "of each": "which codes of x a setting had: all, or some evenly chosen; where branches or "
    "registers are data, elements that came",
}


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    counts = (f"{row.seen:,}", f"{row.codes:,}", f"{row.differ:,}")
    settings = f"{row.simulated:,} of {row.settings:,}"
    return (row.name, row.kind, row.format, f"{row.error:.2f}", *counts, settings, row.each)


def summary(report: Report) -> list[str]:
    """The outcome in sentences."""
    codes = sum(row.codes for row in report.rows)
    word = "exact" if report.exact else f"{sum(r.differ for r in report.rows):,} codes differ"
    trees = sum(row.kind == "pair" for row in report.rows)
    had, came = (sum(getattr(r, name) for r in report.rows) for name in ("simulated", "settings"))
    said = [
        f"Integers and Verilog ({report.simulator}): {word}, {codes:,} codes at "
        f"{len(report.rows) - trees} {'site' if len(report.rows) - trees == 1 else 'sites'}"
        f"{f' and {trees} trees of softmax' if trees else ''}, {had:,} of {came:,} settings of "
        f"their registers, {report.bits} bits.",
        *_sampled(report),
        f"Float and integers: the RMS error of the output over its RMS is {report.output:.3%}"
        + (
            f", and {report.same:.2%} of its rows have the same largest entry."
            if report.same is not None
            else "."
        ),
    ]
    said += [
        f"Transistors and instance, {each.name}: off by {each.error:.2%} of full scale, "
        f"{each.trimmed:.2%} when trimmed (ngspice)."
        for each in report.analog
    ]
    said += [f"{note}." for note in report.notes]
    said += [f"Stays as it is: {name}." for name in report.kept]
    return [*said, *(f"Not measured: {why}" for why in report.skipped)]


def _sampled(report: Report) -> list[str]:
    """What the Verilog did not have, in a sentence."""
    some = [row for row in report.rows if not row.every]
    if not some:
        return ["Every setting had every code."]
    named = "; ".join(f"{row.name} ({row.each})" for row in some[:4])
    more = f"; and {len(some) - 4} more" if len(some) > 4 else ""
    return [f"Not every code of every setting: {named}{more}."]


def html(name: str, report: Report, seen: Sequence[Seen], **about: Any) -> str:
    """The whole document; `about` has its facts, its warnings and its JSON."""
    return page.report(
        title=f"{name} in {report.bits}-bit gates",
        sentences=summary(report),
        sites=details.table(HEADER, [cells(row) for row in report.rows], LEGEND, seen),
        **about,
    )
