"""What `tg bench` measured: rows, and the tables they make."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Times = dict[str, float]  # milliseconds by contender


@dataclass
class Row:
    """One piece of work: milliseconds of each contender, and the ratio that has a limit.

    Args:
        times: of the call as a user makes it; the ratio and the verdict come from them.
        over: the contender that `ours` is divided by; "best" is the fastest other one.
        replayed: times of recorded graphs, which leave out what Python costs, where there are any.
        failed: why there are no times.
        power: log2 of the number of elements, where it is what the row is about.
    """

    section: str
    work: str
    times: Times
    over: str
    limit: float | None
    replayed: Times = field(default_factory=dict)
    note: str = ""
    failed: str = ""
    power: int | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over the other's; None if one of them is missing."""
        return _ratio(self.times, self.over)

    @property
    def replayed_ratio(self) -> float | None:
        return _ratio(self.replayed, self.over)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "MISSED"
        if self.limit is None or self.ratio is None:
            return ""
        return "ok" if self.ratio <= self.limit else "MISSED"


def _ratio(times: Times, over: str) -> float | None:
    others = [ms for name, ms in times.items() if name != "ours"]
    other = (min(others) if others else None) if over == "best" else times.get(over)
    return None if other is None or "ours" not in times else times["ours"] / other


def table(rows: Iterable[Row]) -> str:
    """The ratios as Markdown that fits a terminal."""
    lines = ["| work | ms | over | ratio | replayed | limit | |", "| --- " * 7 + "|"]
    for row in rows:
        ms = f"{row.times['ours']:.4g}" if "ours" in row.times else ""
        figures = [_figure(f) for f in (row.ratio, row.replayed_ratio, row.limit)]
        lines.append(f"| {' | '.join((row.work, ms, row.over, *figures, row.verdict))} |")
    return "\n".join(lines)


def _figure(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def times_table(rows: list[Row]) -> str:
    """Every contender's milliseconds as Markdown; a piece of work once, whatever it is over."""
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    lines = [f"| ms | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for row in {row.work: row for row in rows}.values():
        cells = (f"{row.times[name]:.4g}" if name in row.times else "" for name in names)
        lines.append(f"| {' | '.join((row.work, *cells))} |")
    return "\n".join(lines)


def remarks(rows: Iterable[Row]) -> list[str]:
    """What is to be said about rows, as sentences."""
    said: dict[str, dict[str, None]] = {}  # once, and of which work
    for row in rows:
        words = "; ".join(filter(None, (f"failed: {row.failed}" if row.failed else "", row.note)))
        if words:
            said.setdefault(words, {})[row.work] = None
    return [f"{', '.join(works)}: {words}" for words, works in said.items()]


def slope_of(rows: Iterable[Row], start: int = 25) -> float | None:
    """d log(time) / d log(elements) of our times from 2^start on."""
    points = [(r.power, r.times["ours"]) for r in rows if r.power is not None and not r.failed]
    points = [p for p in points if p[0] >= start]
    if len(points) < 2:
        return None
    (a, t), (b, u) = points[0], points[-1]
    return (math.log2(u) - math.log2(t)) / (b - a)
