"""One call of `blend`, taken apart for a kernel: its structure, its tensors, its place in memory.

A kernel sees x as memory, three axes (outer, G, inner): the parameters vary along G alone. A layer
has G = 1; channels of an image lie at (B, C, H W), in channels_last at (B H W, C, 1); positions of
a neuron are all in G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from threshold_gating.primitive import Value, Values

Numbers = tuple[float | None, ...]  # None stands for a tensor
MOST_BRANCHES = 8


class Form(NamedTuple):
    """What is known before any tensor is read: one compiled kernel serves equal forms."""

    tau: Numbers  # one entry, or one per threshold
    theta: Numbers
    s: Numbers
    c: Numbers
    owner: tuple[str, ...] | None
    centred: bool

    @property
    def K(self) -> int:
        return len(self.s)

    @property
    def hard(self) -> bool:
        return self.tau[0] == math.inf

    def filled(self, tensors: Sequence[Value]) -> tuple[list[Value], ...]:
        """(tau, theta, s, c) with the tensors, which come in this order, put back."""
        rest = iter(tensors)
        rows = (self.tau, self.theta, self.s, self.c)
        return tuple([next(rest) if n is None else n for n in row] for row in rows)


class Call(NamedTuple):
    """A form, its tensors, and the memory they belong to."""

    form: Form
    tensors: list[Tensor]
    order: tuple[int, ...]  # the axes of x from the slowest to the fastest in memory
    sizes: tuple[int, int, int]  # outer, G, inner


def take_apart(
    x: Tensor,
    tau: Values,
    theta: Values,
    s: Values,
    c: Values,
    *,
    form: str = "softmax",
    owner: Sequence[str] | None = None,
    q: Values | None = None,
    anchor: Any = None,
    clamp: tuple[float, float] | None = None,
    centred: bool | None = None,
) -> Call | None:
    """The call as a kernel takes it, or None where only the reference computes it.

    Quadratic and anchored branches, clamps and product gates are frozen instances that mostly are
    torch's own ops: no kernel is kept for them.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return None
    thetas, slopes, constants = _rows(theta), _rows(s), _rows(c)
    K = len(thetas) + 1
    if q is not None or clamp is not None or (form != "softmax" and K > 2):
        return None
    if anchor is not None and any(p is not None for p in anchor):
        return None
    own = isinstance(tau, Tensor) and isinstance(theta, Tensor) and tau.dim() == theta.dim()
    taus = _rows(tau) if own or isinstance(tau, Sequence) else [tau]
    if not 2 <= K <= MOST_BRANCHES or len(slopes) != K or len(constants) != K:
        return None  # nothing to gate, or an error that the reference words
    if len(taus) not in (1, K - 1):
        return None
    rows = (_numbers(taus), _numbers(thetas), _numbers(slopes), _numbers(constants))
    if not _is_regular(*rows[:2]):
        return None
    structure = Form(
        *rows, tuple(owner) if owner else None, centred=_is_centred(centred, *rows[2:])
    )
    parameters = (*taus, *thetas, *slopes, *constants)
    tensors = [w for w in parameters if isinstance(w, Tensor)]
    place = _place(x, tensors)
    return None if place is None else Call(structure, tensors, *place)


def in_memory(x: Tensor, order: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """x as (outer, G, inner); a copy only where x does not lie densely in that order."""
    return x.permute(*order).reshape(*sizes) if x.dim() else x.reshape(*sizes)


def restored(y: Tensor, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """(outer, G, inner) as a tensor that lies in memory as x does."""
    if order == tuple(range(x.dim())):
        return y.view(x.shape)
    back = sorted(range(len(order)), key=lambda d: order[d])
    return y.view([x.shape[d] for d in order]).permute(back)


def _rows(w: Values) -> list[Any]:
    each = w.unbind(0) if isinstance(w, Tensor) and w.dim() else w
    return list(each) if isinstance(each, Sequence) else [each]


def _numbers(row: Sequence[Any]) -> Numbers:
    return tuple(None if isinstance(w, Tensor) else float(w) for w in row)


def _is_regular(taus: Numbers, thetas: Numbers) -> bool:
    """Whether numbers are what the reference takes; it has the words for those that are not."""
    sharp = [t for t in taus if t is not None]
    if not all(t > 0 for t in sharp) or len({t == math.inf for t in taus}) > 1:
        return False
    known = [t for t in thetas if t is not None]
    return sharp[0] != math.inf or known == sorted(known) if sharp else True


def _is_centred(centred: bool | None, slopes: Numbers, constants: Numbers) -> bool:
    if centred is not None or len(slopes) != 2 or None in (*slopes, *constants):
        return bool(centred)
    pairs = (slopes, constants)
    opposite = all(abs(lo or 0.0) == abs(hi or 0.0) for lo, hi in pairs)
    return opposite and any(lo != hi for lo, hi in pairs)


def _place(
    x: Tensor, tensors: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[int, int, int]] | None:
    """Where the parameters' axes lie in x's memory; None if they are not one run of axes."""
    shape: tuple[int, ...] = ()
    for t in tensors:
        if t.numel() > 1:
            padded = (1,) * (x.dim() - t.dim()) + tuple(t.shape)
            if shape and padded != shape:
                return None
            shape = padded
    return place_of(x.shape, () if x.is_contiguous() else x.stride(), shape)


def place_of(
    sizes: Sequence[int], stride: Sequence[int], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, int, int]] | None:
    """The order of axes in memory and (outer, G, inner) for parameters of `shape`, or None.

    `sizes` and `stride` are those of x; no stride means contiguous.
    """
    order = tuple(range(len(sizes)))
    if stride:
        by_stride = _from_outer(stride)
        if is_run(sizes, stride, by_stride):
            order = tuple(by_stride)
    group = [d for d in order if shape and shape[d] > 1]
    if len(shape) > len(sizes) or any(sizes[d] != shape[d] for d in group):
        return None
    if not group:
        return order, (1, 1, math.prod(sizes))
    first, last = order.index(group[0]), order.index(group[-1])
    run = [d for d in order[first : last + 1] if sizes[d] > 1]
    if run != group:
        return None
    # lists: Dynamo does not take a generator here
    parts = (order[:first], group, order[last + 1 :])
    outer, within, inner = (math.prod([sizes[d] for d in part]) for part in parts)
    return order, (outer, within, inner)


def _from_outer(stride: Sequence[int]) -> list[int]:
    """The axes, the widest steps first, by comparisons: Dynamo does not sort sizes that vary."""
    order: list[int] = []
    for d in range(len(stride)):
        at = len(order)
        while at and stride[order[at - 1]] < stride[d]:
            at -= 1
        order.insert(at, d)
    return order


def dense_sizes(
    sizes: Sequence[int], stride: Sequence[int], shape: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """(outer, G, inner) if x is dense in memory and the groups lie there in their own order.

    As for `place_of`, no stride means contiguous.
    """
    found = place_of(sizes, stride, shape)
    if found is None or (stride and not is_run(sizes, stride, found[0])):
        return None
    # positions have an order of their own, in which x may not lie
    turned = sum([n > 1 for n in shape]) > 1 and list(found[0]) != sorted(found[0])
    return None if turned else found[1]


def is_run(sizes: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether memory is dense in this order of axes."""
    step = 1
    for d in reversed(order):
        if sizes[d] > 1 and stride[d] != step:
            return False
        step *= sizes[d]
    return True
