"""`tg export`: a network as gates in the formats that other tools run, and files read back."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from threshold_gating import conversion
from threshold_gating.cli.convert import choices
from threshold_gating.cli.printing import UsageError, say, show, working
from threshold_gating.cli.spec import Network, network
from threshold_gating.export import onnx
from threshold_gating.export.graph import ExportError, graph, left_of, node_count, saved

FORMATS = {".onnx": "ONNX", ".pt2": "a program of torch.export"}


def export(args: argparse.Namespace) -> int:
    """`tg export`."""
    if args.read is not None:
        return _read(args)
    if args.network is None or args.out is None:
        raise UsageError("give a NETWORK and the file to write, or --read FILE.")
    if args.out.suffix not in FORMATS or not args.out.parent.is_dir() or args.out.is_dir():
        kinds = " or ".join(f"FILE{suffix} ({what})" for suffix, what in FORMATS.items())
        raise UsageError(f"{args.out} cannot be written; give {kinds} in a directory.")
    if args.bits is not None and (args.native or args.out.suffix != ".onnx"):
        raise UsageError("--bits is for every gate as thresholds in an .onnx file.")
    if args.bits is not None and not 2 <= args.bits <= 12:
        raise UsageError(f"--bits must be from 2 to 12; got {args.bits}.")
    named = network(args)
    gated = _gated(args, named)
    if args.bits is not None:
        return _quantised(args, named, gated)
    return _program(args, named, gated) if args.out.suffix == ".pt2" else _onnx(args, named, gated)


def _gated(args: argparse.Namespace, named: Network) -> nn.Module:
    """The network with gates, proven; or with those that were saved."""
    if args.saved is not None:
        loaded: nn.Module = conversion.load(args.saved, named.model)
        return loaded
    with working(f"{args.network}: converting"):
        return conversion.convert(named.model, choices(args.site), inputs=named.inputs)


def _onnx(args: argparse.Namespace, named: Network, gated: nn.Module) -> int:
    form: Any = "native" if args.native else "kept"
    with working("exporting, and running it with onnxruntime"):
        made = onnx.export(gated, named.inputs, args.out, form=form, tol=args.tol)
    report, text = made.to_dict(), str(made)
    if not args.no_speed and args.saved is None:  # gates put onto the network: no original is left
        with working("timing it and the original, one thread"):
            ratio = onnx.compared(named.model, args.out, named.inputs)
        report, text = {**report, "speed": ratio._asdict()}, f"{text}\n{ratio}"
    return _done(args, named, report, text)


def _program(args: argparse.Namespace, named: Network, gated: nn.Module) -> int:
    form: Any = "native" if args.native else "kept"
    with working("exporting"):
        program = graph(gated, named.inputs, form=form)
        left = left_of(program)
        parity = saved(program, gated, named.inputs, args.out, args.tol)
    nodes = node_count(program)
    lowered = node_count(program.run_decompositions())
    text = (
        f"{args.out.name}: {nodes} nodes, {lowered} when its gates are lowered; "
        f"max|d|/max|y| {parity:.2e} against the gates in torch"
    )
    if left:
        text += f"\n{sum(left.values())} nonlinearities are no gates: {', '.join(left)}"
    report = {"nodes": nodes, "lowered": lowered, "parity": parity, "left": left}
    return _done(args, named, report, text)


def _quantised(args: argparse.Namespace, named: Network, gated: nn.Module) -> int:
    from threshold_gating.export import qonnx

    with working("exporting, and running it with qonnx"):
        made = qonnx.export(gated, named.inputs, args.out, bits=args.bits, tol=args.tol)
    return _done(args, named, made.to_dict(), str(made))


def _done(args: argparse.Namespace, named: Network, report: dict[str, Any], text: str) -> int:
    show(args, {**report, **named.to_dict()}, text)
    for note in named.notes:
        say(note)
    say(f"Written to {Path(args.out).resolve()}")
    return 0


def _read(args: argparse.Namespace) -> int:
    """The gates of a file, one line for each kind of instance of a site."""
    try:
        sites = onnx.read(args.read)
    except ExportError as error:
        raise UsageError(str(error)) from error
    lines = []
    for site in sites:
        kinds = Counter(site.instances)
        first = next(iter(kinds), None)
        what = "its logits are its thresholds" if first is None else repr(first)
        more = f" and {len(kinds) - 1} more" if len(kinds) > 1 else ""
        lines.append(f"{site.name}: {site.function}, {what}{more}")
    show(args, {"gates": [site.to_dict() for site in sites]}, "\n".join(lines) or "no gates")
    return 0
