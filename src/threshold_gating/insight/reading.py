"""`read`: what the gates of a network are and what they do, site by site and channel by channel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion.aten_ops import tensors
from threshold_gating.conversion.checkpoint.save_load import inner
from threshold_gating.conversion.text import some
from threshold_gating.conversion.watch import can_train, check_weights
from threshold_gating.insight.attention import Heads, HeadTally
from threshold_gating.insight.gates import (
    IN_WEIGHTS,
    TWO_INPUTS,
    behind_weights,
    gate_sites,
    no_function,
    saved_sites,
    unopened,
)
from threshold_gating.insight.looking import Look, as_written
from threshold_gating.insight.nearest import NONE, nearest, points
from threshold_gating.insight.records import BROKEN, Reading, SiteReading, broken_groups, mended
from threshold_gating.primitive import Value
from threshold_gating.training.families import families_of
from threshold_gating.training.health import Rule
from threshold_gating.training.telemetry import LearnedSite


def read(
    model: nn.Module | str | Path, *inputs: Any, rule: Rule | None = None, **named: Any
) -> Reading:
    """Read the gates of a network, and with inputs what they do there.

    With inputs the network runs once, as in evaluation and with the gates evaluated (`reference`),
    and is left as it was. Without, and of a folder that `tg.conversion.save` wrote, the numbers of
    the gates alone are read. What cannot be read is named in `notes`, with the reason.

    Args:
        model: a network with gates, as of `tg.convert`, or the folder of a saved one.
        inputs, named: what the network takes.
        rule: when a channel counts as dead or saturated; see `tg.training.Rule`.
    """
    rule = rule or Rule()
    if isinstance(model, str | Path):
        if inputs or named:
            raise ValueError(
                f"read: {model} is a folder, and only a network runs; load it with tg.load, or "
                "leave the inputs out."
            )
        saved = saved_sites(model)
        return _made(saved.model, saved.sites, saved.weighted, None, rule, saved.unread)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"read: model is a torch.nn.Module or a folder of a saved one; got "
            f"{type(model).__name__}."
        )
    model = inner(model)
    with can_train(), as_written(model):  # in inference mode no slope could be looked at
        return _read(model, inputs, named, rule)


def _read(model: nn.Module, inputs: Any, named: Any, rule: Rule) -> Reading:
    check_weights(model)
    _check_values(model)
    gates = gate_sites(model)
    kind, weighted = type(model).__name__, behind_weights(model)
    if not (inputs or named):
        return _made(kind, gates, weighted, None, rule, unopened(model, gates))
    look = Look(model, gates, rule)
    look.run(inputs, named)
    shapes = ", ".join("x".join(map(str, t.shape)) for t in tensors((inputs, named)))
    return _made(kind, gates, weighted, look, rule, look.unread, shapes or "no tensor")


def _check_values(model: nn.Module) -> None:
    meta = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if meta:
        raise ValueError(
            f"read: {type(model).__name__} has no values, {some(meta)} being on the meta device; "
            "load weights first, as model.to_empty(device='cpu') and model.load_state_dict(...)."
        )


def _made(
    model: str,
    gates: Mapping[str, LearnedSite],
    weighted: set[str],
    look: Look | None,
    rule: Rule,
    unread: Mapping[str, str],
    inputs: str = "",
) -> Reading:
    """The record, and what its reader has to know."""
    gates = look.gates if look else gates
    order = list(look.order()) if look else list(gates)
    sites = [
        _site(gates[name], look, no_function(name, weighted), unread.get(name, ""))
        for name in order
        if gates[name].start is not None
    ]
    tallies = dict(look.heads) if look else {}
    for name, gate in gates.items():  # temperatures that no run shows more of
        if gate.start is None and name not in tallies:
            tallies[name] = HeadTally(gate.groups, gate.tau[0])
    heads = [tally.reading(name) for name, tally in tallies.items()]
    if not sites and not heads:
        if unread:
            others = "; ".join(f"{name}: {why}" for name, why in unread.items())
            raise ValueError(f"read: no gate of {model} is read ({others}).")
        raise ValueError(
            f"read: {model} has no gate to read. Make its nonlinearities gates first: "
            "tg.insight.read(tg.convert(model, inputs=x), x)."
        )
    notes = (*_notes(sites, gates, look, unread, rule), *_notes_of_heads(heads))
    return Reading(model, inputs, tuple(sites), tuple(heads), notes, rule)


def _site(site: LearnedSite, look: Look | None, branches: str, unread: str) -> SiteReading:
    """What is read of a gate; `branches` says where they are, if they are no numbers of its own."""
    t = site.start
    assert t is not None
    tally = look.tallies.get(site.name) if look else None
    values = tally.values() if tally else None
    broken, whole = broken_groups(site), _on_cpu(mended(site))
    words = families_of(whole)
    at = points(None if values is None else values.sample)
    near = (NONE,) * site.groups if branches else nearest(whole, at)
    if broken.any():
        lost = broken.expand(site.groups).tolist()
        words = [BROKEN if off else word for off, word in zip(lost, words, strict=True)]
        near = tuple(NONE if off else n for off, n in zip(lost, near, strict=True))
        values = values and values.without(broken)
    if look is not None and values is None and not unread:
        unread = "never called on these inputs"
    return SiteReading(
        name=site.name,
        start=t,
        share=site.share if site.groups > 1 else "layer",
        learned=site.learned,
        tau=_rows(site.tau, site.groups),
        theta=_rows(site.theta, site.groups),
        s=_rows(site.s, site.groups),
        c=_rows(site.c, site.groups),
        family=(branches,) * site.groups if branches else tuple(words),
        nearest=near,
        values=values,
        unread=unread,
    )


def _on_cpu(site: LearnedSite) -> LearnedSite:
    rows = {
        what: [w.double().cpu() if isinstance(w, Tensor) else w for w in getattr(site, what)]
        for what in ("tau", "theta", "s", "c")
    }
    return site._replace(**rows)  # type: ignore[arg-type]


def _rows(rows: Iterable[Value], groups: int) -> Tensor:
    each = [torch.as_tensor(w, dtype=torch.float64, device="cpu").detach() for w in rows]
    each = [w.expand(groups) for w in each]
    return torch.stack(each) if each else torch.zeros(0, groups, dtype=torch.float64)


_ELSEWHERE = {
    IN_WEIGHTS: "the branches are in the weights",
    TWO_INPUTS: "the branches of a gated linear unit are its other input",
}


def _notes(
    sites: list[SiteReading],
    gates: Mapping[str, LearnedSite],
    look: Look | None,
    unread: Mapping[str, str],
    rule: Rule,
) -> Iterable[str]:
    """What a reader of the table has to know."""
    if look is None:
        yield (
            "Nothing ran: open gates, saturation, flat parts, dead channels and thresholds of "
            "attention need inputs, as in read(model, x)."
        )
    if sites and not any(gate.learned for gate in gates.values()):
        yield "No gate learns: tau, theta, s and c are those of the activations they stand for."
    for site in sites:
        if BROKEN in site.family:
            these = some([str(k) for k, w in enumerate(site.family) if w == BROKEN], 8)
            said = f"tau, theta, s or c of {these} is not finite; no more is read of it"
            yield f"{site.name}: {said}."
        if site.values is not None and site.values.lost:
            lost = site.values.lost
            yield f"{site.name}: {lost:,} of its inputs are NaN or infinite, and left out."
    for branches, where in _ELSEWHERE.items():
        these = some([s.name for s in sites if branches in s.family], 8)
        if these:
            yield f"{these}: {where}, so no family, nearest name or flat part is read."
    whys = {**{s.name: s.unread for s in sites if s.unread}, **unread}
    for why in dict.fromkeys(whys.values()):
        yield f"Not read at {some([n for n, w in whys.items() if w == why], 8)}: {why}."
    if look is not None:
        yield from _notes_of_run(sites, look, rule)


def _notes_of_heads(attentions: Iterable[Heads]) -> Iterable[str]:
    for a in attentions:
        broken = [str(h) for h, tau in enumerate(a.tau.tolist()) if not math.isfinite(tau)]
        if broken:
            yield f"{a.name}: tau of head {some(broken, 8)} is not finite."
        if a.lost:
            said = "queries of its heads have a logit that is NaN or infinite, and are left out"
            yield f"{a.name}: {a.lost:,} {said}."


def _notes_of_run(sites: list[SiteReading], look: Look, rule: Rule) -> Iterable[str]:
    guessed = [s.name for s in sites if s.values is not None and s.values.guessed]
    if guessed:
        yield (
            f"No layer says where the channels of {some(guessed, 8)} are: the last axis of 1 or 3, "
            "else the second, is taken for them."
        )
    few = [s for s in sites if s.values is not None and s.values.states["unknown"]]
    if few:
        count = sum(s.values.states["unknown"] for s in few if s.values is not None)
        least = min(s.values.count for s in few if s.values is not None)
        yield (
            f"{count} channels at {some([s.name for s in few])} saw nothing but flat parts, in "
            f"{least:,} values each or a few more; {rule.values:,} are needed to call a channel "
            "dead or stuck. Give more inputs, or a rule with fewer values."
        )
    if look.left:
        yield f"Left to torch, so not read: {some(list(look.left), 8)}."
