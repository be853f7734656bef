"""The networks of the speech experiment: one, `Listener`, and several trained as one, `Stack`.

A `Stack` computes what its Listeners compute, for training: contenders with one seed see the same
batches, so that a step of all of them has the launches of one. Its LSTMs are plain formulas
(`stacked_lstm`) and not the library's. The parameters of its Listeners are parts of its own
tensors, so a Listener always is what was trained; word error rates are taken of the Listeners,
with the library's LSTM. `Alone` is one Listener as a user would train it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments.ctc import ALPHABET
from experiments.stacked_lstm import recurrence
from threshold_gating.kernels import Structure
from threshold_gating.nn.rnn import SITES
from threshold_gating.nn.unitwise import HELD_BY, sharpness, start

# What each contender learns beside its weights; see `fig3_speech`.
_PAIRS: dict[str, Any] = {"train": ("tau", "theta")}
ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "constant": _PAIRS,
    "released": {**_PAIRS, "family": "free"},
    "control": {**_PAIRS, "sites": ("i", "f", "g", "o")},
}


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


class Alone:
    """One Listener, trained by the library's own LSTM: what a user would run, and what is timed."""

    def __init__(self, model: Listener) -> None:
        self.models = [model]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.models[0].parameters())

    def groups(self, rate: float, gate_rate: float, decay: float) -> list[dict[str, Any]]:
        return tg.training.param_groups(self.models[0], rate, gate_rate, decay)

    def __call__(self, x: Tensor, frames: Tensor) -> Tensor:
        """Log probabilities of symbols, [1, B, T / 4, K]."""
        return self.models[0](x, frames)[None]


class Stack:
    """R Listeners of one size on one device, as one network: tensors have a leading axis R.

    `tensors` holds the weights under the names they have in a Listener: [R, 1, ..], and of an LSTM
    both directions, [R, 2, ..]. `gates` holds the gates of all its LSTMs.
    """

    def __init__(self, models: Sequence[Listener]) -> None:
        self.models = list(models)
        names = [name for name, _ in models[0].named_parameters() if ".gate_" not in name]
        parts = {
            name: [name, f"{name}_reverse"] if ".lstms." in f".{name}" else [name]
            for name in names
            if not name.endswith("_reverse")
        }
        self.tensors = {name: self._joined(own) for name, own in parts.items()}
        self.gates = _Gates(models)

    def _joined(self, parts: Sequence[str]) -> nn.Parameter:
        own = [[model.get_parameter(part) for part in parts] for model in self.models]
        whole = nn.Parameter(torch.stack([torch.stack([p.detach() for p in ps]) for ps in own]))
        whole.grad = torch.zeros_like(whole)
        for k, ps in enumerate(own):
            for d, p in enumerate(ps):
                _share(p, whole, (k, d))
        return whole

    def parameters(self) -> list[nn.Parameter]:
        return [*self.tensors.values(), *self.gates.learned()]

    def groups(self, rate: float, gate_rate: float, decay: float) -> list[dict[str, Any]]:
        """Those of one Listener, with the tensors of all, and one group more for all gates."""
        groups = tg.training.param_groups(self.models[0], rate, gate_rate, decay)
        for group in groups:
            own = [name for name in group.pop("param_names") if name in self.tensors]
            group["params"] = [self.tensors[name] for name in own]
        gates = {"name": "gates", "lr": rate * gate_rate, "weight_decay": 0.0}
        groups = [*groups, {**gates, "params": self.gates.learned()}]
        return [group for group in groups if group["params"]]

    def __call__(self, x: Tensor, frames: Tensor) -> Tensor:
        """Log probabilities of symbols, [R, B, T / 4, K]; see `Listener.forward`."""
        h = self._front(x, frames)  # [R, T, B, C]
        inside = _inside(frames, h.shape[1]).transpose(0, 1)
        layers = len(self.models[0].lstms)
        for layer, gates in enumerate(self.gates.numbers()):
            h = self._lstm(f"lstms.{layer}", self._norm(f"norms.{layer}", h) * inside, gates)
        h = self._norm(f"norms.{layers}", h)
        weight, bias = (self.tensors[f"symbols.{name}"].squeeze(1) for name in ("weight", "bias"))
        y = torch.baddbmm(bias[:, None], h.flatten(1, 2), weight.mT).unflatten(1, h.shape[1:3])
        return y.log_softmax(-1).transpose(1, 2)

    def _front(self, x: Tensor, frames: Tensor) -> Tensor:
        """The two convolutions: the first has the channels of all, the second a group for each."""
        count = len(self.models)

        def apart(h: Tensor) -> Tensor:
            return h.unflatten(1, (count, -1)).permute(1, 3, 0, 2)  # [R, T, B, C]

        weight, bias = (self.tensors[f"first.{name}"].flatten(0, 2) for name in ("weight", "bias"))
        h = apart(F.conv1d(x.mT, weight, bias, stride=2, padding=5))
        h = F.hardtanh(self._norm("norm", h), 0, 20)
        h = h * _inside(2 * frames, h.shape[1]).transpose(0, 1)
        together = h.permute(2, 0, 3, 1).flatten(1, 2)  # [B, R C, T]
        weight, bias = (self.tensors[f"second.{name}"].flatten(0, 2) for name in ("weight", "bias"))
        h = F.conv1d(together, weight, bias, stride=2, padding=2, groups=count)
        return F.hardtanh(apart(h), 0, 20)

    def _norm(self, name: str, h: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"{name}.{part}"].unsqueeze(1) for part in ("weight", "bias"))
        return torch.addcmul(bias, F.layer_norm(h, h.shape[-1:]), weight)

    def _lstm(self, name: str, x: Tensor, gates: Tensor) -> Tensor:
        """Both directions of all, added: [R, T, B, I] to [R, T, B, H]."""
        both = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
        ih, hh, b_ih, b_hh = (
            self.tensors[f"{name}.{part}_l0"].flatten(0, 1)
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        ahead, back = recurrence(both, ih, hh, b_ih + b_hh, gates).unflatten(0, (-1, 2)).unbind(1)
        return ahead + back.flip(1)


class _Gates:
    """The gates of all LSTMs of a Stack: what is learned, as the library's LSTM holds it.

    `held` has a tensor [R, layers, 2, 5, ..] for each of tau, theta, s and c. `learns` is 1 for a
    number that its Listener learns and 0 for the others, which stay at their start, `rest`.
    """

    def __init__(self, models: Sequence[Listener]) -> None:
        own = SITES["lstm"]
        sites, instances = list(own), list(own.values())
        first = models[0].lstms[0]
        units, device = first.hidden_size, first.weight_ih_l0.device
        lead = (len(models), len(models[0].lstms), 2)
        self.held = {}
        for what in HELD_BY:
            own_start = start(what, instances, units).to(first.weight_ih_l0)
            whole = own_start.repeat(*lead, *(1 for _ in own_start.shape))
            self.held[what] = nn.Parameter(whole, requires_grad=False)
        learns = torch.zeros(len(models), 1, 1, len(sites), 6, 1)
        for k, model in enumerate(models):
            learning = model.lstms[0].learning
            if list(learning.sites) != sites[: len(learning.sites)]:
                raise ValueError(f"a stack learns the first of {sites}, not {learning.sites}")
            for what in learning.train:
                learns[k, ..., : len(learning.sites), _PLACES[what], :] = 1
                self._share(what, k, model)
        self.tau0, self.theta0 = (
            torch.tensor(numbers, device=device, dtype=first.weight_ih_l0.dtype)[:, None]
            for numbers in ([sharpness(t) for t in instances], [t.theta[0] for t in instances])
        )
        self.learns = learns.to(first.weight_ih_l0)
        with torch.no_grad():  # of the start, the numbers that are not learned
            self.rest = self._now() * (1 - self.learns)

    def _share(self, what: str, k: int, model: Listener) -> None:
        whole = self.held[what].requires_grad_()
        if whole.grad is None:
            whole.grad = torch.zeros_like(whole)
        for layer, lstm in enumerate(model.lstms):
            for d, suffix in enumerate(("_l0", "_l0_reverse")):
                p = getattr(lstm, f"gate_{HELD_BY[what]}{suffix}")
                with torch.no_grad():
                    whole[k, layer, d, : len(p)] = p
                _share(p, whole, (k, layer, d, slice(len(p))))

    def learned(self) -> list[nn.Parameter]:
        return [p for p in self.held.values() if p.requires_grad]

    def _now(self) -> Tensor:
        """[R, layers, 2, 5, 6, H]."""
        tau = self.tau0 * Structure.sharpening(self.held["tau"])
        theta = self.theta0 + self.held["theta"]
        pair = torch.stack([tau, theta], -2)
        return torch.cat([pair, self.held["c"], self.held["s"]], -2)

    def numbers(self) -> Iterator[Tensor]:
        """Of each layer, [2 R, 5, 6, H], as `recurrence` takes them."""
        now = torch.addcmul(self.rest, self._now(), self.learns)  # exact: these are 0 and 1
        return (own.flatten(0, 1) for own in now.unbind(1))


# Where the six numbers of a gate are, as `recurrence` takes them.
_PLACES = {"tau": slice(0, 1), "theta": slice(1, 2), "c": slice(2, 4), "s": slice(4, 6)}


def _share(p: nn.Parameter, whole: nn.Parameter, at: tuple[Any, ...]) -> None:
    """Make `p` a part of `whole`, and its gradient one of the gradient."""
    p.data, p.grad = whole.detach()[at], whole.grad[at]
