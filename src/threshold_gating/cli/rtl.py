"""`tg rtl`: activations as Verilog, and networks checked from float to Verilog."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from typing import Any

from threshold_gating import conversion
from threshold_gating.cli import pages
from threshold_gating.cli.printing import UsageError, progress, say, show, working
from threshold_gating.cli.spec import network
from threshold_gating.hardware import fixed_point
from threshold_gating.hardware import rtl as digital
from threshold_gating.hardware.digital.bench import SIMULATORS, ToolError
from threshold_gating.hardware.digital.coverify import coverify
from threshold_gating.hardware.fixed_point import Format, FormatError, Unit
from threshold_gating.hardware.models import ModelsMissingError
from threshold_gating.instance import TG
from threshold_gating.show import digital as page
from threshold_gating.show.seen import look
from threshold_gating.taxonomy import TABLE2, TAXONOMY, key_of


def rtl(args: argparse.Namespace) -> int:
    """`tg rtl`."""
    is_network = ":" in args.network
    if args.check and not is_network:
        raise UsageError(f"--check is of a network; {args.network} is none. Give --run for it.")
    if is_network and not args.check:
        raise UsageError(f"{args.network} is a network: give --check.")
    if not 4 <= args.bits <= 16:
        raise UsageError(f"--bits must be from 4 to 16; got {args.bits}.")
    if args.reach is not None and args.reach <= 0:
        raise UsageError(f"--reach must be above 0; got {args.reach:g}.")
    if not 0 <= args.small <= args.bits:
        raise UsageError(
            f"--small must be from 1 to the {args.bits} bits of x, or 0 for the pipeline; got "
            f"{args.small}."
        )
    if args.codes is not None and args.codes < 0:
        raise UsageError(f"--codes must be 1 or more, or 0 for all; got {args.codes}.")
    try:
        return _check(args) if args.check else _activation(args)
    except (FormatError, ToolError, ModelsMissingError) as error:
        raise UsageError(str(error)) from error


# An activation


def _activation(args: argparse.Namespace) -> int:
    for name in ("html", "checkpoint", "inputs", "codes", "trust", "pretrained"):
        if getattr(args, name) not in (None, False):
            raise UsageError(f"--{name} is of a network with --check.")
    if args.simulator is not None and not args.run:
        raise UsageError("--simulator is of --run, which simulates; give it too.")
    try:
        names = TABLE2 if args.network == "table2" else (key_of(args.network),)
    except ValueError as error:
        raise UsageError(str(error)) from error
    instances = {name: TAXONOMY[name] for name in names}
    given = {k: getattr(args, k) for k in ("slope", "tau") if getattr(args, k) is not None}
    unit = fixed_point.unit_for(*instances.values(), bits=args.bits, **given)
    formats = {
        n: fixed_point.format_for(t, args.bits, 8.0 if args.reach is None else args.reach)
        for n, t in instances.items()
    }
    written = _registers(instances, formats, unit)
    text = f"{written}\n// {digital.circuit(unit, args.small).instance}\n\n{digital.text(unit)}"
    if args.out is not None:
        args.out.write_text(text, "utf-8")
        say(f"wrote {args.out}")
    if not args.run:
        if args.out is None:
            show(args, {"verilog": text}, text.rstrip())
        say("Check it at every code and measure it with --run.")
        return 0
    return _run(args, instances, formats, unit)


def _registers(instances: Mapping[str, TG], formats: Mapping[str, Format], unit: Unit) -> str:
    lines = [f"// {unit}"]
    for name, t in instances.items():
        r = fixed_point.registers(t, formats[name], unit)
        lines.append(f"// {name}, {formats[name]}: {r}")
    return "\n".join(lines)


def _run(
    args: argparse.Namespace,
    instances: Mapping[str, TG],
    formats: Mapping[str, Format],
    unit: Unit,
) -> int:
    simulators = SIMULATORS if args.simulator in (None, "both") else (args.simulator,)
    result: dict[str, Any] = {"unit": str(unit), "activations": {}}
    errors = {n: fixed_point.error(t, formats[n], unit) for n, t in instances.items()}
    with progress("rtl") as tell:
        tell("every code")
        found = digital.verify(
            instances, unit=unit, formats=formats, simulators=simulators, small=args.small
        )
        tell("synthesis")
        made, why = _synthesised(args, unit)
        fpga = digital.on_ice40(unit, small=args.small)
    lines = [f"{'activation':18} {'error':>9} {'codes':>7} {'differ':>7}  format"]
    for k, name in enumerate(instances):
        rows = [each[k] for each in found.outcomes.values()]
        differ = sum(row.differ for row in rows)
        lines.append(
            f"{name:18} {errors[name]:5.2f} LSB {rows[0].codes:7,} {differ:7,}  {formats[name]}"
        )
        result["activations"][name] = {
            "error": errors[name],
            **{sim: each[k]._asdict() for sim, each in found.outcomes.items()},
        }
    word = "exact" if found.exact else "NOT EXACT"
    lines.append(f"integers and Verilog: {word} ({', '.join(simulators)})")
    lines.append(f"lint (verilator -Wall): {'clean' if not found.lint else found.lint}")
    lines += [made] if made else []
    lines.append(
        f"iCE40: {fpga.luts} LUTs, {fpga.flops} flip-flops, {fpga.carries} carries, without DSP"
    )
    kind = "small unit" if args.small else "pipeline"
    lines.append(f"{kind}: {digital.cycles(unit, args.small)} cycles from x to y")
    result |= {"exact": found.exact, "lint": found.lint, "fpga": fpga._asdict(), "cells": made}
    show(args, result, "\n".join(lines))
    for note in why:
        say(note)
    return 0 if found.exact else 1


def _synthesised(args: argparse.Namespace, unit: Unit) -> tuple[str, list[str]]:
    try:
        made = digital.synthesise(unit, small=args.small)
    except ModelsMissingError as error:
        return "", [f"No area: {error}"]
    sta = "no figure of OpenSTA" if made.by_sta is None else f"OpenSTA {made.by_sta:.2f} ns"
    text = (
        f"sky130: {made.area:,.0f} um^2, {made.cells:,} cells, {made.flops} of them flip-flops, "
        f"longest path {made.delay:.2f} ns (abc, no wires; {sta})"
    )
    return text, []


# A network


def _check(args: argparse.Namespace) -> int:
    for name in ("out", "reach", "slope", "tau"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is of an activation; a network takes --bits.")
    if args.run or args.small or args.simulator == "both":
        raise UsageError("--run, --small and --simulator both are of an activation.")
    pages.check("--html", args.html)
    named = network(args)
    with working(f"{args.network}: converting"):
        gated = conversion.convert(named.model, inputs=named.inputs, strict=False)
    with progress(args.network) as tell, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what stays as it is stands in the report
        report = coverify(
            gated,
            named.inputs,
            args.bits,
            simulator=args.simulator,
            codes=args.codes,
            tell=tell,
        )
    rows = [page.HEADER, *(page.cells(row) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    result = {
        **report._asdict(),
        "rows": [row._asdict() for row in report.rows],
        "analog": [each._asdict() for each in report.analog],
        "exact": report.exact,
        **named.to_dict(),
    }
    show(args, result, "\n".join([*lines, "", *page.summary(report)]))
    if args.html is not None:
        facts = {"command": pages.command(args)}
        about = {"facts": facts, "warnings": named.notes, "data": result}
        seen = look(gated, named.inputs)
        pages.write(args.html, page.html(args.network, report, seen, **about))
    for note in named.notes:
        say(note)
    return 0 if report.exact else 1
