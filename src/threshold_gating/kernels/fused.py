"""`blend` as one differentiable function that saves x alone and computes the gates anew backward.

For eager mode on a CPU: it goes through memory in tiles that stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from threshold_gating import primitive
from threshold_gating.kernels import launch, ops, tile
from threshold_gating.kernels.form import Call, Form, in_memory, restored
from threshold_gating.primitive import Value

AUDITED_AS = "gates"  # see conversion.audit

# the op itself, see `primitive`
_clamp = torch.ops.aten.clamp.default

# Elements of a tile: K = 2 has some eight tiles in flight, more branches some twenty. Smaller ones
# would fit a nearer cache, but then calling torch costs more than the arithmetic.
_TILE = {True: 2**18, False: 2**17}

Part = tuple[slice, slice, slice]
Packed = tuple[list[Tensor], launch.Codes]


def blend(x: Tensor, other: Tensor | None, call: Call, role: int, triton: bool) -> Tensor:
    """`primitive.blend` of a call that `take_apart` understood; `role` is that of `other`."""
    if _needs_gradient(x, other, *call.tensors):
        how = (call.form, call.order, call.sizes, role, triton)
        y: Tensor = _Blend.apply(x, other, how, *call.tensors)  # type: ignore[no-untyped-call]
        return y
    return (_forward_triton if triton else _forward)(x, other, call, role)


def blend_traced(x: Tensor, v: Tensor | None, call: Call) -> Tensor | None:
    """Soft gates in steps that a compiler fuses into one loop; None for hard and centred ones.

    Where nobody asks for derivatives, two gates come from one exponential of -|u|, whose own
    derivative at the threshold would be wrong.
    """
    form = call.form
    if form.hard or form.centred:
        return None
    z = primitive.wide(x)
    u = z if v is None else v.to(z.dtype)
    tensors = [t.to(z.dtype) for t in call.tensors]
    if x.is_cpu and _needs_gradient(*tensors):
        tensors = [_spread(t, x) for t in tensors]
    tau, theta, s, c = form.filled(tensors)
    if form.K > 2:
        return _many_traced(z, u, tau, theta, s, c).to(x.dtype)
    moved = tau[0] * (z - theta[0])
    empty = all(not isinstance(w, Tensor) and w == 0 for w in (s[0], c[0]))
    if _needs_gradient(x, v, *call.tensors):
        gates = [s[0] if empty else primitive.sigmoid(-moved), primitive.sigmoid(moved)]
    else:
        e = torch.exp(-torch.abs(moved))
        share = 1 / (1 + e)
        e = e * share
        gates = [torch.where(moved > 0, e, share), torch.where(moved > 0, share, e)]
    return _blended(gates, u, s, c).to(x.dtype)


def _spread(t: Tensor, x: Tensor) -> Tensor:
    """A parameter for each stretch of at most 4096 elements of x, so that sums have two stages.

    The compiler adds up longer ones with a care for rounding that takes longer than the gates. One
    value for all is left alone: its sums are one loop with the gates, and two would take longer.
    """
    if t.numel() == 1:
        return t
    shape, run = [1] * (x.dim() - t.dim()) + list(t.shape), 1
    for d in range(x.dim() - 1, 0, -1):
        run *= x.shape[d]
        if run > 4096 or shape[d] > 1:
            return t if d == x.dim() - 1 else t.expand(*x.shape[: d + 1], *shape[d + 1 :])
    return t


def _many_traced(
    z: Tensor, u: Tensor, tau: list[Value], theta: list[Value], s: list[Value], c: list[Value]
) -> Tensor:
    """More than two soft gates: K exponentials, one loop."""
    taus = tau if len(tau) == len(theta) else tau * len(theta)
    most = torch.finfo(z.dtype).max / (4 * len(theta))  # no sum of arguments overflows
    arguments = [_clamp(t * (z - th), -most, most) for t, th in zip(taus, theta, strict=True)]
    return _blended(primitive.softmax_gates(arguments), u, s, c)


def _blended(gates: list[Any], u: Tensor, s: list[Value], c: list[Value]) -> Tensor:
    """u sum_k g_k s_k + sum_k g_k c_k."""
    slope, constant = _weighted(gates, s), _weighted(gates, c)
    if slope is not None and len(gates) > 2:
        u = primitive.settled(u, slope)
    y = slope if slope is None else primitive.times(u, slope)
    y = constant if y is None else y if constant is None else y + constant
    return gates[-1] * 0 if y is None else y  # which NaN passes


def _weighted(e: list[Tensor], w: list[Value]) -> Tensor | None:
    """sum_k w_k e_k; None where every w is the number 0."""
    terms = [
        ek if not isinstance(wk, Tensor) and wk == 1 else wk * ek
        for ek, wk in zip(e, w, strict=True)
        if isinstance(wk, Tensor) or wk != 0
    ]
    return sum(terms[1:], terms[0]) if terms else None


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, how: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(x, other, *tensors)
        ctx.how = how
        form, order, sizes, role, triton = how
        call = Call(form, list(tensors), order, sizes)
        if not triton:
            return _forward(x, other, call, role)
        ctx.rows = _packed(x, call, role)  # views of the parameters, which are saved above
        return _forward_triton(x, other, call, role, ctx.rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, other, *tensors = ctx.saved_tensors
        form, order, sizes, role, triton = ctx.how
        call = Call(form, tensors, order, sizes)
        needed = (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[3:])
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # somebody differentiates the gradient: through the formulas
            grads = _by_autograd(dy, x, other, call, role, needed)
        elif triton:
            grads = _backward_triton(dy, x, other, call, ctx.rows, needed)
        else:
            grads = _backward(dy, x, other, call, needed)
        return *grads[:2], None, *grads[2:]


def _forward_triton(
    x: Tensor, other: Tensor | None, call: Call, role: int, packed: Packed | None = None
) -> Tensor:
    compiling = torch.compiler.is_compiling()
    if compiling and role == launch.ALONE and (call.form.hard or call.form.K == 2):
        return by_formula(x, call)  # the compiler fuses it with what is around; backward is ours
    memory, second = (_memory(t, call) for t in (x, other))
    assert memory is not None
    tensors, codes = packed or _packed(x, call, role)
    if compiling:
        y = ops.forward(memory, second, tensors, list(codes), _group(call), ops.SOURCES)
    else:
        y = launch.forward(memory, second, launch.Parameters.of(tensors), codes, call.sizes)
    return restored(y, x, call.order)


def by_formula(x: Tensor, call: Call) -> Tensor:
    """y in torch's ops."""
    y = blend_traced(x, None, call) if torch.compiler.is_compiling() else None
    if y is None:
        tau, theta, s, c = call.form.filled(call.tensors)
        options: Any = {"owner": call.form.owner, "centred": call.form.centred}
        y = primitive.blend(x, tau if len(tau) > 1 else tau[0], theta, s, c, **options)
    # A view, because torch 2.11 loses the gradient of a Function that returns what a cast to the
    # dtype it has already gave.
    return y.view(y.shape)


def _backward_triton(
    dy: Tensor,
    x: Tensor,
    other: Tensor | None,
    call: Call,
    packed: Packed,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    wanted = _wanted(call.form, needed)
    if call.form.hard:  # a comparison gives its threshold nothing
        wanted = wanted._replace(theta=False)
    slopes, memory, second = (_memory(t, call) for t in (dy, x, other))
    assert slopes is not None and memory is not None
    tensors, codes = packed
    if torch.compiler.is_compiling():
        dx, dother, sums = ops.backward(
            slopes, memory, second, tensors, list(codes), _group(call), list(wanted), ops.SOURCES
        )
    else:
        p = launch.Parameters.of(tensors)
        dx, dother, sums = launch.backward(
            slopes, memory, second, p, codes, tuple(wanted), call.sizes
        )
    found = [dx if wanted.x else None, dother if wanted.v else None]
    grads = [None if d is None else restored(d, x, call.order) for d in found]
    return [*grads, *_parameter_gradients(sums, x, call, wanted, needed[2:])]


def _group(call: Call) -> list[int]:
    """The shape of a parameter beside (outer, G, inner)."""
    return [1, call.sizes[1], 1] if call.sizes[1] > 1 else []


def _memory(t: Tensor | None, call: Call) -> Tensor | None:
    return None if t is None else in_memory(t, call.order, call.sizes).contiguous()


def _packed(x: Tensor, call: Call, role: int) -> Packed:
    """The parameters as the Triton kernels take them, and what these know when compiled."""
    tensors, form = call.tensors, call.form
    if call.order != tuple(range(x.dim())):
        tensors = [_row(t, call, x.dim()) for t in tensors]
    rest, rows = iter(tensors), []
    for numbers in (form.tau, form.theta, form.s, form.c):
        own = [next(rest) for n in numbers if n is None]
        rows.append(launch.packed(numbers, own, x.device))
    digits = [launch.code_of(row) for row in (form.tau, form.theta, form.s, form.c)]
    return rows, launch.codes(form, digits, role)


def _forward(x: Tensor, v: Tensor | None, call: Call, role: int) -> Tensor:
    read = _reader(x, v, call)
    # Written through a view of the result, which is none itself: torch refuses to overwrite one.
    y = torch.empty_permuted(x.shape, call.order, dtype=x.dtype)
    out = in_memory(y, call.order, call.sizes)
    for part in _parts(call.sizes, _TILE[call.form.K == 2]):
        here = out[part]
        made = tile.forward(*read(part), here if x.element_size() >= 4 else None)
        if made is not here:
            here.copy_(made)
    return y


def _backward(
    dy: Tensor, x: Tensor, v: Tensor | None, call: Call, needed: Sequence[bool]
) -> list[Tensor | None]:
    read, slopes = _reader(x, v, call), in_memory(dy, call.order, call.sizes)
    wanted = _wanted(call.form, needed)

    inputs = [torch.empty(call.sizes, dtype=x.dtype) if w else None for w in wanted[:2]]
    sums: list[Tensor] = []
    for part in _parts(call.sizes, _TILE[call.form.K == 2]):
        here = read(part)
        found = tile.backward(_wide(slopes[part], here[-1]), *here, wanted)
        for out, new in zip(inputs, (found.x, found.v), strict=True):
            if out is not None and new is not None:
                out[part] = new
        rows = [s for row in found[2:] for s in row]
        sums = sums or [s.new_zeros(1, call.sizes[1], 1) for s in rows]
        for total, new in zip(sums, rows, strict=True):
            total[:, part[1]] += new
    grads = [None if d is None else restored(d, x, call.order) for d in inputs]
    return [*grads, *_parameter_gradients(sums, x, call, wanted, needed[2:])]


def _by_autograd(
    dy: Tensor, x: Tensor, v: Tensor | None, call: Call, role: int, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The same gradients, differentiable: through the reference."""
    # Aliases, because one input may depend on another, and only direct dependence counts here.
    inputs = [None if t is None else t.view_as(t) for t in (x, v, *call.tensors)]
    tau, theta, s, c = call.form.filled([t for t in inputs[2:] if t is not None])
    y = primitive.blend(
        inputs[0],  # type: ignore[arg-type]
        tau if len(tau) > 1 else tau[0],
        theta,
        s,
        c,
        v=inputs[1] if role == launch.READ else None,
        owner=call.form.owner,
        centred=call.form.centred,
    )
    if role == launch.TIMES and inputs[1] is not None:
        y = y * inputs[1]
    asked = [t for t, n in zip(inputs, needed, strict=True) if n and t is not None]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True, materialize_grads=True))
    return [next(found) if n else None for n in needed]


def _reader(
    x: Tensor, v: Tensor | None, call: Call
) -> Callable[[Part], tuple[Tensor, Tensor, Form, tile.Values, tile.Scratch]]:
    """part -> what `tile.forward` takes, in the dtype that is computed in."""
    memory = in_memory(x, call.order, call.sizes)
    other = None if v is None else in_memory(v, call.order, call.sizes)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = [_row(t.detach(), call, x.dim()).to(dtype) for t in call.tensors]
    # One value for all is best a number, whose reading is free here.
    values = [float(r) if r.numel() == 1 else r for r in rows]
    room = tile.Scratch(min(x.numel(), _TILE[call.form.K == 2]), dtype)

    def read(part: Part) -> tuple[Tensor, Tensor, Form, tile.Values, tile.Scratch]:
        z = memory[part]
        room.clear(z.shape)
        z = _wide(z, room)
        u = z if other is None else _wide(other[part], room)
        here = [r[:, part[1]] if isinstance(r, Tensor) else r for r in values]
        return z, u, call.form, tile.Values(*call.form.filled(here)), room

    return read


def _wide(t: Tensor, room: tile.Scratch) -> Tensor:
    return room.copy(t) if t.element_size() < 4 else t


def _row(t: Tensor, call: Call, dim: int) -> Tensor:
    """A parameter as (1, G, 1) in the order of x's memory."""
    if t.numel() > 1 and call.order != tuple(range(dim)):
        t = t.reshape((1,) * (dim - t.dim()) + tuple(t.shape)).permute(call.order)
    return t.reshape(1, -1, 1)


def _parts(sizes: tuple[int, int, int], most: int) -> Iterator[Part]:
    """Tiles of about `most` elements, contiguous in memory."""
    outer, group, inner = sizes
    i = min(inner, most)
    g = min(group, max(1, most // i)) if i == inner else 1
    o = min(outer, max(1, most // (i * g))) if g == group else 1
    for a in range(0, outer, o):
        for b in range(0, group, g):
            for c in range(0, inner, i):
                yield slice(a, a + o), slice(b, b + g), slice(c, c + i)


def _wanted(form: Form, needed: Sequence[bool]) -> tile.Wanted:
    rest = iter(needed[2:])
    rows = (form.tau, form.theta, form.s, form.c)
    asked = [any([next(rest) for n in row if n is None]) for row in rows]  # noqa: C419  (all are read)
    return tile.Wanted(needed[0], needed[1], *asked)


def _parameter_gradients(
    sums: Iterable[Tensor], x: Tensor, call: Call, wanted: tile.Wanted, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The sums of a kernel, which has one for each row of a wanted parameter, as gradients."""
    form, rest = call.form, iter(sums)
    grads: list[Tensor | None] = []
    tensors, asked = iter(call.tensors), iter(needed)
    for row, is_wanted in zip((form.tau, form.theta, form.s, form.c), wanted[2:], strict=True):
        for number in row:
            total = next(rest) if is_wanted else None
            if number is None:
                t, need = next(tensors), next(asked)
                grads.append(_shaped(total, t, x, call) if need and total is not None else None)
    return grads


def _shaped(total: Tensor, t: Tensor, x: Tensor, call: Call) -> Tensor:
    """A sum per group in the shape, order and dtype of the parameter it belongs to."""
    if t.numel() == 1 and total.numel() > 1:
        total = total.sum()
    if t.numel() == 1 or call.order == tuple(range(x.dim())):
        return total.view(t.shape) if total.dtype == t.dtype else total.view(t.shape).to(t.dtype)
    padded = (1,) * (x.dim() - t.dim()) + tuple(t.shape)
    inverse = sorted(range(x.dim()), key=lambda d: call.order[d])
    laid = total.reshape([padded[d] for d in call.order]).permute(inverse)
    return laid.reshape(t.shape).to(t.dtype)
