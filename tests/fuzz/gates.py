"""Random gates in every backend against their formulas in long double; value and every gradient.

    python -m tests.fuzz.gates --n 100000 --seed 0

A gate is drawn (K, form, one tau or one per threshold, thresholds in any order, hard with owners,
slopes and intercepts over many decades, parabolas, points to evaluate branches from, a clamp, what
the branches read, dtype) and evaluated at points that include 0, subnormal and huge numbers and its own thresholds. `truth` has the formulas of `tile` in
long double. The bound, with eps of the dtype that is computed in:

* An argument u_m = tau_m (x - theta_m) may be off by e_m = 4 eps (tau_m (|x| + |theta_m|) + w),
  where w is what a backend may add up before it cancels: sum_m |u_m|, at most 104 (K - 1).
* A gate is then off by the relative error r_k = 16 eps + sum_m e_m V_m over the thresholds below
  branch k, and e_m U_m over those above: U_m and V_m are the masses above and below a threshold.
  Gates below 1e-26 (float32, K > 2) or the smallest normal number are not resolved.
* y may be off by sum_k g_k r_k (|s_k v| + |c_k|), and each gradient by the same rule: every product
  of gates by the sum of their relative errors, taken of the absolute values of its terms.
* A gradient of a parameter, a sum over n points, may be off by n eps of the sum of the sizes of
  its terms beside that. 16-bit results are rounded once.

A product larger than the largest number may be infinite, and a sum over points of such ones NaN.
Nothing else is NaN for a finite x. Where weights are tensors and a branch, times dy, is larger than
the largest number, gradients by way of the gates saturate or are infinite, but not NaN; numbers are
evaluated in float64 there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from threshold_gating import kernels, primitive
from threshold_gating.kernels.blend import steps
from threshold_gating.kernels.call import of_call

Array = np.ndarray[Any, Any]
_DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
_TOGETHER = 250  # gates of one structure, evaluated as the channels of one input
_UNRESOLVED = {torch.float32: 1e-26, torch.float64: 1e-290}


@dataclass(frozen=True)
class Gates:
    """Gates of one structure, parameters as [rows, gates], x and what is read as [points, gates]."""

    x: Tensor
    v: Tensor | None
    dy: Tensor
    tau: Tensor | None  # None is hard
    theta: Tensor
    s: Tensor
    c: Tensor
    q: Tensor | None  # parabolas
    a: Tensor | None  # hard branches of one gate, as numbers, are evaluated from their points here
    clamp: tuple[float, float] | None
    form: str
    owner: tuple[str, ...] | None
    centred: bool

    @property
    def K(self) -> int:
        return len(self.s)


def _spread(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    return rng.standard_normal(shape) * 10 ** rng.uniform(low, high, shape)


def drawn(rng: np.random.Generator, count: int, points: int = 12) -> Gates:
    """`count` random gates of one random structure."""
    K = int(rng.choice([1, *[2] * 6, *[3] * 4, *[4] * 2, *[5] * 2, *[6] * 2, *[8] * 2]))
    hard = K == 1 or rng.random() < (0.2 if count > 1 else 0.4)
    curved = rng.random() < 0.1
    own = not hard and K > 2 and rng.random() < 0.5
    form = "product" if not hard and K > 2 and rng.random() < 0.15 else "softmax"
    dtype = _DTYPES[rng.integers(len(_DTYPES))]
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def tensor(a: Array, to: torch.dtype = wide) -> Tensor:
        return torch.from_numpy(np.asarray(a, dtype=np.float64)).to(to)

    theta = _spread(rng, (K - 1, count), -2, 2)
    if form == "product" or rng.random() < 0.5:
        theta = np.sort(theta, 0)
    s, c = (_spread(rng, (K, count), -3, 3) for _ in range(2))
    if rng.random() < 0.03:  # slopes and constants at the end of float32
        s, c = (np.clip(w * 10 ** rng.uniform(25, 36, w.shape), -3e38, 3e38) for w in (s, c))
    for w in (s, c):
        w[rng.random(w.shape) < 0.2] = 0
        w[rng.random(w.shape) < 0.1] = 1
    centred = K == 2 and not hard and rng.random() < 0.3
    if centred and rng.random() < 0.7:
        c, s = np.abs(c[:1]) * [[-1], [1]], s * 0
    tau = np.exp(rng.uniform(-5, 7, (K - 1 if own else 1, count)))
    q = _spread(rng, (K, count), -3, 1) if curved else None
    a = _spread(rng, (K, count), -2, 2) if hard and rng.random() < 0.5 else None
    clamp = (-1.5, float(rng.uniform(0, 3))) if rng.random() < 0.05 else None
    x = _spread(rng, (points, count), -1, 2)
    huge = 3e38 if dtype in (torch.float32, torch.bfloat16) else 6e4
    huge = 1e4 if curved and huge > 1e5 else 9 if curved else huge  # squares are finite
    special = [
        0.0,
        -0.0,
        1e-40,
        huge,
        -huge,
        1e30 if huge > 1e5 else 1e3,
        -1e9 if huge > 1e5 else 9,
    ]
    rows = rng.integers(points, size=(3, count))
    for row in rows[:2]:
        x[row, np.arange(count)] = rng.choice(special, count)
    if K > 1:
        x[rows[2], np.arange(count)] = theta[rng.integers(K - 1, size=count), np.arange(count)]
    v = _spread(rng, (points, count), -2, 2) if rng.random() < 0.25 else None
    owner = tuple(str(o) for o in rng.choice(["lo", "hi"], K - 1)) if hard else None
    return Gates(
        tensor(x, dtype),
        None if v is None else tensor(v, dtype),
        tensor(rng.standard_normal((points, count)), dtype),
        None if hard else tensor(tau),
        tensor(theta),
        tensor(s),
        tensor(c),
        None if q is None else tensor(q),
        None if a is None else tensor(a),
        clamp,
        form,
        owner,
        centred,
    )


# --- the truth


def _long(t: Tensor) -> Array:
    return t.detach().double().numpy().astype(np.longdouble)


def _masses(w: Array) -> tuple[Array, Array]:
    """Sums of the rows below and above each threshold."""
    return np.cumsum(w, 0)[:-1], np.cumsum(w[::-1], 0)[::-1][1:]


def _gates_of(g: Gates, x: Array) -> tuple[Array, Array]:
    """The gates [K, points, gates] and the arguments [K - 1, points, gates]."""
    theta = _long(g.theta)[:, None]
    if g.tau is None:
        owners = g.owner or ("lo",) * (g.K - 1)
        beyond = [x >= t if o == "hi" else x > t for t, o in zip(theta, owners, strict=True)]
        region = sum(beyond, np.zeros(x.shape, dtype=int))
        return np.stack([(region == k).astype(np.longdouble) for k in range(g.K)]), x - theta
    u = _long(g.tau)[:, None] * (x - theta)
    if g.form == "softmax" or g.K == 2:
        logits = np.concatenate([np.zeros_like(u[:1]), np.cumsum(u, 0)])
    else:
        below, above = (-np.logaddexp(0, z) for z in (u, -u))
        logits = np.concatenate([below[:1], above[:-1] + below[1:], above[-1:]])
    e = np.exp(logits - logits.max(0))
    return e / e.sum(0), u


def anchors(g: Gates) -> list[tuple[float, float] | None] | None:
    """The points that the branches of a gate are evaluated from; a constant one has none."""
    if g.a is None:
        return None
    q = torch.zeros_like(g.s) if g.q is None else g.q
    rows = zip(*(w[:, 0].tolist() for w in (g.a, q, g.s, g.c)), strict=True)
    return [(a, (q * a + s) * a + c) if q or s else None for a, q, s, c in rows]


def _lines(g: Gates, q: Array, s: Array, c: Array, v: Array) -> tuple[Array, Array, Array]:
    """The branches [K, points, gates], the sizes of what is added up to them, and to their slopes."""
    lines, sizes = q * v * v + s * v + c, np.abs(q * v * v) + np.abs(s * v) + np.abs(c)
    steep = np.abs(s) + np.abs(2 * q * v)
    for k, point in enumerate(anchors(g) or ()):
        if point is not None:
            a, y = (np.longdouble(each) for each in point)
            factor = np.abs(s[k]) + np.abs(q[k]) * (np.abs(v) + np.abs(a))
            lines[k] = (v - a) * (q[k] * (v + a) + s[k]) + y
            sizes[k] = np.abs(v - a) * factor + np.abs(y)
            steep[k] = factor + np.abs(q[k] * (v - a))  # of the two factors of the product
    return lines, sizes, steep


def truth(g: Gates) -> dict[str, tuple[Array, Array]]:
    """y and each gradient, with the error that is allowed, from the formulas in the docstring."""
    dtype = torch.float64 if g.x.dtype == torch.float64 else torch.float32
    eps, nothing = np.longdouble(torch.finfo(dtype).eps), np.longdouble(_UNRESOLVED[dtype])
    nothing = np.longdouble(torch.finfo(dtype).tiny) if g.K == 2 else nothing
    x, dy = _long(g.x), _long(g.dy)
    v = x if g.v is None else _long(g.v)
    s, c, theta = (_long(w)[:, None] for w in (g.s, g.c, g.theta))
    gate, u = _gates_of(g, x)
    q = np.zeros_like(s) if g.q is None else _long(g.q)[:, None]
    lines, sizes, steepness = _lines(g, q, s, c, v)
    lower, upper = _masses(gate)
    error = np.full_like(gate, 16 * eps)
    if g.tau is not None:
        tau = np.broadcast_to(_long(g.tau)[:, None], u.shape)
        added = np.minimum(np.abs(u).sum(0), 104 * (g.K - 1) * (7 if eps < 1e-10 else 1))
        moved = 4 * eps * (tau * (np.abs(x) + np.abs(theta)) + added)
        for k in range(g.K):
            far = [moved[m] * (lower if m < k else upper)[m] for m in range(g.K - 1)]
            error[k] += np.expm1(np.minimum(sum(far), 40))
    off = gate * error + (0 if g.tau is None else nothing)  # of a gate
    y = (gate * lines).sum(0)
    found = {
        "y": (y, (off * sizes).sum(0)),
        "s": (dy * gate * v, np.abs(dy * v) * off),
        "c": (dy * gate, np.abs(dy) * off),
        "q": (dy * gate * v * v, np.abs(dy * v * v) * off),
    }
    slope = (gate * (s + 2 * q * v)).sum(0)
    slope_off = (off * steepness).sum(0)
    if g.tau is None:
        turn, turn_off = np.zeros_like(u), np.zeros_like(u)
        tau = np.zeros_like(u)
    else:
        turn, turn_off = _turns(g, gate, off, lines, sizes, u, eps)
        found["theta"] = (-dy * tau * turn, np.abs(dy * tau) * (turn_off + 8 * eps * np.abs(turn)))
        along = dy * (x - theta) * turn
        along_off = np.abs(dy) * (np.abs(x) + np.abs(theta)) * (turn_off + 8 * eps * np.abs(turn))
        one = len(g.tau) == 1
        found["tau"] = (
            (along.sum(0, keepdims=True), along_off.sum(0, keepdims=True))
            if one
            else (along, along_off)
        )
    if g.clamp is not None:  # its gradient is that of one side, or of the other
        return {"y": (np.clip(y, *g.clamp), found["y"][1])}
    steep, steep_off = (tau * turn).sum(0), (tau * turn_off).sum(0)
    if g.v is None:
        found["x"] = (dy * (slope + steep), np.abs(dy) * (slope_off + steep_off))
    else:
        found["x"] = (dy * steep, np.abs(dy) * steep_off)
        found["v"] = (dy * slope, np.abs(dy) * slope_off)
    return found


def _turns(
    g: Gates, gate: Array, off: Array, lines: Array, sizes: Array, u: Array, eps: Any
) -> tuple[Array, Array]:
    """dy/du_m and the error that is allowed."""
    (lower, upper), (lower_off, upper_off) = _masses(gate), _masses(off)
    (below, above), (size_b, size_a) = _masses(gate * lines), _masses(gate * sizes)
    off_b, off_a = _masses(off * sizes)
    if g.form == "softmax" or g.K == 2:
        turn = lower * above - upper * below
        allowed = lower_off * size_a + lower * off_a + upper_off * size_b + upper * off_b
        return turn, allowed + off_a * lower_off + off_b * upper_off
    y = (gate * lines).sum(0)
    high, low = 1 / (1 + np.exp(-u)), 1 / (1 + np.exp(u))
    turn = gate[1:] * (lines[1:] - y) * low - gate[:-1] * (lines[:-1] - y) * high
    # softmax's own backward subtracts the mean of all, whose rounding is that of the whole
    all_off = (off * sizes).sum(0) * (gate[1:] * low + gate[:-1] * high)
    each = off[1:] * sizes[1:] * low + off[:-1] * sizes[:-1] * high
    total = (gate * sizes).sum(0)
    return turn, 4 * (all_off + each + (off[1:] * low + off[:-1] * high) * total)


# --- what the backends say


def _parameters(g: Gates, how: str) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """(tau, theta, s, c) and options as `blend` takes them; the tensors among them, q last."""
    rows: list[Any] = [[] if g.tau is None else list(g.tau), list(g.theta), list(g.s), list(g.c)]
    rows += [] if g.q is None else [list(g.q)]
    if how == "numbers":
        given: list[Any] = [[float(r) for r in row] for row in rows]
    else:
        shape = (1, -1) if how == "channel" else ()
        given = [[r.reshape(shape).clone().requires_grad_() for r in row] for row in rows]
    tensors = [r for row in given for r in row if isinstance(r, Tensor)]
    tau = given[0] if len(given[0]) > 1 else given[0][0] if given[0] else math.inf
    options = {"q": given[4] if g.q is not None else None, "clamp": g.clamp, "anchor": anchors(g)}
    return [tau, *given[1:4]], options, tensors


def _traced(x: Tensor, *parameters: Any, v: Tensor | None, **options: Any) -> Tensor | None:
    """The formulas of a compiled graph, without a compiler."""
    call = of_call(*parameters, **options)
    return None if call is None else steps.steps(x, v, *call)


def _compiled(x: Tensor, *parameters: Any, **options: Any) -> Tensor:
    torch._dynamo.reset()
    run: Any = torch.compile(kernels.blend, backend="aot_eager", fullgraph=True)
    y: Tensor = run(x, *parameters, **options)
    return y


Backend = Callable[..., Tensor | None]


def backends(compiled: bool = False) -> dict[str, Backend]:
    """The ways to evaluate `blend` here."""
    found: dict[str, Backend] = {
        "reference": primitive.blend,
        "auto": kernels.blend,
        "traced": _traced,
    }
    return {**found, "compiled": _compiled} if compiled else found


def evaluated(g: Gates, how: str, run: Backend) -> dict[str, Tensor] | None:
    """y and each gradient as a backend has them; None where it leaves the call to another."""
    parameters, options, tensors = _parameters(g, how)
    x = g.x.clone().requires_grad_()
    v = None if g.v is None else g.v.clone().requires_grad_()
    centred = g.centred if how != "numbers" else None
    y = run(x, *parameters, v=v, form=g.form, owner=g.owner, centred=centred, **options)
    if y is None:
        return None
    inputs = [x, *([] if v is None else [v]), *tensors]
    grads = list(torch.autograd.grad(y, inputs, g.dy, materialize_grads=True))
    found = {"y": y.detach(), "x": grads.pop(0)}
    if v is not None:
        found["v"] = grads.pop(0)
    if tensors:
        names = ("tau", "theta", "s", "c", "q")
        for name, rows in zip(names, (g.tau, g.theta, g.s, g.c, g.q), strict=True):
            if rows is not None and len(rows):
                found[name] = torch.stack([grads.pop(0).reshape(-1) for _ in rows])
    return found


# --- the comparison


def differences(g: Gates, how: str, names: dict[str, Backend]) -> list[str]:
    """What is off, with a program that shows it."""
    want, found = truth(g), []
    for name, run in names.items():
        have = evaluated(g, how, run)
        for what, value in (have or {}).items():
            if what in want and (bad := _outside(g, what, value, *want[what], how)) is not None:
                found.append(f"{name} {how} d{what}: {bad[1]}\n{program(g, how, name, bad[0])}")
    return found


def _outside(
    g: Gates, what: str, value: Tensor, want: Array, allowed: Array, how: str
) -> tuple[int, str] | None:
    """The first gate whose value is not within the bound."""
    info = torch.finfo(value.dtype)
    size = np.abs(want)
    if what in ("tau", "theta", "s", "c", "q"):  # summed over the points
        rounding = torch.finfo(torch.float64 if g.x.dtype == torch.float64 else torch.float32).eps
        allowed = allowed.sum(1) + len(g.x) * rounding * size.sum(1)
        largest, want, size = size.sum(1), want.sum(1), np.abs(want.sum(1))
    else:
        largest = size
    allowed = 2 * allowed + info.eps * size + 64 * info.tiny
    have = _long(value)
    bad = ~(np.abs(have - want) <= allowed)
    # a sum of infinities may be NaN
    summed = what in ("tau", "theta", "s", "c", "q")
    bad &= ~((largest + allowed > info.max / 8) & (summed | ~np.isnan(have)))
    if what in ("x", "tau", "theta") and how != "numbers":
        saturated = _saturated(g).any(0) if summed else _saturated(g)
        bad &= ~(saturated & (~np.isnan(have) | (largest > info.max)))
    if not bad.any():
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    words = f"{float(have[at])!r} instead of {float(want[at])!r} +- {float(allowed[at]):.3g}"
    return at[-1], f"{words} at {at}, {g.x.dtype}, K={g.K}, {g.form}"


def _saturated(g: Gates) -> Array:
    """Where a branch times dy leaves the range that is computed in: [points, gates]."""
    info = torch.finfo(torch.float64 if g.x.dtype == torch.float64 else torch.float32)
    q, s, c = (_long(torch.zeros_like(g.s) if w is None else w)[:, None] for w in (g.q, g.s, g.c))
    sizes = _lines(replace(g, a=None), q, s, c, _long(g.x if g.v is None else g.v))[1]
    found: Array = (np.maximum(np.abs(_long(g.dy)), 1) * sizes).max(0) > info.max / 4
    return found


def program(g: Gates, how: str, name: str, gate: int) -> str:
    """A small program that evaluates one gate of `g`."""

    def column(t: Tensor | None) -> str:
        return "None" if t is None else repr(t[:, gate].double().tolist())

    number = how == "numbers"
    wide = "torch.float64" if g.x.dtype == torch.float64 else "torch.float32"
    tau = "float('inf')" if g.tau is None else column(g.tau) + ("" if len(g.tau) > 1 else "[0]")
    row = "{}" if number else f"[torch.tensor(w, dtype={wide}, requires_grad=True) for w in {{}}]"
    theta, s, c = (row.format(column(w)) for w in (g.theta, g.s, g.c))
    q = "None" if g.q is None else row.format(column(g.q))
    v = "None" if g.v is None else f"torch.tensor({column(g.v)}, dtype={g.x.dtype})"
    centred = None if number else g.centred
    run = "primitive.blend" if name == "reference" else "kernels.blend"
    return "\n".join(
        (
            "import torch",
            "from threshold_gating import kernels, primitive",
            f"x = torch.tensor({column(g.x)}, dtype={g.x.dtype}, requires_grad=True)",
            f"y = {run}(x, {tau}, {theta}, {s}, {c}, v={v}, form={g.form!r}, owner={g.owner!r}, "
            f"centred={centred}, q={q}, clamp={g.clamp}, anchor={anchors(g)})  # {name}",
            f"y.backward(torch.tensor({column(g.dy)}, dtype={g.x.dtype})); print(y, x.grad)",
        )
    )


def _at_infinity(g: Gates, names: dict[str, Backend]) -> list[str]:
    """NaN stays NaN; at an infinite x the value is that of the outer branch, or NaN as torch's."""
    found = []
    x = torch.tensor([[math.nan], [math.inf], [-math.inf]], dtype=g.x.dtype)
    x = x.expand(3, g.x.shape[1]).contiguous()
    parameters, _, _ = _parameters(g, "channel")
    for name, run in names.items():
        with torch.no_grad():
            y = run(x, *parameters, v=None, form=g.form, owner=g.owner, centred=g.centred)
        if y is None:
            continue
        if not bool(y[0].isnan().all()):
            found.append(f"{name}: NaN is lost\n{program(g, 'channel', name, 0)}")
        outer = [g.s[-1] * math.inf + g.c[-1], g.s[0] * -math.inf + g.c[0]]
        for have, s, c, limit in zip(
            y[1:], (g.s[-1], g.s[0]), (g.c[-1], g.c[0]), outer, strict=True
        ):
            limit = torch.where(s == 0, c, limit).to(have.dtype)
            close = torch.isclose(have, limit, rtol=1e-2, atol=1e-3) | have.isnan()
            if not bool(close.all()):
                at = int((~close).nonzero()[0])
                found.append(f"{name}: not the limit\n{program(g, 'channel', name, at)}")
    return found


def batches(seed: int, n: int) -> Iterator[tuple[Gates, str]]:
    """`n` gates, nine of ten together, the others one by one as tensors or numbers."""
    rng, left = np.random.default_rng(seed), n
    while left > 0:
        together = rng.random() < (0.9 if n > 1000 else 0.5) or left > _TOGETHER * 40
        count = min(left, _TOGETHER if together else 1)
        for _ in range(1 if together else min(25, left)):
            g = drawn(rng, count, 12 if together else 24)
            how = "channel" if together else str(rng.choice(["layer", "numbers"]))
            if how == "numbers" and g.tau is None and bool((g.theta.diff(dim=0) < 0).any()):
                how = "layer"  # as numbers they are refused
            yield g if how == "numbers" else replace(g, a=None), how
            left -= count


def check_gates(seed: int, n: int, compiled: int = 0) -> list[str]:
    """Every difference between a backend and the truth among `n` random gates.

    Args:
        compiled: how many of the drawn structures are compiled, too (aot_eager).
    """
    found: list[str] = []
    with np.errstate(all="ignore"):
        for g, how in batches(seed, n):
            names = backends(compiled=compiled > 0)
            compiled -= 1
            found += differences(g, how, names)
            if how == "channel" and g.q is None and g.clamp is None:
                found += _at_infinity(g, names)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Random gates against long double.")
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", type=int, default=0)
    parser.add_argument("--show", type=int, default=5)
    given = parser.parse_args()
    start = time.monotonic()
    found = check_gates(given.seed, given.n, given.compiled)
    for each in found[: given.show]:
        print(each, end="\n\n")
    seconds = time.monotonic() - start
    print(f"seed {given.seed}: {given.n} gates, {len(found)} differences, {seconds:.0f} s")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
