"""Tier W: layers with weights for each branch over one layer of torch of the same size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.elementwise import by_reference
from benchmarks.timing import Contenders, Place, Work
from threshold_gating import Conv2d, Linear

SECTION, PAIRS = "tier W", ("product",)
DTYPE = torch.bfloat16


class Sizes(NamedTuple):
    """The two products, the batches and width of small ones, an image, the widths of vectors."""

    products: tuple[tuple[int, int, int], tuple[int, int, int]]
    batches: tuple[int, ...]
    width: int
    image: tuple[int, int, int, int]
    vectors: tuple[int, ...]


def tier_w(sizes: Sizes, place: Place) -> Iterator[Work]:
    yield from _large(sizes, place)
    yield from _images(sizes.image, place)
    for batch in sizes.batches:
        work = f"K=2 {batch}x{sizes.width}x{sizes.width} bf16 forward"
        build = partial(_small, batch, sizes.width, place)
        note = "1.00 is the limit, 0.02 more is for noise"
        yield Work(SECTION, work, build, {"two steps": 1.02}, PAIRS, note=note)
    for width in sizes.vectors:
        build = partial(_vector, width, place)
        note = "one matrix of weights is read of two"
        work = f"hard 1x{width}x{width} bf16 forward"
        # not replayed: what is recorded there takes the formulas, see `one_vector.takes`
        yield Work(SECTION, work, build, {"linear": 1.15}, PAIRS, note=note, replay=False)


def _large(sizes: Sizes, place: Place) -> Iterator[Work]:
    for size, forward, both in zip(sizes.products, (2.15, 2.10), (2.25, 2.15), strict=True):
        work = f"K=2 {'x'.join(map(str, size))} bf16"
        build = partial(_products, size, place, False)
        limits = {"linear": forward, "silu+linear": 2.05}
        yield Work(SECTION, f"{work} forward", build, limits, PAIRS)
        build = partial(_products, size, place, True)
        yield Work(SECTION, f"{work} + backward", build, {"linear": both}, PAIRS, backward=True)


def _images(image: tuple[int, int, int, int], place: Place) -> Iterator[Work]:
    work = f"K=2 3x3 of {'x'.join(map(str, image))} bf16"
    note = "in channels_last; K = 2 has twice the products of one convolution"
    for what, backward, limit in (("forward", False, None), ("+ backward", True, 2.3)):
        build = partial(_convolutions, image, place, backward)
        name, limits = f"{work} {what}", {"conv": limit}
        yield Work(SECTION, name, build, limits, PAIRS, backward=backward, note=note)


def _products(size: tuple[int, int, int], place: Place, backward: bool) -> Contenders:
    rows, inner, outer = size
    dense, x = _dense(inner, outer, place), _drawn((rows, inner), place)
    layer = Linear.from_dense(dense, "silu")
    ways = {"linear": dense, "silu+linear": nn.Sequential(nn.SiLU(), dense), "ours": layer}
    return _runs(ways, x, backward)


def _convolutions(image: tuple[int, int, int, int], place: Place, backward: bool) -> Contenders:
    channels = image[1]
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=place.device, dtype=DTYPE)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    x = _drawn(image, place).to(memory_format=torch.channels_last)
    layer = Conv2d.from_dense(conv, "silu")
    ways = {"conv": conv, "silu+conv": nn.Sequential(nn.SiLU(), conv), "ours": layer}
    return _runs(ways, x, backward)


def _small(batch: int, width: int, place: Place) -> Contenders:
    dense, x = _dense(width, width, place), _drawn((batch, width), place)
    layer = Linear.from_dense(dense, "silu")
    # the gated inputs written out, then one product
    two_steps = partial(by_reference, layer, x)
    return {"linear": partial(dense, x), "two steps": two_steps, "ours": partial(layer, x)}


def _vector(width: int, place: Place) -> Contenders:
    dense, x = _dense(width, width, place), _drawn((1, width), place)
    layer = Linear.from_dense(dense, "leaky_relu")
    return {"linear": partial(F.linear, x, dense.weight), "ours": partial(layer, x)}


def _dense(inner: int, outer: int, place: Place) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False, device=place.device, dtype=DTYPE)


def _drawn(shape: tuple[int, ...], place: Place) -> Tensor:
    return torch.randn(shape, device=place.device, dtype=DTYPE)


def _runs(ways: dict[str, nn.Module], x: Tensor, backward: bool) -> Contenders:
    if not backward:
        return {name: partial(model, x) for name, model in ways.items()}
    dy = torch.randn_like(ways["ours"](x))
    x.requires_grad_()
    return {name: partial(_step, model, x, dy) for name, model in ways.items()}


def _step(model: nn.Module, x: Tensor, dy: Tensor) -> Any:
    return torch.autograd.grad(model(x), [x, *model.parameters()], dy)
