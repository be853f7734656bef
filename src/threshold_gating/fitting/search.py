"""One fit with one K: the scaled problem, its conditions, its search, and the best result.

In those units x = centre + width x' and y = base(x) + height y', where the function bends within
|x'| ~ 1 and the coefficients are of order 1, so that bounds and starts suit any function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from threshold_gating.fitting import inputs as _inputs
from threshold_gating.fitting.inputs import Function, Inputs, Line, Scale, values
from threshold_gating.fitting.minimax import Found, search
from threshold_gating.fitting.varpro import Array, Problem
from threshold_gating.instance import TG
from threshold_gating.primitive import GateForm
from threshold_gating.taxonomy import Error


@dataclass(frozen=True, eq=False)
class Task:
    """What `fit` was asked for, all but K; `lines` are the asymptotes if the tails are exact."""

    f: Function
    inputs: Inputs
    objective: str
    form: GateForm
    tails: str
    zero: bool | str
    own_tau: bool
    ordered: bool
    start: TG | None
    starts: int
    seed: int
    lines: tuple[Line, Line] | None = None


@dataclass(frozen=True)
class _Units:
    scale: Scale
    base: Line

    def x(self, x: Tensor | float) -> Array:
        inside = (torch.as_tensor(x) - self.scale.centre) / self.scale.width
        return np.asarray(inside.numpy(), dtype=np.float64)

    def line(self, line: Line) -> Line:
        s, c = line.s - self.base.s, line.c - self.base.c
        height = self.scale.height
        return Line(s * self.scale.width / height, (c + s * self.scale.centre) / height)

    def outside(self, line: Line) -> Line:
        s = line.s * self.scale.height / self.scale.width
        c = self.scale.height * line.c - s * self.scale.centre
        return Line(s + self.base.s, c + self.base.c)


@dataclass(frozen=True)
class _Condition:
    """What `zero` means for a problem: see `Problem`; `origin` sets every intercept to 0."""

    origin: bool = False
    point: tuple[float, float] | None = None
    pin: float | None = None
    note: str = ""


def best(task: Task, K: int, closed: Sequence[TG]) -> tuple[TG, Error, str]:
    """The best instance with K branches, its errors, and a note on a condition not kept.

    `closed` and the start take part as they are if they keep the conditions; they win ties.
    """
    scale = _inputs.scale_of(task.f, task.inputs, task.tails)
    condition = _condition(task, K, scale)
    units = _units(task, scale, condition)
    problem = _problem(task, K, units, condition)
    x = _inputs.all_points(task.inputs, scale)
    check = units.x(x), _heights(task.f, x, units)
    start = task.start
    warm = [] if start is None or start.hard else [_packed(problem, units, start)]
    found = search(problem, task.objective, check, task.starts, task.seed, warm)
    given = [*closed, *([start] if start is not None else [])]
    candidates = [t for t in given if _keeps(t, task, condition)]
    candidates += [_instance(task, problem, units, each) for each in found[:2]]
    errors = [_inputs.error(t, task.f, task.inputs, task.tails, scale) for t in candidates]
    i = _least(errors, task.objective, scale.height)
    note = "" if _agrees_at_zero(candidates[i], task.f) else condition.note
    return candidates[i], errors[i], note


def _least(errors: Sequence[Error], objective: str, height: float) -> int:
    """The first of the best, to rounding: by the objective, then by the other figure."""
    keys = ("sup", "rms") if objective == "sup" else ("rms", "sup")
    left = list(range(len(errors)))
    for key, slack in zip(keys, (1e-6, 1.0), strict=True):
        figures = {i: getattr(errors[i], key) for i in left}
        limit = min(figures.values()) * (1 + slack) + 1e-14 * height
        left = [i for i in left if figures[i] <= limit]
    return left[0]


def _condition(task: Task, K: int, scale: Scale) -> _Condition:
    """TG(0) = f(0) as each kind of problem can have it."""
    inputs, lines = task.inputs, task.lines
    value = float(values(task.f, torch.zeros(1, dtype=torch.float64)))
    unseen = lines is None and not inputs.low <= 0 <= inputs.high
    if not task.zero or unseen or not math.isfinite(value):
        return _Condition()
    if lines is None:
        return _Condition(point=(0.0, value))
    low, high = lines[0].c, lines[1].c
    if K > 2 and task.zero is True and low == high == value == 0:
        return _Condition(origin=True)
    if K > 2:
        beyond = abs(scale.centre) > 20 * scale.width  # there TG(0) is a tail's, to rounding
        return _Condition() if beyond else _Condition(point=(0.0, value))
    if low == high == value:
        return _Condition()
    part = (value - low) / (high - low) if low != high else math.inf
    if 0 < part < 1:
        return _Condition(point=(0.0, value), pin=math.log(part / (1 - part)))
    note = (
        f"TG(0) = f(0) = {value:.4g} is out of reach of K = 2 with exact tails, whose branches "
        f"are {low:.4g} and {high:.4g} at 0."
    )
    return _Condition(note=note)


def _units(task: Task, scale: Scale, condition: _Condition) -> _Units:
    if condition.origin:  # lines through the origin stay so
        scale = Scale(0.0, scale.width, scale.height)
    if task.lines is not None:
        return _Units(scale, task.lines[0])
    ends = torch.tensor([task.inputs.low, task.inputs.high], dtype=torch.float64)
    y = values(task.f, ends)
    run = task.inputs.high - task.inputs.low
    s = float(y[1] - y[0]) / run if run and y.isfinite().all() else 0.0
    c = float(y[0]) - s * task.inputs.low
    return _Units(scale, Line(s, c) if math.isfinite(c) else Line(0.0, 0.0))


def _heights(f: Function, x: Tensor, units: _Units) -> Array:
    y = (values(f, x) - units.base(x)) / units.scale.height
    return np.asarray(y.numpy(), dtype=np.float64)


def _problem(task: Task, K: int, units: _Units, condition: _Condition) -> Problem:
    s, c = np.full(K, np.nan), np.full(K, np.nan)
    if task.lines is not None:
        (s[0], c[0]), (s[-1], c[-1]) = (units.line(line) for line in task.lines)
    if condition.origin:
        c[:] = 0.0
    zero = None
    if condition.point is not None:
        at, value = condition.point
        base = units.base.s * at + units.base.c
        zero = float(units.x(at)), (value - base) / units.scale.height
    x, weight = _inputs.points(task.inputs, units.scale)
    y = _heights(task.f, x, units)
    root = np.asarray(weight.sqrt().numpy(), dtype=np.float64)
    form = "softmax" if K == 2 else task.form
    own, ordered = task.own_tau and K > 2, task.ordered or K == 2
    return Problem(units.x(x), y, root, K, form, own, ordered, s, c, zero, condition.pin)


def _packed(problem: Problem, units: _Units, t: TG) -> Array:
    """The gates of an instance as a start (1, P)."""
    tau = np.broadcast_to(t.tau, (1, problem.K - 1)) * units.scale.width
    return problem.pack(tau, units.x(torch.tensor([t.theta], dtype=torch.float64)))


def _instance(task: Task, problem: Problem, units: _Units, found: Found) -> TG:
    """What was found, in the function's own units, with the fixed coefficients as they were."""
    tau, theta = problem.unpack(found.q[None])
    K, scale = problem.K, units.scale
    coef = np.where(np.abs(found.coef) < 1e-14, 0.0, found.coef)  # what rounding left of a zero
    branches = [units.outside(Line(float(coef[k]), float(coef[K + k]))) for k in range(K)]
    if task.lines is not None:
        branches[0], branches[-1] = task.lines
    if problem.c[1] == 0 and K > 2:  # lines through the origin
        branches = [Line(line.s, 0.0) for line in branches]
    s, c = zip(*branches, strict=True)
    taus = [float(v) for v in tau[0] / scale.width]
    thetas = [float(v) for v in scale.centre + scale.width * theta[0]]
    return TG(taus if problem.own_tau else taus[0], thetas, s, c, form=problem.form)


def _agrees_at_zero(t: TG, f: Function) -> bool:
    x = torch.zeros(1, dtype=torch.float64)
    return float((t(x) - values(f, x)).abs()) <= 1e-12


def _keeps(t: TG, task: Task, condition: _Condition) -> bool:
    """Whether a given instance keeps the conditions of the task."""
    if task.lines is not None:
        outer = (t.s[0], t.c[0], t.s[-1], t.c[-1])
        wanted = (*task.lines[0], *task.lines[1])
        if any(abs(a - b) > 1e-9 * max(1.0, abs(b)) for a, b in zip(outer, wanted, strict=True)):
            return False
    if (condition.point is not None or condition.origin) and not _agrees_at_zero(t, task.f):
        return False
    one_tau = not isinstance(t.tau, tuple)
    in_order = list(t.theta) == sorted(t.theta)
    same_form = t.form == task.form or t.K == 2 or t.hard
    return same_form and (one_tau or task.own_tau) and (in_order or not task.ordered)
