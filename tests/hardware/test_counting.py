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


def busy(totals):
    return {k: v for k, v in totals.items() if v}


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(64)])
def test_a_tile_that_a_converter_reads_is_on_as_long_as_the_converter(norm):
    run = trace(nn.Sequential(nn.Linear(64, 64), norm), torch.randn(4, 64))
    digital, analog = (count(run, Assumptions(), design) for design in ("digital", "analog"))
    assert digital.adc == analog.adc == {"0": 256}
    assert analog.crossbar == digital.crossbar
    assert not analog.gated


class Skipped(nn.Module):
    """A layer that a gate reads; with `both`, a converter reads it, too."""

    def __init__(self, both):
        super().__init__()
        self.a, self.b, self.both = nn.Linear(4, 6), nn.Linear(6, 6), both

    def forward(self, x):
        y = self.a(x)
        z = self.b(torch.relu(y))
        return y + z if self.both else z


def test_a_gate_reads_a_tile_for_as_long_as_it_settles_unless_a_converter_does_too():
    for both in (False, True):
        run = trace(Skipped(both), torch.randn(3, 4))
        a, b = (n.product.macs * n.product.activity for n in run.nodes if n.product)
        found = count(run, Assumptions(), "analog")
        assert busy(found.gated) == ({} if both else {"a": a})
        assert busy(found.crossbar) == ({"a": a, "b": b} if both else {"b": b})


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.f, self.p = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x):
        return x + self.p(torch.relu(self.f(self.norm(x))))


def test_a_residual_stream_is_converted_by_the_layer_that_was_added_last():
    run = trace(nn.Sequential(nn.Linear(8, 16), *map(Block, (16, 16, 16))), torch.randn(4, 8))
    found = count(run, Assumptions(), "analog")
    assert busy(found.adc) == {"0": 64, "1.p": 64, "2.p": 64, "3.p": 64}
    assert found.converted_tiles == 4
    assert found.gates == 3 * 16 * 2  # a gate in each block


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(4, 10), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(torch.cat([self.a(x), self.b(x)], -1))


def test_layers_side_by_side_have_converters_each():
    found = count(trace(Beside(), torch.randn(3, 4)), Assumptions(), "analog")
    assert busy(found.adc) == {"a": 18, "b": 30}
    assert found.converted_tiles == 2


def test_gates_of_a_cell_are_on_the_chip_once_for_all_steps():
    one, seven = (
        count(trace(nn.LSTM(3, 4), torch.randn(steps, 2, 3)), Assumptions(), "analog").gates
        for steps in (2, 7)
    )
    assert one == seven == 4 * (3 + 2)  # three sigmoids and two tanh of one tail each


def test_a_state_of_zero_needs_no_driver_where_states_are_analog():
    run = trace(nn.LSTM(8, 16), torch.randn(7, 2, 8))
    digital, analog = (count(run, Assumptions(), design) for design in ("digital", "analog"))
    assert digital.dac == {"weight_ih_l0": 7 * 2 * 8, "weight_hh_l0": 7 * 2 * 16}
    assert busy(analog.dac) == {"weight_ih_l0": 7 * 2 * 8}
