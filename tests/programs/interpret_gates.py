"""Random gates by interpreted kernels, `interpret_gates.py SEED COUNT`, against long double."""

import sys

import numpy as np

from tests.fuzz import gates
from threshold_gating import kernels

kernels.use("triton")
gates._TOGETHER, found = 10, []
with np.errstate(all="ignore"):
    for g, how in gates.batches(int(sys.argv[1]), int(sys.argv[2])):
        found += gates.differences(g, how, {"triton": kernels.blend})
print("ok" if not found else found[0])
