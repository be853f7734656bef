"""A gate as a count of thresholds: where it reaches each of its levels.

Of L levels these are theta + logit((j - 1/2) / L) / tau for one threshold, and theta itself for a
hard one. Single gates of K > 2 branches do not rise all the way, but their sums
G_j = g_j + ... + g_{K-1} do; their thresholds are found by inversion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from threshold_gating.export.graph import ExportError
from threshold_gating.instance import TG
from threshold_gating.primitive import gates as gates_at


def thresholds(t: TG, bits: int = 8) -> list[Tensor]:
    """The thresholds of each G_j, j = 1 ... K - 1, as float32: one if hard, else 2^bits - 1.

    >>> thresholds(TG(1, 0, (0, 1), (0, 0)), bits=2)
    [tensor([-1.6094,  0.0000,  1.6094])]
    """
    if t.hard:
        assert t.owner is not None
        return [_reached(theta, owner) for theta, owner in zip(t.theta, t.owner, strict=True)]
    count = 2**bits - 1
    at = (torch.arange(1, count + 1, dtype=torch.float64) - 0.5) / count
    if t.K == 2:
        tau = t.tau[0] if isinstance(t.tau, tuple) else t.tau
        return [(t.theta[0] + torch.logit(at) / tau).float()]
    return [_inverted(t, j, at).float() for j in range(1, t.K)]


def _reached(theta: float, owner: str) -> Tensor:
    """A hard threshold as one that x has to reach: the next number, if x == theta lies below."""
    at = torch.tensor([theta], dtype=torch.float32)
    return at if owner == "hi" else torch.nextafter(at, torch.tensor(math.inf))


def _inverted(t: TG, j: int, at: Tensor) -> Tensor:
    """Where G_j has the values `at`, by bisection in float64."""
    taus: Sequence[float] = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    room = 60 / min(taus)

    def total(x: Tensor) -> Tensor:
        return gates_at(x, t.tau, t.theta, form=t.form)[j:].sum(0)

    low = torch.full_like(at, min(t.theta) - room)
    high = torch.full_like(at, max(t.theta) + room)
    line = torch.linspace(float(low[0]), float(high[0]), 8193, dtype=torch.float64)
    if (total(line).diff() < -1e-9).any():
        raise ExportError(
            f"export: the gates above threshold {j} of {t} do not rise together, so no thresholds "
            "stand for them; use form='softmax', of which they do."
        )
    for _ in range(80):
        middle = (low + high) / 2
        below = total(middle) < at
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
