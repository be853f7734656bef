"""tg_config.json: the record of a network's gates, written and read back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating._version import __version__
from threshold_gating.conversion import learn, sites
from threshold_gating.conversion.checkpoint import files
from threshold_gating.conversion.checkpoint.files import CheckpointError, one_line
from threshold_gating.conversion.config import GateConfig
from threshold_gating.conversion.gate import PerCall
from threshold_gating.conversion.learn import gate_parameters
from threshold_gating.conversion.purity import probing
from threshold_gating.conversion.site import Site
from threshold_gating.conversion.text import jsonable
from threshold_gating.instance import TG
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.spec import GateSpec, gate_names

SCHEMA = 2  # 1 where no call learns, so that earlier versions read it
STRUCTURE = ("modules", "owners", "recurrent")
AS_THEY_COME = "as they come"


class Entry(NamedTuple):
    """A module on record, under all its names, and what it holds.

    Of a module that is a site: (site, how its Activation is made) for each of its calls. Of an
    owner: the plan of its calls, None for "as they come". Of a recurrent layer: its gates. `was`
    are values of what the module was, by which it is known again; None where that is unknown.
    """

    names: tuple[str, ...]
    holds: Any
    was: list[Any] | None = None


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
    original: Mapping[str, str] | None = None  # digests of the weights that the gates belong to
    pretrained: Mapping[str, Any] | None = None  # what is known of a model's own files beside
    report: Mapping[str, Any] | None = None  # what `verify` measured, see `card`

    @property
    def sites(self) -> dict[str, Site]:
        """The sites by name; calls that are answered as they come have none."""
        found = [site for entry in self.modules for site, _ in entry.holds]
        found += [site for entry in self.owners for site in (entry.holds or {}).values()]
        return {site.name: site for site in found if site is not None}

    @property
    def config(self) -> GateConfig:
        """What `convert` takes, with inputs, to make these gates again as they started."""
        found: dict[str, GateConfig] = {}
        for entry in (e for e in self.modules if e.was is not None):  # the others were there before
            name, alike = entry.names[0], len(entry.holds) == 1  # then one gate is for all calls
            for k, (site, make) in enumerate(entry.holds):
                key = f"re:{re.escape(name)}(#\\d+)?" if alike else f"{name}#{k}" if k else name
                if site is not None:
                    found[key] = learn.config_of(site.t, spec(site, make))
        for entry in self.owners:
            for call, site in (entry.holds or {}).items():
                if site is not None:
                    found[f"{entry.names[0]}:{call}"] = learn.config_of(site.t, site.learns)
        known = all(entry.holds is not None for entry in self.owners)  # else calls as they come
        return GateConfig(sites=tuple({**({"re:.*": None} if known else {}), **found}.items()))


def describe(model: nn.Module) -> dict[str, Any]:
    """The config of a network, all but what it says of files."""
    gates = structure(model)
    learns = any(isinstance(site, dict) and "learns" in site for _, site in sites_in(gates))
    return {
        "schema": SCHEMA if learns else 1,
        "threshold_gating": __version__,
        "torch": str(torch.__version__),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "trainable": [n for n, p in gate_parameters(model).items() if p.requires_grad],
        **gates,
    }


def structure(model: nn.Module) -> dict[str, Any]:
    """Where a network has gates and which, as JSON values."""
    found: dict[str, list[Any]] = {kind: [] for kind in STRUCTURE}
    for module, (name, *also) in names_of(model).items():
        where = {"name": name, "also": also}
        if isinstance(module, Activation | PerCall):
            gates: list[Any] = module.calls if isinstance(module, PerCall) else [module]
            calls = [_call(gate, name) for gate in gates]
            replaced = vars(module).get("replaced")
            was = None if replaced is None else values_of(replaced)
            found["modules"].append({**where, "calls": calls, "was": was})
        elif isinstance(module, rnn._Gated):
            instances = {gate: jsonable(t.to_dict()) for gate, t in module.gates.items()}
            found["recurrent"].append({**where, "gates": instances})
        if "tg_sites" in vars(module):
            plan = vars(module)["tg_sites"]
            answers = {call: _answer(site) for call, site in (plan or {}).items()}
            answered = AS_THEY_COME if plan is None else answers
            found["owners"].append({**where, "calls": answered})
    return found


def sites_in(structure: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What stands at each site of a `structure`, by its name."""
    for module in structure["modules"]:
        for k, call in enumerate(module["calls"]):
            yield f"{module['name']}{f'#{k}' if k else ''}", call
    for owner in structure["owners"]:
        calls = owner["calls"]
        for call, site in calls.items() if isinstance(calls, dict) else ((calls, calls),):
            yield f"{owner['name']}:{call}", site
    for layer in structure["recurrent"]:
        for gate, instance in layer["gates"].items():
            yield f"{layer['name']}.{gate}", {"kind": gate, "instance": instance}


def values_of(module: nn.Module) -> list[Any]:
    """What an element-wise module gives at a few points, as JSON values."""
    x = torch.tensor([-4.0, -1.5, -0.7, -0.2, 0.0, 0.3, 0.8, 2.0, 7.0], device="cpu").double()
    with probing(module), torch.no_grad():
        return [jsonable(v) for v in module.forward(x).tolist()]


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module, the first one first."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def gate_state(model: nn.Module) -> dict[str, Tensor]:
    """What is learned of the gates, and where it starts, by the keys of the network's state_dict.

    Frozen gates have no keys."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = {*gate_names(module, "parameter"), *gate_names(module, "start")}
        state = module.state_dict(prefix=f"{path}." if path else "", keep_vars=True) if own else {}
        keys = {f"{path}.{name}" if path else name for name in own}
        found |= {k: t for k, t in state.items() if _key_of(k) in keys}
    return found


def _key_of(key: str) -> str:
    """The name of a tensor by its key; that of a parametrized one has more to it."""
    return re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", key)


def _call(gate: nn.Module, name: str) -> dict[str, Any] | None:
    """What stands at one call of a module; None if that is what stood there before."""
    if not isinstance(gate, Activation):
        return None
    return {**_site_to_json(_site(gate, name)), "activation": make_of(gate)}


def _site(act: Activation, name: str) -> Site:
    """The site of an activation; one that replaced nothing is exactly what it is."""
    site = vars(act).get("site") or Site(name, act.name or "activation")
    return replace(site, t=act.init)


def make_of(act: Activation) -> dict[str, Any]:
    """How to make an activation again, but for its instance and what it has learned."""
    return {**learn.spec_to_dict(act), "dtype": str(act.theta0.dtype).removeprefix("torch.")}


def spec(site: Site, make: Mapping[str, Any]) -> GateSpec:
    """What the activation of a site is, as it was made."""
    if site.t is None or make["dtype"] not in ("float32", "float64"):
        raise ValueError(f"there is no activation of {site.t} in {make['dtype']}.")
    _check_make(make)
    return learn.elementwise_of_dict(site.t, make)


def _answer(site: Site | None) -> dict[str, Any] | None:
    """What answers a call of an owner, with what it learns."""
    if site is None:
        return None
    learns = {} if site.learns is None else {"learns": learn.spec_to_dict(site.learns)}
    return {**_site_to_json(site), **learns}


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
    return dict(jsonable(data))


def _site_of_json(data: Any) -> Site:
    t = None if data["instance"] is None else TG.from_dict(_part(data, "instance", dict))
    infinite = ("inf", "-inf", "nan")
    given = _part(data, "parameters", list)
    parameters = tuple(float(v) if v in infinite else v for v in given)
    name, kind = _part(data, "name", str), _part(data, "kind", str)
    return Site(name, kind, t, _part(data, "exact", bool), float(data["sup"]), parameters)


_WORDS: dict[type, str] = {
    **{str: "a text", bool: "true or false", int: "a whole number"},
    **{list: "a list", dict: "named"},
}
_MOST = 2**26  # elements that share nothing; more is no layer, and would take all memory


def _part(data: Any, key: str, kind: type) -> Any:
    """What stands under `key`, which has to be of this type."""
    if not isinstance(data, dict):
        raise ValueError(f"expected named values with {key!r} among them; got {data!r:.40}.")
    value = data[key]
    if type(value) is not kind:  # not isinstance: true is no number
        raise ValueError(f"{key!r} has to be {_WORDS[kind]}; got {value!r:.40}.")
    return value


def _if_there(data: Any, key: str, kind: type) -> Any:
    return None if data.get(key) is None else _part(data, key, kind)


def _texts(data: Any, key: str) -> list[str]:
    texts: list[str] = _part(data, key, list)
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{key!r} has to be a list of strings; {wrong[0]!r:.40} is not a string.")
    return texts


def _check_make(make: Any) -> None:
    """Whether it says how to make an activation, in numbers that one can have."""
    _part(make, "share", str)
    _part(make, "axis", int)
    _texts(make, "train")
    sizes = make["channels"] if isinstance(make["channels"], list) else [make["channels"]]
    if make["channels"] is not None and not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(f"'channels' has to be whole numbers from 1 on; got {sizes!r:.40}.")
    if make["channels"] is not None and math.prod(sizes) > _MOST:
        raise ValueError(f"'channels' has to be at most {_MOST:,} in all; got {sizes!r:.40}.")


def _call_of_json(data: Any) -> Site:
    site = _site_of_json(data)
    if site.kind not in (sites.WHOLE if site.t is None else sites.KINDS):
        raise ValueError(f"calls of the kind {site.kind!r} are not known here.")
    if (learns := _if_there(data, "learns", dict)) is not None:
        _check_make(learns)
        site = replace(site, learns=learn.spec_of_dict(site.kind, site.t, learns))
    return site if site.t is None else replace(site, op=kernels.native(site.t))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Say of `what` whatever goes wrong inside."""
    try:
        yield
    except CheckpointError:
        raise
    except files.DAMAGE as error:
        why = f"there is no {error}." if isinstance(error, KeyError) else one_line(error)
        raise CheckpointError(f"{what}: {why.rstrip('.')}. Save the network again.") from error


def read(directory: Path) -> Checkpoint:
    """The config in `directory`, every part of it understood."""
    path = directory / files.CONFIG
    data = _json(path)
    with reading(str(path)):
        _check_schema(path, data)
        about = None if data["weights"] is None else _part(data, "weights", dict)
        found = Checkpoint(
            directory=directory,
            model=_part(data, "model", str),
            version=_part(data, "threshold_gating", str),
            torch=_part(data, "torch", str),
            gates_only=_part(data, "gates_only", bool),
            weights=about and _weights(about),
            trainable=tuple(_texts(data, "trainable")),
            aliases=dict(_part(data, "aliases", dict)),
            modules=tuple(_module(path, each) for each in _part(data, "modules", list)),
            owners=tuple(_owner(path, each) for each in _part(data, "owners", list)),
            recurrent=tuple(_recurrent(path, each) for each in _part(data, "recurrent", list)),
            structure={kind: data[kind] for kind in STRUCTURE},
            original=_original(data),
            pretrained=_pretrained(data),
            report=_if_there(data, "report", dict),
        )
        _check_once(found)
    return found


def _json(path: Path) -> Any:
    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text:.40} is not a finite number")
        return value

    try:
        return json.loads(path.read_text("utf-8"), parse_constant=number, parse_float=number)
    except OSError as error:
        raise files.unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON, so it is truncated or damaged ({error}); copy it again or "
            "save again."
        ) from error


def _original(data: Any) -> dict[str, str] | None:
    original: dict[str, str] | None = _if_there(data, "original", dict)
    for name in original or ():
        _part(original, name, str)
    return original


def _pretrained(data: Any) -> dict[str, Any] | None:
    """What is said of a model's own files, which stand beside the config and nowhere else."""
    about = _if_there(data, "pretrained", dict)
    if about is None:
        return None
    names = _texts(about, "files")
    if wrong := [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]:
        raise ValueError(
            f"a model's own files must be .safetensors in the same directory; got {wrong[0]!r}."
        )
    if data["weights"] is None or data.get("original") is None or not data["gates_only"]:
        raise ValueError(f"the hashes of {files.BESIDE} and of the weights are not in it.")
    made = _part(about, "made", dict) if "made" in about else {}
    return {"files": names, "variant": _if_there(about, "variant", str), "made": made}


def _weights(about: Any) -> dict[str, Any]:
    """What is said of the file of tensors, which stands beside the config and nowhere else."""
    *most, last = known = (files.WEIGHTS, files.GATES, files.BESIDE)
    if (file := _part(about, "file", str)) not in known:
        raise ValueError(
            f"the file of tensors must be {', '.join(most)} or {last}, in the same directory; "
            f"got {file!r}."
        )
    size, digest = _part(about, "bytes", int), _part(about, "sha256", str)
    return {"file": file, "bytes": size, "sha256": digest}


def _check_once(found: Checkpoint) -> None:
    """A module is on record as one thing, once."""
    seen: set[str] = set()
    for entry in (*found.modules, *found.owners, *found.recurrent):
        # A recurrent layer of ours is on record with its gates; its calls may be, too.
        mark = ", gates" if entry in found.recurrent else ""
        names = [f"{name}{mark}" for name in entry.names]
        if again := [name for name in names if name in seen]:
            raise ValueError(f"{again[0]!r} is on record twice.")
        seen.update(names)


def _check_schema(path: Path, data: Any) -> None:
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path} is not a config of gates; give the directory that save() wrote."
        )
    schema = data["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise CheckpointError(
            f"{path}: the schema must be a whole number from 1 on; got {schema!r}."
        )
    if schema > SCHEMA:
        raise CheckpointError(
            f"{path} was written by version {data.get('threshold_gating', '?')} (schema {schema}); "
            f"this is {__version__} (schema {SCHEMA}); update threshold-gating."
        )


def _names(data: Any) -> tuple[str, ...]:
    return (_part(data, "name", str), *_texts(data, "also"))


def _module(path: Path, data: Any) -> Entry:
    names = _names(data)
    with reading(f"{path}: site {names[0]!r}"):
        calls: list[tuple[Site | None, Any]] = [
            (None, None) if call is None else (_site_of_json(call), call["activation"])
            for call in _part(data, "calls", list)
        ]
        if not any(site for site, _ in calls):
            raise ValueError("it has no call with an instance.")
        for site, make in calls:
            if site is not None:
                spec(site, make)  # it can be made
        return Entry(names, calls, _if_there(data, "was", list))


def _owner(path: Path, data: Any) -> Entry:
    names = _names(data)
    if data["calls"] == AS_THEY_COME:
        return Entry(names, None)
    plan: dict[str, Site | None] = {}
    for call, site in _part(data, "calls", dict).items():
        with reading(f"{path}: site '{names[0]}:{call}'"):
            plan[call] = None if site is None else _call_of_json(site)
    return Entry(names, plan)


def _recurrent(path: Path, data: Any) -> Entry:
    names = _names(data)
    with reading(f"{path}: site {names[0]!r}"):
        gates = {gate: TG.from_dict(t) for gate, t in _part(data, "gates", dict).items()}
        return Entry(names, gates)
