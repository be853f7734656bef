"""Convert a network to gates: `convert`, its in-place twin `convert_`, and `revert`.

A module that is an element-wise activation becomes an `Activation`; every other nonlinear call
(`F.relu(x)`, `x.softmax(-1)`, attention, a recurrent layer's own) is answered by gates where it is
made. Weights, their names, the type, hooks and training mode of every
module stay as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from threshold_gating.conversion.answering import LEAVE, disown, own
from threshold_gating.conversion.certificate import verify
from threshold_gating.conversion.plan import (
    Choice,
    ConversionError,
    Plan,
    Site,
    arguments,
    make_plan,
)
from threshold_gating.layers import Activation


def convert(
    model: nn.Module,
    sites: Mapping[str, Choice] | None = None,
    *,
    inputs: Any = None,
    strict: bool = True,
    tol: float | None = None,
) -> nn.Module:
    """A copy of `model` in which every nonlinearity is a gate; `model` is left as it was.

    Args:
        model: any network.
        sites: what to put at a site other than the default: {name or "re:pattern": TG, a key of
            `TAXONOMY`, a number of branches K, or None to leave the site alone}. A name beats a
            pattern, a later pattern an earlier one; one that matches nothing is an error.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments to run the network
            on. With them every call is found, named and verified; without them modules are
            converted now and calls when they happen, and nothing is certified.
        strict: raise if the certificate of `verify` is not ok: a site or the output is beyond its
            bound, a nonlinearity is left, nothing was compared. With False it is not made.
        tol: your own bound on max|d|/max|y| of each output, instead of the larger of 1e-2 (1024
            ulp where every site is exact) and twice the original's own rounding; `math.inf`
            accepts any finite difference, at the sites, too.
    """
    return _converted(model, copy.deepcopy(model), sites, inputs, strict, tol)


def convert_(
    model: nn.Module,
    sites: Mapping[str, Choice] | None = None,
    *,
    inputs: Any = None,
    strict: bool = True,
    tol: float | None = None,
) -> nn.Module:
    """`convert` in place: no weight is copied. If anything fails, `model` is left as it was."""
    original = model
    if inputs is not None and strict:
        # Its own modules around the same tensors, to compare with.
        tensors = (*model.parameters(), *model.buffers())
        original = copy.deepcopy(model, {id(t): t for t in tensors})
    return _converted(original, model, sites, inputs, strict, tol)


def _converted(
    original: nn.Module,
    model: nn.Module,
    sites: Mapping[str, Choice] | None,
    inputs: Any,
    strict: bool,
    tol: float | None,
) -> nn.Module:
    plan = make_plan(model, sites, inputs)
    try:
        apply_plan(model, plan)
        if inputs is not None and strict:
            _certify(original, model, inputs, tol)
    except BaseException:
        revert(model)
        raise
    return model


def _certify(original: nn.Module, model: nn.Module, inputs: Any, tol: float | None) -> None:
    args, kwargs = arguments(inputs)
    failed = verify(original, model, *args, tol=tol, **kwargs).failed
    for site, message in failed.items():
        more = f" {len(failed) - 1} more failed." if len(failed) > 1 else ""
        raise ConversionError(message + more, site)


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Make the changes of a plan."""
    made: dict[nn.Module, nn.Module] = {}
    where = places(model)
    for parent, name, child in children(model):
        if plan.modules.get(child):
            if child not in made:
                made[child] = _replacement(child, plan.modules[child], where[child])
            parent._modules[name] = made[child]
    for module, calls in plan.modules.items():
        if not calls:  # left alone, also by an owner around it
            own(module, {LEAVE: None})
    if plan.calls is None:
        own(model, None)
    for owner, found in (plan.calls or {}).items():
        own(model.get_submodule(owner), found)
    if any(isinstance(new, PerCall) for new in made.values()):
        model.__dict__["tg_restart"] = model.register_forward_pre_hook(_restart)


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert_` in place; the weights are those of now."""
    if "tg_restart" in model.__dict__:
        model.__dict__.pop("tg_restart").remove()
    for module in list(model.modules()):
        disown(module)
    for parent, name, child in children(model):
        original = child.__dict__.get("replaced")
        if original is not None:
            original.train(child.training)
            parent._modules[name] = original
    return model


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) for every registration, a shared module under each of its names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                yield parent, name, child


class Place(NamedTuple):
    """Where a module works: on which device, and whether in float64."""

    device: torch.device
    double: bool


def places(model: nn.Module) -> dict[nn.Module, Place]:
    """For each module where it works: as a tensor near it, towards the root, says."""
    found: dict[str, Place] = {}
    for name, module in model.named_modules():
        place = found.get(name.rpartition(".")[0], Place(torch.device("cpu"), False))
        tensors = (*module.parameters(), *module.buffers())
        near = next((t for t in tensors if t.is_floating_point()), None)
        if near is not None:
            # accelerate keeps offloaded weights on meta and works elsewhere; CPU scalars fit any
            offloaded = near.is_meta and hasattr(module, "_hf_hook")
            device = torch.device("cpu") if offloaded else near.device
            place = Place(device, near.dtype == torch.float64)
        found[name] = place
    return {module: found[name] for name, module in model.named_modules()}


class PerCall(nn.Module):
    """An activation that is used several times in a run, with an instance for each time."""

    def __init__(self, calls: list[Activation]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)
        self.next = 0

    def forward(self, x: Tensor) -> Tensor:
        """The next call; after the last one the first is next again."""
        act = self.calls[self.next]
        self.next = (self.next + 1) % len(self.calls)
        return cast(Tensor, act(x))


def _restart(model: nn.Module, args: Any) -> None:
    """A run begins: calls are counted from the first, also after a run that failed half way."""
    for module in model.modules():
        if isinstance(module, PerCall):
            module.next = 0


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


def _replacement(module: nn.Module, calls: list[Site], place: Place) -> nn.Module:
    # Only of torch's own modules is it known that they then overwrite.
    over = bool(getattr(module, "inplace", False)) and type(module) in vars(nn).values()
    acts = [
        Activation(site.t, inplace=over, device=place.device)
        for site in calls
        if site.t is not None
    ]
    differ = len({site.t for site in calls}) > 1
    return stand_in(module, acts if differ else acts[:1], calls, place)


def stand_in(
    module: nn.Module, acts: list[Activation], calls: Iterable[Site], place: Place
) -> nn.Module:
    """What takes the place of `module`, with its hooks and its mode: one activation or several."""
    for act, site in zip(acts, calls, strict=False):
        act.__dict__["site"] = site
    new: nn.Module = PerCall(acts) if len(acts) > 1 else acts[0]
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(module, hooks))
    # Beside the registered parts: what was replaced is not a part of the network any more.
    new.__dict__["replaced"] = module
    new.train(module.training)
    return new.double() if place.double else new
