"""A branch cell measured against its instance: over x, temperature and mismatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

from threshold_gating.hardware.cells import Pair
from threshold_gating.hardware.measure import least_squares, over_tails, settling
from threshold_gating.hardware.spice import Analysis, Plot, run
from threshold_gating.hardware.steering import DEPTH, RAMP, Cell, netlist

aten = torch.ops.aten
POINTS = 80
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
    """What cells answered: x, y of every cell (one a row), and the current from the supply."""

    x: Tensor
    y: Tensor
    current: float


def response(cell: Cell, copies: int = 1, **conditions: Any) -> Response:
    """Sweep x over the span of the cell, slowly."""
    outputs = ["i(vo)", *(f"i(vo{k})" for k in range(1, copies))]
    made = netlist(cell, copies, **conditions)
    plot: Plot = run(made, Analysis(RAMP_COMMAND, (*outputs, "i(vdd)")))[0]
    x = (2 * plot["scale"] / RAMP - 1) * cell.span
    y = (torch.stack([plot[name] for name in outputs]) - cell.base) / cell.unit
    # Outputs end at the supply through sources of their own; what these carry is counted by vdd.
    return Response(x, y, -plot["i(vdd)"].mean().item() / copies)


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
    answers = [response(cell, celsius=each, **conditions) for each in celsius]
    return [match(cell, answer.x, answer.y[0]) for answer in answers]


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
