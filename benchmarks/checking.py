"""What comes before any timing: which machine this is, and whether its kernels are right."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator

import torch

from threshold_gating import kernels
from threshold_gating.kernels.pairs import PAIRS, Pair, disagreement


def machine() -> dict[str, str]:
    """What the figures belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"gpu": gpu, "cpu": platform.machine(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if kernels.launch.is_installed():
        import triton

        found["triton"] = triton.__version__
    return found


def check(
    device: str, dtypes: tuple[torch.dtype, ...], pairs: Iterable[Pair] | None = None
) -> list[str]:
    """Every pair of the table against float64, values and gradients; what is wrong, in lines."""
    wrong: list[str] = []
    for pair in PAIRS.values() if pairs is None else pairs:
        # a compiler takes a second or two for each on a CPU
        few = pair.family == "compiled" and device == "cpu"
        for dtype in dtypes[:1] if few else dtypes:
            wrong += _wrong(pair, device, dtype)
    return wrong


def _wrong(pair: Pair, device: str, dtype: torch.dtype) -> Iterator[str]:
    run = f" (runs {', '.join(pair.launches)})" if pair.launches and _launches(device) else ""
    what = f"{pair.name} {str(dtype).removeprefix('torch.')}"
    try:
        inputs = pair.inputs(pair.shapes[device == "cuda"], dtype, device)
        errors = disagreement(pair, inputs)
    except Exception as failed:  # the other kernels are still to be looked at
        first = str(failed).strip().splitlines()
        yield f"{what}: {type(failed).__name__}: {first[0] if first else ''}{run}"
        return
    for name, error in errors.items():
        if not error <= (bound := pair.bound(name, dtype)):
            yield f"{what} {name}: error {error:.1e} above {bound:.1e}{run}"


def _launches(device: str) -> bool:
    """Whether kernels of Triton run there."""
    return device == "cuda" or kernels.backend() == "triton"


def unchecked(device: str) -> str:
    """What the check says nothing about on this machine."""
    if _launches(device):
        return ""
    names = dict.fromkeys(name for pair in PAIRS.values() for name in pair.launches)
    return f"not checked and not timed, for Triton needs a GPU: {', '.join(names)}."
