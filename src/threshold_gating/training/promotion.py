"""Moves of networks between the tiers of Table 1: `promote`, `demote`, `half_transfer`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from threshold_gating import taxonomy
from threshold_gating.conversion.gate import is_inplace
from threshold_gating.conversion.intercept import follow, unshare
from threshold_gating.conversion.watch import copied
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.dense import TIERED
from threshold_gating.nn.tying import SHARES, Tier, TierShare, share_of
from threshold_gating.training.closeness import (
    LayerError,
    Promotion,
    difference,
    expect_same,
    measuring,
)
from threshold_gating.training.following import Follow, Remember, Take, forget, keep_input
from threshold_gating.training.graph import expect_axes, hooked_as, is_hooked, put
from threshold_gating.training.paths import (
    Fed,
    Paths,
    Source,
    find_paths,
    is_transposed,
    shared_parameters,
)
from threshold_gating.training.tiers import ORDER, is_tiered, lifted, projected

Model = TypeVar("Model", bound=nn.Module)  # what comes out is of the class that went in


def promote(
    model: Model,
    tier: Tier = "W",
    share: TierShare | None = None,
    *,
    inputs: Any = None,
    train: Iterable[str] | None = None,
    gates: TG | str | None = None,
) -> Model:
    """A copy of a trained network in a higher tier that computes the same.

    Every linear layer or convolution that an activation feeds becomes a layer of `dense`, with
    the activation as its gates and the weights W_k = s_k W. What else reads the activation (a
    residual sum, a pooling) goes on reading it. So does a layer behind a product, as in SwiGLU:
    `down(silu(gate) * up)`. A network in tier W goes on to S, then general.

    "The same" is to rounding where the instance of the activation is exact, and within `bound` of
    each layer where it is not, as for GELU: see `Promotion`, the attribute `promotion` of what is
    returned.

    Args:
        model: a plain or converted network; it is left as it was.
        tier, share, train: as in `dense.Linear`.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments to run the network on:
            so it is found which activation feeds which layer. Another run that takes another path
            computes the same as well, or raises `PromotionError`. A network that has tiers already
            needs none.
        gates: other gates than the activation's (see `half_transfer`); the function then changes.
    """
    _check(model, tier, share)
    if any(is_tiered(m) for m in model.modules()):
        return _lift_all(model, tier, share, inputs)
    if inputs is None:
        raise ValueError(
            "promote: inputs is needed, because the network is followed by running it: a tensor, a "
            "tuple of arguments or a dict of keyword arguments, as in promote(model, inputs=x)."
        )
    new = copied(model)
    unshare(new)
    paths = find_paths(new, inputs)
    chosen, kept = _chosen(new, paths)
    layers = {}
    for name, feeds in list(chosen.items()):
        try:
            layers[name] = _layer(new, name, feeds, tier, share, train, gates)
        except _UnlikeError as error:
            kept[name] = str(error)
            del chosen[name]
    _check_any(model, chosen, kept)
    dense = {name: new.get_submodule(name) for name in chosen}
    for name, feeds in chosen.items():
        _replace(new, name, layers[name], feeds)
    _freeze_idle(paths, chosen)
    new.register_forward_hook(forget)
    errors: dict[str, LayerError] = {}
    with measuring(new, dense, chosen, errors, changed=gates is not None):
        output = difference(model, new, inputs)
    if gates is None and not any(error.sup for error in errors.values()):
        expect_same(model, inputs, output)
    in_order = {name: errors[name] for name in chosen}
    return _reported(new, Promotion(tuple(chosen), kept, in_order, output))


def _check_any(model: nn.Module, chosen: Collection[str], kept: dict[str, str]) -> None:
    """Refuse a network of which no layer can be promoted, and say of each why."""
    if not chosen:
        reasons = "; ".join(f"{name or '(network)'}: {why}" for name, why in kept.items())
        raise ValueError(
            f"promote: no layer of {type(model).__name__} can be promoted: "
            f"{reasons or 'it has no linear layer or convolution and no activation'}."
        )


def _freeze_idle(paths: Paths, chosen: Collection[str]) -> None:
    """Learned gates that promoted layers alone read learn there: here they have no gradient."""
    idle: dict[Activation, bool] = {}
    for name, source in paths.sources.items():
        if source.learned is not None:
            fed = paths.fed.get(name, {})
            alone = bool(fed) and fed.keys() <= set(chosen) and name not in paths.readers
            idle[source.learned] = idle.get(source.learned, True) and alone
    for act, is_idle in idle.items():
        if is_idle:
            act.requires_grad_(False)


def _chosen(model: nn.Module, paths: Paths) -> tuple[dict[str, list[Fed]], dict[str, str]]:
    """The layers to promote with their calls, and why others are not, by name."""
    chosen: dict[str, list[Fed]] = {}
    kept: dict[str, str] = {}
    shared = set(shared_parameters(model))
    for name, feeds in paths.calls.items():
        why = _obstacle(model.get_submodule(name), feeds)
        if why is None and (name in shared or name in paths.read):
            why = "has parameters that are read elsewhere too"
        if why is None and any(f.trail and paths.is_ambiguous(f.trail.source) for f in feeds):
            why = "reads one of several calls of one kind that have unlike instances"
        if why is None:
            chosen[name] = feeds
        else:
            kept[name] = why
    for name in paths.sources:
        if name not in paths.fed:
            readers = ", ".join(paths.readers.get(name, {})) or "nothing"
            kept[name] = f"feeds no layer but {readers}"
    return chosen, {**kept, **paths.kept}


def _check(model: Any, tier: Any, share: Any) -> None:
    """Arguments that no network could be promoted with, before any is looked at."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"promote: model must be a torch.nn.Module; got {model!r:.60}.")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "promote: weights that are made in torch.inference_mode() cannot be trained; promote "
            "the network outside of it."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"promote: {name or 'the network'} is compiled or scripted, and its inside cannot "
                "be changed; promote the network that it was made from, and compile the result."
            )
    near = {name.lower(): name for name in SHARES}.get(
        tier.lower() if isinstance(tier, str) else ""
    )
    if near is not None and near != tier:
        raise ValueError(f"promote: no tier {tier!r}; did you mean {near!r}?")
    share_of("promote", tier, share)


def half_transfer(
    model: Model, gates: TG | str = "silu", share: TierShare = "channel", *, inputs: Any = None
) -> Model:
    """Weights from a trained network, gates from scratch: the paper's start of tier W.

    It does not compute what `model` does: a ReLU network becomes a SiLU network (each activation
    moves by up to 0.278). To keep the function, `promote` it and make its gates soft by training.
    """
    return promote(model, "W", share, inputs=inputs, gates=gates)


def _reported(model: Model, promotion: Promotion) -> Model:
    vars(model)["promotion"] = promotion
    return model


def _lift_all(model: Model, tier: str, share: str | None, inputs: Any) -> Model:
    new = copied(model)
    done = []
    for name, module in list(new.named_modules()):
        if is_tiered(module):
            new = cast(Model, put(new, module, hooked_as(lifted(module, tier, share), module)))
            done.append(name)
    output = None if inputs is None else difference(model, new, inputs)
    return _reported(new, Promotion(tuple(done), {}, {}, output))


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
    """Project every tiered layer of a network to a lower tier; `model` is left as it was.

    In tier A a layer is an `Activation` and a layer of torch, in the place where it was. `inputs`
    are a tensor, a tuple of arguments or a dict of keyword arguments to measure the difference on.
    """
    if tier not in ORDER[:-1]:
        raise ValueError(f"demote: tier must be one of {', '.join(ORDER[:-1])}; got {tier!r}.")
    new, lost = copied(model), {}
    for name, module in list(new.named_modules()):
        if is_tiered(module) and ORDER.index(vars(module)["tier"]) > ORDER.index(tier):
            lower, lost[name] = projected(module, tier)
            new = put(new, module, lower if lower is module else hooked_as(lower, module))
    if not lost:
        raise ValueError(f"demote: {type(model).__name__} has no layer above tier {tier}.")
    return Demotion(new, lost, None if inputs is None else difference(model, new, inputs))


def _obstacle(layer: Any, feeds: list[Fed]) -> str | None:
    """Why a layer cannot take in the activation before it, or None."""
    trails = [fed.trail for fed in feeds if fed.trail is not None]
    if not feeds:
        return "is not called with these inputs"
    if not trails:
        return "reads no activation"
    acts = dict.fromkeys(trail.source.act for trail in trails)
    if len(trails) < len(feeds) or len(acts) > 1:
        others = [] if len(trails) == len(feeds) else ["what is no activation"]
        return f"is called {len(feeds)} times, on {' and '.join([*acts, *others])}"
    if any(trail.is_overwritten for trail in trails):
        return "reads an activation that is overwritten on the way, or its input is"
    if is_hooked(layer) or "forward" in vars(layer):
        return "has hooks"
    source = trails[0].source
    t, learned = source.t, source.learned
    if t.K < 2 or t.q is not None or t.clamp is not None:
        name = taxonomy.name_of(t) or repr(t)
        return f"reads {name}, which is not a plain blend of two or more affine branches"
    if learned is None or learned.share in ("net", "layer"):
        return None
    width = layer.weight.shape[0 if is_transposed(layer) else 1] * getattr(layer, "groups", 1)
    axes = (1, 1 - layer.weight.dim())  # from the end: of a convolution, before its positions
    along = learned.axis in axes and learned.group == (width,)
    if learned.share == "neuron" or any(trail.is_moved for trail in trails) or not along:
        return "reads gates that differ by position or were moved on the way"
    return None


def _layer(
    model: nn.Module,
    name: str,
    feeds: list[Fed],
    tier: str,
    share: str | None,
    train: Iterable[str] | None,
    gates: TG | str | None,
) -> Any:
    """The tiered layer for the place of a dense one, with what it reads."""
    original = model.get_submodule(name)
    old: Any = _straight(original)
    (source, *_) = [fed.trail.source for fed in feeds if fed.trail is not None]
    size = feeds[0].sizes[2:] if share == "neuron" and old.weight.dim() > 2 else ()
    first = share or "channel" if tier == "W" else "channel"  # on the way to `tier`
    new = TIERED[type(old)].from_dense(old, source.t, tier="W", share=first, train=train, size=size)
    learned = source.learned
    if learned is not None:
        _carry(new, old.weight, learned)
    if gates is not None:
        _regate(new, gates)
    if tier != "W":
        new = lifted(new, tier, share)
    own = learned is not None and learned.share not in ("net", "layer")
    if own and learned is not None and learned.axis != -1:
        expect_axes(new, old.weight.dim())
    take = Take(name, source.act, moved=not own)  # after which no other hook runs
    new.register_forward_pre_hook(take, with_kwargs=True)
    new.weight.requires_grad_(old.weight.requires_grad)
    return new.train(original.training)


def _replace(model: nn.Module, name: str, layer: nn.Module, feeds: list[Fed]) -> None:
    """Put a tiered layer where the dense one is, and let its activation say what it reads."""
    put(model, model.get_submodule(name), layer)
    for fed in feeds:
        assert fed.trail is not None
        assert fed.around is not None
        _mark(fed.trail.source)
        _follow(fed.around).always |= fed.trail.is_followed


def _straight(layer: Any) -> Any:
    """A layer of torch as it is; of GPT-2's `Conv1D` the linear layer that it is."""
    if not is_transposed(layer):
        return layer
    inputs, outputs = layer.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta", dtype=layer.weight.dtype)
    linear.weight = nn.Parameter(
        layer.weight.detach().t().contiguous(), requires_grad=layer.weight.requires_grad
    )
    linear.bias = layer.bias
    return linear.train(layer.training)


def _mark(source: Source) -> None:
    """Let an activation mark its results with its inputs."""
    if source.module is None:
        assert source.owner is not None
        _follow(source.owner).calls[source.call] = source.act
    elif not any(isinstance(h, Remember) for h in source.module._forward_hooks.values()):
        if is_inplace(source.module):
            source.module.register_forward_pre_hook(keep_input, with_kwargs=True)
        hook = Remember(source.act)
        source.module.register_forward_hook(hook, prepend=True, with_kwargs=True)


def _follow(module: nn.Module) -> Follow:
    """What runs the forward of a module in which marks are made or go along."""
    if "tg_follow" not in vars(module):
        follow(module, Follow())
    found: Follow = vars(module)["tg_follow"]
    return found


class _UnlikeError(ValueError):
    """Learned branches that tier W has not."""


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
            raise _UnlikeError(
                "reads gates of which a branch has learned a slope in some channels, or lost it; "
                "the branches of tier W are alike in all channels"
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
    gate = Activation(record, share=own.share, channels=channels, train=train)
    new.gate = gate.to(own.theta0.device, own.theta0.dtype)


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
