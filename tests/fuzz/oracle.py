"""What a converted network must give where a site is only approximate: its gates, written out anew.

Nothing of the library is used here but the numbers of an instance. Gates are evaluated in float64
whatever the type of x, with the logits of Eq. 2 added up and shifted by their largest, and rounded
once at the end. `narrow` evaluates them in the type of x: what they round there is their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.fx
from torch import Tensor, nn

import threshold_gating as tg

torch.fx.wrap("gated")  # a traced network asks each time whether its gates are narrow
_narrow = False
_random = torch.Generator()  # of its own: a dropout must draw the same numbers as before


@contextmanager
def narrow() -> Iterator[None]:
    """Gates are evaluated in the type of their input, 16 bits in float32, and each
    argument and branch is off by a last place: at one point alone rounding may happen to be none."""
    global _narrow
    _narrow = True
    try:
        yield
    finally:
        _narrow = False


def _wide(x: Tensor) -> Tensor:
    return x.double() if not _narrow else x.float() if x.element_size() < 4 else x


def _rounded(u: Tensor) -> Tensor:
    if not _narrow:
        return u
    noise = torch.rand(u.shape, generator=_random) * 2 - 1
    return u * (1 + torch.finfo(u.dtype).eps * noise.to(u.dtype))


def evaluated(t: tg.TG, x: Tensor) -> Tensor:
    """y = sum_k g_k(x) (s_k x + c_k) in float64, in the type of x."""
    z = _wide(x)
    q = t.q or (0.0,) * t.K
    lines = [a * z * z + s * z + c for a, s, c in zip(q, t.s, t.c, strict=True)]
    branches = torch.stack([_rounded(line) for line in lines], -1)
    if t.hard:
        owners = t.owner or ("lo",) * (t.K - 1)
        above = [
            (z > at) if owner == "lo" else (z >= at)
            for at, owner in zip(t.theta, owners, strict=True)
        ]
        region = sum((a.long() for a in above), torch.zeros_like(z, dtype=torch.long))
        y = branches.gather(-1, region.unsqueeze(-1)).squeeze(-1)
    elif t.form == "product":  # of the appendix, K = 3
        a, b = (torch.sigmoid(t.tau * (z - at)) for at in t.theta)
        weights = torch.stack([1 - a, a * (1 - b), b], -1)
        y = (weights * branches).sum(-1) / weights.sum(-1)
    else:
        taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * (t.K - 1)
        logits = [torch.zeros_like(z)]
        for tau, at in zip(taus, t.theta, strict=True):
            logits.append(logits[-1] + _rounded(tau * (z - at)))
        y = (torch.stack(logits, -1).softmax(-1) * branches).sum(-1)
    if t.clamp is not None:
        y = y.clamp(*t.clamp)
    return _like(x, y)


def _like(x: Tensor, y: Tensor) -> Tensor:
    """y with the type and the strides of x: a dropout behind it draws its mask along them."""
    return torch.empty_like(x).copy_(y)


def gated(key: str | tg.TG, x: Tensor) -> Tensor:
    """The default instance of an approximate activation; "softplus:2.0" has a parameter."""
    if isinstance(key, tg.TG):
        return evaluated(key, x)
    name, _, number = key.partition(":")
    p = float(number or 1)
    z = _wide(x)
    if name == "softplus":
        y = evaluated(tg.TAXONOMY[name], p * z) / p
    elif name == "celu":
        y = p * evaluated(tg.TAXONOMY["elu"], z / p)
    elif name == "logsigmoid":
        y = -evaluated(tg.TAXONOMY["softplus"], -z)
    else:
        y = evaluated(tg.TAXONOMY[name], z)
    return _like(x, y)


def gated_(key: str | tg.TG, x: Tensor) -> Tensor:
    """The same, over its input."""
    return x.copy_(gated(key, x.clone()))


class Gated(nn.Module):
    """The same as a module."""

    def __init__(self, key: str | tg.TG, inplace: bool = False) -> None:
        super().__init__()
        self.key, self.over = key, inplace

    def forward(self, x: Tensor) -> Tensor:
        return gated_(self.key, x) if self.over else gated(self.key, x)
