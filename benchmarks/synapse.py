"""Tiers S and general: a gate for each synapse, in gates a second; beside it layers of splines.

A gate is one synapse of one row: rows x inputs x outputs of a layer, and times the taps in a
convolution. Figures are picoseconds a gate: 1.7 T gates/s, the goal, is 0.588. What a GPU can do at
most is in docs/kernels.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.kan import KAN
from benchmarks.timing import Contenders, Place, Work, peak
from threshold_gating import Conv2d, Linear

SECTION, PAIRS = "tier S", ("synapse",)
GATES, FAST_GATES = 1.7e12, 3.0e12  # a second, the goals
BACKWARD = 5.0  # with all gradients, over forward
SPLINES = 9  # parameters of a synapse of KAN, for 8 splines and silu; general K = 3 has as many


class Sizes(NamedTuple):
    """Widths of cubes (rows, inputs and outputs), an image, and batches and width beside KAN."""

    cubes: tuple[int, ...]
    image: tuple[int, int, int, int]
    batches: tuple[int, ...]
    width: int
    most: int  # rows up to which KAN has room for batch x in x out


def synapse(sizes: Sizes, place: Place) -> Iterator[Work]:
    for n in sizes.cubes:
        # the goal is for the first: small ones do not fill the GPU
        held = n == sizes.cubes[0]
        for what, options, goal in (
            ("S K=2", {"tier": "S"}, GATES),
            ("S K=2 fast", {"tier": "S", "accuracy": "fast"}, FAST_GATES),
            ("general K=2", {"tier": "general"}, None),
            ("S K=3", {"tier": "S", "K": 3}, None),
            ("general K=3", {"tier": "general", "K": 3}, None),
        ):
            build = partial(_linear, (n, n, n), options, place)
            yield from _rows(f"{what} {n}x{n}x{n}", build, n**3, goal if held else None, place)
    batch, channels, *size = sizes.image
    gates = batch * size[0] * size[1] * 9 * channels**2
    for share in ("synapse", "channel_pair"):
        name = f"S K=2 3x3 of {'x'.join(map(str, sizes.image))} {share}"
        yield from _rows(name, partial(_conv, sizes.image, share, place), gates, None, place)
    yield from _beside(sizes, place)


def _rows(name: str, build: Any, gates: int, goal: float | None, place: Place) -> Iterator[Work]:
    """Picoseconds a gate, then forward and backward over forward."""

    def figure() -> Contenders:
        layer, x = build()
        return {"ours": lambda: 1e9 * _milliseconds(partial(layer, x), place) / gates}

    limit = None if goal is None else 1e12 / goal
    note = "" if goal is None else f"{goal / 1e12} T gates/s is {limit:.3f}"
    yield Work(SECTION, f"{name} forward", figure, {"": limit}, PAIRS, unit="ps a gate", note=note)

    def both() -> Contenders:
        layer, x = build()
        dy = torch.randn_like(layer(x))
        x.requires_grad_()
        return {"ours": partial(_step, layer, x, dy), "forward": partial(_without, layer, x)}

    yield Work(
        SECTION, f"{name} + backward", both, {"forward": BACKWARD}, PAIRS, backward=True,
        replay=False,
    )  # fmt: skip


def _beside(sizes: Sizes, place: Place) -> Iterator[Work]:
    """Layers of as many parameters, forward and backward: time, and the most memory at once."""
    for batch in sizes.batches:
        name = f"{batch} rows, {SPLINES * sizes.width**2 / 1e6:.1f} M parameters, + backward"
        build = partial(_kans, batch, sizes, place)
        note = "KAN is one product of its splines; 'KAN, each synapse' as pykan evaluates it"
        yield Work(
            SECTION, name, build, {"KAN": None}, PAIRS, backward=True, replay=False, note=note
        )
        memory = partial(_peaks, build, place)
        yield Work(
            SECTION, f"peak of {name}", memory, {"KAN": None}, PAIRS, backward=True, unit="MiB"
        )


def _kans(batch: int, sizes: Sizes, place: Place) -> Contenders:
    found: Contenders = {}
    for name, layer in equals(sizes.width, place.device, batch <= sizes.most).items():
        inputs: Any = layer.in_features
        x = torch.randn(batch, inputs, device=place.device).clamp(-0.99, 0.99).requires_grad_()
        found[name] = partial(_step, layer, x, torch.randn_like(x))
    return found


def equals(width: int, device: str, each: bool = True) -> dict[str, nn.Module]:
    """Square layers of as many parameters as KAN of this width, which has 9 a synapse."""
    own: Any = {"device": device, "bias": False}
    wide, wider = width * 3 // 2, round(width * (SPLINES / 2) ** 0.5)  # tier S has 4, W has 2
    found: dict[str, nn.Module] = {
        "ours": Linear(wide, wide, tier="S", **own),
        "fast": Linear(wide, wide, tier="S", accuracy="fast", **own),
        "general K=3": Linear(width, width, tier="general", init="mish", **own),
        "tier W": Linear(wider, wider, **own),
        "KAN": KAN(width, width, device=device),
    }
    if each:
        found["KAN, each synapse"] = KAN(width, width, expanded=True, device=device)
    return found


def _peaks(build: Any, place: Place) -> Contenders:
    return {name: partial(peak, f, place.device) for name, f in build().items()}


def _linear(size: tuple[int, int, int], options: Any, place: Place) -> tuple[nn.Module, Tensor]:
    rows, inputs, outputs = size
    layer = Linear(inputs, outputs, bias=False, device=place.device, **options)
    return layer, torch.randn(rows, inputs, device=place.device)


def _conv(image: tuple[int, ...], share: Any, place: Place) -> tuple[nn.Module, Tensor]:
    channels = image[1]
    layer = Conv2d(
        channels, channels, 3, padding=1, tier="S", share=share, bias=False, device=place.device
    )
    return layer, torch.randn(image, device=place.device)


def _without(layer: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return layer(x)


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> Any:
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)


def _milliseconds(f: Any, place: Place) -> float:
    """Of a call: the median of many on a GPU, one elsewhere."""
    if place.device == "cuda":
        from triton.testing import do_bench

        ms: float = do_bench(f, warmup=20, rep=100, return_mode="median")
        return ms
    start = time.perf_counter()
    f()
    return 1e3 * (time.perf_counter() - start)
