"""The body of a gate in an exported file: operators of ONNX, and the numbers that they are given.

Numbers are inputs of a body, so that gates which differ in numbers alone have the same body, and
share a function of the file. Numbers 0 and 1 leave out their step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.export.graph import Gate

Value = str | Tensor  # a name in the body, or numbers in float64


class Step(NamedTuple):
    """One operator of a body."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    attributes: tuple[tuple[str, Any], ...] = ()


class Body:
    """The operators of one gate: inputs x, v0, v1, ... and d0, d1, ..., then the `numbers`."""

    def __init__(self, wide: bool, double: bool) -> None:
        self.steps: list[Step] = []
        self.numbers: list[Tensor] = []
        self.double = double
        self.wide = wide  # 16-bit numbers are computed in 32 and rounded once

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> str:
        """A new operator; numbers among its inputs become inputs of the body."""
        names = tuple(v if isinstance(v, str) else self._number(v) for v in inputs)
        output = f"t{len(self.steps)}"
        self.steps.append(Step(kind, names, output, tuple(attributes.items())))
        return output

    def _number(self, w: Tensor) -> str:
        for k, known in enumerate(self.numbers):
            if known.shape == w.shape and torch.equal(known, w):
                return f"p{k}"
        self.numbers.append(w)
        return f"p{len(self.numbers) - 1}"

    def whole(self, *numbers: int) -> str:
        """Whole numbers, which are part of the body."""
        return self.op("Constant", value_ints=numbers)

    def add(self, a: Value, b: Value) -> Value:
        if fixed(a) and fixed(b):
            return a + b  # type: ignore[operator]
        if equals(a, 0) or equals(b, 0):
            return b if equals(a, 0) else a
        return self.op("Add", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return a if equals(b, 0) else self.op("Sub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        if fixed(a) and fixed(b):
            return a * b  # type: ignore[operator]
        if equals(a, 1) or equals(b, 1):
            return b if equals(a, 1) else a
        if equals(a, 0) or equals(b, 0):
            return ZERO
        if equals(a, -1) or equals(b, -1):
            return self.op("Neg", b if equals(a, -1) else a)
        return self.op("Mul", a, b)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for bodies that one function can stand for."""
        return (*self.steps, self.wide, len(self.numbers))


def number(w: float) -> Tensor:
    return torch.tensor(w, dtype=torch.float64)


ZERO, ONE = number(0.0), number(1.0)


def fixed(w: Any) -> bool:
    return isinstance(w, Tensor)


def equals(w: Value, number: float) -> bool:
    return isinstance(w, Tensor) and bool((w == number).all())


def same(w: Sequence[Any]) -> bool:
    """Whether numbers are all equal."""
    return all(torch.equal(*torch.broadcast_tensors(w[0], each)) for each in w[1:])  # type: ignore[no-untyped-call]


def curves(gate: Gate) -> list[Tensor]:
    assert gate.structure is not None
    q = gate.structure.q or (0.0,) * gate.structure.K
    return [number(w) for w in q]
