"""A gate in operators of ONNX, as few as there can be: a sigmoid or a softmax, products and sums.

`written` makes the body of one gate. Its numbers are inputs of the body, so that gates which differ
in numbers alone have the same body, and share a function of the exported file. Numbers 0 and 1
leave out their step. No step has a large difference of close numbers in it, and none overflows
where the gate does not, so that far out y is the outer branch to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.export.graph import ExportError, Gate

Value = str | Tensor  # a name in the body, or numbers in float64
# Of float32 and of float64: how far below the largest a logit is whose gate is below the rounding,
# and the largest number whose exponential is finite.
_CLOSED, _LARGEST = (17.0, 37.0), (87.0, 708.0)


class Step(NamedTuple):
    """One operator of a body."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    attributes: tuple[tuple[str, Any], ...] = ()


class Body:
    """The operators of one gate: inputs x, v0, v1, ... and d0, d1, ..., then the `numbers`."""

    def __init__(self, wide: bool, double: bool) -> None:
        self.steps: list[Step] = []
        self.numbers: list[Tensor] = []
        self.double = double
        self.wide = wide  # 16-bit numbers are computed in 32 and rounded once

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> str:
        """A new operator; numbers among its inputs become inputs of the body."""
        names = tuple(v if isinstance(v, str) else self._number(v) for v in inputs)
        output = f"t{len(self.steps)}"
        self.steps.append(Step(kind, names, output, tuple(attributes.items())))
        return output

    def _number(self, w: Tensor) -> str:
        for k, known in enumerate(self.numbers):
            if known.shape == w.shape and torch.equal(known, w):
                return f"p{k}"
        self.numbers.append(w)
        return f"p{len(self.numbers) - 1}"

    def whole(self, *numbers: int) -> str:
        """Whole numbers, which are part of the body."""
        return self.op("Constant", value_ints=numbers)

    def add(self, a: Value, b: Value) -> Value:
        if _fixed(a) and _fixed(b):
            return a + b  # type: ignore[operator]
        if _is(a, 0) or _is(b, 0):
            return b if _is(a, 0) else a
        return self.op("Add", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return a if _is(b, 0) else self.op("Sub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        if _fixed(a) and _fixed(b):
            return a * b  # type: ignore[operator]
        if _is(a, 1) or _is(b, 1):
            return b if _is(a, 1) else a
        if _is(a, 0) or _is(b, 0):
            return _ZERO
        if _is(a, -1) or _is(b, -1):
            return self.op("Neg", b if _is(a, -1) else a)
        return self.op("Mul", a, b)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for bodies that one function can stand for."""
        return (*self.steps, self.wide, len(self.numbers))


def _number(w: float) -> Tensor:
    return torch.tensor(w, dtype=torch.float64)


_ZERO, _ONE = _number(0.0), _number(1.0)
_LEAST, _TINY = _number(torch.finfo(torch.float32).min), _number(1e-37)


def _fixed(w: Any) -> bool:
    return isinstance(w, Tensor)


def _is(w: Value, number: float) -> bool:
    return isinstance(w, Tensor) and bool((w == number).all())


def _same(w: Sequence[Any]) -> bool:
    """Whether numbers are all equal."""
    return all(torch.equal(*torch.broadcast_tensors(w[0], each)) for each in w[1:])  # type: ignore[no-untyped-call]


def _all(w: Value, holds: Callable[[Tensor], Tensor]) -> bool:
    return isinstance(w, Tensor) and bool(holds(w).all())


def written(gate: Gate, bits: int = 32) -> Body:
    """The operators of a gate for numbers of so many bits; the output of the last one is y."""
    wide = bits < 32
    b = Body(wide, bits > 32)
    if gate.structure is None:
        _softmax(b, gate)
        return b
    x: str = b.op("Cast", "x", to=1) if wide else "x"
    v = [b.op("Cast", f"v{k}", to=1) if wide else f"v{k}" for k in range(gate.inputs)]
    known, count = gate.structure, iter(range(99))
    names = [[f"d{next(count)}" if w is None else w for w in row] for row in gate.rows]
    tau, theta, s, c = names
    if known.hard:
        y = _hard(b, gate, x, v, theta, s, c)
    elif not gate.fixed:
        raise ExportError(
            f"export: {gate.site} is a soft gate whose numbers the network computes as it runs, "
            "which has no form for other tools; sites={name: None} leaves the call to torch."
        )
    elif len(v) > 1:
        y = _apart(b, gate, x, v, tau, theta, s, c)
    else:
        y = _soft(b, gate, x, v[0] if v else x, tau, theta, s, c)
    if known.clamp is not None:
        low, high = (_number(w) for w in known.clamp)
        y = b.op("Clip", y, low, high)
    if isinstance(y, Tensor) or not b.steps or b.steps[-1].output != y:
        y = b.op("Mul", y, _ONE) if isinstance(y, str) else b.add(b.op("Mul", x, _ZERO), y)
    if wide:
        b.op("CastLike", y, "x")
    return b


# Hard gates


def _hard(
    b: Body,
    gate: Gate,
    x: str,
    v: Sequence[str],
    theta: Sequence[Value],
    s: Sequence[Value],
    c: Sequence[Value],
) -> Value:
    """The branch of the region x lies in: by Max, Min or Clip where branches meet, else chosen."""
    known = gate.structure
    assert known is not None
    K, curves = len(s), _curves(gate)
    inputs = [v[k] if len(v) == K else v[0] if v else x for k in range(K)]
    anchors = known.anchor or (None,) * K
    plain = not v and gate.fixed

    def branch(k: int) -> Value:
        return _branch(b, inputs[k], curves[k], s[k], c[k], anchors[k])

    if K == 1 or (plain and all(_same(w) for w in (curves, s, c))):
        return branch(0)
    if plain and known.q is None and _meet(theta, s, c):
        if K == 3 and _is(s[0], 0) and _is(s[2], 0) and _all(s[1], lambda w: w > 0):
            return _between(b, branch(1), c[0], c[2])
        for kind, rising in (("Max", True), ("Min", False)):
            if all(_ordered(s[k], s[k + 1], rising) for k in range(K - 1)):
                return _extreme(b, kind, [branch(k) for k in range(K)])
    if plain and K == 3 and _is_ramp(theta, curves, s, c):
        return b.mul(x, _between(b, b.add(b.mul(curves[1], x), s[1]), s[0], s[2]))
    return _chosen(b, x, theta, known.owner or ("lo",) * (K - 1), branch, _carrier(curves, s))


def _curves(gate: Gate) -> list[Tensor]:
    assert gate.structure is not None
    q = gate.structure.q or (0.0,) * gate.structure.K
    return [_number(w) for w in q]


def _branch(b: Body, v: Value, q: Value, s: Value, c: Value, anchor: Any) -> Value:
    """One branch, from its anchor where it has one, as `primitive` evaluates it."""
    if anchor is None or not _fixed(s):
        return b.add(b.mul(v, b.add(b.mul(q, v), s)), c)
    a, y = (_number(w) for w in anchor)
    if _is(q, 0):
        return b.add(b.mul(b.sub(v, a), s), y)
    assert isinstance(s, Tensor) and isinstance(q, Tensor)
    other = b.add(v, a + s / q)
    return b.add(b.mul(b.mul(b.sub(v, a), other), q), y)


def _meet(theta: Sequence[Any], s: Sequence[Any], c: Sequence[Any]) -> bool:
    """Whether neighbouring branches have the same value where they meet, to float64's rounding."""
    for k, at in enumerate(theta):
        below, above = s[k] * at + c[k], s[k + 1] * at + c[k + 1]
        size = (s[k] * at).abs() + c[k].abs() + (s[k + 1] * at).abs() + c[k + 1].abs()
        if bool(((below - above).abs() > 1e-12 * size).any()):
            return False
    return True


def _ordered(low: Any, high: Any, rising: bool) -> bool:
    return bool((low <= high).all() if rising else (low >= high).all())


def _between(b: Body, y: Value, low: Value, high: Value) -> Value:
    if isinstance(low, Tensor) and isinstance(high, Tensor) and low.numel() == high.numel() == 1:
        return b.op("Clip", y, low, high)
    return b.op("Min", b.op("Max", y, low), high)


def _extreme(b: Body, kind: str, branches: Sequence[Value]) -> Value:
    rest = [w for w in branches if not _is(w, 0)]
    if kind == "Max" and len(rest) == 1 and len(branches) == 2:
        return b.op("Relu", rest[0])
    return b.op(kind, *branches)


def _is_ramp(theta: Any, q: Any, s: Any, c: Any) -> bool:
    """Whether y is x times a slope that rises between two bounds, as hard-swish."""
    if not all(_is(w, 0) for w in (*c, q[0], q[2])) or not _all(q[1], lambda w: w > 0):
        return False
    ends = ((q[1] * theta[0] + s[1], s[0]), (q[1] * theta[1] + s[1], s[2]))
    return all(bool(((a - z).abs() <= 1e-12).all()) for a, z in ends)


def _carrier(q: Sequence[Value], s: Sequence[Value]) -> int | None:
    flat = [_is(a, 0) and _is(w, 0) for a, w in zip(q, s, strict=True)]
    return flat.index(False) if False in flat else None


def _chosen(
    b: Body,
    x: str,
    theta: Sequence[Value],
    owners: Sequence[str],
    branch: Callable[[int], Value],
    carrier: int | None,
) -> Value:
    """By comparisons; NaN fails them all and stays where the choice starts: in a branch that
    carries its input on."""
    start = carrier or 0
    y = branch(start)
    for k in range(start, len(theta)):
        above = b.op("Greater" if owners[k] == "lo" else "GreaterOrEqual", x, theta[k])
        y = b.op("Where", above, branch(k + 1), y)
    for k in range(start - 1, -1, -1):
        below = b.op("LessOrEqual" if owners[k] == "lo" else "Less", x, theta[k])
        y = b.op("Where", below, branch(k), y)
    return b.op("Where", b.op("IsNaN", x), x, y) if carrier is None else y


# Soft gates


def _soft(
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
    q, slope, constant = mean(_curves(gate)), mean(s), mean(c)
    if _is(s[0], 0) and _is(s[-1], 0) and not _is(slope, 0) and len(s) > 2:
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
        if _same(w):
            return low  # type: ignore[no-any-return]
        if _same((low, -high)):
            return b.mul(high, once("tanh", lambda: b.op("Tanh", _moved(b, x, tau / 2, theta))))
        up = b.mul(high, once("up", lambda: b.op("Sigmoid", u()))) if not _is(high, 0) else _ZERO
        if _is(low, 0):
            return up
        down = b.mul(low, once("down", lambda: b.op("Sigmoid", b.op("Neg", u()))))
        return b.add(down, up)

    return mean


def _apart(
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
        if _same(w):
            return w[0]  # type: ignore[no-any-return]
        found = _sum(b, [b.mul(each, part) for each, part in zip(w, weights, strict=True)])
        return b.op("Div", found, total)

    return mean


def _sum(b: Body, parts: Sequence[Value]) -> Value:
    y: Value = _ZERO
    for part in parts:
        y = b.add(y, part)
    return y


def _powers(
    b: Body,
    x: str,
    tau: Sequence[Any],
    theta: Sequence[Any],
    s: Sequence[Any],
    c: Sequence[Any],
) -> Mean | None:
    """Gates with one tau: powers of one exponential, by Horner's rule; None where these overflow.

    With E = exp(u), u = tau (x - mean theta), gate k is w_k E^k / sum_j w_j E^j. Where u is small E
    is 0, and the mean that of the lowest branch. Where it is large u is bounded, at which all gates
    but the last have closed; a last branch without slope would then show what is left of the
    others, so that the gates are taken the other way round.
    """
    flat = [bool((w == 0).any()) and any(not _is(z, 0) for z in s) for w in (s[0], s[-1])]
    turned = flat[1] and not flat[0]
    sharp, middle = tau[0], sum(theta[1:], theta[0]) / len(theta)
    steps = [sharp * (middle - th) for th in theta]
    if turned:
        sharp, steps = -sharp, [-z for z in steps[::-1]]
    logs = [_ZERO]
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
        if _same(w):
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
            h = b.op("Tanh", _moved(b, x, tau / 2, _number(middle)))
            made["h"], made["t"] = h, b.op("Mul", h, h)
        return made["h"], made["t"]

    def mean(w: Sequence[Any]) -> Value:
        fraction = _fraction(float(tau), near, far, [float(z) for z in w])
        assert fraction is not None
        k, a, rest, g = (_number(v) for v in fraction)
        if _is(k, 0):
            return _number(float(w[2]))
        h, t = squared()
        inner = b.add(b.add(t, b.op("Div", rest, b.op("Add", t, g))), a)
        return b.add(b.mul(k, b.op("Div", h, inner)), _number(float(w[2])))

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
        falls = b.op("MatMul", b.op("Min", u, _ZERO), up_to)
        logits = b.op("Sub", falls, b.op("MatMul", b.op("Relu", u), after))
    else:
        logits = b.op("MatMul", u, up_to)
    g = b.op("Softmax", logits, axis=-1)

    def mean(w: Sequence[Any]) -> Value:
        if _same(w):
            return w[0]  # type: ignore[no-any-return]
        weighed = b.op("Mul", g, _last_axis(list(w)))
        return b.op("ReduceSum", weighed, b.whole(-1), keepdims=0)

    return mean


def _last_axis(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*rows), -1)  # type: ignore[no-untyped-call]


def _inside(b: Body, v: Value, tau: Sequence[Any], theta: Sequence[Any]) -> Value:
    """v within the range where gates move: at 1e30 what is left of a closed gate is seen."""
    room = 110 / torch.stack([t.min() for t in tau]).min()
    ends = torch.stack([t.min() for t in theta]).min(), torch.stack([t.max() for t in theta]).max()
    return b.op("Clip", v, ends[0] - room, ends[1] + room)


def _softmax(b: Body, gate: Gate) -> None:
    """Softmax as one gate for each logit (Eq. 11): sigma(z - theta), theta = LSE of the others.

    Of the sigmoid 1 / (1 + exp(theta - z)) the exponential is that of theta, the sum of the others,
    over that of z; so no logarithm is taken, which onnxruntime is slow at. The sum of the others is
    the sum less the logit's own part: where that is nearly all of it, the gate is 1 to rounding
    whatever is left.
    """
    z = b.op("Cast", "x", to=1) if b.wide else "x"
    axis = b.whole(gate.axis)
    top = b.op("ReduceMax", z, axis, keepdims=1)
    guarded = gate.masked == 0
    if guarded:  # a row of nothing but -inf
        top = b.op("Max", top, _LEAST)
    z = b.op("Sub", z, top)
    e = b.op("Exp", z)
    total = b.op("ReduceSum", e, axis, keepdims=1)
    others = b.op("Sub", b.op("Max", total, _TINY) if guarded else total, e)
    p = b.op("Reciprocal", b.op("Add", b.op("Div", others, e), _ONE))
    if b.wide:
        b.op("CastLike", p, "x")
