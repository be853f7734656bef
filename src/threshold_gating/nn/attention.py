"""Attention by gates, three ways, and the recursive form of Eq. 11's threshold.

| way | what runs | memory |
| --- | --- | --- |
| `native` | `torch.nn.functional.scaled_dot_product_attention`: the same values | torch's |
| `fused` | one pass of Triton, algebraically the gates' output; a learned temperature | linear |
| `literal` | two passes of Triton: thresholds first, then sigma(z - theta) of every pair | linear |

Where the kernels cannot run (CPU, float64, heads above 256, a mask that needs a gradient) `fused`
and `literal` are the plain formula, `logits.attend`, in quadratic memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.logits import Top2, _autocast_widens, merge, softmax, thresholds, top2
from threshold_gating.nn.spec import Role, Share, distance, found
from threshold_gating.primitive import wide

__all__ = [
    "WAYS",
    "Temperature",
    "Top2",
    "TreeOperations",
    "merge",
    "row_statistics",
    "scaled_dot_product_attention",
    "softmax",
    "thresholds",
    "top2",
    "tree_logsumexp",
    "tree_operations",
    "with_statistics",
]

WAYS = ("native", "fused", "literal")


def scaled_dot_product_attention(
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
    way: str | None = None,
) -> Tensor:
    """Attention by gates: softmax(scale tau Q K^T + mask) V, each softmax the gates of Eq. 11.

    The signature and rules of `torch.nn.functional.scaled_dot_product_attention`: a boolean mask is
    True where a key takes part, a floating-point one is added, `is_causal` aligns the two sequences
    at their beginning, a row without any key gives 0, dropout is applied whenever `dropout_p` > 0.

    Args:
        query: shape (..., Hq, L, E); the axis of heads is needed for `enable_gqa` and `tau` only.
        key, value: shapes (..., H, S, E) and (..., H, S, Ev).
        attn_mask: broadcasts to (..., Hq, L, S).
        dropout_p: the share of gates set to 0; `fused` and `literal` have none.
        is_causal: query i sees the keys up to i.
        scale: of the logits, 1 / sqrt(E) by default.
        enable_gqa: each head of `key` and `value` serves Hq / H consecutive heads of `query`.
        tau: a temperature for each head, shape (Hq,), that multiplies the logits before a mask is
            added; it gets a gradient.
        way: one of `WAYS`. None goes by the backend in force: under `reference`, and in an exported
            graph, the plain formula; under `triton`, `literal`; else `native`, or `fused` with
            `tau`.

    Returns:
        shape (..., Hq, L, Ev), the dtype of `query`.
    """
    query, key, value = _checked(query, key, value, attn_mask, is_causal, tau)
    _check_way(way, tau, dropout_p)
    with torch.autocast(query.device.type, enabled=False):
        out, _ = kernels.attention(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            gqa=enable_gqa,
            tau=tau,
            way=way,
        )
    assert out is not None
    return out


def with_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    tau: Tensor | None = None,
) -> tuple[Tensor, Top2]:
    """The output of attention and the statistics of its rows of logits, in one pass.

    The arguments are those of `scaled_dot_product_attention`. The statistics, shapes (..., Hq, L,
    1), give the thresholds of chosen rows, `thresholds(z, stats=...)`; those of all pairs would
    take L x S numbers. No gradient flows through them.
    """
    query, key, value = _checked(query, key, value, attn_mask, is_causal, tau)
    options: Any = {"scale": scale, "gqa": enable_gqa, "tau": tau, "statistics": True}
    with torch.autocast(query.device.type, enabled=False):
        out, found = kernels.attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    assert out is not None and found is not None
    return out, found


def row_statistics(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    tau: Tensor | None = None,
) -> Top2:
    """The statistics of `with_statistics` alone: the first pass of the literal form."""
    query, key, _ = _checked(query, key, key, attn_mask, is_causal, tau)
    options: Any = {"scale": scale, "gqa": enable_gqa, "tau": tau, "statistics": True}
    with torch.autocast(query.device.type, enabled=False):
        _, found = kernels.attention(query, key, None, attn_mask, 0.0, is_causal, **options)
    assert found is not None
    return found


class TreeOperations(NamedTuple):
    """What one row of n logits takes in `tree_logsumexp`."""

    gates: int  # hard gates: the larger of two
    integrals: int  # of the soft gate: softplus
    additions: int  # differences among them
    depth: int  # nodes in series


def tree_logsumexp(z: Tensor, dim: int = -1) -> Tensor:
    """log sum exp by a tree of LSE(a, b) = max(a, b) + softplus(-|a - b|), Section 4 of the paper.

    The maximum is a hard gate and softplus the integral of a soft one, so threshold and gate of
    Eq. 11 are made of gates alone. Errors grow with the depth of the tree, log2 n, where adding up
    one after the other makes them grow with n.

    >>> tree_logsumexp(torch.zeros(8)) - math.log(8)
    tensor(0.)
    """
    z = wide(z).movedim(dim, -1)
    if z.shape[-1] == 0:
        return z.new_full(z.shape[:-1], -math.inf)
    while z.shape[-1] > 1:
        odd = z[..., -1:] if z.shape[-1] % 2 else z[..., :0]  # climbs as it is
        pairs = z[..., : z.shape[-1] - odd.shape[-1]]
        z = torch.cat([_lse(pairs[..., ::2], pairs[..., 1::2]), odd], -1)
    return z[..., 0]


def tree_operations(n: int) -> TreeOperations:
    """The operations of one row of n logits in `tree_logsumexp`: n - 1 nodes.

    >>> tree_operations(1024)
    TreeOperations(gates=1023, integrals=1023, additions=2046, depth=10)
    """
    if n < 1:
        raise ValueError(f"tree_operations: a row has at least one logit; got {n}.")
    return TreeOperations(n - 1, n - 1, 2 * (n - 1), (n - 1).bit_length())


def _lse(a: Tensor, b: Tensor) -> Tensor:
    # not b + relu(a - b), which differs from the maximum in a sixth of all float32 pairs
    larger = torch.where(a > b, a, b)
    # of two -inf the difference is NaN; their sum is -inf whatever is added
    apart = torch.where(a == b, 0.0, (a - b).abs())
    return larger + torch.log1p(torch.exp(-apart))


def _check_way(way: str | None, tau: Tensor | None, dropout_p: float) -> None:
    if way is None:
        return
    if way not in WAYS:
        raise ValueError(f"attention: way is None or one of {', '.join(WAYS)}; got {way!r}.")
    if way == "native" and tau is not None:
        raise ValueError("attention: native has no temperature per head; use 'fused' or 'literal'.")
    if way != "native" and dropout_p:
        raise ValueError(
            f"attention: {way} has no dropout; got dropout_p={dropout_p}. Use 0, the way 'native', "
            "or the backend 'reference' with way=None."
        )


def _autocast(t: Tensor) -> Tensor:
    """`t` as autocast hands it to attention: in its 16-bit dtype, float64 as it is."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(kind))


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    tau: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in the dtype that autocast wants, if the arguments fit together."""
    if not (isinstance(query, Tensor) and query.is_floating_point()):
        wide(query)  # refuses it
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"attention: query, key and value need one dtype; "
            f"got {query.dtype}, {key.dtype}, {value.dtype}."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            f"attention: query, key and value need at least two axes, (..., length, size); "
            f"got {query.dim()}, {key.dim()}, {value.dim()}."
        )
    if tau is not None and tau.shape != (query.shape[-3] if query.dim() > 2 else 1,):
        raise ValueError(
            f"attention: tau has one entry for each head of query, {tuple(query.shape)}; "
            f"got shape {tuple(tau.shape)}."
        )
    if attn_mask is not None and is_causal:
        raise ValueError("attention: attn_mask and is_causal exclude each other; give one of them.")
    if attn_mask is not None and not (
        attn_mask.dtype == torch.bool or attn_mask.is_floating_point()
    ):
        raise TypeError(
            f"attention: attn_mask is boolean (True takes part) or floating point (added); "
            f"got {attn_mask.dtype}."
        )
    return query, key, value


@dataclass(frozen=True)
class Temperature:
    """What softmax and attention learn: tau = exp(rho) times the logits, for each head or for all.

    It starts at 1, which changes no bit.
    """

    share: Share = "layer"
    group: tuple[int, ...] = (1,)
    axis: int = -3  # of the heads, in the logits
    learned: tuple[str, ...] = ("tau",)

    def roles(self) -> dict[str, Role]:
        """One parameter, rho."""
        return {"rho": "parameter"}

    def start(self, name: str, device: Any, dtype: torch.dtype) -> Tensor:
        """0 for each head."""
        return torch.zeros(self.group, device=device, dtype=dtype)

    def fixed(self) -> dict[str, Any]:
        """Nothing: what is learned is all there is."""
        return {}

    def tau(self, holder: nn.Module, prefix: str, heads: int | None) -> Tensor:
        """The temperatures now, one for each of `heads`; None for as many as there are."""
        tau = kernels.Structure.sharpening(found(holder, prefix + "rho"))
        if heads is None or self.group == (heads,):
            return tau
        if self.group != (1,):
            raise ValueError(
                f"attention: {self.group[0]} heads have a temperature of their own, and it is "
                f"called with {heads}; convert a network with that many, or with share='layer'."
            )
        return tau.expand(heads)

    def moved(self, holder: nn.Module, prefix: str) -> dict[str, float]:
        """How far the furthest temperature is from 1, as a logarithm."""
        tau = self.tau(holder, prefix, None)
        return {"log tau": distance(tau, torch.ones_like(tau), "tau")}

    def softmax(
        self, holder: nn.Module, prefix: str, z: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """softmax(tau z), in the type that softmax(z) has."""
        logits = z if dtype is None else z.to(dtype)
        shape = [1] * z.dim()
        heads = None
        if self.share != "layer":
            if z.dim() < -self.axis:
                raise ValueError(
                    f"softmax: {self.group[0]} heads at axis {self.axis} do not fit logits of "
                    f"shape {tuple(z.shape)}."
                )
            heads = z.shape[self.axis]
            shape[self.axis] = heads
        tau = self.tau(holder, prefix, heads).view(shape)
        p = softmax(_scaled(wide(logits), tau), dim)
        return p if dtype is None and _autocast_widens(logits) else p.to(logits.dtype)


def _scaled(z: Tensor, tau: Tensor) -> Tensor:
    """tau z, where what is masked stays so: -inf has no part in the gradient of tau, and the least
    number of a type does not become -inf, which would be NaN in a row of them."""
    masked = z.isinf()
    y = z.masked_fill(masked, 0.0) * tau.to(z.dtype)
    return torch.where(masked | y.isinf(), z, y)
