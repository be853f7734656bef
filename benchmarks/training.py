"""Training with gates against training without: time of a step, memory of a backward pass.

First what is timed is checked: outputs and gradients of the fast ways against the reference. Then
both sides run in turn in one process, on one thread, in float32. Times are the processor's, so that
a run which had to wait for others is not longer for it. A figure is the median of the ratios of
runs that followed each other; beside it are their quartiles and the ratio of the shortest runs,
which tell how far it is to be trusted.

Memory is what torch's CPU allocator hands out, as its profiler records it: bytes that the forward
pass leaves behind plus the most that the backward pass has at once. Parameters, the input and the
gradient of the output are there before and not counted; gradients of parameters are.

    python -m benchmarks.layers [--no-compile] [--json FILE]

Compiling takes about a minute with a cold cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import threshold_gating as tg

LIMITS = {"eager": 1.4, "compiled": 1.25, "linear": 2.0, "memory": 2.2}
# Float32 sums of up to 65,536 terms in another order.
AGREEMENT = 1e-4


class Figure(NamedTuple):
    name: str
    ratio: float
    limit: float | None
    quartiles: tuple[float, float] | None = None  # of the ratios; memory has one value
    shortest: float | None = None

    def line(self) -> str:
        spread = "" if self.quartiles is None else "{:.2f} to {:.2f}".format(*self.quartiles)
        shortest = "" if self.shortest is None else f"{self.shortest:.2f}"
        limit = "" if self.limit is None else f"{self.limit:.2f}"
        missed = "  MISSED" if self.limit is not None and self.ratio > self.limit else ""
        return f"{self.name:<50}{self.ratio:>7.2f}{spread:>15}{shortest:>10}{limit:>7}{missed}"


def cnn(activation: Callable[[int], nn.Module]) -> nn.Module:
    """64, 128 and 256 channels; the weights are the same whatever the activation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 64, 1), (64, 128, 2), (128, 256, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), activation(after)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def gated(channels: int) -> nn.Module:
    """Tier A: a sharpness and a threshold for each channel."""
    return tg.Activation("silu", share="channel", channels=channels, train=("tau", "theta"))


def step(model: nn.Module, run: Callable[[Tensor], Tensor], batch: int = 64) -> Callable[[], None]:
    """A training step of `model`, whose forward pass is `run`."""
    torch.manual_seed(1)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def once() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        optimizer.step()

    return once


def product(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward of a layer, with the gradients of input and parameters made anew."""
    x = x.detach().requires_grad_()

    def once() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(dy)

    return once


def timed(rounds: int, **sides: Callable[[], None]) -> dict[str, list[float]]:
    """The processor seconds of each run of each side; one of each, in turn, round after round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
        side()
    order = list(sides.items())
    for _ in range(rounds):
        order.reverse()  # so that neither side always comes first
        for name, side in order:
            start = time.process_time()
            side()
            times[name].append(time.process_time() - start)
    return times


def compared(
    name: str, times: dict[str, list[float]], side: str, base: str, limit: float | None
) -> Figure:
    """The times of one side over those of another."""
    ratios = [a / b for a, b in zip(times[side], times[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Figure(name, middle, limit, (low, high), min(times[side]) / min(times[base]))


def peak(layer: nn.Module, x: Tensor, dy: Tensor) -> int:
    """Bytes: what forward leaves behind and the most that backward has at once besides."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        y = layer(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        y.backward(dy)
    return _held(forward)[-1] + max(_held(backward))


def _held(record: Any) -> list[int]:
    """Bytes in use after each allocation and release, from 0."""
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = [0]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held.append(held[-1] + event.nbytes())
    return held


def check(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, what: str) -> None:
    """Hold outputs and gradients against the reference, with native and fused ways off."""
    parameters = list(model.parameters())
    dy = torch.randn_like(model(x))
    have = [y := run(x), *torch.autograd.grad(y, parameters, dy)]
    with tg.kernels.use("reference"):
        want = [y := model(x), *torch.autograd.grad(y, parameters, dy)]
    off = max(((a - b).norm() / b.norm()).item() for a, b in zip(have, want, strict=True))
    print(f"checked: {what}, {off:.1e} from the reference (limit {AGREEMENT:.0e})", flush=True)
    if not off <= AGREEMENT:
        raise SystemExit(f"{what} is wrong: relative difference {off:.1e}; nothing was timed.")


def training(mode: str, rounds: int) -> Figure:
    """Tier A in a convolutional network against ReLU, in eager mode or compiled."""
    ours, plain = cnn(gated), cnn(lambda channels: nn.ReLU())
    run: list[Callable[[Tensor], Tensor]] = [ours, plain]
    if mode == "compiled":
        run = [torch.compile(ours, fullgraph=True), torch.compile(plain, fullgraph=True)]
    check(ours, run[0], torch.randn(64, 3, 32, 32), f"CNN with gates, {mode}")
    times = timed(rounds, gates=step(ours, run[0]), relu=step(plain, run[1]))
    name = f"training step of a CNN, {mode}: gates over ReLU"
    return compared(name, times, "gates", "relu", LIMITS[mode])


def linear(rounds: int, width: int = 512, batch: int = 256) -> list[Figure]:
    """Tier W with K = 2, and torch's layer with twice the inputs, whose products are the same."""
    torch.manual_seed(0)
    layers = {
        "tier W, K=2": tg.Linear(width, width),
        "torch's, twice the inputs": nn.Linear(2 * width, width),
        "torch's": nn.Linear(width, width),
    }
    dy, wide = torch.randn(batch, width), torch.randn(batch, 2 * width)
    inputs = {name: wide if "twice" in name else wide[:, :width].clone() for name in layers}
    check(layers["tier W, K=2"], layers["tier W, K=2"], inputs["tier W, K=2"], "tier W linear")
    sides = {name: product(layer, inputs[name], dy) for name, layer in layers.items()}
    times = timed(rounds, **sides)
    memory = {name: peak(layer, inputs[name], dy) for name, layer in layers.items()}
    figures = []
    for name in ("tier W, K=2", "torch's, twice the inputs"):
        limits = LIMITS if name.startswith("tier") else {}
        ratio = memory[name] / memory["torch's"]
        figures += [
            compared(f"linear, time: {name}", times, name, "torch's", limits.get("linear")),
            Figure(f"linear, peak of backward: {name}", ratio, limits.get("memory")),
        ]
    return figures


def main() -> None:
    """Print the figures with the limits beside them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--rounds", type=int, default=12, help="runs of a training step (default 12)"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one CPU thread, float32, backend {tg.kernels.backend()}")
    found = [training("eager", args.rounds), *linear(10 * args.rounds)]
    if not args.no_compile:
        found.insert(1, training("compiled", args.rounds))
    print("over ReLU (64-128-256 channels, batch 64, 32x32) and torch's layer (512x512, batch 256)")
    print(f"{'':<50}{'median':>7}{'quartiles':>15}{'shortest':>10}{'limit':>7}")
    for figure in found:
        print(figure.line())
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": [f._asdict() for f in found]}, file)


if __name__ == "__main__":
    main()
