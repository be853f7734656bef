"""Gates of a compiled graph on a CPU as nodes that the engine of a CPU runs (`one_pass`).

One pass of compiled C takes half the time of the compiler's loops, a quarter where gates learn, and
that outweighs what is not fused with it. Few elements, sizes that vary and gates that C does not
take stay formulas (`steps`).

A network's products empty the caches between two gates, so that Python takes several times longer
than in a loop by itself: what does not depend on values is looked up by one key, and the parameters
come as one tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import statically_known_true

from threshold_gating.kernels.blend import cpu, gpu, graph, one_pass
from threshold_gating.kernels.layout import dense, like
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
    Weights,
)

# Elements from which on a call of an op does not matter beside what the gates take, and how many of
# them each group needs: its parameters are copied.
_MANY, _MANY_EACH = 2**12, 64


def pays(x: Tensor, structure: Structure, shape: Shape) -> bool:
    """Whether gates at x are to be a node of the graph that is being made.

    Not where sizes vary: to ask for them would compile another graph. Nor for a subclass, which
    looks for the steps of formulas.
    """
    many = max(_MANY, _MANY_EACH * math.prod(shape))
    if type(x) is not Tensor or not statically_known_true(x.numel() >= many):
        return False
    found: bool = _takes(structure.K, int(structure.gate), x.dtype)
    return found


# Dynamo may neither see transforms nor how C is compiled.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
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

    def kept(self, x: Tensor) -> Tensor:
        """In a graph nobody sees it if x is written over before the backward pass. Where it is not,
        the compiler leaves this copy out."""
        return x.clone()

    def forward(self, x: Tensor, other: Tensor | None, tensors: Held) -> Tensor:
        y: Tensor = one_pass_forward(x, _joined(tensors), self._said())
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
        dx, sums = one_pass_backward(dy, x, _joined(tensors), self._said(), bits)
        rho, dtheta, s, c, tau, theta = tensors
        learned = (tau if rho is None else rho), (theta if dtheta is None else dtheta), s, c
        return [dx if wanted.x else None, None, *graph.apart(sums, learned, wanted)]

    def _said(self) -> str:
        """`gpu.Constants` and the shape of the group."""
        known = gpu.Constants.of(self.structure, self.role)
        return " ".join([str(n) for n in (*known, *self.shape)])


def node(x: Tensor, structure: Structure, tensors: Tensors, shape: Shape) -> tuple[Tensors, Node]:
    """What a node reads, and the node. Numbers become tensors: those of a graph may vary."""
    tau, _, theta, _, s, c = gpu.read(structure, tensors, math.prod(shape), x.device)
    held = tensors._replace(s=s, c=c, tau0=tau, theta0=theta)
    rows = structure.tau, structure.theta, structure.s, structure.c
    tau_n, theta_n, s_n, c_n = [_digits(row) for row in rows]
    return held, Node(structure._replace(tau=tau_n, theta=theta_n, s=s_n, c=c_n), shape)


def _digits(row: Numbers) -> Numbers:
    return tuple([n if n in DIGITS else None for n in row])


def _joined(held: Held) -> Tensor:
    """One tensor of float32."""
    return torch.cat([w.reshape(-1).float() for w in held if w is not None])


class _Call(NamedTuple):
    """What runs for an input of one shape, layout and type."""

    plan: cpu.Plan
    kind: one_pass.Kind | None  # None where a kept graph meets a machine without a compiler
    starts: tuple[int | None, ...]  # of `Tensors` in the one tensor, None for what is not there
    rows: tuple[int, int, int, int]  # of the gradients of tau, theta, s and c

    def ready(self, held: Tensor) -> one_pass.Ready | None:
        if self.kind is None:
            return None
        at, size = held.data_ptr(), held.element_size()
        places = [None if n is None else at + n * size for n in self.starts]
        return self.kind.read(places, self.plan.sizes[1])

    def given(self, held: Tensor) -> cpu.Given:
        """For the engine itself, which takes what compiled code does not."""
        group, counts = self.plan.sizes[1], (*self.rows, *self.rows[:2])
        parts = zip(self.starts, counts, strict=True)
        each = [None if n is None else held[n:][: count * group] for n, count in parts]
        return cpu.Given(Tensors(*[w if w is None else w.view(-1, group) for w in each]), None)


class _Said(NamedTuple):
    """What the text of a node says."""

    known: gpu.Constants
    shape: Shape
    rows: tuple[int, int, int, int]  # of tau, theta, s and c, and of their gradients


@functools.lru_cache(4096)
def _read(said: str) -> _Said:
    numbers, fields = [int(n) for n in said.split()], len(gpu.Constants._fields)
    known = gpu.Constants(*numbers[:fields])
    taus = known.K - 1 if known.gate == Gate.OWN_TAUS else 1
    return _Said(known, tuple(numbers[fields:]), (taus, known.K - 1, known.K, known.K))


@functools.lru_cache(4096)
def _call(said: str, sizes: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> _Call:
    known, shape, rows = _read(said)
    digits = known.tau, known.theta, known.s, known.c
    tau, theta, s, c = map(gpu.numbers, digits, rows)
    structure = Structure(Gate(known.gate), tau, theta, s, c, weights=Weights(known.weights))
    plan = cpu.plan(structure, sizes, stride, shape)
    assert plan is not None  # x is dense
    there, counts = (known.sharpened, known.moved, 1, 1, 1, 1), (*rows, *rows[:2])
    starts: list[int | None] = []
    at = 0
    for count, is_there in zip(counts, there, strict=True):
        starts.append(at if is_there else None)
        at += count * plan.sizes[1] if is_there else 0
    return _Call(plan, one_pass.kind_of(structure, dtype), tuple(starts), rows)


def _forward(x: Tensor, held: Tensor, said: str) -> Tensor:
    x, _ = dense(x, _read(said).shape)
    call, y = _call(said, x.shape, x.stride(), x.dtype), torch.empty_like(x)
    ready = call.ready(held)
    if ready is None or not ready.forward(x, y, call.plan.sizes):
        y.copy_(call.plan.forward(x, None, call.given(held)))
    return y


def _backward(dy: Tensor, x: Tensor, held: Tensor, said: str, wanted: int) -> tuple[Tensor, Tensor]:
    """dx, and what is wanted of the gradients of tau, theta, s and c as rows."""
    x, sizes = dense(x, _read(said).shape)
    call, dx = _call(said, x.shape, x.stride(), x.dtype), torch.empty_like(x)
    ready, dy, asked = call.ready(held), like(dy, x), _wanted(wanted)
    sums = _room(x, said, asked)
    places: list[int | None] = []
    at = sums.data_ptr()
    for count, is_asked in zip(call.rows, asked[2:], strict=True):
        places.append(at if is_asked else None)
        at += count * sizes[1] * sums.element_size() if is_asked else 0
    if ready is None or not ready.go_back(dy, x, dx, sizes, places):
        given = call.given(held)
        made, _, *grads = call.plan.backward(dy, x, None, given.tensors, given, asked)
        if made is not None:
            dx.copy_(made)
        if sums.numel():
            torch.cat([g.reshape(-1, sizes[1]) for g in grads if g is not None], out=sums)
    return dx, sums


def _wanted(bits: int) -> Wanted:
    return Wanted(*[bool(bits >> k & 1) for k in range(len(Wanted._fields))])


def _room(x: Tensor, said: str, asked: Wanted) -> Tensor:
    """Memory for the gradients that are asked for."""
    _, shape, counts = _read(said)
    rows = sum([n for n, is_asked in zip(counts, asked[2:], strict=True) if is_asked])
    return x.new_empty(rows, math.prod(shape), dtype=torch.float32)


def _forward_shape(x: Tensor, held: Tensor, said: str) -> Tensor:
    return torch.empty_like(dense(x, _read(said).shape)[0])


def _backward_shape(
    dy: Tensor, x: Tensor, held: Tensor, said: str, wanted: int
) -> tuple[Tensor, Tensor]:
    return _forward_shape(x, held, said), _room(x, said, _wanted(wanted))


# Ops that give new memory: in loops for a CPU, torch 2.13 loses track of what an op writes to.
_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("one_pass_forward(Tensor x, Tensor held, str said) -> Tensor")
_LIBRARY.define(
    "one_pass_backward(Tensor dy, Tensor x, Tensor held, str said, int wanted) -> (Tensor, Tensor)"
)
for name, run, shapes in (
    ("one_pass_forward", _forward, _forward_shape),
    ("one_pass_backward", _backward, _backward_shape),
):
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threshold_gating::{name}", shapes, lib=_LIBRARY)

one_pass_forward = torch.ops.threshold_gating.one_pass_forward.default
one_pass_backward = torch.ops.threshold_gating.one_pass_backward.default
