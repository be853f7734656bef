"""`tg prove`: taxonomy rows, or a network's sites, tried on every finite number of a type.

    tg prove silu mish
    tg prove all --device cuda --json proofs.json
    tg prove timm:resnet18 --dtype float16 bfloat16

The comparison itself is in `conversion.proof`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from torch import Tensor, nn

from threshold_gating import taxonomy
from threshold_gating.cli import spec
from threshold_gating.cli.printing import UsageError, progress, say, show
from threshold_gating.cli.shared import SPECS
from threshold_gating.cli.spec import network
from threshold_gating.conversion import Site, proof, sites
from threshold_gating.conversion.checkpoint import files, schema
from threshold_gating.conversion.enumeration import FORMATS, name_of
from threshold_gating.conversion.plan import Plan, make_plan
from threshold_gating.conversion.record import Proof, table
from threshold_gating.conversion.text import WIDTH, some
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation

_DTYPES = {name_of(dtype): dtype for dtype in FORMATS}


@dataclass(frozen=True)
class _Instance:
    """What is to be proven: an instance, what it replaces, and where it stands."""

    name: str
    t: TG
    f: Callable[[Tensor], Tensor]
    sup: float = 0.0
    truth: Callable[[Tensor], Tensor] | None = None
    is_module: bool = False
    where: tuple[str, ...] = ()


def prove(args: argparse.Namespace) -> int:
    """`tg prove`."""
    found, left = _instances(args)
    for why, names in left.items():
        say(f"tg prove: {_listed(names)} left out: {why}")
    work = [(each, dtype) for each in found for dtype in args.dtype]
    proofs: list[Proof] = []
    for each, dtype in work:
        proofs.append(_proven(args, each, dtype))
        print(proofs[-1], end="\n\n", flush=True)  # as soon as it is known: each takes long
        if proofs[-1].interrupted:
            break
    done = [p.to_dict() | {"sites": each.where} for p, (each, _) in zip(proofs, work, strict=False)]
    show(args, _as_json(done, left), _summary(proofs, len(work)))
    if proofs[-1].interrupted:
        return 130
    return 0 if all(each.holds for each in proofs) else 1


def _listed(names: Sequence[str]) -> str:
    return f"{some(names)} {'are' if len(names) > 1 else 'is'}"


def _proven(args: argparse.Namespace, each: _Instance, dtype: str) -> Proof:
    # A module evaluates its record but for infinite inputs; other backends would run torch's op.
    module = each.is_module and args.backend == "reference"
    whole = dtype != "float32"  # few enough to try them all, here
    device = spec.device(args.device)
    try:
        with progress(f"{each.name}, {dtype}") as tell:
            return proof.prove(
                each.t,
                each.f,
                _DTYPES[dtype],
                name=each.name,
                sup=each.sup,
                truth=each.truth,
                gate=Activation(each.t, device=device) if module else None,
                device=device,
                backend=args.backend,
                sample=None if whole else args.sample,
                jobs=1 if whole else args.jobs,
                progress=lambda done, count: tell("", done / count),
            )
    except (ValueError, TypeError, RuntimeError) as error:  # of ours, or of the function itself
        said = str(error).splitlines()[0].removeprefix("prove: ")
        raise UsageError(f"{each.name} in {dtype}: {said}") from error


def _summary(proofs: list[Proof], asked: int) -> str:
    wrong = [f"{each.name} ({each.dtype})" for each in proofs if not each.holds]
    complete = sum(each.complete for each in proofs)
    said = [f"Every finite input was tried for {complete} of {asked}"]
    if sampled := sum(not (each.complete or each.interrupted) for each in proofs):
        said.append(f"a sample, which proves nothing, for {sampled}")
    if proofs[-1].interrupted:
        said.append("then it was interrupted")
    verdict = f"WRONG: {', '.join(wrong)}" if wrong else "Every claim holds on what was tried"
    last = fill(f"{'; '.join(said)}. {verdict}.", WIDTH)
    return f"{table(proofs)}\n\n{last}"


def _as_json(proofs: Sequence[Any], left: Any) -> str:
    """One line for each proof."""
    lines = ",\n".join(json.dumps(each, allow_nan=False) for each in proofs)
    return f'{{"left": {json.dumps(left)}, "proofs": [\n{lines}\n]}}'


# What the command line names


def _instances(args: argparse.Namespace) -> tuple[list[_Instance], dict[str, list[str]]]:
    """What is to be proven, and the sites that cannot be, by the reason."""
    folders = [word for word in args.what if (Path(word) / files.CONFIG).is_file()]
    if not folders and not any(":" in word for word in args.what):
        if args.gates is not None:
            raise UsageError(f"--gates is for a network, {SPECS}; got {' '.join(args.what)}.")
        return _rows(args.what), {}
    if len(args.what) > 1:
        raise UsageError(f"give names of rows, or one network; got {' '.join(args.what)}.")
    found: dict[Any, _Instance] = {}
    left: dict[str, list[str]] = {}
    for place in _saved(Path(folders[0]), None) if folders else _of_network(args):
        if isinstance(made := _instance(place), str):
            left.setdefault(made, []).append(place.site.name)
        else:
            key, each = made
            before = found.setdefault(key, each)
            found[key] = replace(before, where=(*before.where, place.site.name))
    if not found:
        why = "; ".join(f"{_listed(names)} left out: {why}" for why, names in left.items())
        raise UsageError(f"{args.what[0]} has no element-wise site to prove. {why}".strip())
    return list(found.values()), left


class _Place(NamedTuple):
    """A site, the module that it replaces if it is one and known, and whether it is learned."""

    site: Site
    is_module: bool
    module: nn.Module | None = None
    learned: bool = False


def _of_network(args: argparse.Namespace) -> Iterator[_Place]:
    args.network = args.what[0]
    if args.gates is not None:
        return _saved(args.gates, network(args, ()).model)  # it need not run
    named = network(args)
    plan = make_plan(named.model, None, named.inputs)
    for note in plan.notes:
        say(f"tg prove: {note}")
    return _planned(plan)


def _planned(plan: Plan) -> Iterator[_Place]:
    for module, made in plan.modules.items():
        yield from (_Place(site, True, module) for site in made if site is not None)
    for calls in (plan.calls or {}).values():
        yield from (_Place(site, False) for site in calls.values() if site is not None)


def _saved(folder: Path, model: nn.Module | None) -> Iterator[_Place]:
    saved = schema.read(folder)
    modules = {} if model is None else dict(model.named_modules())
    for entry in saved.modules:
        if model is not None and entry.names[0] not in modules:
            raise UsageError(f"{folder} does not fit: there is no module {entry.names[0]!r}.")
        for site, make in entry.holds:
            yield _Place(site, True, modules.get(entry.names[0]), bool(make["train"]))
    for entry in saved.owners:
        yield from (
            _Place(site, False) for site in (entry.holds or {}).values() if site is not None
        )


def _instance(place: _Place) -> tuple[Any, _Instance] | str:
    """What is to be proven at a site, under a key that equal ones share; or why nothing can be."""
    site, module = place.site, place.module
    if site.t is None:
        return f"{site.kind} is not one element-wise function."
    if place.learned:
        return "its gates are learned, so there is no function that they replace."
    sup = 0.0 if site.exact else site.sup
    if not place.is_module:
        given = ", ".join(map(str, site.parameters))
        name = f"{site.kind}({given})" if given else site.kind
        f = sites.function(site.kind, site.parameters)
        return (name, site.t), _Instance(name, site.t, f, sup, proof.TRUTHS.get(site.kind))
    if module is not None:
        name = type(module).__name__
        own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        truth = proof.TRUTHS.get(proof.kind_of(module) or "")
        key = (type(module), repr(own), site.t)
        return key, _Instance(name, site.t, module.forward, sup, truth, is_module=True)
    if taxonomy.TAXONOMY.get(site.kind) == site.t:
        return site.kind, replace(_row(site.kind), sup=sup, is_module=True)
    return "the folder does not say which function it replaces; give the network, and --gates."


def _rows(words: list[str]) -> list[_Instance]:
    keys: list[str] = []
    for word in words:
        try:
            exact = [key for key, row in taxonomy.ROWS.items() if row.exact]
            keys += exact if word == "all" else [taxonomy.key_of(word)]
        except ValueError as error:
            raise UsageError(f"{error} Write a network as {SPECS}.") from error
    return [_row(key) for key in dict.fromkeys(keys)]


def _row(key: str) -> _Instance:
    row = taxonomy.ROWS[key]
    return _Instance(key, taxonomy.TAXONOMY[key], row.f, row.sup, proof.TRUTHS.get(key))
