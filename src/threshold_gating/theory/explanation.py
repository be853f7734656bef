"""Record of what `theory` finds of one function: its text and its JSON.

The records that are only shown (`Crossing`, `Residual`, `WellBehaved`) are here too, so that
`theory`, which computes them, imports this module and not the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from textwrap import fill
from typing import Any

from threshold_gating.fitting.shape import REACH, Asymptote, Asymptotes, Corner, Derivatives
from threshold_gating.instance import TG
from threshold_gating.theory.meanfield import EdgeOfChaos


@dataclass(frozen=True)
class Crossing:
    """Where the two asymptotes cross, and what K = 2 cannot do better than there."""

    x: float | None
    line: float | None
    floor: float | None
    reason: str = ""


@dataclass(frozen=True)
class Residual:
    """f - t = coefficient (x - at)^order + ...; order None: equal as far as seen (order 6)."""

    order: int | None
    coefficient: float
    t: TG | None
    reason: str = ""


@dataclass(frozen=True)
class WellBehaved:
    """Whether Def. 7 holds, why not, and the transition point that dominates."""

    ok: bool
    reason: str
    transition: float | None = None


@dataclass(frozen=True)
class Explanation:
    """Everything `theory` knows of one function; prints as a table, `to_dict` is JSON."""

    name: str
    asymptotes: Asymptotes
    corners: tuple[Corner, ...]
    inflections: tuple[float, ...]
    monotone: bool
    derivatives: Derivatives
    kappa: float | None
    crossing: Crossing
    residual: Residual
    well_behaved: WellBehaved
    edges: tuple[EdgeOfChaos, ...]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values: infinities as "inf" or "-inf", NaN as None."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def __str__(self) -> str:
        d, cross, tails = self.derivatives, self.crossing, self.asymptotes
        rows = [
            ("at -inf", _tail_text(tails.low)),
            ("at +inf", _tail_text(tails.high)),
            ("crossing", _crossing_text(cross)),
            ("corners", _some([_corner_text(k) for k in self.corners])),
            ("inflections", _some([f"{x:.6g}" for x in self.inflections])),
            ("monotone", _yes(self.monotone)),
            ("well-behaved", f"{_yes(self.well_behaved.ok)}: {self.well_behaved.reason}"),
            (f"at x = {d.at:g}", _derivatives_text(d)),
            ("kappa", "none" if self.kappa is None else f"{self.kappa:.6g}, which is |f'''|"),
            ("K=2 residual", _residual_text(self.residual, d.at)),
        ]
        table = [
            fill(f"  {label:<13} {text}", 100, subsequent_indent=" " * 16) for label, text in rows
        ]
        return "\n".join([self.name[:100], *table, _EDGES, *map(_edge_text, self.edges)])


def _plain(value: Any) -> Any:
    if isinstance(value, TG):
        return value.to_dict()
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _yes(ok: bool) -> str:
    return "yes" if ok else "no"


def _corner_text(k: Corner) -> str:
    return (
        f"{k.at:.6g} (f steps {k.step:+.4g})" if k.step else f"{k.at:.6g} (f' jumps {k.jump:+.4g})"
    )


def _some(items: list[str], most: int = 4) -> str:
    shown = ", ".join(items[:most]) or "none"
    return shown + (f", ... ({len(items)} in [-{REACH:g}, {REACH:g}])" if len(items) > most else "")


def _tail_text(a: Asymptote) -> str:
    if a.slope is None:
        return a.reason
    if a.intercept is None:
        return f"slope {a.slope:.6g}; {a.reason}"
    return f"{a.slope:.6g} x {'-' if a.intercept < 0 else '+'} {abs(a.intercept):.6g}"


def _crossing_text(cross: Crossing) -> str:
    if cross.x is None:
        return f"none, {cross.reason}"
    return f"x* = {cross.x:.6g}, no K=2 with these tails is closer than {cross.floor:.6g}"


def _derivatives_text(d: Derivatives) -> str:
    names = ("f", "f'", "f''", "f'''")
    values = (d.value, d.first, d.second, d.third)
    shown = ["none" if v is None else f"{v:.6g}" for v in values]
    parts = [f"{name} = {v}" for name, v in zip(names, shown, strict=True)]
    return f"{', '.join(parts)} ({d.by})"


def _residual_text(r: Residual, at: float) -> str:
    if r.t is None or math.isnan(r.coefficient):
        return r.reason
    if r.order is None:
        return "0, exact"
    around = "x" if at == 0 else f"(x - {at:g})"
    power = ("", f" {around}")[r.order] if r.order < 2 else f" {around}^{r.order}"
    return f"{r.coefficient:.6g}{power} + ..."


_EDGES = "  edge of chaos      q  E[f'^2]  E[f''^2]  sigma_w  sigma_b^2    beta   chi_q"


def _edge_text(e: EdgeOfChaos) -> str:
    figures = f"  {'':<13} {e.q:6.3g} {e.moments.slope:8.5f} {e.moments.curvature:9.5f}"
    if not e.valid:
        return f"{figures}  none: {_no_edge(e)}"
    return f"{figures} {e.sigma_w:8.4f} {e.sigma_b2:+10.4f} {e.beta:7.3f} {e.chi_q:7.3f}"


def _no_edge(e: EdgeOfChaos) -> str:
    if e.sigma_b2 < 0:
        return "sigma_b^2 < 0"
    # 0 for a constant, infinite behind a step: either way no sigma_w makes chi_1 one
    return "E[f'^2] is 0" if e.moments.slope == 0 else "E[f'^2] is not finite"
