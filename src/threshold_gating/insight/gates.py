"""Every gate of a network as it is now, learned or frozen, by the name of its site.

What is learned comes from `training.telemetry`; here the frozen gates are added, and the gates of a
saved network, which are read from its folder without the network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from threshold_gating.conversion.checkpoint import save_load, schema
from threshold_gating.conversion.gate import PerCall
from threshold_gating.conversion.learn import RECURRENT
from threshold_gating.conversion.site import Site, prefix_of_call
from threshold_gating.instance import TG
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.attention import Temperature
from threshold_gating.nn.spec import Elementwise, Spec, attach
from threshold_gating.training.telemetry import LearnedSite, learned_sites, site_of
from threshold_gating.training.tiers import is_tiered


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
    plans = (vars(module).get("tg_sites") or {} for module in model.modules())
    names = [site.name for plan in plans for site in plan.values() if site is not None]
    seen = {name.rpartition(".")[0] for name in known} | set(known)
    why = "its gates show in a run; give inputs, as in read(model, x)"
    return {name: why for name in names if name not in seen}


def behind_weights(model: nn.Module) -> set[str]:
    """The sites inside of layers of tier W, S and general, whose branches are in the weights."""
    each = {name_of(path, m) for path, m in model.named_modules() if is_tiered(m)}
    return {f"{name}.gate" for name in each}


def frozen(name: str, t: TG) -> LearnedSite:
    """A gate that learns nothing."""
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    return LearnedSite(name, (), t, taus, t.theta, t.s, t.c)


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
        if site is not None and site.t is not None:
            yield frozen(site.name, site.t)
        elif site is not None and site.kind in RECURRENT:
            if isinstance(module, nn.RNNBase):
                yield from recurrent(site.name, site.kind, len(module._all_weights))
            elif site.kind.endswith("_cell"):
                yield from recurrent(site.name, site.kind, 1)


class Saved(NamedTuple):
    """What a folder says of a network: its class, its gates, and those that need the network."""

    model: str
    sites: dict[str, LearnedSite]
    unread: dict[str, str]


def saved_sites(folder: str | Path) -> Saved:
    """The gates of a saved network, read from its folder, which is checked to be whole."""
    saved, _, tensors = save_load.read(Path(folder), strict=True)
    model = saved.model.rpartition(".")[2]
    found: dict[str, LearnedSite] = {}
    unread: dict[str, str] = {}
    for entry in saved.modules:
        for k, (site, make) in enumerate(entry.holds):
            name = entry.names[0] or model.lower()
            name = f"{name}#{k}" if k else name
            if site is not None:
                prefix = prefix_of_call(k) if len(entry.holds) > 1 else ""
                own = _under(tensors, entry.names[0], prefix)
                found |= _with_tensors(name, schema.spec(site, make), own)
    for entry in saved.owners:
        for call, site in (entry.holds or {}).items():
            if site is not None:
                own = _under(tensors, entry.names[0], site.prefix)
                found |= _of_call(f"{entry.names[0]}:{call}", site, own)
    for entry in saved.recurrent:
        name = entry.names[0] or model.lower()
        if _under(tensors, entry.names[0], "gate_"):
            unread[name] = "a recurrent layer with learned gates; read the network, not its folder"
            continue
        for gate, t in entry.holds.items():
            found[f"{name}.{gate}"] = frozen(f"{name}.{gate}", t)
    return Saved(model, found, unread)


def _under(tensors: Mapping[str, Tensor], path: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of one gate by their own names."""
    at = f"{path}.{prefix}" if path else prefix
    return {k.removeprefix(at): t for k, t in tensors.items() if k.startswith(at)}


def _of_call(name: str, site: Site, own: Mapping[str, Tensor]) -> dict[str, LearnedSite]:
    if site.learns is not None:
        return _with_tensors(name, site.learns, own)
    return {} if site.t is None else {name: frozen(name, site.t)}


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
