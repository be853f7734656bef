"""Recognition of a function by what it computes, over its whole range, on a grid in float64.

The name of a module and the calls it makes are only hints for where to look. What is returned as
exact agrees with the function on every point of the grid, from 1e-30 to 1e30 on both sides:

    rows           the taxonomy, and its families with a parameter
    affine         a call of torch between affine maps, a * tanh(b x + g) + d x + e
    two branches   any blend of the two asymptotes by one gate, however it is written
    lines          any piecewise affine function with few pieces, jumps included

What is none of these is approximate: a row that stands for it, or a fit over the line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from threshold_gating import taxonomy
from threshold_gating.conversion import sites
from threshold_gating.conversion.sites import Recognised
from threshold_gating.instance import TG
from threshold_gating.taxonomy import TAXONOMY

Function = Callable[[Tensor], Tensor]
_APPROXIMATE = sorted({*sites.APPROXIMATE, "gelu_tanh"})
_MOST_PIECES = 8
_FAR_OFF = 0.05  # of the function's size: a fit that is further off stands for nothing
_EXACT = 1e-12  # of the value, or of the function's size between -12 and 12 where that is larger


class _Calls(TorchFunctionMode):
    """Notes the nonlinear calls made while it is on, with their inputs as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[Any, ...], Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = sites.read(func, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        call = sites.KINDS[kind].read(*args, **kwargs) if kind in sites.KINDS else None
        x = None if call is None else call.x.clone()
        y = func(*args, **kwargs)
        self.made.append((kind, call.parameters if call else (), x, y.clone()))  # type: ignore[arg-type]
        return y


def _probe() -> Tensor:
    """Points that tell functions apart: dense where they bend, torch's own kinks, and far out.

    They are float32 numbers, so that a function which computes in float32 is not seen to round.
    """
    fine = torch.arange(-600, 601) / 50
    kinks = torch.tensor([-6, -3, -1, -0.5, 0, 0.1, 0.5, 1, 3, 6])
    far = torch.logspace(-30, 30, 241)
    between = 4 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
    return torch.cat([fine, kinks, fine * 1e-3, far, -far, between]).double()


def is_elementwise(f: Callable[[Tensor], Any]) -> bool:
    """Whether `f` acts on each element alone: order, shape and company do not matter."""
    x = _probe()[:1200]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            y = f(x.clone())
            if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
                return False
            again, image = f(x[order]), f(x.view(2, 3, 10, 20).clone())
            half = f(x[:600].clone())  # a mean over all elements does not see their order
            narrow = f(x.bfloat16())
    except Exception:  # it is not a function of one tensor, and whatever it says does not matter
        return False
    pairs = ((again, y[order]), (image.flatten(), y), (half, y[:600]))
    alike = all(torch.allclose(a, b, rtol=1e-12, atol=0, equal_nan=True) for a, b in pairs)
    return alike and narrow.dtype == torch.bfloat16


def is_bent(f: Callable[[Tensor], Any]) -> bool:
    """Whether `f` is element-wise and not just a straight line."""
    if not is_elementwise(f):
        return False
    x = _probe()
    with torch.no_grad():
        y = f(x.clone())
        a, b = f(torch.tensor([0.0, 1.0], dtype=x.dtype)).tolist()
    return not _Values(x, y).agree(a + (b - a) * x)


def overwrites(f: Callable[[Tensor], Any]) -> bool:
    """Whether `f` leaves its result in its input."""
    x = _probe()
    with torch.no_grad():
        return bool(f(x).data_ptr() == x.data_ptr())


class _Values:
    """What a function gives on the probe."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.known = y.isfinite()

    @functools.cached_property
    def size(self) -> float:
        """The largest value between -12 and 12."""
        near = self.y[(self.x.abs() <= 12) & self.known]
        return float(near.abs().max()) if len(near) else 0.0

    @functools.cached_property
    def allowed(self) -> Tensor:
        """How far another function may be, where this one gives numbers."""
        # tails that cancel have only the digits of what cancels
        slack = _EXACT * self.size + 1e-14 * self.x.abs().clamp(max=1e3)
        return (_EXACT * self.y.abs() + slack)[self.known]

    def agree(self, other: Tensor) -> bool:
        """Whether these are the same, wherever they are numbers."""
        if len(self.allowed) < len(self.known) / 2:
            return False
        return bool(((self.y - other)[self.known].abs() <= self.allowed).all())


def nonlinear_calls(f: Function) -> list[str]:
    """The kinds of the nonlinear calls of torch that f makes."""
    with torch.no_grad(), _Calls() as calls:
        f(_probe())
    return [kind for kind, *_ in calls.made]


def recognise(f: Function, *, fit: bool = True) -> Recognised:
    """The instance of an element-wise function: exact if one is, else with its error on record.

    Raises ValueError if no gate comes near, or if none is known and `fit` is not asked for.
    """
    x = _probe()
    with torch.no_grad():
        with _Calls() as calls:
            seen = _Values(x, f(x.clone()))
        mapped = list(_mapped(calls, seen))
        rows = _rows()
        for found, values in rows:
            if found.exact and seen.agree(values):
                return found
        for t in (*(found.t for found, _ in mapped if found.exact), *_read_off(f)):
            if seen.agree(t(x)):
                return Recognised(t, True, 0.0)
        for found, values in (*rows, *mapped):
            if not found.exact and seen.agree(values):
                return found
        for t in (*_two_branches(f, seen), *_lines(f)):
            if seen.agree(t(x)):
                return Recognised(t, True, 0.0)
    if not fit:
        raise ValueError("it is not a known function")
    found = _fitted(f, seen)
    if not found.sup <= _FAR_OFF * seen.size:
        raise ValueError(f"no gate comes near: the best of five branches is off by {found.sup:.2g}")
    return found


@functools.cache
def _rows() -> tuple[tuple[Recognised, Tensor], ...]:
    """The rows of the taxonomy that a function may be, with what they are on the probe."""
    x, rows = _probe(), taxonomy.ROWS
    exact = [key for key, row in rows.items() if row.exact and TAXONOMY[key].clamp is None]
    return (
        *((Recognised(t, True, 0.0), t(x)) for t in map(TAXONOMY.__getitem__, exact)),
        *((Recognised(TAXONOMY[k], False, rows[k].sup), rows[k].f(x)) for k in _APPROXIMATE),
    )


_FITS: dict[bytes, Recognised | ValueError] = {}
_MOST_FITS = 256


def _fitted(f: Function, seen: _Values) -> Recognised:
    """`sites.fitted`, which takes seconds, once for what a function gives on the probe.

    Should another one agree on all of it and not elsewhere, its certificate says so.
    """
    key = seen.y.numpy().tobytes()
    if key not in _FITS:
        if len(_FITS) == _MOST_FITS:
            _FITS.clear()
        try:
            _FITS[key] = sites.fitted(f)
        except ValueError as error:
            _FITS[key] = error
    found = _FITS[key]
    if isinstance(found, ValueError):
        raise ValueError(*found.args)
    return found


def _read_off(f: Function) -> Iterator[TG]:
    """Members of the families with a parameter that `f` might be, by a few of its values."""
    at = torch.tensor([-1e4, -1.0, 1.0, 1e4], dtype=torch.float64)
    low, left, right, high = f(at).tolist()
    if not all(map(math.isfinite, (low, left, right, high))):
        return
    yield taxonomy.leaky_relu(-left)
    if 0.5 < right < 1:
        yield taxonomy.swish(-math.log(1 / right - 1))
    if low < high and abs(low) < 1e4:
        yield taxonomy.hardtanh(low, high)
    if 0 < 1e4 - high < 1e4:
        yield taxonomy.softshrink(1e4 - high)


def _mapped(calls: _Calls, seen: _Values) -> Iterator[tuple[Recognised, Tensor]]:
    """For each call of torch between affine maps: the instance of all, and what all compute."""
    x, y = seen.x, seen.y
    for kind, parameters, z, w in calls.made:
        if kind not in sites.KINDS or z.shape != x.shape or z.dtype != x.dtype:
            continue
        inner, outer = _solved(z, {"beta": x}), _solved(y, {"alpha": w, "delta": x})
        if inner is None or outer is None or not (inner["beta"] and outer["alpha"]):
            continue
        maps = {**outer, "beta": inner["beta"], "gamma": inner["one"]}
        maps["eps"] = maps.pop("one")
        unmoved = maps == {"alpha": 1, "beta": 1, "gamma": 0, "delta": 0, "eps": 0}
        with suppress(ValueError):  # a clamp around the gate, random slopes
            known = sites.of_call(kind, parameters)
            t = known.t if unmoved else taxonomy.affine(known.t, **maps)
            made = maps["alpha"] * w + maps["delta"] * x + maps["eps"]
            yield Recognised(t, known.exact, abs(maps["alpha"]) * known.sup), made


def _solved(y: Tensor, columns: dict[str, Tensor]) -> dict[str, float] | None:
    """The factors of the columns (and of "one") that add up to y; the fewest that do."""
    columns = {**columns, "one": torch.ones_like(y)}
    first, *rest = columns
    if torch.allclose(columns[first], y, rtol=0, atol=0, equal_nan=True):
        return {**dict.fromkeys(columns, 0.0), first: 1.0}  # least squares would round
    near = (columns[first].abs() <= 12) & y.isfinite() & (y.abs() <= 1e3)
    for more in ((), ("one",), *((n, "one") for n in rest if n != "one")):
        names = (first, *more)
        a = torch.stack([columns[n][near] for n in names], 1)
        if a.shape[0] < 8:
            return None
        solved = torch.linalg.lstsq(a, y[near, None]).solution[:, 0]
        size = float(solved.abs().max())
        factors = [_nice(v, size) for v in solved.tolist()]
        found = {**dict.fromkeys(columns, 0.0), **dict(zip(names, factors, strict=True))}
        if _Values(columns[first], y).agree(sum(f * columns[n] for n, f in found.items())):  # type: ignore[arg-type]
            return found
    return None


def _nice(v: float, size: float = 1.0) -> float:
    """`v`, or what it is to rounding beside numbers of this size: 0, a short number, or 1 / one."""
    short = float(f"{v:.12g}")
    if abs(v) <= 1e-14 * size:
        return 0.0
    if abs(v - short) <= 4e-15 * max(size, abs(v)):
        return short
    inverse = 1 / float(f"{1 / v:.12g}")
    return inverse if abs(v - inverse) <= 4e-15 * abs(v) else v


def _two_branches(f: Function, seen: _Values) -> Iterator[TG]:
    """The asymptotes of f blended by the one gate that two of its values ask for."""
    low, high = _tail(f, -1.0, seen.size), _tail(f, 1.0, seen.size)
    if low is None or high is None:
        return
    x, y = seen.x, seen.y
    below = low[0] * x + low[1]
    q = (y - below) / (high[0] * x + high[1] - below)
    between = ((q > 0.1) & (q < 0.9) & (x != 0)).nonzero().flatten()
    if len(between) < 2:
        return
    a, b = (between[x[between].argmin()], between[x[between].argmax()])
    u = torch.logit(q)
    tau = _nice(float((u[b] - u[a]) / (x[b] - x[a])))
    if 0 < tau < math.inf:
        yield TG(tau, _nice(float(x[a] - u[a] / tau)), (low[0], high[0]), (low[1], high[1]))


def _tail(f: Function, side: float, size: float) -> tuple[float, float] | None:
    """The line (s, c) that f has become on one side, as near to 0 as it has."""
    x = side * 2.0 ** torch.arange(4, 22, dtype=torch.float64)
    y = f(x.clone())
    s = y.diff() / x.diff()
    c = y[:-1] - s * x[:-1]
    same = ((s.diff().abs() <= 1e-13 * s[1:].abs().clamp(min=1)) & s[1:].isfinite()).nonzero()
    if not len(same):
        return None
    at = int(same[0]) + 1
    size = max(size, float(y[at].abs()))
    return _nice(float(s[at]), size), _nice(float(c[at]), size)


class _Piece(NamedTuple):
    """A stretch on which a function is the line s x + c."""

    first: float
    last: float
    s: float
    c: float


def _lines(f: Function) -> Iterator[TG]:
    """The hard instance of a function that is made of a few straight pieces."""
    far = torch.logspace(math.log10(13), 6, 60, dtype=torch.float64)
    x = torch.cat([-far.flip(0), torch.arange(-600, 601).double() / 50, far])
    pieces = _pieces(x, f(x.clone()))
    if not 1 < len(pieces) <= _MOST_PIECES:
        return
    cuts = [_cut(f, *pair) for pair in pairwise(pieces)]
    theta, owner = zip(*cuts, strict=True)
    if list(theta) == sorted(theta):
        yield TG(math.inf, theta, [p.s for p in pieces], [p.c for p in pieces], owner=owner)


def _pieces(x: Tensor, y: Tensor) -> list[_Piece]:
    """The stretches of at least two cells with one slope; none if other cells are between."""
    slopes = (y.diff() / x.diff()).tolist()
    at, values = x.tolist(), y.tolist()
    runs: list[list[int]] = []  # of cells, first and last
    for k, slope in enumerate(slopes):
        if not math.isfinite(slope):
            return []
        if runs and abs(slope - slopes[runs[-1][0]]) <= 1e-9 * max(1.0, abs(slope)):
            runs[-1][1] = k
        else:
            runs.append([k, k])
    long = [run for run in runs if run[1] > run[0]]
    if len(runs) > 2 * _MOST_PIECES or any(b[0] - a[1] > 2 for a, b in pairwise(long)):
        return []
    found = []
    for first, last in long:
        ends = [k for k in range(first, last + 2) if abs(at[k]) <= 12] or [first, last + 1]
        a, b = ends[0], ends[-1]
        size = max(abs(values[a]), abs(values[b]))
        s = _nice((values[b] - values[a]) / (at[b] - at[a]), size)
        near = min(ends, key=lambda k: abs(at[k]))
        found.append(_Piece(at[first], at[last + 1], s, _nice(values[near] - s * at[near], size)))
    return found


def _cut(f: Function, low: _Piece, high: _Piece) -> tuple[float, str]:
    """Where one piece ends and the next begins, and which of them has that point."""
    if low.s != high.s:
        cross = _nice((low.c - high.c) / (high.s - low.s))
        if low.last <= cross <= high.first:
            return cross, "lo" if _slope(f, cross) == low.s else "hi"
    a, b = low.last, high.first
    while (middle := (a + b) / 2) not in (a, b):
        value = float(f(torch.tensor([middle], dtype=torch.float64)))
        nearer = abs(value - low.s * middle - low.c) <= abs(value - high.s * middle - high.c)
        a, b = (middle, b) if nearer else (a, middle)
    return min((a, "lo"), (b, "hi"), key=lambda cut: len(repr(cut[0])))


def _slope(f: Function, at: float) -> float:
    """The derivative that autograd gives f at a point; NaN where it gives none."""
    x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        return float(_gradient(f, x))


def _gradient(f: Function, x: Tensor) -> Tensor:
    """f' at x as autograd has it, 0 where nothing leads back to x."""
    y = f(x.clone())  # a function that works in place must not be given a leaf
    if not y.requires_grad:
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(y.sum(), x, allow_unused=True)
    return torch.zeros_like(x) if slope is None else slope


def trains_as_it_computes(f: Function) -> bool:
    """Whether autograd gives f the derivative of its values, away from kinks.

    A straight-through estimator, a custom backward and what runs without gradients have others.
    """
    x = (_probe()[:1200] + 0.00371).requires_grad_()  # no round number, where kinks are
    with torch.enable_grad():
        try:
            slope = _gradient(f, x)
        except RuntimeError:  # autograd cannot follow it
            return False
    step = 1e-6
    with torch.no_grad():
        measured = (f(x + step) - f(x - step)) / (2 * step)
    known = slope.isfinite() & measured.isfinite()
    # the difference quotient has 1e-16 of the values over the step
    size = float(f(x.detach()).abs().nan_to_num(0, 0, 0).max()) + float(measured[known].abs().max())
    return bool(((slope - measured)[known].abs() <= 1e-7 * size).all())


def specials_apart(f: Function, t: TG) -> list[float]:
    """NaN, the infinities and the largest numbers of float32, where f and t differ, and -0.0 where
    f does not take it for 0.

    Where f itself is NaN at one of them, the gate may have the limit.
    """
    x = torch.tensor([math.nan, -math.inf, math.inf, -3e38, 3e38], dtype=torch.float64)
    with torch.no_grad():
        y, z = f(x.clone()), t(x)
        zero, minus = f(torch.tensor([0.0, -0.0], dtype=x.dtype)).tolist()
    same = torch.isclose(y, z, rtol=1e-9, atol=0, equal_nan=True) | (y.isnan() & ~x.isnan())
    found = [v for v, ok in zip(x.tolist(), same.tolist(), strict=True) if not ok]
    return found if zero == minus or math.isnan(zero) else [*found, -0.0]


def kinks_apart(f: Function, t: TG) -> list[float]:
    """The thresholds of a hard instance at which autograd gives f another slope than t."""
    if not t.hard:
        return []
    return [at for at in t.theta if not math.isclose(_slope(f, at), _slope(t, at), abs_tol=1e-9)]
