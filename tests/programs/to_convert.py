"""Networks and inputs that test_convert names on the command line."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 8), nn.Linear(8, 3), nn.ReLU()

    def forward(self, x):
        return torch.tanh(self.b(self.act(self.a(x))))


def make_model():
    torch.manual_seed(7)
    return Net()


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(4, 8), nn.GELU()

    def forward(self, x, shift=0.0):
        return self.act(self.a(x) + shift)


def smooth():
    torch.manual_seed(7)
    return Smooth()


def make_inputs():
    return torch.randn(5, 4)


def other():
    torch.manual_seed(8)
    return Net()


def wrong():
    return 3


def no_inputs():
    return torch.zeros(0, 4)


def fails():
    raise KeyError("weights\nof mine")


def leaves():
    raise SystemExit(3)


def says():
    print("making it")
    return make_model()


ready = make_model()
ready_inputs = torch.ones(5, 4)
