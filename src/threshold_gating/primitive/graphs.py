"""What a graph of `torch.export` holds of gates: their steps, one node for each, or torch's ops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

# steps: the formulas of each gate; kept: one node a gate; native: torch's own op where a frozen
# gate is exactly that, one node a gate elsewhere
GraphForm = Literal["steps", "kept", "native"]


class _Thread(threading.local):
    form: GraphForm = "steps"
    site: str = ""  # whose gates are being evaluated, where that is not a module


_thread = _Thread()


@contextmanager
def holding(form: GraphForm) -> Iterator[None]:
    """Let graphs that are exported inside hold gates in this form."""
    before, _thread.form = _thread.form, form
    try:
        yield
    finally:
        _thread.form = before


@contextmanager
def at_site(name: str) -> Iterator[None]:
    """Let nodes of gates that are made inside bear this name."""
    before, _thread.site = _thread.site, name
    try:
        yield
    finally:
        _thread.site = before


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
