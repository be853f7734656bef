"""Hard gates of Eq. 2: the branch of the region x lies in, and a gradient for thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from threshold_gating.primitive.arguments import Anchor, is_at_hand, wide
from threshold_gating.primitive.branches import Weights, branch, inputs_of
from threshold_gating.primitive.soft import Value, are_in_order, is_number


def memberships(x: Tensor, thresholds: Sequence[Value], owner: Sequence[str] | None) -> Tensor:
    """The K gates: 1 in the region x lies in, 0 elsewhere."""
    beyond = _beyond(x, thresholds, _owners(owner, len(thresholds)), _above)
    region = sum((b.to(x.dtype) for b in beyond), torch.zeros_like(x))
    g = torch.stack([(region == k).to(x.dtype) for k in range(len(beyond) + 1)])
    return _nowhere(torch.where(x.isnan(), x, g), thresholds)


def blended(
    x: Tensor,
    v: Tensor | Sequence[Tensor] | None,
    thresholds: Sequence[Value],
    owner: Sequence[str] | None,
    anchor: Sequence[Anchor] | None,
    weights: Weights,
) -> Tensor:
    """y of the branch of the region x lies in."""
    K = len(thresholds) + 1
    curves, slopes, constants = weights
    inputs = inputs_of(x, v, K)
    if v is None:
        pairs = zip(curves, slopes, strict=True)
        inputs = [_reached(x, q_k, s_k, k, K) for k, (q_k, s_k) in enumerate(pairs)]
    points = (None,) * K if anchor is None else anchor
    found = [branch(*p) for p in zip(inputs, curves, slopes, constants, points, strict=True)]
    y = _select(x, thresholds, _owners(owner, K - 1), found, _carrier(curves, slopes))
    return _nowhere(y if v is None else torch.where(x.isnan(), x, y), thresholds)


def _owners(owner: Sequence[str] | None, n: int) -> Sequence[str]:
    owners = ("lo",) * n if owner is None else owner
    if len(owners) != n or not set(owners) <= {"lo", "hi"}:
        raise ValueError(f"owner is 'lo' or 'hi' for each of the {n} thresholds; got {owner!r}.")
    return owners


def _above(x: Tensor, theta: Value, owner: str) -> Tensor:
    return x > theta if owner == "lo" else x >= theta


def _below(x: Tensor, theta: Value, owner: str) -> Tensor:
    return x <= theta if owner == "lo" else x < theta


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


def _carrier(curves: Sequence[Value], slopes: Sequence[Value]) -> int | None:
    """The first branch that depends on its input, or None."""
    flat = [is_number(q, 0) and is_number(s, 0) for q, s in zip(curves, slopes, strict=True)]
    return flat.index(False) if False in flat else None


def _reached(x: Tensor, q: Value, s: Value, k: int, K: int) -> Tensor:
    """x without the infinities that are not in region k: there the gradient of a parabola in x, and
    of a learned slope, which are not taken, would be infinite, and 0 times it NaN."""
    if K == 1 or (is_number(q, 0) and not isinstance(s, Tensor)):
        return x
    end = x.isinf() if 0 < k < K - 1 else x == (math.inf if k == 0 else -math.inf)
    return torch.where(end, 0.0, x)


def _nowhere(y: Tensor, thresholds: Sequence[Value]) -> Tensor:
    """`y` of hard gates, NaN where a threshold is: no x is above or below it."""
    for t in thresholds:
        if isinstance(t, Tensor) and not (is_at_hand(t) and bool((t == t).all())):
            y = torch.where(t == t, y, t.detach())
    return y


def straight_through(
    x: Tensor,
    y: Tensor,
    theta: Sequence[Value],
    s: Sequence[Value],
    c: Sequence[Value],
    v: Tensor | Sequence[Tensor] | None = None,
) -> Tensor:
    """`y` of hard gates unchanged, with a gradient for the thresholds at which it jumps.

    A step has none of its own. Theta gets that of a sigmoid of width 1/4 and of the height of the
    jump; x and the branches keep theirs, which are exact. Branches that read `v` instead of x
    jump by what they differ there.

    >>> theta = torch.tensor(0.0, requires_grad=True)
    >>> straight_through(torch.zeros(1), torch.zeros(1), [theta], (0, 0), (0, 1)).sum().backward()
    >>> theta.grad
    tensor(-1.)
    """
    surrogate = torch.zeros_like(y)
    for k, (at, rise) in enumerate(rises(wide(x), theta)):
        low, high = (v[k], v[k + 1]) if isinstance(v, Sequence) else (at if v is None else v,) * 2
        jump: Value = (s[k + 1] * high - s[k] * low) + (c[k + 1] - c[k])
        surrogate = surrogate + constant(jump) * rise
    return y + surrogate.to(y.dtype)


def rises(x: Tensor, theta: Sequence[Value]) -> list[tuple[Value, Tensor]]:
    """Each threshold from below, and 0 with the gradient that a sigmoid of width 1/4 has in it."""
    if not are_in_order(theta):
        theta = torch.stack([torch.as_tensor(t) for t in theta]).sort(0).values.unbind(0)
    z = x.detach()
    # at an infinite x no gradient: an infinite threshold would be NaN away
    apart = [torch.where(z.isinf(), z.sign() * 99, z - at) for at in theta]
    steps = [torch.ops.aten.sigmoid.default(4 * away) for away in apart]
    return [(at, step - step.detach()) for at, step in zip(theta, steps, strict=True)]


def constant(w: Value) -> Value:
    """The height of a jump to autograd; one that is not finite gives its threshold no gradient, and
    must not make the 0 that it is multiplied with NaN."""
    if isinstance(w, Tensor):
        return torch.where(w.isfinite(), w, 0.0).detach()
    return w if math.isfinite(w) else 0.0
