"""A row of the taxonomy by interpreted kernels in float32, `interpret_row.py KEY ROUNDINGS`.

Its error is the one that the row states and so many roundings of a value at most.
"""

import sys

import torch

from threshold_gating import Activation, kernels
from threshold_gating.taxonomy import ROWS

key, roundings = sys.argv[1], int(sys.argv[2])
x = torch.linspace(-12, 12, 20_001)
with kernels.use("triton"):
    y = Activation(key)(x)
off = (y.double() - ROWS[key].f(x.double())).abs()
bound = ROWS[key].sup + roundings * 2**-24 * x.double().abs().clamp(min=1)
print("ok" if (off <= bound).all() else f"{key} is off by {off.max().item()}")
