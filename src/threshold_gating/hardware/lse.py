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

from threshold_gating.hardware.cells import LENGTHS, MIRROR, WIDTHS, device, within
from threshold_gating.hardware.measure import edges, least_squares, timed
from threshold_gating.hardware.spice import Analysis, Netlist, Plot, Wave, batches, follows, run

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
        if self.models != "sky130":
            raise ValueError(f"a tree is made of sky130 transistors; got {self.models}.")
        within("the supply of a tree in V", self.supply, (1.7, 1.95))
        within("the width in um", self.size[0], WIDTHS)
        within("the length in um", self.size[1], LENGTHS)


Stage = list[tuple[str, list[str]]]  # of every group: its common source, and its gates


def stages(tree: Tree) -> list[Stage]:
    """The groups of transistors of every stage; a follower is behind each but the last one."""
    level = [f"i{k}" for k in range(tree.inputs)]
    wide = tree.inputs if tree.flat else 2
    out: list[Stage] = []
    while len(level) > 1:
        groups = [level[k : k + wide] for k in range(0, len(level), wide)]
        names = ["out"] if len(groups) == 1 else [f"s{len(out)}_{k}" for k in range(len(groups))]
        out.append(list(zip(names, groups, strict=True)))
        level = [f"f{name}" for name in names]
    return out


def netlist(tree: Tree, copies: int = 1, wave: Wave = (), **conditions: Any) -> Netlist:
    """Trees on the inputs vi0, vi1, ...; v(out) is log sum exp, lower by a constant.

    Every drain has a source that shows its current: shares of a tail are gates. `wave` moves the
    first input about the level, in units of the spread; the others then stand at its low end.
    """
    within("the number of trees", copies, (1, 10000))
    still = LEVEL - SPREAD if wave else LEVEL
    first = follows(wave, lambda side: LEVEL + SPREAD * side) if wave else f"{LEVEL:g}"
    lines = [f"vdd vdd 0 {tree.supply:g}", f"vi0 i0 0 {first}"]
    lines += [f"vi{k} i{k} 0 {still:g}" for k in range(1, tree.inputs)]
    for copy in range(copies):
        lines += _one(tree, _tag(copy))
    title = f"log sum exp of {tree.inputs}, {'one stage' if tree.flat else 'a tree of pairs'}"
    made = Netlist(title, tuple(lines), models=tree.models)
    return replace(made, **conditions)


def _tag(copy: int) -> str:
    return f"_{copy}" if copy else ""


def _one(tree: Tree, tag: str) -> list[str]:
    lines = [f"ib{tag} vdd mb{tag} {tree.tail:.6g}"]
    lines += [device(f"mb{tag}", "nfet", f"mb{tag} mb{tag} 0 0", tree.models, MIRROR)]
    if not tree.flat and tree.inputs > 2:  # a diode that sets the sources of the followers
        lines += [device(f"cb{tag}", "nfet", f"pb{tag} mb{tag} 0 0", tree.models, MIRROR)]
        lines += [device(f"qb{tag}", "pfet", f"pb{tag} pb{tag} vdd vdd", tree.models, MIRROR)]
    for k, stage in enumerate(stages(tree)):
        for source, gates in stage:
            wired = gates if k == 0 else [f"{gate}{tag}" for gate in gates]
            lines += _sum(tree, f"{source}{tag}", wired, tag)
            lines += [] if source == "out" else _follower(tree, f"{source}{tag}", tag)
    return lines


def _sum(tree: Tree, source: str, gates: list[str], tag: str) -> list[str]:
    lines = [device(f"t_{source}", "nfet", f"{source} mb{tag} 0 0", tree.models, MIRROR)]
    for k, gate in enumerate(gates):
        nodes = f"d{k}_{source} {gate} {source} {source}"
        lines.append(device(f"{k}_{source}", "nfet", nodes, tree.models, tree.size))
        lines.append(f"v{k}_{source} vdd d{k}_{source} 0")
    return lines


def _follower(tree: Tree, gate: str, tag: str) -> list[str]:
    """A pfet that lifts the level again, by what the stage before it lowered it or more."""
    source = f"f{gate}"
    return [
        device(f"b_{source}", "pfet", f"{source} pb{tag} vdd vdd", tree.models, MIRROR),
        device(f"f_{source}", "pfet", f"0 {gate} {source} {source}", tree.models, tree.size),
    ]


# What it answers


class Answers(NamedTuple):
    """Inputs [n, inputs], and of every copy v(out) [copies, n] and gates [copies, n, inputs]."""

    v: Tensor
    out: Tensor
    gates: Tensor


class Law(NamedTuple):
    """v(out) = gain LSE(tau v) / tau + shift, fitted: 1/V, 1, V, and the largest error in logits.

    A logit is 1 / tau volts, the unit in which attention sees an error. `gates` is the largest
    error of the gates of softmax.
    """

    tau: float
    gain: float
    shift: float
    error: float
    gates: float


def answers(
    tree: Tree, vectors: int = 48, draw: int = 0, copies: int = 1, **conditions: Any
) -> Answers:
    """Operating points at random inputs within the spread, and at some where one leads alone.

    The gate of an input is the product of the shares that its side takes of each tail on its way:
    what a tree of gates would pass on.
    """
    generator = torch.Generator().manual_seed(draw)
    v = torch.rand(vectors, tree.inputs, generator=generator, dtype=torch.float64) * 2 - 1
    v[: vectors // 4] = -1.0
    v[: vectors // 4, 0] = torch.linspace(-1, 1, vectors // 4, dtype=torch.float64)
    v = LEVEL + SPREAD * v
    groups = [
        [f"i(v{k}_{source}{{tag}})" for k in range(len(gates))]
        for stage in stages(tree)
        for source, gates in stage
    ]
    tags = [_tag(copy) for copy in range(copies)]
    currents = [name.format(tag=tag) for tag in tags for group in groups for name in group]
    keep = (*(f"v(out{tag})" for tag in tags), *currents)
    runs = [
        Analysis("op", keep, tuple(f"alter vi{k} dc={x:.9g}" for k, x in enumerate(row)))
        for row in v.tolist()
    ]
    plots = run(netlist(tree, copies, **conditions), *runs)
    return Answers(
        v,
        torch.stack([torch.stack([p[f"v(out{tag})"][0] for p in plots]) for tag in tags]),
        torch.stack([torch.stack([_gates(tree, p, tag) for p in plots]) for tag in tags]),
    )


def _gates(tree: Tree, plot: Plot, tag: str) -> Tensor:
    gates = torch.ones(tree.inputs, dtype=torch.float64)
    for stage in stages(tree):
        shares = []
        for source, members in stage:
            taken = torch.stack([plot[f"i(v{k}_{source}{tag})"][0] for k in range(len(members))])
            shares.append(taken / taken.sum())
        every = torch.cat(shares)
        gates = gates * every.repeat_interleave(tree.inputs // len(every))
    return gates


def law(v: Tensor, out: Tensor, gates: Tensor) -> Law:
    """Fit the law to inputs [n, inputs], outputs [n] and gates [n, inputs]."""
    start = (28.0, 1.0, (out - v.amax(1)).mean().item())
    tau, gain, shift = least_squares(lambda p: 1e3 * (_model(v, p) - out), start).tolist()
    return against(Law(tau, gain, shift, 0.0, 0.0), v, out, gates)


def against(known: Law, v: Tensor, out: Tensor, gates: Tensor) -> Law:
    """The same law with the errors of other outputs and gates, as of another copy."""
    p = v.new_tensor(known[:3])
    error = ((_model(v, p) - out).abs().max() * known.tau).item()
    off = (torch.softmax(known.tau * v, 1) - gates).abs().max().item()
    return known._replace(error=error, gates=off)


def _model(v: Tensor, p: Tensor) -> Tensor:
    return p[1] * torch.logsumexp(p[0] * v, 1) / p[0] + p[2]


def measure(tree: Tree, vectors: int = 48, **conditions: Any) -> Law:
    """The law of one tree."""
    found = answers(tree, vectors, **conditions)
    return law(found.v, found.out[0], found.gates[0])


class Spread(NamedTuple):
    """Mismatch: of every copy the law of a perfect tree with its errors, and a law of its own."""

    built: list[Law]
    trimmed: list[Law]


def mismatch(
    tree: Tree, copies: int = 100, seed: int = 1, vectors: int = 8, **conditions: Any
) -> Spread:
    """Monte Carlo: that many trees, each transistor with its own draw."""
    if copies < 2:
        raise ValueError(f"a spread needs 2 trees or more; got {copies}.")
    known = measure(tree, **conditions)
    parts = [
        answers(tree, vectors, copies=n, seed=each, **conditions)
        for n, each in batches(copies, seed)
    ]
    rows = [(a.v, *row) for a in parts for row in zip(a.out, a.gates, strict=True)]
    return Spread([against(known, *row) for row in rows], [law(*row) for row in rows])


def settling(tree: Tree, **conditions: Any) -> float:
    """Seconds to 1 % of the step after one input rose over the others by the spread and fell.

    The slower edge; nothing loads the output.
    """

    def driven(wave: Wave) -> Netlist:
        return netlist(tree, wave=wave, options=timed(tree.tail), **conditions)

    def level(plot: Plot) -> Tensor:
        return plot["v(out)"] / (2 * SPREAD)

    return max(edges(driven, ("v(out)",), level, 1e-13 / tree.tail, points=200))  # 0.1 pC
