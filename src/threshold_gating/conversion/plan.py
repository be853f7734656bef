"""Plan of a conversion: where the nonlinearities are and what replaces each, before any change.

`watch` says how sites are named.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from threshold_gating import kernels, taxonomy
from threshold_gating.conversion import recognise, sites
from threshold_gating.conversion.config import Choice, GateConfig
from threshold_gating.conversion.learn import Learner, prefix_of
from threshold_gating.conversion.purity import obstacle, own_attributes, probing
from threshold_gating.conversion.watch import Run, Visit, Watch, evaluating, fresh
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.spec import Spec

Function = Callable[[Tensor], Tensor]
# How transformers calls attention in kernels (those of its hub have a slash), and gates already.
_CLOSED = ("flash_attention", "flex_attention", "tg")


class ConversionError(ValueError):
    """A network, or a part of it, that cannot be converted; `site` names the place."""

    def __init__(self, message: str, site: str = "") -> None:
        super().__init__(message)
        self.site = site


@dataclass(frozen=True)
class Site:
    """One place where a nonlinearity happens, and the instance that stands there.

    `t` is None where the nonlinearity is not one element-wise function (softmax, attention, GLU).
    `sup` is the largest error of `t` over the line, 0.0 where it is exact. `learns` is None where
    nothing is learned; else the site starts as `t`.
    """

    name: str
    kind: str
    t: TG | None = None
    exact: bool = True
    sup: float = 0.0
    parameters: tuple[Any, ...] = ()
    op: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, compare=False)
    line: str = field(default="", repr=False, compare=False)  # of the code that makes the call
    learns: Spec | None = None
    # Before the names of its tensors in its owner. A field, and not made from the name in a graph,
    # which would be compiled again for each layer.
    prefix: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", prefix_of(self.name.rpartition(":")[2]))


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
    found_any = any(map(any, (*modules.values(), *(each.values() for each in calls.values()))))
    if not learner.learns and found_any:
        raise ConversionError(
            "no site learns anything of what is asked: "
            + ("; ".join(learner.notes) or "there is none whose config trains")
            + "."
        )


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple of arguments or a dict of keyword arguments as what to call with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def run(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    try:
        return model(*args, **kwargs)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"{type(model).__name__} does not run on the inputs given "
            f"({type(error).__name__}: {error}); give a tensor, a tuple of arguments or a dict of "
            "keyword arguments that it takes."
        ) from error


def refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                f"{name or 'the network'} is a scripted module, whose inside cannot be changed; "
                "convert the network it was scripted from.",
                name,
            )
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
        if attention.startswith(_CLOSED) or "/" in attention:
            raise ConversionError(
                f"the attention of {name or 'the network'} is {attention!r}, with no call of torch "
                "that could be answered; convert after model.set_attn_implementation('sdpa').",
                name,
            )
        if type(module).__name__ == "OptimizedModule":
            raise ConversionError(
                f"{name or 'the network'} is compiled; convert it first, and call torch.compile "
                "on what comes out.",
                name,
            )
        if "quantized" in type(module).__module__.split("."):
            raise ConversionError(
                f"{name or 'the network'} is quantised ({type(module).__name__}); convert the "
                "network before it is quantised.",
                name,
            )
        for key, t in module.named_parameters(recurse=False):
            if quantised_by_torchao(t):
                raise ConversionError(
                    f"{name}.{key} is quantised by torchao ({type(t).__name__}), and a conversion "
                    "compares weights, which such tensors do not; convert first, and call "
                    "quantize_ on what comes out.",
                    name,
                )


def quantised_by_torchao(t: Tensor) -> bool:
    return type(t).__module__.partition(".")[0] == "torchao"


class Choices:
    """What the caller wants at which site, and whether every choice was used."""

    def __init__(
        self, given: Mapping[str, Choice] | None, default: GateConfig | None = None
    ) -> None:
        self.given = dict(given or {})
        self.default = default or GateConfig()
        self.used: set[str] = set()
        self.seen: dict[str, None] = {}  # the names of the sites, in their order

    def at(self, name: str, default: sites.Recognised, f: Function) -> sites.Recognised | None:
        """What stands at the element-wise site `name` for `f`; None leaves it alone."""
        self.seen[name] = None
        key = self.deciding(name)
        if key is None:
            return default
        choice = self.given[key]
        if choice is None:
            return None
        if isinstance(choice, GateConfig):
            choice = choice.init
        t = default.t if choice is None else instance_at(choice, default, f, name)
        return default if t == default.t else sites.judged(t, f)

    @property
    def trains(self) -> bool:
        """Whether anything is to be learned anywhere."""
        given = [c.train for c in self.given.values() if isinstance(c, GateConfig)]
        return any((self.default.train, *given))

    def config(self, name: str) -> GateConfig:
        """What a site learns, and how it is shared."""
        key = self._key(name)
        choice = None if key is None else self.given[key]
        return choice.over(self.default) if isinstance(choice, GateConfig) else self.default

    def names(self, name: str) -> bool:
        """Whether the caller has named this very site, and not by a pattern."""
        return name in self.given

    def leaves_alone(self, name: str) -> bool:
        """Whether a site is to stay as it is; asking uses no other choice."""
        key = self._key(name)
        return key is not None and self.given[key] is None and self.deciding(name) == key

    def leaves(self, name: str) -> bool:
        """Whether a site that is not element-wise is left alone: the only choice there."""
        self.seen[name] = None
        key = self.deciding(name)
        choice = None if key is None else self.given[key]
        choice = choice.init if isinstance(choice, GateConfig) else choice
        if key is not None and choice is not None and not key.startswith("re:"):
            raise ConversionError(
                f"{name} is not one element-wise function, so no instance can be chosen for it; "
                "give None to leave it alone.",
                name,
            )
        return self.leaves_alone(name)

    def deciding(self, name: str) -> str | None:
        """The name or pattern among the caller's that decides about a site, which is met."""
        self.used.update(self._patterns(name))
        self.used.update({name} & self.given.keys())
        return self._key(name)

    def _key(self, name: str) -> str | None:
        return name if name in self.given else next(reversed(self._patterns(name)), None)

    def _patterns(self, name: str) -> list[str]:
        return [k for k in self.given if k.startswith("re:") and re.fullmatch(k[3:], name)]

    def check_used(self) -> None:
        if unused := [k for k in self.given if k not in self.used]:
            near = difflib.get_close_matches(unused[0].removeprefix("re:"), self.seen, 5, 0.0)
            names = f"give the name of one, as {', '.join(map(repr, near))}; " if near else ""
            raise ConversionError(
                f"sites: {unused[0]!r} matches no site of this network; {names}"
                "`tg.audit(model, inputs)` lists them.",
                unused[0],
            )


def instance_at(choice: TG | str | int, default: sites.Recognised, f: Function, name: str) -> TG:
    if isinstance(choice, TG):
        return choice
    if isinstance(choice, str):
        return taxonomy.TAXONOMY[taxonomy.key_of(choice)]
    if isinstance(choice, bool) or not isinstance(choice, int) or choice < 2:
        raise ConversionError(
            f"{name}: sites takes a TG, a key of TAXONOMY, a number of branches K >= 2 or None; "
            f"got {choice!r}.",
            name,
        )
    if default.exact and choice == default.t.K:
        return default.t
    base = taxonomy.name_of(default.t)
    if base is not None and f"{base}_k{choice}" in taxonomy.TAXONOMY:
        return taxonomy.TAXONOMY[f"{base}_k{choice}"]
    from threshold_gating.fitting import fit  # scipy, only where a fit is needed

    return fit(f, over="line", K=choice).t


class Judged(NamedTuple):
    """What a module is by itself: an instance, or None for one whose calls are answered instead.

    `left` says why it has to stay as it is, `note` what its gate does differently.
    """

    known: sites.Recognised | None
    left: str = ""
    note: str = ""


def module_sites(model: nn.Module, chosen: Choices, notes: list[str] | None = None) -> ModuleSites:
    """The modules that are element-wise nonlinearities, each with its site; adds to the notes."""
    found: ModuleSites = {}
    known: dict[Any, Judged] = {}
    notes = [] if notes is None else notes
    for name, module in model.named_modules():
        if module is model or not _is_bent(module):
            continue
        what = f"{name} ({type(module).__name__})"
        if chosen.leaves_alone(name):
            found[module] = []
            continue
        alike = _alike(module)
        if alike not in known or alike is None:
            known[alike] = _judged(module)
        judged = known[alike]
        if judged.left and (key := chosen.deciding(name)) is not None:
            raise ConversionError(
                f"{what} was given {chosen.given[key]!r} and has to stay as it is: "
                f"{judged.left}; give None.",
                name,
            )
        if judged.left:
            found[module] = []
            notes.append(f"{what} stays as it is: {judged.left}")
        elif judged.known is not None:
            with probing(module):
                at = chosen.at(name, judged.known, module.forward)
            kind = taxonomy.name_of(judged.known.t) or _kind(module)
            found[module] = [Site(name, kind, *at) if at is not None else None]
            notes += [f"{what}: {judged.note}"] if judged.note else []
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
            return Judged(None, left="" if calls else f"no gate computes it ({_sentence(error)})")
        apart, odd = recognise.kinks_apart(f, known.t), recognise.specials_apart(f, known.t)
    if (apart or odd) and calls:
        return Judged(None)
    kinks, others = (", ".join(f"{x:g}" for x in each) for each in (apart, odd))
    notes = [f"the gradient at x = {kinks} is that of one side, not torch's"] * bool(apart)
    notes += [f"its value at x = {others} differs"] * bool(odd)
    return Judged(known, note=" and ".join(notes))


def _sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].rstrip(".")


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
        if (key := chosen.deciding(name)) is not None:
            raise ConversionError(
                f"{name} was given {chosen.given[key]!r} and has to stay as it is: {why}; "
                "give None.",
                name,
            ) from error
        notes.append(f"{name} stays as it is: {why}")
        return None
    what = chosen.at(name, known, visit.function)
    if what is None:
        return None
    return Site(name, kind, *what, parameters, kernels.native(what.t), calling_line())


def calling_line() -> str:
    """The line of the network's code that is running, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if home.partition(".")[0] != "torch" and not home.startswith(_HOME):
            return _spelled(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def traced_line() -> str:
    """The same while a compiler follows the code, in frames of its own; "" where it has none."""
    for at in reversed(TracingContext.extract_stack()):
        if not at.filename.startswith(_HOMES):
            return _spelled(at.filename, at.lineno or 0)
    return ""


traced_line.__dict__["_dynamo_marked_constant"] = True  # run while the graph is traced


def _spelled(file: str, line: int) -> str:
    """Each copy of a graph module has the same code again, in a file with another number."""
    return f"{re.sub('^<eval_with_key>.*', '<eval_with_key>', file)}:{line}"


_HOME = __name__.rpartition(".")[0]  # of the conversion, which looks on
_HOMES = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
