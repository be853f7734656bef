"""Every finite number of a floating-point type, enumerated by its bits, or a sample of them.

A number is a sign, an exponent and a mantissa. The bits of the last two, read as an integer, grow
with the number, so the integers below infinity's are all finite numbers of one sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCKS = 2**16  # for each sign; of float32, whose numbers have 255 exponents, 257 for each


class Format(NamedTuple):
    """How a type keeps its numbers: in integers of this type, with this many bits of mantissa."""

    bits: torch.dtype
    mantissa: int


FORMATS = {
    torch.float32: Format(torch.int32, 23),
    torch.float16: Format(torch.int16, 10),
    torch.bfloat16: Format(torch.int16, 7),
}


def name_of(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Walk:
    """Finite numbers, from zero outwards to either side: `count` of each sign, in blocks."""

    dtype: torch.dtype
    format: Format
    count: int

    @classmethod
    def over(cls, dtype: torch.dtype, sample: int | None = None) -> Walk:
        """Over every finite number of `dtype`, or over a sample of about this size.

        A sample is spread evenly over the bits, so over the exponents; zero and the largest number
        are in it.
        """
        every = cls(dtype, FORMATS[dtype], 0).finite
        least = 4 * (every >> FORMATS[dtype].mantissa)
        if sample is not None and sample < least:
            raise ValueError(
                f"a sample of {name_of(dtype)} needs at least {least:,} inputs, two for each sign "
                f"and exponent; got {sample:,}."
            )
        return cls(dtype, FORMATS[dtype], every if sample is None else min(every, -(-sample // 2)))

    @property
    def finite(self) -> int:
        """How many finite numbers of each sign there are: the last exponent is infinity's."""
        last = 2 ** (torch.iinfo(self.format.bits).bits - 1)
        return int(last - 2**self.format.mantissa)

    @property
    def complete(self) -> bool:
        """Whether no finite number is left out."""
        return self.count == self.finite

    @property
    def block(self) -> int:
        """How many inputs share a block."""
        return max(1, self.count // _BLOCKS)

    @property
    def blocks(self) -> int:
        """How many blocks each sign has; the last may be shorter."""
        return -(-self.count // self.block)

    def values(self, sign: int, first: int, last: int, device: Any = "cpu") -> Tensor:
        """The inputs of the blocks from `first` up to, not including, `last`; sign 1 is minus."""
        stop = min(last * self.block, self.count)
        return self._numbers(torch.arange(first * self.block, stop, device=device), sign)

    def edges(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest magnitude in each block."""
        first = torch.arange(self.blocks) * self.block
        last = (first + self.block - 1).clamp_max(self.count - 1)
        return self._numbers(first), self._numbers(last)

    def _numbers(self, index: Tensor, sign: int = 0) -> Tensor:
        if not self.complete:
            index = index * (self.finite - 1) // (self.count - 1)
        base = torch.iinfo(self.format.bits).min if sign else 0
        return (index + base).to(self.format.bits).view(self.dtype)

    def pieces(self, blocks: int) -> Iterator[tuple[int, int, int]]:
        """(sign, first block, the one after the last) for so many blocks at a time."""
        for sign in (0, 1):
            for first in range(0, self.blocks, blocks):
                yield sign, first, min(first + blocks, self.blocks)
