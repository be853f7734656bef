"""Every kernel beside the reference it must equal: the tests and `tg bench` go through this table.

A kernel that has no pair does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threshold_gating import kernels, primitive
from threshold_gating.instance import TG
from threshold_gating.taxonomy import TAXONOMY

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Pair:
    """A function of x, mostly of a second input, and of parameters, in two forms.

    Args:
        t: the instance whose parameters the tensors start from.
        share: "layer", "channel" (axis 1) or "neuron".
        second: what another input does: "" (there is none), "read" by the branches, "times" y.
        reference, kernel: called with (x, [other,] tau, theta, s, c, **options).
    """

    name: str
    t: TG
    share: str
    second: str
    reference: Function
    kernel: Function

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> list[Tensor]:
        """x and what else the function reads, then its parameters, all requiring gradients."""
        x = torch.randn(shape, device=device).mul(3).to(dtype)
        others = [torch.randn(shape, device=device).to(dtype)] if self.second else []
        rows = [*self._taus(), *self.t.theta, *self.t.s, *self.t.c]
        wide = {"layer": (), "channel": (*shape[1:2],), "neuron": shape[1:]}[self.share]
        where = (1, *wide, *(1,) * (len(shape) - 1 - len(wide))) if self.share != "layer" else ()
        noise = torch.rand(len(rows), *wide, device=device).mul(0.1)
        start = torch.tensor(rows, device=device).view(-1, *(1,) * len(wide))
        moved = (start + noise).unbind(0)
        return [t.requires_grad_() for t in (x, *others, *(m.reshape(where) for m in moved))]

    def _taus(self) -> tuple[float, ...]:
        if self.t.hard:
            return ()
        return self.t.tau if isinstance(self.t.tau, tuple) else (self.t.tau,)

    def call(self, f: Function, inputs: list[Tensor]) -> Tensor:
        """`f` on what `inputs` made (or on the same in another dtype)."""
        known = 2 if self.second else 1
        rest, K = list(inputs[known:]), self.t.K
        taus = [rest.pop(0) for _ in self._taus()]
        tau: Any = taus if len(taus) > 1 else taus[0] if taus else float("inf")
        theta, s, c = rest[: K - 1], rest[K - 1 : 2 * K - 1], rest[2 * K - 1 :]
        options = {"owner": self.t.owner, "centred": self.name.startswith("tanh")}
        return f(*inputs[:known], tau, theta, s, c, **options)


def _reading(x: Tensor, v: Tensor, *parameters: Any, **options: Any) -> Tensor:
    return primitive.blend(x, *parameters, v=v, **options)


def _kernel_reading(x: Tensor, v: Tensor, *parameters: Any, **options: Any) -> Tensor:
    return kernels.blend(x, *parameters, v=v, **options)


def _times(x: Tensor, up: Tensor, *parameters: Any, **options: Any) -> Tensor:
    return up * primitive.blend(x, *parameters, **options)


_Way = tuple[str, Function, Function]
_ALONE: _Way = ("", primitive.blend, kernels.blend)
_READ: _Way = ("read", _reading, _kernel_reading)
_TIMES: _Way = ("times", _times, kernels.blend_times)
# One instance for each way a kernel takes: K = 2, K = 2 about its middle, one tau, a tau for each
# threshold, hard gates.
_INSTANCES = ("silu", "tanh", "mish", "gelu", "gelu_k4", "leaky_relu", "hardtanh")
_CASES = [
    *((key, share, _ALONE) for key in _INSTANCES for share in ("layer", "channel", "neuron")),
    *((key, "channel", _READ) for key in ("silu", "gelu", "leaky_relu")),
    *((key, "layer", _TIMES) for key in ("silu", "gelu_tanh")),
    ("mish", "channel", _TIMES),
]
PAIRS = {
    (name := " ".join(filter(None, (key, share, way[0])))): Pair(name, TAXONOMY[key], share, *way)
    for key, share, way in _CASES
}


def disagreement(
    pair: Pair, inputs: list[Tensor], kernel: Function | None = None
) -> dict[str, float]:
    """Largest error of y and of each gradient against float64, over the largest value or term."""
    exact = [t.detach().double().requires_grad_() for t in inputs]
    found = []
    for f, given in ((pair.reference, exact), (kernel or pair.kernel, inputs)):
        y = pair.call(f, given)
        torch.manual_seed(1)
        slope = torch.randn(y.shape).to(y.device, inputs[0].dtype)
        found.append([y, *torch.autograd.grad(y, given, slope.to(y.dtype), materialize_grads=True)])
    names = ["y", "dx", *(["dother"] if pair.second else [])]
    names += [f"dparameter {k}" for k in range(len(found[0]) - len(names))]
    errors = {}
    terms = float((slope.double().abs() * (1 + exact[0].detach().abs())).sum())
    for name, want, have in zip(names, *found, strict=True):
        # a parameter's gradient is a sum, whose rounding errors are as large as its terms
        summed = terms / want.numel() if name.startswith("dparameter") else 0.0
        size = max(float(want.detach().abs().max()), summed, 1e-30)
        errors[name] = float((have.detach().double() - want.detach()).abs().max()) / size
    return errors
