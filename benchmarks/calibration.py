"""How long `tg.calibrate` takes: 24 sites, 100,000 values of each, and what it gains.

The network is a stack of residual layers with GELU, as many as a large vision transformer has; the
inputs of each site are drawn to another mean and spread. Errors are on held-out values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import threshold_gating as tg
from benchmarks.timing import Contenders, Work

LIMIT = 60.0  # seconds for all sites


class Layer(nn.Module):
    """One residual layer whose activation sees N(mean, spread^2), roughly."""

    def __init__(self, width: int, mean: float, spread: float) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.normal_(self.up.weight, std=spread * width**-0.5)
        nn.init.constant_(self.up.bias, mean)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


def network(width: int = 64) -> nn.Module:
    """Means from -1 to 1 and spreads from 0.5 to 3, in every combination."""
    means, spreads = torch.linspace(-1, 1, 6).tolist(), (0.5, 1.0, 2.0, 3.0)
    return nn.Sequential(*(Layer(width, m, s) for s in spreads for m in means)).eval()


def calibration(values: int, branches: tuple[int | None, ...]) -> Iterator[Work]:
    """Seconds for all sites, then the mean RMS error over that of the default instances."""
    for K in branches:
        found = partial(_found, K, values)
        for unit, limits in (("s", {"": LIMIT}), ("mean RMS", {"default": 1.0})):
            name = f"24 sites, {values} values, {f'K={K}' if K else 'default K'}, {unit}"
            build = partial(_figures, found, unit)
            yield Work("calibration", name, build, limits, ("frozen module",), unit=unit)


def _figures(found: partial[tuple[float, float, float]], unit: str) -> Contenders:
    seconds, ours, default = found()
    if unit == "s":
        return {"ours": lambda: seconds}
    return {"ours": lambda: ours, "default": lambda: default}


@lru_cache(1)
def _found(K: int | None, values: int) -> tuple[float, float, float]:
    """Seconds, and the mean errors of what was found and of the defaults."""
    torch.manual_seed(0)
    model, batches = network(), [torch.randn(512, 64) for _ in range(4)]
    start = time.perf_counter()
    options: dict[str, Any] = {} if K is None else {"K": K}
    fits = tg.calibrate(model, batches, values=values, **options).fits.values()
    seconds = time.perf_counter() - start
    assert {fit.values for fit in fits} == {values}
    ours, default = ([getattr(fit, name) for fit in fits] for name in ("error", "default_error"))
    return seconds, sum(ours) / len(ours), sum(default) / len(default)
