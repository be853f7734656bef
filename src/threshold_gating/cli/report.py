"""`tg report`: one page on a network."""

from __future__ import annotations

import argparse
import copy
from typing import Any

from torch import nn

from threshold_gating import conversion
from threshold_gating.cli import pages
from threshold_gating.cli.convert import choices
from threshold_gating.cli.printing import UsageError, say, show, working
from threshold_gating.cli.spec import Network, has_its_gates, network
from threshold_gating.conversion.plan import arguments


def report(args: argparse.Namespace) -> int:
    """`tg report`."""
    pages.check("-o", args.out)
    if args.gates is not None and args.site:
        raise UsageError("--site chooses gates and --gates takes those of a folder; give one.")
    chosen = choices(args.site)
    named = network(args)
    positional, keywords = arguments(named.inputs)
    with working(f"{args.network}: converting, verifying and looking at each site"):
        gated = _gated(args, named, chosen)
        certificate = None
        if gated is not named.model:
            certificate = conversion.verify(
                named.model, gated, *positional, tol=args.tol, **keywords
            )
        audit = conversion.audit(gated, *positional, **keywords)
        found = pages.made(args, named, gated, certificate, audit)
    text = str(audit) if certificate is None else f"{certificate}\n\n{audit.counts}"
    show(args, found.to_dict(), text)
    pages.write(args.out, found.html())
    for note in named.notes:
        say(note)
    return 0 if found.ok else 1


def _gated(args: argparse.Namespace, named: Network, chosen: dict[str, Any] | None) -> nn.Module:
    """The network with gates: converted here, from a folder, or as it comes."""
    if args.gates is not None:
        return conversion.load(args.gates, copy.deepcopy(named.model))
    if has_its_gates(named):
        if chosen or args.tol is not None:
            raise UsageError(
                f"{args.network} has its gates already; --site and --tol are for a network that is "
                "converted."
            )
        return named.model
    return conversion.convert(named.model, chosen, inputs=named.inputs, strict=False)
