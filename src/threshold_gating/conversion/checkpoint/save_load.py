"""Saving and loading of a converted network: tg_config.json, and safetensors beside it.

The config says what stands at each site; the tensors are the network's (`model.safetensors`) or
only the learned ones of its gates (`gates.safetensors`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from threshold_gating.conversion import apply, gate, hub
from threshold_gating.conversion.checkpoint import card, files, schema
from threshold_gating.conversion.checkpoint.digest import digests
from threshold_gating.conversion.checkpoint.files import CheckpointError, load_weights
from threshold_gating.conversion.checkpoint.schema import SCHEMA, Checkpoint
from threshold_gating.conversion.intercept import intercept_calls
from threshold_gating.conversion.learn import gate_parameters
from threshold_gating.conversion.plan import refuse
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.spec import found, gate_names

__all__ = ["SCHEMA", "Checkpoint", "CheckpointError", "load", "load_weights", "save"]

_Model = TypeVar("_Model", bound=nn.Module)


def save(model: nn.Module, directory: str | os.PathLike[str], *, gates_only: bool = False) -> Path:
    """Write a converted network into `directory`, which is made where it does not exist.

    Args:
        model: a network with gates. Tensors that share their memory are stored once.
        directory: a checkpoint that is there already stays whole until the new one is.
        gates_only: leave out the weights. Then only learned gates make a file of tensors.

    Returns:
        the directory.
    """
    model, directory = inner(model), Path(directory)
    about = schema.describe(model)
    if not any(about[kind] for kind in schema.STRUCTURE):
        raise CheckpointError(
            f"save: no gate in {type(model).__name__}; convert it first, or save its state_dict."
        )
    state, gates = model.state_dict(), schema.gate_state(model)
    stored, about["aliases"] = once(gates if gates_only else state)
    about["gates_only"] = gates_only
    if gates_only:
        weights = {k: t for k, t in state.items() if isinstance(t, Tensor) and k not in gates}
        about["original"] = digests(weights)
    name = files.GATES if gates_only else files.WEIGHTS
    directory.mkdir(parents=True, exist_ok=True)
    mark = files.mark()
    new = {n: directory / (n + mark) for n in ((name,) if stored else ()) + (files.CONFIG,)}
    with files.alone(directory):
        try:
            write(about, stored, new.get(name), name, new[files.CONFIG])
            files.put_in_place(directory, new, current(directory))
        finally:
            for path in new.values():
                path.unlink(missing_ok=True)
    return directory


def write(
    about: Mapping[str, Any], tensors: dict[str, Tensor], path: Path | None, name: str, config: Path
) -> None:
    """Write the tensors, if there is a file for them, and the config that says which they are."""
    written = None if path is None else {"file": name, **files.write_tensors(tensors, path)}
    text = json.dumps({**about, "weights": written}, indent=1, allow_nan=False)
    config.write_text(text + "\n", "utf-8")
    files.sync(config)


def inner(model: nn.Module) -> nn.Module:
    """The network itself, without what torch.compile and data parallelism put around it."""
    around = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, around) or "_orig_mod" in model._modules:
        model = model.get_submodule("module" if isinstance(model, around) else "_orig_mod")
    return model


def current(directory: Path) -> dict[str, Callable[[Path], bool]]:
    """The files that a checkpoint in place means, and for each how to know it."""
    try:
        saved = schema.read(directory)
    except CheckpointError:
        return {}
    known = {} if saved.pretrained is None else saved.pretrained["files"]
    holds = functools.partial(files.holds, known=saved.original or {})
    found: dict[str, Callable[[Path], bool]] = dict.fromkeys(known, holds)
    if saved.weights is not None:
        found[saved.weights["file"]] = functools.partial(files.matches, about=saved.weights)
    return found


def once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors ready to be written, and the further names of those that have several."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages = set()
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise CheckpointError(
                f"save: {name!r} in the state_dict is not a tensor; safetensors holds nothing else."
            )
        if t.is_meta:
            raise CheckpointError(
                f"save: {name!r} is on the meta device and has no values; load weights first, or "
                "pass gates_only=True."
            )
        view = (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype)
        if t.numel() and first.setdefault(view, name) != name:
            aliases[name] = first[view]
            continue
        storage = (t.device, t.untyped_storage().data_ptr())
        # safetensors takes no two views of one memory, even where they differ.
        own = t.detach().clone() if storage in storages else t.detach()
        stored[name] = own.cpu().contiguous()
        storages.add(storage)
    return stored, aliases


@overload
def load(
    directory: str | os.PathLike[str], model: None = None, *, strict: bool = True
) -> Checkpoint: ...
@overload
def load(directory: str | os.PathLike[str], model: _Model, *, strict: bool = True) -> _Model: ...
def load(
    directory: str | os.PathLike[str], model: nn.Module | None = None, *, strict: bool = True
) -> nn.Module | Checkpoint:
    """Make `model` the network that was saved, in place; without one, say what was saved.

    If anything does not fit, `model` is left as it was.

    Args:
        directory: where `save` wrote.
        model: a network of the same architecture, converted or not. One that is converted in the
            same way keeps its tensors (an optimiser's); one on the meta device gets those loaded.
        strict: every tensor must be on both sides, of the same dtype, in the very file that was
            saved. False leaves alone what only one side has, casts, and takes another file.
    """
    if model is None:
        return schema.read(Path(directory))
    network = inner(model)
    refuse(network)
    restore(network, *read(Path(directory), strict), strict)
    return model


def restore(
    model: nn.Module, saved: Checkpoint, path: Path, tensors: Mapping[str, Tensor], strict: bool
) -> None:
    """Make `model` the network on record, whose tensors, of the file `path`, are these."""
    before = [(m, type(m), _shallow(vars(m))) for m in model.modules()]
    try:
        with schema.reading(str(saved.directory / files.CONFIG)):
            _rebuild(model, saved)
        state = _fitting(model, saved, path, tensors, strict)
        _fill(model, state, whole=not saved.gates_only)
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        gate.count_calls(model)
        raise
    for name, p in gate_parameters(model).items():
        p.requires_grad_(name in saved.trainable)
    card.keep(model, saved.report)


def _shallow(attributes: Mapping[str, Any]) -> dict[str, Any]:
    own = ("_modules", "_parameters", "_buffers")
    return {k: copy.copy(v) if k in own else v for k, v in attributes.items()}


def read(directory: Path, strict: bool) -> tuple[Checkpoint, Path, dict[str, Tensor]]:
    """A config, the tensors that belong to it under all their names, and the file they are from."""
    path = directory / files.CONFIG
    found = None
    while found is None:  # None: a save came between, and that it went on makes sure that this ends
        with files.opened(path) as file:
            saved = schema.read(directory)
            if saved.weights is None:
                return saved, path, {}
            found = files.find_tensors(saved.weights, strict, file)
    with schema.reading(str(found[0])):
        found[1].update({alias: found[1][name] for alias, name in saved.aliases.items()})
    return saved, *found


def _rebuild(model: nn.Module, saved: Checkpoint) -> None:
    """Bring the gates on record, and no others, into `model`."""
    held = ((module, name) for module in model.modules() for name in gate_names(module))
    on_meta = any(found(*each).is_meta for each in held)
    if not on_meta and schema.structure(model) == saved.structure:
        return  # it is so already
    apply.revert(model)
    _check_modules(model, saved)
    at, places = dict(model.named_modules()), gate.places(model)
    for entry in saved.modules:
        module = at[entry.names[0]]
        _become(module, entry.holds, _real(places[module]))
    gate.count_calls(model)
    for entry in saved.owners:
        owner = at[entry.names[0]]
        intercept_calls(owner, entry.holds, *_real(places[owner]))
    for entry in saved.recurrent:
        at[entry.names[0]].__dict__["gates"] = dict(entry.holds)
    hub.guard(model)


def _check_modules(model: nn.Module, saved: Checkpoint) -> None:
    """Every module on record is in an unconverted network, as what it was, and no gates beside."""
    names, at = schema.names_of(model), dict(model.named_modules(remove_duplicate=False))

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(
            f"{saved.directory / files.CONFIG}: {what} in {type(model).__name__}; the checkpoint "
            f"is of {saved.model}, load it into a network of the same architecture."
        )

    for entry in (*saved.modules, *saved.owners, *saved.recurrent):
        if unknown := [name for name in entry.names if name not in at]:
            raise wrong(f"there is no {unknown[0]!r}")
        if tuple(names[at[entry.names[0]]]) != entry.names:
            raise wrong(f"{entry.names[0]!r} is not shared as it was ({', '.join(entry.names)})")
    for entry in saved.modules:
        module = at[entry.names[0]]
        bare = next(module.children(), None) is None and not module.state_dict()
        if module is model or not (bare or isinstance(module, Activation)):
            raise wrong(
                f"{entry.names[0]!r} cannot become an activation: it is the whole or has parts"
            )
        if entry.was is not None and not isinstance(module, Activation):
            _check_function(entry, module, wrong)
    for entry in saved.recurrent:
        layer = at[entry.names[0]]
        if not isinstance(layer, rnn._Gated) or set(layer.gates) != set(entry.holds):
            raise wrong(f"{entry.names[0]!r} has no gates {', '.join(entry.holds)}")
    recorded = {at[entry.names[0]] for entry in (*saved.modules, *saved.recurrent)}
    for module, (name, *_) in names.items():
        if isinstance(module, Activation | rnn._Gated) and module not in recorded:
            raise wrong(f"{name!r} has gates of its own, and the checkpoint has no gates for it")


def _check_function(
    entry: schema.Entry, module: nn.Module, wrong: Callable[[str], CheckpointError]
) -> None:
    """The module computes what the one computed that was replaced."""
    try:
        have = schema.values_of(module)
    except Exception:  # it is no function of each element
        have = None
    want = [float(v) for v in entry.was or ()]
    if have is None or not torch.allclose(
        torch.tensor([float(v) for v in have]).double(),
        torch.tensor(want).double(),
        rtol=1e-6,
        atol=1e-9,
        equal_nan=True,
    ):
        raise wrong(f"{entry.names[0]!r} is {type(module).__name__}, another function than saved,")


def _real(place: gate.Place) -> gate.Place:
    """Where gates are made: those of a network without memory yet have some."""
    is_meta = place.device.type == "meta"
    return place._replace(device=torch.device("cpu")) if is_meta else place


def _become(module: nn.Module, calls: list[Any], place: gate.Place) -> None:
    """Let `module` be the gates on record; it overwrites its input if it did."""
    before = module if isinstance(module, Activation) else None
    if before is not None and _is_made_so(before, calls):
        return
    stands = [schema.spec(site, make) if site else gate.left(module) for site, make in calls]
    double = any(make["dtype"] == "float64" for site, make in calls if site)
    place = place._replace(double=double)
    gate.become(module, stands, [site for site, _ in calls], place)
    if before is not None:  # the network's own one is not there to come back
        del module.__dict__["replaced"]


def _is_made_so(act: Activation, calls: list[Any]) -> bool:
    wanted = [(site and site.t, make) for site, make in calls]
    return not act.theta0.is_meta and [(act.init, schema.make_of(act))] == wanted


def _fitting(
    model: nn.Module, saved: Checkpoint, path: Path, tensors: Mapping[str, Tensor], strict: bool
) -> dict[str, Tensor]:
    """The tensors to load; all that the network needs, each as it needs it."""
    have: dict[str, Any] = model.state_dict(keep_vars=True)
    network, same = type(model).__name__, "load it into a network of the same architecture"
    missing = [
        k for k in (schema.gate_state(model) if saved.gates_only else have) if k not in tensors
    ]
    if missing and strict:
        raise CheckpointError(
            f"{path}: no tensor {missing[0]!r}, which {network} has ({len(missing)} missing); "
            f"{same}, or pass strict=False."
        )
    unexpected = [k for k in tensors if k not in have]
    if unexpected and strict:
        raise CheckpointError(
            f"{path}: no {unexpected[0]!r} in {network} ({len(unexpected)} without a place); "
            f"{same}, or pass strict=False."
        )
    state = {name: tensors[name] for name in have if name in tensors}
    for name, t in state.items():
        _check_tensor(f"{path}: {name!r}", t, have[name], network, strict)
    first: dict[int, str] = {}
    for name, t in state.items():
        other = state[first.setdefault(id(have[name]), name)]
        if t is not other and not torch.equal(t, other):
            raise CheckpointError(
                f"{path}: {first[id(have[name])]!r} and {name!r} differ, and are one tensor in "
                f"{network}; {same}."
            )
    return state


def _check_tensor(what: str, t: Tensor, want: Tensor, network: str, strict: bool) -> None:
    if t.shape != want.shape:
        raise CheckpointError(
            f"{what} is {tuple(t.shape)}, and {tuple(want.shape)} in {network}; load it into a "
            "network of the same sizes."
        )
    if t.dtype != want.dtype and strict:
        raise CheckpointError(
            f"{what} is {t.dtype}, and {want.dtype} in {network}; call model.to({t.dtype}) first, "
            "or pass strict=False to cast."
        )


def _fill(model: nn.Module, state: dict[str, Tensor], whole: bool) -> None:
    """Copy the tensors in; where the network has no memory for them yet, give it these."""
    have: dict[str, Any] = model.state_dict(keep_vars=True)
    everything = itertools.chain(model.named_parameters(), model.named_buffers())
    lost = [name for name, t in everything if t.is_meta and name not in state]
    if whole and lost:
        raise CheckpointError(
            f"load: {lost[0]!r} of {type(model).__name__} is on the meta device and not in the "
            "checkpoint, so it would have no values; make the network on a real device."
        )
    if not any(have[name].is_meta for name in state):
        model.load_state_dict(state, strict=False)
        return
    made: dict[int, Tensor] = {}  # what is tied stays one tensor
    for name, t in state.items():
        like = have[name]
        if id(like) not in made:
            own = t.to(like.dtype, copy=True)  # not a window on the file
            is_parameter = isinstance(like, nn.Parameter)
            made[id(like)] = nn.Parameter(own, like.requires_grad) if is_parameter else own
    assigned = {name: made[id(have[name])] for name in state}
    model.load_state_dict(assigned, strict=False, assign=True)
