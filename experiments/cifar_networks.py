"""The networks of the CIFAR experiments: one ResNet in three stages, told apart by what stands
before its convolutions, and what each of them costs.

A block reads what comes before the activation, so that an activation and the convolution behind it
can be one layer:

    h = activation(z);  z' = shortcut(h) + norm(conv(norm(conv(z))))

In a plain arm the convolution reads h, and the network is the usual one. In a gated arm (tier W,
CReLU, splines) it reads z through weights of its own for each branch, and h is left to the shortcut
and the pooling. All convolutions but the first, which reads pixels, are gated. The stages have w,
2 w and 4 w channels; between them the shortcut takes every second pixel and pads with zeros.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from threshold_gating.nn.tying import TierShare

Convolution = Callable[[int, int, int], nn.Module]  # inputs, outputs, stride


class Arm(NamedTuple):
    """A contender: its activation of so many channels, and its convolution if that is gated."""

    activation: Callable[[int], nn.Module]
    gated: Convolution | None = None
    branches: int = 1  # weights for each pair of channels and place of the kernel


def _tier_a(channels: int) -> nn.Module:
    learned = ("tau", "theta", "s", "c")
    return tg.Activation("silu", share="channel", channels=channels, train=learned)


def _tier_w(init: str, share: TierShare) -> Arm:
    def gated(inputs: int, outputs: int, stride: int) -> nn.Module:
        return tg.Conv2d(
            inputs, outputs, 3, init=init, share=share, stride=stride, padding=1, bias=False
        )

    return Arm(lambda _: tg.Activation(init), gated, tg.TAXONOMY[init].K)


class CReLU(nn.Conv2d):
    """A convolution of max(x, 0) and max(-x, 0): tier W with two hard gates that learn nothing."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(2 * inputs, outputs, 3, stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([F.relu(x), F.relu(-x)], 1))


ARMS: dict[str, Arm] = {
    "relu": Arm(lambda _: nn.ReLU()),
    "silu": Arm(lambda _: nn.SiLU()),
    "gelu": Arm(lambda _: nn.GELU()),
    "tier A": Arm(_tier_a),
    "tier W": _tier_w("silu", "channel"),
    "tier W K=3": _tier_w("gelu_k3", "channel"),
    "tier W per layer": _tier_w("silu", "layer"),
    "crelu": Arm(lambda _: nn.ReLU(), CReLU, 2),
}


class Block(nn.Module):
    def __init__(self, arm: Arm, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.gated = outputs // inputs, arm.gated is not None
        self.act1, self.conv1 = arm.activation(inputs), _conv(arm, inputs, outputs, self.stride)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.act2 = nn.Identity() if self.gated else arm.activation(outputs)
        self.conv2 = _conv(arm, outputs, outputs, 1)

    def forward(self, z: Tensor) -> Tensor:
        h: Tensor = self.act1(z)
        y = self.bn1(self.conv1(z if self.gated else h))
        y = self.bn2(self.conv2(self.act2(y)))
        if self.stride == 2:  # every second pixel, and zeros for the new channels
            h = F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, h.shape[1] // 2, (h.shape[1] + 1) // 2))
        return h + y


class Network(nn.Module):
    """Three stages of n blocks, 6 n + 2 layers."""

    def __init__(self, arm: Arm, depth: int, width: int, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"Network: depth is 6 n + 2 (8, 14, 20, ...); got {depth}.")
        self.conv, self.bn = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sizes = [width, *(width << stage for stage in range(3) for _ in range((depth - 2) // 6))]
        blocks = [Block(arm, a, b) for a, b in itertools.pairwise(sizes)]
        self.blocks, self.act = nn.Sequential(*blocks), arm.activation(4 * width)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(self.bn(self.conv(x)))
        y: Tensor = self.linear(self.act(z).mean((2, 3)))
        return y


def _conv(arm: Arm, inputs: int, outputs: int, stride: int) -> nn.Module:
    if arm.gated is None:
        return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return arm.gated(inputs, outputs, stride)


class Cost(NamedTuple):
    """What one image takes, and what is kept.

    `hard_macs` are those with a branch at a time, as hard gates (and CReLU) need them. A weight is
    read for each MAC, two bytes in bf16. `adc_R` are conversions of crossbars with R rows a tile:
    one for each output, position and tile of its inputs; each branch has rows of its own.
    """

    parameters: int
    macs: int
    hard_macs: int
    adc_128: int
    adc_512: int


class Product(NamedTuple):
    """A layer as a matrix of weights and how many vectors it meets in one image."""

    rows: int
    columns: int
    vectors: int
    branches: int  # of the rows, how many belong to one input


def products(branches: int, depth: int, width: int, classes: int = 10) -> Iterator[Product]:
    yield Product(27, width, 32 * 32, 1)
    before = width
    for stage in range(3):
        channels, places = width << stage, (32 >> stage) ** 2
        for _ in range((depth - 2) // 6):
            for inputs in (before, channels):
                yield Product(9 * inputs * branches, channels, places, branches)
            before = channels
    yield Product(4 * width, classes, 1, 1)


@functools.cache
def cost(arm: Arm, depth: int, width: int) -> Cost:
    found = list(products(arm.branches, depth, width))
    with torch.device("meta"):  # counting draws no numbers that a run would get
        parameters = sum(p.numel() for p in Network(arm, depth, width).parameters())
    macs = [p.rows * p.columns * p.vectors for p in found]
    hard = sum(m // p.branches for m, p in zip(macs, found, strict=True))
    adc = [
        sum(p.columns * p.vectors * math.ceil(p.rows / rows) for p in found) for rows in (128, 512)
    ]
    return Cost(parameters, sum(macs), hard, *adc)


def matched(arm: Arm, depth: int, budget: str, most: Cost) -> int:
    """The width at which an arm comes nearest to a cost, by ratio."""
    target = getattr(most, budget)
    return min(
        range(4, 41), key=lambda w: abs(math.log(getattr(cost(arm, depth, w), budget) / target))
    )
