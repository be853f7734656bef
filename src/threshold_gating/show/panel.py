"""Curves of one function and its gates over the values that it gets, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.show.seen import Seen

_POINTS, _EACH = 97, 8  # of a curve, and how many more lie around each for its error


@dataclass(frozen=True)
class Line:
    """One choice of gates: its values at the panel's x, and its error in the same places.

    `error` is the largest in the neighbourhood of each x, in float64; `worst` is the largest that
    `verify` found at the site, in the network's own type, None where nothing was compared.
    """

    label: str
    K: int
    exact: bool
    y: tuple[float, ...]
    error: tuple[float, ...]
    worst: float | None


@dataclass(frozen=True)
class Panel:
    """A function at a site, its gates, and how many of its inputs fall into equal bins of x, which
    `words` says more of.

    `part` says which function it is where a site has several. `original` is empty where there is
    no function beside the gates.
    """

    network: str
    site: str
    part: str
    kind: str
    x: tuple[float, ...]
    original: tuple[float, ...]
    lines: tuple[Line, ...]
    counts: tuple[float, ...]
    words: str


def line(seen: Seen, t: TG, label: str, exact: bool, worst: float | None) -> Line:
    """The curve of `t` beside the function of a site."""
    at = seen.values.histogram
    x = torch.linspace(at.low, at.high, _POINTS, dtype=torch.float64)
    error: tuple[float, ...] = ()
    if seen.f is not None:
        around = torch.linspace(at.low, at.high, _POINTS * _EACH, dtype=torch.float64)
        apart = (t(around) - _evaluated(seen, around)).abs()
        error = _floats(apart.view(_POINTS, _EACH).amax(1))
    return Line(label, t.K, exact, _floats(t(x)), error, worst)


def panel(network: str, seen: Seen, lines: Sequence[Line]) -> Panel:
    """The function of a site, the curves of its gates, and what it sees."""
    at = seen.values.histogram
    x = torch.linspace(at.low, at.high, _POINTS, dtype=torch.float64)
    curve = () if seen.f is None else _floats(_evaluated(seen, x))
    what = network, seen.site, seen.note, seen.kind
    return Panel(*what, _floats(x), curve, tuple(lines), at.counts, seen.values.described())


@torch.no_grad()
def _evaluated(seen: Seen, x: Tensor) -> Tensor:
    assert seen.f is not None
    return seen.f(x.clone())  # it may work in place


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
