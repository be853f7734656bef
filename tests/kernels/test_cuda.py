"""The reference on a GPU: the same figures as on the CPU, against torch's own CUDA ops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import TAXONOMY, Activation, kernels
from threshold_gating.conversion import convert
from threshold_gating.primitive import blend
from threshold_gating.taxonomy import ROWS

pytestmark = pytest.mark.gpu

BITWISE = [
    *("relu", "leaky_relu", "prelu", "hardtanh", "relu6", "threshold", "hardshrink", "softshrink"),
    *("hardtanh_clamp", "relu6_clamp"),
]


def finite_values(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[x.isfinite()].cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", BITWISE)
def test_piecewise_linear_rows_are_bitwise_torch(key, dtype):
    x = torch.randn(100_003, device="cuda").mul(4).to(dtype)
    if key == "threshold":  # torch's CUDA kernel rounds the threshold 0.1 to the dtype of x
        x = x[(x - 0.1).abs() > 1e-2]
    x.requires_grad_()
    have, want = TAXONOMY[key](x), ROWS[key].f(x)
    assert torch.equal(have, want)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (have, want)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("key", ["sigmoid", "tanh", "silu", "mish", "hardsigmoid"])
def test_16_bit_values_are_torchs_up_to_one_rounding(key):
    for dtype in (torch.bfloat16, torch.float16):
        x = finite_values(dtype)
        have, want = TAXONOMY[key](x), ROWS[key].f(x)
        steps = (have.view(torch.int16).int() - want.view(torch.int16).int()).abs()
        steps = steps[(have != want) & want.isfinite()]
        assert steps.numel() == 0 or int(steps.max()) <= 1
        # CUDA's exp is 2 ulp off in float32, which changes the 16-bit rounding of a few values
        assert steps.numel() <= 80


@pytest.mark.parametrize("key", list(TAXONOMY))
def test_every_row_is_what_it_is_on_the_cpu(key):
    x = torch.randn(10_007) * 4
    with kernels.use("reference"):
        have = Activation(key).cuda()(x.cuda()).cpu()
    torch.testing.assert_close(have, TAXONOMY[key](x), rtol=4e-6, atol=8e-6)


def test_learned_parameters_get_the_gradients_of_the_cpu():
    x = torch.randn(64, 16, 9)
    gradients = []
    for device in ("cpu", "cuda"):
        act = Activation("gelu_k4", share="channel", channels=16, train=("tau", "theta", "s", "c"))
        act.to(device)(x.to(device)).square().sum().backward()
        gradients.append([p.grad.cpu() for p in act.parameters()])
    for want, have in zip(*gradients, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-3)  # sums of 576 float32 terms


def test_layouts_are_kept():
    x = torch.randn(2, 8, 5, 6, device="cuda").to(memory_format=torch.channels_last)
    y = blend(x, 1.0, (0.0, 1.0), (0.0, 1.0, 0.5), (0.0, 0.0, 0.1))
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_network_converts_on_the_gpu():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), layer, nn.Tanh()).cuda().eval().double()
    x = torch.randn(3, 7, 32, device="cuda", dtype=torch.float64)
    gated = convert(model, inputs=x)
    with torch.no_grad(), kernels.use("reference"):
        torch.testing.assert_close(gated(x), model(x), rtol=1e-10, atol=1e-10)


def test_compiled_activations_agree_with_eager():
    act = Activation("gelu", share="layer").cuda()
    x = torch.randn(4096, 17, device="cuda", dtype=torch.bfloat16)
    with kernels.use("reference"):
        torch.testing.assert_close(torch.compile(act, fullgraph=True)(x), act(x))
    assert (
        act(x).float() - F.gelu(x.float())
    ).abs().max() < 2e-2  # one bf16 rounding of values to 4
