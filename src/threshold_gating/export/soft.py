"""Soft gates in operators of ONNX: a sigmoid, a tanh, an exponential or a softmax, then products
and sums. Of these forms the shortest that loses no digits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from threshold_gating.export.body import ZERO, Body, Value, curves, equals, number, same
from threshold_gating.export.graph import ExportError, Gate

# Of float32 and of float64: how far below the largest a logit is whose gate is below the rounding,
# and the largest number whose exponential is finite.
_CLOSED, _LARGEST = (17.0, 37.0), (87.0, 708.0)


def soft(
    b: Body,
    gate: Gate,
    x: str,
    v: Value,
    tau: Sequence[Any],
    theta: Sequence[Any],
    s: Sequence[Any],
    c: Sequence[Any],
) -> Value:
    """y = (mean(q) v + mean(s)) v + mean(c), the means under the gates."""
    known = gate.structure
    assert known is not None
    if len(s) == 2:
        mean = _two(b, x, tau[0], theta[0])
    elif known.form == "product":
        mean = _product(b, x, tau, theta)
    else:
        by_one = len(tau) == 1 and not known.q
        mean = (
            (by_one and _mirrored(b, x, tau[0], theta, s, c))
            or (by_one and _powers(b, x, tau, theta, s, c))
            or _many(b, x, tau, theta)
        )
    q, slope, constant = mean(curves(gate)), mean(s), mean(c)
    if equals(s[0], 0) and equals(s[-1], 0) and not equals(slope, 0) and len(s) > 2:
        v = _inside(b, v, tau, theta)  # far out only the constants are left
    return b.add(b.mul(v, b.add(b.mul(q, v), slope)), constant)


Mean = Callable[[Sequence[Any]], Value]


def _moved(b: Body, x: Value, tau: Tensor, theta: Tensor) -> Value:
    return b.mul(tau, b.sub(x, theta))


def _two(b: Body, x: str, tau: Tensor, theta: Tensor) -> Mean:
    """Two gates: sigmoids of either side, or tanh about the midpoint of opposite branches."""
    made: dict[str, Value] = {}

    def once(name: str, make: Callable[[], Value]) -> Value:
        if name not in made:
            made[name] = make()
        return made[name]

    def u() -> Value:
        return once("u", lambda: _moved(b, x, tau, theta))

    def mean(w: Sequence[Any]) -> Value:
        low, high = w
        if same(w):
            return low  # type: ignore[no-any-return]
        if same((low, -high)):
            return b.mul(high, once("tanh", lambda: b.op("Tanh", _moved(b, x, tau / 2, theta))))
        up = b.mul(high, once("up", lambda: b.op("Sigmoid", u()))) if not equals(high, 0) else ZERO
        if equals(low, 0):
            return up
        down = b.mul(low, once("down", lambda: b.op("Sigmoid", b.op("Neg", u()))))
        return b.add(down, up)

    return mean


def apart(
    b: Body,
    gate: Gate,
    x: str,
    v: Sequence[str],
    tau: Sequence[Any],
    theta: Sequence[Any],
    s: Sequence[Any],
    c: Sequence[Any],
) -> Value:
    """Two branches that read inputs of their own."""
    if len(s) != 2 or (gate.structure is not None and gate.structure.q):
        raise ExportError(
            f"export: {gate.site} has {len(s)} soft gates whose branches read inputs of their own; "
            "two of them can be exported. sites={name: None} leaves the call to torch."
        )
    u = _moved(b, x, tau[0], theta[0])
    down, up = b.op("Sigmoid", b.op("Neg", u)), b.op("Sigmoid", u)
    parts = [b.add(b.mul(s[k], v[k]), c[k]) for k in range(2)]
    return b.add(b.mul(down, parts[0]), b.mul(up, parts[1]))


def _product(b: Body, x: str, tau: Sequence[Any], theta: Sequence[Any]) -> Mean:
    """The renormalised products of sigmoids of the appendix."""
    taus = list(tau) * (len(theta) if len(tau) == 1 else 1)
    u = [_moved(b, x, t, th) for t, th in zip(taus, theta, strict=True)]
    up = [b.op("Sigmoid", z) for z in u]
    down = [b.op("Sigmoid", b.op("Neg", z)) for z in u]
    inner = [b.op("Mul", up[k], down[k + 1]) for k in range(len(u) - 1)]
    return _share(b, [down[0], *inner, up[-1]])


def _share(b: Body, weights: Sequence[Value]) -> Mean:
    """The mean under weights that are not normalised."""
    total = _sum(b, list(weights))

    def mean(w: Sequence[Any]) -> Value:
        if same(w):
            return w[0]  # type: ignore[no-any-return]
        found = _sum(b, [b.mul(each, part) for each, part in zip(w, weights, strict=True)])
        return b.op("Div", found, total)

    return mean


def _sum(b: Body, parts: Sequence[Value]) -> Value:
    y: Value = ZERO
    for part in parts:
        y = b.add(y, part)
    return y


def _powers(
    b: Body, x: str, tau: Sequence[Any], theta: Sequence[Any], s: Sequence[Any], c: Sequence[Any]
) -> Mean | None:
    """Gates with one tau: powers of one exponential, by Horner's rule; None where these overflow.

    With E = exp(u), u = tau (x - mean theta), gate k is w_k E^k / sum_j w_j E^j. Where u is small E
    is 0, and the mean that of the lowest branch. Where it is large u is bounded, at which all gates
    but the last have closed; a last branch without slope would then show what is left of the
    others, so that the gates are taken the other way round.
    """
    flat = [bool((w == 0).any()) and any(not equals(z, 0) for z in s) for w in (s[0], s[-1])]
    turned = flat[1] and not flat[0]
    sharp, middle = tau[0], sum(theta[1:], theta[0]) / len(theta)
    steps = [sharp * (middle - th) for th in theta]
    if turned:
        sharp, steps = -sharp, [-z for z in steps[::-1]]
    logs = [ZERO]
    for z in steps:
        logs.append(logs[-1] + z)
    n = len(theta)
    bound = torch.stack(
        [((logs[k] - logs[n] + _CLOSED[b.double]) / (n - k)).max() for k in range(n)]
    ).max()
    largest = max(float((logs[k] + k * bound).max()) for k in range(n + 1))
    factor = max(1.0, *(float(w.abs().max()) for w in (*s, *c)))
    if largest + math.log(factor * (n + 1)) > _LARGEST[b.double]:
        return None
    weights = [w.exp() for w in logs]
    u = _moved(b, x, sharp, middle)
    e = b.op("Exp", b.op("Min", u, bound))

    def polynomial(w: Sequence[Any]) -> Value:
        y: Value = w[-1]
        for each in w[-2::-1]:
            y = b.add(b.mul(y, e), each)
        return y

    total = polynomial(weights)

    def mean(w: Sequence[Any]) -> Value:
        if same(w):
            return w[0]  # type: ignore[no-any-return]
        each = list(w)[::-1] if turned else list(w)
        return b.op("Div", polynomial([a * z for a, z in zip(each, weights, strict=True)]), total)

    return mean


def _mirrored(
    b: Body, x: str, tau: Tensor, theta: Sequence[Any], s: Sequence[Any], c: Sequence[Any]
) -> Mean | None:
    """Five gates that are the same from either end, as GELU's: a fraction in one tanh.

    With h = tanh(u / 2) and t = h^2, the mean of numbers m + o_k with o_k = -o_{4-k} is m + h R(t),
    where R = (p0 + p1 t) / (q0 + q1 t + q2 t^2) = k / (t + a + b / (t + g)): half the steps of
    `_powers`. None for other gates, and where these steps would lose digits.
    """
    if b.double or len(theta) != 4 or any(w.numel() > 1 for w in (tau, *theta, *s, *c)):
        return None
    middle = sum(float(th) for th in theta) / 4
    near, far = (float(theta[k]) - middle for k in (2, 3))
    mirrored = all(abs(float(theta[k] + theta[3 - k]) / 2 - middle) < 1e-9 for k in (0, 1))
    found = [_fraction(float(tau), near, far, [float(z) for z in w]) for w in (s, c)]
    if not mirrored or any(f is None for f in found):
        return None
    made: dict[str, Any] = {}

    def squared() -> tuple[str, str]:
        if not made:
            h = b.op("Tanh", _moved(b, x, tau / 2, number(middle)))
            made["h"], made["t"] = h, b.op("Mul", h, h)
        return made["h"], made["t"]

    def mean(w: Sequence[Any]) -> Value:
        fraction = _fraction(float(tau), near, far, [float(z) for z in w])
        assert fraction is not None
        k, a, rest, g = (number(v) for v in fraction)
        if equals(k, 0):
            return number(float(w[2]))
        h, t = squared()
        inner = b.add(b.add(t, b.op("Div", rest, b.op("Add", t, g))), a)
        return b.add(b.mul(k, b.op("Div", h, inner)), number(float(w[2])))

    return mean


def _fraction(tau: float, near: float, far: float, w: Sequence[float]) -> list[float] | None:
    """k, a, b and g of `_mirrored`; k = 0 for equal numbers, None for numbers it does not have."""
    middle, inner, outer = w[2], w[3] - w[2], w[4] - w[2]
    if any(abs(w[j] + w[4 - j] - 2 * middle) > 1e-9 for j in (0, 1)):
        return None
    if inner == outer == 0:
        return [0.0, 0.0, 0.0, 1.0]
    side, mid = math.exp(min(tau * far, 300.0)), math.exp(min(tau * (far + near), 300.0))
    q0, q1, q2 = 2 + 2 * side + mid, 12 - 2 * mid, 2 - 2 * side + mid
    p0, p1 = 8 * outer + 4 * side * inner, 8 * outer - 4 * side * inner
    if min(abs(p1), abs(q2)) < 1e-6 * max(abs(p0), q0):
        return None
    k, g = p1 / q2, p0 / p1
    a = q1 / q2 - g
    found = [k, a, q0 / q2 - a * g, g]
    return _settled(found, outer, (p0, p1, q0, q1, q2))


def _settled(found: Sequence[float], outer: float, exact: Sequence[float]) -> list[float] | None:
    """The same with a k that gives the outer branches exactly at t = 1, in float32's own rounding;
    None if the steps lose more than a few digits on the way."""
    h = torch.linspace(0, 1, 4097)
    k, a, rest, g = (torch.tensor(v, dtype=torch.float32) for v in found)
    p0, p1, q0, q1, q2 = exact
    t = h.double().square()
    want = h.double() * (p0 + p1 * t) / (q0 + q1 * t + q2 * t.square())

    def steps(k: Tensor) -> Tensor:
        t = h * h
        return k * (h / (t + rest / (t + g) + a))

    end = torch.tensor(outer, dtype=torch.float32)
    for way in (-torch.inf, torch.inf):
        each = k
        for _ in range(16):
            y = steps(each)
            if y[-1] == end and (y.double() - want).abs().max() < 4e-7 * want.abs().max():
                return [float(each), *(float(v) for v in (a, rest, g))]
            each = torch.nextafter(each, torch.tensor(way))
    return None


def _many(b: Body, x: str, tau: Sequence[Any], theta: Sequence[Any]) -> Mean:
    """Any gates, by one softmax over a new last axis of K logits.

    The logits are given relative to the largest: of thresholds in order, u_1 >= 0 >= u_2 around x,
    logit k is below it by the falls up to k and the rises after k. So no large sums cancel.
    """
    n = len(theta)
    taus, thetas = (_last_axis(list(w) * (n if len(w) == 1 < n else 1)) for w in (tau, theta))
    u = b.op("Mul", taus, b.op("Sub", b.op("Unsqueeze", x, b.whole(-1)), thetas))
    ones = torch.ones(n, n + 1, dtype=torch.float64)
    up_to, after = ones.triu(1), ones.tril(0)
    ordered = all(bool((theta[k] <= theta[k + 1]).all()) for k in range(n - 1))
    if ordered:
        falls = b.op("MatMul", b.op("Min", u, ZERO), up_to)
        logits = b.op("Sub", falls, b.op("MatMul", b.op("Relu", u), after))
    else:
        logits = b.op("MatMul", u, up_to)
    g = b.op("Softmax", logits, axis=-1)

    def mean(w: Sequence[Any]) -> Value:
        if same(w):
            return w[0]  # type: ignore[no-any-return]
        # no ReduceSum: of an empty batch onnxruntime's leaves the axis where it is
        each = _last_axis(list(w))
        if each.dim() == 1:
            found = b.op("MatMul", g, each[:, None])
        else:
            found = b.op("MatMul", b.op("Mul", g, each), ones[:1].mT)
        return b.op("Squeeze", found, b.whole(-1))

    return mean


def _last_axis(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*rows), -1)  # type: ignore[no-untyped-call]


def _inside(b: Body, v: Value, tau: Sequence[Any], theta: Sequence[Any]) -> Value:
    """v within the range where gates move: at 1e30 what is left of a closed gate is seen."""
    room = 110 / torch.stack([t.min() for t in tau]).min()
    ends = torch.stack([t.min() for t in theta]).min(), torch.stack([t.max() for t in theta]).max()
    return b.op("Clip", v, ends[0] - room, ends[1] + room)
