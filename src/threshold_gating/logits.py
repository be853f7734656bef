"""Softmax as one gate per logit, whose threshold the other logits set (Eq. 11 of the paper).

    softmax(z)_i = sigma(z_i - theta_i),   theta_i = LSE(z_-i) = log sum_{j != i} exp(z_j)

The thresholds come from four numbers per row, the top-2 statistics: the maximum m1, its index i1,
the maximum m2 of the other logits, and T = sum_{j != i1} exp(z_j - m2). With rel = T exp(m2 - m1),

    theta_i  = m1 + log1p(rel - exp(z_i - m1))   for i != i1, where rel holds the term taken off
    theta_i1 = m2 + log T

so nothing cancels: theta keeps its digits at a peak of any height, where LSE(z) minus a logit has
none left at +20. The statistics of two tiles merge into those of both (`merge`).

The backward is analytic. Of dp_i/du_i = p_i (1 - p_i), u = z - theta, and dtheta_i/dz_j =
p_j / (1 - p_i) the factor 1 - p_i, which is 0 at a peak, cancels before anything is evaluated:

    dz = p (dp - sum_j p_j dp_j)

The Jacobian is symmetric, so forward mode is the same product. Higher derivatives pass through p,
that is through this rule again. 16-bit logits are evaluated in float32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating.primitive import graphs, wide

AUDITED_AS = "gates"  # see conversion.audit


class Top2(NamedTuple):
    """Statistics of rows that give every threshold; each keeps the reduced axis, with size 1."""

    m1: Tensor  # the maximum
    i1: Tensor  # the index of the first entry that has it
    m2: Tensor  # the maximum of the other entries, -inf if there is none
    T: Tensor  # sum of exp(z_j - m2) over j != i1, 0 if m2 is -inf


def softmax(
    input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, masked: float = math.nan
) -> Tensor:
    """Softmax by gates (Eq. 11): sigma(z_i - theta_i), theta_i the log-sum-exp of the others.

    Takes the arguments of `torch.softmax` and gives its values to rounding: every row sums to one
    and a logit of -inf gets exactly 0. A single +inf gets 1, the limit, where torch has NaN; two
    have no limit and give NaN.

    Args:
        input: logits, floating point, or anything that `dtype` makes so.
        dim: the axis that sums to one.
        dtype: cast the logits to it first.
        masked: what a row of nothing but -inf becomes: NaN, as in `torch.softmax`, or 0, as in
            `scaled_dot_product_attention`.

    >>> softmax(torch.tensor([0.0, 1.0, -torch.inf]))
    tensor([0.2689, 0.7311, 0.0000])
    """
    if not (masked == 0 or math.isnan(masked)):
        raise ValueError(f"softmax: a masked row becomes nan or 0; got masked={masked!r}.")
    logits = input if dtype is None else input.to(dtype)
    z = wide(logits).contiguous()  # as torch's result is: a dropout draws its mask along strides
    if graphs.exporting() and z.numel():
        if graphs.keeps_gates():
            p: Tensor = _softmax_gates(z, dim, masked, graphs.site())
        else:
            p = _exported(z, dim, masked)
    else:
        # Dynamo refuses a function that has a forward mode; there it is left out.
        gates = _Gates if torch.compiler.is_compiling() else _DualGates
        p = gates.apply(z, dim, masked) if z.numel() else z.clone()  # type: ignore[no-untyped-call]
    return p if dtype is None and _autocast_widens(logits) else p.to(logits.dtype)


def thresholds(z: Tensor, dim: int = -1, stats: Top2 | None = None) -> Tensor:
    """The threshold of every logit (Eq. 11): theta_i = LSE(z_-i), -inf where no other is live.

    A 16-bit `z` gives float32. No gradient flows: differentiate `softmax`, which never forms
    theta's derivative.

    Args:
        z: logits, or a tile of them.
        dim: the axis of a row.
        stats: the statistics of the whole rows, if `z` is a tile or they are known.

    >>> thresholds(torch.tensor([0.0, 0.0, 20.0]))
    tensor([20.0000, 20.0000,  0.6931])
    """
    z = wide(z).detach()
    if z.numel() == 0:
        return z
    m1, _, m2, T = top2(z, dim) if stats is None else stats
    rel = T * _relative_exp(m2, m1)
    at_peak = m2 + T.log()
    return torch.where(z == m1, at_peak, m1 + torch.log1p(rel - _relative_exp(z, m1)))


def top2(z: Tensor, dim: int = -1, start: int = 0) -> Top2:
    """The statistics of rows along `dim`, or of their tiles that begin at index `start`."""
    z = wide(z).detach()
    m1, i1 = z.max(dim, keepdim=True)
    others = z.scatter(dim, i1, -math.inf)
    m2 = others.amax(dim, keepdim=True)
    return Top2(m1, i1 + start, m2, _relative_exp(others, m2).sum(dim, keepdim=True))


def merge(a: Top2, b: Top2) -> Top2:
    """The statistics of two tiles of the same rows taken together, `a` before `b`."""
    later = b.m1 > a.m1  # strictly, so the first maximum keeps the index
    lower = torch.where(later, a.m1, b.m1)
    m2 = torch.maximum(torch.maximum(a.m2, b.m2), lower)
    T = a.T * _relative_exp(a.m2, m2) + b.T * _relative_exp(b.m2, m2) + _relative_exp(lower, m2)
    return Top2(torch.where(later, b.m1, a.m1), torch.where(later, b.i1, a.i1), m2, T)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    tau: Tensor | None = None,
) -> Tensor:
    """Attention with every gate of Eq. 11 evaluated, in plain torch and quadratic memory.

    The reference for `attention.scaled_dot_product_attention`, which says what the arguments are.
    """
    z = attention_logits(query, key, attn_mask, is_causal, scale, enable_gqa, tau)
    return mixed(z, query, value, dropout_p, enable_gqa)


def mixed(
    z: Tensor, query: Tensor, value: Tensor, dropout_p: float = 0.0, enable_gqa: bool = False
) -> Tensor:
    """The values weighed by the gates of logits `z`, in the dtype of the query."""
    p = softmax(z, masked=0.0)
    return weighed(F.dropout(p, dropout_p) if dropout_p else p, query, value, enable_gqa)


def weighed(p: Tensor, query: Tensor, value: Tensor, enable_gqa: bool = False) -> Tensor:
    """The values weighed by p, in the dtype of the query."""
    v = wide(value)
    return _product(p, _repeat_heads(v, query) if enable_gqa else v).to(query.dtype)


def attention_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    tau: Tensor | None = None,
) -> Tensor:
    """scale tau Q K^T + mask, shape (..., Hq, L, S), -inf where a key takes no part."""
    q, k = wide(query), wide(key)
    k = _repeat_heads(k, q) if enable_gqa else k
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    z = _product(q * scale, k.transpose(-2, -1))
    z = z if tau is None else z * tau.to(z.dtype)[:, None, None]
    return _apply_mask(z, attn_mask, is_causal)


class AttentionCall(NamedTuple):
    """The arguments of a call of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def logits(self) -> Tensor:
        return attention_logits(
            *(self.query, self.key, self.attn_mask, self.is_causal, self.scale, self.enable_gqa)
        )

    def mixed(self, p: Tensor) -> Tensor:
        """The values weighed by p, in the dtype of the query."""
        return weighed(p, self.query, self.value, self.enable_gqa)


class _Gates(torch.autograd.Function):
    """sigma(z - theta) with the analytic backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, dim: int, masked: float) -> Tensor:
        m1 = z.amax(dim, keepdim=True)
        # Without the shift an offset of 1e4 costs 5e-4, and a row of finfo.min has gates of 1/2.
        z = z - _finite(m1)
        p = _sigma(z - thresholds(z, dim))
        return torch.where(m1 == -math.inf, masked, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor, None, None]:
        (p,) = ctx.saved_tensors
        return _times_jacobian(p, dp, ctx.dim), None, None


def _exported(z: Tensor, dim: int, masked: float, site: str = "") -> Tensor:
    """The same for a graph that keeps no backward of ours: its steps have the right derivative.

    The thresholds are constants to autograd, so p is too, and what it is multiplied by is 1 and has
    the slope of log p: z_i - sum_j p_j z_j. Of first order; a second derivative is not in it.
    """
    p = _Gates.forward(z, dim, masked).detach()
    live = z.masked_fill(z.isinf(), 0.0)
    rise = live - live.detach()  # 0
    return p * (1 + rise - (p.nan_to_num() * rise).sum(dim, keepdim=True))


# The same as one node of an exported graph, for one that keeps gates.
_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("softmax_gates(Tensor z, int dim, float masked, str site) -> Tensor")
_LIBRARY.impl("softmax_gates", _exported, "CompositeImplicitAutograd")
_softmax_gates = torch.ops.threshold_gating.softmax_gates.default


class _DualGates(_Gates):
    """The same with forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Gates.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, dz: Tensor, *_: None) -> Tensor:
        (p,) = ctx.saved_tensors
        return _times_jacobian(p, dz, ctx.dim)


def _times_jacobian(p: Tensor, d: Tensor, dim: int) -> Tensor:
    return p * (d - (p * d).sum(dim, keepdim=True))


def _sigma(u: Tensor) -> Tensor:
    """The gate as e / (1 + e): 1 / (1 + exp(-u)) overflows, and loses gates below 1e-38."""
    e = torch.exp(-u.abs())
    return torch.where(u < 0, e, 1.0) / (1 + e)


def _finite(m: Tensor) -> Tensor:
    """A maximum that can be subtracted: from +-inf, it leaves +-inf instead of NaN."""
    largest = torch.finfo(m.dtype).max
    return m.clamp(-largest, largest)


def _relative_exp(z: Tensor, m: Tensor) -> Tensor:
    """exp(z - m) for z <= m, 0 for z = -inf."""
    return torch.exp(z - _finite(m))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype, whatever autocast is around.

    torch.export keeps the outermost autocast alone, so that in its graph this product comes out in
    16 bits, for steps that were traced in 32; times a one of their dtype it is as wide as they are.
    """
    y = a @ b
    if graphs.exporting() and not graphs.keeps_gates():
        y = y * torch.ones(1, dtype=y.dtype, device=y.device)
    return y


def _autocast_widens(z: Tensor) -> bool:
    """Whether autocast makes `torch.softmax` answer in float32: on accelerators, not on the CPU."""
    kind = z.device.type
    return kind != "cpu" and z.element_size() < 4 and torch.is_autocast_enabled(kind)


def _apply_mask(z: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        attn_mask = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
    if attn_mask is None:
        return z
    if attn_mask.dtype == torch.bool:
        return z.masked_fill(~attn_mask, -math.inf)
    return z + attn_mask.to(z.dtype)


def _repeat_heads(t: Tensor, query: Tensor) -> Tensor:
    have, want = t.shape[-3], query.shape[-3]
    if want % have:
        raise ValueError(
            f"enable_gqa: the heads of query must be a multiple of those of key and value; "
            f"got {want} and {have}."
        )
    return t.repeat_interleave(want // have, -3)
