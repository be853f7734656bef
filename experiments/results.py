"""Rebuild docs/results.md from the rows in experiments/results, and README.md where it has markers.

    make results                        # python -m experiments.results
    python -m experiments.results --check   # fails if a page is not what the rows say

Each experiment of PAGES makes its section (`page`), verdicts (`verdicts`) and pictures (`draw`).
Its docstring ends with a paragraph "Last result: ..." (device, seconds, seeds, date), which is made
here, too. Rows of a smoke run are refused: nothing that made-up data gave reaches a page.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from experiments import record
from experiments.record import RESULTS, ROOT, Row, Verdict

# In the order of the page; the name of the module and of its file of rows.
PAGES: tuple[str, ...] = (
    "table4_conversion",
    "table5_llm",
    "cor11_wide",
    "fig3_width",
    "fig3_depth",
    "fig3_speech",
    "hippocampus",
    "error_against_k",
    "neighbours",
    "insight_pruning",
    "insight_cost",
)
# The README's short table: parts of the paper, and whose verdicts count for them.
PARTS = {
    "conversion (Tables 2, 4, 5, 6)": ("table4_conversion", "table5_llm"),
    "theory (Sec. 2.4, Cor. 11)": ("error_against_k", "cor11_wide"),
    "width, depth, speed (Fig. 3a, b, d)": ("fig3_width", "fig3_depth", "hippocampus"),
    "speech (Fig. 3c, d)": ("fig3_speech",),
}
COLUMNS = (("reproduced",), ("partly",), ("not",), ("not run", "no data here"))
PAGE, README, IMAGES = ROOT / "docs" / "results.md", ROOT / "README.md", ROOT / "docs" / "images"


def gathered(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """The rows of every experiment; smoke rows and files of no experiment are errors."""
    found = {name: record.rows(folder / f"{name}.jsonl") for name in PAGES}
    for name, rows in found.items():
        if any(row.smoke for row in rows):
            file = folder / f"{name}.jsonl"
            raise SystemExit(f"{file} holds rows of a smoke run: delete them and measure again")
        record.check_data(rows)
    strangers = sorted(f.name for f in folder.glob("*.jsonl") if f.stem not in PAGES)
    if strangers:
        raise SystemExit(f"{folder} has rows of no experiment in PAGES: {', '.join(strangers)}")
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"experiments.{name}")


def sections(found: dict[str, list[Row]]) -> dict[str, str]:
    """Text for each pair of markers of the two pages."""
    texts: dict[str, str] = {}
    verdicts: dict[str, list[Verdict]] = {}
    for name, rows in found.items():
        module = _module(name)
        command = f"`python -m experiments.{name}`"
        texts[name] = module.page(rows) if rows else f"Not measured yet: {command}."
        verdicts[name] = module.verdicts(rows)
    texts["verdicts"] = verdict_table([v for own in verdicts.values() for v in own])
    texts["summary"] = summary(verdicts)
    return texts


def summary(verdicts: dict[str, list[Verdict]]) -> str:
    """How many claims of each part of the paper got which verdict."""
    lines = ["| claims on | reproduced | partly | not | not run, no data |", "| --- " * 5 + "|"]
    for part, names in PARTS.items():
        own = [v.verdict for name in names for v in verdicts.get(name, ())]
        counts = [str(sum(word in column for word in own)) for column in COLUMNS]
        lines.append(f"| {' | '.join([part, *counts])} |")
    return "\n".join(lines)


def verdict_table(verdicts: list[Verdict]) -> str:
    lines = ["| claim | paper | here | verdict |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(verdict)} |" for verdict in verdicts)])


def filled(text: str, texts: dict[str, str], file: Path) -> str:
    """The page with what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` made anew."""
    for name, new in texts.items():
        first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if first in text:
            before, _, rest = text.partition(first)
            _, found, after = rest.partition(last)
            if not found:
                raise SystemExit(f"{file} has {first} but not {last}")
            text = f"{before}{first}\n{new.strip()}\n{last}{after}"
    needed = {PAGE: [n for n in texts if n != "summary"], README: ["summary"]}[file]
    if missing := [n for n in needed if f"<!-- {n}:begin -->" not in text]:
        raise SystemExit(f"{file} has no place for {', '.join(missing)}: add the markers")
    return text


def last_result(rows: list[Row], verdicts: list[Verdict]) -> str:
    """For the docstring of an experiment: what came of it, where, how long, which seeds, when."""
    if not rows:
        return "Last result: not measured yet."
    devices = " and ".join(sorted({row.about["device"] for row in rows}))
    seeds = sorted({row.case["seed"] for row in rows if "seed" in row.case})
    drawn = f"seeds {', '.join(map(str, seeds))}, " if seeds else ""
    seconds = sum(row.seconds for row in rows)
    date = max(row.about["date"] for row in rows)
    counts = Counter(v.verdict for v in verdicts)
    claims = f"claims: {', '.join(f'{n} {word}' for word, n in counts.items())}; " if counts else ""
    text = (
        f"Last result: {claims}{len(rows)} rows, {devices}, {drawn}{seconds:,.0f} s of runs (some "
        f"side by side), {date}; docs/results.md."
    )
    return textwrap.fill(text, 100)


def dated(source: str, said: str, file: Path) -> str:
    """The source of an experiment whose docstring ends with `said` in place of an older one."""
    quotes = '"""'
    text, closed, code = source.removeprefix(quotes).partition(quotes)
    body, _, last = text.rpartition("\n\n")
    if not (source.startswith(quotes) and closed and last.startswith("Last result:")):
        raise SystemExit(f'{file}: its docstring does not end with a paragraph "Last result: ..."')
    return f"{quotes}{body}\n\n{said}\n{quotes}{code}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.results")
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail where a page is old"
    )
    asked = parser.parse_args(argv)
    found = gathered()
    texts = sections(found)
    old = []
    sources = {
        ROOT / "experiments" / f"{name}.py": last_result(rows, _module(name).verdicts(rows))
        for name, rows in found.items()
    }
    for file in (PAGE, README, *sources):
        before = file.read_text("utf-8")
        said = sources.get(file)
        after = filled(before, texts, file) if said is None else dated(before, said, file)
        if after != before and asked.check:
            old.append(str(file.relative_to(ROOT)))
        elif after != before:
            file.write_text(after, "utf-8")
    if old:
        sys.exit(f"{', '.join(old)}: not what the rows say; run `make results`")
    if not asked.check:
        import matplotlib

        matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file from the same rows
        for name, rows in found.items():
            draw = getattr(_module(name), "draw", None)
            if draw is not None and rows:
                draw(rows, IMAGES)


if __name__ == "__main__":
    main()
