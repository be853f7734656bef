"""A softmax in integers: the pairwise tree gives each key its threshold, the unit its gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from threshold_gating.hardware.digital import codes, tree, unit
from threshold_gating.hardware.digital.format import Format, unit_for
from threshold_gating.hardware.digital.site import SLACK, FixedGate, Kept, bits_of
from threshold_gating.hardware.physical import Chip
from threshold_gating.hardware.wholes import KeyGates, thresholds
from threshold_gating.instance import TG
from threshold_gating.primitive import wide

SHUT = 16.0  # below the largest logit, where a gate is 0 in 15 bits
_SIGMOID = TG(1, 0, (0, 0), (0, 1))
_THREE = TG(1, (0, 1), (0, 1, 1), (0, 0, 0))


class FixedKeys(FixedGate, KeyGates):
    """A softmax in integers: the pairwise tree gives each key its threshold, the unit its gate.

    The threshold of a key is data, written where the register of theta is.
    """

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        FixedGate.__init__(self, name, kind, _SIGMOID, chip)
        self.pairs = Pairs()

    def fix(self, wanted: Format | int, units: Mapping[str, Any] | None = None) -> None:
        log = unit_for(_THREE, bits=bits_of(wanted)).log
        super().fix(wanted, {"branches": 3, "log": log, **(units or {})})

    def _has_size(self) -> bool:
        return True  # tau is 1: logits have a scale, whatever came

    def _reach(self) -> float:
        """The largest logit from its threshold."""
        return min(max(self.seen.largest, 1.0), SHUT)

    def softmax(self, z: Tensor, dim: int = -1) -> Tensor:
        if not z.numel():
            return torch.softmax(z, dim)
        if self.watching:
            self.given.infinite |= bool((z == math.inf).any())
            far = z - z.amax(dim, keepdim=True) < -SHUT  # such as a mask that is a number
            return super().softmax(z.masked_fill(far, -torch.inf), dim)
        if not self.reached:
            return torch.softmax(z, dim)
        with torch._C.DisableTorchFunction():
            # From the largest down, before there are codes: what all logits share, and a mask that
            # is a number, take no bits.
            rows = wide(z).movedim(dim, -1)
            apart = rows - rows.amax(-1, keepdim=True)
            far = apart < -SLACK * self.format.reach  # these take no part: none of them may matter
            if bool((torch.softmax(rows, -1).where(far, 0) > 2.0**-self.format.out).any()):
                self._say_ends()
            p = self._gates(codes.quantise(apart, self.format.fraction, self.format.bits))
            p = torch.where(apart.isnan().any(-1, keepdim=True), torch.nan, p.to(rows.dtype))
            if self.kind not in ("softmax", "softmin"):  # attention to no key at all is 0 in torch
                p = torch.where((rows == -torch.inf).all(-1, keepdim=True), 0, p)
            if self.measured:
                self.moved.add(p, torch.softmax(rows, -1))
            return p.movedim(-1, dim).to(z.dtype)

    def _gates(self, code: Tensor) -> Tensor:
        """Weights at codes of logits; the lowest code is too far down to take part."""
        f, finer, lowest = self.format, self.unit.finer, -(2 ** (self.format.bits - 1))
        off = tree.off(self.unit)
        theta = thresholds(code << finer, off, self.pair, self.pair)
        self._check_ends(theta)
        r = self.written[0]._replace(theta=(theta,))  # type: ignore[arg-type]
        y = unit.run(r, code, self.unit)
        if self.kept is not None:
            apart = codes.real((code << finer) - theta, f.fraction + finer)
            self.kept.append(Kept(code, code, y, r, torch.sigmoid(apart)))
        p = codes.real(y, f.out)
        # a key with no other is all of it
        return p.where(theta > off, 1).where(code > lowest, 0)

    def _check_ends(self, theta: Tensor) -> None:
        """Say once that thresholds leave the range: more keys than in calibration, or flatter rows.

        They end there, and every gate of such a row is too far open.
        """
        top = 2 ** (tree.width(self.unit) - 1) - 1
        if bool((theta == top).any()):
            self._say_ends()

    def ends(self) -> str:
        """What it means that thresholds left the range."""
        return (
            f"{self.name}: log-sums of a row leave |z| < {self.format.reach:g}, the range that "
            "calibration chose, or its logits do, so that weights are wrong; convert with inputs "
            "whose rows are as long and as far apart as these"
        )

    def pair(self, a: Tensor, b: Tensor) -> Tensor:
        """One cell of the tree; what comes to it is noted where it is to be compared."""
        if self.kept is not None:
            self.pairs.add(a, b)
        return tree.pair(a, b, tree.lowered(self.format, self.unit), self.unit)


class Pairs:
    """What came to the cells of a tree: how many pairs, and which, once each."""

    def __init__(self) -> None:
        self.seen, self._packed = 0, torch.empty(0, dtype=torch.long)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Codes of up to 31 bits each, as one integer."""
        self.seen += a.numel()
        packed = ((a.long() << 32) + (b.long() + 2**31)).flatten().cpu()
        self._packed = torch.unique(torch.cat([self._packed, packed]))

    def distinct(self) -> tuple[Tensor, Tensor]:
        return self._packed >> 32, (self._packed & (2**32 - 1)) - 2**31
