"""Presets are assembled from measurements, and every number says which."""

import pytest
import torch

from threshold_gating.hardware import characterise, devices, measure
from threshold_gating.hardware.cells import Pair
from threshold_gating.hardware.measure import Fit, Own, Spread


@pytest.fixture
def measured(monkeypatch):
    """Measurements with known answers in place of ngspice."""
    v = torch.linspace(-0.4, 0.4, 81, dtype=torch.float64)
    answers = {
        "transfer": (v, torch.sigmoid(20 * v)),
        "own_curve": (Fit(20.00004, 0.0, 0.01), Own(devices.Shape(0.9, 0.1, 1.0, 1.0), 0.00123456)),
        "over_temperature": [Fit(30 - k, 0.0, 0.0) for k in range(len(measure.TEMPERATURES))],
        "mismatch": Spread(10, 0.004, 0.002),
        "settling": 2e-7,
        "noise": 3e-4,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(measure, name, lambda *a, answer=answer, **k: answer)
    monkeypatch.setattr(characterise, "version", lambda: "ngspice-0")
    return characterise.measured_preset("made-up", Pair(tail=1e-8), pairs=10)


def test_a_preset_holds_what_was_measured(measured):
    assert measured.tau == 20.0
    assert measured.deviation == 0.001235
    assert measured.sigma_theta == 0.004
    assert measured.temperature[0] == (-40.0, 30)
    assert measured.energy == pytest.approx(1e-8 * 1.8 * 2e-7, rel=1e-3)
    assert measured.area == 2 * 5 * 1 + 5 * 4


def test_every_number_names_its_unit_its_run_and_its_models(measured):
    assert set(measured.sources) == set(devices.number_names())
    assert devices.from_dict(devices.to_dict(measured)) == measured
    assert "10 pairs, seed 1" in measured.sources["sigma_theta"].source
    assert "binned" in measured.sources["tau"].models
    assert "continuous" in measured.sources["settling"].models  # a real tail has other sizes
    assert "f{" not in str(measured.sources)


def test_the_bandwidth_is_that_of_a_pole_which_settles_in_time():
    f = characterise.bandwidth(1e-6)
    assert torch.exp(torch.tensor(-2 * torch.pi * f * 1e-6)).item() == pytest.approx(0.01)


def test_the_presets_that_ship_are_those_of_the_command():
    shipped = devices.presets()
    assert list(shipped) == list(characterise.PRESETS)
    for name, spec in characterise.PRESETS.items():
        assert shipped[name].tail == spec.tail
        assert shipped[name].supply == spec.supply


def test_a_preset_that_is_not_one_of_them_is_refused():
    with pytest.raises(ValueError, match="no preset 'sky130-odd'; there are sky130-weak, "):
        characterise.measured(["sky130-odd"])
