"""The tree of a softmax in integers, and its cell in Verilog."""

import pytest
import torch

from threshold_gating.hardware.digital import segments, tree
from threshold_gating.hardware.digital.codes import rounded
from threshold_gating.hardware.digital.format import CHOSEN, Format, FormatError, Unit

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
    found = tree.thresholds(z, -end, lambda a, b: tree.pair(a, b, r, unit))
    free = tree.thresholds(z, -end, lambda a, b: unbounded(a, b, shift, log, -end))
    assert torch.equal(found, free.clamp(-end, end - 1))


@pytest.mark.parametrize("keys", [1, 2, 3, 8, 13])
def test_thresholds_are_log_sums_of_all_others(keys):
    z = torch.randn(20, keys, dtype=torch.float64)
    found = tree.thresholds(z, -torch.inf, torch.logaddexp)
    others = z.unsqueeze(-2).expand(20, keys, keys).masked_fill(torch.eye(keys).bool(), -torch.inf)
    torch.testing.assert_close(found, others.logsumexp(-1))


def test_a_cell_needs_its_segments():
    with pytest.raises(FormatError, match=r"the tree of a softmax needs .* give a Unit with log="):
        tree.lowered(Format(), Unit(log=None))
