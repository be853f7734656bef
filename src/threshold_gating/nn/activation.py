"""Table 1 as modules. `Activation` is tier A: one instance applied to each element.

Parameters have the branch or threshold axis first and the sharing group behind it: theta [K-1, G],
s and c [K, G], tau [G] or, with one tau per threshold, [K-1, G]; G is 1 for a layer, the channels
or the shape of a neuron's position otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from threshold_gating import kernels, taxonomy
from threshold_gating.instance import TG
from threshold_gating.primitive import Value

Share = Literal["net", "layer", "channel", "head", "neuron"]
SHARES = get_args(Share)
LEARNABLE = ("tau", "theta", "s", "c")
# What is fixed when an activation is made, and the argument that sets it.
_FIXED = {"init": "init", "share": "share", "group": "channels", "learned": "train"}


class Activation(nn.Module):
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
        self.group = _group(share, channels)
        self.learned = _learned(record, train)
        self._structure = kernels.Structure.of(record, self.learned)
        self._reset(device=device)

    def _reset(self, device: Any) -> None:
        """Make the tensors: parameters and their starts if learned, else what `init` says."""
        learned, hard = self.learned, self.init.hard
        constant = "v" if hard and learned else "c"
        starts = {"tau0": "tau", "theta0": "theta", "s": "s", constant: "c"}
        if hard:
            del starts["tau0"]
        for name, what in starts.items():
            value = self._start(name, device, torch.float32)
            if what in learned and name in ("s", constant):
                setattr(self, name, nn.Parameter(value))
            else:
                self.register_buffer(name, value, persistent=what in learned)
        if "tau" in learned:
            self.rho = nn.Parameter(torch.zeros_like(self.tau0))
        if "theta" in learned:
            self.dtheta = nn.Parameter(torch.zeros_like(self.theta0))

    def _start(self, name: str, device: Any, dtype: torch.dtype) -> Tensor:
        t = self.init
        if name == "tau0" and not isinstance(t.tau, tuple):
            return torch.full(self.group, t.tau, device=device, dtype=dtype)
        values = kernels.Structure.anchored_values(t)
        rows = {"tau0": t.tau, "theta0": t.theta, "s": t.s, "c": t.c, "v": values}
        column = torch.tensor(rows[name], device=device, dtype=dtype)
        return column.view(-1, *(1 for _ in self.group)).repeat(1, *self.group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Activation:
        super()._apply(keeping_wide(fn), recurse)  # type: ignore[no-untyped-call]
        # What `init` says is not in any checkpoint: make it anew, for `to_empty` left it unset and
        # `double` would have kept only its float32 digits.
        for name in self._non_persistent_buffers_set:
            old = getattr(self, name)
            setattr(self, name, self._start(name, old.device, old.dtype))
        self._refine()
        return self

    @torch.no_grad()
    def _refine(self) -> None:
        """Give float64 values that are still at their start the digits that float32 had not."""
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            shared_out = type(value) not in (Tensor, nn.Parameter)
            if value.dtype != torch.float64 or name in ("rho", "dtheta") or shared_out:
                continue
            rounded = self._start(name, value.device, torch.float32).double()
            start = self._start(name, value.device, torch.float64)
            value.copy_(torch.where(value == rounded, start, value))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.learned and hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["fixed"] = self._fixed()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        own = self._fixed()
        saved = local_metadata.get("fixed", own)  # files of before, and other formats, have it not
        if self.learned and saved != own:
            keys = [k for k in {**saved, **own} if saved.get(k) != own.get(k)]
            apart = ", ".join(f"{k} = {saved.get(k)} and not {own.get(k)}" for k in keys)
            errors: list[str] = others[-1]
            errors.append(
                f"{prefix[:-1] or 'Activation'} was saved with {apart}, which was not learned and "
                "is no value of the state dict, so that it would be another function; make this "
                "one with the init and axis of the other."
            )

    def _fixed(self) -> dict[str, Any]:
        """What decides the function beside the values in a state dict. It stands in what torch
        calls the metadata of a state dict, which has no key and need not be there."""
        t = self.init
        fixed = {k: v for k, v in t.to_dict().items() if k not in ("anchor", *self.learned)}
        if t.hard and "c" in fixed:
            # as `v`, which stays while theta moves
            fixed["c"] = list(kernels.Structure.anchored_values(t))
        return {**fixed, "K": t.K, "axis": None if self.group == (1,) else self.axis}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(
                f"Activation: {name} is fixed when it is made, and setting it later would change "
                f"nothing; make a new one, as Activation(..., {_FIXED[name]}=...)."
            )
        super().__setattr__(name, value)

    if TYPE_CHECKING:  # nn.Module says Any

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element of `x`; shape and dtype are kept."""
        return kernels.blend(x, self._structure, self._held, native=True, inplace=self.inplace)

    def _held(self, x: Tensor) -> tuple[Any, tuple[int, ...]]:
        """The tensors of the gate, and the shape in which a group's values broadcast against x."""
        tensors = self.tensors()
        if x.dtype == torch.float64 and not self.learned and self.theta0.dtype != torch.float64:
            # float32 has not all digits of 0.2
            own = {name: self._start(name, x.device, x.dtype) for name in self._buffers}
            tensors = self._structure.tensors(own, self)
        shape_in = _shape_in if torch.compiler.is_compiling() else _kept_shape
        return tensors, shape_in(self.share, self.group, self.axis, x.shape)

    def tensors(self) -> Any:
        """What `kernels` read of this gate, whole, as it is held."""
        # looked up here, because attributes of a module take longer than the rest
        return self._structure.tensors({**self._buffers, **self._parameters}, self)

    def values(self) -> tuple[Any, list[Tensor], list[Value], list[Value]]:
        """(tau, theta, s, c) now: structural numbers where they are known, else tensors."""
        tau, theta, s, c = self._structure.rows(self.tensors())
        return tau if isinstance(self.init.tau, tuple) else tau[0], theta, s, c

    def reset_parameters(self) -> None:
        """Return to `init`."""
        with torch.no_grad():
            for name, value in [*self.named_parameters(), *self.named_buffers()]:
                at_zero = name in ("rho", "dtheta")
                value.copy_(
                    torch.zeros_like(value)
                    if at_zero
                    else self._start(name, value.device, value.dtype)
                )

    @torch.no_grad()
    def set_values(self, tau: Any, theta: Any, s: Any = None, c: Any = None) -> None:
        """Let the learned among tau, theta, s, c be these, as `values` gives them.

        They may be numbers or tensors, K or K - 1 along the first axis, and broadcast to the group.
        """
        if "tau" in self.learned:
            own = isinstance(self.init.tau, tuple)
            self.tau0.copy_(_rows_like(tau, self.tau0) if own else torch.as_tensor(tau))
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
            # at equal thresholds "hi" first: the point between them belongs to the middle
            pairs = sorted(zip(theta, owner, strict=True), key=lambda p: (p[0], p[1] != "hi"))
            theta, owner = (tuple(w) for w in zip(*pairs, strict=True)) if pairs else ((), ())
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


def keeping_wide(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, a cast or a move of a module's tensor, that moves gate tensors but never to 16 bits."""

    def moved(t: Tensor) -> Tensor:
        new = fn(t)
        narrow = new.is_floating_point() and new.element_size() < 4
        return t.detach().to(new.device) if narrow else new

    return moved


def _group(share: str, channels: int | Sequence[int] | None) -> tuple[int, ...]:
    if share == "synapse":
        raise ValueError(
            "Activation: an activation acts before the weights and cannot differ per synapse; "
            "share is 'net', 'layer', 'channel', 'head' or 'neuron'."
        )
    if share not in SHARES:
        raise ValueError(f"Activation: share is one of {', '.join(SHARES)}; got {share!r}.")
    if share in ("net", "layer"):
        if channels is not None:
            raise ValueError(f"Activation: share={share!r} takes no channels; got {channels}.")
        return (1,)
    if isinstance(channels, float):
        raise ValueError(f"Activation: channels is a whole number or a shape; got {channels!r}.")
    shape = (channels,) if isinstance(channels, int) else tuple(channels or ())
    if not shape or min(shape) < 1 or (share != "neuron" and len(shape) > 1):
        want = "their number" if share != "neuron" else "the shape of the positions, as (C, H, W)"
        raise ValueError(f"Activation: share={share!r} needs channels, {want}; got {channels!r}.")
    return shape


def _shape_in(
    share: str, group: tuple[int, ...], axis: int, sizes: Sequence[int]
) -> tuple[int, ...]:
    if share in ("net", "layer"):
        return ()
    before = axis + len(sizes) if axis < 0 else axis
    after = len(sizes) - before - len(group)
    if before < 0 or after < 0 or sizes[before : before + len(group)] != group:
        raise ValueError(
            f"Activation: {share} sharing of {group} at axis {axis} does not "
            f"fit an input of shape {tuple(sizes)}; set channels and axis to match it."
        )
    return (1,) * before + group + (1,) * after


_kept_shape = functools.lru_cache(4096)(_shape_in)  # on a GPU it would take as long as a kernel


def names_of(caller: str, train: Any) -> tuple[str, ...]:
    """What is learned, as names: of one, of several, or an error that says what there is."""
    if isinstance(train, bool) or not isinstance(train, Iterable):
        raise TypeError(
            f"{caller}: train names what is learned, some of {', '.join(LEARNABLE)}, as in "
            f'train=("tau", "theta"), or () for nothing; got {train!r}.'
        )
    return (train,) if isinstance(train, str) else tuple(train)


def _learned(t: TG, train: Iterable[str]) -> tuple[str, ...]:
    names = names_of("Activation", train)
    if unknown := [n for n in names if n not in LEARNABLE]:
        raise ValueError(f"Activation: train takes {', '.join(LEARNABLE)}; got {unknown[0]!r}.")
    if t.hard and "tau" in names:
        raise ValueError(
            "Activation: a hard gate (tau = inf) has no sharpness to learn; train theta, s, c, or "
            "start from a soft instance."
        )
    if t.K == 1 and {"tau", "theta"} & set(names):
        raise ValueError("Activation: one branch (K = 1) has no gate to learn; train s, c only.")
    if names and t.q is not None:
        raise ValueError(
            "Activation: instances with quadratic branches stay frozen; train one with affine "
            "branches instead (for hardswish: 'hardswish_k3')."
        )
    return tuple(n for n in LEARNABLE if n in names)


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
