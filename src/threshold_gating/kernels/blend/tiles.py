"""`blend` and its gradients on one tile: x as (outer, G, inner), parameters as (1, G, 1).

With one tau all softmax gates are powers of one exponential. Let t = tau (x - mean theta),
a = exp(min(t, 0)), b = exp(min(-t, 0)) and w_k = exp(tau sum_{m<k} (mean theta - theta_m)); then

    g_k = w_k a^(k-1) b^(K-k) / sum_j w_j a^(j-1) b^(K-j),

and the sum is never below 1, because a or b is 1 and w_1 = w_K = 1. The gradient of a threshold
comes from the masses on its two sides, U_m = sum_{k>m} g_k and V_m = 1 - U_m, without a difference
of nearly equal branches (L_k = s_k x + c_k):

    T_m = V_m sum_{k>m} g_k L_k - U_m sum_{k<=m} g_k L_k,
    dy/dx = sum_k g_k s_k + sum_m tau_m T_m,   dy/dtau_m = (x - theta_m) T_m,
    dy/dtheta_m = -tau_m T_m,                  dy/ds_k = g_k x,   dy/dc_k = g_k.

For K = 2 it is T = g_1 g_2 (L_2 - L_1), with a sigmoid of its own for either gate: 1 - g has no
digits where g is nearly 1. A gate multiplies x before a slope does, so that 0 meets no overflow.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels.blend.arithmetic import (
    Gradients,
    Scratch,
    Sums,
    added,
    argument,
    branch,
    is_one,
    is_there,
    line,
    mean,
    summed,
    times,
    to_inputs,
)
from threshold_gating.kernels.structure import Gate, Rows, Structure, Wanted
from threshold_gating.primitive import Value, soft

AUDITED_AS = "gates"  # see conversion.audit

_LOG2E = math.log2(math.e)
# The ops themselves, as in `primitive`: a converted network around us answers torch.sigmoid.
_aten = torch.ops.aten
_sigmoid_, _tanh_ = _aten.sigmoid_.default, _aten.tanh_.default
_clamp_, _maximum = _aten.clamp_.default, _aten.maximum.out
_minimum = _aten.minimum.out
# Largest exponent of two of the weights w_k: they, times a slope, and their sum stay in float32.
_WIDEST = 60.0
# exp2 of less is 0; so arguments may be clamped there, as in `primitive`.
UNDERFLOW = {torch.float32: 150.0, torch.float64: 1080.0}


def forward(
    x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, out: Tensor | None = None
) -> Tensor:
    """y of one tile; `v` is what the branches read, mostly `x` itself. `out` may become y."""
    if structure.hard:
        return _forward_hard(x, v, structure, p, room)
    if structure.K > 2:
        parts, share = _parts(x, p.tau, p.theta, room)
        slope, constant = (mean(parts, w, room, share) for w in (p.s, p.c))
    elif structure.gate == Gate.CENTRED and all(map(_is_balanced, (p.s, p.c))):
        swing = _tanh_(argument(x, p.tau[0], p.theta[0], 0.5, room))
        lines = [((w[0] + w[1]) / 2, (w[1] - w[0]) / 2) for w in (p.c, p.s)]
        constant = line(swing, *lines[0], room)
        slope = line(swing, *lines[1], None)
    else:
        slope, constant = _two_means(x, p, room)
    if isinstance(slope, Tensor):
        y: Value = torch.mul(slope, v, out=slope if out is None else out)
    else:
        y = branch(slope, v, 0.0, room)
    y = added(y, constant)
    if not isinstance(y, Tensor):
        # Equal constant branches do not depend on x; NaN is passed on all the same.
        return torch.where(x.isnan(), x, y)
    if structure.K > 2 and not math.isfinite(float(y.sum())):
        return _by_reference(x, v, structure, p)
    return y


def _by_reference(x: Tensor, v: Tensor, structure: Structure, p: Rows) -> Tensor:
    """What is seldom: an infinite x or result, or slopes that overflow before gates shrink them."""
    tau = math.inf if structure.hard else p.tau if len(p.tau) > 1 else p.tau[0]
    theta = [torch.as_tensor(t, dtype=x.dtype) for t in p.theta]  # data, which may have crossed
    other = None if v is x else v
    return primitive.blend(x, tau, theta, p.s, p.c, v=other, owner=structure.owner, known=True)


def _two_means(x: Tensor, p: Rows, room: Scratch) -> tuple[Value, Value]:
    """The mean slope and the mean constant of two branches.

    Of each pair w_small + (w_large - w_small) g_large does not cancel; so where the larger ones
    are on one side, that side's gate is enough.
    """
    pairs = [w for w in (p.s, p.c) if not _are_equal(w)]
    for side in (1, 0):
        if all(_is_larger(w, side) for w in pairs):
            u = argument(x, p.tau[0], p.theta[0], 1.0 if side else -1.0, room)
            gate = _sigmoid_(u)
            rows = [(w[1 - side], w[side] - w[1 - side]) for w in (p.c, p.s)]
            constant = line(gate, *rows[0], room)
            return line(gate, *rows[1], None), constant
    gates = _two_gates(argument(x, p.tau[0], p.theta[0], 1.0, room), room)
    return mean(gates, p.s, room), mean(gates, p.c, room)


def _two_gates(u: Tensor, room: Scratch) -> list[Tensor]:
    """Both gates; the upper one over u."""
    return [_sigmoid_(torch.neg(u, out=room.new())), _sigmoid_(u)]


def _are_equal(w: Sequence[Value]) -> bool:
    return not isinstance(w[0], Tensor) and not isinstance(w[1], Tensor) and w[0] == w[1]


def _is_larger(w: Sequence[Value], side: int) -> bool:
    """Whether w on this side is nowhere much smaller than on the other, nor the two too far apart
    for their difference."""
    size, other = (t.abs() if isinstance(t, Tensor) else abs(t) for t in (w[side], w[1 - side]))
    return _holds((4 * size >= other) & (size < 1e37))


def _is_balanced(w: Sequence[Value]) -> bool:
    """Whether the two are alike in size, so that a mean about their midpoint does not cancel."""
    return _is_larger(w, 0) and _is_larger(w, 1)


def _holds(condition: bool | Tensor) -> bool:
    return bool(condition.all()) if isinstance(condition, Tensor) else condition


def _forward_hard(x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch) -> Tensor:
    sums = [float(w.sum()) for w in ((x,) if v is x else (x, v))]
    known = all(_holds(t == t) for t in p.theta)
    if not known or not all(map(math.isfinite, sums)):  # 0 * inf, NaN
        return _by_reference(x, v, structure, p)
    used = [is_there(s) or is_there(c) for s, c in zip(p.s, p.c, strict=True)]
    g = _hard_gates(x, structure, p, room, used)
    slope, constant = mean(g, p.s, room), mean(g, p.c, room)
    y = slope.mul_(v) if isinstance(slope, Tensor) else branch(slope, v, 0.0, room)
    y = added(y, constant)
    return y if isinstance(y, Tensor) else torch.full_like(x, y)


def backward(
    dy: Tensor, x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    """The gradients of one tile, with the gates computed anew."""
    if structure.hard:
        return _backward_hard(dy, x, v, structure, p, room, wanted)
    way = _backward_two if structure.K == 2 else _backward_many
    return way(dy, x, v, p, room, wanted)


def _backward_two(
    dy: Tensor, x: Tensor, v: Tensor, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    tau, theta = p.tau[0], p.theta[0]
    moved = room.difference(x, theta) if is_there(theta) else x
    gates = _two_gates(room.product(moved, tau), room)
    low, high = gates
    turn = torch.mul(low, high.mul_(dy), out=room.new())
    low.mul_(dy)
    rise, gap = p.s[1] - p.s[0], p.c[1] - p.c[0]
    apart = room.product(turn, gap) if is_there(gap) else None
    if is_there(rise) or apart is None:
        turn.mul_(v)
        turn = turn if is_one(rise) else turn.mul_(rise)  # dy T
        turn = turn if apart is None else turn.add_(apart)
    else:
        turn = apart
    through = mean(gates, p.s, room)  # of gates that are weighed with dy already
    if not isinstance(through, Tensor):
        through = room.product(dy, through)
    sums = Sums([], [], [], [])
    if wanted.theta:
        sums.theta.append(-tau * summed(turn))
    if wanted.tau:
        sums.tau.append(summed(room.product(turn, moved)))
    if wanted.c:
        sums.c.extend([summed(gate) for gate in gates])
    if wanted.s:
        sums.s.extend([summed(gate.mul_(v)) for gate in gates])
    dx, dv = to_inputs(through, turn, tau, x is v, wanted)
    return Gradients(dx, dv, sums)


def _backward_many(
    dy: Tensor, x: Tensor, v: Tensor, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    g = _gates(x, p.tau, p.theta, room)
    slope = mean(g, p.s, room)
    sums = Sums([], [], [], [])
    turn: Tensor | None = None
    taus = p.tau * len(p.theta) if len(p.tau) == 1 else p.tau
    for m, each in enumerate(_turns(dy, v, g, p, room)):
        if wanted.theta:
            sums.theta.append(-taus[m] * summed(each))
        if wanted.tau:
            sums.tau.append(summed(room.difference(x, p.theta[m]).mul_(each)))
        step = each if len(p.tau) == 1 else each.mul_(taus[m])
        turn = step if turn is None else turn.add_(step)
    if wanted.tau and len(p.tau) == 1:
        sums.tau[:] = [sum(sums.tau[1:], sums.tau[0])]
    _branch_sums(dy, v, g, sums, wanted)
    outer = p.tau[0] if len(p.tau) == 1 else 1.0
    dx, dv = to_inputs(times(slope, dy, room), turn, outer, x is v, wanted)
    return Gradients(dx, dv, sums)


def _turns(dy: Tensor, v: Tensor, g: Sequence[Tensor], p: Rows, room: Scratch) -> Iterator[Tensor]:
    """dy T_m for each threshold, low to high, in memory of its own."""
    affine = any(is_there(c) for c in p.c)
    weighed = []  # g_k L_k, or g_k s_k where L_k = s_k v
    for gk, s, c in zip(g, p.s, p.c, strict=True):
        value = _within_range(branch(s, v, c, room)) if affine else s
        weighed.append(room.product(gk, value))
    above, values = [g[-1]], [weighed[-1]]
    for k in range(len(g) - 2, 0, -1):
        above.append(room.sum(above[-1], g[k]))
        values.append(room.sum(values[-1], weighed[k]))
    outer = dy if affine else _within_range(room.product(dy, v))
    below, total = g[0], weighed[0]
    for m in range(len(g) - 1):
        if m:
            below, total = room.sum(below, g[m]), total.add_(weighed[m])
        turn = room.product(values.pop(), below)
        yield turn.addcmul_(above.pop(), total, value=-1).mul_(outer)


def _within_range(t: Value) -> Value:
    """What overflowed as the largest number, for infinity times a gate of 0 would be NaN."""
    if not isinstance(t, Tensor):
        return t
    largest = torch.finfo(t.dtype).max * (1 - 2**-10)  # a mean of such ones does not overflow
    clamped: Tensor = _clamp_(t, -largest, largest)
    return clamped


def _backward_hard(
    dy: Tensor, x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    """The slope of the region x lies in; a comparison gives tau and theta nothing.

    An anchored branch has the value c at its threshold and moves with it, so theta and s get from
    each branch what its constant gets, times how that follows from them.
    """
    used = [wanted.s or wanted.c or is_there(s) for s in p.s]
    gates = _hard_gates(x, structure, p, room, used)
    # 0 * inf: a branch that is not taken gives nothing, and a flat one lets nothing through
    finite = math.isfinite(float(dy.sum()))
    calm = not wanted.s or math.isfinite(float(v.sum()))
    reached = {k: v if calm else torch.where(g > 0, v, 0.0) for k, g in gates.items()}
    for k, g in gates.items():
        gates[k] = g.mul_(dy) if finite else torch.where(g > 0, dy, 0.0)
    anchored, moved = structure.anchored, dict[int, Tensor]()
    masses = {k: summed(g) for k, g in gates.items() if anchored or wanted.c}
    if anchored and wanted.theta:
        for k, mass in masses.items():
            if is_there(p.s[k]):
                at = max(k - 1, 0)
                moved[at] = moved[at] - p.s[k] * mass if at in moved else -p.s[k] * mass
    slope = mean(gates, p.s, room, over=not wanted.s)
    through = slope if isinstance(slope, Tensor) else room.product(dy, slope)
    if not finite:
        through = torch.where(dy.isinf() & through.isnan(), 0.0, through)
    sums = Sums([], [], [], [])
    if wanted.theta:
        still = torch.zeros_like(x[:1, :, :1])
        sums.theta.extend([moved.get(k, still) for k in range(len(p.theta))])
    if wanted.c:
        sums.c.extend(masses.values())
    for k, g in gates.items() if wanted.s else ():
        total = summed(g.mul_(reached[k]))
        sums.s.append(total - p.theta[max(k - 1, 0)] * masses[k] if anchored else total)
    return Gradients(*to_inputs(through, None, 0.0, x is v, wanted), sums)


def _branch_sums(dy: Tensor, v: Tensor, g: Sequence[Tensor], sums: Sums, wanted: Wanted) -> None:
    """sum dy g_k v and sum dy g_k; overwrites the gates."""
    for gk in g if wanted.s or wanted.c else ():
        gk.mul_(dy)
        if wanted.c:
            sums.c.append(summed(gk))
        if wanted.s:
            sums.s.append(summed(gk.mul_(v)))


def _hard_gates(
    x: Tensor, structure: Structure, p: Rows, room: Scratch, used: Sequence[bool]
) -> dict[int, Tensor]:
    """The gates that are used, 0 and 1 in floats: a mask of bools is four times as slow to use."""
    owners = structure.owner or ("lo",) * len(p.theta)
    beyond = [
        (torch.gt if owner == "lo" else torch.ge)(x, theta, out=room.new())
        for theta, owner in zip(p.theta, owners, strict=True)
    ]
    if not _are_in_order(p.theta):  # beyond at least 1, 2, ... of them, see `primitive`
        for last in range(len(beyond) - 1, 0, -1):
            for k in range(last):
                a, b = beyond[k : k + 2]
                beyond[k : k + 2] = _maximum(a, b, out=room.new()), _minimum(a, b, out=b)
    found = {0: torch.rsub(beyond[0], 1)} if used[0] else {}
    found |= {k: room.difference(*beyond[k - 1 : k + 1]) for k in range(1, len(beyond)) if used[k]}
    return found | ({len(beyond): beyond[-1]} if used[-1] else {})


def _are_in_order(theta: Sequence[Value]) -> bool:
    return all(_holds(a <= b) for a, b in pairwise(theta))


def _gates(x: Tensor, tau: Sequence[Value], theta: Sequence[Value], room: Scratch) -> list[Tensor]:
    """The K >= 3 softmax gates at x."""
    parts, share = _parts(x, tau, theta, room)
    return [part.mul_(share) for part in parts]


def _parts(
    x: Tensor, tau: Sequence[Value], theta: Sequence[Value], room: Scratch
) -> tuple[list[Tensor], Tensor]:
    """The gates before they are divided by their sum, and one over it."""
    parts = _powers(x, tau[0], theta, room) if len(tau) == 1 else None
    if parts is None:
        parts = _exponentials(x, tau, theta, room)
    total = room.sum(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return parts, total.reciprocal_()


def _powers(x: Tensor, tau: Value, theta: Sequence[Value], room: Scratch) -> list[Tensor] | None:
    """w_k a^(k-1) b^(K-k), or None where a weight leaves the range of float32, or where thresholds
    are so far out that their middle has not digits enough."""
    K = len(theta) + 1
    middle = sum(theta[1:], theta[0]) / (K - 1)
    if not isinstance(middle, Tensor) and x.dtype == torch.float32:
        middle = ctypes.c_float(middle).value  # as it is taken from x
    exponents: list[Value] = []
    for t in theta:
        step = (middle - t) * (tau * _LOG2E)
        exponents.append(exponents[-1] + step if exponents else step)
    lost = exponents.pop()  # 0 but for the rounding of the middle
    if any(_size(e) > _WIDEST for e in exponents) or _size(lost) > 2**8 * torch.finfo(x.dtype).eps:
        return None
    up = argument(x, tau, middle, _LOG2E, room)
    down = _clamp_(torch.neg(up, out=room.new()), None, 0).exp2_()
    up = _clamp_(up, None, 0).exp2_()
    rising, falling = [up], [down]
    for _ in range(K - 2):
        rising.append(room.product(rising[-1], up))
        falling.append(room.product(falling[-1], down))
    parts = [falling[-1]]
    for k in range(1, K - 1):
        e = exponents[k - 1]
        weight = torch.exp2(e) if isinstance(e, Tensor) else 2.0**e
        parts.append(room.product(rising[k - 1], falling[K - 2 - k]).mul_(weight))
    return [*parts, rising[-1]]


def _size(e: Value) -> float:
    return float(e.abs().max()) if isinstance(e, Tensor) else abs(e)


def _exponentials(
    x: Tensor, tau: Sequence[Value], theta: Sequence[Value], room: Scratch
) -> list[Tensor]:
    """exp(l_k - max l) for the running sums l_k of the arguments."""
    taus = list(tau) * len(theta) if len(tau) == 1 else tau
    arguments = [argument(x, t, th, _LOG2E, room) for t, th in zip(taus, theta, strict=True)]
    if not _are_in_order(theta):
        most = torch.finfo(x.dtype).max / (4 * len(theta))  # no sum of them overflows
        logits = soft.relative_logits([_clamp_(u, -most, most) for u in arguments])
        return [logit.exp2_() for logit in logits]
    bound = UNDERFLOW[x.dtype]
    logits = []
    for u in arguments:
        _clamp_(u, -bound, bound)
        logits.append(u.add_(logits[-1]) if logits else u)
    top = _clamp_(room.copy(logits[0]), 0)
    for logit in logits[1:]:
        _maximum(top, logit, out=top)
    parts = [logit.sub_(top).exp2_() for logit in logits]
    return [top.neg_().exp2_(), *parts]
