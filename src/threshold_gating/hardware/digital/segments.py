"""The sigmoid by straight segments in integers, and the numbers of its table.

|u| is cut into equal segments. Each has a slope of few bits and a base, and the value is

    base_i +- (slope_i * f >> shift),   f the leading bits of where |u| lies in its segment.

The sigmoid lies above and below 1/2 by the same amount, so the segments hold that amount,
tanh(|u| / 2) / 2, and both halves share them. Slopes and bases are chosen for every segment by
trying all codes of |u|, so that cut-off bits are part of the choice. No output is stored: a table
of outputs has an entry for each value, this has two numbers for each segment.

log(1 + exp(-|u|)) has the same form; gates of three and more branches need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Function = Literal["sigmoid", "softplus"]

# The steepest slope is that of the function at 0; slopes are shares of it.
_STEEPEST = {"sigmoid": 2, "softplus": 1}  # as a power of 2, downwards
_FALLS = {"sigmoid": False, "softplus": True}


@dataclass(frozen=True)
class Segments:
    """How a function is cut: what the search chooses.

    Args:
        function: "sigmoid", or "softplus" for log(1 + exp(-|u|)).
        top: |u| is below 2^top.
        fraction: fraction bits of u.
        count: log2 of the number of segments.
        slope: bits of a slope.
        step: bits of the place in a segment; the rest of |u| is not looked at.
        out: fraction bits of the value.
        exact: whether -u and 1 - g are exact, or ~u and ~g, each off by one in its last bit.
    """

    function: Function = "sigmoid"
    top: int = 3
    fraction: int = 12
    count: int = 5
    slope: int = 6
    step: int = 6
    out: int = 15
    exact: bool = True

    def __post_init__(self) -> None:
        if self.function not in _STEEPEST:
            raise ValueError(f"Segments: function is sigmoid or softplus; got {self.function!r}.")
        if not 0 < self.count + self.step <= self.bits:
            raise ValueError(
                f"Segments: |u| has {self.bits} bits (top {self.top}, fraction {self.fraction}), "
                f"too few for {self.count} of the segment and {self.step} of the place in it."
            )
        if self.slope < 1 or self.out < 1:
            raise ValueError(
                f"Segments: slope and out need one bit at least; got {self.slope}, {self.out}."
            )

    @property
    def bits(self) -> int:
        """Of |u|."""
        return self.top + self.fraction

    @property
    def shift(self) -> int:
        """Bits of the product that lie below the value; negative where it is the coarser one."""
        return self.slope + _STEEPEST[self.function] + self.count + self.step - self.top - self.out

    @property
    def falls(self) -> bool:
        """Whether the product is taken away from the base."""
        return _FALLS[self.function]

    def product(self, slope: Tensor, step: Tensor) -> Tensor:
        """What a segment adds to its base."""
        full = slope * step
        return full >> self.shift if self.shift >= 0 else full << -self.shift


class Table(NamedTuple):
    """Slopes and bases of all segments, each as many as there are segments."""

    slopes: Tensor
    bases: Tensor


def exact(segments: Segments, u: Tensor) -> Tensor:
    """What the segments hold, at real |u|: in float64, in units of the last bit."""
    y = torch.tanh(u / 2) / 2 if segments.function == "sigmoid" else torch.log1p(torch.exp(-u))
    scaled: Tensor = y * 2**segments.out
    return scaled


@lru_cache(maxsize=256)
def table(segments: Segments) -> Table:
    """The slope and base of each segment whose largest error is the smallest."""
    a = torch.arange(2**segments.bits)
    # ~u in place of -u: a code of |u| then stands for u = a and u = -a - 1, and lies in between.
    real = (a + (0.0 if segments.exact else 0.5)).double() / 2**segments.fraction
    wanted = exact(segments, real).view(2**segments.count, -1)
    if not segments.exact:
        wanted = wanted - 0.5  # and ~g in place of 1 - g
    step = _step(segments, a[: wanted.shape[1]])
    rise = (wanted[:, -1] - wanted[:, 0]).abs() / max(int(step[-1]), 1)
    near = (rise * 2.0**segments.shift).round().long()
    slopes, bases = torch.zeros_like(near), torch.zeros_like(near)
    error = torch.full((len(near),), torch.inf, dtype=torch.float64)
    for move in (-2, -1, 0, 1, 2):
        slope = (near + move).clamp(0, 2**segments.slope - 1)
        part = segments.product(slope[:, None], step)
        left = wanted + part if segments.falls else wanted - part
        low, high = left.aminmax(dim=1)
        base = _within(segments, ((low + high) / 2).round().long(), part[:, -1])
        off = torch.maximum(high - base, base - low)
        better = off < error
        slopes, bases = torch.where(better, slope, slopes), torch.where(better, base, bases)
        error = torch.where(better, off, error)
    return Table(slopes, bases)


def _within(segments: Segments, base: Tensor, most: Tensor) -> Tensor:
    """A base with which no value leaves its range, so that the circuit needs no clamp."""
    if segments.falls:
        return torch.maximum(base, most)
    top = 2 ** (segments.out - 1) - (0 if segments.exact else 1)
    return torch.minimum(base.clamp(min=0), top - most)


def _step(segments: Segments, a: Tensor) -> Tensor:
    width = segments.bits - segments.count
    return (a & ((1 << width) - 1)) >> (width - segments.step)


def magnitude(segments: Segments, u: Tensor) -> Tensor:
    """|u| of codes of u, as the circuit makes it; the lowest code has no opposite."""
    if not segments.exact:
        return torch.where(u < 0, ~u, u)
    return u.abs().clamp(max=2**segments.bits - 1)


def evaluate(segments: Segments, u: Tensor) -> Tensor:
    """Codes of the value at codes of u, every bit as in the circuit."""
    slopes, bases = (t.to(u.device) for t in table(segments))
    a = magnitude(segments, u)
    i = a >> (segments.bits - segments.count)
    part = segments.product(slopes[i], _step(segments, a))
    if segments.falls:
        return bases[i] - part
    half, h = 2 ** (segments.out - 1), bases[i] + part
    y: Tensor = half + torch.where(u < 0, -h if segments.exact else ~h, h)
    return y


def error(segments: Segments, out: int = 15) -> float:
    """The largest error over all codes of u against float64, in units of 2^-out."""
    u = torch.arange(-(2**segments.bits), 2**segments.bits)
    y = evaluate(segments, u).double() * 2.0 ** (out - segments.out)
    x = u.double() / 2**segments.fraction
    true = torch.sigmoid(x) if segments.function == "sigmoid" else torch.log1p(torch.exp(-x.abs()))
    worst: float = (y - true * 2**out).abs().max().item()
    return worst
