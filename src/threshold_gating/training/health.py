"""Early warning: channels whose gate is stuck, judged by what the gate really sees in training.

A value is in a flat part of a gate where |dy/dx| is at most `flat` times the steepest slope of the
instance it started from; of a step, which is flat everywhere, where the output is the same for all
values. A channel is stuck if at least `share` of its values were in flat parts in each of the last
`patience` observations, and these were `values` or more. It is dead if its output there is 0 (up to
`zero`), so that nothing goes on nor back, and saturated if not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.conversion.text import some
from threshold_gating.instance import TG


@dataclass(frozen=True)
class Rule:
    """When a channel counts as stuck; see the module."""

    flat: float = 0.01
    share: float = 0.999
    patience: int = 2
    values: int = 3000  # 3 / (1 - share): fewer, none of them steep, do not establish the share
    zero: float = 0.01

    def __post_init__(self) -> None:
        shares = 0 <= self.flat < 1 and 0 < self.share <= 1 and self.zero >= 0
        if not (shares and self.patience >= 1 and self.values >= 1):
            raise ValueError(
                "Rule: flat is from 0 to below 1, share above 0 up to 1, zero not negative, "
                f"patience and values at least 1; got {self}."
            )


class Seen(NamedTuple):
    """What one observation shows of each channel of a site, [C]."""

    flat: Tensor  # the share of its values in flat parts of the gate
    level: Tensor  # the mean |y| there
    values: int  # how many there were of each
    axis: int  # of the channels in the input
    lost: tuple[int, int] = (0, 0)  # how many inputs and how many outputs are NaN


class Stuck(NamedTuple):
    """A channel that is stuck, found at a step."""

    step: int
    site: str
    channel: int
    what: str  # "dead" or "saturated"
    values: int  # over which it was seen to be


def look(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    axis: int,
    steepest: Tensor | float,
    rule: Rule,
    *,
    output_of_weights: bool = False,
) -> Seen:
    """Values `x` that reached a gate, judged by the derivative of `f`.

    Args:
        f: what the gate does, or with `output_of_weights` a layer behind gates.
        steepest: the slope that is not flat; 0 for a step.
    """
    with _by_itself():
        z = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            y = f(z.view_as(z))  # which may be overwritten
            signs = torch.ones_like(y)
            if output_of_weights:  # by random signs no output cancels another for many values
                draw = torch.Generator(device="cpu").manual_seed(0)
                bits = torch.randint(2, y.shape, generator=draw)
                signs = (2 * bits - 1).to(y)
            (slope,) = torch.autograd.grad(y, z, signs, allow_unused=True, materialize_grads=True)
        by_channel = [w.detach().movedim(axis, 0).flatten(1).float() for w in (slope, z)]
        slopes, inputs = by_channel[0].abs(), by_channel[1]
        steep = torch.as_tensor(steepest, device=x.device).expand(len(slopes))
        limit = rule.flat * steep.unsqueeze(1)
        out = None if output_of_weights else y.detach().movedim(axis, 0).flatten(1).float()
        flat = slopes <= limit
        if out is not None and not isinstance(steepest, Tensor) and steepest == 0:
            flat = (out == out[:, :1]).all(1, keepdim=True).expand_as(out)
        flat = flat & inputs.isfinite()
        weight = flat.float()
        level = torch.zeros_like(inputs) if out is None else out.abs().nan_to_num()
        level = (weight * level).sum(1) / weight.sum(1).clamp_min(1)
        lost = int(inputs.isnan().sum()), int(y.detach().isnan().sum())
        return Seen(weight.mean(1), level, inputs.shape[1], axis, lost)


@contextmanager
def _by_itself() -> Iterator[None]:
    """Apart from what runs around us: a converted network answers torch's functions, and a
    checkpointed part counts the tensors that are saved."""
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch._C.DisableTorchFunction(), keep:
        yield


@functools.lru_cache(1024)
def steepest_slope(t: TG) -> float:
    """The largest |dy/dx| of an instance, on a grid that is dense where its gates move."""
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    reach = 1.0 if t.hard else 8.0 / min(taus)
    ends = t.theta or (0.0,)
    x = torch.linspace(min(ends) - reach, max(ends) + reach, 4001, dtype=torch.float64)
    x.requires_grad_()
    with torch.enable_grad(), _by_itself():
        (slope,) = torch.autograd.grad(t(x).sum(), x, allow_unused=True, materialize_grads=True)
    return float(slope.abs().max())


class Health:
    """How long each channel of each site has been stuck."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._runs: dict[str, tuple[Tensor, Tensor]] = {}  # observations in a row, and values
        self._told: dict[str, set[int]] = {}

    def judge(self, site: str, seen: Seen, step: int) -> list[Stuck]:
        """Channels that are now known to be stuck, each told of once until it recovers."""
        rule, now = self.rule, (seen.flat >= self.rule.share).cpu()
        times, values = self._runs.get(site, (torch.zeros(0), torch.zeros(0)))
        if times.shape != now.shape:
            times, values = torch.zeros(len(now)), torch.zeros(len(now))
        times, values = (times + 1) * now, (values + seen.values) * now
        self._runs[site] = times, values
        known = (times >= rule.patience) & (values >= rule.values)
        told = self._told.setdefault(site, set())
        told &= set(now.nonzero().flatten().tolist())
        found, level = [], seen.level.cpu()
        for channel in known.nonzero().flatten().tolist():
            if channel not in told:
                dead = float(level[channel]) <= rule.zero
                what = "dead" if dead else "saturated"
                found.append(Stuck(step, site, channel, what, int(values[channel])))
                told.add(channel)
        return found

    def stuck(self, site: str) -> int:
        """How many channels of a site are stuck as far as is known."""
        return len(self._told.get(site, ()))


def described(found: list[Stuck], axis: int) -> str:
    """Findings at one site in a sentence."""
    words = []
    for what in ("dead", "saturated"):
        own = [s for s in found if s.what == what]
        if own:
            these = some([str(s.channel) for s in own], 8)
            many = "s" if own[1:] else ""
            words.append(f"channel{many} {these} (axis {axis}) {'are' if many else 'is'} {what}")
    one, least = found[0], min(s.values for s in found)
    return (
        f"step {one.step}: {one.site}: {'; '.join(words)}: at least {least:,} values of each were "
        f"seen, and all but a few lie where the gate is flat."
    )


def is_step(t: TG) -> bool:
    """Whether an instance is flat everywhere and jumps: its output alone says whether it moves."""
    return t.hard and not any(t.s) and not any(t.q or ())


def scale_of(t: TG) -> float:
    """The slope of an instance that is not flat; 0 for a step."""
    slope = steepest_slope(t)
    return slope if math.isfinite(slope) and not is_step(t) else 0.0
