"""What a graph holds of gates: steps, a node for each, or torch's ops; what compilers are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch

# steps: the formulas of each gate; kept: one node a gate; native: torch's own op where a frozen
# gate is exactly that, one node a gate elsewhere
GraphForm = Literal["steps", "kept", "native"]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Thread(threading.local):
    form: GraphForm = "steps"
    site: str = ""  # whose gates are being evaluated, where that is not a module


_thread = _Thread()


def holding(form: GraphForm) -> AbstractContextManager[None]:
    """Let graphs that are exported inside hold gates in this form."""
    return _having("form", form)


def at_site(name: str) -> AbstractContextManager[None]:
    """Let nodes of gates that are made inside bear this name."""
    return _having("site", name)


@contextmanager
def _having(what: str, value: str) -> Iterator[None]:
    before = getattr(_thread, what)
    setattr(_thread, what, value)
    try:
        yield
    finally:
        setattr(_thread, what, before)


def site() -> str:
    """The name of the site that is being evaluated; "" for one that is a module."""
    return _thread.site


def exporting() -> bool:
    """Whether a graph is being made for torch.export."""
    # The flag and not `torch.compiler.is_exporting()`: Dynamo of torch 2.11 takes that for True
    # in every graph that it compiles.
    return torch.compiler._is_exporting_flag


def keeps_gates() -> bool:
    """Whether the graph that is being made has one node for each gate."""
    return torch.compiler._is_exporting_flag and _thread.form != "steps"  # asked in every call


def takes_native() -> bool:
    """Whether the graph that is being made has torch's own ops where these are exact."""
    return exporting() and _thread.form == "native"


def constant(f: _Function) -> _Function:
    """To a compiler the answer is a constant: `torch.compiler.assume_constant_result`, without the
    second that its import takes."""
    f.__dict__["_dynamo_marked_constant"] = True
    return f


def is_known(condition: bool) -> bool:
    """Whether this holds for all sizes that the graph being compiled is for: it is not compiled
    again for those of which it does not."""
    # here, because it loads half a second of modules that a compiler has loaded already
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
