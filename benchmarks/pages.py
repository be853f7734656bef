"""From what `tg bench --json` wrote to a page and a picture; nothing in them is typed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from threshold_gating.benchmarking.rows import Row, remarks, table, times_table


def rows_of(data: dict[str, Any]) -> list[Row]:
    """The rows of a file, if it says how they were timed."""
    if "how" not in data:
        raise ValueError(
            "these times were written by an older `tg bench`, which timed some rows in other ways "
            "and did not say which; run `tg bench --json FILE` again."
        )
    return [Row(**row) for row in data["rows"]]


def report(data: dict[str, Any]) -> str:
    """The page of results."""
    rows = rows_of(data)
    parts = ["# Results", "", "Written from the JSON of `tg bench`, nothing by hand.", ""]
    parts += [data["how"], "", ", ".join(f"{k} {v}" for k, v in data["machine"].items()) + "."]
    parts += [
        "",
        f"Checks: {'all pairs agree' if not data['wrong'] else '; '.join(data['wrong'])}.",
    ]
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        parts += ["", f"## {section}", "", table(own)]
        if said := remarks(own):
            parts += ["", *(f"- {line}" for line in said)]
        parts += ["", times_table(own)]
    if (slope := data.get("slope")) is not None:
        parts += ["", f"Time grows as the {slope:.3f}th power of the work from 2^25 elements on."]
    return "\n".join(parts) + "\n"


def picture(data: dict[str, Any], path: Path) -> None:
    """Time against elements on logarithmic axes, ours and a copy, as called and replayed."""
    from matplotlib.figure import Figure

    rows = [row for row in rows_of(data) if row.power is not None]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("copy", "ours"):
        for times, style, what in (("times", "o-", name), ("replayed", "--", f"{name}, replayed")):
            points = [(2**row.power, getattr(row, times).get(name)) for row in rows if row.power]
            points = [p for p in points if p[1] is not None]
            if points:
                axes.loglog(*zip(*points, strict=True), style, label=what, base=2)
    axes.set(xlabel="elements", ylabel="milliseconds", title=data["machine"]["gpu"])
    axes.legend()
    figure.savefig(path)
