"""One run of a network, looked at: what reaches each gate, and the thresholds of each head."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import sites
from threshold_gating.conversion.audit import described, gate_of, is_gate
from threshold_gating.conversion.channels import Channels
from threshold_gating.conversion.checkpoint.save_load import inner
from threshold_gating.conversion.gate import PerCall
from threshold_gating.conversion.learn import ATTENTION, RECURRENT
from threshold_gating.conversion.learned_calls import step_of
from threshold_gating.conversion.watch import Run, Told, Visit, Watch, evaluating, fresh
from threshold_gating.insight.attention import HeadTally, logits_of
from threshold_gating.insight.gates import (
    DATA,
    behind_weights,
    frozen,
    glu,
    name_of,
    no_function,
    prelu,
    recurrent,
    suffixes,
)
from threshold_gating.insight.records import mended
from threshold_gating.insight.tally import Tally
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.rnn_steps import blend
from threshold_gating.training.health import Rule
from threshold_gating.training.telemetry import LearnedSite
from threshold_gating.training.tiers import is_tiered

_ALONE = torch._C.DisableTorchFunction  # an owner around us would answer our own arithmetic
_EMPTY = "it was given no values"
_FIXED = "its thresholds are numbers of its own, and not those of softmax"


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """What is compiled in a network is as it was written, and runs so: a graph shows no gate."""
    parts = [
        (module, name, part)
        for module in model.modules()
        for name, part in module._modules.items()
        if part is not None and "_orig_mod" in part._modules
    ]
    compiles = "torch._dynamo" in sys.modules  # to import it takes long
    try:
        for module, name, part in parts:
            module._modules[name] = inner(part)
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield
    finally:
        for module, name, part in parts:
            module._modules[name] = part


class Look:
    """Runs a network once, as in evaluation and by its gates, and tallies what reaches them.

    `tallies` and `heads` are in the order of the run. `unread` has the sites of which a run shows
    nothing, with the reason, `left` the nonlinear calls that no gate answers.
    """

    def __init__(self, model: nn.Module, gates: Mapping[str, LearnedSite], rule: Rule) -> None:
        self.model, self.rule = model, rule
        self.gates = dict(gates)
        self.weighted = behind_weights(model)
        self.names = {m: name_of(path, m) for path, m in model.named_modules()}
        self.channels = Channels(model)
        self.tallies: dict[str, Tally] = {}
        self.heads: dict[str, HeadTally] = {}
        self.unread: dict[str, str] = {}
        self.left: dict[str, None] = {}

    def run(self, inputs: Any, named: Any) -> None:
        """Run the network; its state and the inputs stay as they are."""
        given, keywords = fresh((inputs, named))
        watch = Watch(self.model, self._see, self._whole, answered=True)
        with kernels.use("reference"), evaluating(self.model), self.channels, watch:
            self.model(*given, **keywords)

    def _whole(self, run: Run) -> str | None:
        gate = gate_of(run.module, run.index)
        return described(gate).kind if is_gate(run.module) and is_gate(gate) else None

    def _see(self, visit: Visit) -> Told | None:
        layer: Any = visit.run.module
        if not visit.is_call and isinstance(layer, rnn._Gated):
            self._see_layer(self.names[layer], layer, *visit.args, **visit.kwargs)
            return None
        with _ALONE():
            return self._see_call(visit) if visit.is_call else self._see_module(visit)

    # Modules

    def _see_module(self, visit: Visit) -> Told | None:
        module: Any = visit.run.module
        name, gate = self.names[module], gate_of(module, visit.run.index)
        x = next(iter((*visit.args, *visit.kwargs.values())), None)
        if is_tiered(module):
            self._see_tier(self.names[module.gate], module, x)
            return None
        if isinstance(gate, Activation):
            k = visit.run.index  # of a gate that is used several times each use is a site
            k = k % len(module.calls) if isinstance(module, PerCall) else k
            at = f"{name}#{k}" if k else name
            self.gates.setdefault(at, self.gates[name]._replace(name=at))
            return self._add(at, x)
        self.unread[name] = f"{type(module).__name__} is not one element-wise gate"
        return None

    def _see_tier(self, name: str, layer: Any, x: Any) -> None:
        if layer.share in ("synapse", "channel_pair"):
            self.unread[name] = f"each {layer.share} has a gate: no channel has values of its own"
            return
        axis = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.stride)
        self.gates[name] = self.gates[name]._replace(axis=axis)
        self._add(name, x)

    def _see_layer(self, name: str, layer: Any, x: Any, state: Any = None) -> None:
        """What reaches the gates of a recurrent module, which is run again to hear it."""
        now = layer._now()
        each = [now] * len(suffixes(layer)) if isinstance(now, Mapping) else now
        marked = zip(suffixes(layer), each, strict=True)
        gates = [self._listening(own, f"{name}.{{}}{suffix}") for suffix, own in marked]
        rnn.evaluated(layer, gates if isinstance(layer, nn.RNNBase) else gates[0], x, state)

    def _listening(
        self, gates: Mapping[str, Any], site: str
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """The gates of one step that tally what they are given; {} in `site` is that of a gate."""

        def heard(site: str, t: Any) -> Callable[[Tensor], Tensor]:
            def gate(a: Tensor) -> Tensor:
                with _ALONE():
                    self._tally(site, a.movedim(-1, 0).flatten(1), -1, False)
                return blend(t, a)

            return gate

        return {gate: heard(site.format(gate), t) for gate, t in gates.items()}

    # Calls

    def _see_call(self, visit: Visit) -> Told | None:
        site, kind = visit.gate, visit.kind
        if site is None:
            self.left[visit.name] = None
            return None
        # one that is answered as it comes has no number
        name = site.name if "#" in site.name else visit.name
        if kind in ATTENTION:
            self._see_attention(name, visit)
        elif kind in RECURRENT:
            self._see_recurrent(name, visit)
        elif kind == "glu":
            self.gates.setdefault(name, glu(name))
            self._add(name, sites.halves(*visit.args, **visit.kwargs)[1])
        elif kind == "prelu":
            return self._see_prelu(name, *visit.args, **visit.kwargs)
        elif site.t is not None and kind in sites.KINDS:
            self.gates.setdefault(name, frozen(name, site.t))
            return self._add(name, visit.x)
        else:
            self.unread[name] = f"{kind}: {DATA}"
        return None

    def _see_prelu(self, name: str, input: Tensor, weight: Tensor) -> Told | None:
        self.gates.setdefault(name, prelu(name, weight))
        return self._add(name, input)

    def _see_recurrent(self, name: str, visit: Visit) -> None:
        step = step_of(visit.kind, visit.args)
        for site in recurrent(name, visit.kind, step.layers):
            self.gates.setdefault(site.name, site)
        learns = visit.gate.learns
        owner = visit.run.module
        now: Sequence[Mapping[str, Any]] = [dict(step.gates)] * step.layers
        if learns is not None:
            now = learns.now(owner, visit.gate.prefix, step.units)
        gates = [self._listening(own, f"{name}.{{}}_{k}") for k, own in enumerate(now)]
        function = rnn.FUNCTIONS[getattr(torch, visit.kind)]
        function(*visit.args, gates=gates[0] if visit.kind.endswith("_cell") else gates)

    def _see_attention(self, name: str, visit: Visit) -> None:
        learned = self.gates.get(name)
        tau = None if learned is None else learned.tau[0]
        is_fixed = visit.gate.op is not None  # as `conversion.fixed_thresholds` makes it
        given = visit.kind, visit.args, visit.kwargs, tau
        found = _FIXED if is_fixed else logits_of(*given)
        if isinstance(found, str):
            self.unread[name] = f"{visit.kind}: {found}"
            return
        heads, z = found
        tally = self.heads.setdefault(name, HeadTally(heads, tau))
        if tally.heads == heads:
            tally.add(z)
        else:
            self.unread[name] = f"called with {tally.heads} and with {heads} heads; the first read"

    # What reached a gate

    def _add(self, name: str, x: Any) -> Told | None:
        """Values of an element-wise gate; what is told its output says where the channels are."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            self.unread[name] = "its input is not a tensor of real numbers"
            return None
        site = self.gates[name]
        axis, guessed = self._axis(site, x)
        along = len(site.group) if site.groups > 1 else 1
        z = x.movedim(tuple(range(axis, axis + along)), tuple(range(along))) if x.dim() else x
        rows = site.groups if site.groups > 1 else x.shape[axis] if x.dim() else 1
        if x.numel():
            self._tally(name, z.reshape(rows, -1), axis, guessed)
        elif name not in self.tallies:
            self.unread[name] = _EMPTY
        return None if guessed else self._noted(axis)

    def _noted(self, axis: int) -> Told:
        def note(output: Any) -> None:
            if isinstance(output, Tensor):
                self.channels.note(output, axis)

        return note

    def _axis(self, site: LearnedSite, x: Tensor) -> tuple[int, bool]:
        """Where the channels are in the input, and whether that is no more than a guess."""
        if site.groups > 1 or site.name in self.weighted:
            return site.axis % max(1, x.dim()), False
        found = self.channels.axis(x)
        if found is not None and 0 <= found < x.dim():
            return found, False
        return (x.dim() - 1 if x.dim() in (1, 3) else min(1, x.dim())), True

    def _tally(self, name: str, z: Tensor, axis: int, guessed: bool) -> None:
        tally = self.tallies.get(name)
        if tally is None:
            self.unread.pop(name, None)  # an empty call before
            whole = mended(self.gates[name])
            made = Tally(whole, self.rule, function=not no_function(name, self.weighted))
            tally = self.tallies[name] = made
            tally.axis, tally.guessed = axis, guessed
        if tally.channels not in (None, len(z)):
            self.unread[name] = (
                f"called with {tally.channels} and with {len(z)} channels; the first are read"
            )
            return
        tally.add(z)

    def order(self) -> Iterator[str]:
        """The names of the gates, first those that ran, in order, then the others."""
        yield from self.tallies
        yield from (name for name in self.gates if name not in self.tallies)
