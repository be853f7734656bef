"""`Site`: one place where a nonlinearity happens; how it and its tensors are named, and its error.

`watch` says how sites are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.nn.spec import Spec


class ConversionError(ValueError):
    """A network, or a part of it, that cannot be converted; `site` names the place."""

    def __init__(self, message: str, site: str = "") -> None:
        super().__init__(message)
        self.site = site


@contextmanager
def instead(before: str, after: str, kind: type[ValueError] = ConversionError) -> Iterator[None]:
    """Whatever goes wrong inside is an error of this kind, with its words between `before` and
    `after`; a `ConversionError` says all of it already."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        raise kind(f"{before} ({type(error).__name__}: {error}){after}") from error


@dataclass(frozen=True)
class Site:
    """One place where a nonlinearity happens, and the instance that stands there.

    `t` is None where the nonlinearity is not one element-wise function (softmax, attention, GLU).
    `sup` is the largest error of `t` over the line, 0.0 where it is exact. `learns` is None where
    nothing is learned; else the site starts as `t`.
    """

    name: str
    kind: str
    t: TG | None = None
    exact: bool = True
    sup: float = 0.0
    parameters: tuple[Any, ...] = ()
    op: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, compare=False)
    line: str = field(default="", repr=False, compare=False)  # of the code that makes the call
    learns: Spec | None = None
    # Before the names of its tensors in its owner. A field, and not made from the name in a graph,
    # which would be compiled again for each layer.
    prefix: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", prefix_of(self.name.rpartition(":")[2]))


_CALL = "tg_call_"  # before the number of a call of a module that is called several times


def prefix_of(call: str) -> str:
    """Of the names of a call's tensors in its owner: "tg_relu_0_" for "relu#0"."""
    return f"tg_{call.replace('#', '_')}_"


def prefix_of_call(k: int) -> str:
    """Of the names of the tensors of a module's k-th call in a run."""
    return f"{_CALL}{k}_"


def site_name(path: str, prefix: str) -> str:
    """The name of the site whose tensors stand under `prefix` in the module `path`."""
    if not prefix:
        return path
    if prefix.startswith(_CALL):
        k = prefix.removeprefix(_CALL).rstrip("_")
        return path if k == "0" else f"{path}#{k}"
    kind, _, k = prefix.removeprefix("tg_").rstrip("_").rpartition("_")
    return f"{path}:{kind}#{k}"
