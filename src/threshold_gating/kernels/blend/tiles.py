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

In eager torch every step is a pass over memory: numbers 0 and 1 have none, what is not needed again
is overwritten, and results go to memory that has been used before (a `Scratch`), because new pages
cost more than the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating import primitive
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
        return self.copy(a) if _is_one(b) else torch.mul(a, b, out=self.new())

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


def forward(
    x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, out: Tensor | None = None
) -> Tensor:
    """y of one tile; `v` is what the branches read, mostly `x` itself. `out` may become y."""
    if structure.hard:
        return _forward_hard(x, v, structure, p, room)
    if structure.K > 2:
        parts, share = _parts(x, p.tau, p.theta, room)
        slope, constant = (_mean(parts, w, room, share) for w in (p.s, p.c))
        if isinstance(slope, Tensor) and not math.isfinite(float(v.sum())):
            v = soft.settled(v, slope)
    elif structure.gate == Gate.CENTRED and all(map(_is_balanced, (p.s, p.c))):
        swing = _tanh_(_argument(x, p.tau[0], p.theta[0], 0.5, room))
        lines = [((w[0] + w[1]) / 2, (w[1] - w[0]) / 2) for w in (p.c, p.s)]
        constant = _line(swing, *lines[0], room)
        slope = _line(swing, *lines[1], None)
    else:
        slope, constant = _two_means(x, p, room)
    if isinstance(slope, Tensor):
        y: Value = torch.mul(slope, v, out=slope if out is None else out)
    else:
        y = _branch(slope, v, 0.0, room)
    y = _added(y, constant)
    # Equal constant branches do not depend on x; NaN is passed on all the same.
    return y if isinstance(y, Tensor) else torch.where(x.isnan(), x, y)


def _two_means(x: Tensor, p: Rows, room: Scratch) -> tuple[Value, Value]:
    """The mean slope and the mean constant of two branches.

    Of each pair w_small + (w_large - w_small) g_large does not cancel; so where the larger ones
    are on one side, that side's gate is enough.
    """
    pairs = [w for w in (p.s, p.c) if not _are_equal(w)]
    for side in (1, 0):
        if all(_is_larger(w, side) for w in pairs):
            u = _argument(x, p.tau[0], p.theta[0], 1.0 if side else -1.0, room)
            gate = _sigmoid_(u)
            rows = [(w[1 - side], w[side] - w[1 - side]) for w in (p.c, p.s)]
            constant = _line(gate, *rows[0], room)
            return _line(gate, *rows[1], None), constant
    gates = _two_gates(_argument(x, p.tau[0], p.theta[0], 1.0, room), room)
    return _mean(gates, p.s, room), _mean(gates, p.c, room)


def _two_gates(u: Tensor, room: Scratch) -> list[Tensor]:
    """Both gates; the upper one over u."""
    return [_sigmoid_(torch.neg(u, out=room.new())), _sigmoid_(u)]


def _are_equal(w: Sequence[Value]) -> bool:
    return not isinstance(w[0], Tensor) and not isinstance(w[1], Tensor) and w[0] == w[1]


def _is_larger(w: Sequence[Value], side: int) -> bool:
    """Whether w on this side is nowhere much smaller than on the other."""
    size, other = (t.abs() if isinstance(t, Tensor) else abs(t) for t in (w[side], w[1 - side]))
    return _holds(4 * size >= other)


def _is_balanced(w: Sequence[Value]) -> bool:
    """Whether the two are alike in size, so that a mean about their midpoint does not cancel."""
    return _is_larger(w, 0) and _is_larger(w, 1)


def _holds(condition: bool | Tensor) -> bool:
    return bool(condition.all()) if isinstance(condition, Tensor) else condition


def _forward_hard(x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch) -> Tensor:
    sums = [float(w.sum()) for w in ((x,) if v is x else (x, v))]
    if not all(map(math.isfinite, sums)):  # 0 * inf; seldom, so by the reference
        other = None if v is x else v
        theta = [torch.as_tensor(t, dtype=x.dtype) for t in p.theta]  # data, which may have crossed
        return primitive.blend(x, math.inf, theta, p.s, p.c, v=other, owner=structure.owner)
    g = _hard_gates(x, structure, p, room)
    slope, constant = _mean(g, p.s, room), _mean(g, p.c, room)
    y = slope.mul_(v) if isinstance(slope, Tensor) else _branch(slope, v, 0.0, room)
    y = _added(y, constant)
    return y if isinstance(y, Tensor) else torch.full_like(x, y)


def backward(
    dy: Tensor, x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    """The gradients of one tile, with the gates computed anew."""
    if structure.hard:
        return _backward_hard(dy, x, v, structure, p, room, wanted)
    way = _backward_two if structure.K == 2 else _backward_many
    return way(dy, x, v, structure, p, room, wanted)


def _backward_two(
    dy: Tensor, x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    tau, theta = p.tau[0], p.theta[0]
    moved = room.difference(x, theta) if _is_there(theta) else x
    gates = _two_gates(room.product(moved, tau), room)
    low, high = gates
    turn = torch.mul(low, high.mul_(dy), out=room.new())
    low.mul_(dy)
    rise, gap = p.s[1] - p.s[0], p.c[1] - p.c[0]
    apart = room.product(turn, gap) if _is_there(gap) else None
    if _is_there(rise) or apart is None:
        turn.mul_(v)
        turn = turn if _is_one(rise) else turn.mul_(rise)  # dy T
        turn = turn if apart is None else turn.add_(apart)
    else:
        turn = apart
    through = _mean(gates, p.s, room)  # of gates that are weighed with dy already
    if not isinstance(through, Tensor):
        through = room.product(dy, through)
    sums = Sums([], [], [], [])
    if wanted.theta:
        sums.theta.append(-tau * _sum(turn))
    if wanted.tau:
        sums.tau.append(_sum(room.product(turn, moved)))
    if wanted.c:
        sums.c.extend([_sum(gate) for gate in gates])
    if wanted.s:
        sums.s.extend([_sum(gate.mul_(v)) for gate in gates])
    dx, dv = _to_inputs(through, turn, tau, x is v, wanted)
    return Gradients(dx, dv, sums)


def _backward_many(
    dy: Tensor, x: Tensor, v: Tensor, structure: Structure, p: Rows, room: Scratch, wanted: Wanted
) -> Gradients:
    g = _gates(x, p.tau, p.theta, room)
    slope = _mean(g, p.s, room)
    sums = Sums([], [], [], [])
    turn: Tensor | None = None
    taus = p.tau * len(p.theta) if len(p.tau) == 1 else p.tau
    for m, each in enumerate(_turns(dy, v, g, p, room)):
        if wanted.theta:
            sums.theta.append(-taus[m] * _sum(each))
        if wanted.tau:
            sums.tau.append(_sum(room.difference(x, p.theta[m]).mul_(each)))
        step = each if len(p.tau) == 1 else each.mul_(taus[m])
        turn = step if turn is None else turn.add_(step)
    if wanted.tau and len(p.tau) == 1:
        sums.tau[:] = [sum(sums.tau[1:], sums.tau[0])]
    _branch_sums(dy, v, g, sums, wanted)
    outer = p.tau[0] if len(p.tau) == 1 else 1.0
    dx, dv = _to_inputs(_times(slope, dy, room), turn, outer, x is v, wanted)
    return Gradients(dx, dv, sums)


def _turns(dy: Tensor, v: Tensor, g: Sequence[Tensor], p: Rows, room: Scratch) -> Iterator[Tensor]:
    """dy T_m for each threshold, low to high, in memory of its own."""
    affine = any(_is_there(c) for c in p.c)
    weighed = []  # g_k L_k, or g_k s_k where L_k = s_k v
    for gk, s, c in zip(g, p.s, p.c, strict=True):
        branch = _within_range(_branch(s, v, c, room)) if affine else s
        weighed.append(room.product(gk, branch))
    above, values = [g[-1]], [weighed[-1]]
    for k in range(len(g) - 2, 0, -1):
        above.append(room.sum(above[-1], g[k]))
        values.append(room.sum(values[-1], weighed[k]))
    outer = dy if affine else _within_range(room.product(dy, v))
    below, value = g[0], weighed[0]
    for m in range(len(g) - 1):
        if m:
            below, value = room.sum(below, g[m]), value.add_(weighed[m])
        turn = room.product(values.pop(), below)
        yield turn.addcmul_(above.pop(), value, value=-1).mul_(outer)


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
    g = _hard_gates(x, structure, p, room)
    slope = _mean(g, p.s, room)
    flat: Tensor | None = None
    if isinstance(slope, Tensor) and not math.isfinite(float(dy.sum())):
        flat = slope == 0
    sums = Sums([], [], [], [])
    anchored = structure.anchored
    moved: dict[int, Tensor] = {}
    finite = not wanted.s or math.isfinite(float(v.sum()))
    for k, gk in enumerate(g):
        at = max(k - 1, 0)
        moves = anchored and wanted.theta and _is_there(p.s[k])
        if not (moves or wanted.s or wanted.c):
            continue
        reached = v if finite else torch.where(gk > 0, v, 0.0)  # 0 * inf where it is not taken
        gk.mul_(dy)
        mass = _sum(gk) if moves or wanted.c or anchored else None
        if wanted.c and mass is not None:
            sums.c.append(mass)
        if moves and mass is not None:
            moved[at] = moved[at] - p.s[k] * mass if at in moved else -p.s[k] * mass
        if wanted.s:
            total = _sum(gk.mul_(reached))
            sums.s.append(total if mass is None or not anchored else total - p.theta[at] * mass)
    if wanted.theta:
        still = torch.zeros_like(x[:1, :, :1])
        sums.theta.extend([moved.get(k, still) for k in range(len(p.theta))])
    through = _times(slope, dy, room)
    if flat is not None:  # 0 * inf: a flat branch lets no gradient through, as in torch
        through.masked_fill_(flat, 0.0)
    dx, dv = _to_inputs(through, None, 0.0, x is v, wanted)
    return Gradients(dx, dv, sums)


def _branch_sums(dy: Tensor, v: Tensor, g: Sequence[Tensor], sums: Sums, wanted: Wanted) -> None:
    """sum dy g_k v and sum dy g_k; overwrites the gates."""
    for gk in g if wanted.s or wanted.c else ():
        gk.mul_(dy)
        if wanted.c:
            sums.c.append(_sum(gk))
        if wanted.s:
            sums.s.append(_sum(gk.mul_(v)))


def _times(slope: Value, dy: Tensor, room: Scratch) -> Tensor:
    """slope dy, over the slope if that is ours."""
    return slope.mul_(dy) if isinstance(slope, Tensor) else room.product(dy, slope)


def _to_inputs(
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


def _sum(t: Tensor) -> Tensor:
    """Over all that shares a parameter."""
    return t.sum((0, 2), keepdim=True)


def _is_there(w: Value) -> bool:
    return isinstance(w, Tensor) or w != 0


def _is_one(w: Value) -> bool:
    return not isinstance(w, Tensor) and w == 1


def _added(y: Value, constant: Value) -> Value:
    """y + constant over y, which is ours."""
    if not isinstance(y, Tensor):
        return constant if y == 0 else constant + y
    return y.add_(constant) if _is_there(constant) else y


def _branch(s: Value, v: Tensor, c: Value, room: Scratch) -> Value:
    """s v + c in memory of its own."""
    return _added(room.product(v, s), c) if _is_there(s) else c


def _line(g: Tensor, start: Value, rise: Value, room: Scratch | None) -> Value:
    """start + rise g without the steps that numbers make void; over g where no room is given."""
    if not _is_there(rise):
        return start
    if room is None and not _is_one(rise):
        g.mul_(rise)
    return _added(g if room is None else room.product(g, rise), start)


def _argument(x: Tensor, tau: Value, theta: Value, scale: float, room: Scratch) -> Tensor:
    """scale tau (x - theta) in memory of its own."""
    factor = tau if scale == 1 else tau * scale
    if not _is_there(theta):
        return room.product(x, factor)
    u = room.difference(x, theta)
    return u if _is_one(factor) else u.mul_(factor)


def _mean(
    g: Sequence[Tensor], w: Sequence[Value], room: Scratch, share: Tensor | None = None
) -> Value:
    """sum_k g_k w_k, times `share` if given; equal numbers need no gates, these sum to one."""
    if not any(isinstance(wk, Tensor) for wk in w) and len(set(w)) == 1:
        return w[0]
    total: Tensor | None = None
    for gk, wk in zip(g, w, strict=True):
        if not _is_there(wk):
            continue
        if total is None:
            total = room.product(gk, wk)
        elif isinstance(wk, Tensor):
            total.addcmul_(gk, wk)
        else:
            total.add_(gk, alpha=wk)
    assert total is not None
    return total if share is None else total.mul_(share)


def _hard_gates(x: Tensor, structure: Structure, p: Rows, room: Scratch) -> list[Tensor]:
    """0 and 1 in floats: a mask of bools is four times as slow to use."""
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
    below = torch.rsub(beyond[0], 1)
    return [below, *(room.difference(a, b) for a, b in pairwise(beyond)), beyond[-1]]


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
    """w_k a^(k-1) b^(K-k), or None where a weight leaves the range of float32."""
    K = len(theta) + 1
    middle = sum(theta[1:], theta[0]) / (K - 1)
    exponents: list[Value] = []
    for t in theta[:-1]:
        step = (middle - t) * (tau * _LOG2E)
        exponents.append(exponents[-1] + step if exponents else step)
    if any(_size(e) > _WIDEST for e in exponents):
        return None
    up = _argument(x, tau, middle, _LOG2E, room)
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
    arguments = [_argument(x, t, th, _LOG2E, room) for t, th in zip(taus, theta, strict=True)]
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
