"""Run a network under watch: as in evaluation, on copies of its inputs, module by module."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from threshold_gating.conversion import ops


def fresh(tree: Any) -> Any:
    """A copy of inputs that a network may overwrite."""
    return copy.deepcopy(tree, {id(t): t.detach().clone() for t in ops.tensors(tree)})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with every module in evaluation mode until the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


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
        self.stack: list[Run] = []
        self.calls: Counter[nn.Module] = Counter()

    def __enter__(self) -> Running:
        module = nn.modules.module
        self._hooks = [
            module.register_module_forward_pre_hook(self._start),
            module.register_module_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
            # torch forgets this entry, and torch.compile then warns of a hook that is not there
            nn.modules.module._global_forward_hooks_with_kwargs.pop(hook.id, None)

    def _start(self, module: nn.Module, args: Any) -> None:
        if module in self.names:  # one made on the way counts as part of who made it
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
