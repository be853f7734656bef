"""Conversions of four designs, counted by hand beside."""

import pytest
import torch
from torch import nn

from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.conversions import trace
from threshold_gating.hardware.counting import count


def net():
    return nn.Sequential(
        nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4)
    )


@pytest.fixture(scope="module")
def run():
    return trace(net(), torch.randn(3, 10))


def test_digital_activations_convert_every_column_of_every_tile(run):
    found = count(run, Assumptions(rows=16, columns=8), "digital")
    assert found.adc == {"0": 3 * 20 * 1, "2": 3 * 30 * 2, "4": 3 * 4 * 2}
    assert found.dac == {"0": 3 * 10 * 3, "2": 3 * 20 * 4, "4": 3 * 30 * 1}
    assert dict(found.activations) == {"0": 60, "2": 90}
    assert not found.decisions
    assert found.converted_tiles == 3 + 2 * 4 + 2


def test_analog_gates_leave_the_ends_when_layers_fit_a_tile(run):
    found = count(run, Assumptions(), "analog")
    assert {k: v for k, v in found.adc.items() if v} == {"4": 12}
    assert {k: v for k, v in found.dac.items() if v} == {"0": 30}
    assert dict(found.decisions) == {"0": 60 * 2, "2": 90 * 2}  # K = 2: two tails each
    assert found.gates == 2 * (20 + 30)


def test_a_sum_over_tiles_is_converted_unless_it_is_on_a_wire(run):
    tiles = Assumptions(rows=16)
    analog, wired = (count(run, tiles, design) for design in ("analog", "analog+"))
    # the first layer fits; its gate drives the second, whose two tiles are added digitally
    assert {k: v for k, v in analog.adc.items() if v} == {"2": 3 * 30 * 2, "4": 3 * 4 * 2}
    assert {k: v for k, v in analog.dac.items() if v} == {"0": 30, "4": 90}
    assert dict(analog.activations) == {"2": 90}
    assert {k: v for k, v in wired.adc.items() if v} == {"4": 12}
    digital = count(run, tiles, "digital+")
    assert digital.adc == {"0": 60, "2": 90, "4": 12}
    assert (analog.converted_tiles, digital.converted_tiles) == (2 + 2, 3)
    with pytest.raises(ValueError, match="no design 'wired'; there are digital"):
        count(run, tiles, "wired")


class Joined(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 6), norm

    def forward(self, x):
        y = torch.relu(self.a(x))
        return y + self.b(self.norm(y))


def test_a_digital_norm_costs_conversions_in_and_out():
    plain, normed = (
        count(trace(Joined(norm), torch.randn(3, 4)), Assumptions(), "analog")
        for norm in (nn.Identity(), nn.LayerNorm(6))
    )
    assert (sum(plain.adc.values()), sum(plain.dac.values())) == (18, 12)
    # y is converted once for the norm, b gets DACs, and their sum is converted
    assert (sum(normed.adc.values()), sum(normed.dac.values())) == (18 + 18, 12 + 18)
