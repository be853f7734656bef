"""Calls that are no element-wise function and learn: softmax, attention, GLU, recurrent ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating import kernels
from threshold_gating.conversion import sites
from threshold_gating.instance import TG
from threshold_gating.nn import attention, rnn, rnn_fold

AUDITED_AS = "native"  # see conversion.audit


class Step(NamedTuple):
    """The gates of one step of a recurrent call, how many units, and how many layers it has."""

    gates: tuple[tuple[str, TG], ...]
    units: int
    layers: int  # times directions


def step_of(kind: str, args: tuple[Any, ...]) -> Step:
    """What a recurrent call of torch steps through."""
    gates = rnn.SITES[kind.removesuffix("_cell")]
    blocks = len(gates) - ("cell" in gates)  # in the rows of a weight
    if kind.endswith("_cell"):
        return Step(tuple(gates.items()), args[3].shape[0] // blocks, 1)
    is_padded = isinstance(args[3], bool)
    params, _, layers, _, _, both = args[2:8] if is_padded else args[3:9]
    each = layers * (2 if both else 1)
    return Step(tuple(gates.items()), params[1].shape[0] // blocks, each)


Learns = Callable[..., Any]  # of what is learned, who holds it, the prefix, then as the call


def _learned_softmax(
    learns: Any,
    holder: Any,
    prefix: str,
    input: Tensor,
    dim: int | None = None,
    *rest: Any,
    dtype: Any = None,
    **more: Any,
) -> Tensor:
    axis, dtype = sites.axis_and_type(input, dim, rest, dtype)
    y: Tensor = learns.softmax(holder, prefix, input, axis, dtype)
    return y


def _learned_softmin(
    learns: Any, holder: Any, prefix: str, input: Tensor, *rest: Any, **more: Any
) -> Tensor:
    return _learned_softmax(learns, holder, prefix, -input, *rest, **more)


def heads_of(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """How many heads a call of softmax or attention has; None where its shape does not show any."""
    if kind == "multi_head_attention_forward":
        heads: int = args[4] if len(args) > 4 else kwargs["num_heads"]
        return heads
    x: Tensor = (*args, *kwargs.values())[0]
    if kind == "scaled_dot_product_attention":
        return x.shape[-3] if x.dim() > 3 else None
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    of_keys = x.dim() == 4 and dim in (-1, 3)  # batch, head, query, key
    return x.shape[1] if of_keys else None


def _learned_attention(
    learns: Any,
    holder: Any,
    prefix: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    heads = query.shape[-3] if query.dim() > 2 else 1
    tau = learns.tau(holder, prefix, heads)
    y = attention.scaled_dot_product_attention(query, key, value, *args, tau=tau, **kwargs)
    # a temperature comes with an axis of heads, which these do not have
    return y.squeeze(0) if query.dim() == key.dim() == value.dim() == 2 else y


def _learned_multi_head(
    learns: Any,
    holder: Any,
    prefix: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    size: int,
    heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
    q_proj_weight: Tensor | None = None,
    inside: Callable[..., Any] = sites.multi_head_attention,
    **more: Any,
) -> Any:
    """The temperature of a head is a factor of its queries, and so of the rows that make them."""
    tau = learns.tau(holder, prefix, heads).repeat_interleave(size // heads)

    def scaled(w: Tensor | None) -> Tensor | None:
        if w is None:
            return None
        rest = torch.ones(len(w) - size, dtype=tau.dtype, device=tau.device)
        factor = torch.cat([tau, rest]).to(w.dtype)
        return w * (factor if w.dim() == 1 else factor[:, None])

    return inside(
        *(query, key, value, size, heads, scaled(weight), scaled(bias), *rest),
        q_proj_weight=scaled(q_proj_weight),
        **more,
    )


def _learned_glu(learns: Any, holder: Any, prefix: str, input: Tensor, dim: int = -1) -> Tensor:
    a, b = sites.halves(input, dim)
    y: Tensor = learns.evaluate(holder, prefix, b, v=a)
    return y


def _learned_step(function: Callable[..., Any], gated: Callable[..., Any]) -> Learns:
    kind = function.__name__

    def run(learns: Any, holder: Any, prefix: str, *args: Any) -> Any:
        units = step_of(kind, args).units

        def evaluated(*args: Any) -> Any:
            now = learns.now(holder, prefix, units)
            return gated(*args, gates=now[0] if kind.endswith("_cell") else now)

        def folded(pairs: rnn_fold.Pairs, *args: Any) -> Any:
            held = learns.held(holder, prefix, units)
            return rnn_fold.folded(function, args, pairs, held)

        pairs = _pairs(function, learns)
        if pairs is None or not rnn_fold.takes(args[0]):
            return kernels.either(None, evaluated)(*args)
        rather = args[0] if pairs.cell else None
        return kernels.either(functools.partial(folded, pairs), evaluated, rather)(*args)

    return run


def _pairs(function: Callable[..., Any], learns: Any) -> rnn_fold.Pairs | None:
    """What folds into the weights of a sequence; a single step is not worth a copy of them."""
    if function not in rnn_fold.OPS or not set(learns.learned) <= {"tau", "theta"}:
        return None
    gates = dict(learns.gates)
    return rnn_fold.Pairs.of(rnn.SITES[function.__name__], gates, tuple(gates))


# The same where something is learned.
LEARNED: dict[str, Learns] = {
    "softmax": _learned_softmax,
    "softmin": _learned_softmin,
    "glu": _learned_glu,
    "scaled_dot_product_attention": _learned_attention,
    "multi_head_attention_forward": _learned_multi_head,
    **{f.__name__: _learned_step(f, gated) for f, gated in rnn.FUNCTIONS.items()},
}
