"""Gates behind a norm, whose kernel makes the sums of the norm's backward pass (`blend.norms`).

These are sums of dx and of dx (z - mean). They are also the gradients of a shift and a scale of
zero in x + shift + scale (z - mean), which is how plain torch has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.subjects import NAMES, Gates, Shape, Tensors, learned
from threshold_gating import kernels
from threshold_gating.kernels import runtime
from threshold_gating.kernels.backend import runs_triton
from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.layout import like
from threshold_gating.kernels.structure import Role, Structure, Wanted
from threshold_gating.nn import Activation


@dataclass(frozen=True)
class Normed:
    """Gates of each channel that learn `train`, behind a norm. `joined`, y goes two ways, and two
    gradients come back."""

    gates: Gates
    train: tuple[str, ...] = NAMES
    joined: bool = False

    def draw(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        x, z = (torch.randn(shape, device=device).mul(size).to(dtype) for size in (3, 1))
        if x.dim() == 4:
            x, z = (t.to(memory_format=torch.channels_last) for t in (x, z))
        each = 1, shape[1], *(1,) * (len(shape) - 2)
        found = {"x": x, **self.gates.parameters(shape, device, self.train)}
        found |= {name: torch.zeros(each, device=device) for name in ("shift", "scale")}
        return learned(found) | {"z": z, "mean": torch.randn(each, device=device)}

    def reference(self, w: Tensors) -> Tensors:
        y = self.gates.reference(w | self._moving(w) | {"x": _normed(w)})
        return self._on_their_ways(y, torch.float64)

    def _moving(self, w: Tensors) -> Tensors:
        """Constants that nobody learns move with a hard threshold: the values there stay."""
        if not self.gates.t.hard or "c" in self.train:
            return {}
        theta, slopes = (self.gates.rows(w, name) for name in ("theta", "s"))
        at = zip(
            Structure.anchored_values(self.gates.t), slopes, Structure.nearest(theta), strict=True
        )
        return {f"c {k}": v - s * near for k, (v, s, near) in enumerate(at)}

    def kernel(self, w: Tensors) -> Tensors:
        x, shape = w["x"], tuple(w["mean"].shape)
        act = Activation(
            self.gates.t, share="channel", channels=shape[1], train=self.train, device=x.device
        )
        own = self.gates.held(act, w)
        if not runs_triton(x, kernels.backend()):  # such sums are steps of their own
            y = torch.func.functional_call(act, own, (_normed(w),))
            return self._on_their_ways(y, x.dtype)
        plan = gpu.plan(act._structure, Role.ALONE, x.shape, x.stride(), x.dtype, shape)
        held = act._structure.tensors({**dict(act.named_buffers()), **own}, act)
        given = [w[name] for name in ("x", "z", "mean", "shift", "scale")]
        ways = _Launched.apply(plan, self.joined, *given, *held)  # type: ignore[no-untyped-call]
        return dict(zip(self._names(), ways, strict=False))

    def _on_their_ways(self, y: Tensor, dtype: torch.dtype) -> Tensors:
        """y for everyone who reads it, rounded on each way."""
        return {name: y.to(dtype, copy=True) for name in self._names()}

    def _names(self) -> tuple[str, ...]:
        return ("y", "y again") if self.joined else ("y",)


def _normed(w: Tensors) -> Tensor:
    return w["x"] + w["shift"] + w["scale"] * (w["z"] - w["mean"])


class _Launched(torch.autograd.Function):
    """Forward as in any call, backward as `norms` lets a compiled graph launch it."""

    @staticmethod
    def forward(
        ctx: Any, plan: gpu.Plan, joined: bool, x: Tensor, z: Tensor, mean: Tensor,
        shift: Tensor, scale: Tensor, *held: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = runtime.readable(plan.read(x, held))
        ctx.save_for_backward(x, z, mean, *given)
        ctx.kept = plan, Role.JOINED if joined else Role.NORMED
        y = plan.forward(x, None, given)
        return y, y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor, more: Tensor) -> Any:
        (x, z, mean, *given), (plan, role) = ctx.saved_tensors, ctx.kept
        known = plan.known._replace(role=int(role))
        wanted = Wanted.of((True, False, *ctx.needs_input_grad[-6:]))
        run, parts, axis = gpu.prepared(known, plan.sizes, x.element_size(), wanted)
        rows, channels = known.sums(wanted), plan.sizes[1]
        add = gpu.adding(parts, axis, (rows, 0, 0, 0), apart=False)
        dx, sums = torch.empty_like(x), x.new_empty(parts, dtype=torch.float32)
        # the means are where another input's gradient would be, the second term where theta's
        second = like(more, x) if role == Role.JOINED else sums
        run((x, z, like(dy, x), dx, mean, sums, second, sums, sums, *given))
        added = x.new_empty(rows, channels, dtype=torch.float32)
        if add is None:  # of one part; a compiled graph takes nothing along there
            added = sums[0]
        else:
            add((sums, *[added] * 4))
        found: list[Tensor | None] = [None] * 6
        at = 0
        needed = ctx.needs_input_grad[-6:]
        for k, w in enumerate((given[1], *given[3:])):  # of rho, dtheta, s, c
            if wanted[2 + k]:
                count = w.numel() // channels
                # of tau0 or theta0 where these are computed from what is learned
                found[k if needed[k] else k + 4] = added[at : at + count].view(w.shape)
                at += count
        assert at == rows - 2
        shift, scale = (row.view(mean.shape) for row in added[at:])
        return None, None, dx, None, None, shift, scale, *found
