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

from collections.abc import Sequence

import torch
from torch import Tensor

from threshold_gating.primitive import branches, hard, soft
from threshold_gating.primitive.arguments import (
    FORMS,
    Anchor,
    GateForm,
    Values,
    are_huge,
    check_numbers,
    is_hard,
    is_memory,
    length,
    positive,
    rows_of,
    thresholds_of,
    wide,
)
from threshold_gating.primitive.hard import straight_through
from threshold_gating.primitive.soft import Value

__all__ = [
    "FORMS",
    "Anchor",
    "GateForm",
    "Value",
    "Values",
    "are_huge",
    "beside",
    "blend",
    "features",
    "gated_linear",
    "gates",
    "is_memory",
    "positive",
    "straight_through",
    "wide",
]
AUDITED_AS = "gates"  # see conversion.audit


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
    check_numbers(theta=theta)
    return _memberships(x, positive(tau), theta, form, owner)


def _memberships(
    x: Tensor, tau: Values, theta: Values, form: GateForm, owner: Sequence[str] | None
) -> Tensor:
    """`gates`, whose tau is known to be positive."""
    z = wide(x)
    taus, thresholds = thresholds_of(z, tau, theta, form)
    if is_hard(taus, thresholds):
        g = hard.memberships(z, thresholds, owner)
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
    known: bool = False,
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
        known: the caller knows that tau is positive and all numbers are finite: nobody looks.

    Returns:
        y with the dtype of `x` and the broadcast shape.

    >>> blend(torch.tensor([-1.0, 2.0]), float("inf"), (0.0,), (0.0, 1.0), (0.0, 0.0))
    tensor([0., 2.])
    """
    if not known:
        check_numbers(theta=theta, s=s, c=c, q=q, clamp=clamp)
        tau = positive(tau)
    z = wide(x)
    if z.dtype != torch.float64 and are_huge(s, c, () if q is None else q):
        z = z.double()
    taus, thresholds = thresholds_of(z, tau, theta, form)
    K = len(thresholds) + 1
    curves = [0.0] * K if q is None else rows_of("q", q, z, K)
    weights = curves, rows_of("s", s, z, K), rows_of("c", c, z, K)
    if is_hard(taus, thresholds):
        y = hard.blended(z, v, thresholds, owner, anchor, weights)
    else:
        u = soft.arguments(z, taus, thresholds, form)
        y = branches.averaged(z, v, u, form, centred, weights)
    if clamp is not None:
        y = torch.where(y <= clamp[0], clamp[0], torch.where(y >= clamp[1], clamp[1], y))
    return y.to(x.dtype)


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
    K = length(theta) + 1
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

    >>> features(torch.tensor([[1.0, 2.0]]), float("inf"), (1.5,), (1, 1), (0, 0))
    tensor([[1., 0., 0., 2.]])
    """
    z = wide(x)
    g = _memberships(z, tau, theta, form, owner).unbind(0)
    slopes, constants = rows_of("s", s, z, len(g)), rows_of("c", c, z, len(g))
    rows = zip(g, slopes, constants, strict=True)
    parts = [gk * branches.polynomial(z, 0.0, sk, ck) for gk, sk, ck in rows]
    if straight:
        for k, (at, rise) in enumerate(hard.rises(z, rows_of("theta", theta, z, len(g) - 1))):
            below, above = (slopes[j] * at + constants[j] for j in (k, k + 1))
            parts[k] = parts[k] - hard.constant(below) * rise
            parts[k + 1] = parts[k + 1] + hard.constant(above) * rise
    return beside(parts, axis, groups).to(x.dtype)


def beside(parts: Sequence[Tensor], axis: int, groups: int) -> Tensor:
    """Gated inputs in the order of `features`."""
    if groups == 1:  # images in channels_last stay so
        return torch.cat(list(parts), axis)
    known = parts[0].shape
    axis = axis % len(known)
    shape = (*known[:axis], groups, known[axis] // groups, *known[axis + 1 :])
    return torch.stack([p.reshape(shape) for p in parts], axis + 1).flatten(axis, axis + 2)
