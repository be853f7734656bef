"""Branch cells of transistors against their instances."""

import pytest
import torch

from threshold_gating.hardware import cell_error, steering
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
            # A search ends where a step gains a millionth of what is left.
            assert (m.tau, m.theta, m.gain, m.offset) == pytest.approx(p, abs=1e-4)
            assert m.trimmed < 1e-5
            assert m.error > 0.01


def test_silu_of_two_pairs_with_ideal_tails_is_x_sigma_of_tau_v(pdk):
    """Tried before: tau 26.45 per volt to 0.19 % of full scale."""
    cell = Cell("silu", TAXONOMY["silu"], real=False)
    x, y, *_ = cell_error.response(cell)
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
    # beta is 37: 37/38 of an emitter's current is collected, and beta falls a little with it
    assert m.gain == pytest.approx(0.973, abs=0.005)
    assert m.trimmed < 0.0015


def test_mismatch_moves_every_cell_another_way_and_repeats_with_its_seed(pdk):
    cell = Cell("silu", TAXONOMY["silu"], real=False)
    first, again, other = (cell_error.response(cell, 3, seed=seed).y for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Two pairs with thetas of their own: 4.9 mV each is 0.13 of a logit, of 5.3 at full scale.
    assert 0.001 < (first[0] - first[1]).abs().max() / cell.span < 0.15


def test_more_cells_than_one_netlist_holds_are_all_drawn_anew(monkeypatch):
    asked = []

    def response(cell, copies, seed, **conditions):
        asked.append((copies, seed, conditions))
        return cell_error.Response(torch.zeros(2), torch.full((copies, 2), float(seed)), 0.0)

    monkeypatch.setattr(cell_error, "response", response)
    found = cell_error.mismatched(SILU, 45, 2, celsius=85.0)
    assert sum(len(part.y) for part in found) == 45
    assert len({seed for _, seed, _ in asked}) == len(found) == 3
    assert all(conditions == {"celsius": 85.0} for _, _, conditions in asked)
    with pytest.raises(ValueError, match="2 cells or more; got 1"):
        cell_error.mismatched(SILU, 1)


def test_a_class_ab_branch_needs_no_bias_and_draws_less_at_rest(pdk):
    found = []
    for quiet in (0.0, 10e-9):
        cell = Cell("silu", TAXONOMY["silu"], quiet=quiet)
        answer = cell_error.response(cell)
        found.append((cell_error.match(cell, answer.x, answer.y[0]), answer.rest))
    (lifted, at_bias), (match, at_rest) = found
    assert match.error < 0.03
    assert match.trimmed < 0.003
    assert abs(match.offset) < abs(lifted.offset)  # there is no bias that would have to cancel
    assert at_rest < at_bias / 5


@pytest.mark.slow
def test_corners_move_a_cell_less_than_temperature_does(pdk):
    cold, hot = cell_error.over_temperature(SILU, (-40.0, 125.0))
    corners = cell_error.over_corners(SILU, ("ff", "ss"))
    assert cold.tau > 1.1
    assert hot.tau < 0.9
    assert [m.tau for m in corners] == pytest.approx([0.98, 0.97], abs=0.02)
    assert max(m.error for m in corners) < 0.04


@pytest.mark.slow
def test_a_step_of_x_settles_faster_with_more_bias(pdk):
    slow, fast = (
        max(cell_error.steps(Cell("silu", TAXONOMY["silu"], bias=bias))) for bias in (1e-7, 2e-7)
    )
    # Gate charges stay and currents double; the resistors of the gates halve with them.
    assert slow / fast == pytest.approx(2, rel=0.15)


def test_noise_of_a_cell_is_at_least_the_shot_noise_of_its_output(pdk):
    cell = Cell("silu", TAXONOMY["silu"], real=False)
    low, high = (cell_error.noise(cell, f) for f in (1e6, 4e6))
    density = (high**2 - low**2) / 3e6 * (cell.unit * cell.span) ** 2  # A^2 / Hz
    # Between an output that carries the bias as shot noise, and twice the whole current of both.
    shot = 2 * 1.602e-19 * cell.bias
    assert shot / 2 < density < 4 * shot


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tau": 200.0}, "tau of a nfet pair in 1/V must be from"),
        ({"models": "gf180"}, "sky130 transistors, nfet or npn; got gf180 nfet"),
        ({"device": "pfet"}, "got sky130 pfet"),
        ({"width": 1000.0}, "the width of a pair in um must be from 0.42 to 100; got 1000"),
        ({"span": -1.0}, "the span of x must be from"),
        ({"quiet": 1e-8, "supply": 1.5}, "the supply of a class-AB branch in V must be from 1.7"),
        ({"quiet": 1e-8, "bias": 1e-5}, "the bias of a class-AB branch in A must be from 1e-08"),
        ({"quiet": 9e-8, "bias": 2e-8}, "the current at rest in A must be from 1e-09 to 2e-08"),
    ],
)
def test_a_cell_that_no_transistors_make_is_refused_with_what_they_can(given, said):
    with pytest.raises(ValueError, match=said):
        Cell("silu", TAXONOMY["silu"], **given)


def test_no_cells_are_no_netlist():
    with pytest.raises(ValueError, match="the number of cells must be from 1 to 10000; got 0"):
        steering.netlist(SILU, 0)
