"""The kernels of two soft gates, step by step: they equal float64, and wrong ones are found."""

import test_two_soft as t
import torch
from poison import poison

from threshold_gating.kernels.product import two_soft

poison(torch, "empty_like")
for name in ("new_empty", "new_empty_strided"):
    poison(torch.Tensor, name)
calls, plain_split = [], two_soft.split
two_soft.split = lambda *a: calls.append(1) or plain_split(*a)
t.check_all("cpu", [torch.float32])
assert len(calls) >= 2 * len(t.SHAPES)  # it was the kernels
large, two_soft._LARGE = two_soft._LARGE, 1  # the weights of convolutions half by half
t.check_all("cpu", [torch.float32])
two_soft._LARGE = large
two_soft.interpreting = lambda: False  # and in the tiles of a GPU, several each way
t.SHAPES.append((129, 300))
for planned in (two_soft._forward, two_soft._backward):
    planned.cache_clear()
t.check_all("cpu", [torch.float32])
assert two_soft._tile(300, *two_soft._TILE_BACK) == (8, 128)
t.check_values()
split, joined = two_soft.split, two_soft.joined
wrong = {  # on purpose: what is gated, where, and the gradients of tau and theta alone
    "split": lambda x, g, beside: split(x, g._replace(theta0=-1 - g.theta0), beside),
    "joined": lambda x, g, d: (*joined(x, g, d)[:2], 1.01 * joined(x, g, d)[2]),
}
for name, worse in wrong.items():
    right = getattr(two_soft, name)
    setattr(two_soft, name, worse)
    try:
        t.check_all("cpu", [torch.float32])
    except AssertionError:
        setattr(two_soft, name, right)
    else:
        raise SystemExit(f"a wrong {name} passes")
print("ok")
