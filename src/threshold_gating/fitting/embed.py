"""Instances with one more branch that are the same function, and f itself where it is lines.

A fit with K branches begins where one with K - 1 ended, so it is never worse.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from threshold_gating.fitting import shape
from threshold_gating.fitting.inputs import Function, values
from threshold_gating.instance import TG

_FAR = 36.0  # a weight of exp(-36) is below the rounding of one


def with_one_more(t: TG) -> list[TG]:
    """`t` with K + 1 branches, in several ways; the first is good as a result, all as a start."""
    if t.hard:
        beyond = t.theta[-1] + 1.0
        owner = (*t.owner, "lo") if t.owner is not None else None
        return [TG(t.tau, (*t.theta, beyond), (*t.s, t.s[-1]), (*t.c, t.c[-1]), owner=owner)]
    found = [_with_gate_below(t), _mirrored(_with_gate_below(_mirrored(t)))]
    if not isinstance(t.tau, tuple) and t.form == "softmax":
        middle, reach = sum(t.theta) / len(t.theta), max(t.theta) - min(t.theta) + 1 / t.tau
        found = [_multiplied(t, middle + part * reach) for part in (0.0, -1.0, 1.0)] + found
    return found


def _multiplied(t: TG, at: float) -> TG:
    """Numerator and denominator times 1 + exp(tau (x - at)), for softmax gates with one tau.

    Both are polynomials in exp(tau x), so one of the next degree is the same function; thresholds
    in order stay so.
    """
    assert isinstance(t.tau, float)
    log = [0.0]  # of the coefficients
    for theta in t.theta:
        log.append(log[-1] - t.tau * theta)
    shifted = [w - t.tau * at for w in log]
    total = [log[0], *(_log_sum(a, b) for a, b in zip(log[1:], shifted, strict=False)), shifted[-1]]
    lines = [[t.s[0], t.c[0]]]
    for k in range(1, t.K):
        part = math.exp(log[k] - total[k])
        old = (t.s[k - 1], t.c[k - 1]), (t.s[k], t.c[k])
        lines.append([(1 - part) * below + part * above for below, above in zip(*old, strict=True)])
    lines.append([t.s[-1], t.c[-1]])
    s, c = zip(*lines, strict=True)
    return TG(t.tau, [(a - b) / t.tau for a, b in pairwise(total)], s, c)


def _log_sum(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def _with_gate_below(t: TG) -> TG:
    """A threshold so far down that only the lowest branch is left there, with that branch twice."""
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * len(t.theta)
    slope = offset = 0.0
    lowest = math.inf
    for each, theta in zip(taus, t.theta, strict=True):  # where each branch has weight exp(-36)
        slope, offset = slope + each, offset + each * theta
        lowest = min(lowest, (offset - _FAR) / slope)
    tau = (max(taus), *taus) if isinstance(t.tau, tuple) else t.tau
    return TG(tau, (lowest, *t.theta), (t.s[0], *t.s), (t.c[0], *t.c), form=t.form)


def _mirrored(t: TG) -> TG:
    """t(-x)."""
    tau = t.tau[::-1] if isinstance(t.tau, tuple) else t.tau
    theta, s = ([-v for v in reversed(w)] for w in (t.theta, t.s))
    return TG(tau, theta, s, t.c[::-1], form=t.form)


def lines(f: Function) -> TG | None:
    """f itself as a hard instance if it is straight between its corners, else None.

    ValueError where f is not defined everywhere.
    """
    bends = [corner.at for corner in shape.corners(f)]
    if not bends:
        return None
    at = torch.tensor(bends, dtype=torch.float64)
    ends = torch.cat([at[:1] - 2, at, at[-1:] + 2])
    low, high = (ends[:-1] + part * ends.diff() for part in (0.25, 0.75))
    s = (values(f, high) - values(f, low)) / (high - low)
    c = values(f, low) - s * low
    below = (values(f, at) - (s * ends[1:] + c)[:-1]).abs() < 1e-12
    owner = ["lo" if own else "hi" for own in below.tolist()]
    t = TG(math.inf, bends, s.tolist(), c.tolist(), owner=owner)
    x = torch.cat([torch.linspace(-40, 40, 2003, dtype=torch.float64), at])
    y = values(f, x)
    return t if ((t(x) - y).abs() <= 1e-12 * (1 + y.abs())).all() else None
