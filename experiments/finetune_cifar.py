"""Is it worth learning the gates of a trained network? ResNet-20 on CIFAR-10, fine-tuned 5 epochs.

Every arm starts from the same trained weights and sees the same batches, crops and flips in the
same order; what differs is the activation:

    relu         torch's ReLU, frozen: the baseline
    prelu        a slope per channel, from 0, so that it starts as ReLU
    gates        tg.convert(model, train=("theta", "s", "c"), share="channel"): starts as ReLU
    soft gates   the same from x sigma(8 x), with tau learned too; it starts 0.035 off at most

    python -m experiments.finetune_cifar --data DIR --weights FILE --device cuda --jobs 6
    python -m experiments.finetune_cifar --smoke

A run is 5 epochs of SGD: rate 0.02, falling to 0 along a cosine, momentum 0.9, decay 1e-4 of the
weights alone. The rows are written to results/finetune_cifar.json.

Last result (H200, torch 2.11, three seeds, 3.3 minutes, all 10,000 test images; a training step is
eager, batch 128, over ReLU's, with eight other cores busy). Nothing is gained:

                parameters   before    after   over relu, paired    loss   step
    relu           269,722    91.73    91.59     +0.000 +- 0.000   0.3565   1.00
    prelu          270,410    91.73    91.65     +0.060 +- 0.081   0.3530   1.13
    gates          273,162    91.73    91.59     -0.007 +- 0.083   0.3485   1.89
    soft gates     273,850    91.36    91.51     -0.087 +- 0.133   0.3535   1.93
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments.cifar_resnet import Block, ResNet, pretrained
from experiments.data import Labelled, cifar10

ROOT = Path(__file__).resolve().parents[1]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the network's training
BATCH, RATE, DECAY = 128, 0.02, 1e-4
SOFT = tg.TG(8.0, 0.0, (0.0, 1.0), (0.0, 0.0))


class PReLUBlock(Block):
    """The block with PReLU for both of its calls of ReLU."""

    def slopes(self) -> PReLUBlock:
        width = self.bn2.num_features
        self.act1, self.act2 = nn.PReLU(width, 0.0), nn.PReLU(width, 0.0)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        if self.stride == 2:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, x.shape[1] // 2, x.shape[1] // 2))
        return self.act2(x + y)


class PReLUResNet(ResNet):
    """The network with PReLU everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.act(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def prelu(model: ResNet) -> nn.Module:
    new = copy.deepcopy(model)
    new.__class__, new.act = PReLUResNet, nn.PReLU(16, 0.0)
    for block in [m for m in new.modules() if isinstance(m, Block)]:
        block.__class__ = PReLUBlock
        block.slopes()  # type: ignore[operator]
    return new


def gates(model: ResNet) -> nn.Module:
    return tg.convert(
        model, train=("theta", "s", "c"), share="channel", inputs=torch.randn(2, 3, 32, 32)
    )


def soft_gates(model: ResNet) -> nn.Module:
    return tg.convert(
        model,
        {"re:.*": SOFT},
        train=("tau", "theta", "s", "c"),
        share="channel",
        inputs=torch.randn(2, 3, 32, 32),
        tol=math.inf,  # another function on purpose
    )


ARMS: dict[str, Callable[[ResNet], nn.Module]] = {
    "relu": copy.deepcopy,
    "prelu": prelu,
    "gates": gates,
    "soft gates": soft_gates,
}


class Row(NamedTuple):
    """One fine-tuning: accuracy in percent and loss on the test images, before and after."""

    arm: str
    seed: int
    parameters: int
    before: float
    after: float
    loss: float
    seconds: float


def prepared(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=pixels.device).view(3, 1, 1) for v in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to four pixels, half of them mirrored; drawn on the CPU, so that a
    seed gives the same images on every device."""
    n, size = len(x), x.shape[-1]
    shift = torch.randint(0, 9, (n, 2), generator=generator).to(x.device)
    mirror = (torch.rand(n, generator=generator) < 0.5).to(x.device)
    along = torch.arange(size, device=x.device)
    rows, columns = shift[:, :1] + along, shift[:, 1:] + along
    columns = torch.where(mirror[:, None], columns.flip(1), columns)
    padded = F.pad(x, (4, 4, 4, 4))
    which = torch.arange(n, device=x.device)[:, None, None, None]
    channels = torch.arange(x.shape[1], device=x.device)[:, None, None]
    return padded[which, channels, rows[:, None, :, None], columns[:, None, None, :]]


@torch.no_grad()
def judged(model: nn.Module, test: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Accuracy in percent and cross-entropy on all test images, every gate evaluated as a gate."""
    model.eval()
    with tg.kernels.use("reference"):
        logits = torch.cat([model(prepared(x)) for x in test[0].split(1000)])
    right = (logits.argmax(1) == test[1]).double().mean()
    return 100 * right.item(), F.cross_entropy(logits.double(), test[1]).item()


def optimiser(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    groups = tg.training.param_groups(model, RATE, weight_decay=DECAY)
    sgd = torch.optim.SGD(groups, momentum=0.9)
    return sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, steps)


def step(model: nn.Module, sgd: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    sgd.zero_grad()
    F.cross_entropy(model(x), y).backward()
    sgd.step()


def finetuned(start: ResNet, data: Labelled, arm: str, seed: int, epochs: int, device: str) -> Row:
    """One arm, one seed."""
    (images, labels), test = (tuple(t.to(device) for t in part) for part in data[:2])
    torch.manual_seed(seed)
    model = ARMS[arm](start).to(device)
    before, _ = judged(model, test)
    batches = math.ceil(len(images) / BATCH)
    sgd, schedule = optimiser(model, epochs * batches)
    generator = torch.Generator().manual_seed(seed)
    begun = time.perf_counter()
    for _ in range(epochs):
        model.train()
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            rows = chosen.to(device)
            step(model, sgd, augmented(prepared(images[rows]), generator), labels[rows])
            schedule.step()
    seconds = time.perf_counter() - begun
    after, loss = judged(model, test)
    if not math.isfinite(loss):
        raise RuntimeError(f"{arm}, seed {seed}: the loss is {loss}")
    count = sum(p.numel() for p in model.parameters())
    return Row(arm, seed, count, before, after, loss, seconds)


def step_costs(start: ResNet, device: str, repeats: int) -> dict[str, float]:
    """The time of a training step over that of the ReLU network: the median over interleaved
    rounds in this process, nothing beside it."""
    x = torch.randn(BATCH, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (BATCH,), device=device)
    runs = {}
    for name, make in ARMS.items():
        model = make(start).to(device).train()
        runs[name] = (model, optimiser(model, repeats)[0])
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _, (name, (model, sgd)) in itertools.product(range(repeats), runs.items()):
        wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        wait()
        begun = time.perf_counter()
        step(model, sgd, x, y)
        wait()
        taken[name].append(time.perf_counter() - begun)
    warm = {name: values[len(values) // 4 :] for name, values in taken.items()}
    base = warm["relu"]
    return {
        name: statistics.median(a / b for a, b in zip(values, base, strict=True))
        for name, values in warm.items()
    }


def table(rows: list[Row], costs: dict[str, float]) -> str:
    """Means over the seeds, and differences to the baseline of the same seed with their error."""
    lines = [
        f"{'':11} {'parameters':>10} {'before':>8} {'after':>8} {'over relu, paired':>19} "
        f"{'loss':>7} {'step':>6}"
    ]
    base = {row.seed: row.after for row in rows if row.arm == "relu"}
    for arm in ARMS:
        own = [row for row in rows if row.arm == arm]
        over = [row.after - base[row.seed] for row in own]
        error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
        lines.append(
            f"{arm:11} {own[0].parameters:>10,} {own[0].before:>8.2f} "
            f"{statistics.fmean(row.after for row in own):>8.2f} "
            f"{statistics.fmean(over):>+10.3f} +- {error:.3f} "
            f"{statistics.fmean(row.loss for row in own):>8.4f} {costs[arm]:>6.2f}"
        )
    return "\n".join(lines)


_GIVEN: dict[str, Any] = {}  # in each process: the data, read once


def _start(data: Path, weights: Path) -> None:
    torch.set_num_threads(1)
    _GIVEN.update(data=cifar10(data), start=pretrained(3, weights))


def _run(arm: str, seed: int, epochs: int, device: str) -> Row:
    row = finetuned(_GIVEN["start"], _GIVEN["data"], arm, seed, epochs, device)
    said = f"{arm}, seed {seed}: {row.before:.2f} -> {row.after:.2f} %, {row.seconds:.0f} s"
    print(said, flush=True)
    return row


def smoke() -> tuple[list[Row], dict[str, float]]:
    """Noise for images, a network of no training: seconds, to see that all of it runs."""
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (96, 3, 32, 32)).byte(), torch.randint(0, 10, (96,))
    data = Labelled((images[:64], labels[:64]), (images[64:], labels[64:]), "")
    start = ResNet(1).eval()
    rows = [finetuned(start, data, arm, seed, 1, "cpu") for arm in ARMS for seed in range(2)]
    return rows, step_costs(start, "cpu", 4)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune_cifar")
    parser.add_argument("--data", type=Path, help="the folder with CIFAR-10")
    parser.add_argument("--weights", type=Path, help="resnet20-12fca82f.th")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", "-o", type=Path, default=ROOT / "results" / "finetune_cifar.json")
    parser.add_argument("--smoke", action="store_true", help="seconds, writes nothing")
    asked = parser.parse_args(argv)
    if asked.smoke:
        print(table(*smoke()))
        return
    if asked.data is None or asked.weights is None:
        parser.error("--data and --weights are needed, or --smoke")
    work = [(arm, seed, asked.epochs, asked.device) for seed in range(asked.seeds) for arm in ARMS]
    given = (asked.data, asked.weights)
    with ProcessPoolExecutor(asked.jobs, get_context("spawn"), _start, given) as pool:
        rows = list(pool.map(_run, *zip(*work, strict=True)))
    costs = step_costs(pretrained(3, asked.weights), asked.device, 200)
    print(table(rows, costs))
    about = {
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "version": tg.__version__,
        "data sha256": cifar10(asked.data).sha256,
        "epochs": asked.epochs,
        "step over relu": costs,
        "rows": [row._asdict() for row in rows],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(about, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
