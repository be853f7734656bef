"""Steps of `tiles` in eager torch, without those that numbers make void, in memory used before.

Every step is a pass over memory: numbers 0 and 1 have none, what is not needed again is
overwritten, and results go to a `Scratch`, because new pages cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.structure import Wanted
from threshold_gating.primitive import Value


class Scratch:
    """Memory for the steps of one tile, the same for every tile: `new()` until `clear`.

    Without a number of elements there is one tile, and all of it is new.
    """

    def __init__(self, elements: int | None, dtype: torch.dtype) -> None:
        self._elements, self._dtype = elements, dtype
        self._buffers: list[Tensor] = []
        self._used, self._shape = 0, torch.Size()

    def clear(self, shape: torch.Size) -> None:
        self._used, self._shape = 0, shape

    def new(self) -> Tensor:
        if self._elements is None:
            return torch.empty(self._shape, dtype=self._dtype)
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty(self._elements, dtype=self._dtype))
        buffer = self._buffers[self._used]
        self._used += 1
        return buffer[: self._shape.numel()].view(self._shape)

    def copy(self, t: Tensor) -> Tensor:
        return self.new().copy_(t)

    def product(self, a: Tensor, b: Value) -> Tensor:
        return self.copy(a) if is_one(b) else torch.mul(a, b, out=self.new())

    def difference(self, a: Tensor, b: Value) -> Tensor:
        return torch.sub(a, b, out=self.new())

    def sum(self, a: Tensor, b: Value) -> Tensor:
        return torch.add(a, b, out=self.new())


class Sums(NamedTuple):
    """The gradients of tau, theta, s and c, summed to (1, G, 1), one for each row, if wanted."""

    tau: list[Tensor]
    theta: list[Tensor]
    s: list[Tensor]
    c: list[Tensor]


class Gradients(NamedTuple):
    """Of one tile."""

    x: Tensor | None
    v: Tensor | None
    sums: Sums


def times(slope: Value, dy: Tensor, room: Scratch) -> Tensor:
    """slope dy, over the slope if that is ours."""
    return slope.mul_(dy) if isinstance(slope, Tensor) else room.product(dy, slope)


def to_inputs(
    through: Tensor, turn: Tensor | None, tau: Value, one_input: bool, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dv) = (tau dy T, dy slope), or their sum where the branches read x; overwrites both."""
    if not wanted.x and not wanted.other:
        return None, None
    if not one_input:
        return (torch.zeros_like(through) if turn is None else turn.mul_(tau)), through
    if turn is None:
        return through, None
    if isinstance(tau, Tensor):
        return through.addcmul_(turn, tau), None
    return through.add_(turn, alpha=tau), None


def summed(t: Tensor) -> Tensor:
    """Over all that shares a parameter."""
    return t.sum((0, 2), keepdim=True)


def is_there(w: Value) -> bool:
    return isinstance(w, Tensor) or w != 0


def is_one(w: Value) -> bool:
    return not isinstance(w, Tensor) and w == 1


def added(y: Value, constant: Value) -> Value:
    """y + constant over y, which is ours."""
    if not isinstance(y, Tensor):
        return constant if y == 0 else constant + y
    return y.add_(constant) if is_there(constant) else y


def branch(s: Value, v: Tensor, c: Value, room: Scratch) -> Value:
    """s v + c in memory of its own."""
    return added(room.product(v, s), c) if is_there(s) else c


def line(g: Tensor, start: Value, rise: Value, room: Scratch | None) -> Value:
    """start + rise g without the steps that numbers make void; over g where no room is given."""
    if not is_there(rise):
        return start
    if room is None and not is_one(rise):
        g.mul_(rise)
    return added(g if room is None else room.product(g, rise), start)


def argument(x: Tensor, tau: Value, theta: Value, scale: float, room: Scratch) -> Tensor:
    """scale tau (x - theta) in memory of its own."""
    factor = tau if scale == 1 else tau * scale
    if not is_there(theta):
        return room.product(x, factor)
    u = room.difference(x, theta)
    return u if is_one(factor) else u.mul_(factor)


def mean(
    g: Sequence[Tensor] | Mapping[int, Tensor],
    w: Sequence[Value],
    room: Scratch,
    share: Tensor | None = None,
    over: bool = False,
) -> Value:
    """sum_k g_k w_k, times `share` if given; equal numbers need no gates, these sum to one.

    A gate may be missing where w is the number 0. `over` allows to overwrite one of them.
    """
    if not any(isinstance(wk, Tensor) for wk in w) and len(set(w)) == 1:
        return w[0]
    total: Tensor | None = None
    for k, wk in enumerate(w):
        if not is_there(wk):
            continue
        if total is None:
            total = g[k] if over and is_one(wk) else room.product(g[k], wk)
        elif isinstance(wk, Tensor):
            total.addcmul_(g[k], wk)
        else:
            total.add_(g[k], alpha=wk)
    assert total is not None
    return total if share is None else total.mul_(share)
