"""Tier W by Triton: interpreted on a CPU in a process of its own, compiled where marked gpu."""

import copy
import os

import pytest
import torch

import threshold_gating as tg
from threshold_gating.kernels import halves

# Over the largest true value. float32: a thousand terms in another order; 16 bits: the halves, the
# first product and the result are rounded, each by half a unit in the last place.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
SHAPES = [(1, 17), (63, 5), (300, 17), (3, 7, 33), (0, 4)]


def moved(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return layer


def results(layer, x, dy, backend):
    """The output and every gradient."""
    own, z = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    with tg.kernels.use(backend):
        y = own(z)
        y.backward(dy)
    return {"y": y.detach(), "x": z.grad, **{n: p.grad for n, p in own.named_parameters()}}


def check(layer, x):
    """The kernels against the same layer in float64."""
    with torch.no_grad():
        dy = torch.randn(layer(x).shape, device=x.device).to(x.dtype)
    have = results(layer, x, dy, "triton")
    want = results(copy.deepcopy(layer).double(), x.double(), dy.double(), "reference")
    for name, true in want.items():
        assert have[name].shape == true.shape, name
        if true.numel():
            error = float(
                (have[name].double() - true).abs().max() / true.abs().max().clamp_min(1e-30)
            )
            assert error < TOLERANCE[x.dtype], f"{name} {tuple(x.shape)} {x.dtype}: {error:.1e}"


def check_all(device, dtypes):
    torch.manual_seed(0)
    for dtype in dtypes:
        for share in ("channel", "layer"):
            for shape in SHAPES:
                layer = moved(tg.Linear(shape[-1], 5, share=share, bias=shape[0] != 63))
                check(layer.to(device, dtype), torch.randn(shape, device=device).to(dtype))
            image = torch.randn(2, 6, 5, 4, device=device).to(dtype)
            conv = moved(tg.Conv2d(6, 5, 3, padding=1, stride=2, share=share)).to(device, dtype)
            check(conv, image.to(memory_format=torch.channels_last))


INTERPRETED = """
import sys, torch
sys.path.insert(0, {tests!r})
import test_halves as t
from threshold_gating.kernels import halves

plain = torch.empty_like
torch.empty_like = lambda x, **k: plain(x, **k).fill_(float("nan"))
new = torch.Tensor.new_empty
torch.Tensor.new_empty = lambda x, *a, **k: new(x, *a, **k).fill_(float("nan"))
t.check_all("cpu", [torch.float32])
low, high = halves.split(torch.randn(9, 40), torch.ones(40), torch.zeros(40), beside=False)
assert not (low.isnan().any() or high.isnan().any())
right = halves.split
halves.split = lambda x, tau, theta, beside: right(x, tau, -theta, beside)  # wrong on purpose
try:
    t.check_all("cpu", [torch.float32])
except AssertionError:
    print("ok")
"""


def test_the_kernels_equal_float64_step_by_step(step_by_step):
    step_by_step(INTERPRETED.format(tests=os.path.dirname(__file__)))


def test_memory_that_is_no_matrix_is_left_to_the_formulas():
    plan = tg.kernels.products._Plan(None, (), "softmax", None, None)
    assert halves.takes(plan, torch.randn(4, 6))
    assert not halves.takes(plan, torch.randn(6, 4).t())
    image = plan._replace(conv=tg.kernels.products.Conv((1, 1), (0, 0), (1, 1), 1))
    x = torch.randn(2, 3, 4, 4)
    assert not halves.takes(image, x)
    assert halves.takes(image, x.to(memory_format=torch.channels_last))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernels_equal_float64(dtype):
    check_all("cuda", [dtype])
    torch.manual_seed(0)
    layer = moved(tg.Linear(515, 130)).to("cuda", dtype)
    check(layer, torch.randn(1003, 515, device="cuda").to(dtype))


@pytest.mark.gpu
def test_gradients_have_gradients_and_autocast_works():
    torch.manual_seed(0)
    layer = moved(tg.Linear(8, 4)).cuda()
    x = torch.randn(300, 8, device="cuda", requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert x.grad.isfinite().all()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.gate.rho.grad.isfinite().all()
