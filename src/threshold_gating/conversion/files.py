"""The files of a checkpoint: tensors read and written with safetensors, put in place as one.

A checkpoint is a config and at most one file of tensors, which the config names with its sha256.
The config is replaced last and old tensors are set aside until then (".previous"), so a save that
breaks off anywhere leaves the old pair to be read.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONFIG, WEIGHTS, GATES = "tg_config.json", "model.safetensors", "gates.safetensors"
PICKLES = (".pt", ".pth", ".th")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the network is as it was."""


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "checkpoints need the package safetensors: pip install 'threshold-gating[text]'."
        ) from error
    return safetensors


def write_tensors(tensors: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Write a file of tensors; its size and sha256, as the config records them."""
    _safetensors().torch.save_file(tensors, path, {"format": "pt"})
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which is checked to be whole."""
    safetensors = _safetensors()
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path}: is no whole safetensors file ({error}); copy it again or save again."
        ) from error
    return tensors


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk before going on."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open one
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def put_in_place(
    directory: Path, new: Mapping[str, Path], current: Mapping[str, Any] | None
) -> None:
    """Rename the `new` files, the config among them, to their names.

    Args:
        directory: of the checkpoint.
        new: name -> written file.
        current: what the config in place says of its file of tensors; these are kept until last.
    """
    for name in (n for n in new if n != CONFIG):
        shutil.copymode(new[CONFIG], new[name])  # safetensors lets only the owner read
        target = directory / name
        if current is not None and _matches(target, current):
            os.replace(target, _previous(target))
        os.replace(new[name], target)
        sync(directory)
    os.replace(new[CONFIG], directory / CONFIG)
    sync(directory)
    for old in (_previous(directory / WEIGHTS), _previous(directory / GATES)):
        old.unlink(missing_ok=True)
    if GATES not in new:
        (directory / GATES).unlink(missing_ok=True)


def _matches(path: Path, about: Mapping[str, Any]) -> bool:
    fits = path.is_file() and path.stat().st_size == about["bytes"]
    return fits and _sha256(path) == about["sha256"]


def find_tensors(directory: Path, about: Mapping[str, Any], strict: bool) -> Path:
    """The file that the config means, under its name or set aside; not strict: as it is now."""
    path = directory / str(about["file"])
    for candidate in (path, _previous(path)):
        if _matches(candidate, about):
            return candidate
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing, and {CONFIG} was written with it; copy the whole directory."
        )
    size = path.stat().st_size
    if strict and size < about["bytes"]:
        raise CheckpointError(
            f"{path}: cut short, {size} of {about['bytes']} bytes; copy it again or save again."
        )
    if strict:
        raise CheckpointError(
            f"{path}: not the file that {CONFIG} was written with (sha256 differs), so damaged or "
            "of another network; copy both again, or pass strict=False to take it as it is."
        )
    return path


def load_weights(path: str | os.PathLike[str], *, trust: bool = False) -> dict[str, Tensor]:
    """The tensors of a file of weights: .safetensors, or .pt, .pth, .th as `torch.save` writes.

    A state_dict is found under "state_dict" or "model"; what torch.compile and data parallelism
    put before the names ("_orig_mod.", "module.") is taken off.

    Args:
        path: the file.
        trust: run the code that a pickle may hold. Only for files whose origin you trust.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", *PICKLES):
        raise CheckpointError(
            f"{path}: weights come as .safetensors, {', '.join(PICKLES)}; not as {path.suffix!r}."
        )
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; give the path of a file of weights.")
    data = read_tensors(path) if path.suffix == ".safetensors" else _unpickled(path, trust)
    if isinstance(data, nn.Module):
        data = data.state_dict()
    while isinstance(data, Mapping) and (
        inside := [k for k in ("state_dict", "model") if isinstance(data.get(k), Mapping)]
    ):
        data = data[inside[0]]
    if not isinstance(data, Mapping) or not data:
        raise CheckpointError(
            f"{path}: holds no weights; a state_dict is wanted, by itself or under 'state_dict' or "
            "'model'."
        )
    if other := [k for k, v in data.items() if not isinstance(v, Tensor)]:
        raise CheckpointError(f"{path}: {other[0]!r} is no tensor; a state_dict is wanted.")
    return _bare(data)


def _bare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name.replace("_orig_mod.", ""): t for name, t in tensors.items()}
    while all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): t for name, t in found.items()}
    return found


def _unpickled(path: Path, trust: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if trust or "Unsupported" not in str(error):
            raise _damaged(path, error) from error
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        needs = f"the code of {wanted[1]}" if wanted else "code"
        raise CheckpointError(
            f"{path}: a pickle that needs {needs} to load; save the state_dict alone or as "
            "safetensors, or pass trust=True (--trust) if you trust where it comes from."
        ) from error
    except (EOFError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0].rstrip(": ")
    return CheckpointError(f"{path}: is no whole checkpoint of torch ({why}); copy it again.")
