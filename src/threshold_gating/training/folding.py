"""`fold_batchnorm`: BatchNorm, z = a x + d, folded into the gates behind it, for inference."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from threshold_gating.conversion.gate import Gate, successor
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.dense import Conv1d, Conv2d, Conv3d, Linear
from threshold_gating.training.graph import (
    Network,
    expect_axes,
    finished,
    is_hooked,
    overwrites,
    part_of,
    reads_parameters,
    trace,
)
from threshold_gating.training.tiers import is_tiered

# The layers that have their channels where the norm has them, and how many axes they then read.
_BEHIND: dict[type[nn.Module], dict[type[nn.Module], int]] = {
    nn.BatchNorm1d: {Linear: 2, Conv1d: 3},
    nn.BatchNorm2d: {Conv2d: 4},
    nn.BatchNorm3d: {Conv3d: 5},
}


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of a network in evaluation mode whose BatchNorms are in the gates that read them.

    With z = a x + d the gates take tau |a| and (theta - d) / a, the branches s a and c + s d, in
    reverse where a < 0. A BatchNorm is folded if everything that reads it is an `Activation` or a
    tiered layer with gates per channel (or layer); the others stay. On the result, `folded` names
    those that went and `kept` says of each other one why it stayed.
    """
    if model.training:
        raise ValueError(
            "fold_batchnorm: the statistics are fixed in evaluation only; call eval()."
        )
    network = trace(model)
    graph, done, kept = network.module.graph, [], {}
    for node in reversed(list(graph.nodes)):  # of two in a row the second goes first
        if node.op != "call_module" or type(part_of(network, node)) not in _BEHIND:
            continue
        plan = _plan(network, node)
        if isinstance(plan, str):
            kept[str(node.target)] = plan
            continue
        for reader, new in plan.items():
            network.module.set_submodule(str(reader.target), new)
            node.append(reader)  # x is read where the norm read it: it may be overwritten later
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
        done.append(str(node.target))
    vars(network.module).update(folded=tuple(reversed(done)), kept=kept)
    return finished(network)


def _plan(network: Network, node: fx.Node) -> dict[fx.Node, nn.Module] | str:
    """What each reader of a BatchNorm becomes, or why it stays. Nothing is changed yet."""
    norm, readers = part_of(network, node), list(node.users)
    if norm.training or norm.running_mean is None:
        return "it normalises by the batch"
    if why := _obstacle(network, node):
        return f"it {why}"
    if not readers:
        return "nothing reads it"
    a, d = _affine(norm)
    if not bool(a.all()):
        return "a channel has the scale 0, so its input is lost"
    plan: dict[fx.Node, nn.Module] = {}
    for reader in readers:
        if reader.op != "call_module" or not _is_gated(part_of(network, reader), type(norm)):
            return f"{reader.target}, which reads it, has no gates per channel"
        axis = 1 - max(_BEHIND[type(norm)].values())
        new = _obstacle(network, reader) or _folded(part_of(network, reader), a, d, axis)
        if isinstance(new, str):
            return f"{reader.target}, which reads it, {new}"
        if len(readers) > 1 and overwrites(network, reader):
            return f"{reader.target} overwrites what others read"
        if type(norm) is nn.BatchNorm1d and is_tiered(new):
            expect_axes(new, _BEHIND[type(norm)][type(new)])
        plan[reader] = new
    return plan


def _is_gated(part: nn.Module, norm: type[nn.Module]) -> bool:
    """Whether its channels are where `norm` has them, or it does what `Activation` does."""
    return type(part) in _BEHIND[norm] or type(part).forward in (Activation.forward, Gate.forward)


def _obstacle(network: Network, node: fx.Node) -> str | None:
    """Why a module cannot be replaced, whatever it computes."""
    nodes = network.module.graph.nodes
    if sum(n.op == "call_module" and n.target == node.target for n in nodes) > 1:
        return "is called several times"
    if is_hooked(part_of(network, node)):
        return "has hooks"
    if reads_parameters(network, node):
        return "has parameters that are read elsewhere too"
    return None


@torch.no_grad()
def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """a, d of z = a x + d, one of each a channel."""
    a = (norm.running_var.double() + norm.eps).rsqrt()
    a = a if norm.weight is None else a * norm.weight
    d = -norm.running_mean * a
    return a, d if norm.bias is None else d + norm.bias


class _Rows(NamedTuple):
    """Gates and branches of every channel in float64, each (rows, C), low to high."""

    tau: Tensor
    theta: Tensor
    s: Tensor
    c: Tensor


@torch.no_grad()
def _folded(part: Any, a: Tensor, d: Tensor, axis: int) -> nn.Module | str:
    """A new `part` for x instead of z, or why there is none; `axis` is that of the channels of the
    norm, from the end."""
    tiered = is_tiered(part)
    gate: Activation = part.gate if tiered else part
    t, flip, dtype = gate.init, a < 0, gate.theta0.dtype
    dtype = torch.promote_types(dtype, part.weight.dtype) if tiered else dtype
    if t.K < 2 or t.q is not None or t.clamp is not None:
        return "is not a plain blend of two or more affine branches"
    one = gate.group == (1,)
    along = part.share in ("layer", "channel") if tiered else one or gate.axis in (1, axis)
    if not along or not (one or gate.group == tuple(a.shape)):
        return "has gates that are not per channel"
    if tiered and bool(flip.any()) and t.s != t.s[::-1]:
        return "has unlike branches, which negative scales would exchange"
    z = _Rows(*(_table(w, a) for w in gate.values()))
    low = _Rows(*(torch.where(flip, w.flip(0), w) for w in z))  # in the order of x
    if tiered:  # a branch x + c takes a out of its brackets, into the weights
        s, c = low.s, torch.where(low.s == 1, (low.c + d) / a, low.c)
        scale = torch.where(low.s == 1, a, 1.0)
        weight = _weight(part, scale, flip)
    else:
        s, c, weight = low.s * a, low.c + low.s * d, torch.zeros(())
    x = _Rows(low.tau * a.abs(), (low.theta - d) / a, s, c)
    if not (all(_fits(w, dtype) for w in x) and (not tiered or _fits(weight, part.weight.dtype))):
        return f"would have values beyond {str(dtype).removeprefix('torch.')}"
    x = x._replace(theta=_owned(x.theta.to(dtype), t.owner, flip) if t.hard else x.theta)
    free = ("tau", "theta", "c") if tiered else ("tau", "theta", "s", "c")
    new = _gate(gate, free, len(a)).to(dtype)
    new.set_values(x.tau if isinstance(t.tau, tuple) else x.tau[0], x.theta, x.s, x.c)
    return new if not tiered else _tiered(part, new, weight)


def _weight(part: Any, scale: Tensor, flip: Tensor) -> Tensor:
    """The weights in float64 with their branches in the order of x, times `scale` (K, C)."""
    groups, rows, inner = getattr(part, "groups", 1), len(part.weight), part.weight.shape[2]
    tail = (1,) * (part.weight.dim() - 3)

    def per_weight(w: Tensor) -> Tensor:  # (K, C) -> (O, K, C / groups, 1, ..)
        w = w.view(-1, groups, 1, inner).expand(-1, groups, rows // groups, inner)
        return w.reshape(-1, rows, inner).transpose(0, 1).reshape(rows, -1, inner, *tail)

    weight = part.weight.double()
    return torch.where(per_weight(flip[None]), weight.flip(1), weight) * per_weight(scale)


def _tiered(part: Any, gate: Activation, weight: Tensor) -> nn.Module:
    new: Any = copy.deepcopy(part)
    new.weight = nn.Parameter(weight.to(part.weight.dtype), requires_grad=False)
    new.gate, new.share = gate, "channel"
    return new  # type: ignore[no-any-return]


def _gate(gate: Activation, train: tuple[str, ...], channels: int) -> Activation:
    new = successor(
        gate,
        replace(gate.init, anchor=None),
        share="channel",
        channels=channels,
        axis=1,
        train=[n for n in train if not (gate.init.hard and n == "tau")],
    )
    return new.eval().requires_grad_(False)


def _table(w: Any, a: Tensor) -> Tensor:
    """Values of all channels, (rows, C), in float64."""
    rows = w if isinstance(w, list) else [w]
    return torch.stack([torch.as_tensor(r, dtype=a.dtype).to(a.device).expand_as(a) for r in rows])


def _fits(w: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` has these numbers to its rounding: none is too large, or too small."""
    near = (w.to(dtype).double() - w).abs() <= torch.finfo(dtype).eps * w.abs()
    return bool((near | (w == math.inf)).all())  # the sharpness of hard gates


def _owned(theta: Tensor, owner: tuple[str, ...] | None, flip: Tensor) -> Tensor:
    """Thresholds that leave x == theta on the side where z == theta was.

    In channels that are turned round the other side has it. A record says the same of all
    channels, so there the threshold moves to the next number.
    """
    rows = []
    owners = owner or ("lo",) * len(theta)
    for row, own, before in zip(theta, owners, reversed(owners), strict=True):
        there = math.inf if own == "hi" else -math.inf
        moved = torch.nextafter(row, torch.full_like(row, there))
        rows.append(torch.where(flip, moved, row) if own == before else row)
    return torch.stack(rows)
