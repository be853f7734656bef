"""The branch cell: an instance as a circuit in which each branch is the tail of a gate.

y = sum_k g_k (s_k x + c_k) needs a product of gate and branch. A differential pair multiplies its
tail current by its gate, so branch k, as a current I_b + (s_k x + c_k) I_u, is the tail of K
transistors with gate voltages that are the gate's log odds; the k-th of them leads to the output.
The bias I_b keeps currents positive, and since gates add up to one the output is I_b + y I_u.
K = 2 is two pairs with crossed outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from threshold_gating.hardware import devices
from threshold_gating.hardware.cells import LENGTHS, MIRROR, WIDTHS, device, within
from threshold_gating.hardware.spice import Netlist, Wave, follows
from threshold_gating.instance import TG

DEPTH = 0.8  # of the bias: how far a branch current goes to either side
COMMON = 1.0  # volts of the gate that stands still: pair and mirror below it need 0.75
SATURATION = 0.2  # volts that a current mirror needs to work
SHEET = (2000.0, 0.35)  # ohms per square and width in um of the resistor res_xhigh_po
BIASES = (1e-9, 1e-5)
RAMP = 1.0  # seconds of a sweep of x, slow beside every time constant of a cell
FINGERS = 8  # of the transistors of a mirror
RATIOS = (0.02, 8.0)  # of a current mirror
MIDDLE = 0.85  # volts of the input of a class-AB branch: a pfet diode and a follower above it
PFOLLOWER = (20.0, 0.5)  # width and length of its pfet: wide, so that its gate stays above ground
QUIET = (1e-9, 1e-7)
AB_BIASES = (1e-8, 2e-7)

SWEEP: Wave = ((0.0, -1.0), (RAMP, 1.0))


@dataclass(frozen=True)
class Cell:
    """A branch cell of an instance: currents in A, voltages in V, sizes in um.

    `tau` is what the pair is taken to have (1/V); 0 takes it from the presets. `span` is the
    largest |x|; 0 is the one that makes the swing, or 1.5 thresholds for a hard gate. `quiet` is
    the current at rest of a class-AB branch (A); 0 lifts every branch by the bias instead.
    """

    name: str
    instance: TG
    bias: float = 100e-9
    swing: float = 0.2
    real: bool = True
    device: str = "nfet"
    models: str = "sky130"
    width: float = 5.0
    length: float = 1.0
    supply: float = 1.8
    tau: float = 0.0
    span: float = 0.0
    quiet: float = 0.0

    def __post_init__(self) -> None:
        _check_instance(self.name, self.instance)
        _check_parts(self)
        if self.quiet:
            _check_class_ab(self)
        if not BIASES[0] <= self.bias <= BIASES[1]:
            raise ValueError(
                f"the bias current must be from {BIASES[0]:g} to {BIASES[1]:g} A, where tau is "
                f"known; got {self.bias:g} A."
            )
        _check_rails(self)
        if not self.tau:
            object.__setattr__(self, "tau", expected_tau(self.device, self.bias))
        if not self.span:
            object.__setattr__(self, "span", _span(self))
        _check_reach(self)

    @cached_property
    def taus(self) -> tuple[float, ...]:
        """Sharpness of every threshold per unit of x; a hard gate gets what the swing gives."""
        t = self.instance
        if t.hard:
            return (self.swing * self.tau / self.span,) * (t.K - 1)
        return t.tau if isinstance(t.tau, tuple) else (t.tau,) * (t.K - 1)

    @cached_property
    def odds(self) -> tuple[tuple[float, float], ...]:
        """Log odds of every branch as slope and intercept in x; the middle branch has none."""
        lines = [(0.0, 0.0)]
        for tau, theta in zip(self.taus, self.instance.theta, strict=True):
            lines.append((lines[-1][0] + tau, lines[-1][1] - tau * theta))
        a, b = lines[self.middle]
        return tuple((slope - a, start - b) for slope, start in lines)

    @property
    def middle(self) -> int:
        """The branch whose gate voltage stands still."""
        return (self.instance.K - 1) // 2

    @property
    def constant(self) -> bool:
        """Whether no branch carries x on: such a branch may have no current at all."""
        return not any(self.instance.s)

    @cached_property
    def unit(self) -> float:
        """Amperes of the output per unit of y."""
        t, ends = self.instance, (-self.span, self.span)
        if self.constant:
            return 2 * self.bias / (max(t.c) - min(t.c))
        widest = max(abs(s * x + c) for s, c in zip(t.s, t.c, strict=True) for x in ends)
        return DEPTH * self.bias / widest

    @property
    def base(self) -> float:
        """Amperes of every branch, and so of the output, at y = 0."""
        if self.quiet:
            return 0.0
        return -min(self.instance.c) * self.unit if self.constant else self.bias

    @property
    def x_unit(self) -> float:
        """Amperes of the input per unit of x."""
        return DEPTH * self.bias / self.span

    def gate(self, k: int, x: float) -> float:
        """Voltage of gate k at x."""
        slope, start = self.odds[k]
        return COMMON + (slope * x + start) / self.tau

    def branch(self, k: int, x: float) -> float:
        """Current of branch k at x."""
        return self.base + (self.instance.s[k] * x + self.instance.c[k]) * self.unit


def expected_tau(kind: str, tail: float) -> float:
    """tau of a 5/1 um sky130 pair at a tail current, between those of the presets."""
    if kind == "npn":
        return devices.preset("sky130-npn").tau
    named = [devices.preset(f"sky130-{word}") for word in ("weak", "moderate", "strong")]
    points = [(math.log(p.tail), p.tau) for p in named]
    x = math.log(tail)
    (x0, y0), (x1, y1) = points[:2] if x < points[1][0] else points[1:]
    return min(y0 + (y1 - y0) * (x - x0) / (x1 - x0), named[0].tau)


# What a cell cannot be


def _check_instance(name: str, t: TG) -> None:
    if t.clamp is not None or t.q is not None:
        what = "a clamp" if t.clamp is not None else "branches with x^2"
        raise ValueError(
            f"{name} has {what}, which no steered current makes; give affine branches."
        )
    if t.form != "softmax":
        raise ValueError(
            f"{name} has gates of the product form; K transistors on one tail make those of the "
            "softmax form."
        )
    if not t.hard and max(t.theta) - min(t.theta) > 20:
        raise ValueError(
            f"{name} has thresholds from {min(t.theta):g} to {max(t.theta):g}; up to 20 apart they "
            "are within the reach of one cell."
        )


def _check_parts(cell: Cell) -> None:
    if cell.models != "sky130" or cell.device not in ("nfet", "npn"):
        raise ValueError(
            f"cells are made of sky130 transistors, nfet or npn; got {cell.models} {cell.device}."
        )
    within("the width of a pair in um", cell.width, WIDTHS)
    within("the length of a pair in um", cell.length, LENGTHS)
    if cell.tau:
        names = ["sky130-npn"] if cell.device == "npn" else ["sky130-strong", "sky130-weak"]
        known = [tau for name in names for _, tau in devices.preset(name).temperature]
        within(f"tau of a {cell.device} pair in 1/V", cell.tau, (min(known), max(known)))
    if cell.span:
        within("the span of x", cell.span, (1e-6, 1e6))


def _check_class_ab(cell: Cell) -> None:
    t, (low, high) = cell.instance, QUIET
    if t.K != 2 or t.s != (0.0, 1.0) or any(t.c) or any(t.theta):
        raise ValueError(
            f"a class-AB branch makes x times one gate (silu, gelu_k2, relu); {cell.name} is no "
            "such product. Leave out the current at rest: a bias then carries its branches."
        )
    if not (cell.real and cell.device == "nfet"):
        raise ValueError("a class-AB branch is made of nfet pairs with real tails.")
    # Its stack of a pfet diode and a follower was measured there, and has no room to spare.
    within("the bias of a class-AB branch in A", cell.bias, AB_BIASES)
    within("the supply of a class-AB branch in V", cell.supply, (1.7, 1.95))
    within("the current at rest in A", cell.quiet, (low, min(high, cell.bias)))


def _check_rails(cell: Cell) -> None:
    room = round(cell.supply - SATURATION - COMMON, 6)  # less than from COMMON down to the ground
    if room <= 0:
        raise ValueError(
            f"a supply of {cell.supply:g} V leaves no room: gates stand at {COMMON:g} V and a "
            f"mirror above them needs {SATURATION:g} V; give "
            f"{COMMON + SATURATION + cell.swing:g} V or more."
        )
    if cell.supply > 1.95:
        raise ValueError(
            f"sky130 transistors bear up to 1.95 V; got a supply of {cell.supply:g} V."
        )
    if not 0 < cell.swing <= room:
        raise ValueError(
            f"a swing of {cell.swing:g} V does not fit between the rails: at a supply of "
            f"{cell.supply:g} V it may be up to {room:g} V (gates stand at {COMMON:g} V)."
        )


def _span(cell: Cell) -> float:
    t = cell.instance
    if t.hard:
        return 1.5 * max(map(abs, t.theta)) or 1.0
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    return cell.swing * cell.tau / max(taus)


def _check_reach(cell: Cell) -> None:
    """Refuse what the gates or mirrors cannot make: it would be another function."""
    limit = cell.supply - SATURATION
    for k in range(cell.instance.K):
        for x in (-cell.span, cell.span):
            if not 0 <= cell.gate(k, x) <= limit + 1e-9:
                raise ValueError(
                    f"{cell.name}: gate {k} would be at {cell.gate(k, x):.3g} V for x = {x:.3g}; "
                    f"from 0 to {limit:g} V is possible. Give a smaller swing or span."
                )
    for s, c in zip(cell.instance.s, cell.instance.c, strict=True):
        ratio = abs(s) * cell.unit / cell.x_unit
        low, high = RATIOS
        if ratio and not low <= ratio <= high:
            raise ValueError(
                f"{cell.name}: a branch has the slope {s:g}, a mirror of ratio {ratio:.3g}; "
                f"from {low:g} to {high:g} is possible, so slopes from "
                f"{low * cell.x_unit / cell.unit:.3g} on (the constant c = {c:g})."
            )


# The netlist


def netlist(cell: Cell, copies: int = 1, wave: Wave = SWEEP, **conditions: Any) -> Netlist:
    """Cells side by side on one x; `i(vo)`, less `i(vq)` of class AB, is the first one's output.

    `wave` has times and x in spans: by default one slow ramp over the whole range.
    """
    within("the number of cells", copies, (1, 10000))
    lines = [f"vdd vdd 0 {cell.supply:g}"]
    for copy in range(copies):
        lines += _one(cell, str(copy) if copy else "", wave)
    kind = "class-AB branch" if cell.quiet else "real tails" if cell.real else "ideal tails"
    output = "i(vo) - i(vq)" if cell.quiet else f"i(vo) - {cell.base:.6g}"
    notes = (
        f"x from {-cell.span:.6g} to {cell.span:.6g} in {RAMP:g} s; "
        f"y = ({output}) / {cell.unit:.6g}",
    )
    title = f"branch cell {cell.name}, K = {cell.instance.K}, {cell.device}, {kind}"
    made = Netlist(title, tuple(lines), models=cell.models, notes=notes)
    return replace(made, **conditions)


def _one(cell: Cell, tag: str, wave: Wave) -> list[str]:
    if cell.quiet:
        return _class_ab(cell, tag, wave)
    K = cell.instance.K
    lines = [f"vo{tag} vdd o{tag} 0", f"vn{tag} vdd n{tag} 0"]
    for k in range(K):
        if not any(cell.branch(k, x) for x in _ends(cell)):
            continue  # no current to steer
        for j in range(K):
            drain = "o" if j == k else "n"
            nodes = f"{drain}{tag} g{j}_{tag} t{k}_{tag} 0"
            size = (cell.width, cell.length)
            lines.append(device(f"s{k}{j}_{tag}", cell.device, nodes, cell.models, size))
    return lines + (_mirrors if cell.real else _sources)(cell, tag, wave)


def _driven(cell: Cell, wave: Wave, value: Callable[[float], float]) -> str:
    """The value of a source that follows x."""
    return follows(wave, lambda side: value(side * cell.span))


def _sources(cell: Cell, tag: str, wave: Wave) -> list[str]:
    """Gates and branches from ideal sources."""
    lines = []
    for k in range(cell.instance.K):
        lines += [f"vg{k}_{tag} g{k}_{tag} 0 {_driven(cell, wave, partial(cell.gate, k))}"]
        if any(cell.branch(k, x) for x in _ends(cell)):
            lines += [f"it{k}_{tag} t{k}_{tag} 0 {_driven(cell, wave, partial(cell.branch, k))}"]
    return lines


def _ends(cell: Cell) -> tuple[float, float]:
    return -cell.span, cell.span


def _mirrors(cell: Cell, tag: str, wave: Wave) -> list[str]:
    """Gates and branches from one current x and one bias, by mirrors and resistors."""
    t, b = cell.instance, cell.bias
    x = _driven(cell, wave, lambda x: b + x * cell.x_unit)
    lines = [f"ix{tag} vdd mx{tag} {x}", f"ib{tag} vdd mb{tag} {b:.6g}"]
    for w in "xb":  # a diode that sets the nfet mirror, a copy through a diode that sets the pfet's
        lines += [_mirror(cell, f"d{w}{tag}", f"m{w}{tag} m{w}{tag}", 1.0)]
        lines += [_mirror(cell, f"c{w}{tag}", f"p{w}{tag} m{w}{tag}", 1.0)]
        lines += [_mirror(cell, f"q{w}{tag}", f"p{w}{tag} p{w}{tag}", -1.0)]
    for k in range(t.K):
        ratio = t.s[k] * cell.unit / cell.x_unit
        lines += _sum(cell, tag, f"t{k}", ratio, cell.base / b - ratio + t.c[k] * cell.unit / b)
    still = max(abs(slope) for slope, _ in cell.odds) / cell.tau / cell.x_unit  # ohms
    lines += [f"vr{tag} r{tag} 0 {COMMON - still * b:.8g}"]
    for k, (slope, start) in enumerate(cell.odds):
        ohms = abs(slope) / cell.tau / cell.x_unit or still
        sign = (slope > 0) - (slope < 0)
        wanted = (still * b + start / cell.tau) / ohms / b - sign
        lines += [f"rg{k}_{tag} g{k}_{tag} r{tag} {ohms:.8g}"]
        lines += _sum(cell, tag, f"g{k}", -float(sign), -wanted)
    return lines


def _class_ab(cell: Cell, tag: str, wave: Wave) -> list[str]:
    """x as the difference of two currents that are never negative, each the tail of a pair.

    Two followers share the input node. Their gates are set by two diodes at the current of rest, so
    that at x = 0 each carries that; a positive x flows down through the pfet, a negative one is
    fed through the nfet, and the difference of the two is x whatever their models are.
    """
    q, pn, n = cell.quiet, PFOLLOWER, (cell.width, cell.length)
    lines = [f"vo{tag} vdd o{tag} 0", f"vq{tag} vdd q{tag} 0", f"vn{tag} vdd n{tag} 0"]
    lines += [f"ix{tag} 0 in{tag} {_driven(cell, wave, lambda x: x * cell.x_unit)}"]
    lines += [f"ib{tag} vdd mb{tag} {q:.6g}", f"vm{tag} m{tag} 0 {MIDDLE:g}"]
    followers = (
        ("f1", "nfet", f"b1{tag} b1{tag} m{tag} 0", n),
        ("f2", "nfet", f"pn{tag} b1{tag} in{tag} 0", n),
        ("f3", "pfet", f"b2{tag} b2{tag} m{tag} m{tag}", pn),
        ("f4", "pfet", f"mp{tag} b2{tag} in{tag} in{tag}", pn),
    )
    lines += [device(f"{w}_{tag}", kind, at, cell.models, size) for w, kind, at, size in followers]
    wires = (  # drain and gate of every mirror transistor: nfet for 1, pfet for -1
        *(("mb mb", 1), ("pb mb", 1), ("pb pb", -1), ("b1 pb", -1), ("b2 mb", 1)),
        *(("mp mp", 1), ("t1 mp", 1), ("pp mp", 1), ("pp pp", -1), ("g1 pp", -1)),
        *(("pn pn", -1), ("mn pn", -1), ("mn mn", 1), ("t0 mn", 1), ("g1 mn", 1)),
    )
    for k, (nodes, side) in enumerate(wires):
        drain, gate = (f"{node}{tag}" for node in nodes.split())
        lines += [_mirror(cell, f"m{k}_{tag}", f"{drain} {gate}", float(side))]
    for k, out in ((1, "o"), (0, "q")):
        for gate, drain in (("g1", out), ("r", "n")):
            nodes = f"{drain}{tag} {gate}{tag} t{k}{tag} 0"
            lines += [device(f"s{k}{gate}_{tag}", cell.device, nodes, cell.models, n)]
    ohms = cell.odds[1][0] / cell.tau / cell.x_unit
    return [*lines, f"vr{tag} r{tag} 0 {COMMON:g}", f"rg{tag} g1{tag} r{tag} {ohms:.8g}"]


def _sum(cell: Cell, tag: str, node: str, of_x: float, of_bias: float) -> list[str]:
    """Mirrors that draw multiples of the x current and of the bias out of a node."""
    lines = []
    for w, ratio in (("x", of_x), ("b", of_bias)):
        if abs(ratio) > 1e-6:
            side = "m" if ratio > 0 else "p"
            nodes = f"{node}_{tag} {side}{w}{tag}"
            lines += _outputs(cell, f"{node}{w}_{tag}", nodes, ratio)
    return lines


def _outputs(cell: Cell, name: str, nodes: str, ratio: float) -> list[str]:
    """Outputs of a mirror: one with as many fingers as the ratio has, and one for the rest.

    Fingers of one width copy exactly; another width or length has another threshold.
    """
    whole = math.floor(abs(ratio) * FINGERS + 1e-6) / FINGERS
    rest = abs(ratio) - whole
    parts = [part for part in (whole, rest) if part > 1e-6]
    return [
        _mirror(cell, f"{name}_{k}", nodes, math.copysign(part, ratio))
        for k, part in enumerate(parts)
    ]


def _mirror(cell: Cell, name: str, nodes: str, ratio: float) -> str:
    """One output of a mirror: nfet to ground for a positive ratio, pfet to the supply else."""
    width, length = MIRROR
    width *= abs(ratio)
    fingers = max(round(abs(ratio) * FINGERS), 1)
    if width < WIDTHS[0]:  # too narrow a finger: longer instead
        width, length = WIDTHS[0], min(length * WIDTHS[0] / width, LENGTHS[1])
    kind, rail = ("nfet", "0 0") if ratio > 0 else ("pfet", "vdd vdd")
    return device(name, kind, f"{nodes} {rail}", cell.models, (width, length), fingers)


def area(made: Netlist) -> float:
    """Drawn gates (emitters) and resistors in um^2; diffusions, wells and wires are not counted."""
    ohms, wide = SHEET
    total = 0.0
    for line in made.elements:
        if line[0] == "r":
            total += float(line.split()[3]) / ohms * wide**2
        elif line[0] == "x":
            size = dict(word.split("=") for word in line.split() if "=" in word)
            total += float(size["w"]) * float(size["l"]) if size else 1.0
    return total
