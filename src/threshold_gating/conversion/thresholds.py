"""Attention with fixed thresholds, without the sum over the other keys.

Eq. 11 gates each logit against theta_ij = LSE(z_i,-j), which takes a reduction over the row. Here

    p_ij = sigma(z_ij - theta[h, b(n_i)])

with one number for each head h and each bucket b of n_i, how many keys the row i sees: the mean of
the thresholds that a trained network really has there. That is sigmoid attention, of a network that
was trained with softmax. It is an approximation, and a coarse one: rows do not sum to one any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import logits
from threshold_gating.conversion.gate import places
from threshold_gating.conversion.intercept import intercept_calls
from threshold_gating.conversion.plan import make_plan, run
from threshold_gating.conversion.site import ConversionError, Site
from threshold_gating.conversion.watch import copied, evaluating, fresh

KIND = "scaled_dot_product_attention"
_OPEN = -1e4  # for -inf, the threshold of a row's only key: its gate is 1 all the same


def fixed_thresholds(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """A copy of `model` whose attention gates every logit against a fixed, learnable threshold.

    Args:
        model: a network, not converted, whose attention is `F.scaled_dot_product_attention`.
        batches: inputs as `tg.convert` takes them. Thresholds are measured on all of them; rows
            with more keys than any of theirs take the threshold of the longest.

    The thresholds are parameters `....thresholds.theta`, shape (heads, buckets); everything else is
    as it was. `tg.conversion.save` does not know them; keep the state dict.
    """
    found = copied(model)
    batches = list(batches)
    plan = make_plan(found, None, batches[0])
    calls = {
        owner: {call: site for call, site in sites.items() if site and site.kind == KIND}
        for owner, sites in (plan.calls or {}).items()
    }
    calls = {owner: sites for owner, sites in calls.items() if sites}
    if not calls or any(len(sites) > 1 for sites in calls.values()):
        raise ConversionError(
            f"fixed_thresholds needs a network with one call of {KIND} in each attention; "
            "a Hugging Face model has it after model.set_attn_implementation('sdpa')."
        )
    watched = {owner: _Measured() for owner in calls}
    _answer(found, calls, watched, plan.calls or {})
    with evaluating(found):
        for batch in batches:
            run(found, fresh(batch))
    where = places(found)
    made = {
        owner: FixedThresholds(seen.mean().to(where[found.get_submodule(owner)].device))
        for owner, seen in watched.items()
    }
    _answer(found, calls, made, plan.calls or {})
    for owner, module in made.items():
        found.get_submodule(owner).add_module("thresholds", module)
    return found


def _answer(
    model: nn.Module,
    calls: Mapping[str, Mapping[str, Site]],
    answers: Mapping[str, Any],
    plan: Mapping[str, Mapping[str, Site | None]],
) -> None:
    """Let the attention of each owner be answered by its own function, and no other call."""
    for owner, sites in calls.items():
        module = model.get_submodule(owner)
        left: dict[str, Site | None] = dict.fromkeys(plan[owner])
        for call, site in sites.items():
            left[call] = Site(site.name, site.kind, exact=False, op=answers[owner])
        if "tg_sites" in module.__dict__:
            module.__dict__["tg_sites"] = left
        else:
            intercept_calls(module, left)


class FixedThresholds(nn.Module):
    """Attention whose gates have thresholds of their own: theta[h, bucket of the row]."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """With the arguments of `F.scaled_dot_product_attention`; there is no dropout."""
        call = logits.AttentionCall(*args, **kwargs)
        z = call.logits()
        at = _bucket(z).clamp(max=self.theta.shape[1] - 1)
        heads = torch.arange(self.theta.shape[0], device=z.device)[:, None]
        p = torch.sigmoid(z - self.theta[heads, at][..., None])  # the gate of -inf is 0
        return call.mixed(p)


class _Measured:
    """Answers attention as it was; counts and adds up the thresholds by head and bucket."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, 1, 1, dtype=torch.float64)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        call = logits.AttentionCall(*args, **kwargs)
        z = call.logits()
        theta = logits.thresholds(z).clamp(min=_OPEN).double()
        live, at, heads = _live(z), _bucket(z), z.shape[-3]
        seen = theta.new_zeros(2, heads, int(at.max()) + 1)
        for total, what in zip(seen, (live.double(), theta * live), strict=True):
            total.scatter_add_(1, _by_head(at), _by_head(what.sum(-1)))
        more = seen.shape[2] - self.sums.shape[2]
        grown = F.pad(self.sums.expand(2, heads, -1), (0, max(0, more)))
        self.sums = grown + F.pad(seen.cpu(), (0, max(0, -more)))
        return call.mixed(logits.softmax(z, masked=0.0))

    def mean(self) -> Tensor:
        """(heads, buckets); a bucket that no row fell into has the next lower one's."""
        count, total = self.sums.unbind()
        theta: Tensor = total / count
        for b in range(1, theta.shape[1]):
            theta[:, b] = torch.where(count[:, b] > 0, theta[:, b], theta[:, b - 1])
        return theta.float()


def _by_head(rows: Tensor) -> Tensor:
    """(..., heads, rows) as (heads, all rows of a head)."""
    return rows.movedim(-2, 0).flatten(1)


def _live(z: Tensor) -> Tensor:
    """The pairs that take part; a mask that is added may have the lowest number for -inf."""
    return z > torch.finfo(z.dtype).min / 2


def _bucket(z: Tensor) -> Tensor:
    """Half octaves of the number of keys that a row sees: 1, 2, 3, 4, 5-6, 7-9, 10-13, ..."""
    n = _live(z).sum(-1).clamp(min=1)
    return (2 * n.double().log2()).round().long()
