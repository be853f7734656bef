"""What does recording gates cost a run? Steps that are looked at against steps that are not.

`tg.insight.record` looks at one step in `every`; the others run as if it was not there. So the cost
is that of a step that is looked at, over `every` steps. Both kinds are timed in one run, in seconds
of the process (other work on the machine does not count), writing included.

    mlp        64-32-32-32-10, batch 64: a step so short that Python is most of it
    cnn        three convolutions of 32 channels, images 32 x 32, batch 32
    resnet20   19 sites per channel, images 32 x 32, batch 128

    python -m experiments.insight_cost             # two minutes on one core
    python -m experiments.insight_cost --smoke

Last result: 3 rows, CPU (x86_64, 2 cores, 1 threads), 147 s of runs (some side by side),
2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments import record
from experiments.cifar_resnet import ResNet
from experiments.record import Case, Row, Verdict
from threshold_gating.insight.recording import EVERY

NAME = "insight_cost"
OFTEN = 10  # here, so that there are enough of them to time


def mlp() -> nn.Module:
    layers = [nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (3, 32, 32):
        layers += [nn.Conv2d(inputs, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def resnet20() -> nn.Module:
    return ResNet(3)


NETWORKS = {
    "mlp": (mlp, (64, 64), ("tau", "theta", "s", "c"), 400),
    "cnn": (cnn, (32, 3, 32, 32), ("tau", "theta", "s", "c"), 200),
    "resnet20": (resnet20, (128, 3, 32, 32), ("theta", "s", "c"), 40),
}


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step that is looked at, of one that is not, and the share at EVERY."""
    make, shape, train, steps = NETWORKS[case["network"]]
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = tg.convert(make(), train=train, share="channel", inputs=x[:2]).train()
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 1e-3))
    labels = torch.arange(len(x)) % 10
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        tg.insight.record(model, optimizer, Path(folder), every=OFTEN) as watch,
    ):
        for step in range(1, (2 * OFTEN if asked.smoke else steps) + 1):
            begun = time.process_time()
            _step(model, optimizer, x, labels)
            seconds[watch.step % OFTEN == 0].append(time.process_time() - begun)
            assert watch.step == step
    plain, looked = statistics.median(seconds[False]), statistics.mean(seconds[True][1:])
    share = (looked - plain) / (EVERY * plain)
    return {"step ms": 1e3 * plain, "looked at ms": 1e3 * looked, "share %": 100 * share}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()


def page(rows: list[Row]) -> str:
    """The table, in Markdown."""
    lines = [
        f"| network | a step | a step that is looked at | cost at `every={EVERY}` |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        plain, looked, share = (row.figures[k] for k in ("step ms", "looked at ms", "share %"))
        name = row.case["network"]
        lines.append(f"| {name} | {plain:.1f} ms | {looked:.1f} ms | {share:.2f} % |")
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> list[Verdict]:
    """None: the paper does not claim it."""
    return []


def main(argv: list[str] | None = None) -> list[Row]:
    asked = record.options(NAME, __doc__).parse_args(argv)
    torch.set_num_threads(1)
    rows = record.complete(NAME, [{"network": name} for name in NETWORKS], run, asked)
    print(page(rows))
    return rows


if __name__ == "__main__":
    main()
