"""Which op of torch computes an instance, decided by comparing parameters, never by a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.instance import TG

Op = Callable[[Tensor], Tensor]
# Found once: looking an op up takes as long as a small one runs.
_OPS: dict[str, Any] = {}
_IN_PLACE: dict[str, str] = {}

_FIXED = {
    taxonomy.TAXONOMY[key]: key.removesuffix("_clamp")
    for key in (
        *("relu", "silu", "sigmoid", "tanh", "mish", "relu6", "hardswish"),
        *("hardsigmoid", "hardsigmoid_clamp"),
    )
}


def native(t: TG) -> Op | None:
    """Torch's op for exactly the function of `t`, or None.

    >>> native(TG(1, 0, (0, 1), (0, 0)))(torch.tensor([1.0]))
    tensor([0.7311])
    """
    if t in _FIXED:
        return _op(_FIXED[t])
    if t.clamp is not None and set(t.s) == {1.0} and set(t.c) == {0.0} and t.q is None:
        return _op("hardtanh", *t.clamp)
    if t.K == 2 and t == taxonomy.leaky_relu(t.s[0]):
        return _op("leaky_relu", t.s[0])
    if t.K == 2 and t == taxonomy.threshold(t.theta[0], t.c[0]):
        return _op("threshold", t.theta[0], t.c[0])
    if t.K == 3:
        low, high = t.theta
        if low < high and t == taxonomy.hardtanh(low, high):
            return _op("hardtanh", low, high)
        if high >= 0 and t == taxonomy.hardshrink(high):
            return _op("hardshrink", high)
        if high >= 0 and t == taxonomy.softshrink(high):
            return _op("softshrink", high)
    return None


def overwriting(op: Op, x: Tensor) -> Tensor:
    """`op`, which `native` gave, written over its input where torch has such a form of it."""
    assert isinstance(op, partial)
    name, parameters = op.args
    over = _IN_PLACE.get(name)
    if over is None:
        over = _IN_PLACE[name] = name + "_" if hasattr(torch.ops.aten, name + "_") else name
    return _call(over, parameters, x)


def _op(name: str, *parameters: float) -> Op:
    return partial(_call, name, parameters)


def _call(name: str, parameters: tuple[float, ...], x: Tensor) -> Tensor:
    # The op itself and not torch.relu, which a converted network intercepts around us; looked up
    # here because ops cannot be pickled.
    op = _OPS.get(name)
    if op is None:
        op = _OPS[name] = getattr(torch.ops.aten, name).default
    y: Tensor = op(x, *parameters)
    return y
