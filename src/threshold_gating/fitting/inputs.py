"""Inputs of a fit: a density, samples, an interval or the line; their points, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.instance import TG
from threshold_gating.taxonomy import Error

Function = Callable[[Tensor], Tensor]
Over = str | tuple[Any, ...] | Tensor

_BINS = 1500  # of samples; the residual is smooth, so a bin stands for its members


class Line(NamedTuple):
    """s x + c."""

    s: float
    c: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.s * x + self.c


@dataclass(frozen=True, eq=False)
class Inputs:
    """`kind` is "line", "interval", "normal" or "samples"; low and high are where they lie."""

    kind: str
    low: float
    high: float
    mean: float = 0.0
    std: float = 1.0
    values: Tensor | None = None

    def describe(self, tails: str) -> str:
        """What the figures of a fit with these tails are over."""
        density = f"N({self.mean:g}, {self.std**2:g})"
        if self.kind == "line" or (self.kind == "normal" and tails == "exact"):
            return f"sup over the line, RMS under {density}"
        span = f"[{self.low:.4g}, {self.high:.4g}]"
        if self.kind == "normal":
            return f"sup over {span}, RMS under {density}"
        if self.values is not None:
            return f"sup and RMS over {len(self.values)} samples in {span}"
        return f"sup and RMS over {span}"


@dataclass(frozen=True)
class Scale:
    """Where a function bends, how wide that region is, and by how much its value turns there.

    Powers of two and quarters of them, so that the change of units rounds nothing.
    """

    centre: float
    width: float
    height: float


def values(f: Function, x: Tensor) -> Tensor:
    """f(x) in float64, without a graph."""
    with torch.no_grad():
        y = f(x.clone())
    if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
        given = (
            f"{str(y.dtype).removeprefix('torch.')} of shape {tuple(y.shape)}"
            if isinstance(y, Tensor)
            else type(y).__name__
        )
        raise ValueError(
            "f must be element-wise: a real tensor in, one of the same shape out. "
            f"For x of shape {tuple(x.shape)} it returned {given}."
        )
    return y.double()


def parse(over: Over) -> Inputs:
    """`over` as given to `fit`, checked."""
    if isinstance(over, Tensor):
        return _samples(over)
    if over == "line":
        return Inputs("line", -math.inf, math.inf)
    if over == "normal":
        return _normal(0.0, 1.0)
    if isinstance(over, tuple) and len(over) == 3 and over[0] == "normal":
        return _normal(*over[1:])
    if not (isinstance(over, tuple) and len(over) == 2 and all(map(_is_number, over))):
        raise ValueError(
            "fit: over must be 'line', an interval (a, b), 'normal', ('normal', mean, std) or a "
            f"1-D tensor of samples; got {over!r}."
        )
    low, high = map(float, over)
    if not low < high or math.isinf(low) or math.isinf(high):
        raise ValueError(
            f"fit: an interval (a, b) must be finite with a < b; got {over!r}. "
            "For the whole line use over='line'."
        )
    return Inputs("interval", low, high, (low + high) / 2)


def _is_number(v: object) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool)


def _normal(mean: float, std: float) -> Inputs:
    if not (_is_number(mean) and _is_number(std) and math.isfinite(mean) and 0 < std < math.inf):
        raise ValueError(
            "fit: over=('normal', mean, std) needs a finite mean and a std > 0; "
            f"got mean={mean!r}, std={std!r}."
        )
    return Inputs("normal", mean - 6.0 * std, mean + 6.0 * std, float(mean), float(std))


def _samples(over: Tensor) -> Inputs:
    x = over.detach().to("cpu", torch.float64) if over.is_floating_point() else None
    if x is None or x.dim() != 1 or not len(x):
        raise ValueError(
            "fit: samples must be a 1-D floating-point tensor with at least one value; "
            f"got {str(over.dtype).removeprefix('torch.')} of shape {tuple(over.shape)}."
        )
    if not x.isfinite().all():
        raise ValueError(
            f"fit: samples must be finite; {int((~x.isfinite()).sum())} of {len(x)} are not. "
            "Drop them first."
        )
    x = x.sort().values
    return Inputs("samples", float(x[0]), float(x[-1]), float(x.mean()), values=x)


def finite(f: Function, x: Tensor) -> Tensor:
    """`values`, refused where one is NaN or infinite."""
    y = values(f, x)
    if not y.isfinite().all():
        first = int((~y.isfinite()).nonzero()[0])
        raise ValueError(
            f"fit: f({float(x[first]):.6g}) = {float(y[first])}, and f must be finite on all "
            "inputs. Fit over an interval where it is."
        )
    return y


def check(f: Function, inputs: Inputs) -> None:
    """Refuse an f that is not element-wise, not the same twice, or NaN where it is fitted."""
    x = _span(inputs, 401)
    y = finite(f, x)
    again = torch.cat([values(f, x[:100].flip(0)).flip(0), values(f, x[100:])])
    if not torch.allclose(y, again, rtol=1e-9, atol=1e-9 * float(y.abs().max())):
        at = float(x[(y - again).abs().argmax()])
        raise ValueError(
            f"fit: f is not element-wise: its value at {at:.6g} depends on the other elements or "
            "changes from call to call. Put a module into eval(), or fit one channel at a time."
        )


def _span(inputs: Inputs, n: int) -> Tensor:
    if inputs.values is not None:
        return inputs.values[torch.linspace(0, len(inputs.values) - 1, n).long()]
    low, high = max(inputs.low, -60.0), min(inputs.high, 60.0)
    if inputs.kind != "line":
        low, high = inputs.low, inputs.high
    return torch.linspace(low, high, n, dtype=torch.float64)


def scale_of(f: Function, inputs: Inputs, tails: str) -> Scale:
    """From the slope's jumps between neighbouring points: their median, spread and sum.

    With exact tails over the whole line, since the fit follows f there wherever the inputs lie.
    """
    out = torch.logspace(-10, 20, 700, base=2, dtype=torch.float64)
    x = torch.cat([-out.flip(0), out])
    low, high = (-math.inf, math.inf) if tails == "exact" else (inputs.low, inputs.high)
    if tails == "free":
        x = _merged(x, torch.linspace(low, high, 801, dtype=torch.float64))
    for _ in range(2):
        x = x[(x >= low) & (x <= high)]
        if len(x) < 3:  # one value alone
            return Scale(low, 1.0, 1.0)
        slopes = values(f, x).diff() / x.diff()
        jumps = slopes.diff().abs().nan_to_num(0, 0, 0)
        jumps[jumps < 1e-9 * jumps.sum()] = 0
        total = float(jumps.sum())
        if total <= 1e-9 * float(slopes.abs().max()) or total == 0:
            return Scale(0.0, 1.0, 1.0)  # affine
        share = jumps.cumsum(0) / total
        at = torch.searchsorted(share, torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64))
        first, middle, last = x[1:-1][at.clamp(max=len(share) - 1)].tolist()
        width = 2.0 ** round(math.log2(max((last - first) / 2, 2.0**-10)))
        centre = round(4 * middle / width) * width / 4
        x = torch.linspace(centre - 20 * width, centre + 20 * width, 8001, dtype=torch.float64)
    return Scale(centre, width, 2.0 ** round(math.log2(width * total)))


def points(inputs: Inputs, scale: Scale) -> tuple[Tensor, Tensor]:
    """Points to fit on and their weights, which sum to one."""
    if inputs.values is not None:
        return _binned(inputs.values)
    fine = scale.centre + scale.width * torch.linspace(-10, 10, 401, dtype=torch.float64)
    if inputs.kind == "line":
        x = _merged(fine, _far(scale, 40))
        return x, torch.full_like(x, 1 / len(x))
    reach = 8.5 * inputs.std
    low, high = inputs.low, inputs.high
    if inputs.kind == "normal":
        low, high = inputs.mean - reach, inputs.mean + reach
    even = torch.linspace(low, high, 401, dtype=torch.float64)
    x = _merged(even, fine[(fine > low) & (fine < high)])
    weight = torch.zeros_like(x)
    weight[1:] += x.diff() / 2
    weight[:-1] += x.diff() / 2
    if inputs.kind == "normal":
        weight = weight * torch.exp(-(((x - inputs.mean) / inputs.std) ** 2) / 2)
    return x, weight / weight.sum()


def _far(scale: Scale, n: int) -> Tensor:
    """`n` points on either side beyond the region where f bends; tails like 1/x reach far."""
    out = scale.width * torch.logspace(1.01, 3, n, dtype=torch.float64)
    return scale.centre + torch.cat([-out, out])


def _merged(a: Tensor, b: Tensor) -> Tensor:
    """The points of both, sorted, none twice."""
    x = torch.cat([a, b]).sort().values
    return x[torch.cat([torch.ones(1, dtype=torch.bool), x.diff() > 0])]


def _binned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted samples as the means and shares of bins, narrow both in value and in rank."""
    if len(x) <= _BINS or x[0] == x[-1]:
        return x, torch.full_like(x, 1 / len(x))
    rank = torch.linspace(0, 1, len(x), dtype=torch.float64)
    place = (rank + (x - x[0]) / (x[-1] - x[0])) / 2
    bins = (place * (_BINS - 1)).long()
    count = torch.bincount(bins, minlength=_BINS)
    mean = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, x)
    full = count > 0
    return mean[full] / count[full], count[full] / len(x)


def all_points(inputs: Inputs, scale: Scale) -> Tensor:
    """Points dense enough to see every peak of the error."""
    if inputs.values is not None:
        return inputs.values
    fine = scale.centre + scale.width * torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    if inputs.kind == "line":
        return _merged(fine, _far(scale, 1000))
    even = torch.linspace(inputs.low, inputs.high, 20_001, dtype=torch.float64)
    return _merged(even, fine[(fine > inputs.low) & (fine < inputs.high)])


def error(t: TG, f: Function, inputs: Inputs, tails: str, scale: Scale) -> Error:
    """Errors of `t` itself, as `Inputs.describe` says; on the line and N(0, 1) as `measure` has."""
    everywhere = inputs.kind == "line" or (inputs.kind == "normal" and tails == "exact")
    x = all_points(Inputs("line", -math.inf, math.inf) if everywhere else inputs, scale)
    sup = float((t(x) - finite(f, x)).abs().max())
    if everywhere:
        out = torch.logspace(math.log10(60), 4, 1000, dtype=torch.float64)
        x = torch.cat([torch.linspace(-60, 60, 240_001, dtype=torch.float64), out, -out])
        sup = max(sup, float((t(x) - finite(f, x)).abs().max()))
    x, weight = _quadrature(inputs)
    y = finite(f, x)
    rms, size = (float((weight * z**2).sum().sqrt()) for z in (t(x) - y, y))
    return Error(sup, rms, rms / size if size else math.inf if rms else 0.0)


def _quadrature(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Points and weights of the mean: the samples, or the trapezoid rule on 48,001 points."""
    if inputs.values is not None:
        return inputs.values, torch.full_like(inputs.values, 1 / len(inputs.values))
    if inputs.kind == "interval":
        x = torch.linspace(inputs.low, inputs.high, 48_001, dtype=torch.float64)
        weight = torch.ones_like(x)
        weight[[0, -1]] = 0.5
    else:
        z = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
        x, weight = inputs.mean + inputs.std * z, torch.exp(-(z**2) / 2)
    return x, weight / weight.sum()
