"""The tree of a softmax in integers: every bit as its Verilog computes it.

A key's gate is the sigmoid of its logit less a threshold, the log-sum-exp of all other keys. Cells
of two inputs make it, up for every subtree and down for all that is outside of it:

    pair(a, b) = max(a, b) + log(1 + exp(-|a - b|)),

by the segments that a unit of three branches has. Codes have the fraction of theta; the lowest
takes no part, so that a key that is masked, or was never there, changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threshold_gating.hardware.digital import segments
from threshold_gating.hardware.digital.codes import rounded, saturated
from threshold_gating.hardware.digital.format import Format, FormatError, Unit
from threshold_gating.hardware.digital.segments import Segments


def width(unit: Unit) -> int:
    """Bits of a cell's codes, which are those of theta."""
    return unit.bits + unit.finer


def off(unit: Unit) -> int:
    """The code that takes no part: the lowest."""
    lowest: int = -(2 ** (width(unit) - 1))
    return lowest


def log_of(unit: Unit) -> Segments:
    """The segments that a cell is made of."""
    if unit.log is None:
        raise FormatError("the tree of a softmax needs log(1 + exp(-|u|)); give a Unit with log=.")
    return unit.log


def furthest(unit: Unit) -> int:
    """The most that a cell lowers by: beyond it every difference is 0."""
    return log_of(unit).bits + width(unit) + 1


def lowered(f: Format, unit: Unit) -> int:
    """The register of a cell: a difference is a u when raised by log's bits and lowered by this.

    Beyond its ends nothing changes: there a difference is 0, or at the end of the range of u.
    """
    return min(max(log_of(unit).top + f.fraction + unit.finer, 0), furthest(unit))


def pair(a: Tensor, b: Tensor, r: int, unit: Unit) -> Tensor:
    """One cell; where one side takes no part, the other passes."""
    log, lowest = log_of(unit), off(unit)
    u = saturated(rounded((a - b) << log.bits, r), log.bits + 1)
    top = torch.maximum(a, b)
    both = saturated(top + rounded(segments.evaluate(log, u) << r, log.bits), width(unit))
    return torch.where((a == lowest) | (b == lowest), top, both)
