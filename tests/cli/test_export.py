"""tg export, as it is typed."""

import json

import pytest
import torch

from threshold_gating.export import onnx

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
NETWORK = "to_convert.py"
ASKED = ("export", "net.py:make_model")


def test_a_network_is_exported_compared_timed_and_read_back(folder, tg):
    code, out, err = tg(*ASKED, "net.onnx", "--inputs", "5,4")
    assert code == 0
    for text in ("2 gates of 2 sites", "max|d|/max|y|", "times as long", "inputs: "):
        assert text in out
    assert "Written to" in err
    assert "Inputs are random" in err
    code, out, _ = tg("export", "--read", "net.onnx")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "TG(tau=" in out
    code, out, _ = tg("export", "--read", "net.onnx", "--json", "-")
    sites = onnx.read(folder / "net.onnx")
    assert [g["site"] for g in json.loads(out)["gates"]] == [site.name for site in sites]


def test_a_program_of_torch_says_its_nodes_with_gates_kept_and_lowered(folder, tg):
    code, out, _ = tg(*ASKED, "net.pt2", "--inputs", "5,4", "--json", "-")
    found = json.loads(out)
    assert code == 0
    assert found["nodes"] < found["lowered"]
    assert torch.export.load(folder / "net.pt2").module()(torch.randn(3, 4)).shape[0] == 3


def test_native_where_exact_names_what_is_no_gate(folder, tg):
    code, out, _ = tg(*ASKED, "net.onnx", "--native-where-exact", "--inputs", "5,4", "--no-speed")
    assert code == 0
    assert "nonlinearities are torch's own ops" in out
    assert "times as long" not in out


@pytest.mark.parametrize("file", [pytest.param("net.onnx", marks=pytest.mark.slow), "net.pt2"])
def test_native_within_says_what_is_left_to_torch_and_how_far_it_is_from_gates(folder, tg, file):
    (folder / "soft.py").write_text(SOFT)
    asked = ("export", "soft.py:make_model", file, "--inputs", "5,4", "--no-speed")
    code, out, _ = tg(*asked, "--native-within", "1e-4")
    assert code == 0
    assert "1 approximate sites are torch's own ops" in out
    assert "differ from these by at most 4.98e-05 over the line (0.0001 asked): 1" in out
    assert "against the network in torch with gates at these, too: max|d|/max|y| " in out
    code, out, _ = tg(*asked, "--native-within", "1e-6", "--json", "-")
    assert (json.loads(out)["native"], json.loads(out)["all_gates"]) == ({}, None)


SOFT = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.SiLU())
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*ASKED, "net.txt", "--inputs", "5,4"), "net.txt cannot be written; give FILE.onnx"),
        ((*ASKED, "no/net.onnx", "--inputs", "5,4"), "cannot be written"),
        (ASKED, "give a NETWORK and the file to write, or --read FILE"),
        (("export", "--read", "net.py"), "net.py is no ONNX file"),
        ((*ASKED, "net.pt2", "--bits", "4", "--inputs", "5,4"), "--bits is for every gate"),
        (("export", "no.py:none", "net.onnx", "--bits", "99"), "--bits must be from 2 to 12"),
        ((*ASKED, "net.onnx", "--bits", "4", "--native-within", "1"), "--bits is for every gate"),
        ((*ASKED, "net.onnx", "--saved", ".", "--native-within", "1"), "may have been learned"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folder, tg, words, said):
    code, out, err = tg(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_tol_holds_a_network_of_integers(folder, tg):
    pytest.importorskip("qonnx")
    code, _, err = tg(*ASKED, "q.onnx", "--bits", "4", "--inputs", "5,4", "--tol", "1e-9")
    assert code != 0
    assert "1e-09 is allowed; nothing is written" in " ".join(err.split())
    assert not (folder / "q.onnx").exists()
