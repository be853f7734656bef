"""Learned gates of K >= 3 branches by kernels, step by step, in tiles of several sizes."""

import torch

from tests.kernels.blend import learned
from threshold_gating import kernels
from threshold_gating.kernels.blend import gpu

kernels.use("triton")
torch.manual_seed(0)
NARROW = [torch.bfloat16, torch.float16]
learned.check_gates("cpu", [torch.float32])
learned.check_gates("cpu", NARROW, branches=(5,))
learned.check_some("cpu")
learned.check_tails("cpu", [torch.float32, *NARROW])
for dtype in (torch.float32, *NARROW):
    learned.check_ends("cpu", dtype)
for rows, columns, stages, programs in ((1, 16, 3, 4), (2, 8, 2, 2), (4, 32, 4, 1)):
    # tiles ahead that there are none of, and programs whose last round is not full
    tiles = (rows, columns, 1, stages, programs)
    gpu.tiles_forward = gpu.tiles_backward = lambda m, size, known, tiles=tiles: m.tiles(*tiles)
    gpu.prepared.cache_clear(), gpu.plan.cache_clear()
    learned.check_gates("cpu", [torch.float32], branches=(3,))
print("ok")
