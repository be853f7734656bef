"""A quarter of the pairs, `interpret_pairs.py PART`, step by step, with NaN in what is not written."""

import sys
from unittest import mock

import test_pairs as t
import torch
from poison import poison

from benchmarks.pairs import PAIRS
from threshold_gating import kernels
from threshold_gating.kernels.blend import function, gpu

part = int(sys.argv[1])
poison(torch, "empty", "empty_like")
poison(torch.Tensor, "new_empty", "new_empty_strided")
torch.set_num_threads(1)
with kernels.use("triton"):
    for name in list(t.GATES)[part::4]:
        for shape in t.SHAPES:
            t.check(PAIRS[name], shape, torch.float32)
        for dtype in t.DTYPES[2:]:
            t.check(PAIRS[name], (3, 63), dtype)
    if part == 0:
        t.check_special()
    if part == 1:
        # Few are many here: the interpreter would take a minute for as many as on a GPU.
        with (
            mock.patch.object(gpu, "MANY_GROUPS", 256),
            mock.patch.object(function, "_applied", wraps=function._applied) as calls,
        ):
            t.check_learned()
            t.check_given()
        assert calls.call_count > 20
    try:
        t.check(PAIRS["silu channel"], (1, 63), torch.float32, kernel=t.wrong)
    except AssertionError:
        print("ok")
