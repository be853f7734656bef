"""What each site of a network learns: decided from a run, and everything that it cannot is said.

`Learner` sees the inputs of every site while the network runs, and then gives each site its
`learns`: which numbers, how many of each, and along which axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating.conversion import learned_calls, sites
from threshold_gating.conversion.channels import HEADLESS, UNKNOWN, Channels
from threshold_gating.conversion.choices import Choices
from threshold_gating.conversion.config import GateConfig
from threshold_gating.conversion.lines import in_function
from threshold_gating.conversion.site import ConversionError, Site, site_name
from threshold_gating.conversion.text import some
from threshold_gating.conversion.watch import Visit, copied
from threshold_gating.instance import TG
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.attention import Temperature
from threshold_gating.nn.spec import (
    Elementwise,
    GateSpec,
    Share,
    Spec,
    found,
    gate_names,
    gates_of,
    group_of,
    learnable,
    learned,
    restart,
)
from threshold_gating.nn.unitwise import Units
from threshold_gating.taxonomy import TAXONOMY

# Sites that are no element-wise function and learn nothing, and why.
_FIXED = {
    "prelu": "PReLU has a weight of its own, which learns as it did",
    **dict.fromkeys(("maximum", "minimum"), "its threshold is data, the other input"),
    **{f"{k}_by_tensors": "its thresholds are data" for k in sites.KINDS if "clamp" in k},
    "rrelu": "in training it draws its slopes, and no gate is evaluated",
}


ATTENTION = {
    *("softmax", "softmin", "scaled_dot_product_attention", "multi_head_attention_forward"),
}
RECURRENT = {function.__name__ for function in rnn.FUNCTIONS}
_NO_THRESHOLD = "softmax has a temperature, tau, and thresholds that follow from its other logits"
# Of what is no element-wise function and has an element-wise gate.
_STARTS = {"glu": "silu"}


class CannotLearnError(ValueError):
    """Why a site learns nothing of what is asked of it."""


class Seen(NamedTuple):
    """What reached a site in one call: the shape of its input, the axis of its channels, and what
    else it takes to know its size (heads, the step of a recurrent call)."""

    shape: tuple[int, ...]
    axis: int | None
    size: Any = None


class Learner:
    """Decides what each site learns. `notes` say, after all sites, what some of them cannot."""

    def __init__(self, model: nn.Module, chosen: Choices) -> None:
        self.model, self.chosen = model, chosen
        self.channels = Channels(model)
        self.seen: dict[str, list[Seen]] = {}
        self.why: dict[str, list[str]] = {}  # sites by what they cannot
        self.sizes: dict[str, tuple[int, ...]] = {}  # of positions with gates of their own
        self.functions: set[str] = set()  # sites inside of a `torch.autograd.Function`
        self.learns = 0

    def see(self, visit: Visit) -> None:
        """Note what reaches a site."""
        if in_function():
            self.functions.add(visit.name)
        x = _input(visit)
        if isinstance(x, Tensor):
            axis = self.channels.axis(x)
            at = Seen(tuple(x.shape), axis, _size(visit, axis))
            self.seen.setdefault(visit.name, []).append(at)

    def decided(self, site: Site | None) -> Site | None:
        """The site with what it learns."""
        if site is None:
            return None
        config = self.chosen.config(site.name)
        if not config.train:
            return site
        try:
            spec, why = self._spec(site, config)
        except CannotLearnError as error:
            spec, why = None, str(error)
        if spec is None and self.chosen.names(site.name):
            raise ConversionError(
                f"{site.name} ({site.kind}) is to learn {', '.join(config.train)} and cannot: "
                f"{why}.",
                site.name,
            )
        if why:
            does = f"only {_listed(spec.learned)} learned" if spec else "nothing is learned"
            self.why.setdefault(f"{does}, because {why}", []).append(site.name)
        if isinstance(spec, GateSpec) and spec.share == "neuron":
            self.sizes[site.name] = spec.group
        self.learns += spec is not None
        return replace(site, learns=spec)

    @property
    def notes(self) -> Iterator[str]:
        """What some sites cannot, a sentence for each reason, and sizes that are fixed now."""
        for what, names in self.why.items():
            yield f"{some(names)}: {what}"
        if self.sizes:
            each = [f"{name} {size}" for name, size in self.sizes.items()]
            said = "where each position has a gate, inputs of another size are refused"
            yield f"{said}: {some(each)}"

    def _spec(self, site: Site, config: GateConfig) -> tuple[Spec | None, str]:
        if site.kind in _FIXED:
            raise CannotLearnError(_FIXED[site.kind])
        if site.name in self.functions:
            raise CannotLearnError("it is in an autograd.Function, whose backward knows no gates")
        if site.kind in ATTENTION:
            return self._temperature(site, config)
        if site.kind in RECURRENT:
            return self._units(site, config)
        t = site.t or TAXONOMY[_STARTS[site.kind]]
        names, why = learnable(t, config.train or ())
        if not names:
            raise CannotLearnError(why)
        group, axis = self._group(site, config)
        return GateSpec(t, names, _share(config), group, axis), why

    def _temperature(self, site: Site, config: GateConfig) -> tuple[Spec, str]:
        """One for each head where there are heads and not one for all is asked for."""
        if "tau" not in (config.train or ()):
            raise CannotLearnError(_NO_THRESHOLD)
        why = "" if config.train == ("tau",) else _NO_THRESHOLD
        if _share(config) == "layer":
            return Temperature(), why
        seen = self._one(site, [seen.size for seen in self._calls(site)], "heads")
        if seen is not None:
            return Temperature("head", (seen,)), why
        no_heads = (
            f"its input of shape {self._calls(site)[0].shape} shows no heads (batch, head, query, "
            "key), so there is one temperature for all of it"
        )
        if _share(config) == "head":
            raise CannotLearnError(f"{no_heads}: say share='layer' for it")
        return Temperature(), f"{why}; {no_heads}" if why else no_heads

    def _units(self, site: Site, config: GateConfig) -> tuple[Spec, str]:
        """Values for each gate of the step, and for each unit if it is not one for a layer."""
        if _share(config) == "head":
            raise CannotLearnError("it is recurrent and has units, not heads; say share='channel'")
        step = self._one(site, [seen.size for seen in self._calls(site)], "units and layers")
        able = [learnable(t, config.train or ()) for _, t in step.gates]
        names, why = next((each for each in able if each[1]), able[0])
        if not names:
            raise CannotLearnError(why)
        per_unit = _share(config) != "layer"
        group = (step.units,) if per_unit else (1,)
        share: Share = "channel" if per_unit else "layer"
        return Units(step.gates, names, step.layers, share, group), why

    def _calls(self, site: Site) -> list[Seen]:
        if site.name not in self.seen:
            raise CannotLearnError(
                "these inputs do not reach it, so that its channels are not known; give inputs "
                "that do, or share='layer'"
            )
        return self.seen[site.name]

    def _one(self, site: Site, each: list[Any], what: str) -> Any:
        """What all calls of a site in a run have in common."""
        if len(set(each)) > 1:
            shapes = " and ".join(str(seen.shape) for seen in dict.fromkeys(self._calls(site)))
            raise CannotLearnError(
                f"it is called with inputs of shapes {shapes} in one run, which have not the same "
                f"{what}; sites={{{site.name!r}: GateConfig(share='layer')}} has one gate for all"
            )
        return each[0]

    def _group(self, site: Site, config: GateConfig) -> tuple[tuple[int, ...], int]:
        """The shape of the sharing groups at a site, and where it lies in the input."""
        share = _share(config)
        if share == "layer":
            return (1,), 1
        if share == "head":
            raise CannotLearnError(
                f"it is element-wise and has no heads; share='head' is for attention, so give "
                f"sites={{{site.name!r}: GateConfig(share='channel')}}, or share='channel' for "
                "all, which gives attention a temperature for each head"
            )
        each = [_channels(site.name, share, config.axis, seen) for seen in self._calls(site)]
        group, axis = self._one(site, each, "channels")
        return group, axis


def _listed(names: tuple[str, ...]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last} are" if most else f"{last} is"


def _share(config: GateConfig) -> Any:
    return config.share or "layer"


def _input(visit: Visit) -> Any:
    """What the gates of a site read: its input, of a gated linear unit the second half."""
    if visit.kind == "glu" and visit.is_call:
        return sites.halves(*visit.args, **visit.kwargs)[1]
    if visit.is_call and visit.kind in sites.WHOLE:
        return (*visit.args, *visit.kwargs.values())[0]
    return visit.x


def _size(visit: Visit, axis: int | None) -> Any:
    if visit.is_call and visit.kind in ATTENTION:
        is_turned = axis == HEADLESS and visit.kind in ("softmax", "softmin")
        return None if is_turned else learned_calls.heads_of(visit.kind, visit.args, visit.kwargs)
    return learned_calls.step_of(visit.kind, visit.args) if visit.kind in RECURRENT else None


def _channels(name: str, share: str, axis: int | None, seen: Seen) -> tuple[tuple[int, ...], int]:
    """(group, axis) for one shape of inputs."""
    shape, dim = seen.shape, len(seen.shape)
    if share == "neuron" and axis is None:
        if dim < 2:
            raise CannotLearnError(f"its input of shape {shape} has no axis behind the batch")
        return shape[1:], 1
    at = _axis(name, shape, seen.axis) if axis is None else axis
    if not -dim <= at < dim:
        raise CannotLearnError(f"its input of shape {shape} has no axis {at}")
    if share == "neuron":
        return shape[at % dim :], at
    # from the end if a run says it: rows of a linear layer may have more axes in another run, and
    # images may come without a batch
    at = at - dim if axis is None or at == dim - 1 else at
    return (shape[at],), at


def _axis(name: str, shape: tuple[int, ...], known: int | None) -> int:
    """The axis of the channels: as a layer before says, or where they usually are."""
    dim = len(shape)
    if known is not None and known >= 0:
        return known
    if known is None and dim in (2, 4, 5):
        return 1
    before = (
        "no layer with weights is before it"
        if known in (None, UNKNOWN)
        else "what is between it and the last layer with weights is not known to keep the channels "
        "in one axis"
    )
    raise CannotLearnError(
        f"its input has the shape {shape}, and {before}, so that the axis of the channels is not "
        f"known; say it, as in sites={{{name!r}: GateConfig(axis=1)}}, or take share='layer'"
    )


def spec_to_dict(spec: Any) -> dict[str, Any]:
    """What is learned as JSON values, but for the instances that it starts from."""
    alike = spec.share in ("net", "layer")
    channels = None if alike else list(spec.group) if spec.share == "neuron" else spec.group[0]
    train, layers = list(spec.learned), {"layers": spec.layers} if isinstance(spec, Units) else {}
    return {"share": spec.share, "channels": channels, "axis": spec.axis, "train": train, **layers}


def config_of(t: TG | None, spec: Any) -> GateConfig:
    """The config of a site that starts as `t` and learns what `spec` says, which may be nothing."""
    if spec is None or not spec.learned:
        return GateConfig(t)
    found = isinstance(spec, Elementwise) and spec.share != "layer"  # where the run showed an axis
    return GateConfig(t, spec.learned, spec.share, spec.axis if found else None)


def elementwise_of_dict(t: TG, data: Mapping[str, Any]) -> GateSpec:
    """The gate that `spec_to_dict` has described, with the instance that it starts from."""
    group = group_of(data["share"], data["channels"])
    return GateSpec(t, learned(t, data["train"]), data["share"], group, data["axis"])


def spec_of_dict(kind: str, t: TG | None, data: Mapping[str, Any]) -> Spec:
    """What a call of this kind learns, as `spec_to_dict` has described it."""
    shared = data["share"], group_of(data["share"], data["channels"]), data["axis"]
    if kind in ATTENTION and t is None:
        if data["train"] != ["tau"]:
            raise ValueError(f"{kind} learns tau; got {data['train']}.")
        return Temperature(*shared)
    if kind in RECURRENT and t is None:
        gates = tuple(rnn.SITES[kind.removesuffix("_cell")].items())
        names = learned(gates[0][1], data["train"])
        layers = data["layers"]
        if type(layers) is not int or layers < 1:
            raise ValueError(f"'layers' has to be a whole number from 1 on; got {layers!r:.40}.")
        return Units(gates, names, layers, *shared)
    if t is None and kind not in _STARTS:
        raise ValueError(f"calls of the kind {kind!r} learn nothing.")
    return elementwise_of_dict(t or TAXONOMY[_STARTS[kind]], data)


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the gates of a network by their dotted names: those of `Activation`s and
    those that modules hold for the calls they make. Not those of LSTM and GRU of this library, nor
    of the tiers below A (`training.gate_parameters` has these, too)."""
    found: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name in gate_names(module, "parameter"):
            p = module._parameters.get(name)
            if p is not None:
                found[f"{path}.{name}" if path else name] = p
    return found


def learned_gates(model: nn.Module) -> Iterator[tuple[str, Activation]]:
    """The element-wise gates of a network that learn, by the names of their sites.

    One that is no module of its own is given as an `Activation` around the same tensors, so that
    its `values`, `instances` and in-place changes are those of the network.
    """
    for path, module in model.named_modules():
        for prefix, spec in gates_of(module).items():
            if spec.learned and isinstance(spec, Elementwise):
                yield site_name(path, prefix), view(module, prefix, spec)


def moved(model: nn.Module, *, own: bool = False) -> dict[str, dict[str, float]]:
    """How far what is learned at each site of a converted network is from its start, by name; with
    `own`, of the gates, too, that the network had before it was converted."""
    found = {}
    for path, module in model.named_modules():
        site = vars(module).get("site")
        if isinstance(module, Activation) and (site is None or site.learns is None) and not own:
            continue
        for prefix, spec in gates_of(module).items():
            if spec.learned:
                found[site_name(path, prefix)] = spec.moved(module, prefix)
    return found


@torch.no_grad()
def started(model: nn.Module, converted: nn.Module) -> nn.Module:
    """A copy of a network that learned, with the tensors of `model` and gates at their start."""
    new = copied(converted)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, t in (*new.named_parameters(), *new.named_buffers()):
        if name in own and own[name].shape == t.shape:
            t.copy_(own[name])
    for module in new.modules():
        site = vars(module).get("site")
        if not isinstance(module, Activation) or (site is not None and site.learns is not None):
            restart(module)
    return new


def as_at_start(gate: nn.Module, alone: bool = False) -> nn.Module:
    """A gate of a converted network, a module, as it was before it learned anything; `alone`, as
    one for all channels, so that it takes any shape."""
    site = vars(gate).get("site")
    if not isinstance(gate, Activation) or site is None or site.learns is None:
        return gate
    spec: Elementwise = GateSpec(gate.init, gate.learned) if alone else gate
    device, dtype = gate.theta0.device, gate.theta0.dtype
    new = type(gate).of(spec, {name: spec.start(name, device, dtype) for name in spec.roles()})
    vars(new).update({k: v for k, v in vars(gate).items() if k in ("argument", "inplace")})
    return new


def view(
    module: nn.Module, prefix: str, spec: Elementwise, kind: type[Activation] = Activation
) -> Activation:
    """A gate that a module holds, as an `Activation` around the same tensors."""
    if isinstance(module, Activation):
        return module
    return kind.of(spec, {name: found(module, prefix + name) for name in spec.roles()})
