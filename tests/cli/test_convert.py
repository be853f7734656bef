"""tg convert, tg calibrate, tg audit and tg verify, as they are typed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from threshold_gating import load
from threshold_gating.cli.function import from_file

NETWORK = "to_convert.py"


def test_a_network_of_a_file_is_converted_verified_and_saved(folder, tg):
    code, out, err = tg("convert", "net.py:make_model", "--inputs", "5,4", "-o", "out")
    assert code == 0
    assert "2 of 2 sites evaluated with native off: ok" in out
    assert "2 sites, 0 left" in out
    assert "Written to" in err
    assert {p.name for p in (folder / "out").iterdir()} == {
        *("README.md", "tg_config.json", "model.safetensors")
    }
    code, out, _ = tg("verify", "net.py:make_model", "out", "--inputs", "net.py:make_inputs")
    assert code == 0
    assert "ok" in out
    code, out, _ = tg("audit", "net.py:make_model", "--gates", "out", "--inputs", "5,4")
    assert out.splitlines()[-1] == "2 sites, 0 left, 0 other"


def test_an_audit_lists_what_is_left(folder, tg):
    code, out, _ = tg("audit", "net.py:make_model", "--inputs", "5,4")
    assert code == 0
    assert out.splitlines()[-1] == "0 sites, 2 left, 0 other"


def test_json_has_no_number_that_only_python_reads(folder, tg):
    def refused(word):
        raise AssertionError(word)

    code, out, _ = tg(
        "convert", "net.py:make_model", "--inputs", "5,4", "--json", "-", "--tol", "inf"
    )
    assert code == 0
    assert json.loads(out, parse_constant=refused)["certificate"]["tol"] == "inf"


def test_json_is_for_other_programs(folder, tg):
    code, out, err = tg("convert", "net.py:make_model", "--inputs", "5,4", "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert "Inputs are random" in err
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


def test_other_weights_than_the_networks_own_fail_verification(folder, tg):
    tg("convert", "net.py:make_model", "--inputs", "5,4", "-o", "out")
    code, out, err = tg("verify", "net.py:other", "out", "--inputs", "5,4")
    assert code == 1
    assert "weights are not the original's" in out
    assert err.splitlines()[-1] == (
        "tg verify: out has other weights than net.py:other; name the network that was converted, "
        "with the weights it had (--checkpoint, --pretrained)."
    )
    torch.save(tg_weights(folder / "out"), "weights.pt")
    words = ("verify", "net.py:other", "out", "--inputs", "5,4", "--checkpoint", "weights.pt")
    assert tg(*words)[0] == 0


def tg_weights(directory):
    return load_file(directory / "model.safetensors")


def test_random_weights_and_inputs_are_said_to_be(folder, tg):
    pytest.importorskip("timm")
    words = ("convert", "timm:test_resnet", "--inputs", "2,3,64,64", "-o", "out")
    code, _, err = tg(*words)
    assert code == 0
    assert "Weights are random: give --pretrained or --checkpoint FILE for trained ones." in err
    assert "Inputs are random; --inputs with a file of tensors or FILE.py:FUNCTION takes" in err
    assert err.splitlines()[-1].endswith("out, with random weights")
    with torch.no_grad():
        weights = {
            k: v + 1.0 * v.is_floating_point() for k, v in tg_weights(folder / "out").items()
        }
    torch.save(weights, "weights.pt")
    report = json.loads(tg(*words, "--json", "-")[1])
    assert (report["random_weights"], report["random_inputs"]) == (True, True)
    report = json.loads(tg(*words, "--json", "-", "--checkpoint", "weights.pt")[1])
    assert (report["random_weights"], report["random_inputs"]) == (False, True)
    code, _, err = tg("verify", "timm:test_resnet", "out", "--inputs", "2,3,64,64")
    assert code == 1
    assert "other weights than timm:test_resnet, which are random; name the network that" in err
    torch.save(torch.randn(5, 4), "x.pt")
    for inputs in ("x.pt", "net.py:make_inputs", "net.py:ready_inputs"):
        assert "random" not in tg("audit", "net.py:make_model", "--inputs", inputs)[2]


def test_a_hugging_face_folder_without_some_weights_has_random_ones(tmp_path, tg):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))
    model.save_pretrained(tmp_path / "llama")
    path = tmp_path / "llama" / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, {"format": "pt"})
    _, _, err = tg("audit", f"hf:{tmp_path / 'llama'}")
    assert "has no model.norm.weight (1 missing)." in err


def test_a_network_that_stands_in_a_file_is_taken_and_prints_beside_the_report(folder, tg):
    assert tg("audit", "net.py:ready", "--inputs", "5,4")[0] == 0
    code, out, err = tg("audit", "net.py:says", "--inputs", "5,4", "--json", "-")
    assert code == 0
    assert err.startswith("making it\n")
    assert json.loads(out)["random_inputs"]


def test_sites_are_chosen_by_name(folder, tg):
    words = ("--site", "act=silu", "--site", ":tanh#0=none", "--json", "-")
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


def test_a_network_is_calibrated_to_data_and_saved(folder, tg):
    torch.save(torch.randn(300, 4), "data.pt")
    words = ("calibrate", "net.py:smooth", "--data", "data.pt", "-K", "3", "-o", "out")
    code, out, err = tg(*words)
    assert code == 0
    assert out.splitlines()[0].split() == ["site", "kind", "K", "values", *REST]
    assert "1 of 1 sites calibrated, by the rms error on held-out values" in out
    assert "random" not in out
    assert "Written to" in err
    code, out, _ = tg("verify", "net.py:smooth", "out", "--inputs", "5,4", "--json", "-")
    assert code == 0
    assert [row["exact"] for row in json.loads(out)["rows"]] == [False]
    (row,) = json.loads(tg(*words, "--json", "-")[1])["calibration"]
    assert (row["site"], row["kind"], row["K"], row["values"]) == ("act", "gelu", 3, 2400)
    assert row["error"] < row["default_error"]
    saved = json.loads((folder / "out" / "tg_config.json").read_text())
    assert "act" in json.dumps(saved)


REST = ["default", "calibrated", "chosen"]


def test_every_kind_of_data_gives_the_same_calibration(folder, tg):
    x = torch.randn(70, 4)
    torch.save({"x": x}, "data.pt")
    save_file({"x": x}, "data.safetensors")
    np.savez("data.npz", x.numpy().astype(np.float64))
    save_file({"x": x, "shift": torch.zeros(70, 1)}, "named.safetensors")
    found = []
    for file in ("data.pt", "data.safetensors", "data.npz", "named.safetensors"):
        words = ("calibrate", "net.py:smooth", "--data", file, "-K", "2", "--json", "-")
        assert tg(*words)[0] == 1  # two branches are further off than what passes unasked
        code, out, _ = tg(*words, "--tol", "inf")
        assert code == 0
        found.append(json.loads(out)["calibration"])
    assert all(each == found[0] for each in found)
    assert found[0][0]["seen"] == 560


def test_without_data_the_inputs_are_random_and_that_is_said(folder, tg):
    words = ("calibrate", "net.py:smooth", "-K", "2", "--inputs")
    assert "Inputs are random" in tg(*words, "64,4")[1]
    assert json.loads(tg(*words, "64,4", "--json", "-")[1])["random"]
    torch.save(torch.randn(64, 4), "data.pt")
    assert "Inputs are random" not in tg(*words, "data.pt")[1]


@pytest.mark.parametrize("word", ["nan", "-1", "x"])
def test_a_bound_that_is_none_is_refused(folder, tg, word):
    code, _, err = tg("convert", "net.py:smooth", "--inputs", "5,4", f"--tol={word}")
    assert code == 2
    assert f"E must be a number from 0 on, or inf; got '{word}'" in err


def test_an_error_chooses_the_branches(folder, tg):
    words = ("calibrate", "net.py:smooth", "--inputs", "512,4", "--json", "-", "--max-error")
    got = [json.loads(tg(*words, error)[1])["calibration"][0]["K"] for error in ("1e-1", "1e-3")]
    assert got == [2, 3]


@pytest.mark.parametrize("options", [("--recipe", "paper"), ("--max-error", "1e-3")])
def test_branches_are_asked_for_once(folder, tg, options):
    code, _, err = tg("calibrate", "net.py:smooth", "--inputs", "64,4", "-K", "2", *options)
    assert code == 2
    assert "not allowed with argument -K" in err


BAD = [
    (("--data", "nowhere.pt"), "--data 'nowhere.pt' is not a file."),
    (("--data", "list.pt"), "--data list.pt holds no tensor with samples along its first axis."),
    (
        ("--data", "uneven.pt"),
        "--data uneven.pt must have equally many samples of each tensor; it has 3, 4.",
    ),
    (("--data", "data.pt", "--batch-size", "0"), "--batch-size must be at least 1; got 0."),
    (("--data", "text.npz"), "--data text.npz: "),
    (("--data", "text.pt"), "text.pt does not load as tensors: "),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=range(len(BAD)))
def test_data_that_cannot_be_used_is_answered_with_why(folder, tg, words, message):
    torch.save([1, 2], "list.pt")
    torch.save({}, "empty.pt")
    torch.save({"a": torch.zeros(3, 2), "b": torch.zeros(4)}, "uneven.pt")
    torch.save(torch.randn(9, 4), "data.pt")
    for name in ("text.npz", "text.pt"):
        (folder / name).write_text("not tensors")
    code, out, err = tg("calibrate", "net.py:smooth", *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"tg calibrate: {message}")


def test_a_network_without_an_approximate_site_is_not_calibrated(folder, tg):
    code, _, err = tg("calibrate", "net.py:make_model", "--inputs", "5,4")
    assert code == 2
    assert err.startswith("tg calibrate: no approximate site ran in Net; these are exact already")


MESSAGES = [
    (("convert", "resnet50"), "tg convert: no network 'resnet50'; write timm:NAME, hf:FOLDER_OR_ID or FILE.py:FACTORY."),
    (("convert", "net.py:make_modell"), "tg convert: no 'make_modell' in net.py; did you mean 'make_model', 'make_inputs'?"),
    (("convert", "nett.py:make_model"), "tg convert: no file 'nett.py'; did you mean 'net.py'?"),
    (("convert", "net.py:wrong"), "tg convert: net.py:wrong gave int, which is not a torch.nn.Module."),
    (("convert", "net.py:make_model"), "tg convert: net.py:make_model comes without inputs; give --inputs."),
    (("convert", "net.py:make_model", "--inputs", "nowhere.pt"), "tg convert: --inputs 'nowhere.pt' is not a file; give a shape (1,3,224,224), a file of tensors or FILE.py:FUNCTION."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "act"), "tg convert: --site 'act' is not NAME=CHOICE."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "act=geluu"), "tg convert: --site 'act=geluu': no activation 'geluu' in the taxonomy; did you mean 'gelu', 'elu', 'selu'?"),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "act=99"), "tg convert: --site 'act=99': the number of branches must be from 2 to 8; got 99."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "re:(=relu"), "tg convert: --site 're:(=relu' is not a pattern (missing ), unterminated subpattern at position 3)."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "act=2", "--site", "act=3"), "tg convert: --site 'act' is given twice; a site takes one choice."),
    (("convert", "net.py:make_model", "--inputs", "0,4"), "tg convert: --inputs '0,4' is not a shape: give whole numbers from 1 on, as in 1,3,224,224."),
    (("audit", "net.py:make_model", "--inputs", "5,,4"), "tg audit: --inputs '5,,4' is not a shape: give whole numbers from 1 on, as in 1,3,224,224."),
    (("verify", "net.py:make_model", "out", "--inputs", "net.py:no_inputs"), "tg verify: --inputs net.py:no_inputs holds no values, so nothing of the network would be seen."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "-o", "net.py"), "tg convert: -o net.py is a file; give a directory, which may be a new one."),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--pretrained"), "tg convert: --pretrained is for timm:NAME; net.py:make_model has weights of its own."),
    (("convert", "net.py:fails", "--inputs", "5,4"), "tg convert: net.py:fails fails in line 53: KeyError: 'weights\\nof mine'"),
    (("convert", "net.py:leaves", "--inputs", "5,4"), "tg convert: net.py:leaves fails in line 57: SystemExit: 3"),
    (("audit", "net.py:make_model", "--inputs", "5,3"), "tg audit: RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x3 and 4x8) (TG_TRACEBACK=1 shows where)"),
    (("convert", "net.py:make_model", "--inputs", "5,4", "--site", "nope=relu"), "tg convert: sites: 'nope' matches no site of this network; give the name of one, as ':tanh#0', 'act'; `tg.audit(model, inputs)` lists them."),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(folder, tg, words, message):
    code, out, err = tg(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == message


def test_the_card_of_what_was_saved_says_what_was_done_and_keeps_what_a_user_wrote(folder, tg):
    words = ("convert", "net.py:make_model", "--inputs", "5,4", "-o", "out")
    assert tg(*words)[0] == 0
    text = Path("out/README.md").read_text()
    assert "```sh\ntg convert net.py:make_model --inputs 5,4 -o out\n```" in text
    assert "Inputs: float32 5 x 4." in text
    assert "Inputs are random; --inputs with a file of tensors or FILE.py:FUNCTION takes" in text
    assert "2 of 2 sites were compared" in text
    Path("out/README.md").write_text(f"# Mine\n\n{text}\n\nAn end of mine.\n")
    assert tg(*words, "--site", "act=silu", "--tol", "9")[0] == 0
    again = Path("out/README.md").read_text()
    assert again.startswith("# Mine\n")
    assert again.endswith("An end of mine.\n")
    assert again.count("## Threshold gating") == 1
    assert "--site act=silu" in again


def test_two_saved_networks_are_compared_and_what_differs_is_named(folder, tg):
    words = ("convert", "net.py:make_model", "--inputs", "5,4")
    for out, more in (
        ("a", ()),
        ("b", ("--site", "act=silu", "--tol", "9")),
        ("g", ("--gates-only",)),
    ):
        assert tg(*words, "-o", out, *more)[0] == 0
    assert tg("verify", "a", "a")[:2] == (
        0,
        "weights: 4 the same, 0 differ\ngates: 2 the same, 0 differ\n\nthe same\n",
    )
    assert tg("verify", "a", "g")[0] == 0  # by the hash of the weights
    path = Path("b/model.safetensors")
    weights = load_file(path)
    weights["b.bias"] = weights["b.bias"] + 0.5
    save_file(weights, path, {"format": "pt"})
    code, out, err = tg("verify", "a", "b")
    assert (code, out) == (2, "")
    assert "is not the file that tg_config.json was written with (sha256 differs)" in err
    torch.save(weights, "w.pt")
    assert tg(*words, "-o", "b", "--site", "act=silu", "--tol", "9", "--checkpoint", "w.pt")[0] == 0
    code, out, _ = tg("verify", "a", "b")
    assert code == 1
    assert out.splitlines()[:3] == [
        "weights: 3 the same, 1 differ",
        "  b.bias: has other values, max|d| = 0.5",
        "gates: 1 the same, 1 differ",
    ]
    assert out.splitlines()[3].startswith("  act: ")
    assert out.endswith("\nnot the same\n")
    report = json.loads(tg("verify", "a", "b", "--json", "-")[1])
    assert (report["same"], [*report["weights"]], [*report["gates"]]) == (
        False,
        ["b.bias"],
        ["act"],
    )
    code, _, err = tg("verify", "a", "b", "--inputs", "5,4")
    assert code == 2
    assert "--inputs is for a network that runs" in err
    assert "neither 'x' nor 'y' is a folder with a tg_config.json" in tg("verify", "x", "y")[2]


def test_gates_alone_are_verified_against_the_weights_they_were_saved_with(folder, tg):
    words = ("net.py:make_model", "--inputs", "5,4")
    assert tg("convert", *words, "-o", "g", "--gates-only")[0] == 0
    for order in (("net.py:make_model", "g"), ("g", "net.py:make_model")):
        code, out, _ = tg("verify", *order, "--inputs", "5,4")
        assert code == 0
        assert "weights: 4 the same, 0 differ" in out
    torch.save({k: t + 1 for k, t in from_file(Path("net.py"), "make_model")().state_dict().items()}, "w.pt")  # fmt: skip
    code, out, err = tg(
        "verify", "net.py:make_model", "g", "--inputs", "5,4", "--checkpoint", "w.pt"
    )
    assert code == 1
    assert "  a.weight: has other values" in out
    assert "g has other weights than net.py:make_model; name the network that" in err


def test_a_hugging_face_network_is_saved_beside_its_own_files(tmp_path, tg):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))
    model.save_pretrained(tmp_path / "llama")
    spec, out = f"hf:{tmp_path / 'llama'}", str(tmp_path / "out")
    assert tg("convert", spec, "-o", out)[0] == 0
    assert isinstance(load(out), transformers.LlamaForCausalLM)
    code, said, _ = tg("verify", spec, out)
    assert code == 0
    assert "weights: 12 the same, 0 differ" in said
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(tmp_path / "llama")
    code, said, _ = tg("verify", spec, out)
    assert code == 1
    assert "weights: 11 the same, 1 differ\n  lm_head.weight: has other values, max|d| = 1" in said
