"""Networks that test_prove names on the command line."""

import torch
import torch.nn.functional as F
from torch import nn


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class Net(nn.Module):
    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.a, self.act, self.b, self.c = nn.Linear(4, 4), act(), Swish(), Swish()
        self.slope = nn.LeakyReLU(0.2)

    def forward(self, x):
        x = self.slope(self.c(self.b(self.act(self.a(x)))))
        x = F.leaky_relu(x, 0.3) + F.leaky_relu(x, 0.3)
        return torch.softmax(torch.tanh(x), -1)


def make():
    return Net()


def soft():
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
