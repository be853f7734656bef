"""Gates of each synapse in plain torch: a tap of the kernel after the other, some rows at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from threshold_gating import primitive
from threshold_gating.kernels.blend.function import blend
from threshold_gating.kernels.product.formula import Conv
from threshold_gating.primitive import GateForm, Value, graphs

# Elements of one gate that are held at once.
_AT_ONCE = 1 << 22


class Synapses(NamedTuple):
    """tau (one, or K - 1), K - 1 theta, K slopes and constants, each (O, I / groups, *kernel).

    Or a number. The kernel of a gate is 1 where all taps share it.
    """

    tau: list[Value]
    theta: list[Value]
    slopes: list[Value]
    constants: list[Value]

    @property
    def K(self) -> int:
        return len(self.slopes)

    def at(self, tap: tuple[int, ...], groups: int) -> Synapses:
        """Those of one tap, (groups, O / groups, I / groups)."""

        def here(w: Value) -> Value:
            if not isinstance(w, Tensor) or w.dim() < 2:
                return w
            sizes = w.shape[w.dim() - len(tap) :]
            where: tuple[Any, ...] = tuple(min(t, n - 1) for t, n in zip(tap, sizes, strict=True))
            one: Tensor = w[(..., *where)]
            return one.view(groups, -1, one.shape[-1])

        return Synapses(*[[here(w) for w in row] for row in self])


class Formula(NamedTuple):
    """Everything about the gates and the convolution that is not a tensor."""

    form: GateForm
    owner: tuple[str, ...] | None
    jumps: bool  # where a learned hard threshold has the gradient of a soft one
    conv: Conv | None

    def __call__(self, x: Tensor, synapses: Synapses, factor: Tensor | None = None) -> Tensor:
        """(..., I) -> (..., O), or (B, C, *spatial) -> (B, O, *spatial); differentiable."""
        if self.conv is not None:
            return self._taps(x, synapses, factor, self.conv)
        y = self._rows(x.reshape(-1, x.shape[-1]), synapses.at((), 1), factor)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _taps(self, x: Tensor, synapses: Synapses, factor: Tensor | None, conv: Conv) -> Tensor:
        """A sum over the taps of the kernel.

        With zero padding a synapse whose input lies outside is silent: its gates, which would see a
        zero there, are not evaluated.
        """
        pad, zeros = padding(conv), conv.mode == "constant"
        inside, kernel = None, kernel_of(synapses, len(conv.stride))
        if any(pad):
            inside = F.pad(torch.ones_like(x[:1, :1]), pad) if zeros else None
            x = F.pad(x, pad, conv.mode)
            factor = None if factor is None else F.pad(factor, pad, conv.mode)
        out = out_sizes(x.shape[2:], kernel, conv)
        total: Tensor | None = None
        for tap in itertools.product(*map(range, kernel)):
            starts = (t * d for t, d in zip(tap, conv.dilation, strict=True))
            where: tuple[Any, ...] = (
                ...,
                *(
                    slice(a, a + s * (n - 1) + 1, s)
                    for a, s, n in zip(starts, conv.stride, out, strict=True)
                ),
            )
            part = x[where].movedim(1, -1)  # (B, *out, C)
            by = None if factor is None else factor[where].movedim(1, -1)
            own = synapses.at(tap, conv.groups)
            y = self._rows(part.reshape(-1, part.shape[-1]), own, by)
            y = y.view(*part.shape[:-1], y.shape[-1]).movedim(-1, 1)
            y = y if inside is None else y * inside[where]
            total = y if total is None else total + y
        assert total is not None
        return total

    def _rows(self, x: Tensor, synapses: Synapses, factor: Tensor | None) -> Tensor:
        """(N, C) -> (N, O) for one tap."""
        like = next(w for row in synapses for w in row if isinstance(w, Tensor) and w.dim() == 3)
        groups, outputs, inputs = like.shape
        z = x.view(len(x), groups, 1, inputs).expand(-1, -1, outputs, -1)
        rows = max(1, _AT_ONCE // max(1, like.numel()))
        zs = z.split(rows)  # type: ignore[no-untyped-call]
        scales: Sequence[Tensor | None] = [None] * len(zs)
        if factor is not None:
            scales = factor.reshape(len(x), groups, 1, -1).split(rows)  # type: ignore[no-untyped-call]
        run: Callable[..., Tensor] = self._summed
        if _may_run_again():
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        parts = [run(part, by, *synapses) for part, by in zip(zs, scales, strict=True)]
        return torch.cat(parts).flatten(-2)

    def _summed(
        self,
        z: Tensor,
        by: Tensor | None,
        tau: Any,
        theta: list[Value],
        s: list[Value],
        c: list[Value],
    ) -> Tensor:
        """sum_i sum_k g_k(z_i) (w^k_i z_i + c^k_i) by_i: (N, groups, O, I) -> (N, groups, O)."""
        about: dict[str, Any] = {"form": self.form, "owner": self.owner, "centred": False}
        y = blend(z, tau if len(tau) > 1 else tau[0], theta, s, c, known=True, **about)
        if self.jumps and torch.is_grad_enabled():
            y = primitive.straight_through(z, y, theta, s, c)
        return (y if by is None else y * by).sum(-1)


def padding(conv: Conv) -> list[int]:
    """What is padded on either side of each axis, the last axis first, as F.pad takes it."""
    return list(conv.pad) or [n for n in reversed(conv.padding) for _ in (0, 1)]


def kernel_of(synapses: Synapses, spatial: int) -> tuple[int, ...]:
    """The sizes of the kernel, which gates that all taps share have not."""
    tensors = [w for row in synapses for w in row if isinstance(w, Tensor) and w.dim() > 1]
    each = [w.shape[w.dim() - spatial :] for w in tensors]
    return tuple(max(sizes) for sizes in zip(*each, strict=True))


def out_sizes(padded: Sequence[int], kernel: Sequence[int], conv: Conv) -> list[int]:
    parts = zip(padded, conv.dilation, kernel, conv.stride, strict=True)
    return [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in parts]


@graphs.constant
def _may_run_again() -> bool:
    """Whether a part may be computed again in the backward pass instead of being kept.

    Transforms do not see into a checkpoint. One that is made in a backward pass, for second
    derivatives, would run again in another thread, which knows no backend; and within another one
    torch 2.11 would find other tensors when that runs again.
    """
    if torch._C._current_graph_task_id() != -1 or torch._C._are_functorch_transforms_active():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or hooks[0].__module__ != checkpoint.__module__
