"""Fit the primitive to any function: in closed form (`match`) or by search (`fit`).

`match` is the paper's Lemma 9 and App. F with the intercepts that make it true: the two branches
are the asymptotes of f, and the sharpness matches its derivatives at the centre. `fit` takes any
callable, any K and three kinds of inputs: least squares by variable projection under a density or
on samples, minimax by sequential linear programming over an interval or the whole line.

`fit` is a search: what it returns is the best found, not proved to be the best there is. More
freedom (a branch more, own_tau, any order, no condition at 0, free tails) never makes it worse.

Everything is float64 and deterministic. `fit` needs scipy, the extra `threshold-gating[fit]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from threshold_gating import taxonomy
from threshold_gating.fitting import inputs as _inputs
from threshold_gating.fitting import shape
from threshold_gating.fitting.inputs import Function, Inputs, Line, Over, values
from threshold_gating.fitting.options import check_options
from threshold_gating.instance import TG
from threshold_gating.primitive import GateForm

if TYPE_CHECKING:
    from threshold_gating.fitting.scaled import Task
    from threshold_gating.fitting.search import Search

_LARGEST_K = 8  # of K="auto"; further branches buy little and cost as much


@dataclass(frozen=True)
class Fit:
    """An instance and how far it is from the function: errors never without what they are over.

    `sup` is the largest absolute error, `rms` the root mean square, `rel_rms` that divided by the
    root mean square of the function, each over the inputs that `over` names, measured with `t`
    itself. `warning` says where the fit must not be trusted, empty if nowhere.
    """

    t: TG
    sup: float
    rms: float
    rel_rms: float
    over: str
    objective: str
    warning: str = ""

    @property
    def K(self) -> int:
        """Number of branches."""
        return self.t.K

    @property
    def error(self) -> float:
        """The error that was minimised: `sup` or `rms`."""
        return self.sup if self.objective == "sup" else self.rms

    def __str__(self) -> str:
        figures = f"sup {self.sup:.3g}, RMS {self.rms:.3g}, relative RMS {self.rel_rms:.3g}"
        lines = [f"K = {self.K}, least {self.objective}: {figures} ({self.over})", repr(self.t)]
        return "\n".join([*lines, *([f"warning: {self.warning}"] if self.warning else [])])


def match(f: Function, at: float = 0.0, family: str | None = None) -> TG:
    """The K = 2 instance with f's asymptotes that agrees with f at `at`, in closed form (App. F).

    The branches are the asymptotes L- and L+ of f. Where they cross at the centre, every K = 2
    instance with these tails passes through the crossing (so none comes nearer to Softplus at 0
    than ln 2), and theta = at gives it their mean slope there. The sharpness comes from the second
    derivative: tau = 2 f''(at) / (s+ - s-) (SiLU: 1; GELU: 1.596).

    Where they do not cross at the centre, tau and theta are those for which value and slope agree
    with f there: with q = (f - L-) / (L+ - L-) and D = L+ - L-,
    tau = (f' - s- - (s+ - s-) q) / (D q (1 - q)) and theta = at - logit(q) / tau. In the constant
    family at its midpoint that is tau = 4 f'(at) / (c+ - c-), theta = at (Sigmoid: 1; Tanh: 2).
    ValueError if f does not lie between the lines (ELU at 0).

    A function that is its asymptotes on either side of `at` (ReLU) gives a hard instance. The
    paper draws both lines through (at, f(at)) instead, which makes a constant of Sigmoid and Tanh
    and gives ELU and Softplus wrong tails.

    Args:
        f: element-wise, differentiable twice by autograd.
        at: the centre.
        family: "constant" or "multiplicative" (Table 3) to insist on that, None to take either.

    >>> match(torch.tanh)
    TG(tau=2.0, theta=(0.0,), s=(0.0, 0.0), c=(-1.0, 1.0))
    """
    _check_callable(f, "match")
    low, high = _lines(f, "match")
    _check_family(family, low, high)
    x = torch.tensor(at, dtype=torch.float64)
    if _is_hard(f, low, high, at):
        owner = "lo" if float(values(f, x[None])) == float(low(x)) else "hi"
        return TG(math.inf, at, (low.s, high.s), (low.c, high.c), owner=(owner,))
    value, slope, bend = _derivatives(f, at)
    gap = float(high(x) - low(x))
    scale = abs(low.s * at) + abs(low.c) + abs(high.s * at) + abs(high.c)
    if abs(gap) <= 1e-9 * scale or gap == 0:
        tau, theta = 2 * bend / (high.s - low.s), at
        reason = f"f''({at:g}) = {bend:.4g} with slopes {low.s:.4g} and {high.s:.4g} at infinity"
    else:
        q = (value - float(low(x))) / gap
        if not 0 < q < 1:
            raise ValueError(
                f"match: f({at:g}) = {value:.4g} does not lie between its asymptotes there, "
                f"{float(low(x)):.4g} and {float(high(x)):.4g}, as any K = 2 blend of them does. "
                f"{_crossing(low, high)}, or fit with K = 3."
            )
        tau = (slope - low.s - (high.s - low.s) * q) / (gap * q * (1 - q))
        theta = at - (math.log(q / (1 - q)) / tau if q != 0.5 and tau else 0.0)
        reason = f"f'({at:g}) = {slope:.4g} between {float(low(x)):.4g} and {float(high(x)):.4g}"
    if not 0 < tau < math.inf:
        raise ValueError(
            f"match: {reason} would need tau = {tau:.4g}, and tau must be positive. "
            "Choose another centre with at=..., or use fit."
        )
    return TG(tau, theta, (low.s, high.s), (low.c, high.c))


def fit(
    f: Function,
    over: Over = "line",
    K: int | str = 3,
    *,
    form: GateForm = "softmax",
    tails: str = "exact",
    zero: bool | str = True,
    own_tau: bool = False,
    ordered: bool | None = None,
    objective: str | None = None,
    max_error: float | None = None,
    recipe: str | None = None,
    start: TG | None = None,
    starts: int = 16,
    seed: int = 0,
) -> Fit:
    """The best instance found for f with K branches, over given inputs (App. F, any K and norm).

    This is a search: there are many local minima, and none that is found is proved the lowest. The
    best instance of every task with less freedom takes part, so a branch more, `own_tau`, any
    order, `zero=False` and free tails are never worse. No coefficient exceeds 32 heights of f; a
    fit that would go on with larger ones (ELU, K = 3) ends there. A function that is straight
    between its corners (Hardtanh) gives a hard instance.

    On one core K = 2 takes 0.1 s, K = 3 0.3 s, K = 5 1.5 s (`own_tau` 3 to 6 s) and K = 8 5 s.

    Args:
        f: any element-wise callable on float64 tensors.
        over: "line"; an interval (a, b); "normal" for N(0, 1) or ("normal", mean, std); or
            samples, a 1-D tensor of pre-activations.
        K: number of branches, 2 to 16, or "auto" for the smallest with `error` below `max_error`.
        form: "softmax", or the appendix's "product".
        tails: "exact" fixes the outer branches to the asymptotes of f; "free" fits them too, and
            `Fit.warning` says what that does beyond the inputs.
        zero: True makes TG(0) = f(0). Where f and its asymptotes pass through the origin every
            branch does, so it holds in any precision; elsewhere it holds to rounding. "value"
            asks for the value alone, to rounding: more accurate from K = 5 on.
        own_tau: a sharpness for each threshold instead of one.
        ordered: True for thresholds low to high, as the paper has them. None, the default, is
            any order for softmax gates, and low to high for product gates, which need that.
        objective: "sup" (default over the line and intervals) or "rms" (under densities, samples).
        recipe: "paper" for the appendix's own: Nelder-Mead on nine parameters, K = 3, product
            form, free tails. Slow; it takes samples, or 100,000 drawn from the density.
        start: an instance to begin from; the result is no worse than it, where it keeps to the
            conditions above. Simpler tasks are then left out, which is three times as fast.
        starts, seed: how many new starts each task searches from, besides those of simpler tasks.
            Five times as many take half as long again, and seldom find more.

    Raises:
        ValueError: f has no asymptote and tails="exact", or no K reaches `max_error`.
    """
    _check_callable(f, "fit")
    inputs = _inputs.parse(over)
    objective = objective or ("sup" if inputs.kind in ("line", "interval") else "rms")
    in_order = form == "product" if ordered is None else ordered
    task = _task(f, inputs, objective, form, tails, zero, own_tau, in_order, start, starts, seed)
    check_options(task, K, max_error, recipe)
    _inputs.check(f, inputs)
    if recipe is not None:
        return _paper(task)
    search, task = _search(task)
    if isinstance(K, int):
        return _best(search, task, K)
    assert max_error is not None
    tried = []
    for k in range(2, _LARGEST_K + 1):
        tried.append(_best(search, task, k))
        if tried[-1].error <= max_error:
            return tried[-1]
    best = min(tried, key=lambda each: each.error)
    raise ValueError(
        f"fit: no K up to {_LARGEST_K} brings the {objective} error to {max_error:.3g}; the best "
        f"is {best.error:.3g} at K = {best.K}. Raise max_error"
        f"{'' if own_tau else ', or allow own_tau=True'}."
    )


def _check_callable(f: Any, caller: str) -> None:
    if isinstance(f, str):
        try:
            key = taxonomy.key_of(f)
        except ValueError as error:
            why = str(error)
        else:
            why = f"TAXONOMY[{key!r}] is the instance, taxonomy.ROWS[{key!r}].f its function."
        raise TypeError(
            f"{caller}: f must be a function of a tensor, such as torch.tanh; got the string "
            f"{f!r}. {why}"
        )
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        raise TypeError(f"{caller}: {f.__name__} is a class; give an object of it, {f.__name__}().")
    if not callable(f):
        raise TypeError(f"{caller}: f must be a function of a tensor; got {f!r:.60}.")


def _lines(f: Function, caller: str = "fit") -> tuple[Line, Line]:
    """The lines that f approaches at -inf and +inf."""
    tails = shape.asymptotes(f)
    lines = []
    for end, tail in (("-inf", tails.low), ("+inf", tails.high)):
        if tail.slope is None or tail.intercept is None:
            raise ValueError(
                f"{caller}: f has no asymptote at {end}: {tail.reason}. "
                "Without one, use fit(f, over=(a, b), tails='free')."
            )
        lines.append(Line(tail.slope, tail.intercept))
    return lines[0], lines[1]


def _crossing(low: Line, high: Line) -> str:
    if low.s == high.s:
        return "Choose another centre with at=..."
    return f"Match at their crossing, at={(low.c - high.c) / (high.s - low.s) + 0.0:.6g}"


def _check_family(family: str | None, low: Line, high: Line) -> None:
    if family not in (None, "constant", "multiplicative"):
        raise ValueError(
            f"match: family must be 'constant', 'multiplicative' or None; got {family!r}."
        )
    if low == high:
        raise ValueError(
            f"match: f has the same asymptote {low.s:.4g} x + {low.c:.4g} on both sides, so no "
            "gate between them can follow it. Fit with K = 3, or K = 1 if f is affine."
        )
    if family is not None and family != ("constant" if low.s == high.s else "multiplicative"):
        raise ValueError(
            f"match: f is not of the {family} family: its slopes at infinity are {low.s:.4g} and "
            f"{high.s:.4g}. Leave family out."
        )


def _is_hard(f: Function, low: Line, high: Line, at: float) -> bool:
    """Whether f is `low` below `at` and `high` above it."""
    out = torch.logspace(-6, 3, 200, dtype=torch.float64)
    x = torch.cat([at - out, at + out])
    line = torch.where(x < at, low(x), high(x))
    return bool(((values(f, x) - line).abs() <= 1e-12 * (1 + line.abs())).all())


def _derivatives(f: Function, at: float) -> tuple[float, float, float]:
    """f, f' and f'' at a point by autograd; ValueError where f bends sharply or autograd fails."""
    h = torch.tensor([1e-4, 1e-5], dtype=torch.float64)
    y = values(f, torch.stack([at - h, at + 0 * h, at + h]))
    left, right = (y[1] - y[0]) / h, (y[2] - y[1]) / h
    wide, narrow = (right - left).abs().tolist()
    if narrow > max(0.5 * wide, 1e-6 * float(left.abs().max() + right.abs().max())):
        raise ValueError(
            f"match: f has a corner at {at:g}, slopes {left[1]:.4g} and {right[1]:.4g}, but is "
            "not hard; no sharpness matches it. Choose another centre with at=..., or use fit."
        )
    x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    try:
        value = f(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        bend = torch.zeros_like(slope)
        if slope.requires_grad:
            (bend,) = torch.autograd.grad(slope.sum(), x)
    except RuntimeError as error:
        raise ValueError(
            f"match: needs f twice differentiable by autograd; torch says: {error}"
        ) from error
    return value.item(), slope.item(), bend.item()


def _task(*options: Any) -> Task:
    try:
        from threshold_gating.fitting.scaled import Task
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"fit needs scipy ({error}); pip install 'threshold-gating[fit]'"
        ) from error
    return Task(*options)


def _best(search: Search, task: Task, K: int) -> Fit:
    """The best instance with K branches as a record."""
    t, errors, note = search.best(task, K)
    notes = [note, *([_extrapolation(t, task.f, task.inputs)] if task.tails == "free" else [])]
    over = task.inputs.describe(task.tails)
    return Fit(t, *errors, over, task.objective, " ".join(n for n in notes if n))


def _search(task: Task) -> tuple[Search, Task]:
    """The search for one function, and the task with the asymptotes that exact tails are."""
    from threshold_gating.fitting import embed
    from threshold_gating.fitting.search import Search

    try:
        lines = _lines(task.f)
    except (TypeError, ValueError):
        if task.tails == "exact":
            raise
        lines = None
    closed = []
    with suppress(TypeError, ValueError):  # there is none
        closed.append(embed.lines(task.f))
    with suppress(TypeError, ValueError):
        closed.append(match(task.f))
    search = Search([t for t in closed if t is not None], lines)
    return search, replace(task, lines=lines if task.tails == "exact" else None)


def _extrapolation(t: TG, f: Function, inputs: Inputs) -> str:
    """What free tails do beyond the inputs, or "" if nothing wrong."""
    middle, half = (inputs.low + inputs.high) / 2, (inputs.high - inputs.low) / 2
    x = torch.tensor([middle - 2 * half, middle + 2 * half], dtype=torch.float64)
    off = (t(x) - values(f, x)).abs()
    try:
        true = [line.s for line in _lines(f)]
        those = f"those of f {true[0]:.4g} and {true[1]:.4g}"
        right = all(abs(s - r) < 1e-6 for s, r in zip((t.s[0], t.s[-1]), true, strict=True))
    except ValueError:
        those, right = "f has none", False
    if right:
        return ""
    out = f"Twice as far out as the inputs, at x = {x[0]:.4g} and {x[1]:.4g}, the fit is off by "
    out += f"{off[0]:.2g} and {off[1]:.2g}." if off.isfinite().all() else "no finite amount."
    return (
        f"free tails: the slopes at infinity are {t.s[0]:.4g} and {t.s[-1]:.4g}, {those}. {out} "
        f"Do not use it beyond [{inputs.low:.4g}, {inputs.high:.4g}]."
    )


def _paper(task: Task) -> Fit:
    """App. F: nine parameters by Nelder-Mead on samples from (-1, 1, 1.8), s = (0, 1, 1), c = 0."""
    from scipy.optimize import minimize
    from scipy.special import expit

    x = task.inputs.values
    if x is None:
        draw = torch.Generator().manual_seed(task.seed)
        x = torch.randn(100_000, generator=draw, dtype=torch.float64)
        x = task.inputs.mean + task.inputs.std * x
    z, y = x.numpy(), values(task.f, x).numpy()

    def rms(p: Sequence[float]) -> float:
        first, second, tau = p[:3]
        if not (first < second and tau > 0):
            return math.inf
        a, b = expit(tau * (z - first)), expit(tau * (z - second))
        parts = (1 - a, a * (1 - b), b)
        blend = sum(g * (s * z + c) for g, s, c in zip(parts, p[3:6], p[6:], strict=True))
        return float((((blend / (1 + b * (1 - a)) - y) ** 2).mean()) ** 0.5)

    begin = (-1.0, 1.0, 1.8, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    options = {"maxiter": 3000, "xatol": 1e-6}
    p = minimize(rms, begin, method="Nelder-Mead", options=options).x.tolist()
    t = TG(p[2], p[:2], p[3:6], p[6:], form="product")
    scale = _inputs.scale_of(task.f, task.inputs, "free")
    errors = _inputs.error(t, task.f, task.inputs, "free", scale)
    over = task.inputs.describe("free")
    return Fit(t, *errors, over, "rms", _extrapolation(t, task.f, task.inputs))
