"""Digests of weights, by which gates know the weights that they belong to."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WORKERS = min(4, os.cpu_count() or 1)  # hashlib lets other threads run


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each tensor "dtype:digest"; one without values (on the meta device) has none."""
    there = {name: whole(t) for name, t in tensors.items() if not t.is_meta}
    with ThreadPoolExecutor(_WORKERS) as pool:
        return dict(zip(there, pool.map(_digest, there.values()), strict=True))


def whole(t: Any) -> Any:
    """A tensor that is distributed over processes, gathered; any other as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _digest(t: Tensor) -> str:
    name = str(t.dtype).removeprefix("torch.")
    found = hashlib.sha256(f"{list(t.shape)}".encode())
    for part in _parts(t.detach()):
        part = part.cpu().resolve_conj().resolve_neg().contiguous()
        if part.numel():  # its memory as it is: numpy is not there for everybody
            memory = (ctypes.c_char * part.nbytes).from_address(part.data_ptr())
            found.update(memory)
    return f"{name}:{found.hexdigest()[:32]}"


def _parts(t: Tensor) -> Iterator[Tensor]:
    """The tensors that have memory: of a quantised one, what it is made of."""
    if not is_traceable_wrapper_subclass(t):
        yield t
        return
    names, _ = t.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(t, name))


def differing(want: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, str]:
    """The names on record whose tensors are others now, and how; {} where all are the same."""
    have = digests({name: t for name, t in tensors.items() if name in want})
    return {n: _apart(text, have.get(n)) for n, text in want.items() if text != have.get(n)}


def unlike(known: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, str]:
    """`differing`, and the tensors that are not on record."""
    new = {name: "is not on record" for name in tensors if name not in known}
    return {**differing(known, tensors), **new}


def _apart(want: str, have: str | None) -> str:
    if have is None:
        return "is missing"
    dtype, other = want.partition(":")[0], have.partition(":")[0]
    return "has other values" if dtype == other else f"is {other} and was {dtype}"
