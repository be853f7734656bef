"""Presets: every number has a unit and a source, and curves are those of a pair."""

import dataclasses
import json

import pytest
import torch

from threshold_gating.hardware import devices

ALL = list(devices.presets().values())


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.name)
def test_every_number_has_unit_source_and_models(preset):
    for name in devices.number_names():
        assert all(preset.sources[name]), name


@pytest.mark.parametrize("missing", ["unit", "source", "models"])
@pytest.mark.parametrize("name", ["tau", "sigma_theta", "energy"])
def test_a_number_without_its_source_is_refused(tmp_path, name, missing):
    rows = {p.name: devices.to_dict(p) for p in ALL}
    del rows["sky130-weak"][name][missing]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=f"sky130-weak: {name} has no {missing}"):
        devices.presets(tmp_path / "p.json")


def test_a_file_of_presets_reads_back_as_it_was(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({p.name: devices.to_dict(p) for p in ALL}))
    assert list(devices.presets(tmp_path / "p.json").values()) == ALL


def test_a_preset_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALL[0].tau = 1.0
    assert len(set(ALL)) == len(ALL)


def test_the_curve_without_a_shape_is_the_logistic_one():
    u = torch.linspace(-30, 30, 601, dtype=torch.float64)
    assert torch.equal(devices.curve(u), torch.sigmoid(u))


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.name)
def test_a_curve_is_odd_about_a_half_monotone_and_finite_with_its_gradient(preset):
    v = torch.cat([torch.linspace(-2, 2, 4001), torch.tensor([-1e30, 1e30])]).double()
    v.requires_grad_()
    g = preset.gate(v)
    # Both sides are rounded apart from each other, by units in the last place of one.
    assert (g + preset.gate(-v) - 1).abs().max() < 1e-14
    assert (g[:4001].diff() >= 0).all()
    (dv,) = torch.autograd.grad(g.sum(), v)
    assert dv.isfinite().all()
    assert (dv >= 0).all()


def test_theta_moves_the_curve_and_tau_stretches_it():
    preset = devices.preset("sky130-strong")
    v = torch.linspace(-0.3, 0.3, 61, dtype=torch.float64)
    assert torch.allclose(preset.gate(v, theta=0.05), preset.gate(v - 0.05), rtol=0, atol=1e-15)
    doubled = preset.gate(v, tau=2 * preset.tau)
    assert torch.allclose(doubled, preset.gate(2 * v), rtol=0, atol=1e-15)


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.name)
def test_tau_over_temperature_goes_through_what_was_measured(preset):
    for celsius, tau in preset.temperature:
        assert preset.tau_at(celsius) == pytest.approx(tau, rel=1e-12)
    between = preset.tau_at(60)
    assert preset.temperature[-1][1] < between < preset.tau_at(27)


def test_tau_between_two_temperatures_is_that_of_one_over_kelvin():
    ends = tuple((celsius, 1e4 / (celsius + 273.15)) for celsius in (-40.0, 125.0))
    pair = dataclasses.replace(devices.preset("sky130-weak"), temperature=ends)
    assert pair.tau_at(27.0) == pytest.approx(1e4 / 300.15, rel=1e-12)


def test_a_temperature_that_was_not_measured_is_refused_with_the_range():
    with pytest.raises(ValueError, match=r"from -40 to 125 C; 150 C is outside"):
        devices.preset("sky130-weak").tau_at(150)


def test_a_preset_that_is_not_there_is_answered_with_the_names():
    with pytest.raises(ValueError, match=r"did you mean 'sky130-weak'\? There are sky130-weak, "):
        devices.preset("sky130-week")


def test_a_tau_that_is_of_no_such_pair_is_refused_with_what_the_pair_has():
    pair = devices.preset("sky130-weak")
    v = torch.zeros(1)
    for tau in (-5.0, 0.0, 1000.0, float("nan")):
        with pytest.raises(ValueError, match=r"28\.84 per volt.* is not of this pair.*more volts"):
            pair.gate(v, tau=tau)
    assert pair.gate(v, tau=pair.tau_at(125)).item() == 0.5
