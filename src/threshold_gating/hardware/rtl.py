"""Activations as a circuit: Verilog of the gate unit, checked code by code, and what it takes.

unit = fixed_point.unit_for(TAXONOMY["silu"])
print(rtl.text(unit))                                     # synthesizable Verilog
rtl.verify({"silu": TAXONOMY["silu"]})                    # every code, two simulators
rtl.synthesise(unit)                                      # area and delay on standard cells
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from threshold_gating.hardware.digital import bench, synthesis
from threshold_gating.hardware.digital.bench import SIMULATORS, Outcome, lint
from threshold_gating.hardware.digital.bench import ToolError as ToolError
from threshold_gating.hardware.digital.format import Format, Unit, registers, unit_for
from threshold_gating.hardware.digital.synthesis import Fpga, Netlist
from threshold_gating.hardware.digital.verilog import latency, parameters, text
from threshold_gating.hardware.fixed_point import every_code, format_for
from threshold_gating.instance import TG


class Verified(NamedTuple):
    """Outcomes by simulator, and what the linter warned of."""

    outcomes: dict[str, list[Outcome]]
    lint: str

    @property
    def exact(self) -> bool:
        """Whether every code of every case agreed in every simulator."""
        return all(o.codes > 0 and not o.differ for each in self.outcomes.values() for o in each)


def verify(
    instances: Mapping[str, TG],
    bits: int = 16,
    *,
    unit: Unit | None = None,
    formats: Mapping[str, Format] | None = None,
    simulators: Sequence[str] = SIMULATORS,
    small: int = 0,
) -> Verified:
    """Compare the Verilog with the integers, at every code of x, for instances in one unit."""
    chip = unit or unit_for(*instances.values(), bits=bits)
    codes = every_code(chip.bits)
    cases = []
    for name, t in instances.items():
        f = (formats or {}).get(name) or format_for(t, chip.bits)
        cases.append(bench.case(name, registers(t, f, chip), codes, chip))
    found = {each: bench.check(chip, cases, each, small) for each in simulators}
    return Verified(found, lint(chip, small))


def synthesise(
    unit: Unit, *, pipeline: bool = True, small: int = 0, cells: str = "sky130"
) -> Netlist:
    """Area and delay of a unit on standard cells; registers are inputs, and not counted."""
    top, given = _top(unit, pipeline, small)
    return synthesis.synthesise(text(unit), top, given, cells)


def on_ice40(unit: Unit, *, pipeline: bool = True, small: int = 0, dsp: bool = False) -> Fpga:
    """What a unit takes of an iCE40 FPGA."""
    top, given = _top(unit, pipeline, small)
    return synthesis.on_ice40(text(unit), top, given, dsp)


def _top(unit: Unit, pipeline: bool, small: int) -> tuple[str, dict[str, int]]:
    if small:
        return "tg_unit_small", bench.small_parameters(unit, small)
    return "tg_unit", parameters(unit, pipeline)


def cycles(unit: Unit, small: int) -> int:
    """From x to y: in the pipeline, or in the small unit, which takes no other x meanwhile."""
    if not small:
        return latency(unit)
    digits = bench.small_parameters(unit, small)["DIGITS"]
    steps = max(unit.branches, 2) - 1
    products = (1 + steps) * (2 if unit.square else 1) + (2 * steps if unit.gate else 0)
    return 1 + products * digits


__all__ = [
    "Verified",
    "cycles",
    "latency",
    "lint",
    "on_ice40",
    "synthesise",
    "text",
    "verify",
]
