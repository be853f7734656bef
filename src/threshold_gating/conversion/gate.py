"""Modules that have become gates, in the same object: `Gate`, and `PerCall` with one a call."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from threshold_gating import kernels
from threshold_gating.conversion import aten_ops, recomputing
from threshold_gating.conversion.answering import LEAVE
from threshold_gating.conversion.intercept import intercept_calls
from threshold_gating.conversion.learn import view
from threshold_gating.conversion.purity import probing
from threshold_gating.conversion.recognise import overwrites
from threshold_gating.conversion.site import ConversionError, Site, prefix_of_call
from threshold_gating.conversion.watch import copied
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.spec import Elementwise, GateSpec, Holder, attach, found, gate_names

Network = TypeVar("Network", bound=nn.Module)  # a converted network is of the class that it was


def twin(model: Network) -> Network:
    """Modules of its own around the same tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return copied(model, tensors)


class Place(NamedTuple):
    """Where a module works: on which device, and whether in float64."""

    device: torch.device
    double: bool


def places(model: nn.Module, inputs: Any = None) -> dict[nn.Module, Place]:
    """For each module where it works: as a tensor near it, towards the root, says; of a network
    that has none, as its inputs do."""
    found: dict[str, Place] = {}
    given = next((t for t in aten_ops.tensors(inputs) if t.is_floating_point()), torch.empty(0))
    default = Place(given.device, given.dtype == torch.float64)
    for name, module in model.named_modules():
        place = found.get(name.rpartition(".")[0], default)
        tensors = (*module.parameters(), *module.buffers())
        near = next((t for t in tensors if t.is_floating_point()), None)
        if near is not None:
            # accelerate keeps offloaded weights on meta and works elsewhere; CPU scalars fit any
            offloaded = near.is_meta and hasattr(module, "_hf_hook")
            device = torch.device("cpu") if offloaded else near.device
            place = Place(device, near.dtype == torch.float64)
        found[name] = place
    return {module: found[name] for name, module in model.named_modules()}


class _Converted(nn.Module):
    """What a module is that has become a gate, in the same object: whoever holds it sees the gate.

    `replaced` is what it was. Its attributes can be read here, too (`borrowed`), but not set: it
    would do nothing.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("replaced")
        if original is not None and _is_data(original, name, self.__dict__["borrowed"]):
            raise AttributeError(
                f"{type(original).__name__}.{name} cannot be set: the module is a gate now, which "
                "would not change with it. Set it before `convert`, or call `revert` first."
            )
        super().__setattr__(name, value)

    def given(self, args: Sequence[Tensor], named: Mapping[str, Tensor]) -> Tensor:
        """The one argument of `forward`, which has the name that it had before."""
        name = self.__dict__.get("argument", "x")
        if len(args) + len(named) != 1 or (named and name not in named):
            raise TypeError(
                f"{type(self).__name__}.forward takes one argument, {name!r}; got {len(args)} by "
                f"position and {', '.join(named) or 'none'} by name."
            )
        return args[0] if args else named[name]


def _is_data(module: nn.Module, name: str, borrowed: frozenset[str]) -> bool:
    """Whether an attribute is data of what a module was and not of what it is."""
    own = not hasattr(Activation, name) and hasattr(type(module), name)
    return name in borrowed or (own and not callable(getattr(type(module), name)))


class Gate(_Converted, Activation):
    """An activation of a network that was converted to an `Activation`."""

    @classmethod
    def made(cls, spec: Elementwise, inplace: bool, device: Any) -> Gate:
        """A gate with tensors of its own."""
        return cls(
            spec.init,
            share=spec.share,
            channels=_channels(spec),
            axis=spec.axis,
            train=spec.learned,
            inplace=inplace,
            device=device,
        )

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        """The gates of the one argument, also by the name that it had before."""
        x = self.given(args, named)
        if _stands_apart(self):
            return _apart(lambda x: self.evaluate(self, "", x), x, self.inplace)
        return super().forward(x)

    if TYPE_CHECKING:

        def __call__(self, *args: Tensor, **named: Tensor) -> Tensor: ...


_KEEP_THEIR_RESULT = ("relu", "sigmoid", "tanh")  # ops of torch whose backward reads it


def _stands_apart(module: nn.Module) -> bool:
    """Whether nobody's backward may read the memory of the result, as a module's own op would."""
    return bool(vars(module).get("apart")) and torch.is_grad_enabled() and kernels.takes_native()


def _apart(f: Callable[[Tensor], Tensor], x: Tensor, inplace: bool) -> Tensor:
    """`f(x)` in memory that may be written over, because what f keeps is elsewhere."""
    return kernels.overwritten(x, f) if inplace else f(x).clone()


def _channels(spec: Elementwise) -> tuple[int, ...] | None:
    """The sizes that `Activation` takes for how a gate is shared."""
    return None if spec.share in ("net", "layer") else spec.group


def successor(act: Activation, record: TG, **options: Any) -> Activation:
    """A new activation for where `act` stands: on its device, in its type, called by its names, and
    shared as it is if `options` do not say otherwise."""
    kind = Gate if isinstance(act, Gate) else Activation
    options = {"share": act.share, "channels": _channels(act), "axis": act.axis, **options}
    new = kind(record, device=act.theta0.device, **options).to(act.theta0.dtype)
    vars(new).update({k: v for k, v in vars(act).items() if k == "argument"})
    return new


_DESCRIBED = ("init", "learned", "share", "group", "axis")  # what a gate is
Stands = GateSpec | nn.Module  # at one call: a gate, or what the module was, which has no tensors


class PerCall(_Converted, Holder):
    """An activation that is used several times in a run, with what stands there each time.

    That is an instance, or what the module was for a call that is left alone. The tensors of its
    gates are its own, under prefixes: it has no parts.
    """

    def __init__(
        self, sites: Sequence[Site | None], stands: Sequence[Stands], inplace: bool, device: Any
    ) -> None:
        super().__init__()
        self.sites, self.stands, self.inplace = tuple(sites), tuple(stands), inplace
        self.name = next(site.name.partition("#")[0] for site in sites if site is not None)
        gates = {k: at for k, at in enumerate(stands) if isinstance(at, GateSpec)}
        self.tg_gates = {prefix_of_call(k): at for k, at in gates.items()}
        for prefix, spec in self.tg_gates.items():
            attach(self, prefix, spec, device)

    @property
    def calls(self) -> list[nn.Module]:
        """What stands at each call as a module; a gate around the tensors that are here."""
        found: list[nn.Module] = []
        for k, (site, at) in enumerate(zip(self.sites, self.stands, strict=True)):
            module = view(self, prefix_of_call(k), at, Gate) if isinstance(at, GateSpec) else at
            own = {"inplace": self.inplace} if isinstance(at, GateSpec) else {}
            vars(module).update(own, site=site, argument=vars(self).get("argument", "x"))
            found.append(module)
        return found

    def put(self, k: int, gate: Activation) -> None:
        """Let another gate stand at the k-th call, with the values that it has."""
        prefix, spec = prefix_of_call(k), GateSpec(*(getattr(gate, n) for n in _DESCRIBED))
        for name in [n for n in gate_names(self) if n.startswith(prefix)]:
            delattr(self, name)
        self.tg_gates = {**self.tg_gates, prefix: spec}
        self.stands = (*self.stands[:k], spec, *self.stands[k + 1 :])
        self.sites = (*self.sites[:k], None, *self.sites[k + 1 :])
        attach(self, prefix, spec, gate.theta0.device, gate.theta0.dtype)
        with torch.no_grad():
            for name in spec.roles():
                found(self, prefix + name).copy_(found(gate, name))

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        """The next call of this run."""
        x = self.given(args, named)
        k = _counts.calls.get(id(self), len(self.stands))
        if k >= len(self.stands):
            raise ConversionError(
                f"{self.name} is called more often than the {len(self.stands)} times in a run when "
                "the network was converted, and each call has its own instance; convert it with "
                "inputs that take the same path, and call the network as a whole.",
                self.name,
            )
        if (where := recomputing.region()) is not None:
            recomputing.again(where, lambda: _counting(self, k))
        _counts.calls[id(self)] = k + 1
        at = self.stands[k]
        if not isinstance(at, GateSpec):
            return cast(Tensor, at(x))
        prefix = prefix_of_call(k)
        if _stands_apart(self):
            return _apart(lambda x: at.evaluate(self, prefix, x), x, self.inplace)
        return at.evaluate(self, prefix, x, inplace=self.inplace)


class _Counts(threading.local):
    """How often each `PerCall` was called in the run of this thread."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}


_counts = _Counts()


@contextmanager
def _counting(module: PerCall, k: int) -> Iterator[None]:
    """What is computed again of a run goes on from its k-th call."""
    before = dict(_counts.calls)
    _counts.calls[id(module)] = k  # the first call of a region comes last, and counts
    try:
        yield
    finally:
        _counts.calls = before


def count_calls(model: nn.Module) -> None:
    """Let every run of `model` count the calls of activations with an instance for each."""
    stop_counting(model)
    if any(isinstance(module, PerCall) for module in model.modules()):
        if isinstance(model, GraphModule) and "tg_sites" not in model.__dict__:
            intercept_calls(model, {})  # its own copies lose hooks, an owner's do not
        before = model.register_forward_pre_hook(_restart, prepend=True)
        after = model.register_forward_hook(_finish, always_call=True)
        model.__dict__["tg_counting"] = (before, after)


def stop_counting(model: nn.Module) -> None:
    """Undo `count_calls`."""
    for hook in model.__dict__.pop("tg_counting", ()):
        hook.remove()


def _restart(model: nn.Module, args: Any) -> None:
    """A run begins: calls are counted from the first, also after a run that failed half way."""
    for module in model.modules():
        if isinstance(module, PerCall):
            _counts.calls[id(module)] = 0


def _finish(model: nn.Module, *_: Any) -> None:
    """A run ends: fewer calls than there were may have had each other's instances.

    Its other arguments have no names, or Dynamo asks the output for its `grad`, which warns.
    """
    for module in model.modules():
        if isinstance(module, PerCall):
            made = _counts.calls.pop(id(module), 0)
            failed = sys.exc_info()[0] is not None  # the run, and says so itself
            if 0 < made < len(module.stands) and not failed:
                raise ConversionError(
                    f"{module.name} was called {made} times in a run and {len(module.stands)} "
                    "times when the network was converted, so its instances may be at the wrong "
                    "calls; convert it with inputs that take the same path.",
                    module.name,
                )


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


def is_inplace(module: nn.Module) -> bool:
    """Whether an activation overwrites its input."""
    if isinstance(module, Activation):
        return module.inplace
    with probing(module):
        return overwrites(module.forward)


def _may_be_overwritten(module: nn.Module) -> bool:
    """Whether the result of a module may be written over before its backward: that of x * (x > 0)
    may, that of torch's relu may not."""
    with probing(module), torch.inference_mode(False), torch.enable_grad():
        x = torch.linspace(-2, 2, 9, requires_grad=True)
        y = module.forward(x * 1.0).mul_(1.0)
        try:
            torch.autograd.grad(y.sum(), x, allow_unused=True)
        except RuntimeError:
            return False
    return True


def _keeps_result(at: Stands) -> bool:
    """Whether torch's own op for a gate reads its result in the backward."""
    op = at._structure.native if isinstance(at, GateSpec) else None
    return op is not None and op.name in _KEEP_THEIR_RESULT


def left(module: nn.Module) -> nn.Module:
    """What a module was, without its hooks, for a call that is left alone."""
    same = object.__new__(type(module))
    object.__setattr__(
        same, "__dict__", {**vars(module), **{k: OrderedDict() for k in _HOOKS[:-1]}}
    )
    intercept_calls(same, {LEAVE: None})
    return same


def _with(site: Site | None, at: Stands) -> Site | None:
    """The site of a gate, with what the gate learns."""
    learns = at if isinstance(at, GateSpec) and at.learned else None
    return None if site is None else replace(site, learns=learns)


def become(
    module: nn.Module, stands: Sequence[Stands], calls: Sequence[Site | None], place: Place
) -> None:
    """Let `module` be one gate or several, with its hooks and its mode, as the same object."""
    taken = inspect.signature(module.forward).parameters.values()
    argument = next((p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD), "x")
    over = is_inplace(module)
    apart = any(map(_keeps_result, stands)) and _may_be_overwritten(module)
    calls = [_with(site, at) for site, at in zip(calls, stands, strict=False)]
    if isinstance(only := stands[0], GateSpec) and len(stands) == 1:
        new: nn.Module = Gate.made(only, over, place.device)
        vars(new)["site"] = calls[0]
    else:
        new = PerCall(calls, stands, over, place.device)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(module, hooks))
    new.train(module.training)
    new = new.double() if place.double else new
    # Beside the registered parts: what was replaced is not a part of the network any more.
    original = object.__new__(type(module))
    object.__setattr__(original, "__dict__", module.__dict__)
    borrowed = {k: v for k, v in vars(module).items() if k not in vars(new)}
    vars(new).update(borrowed, borrowed=frozenset(borrowed), replaced=original, argument=argument)
    vars(new).update({"apart": True} if apart else {})
    module.__class__ = type(new)
    object.__setattr__(module, "__dict__", new.__dict__)
