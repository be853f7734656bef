"""`tg rtl`: Verilog on standard output, checks, a page, and words for what cannot be had."""

import json
import re
import shutil

import pytest

from tests.show.test_page import check_page

needs_iverilog = pytest.mark.skipif(
    shutil.which("iverilog") is None, reason="iverilog is not installed"
)
NET = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 6), nn.ReLU(), nn.Softmax(-1))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_the_unit_is_printed_with_its_registers(tg):
    code, out, err = tg("rtl", "SiLU", "--bits", "8")
    assert code == 0
    assert "// silu, 8 bits, x / 2^4, y / 2^4: Registers(" in out
    assert "module tg_unit " in out
    assert "--run" in err


def test_the_unit_is_written(tg, folder):
    code, out, _ = tg("rtl", "table2", "-o", "unit.v")
    assert (code, out) == (0, "")
    assert "module tg_softplus" in (folder / "unit.v").read_text()


@needs_iverilog
@pytest.mark.skipif(shutil.which("yosys") is None, reason="yosys is not installed")
def test_run_checks_every_code_and_measures(tg, pdk):
    if shutil.which("verilator") is None:
        pytest.skip("verilator is not installed")
    words = ("rtl", "relu", "--bits", "6", "--slope", "2", "--simulator", "iverilog", "--run")
    code, out, _ = tg(*words, "--json", "-")
    assert code == 0
    found = json.loads(out)
    assert found["exact"] is True
    assert found["lint"] == ""
    assert found["activations"]["relu"]["iverilog"] == {"name": "relu", "codes": 64, "differ": 0}
    assert "um^2" in found["cells"]
    assert found["fpga"]["luts"] > 0


@needs_iverilog
def test_a_network_is_checked_and_its_page_written(tg, folder, monkeypatch):
    monkeypatch.setenv("TG_PDK", "nowhere")  # without transistors
    words = ("rtl", "net.py:make_model", "--inputs", "5,4", "--check", "--bits", "10")
    code, out, err = tg(*words, "--html", "page.html")
    assert code == 0
    assert "Integers and Verilog (iverilog): exact" in out
    assert "Not measured: transistors:" in out
    assert "Inputs are random" in err
    read = check_page((folder / "page.html").read_text())
    assert read.ids.count("site4") == 1  # a tree of a softmax
    assert "site5" not in read.ids
    assert read.data["exact"] is True
    assert len(read.alts) == 4  # SiLU, ReLU, and softmax for its gates and for its tree


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("silu", "--check"), "--check is of a network; silu is none"),
        (("net.py:make_model",), "is a network: give --check"),
        (("elu",), "tau = 16384 is too large .* take another row"),
        (("threshold", "--reach", "0.05"), "theta = 0.1 lies outside .* would do"),
        (("sillu",), "did you mean 'silu'"),
        (("silu", "--bits", "20"), "--bits must be from 4 to 16; got 20"),
        (("silu", "--reach", "0"), "--reach must be above 0; got 0"),
        (("silu", "--reach", "-1"), "--reach must be above 0; got -1"),
        (("silu", "--small", "-1"), "--small must be from 1 to the 16 bits"),
        (("silu", "--small", "99"), "--small must be from 1 to the 16 bits"),
        (("net.py:make_model", "--check", "--codes", "-5"), "--codes must be 1 or more"),
        (("silu", "--html", "x.html"), "--html is of a network with --check"),
        (("silu", "--codes", "5"), "--codes is of a network with --check"),
        (("silu", "--pretrained"), "--pretrained is of a network with --check"),
        (("silu", "--simulator", "iverilog"), "--simulator is of --run"),
        (("net.py:make_model", "--check", "--slope", "2"), "--slope is of an activation"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(tg, folder, words, said):
    code, out, err = tg("rtl", *words)
    assert (code, out) == (2, "")
    assert re.search(said, err)
    assert err.count("\n") == 1
