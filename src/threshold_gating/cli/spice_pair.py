"""`tg spice pair`: one differential pair, and what ngspice measures of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from threshold_gating.cli.spice_tables import (
    CELSIUS,
    DRAWS,
    TAILS,
    Answer,
    Row,
    amperes,
    conditions,
)
from threshold_gating.hardware import characterise, devices, measure
from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.cells import Pair, describe


def asked(args: argparse.Namespace) -> Pair:
    """The pair that the options describe."""
    # The binned models have no other transistor and no mirror of every size.
    plain = args.transistor == "nfet" and args.tail != "real"
    set_of = args.models or ("sky130-binned" if plain else "sky130")
    tail = amperes(args, "bias", 10e-9)
    spec = Pair(
        set_of, args.transistor, tail=tail, real=args.tail == "real", supply=args.supply or 0
    )
    if args.swing:
        spec.check_swing(args.swing)
    return replace(spec, tail=tail_for(spec, args.tau)) if args.tau else spec


def tail_for(spec: Pair, tau: float) -> float:
    """The tail current at which a pair has a tau, from a sweep of tails; refused where none has."""
    fits = measure.over_tails(spec, TAILS)
    points = [(fit.tau, tail) for fit, tail in zip(fits, TAILS, strict=True)]
    for (high, a), (low, b) in pairwise(points):
        if low <= tau <= high:
            share = (high - tau) / (high - low) if high > low else 0.0
            return float(a * (b / a) ** share)
    low, high = points[-1][0], points[0][0]
    raise ValueError(
        f"tau {tau:g} per volt is not what this pair can do: from {low:.3g} (at {TAILS[-1]:g} A) "
        f"to {high:.4g} (at {TAILS[0]:g} A) at 27 C. A larger tau per unit of x needs more volts "
        "per unit."
    )


class _Found(NamedTuple):
    """What was measured of a pair: its curve with two fits, what moves it, its speed and noise."""

    v: Tensor
    g: Tensor
    fit: measure.Fit
    own: measure.Own
    warm: dict[str, measure.Fit]
    corners: dict[str, measure.Fit]
    spread: measure.Spread
    parts: dict[str, measure.Spread]
    settling: float
    undecoupled: float | None  # settling without the capacitor on the bias line of a real tail
    noise: float

    @property
    def bandwidth(self) -> float:
        """Hz that the noise is taken up to."""
        return characterise.bandwidth(self.settling)


def answer(args: argparse.Namespace, spec: Pair, tell: Any) -> Answer:
    """Measure a pair, in a table and as JSON."""
    found = _measured(args, spec, tell)
    title = f"Differential pair: {describe(spec)}, {args.celsius:g} C"
    rows = [*_curve_rows(found), *_mismatch_rows(found, spec), *_speed_rows(found, spec)]

    def draw(axes: Any) -> None:
        v, g, u = found.v, found.g, found.fit.tau * (found.v - found.fit.theta)
        axes[0].plot(v, g, "k", label="measured")
        axes[0].plot(v, devices.curve(u), "--", label="logistic")
        axes[0].set(xlabel="input (V)", ylabel="share of the tail current")
        axes[1].plot(v, g - devices.curve(u), "--", label="from the logistic curve")
        axes[1].plot(v, g - devices.curve(u, found.own.shape), label="from its own curve")
        axes[1].set(xlabel="input (V)", ylabel="distance")

    return Answer([(title, rows)], _result(found, spec), draw)


def _measured(args: argparse.Namespace, spec: Pair, tell: Any) -> _Found:
    at, draws = conditions(args), args.draws or DRAWS
    v, g = measure.transfer(spec, args.swing or measure.SWING, **at)
    fit, own = measure.own_curve(v, g)
    tell("temperature", 0.2)
    warm = measure.over_temperature(spec, CELSIUS, corner=args.corner)
    names = pdk.chosen(spec.models).corners
    corners = measure.over_corners(spec, names, celsius=args.celsius)
    tell("mismatch", 0.4)
    spread = measure.mismatch(spec, draws, args.seed, **at)
    parts = measure.mismatch_parts(spec, draws, args.seed, **at)
    tell("settling", 0.7)
    settling = measure.settling(spec, fit.tau, **at)
    bare = measure.settling(replace(spec, decoupling=0.0), fit.tau, **at) if spec.real else None
    noise = measure.noise(spec, characterise.bandwidth(settling), **at)
    by_temperature = {f"{t:g}": f for t, f in zip(CELSIUS, warm, strict=True)}
    by_corner = dict(zip(names, corners, strict=True))
    return _Found(v, g, fit, own, by_temperature, by_corner, spread, parts, settling, bare, noise)


def _curve_rows(found: _Found) -> list[Row]:
    fit = found.fit
    return [
        ("tau", f"{fit.tau:.2f}", "1/V", "logistic fit"),
        ("theta", f"{fit.theta * 1e3:.3f}", "mV", ""),
        ("deviation", f"{fit.deviation:.4f}", "", "from the logistic curve, largest"),
        ("deviation", f"{found.own.deviation:.5f}", "", "from the device's own curve, largest"),
        *(("tau", f"{f.tau:.2f}", "1/V", f"at {t} C") for t, f in found.warm.items()),
        *(("tau", f"{f.tau:.2f}", "1/V", f"corner {c}") for c, f in found.corners.items()),
    ]


def _mismatch_rows(found: _Found, spec: Pair) -> list[Row]:
    spread, seen = found.spread, f"{found.spread.pairs} pairs, {spec.models}"
    by_cause = [(part.sigma_theta * 1e3, cause) for cause, part in found.parts.items()]
    logits = found.fit.tau * spread.sigma_theta
    return [
        ("sigma(theta)", f"{spread.sigma_theta * 1e3:.2f}", "mV", seen),
        *(("sigma(theta)", f"{mv:.2f}", "mV", f"of {cause} alone") for mv, cause in by_cause),
        ("sigma(tau)", f"{spread.sigma_tau:.2%}", "", seen),
        ("tau sigma(theta)", f"{logits:.4f}", "", "what a network sees"),
    ]


def _speed_rows(found: _Found, spec: Pair) -> list[Row]:
    watts = spec.tail * spec.supply
    rows: list[Row] = [
        ("settling", f"{found.settling * 1e9:.4g}", "ns", "to 1 % of the tail, no load")
    ]
    if found.undecoupled is not None:
        without = f"without the {spec.decoupling * 1e12:g} pF on the bias line"
        rows += [
            ("settling", f"{found.undecoupled * 1e9:.4g}", "ns", without),
            ("energy", f"{watts * found.undecoupled * 1e15:.3g}", "fJ", without),
        ]
    band = f"input-referred, 1 Hz to {found.bandwidth:.3g} Hz"
    return [
        *rows,
        ("noise", f"{found.noise * 1e3:.3f}", "mV rms", band),
        ("power", f"{watts * 1e9:.4g}", "nW", "of the tail"),
        ("energy", f"{watts * found.settling * 1e15:.3g}", "fJ", "tail x supply x settling"),
        ("gate area", f"{spec.area:g}", "um^2", "of the two transistors"),
    ]


def _result(found: _Found, spec: Pair) -> dict[str, Any]:
    return {
        "pair": describe(spec),
        **found.fit._asdict(),
        "shape": found.own.shape._asdict(),
        "own_deviation": found.own.deviation,
        "settling": found.settling,
        "noise": found.noise,
        "sigma_theta": found.spread.sigma_theta,
        "sigma_tau": found.spread.sigma_tau,
        "sigma_theta_of": {cause: part.sigma_theta for cause, part in found.parts.items()},
        "tau_at": {t: f.tau for t, f in found.warm.items()},
    }
