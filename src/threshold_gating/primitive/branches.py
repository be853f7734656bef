"""Branches, affine or quadratic functions of their input, and their mean under soft gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from threshold_gating.primitive import soft
from threshold_gating.primitive.arguments import Anchor
from threshold_gating.primitive.soft import Value, is_number

Weights = tuple[Sequence[Value], Sequence[Value], Sequence[Value]]  # q, s and c of K branches


def inputs_of(x: Tensor, v: Tensor | Sequence[Tensor] | None, K: int) -> list[Tensor]:
    """What each branch reads, in the computing dtype; the same object where it is shared."""
    if v is None or isinstance(v, Tensor):
        return [x if v is None else v.to(x.dtype)] * K
    if len(v) != K:
        raise ValueError(f"v is one tensor or one for each of the K = {K} branches; got {len(v)}.")
    return [z.to(x.dtype) for z in v]


def averaged(
    x: Tensor,
    v: Tensor | Sequence[Tensor] | None,
    u: Sequence[Tensor],
    form: str,
    centred: bool | None,
    weights: Weights,
) -> Tensor:
    """Soft gates with the arguments u: y = (mean(q) v + mean(s)) v + mean(c)."""
    curves, slopes, constants = weights
    K, mean = len(slopes), _mean(u, form, centred, weights)
    inputs = inputs_of(x, v, K)
    if all(v is inputs[0] for v in inputs):
        curve, slope, constant = mean(curves), mean(slopes), mean(constants)
        y = polynomial(inputs[0], curve, slope, constant)
        if isinstance(slope, Tensor) and is_number(curve, 0):
            read = inputs[0] if K == 2 else soft.settled(inputs[0], slope)
            y = soft.times(read, slope)
            y = y if is_number(constant, 0) else y + constant
    else:
        y = mean([branch(*p) for p in zip(inputs, curves, slopes, constants, strict=True)])
    # Equal constant branches do not depend on x; NaN is passed on all the same.
    return y if isinstance(y, Tensor) else torch.where(x.isnan(), x, y)


def _mean(
    u: Sequence[Tensor], form: str, centred: bool | None, weights: Weights
) -> Callable[[Sequence[Value]], Value]:
    """What takes the mean of a value for each branch."""
    curves, slopes, constants = weights
    K = len(slopes)
    if centred is None:
        centred = K == 2 and soft.are_opposite(slopes, constants, curves)
    if centred:
        return soft.mean_about_midpoint(u[0])
    used = [any(not is_number(w[k], 0) for w in weights) for k in range(K)]
    return soft.mean_of(soft.gates(u, form, used))


def polynomial(v: Tensor, q: Value, s: Value, c: Value) -> Value:
    """(q v + s) v + c without the steps that numbers make void."""
    slope = s if is_number(q, 0) else q * v if is_number(s, 0) else q * v + s
    if is_number(slope, 0):
        return c
    y = v if is_number(slope, 1) else v * slope
    return y if is_number(c, 0) else y + c


def branch(v: Tensor, q: Value, s: Value, c: Value, anchor: Anchor = None) -> Value:
    """One branch: from its anchor a as (v - a)(q (v - b)) or s (v - a), else the polynomial.

    A coefficient that is 1/n divides by n there, as torch's hardsigmoid and hardswish do.
    """
    if anchor is None:
        return polynomial(v, q, s, c)
    if isinstance(q, Tensor) or isinstance(s, Tensor):
        raise TypeError("an anchored branch has numbers for s and q; got a tensor.")
    a, y = anchor
    lead = q or s
    z = (v - a) if q == 0 else (v - a) * polynomial(v, 0.0, 1.0, a + s / q)
    z = z / (1 / lead) if (1 / lead).is_integer() else z * lead
    return z if y == 0 else z + y
