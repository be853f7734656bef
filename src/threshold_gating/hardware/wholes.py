"""Sites that are more than one element-wise gate, on differential pairs.

Softmax and attention: a gate for each key against the log-sum-exp of the others (Eq. 11), which a
tree of softplus cells computes, up for every subtree and down for all that is outside of it, each
cell with an error of its own. GLU, PReLU, maximum and minimum: one gate with data in its branches.
LSTM, GRU, RNN: a gate for each nonlinearity of a step, used again in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import sites
from threshold_gating.conversion.plan import ConversionError
from threshold_gating.hardware.drawn import normal
from threshold_gating.hardware.physical import AnalogGate, Chip
from threshold_gating.logits import AttentionCall
from threshold_gating.nn.rnn_steps import FUNCTIONS, SITES
from threshold_gating.primitive import wide
from threshold_gating.taxonomy import TAXONOMY

_OFF = -1e30  # the logit of a key that takes no part; -inf would give NaN as a gradient


class KeyGates(AnalogGate):
    """The gates of a row of keys, and the tree that gives each its threshold.

    One gate for each key, used again for every query and head; with share="neuron" one for each
    head and key. Rows may be shorter than those seen in calibration.
    """

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__(name, kind, TAXONOMY["sigmoid"], chip)

    def _group(self) -> tuple[int, ...]:
        shape = self.seen.shape
        heads = shape[-3:-2] if self.chip.share == "neuron" else ()
        return (1,) if self.chip.share == "layer" else (*heads, shape[-1])

    def draw(self, seed: int, draws: int) -> None:
        super().draw(seed, draws)
        if self.chip.errors.tree:
            leaves = _leaves(self.seen.shape[-1], 2)
            for key, cells in (("up", leaves), ("down", 2 * leaves)):
                numbers = normal(seed, f"{self.name}/{key}", draws, (cells,))
                self.devices.put(key, numbers.to(self.device))

    def _per_gate(self, key: str, x: Tensor) -> Any:
        numbers = getattr(self.devices, key, None)
        if numbers is None or self.group == (1,):
            return numbers
        numbers = numbers[..., : x.shape[-1]].to(x.dtype)
        return numbers.unsqueeze(-2) if len(self.group) == 2 else numbers

    def _check_keys(self, keys: int) -> None:
        """Refuse a row that is longer than what has gates, or cells of a tree."""
        if self.watching or (self.chip.share == "layer" and not self.chip.errors.tree):
            return
        if keys <= (seen := self.seen.shape[-1]):
            return
        raise ValueError(
            f"simulate: {self.name} has gates and a tree for {seen} keys and is given {keys}; "
            "simulate with inputs of the longest rows that it is to run on; shorter ones work."
        )

    def softmax(self, z: Tensor, dim: int = -1) -> Tensor:
        """sigma(z_i - theta_i) along `dim`; nothing makes the gates of a row sum to one."""
        with torch._C.DisableTorchFunction():
            rows = wide(z).movedim(dim, -1)
            self._check_keys(rows.shape[-1])
            live = ~(rows <= _OFF)  # NaN takes part, and is seen
            rows = torch.where(live, rows, _OFF)
            theta = self._thresholds(rows)
            # a single key has nothing to be compared with; NaN is, and stays NaN
            gated = live & ~(theta <= _OFF / 2)
            # What is not gated counts for nothing where it is seen, and is 0 or 1.
            nothing = -math.inf if self.watching else 0.0
            p = self(torch.where(gated, rows - theta, nothing))
            p = torch.where(gated, p, live.to(p.dtype))
            return p.movedim(-1, dim).to(z.dtype)

    def _thresholds(self, z: Tensor) -> Tensor:
        """The log-sum-exp of all others, for each entry of a row."""
        leaves = _leaves(z.shape[-1], 2)

        # the levels before one of n cells have leaves - 2 n together, or n - 2 on the way down
        def up(a: Tensor, b: Tensor) -> Tensor:
            return self._cell(a, b, "up", leaves - 2 * a.shape[-1])

        def down(a: Tensor, b: Tensor) -> Tensor:
            return self._cell(a, b, "down", a.shape[-1] - 2)

        return thresholds(z, _OFF, up, down, leaves)

    def _cell(self, a: Tensor, b: Tensor, key: str, start: int) -> Tensor:
        """One softplus cell for each pair; where one side is off, the other passes.

        Its transistors are as warm as those of the gates: a tree bends as much as they do.
        """
        errors, warmth = self.chip.errors, 1.0 if self.watching else self.chip.warmth
        y = (
            torch.logaddexp(a, b)
            if warmth == 1
            else torch.logaddexp(a * warmth, b * warmth) / warmth
        )
        if self.watching or not errors.tree:
            return y
        numbers = getattr(self.devices, key)[..., start : start + y.shape[-1]]
        moved = y + self._sigma(errors.tree, self.volts) * numbers.to(y.dtype)
        if errors.noise:
            moved = moved + self._sigma(errors.noise, self.volts) * torch.randn_like(y)
        return torch.where((a > _OFF / 2) & (b > _OFF / 2), moved, y)


Cell = Callable[[Tensor, Tensor], Tensor]


def thresholds(z: Tensor, off: float, up: Cell, down: Cell, least: int = 1) -> Tensor:
    """The log-sum-exp of all others, for each entry of a row, by a full tree of cells.

    `up` computes those of every subtree, `down` those of all that is outside of it; what is `off`
    takes no part. There are `least` leaves or more.
    """
    n = z.shape[-1]
    levels = [F.pad(z, (0, _leaves(n, least) - n), value=off)]
    while levels[-1].shape[-1] > 1:
        levels.append(up(levels[-1][..., ::2], levels[-1][..., 1::2]))
    outside = torch.full_like(levels[-1], off)
    for level in reversed(levels[:-1]):
        other = torch.unflatten(level, -1, (-1, 2)).flip(-1).flatten(-2)
        outside = down(outside.repeat_interleave(2, -1), other)
    return outside[..., :n]


def _leaves(n: int, least: int) -> int:
    """Of the smallest full tree for n keys."""
    return max(least, 1 << max(n - 1, 0).bit_length())


class Softmax(nn.Module):
    """`torch.softmax` and `F.softmin`."""

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__()
        self.kind, self.gates = kind, chip.keys(name, kind)

    def forward(
        self, input: Tensor, dim: int | None = None, *rest: Any, dtype: Any = None, **more: Any
    ) -> Tensor:
        axis, dtype = sites.axis_and_type(input, dim, rest, dtype)
        z = input if dtype is None else input.to(dtype)
        p: Tensor = self.gates.softmax(-z if self.kind == "softmin" else z, axis)
        return p


class Attention(nn.Module):
    """`F.scaled_dot_product_attention`: logits and sums over values as they are, gates analog."""

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__()
        self.gates = chip.keys(name, kind)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            call = AttentionCall(*args, **kwargs)
            p = self.gates.softmax(call.logits())
            return call.mixed(F.dropout(p, call.dropout_p) if call.dropout_p else p)


class MultiHead(nn.Module):
    """`F.multi_head_attention_forward`, with the softmax and the attention of here."""

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__()
        self.attention = Attention(name, kind, chip)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = sites.multi_head(lambda z, dim: self.attention.gates.softmax(z, dim), self.attention)
        return run(*args, **kwargs)


class Glu(nn.Module):
    """`F.glu`: the gate of SiLU at one half of the channels, whose branches read the other."""

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__()
        self.gate = chip.gate(name, kind, TAXONOMY["silu"])

    def forward(self, input: Tensor, dim: int = -1) -> Tensor:
        with torch._C.DisableTorchFunction():
            a, b = wide(input).chunk(2, dim)
            y: Tensor = self.gate(b, v=a)
            return y.to(input.dtype)


class Prelu(nn.Module):
    """`F.prelu`: a hard gate whose lower slope is data."""

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__()
        self.gate = chip.gate(name, kind, TAXONOMY["relu"])

    def forward(self, input: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            per_channel = weight.numel() > 1
            behind = (1 for _ in input.shape[2:])
            slope = weight.view(-1, *behind) if per_channel else weight.view(())
            y: Tensor = self.gate(input, s=(wide(slope), 1.0))
            return y


class Extreme(nn.Module):
    """`torch.maximum` and `minimum`: b + relu(a - b) and b - relu(b - a)."""

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        super().__init__()
        self.side = 1 if kind == "maximum" else -1
        self.gate = chip.gate(name, kind, TAXONOMY["relu"])

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            apart = self.side * (input - other)
            above: Tensor = self.gate(apart)
            return other + self.side * above


class Recurrent(nn.Module):
    """`torch.lstm`, `gru_cell` and the like: gates of their own for each layer and direction."""

    def __init__(self, name: str, kind: str, chip: Chip, layers: int) -> None:
        super().__init__()
        self.function, self.is_cell = getattr(torch, kind), kind.endswith("_cell")
        records = SITES[kind.removesuffix("_cell")]
        self.gates = nn.ModuleList(
            nn.ModuleDict(
                {
                    each: chip.gate(_part(name, each, k, layers), each, t)
                    for each, t in records.items()
                }
            )
            for k in range(layers)
        )

    def forward(self, *args: Any) -> Any:
        # The plain mappings that `rnn_steps` reads; a cell has one, a layer one for each direction.
        gates: list[dict[str, Any]] = [dict(each.items()) for each in self.gates]  # type: ignore[operator]
        with torch._C.DisableTorchFunction():
            return FUNCTIONS[self.function](*args, gates=gates[0] if self.is_cell else gates)


def _part(name: str, gate: str, layer: int, layers: int) -> str:
    return f"{name}/{gate}" if layers == 1 else f"{name}/{gate}_{layer}"


class Elementwise:
    """Answers a call such as `F.leaky_relu(x, 0.2)` by an analog gate."""

    def __init__(self, gate: AnalogGate, parameters: tuple[Any, ...]) -> None:
        self.gate, self.parameters = gate, parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        x, parameters, inplace = sites.KINDS[self.gate.kind].read(*args, **kwargs)
        if parameters != self.parameters:
            raise ConversionError(
                f"{self.gate.name} was converted with {self.parameters} and is called with "
                f"{parameters}; convert it with inputs that take the same path.",
                self.gate.name,
            )
        return kernels.overwritten(x, self.gate) if inplace else self.gate(x)


WHOLE: dict[str, Callable[[str, str, Chip], nn.Module]] = {
    "softmax": Softmax,
    "softmin": Softmax,
    "scaled_dot_product_attention": Attention,
    "multi_head_attention_forward": MultiHead,
    "glu": Glu,
    "prelu": Prelu,
    "maximum": Extreme,
    "minimum": Extreme,
}


def whole(name: str, kind: str, chip: Chip, owner: nn.Module) -> nn.Module | None:
    """What answers a call that is not element-wise; None where it is not known in analog."""
    if kind in WHOLE:
        return WHOLE[kind](name, kind, chip)
    if kind in {function.__name__ for function in FUNCTIONS}:
        if isinstance(owner, nn.RNNBase):
            return Recurrent(name, kind, chip, owner.num_layers * (1 + owner.bidirectional))
        if isinstance(owner, nn.RNNCellBase):
            return Recurrent(name, kind, chip, 1)
    return None
