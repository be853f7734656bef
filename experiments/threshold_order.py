"""Ways to keep learned thresholds of hard gates in order: what each does to a training.

What it should show: which way loses nothing where thresholds would cross. 64 gates of four steps
each learn where another gate, with thresholds at random, has its steps, from small batches and with
rates so high that neighbours pass each other.

    python -m experiments.threshold_order [--steps 600] [--seeds 3]

Last measured result (torch 2.13, one thread), mean squared error on unseen points, three seeds:

                  SGD 0.5   SGD 2   Adam 0.02   Adam 0.1
    sorted          0.029   0.081       0.018      0.063
    running max     0.028   0.083       0.018      0.061
    gaps            0.030   0.054       0.025      0.057
    projected       0.026   0.072       0.054      0.151

Thresholds would be crossed in 3 to 16 of the 64 gates at any step. The library sorts them.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from threshold_gating import primitive

GATES, THRESHOLDS = 64, 3
RATES = [("SGD", 0.5), ("SGD", 2.0), ("Adam", 0.02), ("Adam", 0.1)]


def gaps(start: Tensor, moved: Tensor) -> Tensor:
    """The first threshold, and gaps above it that shrink exponentially and never vanish."""
    now, first = (start + moved).diff(dim=0), start.diff(dim=0)
    small = first * torch.exp((now / first - 1).clamp(max=0))
    lowest = (start + moved)[:1]
    return torch.cat([lowest, lowest + torch.where(now >= first, now, small).cumsum(0)])


def projected(theta: Tensor) -> Tensor:
    """The nearest thresholds in order: for each, the largest of the least means around it."""
    sums = torch.cat([torch.zeros_like(theta[:1]), theta.cumsum(0)])

    def mean(i: int, j: int) -> Tensor:
        return (sums[j + 1] - sums[i]) / (j - i + 1)

    n = len(theta)
    least = [
        [torch.stack([mean(i, j) for j in range(k, n)]).amin(0) for i in range(k + 1)]
        for k in range(n)
    ]
    return torch.stack([torch.stack(each).amax(0) for each in least])


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sorted": lambda start, moved: (start + moved).sort(dim=0, stable=True).values,
    "running max": lambda start, moved: (start + moved).cummax(0).values,
    "gaps": gaps,
    "projected": lambda start, moved: start + moved,  # and put back in order after each step
}


def error(way: str, name: str, rate: float, seed: int, steps: int) -> float:
    """The mean squared error on unseen points after a training."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.linspace(-1, 1, THRESHOLDS)[:, None].repeat(1, GATES)
    target = torch.randn(THRESHOLDS, GATES, generator=draw).sort(0).values
    slopes, levels = [0.0] * (THRESHOLDS + 1), torch.randn(THRESHOLDS + 1, generator=draw).tolist()

    def f(x: Tensor, theta: Tensor) -> Tensor:
        rows = list(theta.unbind(0))
        y = primitive.blend(x, math.inf, rows, slopes, levels)
        return primitive.straight_through(x, y, rows, slopes, levels)

    moved = torch.zeros_like(start, requires_grad=True)
    make = {
        "SGD": lambda: torch.optim.SGD([moved], rate, momentum=0.9),
        "Adam": lambda: torch.optim.Adam([moved], rate),
    }
    optimizer = make[name]()
    for _ in range(steps):
        x = 1.5 * torch.randn(16, GATES, generator=draw)
        optimizer.zero_grad()
        (f(x, WAYS[way](start, moved)) - f(x, target)).square().mean().backward()
        optimizer.step()
        if way == "projected":
            with torch.no_grad():
                moved.copy_(projected(start + moved) - start)
    with torch.no_grad():
        x = 1.5 * torch.randn(20_000, GATES, generator=draw)
        return float((f(x, WAYS[way](start, moved)) - f(x, target)).square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for way in WAYS:
        means = []
        for name, rate in RATES:
            found = [error(way, name, rate, seed, args.steps) for seed in range(args.seeds)]
            means.append(f"{name} {rate:g}: {sum(found) / len(found):.3f}")
        print(f"{way:<12}", *means, sep="  ")


if __name__ == "__main__":
    main()
