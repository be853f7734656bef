"""Owners: modules whose `forward` makes nonlinear calls, and how gates answer these.

An owner gets a subclass of its own class, made once for each class, whose `forward` runs the
original one while a mode of torch looks at every call: those of the owner's plan are answered by
gates, all others pass. State, keys, type checks, copies and pickles stay as they were, and no
tracing is needed, so control flow in Python is no obstacle. A call that the plan does not have is
an error: sites are never shifted in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from threshold_gating import kernels, sites
from threshold_gating.conversion.plan import ConversionError, Site

LEAVE = "*"  # in a plan: every call is left alone
_OWNED: dict[type, type] = {}


def own(module: nn.Module, plan: Mapping[str, Site | None] | None) -> None:
    """Let the calls that `module.forward` makes be answered by `plan` (None: as they come)."""
    module.__dict__["tg_sites"] = plan
    module.__dict__["tg_native"] = plan is not None and all(map(_is_torchs, plan.values()))
    base = type(module)
    module.__class__ = _owned(base)
    if "forward" in module.__dict__:  # set on the instance, as accelerate does: wrap that one
        module.__dict__["forward"] = _Wrapped(module, module.__dict__["forward"])


def disown(module: nn.Module) -> None:
    base = getattr(type(module), "tg_base", None)
    if base is not None:
        module.__class__ = base
        del module.__dict__["tg_sites"], module.__dict__["tg_native"]
        forward = module.__dict__.get("forward")
        if isinstance(forward, _Wrapped):
            module.__dict__["forward"] = forward.original


_watched = False


@contextmanager
def watched() -> Iterator[None]:
    """Inside, every call is answered, also where torch's own op runs: someone looks who asks."""
    global _watched
    before, _watched = _watched, True
    try:
        yield
    finally:
        _watched = before


def _is_torchs(site: Site | None) -> bool:
    """Whether the native answer to a call is the call itself."""
    return site is None or (
        site.op is None if site.t is None else site.exact and site.op is not None
    )


def _may_pass(module: Any) -> bool:
    """Whether nothing has to look at the calls of an owner: native would answer with each itself.

    Looking costs a microsecond for every call of torch, which is half of a small decoding step. An
    owner around this one that does look must not see its calls.
    """
    return (
        module.__dict__.get("tg_native", False)
        and not _watched
        and kernels.takes_native()
        and torch._C._len_torch_function_stack() == 0
    )


def _owned(base: type) -> type:
    """The subclass of `base` whose forward has its calls answered; one for each class."""
    if base not in _OWNED:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # through the wrapper, which answers already
            if "forward" in self.__dict__ or _may_pass(self):
                return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            with Answering(self.tg_sites):
                return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

        def reduce(self: Any, protocol: Any) -> Any:
            return _rebuild, (base,), self.__getstate__()

        body = {"forward": forward, "__reduce_ex__": reduce, "tg_base": base}
        names = {k: getattr(base, k) for k in ("__module__", "__qualname__", "__doc__")}
        _OWNED[base] = type(base.__name__, (base,), {**body, **names})
    return _OWNED[base]


def _rebuild(base: type) -> Any:
    owned: Any = _owned(base)
    return owned.__new__(owned)


class _Wrapped:
    """A forward set on the instance, with its calls answered."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.module, self.original = module, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _may_pass(self.module):
            return self.original(*args, **kwargs)
        with Answering(self.module.__dict__["tg_sites"]):
            return self.original(*args, **kwargs)


class Answering(TorchFunctionMode):
    """Answers the nonlinear calls of one run of an owner's forward by its plan."""

    def __init__(self, plan: Mapping[str, Site | None] | None) -> None:
        super().__init__()
        self.plan = plan
        self.counts: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Nearly every call is none of ours: that is found out first, with as little as possible.
        if func not in sites.FUNCTIONS:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        kind = sites.read(func, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        site = self._site(kind, count, args, kwargs)
        # An owner around this one must not be asked again, neither about a call that is left alone
        # nor about the arithmetic of the gates.
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs) if site is None else answer(site, func, args, kwargs)

    def _site(self, kind: str, count: int, args: Any, kwargs: Any) -> Site | None:
        if self.plan is None:
            return as_it_comes(kind, args, kwargs)
        if LEAVE in self.plan:
            return None
        name = f"{kind}#{count}"
        if name not in self.plan:
            known = ", ".join(self.plan) or "none"
            raise ConversionError(
                f"the call {name} was not made when the network was converted (then: {known}); "
                "convert it with inputs that take the same path.",
                name,
            )
        return self.plan[name]


# Sites of calls that no plan has, and the names by which these have them. Attributes and not items:
# a compiler looks those up when it comes to them, so that it sees one that was made on the way.
_MADE = SimpleNamespace()
_NAMES: dict[tuple[str, tuple[Any, ...]], str] = {}


def as_it_comes(kind: str, args: Any, kwargs: Any) -> Site:
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


def answer(site: Site, func: Any, args: Any, kwargs: Any) -> Any:
    """What the gates say to a call of torch, written where the call would have written it."""
    out = kwargs.pop("out", None) if "out" in kwargs else None
    inplace = sites.FUNCTIONS[func][1]
    if site.t is None:
        x = args[0] if args else None
        gated = site.op or (func if kernels.takes_native() else sites.WHOLE[site.kind])
        y = gated(*args, **kwargs)
        out = x if inplace else out
        return y if out is None or y is out else out.copy_(y)
    x, parameters, asked = sites.KINDS[site.kind].read(*args, **kwargs)
    if parameters != site.parameters:
        raise ConversionError(
            f"{site.name} was converted with {site.parameters} and is called with "
            f"{parameters}; convert it with inputs that take the same path.",
            site.name,
        )
    inplace = inplace or asked
    # The gate keeps its input for the backward, so what is overwritten must not be that.
    y = kernels.evaluate(site.t, x.clone() if inplace and x.requires_grad else x, op=site.op)
    out = x if inplace else out
    return y if out is None else out.copy_(y)
