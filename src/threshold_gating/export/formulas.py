"""A gate in operators of ONNX, as few as there can be: a sigmoid or a softmax, products and sums.

`written` makes the body of one gate; soft gates are in `soft`. No step has a large difference of
close numbers in it, and none overflows where the gate does not, so that far out y is the outer
branch to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from threshold_gating.export.body import ONE, ZERO, Body, Value, curves, equals, fixed, number, same
from threshold_gating.export.graph import ExportError, Gate
from threshold_gating.export.soft import apart, soft

_LEAST, _TINY = number(torch.finfo(torch.float32).min), number(1e-37)


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
        y = apart(b, gate, x, v, tau, theta, s, c)
    else:
        y = soft(b, gate, x, v[0] if v else x, tau, theta, s, c)
    if known.clamp is not None:
        low, high = (number(w) for w in known.clamp)
        y = b.op("Clip", y, low, high)
    if isinstance(y, Tensor) or not b.steps or b.steps[-1].output != y:
        y = b.op("Mul", y, ONE) if isinstance(y, str) else b.add(b.op("Mul", x, ZERO), y)
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
    K, q = len(s), curves(gate)
    inputs = [v[k] if len(v) == K else v[0] if v else x for k in range(K)]
    anchors = known.anchor or (None,) * K
    plain = not v and gate.fixed

    def branch(k: int) -> Value:
        return _branch(b, inputs[k], q[k], s[k], c[k], anchors[k])

    if K == 1 or (plain and all(same(w) for w in (q, s, c))):
        return branch(0)
    if plain and known.q is None and _meet(theta, s, c):
        if K == 3 and equals(s[0], 0) and equals(s[2], 0) and _all(s[1], lambda w: w > 0):
            return _between(b, branch(1), c[0], c[2])
        for kind, rising in (("Max", True), ("Min", False)):
            if all(_ordered(s[k], s[k + 1], rising) for k in range(K - 1)):
                return _extreme(b, kind, [branch(k) for k in range(K)])
    if plain and K == 3 and _is_ramp(theta, q, s, c):
        return b.mul(x, _between(b, b.add(b.mul(q[1], x), s[1]), s[0], s[2]))
    return _chosen(b, x, theta, known.owner or ("lo",) * (K - 1), branch, _carrier(q, s))


def _branch(b: Body, v: Value, q: Value, s: Value, c: Value, anchor: Any) -> Value:
    """One branch, from its anchor where it has one, as `primitive` evaluates it."""
    if anchor is None or not fixed(s):
        return b.add(b.mul(v, b.add(b.mul(q, v), s)), c)
    a, y = (number(w) for w in anchor)
    if equals(q, 0):
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
    rest = [w for w in branches if not equals(w, 0)]
    if kind == "Max" and len(rest) == 1 and len(branches) == 2:
        return b.op("Relu", rest[0])
    return b.op(kind, *branches)


def _is_ramp(theta: Any, q: Any, s: Any, c: Any) -> bool:
    """Whether y is x times a slope that rises between two bounds, as hard-swish."""
    if not all(equals(w, 0) for w in (*c, q[0], q[2])) or not _all(q[1], lambda w: w > 0):
        return False
    ends = ((q[1] * theta[0] + s[1], s[0]), (q[1] * theta[1] + s[1], s[2]))
    return all(bool(((a - z).abs() <= 1e-12).all()) for a, z in ends)


def _carrier(q: Sequence[Value], s: Sequence[Value]) -> int | None:
    flat = [equals(a, 0) and equals(w, 0) for a, w in zip(q, s, strict=True)]
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


def _all(w: Value, holds: Callable[[Tensor], Tensor]) -> bool:
    return isinstance(w, Tensor) and bool(holds(w).all())


# Softmax


def _softmax(b: Body, gate: Gate) -> None:
    """Softmax as one gate for each logit (Eq. 11): sigma(z - theta), theta = LSE of the others.

    The sigmoid is exp(z) / (exp(z) + exp(theta)), and exp(theta) the sum of the others: so its
    denominator is the sum of all, and no logarithm is taken, which onnxruntime is slow at.
    """
    z = b.op("Cast", "x", to=1) if b.wide else "x"
    axis = b.whole(gate.axis)
    top = b.op("ReduceMax", z, axis, keepdims=1)
    guarded = gate.masked == 0
    if guarded:  # a row of nothing but -inf
        top = b.op("Max", top, _LEAST)
    e = b.op("Exp", b.op("Sub", z, top))
    total = b.op("ReduceSum", e, axis, keepdims=1)
    p = b.op("Div", e, b.op("Max", total, _TINY) if guarded else total)
    if b.wide:
        b.op("CastLike", p, "x")
