"""Eqs. 2-5 in plain torch: gates, branches and their blend; the reference of every kernel.

A gate says how much of `x` lies in a region, a branch is an affine function of `x`, and

    y = sum_k g_k(x) (s_k x + c_k) = a(x) x + b(x),   a = sum_k g_k s_k,   b = sum_k g_k c_k.

The right-hand form is the one evaluated: a vanishing gate meets a slope, never an overflowed
branch, so no finite input gives NaN. Branches run low to high in x, everywhere.

Soft gates are the softmax of logits l_1 = 0, l_{k+1} = l_k + u_k with u_k = tau_k (x - theta_k):
for K = 2 the sigmoid and its complement. The appendix's renormalised product of sigmoids is
`form="product"`. Hard gates (tau = inf) are comparisons, with an owner per threshold that says on
which side x == theta lies.

Derivatives are the analytic ones to any order (`soft`). 16-bit inputs are evaluated in float32 and
rounded once.

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

from threshold_gating.primitive import soft
from threshold_gating.primitive.soft import Value as Value
from threshold_gating.primitive.soft import are_in_order, is_number

AUDITED_AS = "gates"  # see conversion.audit

Values = Value | Sequence[Value]
GateForm = Literal["softmax", "product"]
Anchor = tuple[float, float] | None

FORMS = get_args(GateForm)


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
            with as many axes as a tensor theta). The number `inf` gives hard gates. A tensor that
            is not positive and finite is refused, or gives NaN where its values are not at hand
            (on a GPU, in a compiled graph).
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
    _check_numbers(theta=theta)
    return _memberships(x, positive(tau), theta, form, owner)


def _memberships(
    x: Tensor, tau: Values, theta: Values, form: GateForm, owner: Sequence[str] | None
) -> Tensor:
    """`gates`, whose tau is known to be positive."""
    z = wide(x)
    taus, thresholds = _thresholds(z, tau, theta, form)
    if _is_hard(taus, thresholds):
        owners = _owners(owner, len(thresholds))
        beyond = _beyond(z, thresholds, owners, _above)
        region = sum((b.to(z.dtype) for b in beyond), torch.zeros_like(z))
        g = torch.stack([(region == k).to(z.dtype) for k in range(len(beyond) + 1)])
        g = _nowhere(torch.where(z.isnan(), z, g), thresholds)
    else:
        g = torch.stack(soft.gates(soft.arguments(z, taus, thresholds, form), form))  # (K, *shape)
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
    _check_numbers(theta=theta, s=s, c=c, q=q, clamp=clamp)
    return evaluated(x, positive(tau), theta, s, c, v, form, owner, q, anchor, clamp, centred)


def evaluated(
    x: Tensor,
    tau: Values,
    theta: Values,
    s: Values,
    c: Values,
    v: Tensor | Sequence[Tensor] | None = None,
    form: GateForm = "softmax",
    owner: Sequence[str] | None = None,
    q: Values | None = None,
    anchor: Sequence[Anchor] | None = None,
    clamp: tuple[float, float] | None = None,
    centred: bool | None = None,
) -> Tensor:
    """`blend` for who knows that tau is positive: a tensor's values are not looked at."""
    z = wide(x)
    if z.dtype != torch.float64 and are_huge(s, c, () if q is None else q):
        y = evaluated(z.double(), tau, theta, s, c, v, form, owner, q, anchor, clamp, centred)
        return y.to(x.dtype)
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
        y = _nowhere(y if v is None else torch.where(z.isnan(), z, y), thresholds)
    else:
        u = soft.arguments(z, taus, thresholds, form)
        if centred is None:
            centred = K == 2 and soft.are_opposite(slopes, constants, curves)
        if centred:
            mean = soft.mean_about_midpoint(u[0])
        else:
            weights = (curves, slopes, constants)
            used = [any(not is_number(w[k], 0) for w in weights) for k in range(K)]
            mean = soft.mean_of(soft.gates(u, form, used))
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
    surrogate = torch.zeros_like(y)
    for k, (at, rise) in enumerate(_rises(wide(x), theta)):
        jump: Value = (s[k + 1] - s[k]) * at + (c[k + 1] - c[k])
        surrogate = surrogate + _constant(jump) * rise
    return y + surrogate.to(y.dtype)


def _rises(x: Tensor, theta: Sequence[Value]) -> list[tuple[Value, Tensor]]:
    """Each threshold from below, and 0 with the gradient that a sigmoid of width 1/4 has in it."""
    if not are_in_order(theta):
        theta = torch.stack([torch.as_tensor(t) for t in theta]).sort(0).values.unbind(0)
    z = x.detach()
    # at an infinite x no gradient: an infinite threshold would be NaN away
    apart = [torch.where(z.isinf(), z.sign() * 99, z - at) for at in theta]
    steps = [torch.ops.aten.sigmoid.default(4 * away) for away in apart]
    return [(at, step - step.detach()) for at, step in zip(theta, steps, strict=True)]


def _constant(w: Value) -> Value:
    """The height of a jump to autograd; one that is not finite gives its threshold no gradient, and
    must not make the 0 that it is multiplied with NaN."""
    if isinstance(w, Tensor):
        return torch.where(w.isfinite(), w, 0.0).detach()
    return w if math.isfinite(w) else 0.0


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
    straight: bool = False,
) -> Tensor:
    """The gated inputs g_k(x) (s_k x + c_k), one beside the other: what tier W multiplies (Eq. 4).

    Args:
        x, tau, theta, s, c, form, owner: as in `blend`.
        axis: where the channels of `x` are; the result has K times as many there.
        groups: the result is ordered (groups, K, channels / groups), as a grouped convolution
            wants its inputs.
        straight: give the thresholds of hard gates a gradient where a gated input jumps, which is
            that of `straight_through`.

    >>> features(torch.tensor([[1.0, 2.0]]), math.inf, (1.5,), (1, 1), (0, 0))
    tensor([[1., 0., 0., 2.]])
    """
    z = wide(x)
    g = _memberships(z, tau, theta, form, owner).unbind(0)
    slopes, constants = _rows("s", s, z, len(g)), _rows("c", c, z, len(g))
    parts = [
        gk * _polynomial(z, 0.0, sk, ck) for gk, sk, ck in zip(g, slopes, constants, strict=True)
    ]
    if straight:
        for k, (at, rise) in enumerate(_rises(z, _rows("theta", theta, z, len(g) - 1))):
            below, above = (slopes[j] * at + constants[j] for j in (k, k + 1))
            parts[k] = parts[k] - _constant(below) * rise
            parts[k + 1] = parts[k + 1] + _constant(above) * rise
    return beside(parts, axis, groups).to(x.dtype)


def beside(parts: Sequence[Tensor], axis: int, groups: int) -> Tensor:
    """Gated inputs in the order of `features`."""
    known = parts[0].shape
    axis = axis % len(known)
    shape = (*known[:axis], groups, known[axis] // groups, *known[axis + 1 :])
    return torch.stack([p.reshape(shape) for p in parts], axis + 1).flatten(axis, axis + 2)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype it is computed in: float32 for 16-bit floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"gates need a real floating-point tensor, got {given}; convert it first.")
    return x.float() if x.element_size() < 4 else x


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def is_memory(x: Any) -> bool:
    """Whether x is plain memory: of no subclass, in no transform of functions, not traced."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None  # torch.jit.trace
        and torch._C._get_dispatch_mode(_PROXY) is None  # make_fx
    )


def are_huge(*weights: Values) -> bool:
    """Whether numbers among slopes and constants are so large that float32 would overflow before a
    gate makes them small: the gates then are evaluated in float64. A tensor's are not looked at."""
    each = [w for row in weights for w in (row if isinstance(row, Sequence) else (row,))]
    return any(not isinstance(w, Tensor) and abs(w) > 1e30 for w in each)


def positive(tau: Values) -> Values:
    """`tau`, whose tensors are looked at where that costs nothing; elsewhere what is not positive
    and finite becomes NaN, which every result then is."""
    if isinstance(tau, Sequence):
        return tuple([_positive(t) if isinstance(t, Tensor) else t for t in tau])
    return _positive(tau) if isinstance(tau, Tensor) else tau


def _positive(tau: Tensor) -> Tensor:
    right = (tau > 0) & (tau < math.inf)
    if not _is_at_hand(tau):
        return torch.where(right, tau, math.nan)
    if not bool(right.all()):
        bad = tau.detach()[~right].flatten()[0].item()
        raise ValueError(
            f"tau must be positive; got a tensor with {bad}. For hard gates give the number "
            "float('inf'); for a sharpness that is learned give tau0 * rho.exp()."
        )
    return tau


def _is_at_hand(t: Tensor) -> bool:
    """Whether the values of a tensor may be looked at: nothing waits for them, nor traces them."""
    return not torch.compiler.is_compiling() and t.is_cpu and is_memory(t)


def _nowhere(y: Tensor, thresholds: Sequence[Value]) -> Tensor:
    """`y` of hard gates, NaN where a threshold is: no x is above or below it."""
    for t in thresholds:
        if isinstance(t, Tensor) and not (_is_at_hand(t) and bool((t == t).all())):
            y = torch.where(t == t, y, t.detach())
    return y


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


def _check_numbers(**given: Values | None) -> None:
    """Refuse NaN; and infinity, but for a threshold or a bound that is never reached."""
    for name, w in given.items():
        each = [n for n in (w if isinstance(w, Sequence) else (w,)) if isinstance(n, int | float)]
        if any(n != n or (abs(n) == math.inf and name in "scq") for n in each):
            raise ValueError(f"{name} must be finite numbers or tensors; got {w!r}.")


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


def _owners(owner: Sequence[str] | None, n: int) -> Sequence[str]:
    owners = ("lo",) * n if owner is None else owner
    if len(owners) != n or not set(owners) <= {"lo", "hi"}:
        raise ValueError(f"owner is 'lo' or 'hi' for each of the {n} thresholds; got {owner!r}.")
    return owners


def _above(x: Tensor, theta: Value, owner: str) -> Tensor:
    return x > theta if owner == "lo" else x >= theta


def _below(x: Tensor, theta: Value, owner: str) -> Tensor:
    return x <= theta if owner == "lo" else x < theta


def _branch_inputs(x: Tensor, v: Tensor | Sequence[Tensor] | None, K: int) -> list[Tensor]:
    """What each branch reads, in the computing dtype; the same object where it is shared."""
    if v is None or isinstance(v, Tensor):
        return [x if v is None else v.to(x.dtype)] * K
    if len(v) != K:
        raise ValueError(f"v is one tensor or one for each of the K = {K} branches; got {len(v)}.")
    return [z.to(x.dtype) for z in v]


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
        if isinstance(slope, Tensor) and is_number(curve, 0):
            v = inputs[0] if len(slopes) == 2 else soft.settled(inputs[0], slope)
            y = soft.times(v, slope)
            y = y if is_number(constant, 0) else y + constant
    else:
        y = mean([_branch(*p) for p in zip(inputs, curves, slopes, constants, strict=True)])
    # Equal constant branches do not depend on x; NaN is passed on all the same.
    return y if isinstance(y, Tensor) else torch.where(x.isnan(), x, y)


def _polynomial(v: Tensor, q: Value, s: Value, c: Value) -> Value:
    """(q v + s) v + c without the steps that numbers make void."""
    slope = s if is_number(q, 0) else q * v if is_number(s, 0) else q * v + s
    if is_number(slope, 0):
        return c
    y = v if is_number(slope, 1) else v * slope
    return y if is_number(c, 0) else y + c


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
    if K == 1 or (is_number(q, 0) and not isinstance(s, Tensor)):
        return x
    end = x.isinf() if 0 < k < K - 1 else x == (math.inf if k == 0 else -math.inf)
    return torch.where(end, 0.0, x)


def _carrier(curves: Sequence[Value], slopes: Sequence[Value]) -> int | None:
    """The first branch that depends on its input, or None."""
    flat = [is_number(q, 0) and is_number(s, 0) for q, s in zip(curves, slopes, strict=True)]
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
    if are_in_order(thresholds):
        return found if side is _above else found[::-1]
    for last in range(len(found) - 1, 0, -1):
        for k in range(last):
            a, b = found[k], found[k + 1]
            found[k], found[k + 1] = a | b, a & b
    return found
