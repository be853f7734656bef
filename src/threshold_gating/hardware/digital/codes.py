"""Codes: integers that stand for real numbers, and how a circuit keeps them in their bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from threshold_gating.hardware.digital.format import FormatError, check_whole


def every_code(bits: int) -> Tensor:
    """All codes of x, from the lowest."""
    return torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))


def quantise(x: Tensor, fraction: int, bits: int) -> Tensor:
    """Codes of real numbers: the nearest, halves to even; beyond the range its end. NaN is 0."""
    scaled = torch.ldexp(x.double(), torch.tensor(fraction, device=x.device))
    limit = 2.0**bits
    return saturated(scaled.nan_to_num().clamp(-limit, limit).round().long(), bits)


def real(codes: Tensor, fraction: int) -> Tensor:
    """The float64 numbers of codes."""
    return torch.ldexp(codes.double(), torch.tensor(-fraction, device=codes.device))


def room(bits: int, size: float) -> int:
    """The most fraction bits with which `size` has a code, up to a last bit."""
    check_whole("fixed_point: bits", bits)
    if not 0 < size < math.inf:
        raise FormatError(f"fixed_point: reach must be a number above 0; got {size!r}.")
    return bits - 1 - math.ceil(math.log2(size) - 1e-4)


def saturated(code: Tensor, bits: int) -> Tensor:
    """The nearest of the signed codes of `bits` bits."""
    return code.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def rounded(code: Tensor, shift: int) -> Tensor:
    """code / 2^shift to the nearest, halves upwards."""
    return (code + (1 << shift >> 1)) >> shift
