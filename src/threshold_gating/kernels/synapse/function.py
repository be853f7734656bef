"""Tiers S and general: gates of each synapse as one differentiable function.

The kernels are ops that torch.compile can place; each takes milliseconds, so eager code calls them
the same way. Only x and the parameters are kept for the backward pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating.kernels.backend import backend, engine, no_native_op
from threshold_gating.kernels.blend.autograd import differentiated
from threshold_gating.kernels.product.formula import Conv, check_factor
from threshold_gating.kernels.structure import Structure
from threshold_gating.kernels.synapse import gpu
from threshold_gating.kernels.synapse.formula import (
    Formula,
    Synapses,
    kernel_of,
    out_sizes,
    padding,
)
from threshold_gating.primitive import Value
from threshold_gating.primitive.reading import read

AUDITED_AS = "gates"  # see conversion.audit
MOST_BRANCHES = 3  # of a kernel


def synaptic(
    x: Tensor,
    structure: Structure,
    *rows: list[Value],
    conv: Conv | None = None,
    jumps: bool = False,
    factor: Tensor | None = None,
    fast: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """a_o = sum_i sum_k g_k(x_i) (w^k_oi x_i + c^k_oi) (Eq. 4), the gates those of synapse (o, i).

    Soft gates of two or three branches run as kernels on a GPU, which evaluate a gate where it is
    needed and never store it. The rest, and what `factor` multiplies, is in plain torch.

    Args:
        x: (..., I), or (B, C, *spatial) for a convolution.
        rows: tau, theta, slopes w and constants c of the synapses, as in `Synapses`.
        conv: how to convolve; None multiplies.
        jumps: whether learned hard thresholds have the gradient of soft ones.
        factor: what multiplies the gated inputs, as large as x.
        fast: two branches only: sigmoids by one special function where kernels run, 4e-6 from
            exact on an H200.
        weight: the slopes in one tensor (O, K, I / groups, *kernel), if there is one.
    """
    synapses = Synapses(*rows)
    formula = Formula(structure.form, structure.owner, jumps, conv)
    if torch._C._len_torch_function_stack() == 0:
        return _synaptic(x, synapses, formula, factor, fast, weight)
    # A converted network around us must not look at our steps, nor answer them.
    with torch._C.DisableTorchFunction():
        return _synaptic(x, synapses, formula, factor, fast, weight)


def _synaptic(
    x: Tensor,
    synapses: Synapses,
    formula: Formula,
    factor: Tensor | None,
    fast: bool,
    weight: Tensor | None,
) -> Tensor:
    name = backend()
    if name == "native":
        raise no_native_op()
    if factor is not None:
        check_factor(x, factor)
    seen = engine(x, name) in ("triton", "graph")
    if not seen or factor is not None or not _takes(x, synapses, formula):
        return formula(x, synapses, factor)
    if torch.compiler.is_compiling():
        x = read(x, itertools.chain(*synapses))
    # of a bounded function all slopes are 0
    slope = next(w for w in (*synapses.slopes, *synapses.constants) if isinstance(w, Tensor))
    casts = torch.is_autocast_enabled(x.device.type)  # sums are float32 there
    x = x.to(torch.float32 if casts else torch.promote_types(x.dtype, slope.dtype))
    constants = any(isinstance(c, Tensor) or c != 0 for c in synapses.constants)
    lines = _stacked(synapses.slopes, slope) if weight is None else weight
    if constants:
        lines = torch.cat((lines, _stacked(synapses.constants, slope)), 1)
    stacked = _stacked([*synapses.tau, *synapses.theta], slope), lines
    known = (synapses.K, len(synapses.tau), constants, fast)
    if formula.conv is None:
        rows, plan = x.reshape(-1, x.shape[-1]), Plan(formula, *known, ())
        y: Tensor = _Synaptic.apply(rows, *stacked, plan)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], len(slope))
    x, conv = _padded(x, formula.conv)
    kernel = kernel_of(synapses, len(conv.stride))
    plan = Plan(formula._replace(conv=conv), *known, kernel)
    image: Tensor = _Synaptic.apply(x, *stacked, plan)  # type: ignore[no-untyped-call]
    return image


def _takes(x: Tensor, synapses: Synapses, formula: Formula) -> bool:
    """Whether kernels have these gates, and there is something to compute."""
    soft = all(isinstance(t, Tensor) for t in (*synapses.tau, *synapses.theta))
    if not soft or formula.form != "softmax" or not 2 <= synapses.K <= MOST_BRANCHES:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    # kernels take addresses and do not ask; the formulas have the words
    held = [w for row in synapses for w in row if isinstance(w, Tensor)]
    if any(w.device != x.device or w.dtype == torch.float64 for w in held):
        return False
    gate = held[0]
    if x.numel() == 0 or gate.numel() == 0:
        return False
    if formula.conv is None:
        return x.shape[-1] == gate.shape[1]
    return _covers(x, gate, kernel_of(synapses, len(formula.conv.stride)), formula.conv)


def _covers(x: Tensor, gate: Tensor, kernel: tuple[int, ...], conv: Conv) -> bool:
    """Whether a convolution has inputs of its width, outputs, and programs for a grid of CUDA."""
    if x.dim() != gate.dim() or x.shape[1] != conv.groups * gate.shape[1]:
        return False
    pad = padding(conv)
    sizes = [n + a + b for n, a, b in zip(x.shape[:1:-1], pad[::2], pad[1::2], strict=True)]
    programs = conv.groups * math.prod(kernel)  # on one axis
    return min(out_sizes(sizes[::-1], kernel, conv)) > 0 and programs <= gpu.MOST_PROGRAMS


def _padded(x: Tensor, conv: Conv) -> tuple[Tensor, Conv]:
    """x padded where that takes its own values; zeros are never seen, and left to the table."""
    pad = padding(conv)
    if conv.mode != "constant" and any(pad):
        x, pad = F.pad(x, pad, conv.mode), [0] * len(pad)
    return x, conv._replace(pad=tuple(pad), mode="constant")


def _stacked(rows: Sequence[Value], like: Tensor) -> Tensor:
    """(O, rows, I, *kernel)."""
    return torch.stack([w if isinstance(w, Tensor) else torch.full_like(like, w) for w in rows], 1)


class Plan(NamedTuple):
    """Everything about a call that is not a tensor; `kernel` is () for a matrix."""

    formula: Formula
    K: int
    taus: int
    constants: bool
    fast: bool
    kernel: tuple[int, ...]

    def numbers(self) -> list[int]:
        return [self.K, self.taus, self.constants, self.fast]

    def window(self, x: Tensor) -> list[int]:
        """The numbers of a `gpu.Window` behind the number of groups; none for a matrix."""
        conv = self.formula.conv
        if conv is None:
            return []
        low, high = conv.pad[::2][::-1], conv.pad[1::2][::-1]
        size = x.shape[2:]
        padded = [n + a + b for n, a, b in zip(size, low, high, strict=True)]
        out = out_sizes(padded, self.kernel, conv)
        sizes = (size, out, self.kernel, conv.stride, low, conv.dilation)
        return [conv.groups, *(n for each in sizes for n in each)]

    def value(self, x: Tensor, gates: Tensor, lines: Tensor) -> Tensor:
        """By the formula, for those who differentiate twice."""
        gate, line = list[Value](gates.unbind(1)), list[Value](lines.unbind(1))
        constants: list[Value] = line[self.K :] if self.constants else [0.0] * self.K
        synapses = Synapses(gate[: self.taus], gate[self.taus :], line[: self.K], constants)
        return self.formula(x, synapses)


class _Synaptic(torch.autograd.Function):
    """Keeps x and the parameters; the gates are evaluated again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, lines: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, gates, lines)
        y: Tensor = synapse_forward(x, gates, lines, plan.numbers(), plan.window(x))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan, given, wanted = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # someone differentiates twice
            return *differentiated(plan.value, given, dy, wanted), None
        about = plan.numbers(), plan.window(given[0])
        found = synapse_backward(dy, *given, *about, [wanted[0], wanted[1] or wanted[2]])
        return *(g if w else None for g, w in zip(found, wanted, strict=True)), None


# The ops


def _packed(
    x: Tensor, gates: Tensor, lines: Tensor, numbers: list[int], window: list[int]
) -> gpu.Packed:
    K, taus, constants, fast = numbers
    groups, seen = (window[0], _window(window)) if window else (1, None)
    gates, lines = _grouped(gates, groups), _grouped(lines, groups)
    _, taps, outputs, _, inputs = lines.shape
    rows = _rows(x)
    images = 1 if seen is None else len(x)
    count = len(rows) if seen is None else images * math.prod(seen.out)
    sizes = gpu.Sizes(count, len(rows), inputs, outputs, taps, groups, images)
    shared = gates.shape[1] < taps
    known = gpu.Known(K, taus, bool(constants), bool(fast), seen is not None, shared)
    return gpu.Packed(rows, gates, lines, known, sizes, seen)


def _window(numbers: list[int]) -> gpu.Window:
    axes = len(numbers) // 6
    return gpu.Window(*[tuple(numbers[1 + k * axes : 1 + (k + 1) * axes]) for k in range(6)])


def _rows(x: Tensor) -> Tensor:
    """(B, C, *spatial) as rows of channels, in float32: shared memory is filled by four bytes."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).float().contiguous()


def _grouped(w: Tensor, groups: int) -> Tensor:
    """(O, kind, I, *kernel) as (groups, taps, outputs, kind, inputs) in float32."""
    each = w.reshape(groups, len(w) // groups, *w.shape[1:3], -1)
    return each.permute(0, 4, 1, 2, 3).float().contiguous()


def _ungrouped(w: Tensor, like: Tensor) -> Tensor:
    return w.permute(0, 2, 3, 4, 1).reshape(like.shape).to(like.dtype).contiguous()


def _forward(
    x: Tensor, gates: Tensor, lines: Tensor, numbers: list[int], window: list[int]
) -> Tensor:
    y = _packed(x, gates, lines, numbers, window).forward().to(x.dtype)
    if not window:
        return y
    return y.view(len(x), *_window(window).out, -1).movedim(-1, 1)


def _forward_shape(
    x: Tensor, gates: Tensor, lines: Tensor, numbers: list[int], window: list[int]
) -> Tensor:
    if not window:
        return x.new_empty(len(x), len(lines))
    return x.new_empty(len(x), *_window(window).out, len(lines)).movedim(-1, 1)


def _backward(
    dy: Tensor,
    x: Tensor,
    gates: Tensor,
    lines: Tensor,
    numbers: list[int],
    window: list[int],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    packed = _packed(x, gates, lines, numbers, window)
    rows, *found = packed.gradients(_rows(dy), *wanted)
    dx, dgates, dlines = (w.new_empty(0) for w in (x, gates, lines))
    if wanted[0]:
        dx = rows.to(x.dtype).view(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)
    if wanted[1]:
        dgates, dlines = map(_ungrouped, found, (gates, lines))
    return dx, dgates, dlines


def _backward_shape(
    dy: Tensor,
    x: Tensor,
    gates: Tensor,
    lines: Tensor,
    numbers: list[int],
    window: list[int],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgates, dlines = (w.new_empty(0) for w in (x, gates, lines))
    if wanted[0]:
        dx = x.new_empty(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)
    if wanted[1]:
        dgates, dlines = (w.new_empty(w.shape) for w in (gates, lines))
    return dx, dgates, dlines


_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_GIVEN = "Tensor x, Tensor gates, Tensor lines, int[] numbers, int[] window"
for name, arguments, result, run, shape in (
    ("synapse_forward", _GIVEN, "Tensor", _forward, _forward_shape),
    (
        "synapse_backward", f"Tensor dy, {_GIVEN}, bool[] wanted", "(Tensor, Tensor, Tensor)",
        _backward, _backward_shape,
    ),
):  # fmt: skip
    _LIBRARY.define(f"{name}({arguments}) -> {result}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threshold_gating::{name}", shape, lib=_LIBRARY)

synapse_forward = torch.ops.threshold_gating.synapse_forward.default
synapse_backward = torch.ops.threshold_gating.synapse_backward.default
