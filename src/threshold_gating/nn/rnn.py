"""LSTM, GRU, RNN and their cells as torch's own, with every sigmoid, tanh and ReLU an instance.

The classes are torch's and run torch's own `forward`, so arguments, checks, errors and results are
the same. That `forward` ends in one fused op. It is called where the backend allows native and the
gates are torch's or fold into the weights (`threshold_gating.nn.rnn_fold`); otherwise a torch
function mode answers it by its entry in `FUNCTIONS`, which evaluates the gates
(`threshold_gating.nn.rnn_steps`). One exception: for a batch whose gates fold, `_run_batch` repeats
the few lines of that `forward`. Compare it with torch's when torch is updated.

An LSTM and a GRU can learn tau and theta of each gate and unit (`train=`). Behind an affine map
that pair adds no function, sigma(tau (w x + b - theta)) = sigma((tau w) x + tau (b - theta)): for
i, f, g, o and for r, z, n it changes only how training goes, and `fold` puts it into the weights
for good. What is new as a function is the pair of an LSTM's cell output alone.

Dynamo refuses `torch.nn.LSTM`, `GRU` and `RNN`, and so these, unless
`torch._dynamo.config.allow_rnn` is set; the cells and `FUNCTIONS` it takes as they are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from threshold_gating import kernels, taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn import rnn_fold
from threshold_gating.nn.activation import keeping_wide
from threshold_gating.nn.rnn_steps import FUNCTIONS, SITES, Gates
from threshold_gating.nn.unitwise import HELD_BY, Learned, Learning, before, learning, start, values

__all__ = ["FUNCTIONS", "GRU", "LSTM", "RNN", "SITES", "GRUCell", "LSTMCell", "RNNCell"]


Run = Callable[..., Any]
Ways = tuple[Run | None, Run, Tensor | None]  # as `kernels.either` takes them


class _Evaluated(TorchFunctionMode):
    """Inside, torch's fused op is answered by what evaluates `gates`."""

    def __init__(self, gates: Gates | Sequence[Gates]) -> None:
        super().__init__()
        self.gates = gates

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in FUNCTIONS:
            func = partial(FUNCTIONS[func], gates=self.gates)
        return func(*args, **(kwargs or {}))


class _Folded(TorchFunctionMode):
    """Inside, torch's fused op runs with the learned gates in its weights."""

    def __init__(self, pairs: rnn_fold.Pairs, held: Sequence[rnn_fold.Held]) -> None:
        super().__init__()
        self.pairs, self.held = pairs, held

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in rnn_fold.OPS:
            return rnn_fold.folded(func, args, self.pairs, self.held)
        return func(*args, **(kwargs or {}))


class _Gated(nn.Module):
    """What the classes add to torch's: `gates`, an instance for each of their `SITES`."""

    _kind: str
    gates: dict[str, TG]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gates = dict(self._standard())

    def _standard(self) -> dict[str, TG]:
        return SITES[self._kind]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch's; the gates are evaluated where the backend asks for it."""
        plain = super().forward

        def gated(input: Any, hx: Any) -> Any:
            with _Evaluated(self._now()):
                return plain(input, hx)

        return kernels.either(*self._native(plain, input, gated))(input, hx)

    def _native(self, plain: Run, input: Any, gated: Run) -> Ways:
        """What runs torch's own ops for the same result, if that is possible, or the gates."""
        return plain if self.exact else None, gated, None

    @property
    def exact(self) -> bool:
        """Whether every gate is torch's and none is learned."""
        return self.gates == self._standard()

    def _now(self) -> Gates | Sequence[Gates]:
        """The gates as they are: of all layers and directions, or of each."""
        return self.gates

    @classmethod
    def from_torch(cls, module: nn.Module) -> Self:
        """`module` with its gates as instances; parameters and hooks are shared, not copied.

        >>> plain = nn.LSTMCell(2, 3)
        >>> LSTMCell.from_torch(plain).weight_ih is plain.weight_ih
        True
        """
        plain = _torch_class(cls)
        if type(module) is not plain or "forward" in vars(module):
            own = " with its own forward" if type(module) is plain else ""
            raise TypeError(
                f"{cls.__name__}.from_torch: takes a plain torch.nn.{plain.__name__}; "
                f"got {type(module).__name__}{own}."
            )
        new: Self = _alias(module, cls)
        new.gates = dict(new._standard())
        return new

    def to_torch(self) -> Any:
        """The plain module of torch with the same parameters, the inverse of `from_torch`."""
        plain = _torch_class(type(self))
        if self.gates != self._standard():
            raise ValueError(
                f"{type(self).__name__}.to_torch: the gates of torch.nn.{plain.__name__} are "
                f"{_words(self._standard())}; these are {_words(self.gates)}."
            )
        new = _alias(self, plain)
        for name in ("gates", "learning"):
            vars(new).pop(name, None)
        return new

    def extra_repr(self) -> str:
        exact = ", exact" if self.exact else ""
        return f"{super().extra_repr()}, gates: {_words(self.gates)}{exact}"


def evaluated(layer: _Gated, gates: Gates | Sequence[Gates], input: Tensor, hx: Any) -> Any:
    """What a layer returns with these gates in place of its own."""
    with _Evaluated(gates):
        return _torch_class(type(layer)).forward(layer, input, hx)


def _torch_class(cls: type) -> type[Any]:
    return next(c for c in cls.__mro__ if c.__module__ == nn.LSTM.__module__)


def _alias(module: nn.Module, cls: type[Any]) -> Any:
    """A module of `cls` with the attributes of `module`: its tensors in containers of their own."""
    new = object.__new__(cls)
    for name, value in vars(module).items():
        own = isinstance(value, dict | list | set)
        vars(new)[name] = copy.copy(value) if own else value
    return new


def _words(gates: Mapping[str, TG]) -> str:
    counts = Counter(taxonomy.name_of(t) or repr(t) for t in gates.values())
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.items())


class _Learnable(_Gated, nn.RNNBase):
    """What LSTM and GRU add: gates that are learned, with values of their own for each unit.

    Args, beside torch's:
        train: "tau", "theta" or both; nothing is learned by default. For each layer and direction
            gate_rho_l0, gate_dtheta_l0, [sites, H]: tau = tau0 exp(rho), theta = theta0 + dtheta.
        family: "constant" keeps the branches; "free" learns them too, for comparison, as gate_s_l0
            and gate_c_l0, [sites, 2, H].
        sites: which gates are learned, rows in this order; all of them by default.
    """

    learning = Learning()

    def __init__(
        self,
        *args: Any,
        train: Iterable[str] = (),
        family: str = "constant",
        sites: Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._learn(train, family, sites)

    @classmethod
    def from_torch(
        cls,
        module: nn.Module,
        *,
        train: Iterable[str] = (),
        family: str = "constant",
        sites: Iterable[str] | None = None,
    ) -> Self:
        """`module` with its gates as instances; parameters and hooks are shared, not copied.

        What is learned, `train`, `family` and `sites`, is as for a new layer.
        """
        new = super().from_torch(module)
        new._learn(train, family, sites)
        return new

    def to_torch(self) -> Any:
        """The plain module of torch with the same parameters, the inverse of `from_torch`."""
        if self.learning.train:
            name, sites = type(self).__name__, ", ".join(self.learning.sites)
            raise ValueError(
                f"{name}.to_torch: the gates {sites} are learned; fold() puts those of i, f, g, o "
                "and r, z, n into the weights."
            )
        return super().to_torch()

    def _learn(self, train: Iterable[str], family: str, sites: Iterable[str] | None) -> None:
        self.learning = learning(type(self).__name__, tuple(self.gates), train, family, sites)
        like = getattr(self, self._flat_weights_names[0])
        dtype = torch.promote_types(like.dtype, torch.float32)
        for name, what in self._gate_names().items():
            self.register_parameter(name, nn.Parameter(self._start(what).to(like.device, dtype)))

    def _suffixes(self) -> list[str]:
        """_l0, _l0_reverse, _l1, .. in the order of torch's weights."""
        return [names[0].removeprefix("weight_ih") for names in self._all_weights]

    def _gate_names(self) -> dict[str, str]:
        """What each gate parameter holds, by its name."""
        train = self.learning.train
        return {f"gate_{HELD_BY[w]}{suffix}": w for suffix in self._suffixes() for w in train}

    def _start(self, what: str) -> Tensor:
        return start(what, [self.gates[site] for site in self.learning.sites], self.hidden_size)

    def reset_parameters(self) -> None:
        """Torch's start for the weights; learned gates go back to theirs."""
        super().reset_parameters()
        with torch.no_grad():
            for name, what in self._gate_names().items():
                getattr(self, name).copy_(self._start(what))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        gates = [self._parameters[name] for name in self._gate_names()]
        own = [t for p in gates if p is not None for t in (p, p.grad)]
        ids, wide = {id(t) for t in own}, keeping_wide(fn)
        super()._apply(lambda t: wide(t) if id(t) in ids else fn(t), recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def exact(self) -> bool:
        # not `super().exact`, which torch 2.11 cannot compile
        return not self.learning.train and self.gates == self._standard()

    def _now(self) -> Gates | Sequence[Gates]:
        if not self.learning.train:
            return self.gates
        return [{**self.gates, **self._learned(suffix)} for suffix in self._suffixes()]

    def _native(self, plain: Run, input: Any, gated: Run) -> Ways:
        train, family, sites = self.learning
        if not train or family == "free" or not rnn_fold.takes(input):
            return super()._native(plain, input, gated)
        pairs = rnn_fold.Pairs.of(self._standard(), self.gates, sites)
        if pairs is None:
            return None, gated, None

        def folded(input: Any, hx: Any) -> Any:
            held = [self._held(suffix) for suffix in self._suffixes()]
            if rnn_fold.is_batch(self.mode, input, hx):
                return self._run_batch(input, hx, pairs, held)
            with _Folded(pairs, held):
                return plain(input, hx)

        return folded, gated, rnn_fold.data(input) if pairs.cell else None

    def _run_batch(
        self, x: Tensor, hx: Any, pairs: rnn_fold.Pairs, held: Sequence[rnn_fold.Held]
    ) -> Any:
        """Torch's `forward` for a batch, without a mode: that answers every call in it, slowly."""
        self._update_flat_weights()
        hx = self._zeros(x) if hx is None else hx
        self.check_forward_args(x, hx, None)
        options = self.bias, self.num_layers, self.dropout, self.training, self.bidirectional
        args = (x, hx, self._flat_weights, *options, self.batch_first)
        ops: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru}
        y, *last = rnn_fold.folded(ops[self.mode], args, pairs, held)
        return y, tuple(last) if self.mode == "LSTM" else last[0]

    def _zeros(self, x: Tensor) -> Any:
        """The state that torch starts from."""
        shape = self.get_expected_hidden_size(x, None)
        h = torch.zeros(shape, dtype=x.dtype, device=x.device)
        if self.mode != "LSTM":
            return h
        shape = (*shape[:2], self.hidden_size)
        return h, torch.zeros(shape, dtype=x.dtype, device=x.device)

    def _held(self, suffix: str) -> dict[str, Tensor]:
        train = self.learning.train
        return {what: getattr(self, f"gate_{HELD_BY[what]}{suffix}") for what in train}

    def _learned(self, suffix: str) -> dict[str, Learned]:
        return values({site: self.gates[site] for site in self.learning.sites}, self._held(suffix))

    def learned_gates(self) -> dict[str, Learned]:
        """The learned gates as they are: i_l0, .., cell_l0_reverse, .. with values [H]."""
        each = [(suffix, self._learned(suffix)) for suffix in self._suffixes()]
        return {f"{site}{suffix}": t for suffix, now in each for site, t in now.items()}

    def fold(self) -> Self:
        """A copy that computes the same with the pairs of i, f, g, o (r, z, n) in its weights.

        A GRU is torch's own again (`to_torch`), and so is an LSTM that learned no cell output. One
        that did keeps that pair: torch's fused op has no place for it. Exact but for the rounding
        of the weights to their type.
        """
        _check_foldable(self)
        new = copy.deepcopy(self)
        kept = tuple(site for site in self.learning.sites if site == "cell")
        rows = [self.learning.sites.index(site) for site in kept]
        with torch.no_grad():
            for names, suffix in zip(self._all_weights, self._suffixes(), strict=True):
                _fold(new, names, self._learned(suffix))
        for name in self._gate_names():
            old = getattr(new, name)
            delattr(new, name)
            if kept:
                learned = nn.Parameter(old.detach()[rows].clone(), old.requires_grad)
                new.register_parameter(name, learned)
        new.learning = self.learning._replace(sites=kept) if kept else Learning()
        return new

    def extra_repr(self) -> str:
        train, family, sites = self.learning
        if not train:
            return super().extra_repr()
        words = [super().extra_repr(), f"train=({', '.join(train)})"]
        if family != "constant":
            words.append(f"family={family}")
        if sites != tuple(self.gates):
            words.append(f"sites=({', '.join(sites)})")
        gates = sum(getattr(self, name).numel() for name in self._gate_names())
        whole = sum(p.numel() for p in self.parameters())
        return ", ".join([*words, f"+{gates / (whole - gates):.2%} parameters"])


def _check_foldable(layer: _Learnable) -> None:
    name, (_, family, sites) = type(layer).__name__, layer.learning
    if family == "free":
        raise ValueError(
            f"{name}.fold: tau and theta fold into the weights, learned branches (family='free') "
            "do not."
        )
    for site in sites:
        if site != "cell" and any(layer.gates[site].s):
            raise ValueError(
                f"{name}.fold: the gate {site} is {_words({site: layer.gates[site]})}, whose "
                "branches carry its input on; only gates of the constant family fold."
            )
    own = [layer._parameters.get(weight) for weight in layer._flat_weights_names]
    if None in own or len(set(map(id, own))) < len(own):
        raise ValueError(
            f"{name}.fold: its weights are shared or computed (a parametrization, weight norm); "
            "fold needs parameters of its own to write to."
        )


def _fold(layer: _Learnable, names: Sequence[str], learned: Mapping[str, Learned]) -> None:
    """Write e and d of a' = e a + d into the weights of one layer and direction, called `names`."""
    units, device = layer.hidden_size, getattr(layer, names[0]).device
    blocks = [site for site in layer.gates if site != "cell"]  # the rows of torch's weights
    scale = torch.ones(len(blocks), units, dtype=torch.float64, device=device)
    shift = torch.zeros_like(scale)
    for site in set(learned) - {"cell"}:
        k = blocks.index(site)
        scale[k], shift[k] = before(learned[site], units)
    if not layer.bias and shift.any():
        raise ValueError(
            f"{type(layer).__name__}.fold: a threshold that has moved folds into the bias, and the "
            "layer has none; make it with bias=True, or with train='tau'."
        )
    for name in names:
        if name.startswith("weight_hr"):
            continue
        w = getattr(layer, name)
        new = w.double() * scale.view(-1, *(1,) * (w.dim() - 1))
        w.copy_(new + shift.view(-1) if name.startswith("bias_ih") else new)


class LSTM(_Learnable, nn.LSTM):
    """`torch.nn.LSTM` with i, f, g, o and the tanh of the cell state as instances, in `gates`.

    Learned (`train=("tau", "theta")`), the pairs of i, f, g, o add no function to what the weights
    can do: they change how training goes, and `fold` puts them into the weights. Only the pair of
    the cell output is new, which `sites="cell"` learns alone.

    >>> LSTM(2, 3)
    LSTM(2, 3, gates: sigmoid x3, tanh x2, exact)
    >>> LSTM(512, 512, train=("tau", "theta"))
    LSTM(512, 512, gates: sigmoid x3, tanh x2, train=(tau, theta), +0.24% parameters)
    """

    _kind = "lstm"


class GRU(_Learnable, nn.GRU):
    """`torch.nn.GRU` with r, z and n as instances, in `gates`.

    Learned (`train=("tau", "theta")`), their pairs add no function to what the weights can do: they
    change how training goes, and `fold` puts them into the weights.
    """

    _kind = "gru"


class RNN(_Gated, nn.RNN):
    """`torch.nn.RNN` with its tanh or ReLU as the instance "h", in `gates`."""

    def _standard(self) -> dict[str, TG]:
        return SITES[f"rnn_{self.nonlinearity}"]


class LSTMCell(_Gated, nn.LSTMCell):
    """`torch.nn.LSTMCell` with i, f, g, o and the tanh of the cell state as instances."""

    _kind = "lstm"


class GRUCell(_Gated, nn.GRUCell):
    """`torch.nn.GRUCell` with r, z and n as instances, in `gates`."""

    _kind = "gru"


class RNNCell(_Gated, nn.RNNCell):
    """`torch.nn.RNNCell` with its tanh or ReLU as the instance "h", in `gates`."""

    def _standard(self) -> dict[str, TG]:
        return SITES.get(f"rnn_{self.nonlinearity}", {})  # torch refuses others when called
