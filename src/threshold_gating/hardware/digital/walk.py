"""Every distinct instance of a network in Verilog: what its circuits are given, and what they gave.

Instances differ in their registers alone, so circuits of one unit share one simulation, which walks
through all of their settings. A setting has every code of x, or codes evenly chosen where there are
too many. Where branches read another input, or registers are data as the thresholds of keys, there
is no end of them: different elements that came are taken.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from threshold_gating.hardware.digital import bench, codes, tree
from threshold_gating.hardware.digital.format import Registers
from threshold_gating.hardware.digital.keys import FixedKeys
from threshold_gating.hardware.digital.site import FixedGate
from threshold_gating.hardware.digital.verilog import Circuit, cell, circuit, word

ELEMENTS = 2**14  # of a site, where they are chosen from those that came
MANY = 2**19  # codes, from which on verilator is faster, which compiles for ten seconds
MOST = 2**22  # codes of all settings together, where nothing else is asked for


class Row(NamedTuple):
    """One circuit of a site: how far its integers are from float64, and what the Verilog gave."""

    name: str
    kind: str
    format: str
    error: float  # largest, in last bits of the result, at the codes that came
    seen: int  # codes that came
    codes: int  # compared with the Verilog
    differ: int
    simulated: int  # settings of the registers that the Verilog had
    settings: int  # of so many different ones that came
    every: bool  # whether each of those had every code
    each: str  # which codes a setting had


class Walk(NamedTuple):
    """What is compared of a circuit: its cases, and a row that lacks the outcome."""

    circuit: Circuit
    cases: list[bench.Case]
    row: Row


def compare(
    gates: Sequence[FixedGate], simulator: str | None, most: int | None, tell: Callable[..., None]
) -> tuple[list[Row], str]:
    """Rows of all sites, and the simulators that were used.

    Args:
        gates: sites that kept what came to them.
        simulator: None for iverilog, or verilator for many codes where it is installed.
        most: codes of a setting; 0 for all, None for as many as there is room for.
        tell: told what is done.
    """
    seen = [gate for gate in gates if gate.kept]
    swept = {g.name: distinct for g in seen if (distinct := _instances(g)) is not None}
    written = {(gate.unit, r) for gate in seen for r in swept.get(gate.name, ())}
    room = MOST if simulator == "verilator" or shutil.which("verilator") else MANY
    share = max(room // max(len(written), 1), 64) if most is None else most
    walks = []
    for gate in seen:
        found = swept.get(gate.name)
        walks.append(_elements(gate) if found is None else _sweep(gate, found, share))
        if isinstance(gate, FixedKeys):
            walks.append(_pairs(gate))
    outcomes, used = _simulated(walks, simulator, tell)
    rows = []
    for walk in walks:
        mine = [outcomes[c.name] for c in walk.cases]
        codes_, differ = sum(o.codes for o in mine), sum(o.differ for o in mine)
        rows.append(walk.row._replace(codes=codes_, differ=differ))
    return rows, used


def _simulated(
    walks: Sequence[Walk], simulator: str | None, tell: Callable[..., None]
) -> tuple[dict[str, bench.Outcome], str]:
    """Outcomes by name, and the simulators that were used; a circuit is compiled once."""
    groups: dict[str, list[Walk]] = {}
    for walk in walks:
        groups.setdefault(f"{walk.circuit.instance} {walk.circuit.text}", []).append(walk)
    used: set[str] = set()
    outcomes: dict[str, bench.Outcome] = {}
    for k, members in enumerate(groups.values()):
        cases = list({c.name: c for walk in members for c in walk.cases}.values())
        if cases:
            tell(f"Verilog, circuit {k + 1} of {len(groups)}", k / len(groups))
            used.add(tool := simulator or _faster(sum(len(c.x) for c in cases)))
            outcomes |= {o.name: o for o in bench.check(members[0].circuit, cases, tool)}
    return outcomes, " and ".join(sorted(used))


def _faster(count: int) -> str:
    return "verilator" if count >= MANY and shutil.which("verilator") else "iverilog"


# Sites whose settings are few


def _instances(gate: FixedGate) -> list[Registers] | None:
    """Every setting of a site, once each; None where they, or branches, are data."""
    if isinstance(gate, FixedKeys) or any(kept.v is not kept.x for kept in gate.kept or ()):
        return None
    found: dict[Registers, None] = {}
    for kept in gate.kept or ():
        found |= dict.fromkeys(_settings(kept.registers))
    return list(found)


def _settings(r: Registers) -> Iterator[Registers]:
    """The different rows of registers that are tensors, as numbers."""
    leaves, form = tree_flatten(r)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return iter([r])
    own = [c.flatten().cpu() for c in torch.broadcast_tensors(*tensors)]  # type: ignore[no-untyped-call]
    return _written(leaves, form, own, _distinct(own, own[0].numel()))


def _sweep(gate: FixedGate, settings: Sequence[Registers], most: int) -> Walk:
    """Every code of x for every setting; sites with the same setting share its case."""
    every = codes.every_code(gate.unit.bits)
    x = every[_evenly(len(every), most)]
    made = circuit(gate.unit)
    cases = [bench.case(f"{gate.unit} {r}", r, x, gate.unit) for r in settings]
    said = f"all {len(x):,} codes" if len(x) == len(every) else f"{len(x):,} of {len(every):,}"
    counts = (len(settings), len(settings), len(x) == len(every), said)
    return Walk(made, cases, _row(gate, *counts))


# Sites whose settings, or branches, are data


def _elements(gate: FixedGate) -> Walk:
    """Different elements that came, each with its registers, and what the network had for y."""
    calls = gate.kept or []
    share = max(ELEMENTS // len(calls), 64)
    grouped: dict[Registers, list[Tensor]] = {}
    came: set[Registers] = set()
    total = 0
    for kept in calls:
        leaves, form = tree_flatten(kept.registers)
        own = [_flat(w, kept.x) for w in leaves if isinstance(w, Tensor)]
        flows = torch.stack([_flat(t, kept.x) for t in (kept.x, kept.v, kept.y)])
        came |= set(_written(leaves, form, own, _distinct(own, flows[0].numel())))
        at = _distinct([*own, flows[0], flows[1]], flows[0].numel())
        total += len(at)
        at = at[_evenly(len(at), share)]
        for r, row in zip(_written(leaves, form, own, at), flows.T[at], strict=True):
            grouped.setdefault(r, []).append(row)
    cases = []
    for k, (r, rows) in enumerate(grouped.items()):
        x, v, y = torch.stack(rows).unbind(-1)
        cases.append(bench.Case(f"{gate.name}/{k}", word(r, gate.unit), x, v, y))
    said = f"{sum(len(c.x) for c in cases):,} of {total:,} elements that came"
    return Walk(circuit(gate.unit), cases, _row(gate, len(cases), len(came), False, said))


def _flat(t: Tensor, x: Tensor) -> Tensor:
    return t.broadcast_to(x.shape).flatten().cpu()


def _distinct(columns: Sequence[Tensor], n: int) -> Tensor:
    """The places of one element for each different row, in the order of the columns."""
    key = torch.zeros(n, dtype=torch.long)
    for column in columns:
        values, place = torch.unique(column, return_inverse=True)
        key = torch.unique(key * len(values) + place, return_inverse=True)[1]
    found = torch.zeros(int(key.max()) + 1 if n else 0, dtype=torch.long)
    return found.scatter_(0, key, torch.arange(n))


def _written(
    leaves: Sequence[Any], form: Any, own: Sequence[Tensor], at: Tensor
) -> Iterator[Registers]:
    """The registers of some elements, as numbers."""
    columns = iter([column[at].tolist() for column in own])
    every = [
        next(columns) if isinstance(leaf, Tensor) else itertools.repeat(leaf, len(at))
        for leaf in leaves
    ]
    return (tree_unflatten(list(values), form) for values in zip(*every, strict=True))


def _pairs(gate: FixedKeys) -> Walk:
    """The cell of a tree, at pairs that came."""
    a, b = gate.pairs.distinct()
    at = _evenly(len(a), 4 * ELEMENTS)
    r, f = tree.lowered(gate.format, gate.unit), gate.format
    case = bench.pairs(f"{gate.name}/tree", a[at], b[at], r, gate.unit)
    fraction, lowest = f.fraction + gate.unit.finer, tree.off(gate.unit)
    z = [codes.real(n, fraction).where(n > lowest, -torch.inf) for n in (case.x, case.v)]
    wanted = torch.ldexp(torch.logaddexp(*z), torch.tensor(fraction)).clamp(lowest, -lowest - 1)
    said = f"{len(at):,} of {len(a):,} pairs that came"
    row = Row(
        f"{gate.name}/tree",
        "pair",
        f"{tree.width(gate.unit)} bits, z / 2^{fraction}",
        (case.y - wanted).abs().max().item() if len(at) else 0.0,
        gate.pairs.seen,
        0,
        0,
        1,
        1,
        False,
        said,
    )
    return Walk(cell(gate.unit), [case] if len(at) else [], row)


def _row(gate: FixedGate, simulated: int, settings: int, every: bool, each: str) -> Row:
    seen = sum(kept.x.numel() for kept in gate.kept or ())
    shown = (gate.name, gate.kind, str(gate.format), _off(gate), seen, 0, 0)
    return Row(*shown, simulated, settings, every, each)


def _off(gate: FixedGate) -> float:
    """The largest error against float64, at the codes that came, in last bits of y."""
    limit, worst = 2 ** (gate.format.bits - 1), 0.0
    for kept in gate.kept or ():
        wanted = torch.ldexp(kept.wanted, torch.tensor(gate.format.out)).clamp(-limit, limit - 1)
        worst = max(worst, (kept.y - wanted).abs().max().item())
    return worst


def _evenly(n: int, most: int) -> Tensor:
    if not most or n <= most:
        return torch.arange(n)
    return torch.linspace(0, n - 1, most, dtype=torch.float64).round().long()
