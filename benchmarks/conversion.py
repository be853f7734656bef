"""Converted networks against their originals: error with the gates evaluated, then time.

Weights are random, gains re-drawn in +-[0.5, 1.5] and BatchNorm statistics set by a training pass,
because with stock initialisation many sites have no effect on the output. A network with GELU is
compared with the same network whose GELU is the fitted function itself. Times are medians of nine
runs on one thread, original and converted in turn in one process, batch 8.

    python -m benchmarks.conversion [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
from torch import nn

from threshold_gating import TAXONOMY, conversion, kernels
from threshold_gating.conversion.plan import make_plan

ERROR_LIMIT = 3e-6  # max|d| / max|y|, float32 rounding through some hundred layers
TIME_LIMIT = 1.05  # converted / original under "auto", exact networks
META_LIMIT = 2.0  # seconds for a transformer of 1e9 parameters on the meta device

NETWORKS = {
    "resnet50": 224,
    "efficientnet_b0": 224,
    "mobilenetv3_small_100": 224,
    "vit_base_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "convnext_tiny": 224,
}


class Fitted(nn.Module):
    """GELU as the instance that stands for it."""

    def forward(self, x):
        return TAXONOMY["gelu"](x)


def enliven(model, x):
    """Draw gains anew and set BatchNorm statistics, so that every site matters."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() <= 1 and ("norm" in name or "bn" in name or "gamma" in name or "ls" in name):
                p.copy_((0.5 + torch.rand_like(p)) * torch.randn_like(p).sign())
        model.train()(x)
    return model.eval()


def with_fitted_gelu(model):
    """A copy in which every nn.GELU-like module is the fitted function."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.startswith("GELU"):
                setattr(parent, name, Fitted())
    return model


def slowdown(gated, model, x, runs=9):
    """Median time of `gated` over that of `model`, run in turn so that both see the same noise."""
    taken = {gated: [], model: []}
    with torch.no_grad():
        for _ in range(runs):
            for f, times in taken.items():
                start = time.perf_counter()
                f(x)
                times.append(time.perf_counter() - start)
    return statistics.median(taken[gated]) / statistics.median(taken[model])


def row(name, model, x):
    """Error and time of one network."""
    plan = make_plan(model, None, x)
    exact = all(site.exact for calls in plan.modules.values() for site in calls)
    gated = conversion.convert(model, inputs=x, strict=False)
    twin = model if exact else with_fitted_gelu(model)
    with torch.no_grad(), kernels.use("reference"):
        want, have = twin(x), gated(x)
    want, have = (y[0] if isinstance(y, tuple) else y for y in (want, have))
    error = ((have - want).abs().max() / want.abs().max()).item()
    ratio = slowdown(gated, model, x)
    modules, calls = sum(map(len, plan.modules.values())), sum(map(len, plan.calls.values()))
    ok = error <= ERROR_LIMIT and (not exact or ratio <= TIME_LIMIT)
    return {
        "name": name,
        "sites": modules + calls,
        "exact": exact,
        "error": error,
        "ratio": ratio,
        "ok": ok,
    }


def rows(batch=8):
    """One row for each network, timm's and two recurrent ones."""
    import timm

    for name, size in NETWORKS.items():
        torch.manual_seed(0)
        x = torch.randn(batch, 3, size, size)
        yield row(name, enliven(timm.create_model(name), x), x)
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(0)
        yield row(
            kind.__name__, kind(64, 128, num_layers=2, batch_first=True), torch.randn(batch, 50, 64)
        )


def meta_seconds():
    """How long a transformer of 1e9 parameters takes to convert on the meta device."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, activation="gelu")
        model = nn.TransformerEncoder(layer, 20)
    assert sum(p.numel() for p in model.parameters()) >= 1e9
    start = time.perf_counter()
    conversion.convert_(model)
    return time.perf_counter() - start


def main():
    """Print the table with the limits beside the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one CPU thread, batch 8, float32")
    print(
        f"{'network':<30}{'sites':>6}{'class':>8}{'max|d|/max|y|':>15}{'limit':>8}{'auto/orig':>11}{'limit':>7}"
    )
    found = []
    for r in rows():
        found.append(r)
        limit = f"{TIME_LIMIT:.2f}" if r["exact"] else "-"
        print(
            f"{r['name']:<30}{r['sites']:>6}{'exact' if r['exact'] else 'K=5':>8}"
            f"{r['error']:>15.1e}{ERROR_LIMIT:>8.0e}{r['ratio']:>11.3f}{limit:>7}"
            f"{'' if r['ok'] else '  over'}",
            flush=True,
        )
    taken = meta_seconds()
    print(f"1e9 parameters on meta: {taken:.2f} s (limit {META_LIMIT} s)")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"rows": found, "meta_seconds": taken, "torch": torch.__version__}, file, indent=1
            )


if __name__ == "__main__":
    main()
