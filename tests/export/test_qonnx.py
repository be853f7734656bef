"""QONNX: gates as counts of thresholds, equal to the network of integers in every bit."""

import math

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.export import qonnx as exporting
from threshold_gating.export.graph import ExportError
from threshold_gating.export.onnx import read


def evaluated(t, x, bits):
    """y = b_0 + sum_j G_j (b_j - b_{j-1}) with gates that are counts of thresholds, in float64."""
    b = [s * x + c for s, c in zip(t.s, t.c, strict=True)]
    y = b[0]
    for j, table in enumerate(exporting.thresholds(t, bits), 1):
        g = (x[:, None] >= table.double()).double().mean(1)
        y = y + g * (b[j] - b[j - 1])
    return y


@pytest.mark.parametrize(
    "key", ["silu", "quick_gelu", "tanh", "gelu", "mish", "elu", "softplus", "dsilu"]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_soft_gates_are_off_by_half_a_level_of_each_gate(key, bits):
    t = tg.TAXONOMY[key]
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    b = torch.stack([s * x + c for s, c in zip(t.s, t.c, strict=True)])
    # each G_j is rounded to the nearest of 2^bits - 1 levels; thresholds are float32
    bound = b.diff(dim=0).abs().sum(0) * (0.5 / (2**bits - 1)) + 1e-6
    assert ((evaluated(t, x, bits) - t(x)).abs() <= bound).all()


def test_thresholds_of_one_gate_are_the_logits_of_its_levels():
    t = tg.TG(1.7, 0.3, (0, 1), (0, 0))
    (found,) = exporting.thresholds(t, 4)
    g = torch.sigmoid(1.7 * (found.double() - 0.3))
    assert torch.allclose(
        g, (torch.arange(1, 16).double() - 0.5) / 15, atol=1e-6
    )  # found is float32


@pytest.mark.parametrize(
    "key", ["relu", "leaky_relu", "hardtanh", "hardshrink", "threshold", "abs"]
)
def test_hard_gates_are_equal_at_their_thresholds_too(key):
    t = tg.TAXONOMY[key]
    at = torch.tensor([*t.theta, 0.0, 1.0])
    near = torch.cat([at, at.nextafter(at + 1), at.nextafter(at - 1), torch.randn(99)])
    want = t(near).double()  # thresholds are float32, as a network has them
    assert torch.allclose(evaluated(t, near.double(), 8), want, rtol=0, atol=1e-6)  # float32


@pytest.mark.parametrize("owner", [("lo", "lo"), ("hi", "hi"), ("lo", "hi"), ("hi", "lo")])
def test_a_tie_belongs_to_its_owner(owner):
    t = tg.TG(math.inf, (-1.0, 1.0), (1.0, 2.0, 1.0), (0.0, 4.0, -8.0), owner=owner)
    x = torch.tensor([-1.0, 1.0, 0.0, -2.0, 2.0], dtype=torch.float64)
    assert torch.equal(evaluated(t, x, 8), t(x))


def test_product_gates_that_do_not_rise_together_are_refused_or_inverted():
    t = tg.TAXONOMY["gelu_k3_product"]
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    assert (evaluated(t, x, 8) - t(x)).abs().max() < 0.05  # half a level of 255 times 6


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.SiLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    x = torch.randn(4, 1, 12, 12)
    return model.eval(), x


def test_a_network_of_integers_is_near_the_network(net):
    model, x = net
    gated = tg.convert(model, inputs=x)
    made = exporting.quantised(gated, x, bits=10)
    with torch.no_grad():
        want, have = gated(x), made(x)
    assert ((have - want).abs().max() / want.abs().max()) < 0.02  # ten roundings of 2^-9
    assert torch.equal(have / 2.0**-23, (have / 2.0**-23).round())  # whole steps, so sums are exact


@pytest.mark.parametrize("share", [pytest.param("layer", marks=pytest.mark.slow), "channel"])
def test_qonnx_computes_the_same_bits(net, tmp_path, share):
    pytest.importorskip("qonnx")
    model, x = net
    gated = tg.convert(model, inputs=x)
    if share == "channel":
        gated[3] = tg.Activation("silu", share="channel", channels=4, train=("tau", "theta"))
        with torch.no_grad():
            gated[3].dtheta.add_(torch.randn_like(gated[3].dtheta))
    made = exporting.export(gated, x, tmp_path / "net.onnx", bits=4)
    assert made.layers == 5
    assert [site.name for site in made.sites] == ["1", "3", "7", "9"]
    assert len(made.sites[1].instances) == (4 if share == "channel" else 1)
    assert read(made.path) == made.sites
    # one for ReLU; 15 for SiLU (of 4 channels: 60), 4 x 15 for GELU, 15 for tanh
    assert made.thresholds == 1 + (60 if share == "channel" else 15) + 60 + 15
    assert "equal in every bit" in str(made)
    assert (tmp_path / "net.onnx").is_file()


def test_a_file_that_differs_in_a_bit_is_not_written(tmp_path, monkeypatch):
    pytest.importorskip("qonnx")
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    before = exporting.executed
    monkeypatch.setattr(
        exporting,
        "executed",
        lambda *given: [y.nextafter(torch.tensor(9.0)) for y in before(*given)],
    )
    with pytest.raises(ExportError, match="qonnx does not compute what the network of 4-bit"):
        exporting.export(tg.convert(model, inputs=x), x, tmp_path / "net.onnx", bits=4)
    assert not list(tmp_path.iterdir())


def test_what_has_no_fixed_thresholds_is_refused():
    class Soft(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1)

    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match="is a softmax, whose thresholds the other logits set"):
        exporting.quantised(tg.convert(Soft(), inputs=x), x)


def test_a_batchnorm_is_to_be_folded_first():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    x = torch.randn(2, 1, 5, 5)
    with pytest.raises(ExportError, match="fold_batchnorm"):
        exporting.quantised(tg.convert(net, inputs=x), x)


@pytest.mark.parametrize("bits", [16, 1, 4.0, True, "4"])
def test_bits_are_few_and_whole(bits):
    with pytest.raises(ValueError, match="bits is a whole number from 2 to 12; got"):
        exporting.quantised(nn.ReLU(), torch.randn(2, 2), bits=bits)


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
        exporting.quantised(tg.convert(net.eval(), inputs=x), x)


def test_a_bias_beyond_its_bits_is_refused():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    gated = tg.convert(net, inputs=x)
    with pytest.raises(ExportError, match=r"the bias of linear is up to .* take fewer bits"):
        exporting.quantised(gated, 1e-6 * x, bits=8)


def test_other_types_and_numbers_are_refused():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    with pytest.raises(ExportError, match="among the weights or in what enters"):
        exporting.quantised(tg.convert(net, inputs=x), x * math.nan)
    double = tg.convert(net.double(), inputs=x.double())
    with pytest.raises(ExportError, match=r"0.weight is torch.float64, and QONNX .* model.float"):
        exporting.quantised(double, x.double())


def test_too_few_bits_are_refused_unless_any_error_is_accepted(tmp_path):
    pytest.importorskip("qonnx")
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).eval(), torch.randn(3, 8)
    gated = tg.convert(net, inputs=x)
    with pytest.raises(ExportError, match=r"differs by .* 1e-05 is allowed; nothing is written"):
        exporting.export(gated, x, tmp_path / "net.onnx", bits=4, tol=1e-5)
    assert not list(tmp_path.iterdir())
    made = exporting.export(gated, x, tmp_path / "net.onnx", bits=4, tol=math.inf)
    assert made.error > 1e-5
    assert "(any allowed)" in str(made)
    assert "input 3 x 8; all axes are fixed in the file, the batch too" in str(made)
