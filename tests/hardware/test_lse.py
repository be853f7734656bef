"""log sum exp of transistors on one tail, alone and as a tree."""

import math

import pytest
import torch

from threshold_gating.hardware import lse
from threshold_gating.hardware.lse import Tree
from threshold_gating.hardware.spice import batches


def test_the_law_that_was_put_in_is_found_again():
    v = torch.rand(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2
    gates = torch.softmax(25 * v, 1)
    found = lse.law(v, 0.95 * torch.logsumexp(25 * v, 1) / 25 - 0.4, gates)
    # The search ends where a step gains a millionth of what is left.
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
        ({"supply": 0.5}, "the supply of a tree in V must be from 1.7 to 1.95; got 0.5"),
        ({"models": "gf180"}, "made of sky130 transistors; got gf180"),
        ({"size": (0.0, 1.0)}, "the width in um must be from 0.42"),
        ({"tail": 1e-5}, "from 1e-09 to 1e-07 A.*got 1e-05 A"),
    ],
)
def test_a_tree_that_would_not_work_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Tree(**given)


def test_gates_of_a_tree_are_products_of_shares_on_the_way():
    """Currents of exact pairs put in by hand: the product is softmax."""
    v = torch.tensor([0.1, -0.4, 0.9, 0.3, 0.0, 1.1, -0.2, 0.5], dtype=torch.float64)
    for tree in (Tree(8), Tree(8, flat=True)):
        level, plot = v, {}
        for stage in lse.stages(tree):
            groups = level.view(len(stage), -1)
            for (source, _), group in zip(stage, groups, strict=True):
                for k, current in enumerate(group.softmax(0) * 3e-8):
                    plot[f"i(v{k}_{source}_7)"] = current[None]
            level = groups.logsumexp(1)
        assert torch.allclose(lse._gates(tree, plot, "_7"), v.softmax(0), rtol=1e-12)


def test_mismatch_moves_every_tree_another_way_and_repeats_with_its_seed(pdk):
    tree = Tree(2)
    first, again, other = (lse.mismatch(tree, 3, seed, vectors=4) for seed in (1, 1, 2))
    assert first == again != other
    perfect = lse.measure(tree)
    # Two transistors of 5 um^2 with 2 mV each (continuous models) are 0.05 to 0.2 of a logit.
    assert perfect.error < 0.005 < max(law.error for law in first.built) < 0.5
    assert perfect.gates < max(law.gates for law in first.built) < 0.15
    with pytest.raises(ValueError, match="2 trees or more; got 1"):
        lse.mismatch(tree, 1)


def test_every_tree_of_several_netlists_is_in_the_spread(monkeypatch):
    """Outputs tell seed and copy; a law of its own is read off them in place of a fit."""
    v = torch.zeros(4, 2, dtype=torch.float64)

    def answers(tree, vectors, copies=1, seed=0, **conditions):
        names = torch.arange(copies, dtype=torch.float64) + 1000 * seed
        return lse.Answers(v, names[:, None].expand(-1, 4), v.expand(copies, -1, -1))

    monkeypatch.setattr(lse, "answers", answers)
    monkeypatch.setattr(lse, "law", lambda v, out, gates: lse.Law(1.0, 1.0, out[0].item(), 0, 0))
    found = lse.mismatch(Tree(2), 50, 1)
    wanted = [1000 * seed + k for n, seed in batches(50, 1) for k in range(n)]
    assert [law.shift for law in found.trimmed] == wanted
    assert len(set(wanted)) == 50
    # Built: against the tree without mismatch, whose output is that of two equal inputs.
    off = [name - math.log(2) for name in wanted]
    assert [law.error for law in found.built] == pytest.approx(off, rel=1e-12)


def test_a_tree_settles_to_a_percent_of_the_step_of_its_input(monkeypatch):
    asked = {}

    def edges(driven, keep, level, guess, points):
        asked["step"] = driven([(0, -1), (1e-6, 1)]).elements
        asked["level"] = level({"v(out)": torch.tensor(0.2)})
        return 3e-7, 2e-7

    monkeypatch.setattr(lse, "edges", edges)
    assert lse.settling(Tree(2)) == 3e-7
    assert "vi0 i0 0 pwl(0 0.55 1e-06 0.75)" in asked["step"]
    assert "vi1 i1 0 0.55" in asked["step"]
    assert asked["level"].item() == pytest.approx(1.0)  # as far as the input steps


@pytest.mark.slow
def test_a_tree_settles_in_inverse_proportion_to_its_tail(pdk):
    slow, fast = (lse.settling(Tree(2, tail=tail)) for tail in (1e-8, 2e-8))
    assert slow / fast == pytest.approx(2, rel=0.15)  # a time step is up to 4 % of it
