"""`tg explain`: the family, the fits and the theory of a function."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch

from threshold_gating import taxonomy, theory
from threshold_gating.cli.function import Function, Target, target
from threshold_gating.cli.printing import missing, progress, say, show
from threshold_gating.cli.table import WIDTH
from threshold_gating.fitting import Fit, fit
from threshold_gating.fitting.shape import curve
from threshold_gating.instance import TG
from threshold_gating.show.instances import is_exact, plot_explanation, probes, rounding, values
from threshold_gating.taxonomy import ROWS, TAXONOMY
from threshold_gating.theory.explanation import Explanation

_MEANING = {
    "multiplicative": "an outer branch carries x on",
    "saturating": "inner branches carry x on, the outer ones do not",
    "constant": "no branch carries x on",
}


class Attempt(NamedTuple):
    """One line of the fits: what was found with K branches, or why nothing was."""

    K: int
    own_tau: bool
    fit: Fit | None
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All that `tg explain` knows of a function; `as_text` and `as_json` show it.

    `row` is the key under which the taxonomy has this very function, `best` the instance nearest to
    it, `exact` whether they differ by rounding only; `missing` names a package that fits need.
    """

    target: Target
    row: str | None
    family: str
    best: Fit | None
    exact: bool
    attempts: tuple[Attempt, ...]
    explanation: Explanation
    missing: str = ""

    @property
    def fits(self) -> list[Fit]:
        """The instances to draw: the best, and those that miss more."""
        found = [attempt.fit for attempt in self.attempts if attempt.fit is not None]
        others = [each for each in found if not (self.exact and is_exact(each.sup, self.target.f))]
        known = [self.best] if self.best is not None and self.best not in others else []
        return [*known, *others]


def explain(args: argparse.Namespace) -> int:
    """`tg explain`."""
    try:
        # What a user's own file prints is not the report.
        with progress(args.what) as tell, redirect_stdout(sys.stderr):
            found = report(args.what, args.K, args.at, tell)
    except ValueError as error:
        say(f"tg explain: {error}")  # of several lines where it points into a formula
        return 2
    undrawn = "" if args.out is None else _draw(found, args.out)
    drawn = None if args.out is None or undrawn else str(args.out.resolve())
    show(args, as_json(found, drawn), as_text(found))
    unfitted = found.missing and missing("the fits need", found.missing, "fit")
    for why in filter(None, (unfitted, undrawn)):
        say(f"tg explain: {why}")
    if drawn:
        say(f"Written to {drawn}")
    elif args.out is None and args.json is None:
        name = re.sub(r"\W+", "_", found.target.name).strip("_")[:40] or "picture"
        say(f"For a picture: tg explain {shlex.quote(args.what)} -o {name}.png")
    return 1 if unfitted or undrawn else 0


def _draw(found: Report, path: Path) -> str:
    """Draw the picture; why that cannot be, "" if it can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plot_explanation(found.target.f, found.fits, found.explanation, path)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "numpy"):
            raise
        return missing("the picture needs", package, "plot")
    except OSError as error:
        return f"-o {path} cannot be written: {error}"
    return ""


# What is found out about it


def report(
    what: str,
    ks: Iterable[int] = (2, 3, 4, 5),
    at: float = 0.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Fits with each K of `ks`, and the theory about `at`; `tell` hears of each fit as it ends.

    Raises ValueError where `what` cannot be read or is no element-wise function.
    """
    asked = target(what)
    f = asked.f
    try:
        checked = curve(f)
    except TypeError as error:
        raise ValueError(str(error)) from error
    explanation = theory.explain(checked, at, name=asked.name)
    row = _row(asked)
    known = None
    if row is not None and ROWS[row].exact:
        t = TAXONOMY[row]
        known = Fit(t, *taxonomy.measure(t, f), "sup over the line, RMS under N(0, 1)", "sup")
    attempts, absent = [], ""
    try:
        for attempt in _attempts(f, ks, _starts(f, known, explanation)):
            tell(_progress(attempt))
            attempts.append(attempt)
    except ModuleNotFoundError as error:
        absent = _package(error)
    fits = [attempt.fit for attempt in attempts if attempt.fit is not None]
    best = known or min(fits, key=lambda each: each.sup, default=None)
    exact = best is not None and (best is known or is_exact(best.sup, f))
    family = _family(row, best, explanation)
    return Report(asked, row, family, best, exact, tuple(attempts), explanation, absent)


def _package(error: ModuleNotFoundError) -> str:
    """Which of the extra's packages is not there; any other is an error."""
    cause = error.__cause__
    name = error.name or (cause.name if isinstance(cause, ModuleNotFoundError) else None) or ""
    package = name.partition(".")[0]
    if package not in ("scipy", "numpy"):
        raise error
    return package


def _row(asked: Target) -> str | None:
    """The first key under which the taxonomy has this very function, exact rows first."""
    x = probes()
    y = values(asked.f, x)
    if not y.isfinite().all():
        return None
    allowed = rounding(x, y)
    named = [asked.name] if asked.name in ROWS and ROWS[asked.name].exact else []
    keys = (*named, *ROWS)
    return next((k for k in keys if ((values(ROWS[k].f, x) - y).abs() <= allowed).all()), None)


def _starts(f: Function, known: Fit | None, e: Explanation) -> dict[int, TG]:
    """Instances that may already be exact: the taxonomy's, and f itself if it is lines."""
    candidates = [] if known is None else [known.t]
    bends = [corner.at for corner in e.corners]
    if not bends and e.crossing.x is not None:
        bends = [e.crossing.x]
    if bends and (lines := _lines(f, bends)) is not None:
        candidates.insert(0, lines)
    return {t.K: t for t in candidates if t.q is None and t.clamp is None and t.K > 1}


def _lines(f: Function, bends: list[float]) -> TG | None:
    """The hard instance through f between `bends`, None where f is no line there."""
    at = torch.tensor(bends, dtype=torch.float64)
    ends = torch.cat([at[:1] - 2, at, at[-1:] + 2])
    low, high = (ends[:-1] + part * ends.diff() for part in (0.25, 0.75))
    s = (values(f, high) - values(f, low)) / (high - low)
    c = values(f, low) - s * low
    below = (values(f, at) - (s * ends[1:] + c)[:-1]).abs() < 1e-12
    owner = ["lo" if own else "hi" for own in below.tolist()]
    t = TG(math.inf, bends, s.tolist(), c.tolist(), owner=owner)
    x = probes()
    y = values(f, x)
    return t if ((t(x) - y).abs() <= rounding(x, y)).all() else None


def _attempts(f: Function, ks: Iterable[int], starts: dict[int, TG]) -> Iterator[Attempt]:
    """A fit for each K, two for K = 4; none is tried beyond the first that is exact."""
    exact = None
    for K in sorted(set(ks)):
        if exact is not None:
            yield Attempt(K, False, None, f"exact with K = {exact} already")
            continue
        first = _attempt(f, K, False, starts.get(K))
        yield first
        exact = K if first.fit is not None and is_exact(first.fit.sup, f) else None
        if K == 4 and first.fit is not None and exact is None:
            yield _attempt(f, K, True, first.fit.t)


def _attempt(f: Function, K: int, own_tau: bool, start: TG | None) -> Attempt:
    begin = time.perf_counter()
    try:
        found = fit(f, "line", K, own_tau=own_tau, start=start)
    except ValueError as error:
        return Attempt(K, own_tau, None, str(error).removeprefix("fit: "))
    return Attempt(K, own_tau, found, found.warning, time.perf_counter() - begin)


def _family(row: str | None, best: Fit | None, explanation: Explanation) -> str:
    """Table 3's word for the function: that of its row, of its tails, or of its best fit."""
    tails = explanation.asymptotes
    if row is not None:
        word = str(taxonomy.family(TAXONOMY[row]))
    elif tails.low.slope is None or tails.high.slope is None:
        return "none"
    elif max(abs(tails.low.slope), abs(tails.high.slope)) > 1e-9:
        word = "multiplicative"
    else:
        word = str(taxonomy.family(best.t, tol=1e-9)) if best is not None else "constant"
    return word


# How it is shown


def as_text(r: Report) -> str:
    """Within `WIDTH` columns: family, fits, the best instance, theory."""
    name, tails = r.target.name, r.explanation.asymptotes
    reason = _MEANING.get(r.family) or (
        f"no slope at infinity, {tails.low.reason or tails.high.reason}"
    )
    lines = [
        name if len(name) <= WIDTH else f"{name[: WIDTH - 4]} ...",
        _line("family", f"{r.family}: {reason}"),
        _line("exact", _exactness(r)),
        "",
        *_fits_text(r),
    ]
    if r.best is not None:
        how = "exact" if r.exact else "best"
        lines += ["", _line(f"{how}, K = {r.best.K}", repr(r.best.t))]
    rest = str(r.explanation).split("\n")[1:]
    return "\n".join([*lines, "", *rest])


def _line(label: str, text: str) -> str:
    """As `Explanation` prints its own."""
    return fill(f"  {label:<13} {text}", WIDTH, subsequent_indent=" " * 16, break_on_hyphens=False)


def _exactness(r: Report) -> str:
    row = r.row and ROWS[r.row]
    if r.best is not None and r.exact:
        note = row.note.removeprefix("exact: ") if row else ""
        name = (
            f"as the row {r.row} of the taxonomy" if row else "though the taxonomy has no such row"
        )
        return f"yes, with K = {r.best.K}, {name}" + (f" ({note})" if note else "")
    tried = ", ".join(str(K) for K in sorted({attempt.K for attempt in r.attempts}))
    if row:
        return f"no; the taxonomy's row {r.row} is not exact either (`tg table {r.row}`)"
    why = taxonomy.NOT_REPRESENTABLE.get(r.target.name)
    return f"no, {why}" if why else f"not with K = {tried}" if tried else "not known"


def _fits_text(r: Report) -> list[str]:
    """The fits as a table; one line where none of them exists."""
    if not any(attempt.fit for attempt in r.attempts):
        notes = " ".join({attempt.note: None for attempt in r.attempts})
        return [_line("fits", f"none: {notes or f'they need {r.missing}.'}")]
    lines = [
        "  fits with the tails of f and its value at 0; sup is over the line, RMS under N(0, 1)",
        f"  {'K':<13} {'sup':>10} {'RMS':>10} {'rel. RMS':>10} {'seconds':>8}",
    ]
    for attempt in r.attempts:
        if attempt.fit is not None:
            label = f"{attempt.K}, own tau" if attempt.own_tau else str(attempt.K)
            errors = (attempt.fit.sup, attempt.fit.rms, attempt.fit.rel_rms)
            shown = " ".join(f"{error:10.3g}" for error in errors)
            exact = "  exact" if is_exact(attempt.fit.sup, r.target.f) else ""
            lines.append(f"  {label:<13} {shown} {attempt.seconds:8.1f}{exact}")
            lines += [_line("", attempt.note)] if attempt.note else []
    without: dict[str, list[str]] = {}
    for attempt in r.attempts:
        if attempt.fit is None:
            without.setdefault(attempt.note, []).append(str(attempt.K))
    return [*lines, *(_line(", ".join(ks), note) for note, ks in without.items())]


def _progress(attempt: Attempt) -> str:
    own = " with own tau" if attempt.own_tau else ""
    if attempt.fit is None:
        return f"K = {attempt.K}{own}: {attempt.note}"
    return f"K = {attempt.K}{own}: sup {attempt.fit.sup:.3g}, {attempt.seconds:.1f} s"


def as_json(r: Report, picture: str | None = None) -> str:
    """Every digit: `TG.from_dict(fit["instance"])` is the instance that was found."""
    row = None
    if r.row is not None:
        row = {"key": r.row, "exact": ROWS[r.row].exact, "note": ROWS[r.row].note}
    data = {
        "name": r.target.name,
        "family": None if r.family == "none" else r.family,
        "row": row,
        "not_representable": taxonomy.NOT_REPRESENTABLE.get(r.target.name),
        "exact": r.exact,
        "best": None if r.best is None else r.best.t.to_dict(),
        "fits": [_attempt_dict(attempt) for attempt in r.attempts],
        "missing": r.missing or None,
        "theory": r.explanation.to_dict(),
        "picture": picture,
    }
    return json.dumps(data, indent=2, allow_nan=False)


def _attempt_dict(attempt: Attempt) -> dict[str, Any]:
    data: dict[str, Any] = {"K": attempt.K, "own_tau": attempt.own_tau, "note": attempt.note}
    if (found := attempt.fit) is None:
        return {**data, "instance": None}
    errors = {name: getattr(found, name) for name in ("sup", "rms", "rel_rms")}
    plain = {name: value if math.isfinite(value) else None for name, value in errors.items()}
    about = {"over": found.over, "seconds": round(attempt.seconds, 3)}
    return {**data, **plain, **about, "instance": found.t.to_dict()}
