"""Files of a checkpoint: tensors read and written with safetensors, put in place all at once.

A checkpoint is a config and at most one file of tensors, which the config names with its sha256;
beside a model's own files the config knows these, too. The config is replaced last and old files
are set aside until then (".previous"), so a save that breaks off anywhere leaves the old ones to be
read. Saves into one directory wait for each other; readers do not wait, and begin again where a
save went on between the config and the tensors.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion.checkpoint.digest import digests

CONFIG, WEIGHTS, GATES = "tg_config.json", "model.safetensors", "gates.safetensors"
BESIDE = "tg_gates.safetensors"  # the gates beside a model's own files
PICKLES = (".pt", ".pth", ".th")
_BEGUN = re.compile(
    rf"(\.tg|{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|{re.escape(GATES)})\.\d+-\w+\.tmp"
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the network is as it was."""


def safetensors_package() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "checkpoints need the package safetensors: pip install 'threshold-gating[text]'."
        ) from error
    return safetensors


def write_tensors(tensors: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Write a file of tensors; its size and sha256, as the config records them."""
    safetensors_package().torch.save_file(tensors, path, {"format": "pt"})
    sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def mark() -> str:
    """The end of the name of something half written, of this save alone."""
    return f".{os.getpid()}-{secrets.token_hex(4)}.tmp"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which is checked to be whole."""
    safetensors = safetensors_package()
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except OSError as error:
        raise unreadable(path, error) from error
    # A header may claim anything: also sizes and types that only torch stumbles over.
    except (safetensors.SafetensorError, *DAMAGE) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({one_line(error)}); copy it again or save "
            "again."
        ) from error
    return tensors


# What reading damaged data may end in.
DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError),
    *(TypeError, ValueError),
)


def one_line(error: BaseException) -> str:
    """What an error says, in a line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def unreadable(path: Path, error: OSError) -> CheckpointError:
    why = error.strerror or one_line(error)
    return CheckpointError(f"{path} cannot be read ({why}); give the directory that save() wrote.")


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk before going on."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open one
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder, which need not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def merge(folder: Path, into: Path) -> None:
    """Put what is in a folder into another one, which need not be there."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    remove(folder)


def previous(path: Path) -> Path:
    """Where a file is set aside while a new one takes its place."""
    return path.with_name(path.name + ".previous")


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """The only save into `directory` while inside; what earlier ones left half written is removed.

    The lock is the system's, on the directory itself: it leaves no file, and a process that is
    killed gives it back.
    """
    handle = _locked(directory)
    try:
        if handle is not None:  # who wrote these is gone, or would have the lock
            for path in directory.iterdir():
                if _BEGUN.fullmatch(path.name):
                    remove(path)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _locked(directory: Path) -> int | None:
    """The open directory with a lock on it, or None and a warning where there are no locks."""
    handle = None
    try:
        import fcntl

        handle = os.open(directory, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except (ImportError, OSError) as error:
        if handle is not None:
            os.close(handle)
        warnings.warn(
            f"save: {directory} cannot be locked ({one_line(error)}); make sure that no other "
            "process saves into it at the same time.",
            stacklevel=5,
        )
        return None
    return handle


def put_in_place(
    directory: Path,
    new: Mapping[str, Path],
    current: Mapping[str, Callable[[Path], bool]],
    obsolete: Iterable[str] = (),
) -> None:
    """Rename the `new` files, the config among them, to their names.

    Args:
        directory: of the checkpoint.
        new: name -> written file.
        current: the files that the config in place means, and how to know them; they are kept
            until last.
        obsolete: what goes with the old config.
    """
    for name in (n for n in new if n != CONFIG):
        shutil.copymode(new[CONFIG], new[name])  # safetensors lets only the owner read
        target = directory / name
        if name in current and target.exists():
            _set_aside(target, current[name])
        os.replace(new[name], target)
        sync(directory)
    os.replace(new[CONFIG], directory / CONFIG)
    sync(directory)
    gone = {GATES, BESIDE, *obsolete} - new.keys()
    aside = (previous(directory / name) for name in {*new, *current, WEIGHTS, GATES, BESIDE})
    for old in (*(directory / name for name in gone), *aside):
        old.unlink(missing_ok=True)


def _set_aside(path: Path, is_current: Callable[[Path], bool]) -> None:
    """Keep a file that the config in place means; a save that broke off may have kept it already,
    and what stands under its name is that save's."""
    old = previous(path)
    if not (old.exists() and is_current(old)):
        os.replace(path, old)


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    with safetensors_package().safe_open(path, "pt") as file:
        return list(file.keys())


_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_INDEX = re.compile(r"(?P<stem>.+)\.(?P<kind>safetensors|bin)\.index(?P<variant>\..+)?\.json")


def family(name: str) -> str | None:
    """What a file of weights is a shard or the index of: "model.safetensors"; None of no such."""
    name = name.removesuffix(".previous")
    if index := _INDEX.fullmatch(name):
        return f"{index['stem']}{index['variant'] or ''}.{index['kind']}"
    is_weights = name.endswith((".safetensors", ".bin")) and name not in (BESIDE, GATES)
    return _SHARD.sub("", name) if is_weights else None


def holds(path: Path, known: Mapping[str, str]) -> bool:
    """Whether a file of tensors is whole and holds none but those on record (`digest`)."""
    try:
        tensors = read_tensors(path)
    except CheckpointError:
        return False
    return all(known.get(name) == text for name, text in digests(tensors).items())


def matches(path: Path, about: Mapping[str, Any]) -> bool:
    try:
        with path.open("rb") as file:
            return _is(file, about)
    except FileNotFoundError:
        return False


def _is(file: BufferedReader, about: Mapping[str, Any]) -> bool:
    fits: bool = os.fstat(file.fileno()).st_size == about["bytes"]
    return fits and bool(hashlib.file_digest(file, "sha256").hexdigest() == about["sha256"])


def opened(path: Path) -> BufferedReader:
    """A file to read, or the error of a checkpoint."""
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


def is_there(file: BufferedReader) -> bool:
    """Whether an open file still has its name; a new one there cannot have its identity, too."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def find_tensors(
    about: Mapping[str, Any], strict: bool, config: BufferedReader
) -> tuple[Path, dict[str, Tensor]] | None:
    """The file that an open config means, under its name or set aside, and its tensors.

    Not strict: the file that is there now. None where a save came between.
    """
    path = Path(config.name).with_name(about["file"])
    for candidate in (path, previous(path)):
        try:
            file = candidate.open("rb")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unreadable(candidate, error) from error
        with file:
            if _is(file, about):
                tensors = _unless_replaced(file, candidate)
                return None if tensors is None else (candidate, tensors)
    if not is_there(config):
        return None
    if strict or not path.is_file():
        raise _absent(path, about)
    return path, read_tensors(path)


def _unless_replaced(file: BufferedReader, path: Path) -> dict[str, Tensor] | None:
    """The tensors of an open file, which safetensors opens once more by its name."""
    try:
        tensors = read_tensors(path)
    except CheckpointError:
        if is_there(file):
            raise
        return None
    return tensors if is_there(file) else None


def _absent(path: Path, about: Mapping[str, Any]) -> CheckpointError:
    if not path.is_file():
        return CheckpointError(
            f"{path} is missing, and {CONFIG} was written with it; copy the whole directory."
        )
    size = path.stat().st_size
    if size < about["bytes"]:
        return CheckpointError(
            f"{path} is truncated, {size} of {about['bytes']} bytes; copy it again or save again."
        )
    return CheckpointError(
        f"{path} is not the file that {CONFIG} was written with (sha256 differs), so it is damaged "
        "or belongs to another network; copy both again, or pass strict=False to take it as it is."
    )


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
            f"{path} does not end as files of weights do, in .safetensors or "
            f"{', '.join(PICKLES)}; got {path.suffix!r}."
        )
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give the path of a file of weights.")
    data = read_tensors(path) if path.suffix == ".safetensors" else _unpickled(path, trust)
    if isinstance(data, nn.Module):
        data = data.state_dict()
    while isinstance(data, Mapping) and (
        inside := [k for k in ("state_dict", "model") if isinstance(data.get(k), Mapping)]
    ):
        data = data[inside[0]]
    if not isinstance(data, Mapping) or not data:
        raise CheckpointError(
            f"{path} holds no weights; it must hold a state_dict, by itself or under "
            "'state_dict' or 'model'."
        )
    if other := [k for k, v in data.items() if not isinstance(v, Tensor)]:
        raise CheckpointError(
            f"{path} holds {other[0]!r}, which is not a tensor; it must hold a state_dict."
        )
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
            f"{path} is a pickle that needs {needs} to load; save the state_dict alone or as "
            "safetensors, or pass trust=True (--trust) if you trust where it comes from."
        ) from error
    except (EOFError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0].rstrip(": ")
    return CheckpointError(f"{path} is not a complete checkpoint of torch ({why}); copy it again.")
