"""The engine for compiled graphs: as few nodes as can be, for each is a call in every step.

On a GPU two branches and hard gates go forward by formulas, which the compiler fuses with what is
before and behind them; backward, where sums over the whole input come in, and wherever there are
more branches, a kernel is cheaper than what the compiler makes. On a CPU gates are nodes of another
kind (`graph_cpu`), or formulas (`steps`).

The kernels are ops that torch.compile can place. They are registered one by one instead of by
`torch.library.custom_op`, whose care for autograd and aliases takes 9 us of every call; ours are
called without derivatives and return nothing they were given. Where all sizes are known they are
opened, so that the compiler launches the kernel itself: on a GPU that takes a fraction of what a
call of an op does. With sizes that vary they stay closed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from threshold_gating.kernels import runtime
from threshold_gating.kernels.blend import gpu, norms
from threshold_gating.kernels.blend.steps import steps
from threshold_gating.kernels.layout import dense, like
from threshold_gating.kernels.structure import Held, Role, Shape, Structure, Wanted, viewed


class Graph(NamedTuple):
    """The nodes of one structure in a graph."""

    structure: Structure
    role: Role
    shape: Shape

    def read(self, x: Tensor, tensors: Held) -> Held:
        """The tensors as they are: what follows from them is a step of the graph."""
        return tensors

    def forward(self, x: Tensor, other: Tensor | None, tensors: Held) -> Tensor:
        structure = self.structure
        if self.role == Role.ALONE and (structure.hard or structure.K == 2):
            y = steps(x, None, structure, viewed(structure.rows(tensors), self.shape))
            # A view, because torch 2.11 loses the gradient of a Function that returns what a cast
            # to the dtype it has already gave.
            return y.view(y.shape)
        known = list(gpu.Constants.of(structure, self.role)), list(self.shape), SOURCES
        found: Tensor = blend_forward(x, other, self._read(x, tensors), *known)
        return found

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        other: Tensor | None,
        tensors: Held,
        given: Any,
        wanted: Wanted,
    ) -> list[Tensor | None]:
        known = list(gpu.Constants.of(self.structure, self.role)), list(self.shape)
        # Nothing here asks how a tensor lies in memory: Dynamo would have dy copied for that.
        parameters = self._read(x, tensors)
        dx, dother, sums = blend_backward(dy, x, other, parameters, *known, list(wanted), SOURCES)
        inputs = dx if wanted.x else None, dother if wanted.other else None
        _, rho, _, shift, s, c = parameters
        return [*inputs, *apart(sums, (rho, shift, s, c), wanted)]

    def _read(self, x: Tensor, tensors: Held) -> list[Tensor]:
        return list(gpu.read(self.structure, tensors, math.prod(self.shape), x.device))


def apart(sums: Tensor, learned: Sequence[Any], wanted: Wanted) -> list[Tensor | None]:
    """The gradients of what is learned of tau, theta, s and c, of which `sums` (rows, G) has those
    that are wanted."""
    grads: list[Tensor | None] = []
    at = 0
    for w, needed in zip(learned, wanted[2:], strict=True):
        rows = w.numel() // sums.shape[1] if needed else 0
        grads.append(sums[at : at + rows].view(w.shape) if needed else None)
        at += rows
    return grads


# Handed to each op, so that a graph with opened kernels that torch keeps on disk is not taken once
# they have changed.
SOURCES = zlib.crc32(
    b"".join(p.read_bytes() for p in sorted(Path(runtime.__file__).parent.rglob("*.py")))
)

_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "blend_forward(Tensor x, Tensor? other, Tensor[] parameters, int[] constants, int[] shape, "
    "int sources) -> Tensor"
)
_LIBRARY.define(
    "blend_backward(Tensor dy, Tensor x, Tensor? other, Tensor[] parameters, int[] constants, "
    "int[] shape, bool[] wanted, int sources) -> (Tensor, Tensor, Tensor)"
)


def _forward(
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    constants: list[int],
    shape: list[int],
    sources: int,
) -> Tensor:
    x, sizes = dense(x, shape)
    y = torch.empty_like(x)
    second = x if other is None else like(other, x)
    run = gpu.prepared(gpu.Constants(*constants), sizes, x.element_size()).run
    run((x, second, y, *runtime.readable(tuple(parameters))))
    return y


def _backward(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    parameters: list[Tensor],
    constants: list[int],
    shape: list[int],
    wanted: list[bool],
    sources: int,
) -> tuple[Tensor, ...]:
    x, sizes = dense(x, shape)
    known = gpu.Constants(*constants)
    run, parts, axis = gpu.prepared(known, sizes, x.element_size(), Wanted(*wanted))
    # what is not wanted is x to the kernel, and an op may not return that
    grads = [torch.empty_like(x) if w else x.new_empty(0) for w in wanted[:2]]
    to = [g if w else x for g, w in zip(grads, wanted[:2], strict=True)]
    sums = x.new_empty(parts, dtype=torch.float32)
    second = x if other is None else like(other, x)
    run((x, second, like(dy, x), *to, *[sums] * 4, *runtime.readable(tuple(parameters))))
    add = gpu.adding(parts, axis, (known.sums(Wanted(*wanted)), 0, 0, 0), apart=False)
    if add is None or not sums.numel():
        return *grads, runtime.total(sums, axis)
    # by a kernel of ours: the compiler takes two for so many parts
    added = x.new_empty(parts[1] if axis == 0 else parts[0], sizes[1], dtype=torch.float32)
    add((sums, *[added] * 4))
    return *grads, added


def _forward_shape(x: Tensor, *rest: Any) -> Tensor:
    *_, shape, _ = rest
    return torch.empty_like(dense(x, shape)[0])


def _backward_shape(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, constants, shape, wanted, _ = rest
    x, sizes = dense(x, shape)
    dx, dother = (torch.empty_like(x) if w else x.new_empty(0) for w in wanted[:2])
    rows = sum(gpu.Constants(*constants).rows(Wanted(*wanted)))
    return dx, dother, x.new_empty(rows, sizes[1], dtype=torch.float32)


def _opened(run: Callable[..., Any]) -> Callable[..., Any]:
    """The op as what is in it, for a compiler that can launch the kernel itself."""

    def rule(mode: Any, op: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        if any(isinstance(n, torch.SymInt) for n in arguments[0].shape):
            return mode.__torch_dispatch__(op, types, arguments, more)
        norms.register()
        with mode:
            return run(*arguments, **(more or {}))

    return rule


for name, run, shape in (
    ("blend_forward", _forward, _forward_shape),
    ("blend_backward", _backward, _backward_shape),
):
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threshold_gating::{name}", shape, lib=_LIBRARY)
    if not runtime.interpreting():
        _LIBRARY._register_torch_dispatch_rule(name, FunctionalTensorMode, _opened(run))

blend_forward = torch.ops.threshold_gating.blend_forward.default
blend_backward = torch.ops.threshold_gating.blend_backward.default
