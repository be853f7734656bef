"""One network four ways on the same inputs: float, integers, Verilog, and transistors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.watch import evaluating, fresh
from threshold_gating.hardware import cell_error, models
from threshold_gating.hardware.digital import bench
from threshold_gating.hardware.digital.format import Unit
from threshold_gating.hardware.digital.keys import FixedKeys
from threshold_gating.hardware.digital.network import FixedPoint, convert
from threshold_gating.hardware.digital.site import FixedGate, Kept
from threshold_gating.hardware.report import compared
from threshold_gating.hardware.spice import SpiceError
from threshold_gating.hardware.steering import Cell
from threshold_gating.instance import TG

KEYS = 64  # elements of a call whose registers are data, each a case of one code


class Row(NamedTuple):
    """One site: its format, how far integers are from float64, and what the Verilog gave."""

    name: str
    kind: str
    format: str
    error: float  # largest, in last bits of y, at the codes that came
    seen: int  # codes that came
    codes: int  # of them compared with the Verilog
    differ: int
    simulated: int  # settings of the registers that the Verilog had
    settings: int  # of so many different ones that came


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
        return bool(self.rows) and all(r.codes and not r.differ for r in self.rows)


def coverify(
    gated: nn.Module,
    inputs: Any,
    bits: int = 16,
    *,
    simulator: str = "iverilog",
    codes: int = 2000,
    analog: bool = True,
    tell: Callable[..., None] = lambda *_: None,
) -> Report:
    """Run a converted network in integers, then every code that came to a site in the Verilog.

    Args:
        gated: a network that `tg.convert(model, inputs=...)` made.
        inputs: as `tg.convert` takes them.
        bits: of every site.
        simulator: "iverilog", or "verilator", which is faster once compiled.
        codes: the most that are compared of a site and instance, evenly chosen; 0 for all.
        analog: also measure the instances as cells of transistors, where ngspice and models are.
        tell: told what is done.
    """
    made = convert(gated, bits, inputs=inputs)
    args, kwargs = arguments(inputs)
    for gate in made.gates():
        gate.kept = []
    tell("integers")
    made.eval()
    with torch.no_grad(), evaluating(gated):
        aim, got = gated(*fresh(args), **fresh(kwargs)), made(*fresh(args), **fresh(kwargs))
    output = compared(0, got, aim)
    rows = _compared(made, simulator, codes, tell)
    found, skipped = _cells(made, tell) if analog else ([], [])
    shown = (output.error, output.same, simulator, made.kept, found, skipped, made.notes())
    return Report(bits, rows, *shown)


def _compared(made: FixedPoint, simulator: str, codes: int, tell: Callable[..., None]) -> list[Row]:
    """Sites of one unit share a simulation: it is compiled once."""
    groups: dict[Unit, list[tuple[FixedGate, list[bench.Case]]]] = {}
    for gate in made.gates():
        if gate.kept:
            groups.setdefault(gate.unit, []).append((gate, _cases(gate, codes)))
    rows = {}
    for k, (unit, members) in enumerate(groups.items()):
        tell(f"Verilog, unit {k + 1} of {len(groups)}", k / len(groups))
        every = [case for _, cases in members for case in cases]
        found = iter(bench.check(unit, every, simulator))
        for gate, cases in members:
            mine = [next(found) for _ in cases]
            compared_codes, differ = sum(o.codes for o in mine), sum(o.differ for o in mine)
            seen = sum(kept.x.numel() for kept in gate.kept or ())
            settings = len({case.registers for case in cases}), _settings(gate)
            counts = (seen, compared_codes, differ, *settings)
            rows[gate.name] = Row(gate.name, gate.kind, str(gate.format), _off(gate), *counts)
    return [rows[gate.name] for gate in made.gates() if gate.name in rows]


def _cases(gate: FixedGate, codes: int) -> list[bench.Case]:
    """What came to a site, once each; where registers are data, some elements with their own."""
    cases = []
    for k, kept in enumerate(gate.kept or ()):
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(kept.registers)):
            cases += _single(gate, kept)
            continue
        pairs = torch.stack([kept.x, kept.v.expand_as(kept.x)], -1).reshape(-1, 2)
        pairs = torch.unique(pairs, dim=0)
        x, v = pairs[_evenly(len(pairs), codes)].unbind(1)
        cases.append(bench.case(f"{gate.name}/{k}", kept.registers, x, gate.unit, v))
    return cases


def _settings(gate: FixedGate) -> int:
    """How many different register values came to a site: of channels, of keys, of slopes."""
    found: set[tuple[Any, ...]] = set()
    for kept in gate.kept or ():
        leaves, form = tree_flatten(kept.registers)
        rows = [w.broadcast_to(kept.x.shape).flatten() for w in leaves if isinstance(w, Tensor)]
        plain = tuple(w for w in leaves if not isinstance(w, Tensor))
        each = torch.unique(torch.stack(rows, -1), dim=0).tolist() if rows else [()]
        found |= {(str(form), plain, *row) for row in each}
    return len(found)


def _single(gate: FixedGate, kept: Kept) -> list[bench.Case]:
    """Cases of one code: thresholds of keys, slopes of PReLU, registers of channels."""
    cases = []
    for i in _evenly(kept.x.numel(), KEYS).tolist():

        def own(leaf: Any, i: int = i) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return int(leaf.broadcast_to(kept.x.shape).reshape(-1)[i])

        written = tree_map(own, kept.registers)
        x, v = (w.reshape(-1)[i : i + 1] for w in (kept.x, kept.v.expand_as(kept.x)))
        cases.append(bench.case(f"{gate.name}/{i}", written, x, gate.unit, v))
    return cases


def _evenly(n: int, most: int) -> Tensor:
    if not most or n <= most:
        return torch.arange(n)
    return torch.linspace(0, n - 1, most).round().long()


def _off(gate: FixedGate) -> float:
    """The largest error against float64, at the codes that came, in last bits of y."""
    limit, worst = 2 ** (gate.format.bits - 1), 0.0
    for kept in gate.kept or ():
        wanted = torch.ldexp(kept.wanted, torch.tensor(gate.format.out)).clamp(-limit, limit - 1)
        worst = max(worst, (kept.y - wanted).abs().max().item())
    return worst


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
