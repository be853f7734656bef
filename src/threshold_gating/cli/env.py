"""`tg env`: installed versions, devices, and a trial of each backend."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from threshold_gating import kernels, taxonomy
from threshold_gating._version import __version__
from threshold_gating.cli.printing import show
from threshold_gating.kernels.blend.one_pass import status as cpu_gates
from threshold_gating.kernels.host import status as calls_of_gates
from threshold_gating.nn.activation import Activation

_OPTIONAL = (
    *("matplotlib", "onnx", "onnxruntime", "ray", "scipy", "timm", "torchvision"),
    *("transformers", "triton"),
)
_TRIED = ("relu", "silu", "tanh", "mish")  # each has a native op, so every backend runs them
# Values and gradients of order 10 in float32, a few roundings of 6e-7 each; a wrong formula is
# off by far more.
_WORKS_BELOW = 1e-5


def env(args: argparse.Namespace) -> int:
    """`tg env`."""
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        devices["cuda"] = torch.cuda.get_device_name()
    tried = {name: {d: try_backend(name, d) for d in devices} for name in kernels.BACKENDS}
    facts: dict[str, Any] = {"versions": _versions(), "devices": devices, "backends": tried}
    gates, calls = cpu_gates(), calls_of_gates("cpu")
    if not gates[0]:  # it is C that C++ calls
        calls = False, "Python: soft gates are not compiled"
    found = gates, calls, calls_of_gates("cuda")
    for key, each in zip(("cpu_gates", "cpu_calls", "gpu_calls"), found, strict=True):
        facts[key] = dict(zip(("works", "message"), each, strict=True))
    show(args, {**facts, "backend": kernels.backend()}, _text(**facts))
    works = all(result["works"] is not False for on in tried.values() for result in on.values())
    return 0 if works else 1


def _text(
    versions: Any, devices: Any, backends: Any, cpu_gates: Any, cpu_calls: Any, gpu_calls: Any
) -> str:
    lines = [f"{name:<16}  {version or 'not installed'}" for name, version in versions.items()]
    lines += ["", "devices:", *(f"{device:<16}  {words}" for device, words in devices.items())]
    lines += ["", "backends, forward and backward in float32 against torch in float64:"]
    for name, on in backends.items():
        chosen = " (in use)" if name == kernels.backend() else ""
        for device, result in on.items():
            lines.append(f"{name + chosen:<16}  {device:<4}  {result['message']}")
    lines += ["", f"{'soft gates':<16}  cpu   {cpu_gates['message']}"]
    lines += [f"{'calls of gates':<16}  cpu   {cpu_calls['message']}"]
    lines += [f"{'calls of gates':<16}  cuda  {gpu_calls['message']}"]
    return "\n".join(lines)


def _versions() -> dict[str, str | None]:
    """Read from the installed metadata: importing some of these takes seconds."""
    versions: dict[str, str | None] = {
        "threshold_gating": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _OPTIONAL:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def try_backend(name: kernels.Backend, device: str = "cpu") -> dict[str, Any]:
    """Run a backend, values and gradients, and say how far it is from torch in float64."""
    x = torch.linspace(-8, 8, 1003, dtype=torch.float64)
    try:
        with kernels.use(name):
            error = max(_distance(key, x, device) for key in _TRIED)
    except kernels.BackendError as absent:
        return {"works": None, "max_error": None, "message": f"not available: {absent}"}
    except Exception as failure:  # whatever it is, the report is what was asked for
        message = f"fails: {type(failure).__name__}: {failure}"
        return {"works": False, "max_error": None, "message": message}
    works = error < _WORKS_BELOW  # False for NaN
    message = f"{'works' if works else 'gives wrong values'} (max error {error:.1e})"
    return {"works": works, "max_error": error, "message": message}


def _distance(key: str, x: Tensor, device: str) -> float:
    got = _with_gradient(Activation(key).to(device), x.to(device, torch.float32))
    # The same inputs in both: those of float32.
    wanted = _with_gradient(taxonomy.ROWS[key].f, x.float().double())
    return max((g.cpu().double() - w).abs().max().item() for g, w in zip(got, wanted, strict=True))


def _with_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]
