"""What the pairs compare, each in two forms: gates, products of tier W, attention, recurrence.

`draw` makes the tensors, `reference` is plain torch, `kernel` and `module` are what users call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from threshold_gating import kernels, primitive
from threshold_gating.instance import TG
from threshold_gating.nn import Activation, Conv2d, Linear, attention, rnn
from threshold_gating.taxonomy import TAXONOMY

Shape = tuple[int, ...]
Tensors = dict[str, Tensor]  # by name; several rows of one parameter are "theta 0", "theta 1"
NAMES = ("tau", "theta", "s", "c")


def exactly(t: Tensor) -> Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


@dataclass(frozen=True)
class Gates:
    """An instance whose parameters are drawn near its own, shared as `share` says (axis 1).

    `other` names a second input: "v", which the branches read, or "up", which multiplies y.
    """

    t: TG
    share: str = "layer"
    other: str = ""

    def draw(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        x = torch.randn(shape, device=device).mul(3).to(dtype)
        found = {"x": x, **({self.other: torch.randn_like(x)} if self.other else {})}
        return learned(found | self.parameters(shape, device))

    def parameters(self, shape: Shape, device: Any, names: Sequence[str] = NAMES) -> Tensors:
        """Rows by name, in shapes that broadcast against x."""
        after = (1,) * (len(shape) - 2)
        group = {"layer": (), "channel": (1, *shape[1:2], *after), "neuron": (1, *shape[1:])}
        return {
            f"{name} {k}": torch.rand(group[self.share], device=device).mul(0.1) + value
            for name in names
            for k, value in enumerate(self.rows({}, name))
        }

    def rows(self, w: Tensors, name: str) -> list[Any]:
        """The rows of one parameter: tensors, or the numbers of the instance."""
        number = getattr(self.t, name) if name != "tau" or not self.t.hard else ()
        numbers = number if isinstance(number, tuple) else (number,)
        return [row for key, row in w.items() if key.split()[0] == name] or [*numbers]

    def values(self, w: Tensors) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """tau, theta, s, c as `primitive.blend` takes them."""
        tau, theta, s, c = (self.rows(w, name) for name in NAMES)
        return tau if len(tau) > 1 else tau[0] if tau else math.inf, theta, s, c

    def options(self) -> dict[str, Any]:
        """What is no tensor; tanh is evaluated about its middle."""
        return {"owner": self.t.owner, "centred": self.t == TAXONOMY["tanh"]}

    def reference(self, w: Tensors) -> Tensor:
        y = primitive.blend(w["x"], *self.values(w), v=w.get("v"), **self.options())
        return w["up"] * y if "up" in w else y

    def kernel(self, w: Tensors) -> Tensor:
        if "up" in w:
            return kernels.blend(w["x"], *self.values(w), up=w["up"], **self.options())
        return kernels.blend(w["x"], *self.values(w), v=w.get("v"), **self.options())

    def module(self, w: Tensors, inplace: bool = False) -> Tensor:
        """The same by a learned `Activation`, which holds its tensors whole."""
        act = self.activation(w)
        act.inplace = inplace
        return self.applied(act, w | {"x": w["x"].clone()} if inplace else w)

    def activation(self, w: Tensors) -> Activation:
        x, share = w["x"], cast(Any, self.share)
        channels = {"layer": None, "channel": x.shape[1], "neuron": tuple(x.shape[1:])}[share]
        learned = NAMES[1:] if self.t.hard else NAMES
        return Activation(self.t, share=share, channels=channels, train=learned, device=x.device)

    def applied(self, act: Activation, w: Tensors) -> Tensor:
        y: Tensor = torch.func.functional_call(act, self.held(act, w), (w["x"],))
        return y

    def held(self, act: Activation, w: Tensors, prefix: str = "") -> Tensors:
        """The parameters as the module `act` holds them."""

        def stacked(name: str) -> Tensor:
            shape = act.s.shape[1:]
            rows = self.rows(w, name)
            whole = (r if isinstance(r, Tensor) else act.s.new_full(shape, r) for r in rows)
            return torch.stack([row.reshape(shape) for row in whole])

        theta, found = stacked("theta"), {"s": stacked("s"), "c": stacked("c")}
        found["dtheta"] = theta - act.theta0
        if self.t.hard:  # it holds the values of the branches at their thresholds
            found["v"] = found["c"] + found["s"] * torch.cat([theta[:1], theta])
        else:
            found["rho"] = (stacked("tau").view_as(act.tau0) / act.tau0).log()
        return {prefix + name: found[name] for name, _ in act.named_parameters()}


def learned(tensors: Tensors) -> Tensors:
    return {name: t.requires_grad_() for name, t in tensors.items()}


@dataclass(frozen=True)
class Product:
    """Gates shared by the outputs, then a matrix or a convolution for each branch.

    Without `derived` nothing is differentiated, which one vector under hard gates needs.
    """

    gates: Gates
    derived: bool = True
    outputs: int = 5

    def draw(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        kernel, K = (3,) * (len(shape) - 2), self.gates.t.K
        x = torch.randn(shape, device=device).to(dtype)
        x = x.to(memory_format=torch.channels_last) if kernel else x
        scale = (shape[1] * K) ** -0.5
        found = {
            "x": x,
            "weight": torch.randn(self.outputs, K, shape[1], *kernel, device=device).mul(scale),
            "bias": torch.randn(self.outputs, device=device),
        }
        found = {name: t.to(dtype) for name, t in found.items()}
        found |= self.gates.parameters(shape, device, self._train())
        return learned(found) if self.derived else found

    def _train(self) -> tuple[str, ...]:
        return ("theta", "c") if self.gates.t.hard else ("tau", "theta")

    def reference(self, w: Tensors) -> Tensor:
        """sum_k W_k (g_k(x) (s_k x + c_k)) + b, a branch after the other."""
        tau, theta, s, c = self.gates.values(w)
        y: Any = 0.0
        for k, weight in enumerate(w["weight"].unbind(1)):
            alone = [[row * (j == k) for j, row in enumerate(rows)] for rows in (s, c)]
            phi = primitive.blend(w["x"], tau, theta, *alone, owner=self.gates.t.owner)
            if self.gates.t.hard and self.derived:  # each branch jumps where its gate opens
                phi = primitive.straight_through(w["x"], phi, theta, *alone)
            bias = w["bias"] if k == 0 else None
            y = y + _linear(phi, weight, bias)
        return y  # type: ignore[no-any-return]

    def module(self, w: Tensors) -> Tensor:
        x, weight, gates = w["x"], w["weight"], self.gates
        make = functools.partial(Conv2d, kernel_size=3, padding=1) if x.dim() > 2 else Linear
        layer = make(
            x.shape[1], len(weight), init=gates.t, share=cast(Any, gates.share),
            train=self._train(), device=x.device, dtype=x.dtype,
        )  # fmt: skip
        given = {"weight": weight, "bias": w["bias"], **gates.held(layer.gate, w, "gate.")}
        with torch.set_grad_enabled(self.derived):
            y: Tensor = torch.func.functional_call(layer, given, (x,))
        return y


@dataclass(frozen=True)
class Synaptic:
    """Gates of each synapse, or of each pair of channels in a convolution 3 x 3."""

    t: TG
    tier: str = "S"
    share: str = "synapse"
    accuracy: str = "full"
    outputs: int = 5

    def draw(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        kernel, K = (3,) * (len(shape) - 2), self.t.K
        each = (
            self.outputs,
            shape[1],
            *((1,) * len(kernel) if self.share != "synapse" else kernel),
        )
        scale = (shape[1] * 3 ** len(kernel) * K) ** -0.5
        weights = (self.outputs, K, shape[1], *kernel)
        found = {
            "x": torch.randn(shape, device=device),
            "weight": torch.randn(weights, device=device).mul(scale),
        }
        if self.tier == "general":
            found["const"] = torch.randn(weights, device=device).mul(scale)
        found = {name: w.to(dtype) for name, w in found.items()}
        taus = self.t.tau if isinstance(self.t.tau, tuple) else (self.t.tau,)
        for name, row in (("tau", taus), ("theta", self.t.theta)):
            for k, value in enumerate(row):
                found[f"{name} {k}"] = torch.rand(each, device=device).mul(0.5) + value
        return learned(found)

    def reference(self, w: Tensors) -> Tensor:
        """Every synapse at every row, written out: (N, O, I) and, unfolded, (N L, O, C taps)."""
        x, weight = w["x"], w["weight"].flatten(2)  # (O, K, synapses)
        tau, theta = ([v for n, v in w.items() if n.split()[0] == p] for p in ("tau", "theta"))
        rows, inside = x, None
        if x.dim() > 2:
            rows, inside = (
                F.unfold(image, 3, padding=1).transpose(1, 2).flatten(0, 1)
                for image in (x, torch.ones_like(x))
            )

        def wide(v: Tensor) -> Tensor:
            return v.expand(w["weight"][:, 0].shape).flatten(1)

        # constants of tier S are those of the branches, times the weights
        const = (
            w["const"].flatten(2) if "const" in w else weight * weight.new_tensor(self.t.c)[:, None]
        )
        gate = [wide(t) for t in tau]
        y = primitive.blend(
            rows.unsqueeze(1), gate if len(gate) > 1 else gate[0], [wide(t) for t in theta],
            [*weight.unbind(1)], [*const.unbind(1)],
        )  # fmt: skip
        y = (y if inside is None else y * inside.unsqueeze(1)).sum(-1)
        if x.dim() > 2:
            y = y.view(len(x), *x.shape[2:], -1).movedim(-1, 1)
        return y

    def module(self, w: Tensors) -> Tensor:
        x, weight = w["x"], w["weight"]
        make = functools.partial(Conv2d, kernel_size=3, padding=1) if x.dim() > 2 else Linear
        layer = make(
            x.shape[1], len(weight), init=self.t, tier=cast(Any, self.tier),
            share=cast(Any, self.share), accuracy=cast(Any, self.accuracy), bias=False,
            device=x.device, dtype=x.dtype,
        )  # fmt: skip
        gate = layer.gate
        tau, theta = (
            torch.stack([v for n, v in w.items() if n.split()[0] == p]) for p in ("tau", "theta")
        )
        given = {"weight": weight, "gate.dtheta": theta - gate.theta0}
        given["gate.rho"] = (tau.view_as(gate.tau0) / gate.tau0).log()
        given |= {"const": w["const"]} if "const" in w else {}
        y: Tensor = torch.func.functional_call(layer, given, (x,))
        return y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) if x.dim() == 2 else F.conv2d(x, weight, bias, padding=1)


@dataclass(frozen=True)
class Attention:
    """softmax(scale tau Q K^T + mask) V one way, or with the statistics of its rows of logits."""

    way: str
    causal: bool = False
    mask: str = ""  # "keep" chosen pairs, "add" to their logits
    temperature: bool = False
    shared: int = 1  # heads of queries for one of keys

    def draw(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        batch, heads, length, size = shape
        keys = (batch, heads // self.shared, length, size)
        drawn = (("q", shape), ("k", keys), ("v", keys))
        found = {name: torch.randn(each, device=device).to(dtype) for name, each in drawn}
        if self.temperature:
            found["tau"] = torch.rand(heads, device=device) + 0.5
        found = learned(found)
        if self.mask:
            drawn_mask = torch.randn(length, length, device=device)
            found["mask"] = drawn_mask > -1 if self.mask == "keep" else drawn_mask.to(dtype)
        return found

    def options(self, w: Tensors) -> dict[str, Any]:
        gqa = self.shared > 1
        known = {"attn_mask": w.get("mask"), "is_causal": self.causal, "enable_gqa": gqa}
        return {**known, "tau": w.get("tau")}

    def reference(self, w: Tensors) -> Any:
        """By torch's softmax of the logits, written out."""
        z = self.logits(w)
        y = z.softmax(-1) @ w["v"].repeat_interleave(self.shared, 1)
        if self.way in attention.WAYS:
            return y
        z = z.detach()
        m1, m2 = (m.unsqueeze(-1) for m in z.topk(2).values.unbind(-1))
        others = z.scatter(-1, z.argmax(-1, keepdim=True), -math.inf)
        T = torch.where(m2.isfinite(), (others - m2).exp().sum(-1, keepdim=True), 0.0)
        found = {"m1": m1, "m2": m2, "T": T, "z at i1": m1}
        return {"y": y, **found} if self.way == "statistics" else found

    def logits(self, w: Tensors) -> Tensor:
        q, k, mask = w["q"], w["k"].repeat_interleave(self.shared, 1), w.get("mask")
        z: Tensor = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        z = z * w["tau"].view(-1, 1, 1) if "tau" in w else z
        if mask is not None:
            z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
        before = torch.ones_like(z, dtype=torch.bool).tril()
        return z.masked_fill(~before, -math.inf) if self.causal else z

    def kernel(self, w: Tensors) -> Any:
        qkv, options = (w["q"], w["k"], w["v"]), self.options(w)
        if self.way in attention.WAYS:
            return attention.scaled_dot_product_attention(*qkv, way=self.way, **options)
        if self.way == "statistics":
            y, found = attention.with_statistics(*qkv, **options)
        else:
            found = attention.row_statistics(*qkv[:2], **options)
        z = self.logits({name: exactly(t) for name, t in w.items()})
        # the logit at i1: two that are equal to rounding may be taken for each other
        rows = {"m1": found.m1, "m2": found.m2, "T": found.T, "z at i1": z.gather(-1, found.i1)}
        rows = {name: t.detach() for name, t in rows.items()}
        return {"y": y, **rows} if self.way == "statistics" else rows


@dataclass(frozen=True)
class Recurrent:
    """A layer over (T, B, H) with learned gates at `sites`, all of them by default.

    `free` learns the branches, too; `both` has a second direction; `packed` sequences end one
    after the other.
    """

    kind: str = "lstm"
    sites: tuple[str, ...] = ()
    free: bool = False
    both: bool = False
    packed: bool = False
    learns: bool = True

    def _names(self) -> tuple[str, ...]:
        return (self.sites or tuple(rnn.SITES[self.kind])) if self.learns else ()

    def _numbers(self) -> tuple[str, ...]:
        return NAMES if self.free else NAMES[:2]

    def _directions(self) -> tuple[str, ...]:
        return ("_l0", "_l0_reverse")[: 1 + self.both]

    def draw(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensors:
        steps, batch, units = shape
        rows, inner = {"lstm": 4, "gru": 3}[self.kind] * units, units // 2 + 3
        found = {"x": torch.randn(steps, batch, inner)}
        for state in ("h", "c")[: 2 if self.kind == "lstm" else 1]:
            found[state] = torch.randn(len(self._directions()), batch, units)
        for end in self._directions():
            sizes: dict[str, Shape] = {"weight_ih": (rows, inner), "weight_hh": (rows, units)}
            sizes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
            found |= {n + end: torch.randn(size) * units**-0.5 for n, size in sizes.items()}
        found = {name: t.to(dtype) for name, t in found.items()}
        for end in self._directions():
            for site in self._names():
                t = rnn.SITES[self.kind][site]
                for name in self._numbers():
                    value = getattr(t, name)
                    value = value if isinstance(value, tuple) else (value,)
                    wide = torch.tensor(value).unsqueeze(-1) + torch.rand(len(value), units) / 4
                    found[f"{name} {site}{end}"] = wide
        return learned({name: t.to(device) for name, t in found.items()})

    def _lasts(self, x: Tensor) -> list[int]:
        """How many steps each sequence has, the longest first."""
        steps, batch = x.shape[:2]
        return [steps - k * (steps - 1) // max(batch - 1, 1) * self.packed for k in range(batch)]

    def reference(self, w: Tensors) -> Tensors:
        """A step after the other; where a sequence has ended, its state stays."""
        x = w["x"]
        lasts = torch.tensor(self._lasts(x), device=x.device)
        sides, ends = [], []
        for k, end in enumerate(self._directions()):
            state = [w[name][k] for name in ("h", "c") if name in w]
            seen = {}
            for t in range(len(x))[:: -1 if k else 1]:
                there = (t < lasts).unsqueeze(-1)
                after = self._step(w, end, x[t], state)
                state = [torch.where(there, *both) for both in zip(after, state, strict=True)]
                seen[t] = state[0] * there
            sides.append(torch.stack([seen[t] for t in range(len(x))]))
            ends.append(state)
        last = [torch.stack(each) for each in zip(*ends, strict=True)]
        return dict(zip(("y", "h", "c"), (torch.cat(sides, -1), *last), strict=False))

    def _step(self, w: Tensors, end: str, x: Tensor, state: list[Tensor]) -> list[Tensor]:
        h, *cell = state
        a = F.linear(x, w["weight_ih" + end], w["bias_ih" + end])
        b = F.linear(h, w["weight_hh" + end], w["bias_hh" + end])
        gate = functools.partial(self._gate, w, end)
        if self.kind == "lstm":
            i, f, g, o = (gate(*each) for each in zip("ifgo", (a + b).chunk(4, -1), strict=True))
            c = f * cell[0] + i * g
            return [o * gate("cell", c), c]
        (a_r, a_z, a_n), (b_r, b_z, b_n) = a.chunk(3, -1), b.chunk(3, -1)
        z, n = gate("z", a_z + b_z), gate("n", a_n + gate("r", a_r + b_r) * b_n)
        return [(1 - z) * n + z * h]

    def _gate(self, w: Tensors, end: str, site: str, x: Tensor) -> Tensor:
        t = rnn.SITES[self.kind][site]
        own: list[Any] = [w.get(f"{name} {site}{end}", getattr(t, name)) for name in NAMES]
        tau, theta = (v[0] if not isinstance(v, float) else v for v in own[:2])
        (s0, s1), (c0, c1) = own[2:]
        high = 1 / (1 + torch.exp(-tau * (x - theta)))
        y: Tensor = (1 - high) * (s0 * x + c0) + high * (s1 * x + c1)
        return y

    def module(self, w: Tensors) -> Tensors:
        x, (inner, units) = w["x"], (w["x"].shape[-1], w["weight_hh_l0"].shape[1])
        make = {"lstm": rnn.LSTM, "gru": rnn.GRU}[self.kind]
        layer = make(
            inner, units, bidirectional=self.both, device=x.device, dtype=x.dtype,
            train=("tau", "theta") if self.learns else (), sites=self.sites or None,
            family="free" if self.free else "constant",
        )  # fmt: skip
        given = {name: t for name, t in w.items() if name.startswith(("weight", "bias"))}
        for end in self._directions() if self.learns else ():
            given |= self._held(w, end)
        state = (w["h"], w["c"]) if self.kind == "lstm" else w["h"]
        lasts = torch.tensor(self._lasts(x))
        data: Any = pack_padded_sequence(x, lasts) if self.packed else x
        y, last = torch.func.functional_call(layer, given, (data, state))
        y = pad_packed_sequence(y, total_length=len(x))[0] if self.packed else y
        return dict(
            zip(("y", "h", "c"), (y, *(last if self.kind == "lstm" else (last,))), strict=False)
        )

    def _held(self, w: Tensors, end: str) -> Tensors:
        """The numbers of all sites as the layer holds them."""

        def rows(name: str) -> Tensor:
            return torch.stack([w[f"{name} {site}{end}"] for site in self._names()])

        starts = [rnn.SITES[self.kind][site].tau for site in self._names()]
        tau = rows("tau")[:, 0]
        found = {"rho": (tau / torch.tensor(starts).to(tau).unsqueeze(-1)).log()}
        found["dtheta"] = rows("theta")[:, 0]
        if self.free:
            found |= {"s": rows("s"), "c": rows("c")}
        return {f"gate_{name}{end}": t for name, t in found.items()}
