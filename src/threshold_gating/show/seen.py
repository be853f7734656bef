"""What each function of a network gets in one run, and the gates that stand for it.

A recurrent layer is one call of torch with several functions inside, and attention is a gate for
each weight (Eq. 11). Both are opened: the library's own code for them runs once more, with gates
that take note of what they are given. Sites are watched by `conversion.watch`, and named as there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating import kernels, taxonomy
from threshold_gating.conversion import sites
from threshold_gating.conversion.audit import described, gate_of, is_gate
from threshold_gating.conversion.learn import ATTENTION, RECURRENT
from threshold_gating.conversion.learned_calls import LEARNED, step_of
from threshold_gating.conversion.plan import module_sites, run, whole
from threshold_gating.conversion.site_error import floats
from threshold_gating.conversion.watch import Run, Visit, Watch, evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.logits import AttentionCall, attention_logits
from threshold_gating.nn import attention, rnn, rnn_steps
from threshold_gating.nn.activation import Activation
from threshold_gating.primitive import wide
from threshold_gating.show.functions import Function, Gate, of_call, of_module, of_step
from threshold_gating.show.values import KEPT, Values

_OFF = -1e30  # the logit of a key that takes no part, at most
# Farther off a weight is 0 or 1 in any type: exp(-746) is 0 in float64. Masks of -10000 are there.
_DECIDED = 746.0

_PARTS = {
    **{"i": "input gate i", "f": "forget gate f", "g": "candidate g", "o": "output gate o"},
    **{"cell": "output of the cell", "r": "reset gate r", "z": "update gate z", "n": "candidate n"},
    "h": "the new state",
}


@dataclass(frozen=True)
class Seen:
    """A function at a site: what the original computes there, its gates, and the values it got.

    `part` names it where a site has several ("i", or "i_1" in the second layer). `f` is None where
    the network had these gates already. `gates` has the different ones of its channels; it is empty
    where no single gate is it. `note` says what x is, where that is no input of the site.
    """

    site: str
    part: str
    kind: str
    f: Function | None
    gates: tuple[TG, ...]
    exact: bool | None
    values: Values
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.site}/{self.part}" if self.part else self.site


def look(model: nn.Module, inputs: Any, *, values: int = KEPT) -> list[Seen]:
    """Run a network, converted or not, with its gates evaluated, and note what each function gets.

    They come in the order in which they ran, then those that these inputs do not reach.

    Args:
        model: runs once, in evaluation mode, and stays as it was.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        values: how many values of each function to keep.
    """
    notes = _Notes(model, values)
    with kernels.use("reference"), evaluating(model), notes.watch:
        run(model, fresh(inputs))
    return [*notes.found.values(), *_idle(model, {seen.site for seen in notes.found.values()})]


class _Notes:
    """While a network runs under `watch`, takes note of what its functions get."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.size = size
        self.found: dict[tuple[str, str], Seen] = {}
        self.modules = module_sites(model)
        self.bent = whole(self.modules)
        self.watch = Watch(model, self._see, self._kind, answered=True)

    def _kind(self, run: Run) -> str | None:
        return described(_evaluated(run)).kind if is_gate(run.module) else self.bent(run)

    def note(
        self, site: str, gate: Callable[[], Gate], x: Tensor, part: str = "", apart: int = 0
    ) -> None:
        if (site, part) not in self.found:
            at = gate()
            new = Values(self.size, zlib.crc32(f"{site}/{part}".encode(errors="replace")))
            fields = (at.kind, at.f, at.gates, at.exact, new, at.note)
            self.found[site, part] = Seen(site, part, *fields)
        self.found[site, part].values.add(x, apart)

    def _see(self, visit: Visit) -> None:
        module = _evaluated(visit.run)
        if visit.is_call and visit.kind in ATTENTION:
            self._attention(visit)
        elif visit.is_call and visit.kind in RECURRENT:
            self._recurrent(visit)
        elif not visit.is_call and isinstance(module, rnn._Gated):
            self._layer(visit, module)
        elif visit.is_call:
            x, gate = of_call(visit)
            self.note(visit.name, gate, x)
        else:
            x = next(iter(floats((visit.args, visit.kwargs))), torch.empty(0))
            self.note(visit.name, partial(self._module, module, visit), x)

    def _module(self, module: nn.Module, visit: Visit) -> Gate:
        if is_gate(module):
            return of_module(module, visit.run.module)
        site = next(iter(self.modules.get(module, ())), None)
        if site is None or site.t is None:
            return Gate(visit.kind, visit.f)
        return Gate(visit.kind, visit.f, (site.t,), site.exact)

    # What is several functions, or one for each weight

    def _recurrent(self, visit: Visit) -> None:
        step, site = step_of(visit.kind, visit.args), visit.gate
        now: Sequence[rnn_steps.Gates] = [dict(step.gates)] * step.layers
        if site is not None and site.learns is not None:
            now = site.learns.now(visit.run.module, site.prefix, step.units)
        gates = self._noting(visit.name, now)
        function = rnn.FUNCTIONS[getattr(torch, visit.kind)]
        function(*visit.args, gates=gates[0] if visit.kind.endswith("_cell") else gates)

    def _layer(self, visit: Visit, layer: rnn._Gated) -> None:
        def given(input: Any, hx: Any = None) -> tuple[Any, Any]:
            return input, hx

        now = layer._now()
        # one mapping for all layers and directions, or one for each
        gates = self._noting(visit.name, now if isinstance(now, list) else [now])
        of_all = gates if isinstance(now, list) else gates[0]
        rnn.evaluated(layer, of_all, *given(*visit.args, **visit.kwargs))

    def _noting(self, name: str, now: Sequence[Any]) -> list[dict[str, Function]]:
        """Gates of each layer and direction that take note of what they get."""

        def evaluate(key: str, k: int, t: Any, x: Tensor) -> Tensor:
            several = len(now) > 1
            words = f"{_PARTS[key]}, {k + 1} of {len(now)} layers and directions"
            gate = partial(of_step, t, words if several else _PARTS[key])
            self.note(name, gate, x, f"{key}_{k}" if several else key)
            return rnn_steps.blend(t, x)

        return [
            {key: partial(evaluate, key, k, t) for key, t in each.items()}
            for k, each in enumerate(now)
        ]

    def _attention(self, visit: Visit) -> None:
        """The gate of every weight over how far its logit lies above the threshold (Eq. 11)."""
        site, owner = visit.gate, visit.run.module
        learns = None if site is None else site.learns
        note = partial(self._above, visit.name, learns)

        def softmax(*args: Any, **kwargs: Any) -> Any:
            note(*_logits(*args, **kwargs))
            return sites.WHOLE["softmax"](*args, **kwargs)

        def attend(*args: Any, tau: Tensor | None = None, **kwargs: Any) -> Tensor:
            q, k, _, mask, _, causal, scale, gqa = AttentionCall(*args, **kwargs)
            note(attention_logits(q, k, mask, causal, scale, gqa, tau), -1, q.dtype)
            return attention.scaled_dot_product_attention(*args, **kwargs)

        if visit.kind == "multi_head_attention_forward":
            opened = sites.multi_head(softmax, attend)
            if learns is not None:
                opened = partial(LEARNED[visit.kind], learns, owner, site.prefix, inside=opened)
            opened(*visit.args, **visit.kwargs)
            return
        tau = None if learns is None else learns.tau(owner, site.prefix, None)
        if visit.kind == "scaled_dot_product_attention":
            heads = floats((visit.args, visit.kwargs))[0].shape[-3:-2] or (1,)
            attend(*visit.args, tau=None if tau is None else tau.expand(heads), **visit.kwargs)
        else:
            z, axis, dtype = _logits(*visit.args, **visit.kwargs)
            z = -z if visit.kind == "softmin" else z
            if tau is not None:
                z = z * (tau if tau.numel() == 1 else tau.view(-1, 1, 1))  # one for each head
            note(z, axis, dtype)

    def _above(self, name: str, learns: Any, z: Tensor, axis: int, dtype: torch.dtype) -> None:
        z = wide(z).detach()
        theta = attention.thresholds(z, axis)
        off = max(_OFF, torch.finfo(dtype).min / 2)
        above = z - theta
        decided = z.isfinite() & theta.isfinite() & (above.abs() > _DECIDED)
        apart = (z <= off) | (theta <= off) | decided
        words = "x is how far a logit lies above all others together; a gate for each weight"
        if learns is not None:
            words += "; a learned temperature is in x"
        exact = learns is None
        gate = Gate("softmax", torch.sigmoid, (taxonomy.TAXONOMY["sigmoid"],), exact, words)
        self.note(name, lambda: gate, above[~apart], apart=int(apart.sum()))


def _logits(
    input: Tensor, dim: int | None = None, *rest: Any, dtype: Any = None, **more: Any
) -> tuple[Tensor, int, torch.dtype]:
    """What a call of softmax is given: its logits, their axis, and the type that they come in."""
    axis, dtype = sites.axis_and_type(input, dim, rest, dtype)
    return input if dtype is None else input.to(dtype), axis, input.dtype


def _evaluated(run: Run) -> nn.Module:
    """What a call of a module evaluates: in a converted network a gate for this one alone."""
    return gate_of(run.module, run.index) if is_gate(run.module) else run.module


def _idle(model: nn.Module, seen: set[str]) -> Iterator[Seen]:
    """Sites of a converted network that the run did not reach."""
    gated = [module for module in model.modules() if is_gate(module)]
    inside = {part for layer in gated for part in layer.modules() if part is not layer}
    for name, module in model.named_modules():
        gates: dict[str, Gate] = {}
        if isinstance(module, Activation) and module not in inside:
            gates[name] = of_module(module, module)
        for site in (vars(module).get("tg_sites") or {}).values():
            if site is not None:
                t = () if site.t is None else (site.t,)
                gates[site.name] = Gate(site.kind, None, t, site.exact)
        for at, gate in gates.items():
            if at not in seen:
                yield Seen(at, "", gate.kind, gate.f, gate.gates, gate.exact, Values())
