"""The pictures of docs/insight.md: what `tg.insight` shows of three networks.

python -m experiments.insight_pictures docs/images --data DIR    # a minute
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from experiments.insight_pruning import resnet20, stories260k

DEEP = 12  # gates of the network whose run is a film


def film(folder: Path) -> None:
    """Thresholds of a deep network of the digits drift from 0, in 600 steps."""
    from experiments.digits_training import digits

    x, y, _, _ = digits()
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 32), nn.SiLU()]
    for _ in range(DEEP - 1):
        layers += [nn.Linear(32, 32), nn.SiLU()]
    plain = nn.Sequential(*layers, nn.Linear(32, 10))
    model = tg.convert(plain, train=("tau", "theta", "s", "c"), share="channel", inputs=x[:8])
    optimizer = torch.optim.Adam(tg.training.param_groups(model, lr=3e-3, gate_lr_scale=2.0))
    with tempfile.TemporaryDirectory() as run:
        with tg.insight.record(model, optimizer, run, every=100):
            for _ in range(600):
                rows = torch.randint(len(x), (64,))
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        tg.insight.film(tg.insight.history(run), folder / "insight_film.png", frames=6)


def small(folder: Path) -> None:
    """Few colours are enough, and a third of the bytes."""
    from PIL import Image

    for path in folder.glob("insight_*.png"):
        Image.open(path).convert("RGB").quantize(250, Image.Quantize.MAXCOVERAGE).save(
            path, optimize=True
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.insight_pictures")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="the folder with the data sets (else TG_DATA)")
    parser.add_argument("--smoke", action="store_true", help="networks and data that are made up")
    asked = parser.parse_args(argv)
    if asked.data is not None:
        os.environ["TG_DATA"] = str(asked.data)
    asked.folder.mkdir(parents=True, exist_ok=True)
    images, text = resnet20({}, asked), stories260k({}, asked)
    reading = tg.insight.read(images.model, images.read[:500])
    tg.insight.ridges(reading, asked.folder / "insight_ridges.png")
    report = tg.theory.layer_report(images.model, images.read[:100])
    tg.insight.chaos_map(report, asked.folder / "insight_chaos.png")
    reading = tg.insight.read(text.model, text.read)
    tg.insight.heads(reading, asked.folder / "insight_heads.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.training.GateWarning)
        film(asked.folder)
    small(asked.folder)


if __name__ == "__main__":
    main()
