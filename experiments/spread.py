"""Means with their spread, differences of runs that share a seed, and what they make of a claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Literal, NamedTuple

Word = Literal["reproduced", "partly", "not", "no data here", "not run"]
SEEDS = 3  # of every network in the plans
MARGIN = 0.5  # points of accuracy: what "as good" and "marginal" may hide

# 97.5 % points of Student's t with n - 1 degrees of freedom, for n runs.
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


class Difference(NamedTuple):
    """The mean of paired differences, and half of its 95 % interval (Student's t)."""

    mean: float
    half: float  # infinite for one pair
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 0:
            return "not run"
        ends = f" [{self.mean - self.half:+.2f}, {self.mean + self.half:+.2f}]"
        return f"{self.mean:+.2f}{ends if self.pairs > 1 else ''}{few(self.pairs)}"


def few(count: int) -> str:
    """What stands behind a figure of fewer seeds than every experiment plans."""
    return "" if count >= SEEDS else f" ({count} seed{'s' if count > 1 else ''})"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean +- standard deviation, or what there is; of how many, where seeds are missing."""
    if not values:
        return "not run"
    off = f" +- {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{off}{few(len(values))}"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Ours minus theirs, seed by seed, over the seeds that both have."""
    found = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    n = len(found)
    if n > max(_T):
        raise ValueError(f"paired: up to {max(_T)} seeds; got {n}.")
    half = _T[n] * stdev(found) / math.sqrt(n) if n > 1 else math.inf
    return Difference(mean(found) if found else math.nan, half, n)


def judged_match(gain: Difference) -> Word:
    """What a claim of "as good" comes to: so on average and surely no more than the margin worse,
    within the interval, or neither."""
    if not gain.pairs:
        return "not run"
    if gain.mean >= 0 and gain.mean - gain.half > -MARGIN:
        return "reproduced"
    return "partly" if gain.mean + gain.half > 0 else "not"


def judged_small(gain: Difference) -> Word:
    """What a claim of "marginal" comes to: surely, or on average, within the margin."""
    if not gain.pairs:
        return "not run"
    if abs(gain.mean) + gain.half < MARGIN:
        return "reproduced"
    return "partly" if abs(gain.mean) < MARGIN else "not"


def judged_gain(gain: Difference) -> Word:
    """What a claim of "more" comes to: beyond the interval, or only on average."""
    if not gain.pairs:
        return "not run"
    return "reproduced" if gain.mean - gain.half > 0 else "partly" if gain.mean > 0 else "not"


def judged_factor(values: Sequence[float | None], paper: float) -> Word:
    """What a claim of "so many times faster" comes to; None is a run that never arrives.

    Every run has to arrive, and sooner. Reproduced within a tenth of the paper's factor, partly
    with half of its gain: less is what one evaluation more or less makes of a ratio.
    """
    if not values:
        return "not run"
    known = [value for value in values if value is not None]
    if len(known) < len(values) or min(known) <= 1:
        return "not"
    found = mean(known)
    return "reproduced" if found >= 0.9 * paper else "partly" if found >= (1 + paper) / 2 else "not"
