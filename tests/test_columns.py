"""One vector under hard gates reads one column an input; interpreted here, compiled where marked gpu."""

import copy
import os

import pytest
import torch

import threshold_gating as tg
from threshold_gating.kernels import columns

# Over the largest true value: 70 terms added in float32 in another order; the gate's constants and
# the result of 16 bits are rounded to 1 in 256 and 1 in 2,048.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(device, dtype=torch.float32):
    """The kernel against float64, and that it was the kernel."""
    torch.manual_seed(0)
    for init, share, train in (
        ("relu", "channel", ()),
        ("leaky_relu", "layer", ()),
        ("relu", "channel", ("theta",)),
        ("leaky_relu", "layer", ("theta",)),
    ):
        layer = tg.Linear(70, 150, init=init, share=share, train=train)
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
            layer = layer.to(device, dtype)
            x = torch.randn(1, 70, device=device).to(dtype)
            x[0, 3] = 0.0  # at the threshold, where there is one
            with tg.kernels.use("triton"):
                have = layer(x)
            with tg.kernels.use("reference"):
                want = copy.deepcopy(layer).double()(x.double())
        assert layer.weight in columns._COPIES
        error = float((have.double() - want).abs().max() / want.abs().max())
        assert error < TOLERANCE[dtype], f"{init} {share} {train}: {error:.1e}"
        with torch.no_grad(), tg.kernels.use("triton"):
            layer.weight.mul_(2)
            again = layer(x)
        bias = layer.bias.double()
        # twice the weights, twice the sum: both are rounded to the dtype beside the bias
        bound = 4 * TOLERANCE[dtype] * float(have.abs().max())
        assert float(((again.double() - bias) / 2 - (have.double() - bias)).abs().max()) < bound


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
right = t.columns.product
t.columns.product = lambda x, theta, *rest: right(-x, theta, *rest)  # wrong on purpose
try:
    t.check("cpu")
except AssertionError:
    print("ok")
"""


def test_the_kernel_equals_float64_step_by_step(step_by_step):
    step_by_step(INTERPRETED.format(tests=os.path.dirname(__file__)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernel_equals_float64(dtype):
    check("cuda", dtype)
