"""Owners: modules whose `forward` makes nonlinear calls, and how gates answer these calls.

An owner gets a subclass of its own class, made once for each class, whose `forward` runs the
original one while a mode of torch looks at every call: those of the owner's plan are answered by
gates, all others pass. State, keys, type checks, copies and pickles stay as they were, and no
tracing is needed, so control flow in Python is no obstacle. A call that the plan does not have is
an error: sites are never shifted in silence.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import Graph, GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from threshold_gating import kernels
from threshold_gating.conversion import recomputing, sites
from threshold_gating.conversion.plan import ConversionError, Site, calling_line, traced_line
from threshold_gating.nn.spec import Elementwise, Holder, Spec, at_start, attach, detach, gate_names
from threshold_gating.primitive import graphs

LEAVE = "*"  # in a plan: every call is left alone
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
        _told_to_dynamo()
    if (follow := module.__dict__.get("tg_follow")) is not None:
        forward = functools.partial(follow, forward)
    if "tg_sites" not in module.__dict__:
        return forward(*args, **kwargs)
    mode = Answering(module.__dict__["tg_sites"], module)
    mode.watch = module.__dict__.get("tg_watch")
    with mode:
        output = forward(*args, **kwargs)
    mode.finish()
    return output


def _told_to_dynamo() -> bool:
    """Have Dynamo hand every nonlinear call to the modes, as eager torch does.

    It passes over what `torch.overrides` lists as not to be overridden: `F.selu_`, `torch.relu_`,
    `F.hardswish` and others, whose gates would be lost in a graph without a word. And the steps
    that it makes of `torch.lstm` crash in training, or give states of another shape (torch 2.11):
    a graph breaks there, as it does at nn.LSTM.

    A call that is refused breaks the graph, too, and is refused again outside of it: what looks at
    the line that makes the call is no graph by itself, for it would keep the line of its first one.
    """
    from torch._dynamo.eval_frame import skip_code  # a second to import
    from torch._dynamo.variables.torch import get_overridable_functions

    for looks in (Answering.__torch_function__, Answering._site, sites.read, calling_line):
        skip_code(looks.__code__)
    get_overridable_functions().update(sites.FUNCTIONS)
    if _MADE.lstm is torch.lstm:
        _MADE.lstm = torch.compiler.disable(torch.lstm)  # type: ignore[no-untyped-call]
    return True


# torch.compiler.assume_constant_result: run while the graph is traced, before the calls come
_told_to_dynamo.__dict__["_dynamo_marked_constant"] = True


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
    from threshold_gating.conversion.apply import count_calls  # it imports this module

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


# To Dynamo these are calls like others; eager checkpointing is followed by `recomputing`.
_REGIONS = {tag_activation_checkpoint, checkpoint}


def _are_alike(plan: Mapping[str, Site | None]) -> bool:
    """Whether all calls of one kind have one answer."""
    found: dict[str, Any] = {}
    for name, site in plan.items():
        answer = _answer_of(name, site)
        if found.setdefault(name.partition("#")[0], answer) != answer:
            return False
    return True


def _answer_of(name: str, site: Site | None) -> Any:
    """Equal for calls that have the same answer; one that learns is like no other."""
    return site and (site.t, site.parameters, name if site.learns else "")


_NEVER = object()


class Answering(TorchFunctionMode):
    """Answers the nonlinear calls of one run of an owner's forward by its plan."""

    watch: Callable[..., Any] | None = None  # evaluates each call, and tells of it

    def __init__(
        self,
        plan: Mapping[str, Site | None] | None,
        owner: nn.Module | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.plan, self.owner = plan, owner
        self.counts: dict[str, int] = dict(counts or {})
        # Without gradients from the start there is no backward in which anything is run again.
        self.region = recomputing.region() if torch.is_grad_enabled() else _NEVER
        self.unlike: dict[str, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Nearly every call is none of ours: that is found out first, with as little as possible.
        if func not in sites.FUNCTIONS:
            if func in _REGIONS:
                return func(self._inside(args[0]), *args[1:], **(kwargs or {}))
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        kind = sites.read(func, args, kwargs)
        if kind is None:
            _refuse_tracing(args, kwargs)
            return func(*args, **kwargs)
        self._follow()
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        site = self._site(kind, count, args, kwargs)
        # An owner around this one must not be asked again, neither about a call that is left alone
        # nor about the arithmetic of the gates.
        with torch._C.DisableTorchFunction():
            if self.watch is not None:
                evaluate = _evaluation(site, func, self.owner)
                return self.watch(kind, evaluate, args, kwargs, site)
            if site is None:
                return func(*args, **kwargs)
            if not graphs.keeps_gates():
                return answer(site, func, args, kwargs, self.owner)
            with graphs.at_site(site.name):
                return answer(site, func, args, kwargs, self.owner)

    def _inside(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointed region of a compiled graph, which is traced without this mode.

        It may change nothing outside of it, so its calls are not counted here; where calls of one
        kind have different instances, a later one would be taken for another.
        """
        plan, owner, counts = self.plan, self.owner, dict(self.counts)
        if plan is not None and not _are_alike(plan):
            raise ConversionError(
                "a checkpointed region is compiled in a network whose calls of one kind have "
                "different instances, and cannot be told apart there; compile the network without "
                "checkpointing, or give these calls one instance."
            )

        def inside(*args: Any, **kwargs: Any) -> Any:
            with Answering(plan, owner, counts):
                return run(*args, **kwargs)

        return inside

    def _follow(self) -> None:
        """Answer again what a checkpointed region in this run computes again."""
        where = None if self.region is _NEVER else recomputing.region()
        if where is not None and where is not self.region:
            counts, plan, owner = dict(self.counts), self.plan, self.owner
            recomputing.again(where, lambda: Answering(plan, owner, counts))
            self.region = where

    def _site(self, kind: str, count: int, args: Any, kwargs: Any) -> Site | None:
        if self.plan is None:
            return site_of_call(kind, args, kwargs)
        if LEAVE in self.plan:
            return None
        name = f"{kind}#{count}"
        if name not in self.plan:
            known = ", ".join(self.plan) or "none"
            raise ConversionError(
                f"the call {name} was not made when the network was converted (then: {known}); "
                "convert it with inputs that take the same path, or without inputs, so that calls "
                "are answered as they come.",
                name,
            )
        site = self.plan[name]
        if site is not None and site.line and self._has_lines(site, kind):
            line = traced_line() if torch.compiler.is_compiling() else calling_line()
            if line not in ("", site.line):
                raise ConversionError(
                    f"the call {name} is made by {line} and was made by {site.line} when the "
                    "network was converted, and its instance is for that one; convert it with "
                    "inputs that take the same path.",
                    name,
                )
        return site

    def _has_lines(self, site: Site, kind: str) -> bool:
        """Whether it matters which line makes a call, and the line is one of the owner's: the first
        one outside of torch's own layers is that of whoever calls the network."""
        home = None if self.owner is None else type(self.owner).forward.__module__
        own = (home or "").partition(".")[0] != "torch"  # a traced network's has none
        return own and (site.learns is not None or self._is_told_apart(kind))

    def _is_told_apart(self, kind: str) -> bool:
        """Whether calls of a kind have unlike instances, so that it matters which is which."""
        if f"{kind}#1" not in (self.plan or {}):
            return False  # one call has no other
        if kind not in self.unlike:
            planned = self._planned(kind).items()
            self.unlike[kind] = len({_answer_of(*each) for each in planned}) > 1
        return self.unlike[kind]

    def _planned(self, kind: str) -> dict[str, Site | None]:
        return {n: s for n, s in (self.plan or {}).items() if n.partition("#")[0] == kind}

    def finish(self) -> None:
        """The run is over: fewer calls than planned may have had each other's instances.

        Not where each was made by a line of its own, which was looked at then.
        """
        for kind, made in self.counts.items() if self.plan else ():
            if f"{kind}#{made}" not in (self.plan or {}) or not self._is_told_apart(kind):
                continue
            planned = self._planned(kind)
            lines = {site.line for site in planned.values() if site is not None and site.line}
            if len(lines) < len(planned):
                raise ConversionError(
                    f"{kind} was called {made} times and {len(planned)} times when the network "
                    f"was converted ({', '.join(planned)}), so its instances may be at the wrong "
                    "calls; convert it with inputs that take the same path.",
                    kind,
                )


def _refuse_tracing(args: Any, kwargs: Any) -> None:
    """torch.fx records calls as they are, past the gates that would answer them."""
    if any(type(x).__module__ == "torch.fx.proxy" for x in (*args[:1], *kwargs.values())):
        raise ConversionError(
            "torch.fx would record the calls of a converted network without its gates; use "
            "torch.export or torch.compile, or trace the network before it is converted."
        )


# Sites of calls that no plan has, and the names by which these have them. Attributes and not items:
# a compiler looks those up when it comes to them, so that it sees one that was made on the way.
# Beside them torch's LSTM, as a graph takes it.
_MADE = SimpleNamespace(lstm=torch.lstm)
_NAMES: dict[tuple[str, tuple[Any, ...]], str] = {}


def site_of_call(kind: str, args: Any, kwargs: Any) -> Site:
    """The site of a call that no plan has."""
    parameters = sites.KINDS[kind].read(*args, **kwargs).parameters if kind in sites.KINDS else ()
    site: Site = getattr(_MADE, _made(kind, parameters))
    return site


def _made(kind: str, parameters: tuple[Any, ...]) -> str:
    """The name of a call's site, which is there then. It measures, even fits: not for a graph."""
    name = _NAMES.get((kind, parameters))
    if name is None:
        site = Site(f":{kind}", kind)
        if kind in sites.KINDS:
            known = sites.of_call(kind, parameters)
            site = Site(f":{kind}", kind, *known, parameters, kernels.native(known.t))
        name = f"site{id(site)}"  # no counter: threads may come here together
        setattr(_MADE, name, site)
        _NAMES[kind, parameters] = name
    return name


# torch.compiler.assume_constant_result, without the second that its import takes
_made.__dict__["_dynamo_marked_constant"] = True


def _has_functions(kind: type) -> bool:
    """Whether a class of tensors, which torch does not have, does something of its own in calls."""
    own = getattr(kind, "__torch_function__", None)
    inherited = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    known = {getattr(each, "__func__", each) for each in inherited}
    foreign = issubclass(kind, Tensor) and kind.__module__.partition(".")[0] != "torch"
    return foreign and getattr(own, "__func__", own) not in known


def answer(site: Site, func: Any, args: Any, kwargs: Any, owner: nn.Module | None = None) -> Any:
    """What the gates say to a call of torch, written where the call would have written it.

    Of a gate that learns, `owner` has the tensors; without one it is as at its start.
    """
    first: Any = args[0] if args else None
    if type(first) is not Tensor and _has_functions(type(first)):
        raise ConversionError(
            f"{site.name} is given a {type(first).__name__}, which has its own __torch_function__: "
            "a gate would not run it. Give the network x.as_subclass(torch.Tensor).",
            site.name,
        )
    out = kwargs.pop("out", None) if "out" in kwargs else None
    inplace = sites.FUNCTIONS[func][1]
    if site.t is None:
        y = _as_a_whole(site, func, (*args, *kwargs.values()), owner)(*args, **kwargs)
        if inplace:
            return y if y is first else first.copy_(y)
        return _written(y, out)
    x, parameters, asked = sites.KINDS[site.kind].read(*args, **kwargs)
    if parameters != site.parameters:
        raise ConversionError(
            f"{site.name} was converted with {site.parameters} and is called with "
            f"{parameters}; convert it with inputs that take the same path.",
            site.name,
        )
    evaluate: Callable[[Tensor], Tensor]
    if site.learns is None:
        evaluate = functools.partial(kernels.evaluate, site.t, op=site.op)
    else:
        holder = at_start(site.prefix, site.learns, x) if owner is None else owner
        gate = cast(Elementwise, site.learns)
        evaluate = functools.partial(gate.evaluate, holder, site.prefix)
    if inplace or asked:
        return kernels.overwritten(x, evaluate)
    y = evaluate(x)
    y = y.clone() if y is x else y  # an instance that changes nothing: torch gives a new tensor
    return _written(y, out)


def _as_a_whole(
    site: Site, func: Any, given: tuple[Any, ...], owner: nn.Module | None
) -> Callable[..., Any]:
    """What evaluates a call that is no element-wise function."""
    if site.learns is not None:
        if owner is None:
            first = next(t for t in given if isinstance(t, Tensor))
            owner = at_start(site.prefix, site.learns, first)
        return functools.partial(sites.LEARNED[site.kind], site.learns, owner, site.prefix)
    gated: Any = site.op or (func if kernels.takes_native() else sites.WHOLE[site.kind])
    return _MADE.lstm if gated is torch.lstm else gated  # type: ignore[no-any-return]


def _evaluation(site: Site | None, func: Any, owner: nn.Module | None) -> Callable[..., Any]:
    """`answer` as a function of what the call is given."""
    if site is None:
        return func  # type: ignore[no-any-return]
    return lambda *args, **kwargs: answer(site, func, args, kwargs, owner)


def _written(y: Any, out: Tensor | None) -> Any:
    """`y` in `out`, if there is one, by an op of torch's: that resizes `out`, with torch's warning,
    and refuses a type that does not hold it, or gradients, in torch's words."""
    return y if out is None or y is out else torch.mul(y, 1, out=out)
