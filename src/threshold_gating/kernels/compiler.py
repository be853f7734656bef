"""Sources of the package as shared libraries, kept in a user's cache: C at its first use, C++ for
this Python and this torch when somebody asks for it, because that takes some 15 s.

No compiler is needed: where there is none, or it fails, `library` says why and whoever asked goes
another way; `tg env` prints it. A file in the cache is named after a hash of all that it depends on
(source, flags, compiler, processor, torch) and one of what is in it: a file that was cut off must
not be loaded, for a process that runs it ends. It is written under another name first and then
moved, so that two processes do not disturb each other. A compiler that failed is not asked again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 20.0  # after which a compiler is taken to hang
_OF_EXTENSION = 600.0  # the same for torch's headers, on a busy machine
_NAMES = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
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
    """A file of C or C++ could not be compiled or loaded here."""


def library(source: Path, defined: Sequence[str]) -> ctypes.CDLL:
    """The C file, compiled with these definitions ("K=5"); raises CompilerError if it cannot be."""
    try:
        command = [*_compiler(), *_FLAGS, *_OF_MACHINE.get(platform.machine(), ())]
        command += [f"-D{definition}" for definition in defined]
        stem = _stem([source], [*command, _identity()])
        path = _kept(stem) or _compiled([*command, str(source)], stem)
    except OSError as error:
        raise CompilerError(f"nothing can be compiled ({error})") from None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"what {command[0]} made cannot be loaded ({error})") from None


def extension(sources: Sequence[Path], build: bool) -> Path | None:
    """The first of C++ files, which depends on the others, as a module for this Python and torch.

    None if it is not in the cache and not to be built. Raises CompilerError if it cannot be.
    """
    import torch

    home = Path(torch.__file__).parent
    flags = [
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(home / "include"), "-isystem", sysconfig.get_path("include")),
    ]
    try:
        # not of a compiler or a processor: what is built serves where there is no compiler
        of = torch.__version__, str(torch.version.git_version), sys.version, platform.machine()
        stem = _stem(sources, [*flags, *of])
        path = _kept(stem)
        if path is None and build:
            linked = [f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
            command = [*_compiler("CXX"), *flags, str(sources[0]), *linked]
            path = _compiled(command, stem, _OF_EXTENSION)
    except OSError as error:
        raise CompilerError(f"nothing can be compiled ({error})") from None
    return path


def _stem(sources: Sequence[Path], depends: Sequence[str]) -> str:
    """How a file in the cache begins that is made from sources and depends on this."""
    name = hashlib.sha256("\0".join(depends).encode())
    for source in sources:
        name.update(source.read_bytes())
    return f"{sources[0].stem}-{name.hexdigest()[:32]}"


def _kept(stem: str) -> Path | None:
    return next((path for path in _folder().glob(f"{stem}-*.so") if _is_whole(path)), None)


def _is_whole(path: Path) -> bool:
    """Whether what is in a file is what its name says."""
    try:
        return path.stem.endswith(_sum(path.read_bytes()))
    except OSError:
        return False


def _sum(content: bytes) -> str:
    return "-" + hashlib.sha256(content).hexdigest()[:16]


_failed: dict[str, str] = {}  # how a compiler of C failed in this process: it is asked for often


def _compiled(command: Sequence[str], stem: str, seconds: float | None = None) -> Path:
    """The file in the cache that the compiler makes."""
    compiler, often = command[0], seconds is None
    if often and compiler in _failed:
        raise CompilerError(_failed[compiler])
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        made = Path(folder) / "made.so"
        try:
            _run([*command, "-o", str(made), "-lm"], SECONDS if seconds is None else seconds)
        except CompilerError as error:
            if often:
                _failed[compiler] = str(error)
            raise
        return _moved(made, stem, compiler)


def _moved(made: Path, stem: str, compiler: str) -> Path:
    """What was made under its name in the cache."""
    try:
        content = made.read_bytes()
        with made.open("rb+") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise CompilerError(f"{compiler} makes no file ({error})") from None
    path = _folder() / f"{stem}{_sum(content)}.so"
    try:
        os.replace(made, path)
    except OSError as error:
        raise CompilerError(f"{path} is in the way, delete it ({error})") from None
    return path


def _run(command: Sequence[str], seconds: float) -> None:
    """Run the compiler, and end it with all that it started if it takes too long."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, encoding="utf-8", errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CompilerError(f"{command[0]} did not end within {seconds:g} s") from None
        finally:
            if process.poll() is None:
                _end(process)
    if process.returncode:
        lines = said.strip().splitlines() or [f"status {process.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise CompilerError(f"{command[0]} fails: {said}")


def _end(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


@functools.cache
def _compiler(variable: str = "CC") -> tuple[str, ...]:
    """The compiler, and the arguments that CC or CXX has for it."""
    asked, usual = os.environ.get(variable, "").strip(), _NAMES[variable]
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise CompilerError(f"{variable}={asked} cannot be read ({error})") from None
    found = [p for p in map(shutil.which, words[:1] or usual) if p is not None]
    if not found:
        looked = f"{variable}={asked}" if asked else f"there is no {', '.join(usual)}"
        raise CompilerError(
            f"no {'C' if variable == 'CC' else 'C++'} compiler was found ({looked})"
        )
    return found[0], *words[1:]


@functools.cache
def _identity(variable: str = "CC") -> str:
    """The compiler, by its file, and the processor, by what it says of itself."""
    path = os.path.realpath(_compiler(variable)[0])
    about = os.stat(path)
    return f"{path} {about.st_size} {about.st_mtime_ns} {platform.machine()} {_processor()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", errors="replace") as file:
            first = file.read(8192).partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(("model", "flags", "Feat"))]
        return "\n".join(lines)
    except OSError:
        return platform.processor()


@functools.cache
def _folder() -> Path:
    """The cache, which nobody else may write to: what is in it is run."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as its specification has it
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise CompilerError("there is no home folder for a cache; set HOME or XDG_CACHE_HOME")
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
