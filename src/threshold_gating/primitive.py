"""Eqs. 2-5 in plain torch: gates, branches and their blend; the reference of every kernel.

A gate says how much of `x` lies in a region, a branch is an affine function of `x`, and

    y = sum_k g_k(x) (s_k x + c_k) = a(x) x + b(x),   a = sum_k g_k s_k,   b = sum_k g_k c_k.

The right-hand form is the one evaluated: a vanishing gate meets a slope, never an overflowed
branch, so no finite input gives NaN. Branches run low to high in x, everywhere.

Soft gates are the softmax of logits l_1 = 0, l_{k+1} = l_k + u_k with u_k = tau_k (x - theta_k):
for K = 2 the sigmoid and its complement. The appendix's renormalised product of sigmoids is
`form="product"`. Hard gates (tau = inf) are comparisons, with an owner per threshold that says on
which side x == theta lies.

Derivatives are the analytic ones to any order. Those of a gate are products of masses, never a
difference of nearly equal ones, so they keep their digits where a gate is almost shut or open.
16-bit inputs are evaluated in float32 and rounded once.

Python numbers among the parameters are structure, tensors are data: a number 0 removes its term
and a number 1 its multiplication (which makes ReLU and its kin bitwise torch's), while a tensor's
values are never looked at, so that one compiled graph serves every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

AUDITED_AS = "gates"  # see conversion.audit

Value = float | Tensor
Values = Value | Sequence[Value]
GateForm = Literal["softmax", "product"]
Anchor = tuple[float, float] | None

FORMS = get_args(GateForm)
# The ops themselves: whoever intercepts torch.sigmoid and its like in a network around us must not
# see the gate's own arithmetic.
_sigmoid, _tanh = torch.ops.aten.sigmoid.default, torch.ops.aten.tanh.default
_logsigmoid, _clamp = torch.ops.aten.log_sigmoid.default, torch.ops.aten.clamp.default
_softmax = torch.ops.aten.softmax.int
_minimum = torch.ops.aten.minimum.default


def gates(
    x: Tensor,
    tau: Values,
    theta: Values,
    *,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
) -> Tensor:
    """Membership of each element of `x` in each of the K regions cut by `theta` (Eq. 2).

    Args:
        x: pre-activations, any shape, floating point.
        tau: sharpness > 0, one value or, along the first axis, one per threshold (a tensor tau
            with as many axes as a tensor theta). The number `inf` gives hard gates.
        theta: K - 1 thresholds along the first axis, low to high; each broadcasts against `x`.
            Softmax gates take them in any order. Product and hard gates take numbers in
            non-decreasing order only; tensors are data and may cross. A hard gate then counts the
            thresholds that x lies beyond, as if they were sorted.
        form: "softmax" or, for K >= 3, the appendix's "product"; they agree for K <= 2.
        owner: for hard gates, per threshold "lo" (x == theta lies below, the default) or "hi".

    Returns:
        gates of shape (K, *broadcast shape), low to high; they sum to one.

    >>> gates(torch.tensor([0.0]), 1.0, (0.0,))
    tensor([[0.5000],
            [0.5000]])
    """
    z = wide(x)
    taus, thresholds = _thresholds(z, tau, theta, form)
    if _is_hard(taus, thresholds):
        owners = _owners(owner, len(thresholds))
        beyond = _beyond(z, thresholds, owners, _above)
        region = sum((b.to(z.dtype) for b in beyond), torch.zeros_like(z))
        g = torch.stack([(region == k).to(z.dtype) for k in range(len(beyond) + 1)])
        g = torch.where(z.isnan(), z, g)
    else:
        g = torch.stack(_soft_gates(_arguments(z, taus, thresholds, form), form))  # (K, *shape)
    return g.to(x.dtype)


def blend(
    x: Tensor,
    tau: Values,
    theta: Values,
    s: Values,
    c: Values,
    *,
    v: Tensor | Sequence[Tensor] | None = None,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
    q: Values | None = None,
    anchor: Sequence[Anchor] | None = None,
    clamp: tuple[float, float] | None = None,
    centred: bool | None = None,
) -> Tensor:
    """The primitive y = sum_k g_k(x) (s_k x + c_k) (Eq. 3): K branches blended by K gates.

    Args:
        x, tau, theta, form, owner: as in `gates`.
        s, c: K slopes and K intercepts along the first axis; each broadcasts against `x`.
        v: what the branches read instead of `x` (two-input gates: GLU is v * sigmoid(x)); K
            tensors give each branch its own (max(a, b) is x = a - b with v = (b, a)).
        q: K quadratic coefficients: the branch becomes q_k x^2 + s_k x + c_k.
        anchor: per branch None or a point (a_k, y_k) on it. A hard branch is then evaluated from
            that point, which keeps its digits where s_k x + c_k would cancel (HardSigmoid).
        clamp: bounds on y, with gradient 0 at and beyond them, as `hardtanh` has.
        centred: for K = 2 soft gates, evaluate about the midpoint of the branches with tanh
            instead of sigmoid: free of cancellation where the branches are opposite (Tanh).
            None decides by the values where they are numbers.

    Returns:
        y with the dtype of `x` and the broadcast shape.

    >>> blend(torch.tensor([-1.0, 2.0]), float("inf"), (0.0,), (0.0, 1.0), (0.0, 0.0))
    tensor([0., 2.])
    """
    z = wide(x)
    taus, thresholds = _thresholds(z, tau, theta, form)
    K = len(thresholds) + 1
    curves = [0.0] * K if q is None else _rows("q", q, z, K)
    slopes, constants = _rows("s", s, z, K), _rows("c", c, z, K)
    inputs = _branch_inputs(z, v, K)
    if _is_hard(taus, thresholds):
        points = (None,) * K if anchor is None else anchor
        if v is None:
            pairs = zip(curves, slopes, strict=True)
            inputs = [_reached(z, q_k, s_k, k, K) for k, (q_k, s_k) in enumerate(pairs)]
        parts = zip(inputs, curves, slopes, constants, points, strict=True)
        branches = [_branch(*p) for p in parts]
        y = _select(z, thresholds, _owners(owner, K - 1), branches, _carrier(curves, slopes))
        if v is not None:
            y = torch.where(z.isnan(), z, y)
    else:
        u = _arguments(z, taus, thresholds, form)
        if centred is None:
            centred = K == 2 and _are_opposite(slopes, constants, curves)
        if centred:
            mean = _mean_about_midpoint(u[0])
        else:
            weights = (curves, slopes, constants)
            used = [any(not _is_number(w[k], 0) for w in weights) for k in range(K)]
            mean = _mean(_soft_gates(u, form, used))
        y = _average(z, inputs, mean, curves, slopes, constants)
    if clamp is not None:
        y = torch.where(y <= clamp[0], clamp[0], torch.where(y >= clamp[1], clamp[1], y))
    return y.to(x.dtype)


def straight_through(
    x: Tensor, y: Tensor, theta: Sequence[Value], s: Sequence[Value], c: Sequence[Value]
) -> Tensor:
    """`y` of hard gates unchanged, with a gradient for the thresholds at which it jumps.

    A step has none of its own. Theta gets that of a sigmoid of width 1/4 and of the height of the
    jump; x and the branches keep theirs, which are exact.

    >>> theta = torch.tensor(0.0, requires_grad=True)
    >>> straight_through(torch.zeros(1), torch.zeros(1), [theta], (0, 0), (0, 1)).sum().backward()
    >>> theta.grad
    tensor(-1.)
    """
    z, surrogate = wide(x).detach(), torch.zeros_like(y)
    if not _are_in_order(theta):  # the k-th jump is at the k-th threshold from below
        theta = torch.stack([torch.as_tensor(t) for t in theta]).sort(0).values.unbind(0)
    for k, at in enumerate(theta):
        jump: Value = (s[k + 1] - s[k]) * at + (c[k + 1] - c[k])
        jump = jump.detach() if isinstance(jump, Tensor) else jump
        surrogate = surrogate + jump * _sigmoid(4 * (z - at))
    return y + (surrogate - surrogate.detach()).to(y.dtype)


def gated_linear(
    x: Tensor,
    tau: Values,
    theta: Values,
    weight: Tensor,
    const: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
) -> Tensor:
    """Gates before the sum (Eq. 4): a_j = sum_i sum_k g_k(x_i) (w^k_ji x_i + c^k_ji) + b_j.

    With w^k = s_k W and c^k = c_k W (Eq. 5) this is `blend` followed by the dense layer W. Gates
    shared by the outputs cost one product of K times the inner size; gates per synapse are
    evaluated once for each output.

    Args:
        x: inputs of shape (..., I).
        tau, theta, form, owner: as in `gates`, each value of a shape that broadcasts to (I,)
            (shared by all outputs) or of shape (O, I) (one gate per synapse).
        weight: branch weights of shape (O, K, I).
        const: branch constants of shape (O, K, I), or None for zero.
        bias: shape (O,), or None.

    Returns:
        shape (..., O).
    """
    K = _length(theta) + 1
    if weight.dim() != 3 or tuple(weight.shape[1:]) != (K, x.shape[-1]):
        raise ValueError(
            f"gated_linear: {K - 1} thresholds and x of shape {tuple(x.shape)} need a weight of "
            f"shape (O, {K}, {x.shape[-1]}), that is (O, K, I); got {tuple(weight.shape)}."
        )
    if const is not None and const.shape != weight.shape:
        raise ValueError(
            f"gated_linear: const has the shape of weight, {tuple(weight.shape)}; "
            f"got {tuple(const.shape)}."
        )
    each = theta.unbind(0) if isinstance(theta, Tensor) and theta.dim() else theta
    per_synapse = isinstance(each, Sequence) and any(
        isinstance(t, Tensor) and t.dim() == 2 for t in each
    )
    z = x.unsqueeze(-2) if per_synapse else x
    g = gates(z, tau, theta, form=form, owner=owner).movedim(0, -2)  # (..., [O,] K, I)
    gx = g * z.unsqueeze(-2)
    if per_synapse:
        y = (gx * weight).sum((-1, -2)) + (0 if const is None else (g * const).sum((-1, -2)))
    else:
        y = gx.flatten(-2) @ weight.flatten(1).T
        y = y if const is None else y + g.flatten(-2) @ const.flatten(1).T
    return y if bias is None else y + bias


def features(
    x: Tensor,
    tau: Values,
    theta: Values,
    s: Values,
    c: Values,
    *,
    axis: int = -1,
    groups: int = 1,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
) -> Tensor:
    """The gated inputs g_k(x) (s_k x + c_k), one beside the other: what tier W multiplies (Eq. 4).

    Args:
        x, tau, theta, s, c, form, owner: as in `blend`.
        axis: where the channels of `x` are; the result has K times as many there.
        groups: the result is ordered (groups, K, channels / groups), as a grouped convolution
            wants its inputs.

    >>> features(torch.tensor([[1.0, 2.0]]), math.inf, (1.5,), (1, 1), (0, 0))
    tensor([[1., 0., 0., 2.]])
    """
    z = wide(x)
    g = gates(z, tau, theta, form=form, owner=owner).unbind(0)
    slopes, constants = _rows("s", s, z, len(g)), _rows("c", c, z, len(g))
    parts = [
        gk * _polynomial(z, 0.0, sk, ck) for gk, sk, ck in zip(g, slopes, constants, strict=True)
    ]
    axis = axis % x.dim()
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    split = [p.reshape(shape) for p in parts]
    return torch.stack(split, axis + 1).flatten(axis, axis + 2).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype it is computed in: float32 for 16-bit floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"gates need a real floating-point tensor, got {given}; convert it first.")
    return x.float() if x.element_size() < 4 else x


def _length(w: Values) -> int:
    return len(w) if isinstance(w, Sequence) or (isinstance(w, Tensor) and w.dim()) else 1


def _rows(name: str, w: Values, x: Tensor, n: int) -> list[Value]:
    """The n entries of `w` along its first axis: numbers as they are, tensors in x's dtype."""
    each = w.unbind(0) if isinstance(w, Tensor) and w.dim() else w
    each = each if isinstance(each, Sequence) else (each,)
    if len(each) != n:
        raise ValueError(
            f"{name} needs {n} entries along its first axis to fit the thresholds; got {len(each)}."
        )
    return [r.to(x.dtype) if isinstance(r, Tensor) else float(r) for r in each]


def _thresholds(
    x: Tensor, tau: Values, theta: Values, form: str
) -> tuple[list[Value], list[Value]]:
    """(tau_k, theta_k) for each threshold, numbers checked, tensors taken as they are."""
    if form not in FORMS:
        raise ValueError(f"form is 'softmax' or 'product'; got {form!r}.")
    n = _length(theta)
    own = isinstance(tau, Tensor) and isinstance(theta, Tensor) and tau.dim() == theta.dim()
    if own or isinstance(tau, Sequence):
        taus = _rows("tau", tau, x, n)
    else:
        taus = [tau.to(x.dtype) if isinstance(tau, Tensor) else float(tau)] * max(n, 1)
    if any(not isinstance(t, Tensor) and not t > 0 for t in taus):
        raise ValueError(f"tau must be positive (inf for a hard gate); got {tau!r}.")
    if len({not isinstance(t, Tensor) and t == math.inf for t in taus}) > 1:
        raise ValueError(f"tau is inf (hard gates) at every threshold or at none; got {tau!r}.")
    thresholds = _rows("theta", theta, x, n)
    numbers = [t for t in thresholds if not isinstance(t, Tensor)]
    if (form == "product" or _is_hard(taus, thresholds)) and numbers != sorted(numbers):
        raise ValueError(
            f"hard and product-form gates need non-decreasing thresholds; got theta={theta!r}."
        )
    return taus, thresholds


def _is_hard(taus: Sequence[Value], thresholds: Sequence[Value]) -> bool:
    """Hard gates are asked for by the number inf; a tensor is data and never inspected."""
    return not thresholds or (not isinstance(taus[0], Tensor) and taus[0] == math.inf)


def _is_number(w: Value, value: float) -> bool:
    return not isinstance(w, Tensor) and w == value


def _owners(owner: Sequence[str] | None, n: int) -> Sequence[str]:
    owners = ("lo",) * n if owner is None else owner
    if len(owners) != n or not set(owners) <= {"lo", "hi"}:
        raise ValueError(f"owner is 'lo' or 'hi' for each of the {n} thresholds; got {owner!r}.")
    return owners


def _above(x: Tensor, theta: Value, owner: str) -> Tensor:
    return x > theta if owner == "lo" else x >= theta


def _below(x: Tensor, theta: Value, owner: str) -> Tensor:
    return x <= theta if owner == "lo" else x < theta


def _arguments(
    x: Tensor, taus: Sequence[Value], thresholds: Sequence[Value], form: str
) -> list[Tensor]:
    """u_k = tau_k (x - theta_k), within the range where a gate can move."""
    shifted = [x if _is_number(t, 0) else x - t for t in thresholds]
    scaled = [z if _is_number(t, 1) else t * z for t, z in zip(taus, shifted, strict=False)]
    bound = _underflow(x.dtype)
    if form == "softmax" and not _are_in_order(thresholds):
        bound = torch.finfo(x.dtype).max / (4 * len(thresholds))  # so that no sum of them overflows
    return [_clamp(u, -bound, bound) for u in scaled]


def _underflow(dtype: torch.dtype) -> float:
    """Beyond this exp underflows to exactly 0.

    Of thresholds in order the arguments fall from positive to negative, so clamping each there
    changes no gate. Without it their running sum reaches inf - inf for finite x (GELU with K = 5 at
    1e38), and the gradient of a saturated gate 0 * inf.
    """
    # A number of a module's is one that may change to torch.compile(dynamic=True), which then mixes
    # up the graphs of gates inside and outside of a checkpointed region; a literal is not.
    return 746.0 if dtype == torch.float64 else 104.0


def _are_in_order(thresholds: Sequence[Value]) -> bool:
    """Whether thresholds are known to be low to high; a tensor's values are not."""
    known = [t for t in thresholds if not isinstance(t, Tensor)]
    return len(thresholds) < 2 or (len(known) == len(thresholds) and known == sorted(known))


def _soft_gates(
    u: Sequence[Tensor], form: str, used: Sequence[bool] = (True, True)
) -> list[Tensor]:
    """The K gates; for K = 2 one that is not used is not evaluated (its place holds the other)."""
    if len(u) == 1:
        high = sigmoid(u[0]) if used[1] else None
        low = sigmoid(-u[0]) if used[0] or high is None else high
        return [low, low if high is None else high]
    if form == "softmax":
        return softmax_gates(u)
    # log of sigma(u_{k-1}) sigma(-u_k); the softmax renormalises, without a 0/0
    below, above = [_logsigmoid(-z) for z in u], [_logsigmoid(z) for z in u]
    inner = [a + b for a, b in zip(above, below[1:], strict=False)]
    logits = torch.broadcast_tensors(below[0], *inner, above[-1])  # type: ignore[no-untyped-call]
    return list(_softmax(torch.stack(logits), 0).unbind(0))


def sigmoid(u: Tensor) -> Tensor:
    """The sigmoid, with a derivative that keeps its digits where torch's 1 - sigma has none."""
    y: Tensor = _applied(_Sigmoid, _DualSigmoid, u)
    return y


def softmax_gates(u: Sequence[Tensor]) -> list[Tensor]:
    """The K gates of K - 1 arguments whose thresholds are in any order."""
    same_shape = torch.broadcast_tensors(*u)  # type: ignore[no-untyped-call]
    if torch.compiler._is_exporting_flag and torch.is_grad_enabled():
        return _exported_gates(same_shape)
    return list(_applied(_Gates, _DualGates, *same_shape))


def _exported_gates(u: Sequence[Tensor]) -> list[Tensor]:
    """The gates for a graph that keeps no backward of ours: its steps have the right derivative.

    Where x is on a threshold two logits are the largest, and torch's derivative of that is no
    common shift. So the gates are constants to autograd, and what it sees is how they move, at 0.
    Of first order, as in `logits`; a second derivative is not in it.
    """
    gates = [g.detach() for g in _Gates.forward(*u)]
    moves = _moved(gates, [z - z.detach() for z in u])
    return [g + move for g, move in zip(gates, moves, strict=True)]


def relative_logits(u: Sequence[Tensor]) -> list[Tensor]:
    """l_k - max l for the running sums l of `u`, K of them, for thresholds in any order.

    The drop below the largest so far, from the left and from the right; the larger drop is the one
    below all. No sum holds more than what lies between a logit and the largest, so nothing that
    cancels later is added first.
    """
    left, right = [torch.zeros_like(u[0])], [torch.zeros_like(u[0])]
    for z in u:
        left.append(_clamp(left[-1] + z, None, 0))
    for z in reversed(u):
        right.append(_clamp(right[-1] - z, None, 0))
    return [_minimum(a, b) for a, b in zip(left, reversed(right), strict=True)]


def _applied(plain: Any, dual: Any, *inputs: Tensor) -> Any:
    """Dynamo refuses a function with a forward mode, and one of many inputs without gradient."""
    if not torch.compiler.is_compiling():
        return dual.apply(*inputs)
    needed = torch.is_grad_enabled() and any(u.requires_grad for u in inputs)
    return plain.apply(*inputs) if needed else plain.forward(*inputs)


def times(v: Tensor, slope: Tensor) -> Tensor:
    """v slope, whose gradient in the slope is finite: behind it infinity would meet shut gates."""
    same_shape = torch.broadcast_tensors(v, slope)  # type: ignore[no-untyped-call]
    y: Tensor = _applied(_Times, _DualTimes, *same_shape)
    return y


def settled(v: Tensor, slope: Tensor) -> Tensor:
    """What the branches read, 0 at an infinity where only constant branches are open.

    So ELU and Softplus have their limits there, as torch's have. Two gates follow torch's SiLU.
    """
    return torch.where(v.isinf() & (slope == 0), 0.0, v)


def _within_range(t: Tensor) -> Tensor:
    """What overflowed as a large number, for infinity times a gate of 0 would be NaN."""
    largest = torch.finfo(t.dtype).max / 2
    bounded: Tensor = _clamp(t, -largest, largest)
    return bounded


class _Times(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, slope: Tensor) -> Tensor:
        return v * slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        v, slope = ctx.saved_tensors
        return dy * slope, _within_range(dy * v)


class _DualTimes(_Times):
    """The same with forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dv: Tensor, dslope: Tensor) -> Tensor:
        v, slope = ctx.saved_tensors
        dy: Tensor = dv * slope + v * dslope
        return dy


class _Sigmoid(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        y: Tensor = _sigmoid(u)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return _within_range(dy) * (sigmoid(u) * sigmoid(-u))


class _DualSigmoid(_Sigmoid):
    """The same with forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, du: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return du * (sigmoid(u) * sigmoid(-u))


class _Swing(_Sigmoid):
    """tanh(u / 2), likewise."""

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        y: Tensor = _tanh(u / 2)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return 2 * _within_range(dy) * (sigmoid(u) * sigmoid(-u))


class _DualSwing(_Swing):
    """The same with forward mode."""

    setup_context = _DualSigmoid.setup_context

    @staticmethod
    def jvp(ctx: Any, du: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return 2 * du * (sigmoid(u) * sigmoid(-u))


class _Gates(Function):
    """Softmax gates of their arguments; see `tile` for the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*u: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.exp(logit) for logit in relative_logits(u)]
        share = 1 / sum(parts[1:], parts[0])
        return tuple([part * share for part in parts])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *dg: Tensor) -> tuple[Tensor, ...]:
        g = ctx.saved_tensors
        weighed = [gk * _within_range(d) for gk, d in zip(g, dg, strict=True)]
        sides = zip(*_sides(g), *_sides(weighed), strict=True)
        return tuple([lower * above - upper * below for lower, upper, below, above in sides])


class _DualGates(_Gates):
    """The same with forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def jvp(ctx: Any, *du: Tensor) -> tuple[Tensor, ...]:
        return tuple(_moved(ctx.saved_tensors, du))


def _moved(g: Sequence[Tensor], du: Sequence[Tensor]) -> list[Tensor]:
    """How the gates move with their arguments. Each threshold lifts the branches above it by the
    mass below, and lowers those below it by the mass above: no two of these terms cancel where a
    gate is shut, whatever tau is."""
    rows = [(d * lower, d * upper) for d, lower, upper in zip(du, *_sides(g), strict=True)]
    none = torch.zeros_like(g[0])
    lifts = [none, *_running([lift for lift, _ in rows])]
    falls = [*_running([fall for _, fall in rows[::-1]])[::-1], none]
    return [gk * (a - b) for gk, a, b in zip(g, lifts, falls, strict=True)]


def _sides(w: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sums of `w` below and above each threshold."""
    return _running(w[:-1]), _running(w[:0:-1])[::-1]


def _running(w: Sequence[Tensor]) -> list[Tensor]:
    found = [w[0]]
    for each in w[1:]:
        found.append(found[-1] + each)
    return found


def _branch_inputs(x: Tensor, v: Tensor | Sequence[Tensor] | None, K: int) -> list[Tensor]:
    """What each branch reads, in the computing dtype; the same object where it is shared."""
    if v is None or isinstance(v, Tensor):
        return [x if v is None else v.to(x.dtype)] * K
    if len(v) != K:
        raise ValueError(f"v is one tensor or one for each of the K = {K} branches; got {len(v)}.")
    return [z.to(x.dtype) for z in v]


def _are_opposite(*pairs: Sequence[Value]) -> bool:
    """Whether two branches of numbers have equal or opposite coefficients, but are not equal."""
    if any(isinstance(w, Tensor) for pair in pairs for w in pair):
        return False
    return any(lo != hi for lo, hi in pairs) and all(abs(lo) == abs(hi) for lo, hi in pairs)


def _mean(g: Sequence[Tensor]) -> Callable[[Sequence[Value]], Value]:
    """w -> sum_k g_k w_k; equal numbers need no gates, since these sum to one."""

    def mean(w: Sequence[Value]) -> Value:
        if not any(isinstance(wk, Tensor) for wk in w) and len(set(w)) == 1:
            return w[0]
        terms = [
            gk if _is_number(wk, 1) else wk * gk
            for wk, gk in zip(w, g, strict=True)
            if not _is_number(wk, 0)
        ]
        return sum(terms[1:], terms[0])

    return mean


def _mean_about_midpoint(u: Tensor) -> Callable[[Sequence[Value]], Value]:
    """The same for K = 2, by tanh(u/2): exact to the last digits where w_lo = -w_hi.

    On either side of the threshold it starts from the branch of that side, whatever the values.
    """
    swing: Tensor = _applied(_Swing, _DualSwing, u)

    def mean(w: Sequence[Value]) -> Value:
        low, high = w
        total = low + high
        if not isinstance(low, Tensor) and low == high:
            return low
        if _is_number(total, 0):
            return swing if _is_number(high, 1) else high * swing
        above = high * swing + total * sigmoid(-u)
        return torch.where(u > 0, above, total * sigmoid(u) - low * swing)

    return mean


def _average(
    x: Tensor,
    inputs: Sequence[Tensor],
    mean: Callable[[Sequence[Value]], Value],
    curves: Sequence[Value],
    slopes: Sequence[Value],
    constants: Sequence[Value],
) -> Tensor:
    """Soft gates: y = (mean(q) v + mean(s)) v + mean(c)."""
    if all(v is inputs[0] for v in inputs):
        curve, slope, constant = mean(curves), mean(slopes), mean(constants)
        y = _polynomial(inputs[0], curve, slope, constant)
        if isinstance(slope, Tensor) and _is_number(curve, 0):
            v = inputs[0] if len(slopes) == 2 else settled(inputs[0], slope)
            y = times(v, slope)
            y = y if _is_number(constant, 0) else y + constant
    else:
        y = mean([_branch(*p) for p in zip(inputs, curves, slopes, constants, strict=True)])
    # Equal constant branches do not depend on x; NaN is passed on all the same.
    return y if isinstance(y, Tensor) else torch.where(x.isnan(), x, y)


def _polynomial(v: Tensor, q: Value, s: Value, c: Value) -> Value:
    """(q v + s) v + c without the steps that numbers make void."""
    slope = s if _is_number(q, 0) else q * v if _is_number(s, 0) else q * v + s
    if _is_number(slope, 0):
        return c
    y = v if _is_number(slope, 1) else v * slope
    return y if _is_number(c, 0) else y + c


def _branch(v: Tensor, q: Value, s: Value, c: Value, anchor: Anchor = None) -> Value:
    """One branch: from its anchor a as (v - a)(q (v - b)) or s (v - a), else the polynomial.

    A coefficient that is 1/n divides by n there, as torch's hardsigmoid and hardswish do.
    """
    if anchor is None:
        return _polynomial(v, q, s, c)
    if isinstance(q, Tensor) or isinstance(s, Tensor):
        raise TypeError("an anchored branch has numbers for s and q; got a tensor.")
    a, y = anchor
    lead = q or s
    z = (v - a) if q == 0 else (v - a) * _polynomial(v, 0.0, 1.0, a + s / q)
    z = z / (1 / lead) if (1 / lead).is_integer() else z * lead
    return z if y == 0 else z + y


def _reached(x: Tensor, q: Value, s: Value, k: int, K: int) -> Tensor:
    """x without the infinities that are not in region k: there the gradient of a parabola in x, and
    of a learned slope, which are not taken, would be infinite, and 0 times it NaN."""
    if K == 1 or (_is_number(q, 0) and not isinstance(s, Tensor)):
        return x
    end = x.isinf() if 0 < k < K - 1 else x == (math.inf if k == 0 else -math.inf)
    return torch.where(end, 0.0, x)


def _carrier(curves: Sequence[Value], slopes: Sequence[Value]) -> int | None:
    """The first branch that depends on its input, or None."""
    flat = [_is_number(q, 0) and _is_number(s, 0) for q, s in zip(curves, slopes, strict=True)]
    return flat.index(False) if False in flat else None


def _select(
    x: Tensor,
    thresholds: Sequence[Value],
    owners: Sequence[str],
    branches: Sequence[Value],
    carrier: int | None,
) -> Tensor:
    """Hard gates: the branch of the region x lies in.

    NaN fails every comparison, so it stays where the selection starts: in a branch that carries
    its input on. Without such a branch it is put back at the end.
    """
    start = carrier or 0
    first = branches[start]
    y = first if isinstance(first, Tensor) else torch.full_like(x, first)
    if start < len(thresholds):
        beyond = _beyond(x, thresholds, owners, _above)
        for k in range(start, len(thresholds)):
            y = torch.where(beyond[k], branches[k + 1], y)
    if start:
        short = _beyond(x, thresholds, owners, _below)
        for k in range(start - 1, -1, -1):
            y = torch.where(short[-1 - k], branches[k], y)
    return torch.where(x.isnan(), x, y) if carrier is None else y


def _beyond(
    x: Tensor,
    thresholds: Sequence[Value],
    owners: Sequence[str],
    side: Callable[[Tensor, Value, str], Tensor],
) -> list[Tensor]:
    """Whether x lies on that `side` of at least 1, 2, ... of the thresholds.

    For thresholds in order these are the comparisons themselves; those that may have crossed are
    counted, by exchanging neighbours until they are in order.
    """
    found = [side(x, t, o) for t, o in zip(thresholds, owners, strict=True)]
    if _are_in_order(thresholds):
        return found if side is _above else found[::-1]
    for last in range(len(found) - 1, 0, -1):
        for k in range(last):
            a, b = found[k], found[k + 1]
            found[k], found[k + 1] = a | b, a & b
    return found
