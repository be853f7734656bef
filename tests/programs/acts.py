"""Functions, modules and classes that test_function names, with a module beside them."""

from dataclasses import dataclass

import torch
from beside import DOUBLE
from torch import nn


def swish(x):
    return x * torch.sigmoid(DOUBLE * x)


class Slope(nn.Module):
    def __init__(self, slope=0.3):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([slope]))

    def forward(self, x):
        return torch.nn.functional.prelu(x, self.slope)


class Sized(nn.Module):
    def __init__(self, size):
        super().__init__()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


@dataclass
class Plain:
    scale: float = 3.0

    def __call__(self, x):
        return self.scale * x


drop = nn.Dropout(0.5)
steep = Slope(0.7)
number = 3
