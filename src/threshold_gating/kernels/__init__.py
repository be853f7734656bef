"""The functions of `primitive` as fast as this machine runs them; which way is chosen here.

`native` lowers a frozen exact instance to torch's own op, `reference` evaluates the gates in plain
torch, `auto` (the default) takes native where there is one. Figures and certificates are made
with native off. The environment variable TG_BACKEND sets the initial choice.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.instance import TG
from threshold_gating.kernels.lowering import Op, native, overwriting

__all__ = [
    "BACKENDS",
    "BackendError",
    "backend",
    "blend",
    "evaluate",
    "lowered",
    "native",
    "overwriting",
    "takes_native",
    "use",
]

BACKENDS = ("auto", "native", "reference")


class BackendError(RuntimeError):
    """A backend was asked for that does not exist here or cannot run this instance."""


class use:  # noqa: N801  (called like a function, as torch.set_grad_enabled is)
    """Choose the backend: at once when called, and until the end of a `with` block if given one.

    >>> with use("reference"):
    ...     backend()
    'reference'
    """

    def __init__(self, name: str) -> None:
        global _backend
        self._before = _backend
        _backend = _checked(name)

    def __enter__(self) -> use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _backend
        _backend = self._before


def backend() -> str:
    """The name of the backend in force."""
    return _backend


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise BackendError(
            f"no backend {name!r} (tg.kernels.use or the environment's TG_BACKEND); "
            f"this version has {', '.join(BACKENDS)}."
        )
    return name


_backend = _checked(os.environ.get("TG_BACKEND", "auto"))


def lowered(op: Op | None) -> Op | None:
    """`op`, torch's op for an instance (from `native`), if it is to run; None for the gates."""
    if _backend == "native" and op is None:
        raise BackendError(
            "this instance has no native op (it is learned, approximate or not one of torch's); "
            "use the backend 'auto' or 'reference' for it."
        )
    return op if takes_native() else None


def takes_native() -> bool:
    """Whether torch's own ops may run where they compute the same."""
    # An exported graph is for people and other tools to read: it holds the gates.
    return _backend == "native" or (_backend == "auto" and not torch.compiler.is_exporting())


def blend(x: Tensor, *parameters: Any, **options: Any) -> Tensor:
    """`primitive.blend` (Eq. 3), the gates themselves, by the fastest way that evaluates them."""
    return primitive.blend(x, *parameters, **options)


def evaluate(t: TG, x: Tensor, v: Tensor | None = None, op: Op | None = None) -> Tensor:
    """A frozen instance at `x` by the backend in force; `op` is its `native`, if it has one."""
    chosen = lowered(op) if v is None else None
    return t(x, v) if chosen is None else chosen(x)
