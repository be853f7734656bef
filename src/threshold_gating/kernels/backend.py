"""Which backend is in force, for this context, this thread, this forward pass, and what it runs.

`native` lowers a frozen exact instance to torch's own op, and so learned gates of a recurrent layer
that fold into its weights. `reference` evaluates the gates in plain torch, `triton` by fused
kernels on a GPU, `auto` (the default) takes native where there is one, Triton on a GPU and few
in-place passes on a CPU. Figures and certificates are made with `reference`. The environment
variable TG_BACKEND sets the initial choice.

Eager code reads a context variable, so threads and coroutines do not see each other's `with use`.
Compiled code reads a thread-local, because Dynamo cannot trace a context variable: there a
coroutine sees the last choice of its thread. A thread starts from the default of the process.

A forward pass that is repeated in the backward pass (`torch.utils.checkpoint`) has to be what it
was the first time. Autograd numbers the nodes that a thread makes, so a note of the number at which
the backend changed tells which one was in force when the node that is running was made. The numbers
are those of a thread: of a forward pass in one and its backward pass in another that has run gates
itself, only what is repeated in the backward pass goes by the other's choices.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from threshold_gating.kernels import runtime
from threshold_gating.primitive import graphs
from threshold_gating.primitive import is_memory as is_memory
from threshold_gating.primitive.graphs import exporting as exporting

_choice: ContextVar[str | None] = ContextVar("threshold_gating_backend", default=None)
_MOST_NOTES = 4096


Backend = Literal["auto", "native", "reference", "triton"]
BACKENDS = get_args(Backend)
# What evaluates the gates: the formulas of the reference, in-place passes on a CPU, kernels of
# Triton; in a compiled graph these kernels as nodes, nodes that pass over memory on a CPU, or steps
# that the compiler fuses.
Engine = Literal["plain", "cpu", "triton", "graph", "node", "steps"]


class BackendError(RuntimeError):
    """A backend was asked for that does not exist here or cannot run this instance."""


class Process:
    """What new threads start from."""

    default: ClassVar[str] = "auto"


class _Thread(threading.local):
    def __init__(self) -> None:  # not in the class: a compiled graph would keep that value
        self.start = Process.default
        self.compiled = Process.default
        self.notes: _Notes | None = None


_thread = _Thread()


def start_from(name: str) -> None:
    """Let this thread and those that start from now on begin with `name`."""
    Process.default = _thread.start = name
    _thread.compiled = _chosen()


def backend() -> str:
    """The name of the backend in force."""
    return _thread.compiled if torch.compiler.is_compiling() else eager_backend()


_running = torch._C._current_graph_task_id  # looked up here, for it is asked in every call


def eager_backend() -> str:
    """`backend` for code that knows that nothing is being compiled."""
    if _running() != -1:
        return _of_forward()
    name, notes = _choice.get(), _thread.notes
    if name is None:
        name = _thread.start
    if notes is None or notes.names[-1] != name or _last[0] is not notes:  # asked in every call
        _note(name)
    return name


def _chosen() -> str:
    name = _choice.get()
    return _thread.start if name is None else name


class use:  # noqa: N801  (called like a function, as torch.set_grad_enabled is)
    """Choose the backend: until the end of a `with` block, or from now on if called as a statement.

    The choice is that of this thread or coroutine. As a statement it is also the default from which
    new threads start.

    >>> with use("reference"):
    ...     backend()
    'reference'
    """

    def __init__(self, name: Backend) -> None:
        self._name, self._entered = checked(name), False
        self._before = [_choice.get()]
        self._set(name)

    def __enter__(self) -> use:
        if self._entered:  # by a block before, or around this one
            self._before.append(_choice.get())
            self._set(self._name)
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._set(self._before.pop())

    def _set(self, name: str | None) -> None:
        _note(_chosen())
        _choice.set(name)
        _thread.compiled = _chosen()
        _note(_thread.compiled)

    def _make_default(self) -> None:
        """A `with` block enters what it is given; nobody enters a statement's."""
        if not self._entered:
            self._entered = True
            start_from(self._name)

    def __del__(self) -> None:
        if hasattr(self, "_entered"):  # else the name was refused
            self._make_default()

    def __repr__(self) -> str:
        self._make_default()  # a prompt shows a statement's value, and keeps it
        return f"use({self._name!r})"


class _Notes:
    """From which node on which backend was in force; of one thread."""

    def __init__(self) -> None:
        self.nodes, self.names = [0], ["auto"]

    def add(self, name: str) -> None:
        if self.names[-1] == name:
            return
        node = torch._C._autograd._get_sequence_nr()
        if self.nodes[-1] == node:  # nothing was made under the last one
            self.names[-1] = name
            return
        self.nodes.append(node)
        self.names.append(name)
        if len(self.nodes) > _MOST_NOTES:
            del self.nodes[: _MOST_NOTES // 2], self.names[: _MOST_NOTES // 2]

    def at(self, node: int) -> str:
        return self.names[max(0, bisect_right(self.nodes, node) - 1)]


# Autograd's own threads, which run the backward pass on a GPU, choose no backend and have no notes:
# they go by those of the thread that was the last to make any, the one that trains.
_last: list[_Notes] = []


def _note(name: str) -> None:
    notes = _thread.notes
    if notes is None:
        notes = _thread.notes = _Notes()
        notes.names[0] = name
    notes.add(name)
    _last[:] = [notes]


def _of_forward() -> str:
    """The backend in force when the node that autograd runs now was made."""
    node: Any = torch._C._current_autograd_node()
    notes = _thread.notes or next(iter(_last), None)
    return _chosen() if notes is None or node is None else notes.at(node._sequence_nr())


def checked(name: str) -> str:
    """`name`, if there is such a backend here."""
    if name not in BACKENDS:
        raise BackendError(
            f"no backend {name!r} (tg.kernels.use or the environment's TG_BACKEND); "
            f"this version has {', '.join(BACKENDS)}."
        )
    if name == "triton":
        _check_triton()
    return name


def _check_triton() -> None:
    if not runtime.is_installed():
        raise BackendError(
            "the backend 'triton' needs Triton, which is not installed; "
            "pip install 'threshold-gating[triton]'."
        )
    if not torch.cuda.is_available() and not runtime.interpreting():
        raise BackendError(
            "the backend 'triton' needs a GPU, and torch sees none; "
            "use 'auto', or set TRITON_INTERPRET=1 to step through the kernels on the CPU."
        )


start_from(checked(os.environ.get("TG_BACKEND", "auto")))


def takes_native(name: str | None = None) -> bool:
    """Whether torch's own ops may run where they compute the same."""
    # An exported graph is for people and other tools to read: it holds the gates, unless asked.
    name = backend() if name is None else name
    return name == "native" or (name == "auto" and (not exporting() or graphs.takes_native()))


def no_native_op() -> BackendError:
    return BackendError(
        "this instance has no native op (it is learned, approximate or not one of torch's); "
        "use the backend 'auto' or 'reference' for it."
    )


def either(native: Any, gated: Any, rather: Tensor | None = None) -> Any:
    """Torch's own function, if there is one and it may run, or the one that evaluates gates.

    Where kernels of Triton compute with `rather`, gates are faster: `auto` takes them.
    """
    name = backend()
    if native is not None and takes_native(name):
        slow = rather is not None and name == "auto" and runs_triton(rather, name)
        return gated if slow else native
    if name == "native":
        raise no_native_op()
    return gated


def engine(x: Tensor, name: str) -> Engine:
    """What evaluates gates at x under the backend `name`."""
    if name == "reference":
        return "plain"
    triton = runs_triton(x, name)
    if torch.compiler.is_compiling():
        if exporting():
            return "plain"
        return "graph" if triton else "steps" if x.is_cpu else "plain"
    if not (triton or (x.is_cpu and x.is_floating_point())) or not is_memory(x):
        return "plain"
    return "triton" if triton else "cpu"


def runs_triton(x: Tensor, name: str) -> bool:
    """Whether Triton computes with x: on a GPU, or step by step where it was asked for."""
    if x.dtype not in runtime.DTYPES:
        return False
    if x.is_cuda:
        return name != "reference" and runtime.is_installed()
    return name == "triton" and x.is_cpu and runtime.interpreting()
