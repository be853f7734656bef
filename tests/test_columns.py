"""One vector under hard gates reads one column an input; interpreted here, compiled where marked gpu."""

import copy
import gc
import itertools
import os

import pytest
import torch

import threshold_gating as tg
from threshold_gating.kernels import columns

# Over the largest true value: 70 terms added in float32 in another order; the gate's constants and
# the result of 16 bits are rounded to 1 in 256 and 1 in 2,048.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


# A second threshold, constants, and an owner for each
THREE = tg.TG(float("inf"), (-1, 0.5), (1, 2, 1), (0.5, 1, 2), owner=("hi", "lo"))
CASES = (
    ("relu", "channel", ()),
    ("leaky_relu", "layer", ()),
    ("relu", "channel", ("theta",)),
    ("leaky_relu", "layer", ("theta",)),
    (THREE, "channel", ()),
    (THREE, "layer", ("theta",)),
    (THREE, "channel", ("theta", "c")),
)


def check(device, dtype=torch.float32):
    """The kernel against float64, in parts and in one, and that it was the kernel."""
    torch.manual_seed(0)
    usual = columns._ENOUGH
    for enough, case in itertools.product((1, usual), CASES):
        columns._ENOUGH = enough
        columns._ready.cache_clear()
        check_one(*case, device, dtype, bias=enough == 1 or case[1] == "layer")


def check_one(init, share, train, device, dtype, bias):
    layer = tg.Linear(70, 150, init=init, share=share, train=train, bias=bias)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
        layer = layer.to(device, dtype)
        x = torch.randn(1, 70, device=device).to(dtype)
        x[0, 3:5] = torch.tensor([0.0, 0.5])  # at a threshold, where there is one
        x[0, 5] = -1.0
        with tg.kernels.use("triton"):
            have = layer(x)
        with tg.kernels.use("reference"):
            want = copy.deepcopy(layer).double()(x.double())
    assert columns._COPIES[id(layer.weight)].weight() is layer.weight
    error = float((have.double() - want).abs().max() / want.abs().max())
    assert error < TOLERANCE[dtype], f"{init} {share} {train}: {error:.1e}"
    with torch.no_grad(), tg.kernels.use("triton"):
        layer.weight.mul_(2)
        again = layer(x)
    bias = 0 if layer.bias is None else layer.bias.double()
    # twice the weights, twice the sum: both are rounded to the dtype beside the bias
    bound = 4 * TOLERANCE[dtype] * float(have.abs().max())
    assert float(((again.double() - bias) / 2 - (have.double() - bias)).abs().max()) < bound


def check_copies():
    """The copy of the weights goes with them, and follows a move to other memory."""
    layer, x = tg.Linear(6, 5, init="relu"), torch.randn(6)
    with torch.no_grad(), tg.kernels.use("triton"):
        before = layer(x)
        layer.weight.data = 2 * layer.weight
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))
        key = id(layer.weight)
        assert key in columns._COPIES
        del layer
        gc.collect()
        assert key not in columns._COPIES
    with torch.inference_mode(), tg.kernels.use("triton"):
        layer = tg.Linear(6, 5, init="relu")
        before = layer(x)
        layer.weight.mul_(2)  # which an inference tensor does not count
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))


INTERPRETED = """
import sys, torch
sys.path.insert(0, {tests!r})
import test_columns as t

new = torch.Tensor.new_empty
def poisoned(x, *a, **k):
    out = new(x, *a, **k)
    return out.fill_(float("nan")) if out.is_floating_point() else out
torch.Tensor.new_empty = poisoned
t.check("cpu")
t.check_copies()
right = t.columns.product
wrong = (  # on purpose: another region, and one owner for another
    lambda x, theta, *rest: right(-x, theta, *rest),
    lambda *given: right(*given[:6], None if given[6] is None else ("lo", "lo"), *given[7:]),
)
for t.columns.product in wrong:
    try:
        t.check("cpu")
    except AssertionError:
        continue
    raise SystemExit("a wrong kernel passes")
print("ok")
"""


def test_the_kernel_equals_float64_step_by_step(step_by_step):
    step_by_step(INTERPRETED.format(tests=os.path.dirname(__file__)))


@pytest.mark.gpu
def test_a_recorded_graph_sees_later_weights():
    layer, x = tg.Linear(64, 32, init="relu", bias=False).cuda(), torch.randn(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(x)
        before = layer(x)
        layer.weight.mul_(2)
        graph.replay()
        torch.testing.assert_close(y, 2 * before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernel_equals_float64(dtype):
    check("cuda", dtype)
