"""`blend` as a function of autograd: by a plan of an engine, into new memory or over x.

It saves x and the parameters alone and computes the gates anew in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # importing torch.compiler's would load Dynamo
from torch.autograd.graph import increment_version

from threshold_gating.kernels.backend import is_memory
from threshold_gating.kernels.blend import cpu, gpu
from threshold_gating.kernels.blend.steps import plain
from threshold_gating.kernels.structure import (
    Held,
    Numbers,
    Role,
    Shape,
    Structure,
    Tensors,
    Wanted,
    viewed,
)


class Plan(Protocol):
    """What an engine has ready for one structure: `cpu.Plan`, `gpu.Plan`, `graph.Graph`,
    `graph_cpu.Node`.

    What `read` makes of the tensors is kept between `forward` and `backward`, which gives the
    gradients of x, the other input, tau, theta, s and c.
    """

    @property
    def structure(self) -> Structure: ...

    @property
    def role(self) -> Role: ...

    @property
    def shape(self) -> Shape: ...

    def read(self, x: Tensor, tensors: Held) -> Any: ...

    def forward(self, x: Tensor, other: Tensor | None, given: Any) -> Tensor: ...

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        other: Tensor | None,
        tensors: Held,
        given: Any,
        wanted: Wanted,
    ) -> Sequence[Tensor | None]: ...


class Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, *held: Any) -> Tensor:
        plan: Plan
        *tensors, plan = held
        ctx.save_for_backward(x, other, *tensors)
        given = plan.read(x, tensors)
        # what was read stays right: autograd sees to it that what is saved does not change
        ctx.kept = plan, given, x.stride(), x.dtype
        return plan.forward(x, other, given)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _gradients(ctx, dy)


class Overwrite(torch.autograd.Function):
    """x with the gates written over it, and a copy of what it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: None, *held: Any) -> tuple[Tensor, Tensor]:
        plan: gpu.Plan
        *tensors, plan = held
        given = plan.read(x, tensors)
        ctx.kept = plan, given, x.stride(), x.dtype
        kept = torch.empty_like(x)
        plan.overwrite(x, kept, given)
        increment_version(x)  # autograd does not see what kernels write
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, other, *tensors)
        return x, kept

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dkept: Tensor | None) -> Any:
        if dy is None:
            return dkept, *[None] * 8
        dx, *rest = _gradients(ctx, dy)
        return dx if dkept is None or dx is None else dx + dkept, *rest


def _gradients(ctx: Any, dy: Tensor) -> Any:
    """Of x, the other input and `Tensors`, and None for the plan."""
    plan, given, stride, dtype = ctx.kept
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad[:8]
    # compiled autograd looks into the functions of eager calls: what these run, it cannot follow
    apart = torch.compiler.is_compiling() and isinstance(plan, cpu.Plan | gpu.Plan)
    found = (_apart if apart else gradients)(plan, given, stride, dtype, saved, dy, needed)
    return *found, None


def gradients(
    plan: Plan,
    given: Any,
    stride: Sequence[int],
    dtype: torch.dtype,
    saved: Sequence[Any],
    dy: Tensor,
    needed: tuple[bool, ...],
) -> Sequence[Tensor | None]:
    """Of x, the other input and `Tensors`, which were saved; x had this stride and dtype.

    `given` is what the plan has read of them, None if it is to read them again.
    """
    x, other, *held = saved
    if torch.compiler.is_compiling():
        wanted = Wanted.of(needed)
    else:
        if torch.is_grad_enabled() or not _is_memory_like(dy, x):
            f = partial(_formula, plan.structure, plan.role, plan.shape)
            return differentiated(f, (x, other, *held), dy, needed)
        # a hook on saved tensors may give them back in another layout or type
        if x.stride() != stride or x.dtype is not dtype:
            x = dy.new_empty_strided(dy.shape, stride, dtype=dtype).copy_(x)
        if other is not None and other.dtype is not dtype:
            other = other.to(dtype)
        wanted = wanted_of(needed)
    given = plan.read(x, held) if given is None else given
    dx, dother, dtau, dtheta, ds, dc = plan.backward(dy, x, other, held, given, wanted)
    learned = plan.structure.learned
    if ds is not None and "s" not in learned:
        ds = _of_data(ds, plan.structure.s)
    if dc is not None and "c" not in learned:
        dc = _of_data(dc, plan.structure.c)
    drho, dtau = (None, dtau) if held[0] is None else (dtau, None)
    dshift, dtheta = (None, dtheta) if held[1] is None else (dtheta, None)
    return dx, dother, drho, dshift, ds, dc, dtau, dtheta


_apart = _disable_dynamo(gradients)
wanted_of = functools.lru_cache(256)(Wanted.of)  # of 2^8 at most


def _is_memory_like(dy: Tensor, x: Tensor) -> bool:
    """Whether an engine takes dy: a batch of gradients at once is no memory, nor what a mode or a
    subclass makes of them, and what a hook on saved tensors gives may be of any size."""
    return is_memory(dy) and not _is_batch(dy) and dy.shape == x.shape


_is_batch = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched)


def _of_data(grad: Tensor, numbers: Numbers) -> Tensor:
    """A gradient for the rows that are read: of those that structure knows it is 0."""
    known = [number is not None for number in numbers]
    if not any(known):
        return grad
    # row by row: a tensor of their numbers would be a copy from the host, which no CUDA graph takes
    rows = zip(known, grad.unbind(0), strict=True)
    return torch.stack([torch.zeros_like(row) if zero else row for zero, row in rows])


# `Blend.apply` without its care for functorch, whose tensors do not come here: `backend.is_memory`
apply: Any = super(torch.autograd.Function, Blend).apply
overwrite: Any = super(torch.autograd.Function, Overwrite).apply


def _formula(
    structure: Structure, role: Role, shape: Shape, x: Tensor, other: Any, *held: Any
) -> Tensor:
    rows = viewed(structure.rows(Tensors(*held)), shape)
    y = plain(x, other if role == Role.READ else None, structure, rows)
    return y * other if role == Role.TIMES else y


def differentiated(
    f: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of f in the needed inputs, differentiable again where that is asked for."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, because one input may depend on another, and only direct dependence counts here.
        own = [None if t is None else t.view_as(t) for t in inputs]
        y = f(*own)
    asked = [t for t, need in zip(own, needed, strict=True) if need and t is not None]
    dy = dy.to(y.dtype)
    grads = torch.autograd.grad(y, asked, dy, create_graph=again, materialize_grads=True)
    found = iter(grads)
    return [next(found) if need else None for need in needed]
