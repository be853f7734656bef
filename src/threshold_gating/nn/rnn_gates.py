"""The gates of a step as one tensor, which kernels read, and back: (sites, 6, H).

Six numbers for each unit of a site: tau, theta, the two constants, the two slopes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.kernels import Structure
from threshold_gating.kernels.recurrent.lstm import Form
from threshold_gating.nn.unitwise import Learned
from threshold_gating.primitive import Value, are_huge

Sites = Mapping[str, TG | Learned]


def soft(gates: Mapping[str, Any]) -> Sites | None:
    """`gates`, if each is two soft branches, as kernels take them."""
    found = {site: t for site, t in gates.items() if isinstance(t, TG | Learned)}
    return found if len(found) == len(gates) and all(map(_is_plain, starts(found))) else None


def starts(sites: Sites) -> list[TG]:
    return [t.start if isinstance(t, Learned) else t for t in sites.values()]


def form(sites: Sites) -> Form:
    """What kernels know of these gates."""
    middle = sum(2**k for k, t in enumerate(starts(sites)) if Structure.is_centred(t))
    slopes = [w for t in sites.values() for w in t.s]
    return Form(middle, any(isinstance(w, Tensor) or w != 0 for w in slopes))


def _is_plain(t: TG) -> bool:
    """Two soft affine branches that do not overflow on the way."""
    if t.K != 2 or t.hard or t.form != "softmax" or t.q is not None or t.clamp is not None:
        return False
    return t.anchor is None and not are_huge(t.s, t.c) and all(map(math.isfinite, (*t.s, *t.c)))


def packed(sites: Sites, units: int, device: torch.device) -> Tensor:
    """(sites, 6, H), float32."""
    rows = [
        w.float() if isinstance(w, Tensor) else _row(w, units, device)
        for t in sites.values()
        for w in (_first(t.tau), _first(t.theta), *t.c, *t.s)
    ]
    return torch.stack([row.expand(units) for row in rows]).view(len(sites), 6, units)


def unpacked(gates: Tensor, sites: Sites) -> dict[str, Learned]:
    found = {}
    for site, start, own in zip(sites, starts(sites), gates.unbind(0), strict=True):
        tau, theta, c0, c1, s0, s1 = own.unbind(0)
        found[site] = Learned(start, tau, theta, (s0, s1), (c0, c1))
    return found


def _first(w: Value | tuple[float, ...]) -> Value:
    return w[0] if isinstance(w, tuple) else w


@functools.lru_cache(256)
def _row(number: float, units: int, device: torch.device) -> Tensor:
    """A number for all units, put on the device once."""
    with torch.inference_mode(False):
        return torch.full((units,), number, device=device)
