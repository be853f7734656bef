"""Learned activations, forward and with every gradient, over a copy of the same memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exact import hold
from benchmarks.timing import CHECK, Contenders, Place, Work
from threshold_gating import Activation, kernels, primitive

Share = Literal["layer", "channel", "neuron"]
PAIRS = ("module", "compiled")  # by which these rows are checked
SOFT, HARD = ("tau", "theta", "s", "c"), ("theta", "s", "c")
KEYS = {2: "silu", 3: "mish", 5: "gelu"}  # one tau each
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# By dtype and K: the most of a copy's time for the forward pass, and for it and the backward pass.
_NARROW = {2: (1.08, 2.9), 3: (1.3, 4.0), 5: (1.8, 4.5)}
_WIDE = {2: (1.03, 2.9), 3: (1.08, 4.0), 5: (1.2, None)}
_AIM = 1.03  # of the forward pass with K = 2 in 16 bits
_NOTES = {
    "K=2 neuron of images": "eight float32 values a position: with a batch of 64 reading them is "
    "1.125 copies by itself, 2.84 with backward"
}


class Sizes(NamedTuple):
    """The inputs: rows of channels, images in channels_last, and images with gates of their own."""

    rows: tuple[int, ...]
    images: tuple[int, ...]
    positions: tuple[int, ...]


class Case(NamedTuple):
    """An activation as users write it, and what it is applied to."""

    key: str
    share: Share
    dtype: torch.dtype
    shape: tuple[int, ...]
    train: tuple[str, ...] = SOFT

    def activation(self, device: str) -> Activation:
        channels = {"layer": None, "channel": self.shape[1], "neuron": self.shape[1:]}[self.share]
        axis = -1 if len(self.shape) == 2 else 1
        return Activation(
            self.key, share=self.share, channels=channels, axis=axis, train=self.train,
            device=device,
        )  # fmt: skip

    def input(self, device: str) -> Tensor:
        x = torch.randn(self.shape, device=device).to(self.dtype)
        return x.to(memory_format=torch.channels_last) if self._is_image() else x

    def _is_image(self) -> bool:
        return len(self.shape) == 4 and self.share == "channel"

    def group(self) -> tuple[int, ...]:
        """The shape in which a parameter broadcasts against the input."""
        after = (1,) * (len(self.shape) - 2)
        groups = {"layer": (), "channel": (1, self.shape[1], *after)}
        return groups.get(self.share, (1, *self.shape[1:]))

    def is_compiled(self) -> bool:
        """Whether torch.compile is a contender; compiling takes longer than all the rest."""
        return self.key == KEYS[2] or (self.share == "channel" and self.dtype == torch.bfloat16)

    def prelu(self, device: str) -> nn.PReLU | None:
        """The relative of torch with a learned parameter; none has one for each position."""
        if self.share == "neuron":
            return None
        count = 1 if self.share == "layer" else self.shape[1]
        return nn.PReLU(count, device=device, dtype=self.dtype)


def plain(act: Activation, group: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The formulas of the reference over the tensors of `act`, in torch alone, for a compiler."""
    t = act.init

    def view(w: Any) -> Any:
        return w.view(group) if isinstance(w, Tensor) else w

    def f(x: Tensor) -> Tensor:
        tau, theta, s, c = act.values()
        rows = ([view(w) for w in row] for row in (theta, s, c))
        options: dict[str, Any] = {"form": t.form, "owner": t.owner, "centred": False}
        return primitive.blend(x, view(tau), *rows, **options)

    return f


# The parameters of an `Activation` by the names that the pairs have for what they hold.
_HELD = {"rho": "tau 0", "dtheta": "theta 0", "s": "s 0", "c": "c 0", "v": "c 0"}


def check(
    ours: Callable[[], Any],
    act: Activation,
    x: Tensor,
    dy: Tensor | None = None,
    group: tuple[int, ...] = (),
) -> Callable[[], None]:
    """For `CHECK`: that `ours` gives what the formulas of `act` give at x, or with dy its slopes
    along x and every parameter."""
    exact = copy.deepcopy(act).double()
    own = {_HELD[name]: p for name, p in exact.named_parameters()}
    tau = act.init.tau if isinstance(act.init.tau, tuple) else (act.init.tau,)
    # torch's own op, which may stand for a frozen one, goes back from a rounded y
    rounded = {"roundings": 1 if own else 2, "tau": max(t for t in (0.0, *tau) if t < math.inf)}
    return partial(hold, ours, plain(exact, group), {"x": x}, own, dy, **rounded)


def by_reference(act: nn.Module, x: Tensor) -> Tensor:
    """`act`, a gate or a layer with gates, by the formulas of the reference."""
    with kernels.use("reference"):
        y: Tensor = act(x)
    return y


def gradients(f: Callable[..., Tensor], inputs: list[Tensor], of: list[Tensor], dy: Tensor) -> Any:
    """Forward and backward: of f at `inputs` the derivatives in `of`."""
    return torch.autograd.grad(f(*inputs), of, dy)


def _contenders(case: Case, backward: bool, place: Place) -> Contenders:
    act, x = case.activation(place.device), case.input(place.device)
    out, dy = torch.empty_like(x), torch.randn_like(x)
    own: list[Tensor] = list(act.parameters())
    ways: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {"silu": (F.silu, [])}
    if backward and (prelu := case.prelu(place.device)) is not None:
        ways["PReLU"] = (prelu, list(prelu.parameters()))
    ways["ours"] = (act, own)
    ways["eager"] = (partial(by_reference, act), own)
    if case.is_compiled():
        ways |= {n: (f, own) for n, f in place.compiled(plain(act, case.group())).items()}
    found: Contenders = {"copy": partial(out.copy_, x)}
    if not backward:
        found |= {name: partial(f, x) for name, (f, _) in ways.items()}
        return {**found, CHECK: check(found["ours"], act, x, group=case.group())}
    x = x.detach().requires_grad_()
    found |= {n: partial(gradients, f, [x], [x, *more], dy) for n, (f, more) in ways.items()}
    return {**found, CHECK: check(found["ours"], act, x, dy, case.group())}


Limits = tuple[float | None, float | None]


def _cases(sizes: Sizes) -> Iterator[tuple[str, Case, Limits]]:
    narrow, images = torch.bfloat16, sizes.images
    for dtype, limits in ((narrow, _NARROW), (torch.float32, _WIDE)):
        for K, both in limits.items():
            for share in ("channel", "layer"):
                yield f"K={K} {share}", Case(KEYS[K], share, dtype, sizes.rows), both
    yield "K=2 channel", Case(KEYS[2], "channel", torch.float16, sizes.rows), _NARROW[2]
    both = _NARROW[2]
    yield "K=2 neuron", Case(KEYS[2], "neuron", narrow, sizes.rows), both
    yield "K=2 neuron of images", Case(KEYS[2], "neuron", narrow, sizes.positions), (None, None)
    yield "hard channel", Case("leaky_relu", "channel", narrow, sizes.rows, HARD), both
    yield "K=2 channels_last", Case(KEYS[2], "channel", narrow, images), both


def elementwise(sizes: Sizes, place: Place) -> Iterator[Work]:
    """Learned gates over a copy: the forward pass, and forward and backward with every gradient."""
    for name, case, limits in _cases(sizes):
        forward, both = limits
        work, note = f"{name} {SHORT[case.dtype]}", _NOTES.get(name, "")
        aim = _AIM if limits is _NARROW[2] else None
        build = partial(_contenders, case, False, place)
        limit = {"copy": forward}
        yield Work("elementwise", f"{work} forward", build, limit, PAIRS, aim=aim, note=note)
        build = partial(_contenders, case, True, place)
        work, limit = f"{work} + backward", {"copy": both}
        yield Work("elementwise", work, build, limit, PAIRS, backward=True, note=note)
