"""QONNX files: qonnx computes the bits of the network of integers."""

import math

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.export import qonnx as exporting
from threshold_gating.export.graph import ExportError
from threshold_gating.export.onnx import read


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.SiLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    x = torch.randn(4, 1, 12, 12)
    return model.eval(), x


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


def test_qonnx_computes_a_layer_with_weights_for_each_branch(tmp_path):
    pytest.importorskip("qonnx")
    torch.manual_seed(0)
    net, x = nn.Sequential(tg.Linear(4, 3, init="silu"), nn.Linear(3, 2)).eval(), torch.randn(5, 4)
    made = exporting.export(net, x, tmp_path / "net.onnx", bits=4)
    assert [(site.name, len(site.instances)) for site in made.sites] == [("0", 4), ("0", 4)]
    assert "equal in every bit" in str(made)


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
