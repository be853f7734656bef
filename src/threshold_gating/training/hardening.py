"""`anneal_` and `harden`: soft gates sharpened while training, then made comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion import sites
from threshold_gating.conversion.audit import gate_of, is_gate
from threshold_gating.conversion.gate import PerCall, successor
from threshold_gating.conversion.learn import learned_gates
from threshold_gating.conversion.plan import ModuleSites, module_sites, run, whole
from threshold_gating.conversion.watch import Run, Told, Visit, Watch, copied, evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.nn import rnn
from threshold_gating.nn.activation import Activation
from threshold_gating.training.closeness import difference
from threshold_gating.training.graph import hooked_as, put
from threshold_gating.training.tiers import is_tiered


@dataclass(frozen=True)
class Hardening:
    """A network with hard gates, and what that cost.

    `sites` has for each one the RMS change of its activation over the inputs it saw (tiered layers:
    of their output), relative to the RMS before; `output` is max|d| / max|y| of the network.
    Both are empty without inputs. `kept` says what stayed soft and why: gates, and activations that
    are torch's own. Sites are named as by `tg.audit`.
    """

    model: nn.Module
    sites: dict[str, float]
    output: float | None
    kept: dict[str, str]

    def __str__(self) -> str:
        rows = [f"{name or '(network)'}: {cost:.2e}" for name, cost in self.sites.items()]
        rows += [f"{name or '(network)'} kept soft: {why}" for name, why in self.kept.items()]
        whole = "not measured" if self.output is None else f"{self.output:.2e}"
        return "\n".join([*rows, f"output, max|d| / max|y|: {whole}"])


@torch.no_grad()
def anneal_(model: nn.Module, factor: float) -> None:
    """Multiply the sharpness of every activation that learns it by `factor`, in place.

    Called every few steps with a factor above 1, it brings the gates near hard ones, for which
    `harden` then costs little. Gates that `harden` leaves soft, of recurrent layers and attention,
    stay as they are.
    """
    if not factor > 0:
        raise ValueError(f"anneal_: factor must be positive; got {factor}.")
    for _, act in learned_gates(model):
        if "tau" in act.learned:
            act.tau0.mul_(factor)


def harden(model: nn.Module, *, inputs: Any = None) -> Hardening:
    """A copy of a network whose gates are hard: tau = inf, thresholds and branches as they are.

    Args:
        model: a network with soft gates, learned or not; it is left as it was.
        inputs: a tensor or a tuple of arguments; with them the cost is measured, and calls of torch
            in a forward (`F.gelu`), which stay as they are, are seen and named in `kept`.
    """
    new = copied(model)
    plain = module_sites(model)
    kept = dict(_out_of_reach(model, plain, seen=inputs is not None))
    done: list[str] = []
    for name, module in list(new.named_modules()):
        gates = module.calls if isinstance(module, PerCall) else [module]
        for k, gate in enumerate(gates):
            if not isinstance(gate, Activation) or gate.init.hard:
                continue
            at = f"{name}#{k}" if k else name
            if (why := _obstacle(gate)) is not None:
                kept[at] = why
                continue
            done.append(at)
            if isinstance(module, PerCall):
                module.put(k, _hard(gate))
            else:
                new = put(new, module, _hard(gate))
    for module in new.modules():
        if is_tiered(module):
            layer: Any = module
            if layer.gate.init.hard:
                layer.init = replace(layer.init, tau=math.inf, owner=None)
    costs = {}
    if inputs is not None:
        seen = _Seen(model, new, done, plain)
        with evaluating(model), seen.watch:
            run(model, fresh(inputs))
        costs, kept = seen.costs, kept | seen.kept
    if not done:
        reasons = "".join(f" {name or '(network)'}: {why}." for name, why in kept.items())
        raise ValueError(f"harden: {type(model).__name__} has no soft gates to harden.{reasons}")
    output = None if inputs is None else difference(model, new, inputs)
    return Hardening(new, costs, output, kept)


_CALL = "it is a call in a forward, not a module"
_HARD = {"prelu", "maximum", "minimum", "rnn_relu", "rnn_relu_cell"}


def _is_soft(kind: str, t: TG | None) -> bool:
    """Whether a site has soft gates; without an instance its kind decides."""
    return not t.hard if t is not None else kind not in _HARD and not kind.endswith("_by_tensors")


def _out_of_reach(model: nn.Module, plain: ModuleSites, seen: bool) -> Iterator[tuple[str, str]]:
    """What is soft and no `Activation`: recurrent layers, calls, modules of torch."""
    for name, module in model.named_modules():
        plan = vars(module).get("tg_sites", {})
        if plan is None and not seen:
            yield name, "its calls are answered as they come; give inputs to see them"
        for call, site in (plan or {}).items():
            if site is not None and _is_soft(site.kind, site.t):
                yield f"{name}:{call}", _CALL
        if isinstance(module, rnn._Gated) and not all(t.hard for t in module.gates.values()):
            yield name, "it is recurrent, and its gates are within its step"
    for made in plain.values():
        for site in made:
            if site is not None and _is_soft(site.kind, site.t):
                yield site.name, "it is torch's own, not a gate; convert the network first"


def _obstacle(act: Activation) -> str | None:
    if act.init.K < 2:
        return "it has one branch"
    theta = torch.stack([torch.as_tensor(t).detach().cpu() for t in act.values()[1]])
    if bool((theta.diff(dim=0) < 0).any()):
        return "its thresholds are not in order, so that regions have no hard form"
    return None


@torch.no_grad()
def _hard(act: Activation) -> Activation:
    """`act` with hard gates at the thresholds and with the branches it has now."""
    t = act.init
    record = replace(t, tau=math.inf, form="softmax", owner=None, theta=tuple(sorted(t.theta)))
    learned = [n for n in act.learned if n != "tau"]
    if act.learned:  # what it has learned has to be kept somewhere
        learned = ["theta", *(n for n in ("s", "c") if n in act.learned), "c"]
    new = hooked_as(successor(act, record, train=learned, inplace=act.inplace), act)
    if act.learned:
        _, theta, s, c = act.values()
        new.set_values(math.inf, theta, s, c)
    return new.train(act.training)


class _Seen:
    """What one run of the soft network shows: the change of each site, and calls that are soft."""

    def __init__(
        self, model: nn.Module, new: nn.Module, names: list[str], plain: ModuleSites
    ) -> None:
        # A gate inside a layer is not called itself: its layer is.
        modules = {name.partition("#")[0] for name in names}
        around = {name: name.rpartition(".")[0] for name in modules}
        owners = {around[n] if is_tiered(model.get_submodule(around[n])) else n for n in modules}
        self.hard = {model.get_submodule(name): new.get_submodule(name) for name in owners}
        self.done = set(names)
        self.costs: dict[str, float] = {}
        self.kept: dict[str, str] = {}
        self.plain = whole(plain)
        self.watch = Watch(model, self._see, self._kind, answered=True)

    def _kind(self, run: Run) -> str | None:
        return "gate" if is_gate(run.module) else self.plain(run)

    def _see(self, visit: Visit) -> Told | None:
        if visit.is_call:
            t = visit.gate.t if visit.gate is not None else _instance(visit)
            if _is_soft(visit.kind, t):
                self.kept[visit.name] = _CALL
            return None
        module = visit.run.module
        if module not in self.hard or (isinstance(module, PerCall) and visit.name not in self.done):
            return None
        hard = gate_of(self.hard[module], visit.run.index)
        args, kwargs = fresh((visit.args, visit.kwargs))  # the gate may work in place

        def compare(y: Tensor) -> None:
            with torch._C.DisableTorchFunction():  # what is computed here is not the network's
                scale = y.square().mean().sqrt().clamp_min(1e-30)
                change = hard.forward(*args, **kwargs) - y  # y is what it was before hooks, too
                self.costs[visit.name] = float(change.square().mean().sqrt() / scale)

        return compare


def _instance(visit: Visit) -> TG | None:
    """The instance of a call that torch answers, if it is element-wise."""
    if visit.kind not in sites.KINDS:
        return None
    try:
        return sites.of_call(visit.kind, visit.call.parameters).t
    except ValueError:  # no gate is that function
        return None
