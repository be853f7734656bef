"""The sites of a network for the explorer: of a network itself, or of what was saved of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from threshold_gating.conversion.checkpoint import files, save_load, schema
from threshold_gating.conversion.learn import learned_gates
from threshold_gating.conversion.site import prefix_of_call
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.spec import Elementwise
from threshold_gating.show.explorer import BRANCHES

GROUPS = 64  # channels of one site that the page shows; that there are more is said


class Learned(NamedTuple):
    """The instances of the groups (channels, positions) of a gate that learned."""

    share: str
    instances: list[TG]


def of_model(name: str, model: nn.Module) -> dict[str, Any]:
    """The sites of a converted network, with what its gates have learned."""
    learned = {site: Learned(act.share, act.instances()) for site, act in learned_gates(model)}
    return _network(name, schema.structure(model), learned)


def of_saved(path: Path) -> dict[str, Any]:
    """The sites of a folder that `save` or `save_pretrained` wrote, or of its tg_config.json alone.

    The config says where gates started. What they learned is in the tensors of the folder.
    """
    if path.is_dir():
        saved, _, tensors = save_load.read(path, strict=True)
        return _network(saved.model, saved.structure, dict(_learned(saved, tensors)))
    if path.name != files.CONFIG:
        raise ValueError(f"{path} is no {files.CONFIG}; give that file, or the folder it is in.")
    saved = schema.read(path.parent)
    return _network(saved.model, saved.structure, {})


def _learned(
    saved: schema.Checkpoint, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Learned]]:
    """What the element-wise gates of a saved network learned, by site."""
    for site, path, prefix, spec in _gates(saved):
        if not spec.learned:
            continue
        keys = {name: f"{path}.{prefix}{name}".lstrip(".") for name in spec.roles()}
        stored = [name for name, role in spec.roles().items() if role != "known"]
        if all(keys[name] in tensors for name in stored):
            like = tensors[keys[stored[0]]]
            values = {
                name: tensors[key] if name in stored else spec.start(name, "cpu", like.dtype)
                for name, key in keys.items()
            }
            yield site, Learned(spec.share, Activation.of(spec, values).instances())


def _gates(saved: schema.Checkpoint) -> Iterator[tuple[str, str, str, Elementwise]]:
    """(site, module, prefix of its tensors there, what it is) of every element-wise gate."""
    for entry in saved.modules:
        name, several = entry.names[0], len(entry.holds) > 1
        for k, (site, make) in enumerate(entry.holds):
            if site is not None:
                prefix = prefix_of_call(k) if several else ""
                yield f"{name}#{k}" if k else name, name, prefix, schema.spec(site, make)
    for entry in saved.owners:
        for call, site in (entry.holds or {}).items():
            if site is not None and isinstance(site.learns, Elementwise):
                yield f"{entry.names[0]}:{call}", entry.names[0], site.prefix, site.learns


def _network(
    name: str, structure: Mapping[str, Any], learned: Mapping[str, Learned]
) -> dict[str, Any]:
    found = [_site(site, call, learned.get(site)) for site, call in schema.sites_in(structure)]
    if not any(site["instances"] for site in found):
        raise ValueError(f"{name} has no site with a curve to show.")
    return {"name": name, "sites": found}


def _site(name: str, call: Any, learned: Learned | None) -> dict[str, Any]:
    """As `State.open` in state.js has it; `says` is what a reader has to know."""
    site = {"name": name, "kind": "not a gate", "total": 0, "instances": []}
    if not isinstance(call, dict):
        return {**site, "says": "no gate stands here"}
    site["kind"] = call["kind"]
    if learned is None and call["instance"] is None:
        return {**site, "says": "no function of one number, so it has no curve"}
    shown = [TG.from_dict(call["instance"])] if learned is None else learned.instances
    if shown[0].K > BRANCHES:
        return {
            **site,
            "says": f"K = {shown[0].K}; the explorer shows up to {BRANCHES} branches",
        }
    site |= {"total": len(shown), "instances": [t.to_dict() for t in shown[:GROUPS]]}
    return {**site, "says": "; ".join(_says(call, learned))}


def _says(call: Mapping[str, Any], learned: Learned | None) -> Iterator[str]:
    if "exact" not in call:  # a record of a recurrent layer says no more of its gates
        yield "gate of a recurrent layer as it started; what its units learned is not shown"
    train = (call.get("learns") or call.get("activation") or {}).get("train", ())
    if train and learned is None:
        yield f"learns {', '.join(train)}: this is where it started, what it learned is not here"
    elif learned is not None:
        yield f"learned {', '.join(train)}" if train else "learned"
    elif not call.get("exact", True):
        yield f"approximate: off by at most {float(call['sup']):.2g} over the line"
    if learned is not None and len(learned.instances) > GROUPS:
        yield f"the first {GROUPS} of {len(learned.instances)} gates, one per {learned.share}"
