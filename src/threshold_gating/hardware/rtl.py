"""Activations as a circuit: Verilog of the gate unit, checked code by code, and what it takes.

unit = fixed_point.unit_for(TAXONOMY["silu"])
print(rtl.text(unit))                                     # synthesizable Verilog
rtl.verify({"silu": TAXONOMY["silu"]})                    # every code, two simulators
rtl.synthesise(unit)                                      # area and delay on standard cells
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from threshold_gating.hardware.digital import bench, synthesis, tree
from threshold_gating.hardware.digital.bench import SIMULATORS, Outcome
from threshold_gating.hardware.digital.bench import ToolError as ToolError
from threshold_gating.hardware.digital.codes import every_code, saturated
from threshold_gating.hardware.digital.format import Format, Unit, registers, unit_for
from threshold_gating.hardware.digital.synthesis import Fpga, Netlist
from threshold_gating.hardware.digital.verilog import (
    Circuit,
    cell,
    circuit,
    latency,
    small_parameters,
    text,
)
from threshold_gating.hardware.fixed_point import format_for
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
    return _verified(circuit(chip, small), cases, simulators)


def verify_pairs(
    unit: Unit,
    fractions: Sequence[int],
    *,
    pairs: int = 2**20,
    simulators: Sequence[str] = SIMULATORS,
) -> Verified:
    """Compare the cell of a softmax tree with the integers, for logits of these fraction bits.

    Every pair of codes, where there are no more than `pairs`; otherwise so many drawn at random,
    half of them near each other, where the cell does most.
    """
    width = tree.width(unit)
    if 4**width <= pairs:
        a, b = (each.flatten() for each in torch.meshgrid([every_code(width)] * 2, indexing="ij"))
    else:
        drawn = torch.Generator().manual_seed(0)
        a, far = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (2, pairs), generator=drawn)
        near = saturated(a + (far >> width // 2), width)
        b = torch.where(torch.arange(pairs) % 2 == 0, far, near)
    formats = [Format(unit.bits, fraction, 0) for fraction in fractions]
    cases = [bench.pairs(str(f), a, b, tree.lowered(f, unit), unit) for f in formats]
    return _verified(cell(unit), cases, simulators)


def _verified(made: Circuit, cases: Sequence[bench.Case], simulators: Sequence[str]) -> Verified:
    return Verified({each: bench.check(made, cases, each) for each in simulators}, bench.lint(made))


def lint(unit: Unit, small: int = 0) -> str:
    """What verilator -Wall warns of."""
    return bench.lint(circuit(unit, small))


def synthesise(
    unit: Unit, *, pipeline: bool = True, small: int = 0, cells: str = "sky130"
) -> Netlist:
    """Area and delay of a unit on standard cells; registers are inputs, and not counted."""
    made = circuit(unit, small, pipeline)
    return synthesis.synthesise(made.text, made.top, made.parameters, cells)


def on_ice40(unit: Unit, *, pipeline: bool = True, small: int = 0, dsp: bool = False) -> Fpga:
    """What a unit takes of an iCE40 FPGA."""
    made = circuit(unit, small, pipeline)
    return synthesis.on_ice40(made.text, made.top, made.parameters, dsp)


def cycles(unit: Unit, small: int) -> int:
    """From x to y: in the pipeline, or in the small unit, which takes no other x meanwhile."""
    if not small:
        return latency(unit)
    digits = small_parameters(unit, small)["DIGITS"]
    steps = max(unit.branches, 2) - 1
    products = (1 + steps) * (2 if unit.square else 1) + (2 * steps if unit.gate else 0)
    return 1 + products * digits


__all__ = [
    "Circuit",
    "Verified",
    "cell",
    "circuit",
    "cycles",
    "latency",
    "lint",
    "on_ice40",
    "synthesise",
    "text",
    "verify",
    "verify_pairs",
]
