"""The search behind `fit`: the task with less freedom first, then from there and from new starts.

The best instance of a task is a candidate of every task with more freedom: one more branch, a tau
of its own for each threshold, thresholds in any order, no condition at 0, free tails. So none of
these can make a fit worse, however the search for it goes. What is best in its largest error is a
candidate for the least root mean square, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from threshold_gating.fitting import embed
from threshold_gating.fitting import inputs as _inputs
from threshold_gating.fitting.inputs import Line
from threshold_gating.fitting.minimax import search
from threshold_gating.fitting.scaled import Scaled, Task, agrees_at_zero, condition_of
from threshold_gating.fitting.varpro import starts
from threshold_gating.instance import TG
from threshold_gating.taxonomy import Error

_STRICTER: dict[bool | str, tuple[bool | str, ...]] = {
    False: ("value", True),
    "value": (True,),
    True: (),
}
_EXACT = 1e-14  # of the height of the function: rounding


class Candidate(NamedTuple):
    """An instance and its error, as the task measures it while it searches."""

    t: TG
    error: float


class Search:
    """Fits of one function, each made once; `closed` are closed forms with any K."""

    def __init__(self, closed: Sequence[TG], lines: tuple[Line, Line] | None) -> None:
        self._closed = closed
        self._lines = lines
        self._found: dict[tuple[object, ...], list[Candidate]] = {}

    def best(self, task: Task, K: int) -> tuple[TG, Error, str]:
        """The best instance with K branches, its errors, and a note on a condition not kept."""
        found = self._solved(task, K)
        found = [each for each in found if each.error <= 1.01 * found[0].error]
        scaled = Scaled.of(task, K)
        scale = scaled.units.scale
        errors = [_inputs.error(c.t, task.f, task.inputs, task.tails, scale) for c in found]
        i = _least(errors, task.objective, scale.height)
        note = "" if agrees_at_zero(found[i].t, task.f) else scaled.condition.note
        return found[i].t, errors[i], note

    def _solved(self, task: Task, K: int) -> list[Candidate]:
        """The best few instances with K branches, best first."""
        if K == 2:
            task = replace(task, own_tau=False, ordered=True)
        key = (K, task.objective, task.own_tau, task.ordered, task.zero, task.tails)
        if key not in self._found:
            own = [t for t in (*self._closed, task.start) if t is not None and t.K == K]
            node = _Node(Scaled.of(task, K), own)
            if not node.exact and task.start is None:  # about a start: it alone, and quickly
                for less in self._simpler(task, K):
                    node.take(self._solved(less, K))
                if K > 2:
                    node.take_fewer(self._solved(task, K - 1))
                if task.objective == "rms":  # least squares may stop far from it
                    node.take(self._solved(replace(task, objective="sup"), K))
            self._found[key] = node.solved()
        return self._found[key]

    def _simpler(self, task: Task, K: int) -> Iterator[Task]:
        """The task with as many branches and one freedom less, in every way that it can be had."""
        if task.own_tau:
            yield replace(task, own_tau=False)
        if not task.ordered:
            yield replace(task, ordered=True)
        if task.tails == "free" and self._lines is not None:
            yield replace(task, tails="exact", lines=self._lines)
        scale = _inputs.scale_of(task.f, task.inputs, task.tails)
        for zero in _STRICTER[task.zero]:
            less = replace(task, zero=zero)
            if condition_of(less, K, scale) != condition_of(task, K, scale):
                yield less
                break


class _Node:
    """One task with K branches: what is given, what to begin from, and then the search."""

    def __init__(self, scaled: Scaled, given: Sequence[TG]) -> None:
        self._scaled = scaled
        self._begin = list(given)
        self._known: list[Candidate] = []
        self._know(given)

    @property
    def exact(self) -> bool:
        """Whether an instance that is f itself is known."""
        limit = _EXACT * self._scaled.units.scale.height
        return bool(self._known) and self._known[0].error <= limit

    def take(self, found: Sequence[Candidate]) -> None:
        """The best few of a simpler task."""
        self._know([each.t for each in found[:1]])
        self._begin += [each.t for each in found]

    def take_fewer(self, found: Sequence[Candidate]) -> None:
        """The best few with one branch fewer."""
        more = [embed.with_one_more(each.t) for each in found]
        self._know(more[0][:1])
        self._begin = [*itertools.chain(*more), *self._begin]

    def _know(self, given: Sequence[TG]) -> None:
        scaled = self._scaled
        self._known += [Candidate(t, scaled.error(t)) for t in given if scaled.keeps(t)]
        self._known.sort(key=lambda each: each.error)

    def solved(self) -> list[Candidate]:
        """The best few, best first; what was given wins ties."""
        if self.exact:
            return self._known[:1]
        scaled, task = self._scaled, self._scaled.task
        begin = [scaled.start(t) for t in self._begin if not t.hard]
        q = starts(scaled.problem, task.starts, np.random.default_rng(task.seed))
        found = search(scaled.problem, task.objective, scaled.dense, q, begin)
        made = [scaled.instance(each) for each in found]
        every = self._known[:1] + [Candidate(t, scaled.error(t)) for t in made]
        return sorted(every, key=lambda each: each.error)[:3]


def _least(errors: Sequence[Error], objective: str, height: float) -> int:
    """The first of the best, to rounding: by the objective, then by the other figure."""
    keys = ("sup", "rms") if objective == "sup" else ("rms", "sup")
    left = list(range(len(errors)))
    for key, slack in zip(keys, (1e-9, 1.0), strict=True):
        figures = {i: getattr(errors[i], key) for i in left}
        limit = min(figures.values()) * (1 + slack) + 1e-14 * height
        left = [i for i in left if figures[i] <= limit]
    return left[0]
