"""What stands at each function of a network: what the original computes, and its gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import taxonomy
from threshold_gating.conversion import sites
from threshold_gating.conversion.audit import described
from threshold_gating.conversion.learn import view
from threshold_gating.conversion.site import Site
from threshold_gating.conversion.site_error import floats
from threshold_gating.conversion.watch import Visit
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.unitwise import Learned

_MOST = 100_000  # gates of a site that are looked at one by one

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Gate:
    """What stands at a function; `seen.Seen` says what the fields are."""

    kind: str
    f: Function | None
    gates: tuple[TG, ...] = ()
    exact: bool | None = None
    note: str = ""


def of_module(module: nn.Module, holder: nn.Module) -> Gate:
    """A module of the library, which another one may hold."""
    about = described(module)
    if not isinstance(module, Activation):
        words = "branches have weights of their own; x is what the layer is given"
        return Gate(about.kind, None, exact=about.exact, note=words)
    replaced = vars(holder).get("replaced")
    f = None if replaced is None else replaced.forward
    had = "" if f is not None else "the network had this gate before; there is no other function"
    gates, many = _instances(module)
    return Gate(about.kind, f, gates, about.exact, "; ".join(filter(None, (had, many))))


def _instances(act: Activation) -> tuple[tuple[TG, ...], str]:
    """The gates of all channels; where they are too many what they started from, and a note."""
    many = math.prod(act.group)
    if act.learned and many > _MOST:
        return (act.init,), f"of {many:,} gates that learned only their start is shown"
    return tuple(dict.fromkeys(act.instances())), ""


def of_call(visit: Visit) -> tuple[Tensor, Callable[[], Gate]]:
    """What the gates of a call of torch read, and what they are."""
    kind, site = visit.kind, visit.gate
    if kind in sites.KINDS:
        return visit.x, lambda: _elementwise(visit, site)
    if kind == "glu":
        b = sites.halves(*visit.args, **visit.kwargs)[1]
        return b, lambda: _glu(visit, site)
    x, *others = floats((visit.args, visit.kwargs))
    if kind in ("maximum", "minimum"):
        words = "x is how far the first input lies above the second"
        s = (0, 1) if kind == "maximum" else (1, 0)
        f = F.relu if kind == "maximum" else (lambda x: -F.relu(-x))
        return x - others[0], lambda: Gate(kind, f, (TG(math.inf, 0, s, (0, 0)),), True, words)
    if kind == "prelu":
        slopes = others[0].detach().double().flatten().tolist()
        gates = tuple(dict.fromkeys(taxonomy.leaky_relu(a) for a in slopes))
        first = partial(F.leaky_relu, negative_slope=slopes[0])
        words = "the function is that of the first channel" if len(gates) > 1 else ""
        return x, lambda: Gate(kind, first, gates, True, words)
    return x, lambda: Gate(kind, None, exact=True, note="its thresholds are data: no one curve")


def _elementwise(visit: Visit, site: Site | None) -> Gate:
    parameters = visit.call.parameters
    if site is None:
        known = sites.of_call(visit.kind, parameters)
        return Gate(visit.kind, visit.function, (known.t,), known.exact)
    assert site.t is not None
    gates, many = ((site.t,), "") if site.learns is None else _learned(visit, site)
    return Gate(visit.kind, visit.function, gates, site.exact and site.learns is None, many)


def _learned(visit: Visit, site: Site) -> tuple[tuple[TG, ...], str]:
    learns: Any = site.learns
    return _instances(view(visit.run.module, site.prefix, learns))


def _glu(visit: Visit, site: Site | None) -> Gate:
    """y = g(b) a: the gate of SiLU, whose branches read the other half."""
    learns = site is not None and site.learns is not None
    gates, many = _learned(visit, site) if site and learns else ((taxonomy.TAXONOMY["silu"],), "")
    at_one = tuple(
        TG(t.tau, t.theta, (0,) * t.K, [s + c for s, c in zip(t.s, t.c, strict=True)])
        for t in gates
    )
    words = "x is the second half of the input; the curve is for a first half of 1"
    said = "; ".join(filter(None, (words, many)))
    return Gate("glu", torch.sigmoid, at_one, not learns, said)


def of_step(t: Any, words: str) -> Gate:
    """A gate of a step of a recurrent layer."""
    start = t.start if isinstance(t, Learned) else t
    kind = taxonomy.name_of(start) or "gate"
    f = getattr(torch, kind, None)
    gates = tuple(dict.fromkeys(_units(t))) if isinstance(t, Learned) else (t,)
    return Gate(kind, f, gates, not isinstance(t, Learned), words)


def _units(t: Learned) -> Iterator[TG]:
    """The gates of all units, whose values are tensors or shared."""
    rows = [t.tau, t.theta, *t.s, *t.c]
    own = torch.broadcast_tensors(*(torch.as_tensor(w).detach().double().cpu() for w in rows))  # type: ignore[no-untyped-call]
    for tau, theta, *branches in torch.stack([w.reshape(-1) for w in own], 1).tolist():
        s, c = branches[: len(t.s)], branches[len(t.s) :]
        yield TG(tau, theta, s, c, clamp=t.start.clamp)
