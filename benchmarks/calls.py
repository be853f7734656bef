"""What a call costs beside what it computes: calls that gates answer, Python around a module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.elementwise import SOFT, gradients
from benchmarks.timing import Contenders, Place, Work
from threshold_gating import Activation, convert

_CALLS = 50  # of a function in one forward, so that a network around them costs little
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "clamp": (lambda x: torch.clamp(x, -1.0, 1.0), 1.1),
    "F.gelu": (F.gelu, 4.0),
    "F.relu": (F.relu, None),
    "F.silu": (F.silu, None),
}
_ROUNDS, _REPEATED = 15, 200


class _Calling(nn.Module):
    """A network that does nothing but call a function."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(_CALLS):
            y = self.f(x)
        return y


class _Idle(TorchFunctionMode):
    """What torch takes to ask a mode about a call: nothing that looks at calls can be quicker."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def answered_calls(powers: tuple[int, ...]) -> Iterator[Work]:
    """Functional calls in a converted network on one thread of a CPU, at sizes 2^power."""
    for name, (f, limit) in _FUNCTIONS.items():
        for power in powers:
            yield Work(
                "calls", f"{name} 2^{power} answered", partial(_answered, f, 2**power),
                {"original": limit}, ("frozen module",), note=f"{_CALLS} calls",
            )  # fmt: skip


def _answered(f: Callable[[Tensor], Tensor], n: int) -> Contenders:
    x, plain = torch.randn(n), _Calling(f)

    def idle() -> Tensor:
        with _Idle():
            return plain(x)  # type: ignore[no-any-return]

    return {
        "original": partial(plain, x),
        "ours": partial(convert(plain, inputs=x), x),
        "idle": idle,
    }


def host_time(place: Place) -> Iterator[Work]:
    """Microseconds of Python that one small learned call takes, 32 x 256; a GPU works meanwhile."""
    for what, backward, limit in (("forward", False, 1.2), ("+ backward", True, 1.35)):
        build = partial(_microseconds, backward, place.device)
        name = f"learned K=2 32x256 {what}, Python"
        limits = {"prelu": limit, "silu": None}
        yield Work("host time", name, build, limits, ("module",), backward=backward, unit="us")


def _microseconds(backward: bool, device: str) -> Contenders:
    x, dy = (torch.randn(32, 256, device=device) for _ in range(2))
    x = x.requires_grad_(backward)
    modules = {
        "ours": Activation("silu", train=SOFT).to(device),
        "prelu": nn.PReLU().to(device),
        "silu": nn.SiLU(),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name, module in modules.items():
        of = [x, *module.parameters()]
        calls[name] = partial(gradients, module, [x], of, dy) if backward else partial(module, x)
    with torch.set_grad_enabled(backward):
        taken = {name: min(each) for name, each in _in_turn(calls, device).items()}
    return {name: partial(taken.__getitem__, name) for name in taken}


def _in_turn(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_REPEATED):
                call()
            found[name].append(1e6 * (time.perf_counter() - start) / _REPEATED)
    return found
