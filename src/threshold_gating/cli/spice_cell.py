"""`tg spice ACTIVATION`: one branch cell, and what ngspice measures of it."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from threshold_gating.cli.spice_tables import (
    CELSIUS,
    DRAWS,
    Answer,
    Row,
    conditions,
    copies,
    quantile,
    shares,
)
from threshold_gating.hardware import cell_error, characterise, steering
from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.cell_error import Match, Response
from threshold_gating.hardware.spice import Netlist


class _Found(NamedTuple):
    """What was measured of a cell: its curve, what moves it, its speed and noise."""

    answer: Response
    match: Match
    warm: dict[str, Match]
    corners: dict[str, Match]
    many: list[Response]
    spread: list[Match]
    steps: cell_error.Steps
    noise: float
    tails: list[cell_error.Tail]


def answer(args: argparse.Namespace, cell: steering.Cell, tell: Any) -> Answer:
    """Measure a branch cell, in tables and as JSON."""
    found, made = _measured(args, cell, tell), steering.netlist(cell)
    corner = f", corner {args.corner}" if args.corner else ""
    tables = [
        (_titled(cell) + corner, _error_rows(args, found)),
        ("The whole cell after a step of x over its range", _speed_rows(cell, found)),
        ("A pair over the swing of its branch: the tail is the signal", _tail_rows(found)),
        ("What it is made of", _made(cell, made, found.answer)),
    ]

    def draw(axes: Any) -> None:
        x, (y,) = found.answer.x, found.answer.y
        for part in found.many:
            axes[0].plot(part.x, part.y.T, color="0.8", lw=0.5)
        axes[0].plot(x, y, label="cell")
        axes[0].plot(x, cell.instance(x), "k--", label=cell.name)
        axes[0].set(xlabel="x", ylabel="y")
        axes[1].plot(x, y - cell.instance(x), label="cell - instance")
        axes[1].set(xlabel="x", ylabel="error")

    return Answer(tables, _result(cell, made, found), draw)


def _measured(args: argparse.Namespace, cell: steering.Cell, tell: Any) -> _Found:
    at = conditions(args)
    one = cell_error.response(cell, **at)
    match = cell_error.match(cell, one.x, one.y[0])
    tell("temperature and corners", 0.1)
    warm = cell_error.over_temperature(cell, CELSIUS, corner=args.corner)
    others = [c for c in pdk.chosen(cell.models).corners if c != (args.corner or "tt")]
    corners = cell_error.over_corners(cell, others, celsius=args.celsius)
    tell("mismatch", 0.2)
    many = cell_error.mismatched(cell, args.draws or DRAWS, args.seed, **at)
    spread = [m for part in many for m in cell_error.matches(cell, part)]
    tell("settling and noise", 0.6)
    steps = cell_error.steps(cell, **at)
    noise = cell_error.noise(cell, characterise.bandwidth(max(steps)), **at)
    tell("branch current", 0.8)
    tails = cell_error.over_branch(cell, **at)
    by_temperature = {f"{t:g}": m for t, m in zip(CELSIUS, warm, strict=True)}
    by_corner = dict(zip(others, corners, strict=True))
    return _Found(one, match, by_temperature, by_corner, many, spread, steps, noise, tails)


def _error_rows(args: argparse.Namespace, found: _Found) -> list[Row]:
    rows: list[Row] = [("condition", "error", "trimmed", "tau", "theta (x)", "gain", "offset (y)")]
    here = f"{args.celsius:g}"
    rows += [] if here in found.warm else [_line(f"{here} C", found.match)]
    rows += [_line(f"{t} C", m) for t, m in found.warm.items()]
    rows += [_line(f"corner {c}", m) for c, m in found.corners.items()]
    for share, word in shares(len(found.spread)):
        errors = (quantile([m[k] for m in found.spread], share) for k in (0, 1))
        name = f"mismatch, {word} of {len(found.spread)}"
        rows.append((name, *(f"{error:.2%}" for error in errors), *[""] * 4))
    return rows


def _line(name: str, m: Match) -> Row:
    numbers = (f"{m.tau:.3f}", f"{m.theta:+.3f}", f"{m.gain:.3f}", f"{m.offset:+.3f}")
    return (name, f"{m.error:.2%}", f"{m.trimmed:.2%}", *numbers)


def _speed_rows(cell: steering.Cell, found: _Found) -> list[Row]:
    slower = max(found.steps)
    joules = found.answer.rest * cell.supply * slower
    band = f"of full scale, rms, 1 Hz to {characterise.bandwidth(slower):.3g} Hz"
    return [
        ("settling, x up", f"{found.steps.up * 1e9:.3g} ns", "to 1 % of full scale, no load"),
        ("settling, x down", f"{found.steps.down * 1e9:.3g} ns", "to the smallest branch current"),
        ("noise", f"{found.noise:.2%}", band),
        ("energy", f"{joules * 1e15:.3g} fJ", "power at rest x slower settling"),
    ]


def _tail_rows(found: _Found) -> list[Row]:
    return [
        ("branch current", "tau (1/V)", "settling"),
        *(
            (f"{t.current * 1e9:.3g} nA", f"{t.tau:.2f}", f"{t.settling * 1e9:.3g} ns")
            for t in found.tails
        ),
    ]


def _result(cell: steering.Cell, made: Netlist, found: _Found) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "instance": cell.instance.to_dict(),
        "span": cell.span,
        "match": found.match._asdict(),
        "temperature": {t: m._asdict() for t, m in found.warm.items()},
        "corners": {c: m._asdict() for c, m in found.corners.items()},
        "mismatch": [m._asdict() for m in found.spread],
        "settling": found.steps._asdict(),
        "noise": found.noise,
        "tails": [t._asdict() for t in found.tails],
        "devices": made.count(),
        "area": steering.area(made),
        "current": found.answer.current,
        "rest": found.answer.rest,
    }


def _titled(cell: steering.Cell) -> str:
    tails = "real" if cell.real else "ideal"
    branch = f"I_b = {cell.bias * 1e9:g} nA"
    if cell.quiet:
        branch = f"class AB, {cell.quiet * 1e9:g} nA at rest"
    return (
        f"{cell.name} from {cell.device} pairs with {tails} tails: K = {cell.instance.K}, "
        f"{branch}, |x| <= {cell.span:.3g} at {cell.swing:g} V"
    )


def _made(cell: steering.Cell, made: Netlist, answer: Response) -> list[Row]:
    counts = ", ".join(f"{n} {kind}" for kind, n in made.count().items())
    mean, rest = (
        f"{amperes * 1e9:.4g} nA, {amperes * cell.supply * 1e9:.4g} nW"
        for amperes in (answer.current, answer.rest)
    )
    steer = sum(line.startswith("xs") for line in made.elements)
    rows = [("devices", counts), ("of them steering", str(steer))]
    rows += [
        ("copies of x", str(copies(made))),
        ("gates and resistors", f"{steering.area(made):.0f} um^2"),
    ]
    return [*rows, ("current, power", f"{mean} over the range"), ("at rest", rest)]
