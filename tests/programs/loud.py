"""A network that prints as it is read, as it is made and as it runs."""

import torch

print("read")


class Loud(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("made")
        self.a, self.act = torch.nn.Linear(4, 4), torch.nn.GELU()

    def forward(self, x):
        print("runs")
        return self.act(self.a(x))
