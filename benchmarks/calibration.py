"""How long `tg.calibrate` takes: 24 sites, 100,000 values of each, beside the limit.

The network is a stack of residual layers with GELU, as many as a large vision transformer has; the
inputs of each site are drawn to another mean and spread. Errors are on held-out values.

    python -m benchmarks.calibration [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor, nn

import threshold_gating as tg

SITES, VALUES = 24, 100_000
LIMIT = 60.0  # seconds for all sites on two cores
CHOICES = ({}, {"K": 3}, {"K": 2})


class Layer(nn.Module):
    """One residual layer whose activation sees N(mean, spread^2), roughly."""

    def __init__(self, width: int, mean: float, spread: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.act = nn.GELU()
        nn.init.normal_(self.up.weight, std=spread * width**-0.5)
        nn.init.constant_(self.up.bias, mean)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def network(width: int = 64) -> nn.Module:
    """Means from -1 to 1 and spreads from 0.5 to 3, in every combination."""
    torch.manual_seed(0)
    means, spreads = torch.linspace(-1, 1, 6).tolist(), (0.5, 1.0, 2.0, 3.0)
    return nn.Sequential(*(Layer(width, m, s) for s in spreads for m in means)).eval()


def measure(model: nn.Module, batches: list[Tensor], options: dict) -> dict:
    start = time.perf_counter()
    fits = tg.calibrate(model, batches, values=VALUES, **options).fits.values()
    seconds = time.perf_counter() - start
    assert len(fits) == SITES
    assert {fit.values for fit in fits} == {VALUES}
    return {
        "K": options.get("K", 5),
        "seconds": seconds,
        "calibrated": sum(fit.chosen == "calibrated" for fit in fits),
        "error": [fit.error for fit in fits],
        "default": [fit.default_error for fit in fits],
    }


def main() -> int:
    """Print a line for each number of branches with the limit beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    model, batches = network(), [torch.randn(512, 64) for _ in range(4)]
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads; {SITES} sites, {VALUES} values of each")
    header = ("K", "seconds", "limit", "calibrated", "mean RMS", "default", "ratio")
    print("{:>2}{:>9}{:>7}{:>12}{:>10}{:>10}{:>7}".format(*header))
    found = []
    for options in CHOICES:
        found.append(r := measure(model, batches, options))
        ours, default = (sum(r[key]) / SITES for key in ("error", "default"))
        print(
            f"{r['K']:>2}{r['seconds']:>9.1f}{LIMIT:>7.0f}{r['calibrated']:>12}{ours:>10.2e}{default:>10.2e}"
            f"{ours / default:>7.2f}{'  over' if r['seconds'] > LIMIT else ''}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": found, "torch": torch.__version__}, file, indent=1)
    return int(any(r["seconds"] > LIMIT for r in found))


if __name__ == "__main__":
    raise SystemExit(main())
