"""One thread of a CPU: learned gates with K = 2 over F.silu, as called and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.elementwise import SOFT, Share, gradients
from benchmarks.timing import Contenders, Place, Work
from threshold_gating import Activation

_CHANNELS = {"channel": 64, "layer": None}
# By sharing and whether it is compiled: forward, forward and backward.
_LIMITS: dict[tuple[Share, str], tuple[float, float]] = {
    ("channel", "eager"): (5.0, 7.0),
    ("layer", "eager"): (5.0, 7.0),
    ("channel", "compiled"): (1.6, 5.0),
    ("layer", "compiled"): (1.6, 2.0),
}


def on_cpu(elements: int, place: Place) -> Iterator[Work]:
    """Images of 64 channels, `elements` in all."""
    for (share, how), limits in _LIMITS.items():
        if how == "compiled" and place.compile is None:
            continue
        for what, backward in (("forward", False), ("+ backward", True)):
            build = partial(_contenders, elements, share, how, backward, place)
            limit, pairs = {"silu": limits[backward]}, ("module", "compiled")
            yield Work("cpu", f"K=2 {share} {what} {how}", build, limit, pairs, backward=backward)


def _contenders(elements: int, share: Share, how: str, backward: bool, place: Place) -> Contenders:
    x = torch.randn(elements // 65536, 64, 32, 32)
    act = Activation("silu", share=share, channels=_CHANNELS[share], train=SOFT)
    ours = place.compiled(act)["compile"] if how == "compiled" else act
    if not backward:
        return {"silu": partial(F.silu, x), "ours": partial(ours, x)}
    dy, x = torch.randn_like(x), x.requires_grad_()
    return {
        "silu": partial(gradients, F.silu, [x], [x], dy),
        "ours": partial(gradients, ours, [x], [x, *act.parameters()], dy),
    }
