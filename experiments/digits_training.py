"""Do learned gates beat ReLU on the digits? Small networks, five seeds each, under a minute.

    python -m experiments.digits_training

Every network is trained by the same optimiser on the same batches; those compared are a ReLU and a
SiLU network, tier A and tier W of the same width, and a ReLU network with as many parameters as
tier W. Steps are epochs to the ReLU network's converged accuracy (`tg.training.steps_to_baseline`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import threshold_gating as tg

SEEDS, EPOCHS, WIDTH = range(5), 30, 16
EVERY = ("tau", "theta", "s", "c")


def plain(act: Callable[[], nn.Module], width: int = WIDTH) -> nn.Module:
    """64 -> width -> width -> 10 with `act` between."""
    linears = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)
    return nn.Sequential(linears[0], act(), linears[1], act(), linears[2])


def gate() -> nn.Module:
    return tg.Activation("silu", share="channel", channels=WIDTH, train=EVERY)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: plain(nn.ReLU),
    "SiLU": lambda: plain(nn.SiLU),
    "tier A, per channel": lambda: plain(gate),
    "tier W, per channel": lambda: nn.Sequential(
        nn.Linear(64, WIDTH), tg.Linear(WIDTH, WIDTH), tg.Linear(WIDTH, 10)
    ),
    "ReLU, as many parameters": lambda: plain(nn.ReLU, 20),
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels, every fourth one for the test."""
    images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
    test = torch.arange(len(images)) % 4 == 0
    x = images.float() / 16
    return x[~test], labels[~test], x[test], labels[test]


def curve(make: Callable[[], nn.Module], seed: int) -> list[float]:
    """Test accuracy in percent after each epoch."""
    x, y, test_x, test_y = digits()
    torch.manual_seed(seed)
    network = make()
    optimizer = torch.optim.Adam(tg.training.param_groups(network, lr=3e-3))
    batches = torch.Generator().manual_seed(seed)
    accuracy = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=batches).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            right = network(test_x).argmax(1) == test_y
        accuracy.append(100 * right.double().mean().item())
    return accuracy


def main() -> None:
    start, curves = perf_counter(), {}
    print(f"{'network':26} {'parameters':>10}  {'accuracy, last 6 epochs':24}  speed-up over ReLU")
    for name, make in NETWORKS.items():
        curves[name] = [curve(make, seed) for seed in SEEDS]
        ends = [statistics.fmean(c[-6:]) for c in curves[name]]
        pairs = zip(curves["ReLU"], curves[name], strict=True)
        factors = [tg.training.steps_to_baseline(a, b).speedup for a, b in pairs]
        reached = [f for f in factors if f is not None]
        speed = f"{statistics.fmean(reached):.2f}x" if reached else "-"
        count = sum(p.numel() for p in make().parameters())
        spread = f"{statistics.fmean(ends):.2f} +- {statistics.stdev(ends):.2f} %"
        missed = "" if len(reached) == len(factors) else f" ({len(reached)} of {len(factors)})"
        print(f"{name:26} {count:10}  {spread:24}  {speed}{missed}", flush=True)
    print(f"{len(SEEDS)} seeds, {EPOCHS} epochs each, {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
