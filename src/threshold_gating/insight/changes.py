"""`compare`: what changed between two states of one network, the gates that changed most first."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating.conversion.text import WIDTH, columns, jsonable, some
from threshold_gating.insight.nearest import points
from threshold_gating.insight.reading import read
from threshold_gating.insight.records import Reading, SiteReading

_SHOWN = 20


class Change(NamedTuple):
    """How far a gate has moved.

    `distance` is that of the group whose function changed most, `channel`: the RMS of the
    difference over the RMS of what it was, at the inputs that `Changes` names; `mean` is that of
    all groups. `moved` has the largest change of log tau, theta, s and c over the groups, `nearest`
    the name that was and is nearest to that group, `family` and `state` how many groups and
    channels went from which word to which.
    """

    site: str
    distance: float
    channel: int
    mean: float
    moved: dict[str, float]
    nearest: tuple[str, str]
    family: dict[str, int]
    state: dict[str, int]


@dataclass(frozen=True)
class Changes:
    """What differs between two readings of one network, the largest change first.

    `heads` has the largest change of log tau of each learned attention. `inputs` says at which
    points the functions are compared, `notes` what the readings say of what they lack.
    """

    sites: tuple[Change, ...]
    heads: dict[str, float]
    inputs: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The changes as text; sites beyond the first 20 are counted."""
        moved = [s for s in self.sites if s.distance != 0 or any(s.moved.values()) or s.state]
        header = ("site", "distance", "channel", "mean", "moved", "nearest", "went")
        parts = []
        if moved:
            parts += columns([header, *map(_cells, moved[:_SHOWN])])
            if more := len(moved) - _SHOWN:
                parts += [f"and {more} more"] if more > 0 else []
        parts += [f"{name}: log tau of a head moved by {d:.3g}" for name, d in self.heads.items()]
        same = len(self.sites) - len(moved)
        legend = (
            f"{same} of {len(self.sites)} sites that were read are the same. distance: RMS of the "
            "difference of the two functions over the RMS of the first, of the channel that "
            f"changed most, {self.inputs}; mean: of all channels. moved: the largest change of "
            "each number, of tau its logarithm."
        )
        said = [line for text in (legend, *self.notes) for line in ("", fill(text, WIDTH))]
        return "\n".join([*parts, *said] if parts else said[1:])

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        sites = [site._asdict() for site in self.sites]
        return dict(jsonable({**vars(self), "sites": sites, "notes": list(self.notes)}))

    def to_json(self) -> str:
        """The same as a text."""
        return json.dumps(self.to_dict(), allow_nan=False)


def compare(
    before: Reading | nn.Module | str | Path, after: Reading | nn.Module | str | Path
) -> Changes:
    """What changed most between two states of one network.

    Args:
        before, after: readings, networks, or folders that `tg.conversion.save` wrote. The functions
            are compared at what each site was given in the reading `before`, at N(0, 1) where
            nothing ran.
    """
    one, two = (r if isinstance(r, Reading) else read(r) for r in (before, after))
    _check_alike(one, two)
    others = {site.name: site for site in two.sites}
    found = [_change(site, others[site.name]) for site in one.sites]
    found.sort(key=lambda c: -math.inf if math.isnan(c.distance) else -c.distance)
    now = {a.name: a for a in two.heads}
    heads = {
        a.name: float((now[a.name].tau / a.tau).log().abs().max())
        for a in one.heads
        if a.learned or now[a.name].learned
    }
    where = f"on the first's inputs ({one.inputs})" if one.inputs else "at x from N(0, 1)"
    return Changes(tuple(found), heads, where, tuple(_notes(one, two)))


def _notes(one: Reading, two: Reading) -> Iterator[str]:
    """The notes of both readings, and which of them has those that the other has not."""
    yield from (note for note in one.notes if note in two.notes)
    for which, own, other in (("first", one, two), ("second", two, one)):
        yield from (f"In the {which}: {note}" for note in own.notes if note not in other.notes)


def _check_alike(one: Reading, two: Reading) -> None:
    """Whether both are states of one network; the error says what is not the same."""
    names = [[s.name for s in r.sites] + [a.name for a in r.heads] for r in (one, two)]
    apart = [[n for n in names[k] if n not in names[1 - k]] for k in (0, 1)]
    if any(apart):
        said = [
            f"only the {w} has {some(a)}"
            for w, a in zip(("first", "second"), apart, strict=True)
            if a
        ]
        raise ValueError(
            f"compare: {one.model} and {two.model} do not have the same sites: {'; '.join(said)}. "
            "Give two states of one network, both read with inputs or both without."
        )
    for a in one.sites:
        b = two[a.name]
        if (a.K, a.groups) != (b.K, b.groups):
            raise ValueError(
                f"compare: {a.name} has {a.groups} gates of K = {a.K} in the first and {b.groups} "
                f"of K = {b.K} in the second; give two states of one network."
            )
    others = {a.name: a.heads for a in two.heads}
    for name, heads, other in ((a.name, a.heads, others[a.name]) for a in one.heads):
        if heads != other and 1 not in (heads, other):  # one may stand for all of them
            raise ValueError(
                f"compare: {name} has {heads} heads in the first and {other} in the second; give "
                "two states of one network."
            )


def _change(a: SiteReading, b: SiteReading) -> Change:
    x = points(None if a.values is None else a.values.sample)
    was, now = a.at(x), b.at(x)
    size = was.square().mean(1)
    off = (now - was).square().mean(1)
    apart = torch.where(off == 0, 0.0, (off / size).sqrt())  # of a function that is 0: inf
    worst = int(apart.nan_to_num(math.inf).argmax())
    return Change(
        a.name,
        float(apart[worst]),
        worst,
        float(apart.nanmean()),
        {what: _moved(a, b, what) for what in ("log tau", "theta", "s", "c")},
        (str(a.nearest[worst]), str(b.nearest[worst])),
        _went(a.family, b.family),
        _went(a.values.state, b.values.state) if a.values and b.values else {},
    )


def _moved(a: SiteReading, b: SiteReading, what: str) -> float:
    if what == "log tau":
        return 0.0 if a.start.hard and b.start.hard else _largest(a.tau.log(), b.tau.log())
    return _largest(getattr(a, what), getattr(b, what))


def _largest(a: Tensor, b: Tensor) -> float:
    return float((b - a).abs().max()) if a.numel() else 0.0


def _went(a: Iterable[str], b: Iterable[str]) -> dict[str, int]:
    pairs = zip(a, b, strict=False)
    return dict(Counter(f"{was} to {now}" for was, now in pairs if was != now))


def _cells(change: Change) -> tuple[str, ...]:
    was, now = change.nearest
    moved = " ".join(f"{k.removeprefix('log ')} {v:.2g}" for k, v in change.moved.items() if v)
    went = ", ".join(f"{n} {word}" for word, n in {**change.family, **change.state}.items())
    name = was if was == now else f"{was} to {now}"
    figures = f"{change.distance:.2g}", str(change.channel), f"{change.mean:.2g}"
    return change.site, *figures, moved, name, went
