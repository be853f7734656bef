"""Calls of a plan that C++ makes (`host`): when it can, and what it asks Python for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threshold_gating.kernels import host, runtime
from threshold_gating.kernels.blend import autograd, cpu, gpu, one_pass
from threshold_gating.kernels.structure import Held, Role, Structure, Wanted, fits, held_rows


class Way(IntEnum):
    """Where y goes, by the numbers that `host_node.h` has for it."""

    AWAY = 0  # into new memory
    OVER = 1  # over x
    KEPT = 2  # over x, of which a copy stays for the backward pass


# What gives a holder's tensors. One of its own, set by somebody, is asked each time.
_ASKED = frozenset({"_held", "held", "tensors_of"})


def applied(
    x: Tensor, tensors: Held, plan: autograd.Plan, name: str, way: Way, holder: Any
) -> Tensor | None:
    """y, if C++ makes this call under the backend `name`; else None.

    The holder, if there is one, gets as `_again` what makes its next call if that is like this one.
    `_again` takes x, the module's parameters and buffers, the backend, and whether y goes over x,
    and answers None if the call is another.
    """
    made = call(x, tensors, plan, name, way)
    if holder is not None:
        # of sorted thresholds, what is read is computed from what is held
        asked = plan.structure.ordered or not _ASKED.isdisjoint(vars(holder))
        vars(holder)["_again"] = None if made is None or asked else made.again
    y: Tensor | None = None if made is None else made.blend(x, *tensors)
    return y


def call(x: Tensor, tensors: Held, plan: autograd.Plan, name: str, way: Way) -> Any | None:
    """What makes calls like this one; None before its kernel is compiled, or if Python has to."""
    if not (isinstance(plan, cpu.Plan) or (isinstance(plan, gpu.Plan) and plan.role == Role.ALONE)):
        return None
    module = host.module("cpu" if isinstance(plan, cpu.Plan) else "cuda")
    if module is None:
        return None
    slot = _slot(plan, x.get_device(), x.dtype, name, way)
    # compiled code is tried before its first call, which a mode is not to see, nor to change
    if not slot and torch._C._len_torch_dispatch_stack() == 0:
        slot.extend(_made(module, x, tensors, plan, name, way))
    return slot[0] if slot else None


# Not of the plan itself: a call has its plan, and neither would ever end.
@functools.lru_cache(4096)
def _slot(
    plan: cpu.Plan | gpu.Plan, device: int, dtype: torch.dtype, name: str, way: Way
) -> list[Any]:
    """Room for one call."""
    return []


def _made(
    module: Any, x: Tensor, tensors: Held, plan: cpu.Plan | gpu.Plan, name: str, way: Way
) -> list[Any]:
    """A call from one that can be made; nothing if this one cannot, and None for good if Python has
    to make those like it."""
    if not fits(plan.structure, tensors, plan.sizes[1]):
        return []
    of_all = {
        "fallback": partial(_gradients, plan, x.stride(), x.dtype),
        "backend": name,
        "names": plan.structure.names or (None,) * 6,
        "x": x,
        "there": tuple([t is not None for t in tensors]),
        "rows": held_rows(plan.structure),
        "group": plan.sizes[1],
        "way": int(way),
    }
    if isinstance(plan, cpu.Plan):
        return [_of_cpu(module, x, plan, of_all)]
    read = gpu.read(plan.structure, tensors, plan.sizes[1], x.device)
    run = plan.over if way == Way.KEPT else plan.run
    kernel, hooks = run.handle(x.get_device(), x.dtype), runtime.hooks()
    is_compiled = (x.get_device(), x.dtype) in run.compiled
    if not all(isinstance(each, list) for each in hooks) or (kernel is None and is_compiled):
        return [None]
    if kernel is None or runtime.readable(read) is not read:  # not from copies, which are of once
        return []
    sources = _sources(plan, tensors)
    return [
        module.launched(
            {**of_all, "read": read, "sources": sources, "kernel": kernel, "hooks": hooks}
        )
    ]


def _of_cpu(module: Any, x: Tensor, plan: cpu.Plan, of_all: dict[str, Any]) -> Any:
    """A call of compiled C; None where there is none for these gates."""
    kind = one_pass.kind_of(plan.structure, x.dtype)
    if kind is None:
        return None
    more = {"keeps": not plan.reads_again(), "by python": (False, False, *_mixed(plan.structure))}
    return module.one_pass({**of_all, **kind.for_host(x.dtype, plan.sizes), **more})


def _mixed(structure: Structure) -> tuple[bool, bool]:
    """Of s and c: whether only some rows are in a tensor that may need a gradient, which is put
    together in Python."""
    rows = ("s", structure.s), ("c", structure.c)
    s, c = [n not in structure.learned and set(row) != {None} for n, row in rows]
    return s, c


def _sources(plan: gpu.Plan, tensors: Held) -> tuple[int, ...]:
    """Which of the tensors each of those is that kernels read; -1 for a constant.

    Asked with marks in their place: two tensors may be one and the same in this call only.
    """
    marks: list[Any] = [None if t is None else object() for t in tensors]
    read = gpu.read(plan.structure, marks, plan.sizes[1], torch.device("cpu"))
    return tuple([next((k for k, m in enumerate(marks) if m is each), -1) for each in read])


def _gradients(
    plan: cpu.Plan | gpu.Plan,
    stride: Sequence[int],
    dtype: torch.dtype,
    made: Any,
    dy: Tensor,
    x: Tensor,
    held: Held,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """What C++ asks for: the gradients of x and `Tensors` where no kernel is ready, or none will
    do. The next backward pass like this on a GPU finds its kernel."""
    of_all = needed[0], False, *needed[1:]
    found = autograd.gradients(plan, None, stride, dtype, (x, None, *held), dy, of_all)
    if isinstance(plan, gpu.Plan) and not torch.is_grad_enabled():
        _add_backward(plan, made, x.get_device(), dtype, autograd.wanted_of(of_all))
    return found[0], *found[2:]


def _add_backward(
    plan: gpu.Plan, made: Any, device: int, dtype: torch.dtype, wanted: Wanted
) -> None:
    back, (s, c) = plan.ready.get(wanted), _mixed(plan.structure)
    if back is None or (wanted.s and s) or (wanted.c and c):
        return
    run = back.run.handle(device, dtype)
    add = None if back.add is None else back.add.handle(device, torch.float32)
    if run is None or (add is None) != (back.add is None):
        return
    bits, whose = _bits((wanted.x, *wanted[2:])), sum(2**k for k in back.whose)
    made.add_backward(bits, run, add, back.sums, back.stride, whose)


def _bits(flags: Sequence[bool]) -> int:
    return sum(2**k for k, flag in enumerate(flags) if flag)
