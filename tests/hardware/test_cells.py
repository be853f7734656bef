"""The pair as a netlist, and what a pair cannot be."""

import pytest

from threshold_gating.hardware.cells import Pair, describe, device, mirror, pair


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"models": "gf180", "device": "npn"}, "models gf180 have no npn; nfet, pfet"),
        ({"models": "sky130", "device": "res"}, "have no res; nfet, pfet, npn"),
        ({"width": 0.1}, "the width in um must be from 0.42 to 100; got 0.1"),
        ({"length": 50}, "the length in um must be from 0.15 to 20; got 50"),
        ({"tail": 1.0}, "the tail current in A must be from 1e-10 to 0.0001; got 1"),
        ({"tail": float("nan")}, "the tail current in A must be .*; got nan"),
        ({"supply": 5.0}, "the supply of sky130-binned in V must be from 0.9 to 1.98; got 5"),
        ({"models": "tsmc"}, "no set of models 'tsmc'"),
    ],
)
def test_a_pair_that_cannot_be_is_refused_with_the_range(given, said):
    with pytest.raises(ValueError, match=said):
        Pair(**given)


@pytest.mark.parametrize("swing", [1.3, 0.0, -0.1])
def test_a_swing_beyond_the_rails_is_refused_with_the_range(swing):
    with pytest.raises(ValueError, match=r"does not fit between the rails: .* up to \+-1.2 V"):
        Pair().check_swing(swing)
    Pair().check_swing(1.2)


def test_lengths_are_micrometres_as_each_process_writes_them():
    assert " w=5 l=1 " in device("1", "nfet", "d g s b", "sky130", (5.0, 1.0))
    assert " w=5e-06 l=1e-06 " in device("1", "nfet", "d g s b", "gf180", (5.0, 1.0))
    assert device("1", "nfet", "d g s b", "sky130", (5.0, 1.0), 8).split()[8] == "nf=8"
    assert "w=" not in device("1", "npn", "c b e s", "sky130", (5.0, 1.0))


def test_copies_share_the_input_and_have_tails_of_their_own():
    made = pair(Pair(real=True), copies=3)
    assert made.count() == {"cap": 1, "nfet": 10, "res": 2}
    assert sum(" gp " in line for line in made.elements if line[0] == "x") == 3


def test_a_large_tail_gets_a_wide_mirror():
    assert mirror(1e-8) == (5.0, 4.0)
    assert mirror(1e-4) == (100.0, 1.0)


def test_a_pair_is_described_by_what_it_is():
    said = "sky130-binned nfet 5/1 um, 1e-08 A from an ideal tail, 1.8 V"
    assert describe(Pair()) == said
    assert "npn, " in describe(Pair("sky130", "npn"))
