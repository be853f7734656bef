"""Minimax fits: least squares first, then sequential linear programming on the largest error.

Each step minimises the largest error of the model linear in all parameters, within a trust region
(a linear program), and then the largest error in s and c alone at the new gates, where the model
is exact. That second program is what lets the steps stay long in curved valleys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from threshold_gating.fitting.varpro import (
    MAX_COEFFICIENT,
    Array,
    Problem,
    derivatives,
    evaluate,
    least_squares,
    levelled,
    levenberg_marquardt,
)


class Found(NamedTuple):
    """One fit in the problem's own units, and the error it was sought for."""

    q: Array
    coef: Array
    error: float


class _Point(NamedTuple):
    p: Array
    r: Array  # error at the grid, then at `zero`
    jacobian: Array
    sup: float


@dataclass(frozen=True)
class _Space:
    """All free parameters p = (q, free s and c) of a problem, with their bounds."""

    problem: Problem
    x: Array
    y: Array
    free: NDArray[np.intp]
    fixed: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, problem: Problem) -> _Space:
        low, high = problem.bounds()
        free = np.flatnonzero(problem.free).astype(np.intp)
        limit = np.full(len(free), MAX_COEFFICIENT)
        zero = problem.zero if problem.pin is None else None
        return cls(
            problem,
            np.append(problem.x, [] if zero is None else zero[0]),
            np.append(problem.y, [] if zero is None else zero[1]),
            free,
            np.nan_to_num(np.concatenate([problem.s, problem.c])),
            np.concatenate([low, -limit]),
            np.concatenate([high, limit]),
        )

    @property
    def nonlinear(self) -> int:
        return len(self.low) - len(self.free)

    @property
    def passes(self) -> bool:
        """Whether the fit has a point to pass through, the last of x."""
        return len(self.x) > len(self.problem.x)

    def coef(self, p: Array) -> Array:
        full = self.fixed.copy()
        full[self.free] = p[self.nonlinear :]
        return full

    def at(self, p: Array) -> _Point:
        q = p[None, : self.nonlinear]
        y, by_q, by_coef = derivatives(self.problem, self.x, q, self.coef(p)[None])
        r = y[0] - self.y
        jacobian = np.concatenate([by_q[0], by_coef[0][self.free]]).T
        return _Point(p, r, jacobian, float(np.abs(r[: len(self.problem.x)]).max()))

    def restored(self, point: _Point) -> _Point:
        """The nearest coefficients with which the fit passes through its point again."""
        if not self.passes:
            return point
        a = point.jacobian[-1, self.nonlinear :]
        p = point.p.copy()
        p[self.nonlinear :] -= a * point.r[-1] / max(float(a @ a), 1e-300)
        return self.at(p)


def _program(space: _Space, point: _Point, reach: Array, first: int) -> _Point | None:
    """The step within `reach`, of parameters from `first` on, that is best by the linear model.

    Returns the point the model predicts (its sup is the prediction), None if there is no step.
    """
    low = np.maximum(space.low - point.p, -reach)[first:]
    high = np.minimum(space.high - point.p, reach)[first:]
    reach = np.maximum(np.maximum(-low, high), 1e-12)
    # in units of the current error and of the largest step, HiGHS' tolerances are relative
    a, b = point.jacobian[:, first:] * reach / point.sup, point.r / point.sup
    equal = {"A_eq": np.append(a[-1:], [[0.0]], 1), "b_eq": -b[-1:]} if space.passes else {}
    rows = _rows(b[: len(space.problem.x)], np.abs(a[: len(space.problem.x)]).sum(1))
    a, b = a[rows], b[rows]
    one = np.ones((len(a), 1))
    answer = linprog(
        np.append(np.zeros(len(reach)), 1.0),
        np.block([[a, -one], [-a, -one]]),
        np.append(-b, b),
        bounds=np.append(np.c_[low / reach, high / reach], [[0, np.inf]], 0),
        method="highs-ds",
        # presolve takes longer than it saves; 50 iterations are usual
        options={"presolve": False, "maxiter": 1000},
        **equal,
    )
    if answer.status != 0:
        return None
    p = point.p.copy()
    p[first:] += answer.x[:-1] * reach
    return point._replace(p=np.clip(p, space.low, space.high), sup=answer.x[-1] * point.sup)


def _rows(r: Array, reach: Array) -> NDArray[np.intp]:
    """Grid points for a program: every third and the peaks, if they can reach half the largest.

    The others halve the speed and change nothing: the error is smooth on the grid, and a step is
    judged on all of it.
    """
    e = np.abs(r)
    used = np.zeros(len(r), bool)
    used[::3] = True
    higher = np.diff(e, prepend=-1.0) >= 0  # than the point before
    peaks = np.flatnonzero(higher & ~np.append(higher[1:], False))
    for shift in (-1, 0, 1):
        used[np.clip(peaks + shift, 0, len(r) - 1)] = True
    return np.flatnonzero(used & (e + reach > 0.5))


def polish(problem: Problem, start: Found, iterations: int) -> Found:
    """Lower the largest error on the grid from `start`; it never rises."""
    space = _Space.of(problem)
    here = mark = space.at(np.concatenate([start.q, start.coef[space.free]]))
    unit = np.ones(len(here.p))
    unit[space.nonlinear :] = 4.0  # by trial: 1 creeps, 10 is no faster
    radius = min(0.1, here.sup**0.5)  # where curvature of order one comes to as much as the error
    for done in range(1, iterations + 1):
        if here.sup < 1e-14 or radius < 1e-9:
            break
        if (aim := _program(space, here, radius * unit, 0)) is None:
            radius /= 4
            continue
        there = space.restored(space.at(aim.p))
        if there.sup > here.sup - 0.9 * (here.sup - aim.sup):
            there = _balanced(space, there, radius * unit)
        gain, hoped = here.sup - there.sup, here.sup - aim.sup
        if gain > 0.5 * hoped:
            radius = min(2 * radius, 1.0)
        elif gain < 0.1 * hoped:
            radius = min(radius, float((np.abs(aim.p - here.p) / unit).max())) / 3
        here = there if gain > 0 else here
        if hoped < 1e-4 * here.sup:
            break
        if done % 3 == 0:
            here = mark = _further(space, here, here.p - mark.p, unit)
    return Found(here.p[: space.nonlinear], space.coef(here.p), here.sup)


def _balanced(space: _Space, point: _Point, reach: Array) -> _Point:
    """The best s and c within `reach` at these gates, where the linear model is exact."""
    if not len(space.free):
        return point
    aim = _program(space, point, reach, space.nonlinear)
    found = point if aim is None else space.restored(space.at(aim.p))
    return found if found.sup < point.sup else point


def _further(space: _Space, here: _Point, step: Array, unit: Array) -> _Point:
    """On along the last few steps while that helps: valleys are long where branches are nearly one.

    Steps of the linear model alone creep there.
    """
    begin, size, factor = here.p, float(np.abs(step).max()), 2.0
    while size and factor < 1000:
        there = space.restored(space.at(np.clip(begin + factor * step, space.low, space.high)))
        there = _balanced(space, there, max(1e-3, 10 * factor * size) * unit)
        if there.sup >= here.sup:
            break
        here, factor = there, 3 * factor
    return here


def search(
    problem: Problem,
    objective: str,
    check: tuple[Array, Array],
    q: Array,
    begin: Sequence[Found],
) -> list[Found]:
    """The best few fits from starts q (S, P) and from whole instances, best first.

    For "sup" their errors are over the points `check` (x, y).
    """
    state = least_squares(problem, np.concatenate([q, *(each.q[None] for each in begin)]))
    if objective == "rms":
        state = levenberg_marquardt(problem, state.q[:4], 300)
        found = [Found(*each) for each in zip(state.q, state.coef, state.cost**0.5, strict=True)]
        return sorted(found, key=_error)
    # Least squares ranks the candidates badly. A start may be better than the minimum it led to.
    level = levelled(problem, np.concatenate([state.q, *(each.q[None] for each in begin[:8])]))
    found = _apart([Found(*each) for each in zip(level.q, level.coef, level.cost, strict=True)])
    found = sorted((polish(problem, f, 8) for f in found[:4]), key=_error)
    found = [_exchange(problem, polish(problem, f, 40), *check) for f in found[:2]]
    return sorted(found, key=_error)


def _apart(found: list[Found]) -> list[Found]:
    """Best first, one of those whose error agrees to 1 in 1000."""
    kept: list[Found] = []
    for each in sorted(found, key=_error):
        if not kept or each.error > 1.001 * kept[-1].error:
            kept.append(each)
    return kept


def _error(found: Found) -> float:
    return found.error


def _exchange(problem: Problem, found: Found, x: Array, y: Array) -> Found:
    """Polish again with the peaks of the error between the points of the grid added to it."""
    best = found._replace(error=np.inf)
    for _ in range(4):
        fitted = evaluate(x, *problem.unpack(found.q[None]), found.coef[None], problem.form)[0]
        e = np.abs(fitted - y)
        if e.max() < best.error:
            best = found._replace(error=float(e.max()))
        if e.max() <= 1.0002 * found.error:
            break
        outer = np.pad(e, 1, constant_values=-1.0)
        peaks = (e >= outer[:-2]) & (e >= outer[2:]) & (e > 0.9 * found.error)
        grid, target = np.append(problem.x, x[peaks]), np.append(problem.y, y[peaks])
        order = np.argsort(grid)
        ones = np.ones(len(grid))
        problem = replace(problem, x=grid[order], y=target[order], weight=ones)
        found = polish(problem, found, 15)
    return best
