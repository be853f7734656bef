"""The named activation that a gate is nearest to, and how near: always with its inputs and norm.

The distance is the RMS of the difference over the RMS of the gate's own output, at 1,024 quantiles
of what the site was given, or of N(0, 1) where nothing was. Values far outside, that alone would
decide it, are drawn in. The names are the functions of `taxonomy.ROWS`, each once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.training.telemetry import LearnedSite

POINTS = 1024
_SAME = 1e-6  # relative RMS: a float32 parameter, as tau = 1.702, is off by 6e-8
_AT_ONCE = 512  # groups whose curves are held together
_REACH = 30.0  # times the spread of the inner 99 %: the cube of N(0, 1) ends at 24 times that


class Nearest(NamedTuple):
    """A name of the taxonomy and the relative RMS distance to it; no name for a gate whose output
    is 0 or not a number at every point."""

    name: str
    distance: float

    def __str__(self) -> str:
        if not self.name:
            return "none"
        return f"= {self.name}" if self.distance <= _SAME else f"{self.name} {self.distance:.2g}"


NONE = Nearest("", math.nan)


def points(values: Tensor | None) -> Tensor:
    """1,024 quantiles, at the middle of equal shares: of `values`, or of N(0, 1) without any.

    Two values of 1e10 among a thousand would be all that an RMS knows, and there SiLU is ReLU: what
    is further from the median than 30 times the RMS of the inner 99 % is taken to be just there.
    """
    at = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    if values is None or not len(values):
        return math.sqrt(2) * torch.erfinv(2 * at - 1)
    ordered = values.double().sort().values
    x = ordered[(at * len(ordered)).long()]
    middle, edge = x[POINTS // 2], POINTS // 200
    reach = _REACH * (x[edge:-edge] - middle).square().mean().sqrt()
    return x.clamp(middle - reach, middle + reach) if reach > 0 else x


def nearest(site: LearnedSite, x: Tensor) -> tuple[Nearest, ...]:
    """The nearest name of each group of a gate at the points `x`, of which all count alike."""
    names, named = _values(x)
    found: list[Nearest] = []
    for first in range(0, site.groups, _AT_ONCE):
        some = site.of(range(first, min(first + _AT_ONCE, site.groups)))
        y = some.blend(x.expand(some.groups, -1)).double()
        # one name after the other, for all differences take much memory; a product of y and f
        # would not, but |y|^2 - 2 y f + |f|^2 cancels just where they are near
        apart = torch.stack([(y - f).square().mean(1) for f in named]).nan_to_num(math.inf)
        best = apart.argmin(0)
        off = apart.gather(0, best.unsqueeze(0)).squeeze(0)
        sizes = y.square().mean(1)
        for k, far, size in zip(best.tolist(), off.tolist(), sizes.tolist(), strict=True):
            known = size > 0 and math.isfinite(size)
            found.append(Nearest(names[k], math.sqrt(far / size)) if known else NONE)
    return tuple(found)


def _values(x: Tensor) -> tuple[list[str], Tensor]:
    functions = _functions()
    return list(functions), torch.stack([f(x.clone()) for f in functions.values()])


@functools.cache
def _functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each function of the taxonomy under its first name."""
    x = torch.linspace(-20, 20, 2001, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    for key, row in taxonomy.ROWS.items():
        y = row.f(x.clone())
        if not any(torch.allclose(y, known, rtol=0, atol=1e-9) for known in seen.values()):
            seen[key] = y
    return {key: taxonomy.ROWS[key].f for key in seen}
