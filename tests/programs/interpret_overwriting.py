"""Gates written over their input, step by step: they equal float64, and a wrong copy is found."""

import torch
from poison import poison

from tests.kernels.blend import test_autograd as t
from threshold_gating.kernels.blend import gpu

poison(torch, "empty_like")
t.check_all("cpu", [torch.float32, torch.bfloat16])
t.check_strange("cpu")
t.check_network("cpu")
right = gpu.Plan.overwrite


def worse(self, x, kept, given):  # on purpose: what is kept is what it became
    right(self, x, kept, given)
    if kept is not None:
        kept.copy_(x)


gpu.Plan.overwrite = worse
try:
    t.check_all("cpu", [torch.float32])
except AssertionError:
    print("ok")
else:
    raise SystemExit("a wrong copy passes")
