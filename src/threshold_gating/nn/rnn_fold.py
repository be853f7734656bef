"""Learned pairs of a recurrent layer in its weights, on the way: torch's own fused op runs.

Behind an affine map a pair adds no function, sigmoid(tau (a - theta)) = sigmoid(e a + d) with
e = tau / tau0 and d = theta0 - e theta. So the weights times e, with d in a bias, give torch's op
what the gates would give, once a call and not once a step; the gradients of weights, tau and theta
go back through the same two lines. In 16 bits the folded weights are rounded to their type. The
output of an LSTM's cell is behind no weights: where that learns, torch's sigmoid and tanh run at
every step. So they do for few steps, which are not worth a copy of the weights: of e a + d.

cuDNN wants all weights in one buffer and copies them, with a warning, where they are not: the
folded ones are written to where it wants them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.backends.cudnn.rnn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from threshold_gating import kernels
from threshold_gating.instance import TG
from threshold_gating.nn.rnn_steps import FEW, FUNCTIONS, SITES, Instance, Moved
from threshold_gating.nn.unitwise import sharpness
from threshold_gating.primitive import is_memory
from threshold_gating.taxonomy import TAXONOMY

AUDITED_AS = "native"  # see conversion.audit

# Of a layer and direction, [sites, H]: rho as "tau", dtheta as "theta".
Held = Mapping[str, Tensor]

# The ops themselves: a converted network around us answers torch.lstm.
OPS = {
    torch.lstm: (torch.ops.aten.lstm, "LSTM"),
    torch.gru: (torch.ops.aten.gru, "GRU"),
    torch.rnn_tanh: (torch.ops.aten.rnn_tanh, "RNN_TANH"),
}
_FUNCTIONS = {
    TAXONOMY["sigmoid"]: torch.ops.aten.sigmoid.default,
    TAXONOMY["tanh"]: torch.ops.aten.tanh.default,
}


class Pairs(NamedTuple):
    """Where the learned gates of a step start: tau over that of the gate in torch's op, and theta.

    A frozen one has None. All read a block of rows of the weights but the output of a cell, which
    is the last if it learns (`cell`).
    """

    starts: tuple[tuple[float, float] | None, ...]
    cell: bool = False

    @classmethod
    def of(
        cls, standard: Mapping[str, TG], gates: Mapping[str, TG], learned: Sequence[str]
    ) -> Pairs | None:
        """Or None where one is no gate of torch's op at another tau and theta."""
        found: list[tuple[float, float] | None] = []
        for site, t in standard.items():
            own = gates[site]
            if site not in learned:
                if own != t:
                    return None
                found.append(None)
            elif not _is_moved(own, t):
                return None
            else:
                found.append((sharpness(own) / sharpness(t), own.theta[0] - t.theta[0]))
        frozen = "cell" in standard and "cell" not in learned
        return cls(tuple(found[:-1] if frozen else found), "cell" in learned)

    @property
    def blocks(self) -> int:
        return len(self.starts) - self.cell

    @property
    def fold(self) -> bool:
        """Whether one of them reads weights."""
        return any(self.starts[: self.blocks])

    def affine(self, held: Held) -> tuple[Tensor, Tensor | None]:
        """e and d, [sites, H]; None for a d that is 0 and not learned."""
        rows = [start for start in self.starts if start is not None]
        ratios, starts = zip(*rows, strict=True)
        like = next(iter(held.values()))
        e = kernels.Structure.sharpening(held["tau"]) if "tau" in held else torch.ones_like(like)
        e = e if set(ratios) == {1.0} else e * _column(ratios, like.device, like.dtype)
        theta = held.get("theta")
        if set(starts) != {0.0}:
            begin = _column(starts, like.device, like.dtype)
            theta = begin if theta is None else theta + begin
        d = None if theta is None else -(e * theta)
        return self._among(e, 1.0), None if d is None else self._among(d, 0.0)

    def _among(self, rows: Tensor, other: float) -> Tensor:
        """`rows` at their sites, the number `other` at those that are not learned."""
        if len(rows) == len(self.starts):
            return rows
        each, frozen = iter(rows.unsqueeze(1).unbind(0)), rows.new_full((1, rows.shape[1]), other)
        return torch.cat([frozen if start is None else next(each) for start in self.starts])


def _is_moved(own: TG, t: TG) -> bool:
    """Whether `own` is the soft gate `t` at another tau and theta."""
    if own.hard or t.hard or own.K != t.K:
        return False
    return own is t or own == TG(own.tau, own.theta, t.s, t.c)


@functools.cache  # never forgotten, for a CUDA graph may read it
def _column(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device, dtype=dtype).unsqueeze(-1)


def takes(input: Any) -> bool:
    """Whether torch's ops may compute the gates for this input; elsewhere they are evaluated.

    A compiler fuses gates by itself, and torch's op has no forward-mode derivative and no vmap.
    """
    return not torch.compiler.is_compiling() and is_memory(data(input))


def data(input: Any) -> Any:
    return input[0] if isinstance(input, PackedSequence) else input


def folded(op: Callable[..., Any], args: Sequence[Any], pairs: Pairs, held: Sequence[Held]) -> Any:
    """What torch's `op` returns with the gates in its weights; `held` is for each of its layers."""
    at = 2 if isinstance(args[3], bool) else 3  # packed ones have their batch sizes before
    params, has_biases, layers, dropout, train, both = args[at : at + 6]
    native, mode = OPS[op]
    if torch.is_grad_enabled() and not train:  # cuDNN differentiates in training only
        dropout, train = 0.0, True
    pair = [pairs.affine(h) for h in held]
    folds = pairs.fold and _steps(args) > FEW and (pairs.cell or _has_op(args[0], mode))
    if folds:
        params, has_biases = fold(mode, params, has_biases, layers, pairs.blocks, pair)
    whole = (*args[:at], params, has_biases, layers, dropout, train, both, *args[at + 6 :])
    if folds and not pairs.cell:
        # copies: the op keeps its results for the way back, and these may be overwritten
        return tuple(y.clone() if y.requires_grad else y for y in native(*whole))
    gates = [_moved(op, pairs, *own, pairs.blocks if folds else 0) for own in pair]
    return FUNCTIONS[op](*whole, gates=gates)


def _steps(args: Sequence[Any]) -> int:
    """How many steps a call of torch's op has."""
    if not isinstance(args[3], bool):
        return len(args[1])  # packed: a batch size for each
    return int(args[0].shape[1 if args[-1] else 0])


def _has_op(x: Tensor, mode: str) -> bool:
    """Whether torch's op runs in the type of autocast.

    On a CPU it gives an LSTM to mkldnn whatever that type is. Mkldnn has no derivative in float16,
    and bfloat16 on some CPUs only.
    """
    if mode != "LSTM" or not x.is_cpu or not torch.is_autocast_enabled("cpu"):
        return True
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not there or torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _moved(
    op: Callable[..., Any], pairs: Pairs, e: Tensor, d: Tensor | None, first: int
) -> dict[str, Instance]:
    """Torch's functions for a step, those from the `first` learned one on at e and d."""
    gates: dict[str, Instance] = {}
    for k, (site, t) in enumerate(SITES[op.__name__].items()):
        function = _FUNCTIONS[t]
        if first <= k < len(e) and pairs.starts[k] is not None:
            gates[site] = Moved(function, e[k], None if d is None else d[k])
        else:
            gates[site] = function
    return gates


def fold(
    mode: str,
    params: Sequence[Any],
    has_biases: bool,
    layers: int,
    blocks: int,
    pair: Sequence[tuple[Tensor, Tensor | None]],
) -> tuple[list[Tensor], bool]:
    """The weights times e, with d in a bias, layer after layer; and whether there are biases."""
    n = len(params) // len(pair)
    each = [tuple(params[k : k + n]) for k in range(0, len(params), n)]
    if not has_biases and pair[0][1] is not None:  # thresholds need one
        zero = params[1].new_zeros(params[1].shape[0])
        each, has_biases = [(ih, hh, zero, zero, *hr) for ih, hh, *hr in each], True
    rooms = _rooms(each, mode, layers)
    new: list[Tensor] = []
    for own, (e, d), room in zip(each, pair, rooms, strict=True):
        rows = [w if w is None or len(w) == blocks else w[:blocks] for w in (e, d)]
        new += _Fold.apply(room, 4 if has_biases else 2, *rows, *own)  # type: ignore[no-untyped-call]
    return new, has_biases


class _Fold(torch.autograd.Function):
    """The first weights of one layer times e, row by row, and d in the first bias, in `rooms`."""

    @staticmethod
    def forward(
        ctx: Any, rooms: Sequence[Tensor], scaled: int, *tensors: Any
    ) -> tuple[Tensor, ...]:
        e, d, *weights = tensors
        ctx.scaled, ctx.shifted = scaled, d is not None
        ctx.save_for_backward(e, *weights[:scaled])
        for k, (w, room) in enumerate(zip(weights, rooms, strict=True)):
            if k >= scaled:
                room.copy_(w)
            elif k == 2 and d is not None:
                torch.addcmul(d.reshape(-1), w, e.reshape(-1), out=room)
            else:
                torch.mul(w, e.reshape(-1, *(1,) * (w.dim() - 1)), out=room)
        return tuple(rooms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        e, *weights = ctx.saved_tensors
        wanted, n = ctx.needs_input_grad, ctx.scaled
        wide = [g.to(e.dtype) for g in grads[:n]]
        dd = wide[2].view_as(e) if ctx.shifted and wanted[3] else None
        de = None
        if wanted[2]:
            products = torch._foreach_mul(wide, weights)
            de = products[0].sum(1) + products[1].sum(1)
            for product in products[2:]:
                de = de + product
            de = de.view_as(e)
        scales = [e.reshape(-1, *(1,) * (w.dim() - 1)) for w in weights]
        made = [
            g.to(w.dtype) for g, w in zip(torch._foreach_mul(wide, scales), weights, strict=True)
        ]
        return None, None, de, dd, *made, *grads[n:]


class _Network(NamedTuple):
    """What decides where cuDNN wants each weight."""

    mode: str
    layers: int
    directions: int  # of all layers
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device


def _rooms(each: Sequence[Sequence[Tensor]], mode: str, layers: int) -> list[list[Tensor]]:
    """Where the folded weights go: parts of one buffer for cuDNN, memory of their own elsewhere."""
    all_weights, n = [w for own in each for w in own], len(each[0])
    first = all_weights[0]
    if _are_in_one_buffer(first):
        shapes = tuple(tuple(w.shape) for w in all_weights)
        size, starts = _offsets(
            _Network(mode, layers, len(each), shapes, first.dtype, first.device)
        )
        # without biases there is room for them, which is read
        buffer = first.new_zeros(size).untyped_storage()
        # no views: what is written to one of them is no change of another
        rooms = [
            first.new_empty(0).set_(buffer, start, w.shape, (*w.shape[1:], 1))
            for start, w in zip(starts, all_weights, strict=True)
        ]
    else:
        rooms = [w.new_empty(w.shape) for w in all_weights]
    return [rooms[k : k + n] for k in range(0, len(rooms), n)]


def _are_in_one_buffer(w: Tensor) -> bool:
    """Whether cuDNN runs torch's op and wants it so; torch's own layers miss that in bfloat16."""
    return w.is_cuda and torch._use_cudnn_rnn_flatten_weight() and torch.cudnn_is_acceptable(w)


@functools.lru_cache(256)
def _offsets(network: _Network) -> tuple[int, tuple[int, ...]]:
    """How long the buffer is, and where each weight starts in it, as torch itself lays them out."""
    mode, layers, directions, shapes, dtype, device = network
    n = len(shapes) // directions
    projected = shapes[n - 1] if n % 2 else None  # (P, H)
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        likes = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        torch._cudnn_rnn_flatten_weight(
            likes,
            n,
            shapes[0][1],
            torch.backends.cudnn.rnn.get_cudnn_mode(mode),  # type: ignore[no-untyped-call]
            projected[1] if projected else shapes[1][1],
            projected[0] if projected else 0,
            layers,
            False,  # whether batches come first, which says nothing about weights
            directions > layers,
        )
    storage, size = likes[0].untyped_storage(), likes[0].element_size()
    starts = tuple((w.data_ptr() - storage.data_ptr()) // size for w in likes)
    return storage.nbytes() // size, starts
