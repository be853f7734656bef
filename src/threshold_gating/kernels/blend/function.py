"""`blend` (Eq. 3) by the engine that the backend chooses."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

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
from threshold_gating.kernels.blend import autograd, cpu, gpu, graph_cpu, host_calls
from threshold_gating.kernels.blend.graph import Graph
from threshold_gating.kernels.blend.host_calls import Way
from threshold_gating.kernels.blend.kept import kept
from threshold_gating.kernels.blend.steps import plain, steps
from threshold_gating.kernels.call import common_shape, of_call, whole
from threshold_gating.kernels.layout import as_new
from threshold_gating.kernels.lowering import (
    Op,
    lowered,
    may_rebase,
    native_call,
    overwritten,
)
from threshold_gating.kernels.structure import (
    Gate,
    Role,
    Rows,
    Shape,
    Structure,
    Tensors,
    check_fits,
    exact,
    viewed,
)
from threshold_gating.kernels.weights import Weights, weights_of
from threshold_gating.primitive.graphs import is_known, keeps_gates
from threshold_gating.primitive.reading import read

# Elements up to which hard gates with derivatives are faster by the reference's formulas: these are
# comparisons, and there is no exponential to be saved.
_FEW = 2**14
_NOTHING = Tensors()
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def blend(
    x: Tensor,
    structure: Structure | Any,
    *given: Any,
    v: Any = None,
    up: Tensor | None = None,
    native: bool = False,
    inplace: bool = False,
    holder: Any = None,
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
        holder: the module whose parameters and buffers the tensors are, if y follows from them
            and x alone. It keeps, as `_again`, what makes a call like this one in one step.
    """
    if holder is not None and not torch.compiler.is_compiling():
        again = holder._again
        y: Tensor | None = None
        if again is not None:
            y = again(x, holder._parameters, holder._buffers, backend(), inplace)
        if y is not None:
            return y
    if torch._C._len_torch_function_stack() == 0:
        return _blend(x, structure, given, v, up, native, inplace, holder, options)
    # A converted network around us must not look at our steps, nor answer them.
    with torch._C.DisableTorchFunction():
        return _blend(x, structure, given, v, up, native, inplace, holder, options)


def _blend(
    x: Tensor,
    structure: Any,
    given: Sequence[Any],
    v: Any,
    up: Tensor | None,
    native: bool,
    inplace: bool,
    holder: Any,
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
    count = len(given)
    if options or not (count == 2 or (count == 1 and callable(given[0]))):
        raise TypeError(wrong_call("blend", "tensors, shape", given, options))
    if takes_native(name):
        if native and v is None and up is None and structure.native is not None:
            return lowered(structure.native, x, inplace)
        if name == "native":
            raise no_native_op()
    tensors, shape = given if count == 2 else given[0](x)
    if not inplace:
        if v is None and up is None and (usual := _usual_call(x, structure, tensors, shape, name)):
            return _applied(x, None, *usual, name, holder)  # the shortest way for nearly every call
        return _gates(x, structure, tensors, shape, v, up, name)
    if v is None and up is None:
        y = _overwritten(x, structure, tensors, shape, name, holder)
        if y is not None:
            return y
    return overwritten(x, lambda z: _gates(z, structure, tensors, shape, v, up, name))


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
        options: dict[str, Any] = {"form": t.form, "owner": t.owner, "q": t.q, "anchor": t.anchor}
        options |= {"clamp": t.clamp, "weights": weights_of(t)}
        return _parsed(x, (t.tau, t.theta, t.s, t.c), v, up, options, name)
    return _gates(x, exact(t), _NOTHING, (), v, up, name)


def _parsed(
    x: Tensor, given: Sequence[Any], v: Any, up: Tensor | None, options: Any, name: str
) -> Tensor:
    """The arguments of `primitive.blend`; what they do not fit is left to its words."""
    known, weights = options.pop("known", False), options.pop("weights", Weights.UNKNOWN)
    given = given if known else (primitive.positive(given[0]), *given[1:])
    fits = name != "reference" and isinstance(x, Tensor) and x.is_floating_point()
    found = of_call(*given, weights=weights, **options) if fits else None
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
    if v is None and up is None and (usual := _usual_call(x, structure, held, shape, name)):
        return _applied(x, None, *usual, name)
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
    if by == "steps" and v is None and up is None and graph_cpu.pays(x, structure, shape):
        by = "node"
    if torch.compiler.is_compiling() and (by in ("graph", "node") or not structure.hard):
        x, v, up = _read(x, v, up, held if isinstance(held, Tensors) else itertools.chain(*held))
    # branches of another input do not meet at a threshold of x
    jumps = structure.jumps or (v is not None and structure.hard and "theta" in structure.learned)
    role = Role.READ if v is not None else Role.ALONE if up is None else Role.TIMES
    y = None
    if by in ("triton", "cpu", "graph", "node"):
        tensors = held if isinstance(held, Tensors) else whole(held, shape)
        y = _by_kernel(by, x, v if up is None else up, structure, role, tensors, shape, name)
    if y is not None and not jumps:
        return y
    rows = viewed(structure.rows(held), shape) if isinstance(held, Tensors) else held
    if y is None:
        f = steps if by in ("steps", "node") else plain  # the latter where a node was refused
        y = f(x, v, structure, rows)
        y = y if up is None else y * up
    if jumps and torch.is_grad_enabled():
        y = primitive.straight_through(x, y, rows.theta, rows.s, rows.c, v)
    return y


def _read(x: Tensor, v: Any, up: Tensor | None, learned: Iterable[Any]) -> tuple[Any, ...]:
    """The inputs of gates in a graph: whoever learns needs what all of them were."""
    every = x, v, up, *learned
    return tuple([read(w, every) if isinstance(w, Tensor) else w for w in (x, v, up)])


def _overwritten(
    x: Tensor, structure: Structure, held: Tensors | Rows, shape: Shape, name: str, holder: Any
) -> Tensor | None:
    """The gates written over x in one step, or None where that cannot be."""
    usual = _usual_call(x, structure, held, shape, name)
    if usual is None:
        return None
    tensors, plan = usual
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return None  # torch's own copy has the words to refuse it
    learns = torch.is_grad_enabled() and _learns(x, *tensors)
    if learns and not may_rebase(x):
        return None
    way = Way.KEPT if learns else Way.OVER
    y = host_calls.applied(x, tensors, plan, name, way, holder)
    if y is not None or not isinstance(plan, gpu.Plan):
        return y
    if learns:
        # the copy is given back, so that second derivatives find their way through it
        written: Tensor = autograd.overwrite(x, None, *tensors, plan)[0]
        return written
    plan.overwrite(x, None, plan.read(x, tensors))
    if not x.is_inference():
        increment_version(x)
    return x


def _usual_call(
    x: Tensor, structure: Structure, held: Tensors | Rows, shape: Shape, name: str
) -> tuple[Tensors, cpu.Plan | gpu.Plan] | None:
    """The tensors and the plan, if x is what most inputs are."""
    # only plain memory comes further: a nested tensor cannot be asked for sizes and strides
    if torch.compiler.is_compiling() or keeps_gates() or not is_memory(x):
        return None
    triton = runs_triton(x, name)
    # hard gates on a CPU go through _gates: few elements are fastest by the formulas (_is_few)
    if not triton and (name != "auto" or not x.is_cpu or structure.gate == Gate.HARD):
        return None
    plan = _usual(structure, x.shape, x.stride(), x.dtype, shape, triton)
    if plan is None:
        return None
    tensors = held if isinstance(held, Tensors) else whole(held, shape)
    return None if _is_elsewhere(tensors, x) else (tensors, plan)


@functools.lru_cache(4096)
def _usual(
    structure: Structure,
    sizes: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    shape: Shape,
    triton: bool,
) -> cpu.Plan | gpu.Plan | None:
    """What runs for most inputs, found in one look-up: of small ones Python is what takes time."""
    if not structure.fused or structure.huge or structure.jumps or 0 in sizes:
        return None
    plan: cpu.Plan | gpu.Plan | None = None
    if triton:
        plan = gpu.plan(structure, Role.ALONE, sizes, stride, dtype, shape)
    elif dtype.is_floating_point:
        plan = cpu.plan(structure, sizes, stride, shape)
    return None if plan is None or plan.copies else plan


def _is_few(x: Tensor, structure: Structure, name: str) -> bool:
    """Whether the formulas of the reference are the fastest.

    Asked before the engine, which at 64 elements takes a tenth of the call, and with and without
    gradients alike, so that both have the same bits.
    """
    n = x.numel()
    if torch.compiler.is_compiling():  # there a question of sizes would compile again
        return is_known(n == 0) if x.is_cpu else n == 0
    if n == 0:
        return True
    return structure.gate == Gate.HARD and x.is_cpu and n <= _FEW and name != "triton"


def _alike(other: Any, x: Tensor) -> bool:
    return (
        isinstance(other, Tensor)
        and other.shape == x.shape
        and other.dtype == x.dtype
        and other.device == x.device
        # what torch negates when it reads it is no plain memory; a compiler reads it right
        and (torch.compiler.is_compiling() or not other.is_neg())
    )


def _by_kernel(
    by: Engine,
    x: Tensor,
    other: Tensor | None,
    structure: Structure,
    role: Role,
    tensors: Tensors,
    shape: Shape,
    name: str,
) -> Tensor | None:
    """y of the engine, or None where it does not take these tensors."""
    if _is_elsewhere(tensors, x):
        return None
    if by in ("graph", "node"):
        check_fits(structure, tensors, math.prod(shape))
        made: autograd.Plan = Graph(structure, role, shape)
        if by == "node":
            tensors, made = graph_cpu.node(x, structure, tensors, shape)
        y: Tensor = autograd.Blend.apply(x, other, *tensors, made)  # type: ignore[no-untyped-call]
        return y
    plan: cpu.Plan | gpu.Plan | None
    if by == "cpu":
        plan = cpu.plan(structure, x.shape, x.stride(), shape)
    else:
        plan = gpu.plan(structure, role, x.shape, x.stride(), x.dtype, shape)
    if plan is None:
        return None
    if plan.copies:
        return as_new(_applied(x.contiguous(), other, tensors, plan, name), x)
    return _applied(x, other, tensors, plan, name)


def _applied(
    x: Tensor,
    other: Tensor | None,
    tensors: Tensors,
    plan: autograd.Plan,
    name: str,
    holder: Any = None,
) -> Tensor:
    if other is None:
        made = host_calls.applied(x, tensors, plan, name, Way.AWAY, holder)
        if made is not None:
            return made
    if torch.is_grad_enabled() and _learns(x, other, *tensors):
        y: Tensor = autograd.apply(x, other, *tensors, plan)
        return y
    return plan.forward(x, other, plan.read(x, tensors))


def _learns(*tensors: Tensor | None) -> bool:
    """Whether autograd is to know of what is computed from these, if anything is."""
    for t in tensors:  # noqa: SIM110  (a generator takes longer, in every call)
        if t is not None and t.requires_grad:
            return True
    return False


def _is_elsewhere(tensors: Tensors, x: Tensor) -> bool:
    """Whether a gate is not where a kernel looks: in a subclass, on another device, or computed
    from two tensors that both need a gradient. The formulas take it, or say what is wrong."""
    for t in tensors:
        if t is not None and type(t) not in _PLAIN:
            return True
    rho, dtheta, s, _, tau0, theta0 = tensors
    if rho is not None and tau0 is not None and tau0.requires_grad:
        return True
    if dtheta is not None and theta0 is not None and theta0.requires_grad:
        return True
    if x.is_cuda:  # a launch asks for the devices
        return False
    return (s is not None and not s.is_cpu) or (theta0 is not None and not theta0.is_cpu)
