"""A layer of an LSTM in one direction on a GPU, every gate evaluated: one launch for each step.

The inputs of all steps are one product. A step multiplies its state and evaluates the gates in one
kernel, forward and backward; what goes into the gates is kept. The gradients of weights and of the
gates' numbers are sums over all steps, made at the end at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.backend import backend, is_memory, runs_triton
from threshold_gating.kernels.recurrent.gates import Form, Site, form, is_soft, packed, unpacked
from threshold_gating.kernels.runtime import Launch, cached, interpreting, total

AUDITED_AS = "gates"  # see conversion.audit

SITES = 5  # i, f, g, o, cell
_PARTS = 64  # of all rows, for the sums
Plain = Callable[[Sequence[Any], Sequence[Site]], tuple[Tensor, ...]]


class Layer(NamedTuple):
    """The tensors of one call: x (rows, I), the state at the start (B, H), gates (5, 6, H)."""

    x: Tensor
    ih: Tensor
    hh: Tensor
    bias: Tensor | None
    h: Tensor
    c: Tensor
    gates: Tensor


class Course(NamedTuple):
    """Where steps lie among the rows; rows of the state at the start follow behind all others.

    Each step has a line of `steps`: first row and number of rows before it, of it, and after it. A
    sequence starts where the step before has no such row, and ends where the next one has none.
    """

    steps: Tensor  # (T, 8), int32
    before: Tensor  # of each row, the row it came from
    first: Tensor  # of each sequence, its first row and its last in the order of steps
    last: Tensor
    rows: int


@functools.lru_cache(64)
def course(sizes: tuple[int, ...], reverse: bool, device: torch.device) -> Course:
    """For steps of so many sequences each, the longest first.

    Not to be made while a graph is captured: torch refuses the copy to the device.
    """
    with torch.inference_mode(False):
        counts = torch.tensor(sizes)
        each = torch.stack([counts.cumsum(0) - counts, counts], 1)  # first row, number of rows
        each = each.flip(0) if reverse else each
        none = each.new_zeros(1, 2)
        steps = torch.cat([torch.cat([none, each[:-1]]), each, torch.cat([each[1:], none])], 1)
        lines = steps.repeat_interleave(steps[:, 3], 0)  # for each row that of its step
        came, had, base, _, _, on = lines.unbind(1)
        rows, many = len(lines), each[:, 1]
        r = torch.arange(rows) - (many.cumsum(0) - many).repeat_interleave(many)
        here = base + r
        before = torch.empty_like(r).scatter_(0, here, torch.where(r < had, came, rows) + r)
        first, last = torch.empty(2, sizes[0], dtype=torch.int64)
        first[r[r >= had]], last[r[r >= on]] = here[r >= had], here[r >= on]
        table = torch.cat([steps, each.new_zeros(len(each), 2)], 1).int()  # lines of 32 bytes
        table, before, first, last = (t.to(device) for t in (table, before, first, last))
        return Course(table, before, first, last, rows)


def lstm(
    tensors: Sequence[Tensor | None],
    sites: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    reverse: bool,
    plain: Plain,
) -> tuple[Tensor, ...] | None:
    """h of all rows, h and c at the end of a layer; None where no kernel has that.

    Args:
        tensors: x as packed rows, the weights of x and h, the bias, h and c at the start.
        sites: the gates of i, f, g, o and the cell's output, fields of `gates.Site`.
        sizes: how many sequences each step has, the longest first.
        plain: computes the same of tensors and sites with ops of torch, for second derivatives.
    """
    known = [Site(*t) for t in sites]
    if not _takes(tensors) or not all(is_soft(t.start) for t in known):
        return None
    x, _, hh = tensors[:3]
    assert x is not None and hh is not None
    path = cached(course, tuple(sizes), reverse, x.device)
    run = _Run(form(known), path, known, plain)
    gates = packed(known, hh.shape[1], x.device)
    hidden, h, c = _Lstm.apply(run, *tensors, gates)  # type: ignore[no-untyped-call]
    y = hidden[: run.path.rows]  # out here: a view made inside could not be overwritten
    # `hidden` is kept for the way back, and what is returned may be overwritten
    return y.clone() if y.requires_grad else y, h, c


def _takes(tensors: Sequence[Tensor | None]) -> bool:
    x = tensors[0]
    if x is None or torch.compiler.is_compiling() or not runs_triton(x, backend()):
        return False
    there = [t for t in tensors if t is not None]
    return x.numel() > 0 and all(t.dtype == x.dtype and is_memory(t) for t in there)


class _Run(NamedTuple):
    """Everything about a call that is not a tensor."""

    form: Form
    path: Course
    sites: Sequence[Site]
    plain: Plain


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Any) -> tuple[Tensor, ...]:
        layer = Layer(*tensors)
        hidden, a = _forward(layer, run)
        ctx.run = run
        ctx.save_for_backward(*layer, hidden, a)
        last, units = run.path.last, layer.hh.shape[1]
        return hidden, hidden[last], a[:, 4 * units :][last]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        run: _Run = ctx.run
        *tensors, hidden, a = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # someone differentiates twice
            return None, *_again(run, tensors, grads, wanted)
        return None, *_backward(Layer(*tensors), run, hidden, a, grads, wanted)


def _again(
    run: _Run, tensors: Sequence[Tensor | None], grads: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    own = [None if t is None else t.view_as(t) for t in tensors]
    asked = [t for t, want in zip(own, wanted, strict=True) if want and t is not None]
    slopes = (grads[0][: run.path.rows], *grads[1:])
    *given, gates = own
    assert gates is not None
    ys = run.plain(given, unpacked(gates, run.sites))
    grads = torch.autograd.grad(ys, asked, slopes, create_graph=True, materialize_grads=True)
    found = iter(grads)
    return [next(found) if want else None for want in wanted]


def _forward(layer: Layer, run: _Run) -> tuple[Tensor, Tensor]:
    """h and what goes into the gates, of all rows and the start behind them."""
    x, units, rows = layer.x, layer.hh.shape[1], run.path.rows
    batch = len(layer.h)
    a = x.new_empty(rows + batch, SITES * units)
    hidden = x.new_empty(rows + batch, units)
    into = a[:rows, : 4 * units]
    if layer.bias is None:
        torch.mm(x, layer.ih.t(), out=into)
    else:
        torch.addmm(layer.bias, x, layer.ih.t(), out=into)
    a[rows:, 4 * units :] = layer.c
    hidden[rows:] = layer.h
    launch = _step("lstm_forward", batch, units, rows, run.form, _precision(), None)
    launch.along((hidden, a, *_aligned(layer.hh, layer.gates)), run.path.steps)
    return hidden, a


def _backward(
    layer: Layer,
    run: _Run,
    hidden: Tensor,
    a: Tensor,
    grads: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    path = run.path
    hh, gates, dhidden, last_h, last_c = _aligned(layer.hh, layer.gates, *grads)
    units, rows, batch = hh.shape[1], path.rows, len(layer.h)
    da, dcell = hidden.new_empty(rows, 4 * units), hidden.new_empty(rows, units)
    dgates = hidden.new_empty(rows, SITES * units) if wanted[6] else da
    launch = _step("lstm_backward", batch, units, rows, run.form, _precision(), wanted[6])
    tensors = (dhidden, a, hh, gates, da, dcell, dgates, last_h, last_c)
    launch.along(tensors, path.steps, backwards=True)
    first = path.first
    return [
        da @ layer.ih if wanted[0] else None,
        da.t() @ layer.x if wanted[1] else None,
        da.t() @ hidden[path.before] if wanted[2] else None,
        da.sum(0) if wanted[3] else None,
        da[first] @ hh if wanted[4] else None,
        dcell[first] if wanted[5] else None,
        _sums(a, dgates, gates, rows, run.form) if wanted[6] else None,
    ]


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """As kernels are launched with fastest; what lies in torch's one buffer may start anywhere."""
    each = [t.detach().contiguous() for t in tensors]
    return [t.clone() if t.data_ptr() % 16 else t for t in each]


def _sums(a: Tensor, dgates: Tensor, gates: Tensor, rows: int, form: Form) -> Tensor:
    launch, parts = _summing(rows, gates.shape[-1], form)
    sums = gates.new_empty(parts, *gates.shape)
    launch((a, dgates, gates, sums))
    return total(sums, 0)


def _precision() -> str:
    """That of float32 products in recurrent layers, as torch's own have it; TF32 by default."""
    return "tf32" if torch._C._get_fp32_precision_getter("cuda", "rnn") == "tf32" else "ieee"


# Rows, units and inner size of a tile, stages, warps. Larger inner sizes are two percent faster on
# an H200, and take more shared memory than small GPUs have.
TILES = {"lstm_forward": (32, 8, 64, 3, 4), "lstm_backward": (32, 8, 32, 4, 2)}


@functools.lru_cache(1024)
def _step(
    name: str, batch: int, units: int, rows: int, form: Form, precision: str, learned: bool | None
) -> Launch:
    from threshold_gating.kernels.recurrent import lstm_kernels

    *tile, stages, warps = (16, 16, 16, 1, 4) if interpreting() else TILES[name]
    grid = -(-batch // tile[0]), -(-units // tile[1])
    known = () if learned is None else (learned,)
    rest = (rows, units, *form, *known, precision, *tile, stages)
    return Launch(getattr(lstm_kernels, name), grid, warps, rest)


@functools.lru_cache(1024)
def _summing(rows: int, units: int, form: Form) -> tuple[Launch, int]:
    from threshold_gating.kernels.recurrent.lstm_kernels import lstm_sums

    down, across = (8, 32) if interpreting() else (8, 128)
    iters = -(-rows // (down * _PARTS))
    parts = -(-rows // (down * iters))
    grid = parts, SITES * -(-units // across)
    return Launch(lstm_sums, grid, 4, (rows, units, iters, form.sloped, down, across)), parts
