"""`Answering`: a mode of torch in which gates answer the nonlinear calls of one run of an owner.

A call that the owner's plan does not have is an error: sites are never shifted in silence. Without
a plan every call is answered as it comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from threshold_gating import kernels
from threshold_gating.conversion import learned_calls, quick, recomputing, sites
from threshold_gating.conversion.lines import calling_line, traced_line
from threshold_gating.conversion.site import ConversionError, Site
from threshold_gating.nn.spec import Elementwise, at_start
from threshold_gating.primitive import graphs

LEAVE = "*"  # in a plan, its only entry (`quick` relies on that): every call is left alone
# To Dynamo these are calls like others; eager checkpointing is followed by `recomputing`.
_REGIONS = {tag_activation_checkpoint, checkpoint}
_LOOKED_AT = frozenset((*sites.FUNCTIONS, *_REGIONS))
_NEVER = object()


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
        graph = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        self.eager = plan is not None and not graph
        self.rows = quick.rows_of(plan, owner) if plan is not None and self.eager else {}
        self.unlike: dict[str, bool] = {}
        self.whole: list[tuple[str, str, str]] = []  # calls of whole numbers, with their lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Nearly every call is none of ours: that is found out first, with as little as possible.
        if func not in _LOOKED_AT:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in _REGIONS:
            return func(self._inside(args[0]), *args[1:], **kwargs)
        if self.eager and (y := self._at_once(func, args, kwargs)) is not _NEVER:
            return y
        kind = sites.read(func, args, kwargs)
        if kind is None:
            _refuse_tracing(args, kwargs)
            self._note_whole_numbers(sites.FUNCTIONS[func][0], args, kwargs)
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

    def _at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer to what nearly every call is, with as few steps as can be: a function of a
        plain tensor, which learns nothing and which nobody looks at. `_NEVER` for others, which
        come the long way; nothing is counted then.
        """
        if not args or type(x := args[0]) is not Tensor or not x.is_floating_point():
            return _NEVER
        row = self.rows.get(func)  # what is no element-wise function, whatever its arguments
        if row is None:
            rest = args[1:]
            try:
                row = self.rows[(func, rest, *kwargs.items()) if kwargs else (func, rest)]
            except (KeyError, TypeError):
                row = self._new_row(func, rest, kwargs)
        if row is None or self.watch is not None or _watching() > 0:
            return _NEVER
        kind, answers, over = row
        count = self.counts.get(kind, 0)
        if count >= len(answers) or (quickly := answers[count]) is None or "out" in kwargs:
            return _NEVER
        # asked here, for nearly always there is no region to be followed
        if self.region is not _NEVER and (_hooks(True) is not None or not torch.is_grad_enabled()):
            self._follow()
        self.counts[kind] = count + 1
        if torch._C._len_torch_function_stack() == 0:
            y = quickly(args, kwargs)
        else:
            with torch._C.DisableTorchFunction():
                y = quickly(args, kwargs)
        return y.clone() if y is x and not over else y

    def _new_row(self, func: Any, rest: tuple[Any, ...], named: dict[str, Any]) -> quick.Row | None:
        plan = cast(quick.Plan, self.plan)
        return quick.new_row(self.rows, plan, func, rest, named, self._is_told_apart)

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
            line = _line()
            if line not in ("", site.line):
                raise ConversionError(
                    f"the call {name} is made by {line} and was made by {site.line} when the "
                    "network was converted, and its instance is for that one; convert it with "
                    "inputs that take the same path.",
                    name,
                )
        return site

    def _note_whole_numbers(self, kind: str, args: Any, kwargs: Any) -> None:
        """A call of whole or complex numbers is torch's own; but it must not be one that another
        function stands for, which was learned or asked for: see `finish`."""
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and not x.is_floating_point():
            others = [s for s in self._planned(kind).values() if s and (s.learns or not s.exact)]
            if others:
                self.whole.append((kind, _line(), str(x.dtype)))

    def _check_whole_numbers(self) -> None:
        for kind, line, dtype in self.whole:
            for name, site in self._planned(kind).items():
                made = int(name.partition("#")[2]) < self.counts.get(kind, 0)
                if site is not None and site.line == line and not made:
                    raise ConversionError(
                        f"the call {name} was given real floating-point numbers when the network "
                        f"was converted and is given {dtype}, which gates do not take; give "
                        "x.float().",
                        name,
                    )

    def _has_lines(self, site: Site, kind: str) -> bool:
        """Whether it matters which line makes a call, and the line is one of the owner's: the first
        one outside of torch's own layers is that of whoever calls the network."""
        home = None if self.owner is None else type(self.owner).forward.__module__
        own = (home or "").partition(".")[0] != "torch"  # a traced network's has none
        return own and (site.learns is not None or self._is_told_apart(kind))

    def _is_told_apart(self, kind: str) -> bool:
        """Whether calls of a kind have unlike instances, so that it matters which is which."""
        if kind not in self.unlike:
            several = f"{kind}#1" in (self.plan or {})  # one call has no other
            planned = self._planned(kind).items() if several else ()
            self.unlike[kind] = len({_answer_of(*each) for each in planned}) > 1
        return self.unlike[kind]

    def _planned(self, kind: str) -> dict[str, Site | None]:
        return {n: s for n, s in (self.plan or {}).items() if n.partition("#")[0] == kind}

    def finish(self) -> None:
        """The run is over: fewer calls than planned may have had each other's instances.

        Not where each was made by a line of its own, which was looked at then.
        """
        if self.whole:
            self._check_whole_numbers()
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


# Looked up here, for they are asked in every call.
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_watching = torch._C._len_torch_dispatch_stack


def _line() -> str:
    return traced_line() if torch.compiler.is_compiling() else calling_line()


def _refuse_tracing(args: Any, kwargs: Any) -> None:
    """torch.fx records calls as they are, past the gates that would answer them."""
    if any(type(x).__module__ == "torch.fx.proxy" for x in (*args[:1], *kwargs.values())):
        raise ConversionError(
            "torch.fx would record the calls of a converted network without its gates; use "
            "torch.export or torch.compile, or trace the network before it is converted."
        )


# Sites of calls that no plan has, and the names by which these have them. Attributes and not items:
# a compiler looks those up when it comes to them, so that it sees one that was made on the way.
# Beside them torch's LSTM, as a graph takes it. Never cleared, for compiled graphs look sites up by
# these names: calls without a plan whose parameters are new each time add a site each.
_MADE = SimpleNamespace(lstm=torch.lstm)


_NAMES: dict[tuple[str, tuple[Any, ...]], str] = {}


def site_of_call(kind: str, args: Any, kwargs: Any) -> Site:
    """The site of a call that no plan has."""
    parameters = sites.KINDS[kind].read(*args, **kwargs).parameters if kind in sites.KINDS else ()
    site: Site = getattr(_MADE, _made(kind, parameters))
    return site


@graphs.constant
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
        return functools.partial(learned_calls.LEARNED[site.kind], site.learns, owner, site.prefix)
    gated: Any = site.op or kernels.either(func, sites.WHOLE[site.kind])
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


def tell_dynamo() -> bool:
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

    for looks in (Answering.__torch_function__, Answering._site, sites.read, _line, calling_line):
        skip_code(looks.__code__)
    get_overridable_functions().update(sites.FUNCTIONS)
    if _MADE.lstm is torch.lstm:
        _MADE.lstm = torch.compiler.disable(torch.lstm)  # type: ignore[no-untyped-call]
    return True


# torch.compiler.assume_constant_result: run while the graph is traced, before the calls come
tell_dynamo.__dict__["_dynamo_marked_constant"] = True
