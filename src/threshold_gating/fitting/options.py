"""What may be asked of a fit, and what goes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threshold_gating.primitive import FORMS

if TYPE_CHECKING:
    from threshold_gating.fitting.scaled import Task

_MOST_K = 16  # of any search: K = 16 takes most of a minute, and float64 has few digits left there


def check_options(task: Task, K: int | str, max_error: float | None, recipe: str | None) -> None:
    """Refuse what cannot be asked for, or not together, and say what can."""
    for name, value, allowed in (
        ("form", task.form, FORMS),
        ("tails", task.tails, ("exact", "free")),
        ("zero", task.zero, (True, False, "value")),
        ("objective", task.objective, ("sup", "rms")),
        ("recipe", recipe, (None, "paper")),
    ):
        if value not in allowed:
            words = " or ".join(map(repr, allowed))
            raise ValueError(f"fit: {name} must be {words}; got {value!r}.")
    if K != "auto" and (not isinstance(K, int) or isinstance(K, bool) or not 2 <= K <= _MOST_K):
        raise ValueError(
            f"fit: K must be an integer from 2 to {_MOST_K}, or 'auto' with max_error=...; "
            f"got {K!r}."
        )
    if (K == "auto") != (max_error is not None) or not (max_error is None or max_error > 0):
        raise ValueError(
            f"fit: K='auto' and max_error > 0 go together; got K={K!r}, max_error={max_error!r}."
        )
    if task.starts < 1:
        raise ValueError(f"fit: starts must be at least 1; got {task.starts!r}.")
    if not task.ordered and task.form == "product":
        raise ValueError(
            "fit: product-form gates need ordered thresholds; got ordered=False. "
            "Use form='softmax'."
        )
    if task.start is not None and task.start.K != K:
        raise ValueError(f"fit: start has K = {task.start.K}; asked for K={K!r}.")
    _check_inputs(task, K, recipe)


def _check_inputs(task: Task, K: int | str, recipe: str | None) -> None:
    kind = task.inputs.kind
    if kind == "line" and task.objective == "rms":
        raise ValueError(
            "fit: the RMS over the line is not defined. Use objective='sup', or over='normal', "
            "an interval or samples."
        )
    if kind == "normal" and task.objective == "sup":
        raise ValueError(
            "fit: a density has no largest error. Use objective='rms', or over='line' or an "
            "interval (a, b)."
        )
    if kind == "line" and task.tails == "free" and recipe is None:
        raise ValueError(
            "fit: over='line' needs tails='exact', free ones are off without bound. For "
            "tails='free' give an interval (a, b), a density or samples."
        )
    if recipe is not None and (K != 3 or kind not in ("normal", "samples")):
        raise ValueError(
            "fit: recipe='paper' is K = 3 by RMS on samples or a density; "
            f"got K={K!r} over {kind!r}."
        )
