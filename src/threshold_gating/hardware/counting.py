"""`count`: the conversions, gates and digital activations of a run in one design."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.conversions import Node, Product, Trace

WIRED = "+"  # currents of the tiles of a sum add up on a wire
DESIGNS = ("digital", "digital+", "analog", "analog+")
Totals = defaultdict[str, float]


def _totals() -> Totals:
    return defaultdict(float)


@dataclass
class Counts:
    """What one design does in the run, by layer, and what it needs on the chip."""

    adc: Totals = field(default_factory=_totals)
    dac: Totals = field(default_factory=_totals)
    crossbar: Totals = field(default_factory=_totals)  # MACs times activity, then converted
    gated: Totals = field(default_factory=_totals)  # the same in front of gates
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
    layer: list[str] = []  # the last one on the way of a signal
    converted: set[int] = set()
    pairs: dict[tuple[str, str], int] = {}
    tiles: dict[str, int] = {}
    drivers: dict[str, int] = {}

    def convert(k: int) -> None:
        if analog[k] and k not in converted:
            converted.add(k)
            found.adc[layer[k]] += run.nodes[k].size
            tiles[layer[k]] = converters(products[layer[k]])

    def converters(p: Product) -> int:
        down = p.tiles(settings.rows, settings.columns)[0] if wired else 1
        return tiles_of(p, settings) // down

    products = layers(run)
    for node in run.nodes:
        sources = node.inputs
        stays = bool(sources) and node.kind != "digital" and all(analog[k] for k in sources)
        where = next((layer[k] for k in sources if layer[k]), "input")
        if not stays:
            for k in sources:
                convert(k)
        if node.product is not None:
            p, where = node.product, label(node)
            down, across = p.tiles(settings.rows, settings.columns)
            if not stays:
                found.dac[where] += p.count * p.rows * p.groups * across
                drivers[where] = p.rows * p.groups * across
            stays = gated and not p.overlaps and (down == 1 or wired)
            if not stays:
                sums = 1 if wired else down
                found.adc[where] += p.count * p.columns * p.groups * sums
                tiles[where] = converters(p)
            (found.gated if stays else found.crossbar)[where] += p.macs * p.activity
        elif node.kind == "gate" and stays:
            found.decisions[where] += node.size * node.tails
            pairs[where, node.op] = node.channels * node.tails
        elif node.kind == "gate":
            found.activations[where] += node.size
        analog.append(stays)
        layer.append(where)
    for k in run.outputs:
        convert(k)
    found.gates, found.converted_tiles = sum(pairs.values()), sum(tiles.values())
    found.drivers = sum(drivers.values())
    return found


def label(node: Node) -> str:
    """The name of a layer, with its size where its weights have no name."""
    p = node.product
    assert p is not None
    return node.name if node.name != "computed weights" else f"computed {p.rows}x{p.columns}"


def layers(run: Trace) -> dict[str, Product]:
    """Every layer by name, with the vectors of all its calls."""
    found: dict[str, Product] = {}
    for node in run.nodes:
        if node.product is not None:
            p, name = node.product, label(node)
            calls = p.count + (found[name].count if name in found else 0)
            found[name] = Product(p.rows, p.columns, p.groups, calls, p.overlaps, p.activity)
    return found


def tiles_of(p: Product, settings: Assumptions) -> int:
    return math.prod(p.tiles(settings.rows, settings.columns)) * p.groups
