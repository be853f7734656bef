"""The shape of a function of one variable, measured: tails, corners, inflections, derivatives.

Works for anything that maps a tensor to a tensor element by element, in float64. Derivatives are
nested autograd up to the order at which it was seen to be right and central differences beyond:
torch's HardSigmoid has no double backward, and what comes from numpy has no backward at all.

Corners and inflections are looked for in [-32, 32], one per cell of 1/64. A step against the slope
is seen if it is larger than what f changes by within its cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

REACH = 32.0
_CELLS = 4096
# Smaller jumps, against the size of what jumps, are rounding or torch's Softplus, which switches to
# x at 20 and is off by 2e-9 there.
_JUMP = 1e-6
_FLAT = 1e-9  # a second derivative below this has no sign worth naming


@dataclass(frozen=True)
class Curve:
    """A checked element-wise function; `curve(x, k)` is its k-th derivative in float64.

    `orders` is how many derivatives autograd gets right (at most 3); the rest are differences.
    """

    f: Function
    name: str
    orders: int

    def __call__(self, x: Tensor, order: int = 0) -> Tensor:
        known = min(order, self.orders)
        if order == known:
            return _nested(self.f, x, known)
        return _difference(lambda z: _nested(self.f, z, known), x, order - known)


@dataclass(frozen=True)
class Asymptote:
    """The line slope x + intercept that f approaches on one side, or the reason why not."""

    slope: float | None
    intercept: float | None
    reason: str = ""

    @property
    def exists(self) -> bool:
        """Whether there is such a line."""
        return self.intercept is not None


@dataclass(frozen=True)
class Asymptotes:
    """The tails of f: at -inf (`low`) and at +inf (`high`)."""

    low: Asymptote
    high: Asymptote


@dataclass(frozen=True)
class Corner:
    """Where f' jumps, and by how much; `step` is the jump of f itself, 0 where f is continuous."""

    at: float
    jump: float
    step: float = 0.0


@dataclass(frozen=True)
class Derivatives:
    """f, f', f'', f''' at a point; None where left and right disagree, and from there on."""

    at: float
    value: float | None
    first: float | None
    second: float | None
    third: float | None
    by: str


def curve(f: Any) -> Curve:
    """`f` checked: one tensor in, one of the same shape and dtype out, finite, element-wise.

    Raises TypeError or ValueError that says which of these fails, and where.
    """
    if isinstance(f, Curve):
        return f
    if not callable(f):
        raise TypeError(f"f must be a function of a tensor or a TG; got {type(f).__name__}.")
    name = getattr(f, "__name__", type(f).__name__)
    spread = torch.linspace(-1, 1, 65, dtype=torch.float64)  # 0 is among them
    x = 16 * spread * spread.abs()
    y = _evaluated(f, name, x)
    if not y.isfinite().all():
        bad = ~y.isfinite()
        what = "NaN" if y.isnan().any() else "infinite"
        raise ValueError(
            f"{name} is {what} at x = {x[bad][0]:g} ({int(bad.sum())} of {len(x)} points in "
            "[-16, 16] are not finite); a finite value is needed everywhere."
        )
    if (again := (_evaluated(f, name, x) - y).abs().max().item()) > 0:
        raise ValueError(
            f"{name} is random: two calls on the same input differ by {again:.2g}; put it into "
            "evaluation mode or fix its seed."
        )
    # Shuffled and without the other half: a softmax passes any shuffle, a cumulative sum any cut.
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:32]
    moved = (_evaluated(f, name, x[order]) - y[order]).abs() / (1 + y[order].abs())
    if moved.max() > 1e-9:
        worst = int(moved.argmax())
        raise ValueError(
            f"{name} is not element-wise: its value at x = {x[order][worst]:g} changes when the "
            "other elements do."
        )
    return Curve(f, name, _orders(f))


def asymptotes(f: Any) -> Asymptotes:
    """Slope and intercept at -inf and +inf, or why they do not exist (Def. 7, Thm. 8).

    The paper says that a bounded f' ensures the slopes; it does not (sin), and a slope does not
    ensure an intercept (asinh). The reason is one of "diverging" (ReLU squared), "oscillating"
    (sin), "slope exists but no intercept" (asinh), "not finite far out".

    >>> asymptotes(torch.nn.functional.softplus).high
    Asymptote(slope=1.0, intercept=0.0, reason='')
    """
    c = curve(f)
    return Asymptotes(_tail(c, -1.0), _tail(c, 1.0))


def corners(f: Any) -> tuple[Corner, ...]:
    """Where f' (or f itself) jumps in [-32, 32], located to 1e-13 (1e-6 without autograd).

    >>> corners(torch.relu)
    (Corner(at=0.0, jump=1.0, step=0.0),)
    """
    c = curve(f)
    slope, width, beside = (lambda x: c(x, 1)), 1e-13, 1e-11
    if c.orders == 0:  # f' by differences is smeared over its stencil: take a short one
        slope, width, beside = (lambda x: (c(x + 1e-7) - c(x - 1e-7)) / 2e-7), 1e-6, 2e-6
    steps = _distinct(_jumps(c), beside)
    kinks = (k for k in _jumps(slope, width) if all(abs(k - s) > beside for s in steps))
    places = _distinct([*steps, *kinks], beside)
    # f itself needs no stencil: close by, the root that rises from 0 is seen not to step there
    found = (Corner(at, _jump(slope, at, beside), _jump(c, at, 1e-11)) for at in places)
    return tuple(k for k in found if k.jump or k.step)


def discontinuities(f: Any) -> tuple[tuple[float, ...], ...]:
    """Where f, f' and f'' jump in [-32, 32]: three lists, each without the points of those before.

    What an integral over f, f' and f'' has to be cut at.
    """
    c = curve(f)
    found = corners(c)
    steps = tuple(k.at for k in found if k.step)
    kinks = tuple(k.at for k in found if not k.step)
    if c.orders < 2:  # differences smear a jump of f''
        return steps, kinks, ()
    bends = _distinct(_jumps(lambda x: c(x, 2)), 1e-9)
    known = [*steps, *kinks]
    return steps, kinks, tuple(b for b in bends if all(abs(b - k) > 1e-9 for k in known))


def inflections(f: Any) -> tuple[float, ...]:
    """Where f'' changes sign in [-32, 32], located to 1e-13, low to high.

    A change by a jump counts (Softsign at 0); one across a stretch where f'' vanishes is put into
    its middle; two pieces without curvature have none (ReLU).
    """
    c = curve(f)
    x = _grid()
    bend = c(x, 2)
    if c.orders < 2:  # differences straddle a corner and show its jump as curvature
        for corner in corners(c):
            bend = bend.masked_fill((x - corner.at).abs() < 0.1, 0)
    seen = (bend.abs() > _FLAT).nonzero().flatten()
    x, bend = x[seen], bend[seen]
    turns = (bend[1:].sign() != bend[:-1].sign()).nonzero().flatten()
    low, high = x[turns], x[turns + 1]
    sign = bend[turns].sign()
    apart = (high - low) > 1.5 * (2 * REACH / _CELLS)
    middle = (low + high) / 2
    for _ in range(60):
        m = (low + high) / 2
        same = c(m, 2).sign() == sign
        low, high = torch.where(same, m, low), torch.where(same, high, m)
    return tuple(_snap(v) for v in torch.where(apart, middle, (low + high) / 2).tolist())


def derivatives(f: Any, at: float = 0.0) -> Derivatives:
    """f, f', f'', f''' at `at`, each None where its left and right limits differ.

    >>> derivatives(torch.tanh).third
    -2.0
    """
    c = curve(f)
    by = "autograd"
    values: list[float | None] = [None] * 4
    if c.orders < 3:
        by = f"autograd to order {c.orders}, then " if c.orders else ""
        by += "finite differences"
    steps = torch.tensor([0.0, -1, -2, -3, 1, 2, 3], dtype=torch.float64)
    apart = torch.logspace(-5, 0, 32, dtype=torch.float64)
    around = torch.cat([at - apart, at + apart])
    noise = 0.0
    for order in range(4):
        h = 1e-6 if order else 1e-13 * max(1.0, abs(at))  # f may be steep without limit: a root
        here, *beside = c(at + h * steps, order).tolist()
        if smeared := order > c.orders:  # differences turn a jump into a slope: take two points
            left, right = beside[0], beside[3]
        else:  # limits by extrapolation: what is only steep has no jump
            left, right = (3 * a - 3 * b + d for a, b, d in (beside[:3], beside[3:]))
        # Against the size of f nearby, as f may be 0 here, and against the rounding of the orders
        # below, which is all there is where this one vanishes.
        nearby = torch.cat([c(around, order), steps.new_tensor([0.0, left, right])])
        size = nearby[nearby.isfinite()].abs().max().item()
        noise = max(noise, (1e-12 if c.orders > order else 1e-8) * size)
        if not abs(left - right) <= (1e-4 if smeared else _JUMP) * size + noise:
            break
        # |x| inside a formula has gradient 0 at 0, which is wrong there and right beside it.
        wrong = order > 0 and not abs(here - (left + right) / 2) <= _JUMP * size + noise
        if wrong and c.orders >= order:
            by = "autograd beside the point"
        values[order] = _snap((left + right) / 2 if wrong else here)
    value, first, second, third = values
    return Derivatives(at, value, first, second, third, by)


def is_monotone(f: Any) -> bool:
    """Whether f' keeps its sign in [-32, 32], and no step of f goes against it."""
    c = curve(f)
    slope, steps = c(_grid(), 1), [k.step for k in corners(c)]
    rises = bool((slope >= -_FLAT).all()) and all(s >= 0 for s in steps)
    falls = bool((slope <= _FLAT).all()) and all(s <= 0 for s in steps)
    return rises or falls


def _evaluated(f: Function, name: str, x: Tensor) -> Tensor:
    try:
        y = f(x.clone())
    except Exception as error:
        raise ValueError(
            f"{name} fails on a float64 tensor of shape {tuple(x.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(y, Tensor):
        raise TypeError(f"{name} must return a tensor; got {type(y).__name__}.")
    if y.shape != x.shape:
        raise ValueError(
            f"{name} must keep the shape of its input; {tuple(x.shape)} became {tuple(y.shape)}."
        )
    if y.dtype != x.dtype:
        raise TypeError(
            f"{name} must compute in the dtype of its input, float64; it returned {y.dtype}."
        )
    return y.detach()


def _nested(f: Function, x: Tensor, order: int) -> Tensor:
    """The derivative of that order by autograd, which is 0 once nothing depends on x any more."""
    x = x.detach().requires_grad_(order > 0)
    with torch.set_grad_enabled(order > 0):
        y = f(x.clone())  # a clone, for modules that work in place
        for _ in range(order):
            if not y.requires_grad:
                return torch.zeros_like(x)
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True, materialize_grads=True)
    return y.detach()


def _difference(g: Function, x: Tensor, order: int) -> Tensor:
    """A derivative of `g` by nine-point central differences: truncation h^8, noise 1e-16/h^order.

    h = 1e-3 for a first derivative and 2e-2 beyond keeps both under 1e-8 where g varies on scale
    1; far out, where g is rounded more coarsely, h grows with x.
    """
    h = (1e-3 if order == 1 else 2e-2) * (x.abs() / REACH).clamp(min=1)[..., None]
    offsets = torch.arange(-4.0, 5.0, dtype=torch.float64)
    powers = offsets ** torch.arange(9.0, dtype=torch.float64)[:, None]
    unit = torch.zeros(9, dtype=torch.float64)
    unit[order] = torch.arange(1.0, order + 1).prod()
    weights = torch.linalg.solve(powers, unit) / h**order  # (*shape, 9)
    nearby = g((x[..., None] + h * offsets).flatten()).view(weights.shape)
    # The weights sum to 0 but for rounding; less its middle, a constant has derivative exactly 0.
    total: Tensor = ((nearby - nearby[..., 4:5]) * weights).sum(-1)
    return total


def _orders(f: Function) -> int:
    """How many derivatives autograd gets right: each is held against differences of the last.

    Two probes may fall on corners, where differences are wrong; three that disagree decide. A
    single NaN decides too: torch.where(x > 0, sqrt(x), 0) has it wherever the root is not taken.
    """
    everywhere = _grid()
    everywhere = everywhere[_nested(f, everywhere, 0).isfinite()]
    x = torch.tensor([-4.1, -2.3, -1.37, -0.71, -0.23, 0.31, 0.83, 1.57, 2.19, 3.9]).double()
    y = _nested(f, x, 0)
    size, noise = (y - y.mean()).abs().max(), 1e-11 * y.abs().max()  # noise of a difference
    for order in (1, 2, 3):
        lower = order - 1
        try:
            got = _nested(f, x, order)
            want = _difference(lambda z, k=lower: _nested(f, z, k), x, 1)  # type: ignore[misc]
            finite = bool(_nested(f, everywhere, order).isfinite().all())
        except (RuntimeError, NotImplementedError):  # no backward of this order
            return lower
        wrong = (got - want).abs() > 1e-6 * (want.abs() + size) + noise
        if not finite or wrong.sum() > 2:
            return lower
        size = torch.maximum(size, want.abs().max())
    return 3


def _grid() -> Tensor:
    """Cell boundaries, moved by an odd fraction of a cell so that no round number is among them."""
    return (torch.arange(_CELLS, dtype=torch.float64) + 0.381966) * (2 * REACH / _CELLS) - REACH


def _jumps(g: Function, width: float = 1e-13) -> list[float]:
    """Where `g` jumps: every cell is bisected towards its larger change until that narrow."""
    x = _grid()
    low, high = x[:-1], x[1:]
    at_low, at_high = g(low), g(high)
    while (high - low).max() > width:
        middle = (low + high) / 2
        at = g(middle)
        left = (at - at_low).abs() >= (at_high - at).abs()
        low, at_low = torch.where(left, low, middle), torch.where(left, at_low, at)
        high, at_high = torch.where(left, middle, high), torch.where(left, at, at_high)
    jumps = (at_high - at_low).abs() > _JUMP * at_high.abs().clamp(min=1)
    return [_snap(v) for v in ((low + high) / 2)[jumps].tolist()]


def _jump(g: Function, at: float, beside: float) -> float:
    """The limit of `g` from the right less that from the left, linearly from two points each."""
    steps = torch.tensor([1.0, 2.0, -1.0, -2.0], dtype=torch.float64)
    near, far, near_low, far_low = g(at + beside * steps).tolist()
    jump = (2.0 * near - far) - (2.0 * near_low - far_low)
    return _snap(jump) if abs(jump) > _JUMP * max(1.0, abs(near)) else 0.0


def _tail(c: Curve, side: float) -> Asymptote:
    """One asymptote: f' at +-2^5..2^20, then f - slope x at the same points."""
    x = side * 2.0 ** torch.arange(5, 21, dtype=torch.float64)
    values, slopes = c(x), c(x, 1)
    reached = int((values.isfinite() & slopes.isfinite()).long().cumprod(0).sum())
    if reached < 4:  # exp overflows at 2^10, the fifth point
        return Asymptote(None, None, "not finite far out")
    x, values, slopes = x[:reached], values[:reached], slopes[:reached]
    window = c(x[-1] - side * 10 * torch.linspace(0, 1, 101, dtype=torch.float64) ** 1.5, 1)
    size = max(1.0, slopes[-1].abs().item())
    slope = _limit(slopes.tolist())
    if window.max() - window.min() > 1e-6 * size:
        steps = window.diff()
        one_way = bool((steps >= 0).all() or (steps <= 0).all())
        return Asymptote(None, None, "diverging" if one_way else "oscillating")
    if slope is None:
        return Asymptote(None, None, "diverging")
    slope = _snap(slope, 1e-11)  # before the intercept: 1e-11 is 1e-5 at 2^20
    rest = (values - slope * x).tolist()
    for here, after in pairwise(rest[1:]):
        if abs(after - here) <= 1e-10 * max(1.0, abs(here)):  # settled early: few digits lost
            return Asymptote(slope, _snap(here, 1e-11))
    limit = _limit(rest)
    if limit is None or abs(rest[-1] - rest[-2]) > 1e-3:
        return Asymptote(slope, None, "slope exists but no intercept")
    return Asymptote(slope, _snap(limit, 1e-9))


def _limit(sequence: list[float]) -> float | None:
    """Where a sequence over octaves goes (Aitken: exact for any power of x), None if nowhere."""
    a, b, c = sequence[-3:]
    size = max(1.0, abs(c))
    if abs(c - b) <= 1e-12 * size:
        return c
    ratio = (c - b) / (b - a) if b != a else 2.0
    if abs(ratio) < 0.95:
        return c + (c - b) * ratio / (1 - ratio)
    return None


def _snap(v: float, within: float = 1e-12) -> float:
    """`v`, or the number a thousand times coarser than `within` it is that close to (never -0)."""
    near = round(v, -3 - round(math.log10(within))) + 0.0
    return near if abs(v - near) <= within else v


def _distinct(points: list[float], apart: float) -> list[float]:
    kept: list[float] = []
    for p in sorted(points):
        if not kept or p - kept[-1] > apart:
            kept.append(p)
    return kept
