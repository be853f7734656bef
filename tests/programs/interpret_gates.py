"""Random gates by interpreted kernels, `interpret_gates.py SEED COUNT TOGETHER`, against long double.

Of several gates together one that is taken by itself decides for all, so one at a time goes where
the quick loop goes. That has a stop, beyond which gates below 2^-28 count as 0.
"""

import sys

import numpy as np
import torch

from tests.fuzz import gates
from threshold_gating import kernels

kernels.use("triton")
gates._TOGETHER, found = int(sys.argv[3]), []
if gates._TOGETHER == 1:
    gates._UNRESOLVED = gates._UNRESOLVED | {torch.float32: 2.0**-28}
with np.errstate(all="ignore"):
    for g, how in gates.batches(int(sys.argv[1]), int(sys.argv[2])):
        found += gates.differences(g, how, {"triton": kernels.blend})
print("ok" if not found else found[0])
