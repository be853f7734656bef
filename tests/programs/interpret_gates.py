"""Random gates by interpreted kernels, against long double."""

import numpy as np

from tests.fuzz import gates
from threshold_gating import kernels

kernels.use("triton")
gates._TOGETHER, found = 10, []
with np.errstate(all="ignore"):
    for g, how in gates.batches(3, 60):
        found += gates.differences(g, how, {"triton": kernels.blend})
print("ok" if not found else found[0])
