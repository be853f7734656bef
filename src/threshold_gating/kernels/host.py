"""Calls of gates made in C++: for small inputs the host is what takes time.

`build` compiles `host.cpp` once for this Python and this torch, which takes about 15 s, so that
nothing does so unasked; every process loads it from then on. Where it was not
built, calls run in Python and give the same. The environment variable TG_HOST=python leaves it out.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from threshold_gating.kernels import runtime
from threshold_gating.kernels.backend import BackendError
from threshold_gating.kernels.compiler import CompilerError, extension

# The last is called by address: what was built for another one must not call it.
_FILES = "host.cpp", "host_node.h", "host_launched.h", "host_one_pass.h", "blend/blend.c"
SOURCES = [Path(__file__).parent / name for name in _FILES]
CHOICES = ("auto", "python")
_NAME = "threshold_gating_host"


def build() -> None:
    """Compile what calls a gate, for this Python and this torch; raises if it cannot be.

    It needs a C++ compiler (CXX, else c++, g++ or clang++) and Python's headers, and raises
    `compiler.CompilerError` with the compiler's words if it fails.
    """
    path = extension(SOURCES, build=True)
    assert path is not None  # it is built, or an error is raised
    try:
        load(path)
    except (ImportError, OSError) as error:
        raise CompilerError(f"{path} does not load, delete it ({error})") from error
    _loaded.cache_clear()
    _driving.cache_clear()


def module(device: str) -> Any | None:
    """The compiled module, for calls on "cpu" or "cuda"; None where Python has to do."""
    found = _found(device)
    return None if isinstance(found, str) else found


def status(device: str) -> tuple[bool, str]:
    """Whether C++ calls gates on such a device, or why not, in words."""
    found = _found(device)
    return (False, f"Python: {found}") if isinstance(found, str) else (True, "compiled C++")


def _found(device: str) -> Any | str:
    """The module, or why there is none. For a CPU nobody looks for a GPU: a process that did so
    may not fork any more."""
    return _loaded() if device == "cpu" else _driving()


@functools.cache
def _loaded() -> Any | str:
    asked = os.environ.get("TG_HOST") or "auto"
    if asked not in CHOICES:
        raise BackendError(f"TG_HOST is one of {', '.join(CHOICES)}; got {asked!r}.")
    if asked == "python":
        return "TG_HOST=python"
    try:
        path = extension(SOURCES, build=False)
        if path is None:
            return "not built; threshold_gating.kernels.build() compiles it once"
        return load(path)
    except (CompilerError, ImportError, OSError) as error:
        return f"it cannot be used ({error})"


@functools.cache
def _driving() -> Any | str:
    """The module with the driver's functions in it."""
    if not (torch.cuda.is_available() and runtime.is_installed()):
        return "there is no GPU, or no Triton"
    made = _loaded()
    if not isinstance(made, str):
        try:
            made.drive(*_driver(), False)
        except (AttributeError, OSError) as error:
            return f"it cannot be used ({error})"
    return made


def load(path: Path) -> Any:
    """The module in a file."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made


def _driver() -> tuple[int, ...]:
    """Where the driver launches kernels, where torch says what its stream is, and where the driver
    gives a thread its context."""
    torch_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    cuda = ctypes.CDLL("libcuda.so.1")
    context = cuda.cuDevicePrimaryCtxRetain, cuda.cuCtxSetCurrent
    found = cuda.cuLaunchKernel, torch_cuda.aoti_torch_get_current_cuda_stream, *context
    return tuple(map(address, found))


def address(function: Any) -> int:
    """Where a function of C lies."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found
