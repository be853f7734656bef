"""`record`: gates written down while they train; `history` reads what was written.

Recording is `training.GateWatch`, without figures: the file is drawn afterwards.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from torch import nn

from threshold_gating.conversion.text import WIDTH, columns, some
from threshold_gating.training.callbacks import GateWatch, WatchConfig
from threshold_gating.training.health import Rule
from threshold_gating.training.telemetry import JsonLines, log_gates

FILE = "gates.jsonl"
EVERY = 500  # at which a small network is slowed by less than 1 %; see docs/insight.md


def record(
    model: nn.Module,
    optimizer: Any,
    out: str | Path,
    *,
    every: int = EVERY,
    rule: Rule | None = None,
    start: int = 0,
) -> GateWatch:
    """Record the gates of `model` while `optimizer` trains it, until it is closed.

        with tg.insight.record(model, optimizer, "runs/a"):
            ...  # the loop as it is

    The state at the start and every `every` steps go to gates.jsonl in `out`: spread and histogram
    of tau, theta, s and c of each learned site, the share of its values in flat parts, and how many
    of its channels are stuck. Families are written at the end. Channels that die are warned of.

    Args:
        model, optimizer: as `tg.training.GateWatch` takes them.
        out: a folder, made where it is not there; it holds one run.
        every: one step in so many is looked at.
        rule: when a channel counts as dead or saturated.
        start: steps that were made before, of a run that resumes: then the file is continued.
    """
    if start < 0:
        raise ValueError(f"record: start is the steps made before, 0 or more; got {start}.")
    config = WatchConfig(every=every, out=out, figures=0, rule=rule or Rule())
    path = Path(out) / FILE
    if start == 0 and path.exists() and path.stat().st_size:
        raise ValueError(
            f"record: {path} holds a run already; give another folder, or start= the steps made "
            "before if this run resumes it."
        )
    watch = GateWatch(model, optimizer, config, start=start)
    if start == 0 and watch.writes:
        writer = JsonLines(path)
        log_gates(watch.model, writer, 0)
        writer.close()
    return watch


@dataclass(frozen=True)
class History:
    """A recorded run: what was written at each step, by name.

    `scalars["1/tau/mean"][500]` is a number, `histograms["1/tau"][500]` has "low", "high", "counts"
    and "not_finite"; `texts` are warnings and the families at the end. `steps` have histograms,
    `damaged` are the numbers of lines that could not be read.
    """

    path: str
    steps: tuple[int, ...]
    scalars: Mapping[str, Mapping[int, float]]
    histograms: Mapping[str, Mapping[int, Mapping[str, Any]]]
    texts: tuple[tuple[int, str], ...]
    damaged: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """What moved furthest from the first step to the last, and how much is flat and stuck."""
        first, last = self.steps[0], self.steps[-1]
        header = ("what", "first", "last", "flat", "stuck")
        moved = sorted(self.histograms, key=lambda name: -self._moved(name))
        rows = []
        for name in moved:
            site = name.rpartition("/")[0]
            flat, stuck = (self.scalars.get(f"{site}/{w}", {}) for w in ("flat", "stuck"))
            ends = [_ends(self.histograms[name].get(step)) for step in (first, last)]
            shown = (
                f"{flat[max(flat)]:.2f}" if flat else "",
                f"{stuck[max(stuck)]:.0f}" if stuck else "",
            )
            rows.append((name, *ends, *shown))
        legend = (
            f"{len(self.steps)} records, from step {first} to {last}; what moved furthest first. "
            "first, last: least to largest of all channels. flat, stuck: of the site, last."
        )
        said = [f"step {step}: {text}" for step, text in self.texts]
        return "\n".join([*columns([header, *rows]), "", fill(legend, WIDTH), *said])

    def _moved(self, name: str) -> float:
        """How far the ends of a histogram have moved, of tau their logarithm."""
        first, last = (
            self.histograms[name].get(step) or {} for step in (self.steps[0], self.steps[-1])
        )
        pairs = [(first.get(end), last.get(end)) for end in ("low", "high")]
        known = [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]
        if "/tau" in name:  # one that is 0 by rounding has moved furthest
            known = [(math.log(a), math.log(b)) for a, b in known if min(a, b) > 0]
        return max((abs(b - a) for a, b in known), default=math.inf)


def _ends(histogram: Mapping[str, Any] | None) -> str:
    if histogram is None or histogram["low"] is None:
        return "none is finite" if histogram else ""
    low, high = histogram["low"], histogram["high"]
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def history(path: str | Path) -> History:
    """What `record` wrote: of its folder, or of the file gates.jsonl.

    A line that is damaged, as the last one of a run that was killed may be, is left out and warned
    of by its number; the others are read. Where the steps go back, as in a run that resumes from an
    earlier checkpoint, what was written of later steps before is left out, and warned of.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"history: {path} cannot be read ({error.strerror}); give the folder that record wrote."
        ) from error
    rows: dict[int, dict[str, Any]] = {}
    damaged = []
    undone: set[int] = set()
    for number, line in enumerate(lines, start=1):
        try:
            undone |= _merge(rows, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged.append(number)
    steps = sorted(step for step, row in rows.items() if "histograms" in row)
    if not steps:
        raise ValueError(
            f"history: no line of {path} ({len(lines)} lines) is a record of gates; give the file "
            "that record or GateWatch wrote."
        )
    if damaged:
        numbers = some([str(n) for n in damaged], 8)
        warnings.warn(
            f"{path}: line {numbers} of {len(lines)} is damaged and left out; {len(steps)} steps "
            "are read.",
            stacklevel=2,
        )
    if undone:
        warnings.warn(
            f"{path}: the steps go back: what was written before of steps {min(undone)} to "
            f"{max(undone)} is left out, and the run that was written last is read.",
            stacklevel=2,
        )
    texts = [(step, text) for step in sorted(rows) for text in rows[step].get("texts", {}).values()]
    return History(
        str(path),
        tuple(steps),
        _by_name(rows, "scalars"),
        _by_name(rows, "histograms"),
        tuple(texts),
        tuple(damaged),
    )


def _merge(rows: dict[int, dict[str, Any]], row: Any) -> set[int]:
    """Add what one line says of a step; a step may have several. Those that it undoes are told."""
    step = row["step"]
    if not isinstance(step, int):
        raise TypeError(f"a step is a whole number, not {step!r}.")
    parts = {part: dict(row[part]) for part in ("scalars", "histograms", "texts") if part in row}
    for name, value in parts.get("scalars", {}).items():
        parts["scalars"][name] = float(value)  # or the line is damaged, as below
    for histogram in parts.get("histograms", {}).values():
        _known(histogram["low"], histogram["high"], *histogram["counts"])
    goes_back = bool(parts and rows) and step < max(rows)
    undone = {old for old in rows if goes_back and old >= step}
    for old in undone:
        del rows[old]
    for part, values in parts.items():
        rows.setdefault(step, {}).setdefault(part, {}).update(values)
    return undone


def _known(*numbers: Any) -> list[float]:
    """The numbers that are there, of which a histogram of NaN alone has no ends."""
    return [float(n) for n in numbers if n is not None]


def _by_name(rows: Mapping[int, Mapping[str, Any]], part: str) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for step in sorted(rows):
        for name, value in rows[step].get(part, {}).items():
            found.setdefault(name.removeprefix("gates/"), {})[step] = value
    return found
