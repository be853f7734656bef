"""Perplexity before and after conversion: windows, columns, resuming, several processes."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import threshold_gating as tg
from threshold_gating import logits
from threshold_gating.cli import main
from threshold_gating.cli.evaluate import read_text
from threshold_gating.conversion import perplexity
from threshold_gating.conversion.perplexity import Window, evaluate, windows

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "".join(f"The {n}th story is of a cat that sat on {n * n} mats.\n" for n in range(120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with random weights and a tokenizer trained on the text, as saved."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    config = transformers.LlamaConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300},
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


TOKENS = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(0))


def test_windows_predict_every_token_once():
    for context, stride in ((16, 5), (16, 15), (7, 1), (200, 3)):
        seen = [
            token
            for w in windows(torch.arange(100), context, stride)
            for token in w.ids[w.first :].tolist()
        ]
        assert seen == list(range(1, 100))
    alone = windows(torch.arange(100), 16)
    assert [len(w.ids) for w in alone] == [16] * 6 + [4]
    assert all(w.first == 1 for w in alone)
    with pytest.raises(ValueError, match="stride from 1 to context; got 8, 9"):
        windows(torch.arange(100), 8, 9)


@pytest.mark.parametrize("stride", [None, 10])
def test_the_original_has_the_perplexity_that_torch_computes(model, stride):
    nats, count = 0.0, 0
    for ids, first in windows(TOKENS, 32, stride):
        with torch.no_grad():
            scores = model(ids[None]).logits[0].double()
        nats += F.cross_entropy(scores[first - 1 : -1], ids[first:], reduction="sum").item()
        count += len(ids) - first
    found = evaluate(model, windows(TOKENS, 32, stride), columns=["both"])
    assert list(found.scores) == ["sm", "both"]
    assert found.predicted == count
    assert found.scores["sm"].ppl == pytest.approx(math.exp(nats / count), rel=1e-9)


def test_every_column_of_an_exact_network_is_the_original_to_rounding(model):
    found = evaluate(model, windows(TOKENS, 32))
    assert list(found.scores) == ["sm", "lse", "act", "both"]
    assert found.sites == {"softmax": 2, "activations": 2}
    for score in found.scores.values():
        assert abs(score.delta) <= 1e-5 * score.ppl  # float32 through two layers
        assert score.same == 1
    assert model.state_dict().keys() == tg.convert(model).state_dict().keys()
    assert "+0.000" in found.table()


def test_a_column_has_what_it_says_and_nothing_else(model, monkeypatch):
    """Gates that are off move the columns that have them, and only those."""
    sigma, run = logits._sigma, perplexity._scored

    def spoiled(networks, window):  # after the conversion, whose certificate would see it
        with mock.patch.object(logits, "_sigma", lambda u: sigma(u + 0.3)):
            return run(networks, window)

    monkeypatch.setattr(perplexity, "_scored", spoiled)
    found = evaluate(model, windows(TOKENS, 32)).scores
    assert found["act"].delta == pytest.approx(0, abs=1e-5 * found["sm"].ppl)
    assert abs(found["lse"].delta) > 1e-3
    monkeypatch.undo()
    found = evaluate(model, windows(TOKENS, 32), sites={"re:.*act_fn": "relu"}).scores
    assert found["lse"].delta == pytest.approx(0, abs=1e-5 * found["sm"].ppl)
    assert abs(found["act"].delta) > 1e-3
    assert found["act"].same < 1
    assert found["both"].delta == pytest.approx(found["act"].delta, rel=1e-3)


def test_a_run_that_was_stopped_goes_on_where_it_was(model, tmp_path, monkeypatch):
    some, file = windows(TOKENS, 20), tmp_path / "finished.jsonl"
    whole = evaluate(model, some)

    def stop(done, count, ppl):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, some, finished=file, progress=stop)
    assert len(file.read_text().splitlines()) == 2
    file.write_text(file.read_text()[:-20])  # and the last line was cut off
    scored, run = [], perplexity._scored
    monkeypatch.setattr(
        perplexity, "_scored", lambda networks, w: (scored.append(w), run(networks, w))[1]
    )
    assert evaluate(model, some, finished=file) == whole
    assert len(scored) == 4  # of five
    assert evaluate(model, some, finished=file) == whole
    assert len(scored) == 4
    with pytest.raises(ValueError, match="of another evaluation"):
        evaluate(model, some[1:], finished=file)


def test_other_weights_are_another_evaluation(model, tmp_path):
    some, file = [Window(TOKENS[:9])], tmp_path / "finished.jsonl"
    evaluate(model, some, finished=file)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match="of another evaluation"):
        evaluate(model, some, finished=file)


def differently(model):
    """The network as other settings make it: (what differs, network), with the same weights."""
    yield "a normalisation", lambda m: setattr(m.config, "rms_norm_eps", 1e-2)
    yield "a value of a weight", lambda m: m.lm_head.weight.data[7].mul_(1.001)
    yield "a buffer that is not saved", lambda m: m.model.rotary_emb.inv_freq.mul_(2)
    yield "the attention", lambda m: m.set_attn_implementation("eager")
    yield "the precision", lambda m: m.to(torch.bfloat16)


def test_whatever_decides_the_figures_is_another_evaluation(model, tmp_path):
    some, file = [Window(TOKENS[:9])], tmp_path / "finished.jsonl"
    evaluate(model, some, columns=["act"], finished=file)
    for what, change in differently(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            change(other)
        with pytest.raises(ValueError, match="of another evaluation"):
            pytest.fail(f"{what}: {evaluate(other, some, columns=['act'], finished=file)}")
    for more in ({"columns": ["both"]}, {"sites": {"re:.*act_fn": "relu"}}):
        with pytest.raises(ValueError, match="of another evaluation"):
            evaluate(model, some, **{"columns": ["act"], "finished": file, **more})
    assert evaluate(model, some, columns=["act"], finished=file).windows == 1


@pytest.mark.parametrize("name", ["run [1]*?.jsonl", "-", "a b", "ünd", "new/deep.jsonl"])
def test_a_file_of_any_name_goes_on(model, tmp_path, monkeypatch, name):
    some, file = windows(TOKENS[:40], 20), tmp_path / name
    evaluate(model, some, columns=["act"], finished=file)
    file.with_name(file.name + ".bak").write_text("of somebody else")
    monkeypatch.setattr(perplexity, "_scored", None)
    assert evaluate(model, some, columns=["act"], finished=file).windows == 2


WRONG = {"window": [2, -1, "0", None], "predicted": [20, None], "nats": [{}, 3, {"sm": "x"}]}


@pytest.mark.parametrize(("what", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_rows_that_no_window_has_are_refused(model, tmp_path, what, value):
    some, file = windows(TOKENS[:40], 20), tmp_path / "finished.jsonl"
    evaluate(model, some, columns=["act"], finished=file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1][what] = value
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ValueError, match="line 2 is not a window of this evaluation, so it is damaged"
    ):
        evaluate(model, some, columns=["act"], finished=file)


def test_columns_and_windows_that_are_not_are_refused(model):
    with pytest.raises(ValueError, match="columns out of sm, lse, act, both; got 1 win"):
        evaluate(model, [Window(TOKENS[:9])], columns=["all"])
    with pytest.raises(ValueError, match="at least one window"):
        evaluate(model, [])


def command(folder, *more):
    return [
        "evaluate",
        f"hf:{folder}",
        "--data",
        str(folder / "text.txt"),
        "--context",
        "32",
        *more,
    ]


def test_the_command_prints_a_table_and_writes_json(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(command(folder, "--limit", "200", "--columns", "both", "--json", str(out))) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert f"{found['scores']['both']['ppl']:.3f}" in printed
    assert found["scores"]["both"]["same"] == 1
    assert (found["tokens"], found["context"], found["windows"]) == (200, 32, 7)
    assert found["predicted"] == 200 - 7
    assert main(command(folder, "--limit", "200", "--columns", "both", "--json", "-")) == 0
    again = json.loads(capsys.readouterr().out)  # alone there
    assert again["scores"] == found["scores"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_gives_the_figures_of_the_cpu(folder, tmp_path, name):
    found = {}
    for device in ("cpu", name):
        out = tmp_path / f"{device[:4]}.json"
        words = command(folder, "--limit", "200", "--device", device, "--json", str(out))
        assert main(words) == 0
        found[device] = json.loads(out.read_text())
    cpu, gpu = found.values()
    assert gpu["device"] == name
    assert gpu["sites"] == cpu["sites"]
    for column, score in cpu["scores"].items():  # float32: sums are taken in another order
        assert gpu["scores"][column]["ppl"] == pytest.approx(score["ppl"], rel=1e-5)
        assert gpu["scores"][column]["same"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "timm:x", "--data", "x"], "write hf:FOLDER_OR_ID or hf:FILE.gguf"),
        (["evaluate", "hf:nowhere", "--data", "x"], "tg evaluate: hf: "),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_data_and_choices_are_checked(folder, capsys):
    base = ["evaluate", f"hf:{folder}", "--data"]
    assert main([*base, "nowhere.txt"]) == 2
    assert "'nowhere.txt' is not a file; give FILE.txt" in capsys.readouterr().err
    assert main(command(folder, "--stride", "40")) == 2
    assert "stride from 1 to context" in capsys.readouterr().err
    assert main(command(folder, "--site", "re:nothing=2")) == 2
    assert "matches no site" in capsys.readouterr().err
    for words, said in (
        (("--limit", "-5"), "--limit must be at least 2 tokens; got -5"),
        (("--json", "nowhere/out.json"), "--json nowhere/out.json cannot be written"),
        (("--finished", str(folder)), "cannot be written; give a file in a directory"),
        (("--site", "act=geluu"), "did you mean 'gelu'"),
    ):
        assert main(command(folder, *words)) == 2
        assert said in capsys.readouterr().err
    assert main([*base, str(folder / "model.safetensors")]) == 2
    assert "is not text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command(folder, "--columns", "sm,all"))


def test_rows_of_wikitext_are_put_together_as_they_are(monkeypatch, folder, capsys):
    rows = {"text": ["", " = A = \n", "", " b c \n"]}
    asked = []
    fake = SimpleNamespace(
        load_dataset=lambda *what, split: (asked.append((*what, split)), rows)[1]
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_text("wikitext2-raw") == " = A = \n b c \n"
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert main(["evaluate", f"hf:{folder}", "--data", "wikitext2-raw"]) == 2
    assert "datasets is not installed: pip install datasets" in capsys.readouterr().err


def launched(words, *module):
    here = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, *module, "-m", "threshold_gating", *words],
        env=here,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow  # half a minute of processes; one process that goes on is tested above
def test_two_processes_and_a_killed_one_give_the_same_perplexity(folder, tmp_path):
    """A process is killed at work; two go on from its file, and one does it all."""
    file, out = tmp_path / "finished.jsonl", tmp_path / "two.json"
    killed = launched(command(folder, "--finished", str(file)))
    until = time.monotonic() + 120
    while not (file.exists() and file.read_text().count("\n") > 1) and time.monotonic() < until:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done = len(file.read_text().splitlines())

    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    words = command(folder, "--finished", str(file), "--json", str(out))
    both = launched(words, *torchrun)
    assert both.wait(timeout=300) == 0, both.stderr.read().decode()
    both.stderr.close()
    one = tmp_path / "one.json"
    assert main(command(folder, "--json", str(one))) == 0
    have, want = (json.loads(path.read_text()) for path in (out, one))
    assert 1 < done < want["windows"]
    assert (tmp_path / "finished.jsonl.1").exists()  # the second process did its part
    assert have["windows"] == want["windows"]
    for name, score in want["scores"].items():
        assert have["scores"][name]["ppl"] == pytest.approx(score["ppl"], rel=1e-6)
