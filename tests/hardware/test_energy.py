"""The budget of a network: sums of its figures, at one node, with sources."""

import json

import pytest
import torch
from torch import nn

from threshold_gating.hardware import devices
from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.counting import DESIGNS
from threshold_gating.hardware.energy import energy


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    return energy(net, torch.randn(2, 3, 8, 8))


def test_a_total_is_counts_times_figures(report):
    f = {name: figure.value for name, figure in report.assumptions.figures().items()}
    conv, linear = 2 * 36 * 8 * 1, 2 * 5 * 3  # 27 rows are one tile of 128, 288 are three
    parts = report.energies["digital"]["regression"]
    assert parts["ADC"].value == pytest.approx((conv + linear) * f["ADC, regression"])
    assert parts["DAC"].value == pytest.approx((2 * 36 * 27 + 2 * 288) * f["DAC"])
    assert parts["activation units"].value == pytest.approx(2 * 36 * 8 * f["activation unit"])
    analog = report.energies["analog"]["median"]
    assert analog["ADC"].value == pytest.approx(linear * f["ADC, survey median"])
    assert analog["gates"].value == pytest.approx(2 * 2 * 36 * 8 * f["gate"])
    assert report.total("analog").value == pytest.approx(sum(p.value for p in analog.values()))


def test_layers_add_up_to_the_whole(report):
    for design in DESIGNS:
        layers = report.layer_energies[design].values()
        summed = sum(part.value for parts in layers for part in parts.values())
        assert summed == pytest.approx(report.total(design).value)


def test_an_activation_before_the_first_layer_is_in_the_sum():
    found = energy(nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 8))
    unit = found.assumptions.figures()["activation unit"].value
    for design in DESIGNS:
        layers = found.layer_energies[design]
        assert layers["(inputs)"]["activation units"].value == pytest.approx(3 * 8 * unit)
        summed = sum(part.value for parts in layers.values() for part in parts.values())
        assert summed == pytest.approx(found.total(design).value)


def test_areas_are_converters_drivers_cells_and_gates(report):
    f = {name: figure.value for name, figure in report.assumptions.figures().items()}
    digital, analog = report.areas["digital"], report.areas["analog"]
    assert digital["ADC"].value == pytest.approx((1 + 3) * f["ADC area"])
    assert digital["DAC"].value == pytest.approx((27 + 288) * f["DAC area"])
    assert digital["crossbar"].value == pytest.approx(2 * (27 * 8 + 288 * 5) * f["cell area"])
    assert analog["ADC"].value == pytest.approx(3 * f["ADC area"])
    assert analog["gates"].value == pytest.approx(2 * 8 * f["gate area"])


def test_cells_cost_their_activity_longer_in_front_of_a_gate():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(5, 4)

    def macs(layer, x):  # times V^2 and G as shares of the largest
        w = layer.weight.detach().abs()
        share = x.square().mean() / x.square().max() * w.mean() / w.max()
        return (len(x) * w.numel() * share).item()

    first, last = macs(net[0], x), macs(net[2], net[:2](x).detach())
    report = energy(net, x)
    f = {name: figure.value for name, figure in report.assumptions.figures().items()}
    digital, analog = (
        report.energies[d]["median"]["crossbar"].value for d in ("digital", "analog")
    )
    converted, gated = f["crossbar, converted"], f["crossbar, gated"]
    assert digital == pytest.approx((first + last) * converted, rel=1e-5)  # float32 here
    # A gate reads the first layer, and the ADC at the end the last.
    assert analog == pytest.approx(first * gated + last * converted, rel=1e-5)


def test_96_tiles_share_two_activation_units():
    net = nn.Sequential(nn.Linear(130, 4), nn.ReLU())
    for rows, units in ((2, 2), (1, 4)):  # 65 and 130 tiles
        settings = Assumptions(rows=rows)
        areas = energy(net, torch.randn(2, 130), settings).areas["digital"]
        unit = settings.figures()["activation unit area"].value
        assert areas["activation units"].value == pytest.approx(units * unit)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DAC", 6 * 4e-3 * 100e-9 / 1024 * 1e12),  # 1024 drivers take 4 mW; 6 steps of 100 ns
        ("activation unit", 0.52e-3 / 2 / 1.2e9 * 1e12),  # two take 0.52 mW at 1.2 GHz
        ("crossbar, converted", 0.2**2 * 25e-6 * 100e-9 * 1e12),
        ("DAC area", 63 * 170 / 1024),
        ("cell area", 200 / (8 * 128 * 128)),
        ("activation unit area", 600 / 2),
    ],
)
def test_figures_are_what_isaacs_table_says_of_one_part(name, value):
    assert Assumptions().figures()[name].value == pytest.approx(value)


def test_every_figure_is_at_the_node_and_has_unit_and_source():
    for node in (32.0, 130.0):
        for name, figure in Assumptions(node=node).figures().items():
            assert figure.node == node, name
            assert figure.unit in ("pJ", "um^2")
            assert figure.source
            assert figure.rate is not None or "area" in name


def test_a_gate_is_the_presets_and_scaled_from_its_own_process():
    pair = devices.preset("sky130-weak")
    settings = Assumptions(node=130, preset="sky130-weak")
    assert settings.figures()["gate"].value == pytest.approx(pair.energy * 1e12)
    smaller = Assumptions(node=32, preset="sky130-weak").figures()["gate"]
    assert smaller.value == pytest.approx(pair.energy * 1e12 * 32 / 130)
    assert "at 130 nm" in smaller.source
    area = Assumptions(node=65, preset="sky130-weak").figures()["gate area"]
    assert area.value == pytest.approx(pair.area / 4)


def test_a_slow_gate_keeps_its_crossbar_on():
    slow, fast = (
        Assumptions(preset=name).figures()["crossbar, gated"].value
        for name in ("sky130-weak", "sky130-strong")
    )
    times = devices.preset("sky130-weak").settling / devices.preset("sky130-strong").settling
    assert slow / fast == pytest.approx(times)
    assert times > 1


def test_the_text_fits_and_names_every_figure_its_node_and_what_is_missing(report):
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    for name in (*report.assumptions.figures(), "Not counted: memories", "32 nm", "1.2 GHz"):
        assert name in text


def test_json_has_the_figures_with_their_sources(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert found["layers"][0]["adc"] == {"digital": 576, "digital+": 576, "analog": 0, "analog+": 0}
    assert all(f["source"] and f["node"] == 32 for f in found["figures"].values())
    assert (
        found["energies"]["digital"]["low"]["ADC"] < found["energies"]["digital"]["median"]["ADC"]
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"node": 1}, "from 3 to 350 nm; got 1"),
        ({"rows": 0}, "rows must be whole and from 1 to"),
        ({"adc_bits": 4}, "5 to 16 bits; got 4"),
        ({"adc_bits": 40}, "4 to 16 whole bits; got 40"),
        ({"dac_bits": 0}, "dac_bits must be whole and from 1 to 16; got 0"),
        ({"g_max": -1e-6}, "g_max must be from 1e-12 to 1; got -1e-06"),
        ({"volts": float("nan")}, "volts must be from 0.0001 to 10; got nan"),
        ({"read": 0}, "read must be from 1e-10"),
        ({"preset": "sky130-wek"}, "did you mean 'sky130-weak'"),
    ],
)
def test_bad_settings_are_refused_with_the_range_that_works(given, says):
    with pytest.raises(ValueError, match=says):
        Assumptions(**given)


@pytest.mark.parametrize("given", [{"rows": 1.5}, {"dac_bits": 3.5}, {"columns": 0}])
def test_what_is_counted_must_be_whole(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} must be whole and from 1"):
        Assumptions(**given)
