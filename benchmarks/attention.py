"""Attention by gates against torch's, causal: what is timed is in bf16 with inputs drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.elementwise import gradients
from benchmarks.timing import Contenders, Place, Work, peak
from threshold_gating import attention

SECTION, PAIRS = "attention", ("attention",)
Shape = tuple[int, int, int, int]  # batch, heads, length, size of a head
Function = Callable[..., Tensor]
BACKENDS = {
    "FA2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SDPA = "|".join(BACKENDS)
GROWTH_LIMIT = 2.2  # peak memory of twice the length, over that of one; quadratic would be 4


class Sizes(NamedTuple):
    """Inputs with the limit of the literal forward in times FA2; lengths for the memory."""

    shapes: dict[Shape, float]
    heads: int  # everywhere, for Triton compiles anew for a number that 16 does not divide
    lengths: tuple[int, ...]


def limits(literal: float, backward: bool) -> dict[tuple[str, str], float | None]:
    """(ours, over): the most that it may take of the other's time."""
    if backward:
        found = {("native", SDPA): 1.02, ("fused", "FA2"): 1.2, ("fused tau", "FA2"): 1.2}
        return {**found, ("literal", "FA2"): 1.8}
    found = {("native", SDPA): 1.02, ("fused", "FA2"): 1.05, ("fused tau", "FA2"): 1.05}
    found |= {("literal", "FA2"): literal, ("statistics", "fused"): 1.25}
    return {**found, ("fused", SDPA): 1.2, ("literal", SDPA): 2.2}


def attend(sizes: Sizes, place: Place) -> Iterator[Work]:
    """Every way against torch's backends, then the memory of those that are linear in it."""
    for shape, literal in sizes.shapes.items():
        for backward in (False, True):
            work = f"{'x'.join(map(str, shape))} {'+ backward' if backward else 'forward'}"
            build = partial(_contenders, shape, place, backward)
            allowed = limits(literal, backward)
            yield Work(SECTION, work, build, allowed, PAIRS, backward=backward, replay=False)
    for way in ("fused", "literal"):
        for length in sizes.lengths[1:]:
            of = partial(_peak, way, sizes.heads, place.device)
            made = {"half the length": partial(of, length // 2), "ours": partial(of, length)}
            yield Work(
                SECTION, f"{way} peak of both passes, {length} tokens", partial(dict, made),
                {"half the length": GROWTH_LIMIT}, PAIRS, backward=True, unit="MiB",
            )  # fmt: skip


def _contenders(shape: Shape, place: Place, backward: bool) -> Contenders:
    draw = partial(torch.randn, shape, device=place.device, dtype=torch.bfloat16)
    qkv, do = [draw() for _ in range(3)], draw()
    ways = _of_torch(shape, place) | _of_gates(shape, place.device)
    if not backward:
        return {name: partial(f, *qkv) for name, f in ways.items()}
    qkv = [t.requires_grad_() for t in qkv]
    return {name: partial(gradients, f, qkv, qkv, do) for name, f in ways.items()}


def _of_gates(shape: Shape, device: str) -> dict[str, Function]:
    """Our ways to the same output."""
    tau = torch.ones(shape[1], device=device, requires_grad=True)
    attended = partial(attention.scaled_dot_product_attention, is_causal=True)
    return {
        "native": partial(attended, way="native"),
        "fused": partial(attended, way="fused"),
        "fused tau": partial(attended, way="fused", tau=tau),
        "statistics": lambda q, k, v: attention.with_statistics(q, k, v, is_causal=True)[0],
        "literal": partial(attended, way="literal"),
    }


def _of_torch(shape: Shape, place: Place) -> dict[str, Function]:
    # a CPU shows that it runs, and has not all of them
    on_gpu = place.device == "cuda"
    found: dict[str, Function] = {
        name: partial(_through, backend if on_gpu else SDPBackend.MATH)
        for name, backend in BACKENDS.items()
    }
    return found | (_flex(shape, place) if on_gpu else {})


def _through(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flex(shape: Shape, place: Place) -> dict[str, Function]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def before(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    if place.compile is None:
        return {}
    mask = create_block_mask(before, None, None, shape[2], shape[2])
    return {"Flex": partial(place.compile(flex_attention, dynamic=False), block_mask=mask)}


def _peak(way: str, heads: int, device: str, length: int) -> float:
    """MiB of forward and backward beyond their inputs, of heads of 64."""
    draw = partial(torch.randn, 1, heads, length, 64, device=device, dtype=torch.bfloat16)
    qkv = [draw().requires_grad_() for _ in range(3)]
    attended = partial(attention.scaled_dot_product_attention, is_causal=True, way=way)
    return peak(partial(gradients, attended, qkv, qkv, torch.ones_like(qkv[0])), device)
