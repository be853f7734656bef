"""The branch cell: an instance as a circuit in which each branch is the tail of a gate.

y = sum_k g_k (s_k x + c_k) needs a product of gate and branch. A differential pair multiplies its
tail current by its gate, so branch k, as a current I_b + (s_k x + c_k) I_u, is the tail of K
transistors with gate voltages that are the gate's log odds; the k-th of them leads to the output.
The bias I_b keeps currents positive, and since gates add up to one the output is I_b + y I_u.
K = 2 is two pairs with crossed outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from threshold_gating.hardware import devices
from threshold_gating.hardware.cells import LENGTHS, MIRROR, WIDTHS, device
from threshold_gating.hardware.spice import Netlist
from threshold_gating.instance import TG

DEPTH = 0.8  # of the bias: how far a branch current goes to either side
COMMON = 1.0  # volts of the gate that stands still: pair and mirror below it need 0.75
SATURATION = 0.2  # volts that a current mirror needs to work
SHEET = (2000.0, 0.35)  # ohms per square and width in um of the resistor res_xhigh_po
BIASES = (1e-9, 1e-5)
RAMP = 1.0  # seconds of a sweep of x, slow beside every time constant of a cell
FINGERS = 8  # of the transistors of a mirror
RATIOS = (0.02, 8.0)  # of a current mirror


@dataclass(frozen=True)
class Cell:
    """A branch cell of an instance: currents in A, voltages in V, sizes in um.

    `tau` is what the pair is taken to have (1/V); 0 takes it from the presets. `span` is the
    largest |x|; 0 is the one that makes the swing, or 1.5 thresholds for a hard gate.
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

    def __post_init__(self) -> None:
        _check_instance(self.name, self.instance)
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
        raise ValueError(f"{name} has thresholds from {min(t.theta):g} to {max(t.theta):g}.")


def _check_rails(cell: Cell) -> None:
    high = round(cell.supply - SATURATION - COMMON, 6)
    low = round(DEPTH * COMMON, 6)
    if high <= 0:
        raise ValueError(
            f"a supply of {cell.supply:g} V leaves no room: gates stand at {COMMON:g} V and a "
            f"mirror above them needs {SATURATION:g} V; give "
            f"{COMMON + SATURATION + cell.swing:g} V or more."
        )
    if cell.supply > 1.95:
        raise ValueError(
            f"sky130 transistors bear up to 1.95 V; got a supply of {cell.supply:g} V."
        )
    if not 0 < cell.swing <= min(high, low):
        raise ValueError(
            f"a swing of {cell.swing:g} V does not fit between the rails: at a supply of "
            f"{cell.supply:g} V it may be up to {min(high, low):g} V (gates stand at {COMMON:g} V)."
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


def netlist(cell: Cell, copies: int = 1, **conditions: Any) -> Netlist:
    """Cells side by side on one ramp of x from -span to span; `i(vo)` is the first one's output."""
    lines = [f"vdd vdd 0 {cell.supply:g}"]
    for copy in range(copies):
        lines += _one(cell, str(copy) if copy else "")
    kind = "real tails" if cell.real else "ideal tails"
    notes = (
        f"x from {-cell.span:.6g} to {cell.span:.6g} in {RAMP:g} s; "
        f"y = (i(vo) - {cell.base:.6g}) / {cell.unit:.6g}",
    )
    title = f"branch cell {cell.name}, K = {cell.instance.K}, {cell.device}, {kind}"
    made = Netlist(title, tuple(lines), models=cell.models, notes=notes)
    return replace(made, **conditions)


def _one(cell: Cell, tag: str) -> list[str]:
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
    return lines + (_mirrors(cell, tag) if cell.real else _sources(cell, tag))


def _ramp(low: float, high: float) -> str:
    return f"{low:.8g}" if low == high else f"pwl(0 {low:.8g} {RAMP:g} {high:.8g})"


def _sources(cell: Cell, tag: str) -> list[str]:
    """Gates and branches from ideal sources."""
    lines = []
    for k in range(cell.instance.K):
        lines += [f"vg{k}_{tag} g{k}_{tag} 0 {_ramp(*(cell.gate(k, x) for x in _ends(cell)))}"]
        ends = [cell.branch(k, x) for x in _ends(cell)]
        lines += [f"it{k}_{tag} t{k}_{tag} 0 {_ramp(*ends)}"] if any(ends) else []
    return lines


def _ends(cell: Cell) -> tuple[float, float]:
    return -cell.span, cell.span


def _mirrors(cell: Cell, tag: str) -> list[str]:
    """Gates and branches from one current x and one bias, by mirrors and resistors."""
    t, b = cell.instance, cell.bias
    ends = [b + x * cell.x_unit for x in _ends(cell)]
    lines = [f"ix{tag} vdd mx{tag} {_ramp(*ends)}", f"ib{tag} vdd mb{tag} {b:.6g}"]
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
