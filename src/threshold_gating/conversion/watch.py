"""Run a network under watch: as in evaluation, on copies of its inputs, module by module."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion import ops


def fresh(tree: Any) -> Any:
    """A copy of inputs that a network may overwrite."""
    return copy.deepcopy(tree, {id(t): t.detach().clone() for t in ops.tensors(tree)})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode; then everything is as it was.

    That is modes, buffers, what modules keep of a run (a hidden state, a counter) and the random
    numbers to come.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {t.device.index for t in model.parameters() if t.is_cuda}
    with torch.random.fork_rng(devices=devices), kept(model):
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode


# What every module has; of it only what holds its tensors and parts can change in a run.
INTERNAL = set(vars(nn.Module()))
_OWN = INTERNAL - {"_parameters", "_buffers", "_modules"}


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the state of every module is the same afterwards."""
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
    found += [k for k, v in vars(module).items() if state.own.get(k, found) is not v]
    found += ["contents" for container, contents in state.held if not _same(container, contents)]
    found += ["values" for t, version, _ in state.tensors if _version(t) != version]


class _State:
    """The attributes of a module, with the contents of containers and of tensors among them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, dict(vars(module))
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
        for container, contents in ((vars(self.module), self.own), *self.held):
            if not _same(container, contents):
                container.clear()
                grow = container.extend if isinstance(container, list | deque) else container.update
                grow(contents)
        for t, version, values in self.tensors:
            if _version(t) != version or version < 0:
                with torch.no_grad():
                    t.copy_(values)


def _same(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[k] is b[k] for k in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _version(t: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count it."""
    return -1 if t.is_inference() else t._version


@dataclass
class Run:
    """One call of a module: the name of the module, which call of it, what it has called so far."""

    module: nn.Module
    where: str
    index: int
    counts: Counter[str] = field(default_factory=Counter)
    saved: Any = None

    @property
    def site(self) -> str:
        """The name of the site that this call is, if the module is one."""
        return f"{self.where}#{self.index}" if self.index else self.where


class Running:
    """The modules of a network that are running, innermost last."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Run, Any], None] = lambda run, args: None,
        after: Callable[[Run, Any, Any, Any], None] = lambda run, args, kwargs, output: None,
    ) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.before, self.after = before, after
        self.hooked = {module for module in self.names if module._forward_pre_hooks}
        self.stack: list[Run] = []
        self.calls: Counter[nn.Module] = Counter()

    def __enter__(self) -> Running:
        module = nn.modules.module
        self._hooks = [
            module.register_module_forward_pre_hook(self._start),
            module.register_module_forward_hook(self._end, with_kwargs=True, always_call=True),
            # What a hook before a module calls is called by who calls the module: it starts then.
            *(each.register_forward_pre_hook(self._begin) for each in self.hooked),
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
            self._begin(module, args)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.stack.append(Run(module, self.names[module], self.calls[module]))
        self.calls[module] += 1
        self.before(self.stack[-1], args)

    def _end(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if self.stack and self.stack[-1].module is module:
            run = self.stack.pop()
            if len(kwargs_and_output) == 2:  # where the call failed, torch gives no kwargs
                self.after(run, args, *kwargs_and_output)

    def name_call(self, kind: str) -> str:
        """The name of the next call of this kind by the innermost module."""
        if not self.stack:
            return f":{kind}"
        run = self.stack[-1]
        run.counts[kind] += 1
        return f"{run.where}:{kind}#{run.counts[kind] - 1}"
