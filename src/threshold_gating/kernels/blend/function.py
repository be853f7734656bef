"""`blend` (Eq. 3) by the engine that the backend chooses, as one differentiable function.

It saves x and the parameters alone and computes the gates anew in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.instance import TG
from threshold_gating.kernels.backend import (
    Engine,
    backend,
    engine,
    is_memory,
    no_native_op,
    runs_triton,
    takes_native,
)
from threshold_gating.kernels.blend import cpu, gpu
from threshold_gating.kernels.blend.graph import Graph
from threshold_gating.kernels.blend.kept import kept
from threshold_gating.kernels.blend.steps import plain, steps
from threshold_gating.kernels.call import common_shape, of_call, whole
from threshold_gating.kernels.lowering import Op, lowered, native_call, overwritten
from threshold_gating.kernels.structure import (
    Gate,
    Role,
    Rows,
    Shape,
    Structure,
    Tensors,
    Wanted,
    exact,
    viewed,
)
from threshold_gating.primitive.graphs import keeps_gates


class Plan(Protocol):
    """What an engine has ready for one structure: `cpu.Plan`, `gpu.Plan`, `graph.Graph`.

    What `read` makes of the tensors is kept between `forward` and `backward`, which gives the
    gradients of x, the other input, tau, theta, s and c.
    """

    @property
    def structure(self) -> Structure: ...

    @property
    def role(self) -> Role: ...

    @property
    def shape(self) -> Shape: ...

    def read(self, x: Tensor, tensors: Tensors) -> Any: ...

    def forward(self, x: Tensor, other: Tensor | None, given: Any) -> Tensor: ...

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        other: Tensor | None,
        tensors: Tensors,
        given: Any,
        wanted: Wanted,
    ) -> Sequence[Tensor | None]: ...


# Elements up to which hard gates with derivatives are faster by the reference's formulas: these are
# comparisons, and there is no exponential to be saved.
_FEW = 2**14
_NOTHING = Tensors()


def blend(
    x: Tensor,
    structure: Structure | Any,
    *given: Any,
    v: Any = None,
    up: Tensor | None = None,
    native: bool = False,
    inplace: bool = False,
    **options: Any,
) -> Tensor:
    """y = sum_k g_k(x) (s_k x + c_k) (Eq. 3) as fast as this machine runs it.

    Called as `blend(x, structure, tensors, shape)`; `shape` is that in which a group's values
    broadcast against x. In place of tensors and shape there may be a function of x that gives
    them, which is asked only where gates are evaluated. Or called with an instance alone, or as
    `primitive.blend` is: with tau, theta, s, c and its options, and `known=True` if tau is known to
    be positive, so that nobody looks. The backend "native" runs torch's own op or refuses.

    Args:
        v: what the branches read instead of x.
        up: what multiplies y (SwiGLU, GEGLU); on a GPU in the same pass.
        native: let torch's own op run where it computes the same.
        inplace: overwrite x with y.
    """
    if torch._C._len_torch_function_stack() == 0:
        return _blend(x, structure, given, v, up, native, inplace, options)
    # A converted network around us must not look at our steps, nor answer them.
    with torch._C.DisableTorchFunction():
        return _blend(x, structure, given, v, up, native, inplace, options)


def _blend(
    x: Tensor,
    structure: Any,
    given: Sequence[Any],
    v: Any,
    up: Tensor | None,
    native: bool,
    inplace: bool,
    options: Any,
) -> Tensor:
    # The backend is asked first: with native off, whether there is an op must not matter to a
    # compiled graph.
    name = backend()
    if not isinstance(structure, Structure):
        _check_no_structure(structure, given, native, inplace, options)
        if isinstance(structure, TG):
            return _instance(structure, x, v, up, name)
        if name == "native":
            raise no_native_op()
        return _parsed(x, (structure, *given), v, up, options, name)
    if options or not (len(given) == 2 or (len(given) == 1 and callable(given[0]))):
        raise TypeError(wrong_call("blend", "tensors, shape", given, options))
    if takes_native(name):
        if native and v is None and up is None and structure.native is not None:
            return lowered(structure.native, x, inplace)
        if name == "native":
            raise no_native_op()
    if inplace:
        return overwritten(x, lambda z: _blend(z, structure, given, v, up, False, False, {}))
    tensors, shape = given if len(given) == 2 else given[0](x)
    return _gates(x, structure, tensors, shape, v, up, name)


def _check_no_structure(
    first: Any, given: Sequence[Any], native: bool, inplace: bool, options: Any
) -> None:
    """An instance stands alone, and torch's own op is asked for with a structure."""
    for name in [n for n, asked in (("native", native), ("inplace", inplace)) if asked]:
        raise TypeError(
            f"blend: {name}=True goes with a Structure, as in blend(x, Structure.of(t), tensors, "
            f"shape, {name}=True); got {type(first).__name__}."
        )
    if isinstance(first, TG) and (given or options):
        raise TypeError(
            f"blend: an instance stands alone, as in blend(x, t, v=..., up=...); got "
            f"{', '.join([*map(repr, given), *options])} as well."
        )
    if unknown := sorted(set(options) - _OPTIONS):
        raise TypeError(
            f"blend: no option {unknown[0]!r}; there are v, up, {', '.join(sorted(_OPTIONS))}."
        )


_OPTIONS = frozenset(("form", "owner", "q", "anchor", "clamp", "centred", "known"))


def wrong_call(name: str, wanted: str, given: Sequence[Any], options: Any = ()) -> str:
    """Arguments beside a structure that do not fit it."""
    return (
        f"{name}: beside a Structure come {wanted}, and the structure says the rest; got "
        f"{len(given)} arguments{''.join(f', {option}' for option in options)}."
    )


def evaluate(t: TG, x: Tensor, op: Op | None = None) -> Tensor:
    """A frozen instance at `x` by the backend in force; `op` is its `native`, if it has one."""
    name = backend()
    if op is not None and takes_native(name):
        return op(x)
    if name == "native":
        raise no_native_op()
    if name == "reference":
        return t(x)
    if torch.compiler.is_compiling() or torch._C._len_torch_function_stack() > 0:
        return blend(x, t)
    return _gates(x, exact(t), _NOTHING, (), None, None, name)


def _instance(t: TG, x: Tensor, v: Any, up: Tensor | None, name: str) -> Tensor:
    """The gates of a frozen instance; under "native" its op."""
    if name == "native":
        call = native_call(t)
        if call is None or v is not None or up is not None:
            raise no_native_op()
        return lowered(call, x)
    if torch.compiler.is_compiling() and not keeps_gates():  # a compiler cannot look anything up
        options = {"form": t.form, "owner": t.owner, "q": t.q, "anchor": t.anchor, "clamp": t.clamp}
        return _parsed(x, (t.tau, t.theta, t.s, t.c), v, up, options, name)
    return _gates(x, exact(t), _NOTHING, (), v, up, name)


def _parsed(
    x: Tensor, given: Sequence[Any], v: Any, up: Tensor | None, options: Any, name: str
) -> Tensor:
    """The arguments of `primitive.blend`; what they do not fit is left to its words."""
    known = options.pop("known", False)
    given = given if known else (primitive.positive(given[0]), *given[1:])
    fits = name != "reference" and isinstance(x, Tensor) and x.is_floating_point()
    found = of_call(*given, **options) if fits else None
    if found is not None:
        structure, rows = found
        shape = common_shape(rows, x.dim())
        if shape is not None:
            return _gates(x, structure, rows, shape, v, up, name)
    y = primitive.blend(x, *given, v=v, known=known, **options)
    return y if up is None else y * up


def _gates(
    x: Tensor,
    structure: Structure,
    held: Tensors | Rows,
    shape: Shape,
    v: Any,
    up: Tensor | None,
    name: str,
) -> Tensor:
    """The gates by the engine that the backend has for x."""
    if keeps_gates():
        rows = viewed(structure.rows(held), shape) if isinstance(held, Tensors) else held
        node = kept(x, v, structure, rows)
        return node if up is None else node * up
    if v is None and up is None and runs_triton(x, name) and not torch.compiler.is_compiling():
        plan = _usual(structure, x.shape, x.stride(), x.dtype, shape)
        if plan is not None and is_memory(x):
            tensors = held if isinstance(held, Tensors) else whole(held, shape)
            if not _is_elsewhere(tensors, x):
                return _applied(x, None, tensors, plan)
    if structure.huge and x.dtype != torch.float64 and x.is_floating_point():
        v, up = (w.double() if isinstance(w, Tensor) else w for w in (v, up))
        return _gates(x.double(), structure, held, shape, v, up, name).to(x.dtype)
    by: Engine = "plain"
    if structure.fused and not _is_few(x, structure, name):
        by = engine(x, name)
    if up is not None:
        # `up` multiplies the gradient of a threshold at which y jumps, too: that is added to y
        alone = v is not None or structure.jumps or not _alike(up, x)
        if by not in ("triton", "graph") or alone:
            return _gates(x, structure, held, shape, v, None, name) * up
    elif v is not None and not _alike(v, x):
        by = "plain"
    # branches of another input do not meet at a threshold of x
    jumps = structure.jumps or (v is not None and structure.hard and "theta" in structure.learned)
    role = Role.READ if v is not None else Role.ALONE if up is None else Role.TIMES
    y = None
    if by in ("triton", "cpu", "graph"):
        tensors = held if isinstance(held, Tensors) else whole(held, shape)
        y = _by_kernel(by, x, v if up is None else up, structure, role, tensors, shape)
    if y is not None and not jumps:
        return y
    rows = viewed(structure.rows(held), shape) if isinstance(held, Tensors) else held
    if y is None:
        y = steps(x, v, structure, rows) if by == "steps" else plain(x, v, structure, rows)
        y = y if up is None else y * up
    if jumps and torch.is_grad_enabled():
        y = primitive.straight_through(x, y, rows.theta, rows.s, rows.c, v)
    return y


@functools.lru_cache(4096)
def _usual(
    structure: Structure,
    sizes: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    shape: Shape,
) -> gpu.Plan | None:
    """What runs for most inputs on a GPU, found in one look-up: there Python is what takes time."""
    if not structure.fused or structure.huge or structure.jumps or 0 in sizes:
        return None
    plan = gpu.plan(structure, Role.ALONE, sizes, stride, dtype, shape)
    return None if plan is None or plan.copies else plan


def _is_few(x: Tensor, structure: Structure, name: str) -> bool:
    """Whether the formulas of the reference are the fastest.

    Asked before the engine, which at 64 elements takes a tenth of the call, and with and without
    gradients alike, so that both have the same bits.
    """
    n = x.numel()
    if n == 0 or torch.compiler.is_compiling():  # there a question of sizes would compile again
        return n == 0
    return structure.gate == Gate.HARD and x.is_cpu and n <= _FEW and name != "triton"


def _alike(other: Any, x: Tensor) -> bool:
    return (
        isinstance(other, Tensor)
        and other.shape == x.shape
        and other.dtype == x.dtype
        and other.device == x.device
    )


def _by_kernel(
    by: Engine,
    x: Tensor,
    other: Tensor | None,
    structure: Structure,
    role: Role,
    tensors: Tensors,
    shape: Shape,
) -> Tensor | None:
    """y of the engine, or None where it does not take these tensors."""
    if by == "graph":
        y: Tensor = _Blend.apply(x, other, *tensors, Graph(structure, role, shape))  # type: ignore[no-untyped-call]
        return y
    plan: cpu.Plan | gpu.Plan | None
    if by == "cpu":
        plan = cpu.plan(structure, x.shape, x.stride(), shape)
    else:
        plan = gpu.plan(structure, role, x.shape, x.stride(), x.dtype, shape)
    if plan is None or _is_elsewhere(tensors, x):
        return None
    if plan.copies:
        return _copied(x, _applied(x.contiguous(), other, tensors, plan))
    return _applied(x, other, tensors, plan)


def _applied(x: Tensor, other: Tensor | None, tensors: Tensors, plan: Plan) -> Tensor:
    y: Tensor
    if torch.is_grad_enabled():
        for t in (x, other, *tensors):
            if t is not None and t.requires_grad:
                y = _apply(x, other, *tensors, plan)
                return y
    y = plan.forward(x, other, plan.read(x, tensors))
    return y


def _copied(x: Tensor, y: Tensor) -> Tensor:
    """y as x lies in memory, if x is dense."""
    laid = torch.empty_like(x)
    return y if laid.stride() == y.stride() else laid.copy_(y)


def _is_elsewhere(tensors: Tensors, x: Tensor) -> bool:
    """Whether a gate is not where a kernel looks: on another device, or computed from two tensors
    that both need a gradient. The formulas take it, or say what is wrong."""
    rho, dtheta, s, _, tau0, theta0 = tensors
    if rho is not None and tau0 is not None and tau0.requires_grad:
        return True
    if dtheta is not None and theta0 is not None and theta0.requires_grad:
        return True
    if x.is_cuda:  # a launch asks for the devices
        return False
    return (s is not None and not s.is_cpu) or (theta0 is not None and not theta0.is_cpu)


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, *held: Any) -> Tensor:
        plan: Plan
        *tensors, plan = held
        ctx.save_for_backward(x, other, *tensors)
        # what was read stays right: autograd sees to it that what is saved does not change
        ctx.plan, ctx.given = plan, plan.read(x, Tensors(*tensors))
        ctx.stride, ctx.dtype = x.stride(), x.dtype
        y: Tensor = plan.forward(x, other, ctx.given)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: Plan = ctx.plan
        needed = ctx.needs_input_grad[:8]
        x, other, *held = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled() or not _is_memory_like(dy, x):
                f = partial(_formula, plan.structure, plan.role, plan.shape)
                return *differentiated(f, (x, other, *held), dy, needed), None
            # a hook on saved tensors may give them back in another layout or type
            if x.stride() != ctx.stride or x.dtype != ctx.dtype:
                x = dy.new_empty_strided(dy.shape, ctx.stride, dtype=ctx.dtype).copy_(x)
            if other is not None and other.dtype != ctx.dtype:
                other = other.to(ctx.dtype)
        wanted = Wanted.of(needed)
        grads = plan.backward(dy, x, other, Tensors(*held), ctx.given, wanted)
        dx, dother, dtau, dtheta, ds, dc = grads
        ds, dc = _of_data(ds, plan.structure, "s"), _of_data(dc, plan.structure, "c")
        drho, dtau = (None, dtau) if held[0] is None else (dtau, None)
        dshift, dtheta = (None, dtheta) if held[1] is None else (dtheta, None)
        return dx, dother, drho, dshift, ds, dc, dtau, dtheta, None


def _is_memory_like(dy: Tensor, x: Tensor) -> bool:
    """Whether an engine takes dy: a batch of gradients at once is no memory, nor what a mode or a
    subclass makes of them, and what a hook on saved tensors gives may be of any size."""
    return is_memory(dy) and not _is_batch(dy) and dy.shape == x.shape


_is_batch = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched)


def _of_data(grad: Tensor | None, structure: Structure, name: str) -> Tensor | None:
    """A gradient for the rows that are read: of those that structure knows it is 0."""
    if grad is None or name in structure.learned:
        return grad
    known = [number is not None for number in getattr(structure, name)]
    if not any(known):
        return grad
    # row by row: a tensor of their numbers would be a copy from the host, which no CUDA graph takes
    rows = zip(known, grad.unbind(0), strict=True)
    return torch.stack([torch.zeros_like(row) if zero else row for zero, row in rows])


# `_Blend.apply` without its care for functorch, whose tensors do not come here: `backend.is_memory`
_apply: Any = super(torch.autograd.Function, _Blend).apply


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
