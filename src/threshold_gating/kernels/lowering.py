"""Which op of torch computes an instance, decided by comparing parameters, never by a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.instance import TG

Op = Callable[[Tensor], Tensor]

_OPS: dict[str, Op] = {
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "mish": F.mish,
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardsigmoid_clamp": F.hardsigmoid,
    "hardswish": F.hardswish,
}
_FIXED = {taxonomy.TAXONOMY[key]: op for key, op in _OPS.items()}


def native(t: TG) -> Op | None:
    """Torch's op for exactly the function of `t`, or None.

    >>> native(TG(1, 0, (0, 1), (0, 0))).__name__
    'silu'
    """
    if t in _FIXED:
        return _FIXED[t]
    if t.clamp is not None and set(t.s) == {1.0} and set(t.c) == {0.0} and t.q is None:
        return partial(F.hardtanh, min_val=t.clamp[0], max_val=t.clamp[1])
    if t.K == 2 and t == taxonomy.leaky_relu(t.s[0]):
        return partial(F.leaky_relu, negative_slope=t.s[0])
    if t.K == 2 and t == taxonomy.threshold(t.theta[0], t.c[0]):
        return partial(F.threshold, threshold=t.theta[0], value=t.c[0])
    if t.K == 3:
        low, high = t.theta
        if low < high and t == taxonomy.hardtanh(low, high):
            return partial(F.hardtanh, min_val=low, max_val=high)
        if high >= 0 and t == taxonomy.hardshrink(high):
            return partial(F.hardshrink, lambd=high)
        if high >= 0 and t == taxonomy.softshrink(high):
            return partial(F.softshrink, lambd=high)
    return None
