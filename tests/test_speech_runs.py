"""Runs on AN4: how two contenders compare."""

import math

import pytest

from experiments.speech_runs import bootstrap, signs


def test_the_bootstrap_covers_what_it_should_and_signs_are_binomial():
    ours = {0: {"errors": [0] * 50 + [1] * 80, "words": [6] * 130}}
    theirs = {0: {"errors": [1] * 130, "words": [6] * 130}}
    drawn = bootstrap(ours, theirs)
    assert drawn.mean == pytest.approx(-100 * 50 / 780)
    share = 50 / 130  # of utterances with one error less: the standard error of a binomial
    half = 1.96 * 100 / 6 * math.sqrt(share * (1 - share) / 130)
    assert drawn.high - drawn.low == pytest.approx(2 * half, rel=0.05)
    assert bootstrap(ours, {}).seeds == 0
    assert signs([(0, 1)] * 50 + [(1, 0)] * 7).p == pytest.approx(4e-9, rel=0.2)
    assert signs([(1, 1)]) == (0, 0, 1.0)
