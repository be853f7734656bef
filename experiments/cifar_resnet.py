"""The ResNets of the CIFAR-10 experiments, with the calls of `F.relu` of their trained weights."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride == 2:  # every second pixel, and zeros for the new channels
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, x.shape[1] // 2, x.shape[1] // 2))
        return F.relu(x + y)


class ResNet(nn.Module):
    """Three stages of n blocks, 6 n + 2 layers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(first, width), *(Block(width, width) for _ in range(n - 1)))
            for first, width in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def pretrained(n: int, weights: Path) -> ResNet:
    """The network of 6 n + 2 layers with the weights of a file of its author's."""
    state = torch.load(weights, weights_only=True, map_location="cpu")["state_dict"]
    model = ResNet(n).eval()
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return model
