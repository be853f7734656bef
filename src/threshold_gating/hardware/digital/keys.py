"""A softmax in integers: the pairwise tree gives each key its threshold, the unit its gate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from threshold_gating.hardware.digital import codes, tree, unit
from threshold_gating.hardware.digital.format import Format, unit_for
from threshold_gating.hardware.digital.site import FixedGate, Kept, bits_of
from threshold_gating.hardware.physical import Chip
from threshold_gating.hardware.wholes import _OFF, KeyGates
from threshold_gating.instance import TG
from threshold_gating.primitive import wide

_SIGMOID = TG(1, 0, (0, 0), (0, 1))
_THREE = TG(1, (0, 1), (0, 1, 1), (0, 0, 0))


class FixedKeys(FixedGate, KeyGates):
    """A softmax in integers: the pairwise tree gives each key its threshold, the unit its gate.

    The threshold of a key is data, written where the register of theta is.
    """

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        FixedGate.__init__(self, name, kind, _SIGMOID, chip)
        self.pairs = Pairs()
        self.ended = False  # whether a threshold left the range

    def fix(self, wanted: Format | int, units: Mapping[str, Any] | None = None) -> None:
        log = unit_for(_THREE, bits=bits_of(wanted)).log
        self.ended = False
        super().fix(wanted, {"branches": 3, "log": log, **(units or {})})

    def lost(self) -> float:
        """The share of p that rounding alone moves in its format."""
        given, out = self.given, min(max(self.format.out, 0), 16)
        return given.moved[out] / given.mass if given.mass else 0.0

    def _reach(self) -> float:
        """Logits are taken from the largest: twice as far, but at 16 a gate is shut."""
        largest = max(self.seen.largest, 2.0**-8)
        return max(largest, min(2 * largest, 16.0))

    def softmax(self, z: Tensor, dim: int = -1) -> Tensor:
        if self.watching:
            rows = wide(z)
            self.given.infinite |= bool((rows == math.inf).any())
            self.seen.add(torch.where(rows <= _OFF, -torch.inf, rows), -1)  # logits need codes
            p = super().softmax(z, dim)
            self.given.weigh(p)
            return p
        if not self.reached:
            return torch.softmax(z, dim)
        with torch._C.DisableTorchFunction():
            rows, f, finer = wide(z).movedim(dim, -1), self.format, self.unit.finer
            live, lowest = rows > _OFF, -(2 ** (f.bits - 1))
            code = codes.quantise(rows, f.fraction, f.bits).where(live, lowest)
            # From the largest down, and what is masked at the end of the range.
            code = code - code.amax(-1, keepdim=True)
            code = codes.saturated(code, f.bits).where(live, lowest)
            theta = tree.thresholds(code << finer, tree.off(self.unit), self.pair)
            self._check_ends(theta)
            r = self.written[0]._replace(theta=(theta,))  # type: ignore[arg-type]
            y = unit.run(r, code, self.unit)
            if self.kept is not None:
                apart = codes.real((code << finer) - theta, f.fraction + finer)
                self.kept.append(Kept(code, code, y, r, torch.sigmoid(apart)))
            p = torch.ldexp(y.to(rows.dtype), torch.tensor(-f.out, device=z.device))
            # a key with no other is all of it
            p = p.where(theta > tree.off(self.unit), 1).where(live, 0)
            return (
                p.where(~rows.isnan().any(-1, keepdim=True), torch.nan).movedim(-1, dim).to(z.dtype)
            )

    def _check_ends(self, theta: Tensor) -> None:
        """Say once that thresholds leave the range: more keys than in calibration, or flatter rows.

        They end there, and every gate of such a row is too far open.
        """
        top = 2 ** (tree.width(self.unit) - 1) - 1
        if not self.ended and bool((theta == top).any()):
            self.ended = True
            warnings.warn(f"fixed_point: {self.ends()}.", stacklevel=2)

    def ends(self) -> str:
        """What it means that thresholds left the range."""
        return (
            f"{self.name}: log-sums of a row leave |z| < {self.format.reach:g}, the range that "
            "calibration chose, so that weights are too large; convert with inputs whose rows are "
            "as long as these"
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
