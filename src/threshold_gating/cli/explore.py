"""`tg explore`: the explorer on this machine, or as files, with the sites of a network to walk."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from threshold_gating import conversion, taxonomy
from threshold_gating.cli.printing import EXPECTED, UsageError, say, show, working
from threshold_gating.cli.shared import SPECS
from threshold_gating.cli.spec import has_its_gates, network
from threshold_gating.hardware import devices
from threshold_gating.show import explorer
from threshold_gating.show.explorer import sites
from threshold_gating.show.explorer.server import ADDRESS, Server

_LOOPBACK = (ADDRESS, "localhost")


def explore(args: argparse.Namespace) -> int:
    """`tg explore`."""
    _check(args)
    asked = _asked(args)
    contents = explorer.files(**asked, preset=args.preset or "")
    sizes = {name: len(content) for name, content in contents.items()}
    report = {"files": sizes, "sites": asked.get("network", {}).get("sites", [])}
    if args.static is not None:
        try:
            page = explorer.write(args.static, contents)
        except ValueError as error:
            raise UsageError(f"--static: {error}") from error
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError(f"--static {args.static} cannot be written: {why}.") from error
        show(args, report, f"Written to {page.resolve()}")
        return 0
    return _serve(args, contents, report)


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be had, before a network is loaded for it."""
    if args.address not in _LOOPBACK:
        raise UsageError(
            f"--address {args.address}: the explorer is served to this machine only, at {ADDRESS}; "
            "for others, write it with --static DIR and put that on a web server of yours."
        )
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port must be from 0 (any that is free) to 65535; got {args.port}.")
    if args.static is not None and args.static.exists() and not args.static.is_dir():
        raise UsageError(
            f"--static {args.static} is a file; give a folder, which may be a new one."
        )
    if args.preset:
        try:
            devices.preset(args.preset)
        except ValueError as error:
            raise UsageError(f"--preset: {error}") from error


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What WHAT means to `explorer.files`: a row to begin with, or a network to walk."""
    what = args.network
    is_spec = ":" in what and not Path(what).exists()
    options = [name for name in ("checkpoint", "trust", "pretrained", "inputs") if vars(args)[name]]
    if options and not is_spec:
        raise UsageError(f"--{options[0]} is of a network ({SPECS}); name one.")
    try:
        if is_spec:
            return {"network": _walked(args)}
        if Path(what).exists():
            return {"network": sites.of_saved(Path(what))}
        if Path(what).suffix == ".json" or len(Path(what).parts) > 1:
            raise UsageError(f"there is no {what}; give a folder that tg convert -o wrote.")
        return {"start": taxonomy.key_of(what)}
    except EXPECTED:
        raise
    except ValueError as error:
        raise UsageError(f"{error} A network is {SPECS}, or a saved folder.") from error


def _walked(args: argparse.Namespace) -> dict[str, Any]:
    """The sites of a network, which is converted if it is not yet."""
    named = network(args)
    model: nn.Module = named.model
    if not has_its_gates(named):
        with working(f"{args.network}: converting"):
            model = conversion.convert(model, inputs=named.inputs, strict=False)
        say("The sites are not certified here; `tg convert` does that.")
    for note in named.notes:
        say(note)
    return sites.of_model(args.network, model)


def _serve(args: argparse.Namespace, contents: Mapping[str, bytes], report: dict[str, Any]) -> int:
    try:
        server = Server(contents, args.port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is in use" if taken else f"cannot be had ({error.strerror})"
        raise UsageError(
            f"port {args.port} {why}; give another --port, or 0 for any that is free."
        ) from error
    with server:
        show(args, {"url": server.url, **report}, server.url)
        say("Open that address in a browser. Ctrl-C ends.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nEnded.")
    return 0
