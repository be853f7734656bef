"""The gate unit in integers: every bit as its Verilog computes it.

With u_k = tau_k (x - theta_k) and branches L_k = s_k x + c_k, any K is K - 1 times the same step:

    d_1 = u_1,   d_k = u_k - softplus(-d_{k-1}),
    y_1 = L_1,   y_{k+1} = y_k + sigmoid(d_k) (L_{k+1} - y_k).

These are softmax gates exactly: d_k is the log odds of branch k + 1 against all below it together.
No exponential, no division and no sum over branches is needed, and every y_k is a mean of branches:
it has room where they have. A branch ends at the range of sums; an instance for which that shows in
y is refused (`format.saturates`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from threshold_gating.hardware.digital import segments
from threshold_gating.hardware.digital.codes import rounded, saturated
from threshold_gating.hardware.digital.format import (
    Format,
    Registers,
    Scaled,
    Unit,
    registers,
    unit_for,
)
from threshold_gating.instance import TG


def evaluate(
    instance: TG, codes: Tensor, f: Format, unit: Unit | None = None, v: Tensor | None = None
) -> Tensor:
    """Codes of y at codes of x, as the unit computes them; `v` is what branches read instead.

    By default the smallest unit of the format's bits is taken that can be the instance.
    """
    for each in (codes,) if v is None else (codes, v):
        _check_codes(each, f)
    unit = unit or unit_for(instance, bits=f.bits)
    return run(registers(instance, f, unit), codes, unit, v)


def _check_codes(codes: Tensor, f: Format) -> None:
    """Refuse what is no code of the format."""
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise TypeError(
            f"fixed_point.evaluate: codes are integers; got {codes.dtype}. Give quantise(x, "
            f"{f.fraction}, {f.bits})."
        )
    end = 2 ** (f.bits - 1)
    if codes.numel() and not (-end <= codes.min() and codes.max() < end):
        raise ValueError(
            f"fixed_point.evaluate: codes of {f} are from {-end} to {end - 1}; got "
            f"{codes.min().item()} to {codes.max().item()}. `quantise` gives the nearest."
        )


def run(r: Registers, x: Tensor, unit: Unit, v: Tensor | None = None) -> Tensor:
    """What the unit gives for codes of x with these register values, which may be tensors."""
    x = x.long()
    v = x if v is None else v.long()
    y, before = branch(r, 0, x, v, unit), None
    for k in range(len(r.theta)):
        apart = (x << unit.finer) - r.theta[k]
        if r.hard:
            beyond = apart >= 0 if r.closed[k] else apart > 0
            y = torch.where(beyond, branch(r, k + 1, x, v, unit), y)
            continue
        assert unit.gate is not None
        before = log_odds(apart, r.tau[k], before, unit)
        g = segments.evaluate(unit.gate, before)
        y = y + rounded(g * (branch(r, k + 1, x, v, unit) - y), unit.gate.out)
    return rounded(y, unit.guard).clamp(r.low, r.high)


def log_odds(apart: Tensor, tau: Scaled, before: Tensor | None, unit: Unit) -> Tensor:
    """d_k, from x - theta_k and d_{k-1}."""
    assert unit.gate is not None
    u = saturated((apart * tau.m) >> tau.e, unit.gate.bits + 1)
    if before is None:
        return u
    assert unit.log is not None
    below = torch.where(before < 0, segments.magnitude(unit.log, before), 0)
    soft = below + segments.evaluate(unit.log, before)
    return saturated(u - soft, unit.gate.bits + 1)


def branch(r: Registers, k: int, x: Tensor, v: Tensor, unit: Unit) -> Tensor:
    """L_k, with guard bits."""
    slope: Any = r.s[k].m
    if unit.square:
        slope = saturated(((x * r.q[k].m) >> r.q[k].e) + slope, unit.bits)
    return saturated((((v * slope) << unit.guard) >> r.s[k].e) + r.c[k], unit.sum_bits)
