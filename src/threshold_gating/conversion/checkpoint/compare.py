"""Two saved networks compared without running them: which weights differ, and which gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating.conversion.checkpoint import pretrained, save_load, schema
from threshold_gating.conversion.checkpoint.digest import differing, digests

_SHOWN = 20


class Side(NamedTuple):
    """One of the two: digests of its weights, their values where these are there, its gates."""

    weights: Mapping[str, str] | None  # None: not on record
    values: Mapping[str, Tensor]
    sites: Mapping[str, Any]
    learned: Mapping[str, Tensor]


def of_folder(folder: Path) -> Side:
    """What lies in a folder, which is checked to be whole."""
    saved, _, tensors = save_load.read(folder, strict=True)
    gates = {k: t for k, t in tensors.items() if saved.gates_only or _is_gate(k, saved)}
    sites = dict(schema.sites_in(saved.structure))
    if saved.pretrained is not None:
        values = pretrained.weights_of(folder, saved)
        return Side(saved.original, values, sites, gates)
    if saved.gates_only:
        return Side(saved.original or None, {}, sites, gates)
    values = {name: t for name, t in tensors.items() if name not in gates}
    return Side(digests(values), values, sites, gates)


def of_network(model: nn.Module) -> Side:
    """A network as it is."""
    gates = schema.gate_state(model)
    state = model.state_dict()
    values = {k: t for k, t in state.items() if isinstance(t, Tensor) and k not in gates}
    return Side(digests(values), values, dict(schema.sites_in(schema.structure(model))), gates)


def _is_gate(key: str, saved: schema.Checkpoint) -> bool:
    """Whether a tensor of a whole checkpoint is of a gate: a module that is one has no other, and
    an owner holds its gates' under names of their own."""
    owner, _, name = key.rpartition(".")
    gates = {name for entry in saved.modules for name in entry.names}
    return name.startswith("tg_") or owner in gates or owner.partition(".calls.")[0] in gates


@dataclass(frozen=True)
class Differences:
    """Weights, sites and learned tensors of gates that differ, by name with how; what is the same
    is counted. `weights_known` is False where one side has gates alone and no hash of weights."""

    weights: Mapping[str, str]
    gates: Mapping[str, str]
    same_weights: int
    same_gates: int
    weights_known: bool = True

    @property
    def same(self) -> bool:
        """Whether nothing differs, and all was compared."""
        return self.weights_known and not self.weights and not self.gates

    def table(self) -> str:
        """The same in words."""
        parts = [
            f"weights: {self.same_weights} the same, {len(self.weights)} differ"
            if self.weights_known
            else "weights: not compared, one side has no hash of its weights; save it again"
        ]
        parts += _lines(self.weights)
        parts += [f"gates: {self.same_gates} the same, {len(self.gates)} differ"]
        return "\n".join([*parts, *_lines(self.gates)])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same}


def _lines(found: Mapping[str, str]) -> list[str]:
    lines = [f"  {name}: {how}" for name, how in list(found.items())[:_SHOWN]]
    more = len(found) - len(lines)
    return [*lines, f"  and {more} more"] if more else lines


def compare(a: Side, b: Side) -> Differences:
    """What differs between two sides; "first" and "second" say which."""
    weights = {} if a.weights is None or b.weights is None else _weights(a, b)
    names = {**a.sites, **b.sites}
    gates = {n: how for n in names if (how := _site(a.sites.get(n), b.sites.get(n)))}
    tensors = {**a.learned, **b.learned}
    apart = {n: how for n in tensors if (how := _tensor(a.learned.get(n), b.learned.get(n)))}
    shared = sum(n in (b.weights or {}) for n in a.weights or {})
    both = names.keys() | tensors.keys()
    return Differences(
        weights,
        {**gates, **apart},
        shared - sum(n in (a.weights or {}) and n in (b.weights or {}) for n in weights),
        len(both) - len(gates) - len(apart),
        a.weights is not None and b.weights is not None,
    )


def _weights(a: Side, b: Side) -> dict[str, str]:
    one, two = a.weights or {}, b.weights or {}
    shared = one.keys() & two.keys()
    found = {}
    for name in {**one, **two}:
        if name in shared and one[name] != two[name]:
            there = name in a.values and name in b.values
            how = _tensor(a.values[name], b.values[name]) if there else ""
            found[name] = how or "has other values"
        elif name not in shared:
            side, known = ("first", one) if name in one else ("second", two)
            # a tied weight may stand there once or twice
            if not any(known[name] == known[other] for other in shared):
                found[name] = f"only in the {side}"
    return found


def _tensor(a: Tensor | None, b: Tensor | None) -> str:
    """How two tensors differ; "" where they do not, or are not there."""
    if a is None and b is None:
        return ""
    if a is None or b is None:
        return f"only in the {'first' if b is None else 'second'}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if not differing(digests({"": a}), {"": b}):
        return ""
    a, b = (t.to(torch.float64) if not t.is_complex() else t for t in (a, b))
    return f"has other values, max|d| = {(a - b).abs().max().item():.3g}"


def _site(a: Any, b: Any) -> str:
    """How what stands at a site differs."""
    if a == b:
        return ""
    if not isinstance(a, dict) or not isinstance(b, dict) or _word(a) != _word(b):
        return f"{_word(a)} in the first and {_word(b)} in the second"
    one, two = a.get("instance") or {}, b.get("instance") or {}
    keys = [k for k in {**one, **two} if one.get(k) != two.get(k)]
    more = [k for k in {**a, **b} if k != "instance" and a.get(k) != b.get(k)]
    return f"another {', '.join([*keys, *more])}"


def _word(site: Any) -> str:
    if not isinstance(site, dict):
        return "not a gate" if site is None else str(site)
    K = "" if site.get("instance") is None else f" of K = {len(site['instance']['s'])}"
    return f"{site['kind']}{K}"
