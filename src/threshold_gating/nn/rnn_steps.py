"""The steps of LSTM, GRU and RNN with every sigmoid, tanh and ReLU an instance, and their loop.

    LSTM   i, f, o = sigmoid(W x + U h + b),  g = tanh(W x + U h + b)
           c' = f c + i g,  h' = o tanh(c')
    GRU    r, z = sigmoid(W x + U h + b),  n = tanh(W x + b + r (U h + d)),  h' = n + z (h - n)
    RNN    h' = tanh(W x + U h + b), or ReLU

`FUNCTIONS` maps torch's fused ops to what evaluates their gates: one product for the inputs of all
steps, then one per step for the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import kernels, taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn.unitwise import Learned, sharpness
from threshold_gating.primitive import Value

State = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Moved:
    """A function of torch at another tau and theta for each unit: function(e x + d)."""

    function: Callable[[Tensor], Tensor]
    e: Tensor
    d: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        z = x * self.e if self.d is None else torch.addcmul(self.d, x, self.e)
        return self.function(z).to(x.dtype)


Instance = TG | Learned | Moved | Callable[[Tensor], Tensor]  # the last: evaluates itself
Gates = Mapping[str, Instance]

# Steps that are not worth a copy of the weights: a GPU folds with about as many launches as a step
# has. On a CPU sizes tell for a GRU, and for an LSTM of few steps (`rnn_fold`).
FEW = 2

_SIGMOID, _TANH = taxonomy.TAXONOMY["sigmoid"], taxonomy.TAXONOMY["tanh"]
# The nonlinearities of one step, in the order of torch's weights; "cell" is the tanh of c'.
SITES: dict[str, dict[str, TG]] = {
    "lstm": {"i": _SIGMOID, "f": _SIGMOID, "g": _TANH, "o": _SIGMOID, "cell": _TANH},
    "gru": {"r": _SIGMOID, "z": _SIGMOID, "n": _TANH},
    "rnn_tanh": {"h": _TANH},
    "rnn_relu": {"h": taxonomy.TAXONOMY["relu"]},
}


class _Weights(NamedTuple):
    """The parameters of one layer and direction, as torch orders them."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    hr: Tensor | None = None  # projection of the output, (proj_size, H)


class _Cell(NamedTuple):
    """One step in two parts: a = x weight' + bias, for all times at once, then step(a, state)."""

    weight: Tensor
    bias: Tensor | None
    step: Callable[[Tensor, State], State]


_Build = Callable[[_Weights, Gates], _Cell]


def blend(t: Instance, x: Tensor) -> Tensor:
    """The gates of one site at x."""
    if isinstance(t, TG):
        return kernels.blend(x, t)
    if not isinstance(t, Learned):
        return t(x)
    centred = kernels.Structure.is_centred(t.start)
    clamp = t.start.clamp
    return kernels.blend(x, t.tau, (t.theta,), t.s, t.c, clamp=clamp, centred=centred, known=True)


def _joined(group: Sequence[Instance]) -> Instance:
    """One instance for inputs side by side; where they are learned, their values side by side."""
    moved = [t for t in group if isinstance(t, Moved)]
    if moved:
        d = [t.d for t in moved if t.d is not None]
        e = torch.cat([t.e for t in moved])
        return Moved(moved[0].function, e, torch.cat(d) if d else None)
    learned = [t for t in group if isinstance(t, Learned)]
    if not learned:
        return group[0]
    return Learned(
        learned[0].start,
        _cat([t.tau for t in learned]),
        _cat([t.theta for t in learned]),
        tuple(map(_cat, zip(*(t.s for t in learned), strict=True))),
        tuple(map(_cat, zip(*(t.c for t in learned), strict=True))),
    )


def _cat(values: Sequence[Value]) -> Value:
    tensors = [v for v in values if isinstance(v, Tensor)]
    return torch.cat(tensors) if tensors else values[0]


def _alike(a: Instance, b: Instance) -> bool:
    """Whether one call can evaluate both; learned ones of a layer learn the same numbers."""
    if isinstance(a, Learned) and isinstance(b, Learned):
        return a.start == b.start
    if isinstance(a, Moved) and isinstance(b, Moved):
        return a.function is b.function
    return a == b


def _evaluator(instances: Sequence[Instance]) -> Callable[[Tensor], Sequence[Tensor]]:
    """(B, n H) -> n times (B, H), one instance each; equal neighbours are evaluated in one call."""
    groups: list[list[Instance]] = []
    for t in instances:
        if groups and _alike(groups[-1][-1], t):
            groups[-1].append(t)
        else:
            groups.append([t])
    runs = [(_joined(group), len(group)) for group in groups]
    if len(runs) == 1:
        whole, n = runs[0]
        return lambda a: blend(whole, a).chunk(n, -1)

    def evaluate(a: Tensor) -> list[Tensor]:
        width = a.shape[-1] // len(instances)
        parts = a.split_with_sizes([n * width for _, n in runs], -1)
        pairs = zip(runs, parts, strict=True)
        return [y for (t, n), part in pairs for y in blend(t, part).chunk(n, -1)]

    return evaluate


def _summed(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def _sigmoids_first(w: Tensor, axis: int = 0) -> Tensor:
    """i, f, g, o along `axis` as i, f, o, g, so that one call evaluates the three sigmoids."""
    i, f, g, o = w.chunk(4, axis)
    return torch.cat([i, f, o, g], axis)


def _lstm_update(gates: Gates, hr: Tensor | None) -> Callable[[Tensor, Tensor], State]:
    evaluate, squash = _evaluator([gates[site] for site in "ifog"]), _evaluator([gates["cell"]])

    def update(a: Tensor, c: Tensor) -> State:
        i, f, o, g = evaluate(a)
        c = torch.addcmul(f * c, i, g)
        h = o * squash(c)[0]
        return (h if hr is None else F.linear(h, hr)), c

    return update


def _lstm(w: _Weights, gates: Gates) -> _Cell:
    update, hh = _lstm_update(gates, w.hr), _sigmoids_first(w.hh).t()
    bias = _summed(w.b_ih, w.b_hh)

    def step(a: Tensor, state: State) -> State:
        return update(torch.addmm(a, state[0], hh), state[1])

    return _Cell(_sigmoids_first(w.ih), None if bias is None else _sigmoids_first(bias), step)


def _lstm_once(w: _Weights, gates: Gates) -> _Cell:
    """The same for few steps, which are not worth a copy of the weights."""
    update, hh = _lstm_update(gates, w.hr), w.hh.t()

    def step(a: Tensor, state: State) -> State:
        return update(_sigmoids_first(torch.addmm(a, state[0], hh), -1), state[1])

    return _Cell(w.ih, _summed(w.b_ih, w.b_hh), step)


def _gru(w: _Weights, gates: Gates) -> _Cell:
    evaluate, new = _evaluator([gates["r"], gates["z"]]), _evaluator([gates["n"]])
    sizes = [2 * w.hh.shape[1], w.hh.shape[1]]

    def step(a: Tensor, state: State) -> State:
        (h,) = state
        a_rz, a_n = a.split_with_sizes(sizes, -1)
        b_rz, b_n = F.linear(h, w.hh, w.b_hh).split_with_sizes(sizes, -1)
        r, z = evaluate(a_rz + b_rz)
        n = new(a_n + r * b_n)[0]
        return (n + z * (h - n),)

    return _Cell(w.ih, w.b_ih, step)


def _rnn(w: _Weights, gates: Gates) -> _Cell:
    evaluate, hh = _evaluator([gates["h"]]), w.hh.t()

    def step(a: Tensor, state: State) -> State:
        return (evaluate(torch.addmm(a, state[0], hh))[0],)

    return _Cell(w.ih, _summed(w.b_ih, w.b_hh), step)


def _scan(
    cell: _Cell, steps: Sequence[Tensor], start: State, reverse: bool
) -> tuple[list[Tensor], State]:
    """The outputs of all steps in the order of time, and the state each sequence ends in.

    Packed sequences are sorted by length: going forward the last rows end first, going back they
    join later.
    """
    outputs: list[Tensor] = []
    ended: list[State] = []
    state = tuple(s[: len(steps[-1 if reverse else 0])] for s in start)
    for a in reversed(steps) if reverse else steps:
        rows, had = a.shape[0], state[0].shape[0]
        if rows < had:
            ended.append(tuple(s[rows:] for s in state))
            state = tuple(s[:rows] for s in state)
        elif rows > had:
            joined = zip(state, start, strict=True)
            state = tuple(torch.cat([s, s0[had:rows]]) for s, s0 in joined)
        state = cell.step(a, state)
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(s) for s in zip(state, *reversed(ended), strict=True))
    return outputs[::-1] if reverse else outputs, state


def _layer(
    cell: _Cell, x: Tensor, sizes: list[int] | None, start: State, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over (T, B, I), or over packed rows with their batch sizes."""
    a = F.linear(x, cell.weight, cell.bias)
    steps = a.unbind(0) if sizes is None else a.split_with_sizes(sizes)
    outputs, end = _scan(cell, steps, start, reverse)
    return (torch.stack(outputs) if sizes is None else torch.cat(outputs)), end


def _direction(
    build: _Build,
    w: _Weights,
    gates: Gates,
    x: Tensor,
    sizes: list[int] | None,
    start: State,
    reverse: bool,
) -> tuple[Tensor, State]:
    """`_layer`, by kernels where they have that."""
    sites = _two_branched(gates) if build is _lstm and w.hr is None else None
    if sites is not None:
        rows = x if sizes is not None else x.reshape(-1, x.shape[-1])
        counts = [x.shape[1]] * len(x) if sizes is None else sizes
        tensors = (rows, w.ih, w.hh, _summed(w.b_ih, w.b_hh), *start)
        plain = partial(_lstm_rows, counts, reverse)
        found = kernels.lstm(tensors, sites, counts, reverse, plain)
        if found is not None:
            y, *end = found
            return (y if sizes is not None else y.view(*x.shape[:2], -1)), tuple(end)
    if build is _lstm and len(x if sizes is None else sizes) <= FEW:
        build = _lstm_once
    return _layer(build(w, gates), x, sizes, start, reverse)


def _two_branched(gates: Gates) -> list[Learned] | None:
    """The gates of an LSTM in order, with their numbers; None if one has not two branches."""
    found = []
    for t in (gates[site] for site in SITES["lstm"]):
        if isinstance(t, TG) and t.K == 2:
            found.append(Learned(t, sharpness(t), t.theta[0], t.s, t.c))
        elif isinstance(t, Learned):
            found.append(t)
        else:
            return None
    return found


def _lstm_rows(
    sizes: list[int], reverse: bool, tensors: Sequence[Any], sites: Sequence[Any]
) -> tuple[Tensor, ...]:
    """The same as kernels compute, with gates of these sites."""
    x, ih, hh, bias, *start = tensors
    w = _Weights(ih, hh, bias, None if bias is None else torch.zeros_like(bias))
    gates = dict(zip(SITES["lstm"], (Learned(*t) for t in sites), strict=True))
    y, end = _layer(_lstm(w, gates), x, sizes, tuple(start), reverse)
    return y, *end


def _by_layer(params: Sequence[Any], has_biases: bool, count: int) -> list[_Weights]:
    """The flat list of parameters for each layer and direction."""
    n = len(params) // count
    groups = [params[k : k + n] for k in range(0, len(params), n)]
    if not has_biases:
        groups = [(ih, hh, None, None, *hr) for ih, hh, *hr in groups]
    return [_Weights(*each) for each in groups]


def _cast(x: Tensor, *tensors: Tensor) -> list[Tensor]:
    """All in the type of autocast where it is on, as torch's fused ops do."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return [x, *tensors]
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) for t in (x, *tensors)]


def _check(states: State, batch: int, hh: Tensor) -> None:
    """Sizes of the state that would be cut or broadcast; torch checks only some before the op."""
    for s, size in zip(states, (hh.shape[1], hh.shape[0] // 4), strict=False):
        if tuple(s.shape[-2:]) != (batch, size):
            raise RuntimeError(
                f"Expected a hidden state of {batch} rows and {size} columns, got {list(s.shape)}"
            )


def _sequence(build: _Build, *args: Any, gates: Gates | Sequence[Gates]) -> State:
    """What `torch.lstm`, `torch.gru`, .. return for the same arguments, padded or packed.

    `gates` are those of every layer and direction, or one mapping for each.
    """
    if isinstance(args[3], bool):
        x, hx, *options, batch_first = args
        sizes, x = None, x.transpose(0, 1) if batch_first else x
    else:
        (x, sizes, hx, *options), batch_first = args, False
        sizes = sizes.tolist()
    params, has_biases, num_layers, dropout, train, bidirectional = options
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if not (len(x) if sizes is None else sizes):
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    if build is _lstm or x.device.type != "cpu":  # torch's other ops on a CPU promote instead
        x, *cast = _cast(x, *states, *params)
        states, params = tuple(cast[: len(states)]), cast[len(states) :]
    directions = 2 if bidirectional else 1
    weights = _by_layer(params, has_biases, num_layers * directions)
    _check(states, x.shape[1] if sizes is None else sizes[0], weights[0].hh)
    ends: list[State] = []
    for layer in range(num_layers):
        if layer and dropout:
            x = torch.dropout(x, dropout, train)
        outputs = []
        for reverse in (False, True)[:directions]:
            k = len(ends)
            own = gates if isinstance(gates, Mapping) else gates[k]
            start = tuple(s[k] for s in states)
            y, end = _direction(build, weights[k], own, x, sizes, start, reverse)
            outputs.append(y)
            ends.append(end)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    last = (torch.stack(s) for s in zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, *last


def _once(build: _Build, x: Tensor, hx: Any, *params: Tensor, gates: Gates) -> State | Tensor:
    """What `torch.lstm_cell`, `torch.gru_cell`, .. return for the same arguments."""
    states, w = (hx,) if isinstance(hx, Tensor) else tuple(hx), _Weights(*params)
    _check(states, len(x), w.hh)
    if x.device.type != "cpu":
        x, *cast = _cast(x, *states)
        states = tuple(cast)
    cell = build(w, gates)
    states = cell.step(F.linear(x, cell.weight, cell.bias), states)
    return states[0] if isinstance(hx, Tensor) else states


# Torch's fused ops and what evaluates their gates, for the same positional arguments.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: partial(_sequence, _lstm, gates=SITES["lstm"]),
    torch.gru: partial(_sequence, _gru, gates=SITES["gru"]),
    torch.rnn_tanh: partial(_sequence, _rnn, gates=SITES["rnn_tanh"]),
    torch.rnn_relu: partial(_sequence, _rnn, gates=SITES["rnn_relu"]),
    torch.lstm_cell: partial(_once, _lstm_once, gates=SITES["lstm"]),
    torch.gru_cell: partial(_once, _gru, gates=SITES["gru"]),
    torch.rnn_tanh_cell: partial(_once, _rnn, gates=SITES["rnn_tanh"]),
    torch.rnn_relu_cell: partial(_once, _rnn, gates=SITES["rnn_relu"]),
}
