"""What counts as a stuck channel: the rule, on values that a gate is given."""

import math

import pytest
import torch

import threshold_gating as tg
from threshold_gating.training import health
from threshold_gating.training.health import Health, Rule, look, scale_of

STEP = tg.TG(math.inf, 0.0, (0, 0), (0, 1))


def seen(t, x, rule=None):
    return look(t, x, 1, scale_of(t), rule or Rule())


@pytest.mark.parametrize(
    ("init", "steepest"),
    [("relu", 1.0), ("sigmoid", 0.25), ("tanh", 1.0), ("hardtanh", 1.0), ("hardsigmoid", 1 / 6)],
)
def test_the_steepest_slope_is_that_of_the_function(init, steepest):
    assert scale_of(tg.TAXONOMY[init]) == pytest.approx(steepest, rel=1e-5)


def test_the_steepest_slope_of_silu_is_where_calculus_has_it():
    x = torch.linspace(2, 3, 100_001, dtype=torch.float64)
    g = torch.sigmoid(x)
    assert scale_of(tg.TAXONOMY["silu"]) == pytest.approx((g + x * g * (1 - g)).max().item(), 1e-5)


def test_the_share_of_flat_values_is_counted_for_each_channel():
    x = torch.linspace(-8, 8, 1001).unsqueeze(1) + torch.tensor([0.0, -20.0, 20.0])
    relu = seen(tg.TAXONOMY["relu"], x)
    assert relu.flat.tolist() == pytest.approx([501 / 1001, 1.0, 0.0])
    assert relu.level.tolist() == [0.0, 0.0, 0.0]
    sigmoid = seen(tg.TAXONOMY["sigmoid"], x)
    edge = math.log(0.25 / 0.0025)  # where the slope is 0.0025 of 1, about
    assert sigmoid.flat[0].item() == pytest.approx(1 - edge * 1.3 / 8, abs=0.02)
    assert sigmoid.flat[1:].tolist() == [1.0, 1.0]
    assert sigmoid.level.tolist() == pytest.approx([0.5, 0.0, 1.0], abs=2e-2)


def test_a_step_is_flat_everywhere_and_stuck_only_if_its_output_is():
    x = torch.randn(300, 3) + torch.tensor([0.0, -50.0, 50.0])
    assert seen(STEP, x).flat.tolist() == [0.0, 1.0, 1.0]


def test_what_is_not_finite_is_not_called_flat():
    x = torch.full((4, 1), math.nan)
    assert seen(tg.TAXONOMY["relu"], x).flat.tolist() == [0.0]


def test_a_channel_is_told_of_after_enough_observations_and_values():
    x = torch.randn(100, 2) + torch.tensor([0.0, -50.0])
    one, state = seen(tg.TAXONOMY["relu"], x), Health(Rule(patience=2, values=256))
    found = [state.judge("act", one, step) for step in (10, 20, 30, 40)]
    assert [len(f) for f in found] == [0, 0, 1, 0]  # 300 values, and told of once
    assert found[2] == [health.Stuck(30, "act", 1, "dead", 300)]
    assert state.stuck("act") == 1
    said = health.described(found[2], one.axis)
    assert said.startswith("step 30: act: channel 1 (axis 1) is dead: at least 300 values")


@pytest.mark.parametrize(("values", "alarms"), [(3000, 0), (256, 1)])
def test_sparse_channels_are_not_called_dead_before_enough_values_were_seen(values, alarms):
    """64 channels of ReLU, each open for one value in a hundred; 20 observations of 64 values."""
    assert Rule().values == 3000
    state = Health(Rule(values=values))
    found = []
    for step in range(20):
        x = torch.where(torch.rand(64, 64) < 0.01, 1.0, -1.0)
        found += state.judge("act", seen(tg.TAXONOMY["relu"], x), step)
    assert bool(found) == bool(alarms)


def test_another_number_of_channels_starts_anew():
    state = Health(Rule(patience=2, values=1))
    for channels in (2, 3):
        x = torch.full((10, channels), -1.0)
        assert not state.judge("act", seen(tg.TAXONOMY["relu"], x), 1)
