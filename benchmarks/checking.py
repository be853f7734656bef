"""What comes before any timing: which machine this is, and whether its kernels are right."""

from __future__ import annotations

import platform
from typing import Any, cast

import torch
from torch import Tensor

from threshold_gating import Activation, kernels
from threshold_gating.kernels.pairs import PAIRS, Pair, disagreement
from threshold_gating.nn.activation import Share, nearest

# Largest error against float64 over the largest value, by dtype: one unit in the last place.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def machine() -> dict[str, str]:
    """What the figures belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"gpu": gpu, "cpu": platform.machine(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if kernels.launch.is_installed():
        import triton

        found["triton"] = triton.__version__
    return found


def check(device: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> list[str]:
    """Every pair of the table, and every learned module of it, against float64; what is wrong."""
    wrong = []
    for pair in PAIRS.values():
        ways: dict[str, Any] = {"": pair.kernel}
        if not pair.second:
            ways[" module"] = _as_module(pair, device)
        for dtype in dtypes:
            for way, kernel in ways.items():
                torch.manual_seed(0)
                errors = disagreement(pair, pair.inputs(shape, dtype, device), kernel)
                bound = ALLOWED[dtype] * (3 if pair.second == "times" else 1)
                wrong += [
                    f"{pair.name}{way} {dtype} {name}: error {error:.1e} above {bound:.1e}"
                    for name, error in errors.items()
                    if not error <= bound
                ]
    return wrong


def _as_module(pair: Pair, device: str) -> Any:
    """The pair's function of its tensors by a learned `Activation`: the way that is timed."""
    t, share = pair.t, pair.share

    def call(x: Tensor, tau: Any, theta: Any, s: Any, c: Any, **_: Any) -> Tensor:
        where = None if share == "layer" else theta[0].shape[1:]
        channels = None if where is None else where if share == "neuron" else where[0]
        learned = ("theta", "s", "c") if t.hard else ("tau", "theta", "s", "c")
        kind = cast(Share, share)
        act = Activation(t, share=kind, channels=channels, train=learned, device=device)
        given = {"dtheta": _rows(theta, act.theta0) - act.theta0, "s": _rows(s, act.s)}
        if t.hard:
            near = [ck + sk * th for ck, sk, th in zip(c, s, nearest(theta), strict=True)]
            given["v"] = _rows(near, act.v)
        else:
            own = isinstance(tau, list)
            ratio = (_rows(tau, act.tau0) if own else tau.reshape(act.tau0.shape)) / act.tau0
            given |= {"rho": ratio.log(), "c": _rows(c, act.c)}
        y: Tensor = torch.func.functional_call(act, given, (x,))
        return y

    return call


def _rows(values: Any, like: Tensor) -> Tensor:
    return torch.stack([v.reshape(like.shape[1:]) for v in values])
