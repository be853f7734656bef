"""Activations in fixed point: integers in, integers out, every bit as the circuit computes it.

    f = fixed_point.format_for(TAXONOMY["silu"], bits=12, reach=8.0)
    y = fixed_point.evaluate(TAXONOMY["silu"], codes, f)
    fixed_point.error(TAXONOMY["silu"], f)  # in last bits of y, over every code of x

    net = fixed_point.convert(tg.convert(model, inputs=x), 12, inputs=x)
    net(x)  # every nonlinearity in 12-bit integers; the rest as it was

`hardware.rtl` writes the same unit as Verilog.
"""

from __future__ import annotations

import torch

from threshold_gating.hardware.digital.codes import every_code, quantise, real, room
from threshold_gating.hardware.digital.format import CHOSEN as CHOSEN
from threshold_gating.hardware.digital.format import Format, FormatError, Unit, saturates
from threshold_gating.hardware.digital.format import Registers as Registers
from threshold_gating.hardware.digital.format import registers as registers
from threshold_gating.hardware.digital.format import unit_for as unit_for
from threshold_gating.hardware.digital.narrow import narrowest
from threshold_gating.hardware.digital.network import FixedPoint, convert
from threshold_gating.hardware.digital.segments import Segments as Segments
from threshold_gating.hardware.digital.site import COARSER
from threshold_gating.hardware.digital.unit import evaluate
from threshold_gating.instance import TG


def format_for(t: TG, bits: int = 16, reach: float = 8.0) -> Format:
    """The format with the most fraction bits in which |x| up to `reach`, and y there, have room.

    Branches that are larger than y where their gates are open have room as well.
    """
    fraction = room(bits, reach)
    x = real(every_code(min(bits, 16)), fraction - bits + min(bits, 16))
    most = t(x).abs().max().item()
    out, unit = room(bits, most) if most else fraction, unit_for(t, bits=bits)
    formats = [Format(bits, fraction, out - less) for less in range(COARSER)]
    return next((f for f in formats if not saturates(t, f, unit)), formats[0])


def error(t: TG, f: Format, unit: Unit | None = None) -> float:
    """The largest distance from float64 over all codes of x, in last bits of y.

    Where y has no code, its distance is to the nearest that there is.
    """
    codes = every_code(f.bits)
    wanted = torch.ldexp(t(real(codes, f.fraction)), torch.tensor(f.out))
    wanted = wanted.clamp(-(2 ** (f.bits - 1)), 2 ** (f.bits - 1) - 1)
    return (evaluate(t, codes, f, unit).double() - wanted).abs().max().item()


__all__ = [
    "CHOSEN",
    "FixedPoint",
    "Format",
    "FormatError",
    "Registers",
    "Segments",
    "Unit",
    "convert",
    "error",
    "evaluate",
    "every_code",
    "format_for",
    "narrowest",
    "quantise",
    "real",
    "registers",
    "unit_for",
]
