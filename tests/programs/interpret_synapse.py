"""The kernels of synapses, step by step: they equal float64.

`few`: odd numbers, second derivatives, constants of 16 bits, steep gates, far inputs, unseen positions, memory, the ops and a compiled graph. `every`:
all kinds of layers, in 16 bits too.
"""

import sys

import test_synapse as t
import torch
from poison import poison

import threshold_gating as tg
from threshold_gating.kernels.synapse import gpu

poison(torch.Tensor, "new_empty")
if sys.argv[1] == "few":
    t.check_values("cpu")
    t.check_ops("cpu")
    t.check_compiled("cpu", "aot_eager")
    t.check_constants("cpu")
    t.check_extremes("cpu")
    t.check_far("cpu")
    t.check_unseen("cpu")
    t.check_memory("cpu")
else:
    prepared, parts = gpu._prepared, []
    gpu._prepared = lambda *a: parts.append((a[0], prepared(*a)[1])) or prepared(*a)
    t.check_all("cpu", torch.float32)
    for kind in ("forward", "inputs", "parameters"):  # it was the kernels, with sums in parts
        assert max(n for k, n in parts if k == kind) > 1, kind
    for dtype in (torch.bfloat16, torch.float16):
        t.check(t.moved(tg.Linear(9, 5, tier="S")).to(dtype), torch.randn(7, 9).to(dtype))
        layer = t.moved(tg.Conv2d(3, 2, 2, tier="general")).to(dtype)
        t.check(layer, torch.randn(2, 3, 4, 3).to(dtype))
    t.check_fast("cpu", 1e-5)
print("ok")
