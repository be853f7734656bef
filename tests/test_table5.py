"""The experiments on language models, on a network trained for a moment."""

import argparse
import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("scipy")
from experiments import gpt2_small, record, table5_llm
from experiments.gelu_gates import WAYS
from experiments.record import Row

pytestmark = pytest.mark.filterwarnings("default")  # transformers warns about itself

SMALL = {"layers": 1, "width": 32, "context": 16, "batch": 4, "vocabulary": 300, "steps": 150}


def words(text, out, **more):
    options = SMALL | more
    named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*named, "--data", str(text), "--out", str(out)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} sheep and {n * n} goats.\n" for n in range(2000)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("gpt2") / "out"
    assert gpt2_small.main(words(text, path)) == 0
    return path


def test_the_small_network_learns_and_is_saved_with_what_it_did_not_see(folder):
    done = json.loads((folder / "training.json").read_text())
    assert done["steps"] == 150
    assert done["loss"] < 5  # log 300 = 5.7 before
    assert len(done["sha256"]) == 64
    assert "1999 sheep" in (folder / "heldout.txt").read_text()
    assert not (folder / "state.pt").exists()


def test_a_training_that_was_stopped_goes_on_to_the_same_weights(
    folder, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpt2_small, "KEPT_EVERY", 50)
    real, saved = torch.save, []

    def stopping(*args):
        real(*args)
        saved.append(1)
        if len(saved) == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            gpt2_small.main(words(text, tmp_path))
    assert gpt2_small.main(words(text, tmp_path)) == 0
    once, twice = (json.loads((p / "training.json").read_text()) for p in (folder, tmp_path))
    assert (once["started at"], twice["started at"]) == (0, 100)
    assert once["sha256"] == twice["sha256"]


def test_both_tables_are_printed_beside_the_papers(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table5_llm, "KEPT", tmp_path)
    monkeypatch.setattr(table5_llm, "HELD_OUT", 256)
    out = tmp_path / "rows"
    only = ["--only", "network=gpt2-small", "gates=default,k2-paper,k3-exact,k5"]
    assert table5_llm.main([*only, "--gpt2", str(folder), "-o", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "| GPT-2 124M, paper | GELU | 12 | 29.249 | 29.249 | 29.314 | 29.314 |" in printed
    assert "| gpt2-small | gelu_new | 1 + 1 |" in printed
    assert "Not run: k2-calibrated, k3-recipe, k3-free, k3, k4, k8." in printed
    assert "No rows yet: smollm2-135m, stories260k." in printed
    by = {row.case["gates"]: row.figures for row in record.rows(out)}
    whole = by["default"]
    assert abs(whole["ppl"]["lse"] - whole["ppl"]["sm"]) < 1e-4
    assert abs(by["k5"]["off %"]) < abs(by["k2-paper"]["off %"])
    assert by["k5"]["ppl"]["both"] == whole["ppl"]["both"]  # the default is K = 5
    assert whole["sha256"] == json.loads((folder / "training.json").read_text())["sha256"]
    assert len(list(tmp_path.glob("gpt2-small-*.jsonl"))) == 4


def test_calibration_reads_text_that_is_not_judged(folder):
    network = table5_llm.gpt2(folder, 64)
    assert sum(len(w.ids) for w in network.windows) == 64
    everything = table5_llm.from_folder(f"hf:{folder}", str(folder / "heldout.txt"))
    assert torch.equal(network.others[0].ids, everything.windows[4].ids)


def test_windows_of_other_weights_are_dropped(folder, tmp_path):
    network = table5_llm.gpt2(folder, 32)
    kept = tmp_path / "kept.jsonl"
    kept.write_text('{"key": "of another network"}\n')
    found = table5_llm.scored(network.model, network.windows, kept, columns=["lse"])
    assert len(kept.read_text().splitlines()) == found.windows == 2


def row(network, gates, off, activation="gelu_new", ppl=None, **more):
    ppl = {"sm": 30.0, "lse": 30.0, "act": 30 + 0.3 * off, "both": 30 + 0.3 * off} | (ppl or {})
    found = {"ppl": ppl, "same": dict.fromkeys(ppl, 1.0), "off %": off, "activation": activation}
    found |= {"predicted": 99, "sites": {"softmax": 1, "activations": 1}, **more}
    return Row({"network": network, "gates": gates}, found, 1.0, False, {})


def test_a_network_that_moved_fails():
    moved = row("x", "default", 0.0, "silu", {"both": 30.001})
    assert table5_llm.failures([row("x", "default", 0.0, "silu"), row("y", "k5", 0.002)]) == []
    assert len(table5_llm.failures([moved, row("y", "k5", 0.02)])) == 2


def test_verdicts_follow_from_the_rows():
    whole = [row("smollm2-135m", "default", 0.0, "SiLU"), row("gpt2-small", "default", 0.001)]
    ways = [row("gpt2-small", "k2-paper", 0.3), row("gpt2-small", "k3-recipe", 0.001)]
    assert [v.verdict for v in table5_llm.verdicts([*whole, *ways])] == ["reproduced"] * 4
    ways = [row("gpt2-small", "k2-paper", -1.6), row("gpt2-small", "k3-recipe", 0.02)]
    assert [v.verdict for v in table5_llm.verdicts([*whole, *ways])][2:] == ["partly", "partly"]
    ways = [row("gpt2-small", "k2-paper", 0.001), row("gpt2-small", "k3-recipe", 0.02)]
    assert [v.verdict for v in table5_llm.verdicts([*whole, *ways])][2:] == ["not", "not"]
    worse = [row("smollm2-135m", "default", 0.0, "SiLU", {"lse": 30.01, "both": 30.01})]
    assert [v.verdict for v in table5_llm.verdicts(worse)] == ["not", "not", "not run", "not run"]
    assert {v.verdict for v in table5_llm.verdicts([])} == {"not run"}


def test_what_is_missing_is_named_and_the_rest_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table5_llm, "DATA", tmp_path / "nowhere")
    monkeypatch.setattr(table5_llm.evidence, "DATA", tmp_path / "nowhere")
    assert table5_llm.missing("stories260k")
    monkeypatch.setattr(table5_llm, "find_spec", lambda name: None)
    assert table5_llm.missing("smollm2-135m") == ["gguf", "pyarrow", "accelerate"]
    asked = argparse.Namespace(gpt2=tmp_path, smoke=False, device="cpu")
    with pytest.raises(SystemExit, match="TG_DATA names their folder"):
        table5_llm.train(asked)
    with pytest.raises(SystemExit):
        table5_llm.main(["--model", "hf:x", "--gelu"])
    assert "--gelu calibrates on what --limit leaves" in capsys.readouterr().err


@pytest.mark.slow
def test_the_smoke_run_writes_every_way(capsys):
    assert table5_llm.main(["--smoke", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert all(way.said in printed for way in WAYS.values())
