"""Calls of a plan that C++ makes (`host`): when it can, and what it asks Python for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threshold_gating.kernels import host, runtime
from threshold_gating.kernels.blend import autograd, gpu
from threshold_gating.kernels.structure import Held, Role, Wanted


def applied(x: Tensor, tensors: Held, plan: autograd.Plan, name: str) -> Tensor | None:
    """y, if C++ makes this call under the backend `name`; else None."""
    made = call(x, tensors, plan, name)
    y: Tensor | None = None if made is None else made.blend(x, *tensors)
    return y


def call(x: Tensor, tensors: Held, plan: autograd.Plan, name: str) -> Any | None:
    """What makes calls like this one; None before its kernel is compiled, or if Python has to."""
    # a plan of a CPU asks no further: who looks for a GPU may not fork any more
    if not isinstance(plan, gpu.Plan) or plan.role != Role.ALONE:
        return None
    module = host.module()
    if module is None:
        return None
    slot = _slot(plan, x.get_device(), name)
    if not slot:
        slot.extend(_made(module, x, tensors, plan, name))
    return slot[0] if slot else None


# Not of the plan itself: a call has its plan, and neither would ever end.
@functools.lru_cache(4096)
def _slot(plan: gpu.Plan, device: int, name: str) -> list[Any]:
    """Room for one call."""
    return []


def _made(module: Any, x: Tensor, tensors: Held, plan: gpu.Plan, name: str) -> list[Any]:
    """A call from one that can be made; nothing before the kernel is compiled, and None for good
    if Triton has to launch it."""
    read = gpu.read(plan.structure, tensors, plan.sizes[1], x.device)
    kernel, hooks = plan.run.handle(x.get_device(), x.dtype), runtime.hooks()
    is_compiled = (x.get_device(), x.dtype) in plan.run.compiled
    if not all(isinstance(each, list) for each in hooks) or (kernel is None and is_compiled):
        return [None]
    if kernel is None or runtime.readable(read) is not read:  # not from copies, which are of once
        return []
    fallback = partial(_gradients, plan, x.stride(), x.dtype)
    names = plan.structure.names or (None,) * 6
    own = tuple(tensors)
    return [module.Call(fallback, name, names, x, own, read, kernel, hooks, _sources(plan, own))]


def _sources(plan: gpu.Plan, tensors: Held) -> tuple[int, ...]:
    """Which of the tensors each of those is that kernels read; -1 for a constant.

    Asked with marks in their place: two tensors may be one and the same in this call only.
    """
    marks: list[Any] = [None if t is None else object() for t in tensors]
    read = gpu.read(plan.structure, marks, plan.sizes[1], torch.device("cpu"))
    return tuple([next((k for k, m in enumerate(marks) if m is each), -1) for each in read])


def _gradients(
    plan: gpu.Plan,
    stride: Sequence[int],
    dtype: torch.dtype,
    made: Any,
    dy: Tensor,
    x: Tensor,
    held: Held,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """What C++ asks for: the gradients of x and `Tensors` where no kernel is ready, or none will
    do. The next backward pass like this finds its kernel."""
    of_all = needed[0], False, *needed[1:]
    found = autograd.gradients(plan, None, stride, dtype, (x, None, *held), dy, of_all)
    if not torch.is_grad_enabled():
        _add_backward(plan, made, x.get_device(), dtype, autograd.wanted_of(of_all))
    return found[0], *found[2:]


def _add_backward(
    plan: gpu.Plan, made: Any, device: int, dtype: torch.dtype, wanted: Wanted
) -> None:
    back, structure = plan.ready.get(wanted), plan.structure
    pairs = (wanted.s, "s", structure.s), (wanted.c, "c", structure.c)
    # gradients of rows of which structure knows some are put together in Python
    mixed = any(w and n not in structure.learned and set(k) != {None} for w, n, k in pairs)
    if back is None or mixed:
        return
    run = back.run.handle(device, dtype)
    add = None if back.add is None else back.add.handle(device, torch.float32)
    if run is None or (add is None) != (back.add is None):
        return
    bits, whose = _bits((wanted.x, *wanted[2:])), sum(2**k for k in back.whose)
    made.add_backward(bits, run, add, back.sums, back.stride, whose)


def _bits(flags: Sequence[bool]) -> int:
    return sum(2**k for k, flag in enumerate(flags) if flag)
