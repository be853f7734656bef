"""Which op of torch computes an instance, decided by comparing parameters, never by a name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.instance import TG

Op = Callable[[Tensor], Tensor]
_WITH_PARAMETERS = (
    *("hardtanh", "leaky_relu", "threshold", "hardshrink", "softshrink"),
    *("clamp", "clamp_min", "clamp_max"),
)

_FIXED = {
    taxonomy.TAXONOMY[key]: key.removesuffix("_clamp")
    for key in (
        *("relu", "silu", "sigmoid", "tanh", "mish", "relu6", "hardswish"),
        *("hardsigmoid", "hardsigmoid_clamp"),
    )
}


def _found(name: str) -> Any:
    return getattr(torch._C._nn, name, None) or getattr(torch, name, None)


# Found here, not when first called: a table that grows while a network is compiled has it compiled
# again. The functions that torch.nn.functional calls, because they are the fastest; around a call
# of one, a mode that answers such calls has to be off.
_OPS = {name: _found(name) for name in {*_FIXED.values(), *_WITH_PARAMETERS}}
_OVERWRITING = {name: _found(name + "_") for name in _OPS}


class Native(NamedTuple):
    """An op of torch and its parameters."""

    name: str
    parameters: tuple[float, ...] = ()


def native(t: TG) -> Op | None:
    """Torch's op for exactly the function of `t`, or None.

    >>> native(TG(1, 0, (0, 1), (0, 0)))(torch.tensor([1.0]))
    tensor([0.7311])
    """
    call = native_call(t)
    if call is None:
        return None
    op: Op = _OPS[call.name]
    return partial(_call, op, call.parameters) if call.parameters else op


def opened(op: Op) -> tuple[Callable[..., Tensor], tuple[float, ...]]:
    """An op of `native` as a function of torch and what it is given behind x: two calls less."""
    if isinstance(op, partial) and op.func is _call:
        return op.args[0], op.args[1]
    return op, ()


def native_call(t: TG) -> Native | None:
    """`native` as a name and parameters."""
    if t in _FIXED:
        return Native(_FIXED[t])
    if t.clamp is not None and set(t.s) == {1.0} and set(t.c) == {0.0} and t.q is None:
        return Native("hardtanh", t.clamp)
    if (bounds := _bounds(t)) is not None:
        return bounds
    if t.K == 2 and t == taxonomy.leaky_relu(t.s[0]):
        return Native("leaky_relu", (t.s[0],))
    if t.K == 2 and t == taxonomy.threshold(t.theta[0], t.c[0]):
        return Native("threshold", (t.theta[0], t.c[0]))
    if t.K == 3:
        low, high = t.theta
        if low < high and t == taxonomy.hardtanh(low, high):
            return Native("hardtanh", (low, high))
        if high >= 0 and t == taxonomy.hardshrink(high):
            return Native("hardshrink", (high,))
        if high >= 0 and t == taxonomy.softshrink(high):
            return Native("softshrink", (high,))
    return None


def _bounds(t: TG) -> Native | None:
    """The clamp of torch that `t` is, with its bounds: at a bound its gradient is the inside's."""
    for name, s, owner in (
        ("clamp", (0.0, 1.0, 0.0), ("hi", "lo")),
        ("clamp_min", (0.0, 1.0), ("hi",)),
        ("clamp_max", (1.0, 0.0), ("lo",)),
    ):
        c = tuple(t.theta[min(k, t.K - 2)] * (1 - w) for k, w in enumerate(s)) if t.K > 1 else ()
        if t.s == s and t == TG(math.inf, t.theta, s, c, owner=owner):
            return Native(name, t.theta)
    return None


def lowered(call: Native, x: Tensor, inplace: bool = False) -> Tensor:
    """The op at x, written over it if asked."""
    op = _OVERWRITING[call.name] if inplace else None
    if inplace and op is None:  # torch has no such form of it
        return overwritten(x, partial(lowered, call))
    y: Tensor = (op or _OPS[call.name])(x, *call.parameters)
    return y


def overwritten(x: Tensor, f: Op) -> Tensor:
    """`f(x)`, written over x. With gradients f is given a copy, for it may keep what it reads.

    So it is in a graph, which may be differentiated later.
    """
    compiling = torch.compiler.is_compiling()
    kept = torch.is_grad_enabled() or compiling
    y = f(x.clone() if kept else x)
    if compiling or not y.requires_grad or not may_rebase(x):
        return x.copy_(y)
    written: Tensor = _Written.apply(x, y)  # type: ignore[no-untyped-call]
    return written


class _Written(torch.autograd.Function):
    """x.copy_(y). Torch's own gives what x was a gradient of zeros, which lie in memory as they
    like, to be added: a pass or two more, and images in channels_last are turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        # compiled autograd adds up gradients without asking whether there is one
        return torch.zeros_like(dy) if torch.compiler.is_compiling() else None, dy


def may_rebase(x: Tensor) -> bool:
    """Whether a function of ours may overwrite x, so that autograd goes on from its result.

    So if x is the result of an op and no view, and nothing but autograd looks at it. Torch
    refuses to overwrite a leaf that learns; a function of ours would have done it by then."""
    forward = torch.autograd.forward_ad._current_level >= 0
    transformed = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state()
    watched = forward or transformed or type(x) is not Tensor
    return x.grad_fn is not None and not x._is_view() and not watched


def _call(op: Callable[..., Tensor], parameters: tuple[float, ...], x: Tensor) -> Tensor:
    return op(x, *parameters)
