"""The tree of a softmax in integers, and its cell in Verilog."""

import shutil

import pytest
import torch

from threshold_gating.hardware import rtl
from threshold_gating.hardware.digital import bench, segments, tree
from threshold_gating.hardware.digital.codes import rounded
from threshold_gating.hardware.digital.format import CHOSEN, Format, FormatError, Unit
from threshold_gating.hardware.wholes import thresholds

needs_iverilog = pytest.mark.skipif(
    shutil.which("iverilog") is None, reason="iverilog is not installed"
)
needs_verilator = pytest.mark.skipif(
    shutil.which("verilator") is None, reason="verilator is not installed"
)
UNIT = {
    bits: Unit(bits, branches=3, tau=8, slope=8, gate=gate, log=log)
    for bits, (gate, log) in CHOSEN.items()
}
FRACTIONS = (-9, -3, 0, 3, 7, 12, 22, 40)


def unbounded(a, b, shift, log, lowest):
    """A cell in Python's integers, which end nowhere: a second way to write it."""

    def moved(code, by):
        return code << by if by >= 0 else rounded(code, -by)

    apart = moved(a - b, shift).clamp(-(2**log.bits), 2**log.bits - 1)
    both = torch.maximum(a, b) + moved(segments.evaluate(log, apart), -shift)
    return torch.where(a == lowest, b, torch.where(b == lowest, a, both))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_tree_of_cells_that_saturate_is_one_that_saturates_at_its_end(bits, fraction):
    unit = UNIT[bits]
    end = 2 ** (tree.width(unit) - 1)
    z = torch.randint(-end, end, (300, 9))
    z[:50] = z[:50].clamp(max=-end + 2)  # near the code that takes no part
    z[50:100] = z[50:100] >> 6  # near each other
    r, log = tree.lowered(Format(bits, fraction, 4), unit), unit.log
    shift = log.fraction - fraction - unit.finer
    found, free = (
        thresholds(z, -end, cell, cell)
        for cell in (
            lambda a, b: tree.pair(a, b, r, unit),
            lambda a, b: unbounded(a, b, shift, log, -end),
        )
    )
    assert torch.equal(found, free.clamp(-end, end - 1))


@pytest.mark.parametrize("keys", [1, 2, 3, 8, 13])
def test_thresholds_are_log_sums_of_all_others(keys):
    z = torch.randn(20, keys, dtype=torch.float64)
    found = thresholds(z, -torch.inf, torch.logaddexp, torch.logaddexp)
    others = z.unsqueeze(-2).expand(20, keys, keys).masked_fill(torch.eye(keys).bool(), -torch.inf)
    torch.testing.assert_close(found, others.logsumexp(-1))


def test_a_cell_needs_its_segments():
    with pytest.raises(FormatError, match=r"the tree of a softmax needs .* give a Unit with log="):
        tree.lowered(Format(), Unit(log=None))


@needs_iverilog
@needs_verilator
def test_verilog_and_integers_agree_at_every_pair_of_codes():
    """Of 4 bits and the two finer ones of theta; the linter of verilator finds nothing."""
    unit = Unit(4, branches=3, gate=CHOSEN[8][0], log=CHOSEN[8][1])
    found = rtl.verify_pairs(unit, FRACTIONS, simulators=("iverilog",))
    assert found.exact
    assert found.lint == ""
    assert [o.codes for o in found.outcomes["iverilog"]] == [4096] * len(FRACTIONS)


@needs_iverilog
def test_a_cell_of_other_segments_and_no_finer_bits_agrees():
    """Drawn pairs: there are too many to try all of them."""
    unit = Unit(9, branches=3, finer=0, gate=CHOSEN[10][0], log=CHOSEN[10][1])
    found = rtl.verify_pairs(unit, (-4, 5, 11), pairs=3000, simulators=("iverilog",))
    assert found.exact
    assert [o.codes for o in found.outcomes["iverilog"]] == [3000] * 3


@needs_iverilog
def test_a_wrong_pair_is_counted():
    unit, codes = UNIT[8], torch.arange(-64, 64)
    r = tree.lowered(Format(8, 4, 4), unit)
    right = bench.pairs("cell", codes, codes.flip(0), r, unit)
    y = right.y.clone()
    y[3] += 1
    outcomes = bench.check(rtl.cell(unit), [right, right._replace(y=y), right._replace(word=r + 1)])
    assert [o.differ for o in outcomes][:2] == [0, 1]
    assert outcomes[2].differ > 50  # logits of other fraction bits


@pytest.mark.slow
@needs_iverilog
@needs_verilator
def test_two_simulators_agree_with_the_integers_at_every_pair_of_8_bits():
    """All pairs of codes of theta, which has two bits more; a quarter of a million at 16 bits."""
    for bits, fraction, pairs in ((8, 4, 2**20), (16, 11, 2**18)):
        found = rtl.verify_pairs(UNIT[bits], (fraction,), pairs=pairs)
        assert found.exact
        assert found.lint == ""
        assert {o.codes for each in found.outcomes.values() for o in each} == {pairs}
