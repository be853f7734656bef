"""Branch cells of transistors against their instances."""

import pytest
import torch

from threshold_gating.hardware import cell_error
from threshold_gating.hardware.measure import least_squares
from threshold_gating.hardware.steering import Cell
from threshold_gating.taxonomy import TAXONOMY

SILU = Cell("silu", TAXONOMY["silu"])


def test_a_trim_that_was_put_in_is_found_again():
    x = torch.linspace(-SILU.span, SILU.span, 81, dtype=torch.float64)
    wanted = [(1.2, 0.1, 0.9, 0.05), (0.8, -0.3, 1.1, -0.02)]
    rows = [p[2] * (x * torch.sigmoid(p[0] * (x - p[1]))) + p[3] for p in wanted]
    alone = [cell_error.match(SILU, x, y) for y in rows]
    together = cell_error.matches(SILU, cell_error.Response(x, torch.stack(rows), 0.0))
    for found in (alone, together):
        for m, p in zip(found, wanted, strict=True):
            assert (m.tau, m.theta, m.gain, m.offset) == pytest.approx(p, abs=1e-4)
            assert m.trimmed < 1e-5
            assert m.error > 0.01


def test_silu_of_two_pairs_with_ideal_tails_is_x_sigma_of_tau_v(pdk):
    """Tried before: tau 26.45 per volt to 0.19 % of full scale."""
    cell = Cell("silu", TAXONOMY["silu"], real=False)
    x, y, _ = cell_error.response(cell)
    v = x / cell.span * cell.swing
    (tau,) = least_squares(lambda p: x * torch.sigmoid(p[0] * v) - y[0], [26.0])
    # One gate moves here, then both did: the source moves too, and n with it.
    assert tau.item() == pytest.approx(26.45, abs=0.3)
    off = (x * torch.sigmoid(tau * v) - y[0]).abs().max() / cell.span
    assert off.item() == pytest.approx(0.0019, abs=3e-4)


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("silu", 0.03),
        pytest.param("tanh", 0.04, marks=pytest.mark.slow),
        pytest.param("mish", 0.03, marks=pytest.mark.slow),
    ],
)
def test_cells_with_real_tails_are_their_instances_within_a_few_percent(pdk, key, limit):
    cell = Cell(key, TAXONOMY[key])
    answer = cell_error.response(cell)
    m = cell_error.match(cell, answer.x, answer.y[0])
    assert m.error < limit
    assert m.trimmed < 0.02
    # Two tails, four references and copies of 100 nA each, more of them where K = 3.
    assert 7e-7 < answer.current < 1.2e-6


@pytest.mark.slow
def test_relu_is_as_sharp_as_the_swing_of_the_pair_lets_it_be(pdk):
    errors = []
    for swing in (0.2, 0.4):
        cell = Cell("relu", TAXONOMY["relu"], swing=swing, real=False)
        answer = cell_error.response(cell)
        errors.append(cell_error.match(cell, answer.x, answer.y[0]).error)
        sharpest = 0.2785 / (swing * cell.tau)  # max of relu(x) - x sigma(tau x), at the full scale
        assert errors[-1] == pytest.approx(sharpest, abs=0.005)  # tau moves with the branch
    assert errors[1] < errors[0]


def test_a_bipolar_cell_loses_base_current_but_keeps_the_shape(pdk):
    cell = Cell("silu", TAXONOMY["silu"], real=False, device="npn")
    answer = cell_error.response(cell)
    m = cell_error.match(cell, answer.x, answer.y[0])
    assert m.gain == pytest.approx(0.973, abs=0.005)  # beta is 37
    assert m.trimmed < 0.0015


def test_mismatch_moves_every_cell_another_way_and_repeats_with_its_seed(pdk):
    cell = Cell("silu", TAXONOMY["silu"], real=False)
    first, again, other = (cell_error.response(cell, 3, seed=seed).y for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Two pairs with thetas of their own: 4.9 mV each is 0.13 of a logit, of 5.3 at full scale.
    assert 0.001 < (first[0] - first[1]).abs().max() / cell.span < 0.15
