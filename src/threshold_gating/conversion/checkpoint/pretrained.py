"""`tg.load`: a converted network from a folder or from the Hugging Face hub.

A Hugging Face model is made from its own files, once these are known to be the weights that the
gates were saved with. Any other network is given (`onto`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from threshold_gating.conversion.checkpoint import files, save_load, schema
from threshold_gating.conversion.checkpoint.digest import unlike
from threshold_gating.conversion.checkpoint.files import CheckpointError, one_line
from threshold_gating.conversion.checkpoint.schema import Checkpoint
from threshold_gating.conversion.plan import refuse

_Model = TypeVar("_Model", bound=nn.Module)
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BYTES = {"float64": 8, "float32": 4}  # of a number


@overload
def load(
    source: str | os.PathLike[str], onto: None = None, *, revision: str | None = None
) -> nn.Module: ...
@overload
def load(
    source: str | os.PathLike[str],
    onto: _Model,
    *,
    revision: str | None = None,
    other_weights: bool = False,
) -> _Model: ...
def load(
    source: str | os.PathLike[str],
    onto: nn.Module | None = None,
    *,
    revision: str | None = None,
    other_weights: bool = False,
) -> nn.Module:
    """The converted network that was saved, by `save_pretrained` or `tg.conversion.save`.

    Args:
        source: a folder, or the name of a repository on the Hugging Face hub ("owner/name"), which
            is taken from the cache where it is there or `HF_HUB_OFFLINE` is set.
        onto: the network that gets the gates, in place. A Hugging Face model is made from the
            folder and needs none. Where the folder holds gates alone, or lies beside a model's own
            files, `onto` keeps its weights, which must be those that the gates were saved with.
        revision: branch, tag or commit on the hub.
        other_weights: put the gates on a network with other weights, too.
    """
    _check_arguments(source, onto, revision, other_weights)
    folder = _folder(source, revision)
    if onto is None:
        return _made(folder)
    network = save_load.inner(onto)
    refuse(network)
    saved, path, tensors = save_load.read(folder, strict=True)
    if not saved.gates_only and other_weights:
        raise ValueError(
            f"tg.load: {folder} holds weights, which `onto` gets; other_weights is for gates alone."
        )
    if saved.gates_only:
        _check_attention(network, saved)
        if not other_weights:
            _check_weights(network, saved)
    save_load.restore(network, saved, path, tensors, strict=True)
    return onto


def _check_arguments(source: Any, onto: Any, revision: str | None, other_weights: bool) -> None:
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise TypeError(f"tg.load: source must be a folder or a name on the hub; got {kind}.")
    if onto is not None and not isinstance(onto, nn.Module):
        kind = type(onto).__name__
        raise TypeError(f"tg.load: onto must be a torch.nn.Module; got {kind}.")
    if revision is not None and Path(source).is_dir():
        raise ValueError(
            f"tg.load: {os.fspath(source)} is a folder, which has no revision={revision!r}; a name "
            "on the hub has."
        )
    if other_weights and onto is None:
        raise ValueError("tg.load: other_weights=True needs onto=, the network with these weights.")


# Where it is


def _folder(source: str | os.PathLike[str], revision: str | None) -> Path:
    name = os.fspath(source)
    if Path(name).is_dir():
        return Path(name)
    if name.endswith(".onnx"):
        raise CheckpointError(
            f"{name} is an exported file, which no network is made from; "
            "threshold_gating.export.onnx.read and `tg export --read` show the gates that it holds."
        )
    if not isinstance(source, str) or not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name} is not a folder; give the one that save_pretrained or tg.conversion.save "
            "wrote, or a name on the hub, OWNER/NAME."
        )
    snapshot = _downloaded(name, revision, [files.CONFIG])
    if not (snapshot / files.CONFIG).is_file():
        raise CheckpointError(
            f"{name} has no {files.CONFIG} on the hub, or none in the cache while offline, so "
            "there are no gates to load; from_pretrained gives the network as it is there."
        )
    saved = schema.read(snapshot)
    own = (saved.pretrained or {}).get("files", [])
    wanted = [files.CONFIG, *("config.json", "generation_config.json", "*.index.json"), *own]
    wanted += [] if saved.weights is None else [saved.weights["file"]]
    # the very commit of the config: a branch may have moved on
    commit = snapshot.name if _COMMIT.fullmatch(snapshot.name) else revision
    return _downloaded(name, commit, wanted)


def _downloaded(name: str, revision: str | None, wanted: list[str]) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"tg.load: {name} is not a folder, and names on the hub need the package "
            "huggingface_hub: pip install 'threshold-gating[hub]'."
        ) from error
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted)
    except Exception as error:  # of the hub, of its cache or of what these connect with
        at = "" if revision is None else f" at {revision!r}"
        raise CheckpointError(
            f"{name} is not a folder, and the hub does not give it{at} ({_first(error)}); check "
            "the name and the connection, or give a folder."
        ) from error
    return Path(found)


def _first(error: BaseException) -> str:
    said = one_line(error)
    return said if len(said) <= 200 else f"{said[:200]} ..."


# Whether the weights are those of the gates


def _check_weights(model: nn.Module, saved: Checkpoint) -> None:
    """Refuse a network whose weights are not those that the gates were saved with."""
    where = saved.directory / files.CONFIG
    asked = "or pass other_weights=True to put the gates on it as it is."
    if not saved.original:
        raise CheckpointError(
            f"{where} has no hash of the weights that its gates belong to; save them again, {asked}"
        )
    state = {k: t for k, t in model.state_dict().items() if isinstance(t, Tensor)}
    if apart := unlike(saved.original, _expected(model, state, saved.original)):
        name, how = next(iter(apart.items()))
        raise CheckpointError(
            f"{where}: the gates were saved with other weights than {type(model).__name__} has: "
            f"{name!r} {how} ({len(apart)} of {len(state)} differ); give the network with the "
            f"weights of then, {asked}"
        )


def _expected(
    model: nn.Module, state: Mapping[str, Tensor], known: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors that are on record, or should be: a tied one stands there once, no gate does."""
    tied = {t.data_ptr() for name, t in state.items() if name in known}
    ignored = {*schema.gate_state(model), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    return {
        name: t
        for name, t in state.items()
        if name in known or not (name in ignored or t.data_ptr() in tied or not t.numel())
    }


def _check_attention(model: nn.Module, saved: Checkpoint) -> None:
    """Refuse a network that makes other calls than those the gates answer."""
    was = (saved.pretrained or {}).get("made", {})
    now = implementations(model)
    for option, chosen in was.items():
        if now.get(option, chosen) != chosen:
            raise CheckpointError(
                f"{saved.directory / files.CONFIG}: the network was converted with "
                f"{option}={chosen!r}, and {type(model).__name__} has {now[option]!r}, which makes "
                f"other calls; make it by from_pretrained(..., {option}={chosen!r})."
            )


def implementations(model: nn.Module) -> dict[str, Any]:
    """What of a Hugging Face model decides which calls it makes, and its config does not save."""
    config = getattr(model, "config", None)
    found = {}
    for option in ("attn_implementation", "experts_implementation"):
        root = getattr(config, f"_{option}", None)
        parts = {k: getattr(config, k, None) for k in getattr(config, "sub_configs", None) or ()}
        each = {k: getattr(part, f"_{option}", None) for k, part in parts.items() if part}
        chosen = {"": root, **each}
        if any(chosen.values()):
            found[option] = root if {*each.values()} <= {root} else chosen
    return found


def gates_for(
    folder: Path, model: nn.Module, state: Mapping[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """The learned gates in `folder` for `model`, which is about to get weights of that folder."""
    saved, path, tensors = save_load.read(folder, strict=True)
    if schema.structure(model) != saved.structure:
        raise CheckpointError(
            f"{path}: the gates there are not those of {type(model).__name__} (other sites, "
            f"instances or sharing); go on with the network that tg.load({str(folder)!r}) gives."
        )
    own = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
    known = {k: text for k, text in (saved.original or {}).items() if k in own}
    weights = {k: t for k, t in own.items() if k in known or k not in tensors}
    if apart := unlike(known, weights):
        name, how = next(iter(apart.items()))
        raise CheckpointError(
            f"{folder}: its gates were saved with other weights: {name!r} {how} ({len(apart)} "
            "differ); the folder is half written or mixed, go on from another checkpoint."
        )
    return tensors


# A Hugging Face model from its files


def _made(folder: Path) -> nn.Module:
    """The converted network of a folder that says itself how to make it."""
    while True:
        with files.opened(folder / files.CONFIG) as config:
            saved, path, tensors = save_load.read(folder, strict=True)
            kind = _class(folder, saved)
            with _verified(folder, saved) as place:
                model = None if place is None else _from_pretrained(kind, place, saved)
            if model is not None and files.is_there(config):
                break  # else a save came between, and that it went on makes sure that this ends
            if files.is_there(config):
                raise _mixed(folder, saved)
    if saved.pretrained is None:
        _check_weights(model, saved)
    save_load.restore(model, saved, path, tensors, strict=True)
    return model


def _class(folder: Path, saved: Checkpoint) -> Any:
    """The class of transformers that the folder is of."""
    name = saved.model.rpartition(".")[2]
    needs = (
        f"it is of {saved.model}; make that network and pass it on: "
        f"tg.load({str(folder)!r}, onto={name}(...))."
    )
    path = folder / "config.json"
    if not saved.gates_only or not path.is_file():
        raise CheckpointError(f"{folder} does not say how to make its network; {needs}")
    try:
        config = json.loads(path.read_text("utf-8"))
        kind = config["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path} names no architecture ({one_line(error)}), so it is damaged or no config of "
            f"a Hugging Face model; {needs}"
        ) from error
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"tg.load: {folder} is a Hugging Face model, which needs transformers: pip install "
            "'threshold-gating[text]'."
        ) from error
    found = getattr(transformers, kind, None) if isinstance(kind, str) else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise CheckpointError(f"{path}: transformers has no {kind}; {needs}")
    return found


@contextmanager
def _verified(folder: Path, saved: Checkpoint) -> Iterator[Path | None]:
    """A folder from which transformers reads exactly the weights on record.

    It is the folder itself, or where a save broke off, one of links to the files that it set aside.
    None where the weights are not there.
    """
    if saved.pretrained is None:
        yield folder  # gates were saved into a model's folder; looked at when it is made
        return
    original = saved.original or {}
    chosen: dict[str, Path] = {}
    for name in saved.pretrained["files"]:
        for path in (folder / name, files.previous(folder / name)):
            if name not in chosen and files.holds(path, original):
                chosen[name] = path
    places = {k: n for n, path in chosen.items() for k in files.names_in(path)}
    if len(chosen) < len(saved.pretrained["files"]) or places.keys() != original.keys():
        yield None
    elif _is_plain(folder, chosen, places):
        yield folder
    else:
        with tempfile.TemporaryDirectory() as made:
            _linked(folder, Path(made), chosen, places, saved.pretrained["variant"])
            yield Path(made)


def _is_plain(folder: Path, chosen: Mapping[str, Path], places: Mapping[str, str]) -> bool:
    """Whether transformers finds the chosen files, and no others, by their names."""
    mine = {files.family(name) for name in chosen}
    there = {p.name for p in folder.iterdir() if files.family(p.name) in mine}
    index = {name for name in there if name.endswith(".json")}
    try:
        maps = [json.loads((folder / name).read_text("utf-8"))["weight_map"] for name in index]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    named = all(path.name == name for name, path in chosen.items())
    return named and there - index == chosen.keys() and all(each == places for each in maps)


def _linked(
    folder: Path,
    place: Path,
    chosen: Mapping[str, Path],
    places: Mapping[str, str],
    variant: str | None,
) -> None:
    """Make `place` the folder as it was before a save broke off."""
    others = [p for p in folder.iterdir() if p.is_file() and files.family(p.name) is None]
    for name, path in {**{p.name: p for p in others}, **chosen}.items():
        try:
            os.symlink(path.resolve(), place / name)
        except OSError:  # as Windows has it
            shutil.copy(path, place / name)
    if len(chosen) > 1:
        index = {"metadata": {}, "weight_map": dict(places)}
        name = f"model.safetensors.index{'' if variant is None else f'.{variant}'}.json"
        (place / name).write_text(json.dumps(index), "utf-8")


def weights_of(folder: Path, saved: Checkpoint) -> dict[str, Tensor]:
    """The weights in a model's own files, which are those on record."""
    with _verified(folder, saved) as place:
        if place is None:
            raise _mixed(folder, saved)
        found: dict[str, Tensor] = {}
        for name in (saved.pretrained or {})["files"]:
            found |= files.read_tensors(place / name)
    return found


def _mixed(folder: Path, saved: Checkpoint) -> CheckpointError:
    """What is wrong with the weights in a folder."""
    names = (saved.pretrained or {})["files"]
    gone = [name for name in names if not (folder / name).is_file()]
    if gone:
        return CheckpointError(
            f"{folder / gone[0]} is missing, and {files.CONFIG} was written with it; copy the "
            "whole folder."
        )
    have: dict[str, Tensor] = {}
    for name in names:
        have |= files.read_tensors(folder / name)
    apart = unlike(saved.original or {}, have)
    name, how = next(iter(apart.items()), ("all", "are there, in other files"))
    return CheckpointError(
        f"{folder}: the weights are not those that {files.CONFIG} was written with: {name!r} {how} "
        f"({len(apart)} of {len(have)} differ); copy the whole folder again, or put the gates on "
        "these weights: tg.load(FOLDER, onto=from_pretrained(FOLDER), other_weights=True)."
    )


def _from_pretrained(kind: Any, place: Path, saved: Checkpoint) -> nn.Module:
    about = saved.pretrained or {}
    made = about.get("made", {})
    if made.get("attn_implementation") == "tg":
        from threshold_gating.conversion import hugging_face

        hugging_face.register()
    try:
        model, info = kind.from_pretrained(
            place, variant=about.get("variant"), output_loading_info=True, **made
        )
    except Exception as error:  # of transformers
        raise CheckpointError(
            f"{saved.directory}: transformers does not load it as {kind.__name__} "
            f"({_first(error)}); copy the whole folder again, or update transformers."
        ) from error
    if lost := [f"{k} {sorted(map(str, names))[0]!r}" for k, names in info.items() if names]:
        raise CheckpointError(
            f"{saved.directory}: its weights are not all that {kind.__name__} has and no others: "
            f"{', '.join(lost)}; save the whole network, or make it yourself and pass it as onto=."
        )
    _check_types(model, saved)
    if hasattr(model, "config"):
        model.config._name_or_path = str(saved.directory)  # not that of links
    return model  # type: ignore[no-any-return]


def _check_types(model: nn.Module, saved: Checkpoint) -> None:
    """Refuse a network to which transformers gives fewer digits than were saved."""
    state = model.state_dict()
    for name, text in (saved.original or {}).items():
        dtype = text.partition(":")[0]
        t = state.get(name)
        if t is not None and t.is_floating_point() and _BYTES.get(dtype, 0) > t.element_size():
            raise CheckpointError(
                f"{saved.directory}: from_pretrained makes {name!r} {t.dtype}, and it was saved as "
                f"{dtype}; make the network with these types yourself and pass it as onto=."
            )
