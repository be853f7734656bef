"""tg convert, tg audit and tg verify, as they are typed."""

import json

import pytest
import torch
from torch import nn

from threshold_gating.cli import main

NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 8), nn.Linear(8, 3), nn.ReLU()

    def forward(self, x):
        return torch.tanh(self.b(self.act(self.a(x))))

def make_model():
    torch.manual_seed(7)
    return Net()

def make_inputs():
    return torch.randn(5, 4)

def wrong():
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tg(capsys):
    def run(*words):
        code = main(list(words))
        return code, *capsys.readouterr()

    return run


def test_a_network_of_a_file_is_converted_verified_and_saved(folder, tg):
    code, out, err = tg("convert", "net.py:make_model", "--inputs", "5,4", "-o", "out")
    assert code == 0
    assert "2 of 2 sites evaluated with native off: ok" in out
    assert "2 sites, 0 left" in out
    assert "Written to" in err
    assert {p.name for p in (folder / "out").iterdir()} == {"tg_config.json", "model.safetensors"}
    code, out, _ = tg("verify", "net.py:make_model", "out", "--inputs", "net.py:make_inputs")
    assert code == 0
    assert "ok" in out
    code, out, _ = tg("audit", "net.py:make_model", "--gates", "out", "--inputs", "5,4")
    assert out.splitlines()[-1] == "2 sites, 0 left, 0 other"


def test_an_audit_lists_what_is_left(folder, tg):
    code, out, _ = tg("audit", "net.py:make_model", "--inputs", "5,4")
    assert code == 0
    assert out.splitlines()[-1] == "0 sites, 2 left, 0 other"


def test_json_is_for_other_programs(folder, tg):
    code, out, err = tg("convert", "net.py:make_model", "--inputs", "5,4", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["ok"]
    assert [row["site"] for row in report["certificate"]["rows"]] == ["act", ":tanh#0"]
    assert report["audit"]["left"] == []


def test_a_damaged_conversion_fails_verification(folder, tg):
    tg("convert", "net.py:make_model", "--inputs", "5,4", "-o", "out")
    path = folder / "out" / "tg_config.json"
    path.write_text(path.read_text().replace('"tau": 2.0', '"tau": 2.02'))
    code, out, _ = tg("verify", "net.py:make_model", "out", "--inputs", "5,4")
    assert code == 1
    assert ":tanh#0" in out


def test_sites_are_chosen_by_name(folder, tg):
    words = ("--site", "act=silu", "--site", ":tanh#0=none", "--json")
    _, out, _ = tg("convert", "net.py:make_model", "--inputs", "5,4", *words)
    rows = {row["site"]: row for row in json.loads(out)["certificate"]["rows"]}
    assert not rows["act"]["exact"]
    assert rows[":tanh#0"]["ok"] is None


def test_checkpoints_load_without_running_code(folder, tg):
    state = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).state_dict()
    weights = {k.replace("0.", "a.").replace("1.", "b."): v for k, v in state.items()}
    torch.save(weights, "weights.pt")
    torch.save({"model": nn.Linear(2, 2)}, "pickle.pt")
    words = ("convert", "net.py:make_model", "--inputs", "5,4", "--checkpoint")
    assert tg(*words, "weights.pt")[0] == 0
    code, _, err = tg(*words, "pickle.pt")
    assert code == 2
    assert "trust" in err


def test_timm_networks_are_converted(tg):
    pytest.importorskip("timm")
    code, out, _ = tg("convert", "timm:test_resnet", "--inputs", "2,3,64,64")
    assert code == 0
    assert "evaluated with native off: ok" in out


def test_hugging_face_folders_are_converted(tmp_path, tg):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    code, out, _ = tg("convert", f"hf:{tmp_path / 'llama'}")
    assert code == 0
    assert "2 sites, 0 left" in out


MESSAGES = [
    (("convert", "resnet50"), "tg convert: no network 'resnet50'; it is timm:NAME, hf:FOLDER_OR_ID or FILE.py:FACTORY."),
    (("convert", "net.py:make_modell"), "tg convert: no 'make_modell' in net.py; did you mean 'make_model', 'make_inputs'?"),
    (("convert", "nett.py:make_model"), "tg convert: no file 'nett.py'; did you mean 'net.py'?"),
    (("convert", "net.py:wrong"), "tg convert: net.py:wrong gave a int, not a torch.nn.Module."),
    (("convert", "net.py:make_model"), "tg convert: net.py:make_model comes without inputs; give --inputs."),
    (("convert", "net.py:make_model", "--inputs", "nowhere.pt"), "tg convert: --inputs 'nowhere.pt' is no file; give a shape (1,3,224,224), a file of tensors or FILE.py:FUNCTION."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "act"), "tg convert: --site 'act' is not NAME=CHOICE."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "nope=relu"), "tg convert: sites: 'nope' matches no site of this network; `tg.audit(model, inputs)` lists them."),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(folder, tg, words, message):
    code, out, err = tg(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == message
