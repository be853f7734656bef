"""What a gate is beside its tensors, and modules that hold the tensors of gates by name.

A gate that is a module (`Activation`) and one that a module holds under a prefix (`tg_relu_0_rho`)
are described alike, and made, cast, reset and loaded by the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.instance import TG

Share = Literal["net", "layer", "channel", "head", "neuron"]
SHARES = get_args(Share)
LEARNABLE = ("tau", "theta", "s", "c")
# What a tensor of a gate is: learned; where something learned starts, saved beside it; or known.
Role = Literal["parameter", "start", "known"]
AT_ZERO = ("rho", "dtheta")  # parameters that start there
MEASURED = {"tau": "log tau"}  # how far it moved is the logarithm of a ratio


class Spec(Protocol):
    """What is learned at a place: which tensors there are by name, and where they start."""

    @property
    def learned(self) -> tuple[str, ...]: ...
    def roles(self) -> dict[str, Role]: ...
    def start(self, name: str, device: Any, dtype: torch.dtype) -> Tensor: ...
    def fixed(self) -> dict[str, Any]: ...
    def moved(self, holder: nn.Module, prefix: str) -> dict[str, float]: ...


class Elementwise:
    """One instance for each element, shared by a layer, a channel or nobody; see `Activation`."""

    init: TG
    learned: tuple[str, ...]
    share: Share
    group: tuple[int, ...]
    axis: int
    _structure: kernels.Structure

    def roles(self) -> dict[str, Role]:
        """The tensors of the gate by name, in the order in which a module has them."""
        hard = self.init.hard
        constant = "v" if hard and self.learned else "c"
        found: dict[str, Role] = {}
        for name, what in (("tau0", "tau"), ("theta0", "theta"), ("s", "s"), (constant, "c")):
            start: Role = "start" if name in ("tau0", "theta0") else "parameter"
            found[name] = start if what in self.learned else "known"
        if hard:
            del found["tau0"]
        moving = (("rho", "tau"), ("dtheta", "theta"))
        return found | {name: "parameter" for name, what in moving if what in self.learned}

    def start(self, name: str, device: Any, dtype: torch.dtype) -> Tensor:
        """Where a tensor starts, as `init` says."""
        if name in AT_ZERO:
            like = self.start("tau0" if name == "rho" else "theta0", device, dtype)
            return torch.zeros_like(like)
        t = self.init
        if name == "tau0" and not isinstance(t.tau, tuple):
            return torch.full(self.group, t.tau, device=device, dtype=dtype)
        values = kernels.Structure.anchored_values(t)
        rows = {"tau0": t.tau, "theta0": t.theta, "s": t.s, "c": t.c, "v": values}
        column = torch.tensor(rows[name], device=device, dtype=dtype)
        return column.view(-1, *(1 for _ in self.group)).repeat(1, *self.group)

    def fixed(self) -> dict[str, Any]:
        """What decides the function beside the values in a state dict. It stands in what torch
        calls the metadata of a state dict, which has no key and need not be there."""
        t = self.init
        fixed = {k: v for k, v in t.to_dict().items() if k not in ("anchor", *self.learned)}
        if t.hard and "c" in fixed:
            # as `v`, which stays while theta moves
            fixed["c"] = list(kernels.Structure.anchored_values(t))
        return {**fixed, "K": t.K, "axis": None if self.group == (1,) else self.axis}

    def held(self, holder: nn.Module, prefix: str, x: Tensor) -> tuple[Any, tuple[int, ...]]:
        """The tensors of the gate, and the shape in which a group's values broadcast against x."""
        own = self.tensors_of(holder, prefix)
        if not self.learned and x.dtype == torch.float64 and own["theta0"].dtype != torch.float64:
            # float32 has not all digits of 0.2
            own = {name: self.start(name, x.device, x.dtype) for name in self.roles()}
        shape: tuple[int, ...] = ()
        if self.share not in ("net", "layer"):
            shape_in = _shape_in if torch.compiler.is_compiling() else _kept_shape
            shape = shape_in(self.share, self.group, self.axis, x.shape)
        return self._structure.tensors(own, holder), shape

    def tensors_of(self, holder: nn.Module, prefix: str) -> dict[str, Any]:
        """The tensors that a module holds for this gate now, by their names without the prefix.

        Of a gate that is a module itself, without those that a parametrization computes.
        """
        if not prefix:  # the quickest way, for modules that are called often
            return {**holder._buffers, **holder._parameters}
        return {n: found(holder, prefix + n) for n in self._structure.names if n is not None}

    def moved(self, holder: nn.Module, prefix: str) -> dict[str, float]:
        """How far the furthest of what is learned is from its start: log tau, theta, s, c."""
        own = {n: found(holder, prefix + n) for n in self.roles()}
        then = {n: self.start(n, t.device, t.dtype) for n, t in own.items()}
        rows = self._structure.rows
        now, start = (rows(self._structure.tensors(each, None)) for each in (own, then))
        pairs = {what: (getattr(now, what), getattr(start, what)) for what in self.learned}
        return {
            MEASURED.get(what, what): max(distance(*rows, what) for rows in zip(*both, strict=True))
            for what, both in pairs.items()
        }

    def evaluate(
        self, holder: nn.Module, prefix: str, x: Tensor, v: Any = None, inplace: bool = False
    ) -> Tensor:
        """The gates of `x` with the tensors that `holder` has under `prefix`."""
        return kernels.blend(
            x,
            self._structure,
            lambda x: self.held(holder, prefix, x),
            v=v,
            native=True,
            inplace=inplace,
        )


@dataclass(frozen=True)
class GateSpec(Elementwise):
    """An element-wise gate by itself, without tensors."""

    init: TG
    learned: tuple[str, ...] = ()
    share: Share = "layer"
    group: tuple[int, ...] = (1,)
    axis: int = 1
    _structure: kernels.Structure = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_structure", kernels.Structure.of(self.init, self.learned))


def distance(now: Any, start: Any, what: str) -> float:
    """The largest distance of values from their start, in float64; 0 for a number that is known."""
    if not isinstance(now, Tensor):
        return 0.0
    a, b = (w.detach().double() for w in (now, start))
    return float(((a / b).log() if what == "tau" else a - b).abs().max())


def found(holder: nn.Module, name: str) -> Any:
    """A tensor that a module holds; a parametrization makes it anew whenever it is asked for."""
    # looked up here, because attributes of a module take longer than the rest
    if name in holder._parameters:
        return holder._parameters[name]
    return holder._buffers[name] if name in holder._buffers else getattr(holder, name)


def gates_of(module: nn.Module) -> Mapping[str, Spec]:
    """What the gates are whose tensors a module holds itself, by the prefix of their names."""
    if isinstance(module, Elementwise):
        return {"": module}
    gates: Mapping[str, Spec] = vars(module).get("tg_gates") or {}
    return gates


def gate_names(module: nn.Module, role: Role | None = None) -> Iterator[str]:
    """The names of the tensors that a module holds for its gates, of all roles or of one."""
    for prefix, spec in gates_of(module).items():
        for name, what in spec.roles().items():
            if role in (None, what):
                yield prefix + name


def attach(
    module: nn.Module,
    prefix: str,
    spec: Spec,
    device: Any = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give a module the tensors of a gate, at their start."""
    for name, role in spec.roles().items():
        value = spec.start(name, device, dtype)
        if role == "parameter":
            module.register_parameter(prefix + name, nn.Parameter(value))
        else:
            module.register_buffer(prefix + name, value, persistent=role == "start")


def detach(module: nn.Module) -> None:
    """Take the tensors of the gates that a module holds under prefixes away from it."""
    for name in list(gate_names(module)):
        delattr(module, name)
    vars(module).pop("tg_gates", None)


def at_start(prefix: str, spec: Spec, x: Tensor) -> nn.Module:
    """A module that holds nothing but the tensors of a gate at their start, for an input `x`."""
    holder = nn.Module()
    attach(holder, prefix, spec, x.device, torch.promote_types(x.dtype, torch.float32))
    return holder.requires_grad_(False)


@torch.no_grad()
def restart(module: nn.Module) -> None:
    """Return the gates that a module holds to where they started."""
    for prefix, spec in gates_of(module).items():
        for name in spec.roles():
            if _is_held(module, prefix + name):
                value = found(module, prefix + name)
                value.copy_(spec.start(name, value.device, value.dtype))


class Holder(nn.Module):
    """A module that holds the tensors of gates (`gates_of`), beside its own or alone.

    Gates stay float32 under `.half()` and `.bfloat16()` (1.702 would become 1.7031). A state dict
    does not load into gates that differ in what is not learned: torch keeps that in its metadata.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = [found(self, name) for name in gate_names(self) if _is_held(self, name)]
        ids = {id(t) for each in own for t in (each, each.grad if each.is_leaf else None)}
        wide = keeping_wide(fn)
        super()._apply(lambda t: wide(t) if id(t) in ids else fn(t), recurse)  # type: ignore[no-untyped-call]
        for prefix, spec in gates_of(self).items():
            _settle(self, prefix, spec)
        return self

    def reset_parameters(self) -> None:
        """Return the gates to where they started, and the rest to torch's start, if it has one."""
        own = getattr(super(), "reset_parameters", None)
        if own is not None:
            own()
        restart(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            about = destination._metadata.setdefault(prefix[:-1], {})
            about |= {f"{at}fixed": s.fixed() for at, s in gates_of(self).items() if s.learned}

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        errors: list[str] = others[-1]
        for at, spec in gates_of(self).items():
            own = spec.fixed()
            # files of before, and other formats, have it not
            saved = local_metadata.get(f"{at}fixed", own)
            if spec.learned and saved != own:
                keys = [k for k in {**saved, **own} if saved.get(k) != own.get(k)]
                apart = ", ".join(f"{k} = {saved.get(k)} and not {own.get(k)}" for k in keys)
                where = (prefix + at).rstrip("._") or "Activation"
                errors.append(
                    f"{where} was saved with {apart}, which was not learned and is no value of the "
                    "state dict, so that it would be another function; make this one with the init "
                    "and axis of the other."
                )


def _is_held(module: nn.Module, name: str) -> bool:
    """Whether a tensor is a module's own, and no result of a parametrization."""
    return name in module._parameters or name in module._buffers


def _settle(module: nn.Module, prefix: str, spec: Spec) -> None:
    """After a move: make anew what is in no checkpoint, for `to_empty` left it unset and `double`
    would have kept only its float32 digits; and give float64 values that are still at their start
    the digits that float32 had not."""
    for name, role in spec.roles().items():
        if not _is_held(module, prefix + name):
            continue
        value = found(module, prefix + name)
        if role == "known":
            module._buffers[prefix + name] = spec.start(name, value.device, value.dtype)
            continue
        shared_out = type(value) not in (Tensor, nn.Parameter)
        if value.dtype == torch.float64 and name not in AT_ZERO and not shared_out:
            rounded = spec.start(name, value.device, torch.float32).double()
            exact = spec.start(name, value.device, torch.float64)
            with torch.no_grad():
                value.copy_(torch.where(value == rounded, exact, value))


def keeping_wide(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, a cast or a move of a module's tensor, that moves gate tensors but never to 16 bits."""

    def moved(t: Tensor) -> Tensor:
        new = fn(t)
        narrow = new.is_floating_point() and new.element_size() < 4
        return t.detach().to(new.device) if narrow else new

    return moved


def group_of(share: str, channels: int | Sequence[int] | None) -> tuple[int, ...]:
    """The shape of the sharing groups, checked."""
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


def learnable(t: TG, names: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """What an instance can learn of `names`, and why not the rest, if there is any."""
    if t.q is not None:
        return (), (
            "instances with quadratic branches stay frozen; train one with affine branches instead "
            "(for hardswish: 'hardswish_k3')"
        )
    if t.K == 1 and {"tau", "theta"} & set(names):
        kept = tuple(n for n in ("s", "c") if n in names)
        return kept, "one branch (K = 1) has no gate to learn; train s, c only"
    if t.hard and "tau" in names:
        kept = tuple(n for n in LEARNABLE if n in names and n != "tau")
        return kept, (
            "a hard gate (tau = inf) has no sharpness to learn; train theta, s, c, or start from a "
            "soft instance"
        )
    return tuple(n for n in LEARNABLE if n in names), ""


def learned(t: TG, train: Iterable[str]) -> tuple[str, ...]:
    """What is learned of an instance, in order; an error where any of it cannot be."""
    names = names_of("Activation", train)
    if unknown := [n for n in names if n not in LEARNABLE]:
        raise ValueError(f"Activation: train takes {', '.join(LEARNABLE)}; got {unknown[0]!r}.")
    found, why = learnable(t, names)
    if names and why:
        raise ValueError(f"Activation: {why}.")
    return found
