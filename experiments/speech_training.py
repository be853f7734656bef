"""Training of DeepSpeech2-type networks by CTC, several at once on one GPU.

Batches depend on (seed, epoch) alone, and so do the first weights on the seed: all contenders with
one seed start from the same weights and see the same batches in the same order.

A step of a recurrent network is thousands of small kernels, one behind the other, which leave most
of a GPU idle. So the contenders of a seed are trained as one network (`speech_networks.Stack`, the
recurrence in plain formulas of torch), each with a loss, a clipping and a curve of its own: a
`Lane`, which has a stream and its steps recorded as CUDA graphs, one for each padded length.
`side_by_side` replays lanes in turn, in one process, and the GPU runs them at the same time. Where
steps cannot be recorded they are called, and the figures say so (`recorded`). On a CPU they are
called. Word error rates are taken of each network by itself, by the library's LSTM with every gate
evaluated (native ops off).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import threshold_gating as tg
from experiments.ctc import ctc_loss, decoded, encoded, word_errors
from experiments.data import Spoken
from experiments.speech_networks import Alone, Listener, Stack

STRIDE = 4  # frames of the input for one of the LSTM: 25 a second
LENGTHS = (180, 252, 340, 432)  # in frames: quarters of the training set, nine tenths; then all


class Recipe(NamedTuple):
    """How long and how fast: AdamW, the same for every contender but for the rate."""

    epochs: int
    rate: float
    batch: int = 16
    gate_rate: float = 0.25  # the rate of gate parameters over that of the weights
    decay: float = 1e-5  # of the weights alone
    fall: float = 0.95  # of the rate, each epoch
    rise: int = 3  # epochs until the rate is whole: without, 4e-3 never leaves the first plateau
    clip: float = 400.0
    every: int = 2  # epochs between evaluations


class Part(NamedTuple):
    """Utterances padded to one length, on the device."""

    x: Tensor  # [N, T, 13], each coefficient of each utterance with mean 0 and variance 1
    frames: Tensor  # [N], how many the LSTM has of each
    targets: Tensor  # [N, U]
    lengths: Tensor  # [N]
    which: list[int]  # of the utterances it was made from


class Corpus(NamedTuple):
    """What is trained on, and what is judged: the utterances for validation, then the test's."""

    train: list[Part]
    judged: list[Part]
    texts: list[str]  # of `judged`
    validation: int  # how many of them


def corpus(data: Spoken, device: str) -> Corpus:
    """Every tenth utterance of the training set is for validation: 853, 95 and 130 of AN4."""
    features, texts = data.train
    held = range(0, len(texts), 10)
    kept = [k for k in range(len(texts)) if k % 10]
    said = [*(texts[k] for k in held), *data.test[1]]
    heard = [*(features[k] for k in held), *data.test[0]]
    own = [features[k] for k in kept], [texts[k] for k in kept]
    longest = -(-max(map(len, (*features, *data.test[0]))) // STRIDE) * STRIDE
    lengths = [*(n for n in LENGTHS if n < longest), longest]
    train, judged = parts(*own, lengths, device), parts(heard, said, lengths, device)
    return Corpus(train, judged, said, len(held))


def parts(
    features: Sequence[Tensor], texts: Sequence[str], lengths: Sequence[int], device: str
) -> list[Part]:
    found = []
    for low, high in pairwise((0, *lengths)):
        which = [k for k, x in enumerate(features) if low < len(x) <= high]
        if not which:
            continue
        symbols = [encoded(texts[k]) for k in which]
        frames = [-(-len(features[k]) // STRIDE) for k in which]
        for n, own, k in zip(frames, symbols, which, strict=True):
            needed = len(own) + sum(a == b for a, b in pairwise(own))
            if n < needed:
                raise ValueError(f"{texts[k]!r} needs {needed} frames and has {n}")
        x = torch.zeros(len(which), high, features[0].shape[1])
        targets = torch.zeros(len(which), max(map(len, symbols)), dtype=torch.long)
        for row, k in enumerate(which):
            spread = features[k].std(0, correction=0).clamp(min=1e-5)
            x[row, : len(features[k])] = (features[k] - features[k].mean(0)) / spread
            targets[row, : len(symbols[row])] = torch.tensor(symbols[row])
        counts = torch.tensor([frames, [len(own) for own in symbols]])
        found.append(Part(*(t.to(device) for t in (x, counts[0], targets, counts[1])), which))
    return found


def planned(train: Sequence[Part], batch: int, seed: int, epoch: int) -> list[tuple[int, Tensor]]:
    """The batches of an epoch: which part, and which of its rows. What fills none is left out."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    batches = []
    for k, part in enumerate(train):
        count = len(part.x)
        each = max(1, count // batch)
        rows = torch.randperm(count, generator=generator).repeat(-(-batch // count))
        batches += [(k, own) for own in rows[: each * batch].view(each, batch)]
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[k] for k in order]


def schedule(recipe: Recipe, epoch: int) -> float:
    """The share of the rate in an epoch: it rises along a line, and falls as it always does."""
    return min(1.0, (epoch + 1) / recipe.rise) * recipe.fall**epoch


class Point(NamedTuple):
    """Where a run stands: WER in percent, the mean loss of the steps since the point before."""

    step: int
    validation: float
    test: float
    loss: float


class Lane:
    """Runs with the same batches. `course` does their steps as it is iterated, under `stream`.

    Args:
        models: the network of each run; then `figures` has what came of each, in this order.
        stacked: train them as one. A single one can be trained by itself, by the library's LSTM.
        kept: the file of the runs' state, removed when they end.
        before: epochs that the networks have behind them; the rate goes on falling from there.
        name: what the lane is called where it says how far it is, every tenth epoch.
    """

    def __init__(
        self,
        models: Sequence[Listener],
        data: Corpus,
        recipe: Recipe,
        *,
        seed: int,
        device: str,
        stacked: bool = True,
        kept: Path | None = None,
        before: int = 0,
        name: str = "",
    ) -> None:
        on_gpu = device.startswith("cuda")
        self.models, self.data, self.recipe = [m.to(device) for m in models], data, recipe
        self.net = Stack(self.models) if stacked else Alone(*self.models)
        self.seed, self.device, self.kept = seed, device, kept
        self.before, self.name, self.stacked = before, name, stacked
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        groups = self.net.groups(recipe.rate, recipe.gate_rate, recipe.decay)
        self.optimiser = torch.optim.AdamW(groups, recipe.rate, fused=on_gpu, capturable=on_gpu)
        self.bases = [group["lr"] for group in self.optimiser.param_groups]
        for group in self.optimiser.param_groups:  # so that a recorded step reads today's rate
            group["lr"] = torch.tensor(0.0, device=device)
        self.rows = torch.zeros(recipe.batch, dtype=torch.long, device=device)
        self.losses = torch.zeros(len(models), device=device)  # since the last point
        self.best = [
            [p.targets.new_zeros(len(p.x), p.x.shape[1] // STRIDE) for p in data.judged]
            for _ in models
        ]
        self.step = self.epoch = self.started_at = 0
        self.curves: list[list[Point]] = [[] for _ in models]
        self.errors: list[list[int]] = [[] for _ in models]
        self.recorded = False
        self.learn: list[Callable[[], None]] = [partial(self._learn, p) for p in data.train]
        self.hear: list[Callable[[], None]] = [partial(self._hear, k) for k in range(len(models))]
        if on_gpu:
            torch.cuda.synchronize(device)
        with torch.cuda.stream(self.stream):
            self._prepare()
        self.course = self._course()

    def _learn(self, part: Part) -> None:
        self.optimiser.zero_grad(set_to_none=False)
        x, frames, targets, lengths = (t[self.rows] for t in part[:4])
        count, batch = len(self.models), len(x)
        logp = self.net(x, frames).flatten(0, 1)
        about = targets.repeat(count, 1), frames.repeat(count), lengths.repeat(count)
        losses = ctc_loss(logp, *about).view(count, batch).sum(1) / batch
        losses.sum().backward()  # each goes back to its own network alone
        for model in self.models:
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        self.optimiser.step()
        self.losses += losses.detach()

    @torch.no_grad()
    def _hear(self, k: int) -> None:
        """The likeliest symbols of all that is judged, every gate evaluated as a gate."""
        with tg.kernels.use("reference" if self.stream is None else "triton"):
            for best, part in zip(self.best[k], self.data.judged, strict=True):
                best.copy_(self.models[k](part.x, part.frames).argmax(-1))

    def _prepare(self) -> None:
        """One step of each kind makes all that is kept between steps; then it is put back."""
        start = [p.detach().clone() for p in self.net.parameters()]
        for learn in self.learn if self.stream is not None else self.learn[:1]:
            learn()
        if self.stream is not None:
            for hear in self.hear:
                hear()
            self._record()
        with torch.no_grad():
            for t in (*self._moments(), self.losses):
                t.zero_()
            for p, first in zip(self.net.parameters(), start, strict=True):
                p.copy_(first)
        self._resume()

    def _record(self) -> None:
        pool = torch.cuda.graph_pool_handle()

        def recorded(call: Callable[[], None]) -> Callable[[], None]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                call()
            return graph.replay

        try:
            learn, hear = ([recorded(call) for call in calls] for calls in (self.learn, self.hear))
        except RuntimeError as error:
            print(f"steps are called, not recorded: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
        else:
            self.learn, self.hear, self.recorded = learn, hear, True

    def _course(self) -> Iterator[None]:
        if self.before and not self.curves[0]:
            yield from self._judge()
        while self.epoch < self.recipe.epochs and not all(map(self.diverged, self.runs)):
            share = schedule(self.recipe, self.before + self.epoch)
            for group, base in zip(self.optimiser.param_groups, self.bases, strict=True):
                group["lr"].fill_(base * share)
            batches = planned(self.data.train, self.recipe.batch, self.seed, self.epoch)
            rows = torch.stack([own for _, own in batches]).to(self.device)
            for (k, _), own in zip(batches, rows, strict=True):
                self.rows.copy_(own)
                self.learn[k]()
                self.step += 1
                yield
            self.epoch += 1
            if self.epoch % self.recipe.every == 0 or self.epoch == self.recipe.epochs:
                yield from self._judge()
                if self.epoch % 10 == 0:
                    self._keep()
        if self.kept is not None:
            self.kept.unlink(missing_ok=True)

    @property
    def runs(self) -> range:
        return range(len(self.models))

    def diverged(self, k: int) -> bool:
        """Whether a run has ended so; the others of its lane go on."""
        return bool(self.curves[k]) and not math.isfinite(self.curves[k][-1].loss)

    def _judge(self) -> Iterator[None]:
        """A point more of the curve of each run that goes on."""
        going = [k for k in self.runs if not self.diverged(k)]
        for k in going:
            self.hear[k]()
        yield  # the other lanes are asked before this one is waited for
        losses = self.losses.tolist()
        self.losses.zero_()
        for k in going:
            since = self.step - (self.curves[k][-1].step if self.curves[k] else 0)
            errors, n, words = self._word_errors(k), self.data.validation, self.words
            rates = [
                100 * sum(e) / sum(w) for e, w in ((errors[:n], words[:n]), (errors[n:], words[n:]))
            ]
            self.curves[k].append(Point(self.step, *rates, losses[k] / since if since else 0.0))
            self.errors[k] = errors[n:]

    def _word_errors(self, k: int) -> list[int]:
        heard = [""] * len(self.data.texts)
        for best, part in zip(self.best[k], self.data.judged, strict=True):
            for place, own, n in zip(part.which, best.tolist(), part.frames.tolist(), strict=True):
                heard[place] = decoded(own[:n])
        return [word_errors(a, b) for a, b in zip(self.data.texts, heard, strict=True)]

    @property
    def words(self) -> list[int]:
        return [len(text.split()) for text in self.data.texts]

    def figures(self, k: int) -> dict[str, Any]:
        """A run's; `wer` is the test's at the end, `validation` the mean of the last three."""
        curve, diverged = self.curves[k], self.diverged(k)
        last = [point.validation for point in curve[-3:]]
        gates = tg.training.gate_parameters(self.models[k]).values()
        return {
            "wer": math.inf if diverged else curve[-1].test,
            "validation": math.inf if diverged else sum(last) / len(last),
            **{f"curve_{n}": [getattr(p, n) for p in curve] for n in Point._fields},
            "errors": self.errors[k],
            "words": self.words[self.data.validation :],
            "parameters": sum(p.numel() for p in self.models[k].parameters()),
            "gate_parameters": sum(p.numel() for p in gates),
            "moved": moved(self.models[k]),
            "recorded": self.recorded,
            "started_at": self.started_at,
            **({"stacked": len(self.models)} if self.stacked else {}),
        }

    def _moments(self) -> list[Tensor]:
        known = self.optimiser.state
        own = [known[p] for group in self.optimiser.param_groups for p in group["params"]]
        return [state[name] for state in own for name in ("step", "exp_avg", "exp_avg_sq")]

    def _keep(self) -> None:
        """Written beside and then moved, so that a stop in between leaves the old one."""
        if self.name:
            ends = "; ".join(f"{c[-1].test:.1f} %, loss {c[-1].loss:.3g}" for c in self.curves)
            print(f"{self.name}: epoch {self.epoch}, WER {ends}", flush=True)
        if self.kept is None:
            return
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        tensors = [t.detach().cpu() for t in (*self.net.parameters(), *self._moments())]
        state = {"tensors": tensors, "epoch": self.epoch, "step": self.step, "errors": self.errors}
        state["curves"] = [[list(point) for point in curve] for curve in self.curves]
        new = self.kept.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.kept)

    @torch.no_grad()
    def _resume(self) -> None:
        if self.kept is None or not self.kept.exists():
            return
        state = torch.load(self.kept, map_location=self.device, weights_only=True)
        own = (*self.net.parameters(), *self._moments())
        for t, then in zip(own, state["tensors"], strict=True):
            t.copy_(then)
        self.curves = [[Point(*point) for point in curve] for curve in state["curves"]]
        self.epoch, self.errors = state["epoch"], state["errors"]
        self.step = self.started_at = state["step"]


def moved(model: Listener) -> dict[str, float]:
    """Root mean square of log tau, theta and the slopes over the units, for each gate of a step."""
    found: dict[str, list[Tensor]] = {}
    for lstm in model.lstms:
        for name, t in lstm.named_parameters():
            what = name.removeprefix("gate_").partition("_l0")[0]
            if name.startswith("gate_") and what != "c":
                for site, row in zip(lstm.learning.sites, t.detach(), strict=True):
                    found.setdefault(f"{what} {site}", []).append(row.square().mean())
    return {name: torch.stack(rows).mean().sqrt().item() for name, rows in found.items()}


def side_by_side(lanes: Sequence[Lane]) -> Iterator[int]:
    """Run all of them in turn, a step each; gives the number of a lane as it ends."""
    going = dict(enumerate(lanes))
    while going:
        for k, lane in list(going.items()):
            with torch.cuda.stream(lane.stream):
                ended = next(lane.course, _ENDED) is _ENDED
            if ended:
                del going[k]
                yield k


_ENDED = object()


def milliseconds(lane: Lane, rounds: int) -> dict[str, Any]:
    """Of one step, alone on the device, over the batches of an epoch; and with steps called."""
    counts = [max(1, len(p.x) // lane.recipe.batch) for p in lane.data.train]
    called: list[Callable[[], None]] = [partial(lane._learn, p) for p in lane.data.train]
    found = {}
    with torch.cuda.stream(lane.stream):
        for name, steps in (("ms", lane.learn), ("ms_called", called)):
            each = [min(_seconds(step, lane.stream) for _ in range(rounds)) for step in steps]
            found[name] = 1e3 * sum(map(math.prod, zip(each, counts, strict=True))) / sum(counts)
    return {**found, "recorded": lane.recorded}


def _seconds(call: Callable[[], None], stream: torch.cuda.Stream | None) -> float:
    if stream is not None:
        stream.synchronize()
    begun = time.perf_counter()
    call()
    if stream is not None:
        stream.synchronize()
    return time.perf_counter() - begun
