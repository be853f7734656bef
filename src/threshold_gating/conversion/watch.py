"""`Watch`: a run of a network, reported site by site, in order, whatever the sites are.

A site is a module ("layer1.0.act"; "layer1.0.act#1" for its second call) or a call of torch by one
("layer1.0:relu#0"; ":relu#0" by the network itself). What runs here does so as in evaluation and on
copies of its inputs, and leaves no trace in the network.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from threshold_gating.conversion import aten_ops, sites
from threshold_gating.conversion.site import ConversionError

Module = TypeVar("Module", bound=nn.Module)


def check_weights(model: nn.Module) -> None:
    """Refuse a network that is lazy: its weights have no shape before it has run."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(t):
            raise ConversionError(
                f"{name} of {type(model).__name__} has no shape before the network has run; run it "
                "once, as model(x), then give it again.",
                name.rpartition(".")[0],
            )


def can_train() -> AbstractContextManager[Any]:
    """Outside of `torch.inference_mode`, in which copies could never learn, nor be recognised."""
    inside = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else nullcontext()


def copied(model: Module, shared: Iterable[Tensor] = ()) -> Module:
    """A copy of a network, with these tensors the same.

    Tensors that have a history, which torch does not copy, are copied without it: a pruned weight,
    which is made again in each run, or what a module keeps of a run.
    """
    memo = {id(t): t for t in shared}
    for module in model.modules():
        for t in aten_ops.tensors(vars(module)):
            if t.grad_fn is not None:
                memo.setdefault(id(t), t.detach().clone())
    return copy.deepcopy(model, memo)


def fresh(tree: Any) -> Any:
    """A copy of inputs that a network may overwrite."""
    with can_train():
        return copy.deepcopy(tree, {id(t): t.detach().clone() for t in aten_ops.tensors(tree)})


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Without gradients; then everything is as it was.

    That is buffers, what modules keep of a run (a hidden state, a counter) and the random numbers
    to come.
    """
    devices = {t.device.index for t in model.parameters() if t.is_cuda}
    with can_train(), torch.random.fork_rng(devices=devices), kept(model), torch.no_grad():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Undisturbed and in evaluation mode; then in the modes of before."""
    modes = [(module, module.training) for module in model.modules()]
    with undisturbed(model):
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


# What every module has; of it only what holds its tensors and parts can change in a run.
INTERNAL = set(vars(nn.Module()))
_OWN = INTERNAL - {"_parameters", "_buffers", "_modules"}
_PASSING = "_again"  # no state, but how the last call of an Activation was made


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the state of every module is the same afterwards."""
    check_weights(model)
    saved = [_State(module) for module in model.modules()]
    versions = {name: (p, _version(p)) for name, p in model.named_parameters()}
    try:
        yield
    finally:
        for state in saved:
            state.restore()
    for name, (p, version) in versions.items():
        if _version(p) != version:
            raise ValueError(
                f"{type(model).__name__} changes its parameter {name!r} when it runs, also in "
                "evaluation; make it a buffer, which is put back after a run."
            )


@contextmanager
def changed(module: nn.Module) -> Iterator[list[str]]:
    """After the block, the names of what ran inside has changed in a module; it stays so."""
    found: list[str] = []
    state = _State(module)
    yield found
    own = {k: v for k, v in vars(module).items() if k != _PASSING}
    found += [k for k, v in own.items() if state.own.get(k, found) is not v]
    found += ["contents" for container, contents in state.held if not _same(container, contents)]
    found += ["values" for t, version, _ in state.tensors if _version(t) != version]


class _State:
    """The attributes of a module, with the contents of containers and of tensors among them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, dict(vars(module))
        self.own.pop(_PASSING, None)
        self.held: list[tuple[Any, Any]] = []
        self.seen: set[int] = set()
        self.tensors: list[tuple[Tensor, int, Tensor]] = []
        for name, value in self.own.items():
            if name not in _OWN:
                self._hold(value)

    def _hold(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_meta:
                self.tensors.append((value, _version(value), value.detach().clone()))
        elif isinstance(value, dict | list | set | deque) and id(value) not in self.seen:
            self.seen.add(id(value))  # it may hold itself
            self.held.append((value, copy.copy(value)))
            for each in value.values() if isinstance(value, dict) else value:
                self._hold(each)

    def restore(self) -> None:
        vars(self.module).pop(_PASSING, None)
        for container, contents in ((vars(self.module), self.own), *self.held):
            if not _same(container, contents):
                container.clear()
                grow = container.extend if isinstance(container, list | deque) else container.update
                grow(contents)
        for t, version, values in self.tensors:
            if version < 0 or _version(t) != version or not _equal(t, values):
                with torch.no_grad():
                    t.copy_(values)


def _same(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[k] is b[k] for k in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values: batch norm writes its figures without counting."""
    return a.layout is not torch.strided or torch.equal(a, b)  # torch compares no sparse ones


def _version(t: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count it."""
    return -1 if t.is_inference() else t._version


@dataclass
class Run:
    """One call of a module: the name of the module, which call of it, what it has called so far.

    `visit` is set while the call is told of as a site; `told` is told its output then.
    """

    module: nn.Module
    where: str
    index: int
    counts: Counter[str] = field(default_factory=Counter)
    visit: Visit | None = None
    told: Told | None = None

    @property
    def site(self) -> str:
        """The name of the site that this call is, if the module is one."""
        return f"{self.where}#{self.index}" if self.index else self.where


class Running:
    """The modules of a network that are running, innermost last.

    `before` and `after` are told of each call of a module, with what its `forward` gets behind the
    hooks of its user. Without `everywhere` only modules that have hooks get one more: torch takes
    its fused paths around modules that have none.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Run, Any, Any], None] = lambda run, args, kwargs: None,
        after: Callable[[Run, Any], None] = lambda run, output: None,
        *,
        everywhere: bool = False,
    ) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.before, self.after = before, after
        self.hooked = {
            module
            for module in self.names
            if (everywhere or module._forward_pre_hooks)
            and not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        }
        self.stack: list[Run] = []
        self.calls: Counter[nn.Module] = Counter()
        self.is_paused = False  # what runs then is not the network's

    def __enter__(self) -> Running:
        # Not the method itself, which a copy of a hooked module would copy with all of the network.
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begin(module, args, kwargs)

        module = nn.modules.module
        self._hooks = [
            module.register_module_forward_pre_hook(self._start),
            module.register_module_forward_hook(self._end, with_kwargs=True, always_call=True),
            # What a hook before a module calls is called by who calls the module: it starts then.
            *(each.register_forward_pre_hook(begin, with_kwargs=True) for each in self.hooked),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
            # torch forgets this entry, and torch.compile then warns of a hook that is not there
            nn.modules.module._global_forward_hooks_with_kwargs.pop(hook.id, None)

    def _start(self, module: nn.Module, args: Any) -> None:
        # one made on the way counts as part of who made it
        if module in self.names and module not in self.hooked:
            self._begin(module, args, {})

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # a copy that the network makes of a part has its hook, too
        if not self.is_paused and module in self.names:
            self.stack.append(Run(module, self.names[module], self.calls[module]))
            self.calls[module] += 1
            self.before(self.stack[-1], args, kwargs)

    def _end(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if self.stack and self.stack[-1].module is module and not self.is_paused:
            run = self.stack.pop()
            if len(kwargs_and_output) == 2:  # where the call failed, torch gives no kwargs
                self.after(run, kwargs_and_output[1])

    @property
    def where(self) -> str:
        """The name of the innermost module; "" for the network itself."""
        return self.stack[-1].where if self.stack else ""

    def name_call(self, kind: str) -> str:
        """The name of the next call of this kind by the innermost module."""
        if not self.stack:
            return f":{kind}"
        run = self.stack[-1]
        run.counts[kind] += 1
        return f"{run.where}:{kind}#{run.counts[kind] - 1}"


@dataclass(frozen=True)
class Visit:
    """One evaluation of a site: its name, its kind, and `f(*args, **kwargs)`, which it computes.

    `args` and `kwargs` are what it really gets; it may overwrite them. `run` is its own call, of a
    module, or for a call of torch that of the module which makes it. `gate` is the record by which
    a converted network answers a call.
    """

    name: str
    kind: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Run
    is_call: bool
    gate: Any = None

    @property
    def x(self) -> Tensor:
        """The input of an element-wise site."""
        x: Tensor = self.call.x if self.is_call else (*self.args, *self.kwargs.values())[0]
        return x

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """What an element-wise site does to x."""
        return sites.function(self.kind, self.call.parameters) if self.is_call else self.f

    @property
    def call(self) -> sites.Call:
        """A call of torch with its input and its parameters, if it is element-wise."""
        return sites.KINDS[self.kind].read(*self.args, **self.kwargs)


Told = Callable[[Any], None]
Read = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], str | None]


class Watch(TorchFunctionMode):
    """While it is on, tells of every site of a run of `model`, in order.

    A watch is one thread's, and the model with it. Of two watches of one model the inner one alone
    is told of the calls that gates answer.

    Args:
        model: a network, converted or not.
        see: is told of each site before it is evaluated; what it returns is told the output.
        whole: the kind of site that a call of a module is. None for one whose inside is looked at.
        read: the kind of site that a call of torch is. None for any other call.
        answered: whether to tell of calls that the gates of a converted network answer, too.
    """

    def __init__(
        self,
        model: nn.Module,
        see: Callable[[Visit], Told | None],
        whole: Callable[[Run], str | None],
        *,
        read: Read = sites.read,
        answered: bool = False,
    ) -> None:
        super().__init__()
        self.see, self.whole, self.read = see, whole, read
        self.running = Running(model, self._enter, self._leave, everywhere=True)
        self.owners = [m for m in model.modules() if answered and "tg_sites" in vars(m)]

    def __enter__(self) -> Watch:
        self.running.__enter__()
        self.outer = [vars(owner).get("tg_watch") for owner in self.owners]
        for owner in self.owners:
            vars(owner)["tg_watch"] = self._call
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for owner, outer in zip(self.owners, self.outer, strict=True):
            if outer is None:
                vars(owner).pop("tg_watch", None)  # `kept` inside may have put back less
            else:
                vars(owner)["tg_watch"] = outer
        self.running.__exit__(*error)

    def _tell(self, listener: Callable[[Any], Any], what: Any) -> Any:
        """What a listener computes, or runs, is not the network's."""
        self.running.is_paused = True
        try:
            return listener(what)
        finally:
            self.running.is_paused = False

    def _looks(self) -> bool:
        """Whether what runs is the network's and not inside of a site."""
        stack = self.running.stack
        return bool(stack) and not self.running.is_paused and not any(run.visit for run in stack)

    def _enter(self, run: Run, args: Any, kwargs: Any) -> None:
        kind = self.whole(run) if self._looks() else None
        if kind is not None:
            run.visit = Visit(run.site, kind, run.module.forward, args, kwargs, run, False)
            run.told = self._tell(self.see, run.visit)

    def _leave(self, run: Run, output: Any) -> None:
        if run.told is not None:
            self._tell(run.told, output)

    def _call(self, kind: str, f: Callable[..., Any], args: Any, kwargs: Any, gate: Any) -> Any:
        """A call of torch, evaluated by `f`."""
        if not self._looks():
            return f(*args, **kwargs)
        name, run = self.running.name_call(kind), self.running.stack[-1]
        told = self._tell(self.see, Visit(name, kind, f, args, dict(kwargs), run, True, gate))
        output = f(*args, **kwargs)
        if told is not None:
            self._tell(told, output)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self.read(func, args, kwargs) if self._looks() else None
        if kind is None:
            return func(*args, **kwargs)
        return self._call(kind, func, args, kwargs, None)
