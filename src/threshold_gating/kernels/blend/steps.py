"""The formulas of a gate in torch: those of the reference, and steps that a compiler fuses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels.structure import Gate, Rows, Structure
from threshold_gating.kernels.weights import Weights
from threshold_gating.primitive import Value, soft

AUDITED_AS = "gates"  # see conversion.audit

_clamp = torch.ops.aten.clamp.default


def steps(x: Tensor, v: Tensor | None, structure: Structure, rows: Rows) -> Tensor:
    """y in steps that a compiler fuses into one loop; those of the reference for hard gates.

    Where nobody asks for derivatives, two gates come from one exponential of -|u|, whose own
    derivative at the threshold would be wrong, and more of them, if their weights are known to be
    small, from powers that stop growing, whose derivatives would cancel.
    """
    if structure.gate in (Gate.HARD, Gate.CENTRED):
        return plain(x, v, structure, rows)
    z = primitive.wide(x)
    u = z if v is None else v.to(z.dtype)
    data = [w for row in rows for w in row if isinstance(w, Tensor)]
    spread = x.is_cpu and _needs_gradient(*data)

    def ready(w: Any) -> Any:
        if not isinstance(w, Tensor):
            return w
        return _spread(w.to(z.dtype), x) if spread else w.to(z.dtype)

    tau, theta, s, c = [[ready(w) for w in row] for row in rows]
    derived = _needs_gradient(x, v, *data)
    if structure.K > 2:
        # what "small" means is known for float32
        small = structure.weights >= Weights.SMALL and not derived and z.dtype != torch.float64
        return (_from_below if small else _many)(z, u, tau, theta, s, c).to(x.dtype)
    moved = tau[0] * (z - theta[0])
    empty = all(not isinstance(w, Tensor) and w == 0 for w in (s[0], c[0]))
    if derived:
        gates = [s[0] if empty else soft.sigmoid(-moved), soft.sigmoid(moved)]
    else:
        e = torch.exp(-torch.abs(moved))
        share = 1 / (1 + e)
        e = e * share
        gates = [torch.where(moved > 0, e, share), torch.where(moved > 0, share, e)]
    return _blended(gates, u, s, c).to(x.dtype)


def plain(x: Tensor, v: Any, structure: Structure, rows: Rows) -> Tensor:
    """y by the formulas of the reference."""
    tau, theta, s, c = rows
    anchor: Any = structure.anchor
    if structure.steep:
        parts = zip(structure.steep, Structure.nearest(theta), strict=True)
        anchor = [None if known is None else (at, 0.0) for known, at in parts]
        s = [w if known is None else known for known, w in zip(structure.steep, s, strict=True)]
    return primitive.blend(
        x,
        tau if len(tau) > 1 else tau[0],
        theta,
        s,
        c,
        v=v,
        form=structure.form,
        owner=structure.owner,
        q=structure.q,
        anchor=anchor,
        clamp=structure.clamp,
        centred=structure.gate == Gate.CENTRED,
        known=True,
    )


def _spread(t: Tensor, x: Tensor) -> Tensor:
    """A parameter for each stretch of at most 4096 elements of x, so that sums have two stages.

    The compiler adds up longer ones with a care for rounding that takes longer than the gates. One
    value for all is left alone: its sums are one loop with the gates, and two would take longer.
    """
    if t.numel() == 1:
        return t
    shape, run = [1] * (x.dim() - t.dim()) + list(t.shape), 1
    for d in range(x.dim() - 1, 0, -1):
        run *= x.shape[d]
        if run > 4096 or shape[d] > 1:
            return t if d == x.dim() - 1 else t.expand(*x.shape[: d + 1], *shape[d + 1 :])
    return t


def _many(
    z: Tensor, u: Tensor, tau: list[Value], theta: list[Value], s: list[Value], c: list[Value]
) -> Tensor:
    """More than two soft gates: K exponentials, one loop."""
    taus = tau if len(tau) == len(theta) else tau * len(theta)
    most = torch.finfo(z.dtype).max / (4 * len(theta))  # no sum of arguments overflows
    arguments = [_clamp(t * (z - th), -most, most) for t, th in zip(taus, theta, strict=True)]
    return _blended(soft.softmax_gates(arguments), u, s, c)


def _from_below(
    z: Tensor, u: Tensor, tau: list[Value], theta: list[Value], s: list[Value], c: list[Value]
) -> Tensor:
    """The same with small weights: one exponential for each tau, and no largest logit. Branches are
    counted from below; see `blend.c` and `structure` for where the exponentials may stop. Powers of
    2, which a compiler evaluates in fewer instructions than those of e."""
    J = len(theta)
    weights: list[Value] = [1.0] * (J + 1)
    # tensors, for numbers of a dynamic graph are symbols: math.exp would ask for a sum's value
    taus, thetas = ([_as_tensor(w, z) for w in row] for row in (tau, theta))
    starts: list[Value] = [*thetas]
    if len(tau) == 1:
        middle = sum(thetas[1:], thetas[0]) * (1 / J)
        starts, exponent = [middle], torch.zeros_like(middle)
        for k, at in enumerate(thetas[:-1], 1):
            exponent = exponent + taus[0] * (middle - at)
            weights[k] = torch.exp(exponent)
    slopes, constants = ([_scaled(a, b) for a, b in zip(weights, w, strict=True)] for w in (s, c))
    sharp: list[Value] = [t * math.log2(math.e) for t in taus]
    starts, sharp, weights, slopes, constants = _once(starts, sharp, weights, slopes, constants)
    pairs = zip(starts, sharp, strict=True)
    rises = [torch.exp2(_clamp((z - at) * t, None, 124 / J)) for at, t in pairs]
    rises = rises * J if len(tau) == 1 else rises
    share = 1 / _nested(weights, rises)

    def mean(w: list[Value]) -> Tensor | None:
        if all(not isinstance(wk, Tensor) and wk == 0 for wk in w):
            return None
        return _nested(w, rises) * share

    slope, constant = mean(slopes), mean(constants)
    if slope is not None:  # infinity times 0
        u = torch.where(slope == 0, 0.0, u)
    return _joined(u, slope, constant, share)


def _as_tensor(w: Value, like: Tensor) -> Tensor:
    return w if isinstance(w, Tensor) else like.new_full((), w)


def _scaled(weight: Value, w: Value) -> Value:
    """Their product; the number 0 stays one."""
    return w if not isinstance(w, Tensor) and w == 0 else weight * w


def _once(*rows: list[Value]) -> list[list[Value]]:
    """Rows of numbers and tensors with what the tensors are computed by done before the loop.

    A compiler computes them anew for every few elements, exponentials too: it cannot know that y
    lies elsewhere. `cumprod`, along an axis of one, is an op that it does not open; a graph for
    others to read is left without it.
    """
    tensors = [w for row in rows for w in row if isinstance(w, Tensor)]
    if not tensors or torch.compiler.is_exporting():
        return list(rows)
    done = torch.stack(torch.broadcast_tensors(*tensors)).unsqueeze(0)  # type: ignore[no-untyped-call]
    each = iter(torch.cumprod(done, 0)[0].unbind(0))
    return [[next(each) if isinstance(w, Tensor) else w for w in row] for row in rows]


def _nested(w: list[Value], rises: list[Tensor]) -> Tensor:
    """w_0 + r_1 (w_1 + r_2 (w_2 + ...))."""
    # slices: torch 2.11's Dynamo takes what a star gathers for a tuple
    total = w[-1] * rises[-1] + w[-2]
    for wk, rise in zip(w[-3::-1], rises[-2::-1], strict=True):
        total = total * rise + wk
    return total


def _blended(gates: list[Any], u: Tensor, s: list[Value], c: list[Value]) -> Tensor:
    """u sum_k g_k s_k + sum_k g_k c_k."""
    slope, constant = _weighted(gates, s), _weighted(gates, c)
    if slope is not None and len(gates) > 2:
        u = soft.settled(u, slope)
    return _joined(u, slope, constant, gates[-1])


def _joined(u: Tensor, slope: Any, constant: Any, gate: Tensor) -> Tensor:
    """u slope + constant, either of which may be None; NaN passes by a gate where both are."""
    y = slope if slope is None else soft.times(u, slope)
    y = constant if y is None else y if constant is None else y + constant
    return gate * 0 if y is None else y


def _weighted(e: list[Tensor], w: list[Value]) -> Tensor | None:
    """sum_k w_k e_k; None where every w is the number 0."""
    terms = [
        ek if not isinstance(wk, Tensor) and wk == 1 else wk * ek
        for ek, wk in zip(e, w, strict=True)
        if isinstance(wk, Tensor) or wk != 0
    ]
    return sum(terms[1:], terms[0]) if terms else None


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
