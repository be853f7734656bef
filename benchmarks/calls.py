"""What a call costs beside what it computes: functions that gates answer in a converted network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.timing import Contenders, Work
from threshold_gating import convert

_CALLS = 50  # of a function in one forward, so that a network around them costs little
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "clamp": (lambda x: torch.clamp(x, -1.0, 1.0), 1.1),
    "F.gelu": (F.gelu, 4.0),
    "F.relu": (F.relu, None),
    "F.silu": (F.silu, None),
}


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
