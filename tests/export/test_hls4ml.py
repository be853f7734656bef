"""hls4ml: networks whose every activation is one C++ header, through its C simulation."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.export import hls4ml as exporting
from threshold_gating.export.graph import ExportError


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not here")
@pytest.mark.filterwarnings("ignore")  # of hls4ml and of what it imports
def test_a_network_runs_in_the_c_simulation(tmp_path):
    pytest.importorskip("hls4ml")
    net = nn.Sequential(
        *(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()),
        *(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardtanh(), nn.Linear(8, 3)),
    )
    x = torch.randn(64, 8)
    gated = tg.convert(net.eval(), inputs=x)
    project = exporting.convert(gated, (8,), tmp_path / "project")
    project.compile()
    found = torch.as_tensor(project.predict(np.ascontiguousarray(x.numpy())))
    with torch.no_grad():
        want = gated(x)
    # 12 bits after the point: 2.4e-4 a step, and sums of 16 of them in each of six layers
    assert (found - want).abs().max() < 2e-2
    assert (found - want).abs().mean() < 4e-3


def test_numbers_of_a_layer_are_low_to_high_with_their_owners():
    module = type("Module", (), {"instances": [tg.TAXONOMY["hardtanh"]]})
    layer, shape = exporting._parsed("", "act", ["x"], [[None, 8]], None, module)
    assert shape == [None, 8]
    assert (layer["branches"], layer["groups"], layer["hard"]) == (3, 1, "true")
    assert layer["theta"] == "-1.0, 1.0, 0.0"
    assert layer["s"] == "0.0, 1.0, 0.0"
    assert layer["owner"].count("true") == tg.TAXONOMY["hardtanh"].owner.count("hi")


class Calls(nn.Module):
    def forward(self, x):
        return F.silu(x)


def test_calls_that_hls4ml_does_not_trace_are_refused(tmp_path):
    pytest.importorskip("hls4ml")
    x = torch.randn(2, 4)
    with pytest.raises(ExportError, match="write these as modules"):
        exporting.convert(tg.convert(Calls(), inputs=x), (4,), tmp_path)


def test_branches_that_the_header_has_not_are_refused():
    with pytest.raises(ExportError, match="up to 8 affine branches"):
        exporting._check("act", tg.Activation("hardswish"))


def test_without_hls4ml_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "hls4ml", None)
    with pytest.raises(ExportError, match=r"hls4ml is not installed: pip install .*\[hls4ml\]"):
        exporting.convert(nn.ReLU(), (4,), tmp_path)
