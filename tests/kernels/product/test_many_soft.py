"""Tier W of gates that have no kernel of their own product: made by those of `blend`, one by one."""

import copy

import pytest
import torch

import threshold_gating as tg
from tests.kernels.layers import moved, results
from threshold_gating.kernels.product import formula

# As in `test_two_soft`; in 16 bits y is a sum of products that are rounded.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LOW = tg.TG(tau=1.0, theta=(0.0,), s=(0.0, 1.0), c=(-0.05, 0.0))  # with a constant below


def layers():
    """Each with the shape of its input."""
    learned = {"train": ("tau", "theta", "c")}
    yield tg.Linear(6, 5, init="gelu_k3"), (7, 6)
    yield tg.Conv2d(6, 5, 3, init="gelu_k3", padding=1, stride=2), (2, 6, 5, 4)
    yield tg.Conv2d(6, 4, 3, init="gelu_k3", share="layer", groups=2), (2, 6, 5, 4)
    yield tg.Conv3d(3, 2, 3, init=LOW, padding=1, **learned), (2, 3, 4, 5, 4)


def check_all(device, dtypes):
    """The output and every gradient, against the same layer in float64."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for layer, shape in layers():
            layer, x = moved(layer).to(device, dtype), torch.randn(shape, device=device).to(dtype)
            if len(shape) == 4:
                layer, x = (w.to(memory_format=torch.channels_last) for w in (layer, x))
            dy = torch.randn(layer(x).shape, device=device).to(dtype)
            have = results(layer, x, dy, "triton")
            exact = copy.deepcopy(layer).double()
            want = results(exact, x.double(), dy.double(), "reference")
            for name, true in want.items():
                error = (have[name].double() - true).abs().max() / true.abs().max()
                # a gate's gradients are sums that cancel, of terms that 16 bits have rounded
                most = TOLERANCE[dtype] * (5 if name.startswith("gate") else 1)
                assert error < most, f"{name} of {layer}, {dtype}: {error:.1e}"


def check_launches(monkeypatch):
    """That kernels make the gated inputs, each by one call, and that nothing is copied to a device:
    a CUDA graph takes no constants of the host."""
    calls, every, blend = [], list(layers()), formula.blend
    monkeypatch.setattr(formula, "blend", lambda *a, **k: calls.append(1) or blend(*a, **k))
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: pytest.fail(f"a constant: {a}"))
    for layer, shape in every:
        calls.clear()
        with tg.kernels.use("triton"):
            layer(torch.randn(shape, requires_grad=True)).sum().backward()
        assert len(calls) == 2 * layer.K  # forward, and again backward


def test_gated_inputs_by_kernels_equal_float64_step_by_step(step_by_step):
    step_by_step("interpret_many_soft.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gated_inputs_by_kernels_equal_float64(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # float32 products, not TF32
    check_all("cuda", [dtype])


@pytest.mark.gpu
def test_a_step_of_them_is_recorded_as_a_graph():
    layer, shape = list(layers())[-1]
    layer, x = layer.cuda(), torch.randn(shape, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).sum().backward()
    torch.cuda.synchronize()
    want = layer.gate.c.grad / 3
    layer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).sum().backward()
    graph.replay()
    torch.testing.assert_close(layer.gate.c.grad, want)
