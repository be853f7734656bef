"""Linear and convolution layers whose products are those of a crossbar; see `crossbar`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating.hardware.crossbar import Array, Crossbar
from threshold_gating.primitive import wide


class Layer(nn.Module):
    """A layer whose product is that of its `array`."""

    array: Array
    weight: Any
    bias: Any
    groups: int = 1
    behind: int = 0  # axes behind that of the outputs

    def forward(self, input: Tensor) -> Tensor:
        # A converted network around this would look at our steps, and answer clamp by a gate.
        with torch._C.DisableTorchFunction():
            y = self.array.multiply(self, wide(input))
            if self.bias is not None:
                y = y + wide(self.bias).view(-1, *(1 for _ in range(self.behind)))
            return y.to(input.dtype)

    def whole(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product as torch computes it, with weights (O, R)."""
        raise NotImplementedError

    def rows(self, x: Tensor) -> Tensor:
        """The row voltages of every product, (..., G, R)."""
        raise NotImplementedError

    def columns(self, y: Tensor) -> Tensor:
        """What `whole` gives as (..., G, O)."""
        return torch.unflatten(y.movedim(-1 - self.behind, -1), -1, (self.groups, -1))

    def assembled(self, y: Tensor) -> Tensor:
        """(..., G, O) as the layer's output."""
        return y.flatten(-2).movedim(-1, -1 - self.behind)


class CrossbarLinear(Layer, nn.Linear):
    """`torch.nn.Linear` on crossbars."""

    def whole(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def rows(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2)


class _Conv(Layer):
    """A convolution on crossbars: each position of the output is one product."""

    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    padding_mode: Any
    _reversed_padding_repeated_twice: list[int]

    def _padded(self, x: Tensor) -> Tensor:
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self._reversed_padding_repeated_twice, mode=mode)

    def whole(self, x: Tensor, weight: Tensor) -> Tensor:
        run: Any = (F.conv1d, F.conv2d, F.conv3d)[self.behind - 1]
        shaped = weight.view(-1, *self.weight.shape[1:])
        y: Tensor = run(self._padded(x), shaped, None, self.stride, 0, self.dilation, self.groups)
        return y

    def rows(self, x: Tensor) -> Tensor:
        x = self._padded(x)
        channel, n = x.dim() - self.behind - 1, self.behind
        steps = zip(self.kernel_size, self.dilation, self.stride, strict=True)
        for k, (size, dilation, stride) in enumerate(steps, channel + 1):
            x = x.unfold(k, dilation * (size - 1) + 1, stride)[..., ::dilation]
        x = x.movedim(channel, channel + n)  # behind the positions
        return torch.unflatten(x, channel + n, (self.groups, -1)).flatten(channel + n + 1)


class CrossbarConv1d(_Conv, nn.Conv1d):
    """`torch.nn.Conv1d` on crossbars."""

    behind = 1


class CrossbarConv2d(_Conv, nn.Conv2d):
    """`torch.nn.Conv2d` on crossbars."""

    behind = 2


class CrossbarConv3d(_Conv, nn.Conv3d):
    """`torch.nn.Conv3d` on crossbars."""

    behind = 3


LAYERS: dict[type, type] = {
    nn.Linear: CrossbarLinear,
    nn.Conv1d: CrossbarConv1d,
    nn.Conv2d: CrossbarConv2d,
    nn.Conv3d: CrossbarConv3d,
}


def put_on_crossbar(layer: nn.Module, name: str, settings: Crossbar) -> Array:
    """Let a layer of `LAYERS` be on crossbars from now on, in the same object."""
    array = Array(name, settings)
    layer.__class__ = LAYERS[type(layer)]
    layer.add_module("array", array)
    weight: Any = layer.weight
    groups = getattr(layer, "groups", 1)
    array.check(torch.unflatten(weight.detach().flatten(1), 0, (groups, -1)))
    return array


def take_off_crossbar(layer: nn.Module) -> None:
    """The layer as it was."""
    layer.__class__ = next(plain for plain, on in LAYERS.items() if on is type(layer))
    del layer._modules["array"]
