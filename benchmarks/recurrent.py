"""LSTM and GRU with learned gates over torch's own of the same size: cuDNN's on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import threshold_gating as tg
from benchmarks.timing import Contenders, Place, Work
from threshold_gating import kernels

Size = tuple[int, int, int]  # steps, sequences, units
SECTION = "recurrent"
BOTH = ("tau", "theta")
FOLDED = "folded", "nn.LSTM"


def recurrent(size: Size, place: Place, folded: float, evaluated: float | None) -> Iterator[Work]:
    """`folded` is the most that gates in the weights may cost, `evaluated` those of every step."""
    words = "T={} B={} H={} fp32".format(*size)
    for what, backward in (("forward", False), ("+ backward", True)):
        limits = {
            FOLDED: folded,
            ("cell pair", "nn.LSTM"): evaluated,
            ("evaluated", "nn.LSTM"): evaluated,
        }
        note = "cell pair learns all gates, evaluated none: every gate of every step runs"
        build = partial(_lstms, size, place, backward)
        yield _row(f"LSTM {words} {what}", build, limits, backward, note)
        build = partial(_grus, size, place, backward)
        yield _row(f"GRU {words} {what}", build, {("folded", "nn.GRU"): folded}, backward, "")


def _row(name: str, build: Any, limits: Any, backward: bool, note: str) -> Work:
    families = ("recurrent", "folded")
    return Work(
        SECTION,
        name,
        build,
        limits,
        families,
        backward=backward,
        replay=False,
        slow=True,
        note=note,
    )


def _lstms(size: Size, place: Place, backward: bool) -> Contenders:
    units = size[2]
    plain = nn.LSTM(units, units, device=place.device)
    ways: dict[str, Any] = {
        "nn.LSTM": plain,
        "folded": tg.LSTM.from_torch(plain, train=BOTH, sites=("i", "f", "g", "o")),
        "cell pair": tg.LSTM.from_torch(plain, train=BOTH),
    }
    runs = _runs(ways, size, place, backward)
    off = _runs({"evaluated": tg.LSTM.from_torch(plain)}, size, place, backward)
    return runs | {name: partial(_without_native, place, run) for name, run in off.items()}


def _grus(size: Size, place: Place, backward: bool) -> Contenders:
    units = size[2]
    plain = nn.GRU(units, units, device=place.device)
    ways = {"nn.GRU": plain, "folded": tg.GRU.from_torch(plain, train=BOTH)}
    return _runs(ways, size, place, backward)


def _without_native(place: Place, run: Any) -> Any:
    with kernels.use("triton" if place.device == "cuda" else "reference"):
        return run()


def _runs(ways: dict[str, Any], size: Size, place: Place, backward: bool) -> Contenders:
    x = torch.randn(size, device=place.device, requires_grad=backward)
    dy = torch.randn(size, device=place.device)
    run = _step if backward else _forward
    return {name: partial(run, model, x, dy) for name, model in ways.items()}


def _forward(model: nn.Module, x: Tensor, dy: Tensor) -> Any:
    return model(x)


def _step(model: nn.Module, x: Tensor, dy: Tensor) -> Any:
    return torch.autograd.grad(model(x)[0], [x, *model.parameters()], dy)
