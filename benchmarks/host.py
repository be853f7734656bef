"""What the host takes: small calls, and large ones with threads on whatever cores they wake on.

A learned gate is a node of autograd in C++ where `kernels.build` has compiled it, and a function
written in Python elsewhere; the page says which, with the machine. Beside it stands a function in
Python that allocates what has to be returned and does nothing else: nothing written in Python is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.elementwise import SOFT, check, gradients
from benchmarks.timing import CHECK, Contenders, Place, Work, host_times
from threshold_gating import Activation

SECTION = "host"
SMALL = (32, 256)


class Sizes(NamedTuple):
    """Channels with learned gates, tokens behind a frozen GELU, and how often a call is counted."""

    rows: tuple[int, int]
    tokens: tuple[int, int, int]
    calls: int


Limits = dict[tuple[str, str], float | None]


def host(sizes: Sizes, place: Place) -> Iterator[Work]:
    """Torch runs backward passes in a thread of their own, whose core finds cold caches; one line
    of torch lets them run in the thread that asks for them."""
    rows, tokens, calls = sizes
    yield from small_calls(calls, place, {("ours", ""): 20.0}, {("ours", ""): 150.0})
    size = "x".join(map(str, tokens))
    for alone, how in ((False, ""), (True, ", one thread")):
        options: dict[str, Any] = {"backward": True, "pinned": False, "alone": alone}
        work, build = f"K=2 channel bf16 + backward, loose{how}", partial(_learned, rows, place)
        yield Work(SECTION, work, build, {"copy": 2.9}, ("module",), **options)
        work, build = f"gelu frozen {size} + backward, loose{how}", partial(_gelu, tokens, place)
        yield Work(SECTION, work, build, {"F.gelu": 1.0}, ("frozen module",), **options)


def small_calls(calls: int, place: Place, forward: Limits, both: Limits) -> Iterator[Work]:
    """Microseconds of the host for one small learned call, and those of others beside it."""
    beside: Limits = {(name, ""): None for name in ("PReLU", "F.silu", "empty function")}
    name = f"learned {'x'.join(map(str, SMALL))}"
    ways = [("forward", False, False, forward), ("+ backward", True, False, both)]
    if place.device == "cuda":  # on a CPU there is one thread anyway
        ways.append(("+ backward, one thread", True, True, both))
    for what, backward, alone, limit in ways:
        build, limits = partial(_small, backward, calls, place), limit | beside
        options: dict[str, Any] = {"backward": True, "alone": alone, "unit": "us"}
        yield Work(SECTION, f"{name} {what}", build, limits, ("module",), **options)


def _small(backward: bool, calls: int, place: Place) -> Contenders:
    x = torch.randn(SMALL, device=place.device).requires_grad_()
    act, prelu = _channels(SMALL[1], place), nn.PReLU(SMALL[1], device=place.device)
    own: list[Tensor] = list(act.parameters())
    ways: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "ours": (act, own),
        "PReLU": (prelu, list(prelu.parameters())),
        "F.silu": (F.silu, []),
        "empty function": (lambda x: _empty(x, *own), own),
    }
    dy = torch.ones_like(x)
    found: Contenders = {}
    for name, (f, more) in ways.items():
        found[name] = partial(gradients, f, [x], [x, *more], dy) if backward else partial(f, x)
    check(found["ours"], act, x, dy if backward else None, (1, SMALL[1]))()
    taken = host_times(found, place.device, calls)
    return {name: partial(taken.__getitem__, name) for name in taken}


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *own: Tensor) -> Tensor:
        ctx.save_for_backward(x, *own)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return tuple([torch.empty_like(t) for t in ctx.saved_tensors])


# as `blend` calls its own
_empty: Any = super(torch.autograd.Function, _Empty).apply


def _learned(rows: tuple[int, int], place: Place) -> Contenders:
    x = torch.randn(rows, device=place.device).bfloat16()
    act, out, dy = _channels(rows[1], place), torch.empty_like(x), torch.randn_like(x)
    copy, x = partial(out.copy_, x), x.detach().requires_grad_()
    ours = partial(gradients, act, [x], [x, *act.parameters()], dy)
    silu = partial(gradients, F.silu, [x], [x], dy)
    checked = check(ours, act, x, dy, (1, rows[1]))
    return {"copy": copy, "silu": silu, "ours": ours, CHECK: checked}


def _gelu(tokens: tuple[int, int, int], place: Place) -> Contenders:
    x = torch.randn(tokens, device=place.device).bfloat16().requires_grad_()
    dy, act = torch.randn_like(x), Activation("gelu", device=place.device)
    native = partial(gradients, F.gelu, [x], [x], dy)
    ours = partial(gradients, act, [x], [x], dy)
    return {"F.gelu": native, "ours": ours, CHECK: check(ours, act, x, dy)}


def _channels(channels: int, place: Place) -> Activation:
    return Activation(
        "silu", share="channel", channels=channels, axis=-1, train=SOFT, device=place.device
    )
