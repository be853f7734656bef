"""Steps until a run reaches the level of a baseline (Section 3, App. D of the paper).

A curve is a sequence of values, taken at steps 1, 2, .. (times `every`), or a mapping from step to
value. Both curves are smoothed by a mean over the last `window` values, which is there from the
`window`-th on. Sums are exact, so that a plateau reaches its own level. A window with a NaN or an
infinity in it reaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

Curve = Sequence[float] | Mapping[int, float]
_Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Reached:
    """When a candidate and the baseline itself first reach the baseline's level.

    `baseline` and `candidate` are steps, or None for never; `best` is the candidate's best smoothed
    value (None if it has none) and `end` its last step.
    """

    what: str
    mode: str
    level: float
    baseline: int | None
    candidate: int | None
    best: float | None
    end: int

    @property
    def speedup(self) -> float | None:
        """Steps of the baseline for one of the candidate; None if either never arrives."""
        if self.baseline is None or self.candidate is None:
            return None
        if self.candidate == 0:
            return math.inf if self.baseline else 1.0
        return self.baseline / self.candidate

    def __str__(self) -> str:
        sign = ">=" if self.mode == "max" else "<="
        own = "never does" if self.baseline is None else f"does at step {self.baseline}"
        target = f"the baseline's {self.what} ({sign} {self.level:.6g})"
        if self.candidate is None:
            best = "no finite value" if self.best is None else f"best {self.best:.6g}"
            return f"never reaches {target} in {self.end} steps ({best}); the baseline {own}"
        factor = "" if self.speedup is None else f", {self.speedup:.2f}x"
        return f"reaches {target} at step {self.candidate}; the baseline {own}{factor}"


def steps_to_baseline(
    baseline: Curve,
    candidate: Curve,
    *,
    mode: str = "max",
    window: int = 3,
    last: int = 6,
    every: int = 1,
) -> Reached:
    """The first steps at which both curves, smoothed, reach the baseline's converged level.

    That level is the mean of the baseline's `last` values, as they are. With `last` a multiple of
    `window` the baseline always reaches it.

    Args:
        mode: "max" where more is better (accuracy, Dice), "min" where less is (loss, WER).
        window, last: the paper's are 3 and 6.
        every: steps between the values of a sequence; a mapping has its own steps.

    >>> steps = steps_to_baseline([1, 2, 3, 4, 4, 4, 4, 4, 4], [3, 4, 4, 4, 4, 4], every=100)
    >>> print(steps)
    reaches the baseline's converged level (>= 4) at step 400; the baseline does at step 600, 1.50x
    """
    ours, theirs = _points("baseline", baseline, every), _points("candidate", candidate, every)
    _check(mode, window=window, last=last, every=every)
    _check_length("baseline", ours, max(window, last), window, last)
    _check_length("candidate", theirs, window, window, None)
    ends = [value for _, value in ours[-last:]]
    if not all(map(math.isfinite, ends)):
        raise ValueError(
            f"steps_to_baseline: the baseline's last {last} values must be finite; got "
            f"{', '.join(map(str, ends))}."
        )
    return _reached("converged level", mode, _mean(ends), ours, theirs, window)


def steps_to_peak(
    baseline: Curve, candidate: Curve, *, mode: str = "max", window: int = 1, every: int = 1
) -> Reached:
    """The same with the baseline's best value as the level: App. D's figure for depth and width.

    The appendix does not say whether these curves are smoothed; its example, a peak of 90.81 % at
    epoch 199, is a single value, so by default they are not. A level that is the luckiest of many
    noisy values is late for the baseline and flatters the candidate: `steps_to_baseline` does not.

    >>> steps_to_peak([70, 90, 80, 90], [80, 85, 90]).speedup
    0.6666666666666666
    """
    ours, theirs = _points("baseline", baseline, every), _points("candidate", candidate, every)
    _check(mode, window=window, every=every)
    _check_length("baseline", ours, window, window, None)
    _check_length("candidate", theirs, window, window, None)
    level = _best(_smooth(ours, window), mode)
    if level is None:
        raise ValueError("steps_to_peak: the baseline has no finite value to take a peak from.")
    return _reached("peak", mode, level, ours, theirs, window)


def _reached(
    what: str, mode: str, level: Fraction, ours: _Points, theirs: _Points, window: int
) -> Reached:
    own, other = _smooth(ours, window), _smooth(theirs, window)
    best = _best(other, mode)
    return Reached(
        what=what,
        mode=mode,
        level=float(level),
        baseline=_first(own, level, mode),
        candidate=_first(other, level, mode),
        best=None if best is None else float(best),
        end=theirs[-1][0],
    )


def _points(name: str, curve: Curve, every: int) -> _Points:
    if isinstance(curve, Mapping):
        points = [(step, float(value)) for step, value in curve.items()]
        steps = [step for step, _ in points]
        if steps != sorted(set(steps)) or (steps and steps[0] < 0):
            raise ValueError(f"the steps of the {name} have to increase from 0 on; got {steps}.")
        return points
    return [(every * (k + 1), float(value)) for k, value in enumerate(curve)]


def _check(mode: str, **counts: int) -> None:
    if mode not in ("max", "min"):
        raise ValueError(
            f"mode must be 'max' (more is better) or 'min' (less is better); got {mode!r}."
        )
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}.")


def _check_length(name: str, points: _Points, need: int, window: int, last: int | None) -> None:
    if len(points) < need:
        level = "" if last is None else f" and a level over the last {last}"
        raise ValueError(
            f"the {name} has {len(points)} values; a mean over {window}{level} needs {need}."
        )


def _mean(values: Sequence[float]) -> Fraction:
    from fractions import Fraction  # its import takes longer than that of all our modules

    return sum(map(Fraction, values), Fraction(0)) / len(values)


def _smooth(points: _Points, window: int) -> list[tuple[int, Fraction | None]]:
    """(step, mean of the `window` values that end there), None where one is not finite."""
    found: list[tuple[int, Fraction | None]] = []
    for k in range(window, len(points) + 1):
        values = [value for _, value in points[k - window : k]]
        finite = all(map(math.isfinite, values))
        found.append((points[k - 1][0], _mean(values) if finite else None))
    return found


def _best(smooth: Sequence[tuple[int, Fraction | None]], mode: str) -> Fraction | None:
    finite = [value for _, value in smooth if value is not None]
    return (max if mode == "max" else min)(finite, default=None)


def _first(smooth: Sequence[tuple[int, Fraction | None]], level: Fraction, mode: str) -> int | None:
    for step, value in smooth:
        if value is not None and (value >= level if mode == "max" else value <= level):
            return step
    return None
