"""The values that one function of a network gets, counted, with an even sample for a histogram."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.conversion.sampling import Reservoir

KEPT = 20_000  # values of a function: a bin of its histogram is off by a few in a thousand
_BINS = 48
_ENDS = (0.0005, 0.9995)  # quantiles: what lies beyond is counted, and not drawn
_FAR = 1e300  # beyond it the width of a picture would be infinite


class Histogram(NamedTuple):
    """How many of the values kept lie in equal bins from `low` to `high`, and how many outside."""

    low: float
    high: float
    counts: tuple[int, ...]
    below: int
    above: int

    @property
    def kept(self) -> int:
        return sum(self.counts) + self.below + self.above


class Values:
    """The values that came: how many, how many of them no numbers, and an even sample of the rest.

    `apart` counts the keys of attention that no gate decides on: masked ones, one that is alone in
    its row, and those that lie so far off that their weight is 0 or 1 in any type.
    """

    def __init__(self, size: int = KEPT, seed: int = 0) -> None:
        self.seen = self.nan = self.infinite = self.apart = 0
        self.low, self.high = math.inf, -math.inf
        self.kept = Reservoir(size, seed)

    def add(self, x: Tensor, apart: int = 0) -> None:
        """Take note of these, and of so many that are apart."""
        x = x.detach().flatten()
        self.seen, self.apart = self.seen + x.numel() + apart, self.apart + apart
        if not (finite := x.isfinite()).all():
            nan = int(x.isnan().sum())
            self.nan, self.infinite = self.nan + nan, self.infinite + int((~finite).sum()) - nan
            x = x[finite]
        if x.numel():
            low, high = (end.item() for end in x.aminmax())
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.kept.add(x)

    @cached_property
    def histogram(self) -> Histogram:
        """Over nearly all values, and at least from -4 to 4, where most functions bend; to be asked
        for when all have come."""
        kept = self.kept.sample().double()
        low, high = -4.0, 4.0
        if len(kept):
            ends = kept.quantile(torch.tensor(_ENDS, dtype=torch.float64)).tolist()
            low, high = max(min(low, ends[0]), -_FAR), min(max(high, ends[1]), _FAR)
        counts = torch.histc(kept, _BINS, low, high).long().tolist()
        outside = int((kept < low).sum()), int((kept > high).sum())
        return Histogram(low, high, tuple(counts), *outside)

    def described(self) -> str:
        """What came in words, and how many of it the histogram holds."""
        at = self.histogram
        if not self.seen:
            return "No value reached it on these inputs"
        all_kept = at.kept == self.seen
        said = [f"All {self.seen:,} values" if all_kept else f"{self.seen:,} values came"]
        said += [f"{self.nan:,} NaN"] * bool(self.nan)
        said += [f"{self.infinite:,} infinite"] * bool(self.infinite)
        said += [f"{self.apart:,} keys masked or alone in their row"] * bool(self.apart)
        if not all_kept:
            drawn = at.kept < self.seen - self.nan - self.infinite - self.apart
            said.append(f"the histogram holds {at.kept:,}{', drawn evenly' if drawn else ''}")
        said += [f"from {self.low:.3g} to {self.high:.3g}"] * bool(at.kept)
        said += [f"{at.below + at.above:,} beyond the picture"] * bool(at.below + at.above)
        return ", ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        some = self.histogram.kept > 0
        return {
            **{name: getattr(self, name) for name in ("seen", "nan", "infinite", "apart")},
            "min": self.low if some else None,
            "max": self.high if some else None,
            "kept": self.histogram.kept,
            "histogram": self.histogram._asdict(),
        }
