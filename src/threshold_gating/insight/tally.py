"""What the values that reach a site say of its gate, channel by channel, added up over calls.

A channel is a sharing group of the gate, or of a gate for the whole layer a channel of its input.
When it counts as dead or saturated is the rule of `training.health`, as in a run that is watched.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.training.health import Rule, is_step, look, scale_of
from threshold_gating.training.telemetry import LearnedSite

CLOSED = 0.99  # of a gate that has decided: the others have 1 % together
SAMPLE = 4096  # values of a call that are kept
_CALLS = 16  # of which values are kept, at most
_AT_ONCE = 1 << 20  # values that are evaluated together


@dataclass(frozen=True, eq=False)
class Values:
    """What reached a site: figures [channels] over all values, and a sample of them.

    `open` has the mean of each gate [K, channels]. `saturation` is the share of values at which one
    gate has 0.99 or more, `flat` the share at which |dy/dx| is at most `rule.flat` of the steepest
    slope of the start. `state` is "alive", "dead" (flat nearly everywhere, its output 0),
    "saturated" (flat, its output not 0), or "unknown" where too few values were seen to say so; ""
    where the branches are in the weights, its numbers are not finite, or none of its values is.
    `lost` counts values that are NaN or infinite; all figures are of the others.
    """

    calls: int
    count: int  # of each channel, with those that are lost
    axis: int | None
    guessed: bool  # the axis
    mean: Tensor
    std: Tensor
    open: Tensor
    saturation: Tensor
    flat: Tensor
    level: Tensor  # mean |y| where it is flat
    state: tuple[str, ...]
    lost: int
    sample: Tensor

    @property
    def states(self) -> Counter[str]:
        """How many channels are in which state."""
        return Counter(self.state)

    def without(self, channels: Tensor) -> Values:
        """The same with nothing said of these channels, bool [channels] or one for all."""

        def lost(w: Tensor) -> Tensor:
            return torch.where(channels, math.nan, w)

        off = channels.expand(len(self.state)).tolist()
        state = tuple("" if lost else word for lost, word in zip(off, self.state, strict=True))
        figures = {w: lost(getattr(self, w)) for w in ("open", "saturation", "flat", "level")}
        return replace(self, state=state, **figures)  # type: ignore[arg-type]


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of each channel, [channels] in float64.

    Those of parts are merged (Chan, Golub and LeVeque 1979): E[x^2] - E[x]^2 cancels where the mean
    is large beside the deviation.
    """

    n: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, finite: Tensor) -> Moments:
        """Of the values x, [channels, values], that are finite; the others have to be 0."""
        x, n = x.double(), finite.sum(1, dtype=torch.float64)
        mean = x.sum(1) / n.clamp_min(1)
        off = torch.where(finite, x - mean.unsqueeze(1), 0.0)
        return cls(n.cpu(), mean.cpu(), off.square().sum(1).cpu())

    def merged(self, other: Moments) -> Moments:
        """Those of both parts."""
        n, apart = self.n + other.n, other.mean - self.mean
        share = other.n / n.clamp_min(1)
        squares = self.squares + other.squares + apart.square() * self.n * share
        return Moments(n, self.mean + apart * share, squares)


class Tally:
    """Adds up what reaches one site; `Values` are its result."""

    def __init__(self, site: LearnedSite, rule: Rule, *, function: bool = True) -> None:
        assert site.start is not None  # a temperature is no function of one number
        self.site, self.rule, self.function = _own(site), rule, function
        self.scale, self.step = scale_of(site.start), is_step(site.start)
        self.calls = self.count = self.lost = 0
        self.axis: int | None = None
        self.guessed = False
        self.kept: list[Tensor] = []  # of one call in `stride`
        self.stride = 1
        self.moments: Moments | None = None
        self.sums: Tensor | None = None  # rows: decided, flat, |y| where flat, gates
        self.ends: Tensor | None = None  # of y, for a step

    @property
    def channels(self) -> int | None:
        """How many there are; None before the first call."""
        return None if self.sums is None else self.sums.shape[1]

    def add(self, z: Tensor) -> None:
        """The values of one call, [channels, values]."""
        if self.calls % self.stride == 0:
            some = spread(z.detach().flatten(), SAMPLE).double().cpu()
            self.kept.append(some[some.isfinite()])
            if len(self.kept) > _CALLS:  # of a loop, calls from its start to its end
                self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.calls += 1
        self.count += z.shape[1]
        wide = z.detach() if z.dtype == torch.float64 else z.detach().float()
        for part in torch.split(wide, max(1, _AT_ONCE // max(1, len(z))), 1):
            finite = part.isfinite()
            x = torch.where(finite, part, 0.0)
            moments, sums = Moments.of(x, finite), self._sums(part, x, finite)
            self.moments = self.moments.merged(moments) if self.moments else moments
            self.sums = sums if self.sums is None else self.sums + sums

    def _sums(self, z: Tensor, x: Tensor, finite: Tensor) -> Tensor:
        """Of values z, which are x where they are finite."""
        self.lost += int((~finite).sum())
        gates = self.site.gates(x) * finite
        decided = ((gates >= CLOSED) & finite).any(0)
        flat = level = torch.zeros(len(z), device=z.device)
        if self.function:
            seen = look(self.site.blend, z, 0, self.scale, self.rule)
            flat = seen.flat * z.shape[1]
            level = seen.level * flat
            if self.step:
                self._widen(self.site.blend(x), finite)
        shares = torch.stack([decided.sum(1), flat, level]).double()
        return torch.cat([shares, gates.double().sum(-1)]).cpu()

    def _widen(self, y: Tensor, finite: Tensor) -> None:
        low, high = (torch.where(finite, y, end) for end in (math.inf, -math.inf))
        ends = torch.stack([low.amin(1), high.amax(1)]).cpu()
        if self.ends is not None:
            ends = torch.stack(
                [torch.minimum(ends[0], self.ends[0]), torch.maximum(ends[1], self.ends[1])]
            )
        self.ends = ends

    def values(self) -> Values | None:
        """What was found; None if no value came."""
        if self.sums is None or self.moments is None or not self.count:
            return None
        finite, mean, squares = self.moments
        decided, flat, level, *gates = self.sums
        n = torch.where(finite > 0, finite, math.nan)  # nothing is known of no value
        level = torch.where(flat > 0, level / flat.clamp_min(1), math.nan)
        share = flat / n
        if self.step and self.ends is not None:  # flat everywhere: whether it moves is the question
            share = torch.where(finite > 0, (self.ends[0] == self.ends[1]).double(), math.nan)
            level = torch.where(share > 0, self.ends.abs().amax(0).double(), math.nan)
        return Values(
            calls=self.calls,
            count=self.count,
            axis=self.axis,
            guessed=self.guessed,
            mean=torch.where(finite > 0, mean, math.nan),
            std=(squares / n).sqrt(),
            open=torch.stack(gates) / n,
            saturation=decided / n,
            flat=share if self.function else torch.full_like(share, math.nan),
            level=level,
            state=self._state(share, level, finite),
            lost=self.lost,
            sample=torch.cat(self.kept),
        )

    def _state(self, share: Tensor, level: Tensor, count: Tensor) -> tuple[str, ...]:
        rule = self.rule
        if not self.function:
            return ("",) * len(share)

        def word(flat: float, size: float, seen: float) -> str:
            if not seen:
                return ""
            if flat < rule.share:
                return "alive"
            if seen < rule.values:
                return "unknown"
            return "dead" if size <= rule.zero else "saturated"

        each = zip(share.tolist(), level.tolist(), count.tolist(), strict=True)
        return tuple(word(*one) for one in each)


def _own(site: LearnedSite) -> LearnedSite:
    """The gate with tensors of its own: those of a network from inference mode have no slopes."""
    rows = {
        what: [w.clone() if isinstance(w, Tensor) else w for w in getattr(site, what)]
        for what in ("tau", "theta", "s", "c")
    }
    return site._replace(**rows)  # type: ignore[arg-type]


def spread(values: Tensor, most: int) -> Tensor:
    """At most so many of the values [n], one from each of equal parts, at a place drawn in it.

    Equal steps would meet the same column of every image, or the same key of every query.
    """
    n = len(values)
    if n <= most:
        return values
    draw = torch.Generator(device="cpu").manual_seed(0)
    within = torch.rand(most, generator=draw, dtype=torch.float64)
    at = (torch.arange(most) + within) * (n / most)
    return values[at.long().clamp_max(n - 1).to(values.device)]
