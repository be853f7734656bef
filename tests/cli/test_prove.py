"""tg prove, as it is typed."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from threshold_gating import conversion
from threshold_gating.cli import main, prove
from threshold_gating.cli.function import from_file
from threshold_gating.taxonomy import ROWS

NETWORK = "to_prove.py"
ROWS_OF_NET = ["ReLU", "Swish", "LeakyReLU", "leaky_relu(0.3)", "tanh"]


def proofs(path):
    return {(each["name"], each["dtype"]): each for each in json.loads(path.read_text())["proofs"]}


def test_a_row_is_proven_in_every_type_asked_for(tg, tmp_path):
    file = tmp_path / "p.json"
    code, out, err = tg(
        "prove", "SiLU", "relu", "--dtype", "float16", "bfloat16", "--json", str(file)
    )
    assert (code, err) == (0, "")
    assert "silu, float16: all 63,488 finite inputs" in out
    assert (
        "relu, bfloat16: all 65,280 finite inputs\n  The gates equal torch on every input." in out
    )
    assert out.splitlines()[-1] == (
        "Every finite input was tried for 4 of 4. Every claim holds on what was tried."
    )
    assert max(map(len, out.splitlines())) <= 100
    found = proofs(file)
    assert len(found) == 4
    x = found["silu", "float16"]["error"][1]
    assert f"(x = {x:.4g})" in out


def test_all_are_the_exact_rows(tg, tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "_proven", lambda args, each, dtype: asked.append(each.name) or one)
    asked, one = [], prove.proof.prove_row("relu", torch.float16)
    assert tg("prove", "all", "relu", "--dtype", "float16")[0] == 0
    assert asked == [key for key, row in ROWS.items() if row.exact]


def test_a_sample_is_never_called_a_proof(tg):
    code, out, _ = tg("prove", "silu", "--dtype", "float32", "float16", "--sample", "5000")
    assert code == 0
    assert "silu, float32: 5,000 inputs (a sample, which is no proof)" in out
    assert "tried for 1 of 2; a sample, which proves nothing, for 1." in out


def test_an_interrupt_shows_what_was_covered(tg, tmp_path, monkeypatch):
    def interrupt(text, share):
        raise KeyboardInterrupt

    monkeypatch.setattr(prove, "progress", lambda what: nullcontext(interrupt))
    file = tmp_path / "p.json"
    code, out, _ = tg("prove", "relu", "silu", "--dtype", "float16", "--json", str(file))
    assert code == 130
    assert "relu, float16: 31,744 inputs (interrupted, which is no proof)" in out
    assert "tried for 0 of 2; then it was interrupted." in out
    assert [each["complete"] for each in proofs(file).values()] == [False]


def test_a_claim_that_does_not_hold_is_said_and_returned(tg, monkeypatch):
    wrong = prove.taxonomy.swish(1.001)
    monkeypatch.setitem(prove.taxonomy.TAXONOMY, "silu", wrong)
    code, out, _ = tg("prove", "silu", "--dtype", "float16")
    assert code == 1
    assert out.splitlines()[-1].endswith("WRONG: silu (float16).")


def test_each_distinct_site_of_a_network_is_proven_once(tg, folder):
    code, out, err = tg(
        *("prove", "net.py:make", "--inputs", "2,4", "--dtype", "bfloat16", "--json", "p.json")
    )
    assert code == 0
    assert err == "tg prove: :softmax#0 is left out: softmax is not one element-wise function.\n"
    found = proofs(folder / "p.json")
    assert [name for name, _ in found] == ROWS_OF_NET
    assert found["Swish", "bfloat16"]["sites"] == ["b", "c"]
    assert found["leaky_relu(0.3)", "bfloat16"]["sites"] == [":leaky_relu#0", ":leaky_relu#1"]
    # the module's own forward is what it is compared with: it rounds sigmoid and product in 16 bits
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    differ = int((torch.nn.functional.silu(x) != x * torch.sigmoid(x)).sum())
    assert found["Swish", "bfloat16"]["differs"] == differ > 0
    # what a module gives at infinity, not what the record would
    assert found["Swish", "bfloat16"]["special"] == []
    assert "Swish, bfloat16: all 65,280 finite inputs" in out


def test_a_saved_folder_is_proven_with_its_network_and_as_far_as_it_goes_alone(tg, folder):
    model = from_file(folder / "net.py", "make")()
    converted = conversion.convert_(model, inputs=torch.randn(2, 4), strict=False)
    conversion.save(converted, "saved", gates_only=True)
    words = ("--dtype", "float16", "--json", "p.json")
    assert tg("prove", "net.py:make", "--gates", "saved", *words)[0] == 0
    assert [name for name, _ in proofs(folder / "p.json")] == ROWS_OF_NET
    code, _, err = tg("prove", "saved", *words)
    assert code == 0
    assert "slope is left out: the folder does not say which function it replaces" in err
    assert [name for name, _ in proofs(folder / "p.json")] == ["relu", "silu", *ROWS_OF_NET[3:]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slu"], "no activation 'slu' in the taxonomy; did you mean 'silu', "),
        (["sin"], "'sin' has no instance: "),
        (["relu", "net.py:make"], "give names of rows, or one network; got relu net.py:make."),
        (["relu", "--gates", "x"], "--gates is for a network, timm:NAME, "),
        (["net.py:soft", "--inputs", "2,4"], "net.py:soft has no element-wise site to prove. "),
        (["net.py:nothing"], "nothing"),
        (["relu", "--dtype", "float32", "--sample", "9"], "needs at least 1,020 inputs"),
        (["relu", "--device", "tpu"], "--device 'tpu' is not available: "),
        (["relu", "--dtype", "float32", "--jobs", "0"], "share a CPU; got jobs=0"),
        (
            ["relu", "--dtype", "float16", "--json", "no/such/p.json"],
            "--json no/such/p.json cannot be written; give a file in a directory, or -.",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(tg, folder, words, said):
    code, _, err = tg("prove", *words)
    assert code == 2
    assert err.startswith("tg prove: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_function_that_does_not_take_a_type_is_named(tg, monkeypatch):
    def refuse(x):
        raise TypeError("no 16 bits, please")

    row = prove._row("relu")
    monkeypatch.setattr(prove, "_row", lambda key: replace(row, f=refuse))
    code, _, err = tg("prove", "relu", "--dtype", "bfloat16")
    assert (code, err) == (2, "tg prove: relu in bfloat16: no 16 bits, please\n")


def test_an_unknown_type_is_refused(tg, capsys):
    with pytest.raises(SystemExit):
        main(["prove", "relu", "--dtype", "float8"])
    said = capsys.readouterr().err
    assert "TYPE must be one of float32, float16, bfloat16" in said
    assert "got 'float8'" in said


def test_torchs_own_op_cannot_be_the_backend(capsys):
    with pytest.raises(SystemExit):
        main(["prove", "relu", "--backend", "native"])
    assert "invalid choice: 'native'" in capsys.readouterr().err
