"""Gates beside a model's own files: what `save_pretrained` of a converted network writes.

The class's own method writes, with the gates taken out of the state dict, into a folder of this
save alone inside the directory; gates, config and card join them there. Then all files are renamed
to their names, the config last. The config knows every weight by its digest, so that gates never
meet the weights of another save.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from threshold_gating.conversion.checkpoint import card, files, save_load, schema
from threshold_gating.conversion.checkpoint.digest import digests, whole
from threshold_gating.conversion.checkpoint.files import CheckpointError
from threshold_gating.conversion.checkpoint.pretrained import implementations
from threshold_gating.conversion.hub import UPLOAD

_TENSORS = (".safetensors",)
_PICKLED = (".bin", ".ckpt", ".h5", ".msgpack", *files.PICKLES)
# What is to be added to a folder before it is uploaded, by the folder.
_PENDING: dict[str, Callable[[], None]] = {}


def save(model: nn.Module, own: Callable[..., Any], above: bool, *args: Any, **kwargs: Any) -> Any:
    """`own(*args, **kwargs)`, the `save_pretrained` of a network's class, with the gates beside.

    Args:
        model: the network, or a part of one.
        own: the method of its class, bound.
        above: whether its calls are answered as they come by a network around it.
    """
    call = inspect.signature(own).bind(*args, **kwargs)
    about = _about(model, above)
    given = next(iter(call.arguments))
    directory = Path(call.arguments[given])
    if about is None or directory.is_file():  # no gates in this part; or the class's own complaint
        return own(*args, **kwargs)
    _check_call(model, call)
    state = call.arguments.get("state_dict")
    gates = schema.gate_state(model)
    keys = _keys(model, gates)
    # as a state dict has them that was given to be saved: averages, gathered ones
    given_gates = {k: t for k, t in (state or {}).items() if k in gates}
    stored = {name: whole(t) for name, t in {**gates, **given_gates}.items()}
    if state is not None:
        call.arguments["state_dict"] = {k: t for k, t in state.items() if k not in keys}
    directory.mkdir(parents=True, exist_ok=True)
    writes = _writes(model, call)
    with files.alone(directory) if writes else nullcontext():
        # one that does not write must not wait, nor be tidied up by the one that does
        staged = directory / f".tg{files.mark()}" if writes else Path(tempfile.mkdtemp())
        staged.mkdir(exist_ok=True)
        is_text = isinstance(call.arguments[given], str)  # some classes take no other paths
        call.arguments[given] = str(staged) if is_text else staged
        variant = call.arguments.get("variant")
        _PENDING[str(staged)] = lambda: _complete(model, about, stored, staged, variant)
        try:
            with _without(model, keys):
                result = own(*call.args, **_named_repository(call, directory))
            if writes and any(staged.iterdir()):
                before_upload(model, staged)
                _commit(staged, directory, model)
        finally:
            _PENDING.pop(str(staged), None)
            files.remove(staged)
    return result


def _about(model: nn.Module, above: bool) -> dict[str, Any] | None:
    """The config of a part of a network; None where it has no gates."""
    about = schema.describe(model)
    if above and "tg_sites" not in vars(model):
        about["owners"].insert(0, {"name": "", "also": [], "calls": schema.AS_THEY_COME})
    return about if any(about[kind] for kind in schema.STRUCTURE) else None


def _check_call(model: nn.Module, call: inspect.BoundArguments) -> None:
    """Refuse what would write weights, or upload them, past the gates."""
    given = {**call.arguments, **call.arguments.get("kwargs", {})}
    if given.get("distributed_checkpoint"):
        raise CheckpointError(
            "save_pretrained(distributed_checkpoint=True) writes the parts of each process, and "
            "the gates among them, where from_pretrained does not expect any; leave it out, which "
            "gathers the weights, or save with torch.distributed.checkpoint."
        )
    if given.get("push_to_hub") and not hasattr(type(model), UPLOAD):
        raise CheckpointError(
            f"save_pretrained(push_to_hub=True) of {type(model).__name__} uploads before the gates "
            "are written; save without it, then upload the folder (huggingface_hub.upload_folder)."
        )


def _keys(model: nn.Module, gates: Mapping[str, Tensor]) -> set[str]:
    """All keys of learned gates in a state dict; a shared module has several."""
    own = {id(t) for t in gates.values()}
    return {k for k, t in model.state_dict(keep_vars=True).items() if id(t) in own}


def _named_repository(call: inspect.BoundArguments, directory: Path) -> dict[str, Any]:
    """The keyword arguments; a repository that is named by the directory keeps this name."""
    kwargs = dict(call.kwargs)
    if kwargs.get("push_to_hub") or call.arguments.get("push_to_hub"):
        kwargs.setdefault("repo_id", directory.name)
    return kwargs


def _writes(model: nn.Module, call: inspect.BoundArguments) -> bool:
    """Whether this process is the one of several that writes; the others must not wait for it."""
    main = bool(call.arguments.get("is_main_process", True))
    decides = getattr(model, "should_save_on_this_rank", None)
    return bool(decides(main)) if callable(decides) else main


@contextmanager
def _without(model: nn.Module, keys: set[str]) -> Iterator[None]:
    """State dicts that this thread takes of `model` have its own keys only."""
    thread = threading.get_ident()

    def drop(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if threading.get_ident() == thread:
            for name in keys:
                state.pop(prefix + name, None)

    hook = model.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hook.remove()


def _complete(
    model: nn.Module,
    about: Mapping[str, Any],
    gates: Mapping[str, Tensor],
    folder: Path,
    variant: str | None,
) -> None:
    """Write gates and config for the weights in `folder`."""
    weights = sorted(p for p in folder.iterdir() if p.suffix in _TENSORS)
    if pickled := [p.name for p in folder.iterdir() if p.suffix in _PICKLED]:
        raise CheckpointError(
            f"save_pretrained wrote {pickled[0]}, and gates are saved beside safetensors alone; "
            "leave safe_serialization as it is."
        )
    original: dict[str, str] = {}
    for path in weights:
        files.sync(path)
        original |= digests(files.read_tensors(path))
    if among := [name for name in gates if name in original]:
        raise CheckpointError(
            f"save_pretrained wrote {among[0]!r}, a gate, among the weights, where from_pretrained "
            "does not expect it; save with tg.conversion.save instead."
        )
    stored, aliases = save_load.once(gates)
    names = [path.name for path in weights]
    more = {
        "aliases": aliases,
        "gates_only": True,
        "original": original,
        "pretrained": {"files": names, "variant": variant, "made": implementations(model)},
        "report": card.kept(model),
    }
    path = folder / files.BESIDE
    save_load.write({**about, **more}, stored, path, files.BESIDE, folder / files.CONFIG)


def before_upload(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Have gates and card in a folder that is about to be uploaded, or put in place."""
    complete = _PENDING.pop(os.fspath(folder), None)
    if complete is not None:
        complete()
    if (Path(folder) / files.CONFIG).is_file():
        card.put(model, Path(folder))


def _commit(staged: Path, directory: Path, model: nn.Module) -> None:
    """Have the files of a finished save under their names, and none of an older one beside."""
    for folder in (p for p in staged.iterdir() if p.is_dir()):
        files.merge(folder, directory / folder.name)
    new = {p.name: p for p in staged.iterdir() if p.is_file() and p.name != card.NAME}
    old = save_load.current(directory)
    written = {files.family(name) for name in new} - {None}
    stale = [p.name for p in directory.iterdir() if p.is_file() and files.family(p.name) in written]
    files.put_in_place(directory, new, old, stale)
    card.put(model, directory)
