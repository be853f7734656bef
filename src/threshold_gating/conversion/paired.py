"""Paired comparison of two networks on the same samples: a metric's difference and interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Measure = Callable[[Any], Tensor]
_Z = 1.959963984540054  # the 97.5 % point of N(0, 1)


@dataclass(frozen=True)
class Metric:
    """Means of a metric for both networks over `n` samples, and the difference with its 95 %
    interval; `agreement` is the share of samples on which they are equal. `p` is McNemar's, for
    a metric that is true or false."""

    name: str
    baseline: float
    converted: float
    delta: float
    interval: tuple[float, float]
    agreement: float
    n: int
    p: float | None = None


def compare(metric: Measure | tuple[str, Measure], before: Any, after: Any) -> Metric:
    """`metric` of the outputs `before` and `after`: one truth value or number for each sample."""
    own = getattr(metric, "__name__", type(metric).__name__)
    name, measure = metric if isinstance(metric, tuple) else (own, metric)
    a, b = (torch.as_tensor(measure(output)).detach().cpu().flatten() for output in (before, after))
    if len(a) != len(b) or not len(a):
        raise ValueError(
            f"metric {name!r}: needs one value for each sample of either network; got {len(a)} "
            f"and {len(b)}."
        )
    same, n = (a == b).double().mean().item(), len(a)
    if a.dtype == torch.bool:
        interval, p = _of_counts(int((a & ~b).sum()), int((b & ~a).sum()), n)
    else:
        interval, p = _of_values(b.double() - a.double()), None
    means = a.double().mean().item(), b.double().mean().item()
    return Metric(name, *means, means[1] - means[0], interval, same, n, p)


def _of_counts(lost: int, won: int, n: int) -> tuple[tuple[float, float], float]:
    """For truth values, of which `lost` and `won` samples changed: McNemar's exact test, and Wald's
    interval after adding 1/2 to each of the four counts, which has a width also at lost = won = 0.
    """
    changed = lost + won
    ways = (
        math.lgamma(changed + 1) - math.lgamma(k + 1) - math.lgamma(changed - k + 1)
        for k in range(min(lost, won) + 1)
    )
    p = min(1.0, 2 * math.fsum(math.exp(w - changed * math.log(2)) for w in ways))
    lost_, won_, n_ = lost + 0.5, won + 0.5, n + 2
    centre = (won_ - lost_) / n_
    half = _Z * math.sqrt(lost_ + won_ - (won_ - lost_) ** 2 / n_) / n_
    return (max(-1.0, centre - half), min(1.0, centre + half)), p


def _of_values(d: Tensor) -> tuple[float, float]:
    """The normal interval of a mean; of one sample nothing is known."""
    if len(d) < 2:
        return (-math.inf, math.inf)
    half = _Z * d.std().item() / math.sqrt(len(d))
    return d.mean().item() - half, d.mean().item() + half
