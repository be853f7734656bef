"""Gates of a compiled graph on a CPU as nodes that the engine of a CPU runs (`one_pass`).

One pass of compiled C takes about half the time of the compiler's loops where gates learn, and two
thirds where not, which outweighs that nothing is fused with it. Few elements and gates that C does
not take stay formulas (`steps`).

In a network the caches are cold when a gate is reached, and Python is several times slower than in
a loop. So a call looks up all that does not depend on values by one key, and the parameters are one
tensor. The key is text, because an op takes no record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from threshold_gating.kernels.blend import cpu, gpu, graph, one_pass
from threshold_gating.kernels.layout import as_new, dense, dense_sizes, like
from threshold_gating.kernels.structure import (
    DIGITS,
    Gate,
    Held,
    Numbers,
    Role,
    Shape,
    Structure,
    Tensors,
    Wanted,
    held_rows,
)
from threshold_gating.kernels.weights import Weights
from threshold_gating.primitive.graphs import constant, is_known

# A node pays from so many elements on: a call takes some 10 us. And from so many for each group,
# because its parameters are copied in every call.
_MANY, _MANY_EACH = 2**12, 64


def pays(x: Tensor, structure: Structure, shape: Shape) -> bool:
    """Whether gates at x become a node. Few elements do not, or sizes of which it is not known that
    they are many, nor subclasses, transforms, and what C does not take."""
    many = max(_MANY, _MANY_EACH * math.prod(shape))
    if type(x) is not Tensor or not is_known(x.numel() >= many):
        return False
    if dense_sizes(x.shape, (), shape) is None:  # groups that are no run of axes
        return False
    return _takes(structure.K, int(structure.gate), x.dtype)


# To Dynamo the answer is a constant: it can trace neither questions about transforms, on which it
# guards by itself, nor how C is compiled.
@constant
def _takes(K: int, gate: int, dtype: torch.dtype) -> bool:
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    derived = forward_ad._current_level >= 0
    return not (transformed or derived) and one_pass.takes(K, gate, dtype)


class Node(NamedTuple):
    """The nodes of one structure in a graph."""

    structure: Structure
    shape: Shape
    role: Role = Role.ALONE

    def read(self, x: Tensor, tensors: Held) -> Held:
        """The tensors as they are: what follows from them is a step of the graph."""
        return tensors

    def forward(self, x: Tensor, other: Tensor | None, tensors: Held) -> Tensor:
        y: Tensor = one_pass_forward(x, _joined(tensors), self._key())
        return y

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        other: Tensor | None,
        tensors: Held,
        given: Any,
        wanted: Wanted,
    ) -> list[Tensor | None]:
        bits = sum([2**k for k, w in enumerate(wanted) if w])
        dx, sums = one_pass_backward(dy, x, _joined(tensors), self._key(), bits)
        rho, dtheta, s, c, tau, theta = tensors
        learned = (tau if rho is None else rho), (theta if dtheta is None else dtheta), s, c
        return [dx if wanted.x else None, None, *graph.apart(sums, learned, wanted)]

    def _key(self) -> str:
        """`gpu.Constants` and the shape of the group."""
        known = gpu.Constants.of(self.structure, self.role)
        return " ".join([str(n) for n in (*known, *self.shape)])


def node(x: Tensor, structure: Structure, tensors: Tensors, shape: Shape) -> tuple[Tensors, Node]:
    """What a node reads, and the node. Numbers become tensors: those of a graph may vary."""
    tau, _, theta, _, s, c = gpu.read(structure, tensors, math.prod(shape), x.device)
    held = tensors._replace(s=s, c=c, tau0=tau, theta0=theta)
    rows = structure.tau, structure.theta, structure.s, structure.c
    tau_n, theta_n, s_n, c_n = [_known_digits(row) for row in rows]
    return held, Node(structure._replace(tau=tau_n, theta=theta_n, s=s_n, c=c_n), shape)


def _known_digits(row: Numbers) -> Numbers:
    """Numbers that a graph may know; others stay in tensors."""
    return tuple([n if n in DIGITS else None for n in row])


def _joined(held: Held) -> Tensor:
    """One tensor of float32."""
    return torch.cat([w.reshape(-1).float() for w in held if w is not None])


class _Prepared(NamedTuple):
    """What runs for an input of one shape, layout and type."""

    plan: cpu.Plan
    kind: one_pass.Kind | None  # None where a kept graph meets a machine without a compiler
    starts: tuple[int | None, ...]  # of `Tensors` in the one tensor, None for what is not there

    def ready(self, held: Tensor) -> one_pass.Ready | None:
        if self.kind is None:
            return None
        at, size = held.data_ptr(), held.element_size()
        places = [None if n is None else at + n * size for n in self.starts]
        return self.kind.read(places, self.plan.sizes[1])

    def given(self, held: Tensor) -> cpu.Given:
        """For the engine itself, which takes what compiled code does not."""
        group, rows = self.plan.sizes[1], held_rows(self.plan.structure)
        parts = zip(self.starts, rows, strict=True)
        each = [None if n is None else held[n:][: count * group] for n, count in parts]
        return cpu.Given(Tensors(*[w if w is None else w.view(-1, group) for w in each]), None)


class _Known(NamedTuple):
    """What the text of a node says."""

    structure: Structure
    shape: Shape
    there: tuple[bool, ...]  # which of `Tensors`

    def sums(self, asked: Wanted) -> list[int]:
        """How many rows the gradients of tau, theta, s and c have that are asked for, else 0."""
        rows = held_rows(self.structure)
        return [n if is_asked else 0 for n, is_asked in zip(rows, asked[2:], strict=False)]


@functools.lru_cache(4096)
def _parsed(key: str) -> _Known:
    numbers, fields = [int(n) for n in key.split()], len(gpu.Constants._fields)
    known = gpu.Constants(*numbers[:fields])
    taus = known.K - 1 if known.gate == Gate.OWN_TAUS else 1
    digits = known.tau, known.theta, known.s, known.c
    tau, theta, s, c = map(gpu.numbers_of, digits, (taus, known.K - 1, known.K, known.K))
    structure = Structure(Gate(known.gate), tau, theta, s, c, weights=Weights(known.weights))
    there = bool(known.sharpened), bool(known.moved), True, True, True, True
    return _Known(structure, tuple(numbers[fields:]), there)


@functools.lru_cache(4096)
def _prepared(
    key: str, sizes: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> _Prepared:
    structure, shape, there = _parsed(key)
    plan = cpu.plan(structure, sizes, stride, shape)
    assert plan is not None  # x is dense
    starts: list[int | None] = []
    at = 0
    for count, is_there in zip(held_rows(structure), there, strict=True):
        starts.append(at if is_there else None)
        at += count * plan.sizes[1] if is_there else 0
    return _Prepared(plan, one_pass.kind_of(structure, dtype), tuple(starts))


def _forward(x: Tensor, held: Tensor, key: str) -> Tensor:
    z, _ = dense(x, _parsed(key).shape)
    call = _prepared(key, z.shape, z.stride(), z.dtype)
    ready = call.ready(held)
    y = None if ready is None else ready.forward(z, call.plan.sizes)
    if y is None:
        y = call.plan.forward(z, None, call.given(held))
    return y if z is x else as_new(y, x)


def _backward(dy: Tensor, x: Tensor, held: Tensor, key: str, wanted: int) -> tuple[Tensor, Tensor]:
    """dx, and what is wanted of the gradients of tau, theta, s and c as rows."""
    x, sizes = dense(x, _parsed(key).shape)
    call = _prepared(key, x.shape, x.stride(), x.dtype)
    ready, dy, asked = call.ready(held), like(dy, x), _wanted(wanted)
    sums = _room(x, key, asked)
    places: list[int | None] = []
    at = sums.data_ptr()
    for count in _parsed(key).sums(asked):
        places.append(at if count else None)
        at += count * sizes[1] * sums.element_size()
    dx = None if ready is None else ready.backward_into(dy, x, sizes, places)
    if dx is None:
        given = call.given(held)
        dx, _, *grads = call.plan.backward(dy, x, None, given.tensors, given, asked)
        if sums.numel():
            torch.cat([g.reshape(-1, sizes[1]) for g in grads if g is not None], out=sums)
    # what nobody wants has its shape all the same
    return torch.empty_like(x) if dx is None else dx, sums


def _wanted(bits: int) -> Wanted:
    return Wanted(*[bool(bits >> k & 1) for k in range(len(Wanted._fields))])


def _room(x: Tensor, key: str, asked: Wanted) -> Tensor:
    """Memory for the gradients that are asked for."""
    known = _parsed(key)
    return x.new_empty(sum(known.sums(asked)), math.prod(known.shape), dtype=torch.float32)


def _forward_shape(x: Tensor, held: Tensor, key: str) -> Tensor:
    return torch.empty_like(x)


def _backward_shape(
    dy: Tensor, x: Tensor, held: Tensor, key: str, wanted: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dense(x, _parsed(key).shape)[0]), _room(x, key, _wanted(wanted))


# Ops that give new memory: in loops for a CPU, torch 2.13 loses track of what an op writes to.
_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("one_pass_forward(Tensor x, Tensor held, str key) -> Tensor")
_LIBRARY.define(
    "one_pass_backward(Tensor dy, Tensor x, Tensor held, str key, int wanted) -> (Tensor, Tensor)"
)
for name, run, shapes in (
    ("one_pass_forward", _forward, _forward_shape),
    ("one_pass_backward", _backward, _backward_shape),
):
    _LIBRARY.impl(name, run, "CPU")  # C is given addresses
    torch.library.register_fake(f"threshold_gating::{name}", shapes, lib=_LIBRARY)

one_pass_forward = torch.ops.threshold_gating.one_pass_forward.default
one_pass_backward = torch.ops.threshold_gating.one_pass_backward.default
