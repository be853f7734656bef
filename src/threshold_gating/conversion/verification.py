"""`verify`: what a conversion changes, measured with the gates really evaluated (native off).

The original network runs once as it is used, and once with each of its sites compared by itself
(`local`). Then the converted network runs, and the error of its output against the first run is
what all sites make together (`outputs`); meanwhile it is audited, so that a site that was not
evaluated, or a nonlinearity that is none, cannot pass. Nothing compared is not ok.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import aten_ops, outputs, paired, sites
from threshold_gating.conversion.audit import Audit, AuditedSite, beside, execute, is_gate
from threshold_gating.conversion.certificate import EMPTY, NEVER, NOTHING, Certificate, Row
from threshold_gating.conversion.checkpoint import card
from threshold_gating.conversion.learn import moved, started
from threshold_gating.conversion.site import instead
from threshold_gating.conversion.site_error import RELATIVE, Error, Local
from threshold_gating.conversion.text import some
from threshold_gating.conversion.watch import INTERNAL, evaluating, fresh
from threshold_gating.nn.spec import gate_names


def verify(
    model: nn.Module,
    converted: nn.Module,
    *args: Any,
    metric: paired.Measure | tuple[str, paired.Measure] | None = None,
    tol: float | None = None,
    **kwargs: Any,
) -> Certificate:
    """Compare `converted` with the `model` it was made from, on these inputs, with native off.

    Both run in evaluation mode and without gradients; modes and inputs stay as they were.

    Args:
        model: the original network.
        converted: what `convert` made of it.
        args, kwargs: what both are called with.
        metric: from the output, one truth value or number for each sample, for a paired
            comparison; a function or (name, function).
        tol: your own bound on max|d|/max|y| of each output, instead of the larger of 1e-2 (1024
            ulp where every site is exact) and twice the original's own rounding. Sites may be off
            by as much, if that is more than 1e-2. `math.inf` accepts any finite difference.
    """
    check_tol(tol)
    _check_modules(model, converted)
    ran = _both(model, converted, args, kwargs, tol)
    plain, distances = ran.plain, moved(converted)
    rows = _rows(ran.errors, ran.seen, distances)
    missing, changed = _weights(model, converted, ran.held)
    trained = _trained(distances, changed)
    wide = functools.cache(lambda: outputs.in_wider_type(model, args, kwargs, plain))
    exact, worst = all(row.exact for row in rows if row.ok is not None), _worst(rows)
    bound = math.inf if trained else tol
    compared = outputs.compare(plain, ran.have, exact, bound, wide)
    failed = _failed_sites(rows, ran) | _apart(missing, [] if trained else changed)
    failed = failed or _nothing_compared(rows)
    if message := outputs.judged(compared, plain, ran.have, bound, worst):
        failed["output"] = message
    if trained:
        start = _as_it_started(model, converted, args, kwargs)
        apart = outputs.compare(plain, start, exact, tol, wide)
        if message := outputs.judged(apart, plain, start, tol, worst):
            failed["start"] = (
                "something beside weights and gates was changed: with the original's weights, and "
                f"its gates where they started, {message}"
            )
    if not outputs.agree(plain, ran.watched, tol, wide):
        failed = {"watching": _WATCHING, **failed}
    paired_metric = None if metric is None else paired.compare(metric, plain, ran.have)
    about = (rows, compared, paired_metric, failed, tol, beside(ran.seen))
    certificate = Certificate(*about, outputs.uncompared(plain), trained)
    card.keep(converted, card.measured(certificate, args, kwargs))
    return certificate


class _Ran(NamedTuple):
    """What the original gave as it is used and while it was watched, the errors of its sites and
    what its modules hold; what the converted network gave, and its audit."""

    plain: Any
    held: dict[str, Tensor]
    watched: Any
    errors: Mapping[str, Error]
    have: Any
    seen: Audit


def _both(
    model: nn.Module, converted: nn.Module, args: Any, kwargs: Any, tol: float | None
) -> _Ran:
    """Run both networks; each starts from the same random numbers, should it draw any (a run leaves
    those to come as they were)."""
    name, local = type(model).__name__, Local(model, converted, tol or 0.0)
    with kernels.use("reference"):
        plain, held = _plain_run(model, args, kwargs)
        given, named = fresh((args, kwargs))
        unlike = f"{name} runs, but not where its sites are compared"
        with evaluating(model), local.watch, instead(unlike, f". {_HIDDEN}"):
            watched = model(*given, **named)
        with instead(*_UNLIKE, ValueError):
            have, seen = execute(converted, args, kwargs)
    return _Ran(plain, held, watched, local.errors, have, seen)


_HIDDEN = (
    "Inside torch.vmap (and jacfwd and hessian, which use it) a tensor does not show its values: "
    "make the call outside of it, or leave its site alone (sites={name: None}); strict=False "
    "converts unproven."
)
_UNLIKE = (
    "verify: converted does not run where model does",
    "; give the network that convert made of this model, of its type and on its device.",
)


def _failed_sites(rows: tuple[Row, ...], ran: _Ran) -> dict[str, str]:
    """Why sites failed: beyond their bound, not evaluated by gates, or nothing to compare."""
    return {
        **{row.site: ran.errors[row.site].message for row in rows if row.ok is False},
        **_not_evaluated(rows, ran.seen),
        **{
            row.site: f"nothing was compared at {row.site}: none of its "
            f"{ran.errors[row.site].values} values is finite; give inputs with finite elements "
            "that reach it."
            for row in rows
            if row.note == NOTHING
        },
    }


def _nothing_compared(rows: tuple[Row, ...]) -> dict[str, str]:
    if not all(row.ok is None for row in rows):
        return {}
    why = (
        f"none of {len(rows)} sites was evaluated on these inputs; give inputs with elements that "
        "reach the sites."
        if rows
        else "converted has no site, all of it stays as it was."
    )
    return {"sites": f"nothing was compared: {why}"}


def _as_it_started(model: nn.Module, converted: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output of a trained network before it was trained."""
    new = started(model, converted)
    given, named = fresh((args, kwargs))
    with kernels.use("reference"), evaluating(new):
        return new(*given, **named)


_WATCHING = (
    "model gives another output when its calls are intercepted than when it just runs: it, or "
    "torch, takes another path then, and the gates answer the path that is intercepted. "
    "torch.backends.mha.set_fastpath_enabled(False) turns off the paths of nn.TransformerEncoder "
    "and nn.MultiheadAttention, for both networks."
)


def _plain_run(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output of a network as it is used, with nobody looking, and the tensors that its modules
    hold besides weights and buffers and did not change."""
    given, named = fresh((args, kwargs))
    with evaluating(model):
        before = {name: (t, t._version) for name, t in _held(model)}
        output = model(*given, **named)
        after = dict(_held(model))
        same = {
            name: t
            for name, (t, version) in before.items()
            if after.get(name) is t and t._version == version
        }
    return output, same


def check_tol(tol: float | None, used: bool = True) -> None:
    """Refuse what is no bound, and one that nothing would be held to."""
    is_number = isinstance(tol, Real) and not isinstance(tol, bool)
    if tol is not None and not (is_number and tol >= 0):
        raise ValueError(
            "tol must be a number >= 0, the largest max|d|/max|y| at an output that you accept "
            f"(math.inf accepts any), or None; got {tol!r}."
        )
    if tol is not None and not used:
        raise ValueError(
            f"tol={tol:g} needs inputs= and strict=True: nothing is compared without them."
        )


def _check_modules(model: nn.Module, converted: nn.Module) -> None:
    names = {name for name, _ in converted.named_modules(remove_duplicate=False)}
    if missing := [name for name, _ in model.named_modules() if name not in names]:
        raise ValueError(
            f"verify: converted was not made from model: it has no module {missing[0]!r}."
        )
    after = dict(converted.named_parameters(remove_duplicate=False))
    for name, p in model.named_parameters(remove_duplicate=False):
        q = after.get(name, p)
        if (p.dtype, p.device) != (q.dtype, q.device):
            raise ValueError(
                f"verify: model and converted are not of one type: {name} is {p.dtype} on "
                f"{p.device} and, converted, {q.dtype} on {q.device}; bring both to one, as by "
                f"model.to({q.dtype})."
            )


def _trained(distances: Mapping[str, Mapping[str, float]], changed: list[str]) -> str:
    """What of a network with gates that learn has moved, "" where none of the gates has."""
    gates = [name for name, far in distances.items() if any(far.values())]
    if not gates:
        return ""
    said = f"trained since it was converted: {len(gates)} of {len(distances)} sites that learn"
    weights = f", and {len(changed)} weights, among them {changed[0]}" if changed else ""
    return f"{said}{weights}; sites are compared as they were at their start"


def _rows(
    errors: Mapping[str, Error], seen: Audit, distances: Mapping[str, Mapping[str, float]]
) -> tuple[Row, ...]:
    """One row for each site of the original that was reached, then those that no run reaches."""
    audited = {site.name: site for site in seen.sites}
    rows = [
        replace(_row(name, error, audited.get(name)), **_learning(name, error, distances))
        for name, error in errors.items()
    ]
    idle = [site for site in seen.sites if not site.calls and site.name not in errors]
    never = [Row(s.name, s.kind, s.K, bool(s.exact), note=NEVER) for s in idle]
    return (*rows, *never)


def _learning(
    name: str, error: Error, distances: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    if name not in distances or error.site.learns is None:
        return {}
    learns = error.site.learns.learned
    return {"learns": learns, "moved": distances[name], "input_rms": error.input_rms}


def _row(name: str, error: Error, seen: AuditedSite | None) -> Row:
    site = error.site
    K = None if site.t is None else site.t.K
    evaluated = seen is not None and seen.calls and not seen.native
    if not evaluated or not error.elements:
        note = "not evaluated" if not evaluated else NOTHING if error.values else EMPTY
        return Row(name, site.kind, K, site.exact, calls=error.calls, note=note)
    ok = not error.message
    accepted = ok and not site.exact and error.relative > RELATIVE
    return Row(
        name,
        site.kind,
        K,
        site.exact,
        max=error.max,
        rms=error.rms,
        rel_rms=error.rel_rms,
        ulp=error.ulp if site.exact else None,
        bitwise=error.bitwise,
        bound=error.bound,
        elements=error.elements,
        calls=error.calls,
        ok=ok,
        scope="every input" if ok and error.proven else "these inputs",
        note=f"accepted by tol={error.tol:g}" if accepted else "",
    )


def _not_evaluated(rows: tuple[Row, ...], seen: Audit) -> dict[str, str]:
    """Sites that the gates did not compute, and nonlinearities that are no site."""
    failed = {}
    reached = {row.site for row in rows if row.calls}
    for site in seen.sites:
        if site.native:
            failed[site.name] = f"{site.name} was not evaluated: torch's own op ran."
        elif not site.calls and site.name in reached:
            failed[site.name] = (
                f"{site.name} was not evaluated: converted does not call it. {_SELF}"
            )
        elif site.calls and site.name not in reached:
            failed[site.name] = f"{site.name} was not compared: model does not call it. {_SELF}"
    for op in seen.left:
        if not op.asked:
            where = op.module or "the network itself"
            key, calls = f"{op.module}:{op.op}", f"calls: {op.calls}"
            way_out = _unanswered(op.op, bool(seen.sites))
            failed[key] = f"{op.op} ran outside the gates, in {where} ({calls}). {way_out}"
    return failed


def _unanswered(op: str, has_gates: bool) -> str:
    """Why no gate answered an op, and what would help."""
    if not has_gates:
        return "This network has no gate at all: give the one that `tg.convert` made of model."
    alone = "or as a module of its own, which can stay as it is; strict=False converts the rest "
    if op.strip("_") in {*sites.KINDS, *sites.WHOLE}:
        return (
            "Gates answer such a call of torch in the forward of a module, of floating-point "
            "numbers; not in a hook of the whole network, nor as an ATen op. Make it there, "
            f"{alone}unproven."
        )
    return (
        "Write it as a function of torch that is one (F.relu, torch.sigmoid), of floating-point "
        f"numbers, {alone}unproven."
    )


_SELF = (
    "A function that closes over the network (a lambda with self) calls the one it was made for, "
    "not the copy; make it a method."
)


def _worst(rows: tuple[Row, ...]) -> dict[str, str]:
    """The approximate sites in words, those first that are most off for what they give."""
    close = [row for row in rows if row.ok is not None and not row.exact]
    close.sort(key=lambda row: row.rel_rms, reverse=True)
    return {
        row.site: f"{row.site} ({row.kind}, K = {row.K}: {row.rel_rms:.2g} of what it gives)"
        for row in close
    }


def _weights(
    model: nn.Module, converted: nn.Module, held: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """How the networks differ in what is no site: weights, buffers and what `held` has. First what
    only one of them has, in words; then the names of those that are not the same."""
    gates = tuple(f"{n}." for n, m in converted.named_modules(remove_duplicate=False) if is_gate(m))
    own_gates = set(_held_by_owners(converted))
    before, after = (
        {n: t for n, t in _tensors(each) if not n.startswith(gates) and n not in own_gates}
        for each in (model, converted)
    )
    own, other = {**before, **held}, {**dict(_held(converted)), **after}
    names = [n for n in own if not n.startswith(gates)]
    lost = [n for n in names if n not in other]
    more = [n for n in after if n not in own]
    changed = [
        n for n in names if n in other and not own[n].is_meta and not _same(own[n], other[n])
    ]
    said = [f"converted has no {some(lost)}, which model has."] if lost else []
    said += [f"converted has {some(more)}, which model does not have."] if more else []
    return said, changed


def _apart(said: list[str], changed: list[str]) -> dict[str, str]:
    """How the networks differ in what is no site, if they do."""
    if changed:
        some = f"{len(changed)} weights are not the original's, among them {changed[0]}."
        said = [some, *said]
    return {"weights": " ".join(said)} if said else {}


def _held_by_owners(model: nn.Module) -> Iterator[str]:
    """The names of the tensors that modules hold for the gates of their calls."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in gate_names(module):
            yield f"{path}.{name}".removeprefix(".")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold as plain attributes, also in lists and dicts."""
    for path, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key not in INTERNAL and not key.startswith("tg_"):
                for k, t in enumerate(aten_ops.tensors(value)):
                    if not isinstance(t, nn.Parameter):
                        yield f"{path}.{key}{f'[{k}]' if k else ''}".removeprefix("."), t


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, where NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )
