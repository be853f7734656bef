"""One thread of a CPU: learned gates with K = 2 over F.silu, frozen ones with K = 5 over F.gelu."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.elementwise import SOFT, Share, check, gradients
from benchmarks.timing import CHECK, Contenders, Place, Work
from threshold_gating import Activation

_CHANNELS = {"channel": 64, "layer": None}
_GROUPS = {"channel": (1, 64, 1, 1), "layer": ()}
# By sharing and whether it is compiled: forward, forward and backward.
_LIMITS: dict[tuple[Share, str], tuple[float, float]] = {
    ("channel", "eager"): (1.6, 2.5),
    ("layer", "eager"): (1.3, 1.8),
    ("channel", "compiled"): (1.6, 2.5),
    ("layer", "compiled"): (1.6, 2.0),
}
# Frozen GELU with K = 5 over F.gelu, by how it runs and whether with dx.
_OF_GELU = {
    ("eager", False): 1.25,
    ("eager", True): 1.15,
    ("compiled", False): 1.25,
    ("compiled", True): 1.15,
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
    for (how, backward), most in _OF_GELU.items():
        if how == "eager" or place.compile is not None:
            build = partial(_gelus, elements, how, backward, place)
            name = f"GELU K=5 frozen {'+ backward' if backward else 'forward'} {how}"
            pairs = ("frozen module", "compiled")
            yield Work("cpu", name, build, {"gelu": most}, pairs, backward=backward)


def _contenders(elements: int, share: Share, how: str, backward: bool, place: Place) -> Contenders:
    x = torch.randn(elements // 65536, 64, 32, 32)
    act = Activation("silu", share=share, channels=_CHANNELS[share], train=SOFT)
    ours = place.compiled(act)["compile"] if how == "compiled" else act
    dy = torch.randn_like(x) if backward else None
    found: Contenders = {"silu": partial(F.silu, x), "ours": partial(ours, x)}
    if dy is not None:
        x.requires_grad_()
        found["silu"] = partial(gradients, F.silu, [x], [x], dy)
        found["ours"] = partial(gradients, ours, [x], [x, *act.parameters()], dy)
    return {**found, CHECK: check(found["ours"], act, x, dy, _GROUPS[share])}


def _gelus(elements: int, how: str, backward: bool, place: Place) -> Contenders:
    x, gelu, act = torch.randn(elements), F.gelu, Activation("gelu")
    ways: dict[str, Any] = {"gelu": gelu, "ours": act}
    if how == "compiled":
        ways = {name: place.compiled(f)["compile"] for name, f in ways.items()}
    dy = torch.randn_like(x) if backward else None
    found: Contenders = {name: partial(f, x) for name, f in ways.items()}
    if dy is not None:
        x.requires_grad_()
        found = {name: partial(gradients, f, [x], [x], dy) for name, f in ways.items()}
    return {**found, CHECK: check(found["ours"], act, x, dy)}
