"""Networks that others trained, on a few samples of real data; `make evidence` runs them on all."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.evidence import common, faces, files, text, whisper
from experiments.evidence import run as evidence

# Torch, torchvision and Pillow warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


APPROXIMATE = ("whisper", "whisper-60s", "magika")


@pytest.mark.parametrize("name", evidence.CASES)
def test_a_trained_network_predicts_the_same_after_conversion(name, tmp_path, capsys):
    if lost := evidence.missing(evidence.CASES[name]):
        pytest.skip(f"not here (TG_DATA or `make evidence`): {', '.join(lost)}")
    out = tmp_path / "evidence.json"
    assert evidence.main(["--smoke", "--only", name, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["networks"][name]
    assert found["failed"] == []
    assert found["exact"] == (name not in APPROXIMATE)
    assert found["agreement"] == 1
    assert found["error"] < (1e-3 if name in APPROXIMATE else 1e-5)  # GELU: 2e-4 to 3e-4 measured
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


def test_sequences_of_other_lengths_differ_where_only_one_goes_on():
    def written(*rows):
        tokens = torch.tensor(rows)
        return common.Outcome({}, tokens, F.one_hot(tokens.clamp(min=0), 9).double())

    first, end = [1, 2, 3], common.PAD
    assert evidence.distance(written(first), written(first)) == (3, 3, 0.0)
    assert evidence.distance(written(first), written([1, 2, 3, 4])) == (4, 3, 0.0)
    assert evidence.distance(written([1, 2, 4]), written(first)) == (3, 2, 1.0)
    padded = written(first, [1, end, end])
    assert evidence.distance(padded, padded) == (4, 4, 0.0)


def test_words_that_are_wrong_are_counted():
    said = ["had", "he", "married", "a", "more", "amiable", "woman"]
    assert whisper.edits(said, said) == 0
    assert whisper.edits(said, ["had", "he", "married", "a", "more", "a", "amiable", "woman"]) == 1
    assert whisper.edits(["an", "old", "sposed"], ["an", "ill", "disposed"]) == 2
    assert whisper.edits([], said) == whisper.edits(said, []) == len(said)


def test_pairs_are_merged_in_the_order_in_which_they_were_learned():
    merges = [["a", "b"], ["\u2581", "ab"], ["b", "a"]]
    names = ["<pad>", "<unk>", "<bos>", "<eos>", "a", "b", "\u2581", "ab", "\u2581ab", "ba"]
    tokens = text.spelled("bab abab\u00e9", ["a", "b", "\u2581"], merges)
    assert [names[n] for n in tokens] == ["b", "ab", "\u2581ab", "ab", "<unk>"]


def test_of_boxes_that_overlap_the_likeliest_stays():
    boxes = torch.tensor([[0, 0, 10, 10, 0.8], [1, 0, 11, 10, 0.9], [20, 20, 30, 30, 0.7]])
    assert faces.apart(boxes, 0.7).tolist() == boxes[[1, 2]].tolist()  # 9/11 of both is shared
    assert faces.apart(boxes, 0.9).tolist() == boxes[[1, 0, 2]].tolist()
    assert faces.apart(boxes[:0], 0.7).shape == (0, 5)


def test_a_file_is_its_first_and_last_bytes():
    short = files.ends(b"\n abc \n")
    assert short == [*b"abc \n", *[256] * 2038, *b"\n abc"]
    long = files.ends(b" " + b"x" * 5000 + b"y" * 1000)
    assert long == [ord("x")] * 1024 + [ord("x")] * 24 + [ord("y")] * 1000


def test_what_cannot_be_fetched_here_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(common.shutil, "which", lambda name: None)
    case = evidence.CASES["whisper"]
    assert evidence.missing(case, fetch=True) == [each.requirement for each in case.packages]


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
