"""Networks of integers in torch: near the network, and what has no whole numbers is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.export.graph import ExportError
from threshold_gating.export.integers import quantised


def test_a_network_of_integers_is_near_the_network():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.SiLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    x = torch.randn(4, 1, 12, 12)
    gated = tg.convert(model.eval(), inputs=x)
    made = quantised(gated, x, bits=10)
    with torch.no_grad():
        want, have = gated(x), made(x)
    assert ((have - want).abs().max() / want.abs().max()) < 0.02  # ten roundings of 2^-9
    assert torch.equal(have / 2.0**-23, (have / 2.0**-23).round())  # whole steps, so sums are exact


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x):
        return F.glu(self.up(x))


@pytest.mark.parametrize(
    "net",
    [
        tg.Linear(4, 3, init="relu"),  # tier W: weights for each branch, laid side by side
        tg.Linear(4, 3, init="gelu"),
        tg.Conv1d(4, 3, 2, init="silu"),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()),
        Halves(),  # a gate over another input
    ],
    ids=["relu", "gelu", "conv", "weight_norm", "glu"],
)
def test_weights_may_be_computed_from_parameters_and_branches_read_another_input(net):
    torch.manual_seed(0)
    x = torch.randn(9, 4) if not isinstance(net, tg.Conv1d) else torch.randn(2, 4, 6)
    gated = (
        net.eval()
        if not isinstance(net, nn.Sequential | Halves)
        else tg.convert(net.eval(), inputs=x)
    )
    made = quantised(gated, x, bits=12)
    with torch.no_grad():
        want, have = gated(x), made(x)
    # inputs, weights and gates are rounded to 2^-11; at most 16 products of size 1 in a sum
    assert ((have - want).abs().max() / want.abs().max()) < 16 * 2**-11


def test_a_bound_of_another_input_is_no_fixed_threshold():
    class Larger(nn.Module):
        def forward(self, x):
            return torch.maximum(x, 0.5 * x)

    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match="whose thresholds another input sets"):
        quantised(tg.convert(Larger(), inputs=x), x)


def test_what_has_no_fixed_thresholds_is_refused():
    class Soft(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match="is a softmax, whose thresholds the other logits set"):
        quantised(tg.convert(Soft(), inputs=x), x)


def test_a_batchnorm_is_to_be_folded_first():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    x = torch.randn(2, 1, 5, 5)
    with pytest.raises(ExportError, match="fold_batchnorm"):
        quantised(tg.convert(net, inputs=x), x)


@pytest.mark.parametrize("bits", [16, 1, 4.0, True, "4"])
def test_bits_are_few_and_whole(bits):
    with pytest.raises(ValueError, match="bits is a whole number from 2 to 12; got"):
        quantised(nn.ReLU(), torch.randn(2, 2), bits=bits)


class Product(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.w, self.call = nn.Parameter(torch.randn(4, 4)), call

    def forward(self, x):
        return torch.relu(self.call(x, self.w))


@pytest.mark.parametrize(
    ("net", "word"),
    [
        (Product(torch.matmul), "matmul"),
        (Product(lambda x, w: torch.addmm(x, x, w)), "addmm"),
        (Product(lambda x, w: torch.bmm(x[None], w[None])), "reads w"),
        (Product(lambda x, w: (x[..., None] * w).sum(-2)), "mul in the network itself reads w"),
        (Product(lambda x, w: x @ x.T), "matmul"),
        (nn.Sequential(nn.LayerNorm(4), nn.ReLU()), "layer_norm in 0"),
        (nn.Sequential(nn.ConvTranspose1d(4, 4, 2), nn.ReLU()), "conv_transpose1d in 0"),
    ],
)
def test_a_product_that_is_not_rounded_is_refused_by_its_name(net, word):
    x = torch.randn(4, 4)
    with pytest.raises(ExportError, match=f"{word}.* is not written in whole numbers"):
        quantised(tg.convert(net.eval(), inputs=x), x)


def test_a_bias_beyond_its_bits_is_refused():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    gated = tg.convert(net, inputs=x)
    with pytest.raises(ExportError, match=r"the bias of linear is up to .* take fewer bits"):
        quantised(gated, 1e-6 * x, bits=8)


def test_other_types_and_numbers_are_refused():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    with pytest.raises(ExportError, match="among the weights or in what enters"):
        quantised(tg.convert(net, inputs=x), x * math.nan)
    double = tg.convert(net.double(), inputs=x.double())
    with pytest.raises(ExportError, match=r"0.weight is torch.float64, and QONNX .* model.float"):
        quantised(double, x.double())
