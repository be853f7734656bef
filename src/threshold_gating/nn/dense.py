"""Table 1 below tier A: `Linear` and `Conv1d` to `Conv3d` with weights for each of K branches.

Each layer is an activation and the layer behind it in one (Eq. 4),

    a_j = sum_i sum_k g_k(x_i) (w^k_ji x_i + c^k_ji) + b_j,

and the tier says what is free: in W the weights w^k, with gates shared by all outputs and constants
c^k = c_k w^k; in S the gates of each synapse (or pair of channels) too; in `general` also c^k.
Tier A, where w^k = s_k W, is an `Activation` before a layer of torch.

Weights are (O, K, I / groups, *kernel). The gates are an `Activation`, the child `gate`. A branch
without slope and constant, like the low one of ReLU, gets the slope 1 and weights 0: with slope 0
its weights would never receive a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from threshold_gating import kernels, taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.nn.tying import (
    SHARES,
    Accuracy,
    Tier,
    TierShare,
    accuracy_of,
    branches_of,
    parameter_count,
    record_of,
    share_of,
    trained_of,
)
from threshold_gating.primitive import Value, wide

__all__ = ["SHARES", "TIERED", "Conv1d", "Conv2d", "Conv3d", "Linear", "parameter_count"]


class _Tiered(nn.Module):
    """What the layers share: their tier, their gates, and how the tiers multiply."""

    if TYPE_CHECKING:  # torch's stubs disagree on these two
        weight: Any
        bias: Any
    c: nn.Parameter | None  # tier S: the constants of the branches, where they are learned
    const: nn.Parameter | None  # general: the constant of each synapse
    gate: Activation
    _accuracy: Accuracy = "full"

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        init: TG | str,
        *,
        tier: Tier = "W",
        share: TierShare | None = None,
        train: Iterable[str] | None = None,
        size: Sequence[int] = (),
        accuracy: Accuracy = "full",
    ) -> Self:
        """The layer that computes `layer(init(x))`, with the weights of `layer`."""
        plain = next(c for c, ours in TIERED.items() if ours is cls)
        if type(layer) is not plain:
            raise TypeError(
                f"{cls.__name__}.from_dense: takes a plain torch.nn.{plain.__name__}; "
                f"got {type(layer).__name__}."
            )
        new = object.__new__(cls)
        nn.Module.__init__(new)
        for name, value in vars(layer).items():
            if not name.startswith("_") or name == "_reversed_padding_repeated_twice":
                vars(new)[name] = value
        new.weight, new.bias = layer.weight, layer.bias
        new._set(None, tier, share, init, train, size, accuracy)
        return new

    def _set(
        self,
        K: int | None,
        tier: str,
        share: str | None,
        init: TG | str | None,
        train: Iterable[str] | None,
        size: Sequence[int],
        accuracy: Accuracy,
    ) -> None:
        """Replace the dense weight by K of them that make the layer start as `init`, then W."""
        name = type(self).__name__
        self.tier, self.share = tier, share_of(name, tier, share)
        self.init, self.size = record_of(name, K, init), tuple(size)
        self.accuracy = accuracy
        learned = trained_of(name, self.init, train)
        branches, self._factors = branches_of(self.init, free_constants=tier == "general")
        group = self._group()
        # Tier S has K constants in all, not K for each synapse, and tier general its own (`const`).
        one_set = tier == "S" and self.share != "channel"
        apart = one_set or tier == "general"
        self.gate = Activation(
            branches,
            share="neuron" if group else "layer",
            channels=group or None,
            train=[what for what in learned if not (apart and what == "c")],
            device=self.weight.device,
        )
        dense = self.weight.detach()
        self.register_parameter("c", None)
        self.register_parameter("const", None)
        if one_set and "c" in learned:
            self.c = nn.Parameter(self.gate.c.flatten(1)[:, :1].clone())
        # K times beside each other, so that they lie in memory as `dense` does (channels_last)
        beside = torch.cat([dense] * branches.K, 1)
        self.weight = nn.Parameter(_branches(beside, branches.K))
        if tier == "general":
            self.const = nn.Parameter(torch.empty_like(self.weight))
        self._tie(dense)

    def _group(self) -> tuple[int, ...]:
        """How many gates there are, in the shape that they are kept in; () is one."""
        dense, groups = self.weight, getattr(self, "groups", 1)
        if self.share == "neuron" and len(self.size) != dense.dim() - 2:
            raise ValueError(
                f"{type(self).__name__}: share='neuron' needs size, the {dense.dim() - 2} spatial "
                f"sizes of the input; got {self.size}."
            )
        groupings: dict[str, tuple[int, ...]] = {
            "layer": (),
            "channel": (dense.shape[1] * groups,),
            "neuron": (dense.shape[1] * groups, *self.size),
            "channel_pair": (*dense.shape[:2], *(1,) * (dense.dim() - 2)),
            "synapse": tuple(dense.shape),
        }
        return groupings[self.share]

    @torch.no_grad()
    def _tie(self, dense: Tensor) -> None:
        """W_k = s_k W (and c^k = c_k W), so that the layer is `init` followed by the dense one."""
        per_branch = (1, -1, *(1,) * (dense.dim() - 1))
        self.weight.copy_(dense.unsqueeze(1) * dense.new_tensor(self._factors).view(per_branch))
        if self.const is not None:
            self.const.copy_(dense.unsqueeze(1) * dense.new_tensor(self.init.c).view(per_branch))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights as torch does for the dense layer; the gates start at `init`."""
        if "gate" not in self._modules:  # torch's constructor asks, before there are branches
            return super().reset_parameters()  # type: ignore[misc, no-any-return]
        dense = torch.empty_like(self.weight[:, 0])
        nn.init.kaiming_uniform_(dense, a=math.sqrt(5))
        self._tie(dense)
        if self.bias is not None:
            bound = 1 / math.sqrt(max(1, dense[0].numel()))
            nn.init.uniform_(self.bias, -bound, bound)
        self.gate.reset_parameters()

    @property
    def K(self) -> int:
        """Number of branches."""
        return int(self.weight.shape[1])

    @property
    def accuracy(self) -> Accuracy:
        """How the gates of synapses are evaluated on a GPU, "full" or "fast"; may be set."""
        return self._accuracy

    @accuracy.setter
    def accuracy(self, accuracy: Accuracy) -> None:
        self._accuracy = accuracy_of(type(self).__name__, accuracy, self.init, self.share)

    def _shared(self, x: Tensor, factor: Tensor | None, conv: kernels.Conv | None) -> Tensor:
        """Tier W, one product."""
        spatial = 0 if conv is None else x.dim() - 2
        group = self.gate.group if self.share != "layer" else ()
        shape = (*group, *(1,) * (spatial + 1 - len(group))) if group else ()
        held = self.gate.tensors()
        gate = (self.gate._structure, held, shape)
        return kernels.gated_product(x, *gate, self.weight, self.bias, conv=conv, factor=factor)

    def _synaptic(self, x: Tensor, factor: Tensor | None, conv: kernels.Conv | None) -> Tensor:
        """Tiers S and general, gates of each synapse."""
        tau, theta, s, c = self.gate._structure.rows(self.gate.tensors())
        weights = self.weight.unbind(1)  # K of (O, I / groups, *kernel)
        slopes: list[Value] = [_times(sk, w) for sk, w in zip(s, weights, strict=True)]
        each: list[Any] = list(c)
        weight = self.weight
        if self.c is not None:
            # A constant's gradient is a sum over all synapses, in float32 and rounded once.
            each, weight = list(wide(self.c).unbind(0)), wide(self.weight)
            weights = weight.unbind(1)
        known, free = self.gate._structure, self.c is not None or self.const is not None
        moves = known.hard and "theta" in known.learned
        if self.const is not None:
            # Of the gate's own only how far a learned hard threshold has moved its branches.
            starts = self.gate.theta0.unbind(0)
            each = (
                kernels.Structure.nearest([a - b for a, b in zip(starts, theta, strict=True)])
                if moves
                else [0.0] * self.K
            )
        constants = [_times(ck, w) for ck, w in zip(each, weights, strict=True)]
        if self.const is not None:
            constants = [a + b for a, b in zip(self.const.unbind(1), constants, strict=True)]
        jumps = known.may_jump or (moves and free)
        return kernels.synaptic(
            x, known, tau, theta, slopes, constants, conv=conv, jumps=jumps, factor=factor,
            fast=self.accuracy == "fast", weight=weight if set(s) == {1.0} else None,
        )  # fmt: skip

    def overhead(self) -> float:
        """Parameters more than the dense layer has, over those it has."""
        dense = self.weight[:, 0].numel() + (0 if self.bias is None else self.bias.numel())
        own = sum(p.numel() for p in self.parameters())
        return float(own / dense - 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # the gates are in it

    def extra_repr(self) -> str:
        family = taxonomy.family(self.init)
        return (
            f"{super().extra_repr()}, tier={self.tier}, K={self.K}, share={self.share}, {family}, "
            f"{'accuracy=fast, ' if self.accuracy == 'fast' else ''}"
            f"+{100 * self.overhead():.3g}% parameters"
        )


class Linear(_Tiered, nn.Linear):
    """An activation and the linear layer behind it in one, with weights for each branch.

    Args:
        in_features, out_features, bias: as torch's.
        K: number of branches; by default that of `init`.
        tier: "W", "S" or "general" (Table 1).
        share: which inputs share gates; W: "layer", "channel" (default), "neuron"; S: "synapse"
            (default), "channel_pair", "channel" (which is W); general: "synapse".
        init: the activation it starts as, an instance or a key of `TAXONOMY`.
        train: which of "tau", "theta", "c" are learned beside the weights.
        accuracy: of gates of each synapse or pair of channels, two soft branches, on a GPU: "fast"
            takes one special function instead of two and is off by up to 4e-6 of a gate on an H200
            (docs/kernels.md). Elsewhere it changes nothing.

    >>> Linear(8, 4, init="relu")
    Linear(in_features=8, out_features=4, bias=True, tier=W, K=2, share=channel, multiplicative, \
+111% parameters)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        K: int | None = None,
        *,
        tier: Tier = "W",
        share: TierShare | None = None,
        init: TG | str | None = None,
        train: Iterable[str] | None = None,
        accuracy: Accuracy = "full",
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set(K, tier, share, init, train, (), accuracy)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """(..., in_features) -> (..., out_features); the gated input is multiplied by `factor`,
        which is as large as x."""
        if x.shape[-1:] != (self.in_features,):
            raise RuntimeError(
                f"Linear: takes {self.in_features} features, the last axis of x; "
                f"got x of shape {tuple(x.shape)}."
            )
        if self.share in ("layer", "channel", "neuron"):
            return self._shared(x, factor, None)
        y = self._synaptic(x, factor, None)
        return y if self.bias is None else y + self.bias


class _Conv(_Tiered):
    """What the convolutions share."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    in_channels: int
    kernel_size: tuple[int, ...]
    groups: int
    padding_mode: Any
    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        K: int | None = None,
        *,
        tier: Tier = "W",
        share: TierShare | None = None,
        init: TG | str | None = None,
        train: Iterable[str] | None = None,
        size: Sequence[int] = (),
        accuracy: Accuracy = "full",
        **options: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, **options)
        self._set(K, tier, share, init, train, size, accuracy)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As torch's, which goes by the number of axes when it converts to channels_last."""
        axes = len(self.stride) + 3

        def moved(t: Tensor) -> Tensor:
            # (O, K, I, *kernel) as the weights (O, K I, *kernel) that the convolution reads; as
            # data, because torch swaps no tensor that has views
            return fn(t) if t.dim() != axes else _branches(fn(t.data.flatten(1, 2)), t.shape[1])

        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """(B, C, *spatial) or (C, *spatial), as torch's convolution; `factor` as in `Linear`."""
        if x.dim() == len(self.stride) + 1:
            one = None if factor is None else factor.unsqueeze(0)
            return self.forward(x.unsqueeze(0), one).squeeze(0)
        self._check(x)
        if self.share in ("layer", "channel", "neuron"):
            return self._shared(x, factor, self._conv())
        y = self._synaptic(x, factor, self._conv())
        return y if self.bias is None else y + self.bias.view(-1, *(1,) * len(self.stride))

    def _check(self, x: Tensor) -> None:
        """What torch's convolution asks of x, before a gate is evaluated."""
        name, axes, shape = type(self).__name__, len(self.stride), tuple(x.shape)
        if x.dim() != axes + 2 or shape[1] != self.in_channels:
            raise RuntimeError(
                f"{name}: takes {self.in_channels} channels and {axes} spatial axes, "
                f"with a batch before them or without; got x of shape {shape}."
            )
        if self.share == "neuron" and shape[2:] != self.size:
            raise RuntimeError(
                f"{name}: has a gate for each of {self.size} positions; got x of shape {shape}."
            )
        pad = self._reversed_padding_repeated_twice
        padded = [n + a + b for n, a, b in zip(shape[:1:-1], pad[::2], pad[1::2], strict=True)]
        covered = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if any(n < k for n, k in zip(padded[::-1], covered, strict=True)):
            raise RuntimeError(
                f"{name}: the kernel covers {tuple(covered)}, which must fit into the padded "
                f"input; got {tuple(padded[::-1])} (x of shape {shape})."
            )

    def _conv(self) -> kernels.Conv:
        pad, mode = self._reversed_padding_repeated_twice, self.padding_mode
        even = mode == "zeros" and pad[::2] == pad[1::2]
        padding = tuple(pad[::-2]) if even else (0,) * len(self.stride)
        outside = () if even else tuple(pad)
        return kernels.Conv(
            self.stride, padding, self.dilation, self.groups, outside,
            "constant" if mode == "zeros" else mode,
        )  # fmt: skip


class Conv1d(_Conv, nn.Conv1d):
    """An activation and the convolution behind it in one; arguments as `Linear`'s and torch's.

    Padding comes after the gates: with `sigmoid` a padded position stays 0, as it does behind a
    plain activation. Gates per neuron need `size`, the spatial sizes of the input.
    """


class Conv2d(_Conv, nn.Conv2d):
    """As `Conv1d`, over images.

    >>> Conv2d(8, 4, 3, padding=1)(torch.zeros(1, 8, 5, 5)).shape
    torch.Size([1, 4, 5, 5])
    """


class Conv3d(_Conv, nn.Conv3d):
    """As `Conv1d`, over volumes."""


# The layer of torch and ours that takes its place.
TIERED: dict[type[nn.Module], type[Any]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}


def _branches(beside: Tensor, K: int) -> Tensor:
    """(O, K I, ...) as (O, K, I, ...), a view."""
    return beside.unflatten(1, (K, beside.shape[1] // K))  # type: ignore[no-untyped-call, no-any-return]


def _times(factor: Value, w: Tensor) -> Value:
    number = None if isinstance(factor, Tensor) else factor
    return 0.0 if number == 0 else w if number == 1 else factor * w
