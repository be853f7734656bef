"""Soft gates of Eq. 2 and means under them, with analytic derivatives of any order.

The derivatives of a gate are products of masses, never a difference of nearly equal ones, so they
keep their digits where a gate is almost shut or open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from threshold_gating.primitive.reading import read

Value = float | Tensor
# The ops themselves: whoever intercepts torch.sigmoid and its like in a network around us must not
# see the gate's own arithmetic.
_sigmoid, _tanh = torch.ops.aten.sigmoid.default, torch.ops.aten.tanh.default
_logsigmoid, _clamp = torch.ops.aten.log_sigmoid.default, torch.ops.aten.clamp.default
_softmax = torch.ops.aten.softmax.int
_minimum = torch.ops.aten.minimum.default


def arguments(
    x: Tensor, taus: Sequence[Value], thresholds: Sequence[Value], form: str
) -> list[Tensor]:
    """u_k = tau_k (x - theta_k), within the range where a gate can move."""
    shifted = [x if is_number(t, 0) else x - t for t in thresholds]
    scaled = [z if is_number(t, 1) else t * z for t, z in zip(taus, shifted, strict=False)]
    bound = _underflow(x.dtype)
    if form == "softmax" and not are_in_order(thresholds):
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


def are_in_order(thresholds: Sequence[Value]) -> bool:
    """Whether thresholds are known to be low to high; a tensor's values are not."""
    known = [t for t in thresholds if not isinstance(t, Tensor)]
    return len(thresholds) < 2 or (len(known) == len(thresholds) and known == sorted(known))


def gates(u: Sequence[Tensor], form: str, used: Sequence[bool] = (True, True)) -> list[Tensor]:
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
    y: Tensor = _applied(_Sigmoid, u)
    return y


def softmax_gates(u: Sequence[Tensor]) -> list[Tensor]:
    """The K gates of K - 1 arguments whose thresholds are in any order."""
    same_shape = torch.broadcast_tensors(*u)  # type: ignore[no-untyped-call]
    if torch.compiler._is_exporting_flag and torch.is_grad_enabled():
        return _exported_gates(same_shape)
    return list(_applied(_Gates, *same_shape))


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


def _applied(plain: Any, *inputs: Tensor) -> Any:
    """Dynamo refuses a function with a forward mode, and one of many inputs without gradient."""
    if not torch.compiler.is_compiling():
        return plain.dual.apply(*inputs)
    needed = torch.is_grad_enabled() and any(u.requires_grad for u in inputs)
    return plain.apply(*inputs) if needed else plain.forward(*inputs)


def times(v: Tensor, slope: Tensor) -> Tensor:
    """v slope, whose gradient in the slope is finite: behind it infinity would meet shut gates."""
    if torch.compiler.is_compiling():
        v = read(v, (slope,))
    same_shape = torch.broadcast_tensors(v, slope)  # type: ignore[no-untyped-call]
    y: Tensor = _applied(_Times, *same_shape)
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


C = TypeVar("C", bound=type[Any])


def _with_dual(keeps_output: bool = False) -> Callable[[C], C]:
    """Give a function a `dual`, itself with forward mode by its `tangent`: see `_applied`."""

    def decorate(plain: C) -> C:
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            plain.setup_context(ctx, inputs, output)
            ctx.save_for_forward(*(output if keeps_output else inputs))

        own = {"setup_context": staticmethod(setup_context), "jvp": staticmethod(plain.tangent)}
        plain.dual = type(plain.__name__ + "Dual", (plain,), own)
        return plain

    return decorate


class _Function(Function):
    """A function of its inputs with derivatives of its own, whose backward reads the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)


@_with_dual()
class _Times(_Function):
    @staticmethod
    def forward(v: Tensor, slope: Tensor) -> Tensor:
        return v * slope

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        v, slope = ctx.saved_tensors
        return dy * slope, _within_range(dy * v)

    @staticmethod
    def tangent(ctx: Any, dv: Tensor, dslope: Tensor) -> Tensor:
        v, slope = ctx.saved_tensors
        dy: Tensor = dv * slope + v * dslope
        return dy


def _slope(u: Tensor) -> Tensor:
    """Of the sigmoid."""
    return sigmoid(u) * sigmoid(-u)


@_with_dual()
class _Sigmoid(_Function):
    @staticmethod
    def forward(u: Tensor) -> Tensor:
        y: Tensor = _sigmoid(u)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _within_range(dy) * _slope(*ctx.saved_tensors)

    @staticmethod
    def tangent(ctx: Any, du: Tensor) -> Tensor:
        return du * _slope(*ctx.saved_tensors)


@_with_dual()
class _Swing(_Function):
    """tanh(u / 2), likewise."""

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        y: Tensor = _tanh(u / 2)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * _within_range(dy) * _slope(*ctx.saved_tensors)

    @staticmethod
    def tangent(ctx: Any, du: Tensor) -> Tensor:
        return 2 * du * _slope(*ctx.saved_tensors)


@_with_dual(keeps_output=True)
class _Gates(_Function):
    """Softmax gates of their arguments; see `kernels.blend.tiles` for the derivative."""

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

    @staticmethod
    def tangent(ctx: Any, *du: Tensor) -> tuple[Tensor, ...]:
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


def is_number(w: Value, value: float) -> bool:
    return not isinstance(w, Tensor) and w == value


def are_opposite(*pairs: Sequence[Value]) -> bool:
    """Whether two branches of numbers have equal or opposite coefficients, but are not equal."""
    if any(isinstance(w, Tensor) for pair in pairs for w in pair):
        return False
    return any(lo != hi for lo, hi in pairs) and all(abs(lo) == abs(hi) for lo, hi in pairs)


def mean_of(g: Sequence[Tensor]) -> Callable[[Sequence[Value]], Value]:
    """w -> sum_k g_k w_k; equal numbers need no gates, since these sum to one."""

    def mean(w: Sequence[Value]) -> Value:
        if not any(isinstance(wk, Tensor) for wk in w) and len(set(w)) == 1:
            return w[0]
        terms = [
            gk if is_number(wk, 1) else wk * gk
            for wk, gk in zip(w, g, strict=True)
            if not is_number(wk, 0)
        ]
        return sum(terms[1:], terms[0])

    return mean


def mean_about_midpoint(u: Tensor) -> Callable[[Sequence[Value]], Value]:
    """The same for K = 2, by tanh(u/2): exact to the last digits where w_lo = -w_hi.

    On either side of the threshold it starts from the branch of that side, whatever the values.
    """
    swing: Tensor = _applied(_Swing, u)

    def mean(w: Sequence[Value]) -> Value:
        low, high = w
        total = low + high
        if not isinstance(low, Tensor) and low == high:
            return low
        if is_number(total, 0):
            return swing if is_number(high, 1) else high * swing
        above = high * swing + total * sigmoid(-u)
        return torch.where(u > 0, above, total * sigmoid(u) - low * swing)

    return mean
