"""Owners: modules whose `forward` makes nonlinear calls, which gates answer.

An owner gets a subclass of its own class, made once for each class, whose `forward` runs the
original one while a mode of torch looks at every call (`Answering`): those of the owner's plan are
answered by gates, all others pass. State, keys, type checks, copies and pickles stay as they were,
and no tracing is needed, so control flow in Python is no obstacle.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from threshold_gating.conversion.answering import Answering, tell_dynamo
from threshold_gating.conversion.site import Site
from threshold_gating.kernels import takes_native
from threshold_gating.nn.spec import Holder, Spec, attach, detach, gate_names

# Values and not keys are weak: a subclass keeps its base alive, so weak keys would never go.
_OWNED: WeakValueDictionary[tuple[type, bool], type] = WeakValueDictionary()


def intercept_calls(
    module: nn.Module,
    plan: Mapping[str, Site | None] | None,
    device: Any = None,
    double: bool = False,
) -> None:
    """Let the calls that `module.forward` makes be answered by `plan` (None: as they come).

    What the gates of these calls learn are parameters of `module` then, if it has them not yet.
    """
    gates = gates_in(plan)
    module.__dict__["tg_sites"] = plan
    _become_owner(module, learns=bool(gates))
    if gates:
        module.__dict__["tg_gates"] = gates
    for prefix, spec in gates.items():
        attach(module, prefix, spec, device, torch.float64 if double else torch.float32)


def _become_owner(module: nn.Module, learns: bool) -> None:
    """Let `module` be of the subclass of its class that answers; one that is so already stays it
    under the same class of before."""
    before = getattr(type(module), "tg_base", None)
    module.__class__ = _of_base(type(module), lambda base: _owned(before or base, learns))
    forward = module.__dict__.get("forward")  # set on the instance, as accelerate does
    if forward is not None and not isinstance(forward, _Wrapped):
        module.__dict__["forward"] = _Wrapped(module, forward)


def follow(module: nn.Module, run: Callable[..., Any]) -> None:
    """Let `run(forward, *args, **kwargs)` run the forward of `module`, inside of what answers."""
    if getattr(type(module), "tg_base", None) is None:
        intercept_calls(module, None)
        del module.__dict__["tg_sites"]  # none is answered
    module.__dict__["tg_follow"] = run


def release(module: nn.Module) -> None:
    module.__dict__.pop("tg_sites", None)
    base = getattr(type(module), "tg_base", None)
    if base is None:
        return
    detach(module)
    if "tg_follow" not in module.__dict__:
        module.__class__ = _of_base(type(module), lambda _: base)
        forward = module.__dict__.get("forward")
        if isinstance(forward, _Wrapped):
            module.__dict__["forward"] = forward.original


def gates_in(plan: Mapping[str, Site | None] | None) -> dict[str, Spec]:
    """What the calls of a plan learn, by the prefix of the names of their tensors."""
    return {s.prefix: s.learns for s in (plan or {}).values() if s is not None and s.learns}


def unshare(model: nn.Module) -> None:
    """Give parametrized modules, whose copies torch makes of one class, a class of their own: a
    parametrization that is removed from one is removed from its class."""
    for module in model.modules():
        if _is_parametrized(type(module)):
            module.__class__ = _of_base(type(module), lambda base: base)


def _of_base(kind: type, change: Callable[[type], type]) -> type:
    """`change(kind)`; of a parametrized module, the same properties over the changed base, so that
    torch finds them where it looks for them when they are removed."""
    if not _is_parametrized(kind):
        return change(kind)
    body = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (change(kind.__bases__[0]),), body)


def _is_parametrized(kind: type) -> bool:
    """Whether a class is one that torch makes for a parametrized module."""
    made_there = kind.__module__ == "torch.nn.utils.parametrize"
    return made_there and kind.__name__.startswith("Parametrized")


def _answered(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the forward of an owner with its calls answered.

    It looks also where every answer is the call itself: whatever decides which calls are made (a
    setting, a global, a random number), one that the plan does not have is refused.
    """
    if torch.compiler.is_compiling():
        tell_dynamo()
    if (follow := module.__dict__.get("tg_follow")) is not None:
        forward = functools.partial(follow, forward)
    if "tg_sites" not in module.__dict__ or _takes_fast_path(module):
        return forward(*args, **kwargs)
    mode = Answering(module.__dict__["tg_sites"], module)
    mode.watch = module.__dict__.get("tg_watch")
    with mode:
        output = forward(*args, **kwargs)
    mode.finish()
    return output


_ATTENTION = "multi_head_attention_forward#0"


def _takes_fast_path(module: nn.Module) -> bool:
    """Whether torch's own attention may run unseen: it closes its fast path while a mode looks.

    Its class makes one call and no other, so that nothing is missed where that call would be
    answered by itself and nobody watches.
    """
    own = module.__dict__
    plan = own["tg_sites"]
    return (
        getattr(type(module), "tg_base", None) is nn.MultiheadAttention
        and plan is not None
        and list(plan) == [_ATTENTION]
        and (site := plan[_ATTENTION]) is not None
        and site.learns is None
        and own.get("tg_watch") is None
        and not ("forward" in own or "tg_follow" in own)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and takes_native()
    )


def _owned(base: type, learns: bool = False) -> type:
    """The subclass of `base` whose forward has its calls answered; one for each class, and one for
    those that hold the tensors of gates."""
    owned = _OWNED.get((base, learns))
    if owned is None:

        @functools.wraps(base.forward)  # type: ignore[attr-defined]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = self.__dict__
            bound = functools.partial(base.forward, self)  # type: ignore[attr-defined]
            if not ("tg_sites" in own or "tg_follow" in own):  # only an object of this class
                return bound(*args, **kwargs)
            if "forward" in own and _wrapped.runs and _wrapped.runs[-1] is self:
                return _running(None, bound, args, kwargs)  # what wraps it answers already
            return _answered(self, bound, args, kwargs)

        def reduce(self: Any, protocol: Any) -> Any:
            state = self.__getstate__()  # whatever the class makes of itself
            if isinstance(state, dict):
                state = {k: v for k, v in state.items() if k != "tg_sites"}
            return _rebuild, (base, *_plans(self)), state

        body = {"forward": forward, "__reduce_ex__": reduce, "tg_base": base}
        if any(each.__module__ == "torch.fx.graph_module" for each in base.__mro__):
            body |= _GRAPH
        names = {k: getattr(base, k) for k in ("__module__", "__qualname__", "__doc__")}
        bases = (Holder, base) if learns else (base,)
        owned = _OWNED[base, learns] = type(base.__name__, bases, {**body, **names})
    return owned


# What makes a module an owner: how its calls are answered, what runs its forward.
_OWNING = {"tg_sites", "tg_follow"}


def _plans(module: nn.Module) -> list[Any]:
    """The plan of an owner, if its calls are answered."""
    return [v for k, v in vars(module).items() if k == "tg_sites"]


def _rebuild(base: type, *plans: Any) -> Any:
    owned: Any = _owned(base, learns=any(map(gates_in, plans)))
    module = owned.__new__(owned)
    module.__dict__.update(zip(("tg_sites",), plans, strict=False))
    return module


# A graph module has a class of its own, which its copies and its recompilation make anew: they are
# made as of the network before, and owned again.


def _graph_copy(self: Any, memo: dict[int, Any]) -> Any:
    own = (_plans(self), vars(self).get("tg_follow"), _tensors_of(self))
    return _owned_as(copy.deepcopy(_as_before(self), memo), *copy.deepcopy(own, memo))


def _graph_reduce(self: Any, protocol: Any) -> Any:
    made = _as_before(self).__reduce_ex__(protocol)[:2]
    return _owned_again, (made, _plans(self), vars(self).get("tg_follow"), _tensors_of(self))


def _tensors_of(module: Any) -> dict[str, Any]:
    """The tensors of gates, which are in no graph and would be left behind."""
    names = list(gate_names(module))
    held = {**module._parameters, **module._buffers}
    return {name: held[name] for name in names if name in held}


def _owned_again(made: tuple[Callable[..., Any], tuple[Any, ...]], *own: Any) -> Any:
    make, given = made
    return _owned_as(make(*given), *own)


def _owned_as(module: Any, plans: list[Any], run: Any, gates: dict[str, Any]) -> Any:
    """A new graph module, which has not the hooks and gates of the one that it was made from."""
    from threshold_gating.conversion.gate import count_calls  # it imports this module

    for plan in plans:
        intercept_calls(module, plan)
    for name, t in gates.items():
        (module._parameters if name in module._parameters else module._buffers)[name] = t
    if run is not None:
        follow(module, run)
    count_calls(module)
    return module


def _graph_recompile(self: Any) -> Any:
    before = _as_before(self)
    code = before.recompile()
    vars(self).update(vars(before))
    return code


def _as_before(module: Any) -> Any:
    """A graph module of the class of before around the same parts; other threads may run `module`
    meanwhile, so that it is not changed itself."""
    before = object.__new__(type(module).tg_base)
    own = {k: v for k, v in vars(module).items() if k not in _OWNING}
    object.__setattr__(before, "__dict__", own)
    return before


def _graph(self: Any) -> Any:
    """The graph; to `torch.export`, which runs the nodes of a graph module without its forward,
    one node that is the network as it is called."""
    if not torch.compiler._is_exporting_flag:
        return self._graph
    whole = Graph()
    given = [whole.placeholder(node.target) for node in self._graph.find_nodes(op="placeholder")]
    whole.output(whole.call_function(self.__call__, tuple(given)))
    return whole


_GRAPH = {
    "graph": property(_graph, lambda self, graph: GraphModule.graph.fset(self, graph)),  # type: ignore[attr-defined]
    "__deepcopy__": _graph_copy,
    "__reduce_ex__": _graph_reduce,
    "__reduce__": lambda self: _graph_reduce(self, 2),
    "recompile": _graph_recompile,
}


class _Wrapped:
    """A forward set on the instance, with its calls answered."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)  # for its signature
        self.module, self.original = module, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(_running, self.module, self.original)
        return _answered(self.module, lambda *args, **kwargs: run(args, kwargs), args, kwargs)


class _Runs(threading.local):
    """Whose wrapped forward runs in this thread; last None: the forward inside of the wrapper."""

    def __init__(self) -> None:
        self.runs: list[nn.Module | None] = []


_wrapped = _Runs()


def _running(module: nn.Module | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `forward` as that of a wrapper of `module`. What others set on the instance later calls
    the forward of the class, too, and is no such wrapper."""
    _wrapped.runs.append(module)
    try:
        return forward(*args, **kwargs)
    finally:
        _wrapped.runs.pop()
