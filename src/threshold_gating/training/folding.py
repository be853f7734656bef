"""BatchNorm into the gates behind it, for inference and export: z = a x + d disappears."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from threshold_gating.layers import Activation
from threshold_gating.training.graph import Network, trace
from threshold_gating.training.tiers import is_tiered

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of a network in evaluation mode whose BatchNorms are in the gates that read them.

    With z = a x + d the gates take tau |a| and (theta - d) / a, the branches s a and c + s d, in
    reverse where a < 0. A BatchNorm is folded if everything that reads it is an `Activation` or a
    tiered layer with gates per channel (or layer); the others stay, and `folded` on the result
    names those that went.
    """
    if model.training:
        raise ValueError(
            "fold_batchnorm: the statistics are fixed in evaluation only; call eval()."
        )
    network = trace(model)
    done = []
    for node in list(network.module.graph.nodes):
        if node.op != "call_module" or not _foldable(network, node):
            continue
        norm: Any = network.module.get_submodule(node.target)
        a, d = _affine(norm)
        readers = list(dict.fromkeys(node.users))
        replacements = [_folded(_part(network, r), a, d) for r in readers]
        if any(new is None for new in replacements):
            continue
        for reader, new in zip(readers, replacements, strict=True):
            name = f"{reader.target}"
            network.module.set_submodule(name, new)  # type: ignore[arg-type]
        node.replace_all_uses_with(node.args[0])
        network.module.graph.erase_node(node)
        done.append(str(node.target))
    network.module.recompile()
    network.module.delete_all_unused_submodules()
    network.module.folded = tuple(done)  # type: ignore[assignment]
    return network.module


def _part(network: Network, node: fx.Node) -> Any:
    return network.module.get_submodule(str(node.target))


def _foldable(network: Network, node: fx.Node) -> bool:
    norm = _part(network, node)
    if not isinstance(norm, _NORMS) or norm.running_mean is None:
        return False
    nodes = network.module.graph.nodes
    calls = [n.target for n in nodes if n.op == "call_module"]
    readers = list(node.users)
    return calls.count(node.target) == 1 and bool(readers) and all(
        r.op == "call_module"
        and calls.count(r.target) == 1
        and (is_tiered(_part(network, r)) or isinstance(_part(network, r), Activation))
        for r in readers
    )  # fmt: skip


@torch.no_grad()
def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """a, d of z = a x + d, one of each a channel."""
    a = (norm.running_var.double() + norm.eps).rsqrt()
    a = a if norm.weight is None else a * norm.weight.double()
    d = -norm.running_mean.double() * a
    return a, d if norm.bias is None else d + norm.bias.double()


@torch.no_grad()
def _folded(part: Any, a: Tensor, d: Tensor) -> nn.Module | None:
    """`part` for x instead of z, or None where that cannot be."""
    gate: Activation = part.gate if is_tiered(part) else part
    t = gate.init
    per_channel = gate.group in ((1,), tuple(a.shape)) and (is_tiered(part) or gate.axis == 1)
    if not per_channel or t.q is not None or t.clamp is not None or bool((a == 0).any()):
        return None
    tau, theta, s, c = (_table(w, a) for w in gate.values())
    flip = a < 0
    back = {"tau": tau.flip(0) if isinstance(gate.init.tau, tuple) else tau, "theta": theta.flip(0)}
    tau = torch.where(flip, back["tau"], tau) * a.abs()
    theta = (torch.where(flip, back["theta"], theta) - d) / a
    if not is_tiered(part):
        new = _gate(gate, a, ("tau", "theta", "s", "c"), t.s, t.c, axis=1)
        slopes, constants = s * a, c + s * d
        new.set_values(
            tau if isinstance(t.tau, tuple) else tau[0],
            theta,
            torch.where(flip, slopes.flip(0), slopes),
            torch.where(flip, constants.flip(0), constants),
        )
        return new
    if part.share not in ("layer", "channel") or (bool(flip.any()) and t.s != t.s[::-1]):
        return None
    # s x + c with s = 1 becomes a (x + (d + c) / a), and a goes into the weights
    linear = s == 1
    c = torch.where(linear, (d + c) / a, c)
    scale = torch.where(linear, a, torch.ones_like(a))
    return _tiered(part, gate, a, (tau if isinstance(t.tau, tuple) else tau[0]), theta,
                   torch.where(flip, c.flip(0), c), scale, flip)  # fmt: skip


def _tiered(
    part: Any, gate: Activation, a: Tensor, tau: Tensor, theta: Tensor, c: Tensor,
    scale: Tensor, flip: Tensor,
) -> nn.Module:  # fmt: skip
    groups, (rows, K, inner) = getattr(part, "groups", 1), part.weight.shape[:3]
    tail = (1,) * (part.weight.dim() - 3)

    def per_weight(w: Tensor) -> Tensor:  # (K, C) -> (O, K, C / groups, 1, ..)
        w = w.view(-1, groups, 1, inner).expand(-1, groups, rows // groups, inner)
        return w.reshape(-1, rows, inner).transpose(0, 1).reshape(rows, -1, inner, *tail)

    weight = part.weight.double() * per_weight(scale.expand(K, -1))
    weight = torch.where(per_weight(flip[None]), weight.flip(1), weight)
    part.weight = nn.Parameter(weight.to(part.weight.dtype))
    part.gate = _gate(gate, a, ("tau", "theta", "c"), gate.init.s, gate.init.c, axis=1)
    part.gate.set_values(tau, theta, None, c)
    part.share = "channel"
    return part  # type: ignore[no-any-return]


def _gate(gate: Activation, a: Tensor, train: Any, s: Any, c: Any, axis: int) -> Activation:
    names = [n for n in train if not (gate.init.hard and n == "tau")]
    new = Activation(
        replace(gate.init, s=s, c=c, anchor=None),
        share="channel",
        channels=len(a),
        axis=axis,
        train=names,
        device=a.device,
    )
    return new.eval().requires_grad_(False)


def _table(w: Any, a: Tensor) -> Tensor:
    """Values of all channels, (rows, C), in float64."""
    rows = w if isinstance(w, list) else [w]
    return torch.stack([torch.as_tensor(r).to(a).expand_as(a) for r in rows])
