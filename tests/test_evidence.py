"""Networks that others trained, on a few samples of real data; `make evidence` runs them on all."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.evidence import common
from experiments.evidence import run as evidence

# Torch, torchvision and Pillow warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", evidence.CASES)
def test_a_trained_network_predicts_the_same_after_conversion(name, tmp_path, capsys):
    if lost := evidence.missing(evidence.CASES[name]):
        pytest.skip(f"not here (TG_DATA or `make evidence`): {', '.join(lost)}")
    out = tmp_path / "evidence.json"
    assert evidence.main(["--smoke", "--only", name, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["networks"][name]
    assert found["failed"] == []
    assert found["exact"]
    assert found["agreement"] == 1
    assert found["error"] < 1e-5
    assert all(len(digest) == 64 for digest in found["sha256"].values())
    assert f"{name} " in capsys.readouterr().out


def test_a_broken_network_fails(monkeypatch, tmp_path):
    """With a first answer that is another one, the run says so and its exit status is 1."""
    case = evidence.CASES["memory-gru"]
    if lost := evidence.missing(case):
        pytest.skip(f"not here (TG_DATA): {', '.join(lost)}")

    def load(smoke):
        loaded, runs = case.load(smoke), []

        def evaluate(model):
            outcome = loaded.evaluate(model)
            runs.append(outcome.predictions.flatten()[0].item())
            if len(runs) == 2:
                outcome.predictions.view(-1)[0] += 1
            return outcome

        return loaded._replace(evaluate=evaluate)

    monkeypatch.setitem(evidence.CASES, "memory-gru", case._replace(load=load))
    out = tmp_path / "evidence.json"
    assert evidence.main(["--smoke", "--only", "memory-gru", "--out", str(out)]) == 1
    assert "predictions" in json.loads(out.read_text())["networks"]["memory-gru"]["failed"][0]


def test_what_is_missing_is_named_and_skipped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(evidence, "DATA", tmp_path / "nowhere")
    monkeypatch.setattr(common, "PACKAGES", tmp_path / "nowhere")
    out = tmp_path / "evidence.json"
    assert evidence.main(["--smoke", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["networks"] == {}
    assert list(found["skipped"]) == list(evidence.CASES)
    assert "skipped, missing: weights/cifar10-relu-resnet20" in capsys.readouterr().out


def test_a_package_with_another_hash_is_not_read(monkeypatch, tmp_path):
    case = evidence.CASES["mobilenet-v2"]
    monkeypatch.setattr(common, "PACKAGES", tmp_path)
    case.packages[0].path.write_bytes(b"something else")
    assert "another hash" in evidence.missing(case)[-1]
