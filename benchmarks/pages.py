"""From what `python -m benchmarks --json` wrote to a page and a picture; nothing is typed by hand.

    PYTHONPATH=src python -m benchmarks.pages [FOLDER ...]

Each folder is a machine (default: benchmarks/h200, then benchmarks/cpu), and every JSON of it a
part of RESULTS.md, bench.json the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, remarks, table, times_table

HERE = Path(__file__).parent


def rows_of(data: dict[str, Any]) -> list[Row]:
    """The rows of a file, if it says how they were timed."""
    if "how" not in data:
        raise ValueError(
            "these times were written by an older benchmark, which timed some rows in other ways "
            "and did not say which; run `python -m benchmarks --json FILE` again."
        )
    return [Row(**row) for row in data["rows"]]


def report(data: dict[str, Any]) -> str:
    """One file's part of the page."""
    rows = rows_of(data)
    wrong = data.get("wrong")  # none where another check is among the rows
    agreed = "" if wrong is None else f"Checks: {'; '.join(wrong) or 'all pairs agree'}."
    of = ", ".join(f"{k} {v}" for k, v in data["machine"].items()) + "."
    parts = [data["how"], "", of, "", *filter(None, (agreed, data.get("unchecked")))]
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        parts += ["", f"### {section}", "", table(own)]
        if said := remarks(own):
            parts += ["", *(f"- {line}" for line in said)]
        if times := times_table(own):
            parts += ["", times]
    if (slope := data.get("slope")) is not None:
        parts += ["", f"Time grows as the {slope:.3f}th power of the work from 2^25 elements on."]
        if data["machine"]["gpu"] != "none":
            parts += ["", "![Cost as the work grows](growth.svg)"]
    return "\n".join(parts) + "\n"


def picture(data: dict[str, Any], path: Path) -> None:
    """Time against elements on logarithmic axes, ours and a copy, as called and replayed."""
    from matplotlib import rc_context
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
    with rc_context({"svg.hashsalt": "growth"}):  # the same bytes from the same rows
        figure.savefig(path, metadata={"Date": None})


def main(*folders: Path, out: Path = HERE) -> None:
    """Write RESULTS.md and growth.svg; the picture is of the first file with growing work."""
    parts = ["# Results\n\nWritten from the JSON of `python -m benchmarks`, nothing by hand.\n"]
    drawn = False
    for folder in folders or (HERE / "h200", HERE / "cpu"):
        files = sorted(folder.glob("*.json"), key=lambda p: (p.stem != "bench", p.stem))
        if folders and not files:
            raise SystemExit(f"benchmarks.pages: {folder} holds no JSON of a benchmark.")
        for path in files:
            try:
                data = json.loads(path.read_text())
                part = report(data)
            except ValueError as error:
                raise SystemExit(f"benchmarks.pages: {path}: {error}") from None
            parts += [f"## {_place(data['machine'])}\n"] if path == files[0] else []
            parts.append(part)
            if not drawn and any(row.power for row in rows_of(data)):
                picture(data, out / "growth.svg")
                drawn = True
    (out / "RESULTS.md").write_text("\n".join(parts))


def _place(machine: dict[str, str]) -> str:
    return "On a CPU" if machine["gpu"] == "none" else f"On an {machine['gpu']}"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
