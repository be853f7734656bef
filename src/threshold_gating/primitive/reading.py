"""What a gate reads in a compiled graph must not be written over before its backward pass.

Eager code refuses to go back then, and so do torch's own ops in a compiled graph. A function of
autograd that Dynamo traces does not: it would go back with what is there by then, without a word.
The compiler itself computes what it has not kept from an input of the graph anew, even if that was
written over. So gates read x through an op that autograd knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

from threshold_gating.primitive.graphs import constant, exporting

_PLAIN = (Tensor, torch.nn.Parameter)  # of a subclass, its own rules hold


def read(x: Tensor, learned: Iterable[Any]) -> Tensor:
    """x for gates of a graph that is being compiled, whose parameters may be among `learned`."""
    if not torch.is_grad_enabled() or exporting() or type(x) not in _PLAIN or _is_transformed():
        return x
    anchor = None
    if not x.requires_grad:
        anchor = next((w for w in learned if isinstance(w, Tensor) and w.requires_grad), None)
        if anchor is None:
            return x
    found: Tensor = _read(x, anchor)
    return found


@constant
def _is_transformed() -> bool:
    """In a transform of functions, for which the op has no rule."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or forward_ad._current_level >= 0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _checked(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    _ = ctx.saved_tensors  # raises if what was read has changed
    return dy, None


def _copied(mode: Any, op: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
    """A copy to the compiler, which leaves it out: nobody changes what was read."""
    with mode:
        return arguments[0].clone()


_LIBRARY: Any = torch.library.Library("threshold_gating", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("read(Tensor x, Tensor? learned) -> Tensor")
_LIBRARY.impl("read", lambda x, learned: x.clone(), "CompositeExplicitAutograd")
_LIBRARY._register_torch_dispatch_rule("read", FunctionalTensorMode, _copied)
torch.library.register_fake(
    "threshold_gating::read", lambda x, learned: torch.empty_like(x), lib=_LIBRARY
)
torch.library.register_autograd(
    "threshold_gating::read", _checked, setup_context=_keep, lib=_LIBRARY
)
_read = torch.ops.threshold_gating.read.default
