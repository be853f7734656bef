"""log sum exp as a circuit: transistors on one tail, two at a time, as a tree (Section 4).

Transistors that share a source divide the tail current as softmax divides one, and the source
follows log sum exp of the gates: two transistors make max(a, b) + softplus(-|a - b|) in one step,
with no integrator. Wells are tied to sources, or the body effect would divide every stage by n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.hardware.cells import MIRROR, device
from threshold_gating.hardware.measure import least_squares
from threshold_gating.hardware.spice import Analysis, Netlist, run

LEVEL = 0.65  # volts about which the inputs stand
SPREAD = 0.1  # volts that they go to either side


@dataclass(frozen=True)
class Tree:
    """A tree of pairs (or one stage for all inputs); the tail in A, sizes in um."""

    inputs: int = 8
    tail: float = 10e-9
    flat: bool = False
    models: str = "sky130"
    size: tuple[float, float] = (5.0, 1.0)
    supply: float = 1.8

    def __post_init__(self) -> None:
        if self.inputs not in (2, 4, 8):
            raise ValueError(
                f"a tree has 2, 4 or 8 inputs, and no room for more stages between the rails; got "
                f"{self.inputs}."
            )
        if not 1e-9 <= self.tail <= 1e-7:
            raise ValueError(
                f"a tail from 1e-09 to 1e-07 A keeps the transistors in weak inversion, where the "
                f"law is exponential; got {self.tail:g} A."
            )


def netlist(tree: Tree, **conditions: Any) -> Netlist:
    """The tree on inputs vi0, vi1, ...; v(out) is log sum exp, lower by a constant."""
    lines = [f"vdd vdd 0 {tree.supply:g}", f"ib vdd mb {tree.tail:.6g}"]
    lines += [device("mb", "nfet", "mb mb 0 0", tree.models, MIRROR)]
    if not tree.flat and tree.inputs > 2:  # a diode that sets the sources of the followers
        lines += [device("cb", "nfet", "pb mb 0 0", tree.models, MIRROR)]
        lines += [device("qb", "pfet", "pb pb vdd vdd", tree.models, MIRROR)]
    lines += [f"vi{k} i{k} 0 {LEVEL:g}" for k in range(tree.inputs)]
    level = [f"i{k}" for k in range(tree.inputs)]
    wide = tree.inputs if tree.flat else 2
    stage = 0
    while len(level) > 1:
        last = len(level) == wide
        groups = [level[k : k + wide] for k in range(0, len(level), wide)]
        level = []
        for k, group in enumerate(groups):
            source = "out" if last else f"s{stage}_{k}"
            lines += _sum(tree, source, group)
            level.append(source if last else f"f{stage}_{k}")
            lines += [] if last else _follower(tree, source, level[-1])
        stage += 1
    title = f"log sum exp of {tree.inputs}, {'one stage' if tree.flat else 'a tree of pairs'}"
    made = Netlist(title, tuple(lines), models=tree.models)
    return replace(made, **conditions)


def _sum(tree: Tree, source: str, gates: list[str]) -> list[str]:
    lines = [device(f"t_{source}", "nfet", f"{source} mb 0 0", tree.models, MIRROR)]
    for k, gate in enumerate(gates):
        nodes = f"vdd {gate} {source} {source}"
        lines.append(device(f"{k}_{source}", "nfet", nodes, tree.models, tree.size))
    return lines


def _follower(tree: Tree, gate: str, source: str) -> list[str]:
    """A pfet that lifts the level again, by what the stage before it lowered it or more."""
    return [
        device(f"b_{source}", "pfet", f"{source} pb vdd vdd", tree.models, MIRROR),
        device(f"f_{source}", "pfet", f"0 {gate} {source} {source}", tree.models, tree.size),
    ]


class Law(NamedTuple):
    """v(out) = gain LSE(tau v) / tau + shift, fitted: 1/V, 1, V, and the largest error in logits.

    A logit is 1 / tau volts, the unit in which attention sees an error.
    """

    tau: float
    gain: float
    shift: float
    error: float


def measure(tree: Tree, vectors: int = 48, seed: int = 0, **conditions: Any) -> Law:
    """The law of a tree, from random inputs within the spread and from one that leads alone."""
    draw = torch.Generator().manual_seed(seed)
    v = torch.rand(vectors, tree.inputs, generator=draw, dtype=torch.float64) * 2 - 1
    v[: vectors // 4] = -1.0
    v[: vectors // 4, 0] = torch.linspace(-1, 1, vectors // 4, dtype=torch.float64)
    v = LEVEL + SPREAD * v
    runs = [
        Analysis("op", ("v(out)",), tuple(f"alter vi{k} dc={x:.9g}" for k, x in enumerate(row)))
        for row in v.tolist()
    ]
    plots = run(netlist(tree, **conditions), *runs)
    out = torch.stack([plot["v(out)"][0] for plot in plots])
    return law(v, out)


def law(v: Tensor, out: Tensor) -> Law:
    """Fit the law to inputs [n, inputs] and outputs [n]."""
    start = (28.0, 1.0, (out - v.amax(1)).mean().item())

    def model(p: Tensor) -> Tensor:
        return p[1] * torch.logsumexp(p[0] * v, 1) / p[0] + p[2]

    tau, gain, shift = p = least_squares(lambda p: 1e3 * (model(p) - out), start)
    error = (model(p) - out).abs().max() * tau
    return Law(tau.item(), gain.item(), shift.item(), error.item())
