"""Convert a network to gates: `convert`, its in-place twin `convert_`, and `revert`.

A module that is an element-wise activation becomes an `Activation`; every other nonlinear call
(`F.relu(x)`, `x.softmax(-1)`, attention, a recurrent layer's own) is answered by gates where it is
made. Weights, their names, the type, hooks and training mode of every module stay as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from threshold_gating.conversion import hub
from threshold_gating.conversion.answering import LEAVE
from threshold_gating.conversion.audit import audit
from threshold_gating.conversion.config import Choice, GateConfig, requested

# `Gate` and `PerCall` also by these names for networks that were pickled when they stood here
from threshold_gating.conversion.gate import (
    Gate,
    Network,
    PerCall,
    Stands,
    become,
    count_calls,
    left,
    places,
    stop_counting,
    twin,
)
from threshold_gating.conversion.intercept import intercept_calls, release, unshare
from threshold_gating.conversion.plan import Plan, arguments, make_plan
from threshold_gating.conversion.purity import is_one_call, is_torchs
from threshold_gating.conversion.site import ConversionError, Site
from threshold_gating.conversion.verification import check_tol, verify
from threshold_gating.conversion.watch import can_train, copied
from threshold_gating.nn.spec import GateSpec, Share


def convert(
    model: Network,
    sites: Mapping[str, Choice] | None = None,
    *,
    inputs: Any = None,
    train: Iterable[str] = (),
    share: Share = "layer",
    config: GateConfig | None = None,
    strict: bool = True,
    tol: float | None = None,
) -> Network:
    """A copy of `model` in which every nonlinearity is a gate; `model` is left as it was.

    With `train` the gates learn, from where they stand: those that are modules and those of calls
    alike. What is learned are parameters of the module that is or makes the call (`act.rho`,
    `tg_relu_0_rho`); the network's own keys and modules stay as they were.

    Args:
        model: any network.
        sites: what to put at a site other than the default: {name or "re:pattern": TG, a key of
            `TAXONOMY`, a number of branches K, a `GateConfig` for what it learns, or None to leave
            the site alone}. A name beats a pattern, a later pattern an earlier one; one that
            matches nothing is an error.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments to run the network
            on. With them every call is found, named and verified; without them modules are
            converted now and calls when they happen, and nothing is certified. Gates that learn
            need them.
        train: which of "tau", "theta", "s", "c" are learned at every site that has them. What a
            site cannot learn (the sharpness of ReLU) is said in a warning.
        share: which elements share what is learned: "layer" (one gate for a site), "channel" (the
            axis is found from the run; of attention a temperature for each head), "head" or
            "neuron" (each position).
        config: all of this as a record, instead of `sites`, `train` and `share`.
        strict: raise if the certificate of `verify` is not ok: a site or the output is beyond its
            bound, a nonlinearity is left, nothing was compared. With False it is not made.
        tol: your own bound on max|d|/max|y| of each output, instead of the larger of 1e-2 (1024
            ulp where every site is exact) and twice the original's own rounding; `math.inf`
            accepts any finite difference, at the sites, too.
    """
    _check_arguments("convert", model, sites, inputs)
    check_tol(tol, inputs is not None and strict)
    asked = requested("convert", sites, train, share, config)
    with can_train():
        new = copied(model)
        unshare(new)
        return _converted(model, new, asked, inputs, strict, tol)


def convert_(
    model: Network,
    sites: Mapping[str, Choice] | None = None,
    *,
    inputs: Any = None,
    train: Iterable[str] = (),
    share: Share = "layer",
    config: GateConfig | None = None,
    strict: bool = True,
    tol: float | None = None,
) -> Network:
    """`convert` in place: no weight is copied. If anything fails, `model` is left as it was."""
    _check_arguments("convert_", model, sites, inputs)
    check_tol(tol, inputs is not None and strict)
    asked = requested("convert_", sites, train, share, config)
    original = twin(model) if inputs is not None and strict else model  # to compare with
    with can_train():
        return _converted(original, model, asked, inputs, strict, tol)


def _check_arguments(caller: str, model: Any, sites: Any, inputs: Any) -> None:
    """Refuse what is no network, no choice of sites or no input, with what was probably meant."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise TypeError(f"{caller}: {name} is a class; give a network, {name}(...).")
    if isinstance(model, str):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module; got the string {model!r}. "
            f"timm.create_model({model!r}, pretrained=True) makes one, and the command "
            f"`tg convert timm:{model}` takes a name."
        )
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"{caller}: model must be a torch.nn.Module; got {kind}.")
    parts = sites.values() if isinstance(sites, Mapping) else sites
    parts = parts if isinstance(sites, Mapping | tuple | list) else (sites,)
    if any(isinstance(part, Tensor) for part in parts):
        raise TypeError(
            f"{caller}: the second argument is sites, the choices by site; pass inputs by name: "
            f"{caller}(model, inputs=x)."
        )
    if sites is not None and not isinstance(sites, Mapping):
        raise TypeError(
            f"{caller}: sites must be a dict from site names to choices, such as "
            f"{{'act': 'gelu_k3'}}; got {type(sites).__name__}."
        )
    if isinstance(inputs, str):
        raise TypeError(
            f"{caller}: inputs must be a tensor, a tuple of arguments or a dict of keyword "
            f"arguments; got the string {inputs!r}."
        )


def _converted(
    original: nn.Module,
    model: Network,
    asked: tuple[GateConfig, Mapping[str, Choice]],
    inputs: Any,
    strict: bool,
    tol: float | None,
) -> Network:
    default, sites = asked
    plan = make_plan(model, sites, inputs, default)
    _check_any(model, plan, inputs)
    try:
        apply_plan(model, plan, inputs)
        unseen = _certify(original, model, inputs, tol) if inputs is not None and strict else ()
    except BaseException:
        revert(model)
        raise
    notes = [*plan.notes]
    if unseen:
        notes.append(f"these inputs do not reach {', '.join(unseen)}, so that is not verified")
    if notes:
        warnings.warn("convert: " + "; ".join(notes) + ".", stacklevel=3)
    return model


def _check_any(model: nn.Module, plan: Plan, inputs: Any) -> None:
    """Refuse a network in which there is nothing to convert, and say what was found instead."""
    if not plan.is_empty:
        return
    if any(isinstance(m, Gate | PerCall) or "tg_sites" in vars(m) for m in model.modules()):
        raise ConversionError(
            f"{type(model).__name__} is converted already; for other choices convert the original, "
            "or what `tg.conversion.revert` gives back."
        )
    args, kwargs = arguments(inputs)
    seen = audit(model, *args, **kwargs)
    raise ConversionError(
        f"nothing to convert in {type(model).__name__}: "
        + (
            f"{'; '.join(plan.notes)}."
            if plan.notes
            else "every site was given None; leave at least one site to the gates."
            if plan.modules or any((plan.calls or {}).values())
            else f"no gate computes what it calls; `tg.audit` found\n{seen}"
            if seen.left or seen.other
            else "it ran without a nonlinearity."
        )
    )


def _certify(
    original: nn.Module, model: nn.Module, inputs: Any, tol: float | None
) -> tuple[str, ...]:
    """Raise if the certificate is not ok; the names of sites that no input reached."""
    args, kwargs = arguments(inputs)
    certificate = verify(original, model, *args, tol=tol, **kwargs)
    for site, message in certificate.failed.items():
        others = len(certificate.failed) - 1
        raise ConversionError(message + (f" {others} more failed." if others else ""), site)
    if missed := certificate.uncompared:
        said = f"convert: not compared at the output: {', '.join(missed)}."
        warnings.warn(said, stacklevel=4)
    return tuple(name for name in certificate.unseen if not _is_sure(model, name))


def _is_sure(model: nn.Module, name: str) -> bool:
    """Whether a site needs no input to be right: its instance is the function it replaced.

    That is known of torch's own modules and of one call of torch; another module was recognised by
    its values, and may be something else where nobody looked.
    """
    parts = dict(model.named_modules(remove_duplicate=False))
    gate = parts.get(name)
    site = None if gate is None else vars(gate).get("site")
    if gate is None or site is None or not site.exact:
        return False
    original = vars(gate)["replaced"]
    return is_torchs(original) or is_one_call(original)


def apply_plan(model: nn.Module, plan: Plan, inputs: Any) -> None:
    """Make the changes of a plan that was made with these inputs."""
    where = places(model, inputs)
    for module, calls in plan.modules.items():
        if any(calls):
            become(module, _gates(module, calls), calls, where[module])
        else:  # left alone, also by an owner around it
            intercept_calls(module, {LEAVE: None})
    if plan.calls is None:
        intercept_calls(model, None)
    for name, made in (plan.calls or {}).items():
        owner = model.get_submodule(name)
        intercept_calls(owner, made, *where[owner])
    count_calls(model)
    hub.guard(model)


def revert(model: Network) -> Network:
    """Undo `convert_` in place; the weights are those of now.

    What gates have learned is lost, and their parameters are gone: an optimiser that has them goes
    on with tensors that nobody reads. `conversion.save(..., gates_only=True)` keeps it.
    """
    stop_counting(model)
    hub.unguard(model)
    for module in list(model.modules()):
        release(module)
        original = module.__dict__.get("replaced")
        if original is not None:
            original.training = module.training
            module.__class__ = type(original)
            object.__setattr__(module, "__dict__", original.__dict__)
    return model


def _gates(module: nn.Module, calls: Sequence[Site | None]) -> list[Stands]:
    """What stands at the calls of a module: one gate if it is the same at all, and learns not."""
    same = len({site and site.t for site in calls}) == 1 and not any(s and s.learns for s in calls)
    return [_stands(module, site) for site in (calls[:1] if same else calls)]


def _stands(module: nn.Module, site: Site | None) -> Stands:
    if site is None or site.t is None:
        return left(module)
    return site.learns if isinstance(site.learns, GateSpec) else GateSpec(site.t)
