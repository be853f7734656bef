"""Soft gates to hard ones: sharpen them while training, then make them comparisons."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.layers import Activation
from threshold_gating.recurrent import GRU, LSTM
from threshold_gating.training.graph import put
from threshold_gating.training.promotion import difference
from threshold_gating.training.tiers import is_tiered


@dataclass(frozen=True)
class Hardening:
    """A network with hard gates, and what that cost.

    `sites` has for each one the RMS change of its activation over the inputs it saw (tiered layers:
    of their output), relative to the RMS before; `output` is max|d| / max|y| of the network.
    Both are empty without inputs. `kept` says which gates stayed soft and why.
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
    """Multiply the sharpness of every learned soft gate by `factor`, in place.

    Called every few steps with a factor above 1, it brings the gates near hard ones, for which
    `harden` then costs little.
    """
    if not factor > 0:
        raise ValueError(f"anneal_: factor is positive; got {factor}.")
    for module in model.modules():
        if isinstance(module, Activation) and "tau" in module.learned:
            module.tau0.mul_(factor)


def harden(model: nn.Module, *, inputs: Any = None) -> Hardening:
    """A copy of a network whose gates are hard: tau = inf, thresholds and branches as they are.

    Args:
        model: a network with soft gates, learned or not; it is left as it was.
        inputs: a tensor or a tuple of arguments; with them the cost is measured.
    """
    new = copy.deepcopy(model)
    kept: dict[str, str] = {}
    done: list[str] = []
    for name, module in list(new.named_modules()):
        kept |= _out_of_reach(name, module)
        if not isinstance(module, Activation) or module.init.hard:
            continue
        why = _obstacle(module)
        if why is None:
            new = put(new, module, _hard(module))
            done.append(name)
        else:
            kept[name] = why
    if not done:
        reasons = "".join(f" {name or '(network)'}: {why}." for name, why in kept.items())
        raise ValueError(f"harden: {type(model).__name__} has no soft gates to harden.{reasons}")
    for module in new.modules():
        if is_tiered(module):
            layer: Any = module
            if layer.gate.init.hard:
                layer.init = replace(layer.init, tau=math.inf, owner=None)
    if inputs is None:
        return Hardening(new, {}, None, kept)
    return Hardening(new, _costs(model, new, done, inputs), difference(model, new, inputs), kept)


def _out_of_reach(name: str, module: nn.Module) -> dict[str, str]:
    """Soft gates that no `Activation` has: those of calls and of recurrent layers."""
    plan = vars(module).get("tg_sites") or {}
    soft = [c for c, site in plan.items() if site is not None and site.t and not site.t.hard]
    found = {f"{name}:{call}": "it is a call in a forward, not a module" for call in soft}
    if isinstance(module, LSTM | GRU):
        found[name] = "it is recurrent, and its gates are within its step"
    return found


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
    new = Activation(
        record,
        share=act.share,
        channels=None if act.share in ("net", "layer") else act.group,
        axis=act.axis,
        train=learned,
        inplace=act.inplace,
        device=act.theta0.device,
    ).to(act.theta0.dtype)
    vars(new).update({k: v for k, v in vars(act).items() if "_hook" in k})
    if act.learned:
        _, theta, s, c = act.values()
        new.set_values(math.inf, theta, s, c)
    return new.train(act.training)


@torch.no_grad()
def _costs(model: nn.Module, new: nn.Module, names: list[str], inputs: Any) -> dict[str, float]:
    """The change of each site on what it sees in the soft network."""
    # A gate inside a layer is not called itself: its layer is.
    owners = dict.fromkeys(
        name.rpartition(".")[0] if is_tiered(model.get_submodule(name.rpartition(".")[0])) else name
        for name in names
    )
    costs: dict[str, float] = {}
    handles = []
    for name in owners:

        def watch(module: nn.Module, args: Any, y: Tensor, name: str = name) -> None:
            other = new.get_submodule(name)(*args)
            scale = y.square().mean().sqrt().clamp_min(1e-30)
            costs[name] = float((other - y).square().mean().sqrt() / scale)

        handles.append(model.get_submodule(name).register_forward_hook(watch))
    try:
        difference(model, model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return costs
