"""Training of DeepSpeech2-type networks by CTC, several at once on one GPU.

A step of a recurrent network is thousands of small kernels, one behind the other, which leave most
of a GPU idle. So each run is a `Lane`: a network with a stream of its own and its steps recorded as
CUDA graphs, one for each padded length; `side_by_side` replays the lanes in turn, in one process,
and the GPU runs them at the same time. Where steps cannot be recorded they are called, and the
figures say so (`recorded`). On a CPU they are called.

Batches depend on (seed, epoch) alone, and so do the first weights on the seed: all contenders with
one seed start from the same weights and see the same batches in the same order. Word error rates
are taken with every gate evaluated (native ops off).
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
from experiments.ctc import ALPHABET, ctc_loss, decoded, encoded, word_errors
from experiments.data import Spoken

STRIDE = 4  # frames of the input for one of the LSTM: 25 a second
# What each contender learns beside its weights; see `fig3_speech`.
_PAIRS: dict[str, Any] = {"train": ("tau", "theta")}
ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "constant": _PAIRS,
    "released": {**_PAIRS, "family": "free"},
    "control": {**_PAIRS, "sites": ("i", "f", "g", "o")},
}
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


class Listener(nn.Module):
    """Two convolutions over time, five bidirectional LSTMs, symbols: DeepSpeech2 for cepstra.

    As in DeepSpeech2 the two directions are added and activations are clipped at 20; norms are over
    the features of a frame, so that nothing depends on what else is in a batch. Frames behind the
    end of an utterance are 0 at the input of every layer. `gates` goes to each `tg.LSTM`.
    """

    def __init__(self, hidden: int, gates: dict[str, Any], layers: int = 5, channels: int = 256):
        super().__init__()
        self.first = nn.Conv1d(13, channels, 11, stride=2, padding=5)
        self.second = nn.Conv1d(channels, channels, 5, stride=2, padding=2)
        self.norm = nn.LayerNorm(channels)
        sizes = [channels, *[hidden] * (layers - 1)]
        self.norms = nn.ModuleList(map(nn.LayerNorm, (*sizes, hidden)))
        self.lstms = nn.ModuleList(
            tg.LSTM(size, hidden, bidirectional=True, **gates) for size in sizes
        )
        self.symbols = nn.Linear(hidden, len(ALPHABET))

    def forward(self, x: Tensor, frames: Tensor) -> Tensor:
        """Log probabilities of symbols, [B, T / 4, K]."""
        h = nn.functional.hardtanh(self.norm(self.first(x.mT).mT), 0, 20)
        h = h * _inside(2 * frames, h.shape[1])
        h = nn.functional.hardtanh(self.second(h.mT), 0, 20).permute(2, 0, 1)  # [T, B, C]
        inside = _inside(frames, len(h)).transpose(0, 1)
        for norm, lstm in zip(self.norms, self.lstms, strict=False):
            both, _ = lstm(norm(h) * inside)
            h = torch.add(*both.chunk(2, -1))
        return self.symbols(self.norms[-1](h)).log_softmax(-1).transpose(0, 1)


def _inside(frames: Tensor, steps: int) -> Tensor:
    """[B, T, 1]: 1 up to the end of each utterance, then 0."""
    return (torch.arange(steps, device=frames.device) < frames[:, None]).float().unsqueeze(-1)


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
    """One run. `course` does its steps as it is iterated, under `stream`; then `figures` has all.

    Args:
        kept: the file of the run's state, removed when it ends.
        before: epochs that the network has behind it; the rate goes on falling from there.
        name: what the run is called where it says how far it is, every tenth epoch.
    """

    def __init__(
        self,
        model: Listener,
        data: Corpus,
        recipe: Recipe,
        *,
        seed: int,
        device: str,
        kept: Path | None = None,
        before: int = 0,
        name: str = "",
    ) -> None:
        on_gpu = device.startswith("cuda")
        self.model, self.data, self.recipe, self.seed = model.to(device), data, recipe, seed
        self.device, self.kept, self.before, self.name = device, kept, before, name
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        groups = tg.training.param_groups(model, recipe.rate, recipe.gate_rate, recipe.decay)
        self.optimiser = torch.optim.AdamW(groups, recipe.rate, fused=on_gpu, capturable=on_gpu)
        self.bases = [group["lr"] for group in self.optimiser.param_groups]
        for group in self.optimiser.param_groups:  # so that a recorded step reads today's rate
            group["lr"] = torch.tensor(0.0, device=device)
        self.rows = torch.zeros(recipe.batch, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)  # since the last point
        self.best = [p.targets.new_zeros(len(p.x), p.x.shape[1] // STRIDE) for p in data.judged]
        self.step = self.epoch = self.started_at = 0
        self.curve: list[Point] = []
        self.errors: list[int] = []
        self.recorded, self.diverged = False, False
        self.learn: list[Callable[[], None]] = [partial(self._learn, p) for p in data.train]
        self.hear: Callable[[], None] = self._hear
        if on_gpu:
            torch.cuda.synchronize(device)
        with torch.cuda.stream(self.stream):
            self._prepare()
        self.course = self._course()

    def _learn(self, part: Part) -> None:
        self.optimiser.zero_grad(set_to_none=False)
        x, frames, targets, lengths = (t[self.rows] for t in part[:4])
        loss = ctc_loss(self.model(x, frames), targets, frames, lengths).sum() / len(x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimiser.step()
        self.loss += loss.detach()

    @torch.no_grad()
    def _hear(self) -> None:
        """The likeliest symbols of all that is judged, every gate evaluated as a gate."""
        with tg.kernels.use("reference" if self.stream is None else "triton"):
            for best, part in zip(self.best, self.data.judged, strict=True):
                best.copy_(self.model(part.x, part.frames).argmax(-1))

    def _prepare(self) -> None:
        """One step of each kind makes all that is kept between steps; then it is put back."""
        start = [p.detach().clone() for p in self.model.parameters()]
        for learn in self.learn if self.stream is not None else self.learn[:1]:
            learn()
        if self.stream is not None:
            self._hear()
            self._record()
        with torch.no_grad():
            for t in (*self._moments(), self.loss):
                t.zero_()
            for p, first in zip(self.model.parameters(), start, strict=True):
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
            learn, hear = [recorded(call) for call in self.learn], recorded(self._hear)
        except RuntimeError as error:
            print(f"steps are called, not recorded: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
        else:
            self.learn, self.hear, self.recorded = learn, hear, True

    def _course(self) -> Iterator[None]:
        if self.before and not self.curve:
            self.hear()
            yield
            self._judge()
        while self.epoch < self.recipe.epochs and not self.diverged:
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
                self.hear()
                yield  # the other lanes are asked before this one is waited for
                self._judge()
                if self.epoch % 10 == 0:
                    self._keep()
        if self.kept is not None:
            self.kept.unlink(missing_ok=True)

    def _judge(self) -> None:
        heard = [""] * len(self.data.texts)
        for best, part in zip(self.best, self.data.judged, strict=True):
            for k, own, n in zip(part.which, best.tolist(), part.frames.tolist(), strict=True):
                heard[k] = decoded(own[:n])
        errors = [word_errors(a, b) for a, b in zip(self.data.texts, heard, strict=True)]
        since = self.step - (self.curve[-1].step if self.curve else 0)
        loss = self.loss.item() / since if since else 0.0
        self.loss.zero_()
        self.diverged = not math.isfinite(loss)
        n, words = self.data.validation, self.words
        rates = [
            100 * sum(e) / sum(w) for e, w in ((errors[:n], words[:n]), (errors[n:], words[n:]))
        ]
        self.curve.append(Point(self.step, *rates, loss))
        self.errors = errors[n:]

    @property
    def words(self) -> list[int]:
        return [len(text.split()) for text in self.data.texts]

    def figures(self) -> dict[str, Any]:
        """The run's; `wer` is the test's at the end, `validation` the mean of the last three."""
        last = [point.validation for point in self.curve[-3:]]
        gates = tg.training.gate_parameters(self.model).values()
        return {
            "wer": math.inf if self.diverged else self.curve[-1].test,
            "validation": math.inf if self.diverged else sum(last) / len(last),
            **{f"curve_{n}": [getattr(p, n) for p in self.curve] for n in Point._fields},
            "errors": self.errors,
            "words": self.words[self.data.validation :],
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "gate_parameters": sum(p.numel() for p in gates),
            "moved": moved(self.model),
            "recorded": self.recorded,
            "started_at": self.started_at,
        }

    def _moments(self) -> list[Tensor]:
        known = self.optimiser.state
        own = [known[p] for group in self.optimiser.param_groups for p in group["params"]]
        return [state[name] for state in own for name in ("step", "exp_avg", "exp_avg_sq")]

    def _keep(self) -> None:
        """Written beside and then moved, so that a stop in between leaves the old one."""
        if self.name:
            print(f"{self.name}: epoch {self.epoch}, {self.curve[-1]}", flush=True)
        if self.kept is None:
            return
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        tensors = [t.detach().cpu() for t in (*self.model.parameters(), *self._moments())]
        points, new = [list(point) for point in self.curve], self.kept.with_suffix(".new")
        torch.save({"tensors": tensors, "epoch": self.epoch, "curve": points}, new)
        new.replace(self.kept)

    @torch.no_grad()
    def _resume(self) -> None:
        if self.kept is None or not self.kept.exists():
            return
        state = torch.load(self.kept, map_location=self.device, weights_only=True)
        own = (*self.model.parameters(), *self._moments())
        for t, then in zip(own, state["tensors"], strict=True):
            t.copy_(then)
        self.epoch, self.curve = state["epoch"], [Point(*point) for point in state["curve"]]
        self.step = self.started_at = self.curve[-1].step


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
