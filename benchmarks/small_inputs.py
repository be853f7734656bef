"""Small inputs on one thread of a CPU: `auto` may not be slower than `reference` at any size.

    PYTHONPATH=src python -m benchmarks.small_inputs

Each row is a gate, frozen or learned, forward or forward and backward, at one size. The two
backends take turns, and the smallest of their times is compared: what else runs on the machine only
adds. Times are those of the thread, so that waiting for a core does not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating import Activation, kernels

LIMIT = 1.05  # of the better of the two
SIZES = tuple(2**e for e in range(6, 23, 2))
GATES = {  # one for each way that gates are evaluated
    "gelu": ((), ("tau", "theta", "s", "c")),
    "quick_gelu": ((), ("tau", "theta")),
    "tanh": (("theta",),),
    "gelu_tanh": ((), ("tau", "theta")),
    "leaky_relu": (("theta", "s"),),
    "hardtanh": (("theta",),),
    "elu": ((),),
}
_ROUNDS, _SECONDS = 15, 2e-3


class Row(NamedTuple):
    what: str
    elements: int
    auto: float  # seconds
    reference: float

    @property
    def ratio(self) -> float:
        return self.auto / min(self.auto, self.reference)


def rows(sizes: tuple[int, ...] = SIZES, rounds: int = _ROUNDS) -> Iterator[Row]:
    """Every row; `ratio` is to stay below `LIMIT`."""
    for key, trains in GATES.items():
        for train in trains:
            act = Activation(key, train=train)
            for n in sizes:
                x = torch.randn(n)
                for what, run in (("forward", _forward), ("+ backward", _backward)):
                    how = f"{key} {'learned' if train else 'frozen'} {what}"
                    yield Row(how, n, *_times(partial(run, act, x.clone()), rounds))


def _forward(act: Activation, x: Tensor) -> None:
    with torch.no_grad():
        act(x)


def _backward(act: Activation, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    y = act(x)
    torch.autograd.grad(y, [x, *act.parameters()], x.detach())


def _times(f: Callable[[], None], rounds: int) -> tuple[float, float]:
    best = [float("inf")] * 2
    count = 1
    for _ in range(rounds):
        for k, name in enumerate(("auto", "reference")):
            with kernels.use(name):  # type: ignore[arg-type]
                f()
                start = time.thread_time()
                for _ in range(count):
                    f()
                took = (time.thread_time() - start) / count
            best[k] = min(best[k], took)
        count = max(1, min(200, round(_SECONDS / max(best))))
    return best[0], best[1]


def main() -> int:
    torch.set_num_threads(1)
    slow = 0
    for row in rows():
        mark = "" if row.ratio <= LIMIT else "  above the limit"
        slow += bool(mark)
        us = f"{row.auto * 1e6:10.1f} {row.reference * 1e6:10.1f}"
        print(f"{row.what:32} {row.elements:8} {us} {row.ratio:6.2f}{mark}", flush=True)
    print(f"limit {LIMIT} of the better of auto and reference: {slow} above it")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
