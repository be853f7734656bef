"""Means, paired differences and what they make of a claim, beside scipy's."""

import math
import statistics

import pytest

from experiments.spread import (
    Difference,
    judged_factor,
    judged_gain,
    judged_match,
    judged_small,
    paired,
    spread,
)


def test_an_interval_is_that_of_students_t():
    stats = pytest.importorskip("scipy.stats")
    theirs = dict(enumerate([90.1, 89.7, 90.4, 90.0, 89.9, 90.2, 90.6, 89.5, 90.3, 90.0]))
    ours = {seed: 91.0 + 0.1 * (seed * 7 % 5) for seed in theirs}
    for count in range(2, 11):
        own = {seed: ours[seed] for seed in range(count)}
        found = paired(own, theirs)
        each = [ours[seed] - theirs[seed] for seed in range(count)]
        low, high = stats.t.interval(0.95, count - 1, statistics.mean(each), stats.sem(each))
        assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
            (low, high), abs=2e-3
        )
        assert found.pairs == count


def test_what_is_of_fewer_seeds_says_so():
    assert spread([1.0, 2.0, 3.0]) == "2.00 +- 1.00"
    assert spread([1.0, 3.0]) == "2.00 +- 1.41 (2 seeds)"
    assert spread([1.0]) == "1.00 (1 seed)"
    assert spread([]) == "not run"
    assert (
        str(paired({0: 2.0, 1: 2.0, 5: 9.0}, {0: 1.0, 1: 1.0})) == "+1.00 [+1.00, +1.00] (2 seeds)"
    )
    assert str(paired({0: 2.0}, {0: 1.0})) == "+1.00 (1 seed)"
    assert str(paired({0: 2.0}, {1: 1.0})) == "not run"


@pytest.mark.parametrize(
    ("mean", "half", "gain", "match", "small"),
    [
        (1.0, 0.4, "reproduced", "reproduced", "not"),
        (0.1, 0.3, "partly", "reproduced", "reproduced"),
        (0.1, 3.0, "partly", "partly", "partly"),  # nothing is known
        (1.0, math.inf, "partly", "partly", "not"),  # one seed
        (-0.1, 0.3, "not", "partly", "reproduced"),
        (-0.4, 0.2, "not", "not", "partly"),
    ],
)
def test_a_claim_is_judged_by_the_interval_and_not_by_the_mean_alone(
    mean, half, gain, match, small
):
    found = Difference(mean, half, 3)
    assert (judged_gain(found), judged_match(found), judged_small(found)) == (gain, match, small)
    nothing = Difference(math.nan, math.inf, 0)
    assert {f(nothing) for f in (judged_gain, judged_match, judged_small)} == {"not run"}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([1.9, 2.0, 2.1], "reproduced"),
        ([1.5, 1.6, 1.5], "partly"),
        ([1.04, 1.05, 1.03], "not"),
        ([2.5, 2.5, None], "not"),
        ([4.0, 4.0, 1.0], "not"),  # one is no sooner
        ([], "not run"),
    ],
)
def test_a_factor_is_reproduced_only_if_every_run_arrives_and_sooner(values, word):
    assert judged_factor(values, 2.04) == word
