"""Table 1 as modules. `Activation` is tier A: one instance applied to each element.

Parameters have the branch or threshold axis first and the sharing group behind it: theta [K-1, G],
s and c [K, G], tau [G] or, with one tau per threshold, [K-1, G]; G is 1 for a layer, the channels
or the shape of a neuron's position otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from threshold_gating import kernels, taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn.spec import (
    LEARNABLE,
    SHARES,
    Elementwise,
    Holder,
    Share,
    attach,
    group_of,
    keeping_wide,
    learned,
    names_of,
)
from threshold_gating.primitive import Value

__all__ = ["LEARNABLE", "SHARES", "Activation", "Share", "keeping_wide", "names_of"]

# What is fixed when an activation is made, and the argument that sets it.
_FIXED = {"init": "init", "share": "share", "group": "channels", "learned": "train"}


class Activation(Elementwise, Holder):
    """y = sum_k g_k(x) (s_k x + c_k) for each element (Eq. 3): any activation, frozen or learned.

    Frozen (the default) it adds nothing to `state_dict`, so checkpoints of the original network
    load strictly, both ways. Learned, tau = tau0 exp(rho) and theta = theta0 + dtheta start exactly
    at `init`; rho is used within +-7, so tau stays positive whatever the optimiser does. A learned
    hard gate keeps the values at its thresholds (`v` instead of `c`), which gives theta a gradient;
    where it jumps, theta has that of a soft gate there (`primitive.straight_through`). Thresholds
    of hard and of product-form gates keep their order: one that passes its neighbour takes its
    place (`kernels.structure.in_order`).
    Gate tensors stay float32 under `.half()` and `.bfloat16()` (1.702 would become 1.7031).
    A state dict of a learned one does not load into one that differs in what is not learned: torch
    keeps that in its metadata, which `torch.save` writes. One without (a plain dict, safetensors,
    a file of an earlier version) loads unchecked.

    Args:
        init: an instance or a key of `TAXONOMY`.
        share: which elements share parameters: "net" or "layer" (all of them; reuse one module in
            several places for "net"), "channel", "head" (the same, of attention), "neuron" (each
            position).
        channels: number of channels, or for "neuron" the shape of the positions from `axis` on.
        axis: where the channels are in the input; 1 for images, -1 for tokens.
        train: which of "tau", "theta", "s", "c" are learned.
        inplace: overwrite the input with the result, as torch's activations do when told so. Gates
            keep a copy of the input for the backward pass.

    >>> Activation("silu")(torch.tensor([1.0]))
    tensor([0.7311])
    """

    tau0: Tensor
    theta0: Tensor
    s: Tensor
    c: Tensor
    v: Tensor
    rho: nn.Parameter
    dtheta: nn.Parameter
    _again: Any = None  # of `kernels.blend`: makes a call like the last one; in no file or copy

    def __init__(
        self,
        init: TG | str = "silu",
        *,
        share: Share = "layer",
        channels: int | Sequence[int] | None = None,
        axis: int = 1,
        train: Iterable[str] = (),
        inplace: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(init, str | TG):
            raise TypeError(f"Activation: init is a TG or a key of TAXONOMY; got {init!r}.")
        self.name = taxonomy.key_of(init) if isinstance(init, str) else taxonomy.name_of(init)
        record = init if isinstance(init, TG) else taxonomy.TAXONOMY[taxonomy.key_of(init)]
        self.init = record
        self.share, self.axis, self.inplace = share, axis, inplace
        self.group = group_of(share, channels)
        self.learned = learned(record, train)
        self._structure = kernels.Structure.of(record, self.learned)
        attach(self, "", self, device)

    @classmethod
    def of(cls, spec: Elementwise, tensors: Mapping[str, Tensor]) -> Activation:
        """A gate as a module around tensors that somebody else holds."""
        new = object.__new__(cls)
        nn.Module.__init__(new)
        vars(new).update(
            name=taxonomy.name_of(spec.init),
            init=spec.init,
            share=spec.share,
            axis=spec.axis,
            inplace=False,
            group=spec.group,
            learned=spec.learned,
            _structure=spec._structure,
        )
        for name, role in spec.roles().items():
            t = tensors[name]
            if role == "parameter" and isinstance(t, nn.Parameter):
                new._parameters[name] = t
            else:  # known, or made by a parametrization
                new._buffers[name] = t
        return new

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"Activation: {name} is fixed when it is made, and setting it later would change "
                f"nothing; make a new one, as Activation(..., {_FIXED[name]}=...)."
            )
        self.__dict__.pop("_again", None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))  # at once, for another thread may be calling
        state.pop("_again", None)
        return state

    if TYPE_CHECKING:  # nn.Module says Any

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element of `x`; shape and dtype are kept."""
        holder = self if type(self) is Activation else None  # another may hold other tensors
        return kernels.blend(
            x, self._structure, self._held, native=True, inplace=self.inplace, holder=holder
        )

    def _held(self, x: Tensor) -> tuple[Any, tuple[int, ...]]:
        return self.held(self, "", x)

    def tensors(self) -> Any:
        """What `kernels` read of this gate, whole, as it is held."""
        return self._structure.tensors(self.tensors_of(self, ""), self)

    def values(self) -> tuple[Any, list[Tensor], list[Value], list[Value]]:
        """(tau, theta, s, c) now: structural numbers where they are known, else tensors."""
        tau, theta, s, c = self._structure.rows(self.tensors())
        return tau if isinstance(self.init.tau, tuple) else tau[0], theta, s, c

    @torch.no_grad()
    def set_values(self, tau: Any, theta: Any, s: Any = None, c: Any = None) -> None:
        """Let the learned among tau, theta, s, c be these, as `values` gives them.

        They may be numbers or tensors, K or K - 1 along the first axis, and broadcast to the group.
        """
        if "tau" in self.learned:
            own = isinstance(self.init.tau, tuple)
            new = _rows_like(tau, self.tau0) if own else torch.as_tensor(tau)
            if not bool(((new > 0) & (new < math.inf)).all()):
                raise ValueError(f"set_values: tau must be positive and finite; got {tau!r}.")
            self.tau0.copy_(new)
            self.rho.zero_()
        if "theta" in self.learned:
            self.theta0.copy_(_rows_like(theta, self.theta0))
            self.dtheta.zero_()
        if "s" in self.learned and s is not None:
            self.s.copy_(_rows_like(s, self.s))
        if "c" in self.learned and c is not None:
            if self.init.hard:
                near = torch.stack(kernels.Structure.nearest(list(self.theta0.unbind(0))))
                self.v.copy_(_rows_like(c, self.v) + self.s * near)
            else:
                self.c.copy_(_rows_like(c, self.c))

    def instances(self) -> list[TG]:
        """The instance of each sharing group as it is now, in order."""
        if not self.learned:
            return [self.init] * math.prod(self.group)
        tau, theta, s, c = self.values()
        taus = tau if isinstance(tau, list) else [tau]
        columns = [_columns(w, self.group) for w in (taus, theta, s, c)]
        return [self._instance(*numbers) for numbers in zip(*columns, strict=True)]

    def _instance(self, tau: Any, theta: Any, s: Any, c: Any) -> TG:
        """The record of learned numbers."""
        form, owner = self.init.form, self.init.owner
        if self.init.hard and owner is not None:
            theta, owner = in_order(theta, owner)
        clamp = self.init.clamp
        return TG(tau if len(tau) > 1 else tau[0], theta, s, c, form=form, owner=owner, clamp=clamp)

    def instance(self, channel: int = 0) -> TG:
        """The instance of one sharing group as it is now."""
        return self.instances()[channel]

    def extra_repr(self) -> str:
        t = self.init
        row = taxonomy.ROWS.get(self.name) if self.name else None
        words = [self.name or repr(t), f"K={t.K}"]
        if self.learned:
            words.append(f"train=({', '.join(self.learned)})")
        elif row is not None:
            words.append("exact" if row.exact else f"sup {row.sup:.1e}")
        if self.share not in ("net", "layer"):
            words += [f"share={self.share}", f"channels={'x'.join(map(str, self.group))}"]
        return ", ".join(words)


def in_order(
    theta: Sequence[float], owner: Sequence[str]
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Hard thresholds and their owners from low to high, as a record has them."""
    # at equal thresholds "hi" first: the point between them belongs to the middle
    pairs = sorted(zip(theta, owner, strict=True), key=lambda p: (p[0], p[1] != "hi"))
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


def _rows_like(w: Any, like: Tensor) -> Tensor:
    """The rows of `w`, numbers or tensors, each expanded to those of `like`."""
    return torch.stack([torch.as_tensor(row).to(like).expand(like.shape[1:]) for row in w])


def _columns(rows: Sequence[Value], group: tuple[int, ...]) -> list[tuple[float, ...]]:
    """Transpose rows of shape `group` into one tuple of numbers per group member."""
    full = [
        (
            r.detach().double().expand(group) if isinstance(r, Tensor) else torch.full(group, r)
        ).flatten()
        for r in rows
    ]
    if not full:
        return [()] * math.prod(group)
    return [tuple(column) for column in torch.stack([r.double().cpu() for r in full], 1).tolist()]
