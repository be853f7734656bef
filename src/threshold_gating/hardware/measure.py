"""A differential pair measured: curve, temperature, corners, mismatch, settling, noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacfwd

from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.cells import Pair, pair
from threshold_gating.hardware.devices import LOGISTIC, Shape, curve
from threshold_gating.hardware.spice import Analysis, Netlist, Plot, SpiceError, Wave, follows, run

aten = torch.ops.aten
SWING = 0.4  # volts to either side of a sweep
POINTS = 201
TEMPERATURES = (-40.0, -7.0, 27.0, 60.0, 92.0, 125.0)
EDGE = 3.0  # a step for settling goes from u = -3 to u = 3, where 5 % and 95 % are
WITHIN = 0.01  # of the tail current: settled


class Fit(NamedTuple):
    """A measured curve as a logistic gate: tau in 1/V, theta in V, the largest deviation."""

    tau: float
    theta: float
    deviation: float


class Own(NamedTuple):
    """A measured curve with the shape of its device, on the tau of the logistic fit."""

    shape: Shape
    deviation: float


# Fitting


def fits(v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """tau and theta of the logistic gates nearest to curves in the sense of least squares.

    One curve a row of `g`. Gauss-Newton from the steepest place of each curve, with steps that
    stay within it.
    """
    slopes = (g[..., 1:] - g[..., :-1]) / (v[1:] - v[:-1])
    tau, theta = 4 * slopes.amax(-1, keepdim=True), v[slopes.argmax(-1)][..., None]
    if not (tau > 0).all():
        raise ValueError("a curve does not rise anywhere: this is no gate.")
    for _ in range(60):
        model = aten.sigmoid(tau * (v - theta))
        bell, r = model * (1 - model), model - g
        by_tau, by_theta = bell * (v - theta), -bell * tau
        a, b, c = (by_tau**2).sum(-1), (by_tau * by_theta).sum(-1), (by_theta**2).sum(-1)
        p, q = (by_tau * r).sum(-1), (by_theta * r).sum(-1)
        det = a * c - b * b
        d_tau, d_theta = ((c * p - b * q) / det)[..., None], ((a * q - b * p) / det)[..., None]
        tau = (tau - d_tau).clamp(tau / 2, tau * 2)
        theta = (theta - d_theta).clamp(theta - 1 / tau, theta + 1 / tau)
    return tau[..., 0], theta[..., 0]


def fit(v: Tensor, g: Tensor) -> Fit:
    """The logistic gate nearest to a measured curve, and how far the curve is from it."""
    tau, theta = fits(v, g)
    return Fit(tau.item(), theta.item(), (curve(tau * (v - theta)) - g).abs().max().item())


def own_curve(v: Tensor, g: Tensor) -> tuple[Fit, Own]:
    """The logistic fit and the device's own curve, about the same theta and on the same tau."""
    logistic = fit(v, g)
    if logistic.deviation < LOGISTIC_ENOUGH:
        return logistic, Own(LOGISTIC, logistic.deviation)
    u = logistic.tau * (v - logistic.theta)

    def off(p: Tensor) -> Tensor:
        return curve(u, Shape(*p.exp())) - g

    found = [least_squares(off, [math.log(x) for x in start]) for start in _STARTS]
    best = min(found, key=lambda p: off(p).abs().max().item())
    shape = Shape(*(round(value, 6) for value in best.exp().tolist()))
    return logistic, Own(shape, (curve(u, shape) - g).abs().max().item())


LOGISTIC_ENOUGH = 1e-4  # a bipolar pair is logistic to that; a shape would fit its rounding
_STARTS = ((0.7, 0.7, 1.0, 1.0), (0.7, 4.0, 2.5, 2.0))


def least_squares(residuals: Callable[[Tensor], Tensor], start: Sequence[float]) -> Tensor:
    """Levenberg-Marquardt in float64, for a few parameters and a smooth curve."""
    p = torch.tensor(start, dtype=torch.float64)
    r, damping = residuals(p), 1e-3
    for _ in range(100):
        jacobian = jacfwd(residuals)(p)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ r
        scale = normal.diagonal().clamp_min(1e-30).diag()
        trial = p - torch.linalg.solve(normal + damping * scale, slope)
        left = residuals(trial)
        gain = 1 - (left.square().sum() / r.square().sum()).item()
        if gain > 0:
            p, r, damping = trial, left, max(damping / 5, 1e-12)
        else:  # NaN too
            damping *= 5
        if 0 < gain < 1e-6 or damping > 1e9:
            break
    return p


# Curves


def sweep(swing: float = SWING, points: int = POINTS) -> str:
    """The command of a sweep of the input."""
    return f"dc vd {-swing:g} {swing:g} {2 * swing / (points - 1):.10g}"


def sides(tag: str = "") -> tuple[str, str]:
    """The currents of the two transistors of a pair; the first of several pairs has no tag."""
    return f"i(v1{tag})", f"i(v2{tag})"


def shares(plot: Plot, tag: str = "") -> Tensor:
    """The share of the tail current that the first transistor of a pair takes."""
    first, second = (plot[name] for name in sides(tag))
    return first / (first + second)


def transfer(spec: Pair, swing: float = SWING, **conditions: Any) -> tuple[Tensor, Tensor]:
    """The curve of a pair: differential input in volts, and the share of the tail current."""
    spec.check_swing(swing)
    (plot,) = run(pair(spec, **conditions), Analysis(sweep(swing), sides()))
    return plot["scale"], shares(plot)


def over_tails(
    spec: Pair, tails: Sequence[float], swing: float = SWING, **conditions: Any
) -> list[Fit]:
    """The logistic fit at each tail current, in one run."""
    spec.check_swing(swing)
    source = "iref" if spec.real else "it"
    runs = [Analysis(sweep(swing), sides(), (f"alter {source} dc={tail:.6g}",)) for tail in tails]
    plots = run(pair(spec, **conditions), *runs)
    return [fit(plot["scale"], shares(plot)) for plot in plots]


def over_temperature(
    spec: Pair, celsius: Sequence[float] = TEMPERATURES, **conditions: Any
) -> list[Fit]:
    """The logistic fit at each temperature."""
    return [fit(*transfer(spec, celsius=each, **conditions)) for each in celsius]


def over_corners(spec: Pair, corners: Sequence[str], **conditions: Any) -> list[Fit]:
    """The logistic fit at each corner of the process."""
    return [fit(*transfer(spec, corner=each, **conditions)) for each in corners]


# Mismatch, settling, noise


class Spread(NamedTuple):
    """Mismatch of many pairs: standard deviations of theta in V and of tau relative to its mean."""

    pairs: int
    sigma_theta: float
    sigma_tau: float


def mismatched(
    spec: Pair, pairs: int = 200, seed: int = 1, **conditions: Any
) -> tuple[Tensor, Tensor]:
    """The curves of that many pairs in one netlist, each transistor with its own draw."""
    if pairs < 2:
        raise ValueError(f"a spread needs 2 pairs or more; got {pairs}.")
    tags = [str(k) if k else "" for k in range(pairs)]
    netlist = pair(spec, copies=pairs, seed=seed, **conditions)
    names = tuple(name for tag in tags for name in sides(tag))
    # Fewer points than for one pair: a hundred pairs are swept at once, and two numbers fitted.
    (plot,) = run(netlist, Analysis(sweep(points=81), names))
    return plot["scale"], torch.stack([shares(plot, tag) for tag in tags])


def mismatch(spec: Pair, pairs: int = 200, seed: int = 1, **conditions: Any) -> Spread:
    """Monte Carlo: the spread of theta and tau of that many pairs."""
    taus, thetas = fits(*mismatched(spec, pairs, seed, **conditions))
    return Spread(pairs, thetas.std().item(), (taus.std() / taus.mean()).item())


# What varies from transistor to transistor, where a set of models has a parameter for each.
VARIED = {"sky130-binned": ("vth0", "voff", "toxe")}


def mismatch_parts(
    spec: Pair, pairs: int = 200, seed: int = 1, **conditions: Any
) -> dict[str, Spread]:
    """The same with one cause of mismatch at a time; empty where the models do not part them."""
    causes = VARIED.get(spec.models, ())
    name = pdk.chosen(spec.models).devices[spec.device]
    out = {}
    for cause in causes:
        off = tuple((f"{name}__{other}_slope", 0.0) for other in causes if other != cause)
        out[cause] = mismatch(spec, pairs, seed, parameters=off, **conditions)
    return out


def settling(spec: Pair, tau: float, **conditions: Any) -> float:
    """Seconds to 1 % of the tail after a step of one input over +-3 / tau, the slower edge.

    The other input stands still, so the common source has to follow; junctions of the drawn
    diffusions are counted, whatever the drains drive is not.
    """
    v = EDGE / tau

    def driven(wave: Wave) -> Netlist:
        drive = follows(wave, lambda side: v * side)
        return pair(spec, drive=drive, one_sided=True, options=timed(spec.tail), **conditions)

    # a guess of 50 fC; the time is to fill part of it
    return max(edges(driven, sides(), lambda plot: plot["i(v1)"] / spec.tail, 50e-15 / spec.tail))


def edges(
    driven: Callable[[Wave], Netlist],
    keep: tuple[str, ...],
    level: Callable[[Plot], Tensor],
    span: float,
    points: int = 500,
) -> tuple[float, float]:
    """Seconds until a level stays within 1 % of its operating point, after a step up and one down.

    `span` is a guess of the longer time, cut into `points`; it is tried again until it fits. Levels
    are compared with operating points, not with the end of a step, where a slow part that is not
    over would pass for settled.
    """
    low, high = (
        level(run(driven(((0, side), (1, side))), Analysis("op", keep))[0]) for side in (-1, 1)
    )
    for _ in range(12):
        edge = span / points
        wave = [(0, -1), (span, -1), (span + edge, 1), (2 * span, 1), (2 * span + edge, -1)]
        plot = run(driven(wave), Analysis(f"tran {edge:.6g} {3 * span:.6g} 0 {edge:.6g}", keep))[0]
        time, off = plot["scale"], [(level(plot) - end).abs() > WITHIN for end in (high, low)]
        up, down = (_late(time, off[k], (k + 1) * span, span, edge) for k in (0, 1))
        if span / 8 < max(up, down) < span / 2:
            return up, down
        span = span / 3 if max(up, down) <= span / 8 else span * 2
    raise SpiceError(f"a step did not settle within {span:g} s.")


def timed(current: float) -> str:
    """Tolerances of a transient: a millionth of the current that is switched."""
    return f"reltol=1e-4 gmin=1e-15 abstol={current * 1e-6:.3g} method=gear"


def _late(time: Tensor, off: Tensor, start: float, span: float, edge: float) -> float:
    """The last time after a step at which the level was not yet settled."""
    unsettled = time[off & (time > start) & (time < start + span - edge)]
    return max((unsettled.max() - start - edge / 2).item(), 0.0) if len(unsettled) else 0.0


def noise(spec: Pair, bandwidth: float, **conditions: Any) -> float:
    """Input-referred noise in V rms from 1 Hz to a bandwidth, at balance; loads are noiseless."""
    netlist = pair(spec, drive="0 ac 1", **conditions)
    load = 0.2 / spec.tail
    lines = [line for line in netlist.elements if not line.startswith(("v1 ", "v2 "))]
    lines += [f"rl{k} vdd {node} {load:.6g} noisy=0" for k, node in enumerate("de")]
    lines = [f"{line} noisy=0" if line.startswith(("ra ", "rb ")) else line for line in lines]
    bench = replace(netlist, elements=tuple(lines))
    command = f"noise v(d,e) vd dec 20 1 {bandwidth:.6g}"
    (plot,) = run(bench, Analysis(command, ("inoise_total",)))
    return plot["inoise_total"][-1].item()
