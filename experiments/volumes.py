"""A 3-D U-Net for segmentation, and volumes of unlike sizes on one grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.data import Volumes


class Unit(nn.Module):
    """A norm, an activation, and the convolution that reads it: what tier W makes one layer of."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(inputs, inputs)  # each channel by itself
        self.act: nn.Module = nn.SiLU()
        self.conv: nn.Module = nn.Conv3d(inputs, outputs, kernel, stride, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.act(self.norm(x).to(x.dtype)))  # autocast norms in float32
        return out


class UNet(nn.Module):
    """Two units a level; strided units go down, copies of voxels up, beside what went down."""

    def __init__(self, widths: tuple[int, ...], classes: int = 3) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = nn.Conv3d(1, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(nn.Sequential(Unit(w, w), Unit(w, w)) for w in widths)
        self.down = nn.ModuleList(Unit(a, b, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(nn.Sequential(Unit(a + b, a), Unit(a, a)) for a, b in pairs)
        self.last = Unit(widths[0], classes, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.levels[0](self.first(x))
        passed = []
        for down, level in zip(self.down, self.levels[1:], strict=True):
            passed.append(x)
            x = level(down(x))
        for up in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([passed.pop(), x], 1))
        out: Tensor = self.last(x)
        return out


class Split(NamedTuple):
    """Volumes [N, D, H, W] on one grid, with a margin for crops, and their labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    sha256: str


def split(volumes: Volumes, size: tuple[int, ...], margin: int) -> Split:
    """Every fifth volume is for the test; each has mean 0 and deviation 1, and zeros around it."""
    grid = [n + 2 * margin for n in size]
    images = [centred((v - v.mean()) / max(v.std(), 1e-6), grid) for v in volumes.images]
    labels = [centred(v, grid) for v in volumes.labels]
    x, y = torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels)).long()
    test = torch.arange(len(x)) % 5 == 4
    return Split((x[~test], y[~test]), (x[test], y[test]), volumes.sha256)


def centred(volume: np.ndarray, grid: Iterable[int]) -> np.ndarray:
    """The middle of a volume, with zeros where it is smaller than the grid."""
    for axis, (n, wanted) in enumerate(zip(volume.shape, grid, strict=True)):
        low, more = max(0, (n - wanted) // 2), max(0, wanted - n)
        volume = volume.take(range(low, low + min(n, wanted)), axis)
        pads = [(0, 0)] * volume.ndim
        pads[axis] = (more // 2, more - more // 2)
        volume = np.pad(volume, pads)
    return volume


def cropped(x: Tensor, corners: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The part of each volume [B, D, H, W] that begins at its corner [B, 3]."""
    along = [corners[:, k, None] + torch.arange(n, device=x.device) for k, n in enumerate(grid)]
    which = torch.arange(len(x), device=x.device)[:, None, None, None]
    d, h, w = along
    return x[which, d[:, :, None, None], h[:, None, :, None], w[:, None, None, :]]
