"""Attention by the way that the backend chooses, and the Triton kernels as operations of torch.

`attention_forward` runs one pass (algebraically the gates' output) or, with `literal`, two: the
statistics of all rows, then every gate evaluated at its threshold. Both share one backward. To
torch.compile they are opaque, known by the shapes they give. Triton is imported when one runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import logits
from threshold_gating.kernels.attention.launch import Call
from threshold_gating.kernels.backend import BackendError, backend, exporting, takes_native
from threshold_gating.kernels.runtime import interpreting, is_installed
from threshold_gating.logits import Top2

LARGEST_HEAD = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    gqa: bool = False,
    tau: Tensor | None = None,
    way: str | None = None,
    statistics: bool = False,
) -> tuple[Tensor | None, Top2 | None]:
    """Output (..., Hq, L, Ev) and, if asked for, the statistics of its rows; without a value these
    alone. `nn.attention.scaled_dot_product_attention` explains the arguments.
    """
    if way not in (None, "native", "fused", "literal"):
        raise ValueError(f"attention: way must be None, native, fused or literal; got {way!r}.")
    plain = backend() == "reference" or exporting()  # exported graphs are for people to read
    if statistics:
        chosen = "reference" if plain else "fused"
    else:
        chosen = way or _choose(tau, dropout_p, plain)
    v = key if value is None else value
    given, options = (query, key, v, mask, dropout_p, causal), {"scale": scale, "enable_gqa": gqa}
    if chosen == "native":
        return F.scaled_dot_product_attention(*given, **options), None  # type: ignore[arg-type]
    # the gradient of a mask has as many entries as there are pairs
    fixed = mask is None or not mask.requires_grad
    if chosen != "reference" and fixed and can_run(query, key, v, gqa):
        size = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        known = (mask, tau, size, causal)
        if value is None:
            return None, row_statistics(query, key, *known)
        literal = chosen == "literal"
        return attend(query, key, value, *known, literal=literal, statistics=statistics)
    if not statistics:
        return logits.attend(*given, **options, tau=tau), None  # type: ignore[arg-type]
    z = logits.attention_logits(query, key, mask, causal, scale, gqa, tau)
    out = None if value is None else logits.mixed(z, query, value, enable_gqa=gqa)
    return out, logits.top2(z)


def _choose(tau: Tensor | None, dropout_p: float, plain: bool) -> str:
    """The way of a call by the backend in force, or `reference`."""
    name = backend()
    if tau is None and takes_native(name):
        return "native"
    if name == "native":
        raise BackendError(
            "attention with a temperature has no native op; use the backend 'auto' or "
            "'reference' for it."
        )
    if dropout_p or plain:
        return "reference"
    # the backend triton promises that every gate is evaluated
    return "literal" if name == "triton" else "fused"


def can_run(query: Tensor, key: Tensor, value: Tensor, gqa: bool) -> bool:
    """Whether the kernels take such tensors here."""
    placed = query.is_cuda or (interpreting() and query.device.type == "cpu")
    sizes = (query.shape[-1], value.shape[-1])
    batches = {(t.dim(), t.shape[:-3]) for t in (query, key, value)}
    heads, shared = _heads(query), _heads(key)
    return (
        placed
        and len(batches) == 1
        and shared == _heads(value)
        and (heads == shared or (gqa and shared > 0 and heads % shared == 0))
        and query.dtype in _DTYPES
        and min(sizes) > 0
        and max(sizes) <= LARGEST_HEAD
        and min(query.numel(), key.numel()) > 0
        and is_installed()
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    tau: Tensor | None,
    scale: float,
    causal: bool,
    *,
    literal: bool = False,
    statistics: bool = False,
) -> tuple[Tensor, Top2 | None]:
    """Output (..., Hq, L, Ev) and, if asked for, the statistics of its rows."""
    q, k, v = (_four_axes(t) for t in (query, key, value))
    mask = None if mask is None else _expanded(mask, query, key)
    out, _, levels, index = attention_forward(
        q, k, v, mask, None if tau is None else tau.float(), scale, causal, literal, statistics
    )
    out = out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])
    return out, _top2(levels, index, query) if statistics else None


def row_statistics(
    query: Tensor, key: Tensor, mask: Tensor | None, tau: Tensor | None, scale: float, causal: bool
) -> Top2:
    """The first pass of the literal form alone."""
    mask = None if mask is None else _expanded(mask, query, key)
    tau = None if tau is None else tau.float()
    levels, index = attention_statistics(
        _four_axes(query), _four_axes(key), mask, tau, scale, causal
    )
    return _top2(levels, index, query)


@torch.library.custom_op("threshold_gating::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    tau: Tensor | None,
    scale: float,
    causal: bool,
    literal: bool,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp in base 2, m1 m2 T (3, B, H, L) and i1; the last two empty if unasked."""
    out, lse = _outputs(q, v, mask)
    levels, index = _row_levels(q, statistics or literal)
    call = Call(q, k, v, mask, tau, scale, causal)
    if literal:
        call.forward(None, lse, levels, index if statistics else None)
        call.gates(levels, out)
    else:
        call.forward(out, lse, *((levels, index) if statistics else (None, None)))
    if not statistics:
        return out, lse, *_row_levels(q, False)
    return out, lse, call.in_logits(levels) if literal else levels, index


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, statistics = rest
    return *_outputs(q, v, mask), *_row_levels(q, statistics)


@torch.library.custom_op("threshold_gating::attention_statistics", mutates_args=())
def attention_statistics(
    q: Tensor, k: Tensor, mask: Tensor | None, tau: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """m1, m2 and T (3, B, H, L), and i1 of every row of logits."""
    levels, index = _row_levels(q, True)
    lse = _outputs(q, k, mask)[1]
    call = Call(q, k, k, mask, tau, scale, causal)
    call.forward(None, lse, levels, index)
    return call.in_logits(levels), index


@attention_statistics.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _row_levels(q, True)


@torch.library.custom_op("threshold_gating::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    tau: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the temperatures (empty without)."""
    do = do if do.stride(-1) == 1 else do.contiguous()
    return Call(q, k, v, mask, tau, scale, causal).backward(do, out, lse)


@attention_backward.register_fake
def _(do: Tensor, *given: Any) -> tuple[Tensor, ...]:
    q, k, v, _, tau, _, lse, *_ = given
    dtau = lse.new_empty(0 if tau is None else tau.shape)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dtau


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, tau, ctx.scale, ctx.causal, _, _ = inputs
    ctx.save_for_backward(q, k, v, mask, tau, *output[:2])


def _differentiate(ctx: Any, do: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, tau, out, lse = ctx.saved_tensors
    dq, dk, dv, dtau = attention_backward(do, q, k, v, mask, tau, out, lse, ctx.scale, ctx.causal)
    return dq, dk, dv, None, None if tau is None else dtau, *(None,) * 4


attention_forward.register_autograd(_differentiate, setup_context=_save)


def _heads(t: Tensor) -> int:
    return t.shape[-3] if t.dim() > 2 else 1


def _four_axes(t: Tensor) -> Tensor:
    """(batch, heads, length, size) with the sizes side by side in memory."""
    if t.dim() != 4:
        t = t.reshape(-1, _heads(t), *t.shape[-2:])
    return t if t.stride(-1) == 1 else t.contiguous()


def _expanded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask with all its axes; those along which it is the same take no memory."""
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return (
        mask if mask.dim() == 4 else mask.reshape(-1, *_four_axes(query).shape[1:3], mask.shape[-1])
    )


def _outputs(q: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, unwritten."""
    batch, heads, length, _ = q.shape
    # length before heads, as SDPA lays it out: to join the heads again then costs nothing
    shape = (batch, length, heads, v.shape[-1])
    out = torch.empty(shape, dtype=q.dtype, device=q.device).transpose(1, 2)
    planes = 2 if mask is not None and mask.dtype != torch.bool else 1
    return out, torch.empty((planes, *q.shape[:-1]), dtype=torch.float32, device=q.device)


def _row_levels(q: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    """m1, m2, T and i1, unwritten."""
    shape = q.shape[:-1] if wanted else (0,)
    levels = torch.empty((3, *shape), dtype=torch.float32, device=q.device)
    return levels, torch.empty(shape, dtype=torch.int64, device=q.device)


def _top2(levels: Tensor, index: Tensor, query: Tensor) -> Top2:
    m1, m2, T = levels.detach().view(3, *query.shape[:-1], 1)
    return Top2(m1, index.view(*query.shape[:-1], 1), m2, T)
