"""What each gate of a network sees in one training step, looked at while the step runs.

`Observation` puts hooks on the gates for one step and takes them away again: other steps run as if
it was not there. What a gate sees is judged on the spot, on a sample of its input, without a trace
in the network, the random numbers or the gradients.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion import sites
from threshold_gating.conversion.gate import PerCall
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.rnn import GRU, LSTM, evaluated
from threshold_gating.nn.rnn_steps import blend
from threshold_gating.training.health import Rule, Seen, look, scale_of
from threshold_gating.training.tiers import is_tiered

ELEMENTS = 1 << 18  # of an input that are looked at, about: whole samples are taken
_SEQUENCES, _STEPS = 32, 64  # of what a recurrent layer is given
_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RMSNorm)


class Observation:
    """Hooks on every gate of `model` for one step; `seen` has what they saw, by site.

    `unjudged` has the sites of which nothing can be said, with the reason. Compiled networks run
    without their graphs meanwhile, for a graph holds no hooks.
    """

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.rule = rule
        self.seen: dict[str, Seen] = {}
        self.unjudged: dict[str, str] = {}
        self._last: tuple[int, int] | None = None  # channels of the layer that ran last, their axis
        self._calls: Counter[nn.Module] = Counter()
        self._undo: list[Callable[[], Any]] = []
        inside = {layer.gate for layer in model.modules() if is_tiered(layer)}
        for path, module in model.named_modules():
            name = path or type(module).__name__.lower()
            if isinstance(module, Activation) and module not in inside:
                self._before(module, self._see_activation, name)
            elif is_tiered(module):
                self._before(module, self._see_tier, name)
            elif isinstance(module, LSTM | GRU) and module.learning.train:
                self._before(module, self._see_recurrent, name)
            elif isinstance(module, PerCall):
                self._before(module, self._see_next_call, name)
            elif "tg_sites" in vars(module):
                self._answer(module, name)
            if isinstance(module, (*_FIRST, *_LAST)):
                self._before(module, self._see_layer, name)
        # only where something may be compiled: the import alone takes seconds
        if "torch._dynamo" in sys.modules:
            stance = torch.compiler.set_stance("force_eager")
            self._undo.append(lambda: stance.__exit__(None, None, None))

    def close(self) -> None:
        """Take the hooks away."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _before(self, module: nn.Module, see: Callable[..., None], name: str) -> None:
        def looking(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self._spared(name):
                see(name, module, args, kwargs)

        hook = _Inert(looking)
        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    @contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        """A run goes on where looking at it fails, and the site is named as not judged."""
        try:
            yield
        except Exception as error:
            first = str(error).partition("\n")[0]
            self.unjudged[name] = f"looking at it failed, {type(error).__name__}: {first}"

    def _answer(self, owner: nn.Module, name: str) -> None:
        """Let the calls of a converted module be told of; a watch that is on stays."""
        if "tg_watch" in vars(owner):
            return

        def see(kind: str, f: Callable[..., Any], args: Any, kwargs: Any, site: Any) -> Any:
            with self._spared(f"{name}:{kind}"):
                if site is not None:
                    self._see_call(name, kind, f, args, kwargs, site)
            return f(*args, **kwargs)

        vars(owner)["tg_watch"] = _Inert(see)
        self._undo.append(lambda: vars(owner).pop("tg_watch", None))

    def _see_layer(self, name: str, layer: Any, args: Any, kwargs: Any) -> None:
        axis = -1 if isinstance(layer, _LAST) else 1
        sizes = ("out_features", "out_channels", "num_features", "num_channels", "embedding_dim")
        found = [getattr(layer, size) for size in sizes if hasattr(layer, size)]
        found += list(getattr(layer, "normalized_shape", ()))[-1:]
        if found:
            self._last = found[0], axis

    def _see_activation(self, name: str, act: Activation, args: Any, kwargs: Any) -> None:
        x = (*args, *kwargs.values())[0]
        axis = None if act.share in ("net", "layer") else act.axis
        if axis is not None and len(act.group) > 1:  # gates per position: the first axis of them
            axis = axis if axis >= 0 else axis + x.dim()
        self._see(name, act.init, lambda z: act.forward(z.clone() if act.inplace else z), x, axis)

    def _see_next_call(self, name: str, module: PerCall, args: Any, kwargs: Any) -> None:
        """An activation that is used several times in a run, with a gate for each."""
        gates, self._calls[module] = module.calls, self._calls[module] + 1
        k = (self._calls[module] - 1) % len(gates)
        if isinstance(act := gates[k], Activation):
            self._see_activation(f"{name}#{k}" if k else name, act, args, kwargs)

    def _see_call(
        self, owner: str, kind: str, f: Callable[..., Any], args: Any, kwargs: Any, site: Any
    ) -> None:
        name = site.name if "#" in site.name else f"{owner}:{kind}"  # one as it comes has no number
        if site.t is None or kind not in sites.KINDS:
            self.unjudged[name] = f"{kind} is not one element-wise function"
            return
        x = sites.KINDS[kind].read(*args, **kwargs).x

        def again(z: Tensor) -> Any:
            own = z.clone()  # which the call may overwrite
            given = [own if a is x else a for a in args]
            return f(*given, **{k: own if v is x else v for k, v in kwargs.items()})

        learns = site.learns
        axis = learns.axis if learns is not None and learns.share not in ("net", "layer") else None
        self._see(name, site.t, again, x, axis)

    def _see(self, name: str, t: TG, f: Any, x: Any, axis: int | None) -> None:
        """An element-wise gate; where its parameters do not say it, the layer before says which
        axis the channels are on."""
        if name in self.seen or not torch.is_grad_enabled():
            return
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel() or not x.dim():
            self.unjudged[name] = "its input is no tensor of numbers with an axis"
            return
        axis = self._axis(x) if axis is None else axis
        axis = axis % x.dim()
        self.seen[name] = look(f, _sample(x, axis), axis, scale_of(t), self.rule)
        self.unjudged.pop(name, None)

    def _axis(self, x: Tensor) -> int:
        if self._last is not None:
            channels, axis = self._last
            if -x.dim() <= axis < x.dim() and x.shape[axis] == channels:
                return axis
        return -1 if x.dim() in (1, 3) else 1

    def _see_tier(self, name: str, layer: Any, args: Any, kwargs: Any) -> None:
        if name in self.seen or not torch.is_grad_enabled():
            return
        x = (*args, *kwargs.values())[0]
        axis = x.dim() - 1 if isinstance(layer, nn.Linear) else x.dim() - 1 - len(layer.stride)
        sample = _sample(x, axis) if axis else x
        self.seen[name] = look(
            layer.forward, sample, axis, _of_weights(layer), self.rule, output_of_weights=True
        )

    def _see_recurrent(self, name: str, layer: Any, args: Any, kwargs: Any) -> None:
        if name in self.unjudged or any(site.startswith(f"{name}.") for site in self.seen):
            return
        if not torch.is_grad_enabled():
            return
        x = (*args, *kwargs.values())[0]
        if not isinstance(x, Tensor):
            self.unjudged[name] = "it is given packed sequences"
            return
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        heard = _heard(layer, x, state)
        for site, t in layer.learned_gates().items():
            values = torch.cat(heard[site]).float()
            f = functools.partial(blend, t)
            self.seen[f"{name}.{site}"] = look(f, values, 1, scale_of(t.start), self.rule)


@contextmanager
def observed(model: nn.Module, rule: Rule | None = None) -> Iterator[Observation]:
    """An observation of what runs inside the block."""
    observation = Observation(model, rule or Rule())
    try:
        yield observation
    finally:
        observation.close()


class _Inert:
    """A hook that copies and pickles of a network do not take along: there it does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        if self.call is not None:
            return self.call(*args)
        # of a call of torch, which comes with its function, the call itself
        return args[1](*args[2], **args[3]) if len(args) == 5 else None

    def __deepcopy__(self, memo: Any) -> _Inert:
        return _Inert()

    def __reduce__(self) -> Any:
        return _Inert, ()


def _sample(x: Tensor, axis: int) -> Tensor:
    """Whole samples of x, spaced evenly, about `ELEMENTS` of its values; x if it has no batch."""
    if axis == 0 or x.dim() < 2:
        return x
    keep = max(1, min(len(x), ELEMENTS // max(1, x[0].numel())))
    every = torch.linspace(0, len(x) - 1, keep, device=x.device).round().long()
    return x if keep == len(x) else x.index_select(0, every)


def _heard(layer: Any, x: Tensor, state: Any) -> dict[str, list[Tensor]]:
    """What reaches each gate of a recurrent layer, step by step: the first of a few sequences."""
    heard: dict[str, list[Tensor]] = {}

    def listening(site: str, t: Any) -> Callable[[Tensor], Tensor]:
        own = heard.setdefault(site, [])

        def gate(a: Tensor) -> Tensor:
            own.append(a.detach())
            return blend(t, a)

        return gate

    if x.dim() == 3:
        batch = slice(_SEQUENCES)
        x = x[batch, :_STEPS] if layer.batch_first else x[:_STEPS, batch]
        if state is not None:
            one = isinstance(state, Tensor)
            state = state[:, batch] if one else tuple(s[:, batch] for s in state)
    else:
        x = x[:_STEPS]
    gates = [
        {site: listening(f"{site}{suffix}", t) for site, t in own.items()}
        for suffix, own in zip(layer._suffixes(), layer._now(), strict=True)
    ]
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
        evaluated(layer, gates, x.detach(), state)
    return heard


def _of_weights(layer: Any) -> Tensor:
    """The slope of each input channel of a tiered layer that is not flat: its largest weights."""
    groups = getattr(layer, "groups", 1)

    def norms(w: Tensor) -> Tensor:  # (O, K, I / groups, *kernel) -> [I]
        each = w.detach().flatten(3) if w.dim() > 3 else w.detach().unsqueeze(-1)
        by_group = each.view(groups, -1, *each.shape[1:])
        found: Tensor = by_group.square().sum((1, 4)).amax(1).sqrt().flatten()
        return found

    whole = norms(layer.weight)
    return whole if layer.const is None else whole + norms(layer.const)
