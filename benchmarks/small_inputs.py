"""Small inputs on one thread of a CPU: `auto` may not be slower than `reference` at any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.elementwise import PAIRS, check, gradients
from benchmarks.timing import CHECK, Contenders, Work
from threshold_gating import Activation, kernels

LIMIT = 1.05
GATES: dict[str, tuple[tuple[str, ...], ...]] = {  # what is learned; a row for each way of gates
    "gelu": ((), ("tau", "theta", "s", "c")),
    "quick_gelu": ((), ("tau", "theta")),
    "tanh": (("theta",),),
    "gelu_tanh": ((), ("tau", "theta")),
    "leaky_relu": (("theta", "s"),),
    "hardtanh": (("theta",),),
    "elu": ((),),
}
# A choice of the backend is made once for so many elements, or it would be timed as well.
_AT_ONCE, _MOST_CALLS = 2**14, 4


def small_inputs(powers: range) -> Iterator[Work]:
    """Each gate, frozen or learned, forward or with every gradient, at sizes 2^power."""
    for key, trains in GATES.items():
        for train in trains:
            for power in powers:
                for what, backward in (("forward", False), ("+ backward", True)):
                    name = f"{key} {'learned' if train else 'frozen'} 2^{power} {what}"
                    build = partial(_contenders, key, train, 2**power, backward)
                    calls = _calls(2**power)
                    yield Work(
                        "small inputs", name, build, {"reference": LIMIT}, PAIRS,
                        backward=backward, note=f"{calls} calls" if calls > 1 else "",
                        slow=power >= 20,
                    )  # fmt: skip


def _calls(n: int) -> int:
    return max(1, min(_MOST_CALLS, _AT_ONCE // n))


def _contenders(key: str, train: tuple[str, ...], n: int, backward: bool) -> Contenders:
    act, x = Activation(key, train=train), torch.randn(n)
    call: Callable[[], Any] = partial(act, x)
    dy = torch.randn(n) if backward else None
    if dy is not None:
        x.requires_grad_()
        call = partial(gradients, act, [x], [x, *act.parameters()], dy)
    ways: dict[str, kernels.Backend] = {"ours": "auto", "reference": "reference"}
    found: Contenders = {
        name: partial(_repeated, call, way, _calls(n)) for name, way in ways.items()
    }
    return {**found, CHECK: check(found["ours"], act, x, dy)}


def _repeated(call: Callable[[], Any], way: kernels.Backend, calls: int) -> Any:
    with kernels.use(way):
        for _ in range(calls):
            found = call()
    return found
