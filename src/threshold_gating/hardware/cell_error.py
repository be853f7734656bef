"""A branch cell measured against its instance: over x, conditions and mismatch; speed and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

from threshold_gating.hardware.cells import Pair
from threshold_gating.hardware.measure import edges, least_squares, over_tails, settling, timed
from threshold_gating.hardware.spice import Analysis, Netlist, Plot, Wave, batches, run
from threshold_gating.hardware.steering import DEPTH, RAMP, Cell, netlist

aten = torch.ops.aten
POINTS = 80
LOAD = 1e3  # ohms that turn an output current into the voltage whose noise is taken
RAMP_COMMAND = f"tran {RAMP / POINTS:g} {RAMP:g} 0 {RAMP / POINTS:g}"


class Match(NamedTuple):
    """How a cell compares with its instance; errors are the largest, relative to the largest |y|.

    `trimmed` is what is left when tau, theta, gain and offset are set for this cell: its shape.
    tau is relative to the wanted one; theta is in units of x, the offset in units of y.
    """

    error: float
    trimmed: float
    tau: float
    theta: float
    gain: float
    offset: float


class Response(NamedTuple):
    """What cells answered: x, y of every cell (one a row), and the current from the supply.

    The current is that of one cell in A, as the mean over the sweep and at rest, where x is 0.
    """

    x: Tensor
    y: Tensor
    current: float
    rest: float = 0.0


def response(cell: Cell, copies: int = 1, **conditions: Any) -> Response:
    """Sweep x over the span of the cell, slowly."""
    tags = ["", *(str(k) for k in range(1, copies))]
    names = [name for tag in tags for name in _outputs(cell, tag)]
    made = netlist(cell, copies, **conditions)
    plot: Plot = run(made, Analysis(RAMP_COMMAND, (*names, "i(vdd)")))[0]
    x = (2 * plot["scale"] / RAMP - 1) * cell.span
    y = torch.stack([_output(cell, plot, tag) for tag in tags])
    # Outputs end at the supply through sources of their own; what these carry is counted by vdd.
    drawn = -plot["i(vdd)"] / copies
    return Response(x, y, drawn.mean().item(), drawn[x.abs().argmin()].item())


def mismatched(cell: Cell, copies: int, seed: int = 1, **conditions: Any) -> list[Response]:
    """Sweeps of that many cells, each transistor with its own draw; a few cells a response."""
    if copies < 2:
        raise ValueError(f"a spread needs 2 cells or more; got {copies}.")
    return [response(cell, n, seed=each, **conditions) for n, each in batches(copies, seed)]


def _outputs(cell: Cell, tag: str = "") -> tuple[str, ...]:
    return (f"i(vo{tag})", f"i(vq{tag})") if cell.quiet else (f"i(vo{tag})",)


def _output(cell: Cell, plot: Plot, tag: str = "") -> Tensor:
    """y of one cell: the current of its output, less that at y = 0 or that of its other output."""
    first, *other = (plot[name] for name in _outputs(cell, tag))
    return (first - (other[0] if other else cell.base)) / cell.unit


def match(cell: Cell, x: Tensor, y: Tensor) -> Match:
    """Compare one curve with the instance, as it is and trimmed."""
    wanted = cell.instance(x)
    height = wanted.abs().max().item()
    p = least_squares(lambda p: _model(cell, x, p) - y, _UNTRIMMED)
    return _match(height, wanted, y, _model(cell, x, p), p)


def matches(cell: Cell, answer: Response) -> list[Match]:
    """The same of many cells, by Gauss-Newton on all of them at once."""
    x, wanted = answer.x, cell.instance(answer.x)

    def model(p: Tensor) -> Tensor:
        return _model(cell, x, p)

    start = least_squares(lambda p: model(p) - answer.y.mean(0), _UNTRIMMED)
    every = start.expand(len(answer.y), -1)
    for _ in range(20):
        off = vmap(model)(every) - answer.y
        step = torch.linalg.lstsq(vmap(jacfwd(model))(every), off[..., None]).solution[..., 0]
        every = every - step.clamp(-0.3, 0.3)
    height = wanted.abs().max().item()
    rows = zip(answer.y, vmap(model)(every), every, strict=True)
    return [_match(height, wanted, y, trimmed, p) for y, trimmed, p in rows]


_UNTRIMMED = (0.0, 0.0, 1.0, 0.0)


def _match(height: float, wanted: Tensor, y: Tensor, trimmed: Tensor, p: Tensor) -> Match:
    error, left = ((a - y).abs().max().item() / height for a in (wanted, trimmed))
    tau, theta, gain, offset = p.tolist()
    return Match(error, left, math.exp(tau), theta, gain, offset)


def _model(cell: Cell, x: Tensor, p: Tensor) -> Tensor:
    """The instance with tau times e^p0, theta moved by p1, gain p2 and offset p3."""
    slopes, starts = (x.new_tensor(column)[:, None] for column in zip(*cell.odds, strict=True))
    gates = aten._softmax(p[0].exp() * (slopes * (x - p[1]) + starts), 0, False)
    s, c = (x.new_tensor(column)[:, None] for column in (cell.instance.s, cell.instance.c))
    out: Tensor = p[2] * (gates * (s * x + c)).sum(0) + p[3]
    return out


# What moves with conditions


def over_temperature(cell: Cell, celsius: Sequence[float], **conditions: Any) -> list[Match]:
    """The cell as it was built, at each temperature."""
    return [_at(cell, celsius=each, **conditions) for each in celsius]


def over_corners(cell: Cell, corners: Sequence[str], **conditions: Any) -> list[Match]:
    """The cell at each corner of the process; its resistors stay what they are."""
    return [_at(cell, corner=each, **conditions) for each in corners]


def _at(cell: Cell, **conditions: Any) -> Match:
    answer = response(cell, **conditions)
    return match(cell, answer.x, answer.y[0])


# Speed and noise


class Steps(NamedTuple):
    """Seconds to 1 % of full scale after x stepped over its whole range.

    After a step down a branch carries its smallest current: there the cell is slow.
    """

    up: float
    down: float


def steps(cell: Cell, **conditions: Any) -> Steps:
    """Settling of the whole cell, from the current x to the output; nothing loads the output."""
    height = _height(cell)

    def driven(wave: Wave) -> Netlist:
        return netlist(cell, wave=wave, options=timed(cell.bias), **conditions)

    def level(plot: Plot) -> Tensor:
        return _output(cell, plot) / height

    guess = 2e-13 / (cell.quiet or cell.bias)  # 0.2 pC: the gates of a few mirrors
    return Steps(*edges(driven, _outputs(cell), level, guess, points=200))  # to 4 % of the longer


def _height(cell: Cell) -> float:
    """The largest |y| of the instance over the span."""
    x = torch.linspace(-cell.span, cell.span, 401, dtype=torch.float64)
    return cell.instance(x).abs().max().item()


def noise(cell: Cell, bandwidth: float, **conditions: Any) -> float:
    """Noise of the output from 1 Hz to a bandwidth, rms relative to full scale; the largest of
    x at both ends and in the middle. Loads are noiseless."""
    ends = ("o", "q") if cell.quiet else ("o",)
    command = f"noise v({','.join(ends)}) vdd dec 10 1 {bandwidth:.6g}"
    found = []
    for x in (-1.0, 0.0, 1.0):
        made = netlist(cell, wave=((0.0, x),), **conditions)
        lines = [line for line in made.elements if line.split()[0] not in ("vdd", "vo", "vq")]
        lines += [f"rl{node} vdd {node} {LOAD:g} noisy=0" for node in ends]
        bench = replace(made, elements=(f"vdd vdd 0 {cell.supply:g} ac 1", *lines))
        (plot,) = run(bench, Analysis(command, ("onoise_total",)))
        found.append(plot["onoise_total"][-1].item())
    return max(found) / LOAD / cell.unit / _height(cell)


class Tail(NamedTuple):
    """A pair at one branch current: tau in 1/V and settling in s."""

    current: float
    tau: float
    settling: float


def over_branch(cell: Cell, **conditions: Any) -> list[Tail]:
    """tau and speed of the cell's pair over the swing of a branch current.

    The tail is the signal here: where the branch is small, the pair is slow.
    """
    currents = [cell.bias * share for share in (1 - DEPTH, 1.0, 1 + DEPTH)]
    spec = Pair(cell.models, cell.device, cell.width, cell.length, supply=cell.supply)
    fits = over_tails(spec, currents, **conditions)
    rows = []
    for current, fit in zip(currents, fits, strict=True):
        at = Pair(cell.models, cell.device, cell.width, cell.length, current, supply=cell.supply)
        rows.append(Tail(current, fit.tau, settling(at, fit.tau, **conditions)))
    return rows
