"""One problem in the function's own units, and instances carried into them and back.

In those units x = centre + width x' and y = base(x) + height y', where the function bends within
|x'| ~ 1 and the coefficients are of order 1, so that bounds and starts suit any function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from threshold_gating.fitting import inputs as _inputs
from threshold_gating.fitting.inputs import Function, Inputs, Line, Scale, values
from threshold_gating.fitting.minimax import Found
from threshold_gating.fitting.varpro import Array, Problem
from threshold_gating.instance import TG
from threshold_gating.primitive import GateForm


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
class Condition:
    """What `zero` means for a problem: see `Problem`; `origin` sets every intercept to 0."""

    origin: bool = False
    point: tuple[float, float] | None = None
    pin: float | None = None
    note: str = ""


@dataclass(frozen=True, eq=False)
class Scaled:
    """A task with K branches: its problem, and `check` (x, y), dense enough to see every peak."""

    task: Task
    units: _Units
    condition: Condition
    problem: Problem
    check: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, task: Task, K: int) -> Scaled:
        scale = _inputs.scale_of(task.f, task.inputs, task.tails)
        condition = condition_of(task, K, scale)
        units = _units(task, scale, condition)
        x = _inputs.all_points(task.inputs, scale)
        problem = _problem(task, K, units, condition)
        return cls(task, units, condition, problem, (x, _inputs.finite(task.f, x)))

    @property
    def dense(self) -> tuple[Array, Array]:
        """`check` in the problem's units."""
        x, y = self.check
        return self.units.x(x), _heights(x, y, self.units)

    def error(self, t: TG) -> float:
        """What the task minimises, of an instance: the largest error, or the root mean square."""
        if self.task.objective == "sup":
            x, y = self.check
            return float((t(x) - y).abs().max())
        x, weight = _inputs.points(self.task.inputs, self.units.scale)
        return float((weight * (t(x) - values(self.task.f, x)) ** 2).sum().sqrt())

    def start(self, t: TG) -> Found:
        """A soft instance as a start: within the bounds, so not always quite the same."""
        K, units = self.problem.K, self.units
        tau = np.broadcast_to(t.tau, (1, K - 1)) * units.scale.width
        q = self.problem.pack(tau, units.x(torch.tensor([t.theta], dtype=torch.float64)))[0]
        branches = [units.line(Line(*each)) for each in zip(t.s, t.c, strict=True)]
        coef = np.array([line.s for line in branches] + [line.c for line in branches])
        fixed = np.concatenate([self.problem.s, self.problem.c])
        return Found(q, np.where(np.isnan(fixed), coef, fixed), math.inf)

    def instance(self, found: Found) -> TG:
        """What was found, in the function's own units, with the fixed coefficients as they were."""
        problem, scale, lines = self.problem, self.units.scale, self.task.lines
        tau, theta = problem.unpack(found.q[None])
        K = problem.K
        coef = np.where(np.abs(found.coef) < 1e-14, 0.0, found.coef)  # what rounding left of a zero
        branches = [self.units.outside(Line(float(coef[k]), float(coef[K + k]))) for k in range(K)]
        if lines is not None:
            branches[0], branches[-1] = lines
        if self.condition.origin:  # lines through the origin
            branches = [Line(line.s, 0.0) for line in branches]
        s, c = zip(*branches, strict=True)
        taus = [float(v) for v in tau[0] / scale.width]
        thetas = [float(v) for v in scale.centre + scale.width * theta[0]]
        return TG(taus if problem.own_tau else taus[0], thetas, s, c, form=problem.form)

    def keeps(self, t: TG) -> bool:
        """Whether a given instance keeps the conditions of the task."""
        task = self.task
        if task.lines is not None:
            outer = (t.s[0], t.c[0], t.s[-1], t.c[-1])
            wanted = (*task.lines[0], *task.lines[1])
            pairs = zip(outer, wanted, strict=True)
            if any(abs(a - b) > 1e-9 * max(1.0, abs(b)) for a, b in pairs):
                return False
        held = self.condition.point is not None or self.condition.origin
        if held and not agrees_at_zero(t, task.f):
            return False
        one_tau = not isinstance(t.tau, tuple)
        in_order = list(t.theta) == sorted(t.theta)
        same_form = t.form == task.form or t.K == 2 or t.hard
        return same_form and (one_tau or task.own_tau) and (in_order or not task.ordered)


def agrees_at_zero(t: TG, f: Function) -> bool:
    x = torch.zeros(1, dtype=torch.float64)
    return float((t(x) - values(f, x)).abs()) <= 1e-12


def condition_of(task: Task, K: int, scale: Scale) -> Condition:
    """TG(0) = f(0) as each kind of problem can have it."""
    inputs, lines = task.inputs, task.lines
    value = float(values(task.f, torch.zeros(1, dtype=torch.float64)))
    unseen = lines is None and not inputs.low <= 0 <= inputs.high
    if not task.zero or unseen or not math.isfinite(value):
        return Condition()
    if lines is None:
        return Condition(point=(0.0, value))
    low, high = lines[0].c, lines[1].c
    if K > 2 and task.zero is True and low == high == value == 0:
        return Condition(origin=True)
    if K > 2:
        beyond = abs(scale.centre) > 20 * scale.width  # there TG(0) is a tail's, to rounding
        return Condition() if beyond else Condition(point=(0.0, value))
    if low == high == value:
        return Condition()
    part = (value - low) / (high - low) if low != high else math.inf
    if 0 < part < 1:
        return Condition(point=(0.0, value), pin=math.log(part / (1 - part)))
    note = (
        f"TG(0) = f(0) = {value:.4g} is out of reach of K = 2 with exact tails, whose branches "
        f"are {low:.4g} and {high:.4g} at 0."
    )
    return Condition(note=note)


def _units(task: Task, scale: Scale, condition: Condition) -> _Units:
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


def _heights(x: Tensor, y: Tensor, units: _Units) -> Array:
    inside = (y - units.base(x)) / units.scale.height
    return np.asarray(inside.numpy(), dtype=np.float64)


def _problem(task: Task, K: int, units: _Units, condition: Condition) -> Problem:
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
    y = _heights(x, values(task.f, x), units)
    root = np.asarray(weight.sqrt().numpy(), dtype=np.float64)
    form = "softmax" if K == 2 else task.form
    own, ordered = task.own_tau and K > 2, task.ordered or K == 2
    return Problem(units.x(x), y, root, K, form, own, ordered, s, c, zero, condition.pin)
