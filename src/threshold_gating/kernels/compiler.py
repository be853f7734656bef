"""C files of the package as shared libraries: compiled at their first use, kept in a user's cache.

No compiler is needed: where there is none, or it fails, `library` says why and whoever asked goes
another way; `tg env` prints it. A file in the cache is named after a hash of all that it depends on
(source, flags, compiler, processor). It is written under another name first and then moved, so that
two processes do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 60.0  # after which a compiler is taken to hang
_COMPILERS = ("cc", "gcc", "clang")
# No rule of arithmetic is given up but two that nobody asks about here: errno and traps.
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
# The name of a file in the cache has the processor in it, so its instructions may be in the file.
_OF_MACHINE = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "AMD64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
    "arm64": ("-mcpu=native",),
}


class CompilerError(RuntimeError):
    """A C file could not be compiled or loaded here."""


def library(source: Path, defined: Sequence[str]) -> ctypes.CDLL:
    """The C file, compiled with these definitions ("K=5"); raises CompilerError if it cannot be."""
    command = [_compiler(), *_FLAGS, *_OF_MACHINE.get(platform.machine(), ())]
    command += [f"-D{definition}" for definition in defined]
    name = hashlib.sha256("\0".join([*command, _identity(), source.read_text()]).encode())
    path = _folder() / f"{source.stem}-{name.hexdigest()[:32]}.so"
    if not path.exists():
        _compile([*command, str(source)], path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"what {command[0]} made cannot be loaded ({error})") from None


def _compile(command: Sequence[str], path: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run(
                [*command, "-o", str(made), "-lm"],
                capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if done.returncode:
                said = next(iter(done.stderr.strip().splitlines()), f"status {done.returncode}")
                raise CompilerError(f"{command[0]} fails: {said}")
            os.replace(made, path)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} did not end within {SECONDS:g} s") from None
    except OSError as error:
        raise CompilerError(f"nothing can be compiled into {path.parent} ({error})") from None


@functools.cache
def _compiler() -> str:
    asked = os.environ.get("CC", "")
    found = [p for p in map(shutil.which, [asked] if asked else _COMPILERS) if p is not None]
    if not found:
        looked = f"CC={asked}" if asked else f"there is no {', '.join(_COMPILERS)}"
        raise CompilerError(f"no C compiler was found ({looked})")
    return found[0]


@functools.cache
def _identity() -> str:
    """The compiler, by its file, and the processor, by what it says of itself."""
    path = os.path.realpath(_compiler())
    about = os.stat(path)
    return f"{path} {about.st_size} {about.st_mtime_ns} {platform.machine()} {_processor()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(8192).partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(("model", "flags", "Feat"))]
        return "\n".join(lines)
    except OSError:
        return platform.processor()


@functools.cache
def _folder() -> Path:
    """The cache, which nobody else may write to: what is in it is run."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "threshold_gating"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise CompilerError(f"there is no cache folder ({error})") from None
    own: Any = getattr(os, "getuid", lambda: about.st_uid)()
    if about.st_uid != own or (sys.platform != "win32" and about.st_mode & 0o022):
        raise CompilerError(f"{folder} can be written to by others, and what is in it would be run")
    return folder
