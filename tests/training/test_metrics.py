"""Steps to the baseline's level, on curves made by hand."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threshold_gating.training.metrics import Reached, steps_to_baseline, steps_to_peak

RISING = [10, 20, 30, 40, 50, 60, 60, 60, 60, 60, 60]  # level 60, smoothed 60 from step 8 on


def test_the_first_smoothed_value_at_the_level_counts():
    # means of three: 30, 50, 60 at step 5
    got = steps_to_baseline(RISING, [10, 30, 50, 70, 60, 60])
    assert (got.level, got.baseline, got.candidate) == (60.0, 8, 5)
    assert got.speedup == 8 / 5
    assert str(got) == (
        "reaches the baseline's converged level (>= 60) at step 5; the baseline does at step 8, 1.60x"
    )


def test_one_lucky_value_is_smoothed_away():
    lucky = [10, 90, 10, 10, 10, 10, 10]  # means up to 36.7
    got = steps_to_baseline(RISING, lucky)
    assert got.candidate is None
    assert steps_to_baseline(RISING, lucky, window=1).candidate == 2


def test_a_level_that_is_never_reached_is_said_so():
    got = steps_to_baseline(RISING, [50, 50, 55, 57, 59], every=10)
    assert got.candidate is None
    assert got.speedup is None
    assert got.best == 57.0
    assert str(got) == (
        "never reaches the baseline's converged level (>= 60) in 50 steps (best 57); "
        "the baseline does at step 80"
    )


def test_losses_go_down():
    baseline = [9, 8, 7, 6, 5, 4, 3, 3, 3, 3, 3, 3]
    got = steps_to_baseline(baseline, [6, 3, 2, 4], mode="min")
    assert (got.level, got.baseline, got.candidate) == (3.0, 9, 4)
    assert str(got).startswith("reaches the baseline's converged level (<= 3) at step 4;")
    assert steps_to_baseline(baseline, [6, 4, 4, 4], mode="min").candidate is None


def test_the_level_is_of_the_last_six_values_as_they_are():
    baseline = [0, 0, 0, 1, 2, 3, 4, 5, 6]  # mean of 1 .. 6, means of three 0, 0, .., 4, 5
    got = steps_to_baseline(baseline, baseline)
    assert got.level == 3.5
    assert got.baseline == got.candidate == 8  # 3, 4, 5; the mean 3 before is below
    assert got.speedup == 1.0
    assert steps_to_baseline(baseline, baseline, last=3).level == 5.0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 90.81])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_plateau_reaches_its_own_level_whatever_its_digits(value, mode):
    # 0.1 + 0.1 + 0.1 is not 3 x 0.1 in floating point
    got = steps_to_baseline([value] * 8, [value] * 3, mode=mode)
    assert (got.baseline, got.candidate) == (3, 3)
    assert got.level == value


@given(st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=30), st.sampled_from(["max", "min"]))
def test_the_baseline_reaches_its_own_level(values, mode):
    got = steps_to_baseline(values, values, mode=mode)
    assert got.baseline == got.candidate is not None


@given(st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=30))
def test_less_is_more_of_the_negative(values):
    falling = [-v for v in values]
    up = steps_to_baseline(values, values[::-1])
    down = steps_to_baseline(falling, falling[::-1], mode="min")
    assert (up.baseline, up.candidate, up.level) == (down.baseline, down.candidate, -down.level)


def test_equal_levels_are_reached_and_the_first_of_ties_counts():
    got = steps_to_baseline([5] * 6, [4, 6, 5, 5, 5, 5])  # means 5, 5.33, 5, 5
    assert got.candidate == 3


def test_steps_are_those_of_the_curve():
    baseline = dict(zip([1, 10, 20, 50, 100, 200, 400], [1, 2, 3, 3, 3, 3, 3], strict=True))
    got = steps_to_baseline(baseline, {7: 3, 8: 3, 9: 3}, every=99)
    assert got.level == pytest.approx(17 / 6)
    assert (got.baseline, got.candidate) == (100, 9)  # (2 + 3 + 3)/3 < 17/6 at 50
    assert steps_to_baseline(list(baseline.values()), [3, 3, 3], every=250).baseline == 1250


def test_values_may_be_tensors():
    got = steps_to_baseline(torch.tensor(RISING).double(), [torch.tensor(60.0)] * 3)
    assert (got.baseline, got.candidate) == (8, 3)


def test_a_window_with_a_value_that_is_not_a_number_reaches_nothing():
    nan, inf = math.nan, math.inf
    assert steps_to_baseline(RISING, [60, nan, 60, 60, 60]).candidate == 5
    assert steps_to_baseline(RISING, [60, 60, inf, 0, 0, 60]).candidate is None
    never = steps_to_baseline([nan, *RISING], [nan, nan, nan])
    assert never.baseline == 9
    assert str(never) == (
        "never reaches the baseline's converged level (>= 60) in 3 steps (no finite value); "
        "the baseline does at step 9"
    )
    with pytest.raises(ValueError, match="baseline's last 6 values") as caught:
        steps_to_baseline([1, 1, 1, 1, 1, nan], RISING)
    assert str(caught.value) == (
        "steps_to_baseline: the baseline's last 6 values must be finite; got "
        "1.0, 1.0, 1.0, 1.0, 1.0, nan."
    )


@pytest.mark.parametrize(
    ("baseline", "candidate", "options", "message"),
    [
        (
            [1] * 5,
            [1] * 5,
            {},
            "the baseline has 5 values; a mean over 3 and a level over the last 6 needs 6.",
        ),
        ([1] * 6, [1] * 2, {}, "the candidate has 2 values; a mean over 3 needs 3."),
        ([1] * 6, [], {}, "the candidate has 0 values; a mean over 3 needs 3."),
        (
            [1] * 6,
            [1] * 6,
            {"mode": "best"},
            "mode must be 'max' (more is better) or 'min' (less is better); got 'best'.",
        ),
        ([1] * 6, [1] * 6, {"window": 0}, "window must be at least 1; got 0."),
        ([1] * 6, [1] * 6, {"last": 0}, "last must be at least 1; got 0."),
        ([1] * 6, [1] * 6, {"every": 0}, "every must be at least 1; got 0."),
        (
            [1] * 6,
            {3: 1, 2: 1, 4: 1},
            {},
            "the steps of the candidate have to increase from 0 on; got [3, 2, 4].",
        ),
    ],
)
def test_curves_that_say_nothing_are_refused(baseline, candidate, options, message):
    with pytest.raises(ValueError, match=r"^(the|mode|window|last|every)") as caught:
        steps_to_baseline(baseline, candidate, **options)
    assert str(caught.value) == message


def test_other_windows_may_leave_the_baseline_below_its_own_level():
    # the last value, 5, against a mean of four of 1.25
    got = steps_to_baseline([0, 0, 0, 0, 5], [5, 5, 5, 5], window=4, last=1)
    assert got.baseline is None
    assert got.candidate == 4
    assert got.speedup is None
    assert str(got) == (
        "reaches the baseline's converged level (>= 5) at step 4; the baseline never does"
    )


def test_the_papers_example_of_a_first_peak():
    # App. D: the baseline's peak of 90.81 % at epoch 199, the candidate there at epoch 148
    baseline = [min(90.0, 40 + epoch) for epoch in range(1, 201)]
    baseline[198] = 90.81
    candidate = [min(90.8, 40 + epoch) for epoch in range(1, 201)]
    candidate[147:] = [90.81] * 53
    got = steps_to_peak(baseline, candidate)
    assert (got.level, got.baseline, got.candidate) == (90.81, 199, 148)
    assert f"{got.speedup:.2f}" == "1.34"
    assert str(got) == (
        "reaches the baseline's peak (>= 90.81) at step 148; the baseline does at step 199, 1.34x"
    )


def test_a_peak_is_taken_where_it_is_first_reached():
    assert steps_to_peak([1, 3, 2, 3], [2, 2, 2, 3]).baseline == 2
    assert steps_to_peak([3, 1, 2, 1], [2, 1], mode="min").baseline == 2
    assert steps_to_peak([3, 1, 2, 1], [2, 2], mode="min").candidate is None
    assert steps_to_peak([1, math.nan, 3], [3.0]).candidate == 1
    assert steps_to_peak([0, 9, 0, 5, 5, 5], [5, 5, 5], window=3).level == 5.0
    with pytest.raises(ValueError, match="no finite value to take a peak from"):
        steps_to_peak([math.nan, math.inf], [1])
    with pytest.raises(ValueError, match="the baseline has 2 values; a mean over 3 needs 3"):
        steps_to_peak([1, 2], [1, 2, 3], window=3)


def test_a_candidate_that_starts_at_the_level_is_infinitely_faster():
    assert steps_to_peak({0: 1, 5: 2}, {0: 2}).speedup == math.inf
    assert steps_to_peak({0: 2, 5: 1}, {0: 2}).speedup == 1.0


def test_the_answer_is_a_frozen_record():
    got = steps_to_baseline(RISING, RISING)
    assert isinstance(got, Reached)
    assert isinstance(got.level, float)
    assert not isinstance(got.best, Fraction)
    with pytest.raises(AttributeError):
        got.level = 0.0
