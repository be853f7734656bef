"""Converted networks against their originals: error with the gates evaluated, then time.

Weights are random, gains re-drawn in +-[0.5, 1.5] and BatchNorm statistics set by a training pass,
because with stock initialisation many sites have no effect on the output. A network with GELU is
compared with the same network whose GELU is the fitted function itself. float32.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import threshold_gating as tg
from benchmarks.timing import Contenders, Work
from threshold_gating.conversion import convert_

SECTION, PAIRS = "conversion", ("frozen module", "attention")
ERROR_LIMIT = 3e-6  # max|d| / max|y|: float32 rounding through some hundred layers
META_LIMIT = 2.0  # seconds for a transformer of 1e9 parameters on the meta device
# The most that a conversion may take of the original's time under "auto", where it is exact.
EXACT, FITTED = 1.05, None
OF_TIMM = {
    "resnet50": EXACT,
    "efficientnet_b0": EXACT,
    "mobilenetv3_small_100": EXACT,
    "vit_base_patch16_224": FITTED,
    "swin_tiny_patch4_window7_224": FITTED,
    "convnext_tiny": FITTED,
}
RECURRENT = {"LSTM": nn.LSTM, "GRU": nn.GRU}
Made = Callable[[], tuple[nn.Module, Tensor]]


class Both(NamedTuple):
    """A network, what it is compared with, its conversion, and an input."""

    model: nn.Module
    twin: nn.Module
    gated: nn.Module
    x: Tensor


def conversion(batch: int) -> Iterator[Work]:
    """Two rows for each network, then how long a very large one takes to convert."""
    found: dict[str, tuple[Made, float | None]] = {
        name: (partial(_of_timm, name, batch), limit) for name, limit in OF_TIMM.items()
    }
    found |= {name: (partial(_recurrent, name, batch), EXACT) for name in RECURRENT}
    for name, (make, limit) in found.items():
        both = partial(_both, make, limit is not None)
        build = partial(_errors, both)
        yield Work(SECTION, f"{name}: error", build, {"": ERROR_LIMIT}, PAIRS, unit="error")
        note = "" if limit else "GELU by five branches: no limit"
        build, limits = partial(_times, both), {"original": limit}
        yield Work(SECTION, f"{name}: time", build, limits, PAIRS, slow=True, note=note)
    name = "1e9 parameters on the meta device"
    yield Work(SECTION, name, lambda: {"ours": _on_meta}, {"": META_LIMIT}, PAIRS, unit="s")


def _of_timm(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    import timm

    x = torch.randn(batch, 3, 224, 224)
    return _enlivened(timm.create_model(name), x), x


def _recurrent(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    return RECURRENT[name](64, 128, num_layers=2, batch_first=True), torch.randn(batch, 50, 64)


@torch.no_grad()
def _enlivened(model: nn.Module, x: Tensor) -> nn.Module:
    """With gains drawn anew and BatchNorm statistics, so that every site matters."""
    for name, p in model.named_parameters():
        if p.dim() <= 1 and any(word in name for word in ("norm", "bn", "gamma", "ls")):
            p.copy_((0.5 + torch.rand_like(p)) * torch.randn_like(p).sign())
    model.train()(x)
    return model.eval()


@lru_cache(1)  # for the two rows of a network
def _both(make: Made, exact: bool) -> Both:
    torch.manual_seed(0)
    model, x = make()
    gated = tg.convert(model, inputs=x, strict=False)
    return Both(model, model if exact else _with_fitted_gelu(model), gated, x)


class Fitted(nn.Module):
    """GELU as the instance that stands for it."""

    def forward(self, x: Tensor) -> Tensor:
        return tg.TAXONOMY["gelu"](x)


def _with_fitted_gelu(model: nn.Module) -> nn.Module:
    """A copy in which every nn.GELU-like module is the fitted function."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.startswith("GELU"):
                setattr(parent, name, Fitted())
    return model


def _errors(both: Callable[[], Both]) -> Contenders:
    def error() -> float:
        _, twin, gated, x = both()
        with tg.kernels.use("reference"):
            found = [m(x) for m in (twin, gated)]
        want, have = (y[0] if isinstance(y, tuple) else y for y in found)
        return float((have - want).abs().max() / want.abs().max())

    return {"ours": error}


def _times(both: Callable[[], Both]) -> Contenders:
    model, _, gated, x = both()
    return {"original": partial(model, x), "ours": partial(gated, x)}


def _on_meta() -> float:
    """Seconds."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, activation="gelu")
        model = nn.TransformerEncoder(layer, 20)
    assert sum(p.numel() for p in model.parameters()) >= 1e9
    start = time.perf_counter()
    convert_(model)
    return time.perf_counter() - start
