"""The recurrence of N LSTMs of one size at once, in plain formulas of torch.

One LSTM leaves most of a GPU idle, so those that see the same batches are stacked: N networks and
directions share each launch. A step is one batched product and one pointwise function, which
`torch.compile` makes one kernel on a GPU and a CPU calls as it is; what is a sum over all steps is
made once at the end. Products are in TF32 on a GPU, as in torch's own recurrent layers.

This trains; it is not the library's LSTM. Gates are [N, 5, 6, H]: tau, theta, c0, c1, s0, s1 of
i, f, g, o and the cell's output, as `threshold_gating.kernels.recurrent.gates` packs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Sizes that one process may compile a function for; torch refuses more than 8 by default.
_VARIANTS = 64
# No value in between goes to memory: by default a step on the way back would be four kernels.
_WHOLE = {"realize_reads_threshold": 1000, "realize_opcount_threshold": 10_000}


class Gate(NamedTuple):
    """A gate at x, and what its slopes are made of."""

    y: Tensor
    dx: Tensor
    lower: Tensor
    upper: Tensor
    turned: Tensor  # dy / d(tau (x - theta))


def gate(x: Tensor, numbers: Sequence[Tensor]) -> Gate:
    """y = (1 - g) (c0 + s0 x) + g (c1 + s1 x), g = sigmoid(tau (x - theta)).

    Evaluated about the midpoint, from the branch of x's own side: tanh(t / 2) = 2 g - 1 without
    its cancellation near 0. For a sigmoid, c = 0, 1, it is as exact.
    """
    tau, theta, c0, c1, s0, s1 = numbers
    t = tau * (x - theta)
    h = torch.tanh(0.5 * t)
    lower, upper = torch.sigmoid(-t), torch.sigmoid(t)
    least = torch.minimum(lower, upper)

    def mean(low: Tensor, high: Tensor) -> Tensor:
        return torch.where(t > 0, high * h, -low * h) + (low + high) * least

    slope = mean(s0, s1)
    turned = lower * upper * ((c1 - c0) + x * (s1 - s0))
    return Gate(mean(c0, c1) + x * slope, slope + tau * turned, lower, upper, turned)


def _sites(z: Tensor, cell: Tensor, gates: Tensor) -> list[Gate]:
    """The gates i, f, g, o at z, [N, B, 4 H], and that of the cell's output at c, [N, B, H]."""
    inputs = (*z.chunk(4, -1), cell)
    return [gate(x, gates[:, k, :, None].unbind(1)) for k, x in enumerate(inputs)]


def cell_forward(z: Tensor, cell: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """(c', h) of a step."""
    i, f, g, o = (gate(x, gates[:, k, :, None].unbind(1)).y for k, x in enumerate(z.chunk(4, -1)))
    cell = f * cell + i * g
    return cell, o * gate(cell, gates[:, 4, :, None].unbind(1)).y


def cell_backward(
    dy: Tensor, dh: Tensor, dcell: Tensor, z: Tensor, before: Tensor, cell: Tensor, gates: Tensor
) -> Tensor:
    """Slopes of the loss, [10, N, B, H]: along z of i, f, g, o, along c before the step, and along
    what each of the five gates gives.

    They are one tensor: of that the compiler makes one kernel, and of tensors that differ in shape
    it makes several.

    Args:
        dy: the slope along h as an output.
        dh, dcell: along h and c as the next step's state; h's in four parts, [4, N, B, H].
        before, cell: c before and after the step.
    """
    i, f, g, o, out = _sites(z, cell, gates)
    whole = dy + ((dh[0] + dh[1]) + (dh[2] + dh[3]))
    dcell = dcell + whole * o.y * out.dx
    along = (dcell * g.y, dcell * before, dcell * i.y, whole * out.y, whole * o.y)
    dz = [d * site.dx for d, site in zip(along, (i, f, g, o), strict=False)]
    return torch.stack([*dz, dcell * f.y, *along])


def gate_sums(x: Tensor, dy: Tensor, numbers: Tensor) -> Tensor:
    """Slopes along the numbers of one site, from x and dy [T, N, B, H]: sums over T, [N, 6, B, H].

    The caller sums over B. Sums over T and B at once would be too few to fill a GPU.
    """
    rows = numbers.unsqueeze(2).unbind(1)
    at = gate(x, rows)
    turned, low, high = dy * at.turned, dy * at.lower, dy * at.upper
    tau, theta = rows[:2]
    parts = ((x - theta) * turned, -tau * turned, low, high, low * x, high * x)
    return torch.stack([part.sum(0) for part in parts], 1)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True, options=_WHOLE)


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """One kernel on a GPU; the first call makes it, which has to be before a graph is captured."""
    if not like.is_cuda:
        return function
    limits = torch._dynamo.config
    if limits.recompile_limit < _VARIANTS:  # asked each time: each thread has its own
        limits.recompile_limit = _VARIANTS
    return _compiled(function)


@contextmanager
def _recurrent_precision(like: Tensor) -> Iterator[None]:
    """TF32 on a GPU, and only in here: the loss takes logarithms apart by a product, exactly."""
    before = torch.get_float32_matmul_precision()
    if like.is_cuda:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if like.is_cuda:
            torch.set_float32_matmul_precision(before)


def recurrence(x: Tensor, ih: Tensor, hh: Tensor, bias: Tensor, gates: Tensor) -> Tensor:
    """h of all steps, [N, T, B, H]; c and h start at 0.

    Args:
        x: [N, T, B, I], turned around in time where a direction is backwards.
        ih, hh: weights of x and of h as torch has them, [N, 4 H, I] and [N, 4 H, H].
        bias: [N, 4 H].
        gates: [N, 5, 6, H].
    """
    return _Recurrence.apply(x, ih, hh, bias, gates)


class _Recurrence(torch.autograd.Function):
    """In here time comes first, so that a step lies in memory alike whatever T is."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        x, ih, hh, bias, gates = tensors
        with _recurrent_precision(x):
            z = torch.baddbmm(bias[:, None], x.flatten(1, 2), ih.mT).unflatten(1, x.shape[1:3])
            z = z.transpose(0, 1).contiguous()  # [T, N, B, 4 H]
            cells, hidden = _forward(z, hh, gates)
        ctx.save_for_backward(x, ih, hh, gates, z, cells, hidden)
        return hidden.transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, ih, hh, gates, z, cells, hidden = ctx.saved_tensors
        with _recurrent_precision(x):
            found = _backward(dy.transpose(0, 1).contiguous(), z, cells, hh, gates)
            rows = found[:, :4].permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)  # [N, T B, 4 H]
            before = hidden[:-1].transpose(0, 1).flatten(1, 2)
            return (
                torch.bmm(rows, ih).view_as(x) if ctx.needs_input_grad[0] else None,
                torch.bmm(rows.mT, x.flatten(1, 2)),
                torch.bmm(rows[:, x.shape[2] :].mT, before),
                rows.sum(1),
                _numbers(z, cells, found[:, 5:], gates) if ctx.needs_input_grad[4] else None,
            )


def _forward(z: Tensor, hh: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """c and h of all steps, [T, N, B, H]; z gets the product with h of the step before."""
    step = _fused(cell_forward, z)
    cell = z.new_zeros(*z.shape[1:3], hh.shape[2])
    cells, hidden = [], []
    for now in z:
        if hidden:
            now.baddbmm_(hidden[-1], hh.mT)
        cell, h = step(now, cell, gates)
        cells.append(cell)
        hidden.append(h)
    return torch.stack(cells), torch.stack(hidden)


def _backward(dy: Tensor, z: Tensor, cells: Tensor, hh: Tensor, gates: Tensor) -> Tensor:
    """What `cell_backward` finds, of all steps: [T, 10, N, B, H]."""
    step = _fused(cell_backward, z)
    none, made = torch.zeros_like(cells[0]), []
    dh, dcell = z.new_zeros(4, *none.shape), none
    four = hh.unflatten(1, (4, -1)).transpose(0, 1).flatten(0, 1)  # the gates apart: [4 N, H, H]
    for t in reversed(range(len(z))):
        found = step(dy[t], dh, dcell, z[t], cells[t - 1] if t else none, cells[t], gates)
        made.append(found)
        if t:
            dh, dcell = torch.bmm(found[:4].flatten(0, 1), four).view_as(dh), found[4]
    # flat, for torch joins what has more than four axes one by one
    return torch.stack([found.flatten() for found in made[::-1]]).unflatten(1, made[0].shape)


def _numbers(z: Tensor, cells: Tensor, along: Tensor, gates: Tensor) -> Tensor:
    """Slopes along the gates' numbers, [N, 5, 6, H]."""
    summed = _fused(gate_sums, z)
    found = []
    for k, x in enumerate((*z.chunk(4, -1), cells)):
        dy = along[:, k]
        if z.is_cuda:  # one kernel for all lengths
            for t in (x, dy):
                torch._dynamo.maybe_mark_dynamic(t, 0)
        found.append(summed(x, dy, gates[:, k]))
    return torch.stack(found, 1).sum(3)
