"""What was measured: rows, and the tables they make."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

Times = dict[str, float]  # a figure of each contender, mostly milliseconds
UNMEASURED = "not measured"  # the verdict on a limit whose ratio is missing


@dataclass
class Row:
    """One piece of work: a figure of each contender, and the ratio that has a limit.

    Args:
        times: of the call as a user makes it; the ratio and the verdict come from them.
        over: the contender that `ours` is divided by, "a|b" the faster of two, "best" the fastest
            other one; "" for a figure that has a limit itself.
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
    unit: str = "ms"
    ours: str = "ours"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.work, self.over

    @property
    def ratio(self) -> float | None:
        """Our figure over the other's; None if one of them is missing, or nothing to divide by."""
        return self._ratio(self.times)

    @property
    def replayed_ratio(self) -> float | None:
        return self._ratio(self.replayed)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "MISSED"
        if self.limit is None:
            return ""
        if self.ratio is None:
            return UNMEASURED
        return "ok" if self.ratio <= self.limit else "MISSED"

    def _ratio(self, times: Times) -> float | None:
        if not self.over:
            return times.get(self.ours)
        best = self.over == "best"
        names = [n for n in times if n != self.ours] if best else self.over.split("|")
        others = [times.get(name, 0.0) for name in names]
        # "the faster of two" needs both
        usable = bool(others) and all(0 < other < math.inf for other in others)
        return times[self.ours] / min(others) if usable and self.ours in times else None


def row_of(found: dict[str, Any]) -> Row:
    """A row as it was written to JSON."""
    known = {field.name for field in fields(Row)}
    needed = {f.name for f in fields(Row) if f.default is f.default_factory is MISSING}
    if unknown := sorted(set(found) - known):
        raise ValueError(f"a row has {', '.join(unknown)}, which this version does not know")
    if missing := sorted(needed - set(found)):
        raise ValueError(f"a row has no {', '.join(missing)}")
    # JSON has no inf and nan, so they are written as texts
    figures = {name: _numbers(found.get(name, {})) for name in ("times", "replayed")}
    return Row(**found | figures)


def _numbers(times: dict[str, Any]) -> Times:
    return {name: float(figure) for name, figure in times.items()}


def table(rows: Iterable[Row]) -> str:
    """The ratios as Markdown that fits a terminal."""
    lines = ["| work | ms | over | ratio | replayed | limit | |", "| --- " * 7 + "|"]
    for row in rows:
        ms = _figure(row.times, row.ours, row.unit)
        figures = [_short(f) for f in (row.ratio, row.replayed_ratio, row.limit)]
        over = row.over.replace("|", " or ")
        lines.append(f"| {' | '.join((row.work, ms, over, *figures, row.verdict))} |")
    return "\n".join(lines)


def _figure(times: Times, name: str, unit: str = "ms") -> str:
    if name not in times:
        return ""
    return f"{times[name]:.4g}" + (f" {unit}" if unit != "ms" else "")


def _short(ratio: float | None) -> str:
    return (
        "" if ratio is None else f"{ratio:.3f}" if ratio == 0 or ratio >= 0.01 else f"{ratio:.1e}"
    )


def times_table(rows: list[Row]) -> str:
    """Every contender's milliseconds as Markdown; a piece of work once, whatever it is over."""
    rows = [row for row in rows if row.unit == "ms"]
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    lines = [f"| ms | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for work, row in {row.work.removesuffix(f" {row.ours}"): row for row in rows}.items():
        cells = (_figure(row.times, name) for name in names)
        lines.append(f"| {' | '.join((work, *cells))} |")
    return "\n".join(lines) if rows else ""


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
    points = [(r.power, r.times.get("ours", 0.0)) for r in rows if r.power is not None]
    points = [p for p in points if p[0] >= start and 0 < p[1] < math.inf]
    if len(points) < 2:
        return None
    (a, t), (b, u) = points[0], points[-1]
    return (math.log2(u) - math.log2(t)) / (b - a)
