"""`tg export`: a network as gates in the formats that other tools run, and files read back."""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from threshold_gating import conversion
from threshold_gating.cli.convert import choices
from threshold_gating.cli.printing import UsageError, say, show, working
from threshold_gating.cli.spec import Network, network
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.watch import fresh
from threshold_gating.export import onnx, within
from threshold_gating.export.graph import ExportError, compared, graph, left_of, node_count, saved
from threshold_gating.export.within import Within

FORMATS = {".onnx": "ONNX", ".pt2": "a program of torch.export"}


def export(args: argparse.Namespace) -> int:
    """`tg export`."""
    if args.read is not None:
        return _read(args)
    if args.network is None or args.out is None:
        raise UsageError("give a NETWORK and the file to write, or --read FILE.")
    if not args.out.parent.is_dir():
        raise UsageError(f"{args.out} cannot be written: there is no folder {args.out.parent}.")
    if args.out.suffix not in FORMATS or args.out.is_dir():
        kinds = " or ".join(f"FILE{suffix} ({what})" for suffix, what in FORMATS.items())
        raise UsageError(f"{args.out} cannot be written; give {kinds}.")
    if args.bits is not None and (_form(args) == "native" or args.out.suffix != ".onnx"):
        raise UsageError("--bits is for every gate as thresholds in an .onnx file.")
    if args.bits is not None and not 2 <= args.bits <= 12:
        raise UsageError(f"--bits must be from 2 to 12; got {args.bits}.")
    if args.within is not None and args.saved is not None:
        raise UsageError(
            "--native-within asks for the error of gates against NETWORK's own functions, and "
            "those of --saved may have been learned; --native-where-exact goes with them."
        )
    named = network(args)
    made = _gated(args, named)
    if args.bits is not None:
        return _quantised(args, named, made.model)
    write = _program if args.out.suffix == ".pt2" else _onnx
    report, text = write(args, named, made)
    if args.within is not None:
        more, words = _near(args, named, made.native, report.pop("outputs"))
        report, text = {**report, **more}, f"{text}\n{words}"
    report.pop("outputs", None)
    return _done(args, named, report, text)


def _gated(args: argparse.Namespace, named: Network) -> Within:
    """The network with gates, proven; or with those that were saved."""
    if args.saved is not None:
        loaded: nn.Module = conversion.load(args.saved, named.model)
        return Within(loaded, {})
    with working(f"{args.network}: converting"):
        if args.within is not None:
            return within.gated(named.model, named.inputs, args.within, choices(args.site))
        return Within(_converted(args, named), {})


def _converted(args: argparse.Namespace, named: Network) -> nn.Module:
    return within.converted(named.model, named.inputs, choices(args.site))


def _form(args: argparse.Namespace) -> Any:
    return "native" if args.native or args.within is not None else "kept"


def _near(
    args: argparse.Namespace, named: Network, native: Mapping[str, float], have: Any
) -> tuple[dict[str, Any], str]:
    """What --native-within left to torch, and how far that is from every gate."""
    report = {"within": args.within, "native": dict(native), "all_gates": None}
    if not native:
        return report, f"no approximate site has an error of at most {args.within:g} over the line"
    with working("comparing with every gate"):
        apart = compared(_converted(args, named), named.inputs, have, math.inf).relative
    more = f" and {len(native) - 8} more" if len(native) > 8 else ""
    names = ", ".join(list(native)[:8]) + more
    words = (
        f"{len(native)} approximate sites are torch's own ops, for their gates differ from these "
        f"by at most {max(native.values()):.3g} over the line ({args.within:g} asked): {names}\n"
        f"against the network in torch with gates at these, too: max|d|/max|y| {apart:.2e}"
    )
    return {**report, "all_gates": apart}, words


def _onnx(args: argparse.Namespace, named: Network, made: Within) -> tuple[dict[str, Any], str]:
    with working("exporting, and running it with onnxruntime"):
        file = onnx.export(made.model, named.inputs, args.out, form=_form(args), tol=args.tol)
        report = {**file.to_dict(), "outputs": onnx.run(args.out, named.inputs)}
    # gates put onto the network, or there from the start: no original is left
    alone = args.saved is not None or (made.model is named.model and not made.native)
    if args.no_speed or alone:
        why = "" if args.no_speed else "\nnot timed: the network has gates of its own, no original"
        return report, f"{file}{why}"
    with working("timing it and the original, one thread"):
        ratio = onnx.compared(named.model, args.out, named.inputs)
    return {**report, "speed": ratio._asdict()}, f"{file}\n{ratio}"


def _program(args: argparse.Namespace, named: Network, made: Within) -> tuple[dict[str, Any], str]:
    with working("exporting"):
        program = graph(made.model, named.inputs, form=_form(args))
        left = left_of(program)
        parity = saved(program, made.model, named.inputs, args.out, args.tol)
    nodes = node_count(program)
    with warnings.catch_warnings():  # of torch, about its own code
        warnings.simplefilter("ignore")
        lowered = node_count(program.run_decompositions())
    text = (
        f"{args.out.name}: {nodes} nodes, {lowered} when its gates are lowered; "
        f"max|d|/max|y| {parity:.2e} against the network in torch, its gates evaluated"
    )
    if left:
        text += f"\n{sum(left.values())} nonlinearities are no gates: {', '.join(left)}"
    positional, by_name = fresh(arguments(named.inputs))
    have = program.module()(*positional, **by_name)
    report = {"nodes": nodes, "lowered": lowered, "parity": parity, "left": left, "outputs": have}
    return report, text


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
