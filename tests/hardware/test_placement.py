"""Which sites are analog, which layers are on crossbars, and what cannot be placed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.hardware.analog import simulate
from threshold_gating.hardware.crossbar import Crossbar


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 3), nn.ReLU()),
        torch.randn(8, 4),
    )
    return tg.convert(model, inputs=x), x


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": []}, r"only is a name or pattern of sites, or a list of some; got \[\]"),
        ({"only": 3}, "or a list of some; got 3"),
        ({"only": ["1", 3]}, "or a list of some"),
        ({"only": "re:("}, r"'re:\(' is no pattern"),
        ({"only": ["1", "nope"]}, "only='nope' matches no site; there are '1', '3'"),
        *(({"volts": {"*": v}}, "volts per unit, above 0") for v in (-1.0, 0.0, math.nan, "1")),
        ({"volts": {"1": 1e9}}, "beyond the rail of 0.9 V; up to .* would work"),
        ({"crossbar": Crossbar(adc_bits={"nope": 6})}, "'nope', which is no layer; there are '0'"),
    ],
)
def test_what_fits_no_place_is_refused_with_the_places_there_are(case, given, said):
    gated, x = case
    with pytest.raises(ValueError, match=said):
        simulate(gated, "sky130-weak", inputs=x, **given)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_inputs_that_are_no_numbers_are_refused_at_the_first_site_that_sees_them(case, bad):
    gated, x = case
    x = torch.cat([x, torch.full((1, 4), bad)])
    with pytest.raises(ValueError, match="simulate: 1 saw NaN 6 times in calibration"):
        simulate(gated, "sky130-weak", inputs=x)


def test_a_network_without_layers_has_no_crossbar():
    x = torch.randn(2, 3)
    gated = tg.convert(nn.Sequential(nn.ReLU()), inputs=x)
    with pytest.raises(ValueError, match="no layer for a crossbar: no Linear, Conv1d"):
        simulate(gated, "sky130-weak", inputs=x, crossbar=Crossbar())


def test_a_recurrent_network_computes_its_devices_once_a_run(monkeypatch):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for k in range(x.shape[1]):
                h = self.cell(x[:, k], h)
            return h

    torch.manual_seed(0)
    x = torch.randn(2, 5, 3)
    chips = simulate(tg.convert(Cell(), inputs=x), "sky130-weak", inputs=x)
    gate = next(iter(chips.body.gates()))
    made = []
    plain = type(gate)._analog
    monkeypatch.setattr(
        type(gate), "_analog", lambda self, *args: made.append(self.name) or plain(self, *args)
    )
    chips.chip(0)(x)
    assert sorted(made) == sorted(g.name for g in chips.body.gates())  # not five times each
    assert all(g.known is None for g in chips.body.gates())


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.a = nn.Conv1d(4, 16, 3, padding=1), nn.ReLU()

    def forward(self, x):
        return F.relu(self.a(self.conv(x).transpose(1, 2)) - 0.1)


@pytest.mark.parametrize("cells", [None, Crossbar()])
@pytest.mark.parametrize(
    ("model", "shape", "channel", "neuron"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), (3, 6, 5), (8,), (8, 6, 5)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), (2, 3, 6, 5), (8,), (8, 6, 5)),
        (Turned(), (2, 4, 50), (16,), (50, 16)),
        (nn.Sequential(nn.Linear(3, 7), nn.SiLU()), (2, 5, 3), (7,), (5, 7)),
    ],
)
def test_a_channel_is_where_the_layer_put_it(model, shape, channel, neuron, cells):
    """Without a batch, and behind a transposition, of modules and of calls."""
    x = torch.randn(shape)
    gated = tg.convert(model, inputs=x)
    for share, want in (("channel", channel), ("neuron", neuron)):
        chips = simulate(gated, "sky130-weak", inputs=x, share=share, crossbar=cells)
        assert {row.group for row in chips.report().sites} == {want}
        assert chips(x).shape == (1, *gated(x).shape)
