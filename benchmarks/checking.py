"""What comes before any timing: which machine this is, and whether its kernels are right."""

from __future__ import annotations

import json
import os
import platform
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.pairs import PAIRS, Pair, disagreement
from threshold_gating import kernels
from threshold_gating.kernels import host, runtime

SOURCES = Path(__file__).parent, Path(kernels.__file__).parents[1]


def machine() -> dict[str, str]:
    """What the figures belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"gpu": gpu, "cpu": platform.machine(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if runtime.is_installed():
        import triton

        found["triton"] = triton.__version__
    found["calls of gates by"] = host.status("cpu" if gpu == "none" else "cuda")[1]
    return found


def check(
    device: str, pairs: Iterable[Pair] | None = None, dtypes: tuple[torch.dtype, ...] | None = None
) -> list[str]:
    """Every pair of the table against float64, values and gradients; what is wrong, in lines."""
    return [
        line
        for pair in (PAIRS.values() if pairs is None else pairs)
        for dtype in dtypes or _dtypes(pair, device)
        for shape in (pair.shapes[1:] if device == "cuda" else pair.shapes[:1])
        for line in _wrong(pair, shape, dtype, device)
    ]


def found_right(file: Path, device: str) -> set[str]:
    """The families that runs of this code on this machine have found right, from `file`.

    Checks compile much and take as long as the timing; runs with `--warm` make them side by side.
    """
    if not file.exists():
        return set()
    here, found = code_of(device), set[str]()
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        try:
            kept = json.loads(line)
            found |= set(kept["families"]) if kept["of"] == here else set()
        except (ValueError, TypeError, KeyError):  # a run that was stopped while it wrote
            print(
                f"benchmarks: line {number} of {file} is not whole and is left out; what it says "
                "was right is checked again.",
                file=sys.stderr,
            )
    return found


def keep_right(file: Path, device: str, families: Iterable[str]) -> None:
    """One write a line: several runs may share the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cut = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")  # a run was stopped in it
    line = json.dumps({"of": code_of(device), "families": sorted(families)})
    with file.open("a") as out:
        out.write("\n" * cut + line + "\n")


def code_of(device: str) -> list[str]:
    """What a check and a time depend on: sources, what runs them, the machine and its versions."""
    files = sorted(
        p
        for folder in SOURCES
        for p in folder.rglob("*")
        if p.suffix in (".py", ".c", ".cpp", ".h")
    )
    known = {name: text for name, text in machine().items() if name != "threads"}
    how = [device, kernels.backend(), *(os.environ.get(name, "") for name in _CHOOSE)]
    return [str(zlib.crc32(b"".join(p.read_bytes() for p in files))), *how, *known.values()]


# what evaluates gates, and what compiles it
_CHOOSE = "TG_CPU", "TRITON_INTERPRET", "CC"


def _dtypes(pair: Pair, device: str) -> tuple[torch.dtype, ...]:
    """What is timed is mostly in bf16; K = 2 stands for all in fp16, a cast that differs."""
    if pair.slow:
        return (torch.bfloat16,) if device == "cuda" else (torch.float32,)
    narrow = (torch.bfloat16, torch.float16) if pair.name.startswith("silu") else (torch.bfloat16,)
    return torch.float32, *narrow


def _wrong(pair: Pair, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[str]:
    run = f" (runs {', '.join(pair.launches)})" if pair.launches and _launches(device) else ""
    size = "x".join(map(str, shape))
    what = f"{pair.name} {size} {str(dtype).removeprefix('torch.')}"
    try:
        with _in_full():
            errors = disagreement(pair, pair.inputs(shape, dtype, device))
    except Exception as failed:  # the other kernels are still to be looked at
        first = str(failed).strip().splitlines()
        yield f"{what}: {type(failed).__name__}: {first[0] if first else ''}{run}"
        return
    for name, error in errors.items():
        if not error <= (bound := pair.bound(name, dtype)):
            yield f"{what} {name}: error {error:.1e} above {bound:.1e}{run}"


@contextmanager
def _in_full() -> Iterator[None]:
    """Convolutions of float32 in float32; by default cuDNN rounds their inputs to ten bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _launches(device: str) -> bool:
    """Whether kernels of Triton run there."""
    return device == "cuda" or kernels.backend() == "triton"


def unchecked(device: str) -> str:
    """What the check says nothing about on this machine."""
    if _launches(device):
        return ""
    names = dict.fromkeys(name for pair in PAIRS.values() for name in pair.launches)
    return f"not checked and not timed, for Triton needs a GPU: {', '.join(names)}."
