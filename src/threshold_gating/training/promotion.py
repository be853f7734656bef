"""Moves of networks between the tiers of Table 1: `promote` (exact), `demote`, `half_transfer`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from threshold_gating import taxonomy
from threshold_gating.conversion import sites
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.dense import TIERED
from threshold_gating.nn.tying import SHARES, Tier, TierShare, share_of
from threshold_gating.training.graph import (
    Act,
    Consumer,
    Network,
    consumers,
    expect_axes,
    finished,
    function,
    is_hooked,
    is_move,
    overwrites,
    put,
    reads_parameters,
    trace,
    views,
)
from threshold_gating.training.tiers import ORDER, is_tiered, lifted, projected


@dataclass(frozen=True)
class Promotion:
    """What `promote` did: the layers of the new tier, and why others stayed as they were."""

    layers: tuple[str, ...]
    kept: dict[str, str]

    def __str__(self) -> str:
        many = "layer" if len(self.layers) == 1 else "layers"
        lines = [f"{len(self.layers)} {many} promoted: {', '.join(self.layers)}"]
        return "\n".join([*lines, *(f"{name}: {why}" for name, why in self.kept.items())])


def promote(
    model: nn.Module,
    tier: Tier = "W",
    share: TierShare | None = None,
    *,
    train: Iterable[str] | None = None,
    gates: TG | str | None = None,
) -> nn.Module:
    """A copy of a trained network in a higher tier that computes the same.

    Every linear layer or convolution that an activation feeds becomes a layer of `dense`, with
    the activation as its gates and the weights W_k = s_k W. What else reads the activation (a
    residual sum, a pooling) goes on reading it. A network in tier W goes on to S, then general.

    Args:
        model: a plain or converted network that torch.fx can follow; it is left as it was.
        tier, share, train: as in `dense.Linear`.
        gates: other gates than the activation's (see `half_transfer`); the function then changes.

    Returns:
        the new network, a `torch.fx.GraphModule` with the names of the old one; what was done
        stands in its attribute `promotion`.
    """
    _check(model, tier, share)
    if any(is_tiered(m) for m in model.modules()):
        return _lift_all(model, tier, share)
    network = trace(model)
    calls = Counter(n.target for n in network.module.graph.nodes if n.op == "call_module")
    done: list[str] = []
    kept: dict[str, str] = {}
    fixed = _keep_inputs(network)
    for node, act in network.acts.items():
        if node.target in fixed:
            kept[_name(node)] = fixed[node.target]
            continue
        layers, others = consumers(network, node)
        if not layers:
            kept[_name(node)] = f"feeds no layer but {_names(others)}"
        changed = [n for n in others if overwrites(network, n)]
        for consumer in layers:
            name = str(consumer.layer.target)
            why = _obstacle(network, act, consumer, calls)
            if changed:
                why = f"reads an activation that {_names(changed)} overwrites"
            if why is None:
                _replace(network, node, act, consumer, tier, share, train, gates)
                done.append(name)
            else:
                kept[name] = why
    if not done:
        reasons = "; ".join(f"{name} {why}" for name, why in kept.items()) or "no activation"
        raise ValueError(f"promote: no layer of {type(model).__name__} can be promoted: {reasons}.")
    for node in reversed(network.module.graph.nodes):  # what nothing reads any more
        idle = node in network.acts or is_move(network, node)
        if idle and not node.users and not overwrites(network, node):
            network.module.graph.erase_node(node)
    return _reported(finished(network), Promotion(tuple(done), kept))


def _check(model: Any, tier: Any, share: Any) -> None:
    """Arguments that no network could be promoted with, before any is looked at."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"promote: model must be a torch.nn.Module; got {model!r:.60}.")
    near = {name.lower(): name for name in SHARES}.get(
        tier.lower() if isinstance(tier, str) else ""
    )
    if near is not None and near != tier:
        raise ValueError(f"promote: no tier {tier!r}; did you mean {near!r}?")
    share_of("promote", tier, share)


def half_transfer(
    model: nn.Module, gates: TG | str = "silu", share: TierShare = "channel"
) -> nn.Module:
    """Weights from a trained network, gates from scratch: the paper's start of tier W.

    It does not compute what `model` does: a ReLU network becomes a SiLU network (each activation
    moves by up to 0.278). To keep the function, `promote` it and make its gates soft by training.
    """
    return promote(model, "W", share, gates=gates)


def _reported(model: nn.Module, promotion: Promotion) -> nn.Module:
    vars(model)["promotion"] = promotion
    return model


def _lift_all(model: nn.Module, tier: str, share: str | None) -> nn.Module:
    new = copy.deepcopy(model)
    done = []
    for name, module in list(new.named_modules()):
        if is_tiered(module):
            new = put(new, module, lifted(module, tier, share))
            done.append(name)
    return _reported(new, Promotion(tuple(done), {}))


@dataclass(frozen=True)
class Demotion:
    """A network in a lower tier, and what that lost.

    `lost` is |lost| / |weights| of each layer in the Frobenius norm; `output` is
    max|d| / max|y| on the inputs given, or None.
    """

    model: nn.Module
    lost: dict[str, float]
    output: float | None


def demote(model: nn.Module, tier: Literal["A", "W", "S"] = "A", *, inputs: Any = None) -> Demotion:
    """Project every tiered layer of a network to a lower tier; `model` is left as it was."""
    if tier not in ORDER[:-1]:
        raise ValueError(f"demote: tier must be one of {', '.join(ORDER[:-1])}; got {tier!r}.")
    new, lost = copy.deepcopy(model), {}
    for name, module in list(new.named_modules()):
        if is_tiered(module) and ORDER.index(vars(module)["tier"]) > ORDER.index(tier):
            lower, lost[name] = projected(module, tier)
            new = put(new, module, lower)
    if not lost:
        raise ValueError(f"demote: {type(model).__name__} has no layer above tier {tier}.")
    return Demotion(new, lost, None if inputs is None else difference(model, new, inputs))


@torch.no_grad()
def difference(model: nn.Module, other: nn.Module, inputs: Any) -> float:
    """max|d| / max|y| of two networks on the same inputs, in evaluation mode."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    modes = [(m, m.training) for m in (*model.modules(), *other.modules())]
    y, z = model.eval()(*args), other.eval()(*args)
    for module, mode in modes:
        module.training = mode
    return float((y - z).abs().max() / y.abs().max().clamp_min(1e-30))


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(dict.fromkeys(_name(n) for n in nodes)) or "nothing"


def _obstacle(network: Network, act: Act, consumer: Consumer, calls: Counter[Any]) -> str | None:
    """Why a layer cannot take in the activation before it, or None."""
    layer: Any = network.module.get_submodule(str(consumer.layer.target))
    if calls[consumer.layer.target] > 1:
        return "is called several times"
    if is_hooked(layer):
        return "has hooks"
    if reads_parameters(network, consumer.layer):
        return "has parameters that are read elsewhere too"
    if act.t.K < 2 or act.t.q is not None or act.t.clamp is not None:
        name = taxonomy.name_of(act.t) or repr(act.t)
        return f"reads {name}, which is not a plain blend of two or more affine branches"
    if act.learned is None or act.learned.share in ("net", "layer"):
        return None
    width = layer.weight.shape[1] * getattr(layer, "groups", 1)
    axes = (1, -1) if isinstance(layer, nn.Linear) else (1,)
    along = act.learned.axis in axes and act.learned.group == (width,)
    if act.learned.share == "neuron" or consumer.moves or not along:
        return "reads gates that differ by position or were moved on the way"
    return None


def _replace(
    network: Network,
    node: fx.Node,
    act: Act,
    consumer: Consumer,
    tier: str,
    share: str | None,
    train: Iterable[str] | None,
    gates: TG | str | None,
) -> None:
    name = str(consumer.layer.target)
    old: Any = network.module.get_submodule(name)
    new = TIERED[type(old)].from_dense(old, act.t, tier="W", share=_first(tier, share), train=train)
    if act.learned is not None:
        _carry(new, old.weight, act.learned)
        if act.learned.share not in ("net", "layer") and act.learned.axis == 1:
            expect_axes(new, old.weight.dim())
    if gates is not None:
        _regate(new, gates)
    if tier != "W":
        new = lifted(new, tier, share)
    network.module.set_submodule(name, new.train(old.training))
    graph = network.module.graph
    (before,), (pre,) = consumer.layer.all_input_nodes, node.all_input_nodes
    # Where the activation was: what it read may be overwritten later.
    with graph.inserting_before(node):
        for move in consumer.moves:
            pre = graph.node_copy(move, _substitute(move.args[0], pre))
    node.prepend(consumer.layer)
    consumer.layer.replace_input_with(before, pre)


def _substitute(old: Any, new: Any) -> Any:
    return lambda n: new if n is old else n


def _first(tier: str, share: str | None) -> str:
    """The share of tier W on the way to `tier`."""
    return share or "channel" if tier == "W" else "channel"


@torch.no_grad()
def _carry(new: Any, dense: Tensor, act: Activation) -> None:
    """Give a layer the gates, slopes and constants that the activation before it learned."""
    tau, theta, s, c = act.values()
    groups, (rows, inner) = getattr(new, "groups", 1), dense.shape[:2]

    def each(w: Any) -> Tensor:  # a value for each channel
        return torch.as_tensor(w, dtype=torch.float32).expand(groups * inner)

    offsets = []
    for k, (slope, constant) in enumerate(zip(map(each, s), map(each, c), strict=True)):
        flat = new.gate.init.s[k] == 0
        if bool(slope.any()) if flat else bool(((slope == 0) & (constant != 0)).any()):
            raise ValueError(
                "promote: in some channels a branch has learned a slope, or lost it; the branches "
                "of tier W are alike in all channels."
            )
        if not flat:
            per_output = slope.view(groups, 1, inner).expand(groups, rows // groups, inner)
            new.weight[:, k] = dense * per_output.reshape(rows, inner, *(1,) * (dense.dim() - 2))
            constant = torch.where(slope == 0, constant, constant / slope)
        offsets.append(constant)
    start = new.gate.init.c
    moved = any(bool((o != c0).any()) for o, c0 in zip(offsets, start, strict=True))
    own = [n for n in ("tau", "theta") if n in (*act.learned, *new.gate.learned)]
    _set_gate(new, new.gate.init, [*own, "c"] if moved else own)
    new.gate.set_values(tau, theta, None, offsets)


def _set_gate(new: Any, record: TG, train: Iterable[str]) -> None:
    own = new.gate
    channels = None if own.share == "layer" else own.group
    new.gate = Activation(record, share=own.share, channels=channels, train=train)


def _regate(new: Any, gates: TG | str) -> None:
    """Other gates over the same branches."""
    t = gates if isinstance(gates, TG) else taxonomy.TAXONOMY[taxonomy.key_of(gates)]
    if t.K != new.K:
        raise ValueError(
            f"half_transfer: the network has {new.K} branches, and {taxonomy.name_of(t) or t} "
            f"gives gates for {t.K}."
        )
    gate = {"tau": t.tau, "theta": t.theta, "form": t.form, "owner": t.owner}
    _set_gate(new, replace(new.gate.init, **gate), ("theta",) if t.hard else ("tau", "theta"))
    new.init = replace(new.init, **gate)


def _keep_inputs(network: Network) -> dict[Any, str]:
    """Let no activation overwrite its input, which promoted layers read from now on.

    What reads the input later, and so saw it overwritten, reads the result instead. Activations
    of whose input there are other views, which would not see that, stay as they are: returned by
    target, with the reason.
    """
    place = {n: k for k, n in enumerate(network.module.graph.nodes)}
    over = [n for n in network.acts if overwrites(network, n)]
    for node in over:
        read = node.all_input_nodes[0]
        for user in [u for u in read.users if place[u] > place[node]]:
            user.replace_input_with(read, node)
    fixed: dict[Any, str] = {}
    for node in over:
        others = [n for n in views(network, node.all_input_nodes[0]) if place[n] < place[node]]
        late = [u for n in others for u in n.users if place[u] > place[node]]
        if late:
            fixed[node.target] = f"overwrites its input, of which {_names(late)} reads a view"
    for node in over:
        if node.target not in fixed:
            _not_in_place(network, node)
    return fixed


def _not_in_place(network: Network, node: fx.Node) -> None:
    if node.op == "call_module":
        for module in network.module.get_submodule(str(node.target)).modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        return
    name = str(getattr(node.target, "__name__", node.target))
    if not name.endswith("_"):  # by an argument
        kind = sites.FUNCTIONS[function(node)][0]
        parameters = sites.KINDS[kind].read(*node.args, **node.kwargs).parameters
        node.args, node.kwargs = (node.all_input_nodes[0], *parameters), {}
    elif node.op == "call_method":
        node.target = name.removesuffix("_")
    else:
        plain = name.removesuffix("_")
        node.target = getattr(F, plain, None) or getattr(torch, plain)
