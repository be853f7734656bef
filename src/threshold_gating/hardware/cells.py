"""The differential pair as a netlist: at any tail current, with an ideal or a real tail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.spice import Netlist

# A contacted source or drain is that long (sky130 design rules); its junction loads a node.
DIFFUSION = 0.29
# Sizes that the models cover, in micrometres.
WIDTHS, LENGTHS = (0.42, 100.0), (0.15, 20.0)
TAILS = (1e-10, 1e-4)
MIRROR = (5.0, 4.0)  # width and length of a current mirror: long, so that its current is steady
WIDE = 1e-6  # A; above it a mirror is as wide as keeps it within a fifth of the supply


@dataclass(frozen=True)
class Pair:
    """A differential pair: device, size in micrometres, tail in amperes, and where it stands."""

    models: str = "sky130-binned"
    device: str = "nfet"
    width: float = 5.0
    length: float = 1.0
    tail: float = 10e-9
    real: bool = False  # the tail is a current mirror, not a source
    supply: float = 0.0  # 0: that of the process
    common: float = 0.0  # common-mode input; 0: two thirds of the supply
    decoupling: float = 10e-12  # F on the bias line of a real tail

    def __post_init__(self) -> None:
        process = pdk.chosen(self.models)
        if self.device not in process.devices or self.device == "res":
            kinds = [kind for kind in process.devices if kind != "res"]
            raise ValueError(f"models {self.models} have no {self.device}; {', '.join(kinds)}.")
        within("the width in um", self.width, WIDTHS)
        within("the length in um", self.length, LENGTHS)
        within("the tail current in A", self.tail, TAILS)
        if not self.supply:
            object.__setattr__(self, "supply", process.supply)
        if not self.common:
            object.__setattr__(self, "common", round(self.supply * 2 / 3, 3))
        # Below half of its nominal supply a gate cannot lift its source off the ground.
        supplies = (process.supply / 2, round(process.supply * 1.1, 6))
        within(f"the supply of {self.models} in V", self.supply, supplies)
        within("the common mode in V", self.common, (0.0, self.supply))
        within("the capacitor on the bias line in F", self.decoupling, (0.0, 1e-9))

    @property
    def area(self) -> float:
        """Gate area of the two transistors (emitter area of a bipolar pair), in um^2."""
        return 2.0 if self.device == "npn" else 2 * self.width * self.length

    def check_swing(self, swing: float) -> None:
        """Refuse a differential input that drives a gate beyond the supply or below ground."""
        room = 2 * min(self.supply - self.common, self.common)
        if not 0 < swing <= room:
            raise ValueError(
                f"a swing of +-{swing:g} V does not fit between the rails: with a supply of "
                f"{self.supply:g} V and inputs about {self.common:g} V it may be up to "
                f"+-{room:g} V."
            )


def within(what: str, value: float, limits: tuple[float, float]) -> None:
    """Refuse a value outside of its limits, with the limits."""
    low, high = limits
    if not low <= value <= high:  # NaN too
        raise ValueError(f"{what} must be from {low:g} to {high:g}; got {value:g}.")


def device(
    name: str, kind: str, nodes: str, models: str, size: tuple[float, float], fingers: int = 1
) -> str:
    """The line of one transistor: drain gate source bulk, or collector base emitter substrate."""
    process = pdk.chosen(models)
    if kind == "npn":
        return f"x{name} {nodes} {process.devices[kind]}"
    unit = 1e-6 / process.unit  # a micrometre, as the netlist writes it
    width, length = size
    a, p = width * DIFFUSION, 2 * (width + DIFFUSION)
    drawn = f"w={width * unit:.6g} l={length * unit:.6g}" + (
        f" nf={fingers}" if fingers > 1 else ""
    )
    junction = f"ad={a * unit**2:.4g} as={a * unit**2:.4g} pd={p * unit:.4g} ps={p * unit:.4g}"
    return f"x{name} {nodes} {process.devices[kind]} {drawn} {junction}"


def pair(
    spec: Pair, *, copies: int = 1, drive: str = "0", one_sided: bool = False, **conditions: Any
) -> Netlist:
    """Pairs side by side on one input `vd`; `i(v1)`, `i(v2)` are the currents of the first.

    `drive` is the value of the input source, between the gates about the common mode, or on the
    first gate alone where it is one-sided.
    """
    within("the number of pairs", copies, (1, 10000))
    lines = [f"vdd vdd 0 {spec.supply:g}"]
    if one_sided:
        lines += [f"vc gm 0 {spec.common:g}", f"vd gp gm {drive}"]
    else:  # the resistors halve the input; they belong to the bench, not to the cell
        lines += [f"vc mid 0 {spec.common:g}", f"vd gp gm {drive}", "ra gp mid 1k", "rb mid gm 1k"]
    if spec.real:
        lines += [f"iref vdd ref {spec.tail:.6g}"]
        # The line of the bias serves many cells; its capacitor keeps one's step from the others.
        lines += [f"cref ref 0 {spec.decoupling:g}"] if spec.decoupling else []
        lines += [device("ref", "nfet", "ref ref 0 0", spec.models, mirror(spec.tail))]
    for k in range(copies):
        tag = str(k) if k else ""
        lines += [f"v1{tag} vdd d{tag} 0", f"v2{tag} vdd e{tag} 0"]
        size = (spec.width, spec.length)
        lines += [device(f"1{tag}", spec.device, f"d{tag} gp s{tag} 0", spec.models, size)]
        lines += [device(f"2{tag}", spec.device, f"e{tag} gm s{tag} 0", spec.models, size)]
        if spec.real:
            lines += [device(f"t{tag}", "nfet", f"s{tag} ref 0 0", spec.models, mirror(spec.tail))]
        else:
            lines += [f"it{tag} s{tag} 0 {spec.tail:.6g}"]
    made = Netlist(f"differential pair, {describe(spec)}", tuple(lines), models=spec.models)
    return replace(made, **conditions)


def mirror(tail: float) -> tuple[float, float]:
    """Width and length of the mirror that makes a tail current."""
    return MIRROR if tail <= WIDE else (max(MIRROR[0], round(tail / WIDE, 6)), 1.0)


def describe(spec: Pair) -> str:
    """A pair in words."""
    size = "" if spec.device == "npn" else f" {spec.width:g}/{spec.length:g} um"
    tail = "a mirror" if spec.real else "an ideal tail"
    return f"{spec.models} {spec.device}{size}, {spec.tail:.3g} A from {tail}, {spec.supply:g} V"
