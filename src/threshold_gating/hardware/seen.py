"""What sites and layers see in the run of calibration, by which voltages and formats are chosen."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Seen:
    """What a site saw in calibration: how much, its RMS, its largest input, its last shape."""

    def __init__(self) -> None:
        self.count, self.squares, self.largest = 0, 0.0, 0.0  # of finite numbers
        self.numbers = self.nans = 0
        self.shape: tuple[int, ...] = ()
        self.axis, self.device = -1, torch.device("cpu")

    def add(self, x: Tensor, axis: int) -> None:
        z = x.detach().double()
        self.numbers += z.numel()
        self.nans += int(z.isnan().sum().item())
        z = z[z.isfinite()]  # a mask is -inf
        self.count += z.numel()
        self.squares += z.square().sum().item()
        self.largest = max(self.largest, z.abs().max().item() if z.numel() else 0.0)
        self.shape, self.axis = tuple(x.shape), axis if x.dim() > 1 else -1
        self.device = x.device

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class Products:
    """What a layer saw in calibration: its largest input and column sum, and how many it read.

    A current is a sum over the column's w_max, in currents of a cell at g_max and an input of 1.
    """

    def __init__(self) -> None:
        self.largest_input = self.largest_sum = self.largest_current = 0.0
        self.products = self.tiles = 0  # of one run; tiles on one column

    def add(self, x: Tensor, partial: Tensor, limit: Tensor) -> None:
        self.tiles = partial.shape[-2]
        if not partial.numel():  # an empty batch
            return
        self.largest_input = max(self.largest_input, _top(x))
        self.largest_sum = max(self.largest_sum, _top(partial))
        self.largest_current = max(self.largest_current, _top(partial / limit))
        self.products += partial.numel()


def _top(x: Tensor) -> float:
    """The largest |x|; inf where there is a NaN, which no comparison would keep."""
    return x.detach().abs().nan_to_num(math.inf, math.inf).max().item()
