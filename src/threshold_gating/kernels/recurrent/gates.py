"""The gates of a step as one tensor, which kernels read, and back: (sites, 6, H).

Six numbers for each unit of a site: tau, theta, the two constants, the two slopes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.kernels.runtime import capturing
from threshold_gating.kernels.structure import Structure
from threshold_gating.primitive import Value, are_huge

NUMBERS = 6


class Site(NamedTuple):
    """A gate of two branches: where it starts, and its numbers, tensors [H] where they learn."""

    start: TG
    tau: Value
    theta: Value
    s: tuple[Value, ...]
    c: tuple[Value, ...]


class Form(NamedTuple):
    """What a kernel knows of the gates: which are about their midpoint, whether branches slope."""

    middle: int  # a bit for each site
    sloped: bool


def form(sites: Sequence[Site]) -> Form:
    middle = sum(2**k for k, t in enumerate(sites) if Structure.is_centred(t.start))
    slopes = [w for t in sites for w in t.s]
    return Form(middle, any(isinstance(w, Tensor) or w != 0 for w in slopes))


def is_soft(t: TG) -> bool:
    """Whether kernels take it: two soft affine branches that do not overflow on the way."""
    if t.K != 2 or t.hard or t.form != "softmax" or t.q is not None or t.clamp is not None:
        return False
    return t.anchor is None and not are_huge(t.s, t.c) and all(map(math.isfinite, (*t.s, *t.c)))


def packed(sites: Sequence[Site], units: int, device: torch.device) -> Tensor:
    """(sites, 6, H), float32."""
    # A graph fills what it reads when it runs: until then a cached row would be empty.
    row = _row.__wrapped__ if capturing() else _row
    rows = [
        w.float() if isinstance(w, Tensor) else row(w, units, device)
        for t in sites
        for w in (t.tau, t.theta, *t.c, *t.s)
    ]
    return torch.stack([row.expand(units) for row in rows]).view(len(sites), NUMBERS, units)


def unpacked(gates: Tensor, sites: Sequence[Site]) -> list[Site]:
    each = zip(sites, (own.unbind(0) for own in gates.unbind(0)), strict=True)
    return [
        Site(t.start, tau, theta, (s0, s1), (c0, c1)) for t, (tau, theta, c0, c1, s0, s1) in each
    ]


@functools.lru_cache(256)
def _row(number: float, units: int, device: torch.device) -> Tensor:
    """A number for all units, put on the device once."""
    with torch.inference_mode(False):
        return torch.full((units,), number, device=device)
