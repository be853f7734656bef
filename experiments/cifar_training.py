"""Training on CIFAR-10 with everything on the device: data, crops and flips, bf16, whole steps
recorded as CUDA graphs. Every contender is trained by this loop and differs in its network alone.

The optimiser is SGD with Nesterov momentum 0.9, weight decay 5e-4 on weights (never on gates, norms
or biases), the rate rising for the first tenth of the steps and falling to 0 along a line. Steps
are recorded after a few that are called; where a network cannot be recorded, all are called, and
`Curve.recorded` says so. A stopped run goes on from its checkpoint with the same batches: those of
step t depend on (seed, t) alone. Under torchrun each process takes its share of every batch.

Test accuracy is taken with every gate evaluated (native ops off), on all 10,000 images, in float32
(on a GPU torch multiplies in TF32 inside of convolutions).
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments.data import Labelled

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Recipe(NamedTuple):
    """How long and how fast; the same for every contender of an experiment but for the rate."""

    steps: int
    batch: int = 256
    rate: float = 0.1
    gate_rate: float = 1.0  # the rate of gate parameters over that of the weights
    decay: float = 5e-4
    smoothing: float = 0.0  # of the labels
    evaluations: int = 40  # over the run, evenly
    adam: bool = False  # AdamW instead of SGD, for transformers


class Curve(NamedTuple):
    """Test accuracy in percent along the run, and at its end; seconds without evaluations."""

    steps: list[int]
    accuracy: list[float]
    loss: float  # cross-entropy on the test images at the end
    seconds: float
    step_ms: float  # of a step: the median over the parts between evaluations, without the first
    recorded: bool
    started_at: int  # the step that this run went on from


class DivergedError(RuntimeError):
    """The loss is no number any more."""


def train(
    model: nn.Module,
    data: Labelled,
    recipe: Recipe,
    *,
    seed: int,
    device: str,
    kept: Path | None = None,
) -> Curve:
    """Train in place. `kept` is the file of the run's state, removed when it ends."""
    ranks, rank, device = joined(device)
    images, labels = (t.to(device) for t in data.train)
    test = tuple(t.to(device) for t in data.test)
    model.to(device, memory_format=torch.channels_last)
    optimiser = _optimiser(model, recipe)
    bases = [group["lr"] for group in optimiser.param_groups]
    for group in optimiser.param_groups:  # a tensor, so that a recorded step reads today's rate
        group["lr"] = torch.tensor(0.0, device=device)
    batches = _Batches(len(images), recipe.batch, seed, device)
    share = recipe.batch // ranks
    x, y = images[:share].clone(), labels[:share].clone()
    draws = torch.zeros(share, 3, dtype=torch.long, device=device)

    def step() -> None:
        optimiser.zero_grad()  # to None: a recorded step writes its gradients where they were
        with torch.autocast(torch.device(device).type, torch.bfloat16, device != "cpu"):
            out = model(augmented(prepared(x), draws))
        F.cross_entropy(out.float(), y, label_smoothing=recipe.smoothing).backward()
        if ranks > 1:
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= ranks
        optimiser.step()

    at, curve = _resumed(kept, model, optimiser, device)
    started, called = at, _Step(step, device)
    parts: list[tuple[int, float]] = []  # steps and seconds between evaluations
    marks = {round((n + 1) * recipe.steps / recipe.evaluations) for n in range(recipe.evaluations)}
    model.train()
    begun, since = time.perf_counter(), at
    while at < recipe.steps:
        rows, drawn = batches(at)
        own = slice(rank * share, (rank + 1) * share)
        x.copy_(images[rows[own]])
        y.copy_(labels[rows[own]])
        draws.copy_(drawn[own])
        for group, base in zip(optimiser.param_groups, bases, strict=True):
            group["lr"].fill_(base * schedule(at, recipe.steps))
        called()
        at += 1
        if at in marks or at == recipe.steps:
            _wait(device)
            parts.append((at - since, time.perf_counter() - begun))
            accuracy, loss = judged(model, test)
            if not math.isfinite(loss):
                raise DivergedError(f"the loss is {loss} after {at} steps: try a lower rate")
            curve.append((at, accuracy))
            if at < recipe.steps:
                _keep(kept, at, model, optimiser, curve)
            model.train()
            begun, since = time.perf_counter(), at
    if kept is not None:
        kept.unlink(missing_ok=True)
    steps, accuracies = (list(column) for column in zip(*curve, strict=True))
    seconds = sum(taken for _, taken in parts)
    each = statistics.median(1e3 * taken / count for count, taken in parts[1:] or parts)
    return Curve(steps, accuracies, loss, seconds, each, called.recorded, started)


def joined(device: str) -> tuple[int, int, str]:
    """How many processes train together, which of them this is, and its device."""
    ranks, rank = (int(os.environ.get(n, d)) for n, d in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if ranks > 1:
        device = f"cuda:{os.environ['LOCAL_RANK']}" if device.startswith("cuda") else device
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return ranks, rank, device


def schedule(step: int, steps: int) -> float:
    """The share of the highest rate: up along a line for a tenth of the steps, then down to 0."""
    rise = max(1, steps // 10)
    return (step + 1) / rise if step < rise else (steps - step) / (steps - rise)


@functools.cache
def _normalisers(device: torch.device) -> tuple[Tensor, ...]:
    """Made once: a recorded step cannot copy them to the device."""
    return tuple(torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))


def prepared(pixels: Tensor) -> Tensor:
    mean, std = _normalisers(pixels.device)
    return ((pixels.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def augmented(x: Tensor, draws: Tensor) -> Tensor:
    """Each image shifted by up to four pixels, half of them mirrored; `draws` [B, 3] says how."""
    n, size = len(x), x.shape[-1]
    along = torch.arange(size, device=x.device)
    rows, columns = draws[:, :1] + along, draws[:, 1:2] + along
    columns = torch.where(draws[:, 2:] == 1, columns.flip(1), columns)
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    which = torch.arange(n, device=x.device)[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def judged(model: nn.Module, test: tuple[Tensor, ...]) -> tuple[float, float]:
    """Accuracy in percent and cross-entropy, in float32, every gate evaluated as a gate."""
    model.eval()
    on_gpu = test[0].is_cuda
    with tg.kernels.use("triton" if on_gpu else "reference"):
        logits = torch.cat([model(prepared(x)) for x in test[0].split(2000)])
    right = (logits.argmax(1) == test[1]).double().mean()
    return 100 * right.item(), F.cross_entropy(logits.double(), test[1]).item()


class _Batches:
    """Rows and draws of step t, from (seed, t) alone: an epoch is one permutation."""

    def __init__(self, count: int, batch: int, seed: int, device: str) -> None:
        self.count, self.batch, self.seed, self.device = count, batch, seed, device
        self.each = max(1, count // batch)  # the rest of an epoch is left out
        self.epoch = -1

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, self.each)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            self.epoch, size = epoch, self.each * self.batch
            order = torch.randperm(self.count, generator=generator)
            self.order = order.repeat(-(-size // self.count))[:size].to(self.device)
            shifts = torch.randint(0, 9, (size, 2), generator=generator)
            mirrors = torch.randint(0, 2, (size, 1), generator=generator)
            self.draws = torch.cat([shifts, mirrors], 1).to(self.device)
        part = slice(place * self.batch, (place + 1) * self.batch)
        return self.order[part], self.draws[part]


class _Step:
    """Calls a step, and on a GPU records it at the fourth call and replays it from then on."""

    def __init__(self, step: Callable[[], None], device: str) -> None:
        self.step, self.calls, self.graph = step, 0, None
        self.tries = device.startswith("cuda")
        self.recorded = False

    def __call__(self) -> None:
        self.calls += 1
        if self.graph is not None:
            self.graph.replay()
            return
        if self.tries and self.calls == 4:
            self.tries = False
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.step()
            except RuntimeError as error:
                print(f"steps are called, not recorded: {str(error).splitlines()[0]}", flush=True)
                torch.cuda.synchronize()
            else:
                self.graph, self.recorded = graph, True
                graph.replay()  # recording ran nothing
                return
        if self.tries:  # torch wants the first calls on a stream of their own
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self.step()


def _optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    groups = tg.training.param_groups(
        model, recipe.rate, weight_decay=recipe.decay, gate_lr_scale=recipe.gate_rate
    )
    on_gpu = next(model.parameters()).is_cuda
    if recipe.adam:
        return torch.optim.AdamW(groups, recipe.rate, (0.9, 0.99), fused=on_gpu, capturable=on_gpu)
    return torch.optim.SGD(groups, recipe.rate, momentum=0.9, nesterov=True, fused=on_gpu)


def _resumed(
    kept: Path | None, model: nn.Module, optimiser: torch.optim.Optimizer, device: str
) -> tuple[int, list[tuple[int, float]]]:
    if kept is None or not kept.exists():
        return 0, []
    state = torch.load(kept, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    rates = [group["lr"] for group in optimiser.param_groups]
    optimiser.load_state_dict(state["optimiser"])
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate
    return state["step"], [tuple(point) for point in state["curve"]]


def _keep(
    kept: Path | None,
    step: int,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    curve: list[tuple[int, float]],
) -> None:
    """Written beside and then moved, so that a stop in between leaves the old one."""
    if kept is None:
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = kept.with_suffix(".new")
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
    torch.save({**state, "step": step, "curve": [list(point) for point in curve]}, new)
    new.replace(kept)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
