"""`tg_config.json`: what a network says of its gates, and the records it is read back into."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from threshold_gating import kernels, recurrent, sites
from threshold_gating._version import __version__
from threshold_gating.conversion.files import CONFIG, CheckpointError
from threshold_gating.conversion.plan import Site
from threshold_gating.conversion.rewrite import PerCall
from threshold_gating.instance import TG
from threshold_gating.layers import Activation

SCHEMA = 1
STRUCTURE = ("modules", "owners", "recurrent")
_AS_THEY_COME = "as they come"


class Entry(NamedTuple):
    """A module on record, under all its names, and what it holds.

    Of a module that is a site: (site, how its Activation is made) for each of its calls. Of an
    owner: the plan of its calls, None for "as they come". Of a recurrent layer: its gates.
    """

    names: tuple[str, ...]
    holds: Any


@dataclass(frozen=True)
class Checkpoint:
    """What a saved network says of itself; `sites` has what stands at each site.

    Where a gate is learned its `t` is the start; what was learned since is in the tensors.
    """

    directory: Path
    model: str
    version: str
    torch: str
    gates_only: bool
    weights: Mapping[str, Any] | None  # file, bytes, sha256
    trainable: tuple[str, ...]
    aliases: Mapping[str, str]
    modules: tuple[Entry, ...]
    owners: tuple[Entry, ...]
    recurrent: tuple[Entry, ...]
    structure: Mapping[str, Any]  # these three as they are written

    @property
    def sites(self) -> dict[str, Site]:
        """The sites by name; calls that are answered as they come have none."""
        found = [site for entry in self.modules for site, _ in entry.holds]
        found += [site for entry in self.owners for site in (entry.holds or {}).values()]
        return {site.name: site for site in found if site is not None}


def describe(model: nn.Module) -> dict[str, Any]:
    """The config of a network, all but what it says of files."""
    return {
        "schema": SCHEMA,
        "threshold_gating": __version__,
        "torch": str(torch.__version__),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "trainable": [name for name, p in gate_parameters(model) if p.requires_grad],
        **structure(model),
    }


def structure(model: nn.Module) -> dict[str, Any]:
    """Where a network has gates and which, as JSON values."""
    found: dict[str, list[Any]] = {kind: [] for kind in STRUCTURE}
    inside: set[nn.Module] = set()
    for module, (name, *also) in names_of(model).items():
        where = {"name": name, "also": also}
        if isinstance(module, Activation | PerCall) and module not in inside:
            acts: list[Any] = list(module.calls) if isinstance(module, PerCall) else [module]
            inside.update(acts)
            calls = [
                {**_site_to_json(_site(act, name)), "activation": make_of(act)} for act in acts
            ]
            found["modules"].append({**where, "calls": calls})
        elif isinstance(module, recurrent._Gated):
            gates = {gate: _plain(t.to_dict()) for gate, t in module.gates.items()}
            found["recurrent"].append({**where, "gates": gates})
        if "tg_sites" in vars(module):
            plan = vars(module)["tg_sites"]
            answers = {call: site and _site_to_json(site) for call, site in (plan or {}).items()}
            answered = _AS_THEY_COME if plan is None else answers
            found["owners"].append({**where, "calls": answered})
    return found


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module, the first one first."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def activations(model: nn.Module) -> Iterator[tuple[str, Activation]]:
    """(prefix of its keys, activation) for each."""
    for name, module in model.named_modules():
        if isinstance(module, Activation):
            yield (f"{name}." if name else ""), module


def gate_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The learned parameters of the gates by their keys."""
    for prefix, act in activations(model):
        yield from ((prefix + name, p) for name, p in act.named_parameters())


def _site(act: Activation, name: str) -> Site:
    """The site of an activation; one that replaced nothing is exactly what it is."""
    site = vars(act).get("site") or Site(name, act.name or "activation")
    return replace(site, t=act.init)


def make_of(act: Activation) -> dict[str, Any]:
    """How to make an activation again, but for its instance and what it has learned."""
    channels = {"channel": act.group[0], "neuron": list(act.group)}.get(act.share)
    dtype = str(act.theta0.dtype).removeprefix("torch.")
    make = {"share": act.share, "channels": channels, "axis": act.axis, "dtype": dtype}
    return {**make, "train": list(act.learned)}


def activation(site: Site, make: Mapping[str, Any], device: torch.device) -> Activation:
    """The activation of a site, made as it was."""
    if site.t is None or make["dtype"] not in ("float32", "float64"):
        raise ValueError(f"there is no activation of {site.t} in {make['dtype']}.")
    options = {k: make[k] for k in ("share", "channels", "axis", "train")}
    return Activation(site.t, **options, device=device).to(getattr(torch, make["dtype"]))


def _plain(v: Any) -> Any:
    """As JSON has it, which knows lists and no infinity."""
    if isinstance(v, dict):
        return {k: _plain(w) for k, w in v.items()}
    if isinstance(v, list | tuple):
        return [_plain(w) for w in v]
    return str(v) if isinstance(v, float) and not math.isfinite(v) else v


def _site_to_json(site: Site) -> dict[str, Any]:
    if site.t is None and site.op is not None:
        raise CheckpointError(
            f"{site.name} is answered by a function of its own (fixed thresholds), which no "
            "instance describes; keep the state dict instead."
        )
    data = {
        "name": site.name,
        "kind": site.kind,
        "instance": site.t and site.t.to_dict(),
        "exact": site.exact,
        "sup": site.sup,
        "parameters": site.parameters,
    }
    return {k: _plain(v) for k, v in data.items()}


def _site_of_json(data: Mapping[str, Any]) -> Site:
    t = None if data["instance"] is None else TG.from_dict(data["instance"])
    infinite = ("inf", "-inf", "nan")
    parameters = tuple(float(v) if v in infinite else v for v in data["parameters"])
    return Site(data["name"], data["kind"], t, data["exact"], float(data["sup"]), parameters)


def _call_of_json(data: Mapping[str, Any]) -> Site:
    site = _site_of_json(data)
    if site.kind not in (sites.WHOLE if site.t is None else sites.KINDS):
        raise ValueError(f"calls of the kind {site.kind!r} are not known here.")
    return site if site.t is None else replace(site, op=kernels.native(site.t))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Say of `what` whatever goes wrong inside."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"there is no {error}." if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{what}: {why} Save the network again.") from error


def read(directory: Path) -> Checkpoint:
    """The config in `directory`, every part of it understood."""
    path = directory / CONFIG
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); give the directory that save() wrote."
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path}: is no JSON, so cut short or damaged ({error}); copy it again or save again."
        ) from error
    with reading(str(path)):
        _check_schema(path, data)
        about = data["weights"]
        return Checkpoint(
            directory=directory,
            model=data["model"],
            version=data["threshold_gating"],
            torch=data["torch"],
            gates_only=data["gates_only"],
            weights=about and {k: about[k] for k in ("file", "bytes", "sha256")},
            trainable=tuple(data["trainable"]),
            aliases=dict(data["aliases"]),
            modules=tuple(_module(path, each) for each in data["modules"]),
            owners=tuple(_owner(path, each) for each in data["owners"]),
            recurrent=tuple(_recurrent(path, each) for each in data["recurrent"]),
            structure={kind: data[kind] for kind in STRUCTURE},
        )


def _check_schema(path: Path, data: Any) -> None:
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: is no config; give the directory that save() wrote.")
    schema = data["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise CheckpointError(f"{path}: the schema is a whole number from 1 on; got {schema!r}.")
    if schema > SCHEMA:
        raise CheckpointError(
            f"{path}: written by version {data.get('threshold_gating', '?')} (schema {schema}); "
            f"this is {__version__} (schema {SCHEMA}); update threshold-gating."
        )


def _module(path: Path, data: Mapping[str, Any]) -> Entry:
    with reading(f"{path}: site {data['name']!r}"):
        calls = [(_site_of_json(call), call["activation"]) for call in data["calls"]]
        for site, make in calls:
            activation(site, make, torch.device("meta"))  # it can be made
        return Entry((data["name"], *data["also"]), calls)


def _owner(path: Path, data: Mapping[str, Any]) -> Entry:
    names, calls = (data["name"], *data["also"]), data["calls"]
    plan: dict[str, Site | None] = {}
    for call, site in () if calls == _AS_THEY_COME else calls.items():
        with reading(f"{path}: site '{names[0]}:{call}'"):
            plan[call] = site and _call_of_json(site)
    return Entry(names, None if calls == _AS_THEY_COME else plan)


def _recurrent(path: Path, data: Mapping[str, Any]) -> Entry:
    with reading(f"{path}: site {data['name']!r}"):
        gates = {gate: TG.from_dict(t) for gate, t in data["gates"].items()}
        return Entry((data["name"], *data["also"]), gates)
