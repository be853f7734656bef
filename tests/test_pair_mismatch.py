"""Ways to read theta off a curve: alike where it is logistic, apart where it is not."""

import math

import pytest
import torch

from experiments import pair_mismatch
from threshold_gating.hardware import devices, measure
from threshold_gating.hardware.cells import Pair

V = torch.linspace(-0.4, 0.4, 81, dtype=torch.float64)
THETA = torch.tensor([-0.01, 0.0, 0.004], dtype=torch.float64)


@pytest.mark.parametrize("way", pair_mismatch.WAYS)
def test_every_way_finds_the_theta_of_a_logistic_curve(way):
    g = torch.sigmoid(28.84 * (V - THETA[:, None]))
    # A crossing between two points 10 mV apart is a line in place of a curve.
    assert pair_mismatch.WAYS[way](V, g) == pytest.approx(THETA, abs=5e-5)


def test_log_odds_at_zero_see_less_of_a_shift_where_the_centre_is_flat():
    strong = devices.preset("sky130-strong")
    g = devices.curve(strong.tau * (V - THETA[:, None]), strong.shape)
    crossing, zero = pair_mismatch.crossing(V, g), pair_mismatch.at_zero(V, g)
    assert crossing == pytest.approx(THETA, abs=5e-5)
    slope, rise, knee, bend = strong.shape
    flat = slope + 2 * rise / (1 + math.exp(bend * knee))  # of the log odds, at the centre
    assert 0.8 < flat < 0.9
    assert zero[0] / THETA[0] == pytest.approx(flat, rel=0.002)  # 10 mV is near the centre


def test_the_spread_of_all_pairs_is_told_in_millivolts_times_micrometres(monkeypatch, capsys):
    """Draws with a known spread in place of ngspice; each seed has its own."""

    def mismatched(spec, pairs, seed, **conditions):
        generator = torch.Generator().manual_seed(seed)
        theta = 5e-3 * torch.randn(pairs, 1, generator=generator, dtype=torch.float64)
        return V, torch.sigmoid(20 * (V - theta))

    monkeypatch.setattr(measure, "mismatched", mismatched)
    pair_mismatch.tabulate("x", {"a pair": (Pair(width=4.0, length=1.0), ())})
    rows = capsys.readouterr().out.splitlines()[1:6]
    # 5 mV x 2 um; 2000 draws know it to 1.6 %, and 5 % are three of those.
    assert [float(row.split()[-1]) for row in rows] == pytest.approx([10.0] * 5, rel=0.05)
