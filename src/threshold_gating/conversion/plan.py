"""Plan of a conversion: where the nonlinearities are and what replaces each, before any change.

`watch` says how sites are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import kernels, taxonomy
from threshold_gating.conversion import recognise, sites
from threshold_gating.conversion.choices import Choices
from threshold_gating.conversion.config import Choice, GateConfig
from threshold_gating.conversion.learn import Learner
from threshold_gating.conversion.lines import calling_line
from threshold_gating.conversion.purity import obstacle, own_attributes, probing

# by these names also for networks that were pickled when they stood here
from threshold_gating.conversion.site import ConversionError as ConversionError
from threshold_gating.conversion.site import Site as Site
from threshold_gating.conversion.site import instead
from threshold_gating.conversion.watch import Run, Visit, Watch, evaluating, fresh
from threshold_gating.nn.activation import Activation

# How transformers calls attention in kernels (those of its hub have a slash), and gates already.
_CLOSED = ("flash_attention", "flex_attention", "tg")


ModuleSites = dict[nn.Module, list[Site | None]]


class Plan(NamedTuple):
    """What to convert: whole modules by the sites of their calls, and calls by their owner.

    A module without sites, and a call that is None, are left alone. `calls` is None where the
    network was not run: calls are then answered as they come. `notes` say what the user has to
    know: modules that stay as they are unasked, and why.
    """

    modules: ModuleSites
    calls: dict[str, dict[str, Site | None]] | None
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the network was run and no gate is to stand anywhere."""
        calls = [] if self.calls is None else [found.values() for found in self.calls.values()]
        return self.calls is not None and not any(map(any, (*self.modules.values(), *calls)))


def make_plan(
    model: nn.Module,
    given: Mapping[str, Choice] | None,
    inputs: Any,
    default: GateConfig | None = None,
) -> Plan:
    """Find every nonlinearity of `model` and decide what stands there, and what of it learns, if
    the `default` or a choice says so; `model` is not changed."""
    refuse(model)
    chosen = Choices(given, default)
    if chosen.trains and inputs is None:
        raise ConversionError(
            "gates that learn need inputs=: sites, and where their channels are, are found from a "
            "run; give a tensor, a tuple of arguments or a dict of keyword arguments."
        )
    notes: list[str] = []
    modules = module_sites(model, chosen, notes)
    calls: dict[str, dict[str, Site | None]] | None = None
    learner = Learner(model, chosen) if chosen.trains else None
    if inputs is not None:
        calls = {}
        watch = Watch(model, _collector(calls, chosen, notes, learner), whole(modules))
        with evaluating(model), learner.channels if learner else nullcontext(), watch:
            run(model, fresh(inputs))
        for module, made in modules.items():
            _name_calls(module, made, watch.running.calls[module], chosen)
        # These take a fused path in evaluation, which no gate is in; being owners keeps them from
        # it, as being watched kept them here.
        fused = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
        names = [name for name, module in model.named_modules() if isinstance(module, fused)]
        calls.update({name: calls.get(name, {}) for name in names})
    chosen.check_used()
    if learner and calls is not None:
        _learn(learner, modules, calls, notes)
    return Plan(modules, calls, tuple(notes))


def _learn(
    learner: Learner,
    modules: ModuleSites,
    calls: dict[str, dict[str, Site | None]],
    notes: list[str],
) -> None:
    """Give every site what it learns; the notes say what some cannot."""
    for made in modules.values():
        made[:] = [learner.decided(site) for site in made]
    for found in calls.values():
        found.update({call: learner.decided(site) for call, site in found.items()})
    notes += learner.notes
    if not learner.learns and not Plan(modules, calls).is_empty:
        raise ConversionError(
            "no site learns anything of what is asked: "
            + ("; ".join(learner.notes) or "there is none whose config trains")
            + ". Ask for others of tau, theta, s and c, or leave train out."
        )


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of arguments or a dict of keyword arguments as what to call with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def run(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    after = "; give a tensor, a tuple of arguments or a dict of keyword arguments that it takes."
    with instead(f"{type(model).__name__} does not run on the inputs given", after):
        return model(*args, **kwargs)


def refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if why := _closed(name or "the network", module):
            raise ConversionError(why, name)


def _closed(what: str, module: nn.Module) -> str:
    """Why no gate can stand inside of a module, and what to do instead; "" if one can."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            f"{what} is a scripted module, whose inside cannot be changed; convert the network it "
            "was scripted from."
        )
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    if attention.startswith(_CLOSED) or "/" in attention:
        return (
            f"the attention of {what} is {attention!r}, with no call of torch that could be "
            "answered; convert after model.set_attn_implementation('sdpa')."
        )
    kind = type(module).__name__
    if kind == "OptimizedModule":
        return f"{what} is compiled; convert it first, and call torch.compile on what comes out."
    if "quantized" in type(module).__module__.split("."):
        return f"{what} is quantised ({kind}); convert the network before it is quantised."
    for key, t in module.named_parameters(recurse=False):
        if quantised_by_torchao(t):
            return (
                f"{key} of {what} is quantised by torchao ({type(t).__name__}), and a conversion "
                "compares weights, which such tensors do not; convert first, and call quantize_ "
                "on what comes out."
            )
    return ""


def quantised_by_torchao(t: Tensor) -> bool:
    return type(t).__module__.partition(".")[0] == "torchao"


class Judged(NamedTuple):
    """What a module is by itself: an instance, or None for one whose calls are answered instead.

    `left` says why it has to stay as it is, `note` what its gate does differently.
    """

    known: sites.Recognised | None
    left: str = ""
    note: str = ""


def module_sites(
    model: nn.Module, chosen: Choices | None = None, notes: list[str] | None = None
) -> ModuleSites:
    """The modules that are element-wise nonlinearities, each with its site; adds to the notes."""
    chosen = Choices(None) if chosen is None else chosen
    found: ModuleSites = {}
    known: dict[Any, Judged] = {}
    notes = [] if notes is None else notes
    held = _held_by_method(model)
    for name, module in model.named_modules():
        if module is model or module in held or not _is_bent(module):
            continue
        what = f"{name} ({type(module).__name__})"
        if chosen.leaves_alone(name):
            found[module] = []
            continue
        alike = _alike(module)
        if alike not in known or alike is None:
            known[alike] = _judged(module)
        judged = known[alike]
        if judged.left:
            chosen.check_free(name, what, judged.left)
            found[module] = []
            notes.append(f"{what} stays as it is: {judged.left}")
        elif judged.known is not None:
            with probing(module):
                at = chosen.at(name, judged.known, module.forward)
            kind = taxonomy.name_of(judged.known.t) or _kind(module)
            found[module] = [Site(name, kind, *at) if at is not None else None]
            notes += [f"{what}: {judged.note}"] if judged.note else []
    return found


def _held_by_method(model: nn.Module) -> set[nn.Module]:
    """Modules whose `forward` another one holds, as a method: their calls of torch are answered.

    Of a module that became a gate the method would stay the old one, and be the gate's in a copy
    that pickle makes: two gates where there was one function, which learn apart.
    """
    found: set[nn.Module] = set()
    for holder in model.modules():
        seen: dict[int, Any] = {}  # a list may hold itself
        values = list(own_attributes(holder).values())
        while values:
            value = values.pop()
            if isinstance(value, list | tuple | dict) and id(value) not in seen:
                seen[id(value)] = value
                values += value.values() if isinstance(value, dict) else value
            method = value.func if isinstance(value, partial) else value
            owner = getattr(method, "__self__", None) if isinstance(method, MethodType) else holder
            if isinstance(owner, nn.Module) and owner is not holder and method == owner.forward:
                found.add(owner)
    return found


def whole(modules: ModuleSites) -> Callable[[Run], str | None]:
    """For `Watch`: each call of these modules is a site as a whole."""
    sites = {module: made[0] if made else None for module, made in modules.items()}
    kinds = {module: site.kind if site else _kind(module) for module, site in sites.items()}
    return lambda run: kinds.get(run.module)


def _is_bent(module: nn.Module) -> bool:
    """Whether a module without parts and weights is an element-wise function that bends."""
    if isinstance(module, Activation) or any(True for _ in module.children()):
        return False
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return False
    with probing(module):
        return recognise.is_bent(module.forward)


def _alike(module: nn.Module) -> Any:
    """Equal for modules that compute the same: those of one class with the same numbers."""
    own = own_attributes(module)
    simple = all(isinstance(v, int | float | str | None) for v in own.values())
    # with types: True, 1 and 1.0 are equal, and may be different settings
    key = tuple((name, type(value), repr(value)) for name, value in sorted(own.items()))
    return (type(module), key) if simple else None


def _judged(module: nn.Module) -> Judged:
    f = module.forward
    with probing(module):
        calls = recognise.nonlinear_calls(f)
        why = obstacle(module) or _trains_differently(module)
        if why:
            return Judged(None, left="" if calls else why)
        try:
            known = recognise.recognise(f, fit=not calls)
        except ValueError as error:
            why = str(error).partition(". ")[0].rstrip(".")
            return Judged(None, left="" if calls else f"no gate computes it ({why})")
        apart, odd = recognise.kinks_apart(f, known.t), recognise.specials_apart(f, known.t)
    if (apart or odd) and calls:
        return Judged(None)
    kinks, others = (", ".join(f"{x:g}" for x in each) for each in (apart, odd))
    notes = [f"the gradient at x = {kinks} is that of one side, not torch's"] * bool(apart)
    notes += [f"its value at x = {others} differs"] * bool(odd)
    return Judged(known, note=" and ".join(notes))


def _trains_differently(module: nn.Module) -> str:
    """Whether a module draws random numbers, or computes anything else, in training."""
    differs = not recognise.trains_as_it_computes(module.forward)
    x = torch.linspace(-8, 8, 257, dtype=torch.float64, device="cpu")
    ys = []
    for training in (False, True, True):
        with probing(module, training), torch.no_grad():
            ys.append(module.forward(x.clone()))
    differs = differs or not all(torch.equal(ys[0].nan_to_num(), y.nan_to_num()) for y in ys[1:])
    return "it trains as another function than it computes" if differs else ""


def _kind(module: nn.Module) -> str:
    """What a module is called where no row is it: "leaky_relu" for LeakyReLU."""
    name = type(module).__name__.lower()
    return next((kind for kind in sites.KINDS if kind.replace("_", "") == name), name)


def _name_calls(module: nn.Module, made: list[Site | None], calls: int, chosen: Choices) -> None:
    """Give each further call of a module that is used several times a site of its own."""
    first = made[0] if made else None
    if first is None or first.t is None:
        return
    known = sites.Recognised(first.t, first.exact, first.sup)
    for k in range(1, calls):
        name = f"{first.name}#{k}"
        with probing(module):
            at = chosen.at(name, known, module.forward)
        made.append(None if at is None else Site(name, first.kind, *at))


def _collector(
    found: dict[str, dict[str, Site | None]],
    chosen: Choices,
    notes: list[str],
    learner: Learner | None,
) -> Callable[[Visit], None]:
    """Collects calls as owner -> {"relu#0": site, or None to leave the call alone}; adds to the
    notes."""

    def collect(visit: Visit) -> None:
        owner, _, call = visit.name.rpartition(":")
        if learner is not None:
            learner.see(visit)
        if visit.is_call and call not in found.setdefault(owner, {}):
            found[owner][call] = _call_site(visit, chosen, notes)

    return collect


def _call_site(visit: Visit, chosen: Choices, notes: list[str]) -> Site | None:
    name, kind = visit.name, visit.kind
    if kind in sites.WHOLE:
        return None if chosen.leaves(name) else Site(name, kind)
    if chosen.leaves_alone(name):
        return None
    parameters = visit.call.parameters
    try:
        known = sites.of_call(kind, parameters)
    except ValueError as error:
        why = str(error).partition("; ")[0]
        chosen.check_free(name, name, why)
        notes.append(f"{name} stays as it is: {why}")
        return None
    what = chosen.at(name, known, visit.function)
    if what is None:
        return None
    return Site(name, kind, *what, parameters, kernels.native(what.t), calling_line())
