"""Every gate of a network as it is now, learned or frozen, by the name of its site.

What is learned comes from `training.telemetry`; here the frozen gates are added, and the gates of a
saved network, which are read from its folder without the network.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from threshold_gating.conversion import sites
from threshold_gating.conversion.answering import LEAVE
from threshold_gating.conversion.checkpoint import save_load, schema
from threshold_gating.conversion.checkpoint.digest import whole
from threshold_gating.conversion.gate import PerCall
from threshold_gating.conversion.learn import ATTENTION, RECURRENT
from threshold_gating.conversion.site import Site, prefix_of_call
from threshold_gating.instance import TG
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.attention import Temperature
from threshold_gating.nn.spec import Elementwise, Spec, attach
from threshold_gating.taxonomy import TAXONOMY
from threshold_gating.training.telemetry import LearnedSite, learned_sites, site_of
from threshold_gating.training.tiers import is_tiered

# The family of a gate that is no function of one number: its thresholds are read, and what its
# branches do is not.
IN_WEIGHTS, TWO_INPUTS = "in the weights", "of two inputs"
# Why the gates of a call are not read.
DATA = "its threshold is data"
_IN_A_RUN = "its gates show in a run"
_AS_THEY_COME = "calls of torch in it are answered as they come, and show in a run"
# And what shows them.
_GIVE = "give inputs, as in read(model, x)"
_LOAD = f"load the network with tg.load, and {_GIVE}"


def name_of(path: str, module: nn.Module) -> str:
    """The name of a module that is a site; the network itself has its class's."""
    return path or type(module).__name__.lower()


def gate_sites(model: nn.Module) -> dict[str, LearnedSite]:
    """Every gate of a network, also one that no run reaches."""
    found = {site.name: site for site in learned_sites(model)}
    for path, module in model.named_modules():
        for site in _frozen(name_of(path, module), module):
            found.setdefault(site.name, site)
    return found


def unopened(model: nn.Module, known: Collection[str]) -> dict[str, str]:
    """Calls of torch whose gates only a run shows, as those of attention, each with the reason.

    A call is left out if it, or a gate inside of it, is among the names that are `known`.
    """
    found: dict[str, str] = {}
    seen = {name.rpartition(".")[0] for name in known} | set(known)
    for path, module in model.named_modules():
        plan = vars(module).get("tg_sites", {})
        if plan is None:
            found[name_of(path, module)] = f"{_AS_THEY_COME}; {_GIVE}"
        for call, site in (plan or {}).items():
            name = _of_plan(path, call, name_of(path, module))
            if name not in seen:
                found[name] = _closed(site, _GIVE)
    return found


def _of_plan(path: str, call: str, name: str) -> str:
    """The name of the site that a plan of the module at `path` means by `call`."""
    return name if call == LEAVE else f"{path}:{call}"


def _closed(site: Site | None, way_out: str) -> str:
    """Why the gates of a call are not known from its plan, and what shows them, if anything."""
    if site is None:
        return "it is left to torch"
    shows = site.kind in ATTENTION or site.kind in RECURRENT or site.kind == "prelu"
    return f"{_IN_A_RUN}; {way_out}" if shows else f"{site.kind}: {DATA}"


def behind_weights(model: nn.Module) -> set[str]:
    """The sites inside of layers of tier W, S and general, whose branches are in the weights."""
    return {f"{path}.gate".removeprefix(".") for path, m in model.named_modules() if is_tiered(m)}


def no_function(name: str, weighted: Collection[str]) -> str:
    """Which family of these a gate is of; "" for one that is a function of one number."""
    if ":glu#" in name:
        return TWO_INPUTS
    return IN_WEIGHTS if name in weighted else ""


def frozen(name: str, t: TG) -> LearnedSite:
    """A gate that learns nothing."""
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    return LearnedSite(name, (), t, taus, t.theta, t.s, t.c)


def glu(name: str) -> LearnedSite:
    """The gate of a gated linear unit that learns nothing: SiLU's, over another input."""
    return frozen(name, TAXONOMY["silu"])


def prelu(name: str, weight: Tensor) -> LearnedSite:
    """PReLU with its slopes."""
    slopes = whole(weight).detach().flatten()
    share = "channel" if len(slopes) > 1 else "layer"
    numbers = [math.inf], [0.0], [slopes, 1.0], [0.0, 0.0]
    start = sites.KINDS["leaky_relu"].make(0.25)
    return LearnedSite(name, ("s",), start, *numbers, share, (len(slopes),))


def recurrent(name: str, kind: str, layers: int) -> Iterator[LearnedSite]:
    """The gates of a frozen recurrent call, those of its k-th layer (or direction) marked _k."""
    for k in range(layers):
        for gate, t in rnn.SITES[kind.removesuffix("_cell")].items():
            yield frozen(f"{name}.{gate}_{k}", t)


def suffixes(layer: nn.Module) -> list[str]:
    """What marks each layer and direction of a recurrent module: _l0, _l0_reverse, ..; "" of a
    cell, which is one step."""
    if not isinstance(layer, nn.RNNBase):
        return [""]
    return [names[0].removeprefix("weight_ih") for names in layer._all_weights]


def _frozen(name: str, module: Any) -> Iterator[LearnedSite]:
    """The frozen gates that a module is or holds; learned ones may be among them."""
    if isinstance(module, PerCall):
        for k, gate in enumerate(module.calls):
            if isinstance(gate, Activation):
                yield site_of(f"{name}#{k}" if k else name, gate)
    elif isinstance(module, Activation):
        yield site_of(name, module)
    elif isinstance(module, rnn._Gated):
        for suffix in suffixes(module):
            for part, t in module.gates.items():
                yield frozen(f"{name}.{part}{suffix}", t)
    for site in (vars(module).get("tg_sites") or {}).values():
        if site is not None:
            yield from _of_call(site, module)


def _of_call(site: Site, owner: Any) -> Iterator[LearnedSite]:
    """The frozen gates of a call that the module `owner` makes, as far as it shows them."""
    if site.t is not None:
        yield frozen(site.name, site.t)
    elif site.kind == "glu":
        yield glu(site.name)
    elif site.kind == "prelu" and isinstance(owner, nn.PReLU):
        yield prelu(site.name, owner.weight)
    elif site.kind in RECURRENT and isinstance(owner, nn.RNNBase):
        yield from recurrent(site.name, site.kind, len(owner._all_weights))
    elif site.kind.endswith("_cell"):
        yield from recurrent(site.name, site.kind, 1)


class Saved(NamedTuple):
    """What a folder says of a network: its class, its gates, those whose branches are in weights,
    and those that need the network."""

    model: str
    sites: dict[str, LearnedSite]
    weighted: set[str]
    unread: dict[str, str]


def saved_sites(folder: str | Path) -> Saved:
    """The gates of a saved network, read from its folder, which is checked to be whole."""
    saved, _, tensors = save_load.read(Path(folder), strict=True)
    model = saved.model.rpartition(".")[2]
    found: dict[str, LearnedSite] = {}
    unread: dict[str, str] = {}
    for entry in saved.modules:
        found |= _saved_module(entry.names[0] or model.lower(), entry, tensors)
    for entry in saved.owners:
        path, owner = entry.names[0], entry.names[0] or model.lower()
        if entry.holds is None:
            unread[owner] = f"{_AS_THEY_COME}; {_LOAD}"
        for call, site in (entry.holds or {}).items():
            name = _of_plan(path, call, owner)
            gates = {} if site is None else _saved_call(name, site, path, tensors)
            unread |= {} if gates else {name: _closed(site, _LOAD)}
            found |= gates
    for entry in saved.recurrent:
        name, own = entry.names[0] or model.lower(), _under(tensors, entry.names[0], "")
        if any(key.startswith("gate_") for key in own):
            unread[name] = "a recurrent layer with learned gates; read the network, not its folder"
            continue
        gates = {
            at: frozen(at, t)
            for mark in _marks(own)
            for gate, t in entry.holds.items()
            for at in [f"{name}.{gate}{mark}"]
        }
        unread |= {} if gates else {name: f"{_IN_A_RUN}; {_LOAD}"}
        found |= gates
    return Saved(model, found, {name for name in found if _is_of_a_tier(found[name])}, unread)


def _saved_module(
    name: str, entry: schema.Entry, tensors: Mapping[str, Tensor]
) -> dict[str, LearnedSite]:
    """The gates of a module that is a site, one for each of its calls."""
    found: dict[str, LearnedSite] = {}
    for k, (site, make) in enumerate(entry.holds):
        if site is not None:
            prefix = prefix_of_call(k) if len(entry.holds) > 1 else ""
            own = _under(tensors, entry.names[0], prefix)
            found |= _with_tensors(f"{name}#{k}" if k else name, schema.spec(site, make), own)
    return found


def _saved_call(
    name: str, site: Site, path: str, tensors: Mapping[str, Tensor]
) -> dict[str, LearnedSite]:
    """The gates of a call of the module `path`; none where its tensors do not show them."""
    if site.learns is not None:
        return _with_tensors(name, site.learns, _under(tensors, path, site.prefix))
    own = _under(tensors, path, "")
    each: Iterable[LearnedSite] = ()
    if site.t is not None:
        each = [frozen(name, site.t)]
    elif site.kind == "glu":
        each = [glu(name)]
    elif site.kind == "prelu" and set(own) == {"weight"}:
        each = [prelu(name, own["weight"])]
    elif site.kind in RECURRENT:
        layers = 1 if site.kind.endswith("_cell") else len(_marks(own))
        each = recurrent(name, site.kind, layers)
    return {gate.name: gate for gate in each}


def _marks(own: Mapping[str, Tensor]) -> list[str]:
    """What `suffixes` gives of a recurrent module, by its tensors; nothing without its weights."""
    return [key.removeprefix("weight_ih") for key in own if key.startswith("weight_ih")]


def _is_of_a_tier(site: LearnedSite) -> bool:
    """Whether every branch is the identity, as of the gates in a layer whose branches are weights:
    no folder says of which class a layer is."""
    t = site.start
    is_part = site.name.rpartition(".")[2] == "gate"
    return is_part and t is not None and t.K > 1 and {*t.s} == {1.0} and {*t.c} == {0.0}


def _under(tensors: Mapping[str, Tensor], path: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of one gate by their own names."""
    at = f"{path}.{prefix}" if path else prefix
    return {k.removeprefix(at): t for k, t in tensors.items() if k.startswith(at)}


def _with_tensors(name: str, spec: Spec, own: Mapping[str, Tensor]) -> dict[str, LearnedSite]:
    """A gate with its saved tensors, as the network would hold them; by its name, or names."""
    holder = nn.Module()
    attach(holder, "", spec)
    for key, value in own.items():
        if key in spec.roles():
            getattr(holder, key).data = value
    if isinstance(spec, Elementwise):
        held = {**holder._parameters, **holder._buffers}
        return {name: site_of(name, Activation.of(spec, held))}  # type: ignore[arg-type]
    if isinstance(spec, Temperature):
        tau = spec.tau(holder, "", None).detach().flatten()
        return {name: LearnedSite(name, spec.learned, None, [tau], (), (), (), spec.share)}
    vars(holder)["tg_gates"] = {"": spec}
    found = {}
    for site in learned_sites(holder):
        at = f"{name}.{site.name.rpartition('.')[2]}"
        found[at] = site._replace(name=at)
    return found
