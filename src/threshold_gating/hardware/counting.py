"""`count`: the conversions, gates and digital activations of a run in one design."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.conversions import Product, Trace

WIRED = "+"  # currents of the tiles of a sum add up on a wire
DESIGNS = ("digital", "digital+", "analog", "analog+")
INPUTS = "(inputs)"  # of what comes before the first layer; no layer has such a name
Totals = defaultdict[str, float]


def _totals() -> Totals:
    return defaultdict(float)


@dataclass
class Counts:
    """What one design does in the run, by layer, and what it needs on the chip."""

    adc: Totals = field(default_factory=_totals)
    dac: Totals = field(default_factory=_totals)
    crossbar: Totals = field(default_factory=_totals)  # MACs times activity, read by converters
    gated: Totals = field(default_factory=_totals)  # the same, read by gates
    decisions: Totals = field(default_factory=_totals)  # tail currents switched
    activations: Totals = field(default_factory=_totals)  # digital ones
    gates: int = 0  # pairs on the chip
    converted_tiles: int = 0  # that have an ADC
    drivers: int = 0  # rows that have a DAC

    def of(self, name: str) -> Counts:
        """What one layer does in the run."""
        one = Counts()
        for part in ("adc", "dac", "crossbar", "gated", "decisions", "activations"):
            getattr(one, part)[name] = getattr(self, part)[name]
        return one


def count(run: Trace, settings: Assumptions, design: str) -> Counts:
    """Follow every signal of a run through one design; converters only where it is not analog."""
    if design not in DESIGNS:
        raise ValueError(f"energy: no design {design!r}; there are {', '.join(DESIGNS)}.")
    gated, wired = design.startswith("analog"), design.endswith(WIRED)
    found = Counts()
    analog: list[bool] = []
    last: list[int] = []  # the last product on the way of a signal
    converted: set[int] = set()
    pairs: dict[tuple[str, str, int], int] = {}
    tiles: dict[str, int] = {}
    drivers: dict[str, int] = {}
    seen: defaultdict[tuple[int, str], int] = defaultdict(int)

    def convert(k: int) -> None:
        """By the converters of the last layer on the way; columns side by side have their own."""
        if not analog[k] or k in converted:
            return
        converted.add(k)
        if run.nodes[k].op in ("cat", "stack"):
            for source in run.nodes[k].inputs:
                convert(source)
            return
        name = layer(run, last[k])
        found.adc[name] += run.nodes[k].size
        tiles[name] = converters(products[name])

    def converters(p: Product) -> int:
        down = p.tiles(settings.rows, settings.columns)[0] if wired else 1
        return tiles_of(p, settings) // down

    products = layers(run)
    for index, node in enumerate(run.nodes):
        sources = node.inputs
        stays = bool(sources) and node.kind != "digital" and all(analog[k] for k in sources)
        before = max((last[k] for k in sources), default=-1)
        where = layer(run, before)
        if not stays:
            for k in sources:
                convert(k)
        if node.product is not None:
            p, where, before = node.product, node.name, index
            down, across = p.tiles(settings.rows, settings.columns)
            if not stays and not (gated and node.rests):  # a row at zero needs no driver
                found.dac[where] += p.count * p.rows * p.groups * across
                drivers[where] = p.rows * p.groups * across
            stays = gated and not p.overlaps and (down == 1 or wired)
            if not stays:
                sums = 1 if wired else down
                found.adc[where] += p.count * p.columns * p.groups * sums
                tiles[where] = converters(p)
        elif node.kind == "gate" and stays:
            found.decisions[where] += node.size * node.tails
            seen[before, node.op] += 1  # gates behind one call are several, those of calls are one
            pairs[where, node.op, seen[before, node.op]] = node.channels * node.tails
        elif node.kind == "gate":
            found.activations[where] += node.size
        analog.append(stays)
        last.append(before)
    for k in run.outputs:
        convert(k)
    read = _read(run, converted)
    for index, node in enumerate(run.nodes):
        if node.product is not None:
            held = analog[index] and index not in read
            part = found.gated if held else found.crossbar
            part[node.name] += node.product.macs * node.product.activity
    found.gates, found.converted_tiles = sum(pairs.values()), sum(tiles.values())
    found.drivers = sum(drivers.values())
    return found


def _read(run: Trace, converted: set[int]) -> set[int]:
    """What reaches a converter by wires alone: its tiles are on for as long as the converter."""
    found: set[int] = set()
    left = list(converted)
    while left:
        k = left.pop()
        if k not in found:
            found.add(k)
            left += run.nodes[k].inputs if run.nodes[k].kind == "wires" else ()
    return found


def layer(run: Trace, k: int) -> str:
    """The name of a product's layer; of none the network's inputs."""
    return run.nodes[k].name if k >= 0 else INPUTS


def layers(run: Trace) -> dict[str, Product]:
    """Every layer by name, with the vectors of all its calls."""
    found: dict[str, Product] = {}
    for node in run.nodes:
        if node.product is not None:
            p, name = node.product, node.name
            calls = p.count + (found[name].count if name in found else 0)
            found[name] = Product(p.rows, p.columns, p.groups, calls, p.overlaps, p.activity)
    return found


def tiles_of(p: Product, settings: Assumptions) -> int:
    return math.prod(p.tiles(settings.rows, settings.columns)) * p.groups
