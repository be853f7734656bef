"""One network four ways on the same inputs: float, integers, Verilog, and transistors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from threshold_gating.conversion.audit import beside, execute
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.watch import fresh
from threshold_gating.hardware import cell_error, models
from threshold_gating.hardware.digital.keys import FixedKeys
from threshold_gating.hardware.digital.network import FixedPoint, convert
from threshold_gating.hardware.digital.walk import Row as Row
from threshold_gating.hardware.digital.walk import compare
from threshold_gating.hardware.report import compared
from threshold_gating.hardware.spice import SpiceError
from threshold_gating.hardware.steering import Cell
from threshold_gating.instance import TG


class Analog(NamedTuple):
    """An instance as a cell of transistors: the largest error of full scale, and trimmed."""

    name: str
    error: float
    trimmed: float


class Report(NamedTuple):
    """What was compared, and what could not be."""

    bits: int
    rows: list[Row]
    output: float  # RMS error of the network's output over its RMS
    same: float | None  # rows of the output with the same largest entry
    simulator: str
    kept: tuple[str, ...]
    analog: list[Analog]
    skipped: list[str]
    notes: list[str]

    @property
    def exact(self) -> bool:
        """Whether integers and Verilog agree at every code that was compared."""
        compared_all = all(r.codes or not r.seen for r in self.rows)
        return (
            any(r.codes for r in self.rows)
            and compared_all
            and not any(r.differ for r in self.rows)
        )


def coverify(
    gated: nn.Module,
    inputs: Any,
    bits: int = 16,
    *,
    simulator: str | None = None,
    codes: int | None = None,
    analog: bool = True,
    tell: Callable[..., None] = lambda *_: None,
) -> Report:
    """Run a converted network in integers, then every distinct instance of it in Verilog.

    Args:
        gated: a network that `tg.convert(model, inputs=...)` made.
        inputs: as `tg.convert` takes them.
        bits: of every site.
        simulator: "iverilog" or "verilator"; None for the faster one.
        codes: the most that an instance has of all codes of x, evenly chosen; 0 for all, None for
            as many as 2^22 codes of all instances leave.
        analog: also measure the instances as cells of transistors, where ngspice and models are.
        tell: told what is done.
    """
    made = convert(gated, bits, inputs=inputs)
    args, kwargs = arguments(inputs)
    for gate in made.gates():
        gate.kept = []
    tell("integers")
    made.eval()
    aim, ran = execute(gated, args, kwargs)
    with torch.no_grad():
        got = made(*fresh(args), **fresh(kwargs))
    output = compared(0, got, aim)
    rows, used = compare(list(made.gates()), simulator, codes, tell)
    found, skipped = _cells(made, tell) if analog else ([], [])
    kept = (*made.kept, *(f"{op.op} in {op.module or 'the network'}" for op in ran.left))
    notes = [*made.notes(), *([f"In float, {said}"] if (said := beside(ran)) else [])]
    shown = (output.error, output.same, used, kept, found, skipped, notes)
    return Report(bits, rows, *shown)


def _cells(made: FixedPoint, tell: Callable[..., None]) -> tuple[list[Analog], list[str]]:
    """Every distinct instance as a cell of transistors, and what could not be measured, and why."""
    distinct: dict[TG, str] = {}
    for gate in made.gates():
        for t in gate.instances[:1]:
            distinct.setdefault(t, gate.kind if not isinstance(gate, FixedKeys) else "sigmoid")
    found: list[Analog] = []
    skipped: list[str] = []
    for t, name in distinct.items():
        tell(f"transistors: {name}")
        try:
            cell = Cell(name, t)
            answer = cell_error.response(cell)
        except (SpiceError, models.ModelsMissingError) as error:
            return found, [*skipped, f"transistors: {error}"]
        except ValueError as error:  # no such cell: K or a slope that mirrors cannot make
            skipped.append(f"{name}: {error}")
            continue
        m = cell_error.match(cell, answer.x, answer.y[0])
        if math.isfinite(m.error):
            found.append(Analog(name, m.error, m.trimmed))
    return found, skipped
