"""The functions of `primitive` as fast as this machine runs them; which way is chosen here.

`native` lowers a frozen exact instance to torch's own op, `reference` evaluates the gates in plain
torch, `triton` by fused kernels on a GPU, `auto` (the default) takes native where there is one,
Triton on a GPU and few in-place passes on a CPU. Figures and certificates are made with
`reference`. The environment variable TG_BACKEND sets the initial choice; see `choice` for `use`.
"""

from __future__ import annotations

import os
from typing import Any, get_args

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.instance import TG
from threshold_gating.kernels import choice, direct, fused, launch, products, traced
from threshold_gating.kernels.choice import Backend, backend, use
from threshold_gating.kernels.form import Form, take_apart
from threshold_gating.kernels.lowering import Op, native, overwriting, overwritten

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendError",
    "Form",
    "backend",
    "blend",
    "blend_times",
    "checked",
    "constant",
    "direct",
    "evaluate",
    "exporting",
    "gated_product",
    "launches",
    "lowered",
    "native",
    "overwriting",
    "overwritten",
    "takes_native",
    "traced",
    "traces",
    "use",
]

BACKENDS = get_args(Backend)


class BackendError(RuntimeError):
    """A backend was asked for that does not exist here or cannot run this instance."""


def checked(name: str) -> str:
    """`name`, if there is such a backend here."""
    if name not in BACKENDS:
        raise BackendError(
            f"no backend {name!r} (tg.kernels.use or the environment's TG_BACKEND); "
            f"this version has {', '.join(BACKENDS)}."
        )
    if name == "triton":
        _check_triton()
    return name


def _check_triton() -> None:
    if not launch.is_installed():
        raise BackendError(
            "the backend 'triton' needs Triton, which is not installed; "
            "pip install 'threshold-gating[triton]'."
        )
    if not torch.cuda.is_available() and not launch.interpreting():
        raise BackendError(
            "the backend 'triton' needs a GPU, and torch sees none; "
            "use 'auto', or set TRITON_INTERPRET=1 to step through the kernels on the CPU."
        )


choice.start_from(checked(os.environ.get("TG_BACKEND", "auto")))


def lowered(op: Op | None) -> Op | None:
    """`op`, torch's op for an instance (from `native`), if it is to run; None for the gates."""
    if backend() == "native" and op is None:
        raise BackendError(
            "this instance has no native op (it is learned, approximate or not one of torch's); "
            "use the backend 'auto' or 'reference' for it."
        )
    return op if takes_native() else None


def takes_native() -> bool:
    """Whether torch's own ops may run where they compute the same."""
    # An exported graph is for people and other tools to read: it holds the gates.
    name = backend()
    return name == "native" or (name == "auto" and not exporting())


def exporting() -> bool:
    """Whether a graph is being made for torch.export."""
    # The flag and not `torch.compiler.is_exporting()`: Dynamo of torch 2.11 takes that for True
    # in every graph that it compiles.
    return torch.compiler._is_exporting_flag


def blend(x: Tensor, *parameters: Any, **options: Any) -> Tensor:
    """`primitive.blend` (Eq. 3), the gates themselves, by the fastest way that evaluates them."""
    v = options.pop("v", None)
    if v is None or (isinstance(v, Tensor) and v.shape == x.shape and v.dtype == x.dtype):
        role = launch.ALONE if v is None else launch.READ
        y = _fused(x, v, role, parameters, options)
        if y is not None:
            return y
    return primitive.blend(x, *parameters, v=v, **options)


def blend_times(x: Tensor, up: Tensor, *parameters: Any, **options: Any) -> Tensor:
    """up * blend(x), the gated unit (SwiGLU, GEGLU); on a GPU in one pass."""
    if _runs_triton(x) and up.shape == x.shape and up.dtype == x.dtype:
        y = _fused(x, up, launch.TIMES, parameters, options)
        if y is not None:
            return y
    return up * blend(x, *parameters, **options)


def _fused(
    x: Tensor, other: Tensor | None, role: int, parameters: Any, options: Any
) -> Tensor | None:
    """The same in few passes, or None where only the formulas of the reference do it."""
    if backend() == "reference" or not _is_plain(x):
        return None
    triton = _runs_triton(x)
    if not (x.is_cpu or triton) or (call := take_apart(x, *parameters, **options)) is None:
        return None
    if torch.compiler.is_compiling() and not triton:
        return fused.blend_traced(x, other, call)
    return fused.blend(x, other, call, role, triton)


def _is_plain(x: Any) -> bool:
    """Whether x is memory: not transformed, of no subclass, not in a graph to export."""
    return not exporting() if torch.compiler.is_compiling() else _is_memory(x)


def _is_memory(x: Any) -> bool:
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None  # torch.jit.trace
    )


def _runs_triton(x: Tensor) -> bool:
    """Whether Triton computes with x: on a GPU, or step by step where it was asked for."""
    if x.dtype not in launch.DTYPES:
        return False
    if x.is_cuda:
        return backend() != "reference" and launch.is_installed()
    return backend() == "triton" and x.is_cpu and launch.interpreting()


def constant(t: TG, x: Tensor) -> Tensor | None:
    """A frozen instance at `x`, where a kernel has it ready; else None."""
    return direct.constant(t, x) if launches(x) else None


def launches(x: Tensor) -> bool:
    """Whether a kernel of Triton is called for x here and now, outside of any compiler."""
    return _runs_triton(x) and not torch.compiler.is_compiling() and _is_memory(x)


def traces(x: Tensor) -> bool:
    """Whether a graph is made for x in which kernels of Triton can be nodes."""
    return torch.compiler.is_compiling() and not exporting() and _runs_triton(x)


def evaluate(
    t: TG, x: Tensor, v: Tensor | None = None, op: Op | None = None, up: Tensor | None = None
) -> Tensor:
    """A frozen instance at `x` by the backend in force; `op` is its `native`, if it has one.

    `up` multiplies the result (SwiGLU, GEGLU), on a GPU in the same pass.
    """
    if up is not None:
        y = _constant_times(t, x, up) if v is None else None
        return evaluate(t, x, v, op) * up if y is None else y
    chosen = lowered(op) if v is None else None
    if chosen is not None:
        return chosen(x)
    if backend() == "reference":
        return t(x, v)
    if v is None and (y := constant(t, x)) is not None:
        return y
    options = {"form": t.form, "owner": t.owner, "q": t.q, "anchor": t.anchor, "clamp": t.clamp}
    return blend(x, t.tau, t.theta, t.s, t.c, v=v, **options)


def _constant_times(t: TG, x: Tensor, up: Tensor) -> Tensor | None:
    fits = (up.shape, up.dtype, up.device) == (x.shape, x.dtype, x.device)
    return direct.constant_times(t, x, up) if fits and launches(x) else None


def gated_product(x: Tensor, *parameters: Any, **options: Any) -> Tensor:
    """Tier W (Eq. 4): the gated inputs times the weights of the branches; see `products`."""
    keep = backend() == "reference"
    return products.gated_product(x, *parameters, keep=keep, triton=_runs_triton(x), **options)
