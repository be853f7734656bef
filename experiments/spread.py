"""Means with their spread, and differences of runs that share a seed, for pages of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

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
        if self.pairs == 1:
            return f"{self.mean:+.2f} (1 seed)"
        return f"{self.mean:+.2f} [{self.mean - self.half:+.2f}, {self.mean + self.half:+.2f}]"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean +- standard deviation, or what there is."""
    if not values:
        return "not run"
    if len(values) == 1:
        return f"{values[0]:.{digits}f} (1 seed)"
    return f"{mean(values):.{digits}f} +- {stdev(values):.{digits}f}"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Ours minus theirs, seed by seed, over the seeds that both have."""
    found = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    n = len(found)
    if n > max(_T):
        raise ValueError(f"paired: up to {max(_T)} seeds; got {n}.")
    half = _T[n] * stdev(found) / math.sqrt(n) if n > 1 else math.inf
    return Difference(mean(found) if found else math.nan, half, n)
