"""Pairs measured: fits find what was put in, and the figures of silicon are found again.

Tolerances of measured figures are half of the last digit that is quoted, unless said otherwise.
"""

import math
from dataclasses import replace

import pytest
import torch

from threshold_gating.hardware import devices, measure
from threshold_gating.hardware.cells import Pair, pair
from threshold_gating.hardware.spice import Analysis, Netlist, SpiceError, run

V = torch.linspace(-0.4, 0.4, 201, dtype=torch.float64)


def test_a_logistic_curve_is_found_again():
    fit = measure.fit(V, torch.sigmoid(17.3 * (V - 0.031)))
    assert fit.tau == pytest.approx(17.3, rel=1e-9)
    assert fit.theta == pytest.approx(0.031, abs=1e-11)
    assert fit.deviation < 1e-11


def test_many_curves_are_fitted_at_once():
    tau = torch.tensor([3.0, 28.0, 200.0], dtype=torch.float64)[:, None]
    theta = torch.tensor([0.05, -0.3, 0.003], dtype=torch.float64)[:, None]
    got = measure.fits(V, torch.sigmoid(tau * (V - theta)))
    assert torch.allclose(got[0], tau[:, 0], rtol=1e-8)
    assert torch.allclose(got[1], theta[:, 0], atol=1e-10)


def test_a_curve_that_does_not_rise_is_no_gate():
    with pytest.raises(ValueError, match="does not rise"):
        measure.fit(V, torch.sigmoid(-20 * V))


def test_a_curve_with_a_shape_is_found_again_and_a_logistic_one_gets_none():
    shape = devices.Shape(0.7, 4.5, 3.4, 1.3)
    g = devices.curve(7.8 * (V - 0.01), shape)
    logistic, own = measure.own_curve(V, g)
    assert logistic.deviation > 0.02
    assert own.deviation < 5e-4  # a tenth of what a shape is for: the search stops early
    _, plain = measure.own_curve(V, torch.sigmoid(20 * V))
    assert plain.shape == devices.LOGISTIC


def test_the_figures_of_a_sky130_pair_are_found_again_at_three_tails(pdk):
    weak, moderate, strong = measure.over_tails(Pair(), (10e-9, 1e-6, 100e-6))
    assert weak.tau == pytest.approx(28.84, abs=0.005)
    assert weak.deviation == pytest.approx(0.0009, abs=5e-5)
    # n = 1 / (tau V_T), at 27 C
    assert 1 / (weak.tau * 8.617333e-5 * 300.15) == pytest.approx(1.340, abs=0.0005)
    assert moderate.tau == pytest.approx(24.03, abs=0.005)
    assert moderate.deviation == pytest.approx(0.0039, abs=5e-5)
    assert strong.tau == pytest.approx(7.83, abs=0.005)
    assert strong.deviation == pytest.approx(0.0289, abs=1e-4)  # 0.02883 here
    for name, fit in zip(("weak", "moderate", "strong"), (weak, moderate, strong), strict=True):
        assert devices.preset(f"sky130-{name}").tau == float(f"{fit.tau:.4g}")


@pytest.mark.parametrize(
    "name", [pytest.param("sky130-weak", marks=pytest.mark.slow), "sky130-strong"]
)
def test_the_curve_of_a_preset_is_within_half_a_percent_of_the_transistors(pdk, name):
    preset = devices.preset(name)
    v, g = measure.transfer(Pair(tail=preset.tail))
    off = (preset.gate(v) - g).abs().max().item()
    assert off < 0.005
    # tau of a preset has four digits: half a unit of the last moves a gate by 0.22 x 1.7e-4.
    assert off == pytest.approx(preset.deviation, abs=4e-5)


def test_tau_of_a_weak_pair_falls_with_temperature(pdk):
    taus = []
    for celsius in (-40, 125):
        made = pair(Pair(), celsius=celsius)
        gates = tuple(line.partition(" ad=")[0] for line in made.elements)
        (plot,) = run(replace(made, elements=gates), Analysis(measure.sweep(), measure.sides()))
        taus.append(measure.fit(plot["scale"], measure.shares(plot)).tau)
    assert taus == pytest.approx([36.4, 22.0], abs=0.05)
    # Junctions, which those figures were taken without, leak into the drains of a hot pair.
    (hot,) = measure.over_temperature(Pair(), (125,))
    assert hot.tau == pytest.approx(21.49, abs=0.005)


def test_a_bipolar_pair_is_logistic_at_37_15_per_volt(pdk):
    fit = measure.fit(*measure.transfer(Pair("sky130", "npn", tail=1e-6)))
    assert fit.tau == pytest.approx(37.15, abs=0.005)
    assert fit.deviation < 1e-4


def test_mismatch_of_a_weak_pair_is_that_of_theory_and_repeats_with_its_seed(pdk):
    first, again, other = (measure.mismatch(Pair(), 3, seed) for seed in (3, 3, 4))
    assert first == again != other
    many = measure.mismatch(Pair(), 100, seed=3)
    # Of 100 draws the standard deviation is known to 7 %: three times that. Theory: 10.98 mV um.
    assert many.sigma_theta * math.sqrt(5) * 1e3 == pytest.approx(10.98, rel=0.21)
    assert many.sigma_tau < 0.009


def test_noise_of_a_weak_pair_is_shot_noise_above_the_flicker(pdk):
    low, high = (measure.noise(Pair(), f) for f in (1e6, 4e6))
    density = (high**2 - low**2) / 3e6
    # Two transistors of half the tail: 2 x 2 q I / gm^2 with gm = I tau.
    shot = 8 * 1.602e-19 / (10e-9 * 28.84**2)
    assert density == pytest.approx(shot, rel=0.1)  # what is left of 1/f, and n


@pytest.mark.slow
def test_a_weak_pair_settles_in_inverse_proportion_to_its_tail(pdk):
    slow, fast = (measure.settling(Pair(tail=tail), 28.84) for tail in (10e-9, 20e-9))
    # Charge is the same but for capacitances that move with the bias; a time step is 1.6 % of it.
    assert slow / fast == pytest.approx(2, rel=0.1)


def test_a_spread_is_the_standard_deviation_of_what_was_drawn(monkeypatch):
    """Curves of known tau and theta in place of ngspice."""
    tau = torch.tensor([20.0, 21.0, 22.0], dtype=torch.float64)
    theta = torch.tensor([0.01, -0.02, 0.03], dtype=torch.float64)
    plot = {"scale": V}
    for tag, a, b in zip(("", "1", "2"), tau, theta, strict=True):
        plot[f"i(v1{tag})"] = 3e-8 * torch.sigmoid(a * (V - b))
        plot[f"i(v2{tag})"] = 3e-8 - plot[f"i(v1{tag})"]
    monkeypatch.setattr(measure, "run", lambda netlist, *analyses: [plot])
    found = measure.mismatch(Pair(), 3)
    # of 3 draws: squares over 2; the fit is exact to 1e-8
    assert found.sigma_theta == pytest.approx(theta.std().item(), rel=1e-6)
    assert found.sigma_tau == pytest.approx(1 / 21, rel=1e-6)


def test_a_pair_settles_to_a_percent_of_its_tail_after_a_step_of_three_over_tau(monkeypatch):
    asked = {}

    def edges(driven, keep, level, guess):
        asked["step"] = driven([(0, -1), (1e-6, 1)]).elements
        asked["level"] = level({"i(v1)": torch.tensor(2e-8), "i(v2)": torch.tensor(0.0)})
        return 2e-7, 3e-7

    monkeypatch.setattr(measure, "edges", edges)
    assert measure.settling(Pair(tail=2e-8), 30.0) == 3e-7  # the slower edge
    assert "vd gp gm pwl(0 -0.1 1e-06 0.1)" in asked["step"]
    assert asked["level"].item() == 1.0  # the whole tail


def test_a_spread_of_one_pair_is_refused():
    with pytest.raises(ValueError, match="2 pairs or more; got 1"):
        measure.mismatch(Pair(), 1)


def test_a_step_is_settled_at_its_operating_point_and_not_where_a_slow_part_is_still_under_way(pdk):
    """Two RC lines: nine tenths of the level come fast, one tenth fifty times as slowly."""

    def driven(wave):
        points = " ".join(f"{t:.9g} {side:g}" for t, side in wave)
        lines = (f"vi a 0 pwl({points})", "r1 a b 1k", "c1 b 0 1p", "r2 a c 50k", "c2 c 0 1p")
        return Netlist("two lines", lines)

    keep = ("v(b)", "v(c)")
    fast = measure.edges(driven, keep, lambda plot: plot["v(b)"] / 2, 1e-8)
    # A step of 2, halved: 1 % is left after ln 100 time constants of 1 ns. A point is 2 % of it.
    assert fast == pytest.approx([1e-9 * math.log(100)] * 2, rel=0.05)
    both = measure.edges(driven, keep, lambda plot: 0.45 * plot["v(b)"] + 0.05 * plot["v(c)"], 1e-8)
    assert both == pytest.approx([50e-9 * math.log(10)] * 2, rel=0.05)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"common": 3.0}, "the common mode in V must be from 0 to 1.8; got 3"),
        ({"supply": 0.3}, "the supply of sky130-binned in V must be from 0.9 to 1.98; got 0.3"),
        ({"decoupling": -1.0}, "the capacitor on the bias line in F must be from 0"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_with_what_can(given, said):
    with pytest.raises(ValueError, match=said):
        Pair(**given)


@pytest.mark.slow
def test_causes_of_mismatch_add_up_as_squares_and_only_the_threshold_is_left_in_strong(pdk):
    weak, strong = (measure.mismatch_parts(Pair(tail=tail), 60) for tail in (1e-8, 1e-4))
    slopes = {"vth0": 3.356e-3, "voff": 7e-3}  # V um, of the models
    for cause, slope in slopes.items():
        # Two transistors; 60 draws know a standard deviation to 9 %: three times that.
        assert weak[cause].sigma_theta == pytest.approx(slope * math.sqrt(2 / 5), rel=0.27)
    # voff shifts the current of weak inversion only; the oxide scales that of strong inversion.
    assert strong["voff"].sigma_theta < weak["voff"].sigma_theta / 4
    assert strong["toxe"].sigma_theta > 0.9 * weak["toxe"].sigma_theta
    assert measure.mismatch_parts(Pair("gf180")) == {}


def test_a_step_that_never_settles_is_an_error_of_the_simulation(monkeypatch):
    def stuck(netlist, analysis):
        """Half of the tail, whatever the wave asks for."""
        return [{"scale": netlist, "level": torch.full_like(netlist, 0.5)}]

    def driven(wave):
        return torch.linspace(0, wave[-1][0] * 1.5, 100, dtype=torch.float64)

    monkeypatch.setattr(measure, "run", stuck)
    ends = iter((0.0, 1.0))

    def level(plot):
        value = next(ends, None)
        return plot["level"] if value is None else torch.tensor(value)

    with pytest.raises(SpiceError, match="did not settle within"):
        measure.edges(driven, ("level",), level, 1e-9)
