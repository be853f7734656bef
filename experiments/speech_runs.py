"""Runs of `fig3_speech`: which rate each contender takes, and how two of them compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import threshold_gating as tg
from experiments.record import Row
from experiments.speech_networks import ARMS

DRAWS = 10_000
Figures = dict[str, Any]


def having(rows: Sequence[Row], **case: Any) -> list[Row]:
    return [r for r in rows if all(r.case.get(n) == v for n, v in case.items())]


def chosen(
    rows: Sequence[Row], rates: Sequence[float], seed: int, **setting: Any
) -> dict[str, float]:
    """The rate with the lowest WER on validation of each contender that ran with all of them."""
    best = {}
    for arm in ARMS:
        found = {r.case["rate"]: r for r in having(rows, arm=arm, seed=seed, **setting)}
        if set(rates) <= set(found):
            best[arm] = min(rates, key=lambda rate: float(found[rate].figures["validation"]))
    return best


class Runs(NamedTuple):
    """The runs that count: of one length, at the rates that the sweep chose, not diverged."""

    epochs: int
    rates: dict[str, float]
    each: dict[tuple[str, int], dict[int, Figures]]  # by contender and width, then by seed

    def of(self, arm: str, hidden: int) -> dict[int, Figures]:
        return self.each.get((arm, hidden), {})

    def wer(self, arm: str, hidden: int) -> dict[int, float]:
        return {seed: float(f["wer"]) for seed, f in self.of(arm, hidden).items()}

    @property
    def widths(self) -> list[int]:
        return sorted({hidden for _, hidden in self.each})


class Interval(NamedTuple):
    """A difference in WER, in points, and its 95 % interval over drawn utterances."""

    mean: float
    low: float
    high: float
    seeds: int
    agree: bool  # whether every seed's own difference has the same sign

    def __str__(self) -> str:
        if self.seeds == 0:
            return "not run"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def bootstrap(ours: Mapping[int, Figures], theirs: Mapping[int, Figures]) -> Interval:
    """Ours minus theirs: utterances are drawn with replacement, each with all of its seeds."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return Interval(math.nan, math.nan, math.nan, 0, False)
    own, other = (torch.tensor([f[s]["errors"] for s in seeds]).double() for f in (ours, theirs))
    by_seed = (own - other).sum(1)
    gained = (own - other).mean(0)
    words = torch.tensor(ours[seeds[0]]["words"]).double()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(words), (DRAWS, len(words)), generator=generator)
    points = 100 * gained[drawn].sum(1) / words[drawn].sum(1)
    low, high = points.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    agree = bool((by_seed > 0).all() or (by_seed < 0).all())
    return Interval((100 * gained.sum() / words.sum()).item(), low, high, len(seeds), agree)


class Signs(NamedTuple):
    """How often ours is lower, of how many without ties, and the two-sided p of a fair coin."""

    wins: int
    count: int
    p: float

    def __str__(self) -> str:
        return f"{self.wins}/{self.count}, p = {self.p:.1g}" if self.count else "not run"


def signs(pairs: Sequence[tuple[float, float]]) -> Signs:
    wins, losses = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return Signs(wins, n, min(1.0, 2 * tail))


def checkpoints(runs: Runs, arm: str) -> list[tuple[float, float]]:
    """(ours, standard) of every evaluation at the same step, of all widths and seeds."""
    each = [(runs.of(arm, h), runs.of("standard", h)) for h in runs.widths]
    return [
        pair
        for own, them in each
        for seed in own.keys() & them.keys()
        for pair in zip(own[seed]["curve_test"], them[seed]["curve_test"], strict=False)
    ]


def ends(runs: Runs, arm: str, other: str = "standard") -> list[tuple[float, float]]:
    """(ours, other) at the end of each run."""
    each = [(runs.wer(arm, h), runs.wer(other, h)) for h in runs.widths]
    return [(own[s], them[s]) for own, them in each for s in sorted(own.keys() & them.keys())]


def reached(runs: Runs, arm: str, hidden: int) -> list[tg.training.Reached]:
    """When a run and its baseline reach the baseline's converged level, seed by seed (App. D)."""
    found = []
    for seed, own in sorted(runs.of(arm, hidden).items()):
        base = runs.of("standard", hidden).get(seed)
        if base is not None and min(len(base["curve_test"]), len(own["curve_test"])) >= 6:
            ours, theirs = (
                dict(zip(f["curve_step"], map(float, f["curve_test"]), strict=True))
                for f in (own, base)
            )
            found.append(tg.training.steps_to_baseline(theirs, ours, mode="min"))
    return found
