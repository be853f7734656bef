"""From what `python -m benchmarks --json` wrote to a page and a picture; nothing is typed by hand.

    PYTHONPATH=src python -m benchmarks.pages [FOLDER ...]

Each folder is a machine (default: benchmarks/h200, then benchmarks/cpu), and every JSON of it a
part of RESULTS.md, bench.json the first.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, remarks, row_of, slope_of, table, times_table
from benchmarks.sections import not_timed

HERE = Path(__file__).parent
_SMOKE = "A smoke run: small sizes on the CPU, to see that the rows run. Its times say nothing."


def rows_of(data: Any) -> list[Row]:
    """The rows of a file, if they are as this version writes them and it says how they were
    timed."""
    if not isinstance(data, dict) or not {"machine", "rows"} <= set(data):
        raise ValueError("it has no rows of a machine")
    if "how" not in data:
        raise ValueError(
            "these times were written by an older benchmark, which timed some rows in other ways "
            "and did not say which"
        )
    return [row_of(row) for row in data["rows"]]


def report(data: dict[str, Any]) -> str:
    """One file's part of the page."""
    rows, gpu = rows_of(data), _on_gpu(data)
    wrong = data.get("wrong")  # none where another check is among the rows
    pairs = " of ".join(filter(None, ("all pairs", ", ".join(data.get("checked", ())))))
    agreed = "" if wrong is None else f"Checks: {'; '.join(wrong) or f'{pairs} agree'}."
    of = ", ".join(f"{k} {v}" for k, v in data["machine"].items()) + "."
    parts = [_SMOKE, ""] if data.get("smoke") else []
    parts += [data["said"], ""] if data.get("said") else []
    if (runs := data.get("runs", 1)) > 1:
        hosts = "maybe on as many hosts"
        parts += [f"In {runs} runs of the same code, {hosts}: each timed what was missing.", ""]
    parts += [data["how"], "", of, "", *filter(None, (agreed, data.get("unchecked")))]
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        parts += ["", f"### {section}", "", table(own)]
        if said := remarks(own):
            parts += ["", *(f"- {line}" for line in said)]
        if times := times_table(own):
            parts += ["", times]
    if (slope := slope_of(rows)) is not None:
        parts += ["", f"Time grows as the {slope:.3f}th power of the work from 2^25 elements on."]
        if gpu:
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
            points = [
                (2**row.power, getattr(row, times).get(name, math.nan)) for row in rows if row.power
            ]
            points = [p for p in points if math.isfinite(p[1])]
            if points:
                axes.loglog(*zip(*points, strict=True), style, label=what, base=2)
    axes.set(xlabel="elements", ylabel="milliseconds", title=data["machine"]["gpu"])
    axes.legend()
    with rc_context({"svg.hashsalt": "growth"}):  # the same bytes from the same rows
        figure.savefig(path, metadata={"Date": None})


def main(*folders: Path, out: Path = HERE) -> None:
    """Write RESULTS.md and growth.svg; the picture is of the first file with growing work."""
    parts = ["# Results\n\nWritten from the JSON of `python -m benchmarks`, nothing by hand.\n"]
    grown = []
    for folder in folders or (HERE / "h200", HERE / "cpu"):
        files = sorted(folder.glob("*.json"), key=lambda p: (p.stem != "bench", p.stem))
        if folders and not files:
            raise SystemExit(f"benchmarks.pages: {folder} holds no JSON of a benchmark.")
        read = [_read(path) for path in files]
        parts += [*_heading([data for data, _ in read]), *(part for _, part in read)]
        grown += [data for data, _ in read if any(row.power for row in rows_of(data))]
    if grown:
        picture(grown[0], out / "growth.svg")
    (out / "RESULTS.md").write_text("\n".join(parts))


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """What is in a file, and its part of the page."""
    try:
        data = json.loads(path.read_text())
        return data, report(data)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        told = isinstance(error, OSError | ValueError)  # else JSON of something else
        what = error if told else f"{type(error).__name__}: {error}"
        raise SystemExit(
            f"benchmarks.pages: {path}: {what}; run `python -m benchmarks --json FILE` again, or "
            "make the page with the version that wrote it."
        ) from None


def _heading(found: list[dict[str, Any]]) -> list[str]:
    """The machine of a folder, and what its files lack of a whole run."""
    if not found:
        return []
    gpu = _on_gpu(found[0])
    name = f"an {found[0]['machine']['gpu']}" if gpu else "a CPU"
    rows = [row for data in found if not data.get("smoke") for row in rows_of(data)]
    lacking = ", ".join(not_timed(rows, gpu))
    said = [f"Not the whole benchmark: not run were {lacking}.\n"] if lacking else []
    return [f"## On {name}\n", *said]


def _on_gpu(data: dict[str, Any]) -> bool:
    """A smoke run is on the CPU, whatever else the machine has."""
    return data["machine"]["gpu"] != "none" and not data.get("smoke")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
