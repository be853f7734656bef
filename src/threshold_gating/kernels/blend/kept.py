"""A gate as one node of an exported graph: the op `threshold_gating::gate`.

Its text says what is known of the gate, rows that are tensors are given beside it. To torch it is
made of the formulas of the reference, so `run_decompositions` of an exported program lowers it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.blend.steps import plain
from threshold_gating.kernels.structure import Gate, Rows, Structure
from threshold_gating.primitive import graphs

_SAID = ("gate", "tau", "theta", "s", "c", "owner", "form", "q", "anchor", "clamp", "steep")


class Kept(NamedTuple):
    """What the node of a gate says."""

    structure: Structure
    inputs: int  # how many its branches read; 0: x itself
    site: str = ""  # "" where the site is the module that the node is in

    def rows(self, data: Sequence[Any]) -> Rows:
        """Numbers where they are known, else what was given for them, in order."""
        rest = iter(data)
        known = (self.structure.tau, self.structure.theta, self.structure.s, self.structure.c)
        return Rows(*[[next(rest) if n is None else n for n in row] for row in known])


def kept(x: Tensor, v: Any, structure: Structure, rows: Rows) -> Tensor:
    """The node of a gate, in the graph that is being made."""
    inputs = [] if v is None else [v] if isinstance(v, Tensor) else list(v)
    data = [w for row in rows for w in row if isinstance(w, Tensor)]
    now = [tuple(None if isinstance(w, Tensor) else float(w) for w in row) for row in rows]
    tau, theta, s, c = now
    said = structure._replace(tau=tau, theta=theta, s=s, c=c)
    more = {"inputs": len(inputs), "site": graphs.site()}
    text = json.dumps({**{name: getattr(said, name) for name in _SAID}, **more})
    y: Tensor = gate(x, [*inputs, *data], text)
    return y


@functools.lru_cache(4096)
def read(text: str) -> Kept:
    """What the text of a node says."""
    found = {k: _tuples(v) for k, v in json.loads(text).items()}
    said = {**{name: found[name] for name in _SAID}, "gate": Gate(found["gate"])}
    return Kept(Structure(**said), found["inputs"], found["site"])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _formula(x: Tensor, given: list[Tensor], text: str) -> Tensor:
    known = read(text)
    v = given[: known.inputs]
    one = v[0] if len(v) == 1 else v or None
    return plain(x, one, known.structure, known.rows(given[known.inputs :]))


_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("gate(Tensor x, Tensor[] given, str gate) -> Tensor")
_LIBRARY.impl("gate", _formula, "CompositeImplicitAutograd")
gate = torch.ops.threshold_gating.gate.default
