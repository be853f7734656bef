"""The named activation that a gate is nearest to, and how near: always with its inputs and norm.

The distance is the RMS of the difference over the RMS of the gate's own output, at 1,024 quantiles
of what the site was given, or of N(0, 1) where nothing was. The names are the functions of
`taxonomy.ROWS`, each once.
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
_AT_ONCE = 4096  # groups whose curves are held together


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
    """1,024 quantiles, at the middle of equal shares: of `values`, or of N(0, 1) without any."""
    at = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    if values is None or not len(values):
        return math.sqrt(2) * torch.erfinv(2 * at - 1)
    ordered = values.double().sort().values
    return ordered[(at * len(ordered)).long()]


def nearest(site: LearnedSite, x: Tensor) -> tuple[Nearest, ...]:
    """The nearest name of each group of a gate at the points `x`, of which all count alike."""
    names, named = _values(x)
    sizes = named.square().mean(1)
    found: list[Nearest] = []
    for first in range(0, site.groups, _AT_ONCE):
        some = site.of(range(first, min(first + _AT_ONCE, site.groups)))
        y = some.blend(x.expand(some.groups, -1)).double()
        size = y.square().mean(1, keepdim=True)
        # |y - f|^2 by its parts, for groups times names differences would take much memory
        apart = (size - 2 / len(x) * (y @ named.T) + sizes).clamp_min(0).nan_to_num(math.inf)
        best = apart.argmin(1)
        exact = (y - named[best]).square().mean(1)  # where the parts cancel
        for k, total, off in zip(
            best.tolist(), size.flatten().tolist(), exact.tolist(), strict=True
        ):
            known = total > 0 and math.isfinite(total)
            found.append(Nearest(names[k], math.sqrt(off / total)) if known else NONE)
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
