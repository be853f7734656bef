"""Does tier W win at equal conversions? The digits on tiles of 128 and 512 rows, five seeds each.

    python -m experiments.tier_w_conversions

A layer of tier W has K rows for each input, so it takes more tiles, and conversions, once K inputs
are more than the rows of a tile. Beside it is a SiLU network as wide as converts no more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from torch import nn

import threshold_gating as tg
from experiments.digits_training import SEEDS, curve, plain

LAYERS = ((128, 16), (128, 64), (128, 256), (512, 256))  # rows of a tile, width of tier W
K, INPUTS, CLASSES = 2, 64, 10


def tier_w(width: int) -> nn.Module:
    """64 -> width -> width -> 10 with tier W behind the first layer."""
    return nn.Sequential(
        nn.Linear(INPUTS, width), tg.Linear(width, width), tg.Linear(width, CLASSES)
    )


def conversions(width: int, rows: int, branches: int = 1) -> int:
    """Of one image."""
    tiles = math.ceil(branches * width / rows)
    return width * math.ceil(INPUTS / rows) + (width + CLASSES) * tiles


def as_wide(width: int, rows: int) -> int:
    """The widest dense network that converts no more than tier W."""
    most = conversions(width, rows, K)
    return max(w for w in range(width, K * width + 1) if conversions(w, rows) <= most)


def accuracy(make: Callable[[], nn.Module]) -> str:
    """Mean of the last 6 epochs, over the seeds."""
    ends = [statistics.fmean(curve(make, seed)[-6:]) for seed in SEEDS]
    return f"{statistics.fmean(ends):.2f} +- {statistics.stdev(ends):.2f} %"


def main() -> None:
    print("rows  conversions  tier W                    SiLU, no more conversions")
    for rows, width in LAYERS:
        dense = as_wide(width, rows)
        ours, theirs = (
            accuracy(lambda w=width: tier_w(w)),
            accuracy(lambda w=dense: plain(nn.SiLU, w)),
        )
        most = f"{conversions(width, rows, K)} and {conversions(dense, rows)}"
        print(f"{rows:4}  {most:13} {width:4} wide {ours:16} {dense:4} wide {theirs}", flush=True)


if __name__ == "__main__":
    main()
