"""Learned pairs of a recurrent layer in its weights, on the way: torch's own fused op runs.

Behind an affine map a pair adds no function, sigmoid(tau (a - theta)) = sigmoid(e a + d) with
e = tau / tau0 and d = theta0 - e theta. So the weights times e, with d in a bias, give torch's op
what the gates would give, once a call and not once a step; the gradients of weights, tau and theta
go back through the same two lines. In 16 bits the folded weights are rounded to their type. The
output of an LSTM's cell is behind no weights: where that learns, torch's sigmoid and tanh run at
every step. So they do for few steps, which are not worth a copy of the weights: of e a + d.

cuDNN wants all weights in one buffer: the folded ones are written there (`rnn_buffer`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from threshold_gating import kernels
from threshold_gating.instance import TG
from threshold_gating.nn.rnn_buffer import rooms_for
from threshold_gating.nn.rnn_steps import FEW, FUNCTIONS, SITES, Instance, Moved
from threshold_gating.nn.unitwise import sharpness
from threshold_gating.primitive import is_memory
from threshold_gating.taxonomy import TAXONOMY

AUDITED_AS = "native"  # see conversion.audit

# Of a layer and direction, [sites, H]: rho as "tau", dtheta as "theta".
Held = Mapping[str, Tensor]

# The ops themselves for modes around us: a converted network answers torch.lstm.
OPS = {
    torch.lstm: (torch.ops.aten.lstm, "LSTM"),
    torch.gru: (torch.ops.aten.gru, "GRU"),
    torch.rnn_tanh: (torch.ops.aten.rnn_tanh, "RNN_TANH"),
}
_HARDTANH_BACKWARD = torch.ops.aten.hardtanh_backward.default
_FUNCTIONS = {
    TAXONOMY["sigmoid"]: torch.ops.aten.sigmoid.default,
    TAXONOMY["tanh"]: torch.ops.aten.tanh.default,
}

# Costs on a CPU, as the number of weights that are folded in the same time: of a step made by
# itself, without its products, and of each of its pre-activations.
_STEP, _UNIT = 2**18, 8


@dataclass(frozen=True)
class Pairs:
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
        own = tuple([gates[site] for site in standard])
        # by identity: to hash the numbers of all gates takes as long as to find the pairs
        key = (*standard, *learned, *map(id, standard.values()), *map(id, own))
        found = _FOUND.get(key)
        if found is None:
            kept = tuple(standard.values()), own  # or their ids may be those of others one day
            found = _pairs(standard, own, learned), kept
            if len(_FOUND) >= 256:
                _FOUND.clear()
            _FOUND[key] = found
        return found[0]

    @functools.cached_property
    def blocks(self) -> int:
        return len(self.starts) - self.cell

    @functools.cached_property
    def fold(self) -> bool:
        """Whether one of them reads weights."""
        return any(self.starts[: self.blocks])

    @functools.cached_property
    def _ratios(self) -> tuple[float, ...] | None:
        """What to multiply exp(rho) by; None for nothing."""
        ratios = tuple(start[0] for start in self.starts if start is not None)
        return None if set(ratios) == {1.0} else ratios

    @functools.cached_property
    def _thetas(self) -> tuple[float, ...] | None:
        """What to add to dtheta; None for nothing."""
        thetas = tuple(start[1] for start in self.starts if start is not None)
        return None if set(thetas) == {0.0} else thetas

    @functools.cached_property
    def of_weights(self) -> Pairs:
        """Those that read weights."""
        return Pairs(self.starts[: self.blocks])

    @functools.cached_property
    def _is_partial(self) -> bool:
        return None in self.starts

    def has_theta(self, held: Held) -> bool:
        """Whether one of them has a threshold, or learns one."""
        return self._thetas is not None or "theta" in held

    def values(self, rho: Tensor | None, theta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """e and theta, [sites, H]; None for a theta that is 0 and not learned."""
        like = rho if theta is None else theta
        assert like is not None
        e = torch.ones_like(like) if rho is None else _sharpening(rho)
        if self._ratios is not None:
            e = e * _column(self._ratios, like.device, like.dtype)
        if self._thetas is not None:
            begin = _column(self._thetas, like.device, like.dtype)
            theta = begin.expand_as(like) if theta is None else theta + begin
        if self._is_partial:
            return self._among(e, 1.0), None if theta is None else self._among(theta, 0.0)
        return e, theta

    def learned(self, rows: Tensor) -> Tensor:
        """Those of `rows`, one for each site, that learn."""
        if not self._is_partial:
            return rows
        each = zip(rows.unbind(0), self.starts, strict=True)
        return torch.stack([row for row, start in each if start is not None])

    def _among(self, rows: Tensor, other: float) -> Tensor:
        """`rows` at their sites, the number `other` at those that are not learned."""
        each, frozen = iter(rows.unsqueeze(1).unbind(0)), rows.new_full((1, rows.shape[1]), other)
        return torch.cat([frozen if start is None else next(each) for start in self.starts])


_FOUND: dict[tuple[Any, ...], tuple[Pairs | None, Any]] = {}


def _pairs(standard: Mapping[str, TG], gates: Sequence[TG], learned: Sequence[str]) -> Pairs | None:
    found: list[tuple[float, float] | None] = []
    for (site, t), own in zip(standard.items(), gates, strict=True):
        if site not in learned:
            if own != t:
                return None
            found.append(None)
        elif not _is_moved(own, t):
            return None
        else:
            found.append((sharpness(own) / sharpness(t), own.theta[0] - t.theta[0]))
    frozen = "cell" in standard and "cell" not in learned
    return Pairs(tuple(found[:-1] if frozen else found), "cell" in learned)


def _sharpening(rho: Tensor) -> Tensor:
    """`Structure.sharpening`, with less Python where nobody answers torch's functions."""
    if _modes_around():
        return kernels.Structure.sharpening(rho)
    bound = kernels.Structure.rho_bound()
    return rho.clamp(-bound, bound).exp()


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


def is_batch(mode: str, input: Any, hx: Any) -> bool:
    """Whether torch's `forward` does no more than check: (T, B, I), with such a state or none."""
    if isinstance(input, PackedSequence) or input.dim() != 3:
        return False
    if hx is None:
        return True
    states = hx if mode == "LSTM" else (hx,)
    if type(states) is not tuple or len(states) != (2 if mode == "LSTM" else 1):
        return False
    return all(isinstance(s, Tensor) and s.dim() == 3 for s in states)


def folded(op: Callable[..., Any], args: Sequence[Any], pairs: Pairs, held: Sequence[Held]) -> Any:
    """What torch's `op` returns with the gates in its weights; `held` is for each of its layers."""
    at = 2 if isinstance(args[3], bool) else 3  # packed ones have their batch sizes before
    params, has_biases, layers, dropout, train, both = args[at : at + 6]
    packet, mode = OPS[op]
    native = packet if _modes_around() else op  # which needs no search for the overload
    if torch.is_grad_enabled() and not train:  # cuDNN differentiates in training only
        dropout, train = 0.0, True
    folds = pairs.fold and (pairs.cell or _has_op(args[0], mode))
    folds = folds and _pays(args, params, mode, pairs.cell)
    if folds:
        params, has_biases = fold(mode, params, has_biases, layers, pairs, held)
    whole = (*args[:at], params, has_biases, layers, dropout, train, both, *args[at + 6 :])
    if folds and not pairs.cell:
        y, *last = native(*whole)
        # a copy: the op keeps y for the way back, and what is returned may be overwritten
        return y.clone() if y.requires_grad else y, *last
    first = pairs.blocks if folds else 0
    gates = [_moved(op, pairs, h, first) for h in held]
    return FUNCTIONS[op](*whole, gates=gates)


def _modes_around() -> bool:
    return torch._C._len_torch_function_stack() > 0


def _steps(args: Sequence[Any]) -> int:
    """How many steps a call of torch's op has."""
    if not isinstance(args[3], bool):
        return len(args[1])  # packed: a batch size for each
    return int(args[0].shape[1 if args[-1] else 0])


def _pays(args: Sequence[Any], params: Sequence[Tensor], mode: str, by_steps: bool) -> bool:
    """Whether to copy the weights takes less time than to make the steps one by one, as those of a
    learned cell are made in any case."""
    steps, x = _steps(args), args[0]
    if by_steps or not x.is_cpu or (mode == "LSTM" and steps > FEW):
        return steps > FEW
    # the first layer stands for all: both sides grow with their number
    ih, hh, rows = params[0], params[1], math.prod(x.shape[:-1])
    return bool(steps * _STEP + rows * hh.shape[0] * _UNIT > ih.numel() + hh.numel())


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


def _moved(op: Callable[..., Any], pairs: Pairs, held: Held, first: int) -> dict[str, Instance]:
    """Torch's functions for a step, those from the `first` learned one on at e and d."""
    e, theta = pairs.values(held.get("tau"), held.get("theta"))
    gates: dict[str, Instance] = {}
    d = None if theta is None else -(e * theta)
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
    pairs: Pairs,
    held: Sequence[Held],
) -> tuple[list[Tensor], bool]:
    """The weights times e, with d in a bias, layer after layer; and whether there are biases."""
    n = len(params) // len(held)
    each = [params[k : k + n] for k in range(0, len(params), n)]
    if not has_biases and pairs.has_theta(held[0]):
        zero = params[1].new_zeros(params[1].shape[0])
        each, has_biases = [(ih, hh, zero, zero, *hr) for ih, hh, *hr in each], True
    rooms, scaled = rooms_for(each, mode, layers), 4 if has_biases else 2
    run = _apply if torch.is_grad_enabled() else _folded
    new: list[Tensor] = []
    for own, h, room in zip(each, held, rooms, strict=True):
        rho, theta = h.get("tau"), h.get("theta")
        if pairs.cell:  # the last row, behind no weights
            rho, theta = (None if t is None else t[:-1] for t in (rho, theta))
        call = _Call(pairs.of_weights, room, scaled)
        new += run(call, rho, theta, *own)
    return new, has_biases


class _Call(NamedTuple):
    """Everything about the fold of a layer that is differentiated by nothing."""

    pairs: Pairs
    rooms: Sequence[Tensor | None]
    scaled: int  # the first so many weights are


def _folded(
    call: _Call, rho: Tensor | None, theta: Tensor | None, *weights: Tensor
) -> tuple[Tensor, ...]:
    """The first weights of one layer times e, row by row, and d in the first bias, in `rooms`."""
    return _written(call, _factors(call.pairs, rho, theta), weights)


class _Factors(NamedTuple):
    """e and theta for the rows of a layer's weights."""

    column: Tensor  # [rows, 1]
    e: Tensor  # [rows]
    theta: Tensor | None


def _factors(pairs: Pairs, rho: Tensor | None, theta: Tensor | None) -> _Factors:
    e, theta = pairs.values(rho, theta)
    flat = e.reshape(-1)
    return _Factors(flat.unsqueeze(1), flat, None if theta is None else theta.reshape(-1))


def _written(call: _Call, by: _Factors, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`_folded`, for e and theta as they are."""
    new = []
    for k, (w, room) in enumerate(zip(weights, call.rooms, strict=True)):
        if k >= call.scaled:
            made = w.clone() if room is None else room.copy_(w)
        elif k == 2 and by.theta is not None:
            made = torch.addcmul((by.e * by.theta).neg_(), w, by.e, out=room)
        else:
            made = torch.mul(w, by.column if k < 2 else by.e, out=room)
        # in 16 bits e is wider, and so is what had no room
        new.append(made if made.dtype == w.dtype else made.to(w.dtype))
    return tuple(new)


class _Fold(torch.autograd.Function):
    """`_folded` with its way back."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, rho: Tensor | None, theta: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.by = call.pairs, _factors(call.pairs, rho, theta)
        ctx.save_for_backward(rho, theta, *weights[: call.scaled])
        return _written(call, ctx.by, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rho, theta, *weights = ctx.saved_tensors
        pairs, n, (_, of_rho, of_theta, *_) = ctx.pairs, len(weights), ctx.needs_input_grad
        # anew for those who differentiate twice
        by = _factors(pairs, rho, theta) if torch.is_grad_enabled() else ctx.by
        made = [g * (by.column if k < 2 else by.e) for k, g in enumerate(grads[:n])]
        drho = dtheta = None
        if of_rho:
            slope = _of_log_e(made, weights, by.theta).view(pairs.blocks, -1)
            drho = _within(pairs.learned(slope), rho)
        if of_theta:
            dtheta = pairs.learned(-made[2].view(pairs.blocks, -1))
        return None, drho, dtheta, *made, *grads[n:]


# without its care for functorch, in whose transforms nothing folds: see `takes`
_apply: Any = super(torch.autograd.Function, _Fold).apply


def _of_log_e(made: Sequence[Tensor], weights: Sequence[Tensor], theta: Tensor | None) -> Tensor:
    """The gradient of log e; `made` are those of the weights before the fold, and so e is in."""
    ih, hh, *biases = weights
    found = (made[0] * ih).sum(1) + (made[1] * hh).sum(1)
    for g, b in zip(made[2:], biases, strict=True):
        found = torch.addcmul(found, g, b)
    if theta is not None:
        found = torch.addcmul(found, made[2], theta, value=-1)
    return found


def _within(slope: Tensor, rho: Tensor) -> Tensor:
    """`slope` where rho is used as it is, bounds included, and 0 elsewhere."""
    beyond = 1 + torch.finfo(rho.dtype).eps  # the op leaves its bounds out
    bound = kernels.Structure.rho_bound() * beyond
    found: Tensor = _HARDTANH_BACKWARD(slope, rho, -bound, bound)
    return found
