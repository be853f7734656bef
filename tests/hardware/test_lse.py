"""log sum exp of transistors on one tail, alone and as a tree."""

import pytest
import torch

from threshold_gating.hardware import lse
from threshold_gating.hardware.lse import Tree


def test_the_law_that_was_put_in_is_found_again():
    v = torch.rand(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2
    gates = torch.softmax(25 * v, 1)
    found = lse.law(v, 0.95 * torch.logsumexp(25 * v, 1) / 25 - 0.4, gates)
    assert found[:3] == pytest.approx((25, 0.95, -0.4), rel=1e-3)
    assert found.error < 1e-4
    assert found.gates < 1e-4
    other = lse.against(found, v, 0.95 * torch.logsumexp(25 * v, 1) / 25 - 0.42, gates.roll(1, 1))
    assert other.error == pytest.approx(0.02 * 25, rel=1e-3)  # logits of a shift by 20 mV
    assert other.gates == pytest.approx((gates.roll(1, 1) - gates).abs().max().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("tree", "limit"),
    [
        (Tree(2), 0.005),
        pytest.param(Tree(8, flat=True), 0.005, marks=pytest.mark.slow),
        (Tree(8), 0.03),
    ],
    ids=["softplus", "one stage", "tree"],
)
def test_transistors_on_one_tail_add_exponentials(pdk, tree, limit):
    found = lse.measure(tree, vectors=20)
    assert found.error < limit  # logits
    assert 24 < found.tau < 29
    assert found.gain == pytest.approx(1, abs=0.05)


def test_a_tree_of_eight_has_seven_pairs_and_a_follower_after_all_but_the_last():
    count = lse.netlist(Tree(8)).count()
    # pairs and tails, and two of the bias; followers with their sources, and one of the bias
    assert count == {"nfet": 7 * 3 + 2, "pfet": 6 * 2 + 1}
    assert lse.netlist(Tree(8, flat=True)).count() == {"nfet": 8 + 2}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": 16}, "2, 4 or 8 inputs.*got 16"),
        ({"tail": 1e-5}, "from 1e-09 to 1e-07 A.*got 1e-05 A"),
    ],
)
def test_a_tree_that_would_not_work_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Tree(**given)
