"""The line of a network's own code that makes a call, as file:line, run or traced."""

from __future__ import annotations

import os
import re
import sys
from types import FrameType

import torch
from torch._guards import TracingContext

_HOME = __name__.rpartition(".")[0]  # of the conversion, which looks on
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_HOMES = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))


def calling_line() -> str:
    """The line of the network's code that is running, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if home.partition(".")[0] != "torch" and not home.startswith(_HOME):
            return _spelled(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def in_function() -> bool:
    """Whether the code that is running is the forward of a `torch.autograd.Function`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


def traced_line() -> str:
    """The same while a compiler follows the code, in frames of its own; "" where it has none."""
    for at in reversed(TracingContext.extract_stack()):
        if not at.filename.startswith(_HOMES):
            return _spelled(at.filename, at.lineno or 0)
    return ""


traced_line.__dict__["_dynamo_marked_constant"] = True  # run while the graph is traced


def _spelled(file: str, line: int) -> str:
    """Each copy of a graph module has the same code again, in a file with another number."""
    return f"{re.sub('^<eval_with_key>.*', '<eval_with_key>', file)}:{line}"
