"""Def. 7 to Cor. 11 and Apps. A to C, computed: what is true of a function.

For any element-wise function or `TG`. `explain` is all in one record, whose text is made in
`explanation`.

Where the paper and a computation part, the docstring says so; docs/theory.md has the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.fitting.shape import (
    REACH,
    Curve,
    asymptotes,
    corners,
    curve,
    derivatives,
    inflections,
    is_monotone,
)
from threshold_gating.instance import TG
from threshold_gating.primitive import gates
from threshold_gating.theory.explanation import Crossing, Explanation, Residual, WellBehaved
from threshold_gating.theory.meanfield import (
    edge_of_chaos,
    gaussian_rule,
    moments,
)

if TYPE_CHECKING:
    from threshold_gating.fitting import Fit


@dataclass(frozen=True)
class GradientPath:
    """The two parts of dy/dx (Remark 6): RMS under N(0, q), and the slopes far out."""

    slopes: float
    gates: float
    low: float
    high: float


@dataclass(frozen=True)
class Inflected:
    """What Remarks 12 and 13 are about: where a function is inflected, whether it is monotone."""

    name: str
    inflections: tuple[float, ...]
    monotone: bool


@dataclass(frozen=True)
class Hardening:
    """How far gates of sharpness tau are from hard ones in the sup norm (App. A)."""

    tau: float
    gate: float
    relu: float


def crossing(f: Any) -> Crossing:
    """The crossing x* of the two asymptotes and the K = 2 error floor |f(x*) - L(x*)| (Thm. 8).

    The paper's theorem claims two branches suffice. Correct is: every K = 2 instance with the
    tails of f, soft or hard, goes through the point where they cross, so it is off by at least the
    floor there: ln 2 for Softplus, 1/e for ELU, 0 for GELU. A floor of 0 is necessary only.
    """
    c = curve(f)
    tails = asymptotes(c)
    low, high = tails.low, tails.high
    if low.slope is None or low.intercept is None or high.slope is None or high.intercept is None:
        return Crossing(None, None, None, f"no asymptote: {low.reason or high.reason}")
    if abs(high.slope - low.slope) < 1e-9:
        same = abs(high.intercept - low.intercept) < 1e-9
        return Crossing(None, None, None, "one line for both" if same else "parallel asymptotes")
    x = (low.intercept - high.intercept) / (high.slope - low.slope) + 0.0
    line = low.slope * x + low.intercept
    off = abs(_at(c, x) - line)
    return Crossing(x, line, off if off > 1e-12 else 0.0)


def kappa(f: Any, at: float = 0.0) -> float | None:
    """|f'''(at)|, as the paper defines it, with no promise attached; None where f''' is none.

    The paper ties it to the residual, the step size and the trainable depth (Lemma 9, Cor. 10,
    Cor. 11). It is 0 for SiLU, GELU and Softplus and 2 for tanh, whose conversion is exact, and it
    changes with the units of x.
    """
    third = derivatives(f, at).third
    return None if third is None else abs(third)


def lemma_instance(f: Any, at: float = 0.0) -> TG:
    """The K = 2 instance that Thm. 8 and Lemma 9 construct at a centre.

    Unequal slopes at infinity: both branches through (at, f(at)), tau = 2 f''(at) / (s_+ - s_-),
    as printed. Equal slopes: there the printed proof gives a constant; the branches are the
    asymptotes instead, tau = 4 (f'(at) - s) / (b_+ - b_-). A corner at the centre: hard gates.
    """
    c = curve(f)
    tails = asymptotes(c)
    low, high = tails.low, tails.high
    if low.slope is None or high.slope is None:
        raise ValueError(f"{c.name} has no slope at infinity: {low.reason or high.reason}.")
    slopes = low.slope, high.slope
    if abs(high.slope - low.slope) < 1e-9:
        if low.intercept is None or high.intercept is None:
            raise ValueError(f"{c.name} has no asymptote: {low.reason or high.reason}.")
        lines = low.intercept, high.intercept
        order, rise, swing = 1, -4 * low.slope, high.intercept - low.intercept
    else:
        value = _at(c, at)
        lines = value - low.slope * at, value - high.slope * at
        if any(abs(k.at - at) < 1e-9 for k in corners(c)):
            return TG(math.inf, at, slopes, lines)
        order, rise, swing = 2, 0.0, high.slope - low.slope
    d = derivatives(c, at)
    bend = d.first if order == 1 else d.second
    if bend is None:
        raise ValueError(f"{c.name} has no derivative of order {order} at x = {at:g} to match.")
    tau = (rise + (4 if order == 1 else 2) * bend) / swing if swing else 0.0
    if not tau > 0:
        raise ValueError(f"{c.name} cannot be matched at x = {at:g}: tau would be {tau:.4g}.")
    return TG(tau, at, slopes, lines)


def residual(f: Any, t: TG | None = None, at: float = 0.0) -> Residual:
    """The true order and coefficient of f - t at the centre; t None: that of Lemma 9.

    The paper says kappa / 6 at third order. Correct is: the value must agree (it does not for a
    Gompertz curve), then the slope (not for Mish: 0.1 x), and the third derivative of t counts
    too (tanh has kappa = 2 and residual 0).
    """
    c = curve(f)
    if t is None:
        try:
            t = lemma_instance(c, at)
        except ValueError as error:
            return Residual(None, math.nan, None, str(error))
    for sides, degree in ((("both",), 16), (("left", "right"), 8)):
        found = [_taylor(c, t, at, side, degree) for side in sides]
        if all(f is not None for f in found):
            seen = [first for first in found if first is not None and first[0] is not None]
            if not seen:
                return Residual(None, 0.0, t)
            order, coefficient = min(seen, key=lambda p: (p[0], -abs(p[1])))
            return Residual(order, coefficient, t)
    return Residual(None, math.nan, t, f"{c.name} has no expansion at x = {at:g}")


def well_behaved(f: Any) -> WellBehaved:
    """Def. 7 made testable: continuous, slopes at infinity, one transition that dominates.

    A corner is as strong as the jump of f', an inflection as the smaller of the changes of f' on
    its two sides; "dominant" is at least twice as strong as any other. By that tanh and ReLU are
    well-behaved; SiLU, GELU and Mish (two equal inflections, none at the centre), Softplus and ELU
    (none at all) and Hardtanh (two equal corners) are not, though the paper counts them in.
    """
    c = curve(f)
    bent, kinks, tails = inflections(c), corners(c), asymptotes(c)
    if any(k.step for k in kinks):
        return WellBehaved(False, f"not continuous at x = {kinks[0].at:.6g}")
    for side in (tails.low, tails.high):
        if side.slope is None:
            return WellBehaved(False, f"no slope at infinity: {side.reason}")
    strength = {k.at: abs(k.jump) for k in kinks}
    ends = sorted({-REACH, REACH, *bent, *strength})
    for i, x in enumerate(ends):
        if x in bent and x not in strength:
            below = _slope(c, x) - _slope(c, ends[i - 1], 1e-9)
            above = _slope(c, ends[i + 1], -1e-9) - _slope(c, x)
            strength[x] = min(abs(below), abs(above))
    ranked = sorted(strength, key=lambda x: -strength[x])
    if not ranked:
        return WellBehaved(False, "no transition point: neither an inflection nor a corner")
    if len(ranked) > 1 and strength[ranked[0]] < 2 * strength[ranked[1]]:
        places = ", ".join(f"{x:.6g} ({strength[x]:.3g})" for x in sorted(ranked[:2]))
        return WellBehaved(False, f"no dominant transition: x (strength) {places}")
    what = "corner" if any(k.at == ranked[0] for k in kinks) else "inflection"
    return WellBehaved(True, f"{what} at x = {ranked[0]:.6g}", ranked[0])


def branches_for(f: Any, max_error: float) -> Fit:
    """The fit with the fewest branches whose largest error over the line is at most `max_error`.

    The paper says K = O(1/error), and 2 or 3 for whatever trains well. Needs the extra `fit`.
    """
    from threshold_gating.fitting import fit

    return fit(f, over="line", K="auto", max_error=max_error)


def gradient_path(t: TG, q: float = 1.0) -> GradientPath:
    """Remark 6 computed: dy/dx = sum_k g_k s_k + (what goes through g (1 - g)), under N(0, q).

    The first part is exactly 0 if every s_k is, the second dies out in both tails. The remark's
    conclusion does not follow: on the edge of chaos tanh keeps its gradients at any depth.
    """
    x, weight = gaussian_rule(q, cuts=tuple(k.at for k in corners(t)))
    g = gates(x, t.tau, t.theta, form=t.form, owner=t.owner)
    curves = t.q or (0.0,) * t.K
    branch = torch.stack([2 * qk * x + s for qk, s in zip(curves, t.s, strict=True)])
    carried = (g * branch).sum(0)
    if t.clamp is not None:
        y = TG(t.tau, t.theta, t.s, t.c, form=t.form, owner=t.owner, q=t.q)(x)
        carried = carried * ((y > t.clamp[0]) & (y < t.clamp[1]))
    gated = curve(t)(x, 1) - carried
    rms = [(weight @ part**2).sqrt().item() for part in (carried, gated)]
    return GradientPath(rms[0], rms[1] if rms[1] > 1e-12 else 0.0, t.s[0], t.s[-1])


def remarks_12_13() -> tuple[Inflected, ...]:
    """Remarks 12 and 13 computed for the functions they name.

    "At most two inflections" is true of all four. "Compositions of monotone factors" is not:
    those would be monotone, and GELU, SiLU and Mish are not. Nor has a single gate "at most one
    inflection": SiLU is one and has two.
    """
    named = {"mish": F.mish, "gelu": F.gelu, "elu": F.elu, "silu": F.silu}
    return tuple(Inflected(name, inflections(f), is_monotone(f)) for name, f in named.items())


def hardening(tau: float) -> Hardening:
    """App. A computed: sup |sigma(tau u) - 1[u > 0]| and sup |x sigma(tau x) - relu(x)|.

    The paper concludes that the L^p classes coincide for p up to infinity. Correct is: the gate
    stays 1/2 away for every tau; the blend of continuous branches converges, as 0.27846 / tau.
    """
    soft, hard = (TG(s, 0, (0, 1), (0, 0)) for s in (tau, math.inf))
    x = torch.linspace(-4, 4, 800_001, dtype=torch.float64) / tau
    near = torch.logspace(-300, 2, 3021, dtype=torch.float64)
    u = torch.cat([-near, near])
    gap = (gates(u, tau, (0.0,))[1] - (u > 0).double()).abs().max().item()
    return Hardening(tau, gap, (soft(x) - hard(x)).abs().max().item())


def curvature_ratio(f: Any, q: float, at: float = 0.0) -> float:
    """App. B computed: kappa^2 (q + at^2) over the E[f''^2] that it stands for.

    The paper calls the two close; tanh gives 1.1, 6.2 and 32 at q = 0.01, 0.5 and 2, SiLU and GELU
    0 at any q. NaN where there is no third derivative.
    """
    k = kappa(f, at)
    return math.nan if k is None else k**2 * (q + at**2) / moments(f, q).curvature


def trust_radius(f: Any, at: float = 0.0, delta: float = 0.1) -> float:
    """App. C computed: the largest step in z within which f'(z)^2 changes by at most `delta`.

    The paper says sqrt(delta |f'| / kappa). That needs f''(at) = 0 and is then right for small
    delta (tanh); else the change is of first order and the radius delta |f'| / (2 |f''|) (SiLU:
    delta / 2, where kappa = 0 promises infinity). It is a displacement, not a learning rate.
    """
    c = curve(f)
    if any(abs(k.at - at) < 1e-9 for k in corners(c)):
        return 0.0
    here = _slope(c, at) ** 2

    def leaves(z: Tensor) -> Tensor:
        around = torch.stack([c(at + z, 1), c(at - z, 1)]) ** 2
        return ((around - here).abs() > delta * here).any(0)

    z = torch.logspace(-8, 2, 20_001, dtype=torch.float64)
    out = leaves(z).nonzero()
    if not len(out):
        return math.inf
    first = int(out[0])
    low, high = z[first - 1] if first else torch.zeros_like(z[0]), z[first]
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if leaves(middle[None]).item() else (middle, high)
    return high.item()


def explain(
    f: Any, at: float = 0.0, *, name: str | None = None, q: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0)
) -> Explanation:
    """Everything about one function: its tails, corners, centre, K = 2 residual, edge of chaos.

    Args:
        f: an element-wise function of a tensor, or a `TG`; anything else is refused by `curve`.
        at: the centre for the derivatives, kappa and the residual.
        name: how to call it; its own name if None.
        q: the variances at which the edge of chaos is computed.
    """
    c = curve(f)
    if name is None:
        name = (taxonomy.name_of(f) if isinstance(f, TG) else None) or c.name
    return Explanation(
        name=name,
        asymptotes=asymptotes(c),
        corners=corners(c),
        inflections=inflections(c),
        monotone=is_monotone(c),
        derivatives=derivatives(c, at),
        kappa=kappa(c, at),
        crossing=crossing(c),
        residual=residual(c, at=at),
        well_behaved=well_behaved(c),
        edges=tuple(edge_of_chaos(c, v) for v in q),
    )


def _at(c: Curve, x: float) -> float:
    return c(torch.tensor([x], dtype=torch.float64)).item()


def _slope(c: Curve, x: float, beside: float = 0.0) -> float:
    return c(torch.tensor([x + beside], dtype=torch.float64), 1).item()


def _taylor(c: Curve, t: TG, at: float, side: str, degree: int) -> tuple[int | None, float] | None:
    """The first term of f - t about `at`, by interpolation on ever smaller intervals.

    None where no interval of at least 1e-3 is matched: there is a corner at the centre.
    """
    angle = torch.linspace(0, math.pi, degree + 1, dtype=torch.float64)
    between = (angle[1:] + angle[:-1]) / 2
    nodes, checks = angle.cos(), between.cos()
    if side != "both":
        sign = 1 if side == "right" else -1
        nodes, checks = sign * (1 + nodes) / 2, sign * (1 + checks) / 2
    powers = torch.arange(degree + 1, dtype=torch.float64)
    reach = 0.5
    while reach > 1e-3:
        x, z = at + reach * nodes, at + reach * checks
        size = max(c(x).abs().max().item(), t(x).abs().max().item(), 1e-30)
        terms = torch.linalg.solve(nodes[:, None] ** powers, c(x) - t(x))
        if ((checks[:, None] ** powers @ terms) - (c(z) - t(z))).abs().max() <= 1e-10 * size:
            for order, term in enumerate(terms[:7].tolist()):
                if abs(term) > 1e-8 * size:
                    return order, term / reach**order
            return None, 0.0
        reach /= 2
    return None
