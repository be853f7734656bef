"""The sigmoid by segments, over every code."""

import pytest
import torch

from threshold_gating.hardware.digital import search
from threshold_gating.hardware.digital.format import CHOSEN, WITHIN
from threshold_gating.hardware.digital.segments import Segments, error, evaluate, table

SOME = [Segments(), Segments(exact=False), Segments(count=6, slope=3, step=2, out=9), *CHOSEN[8]]


@pytest.mark.parametrize("s", SOME, ids=str)
def test_values_stay_in_their_range_without_a_clamp(s):
    y = evaluate(s, torch.arange(-(2**s.bits), 2**s.bits))
    assert y.min() >= 0
    assert y.max() <= 2**s.out


@pytest.mark.parametrize("exact", [True, False])
def test_halves_mirror_each_other(exact):
    s = Segments(exact=exact)
    u = torch.arange(2**s.bits)
    opposite = evaluate(s, -u if exact else ~u)
    whole = evaluate(s, u) + opposite
    inner = u > 0 if exact else u >= 0  # 0 is its own opposite, and on the upper half
    assert (whole[inner] == 2**s.out - (0 if exact else 1)).all()


def test_the_table_of_a_segment_is_the_best_of_all_slopes_and_bases():
    """Of one small table, against every slope and base that there is."""
    s = Segments(top=3, fraction=4, count=3, slope=3, step=3, out=7)
    found = table(s)
    a = torch.arange(2**s.bits).view(8, -1)
    wanted = torch.tanh(a.double() / 2**4 / 2) / 2 * 2**7
    step = torch.arange(16) >> 1
    for i in range(8):
        every = [
            (wanted[i] - (base + s.product(torch.tensor(slope), step))).abs().max().item()
            for slope in range(8)
            for base in range(65)
            if base + s.product(torch.tensor(slope), step).max() <= 64
        ]
        mine = found.bases[i] + s.product(found.slopes[i], step)
        assert (wanted[i] - mine).abs().max().item() <= min(every) + 0.5  # bases are whole


def test_errors_of_the_searched_ones_are_below_what_was_known_before():
    """27 of 2^-15 with 32 segments of 6 x 6 bits, 4.9 with 64 of 8 x 8."""
    assert error(Segments(count=5, slope=6, step=6, exact=False)) < 27
    assert error(Segments(count=7, slope=6, step=8, out=14, exact=False)) < 4.9


@pytest.mark.parametrize("bits", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", [0, 1])
def test_the_search_finds_the_chosen_ones_again(bits, which):
    s = CHOSEN[bits][which]
    found = search.choose(WITHIN[bits][which], s.function, s.top, s.fraction, s.out)
    assert found == s


def test_a_search_for_too_much_says_what_there_is():
    with pytest.raises(ValueError, match=r"no segments of sigmoid are within 0.1 .* best found"):
        search.choose(0.1, "sigmoid", 4, 6, 7)


def test_segments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\|u\| has 7 bits .* too few for 5"):
        Segments(fraction=4, count=5, step=6)
