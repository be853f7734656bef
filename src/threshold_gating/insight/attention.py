"""Attention head by head: the thresholds of Eq. 11 that its keys meet, on the inputs of a run.

A key j has the weight sigma(z_j - theta_j), theta_j the log-sum-exp of the row's other logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threshold_gating import logits
from threshold_gating.conversion import sites
from threshold_gating.conversion.learned_calls import heads_of
from threshold_gating.insight.tally import CLOSED, spread
from threshold_gating.primitive import wide

QUANTILES = (0.1, 0.5, 0.9)
_KEPT = 4096  # thresholds of a head that are kept from a call
_SEEN = torch.finfo(torch.float32).tiny  # a weight below it is 0 on many a device


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of an attention or a softmax: figures [heads] over all queries of the run.

    `theta` are the quantiles 10, 50 and 90 % of the thresholds [3, heads], `keys` how many keys a
    query weighs, the mean of exp(entropy), of `live` that it can see, with a weight of 1e-38 or
    more, and `decided` the share of queries of which one key has 0.99 or more. `tau` are the
    learned temperatures, 1 without any.
    All but `tau` is NaN where nothing ran. `lost` counts queries of all heads with a logit that is
    NaN or inf, whose weights are NaN: they are left out.
    """

    name: str
    learned: bool
    queries: int
    tau: Tensor
    theta: Tensor
    keys: Tensor
    live: Tensor
    decided: Tensor
    lost: int = 0

    @property
    def heads(self) -> int:
        return len(self.keys)


class HeadTally:
    """Adds up what the heads of one attention do."""

    def __init__(self, heads: int, tau: Any) -> None:
        self.heads, self.tau = heads, tau
        self.queries = self.lost = 0
        self.thetas: list[list[Tensor]] = [[] for _ in range(heads)]
        self.sums = torch.zeros(4, heads, dtype=torch.float64)  # rows, keys, live, decided

    def add(self, each: Iterable[Tensor]) -> None:
        """The logits of one call, head by head: [queries, keys].

        A key takes no part if its weight is 0. That holds for a mask of -inf as for one of -1e4,
        and for one that a temperature makes weaker exactly where the network sees the key.
        """
        for h, z in enumerate(each):
            z = wide(z).detach()
            broken = (z.isnan() | (z == torch.inf)).any(1)
            self.lost += int(broken.sum())
            z = z[~broken]
            p = torch.softmax(z, -1)
            live = p >= _SEEN  # not so NaN, of a query that has no key
            some = live.any(1)
            if not some.any():
                continue
            z, p, live = z[some], p[some], live[some]
            theta = logits.thresholds(z.masked_fill(~live, -torch.inf))
            entropy = -(p * p.clamp_min(1e-30).log()).sum(1)
            own = [torch.ones(len(z)), entropy.exp(), live.sum(1), p.amax(1) >= CLOSED]
            self.sums[:, h] += torch.stack([w.double().sum().cpu() for w in own])
            seen = theta[live & theta.isfinite()]  # a row's only key has no threshold
            self.thetas[h].append(spread(seen, _KEPT).double().cpu())
        self.queries = int(self.sums[0].max())

    def reading(self, name: str) -> Heads:
        """What was found; without any call, the temperatures alone."""
        n = torch.where(self.sums[0] > 0, self.sums[0], torch.nan)  # nothing is known of no query
        at = torch.tensor(QUANTILES, dtype=torch.float64)
        none = torch.zeros(0, dtype=torch.float64)
        each = [torch.cat([none, *kept]) for kept in self.thetas]
        empty = torch.full((len(at),), torch.nan, dtype=torch.float64)
        theta = [t.quantile(at) if len(t) else empty for t in each]
        tau = torch.ones(1) if self.tau is None else self.tau.detach().cpu()
        keys, live, decided = self.sums[1:] / n
        return Heads(
            name,
            self.tau is not None,
            self.queries,
            tau.double().expand(self.heads),
            torch.stack(theta, 1),
            keys,
            live,
            decided,
            self.lost,
        )


def logits_of(
    kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], tau: Any
) -> tuple[int, Iterable[Tensor]] | str:
    """How many heads a call has, and their logits one after the other, [queries, keys]; or why
    they cannot be had. A call whose shape shows no heads is one."""
    if kind == "scaled_dot_product_attention":
        return _of_attention(logits.AttentionCall(*args, **kwargs), tau)
    if kind == "multi_head_attention_forward":
        return _of_multi_head(args, kwargs, tau)
    heads = heads_of(kind, args, kwargs)
    z, dim = _softmax_arguments(*args, **kwargs)
    z = wide(_masked(-z if kind == "softmin" else z))
    rows = z.movedim(dim, -1) if z.dim() else z.view(1)
    if tau is not None:
        size = -1 if len(tau) > 1 else 1
        rows = rows * tau.to(rows).view(size, 1, 1) if heads else rows * tau.to(rows)
    if heads is None:
        return 1, [_rows(rows)]
    return heads, map(_rows, rows.unbind(1))


def _rows(z: Tensor) -> Tensor:
    """[queries, keys] of logits; -1 for the queries would be refused where there is no key."""
    return z.reshape(z.shape[:-1].numel(), z.shape[-1])


def _softmax_arguments(
    input: Tensor, dim: int | None = None, *rest: Any, **more: Any
) -> tuple[Tensor, int]:
    return input, sites.axis_and_type(input, dim, rest, more.get("dtype"))[0]


def _masked(z: Tensor) -> Tensor:
    """Logits, or a mask for them, with -inf for the lowest number of their type: many masks have it
    instead, and a row of nothing else is masked, too. A temperature must not weaken it before."""
    return z.masked_fill(z <= torch.finfo(z.dtype).min / 2, -torch.inf)


def _of_attention(call: logits.AttentionCall, tau: Any) -> tuple[int, Iterable[Tensor]]:
    q, k, mask = call.query, call.key, call.attn_mask
    if mask is not None and mask.is_floating_point():
        mask = _masked(mask)
    if not call.enable_gqa:  # then one head of the queries may meet many of the keys
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])  # type: ignore[no-untyped-call]
        q, k = (w.expand(*lead, *w.shape[-2:]) for w in (q, k))
    if q.dim() < 4:
        q, k = q.view(1, -1, *q.shape[-2:]), k.view(1, -1, *k.shape[-2:])
        if q.shape[1] > 1:  # without an axis of heads: these are the batch
            q, k = q.transpose(0, 1), k.transpose(0, 1)
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    heads, groups = q.shape[-3], q.shape[-3] // k.shape[-3]

    def each() -> Iterable[Tensor]:
        # one by one: the logits of all heads of a long sequence would not fit
        for h in range(heads):
            own = mask
            if mask is not None and mask.dim() >= 3 and mask.shape[-3] > 1:
                own = mask[..., h : h + 1, :, :]
            at = slice(h // groups, h // groups + 1)
            z = logits.attention_logits(
                *(q[..., h : h + 1, :, :], k[..., at, :, :], own, call.is_causal, call.scale),
                tau=None if tau is None else tau.expand(heads)[h : h + 1],
            )
            yield _rows(z)

    return heads, each()


def _of_multi_head(
    args: tuple[Any, ...], kwargs: dict[str, Any], tau: Any
) -> tuple[int, Iterable[Tensor]] | str:
    """Torch's function is run again with ears in the place of its softmax and attention."""
    if tau is not None:
        return "its learned temperatures are in its weights, so its thresholds are not read"
    heads = heads_of("multi_head_attention_forward", args, kwargs) or 1
    heard: list[Tensor] = []

    def softmax(z: Tensor, dim: int = -1) -> Tensor:
        heard.extend(_masked(z).view(-1, heads, *z.shape[-2:]).unbind(1))
        p: Tensor = sites.WHOLE["softmax"](z, dim)
        return p

    def attend(*args: Any, **kwargs: Any) -> Any:
        heard.extend(_of_attention(logits.AttentionCall(*args, **kwargs), None)[1])
        return sites.WHOLE["scaled_dot_product_attention"](*args, **kwargs)

    sites.multi_head(softmax, attend)(*args, **kwargs)
    return heads, map(_rows, heard)
