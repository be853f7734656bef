"""Moves of one layer between the tiers W, S and general: up exactly, down by projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.nn.activation import Activation
from threshold_gating.nn.dense import SHARES, TIERED

AUDITED_AS = "network"  # see conversion.audit

ORDER = ("A", "W", "S", "general")
_PLAIN = {ours: plain for plain, ours in TIERED.items()}


class InTierA(nn.Sequential):
    """An activation and the layer behind it, in the place of a tiered layer."""

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """As the tiered layer: what the activation gives is multiplied by `factor`."""
        act, layer = self
        y: Tensor = layer(act(x) if factor is None else act(x) * factor)
        return y

    # networks ask layers for their dtype and device
    weight = property(lambda self: self[1].weight)
    bias = property(lambda self: self[1].bias)


def is_tiered(module: nn.Module) -> bool:
    """Whether `module` is a layer of tier W, S or general."""
    return type(module) in _PLAIN


@torch.no_grad()
def lifted(layer: Any, tier: str, share: str | None = None) -> Any:
    """The same function as a layer of a higher tier."""
    shares = SHARES[tier]
    share = share or shares[0]
    if ORDER.index(tier) < ORDER.index(layer.tier):
        raise ValueError(f"promote only goes up: this layer is tier {layer.tier}; got {tier!r}.")
    tau, theta, s, c = layer.gate.values()
    if tier == "S" and "c" in layer.gate.learned and share != "channel":
        raise ValueError(
            "tier S has one constant a branch, and this layer learned one for each channel; "
            "promote it to 'general'."
        )
    new = _empty(layer, tier, share)
    spread = [_spread(layer, new, w) for w in theta]
    taus = [_spread(layer, new, t) for t in tau] if isinstance(tau, list) else tau
    new.gate.set_values(taus if isinstance(taus, list) else _spread(layer, new, taus), spread)
    if tier != "general":
        new.weight.copy_(layer.weight)
        return new
    for k in range(layer.K):
        w = layer.weight[:, k]
        new.weight[:, k] = _spread(layer, new, s[k]) * w
        constant = c[k] if layer.c is None else layer.c[k]
        new.const[:, k] = (
            _spread(layer, new, constant) * w if layer.const is None else (layer.const[:, k])
        )
    return new


@torch.no_grad()
def projected(layer: Any, tier: str) -> tuple[nn.Module, float]:
    """The nearest layer of a lower tier, and how much of the weights that loses.

    The loss is |lost| / |weights| in the Frobenius norm, over weights and constants.
    """
    lost = 0.0
    if layer.tier == "general" and tier != "general":
        layer, lost = _without_constants(layer)
    if layer.tier == "S" and layer.share != "channel" and tier in ("W", "A"):
        new = _empty(layer, "W", "channel")
        weight = layer.weight.square().sum(1)
        tau, theta = layer.gate.values()[:2]
        new.gate.set_values(_mean(layer, tau, weight), [_mean(layer, t, weight) for t in theta])
        new.weight.copy_(layer.weight)
        layer = new
    if tier != "A":
        return layer, lost
    new, tied = _tied(layer)
    return new, max(lost, tied)


def _empty(layer: Any, tier: str, share: str) -> Any:
    """A layer of `tier` like `layer`, its weights and gates yet to be written."""
    dense = _dense(layer, layer.weight[:, -1].clone())
    per_synapse = share in ("synapse", "channel_pair")  # else there is one accuracy
    new = type(layer).from_dense(
        dense, layer.init, tier=tier, share=share, train=_train(layer, tier), size=layer.size,
        accuracy=layer.accuracy if per_synapse else "full",
    )  # fmt: skip
    return new.train(layer.training)


def _dense(layer: Any, weight: Tensor) -> Any:
    """The layer of torch with this weight, without the hooks of `layer`, which stay around it."""
    plain = object.__new__(_PLAIN[type(layer)])
    own = {k: {} if "_hook" in k and isinstance(v, dict) else v for k, v in vars(layer).items()}
    vars(plain).update(own)
    plain._parameters = {"weight": nn.Parameter(weight), "bias": layer.bias}
    plain._modules = {}
    return plain


def _train(layer: Any, tier: str) -> list[str]:
    names = list(layer.gate.learned)
    if tier == "general":
        return [n for n in names if n != "c"]
    return [*names, "c"] if layer.c is not None else names


def _spread(layer: Any, new: Any, w: Any) -> Any:
    """Gate values of one sharing in the shape of a finer one."""
    if not isinstance(w, Tensor) or w.numel() == 1:
        return w.view(()) if isinstance(w, Tensor) else w
    if layer.share == new.share or new.share in ("layer", "channel", "neuron"):
        return w
    shape = new.weight[:, 0].shape
    if layer.share == "channel":
        groups = shape[1] and w.shape[0] // shape[1]
        w = w.view(groups, 1, shape[1]).expand(groups, shape[0] // groups, shape[1])
        w = w.reshape(shape[:2])
    elif layer.share == "neuron":
        raise ValueError(
            "gates per position cannot become gates per synapse: a synapse sees many positions."
        )
    w = w.reshape(*w.shape[:2], *(1,) * (len(shape) - 2)) if w.dim() == 2 else w
    return w.expand(new.gate.group)


def _mean(layer: Any, w: Any, weight: Tensor) -> Any:
    """One value for each channel from those of its synapses, by the weight these have."""
    if isinstance(w, list):
        return [_mean(layer, each, weight) for each in w]
    if not isinstance(w, Tensor):
        return w
    groups = getattr(layer, "groups", 1)
    weight = weight + torch.finfo(weight.dtype).tiny
    full = w.expand_as(weight) * weight
    rows = [
        t.view(groups, -1, *t.shape[1:]).transpose(1, 2).flatten(2).sum(-1) for t in (full, weight)
    ]
    return (rows[0] / rows[1]).flatten()


def _without_constants(layer: Any) -> tuple[Any, float]:
    """general -> S: c^k = c_k w^k with the best c_k of each branch."""
    new = _empty(layer, "S", "synapse")
    new.gate.set_values(*layer.gate.values()[:2])
    lost = total = 0.0
    starts = []
    for k in range(layer.K):
        w, c = layer.weight[:, k], layer.const[:, k]
        # A branch that has constants only is a constant: its weights are what multiplies it.
        flat = new.gate.init.s[k] == 0
        scale = 1.0 if flat else float((w * c).sum() / w.square().sum().clamp_min(1e-30))
        new.weight[:, k] = c / new.gate.init.c[k] if flat else w
        remainder = w.square().sum() if flat else (c - scale * w).square().sum()
        lost, total = lost + float(remainder), total + float(w.square().sum() + c.square().sum())
        starts.append(new.gate.init.c[k] if flat else scale)
    if any(abs(a - b) > 0 for a, b in zip(starts, new.gate.init.c, strict=True)):
        new.c = nn.Parameter(new.weight.new_tensor(starts, dtype=torch.float32)[:, None])
    return new, (lost / max(total, 1e-30)) ** 0.5


def _tied(layer: Any) -> tuple[nn.Module, float]:
    """W -> A: w^k_ji = s_ki W_ji with the best s of each channel, by a singular value each."""
    groups = getattr(layer, "groups", 1)
    outputs, K, inner = layer.weight.shape[:3]
    branches = layer.weight.reshape(groups, outputs // groups, K, inner, -1).permute(0, 3, 2, 1, 4)
    branches = branches.reshape(groups * inner, K, -1)  # for each channel K rows
    u, sigma, v = torch.linalg.svd(branches, full_matrices=False)
    # The largest slope is 1, so that W is the weight of the branch it belongs to.
    top = u[..., 0].gather(1, u[..., 0].abs().argmax(1, keepdim=True))
    slopes = u[..., 0] / top
    dense = (top * sigma[:, :1] * v[:, 0]).view(groups, inner, outputs // groups, -1)
    tau, theta, s, c = layer.gate.values()
    record = layer.gate.init
    act = Activation(
        record, share="channel", channels=groups * inner, axis=1 if layer.weight.dim() > 3 else -1,
        train=[*(n for n in layer.gate.learned if n in ("tau", "theta")), "s", "c"],
    )  # fmt: skip

    def rows(values: Any) -> list[Tensor]:
        return [slopes[:, k] * torch.as_tensor(w).to(slopes) for k, w in enumerate(values)]

    act.set_values(tau, theta, rows(s), rows(c))
    weight = dense.permute(0, 2, 1, 3).reshape(outputs, inner, *layer.weight.shape[3:])
    plain = _dense(layer, weight.contiguous())
    lost = sigma[:, 1:].square().sum() / sigma.square().sum().clamp_min(1e-30)
    return InTierA(act, plain).train(layer.training), float(lost) ** 0.5
