"""A run is recorded by the watch that there is, and read back, damaged lines and all."""

import json
import math

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.insight import history, record
from threshold_gating.training import GateWarning, GateWatch, Rule


def network():
    return nn.Sequential(
        nn.Linear(4, 6),
        tg.Activation("silu", share="channel", channels=6, train=("tau", "theta")),
        nn.Linear(6, 2),
    )


def trained(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def run(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 0.1))
    with record(model, optimizer, tmp_path / "run", every=5) as watch:
        trained(model, optimizer, 12)
    assert isinstance(watch, GateWatch)
    return tmp_path / "run", model


def test_the_start_and_every_n_steps_are_recorded(run):
    folder, _ = run
    found = history(folder)
    assert found.steps == (0, 5, 10)
    assert found.histograms["1/tau"][0]["low"] == found.histograms["1/tau"][0]["high"] == 1.0
    assert found.scalars["1/tau/mean"].keys() == {0, 5, 10}
    assert found.scalars["1/flat"].keys() == {5, 10}
    assert found.damaged == ()
    assert not (folder / "figures").exists()
    assert json.loads((folder / "families.json").read_text())["1"]["now"] == {"multiplicative": 6}


def test_the_last_record_has_the_values_of_the_gates(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 0.1))
    with record(model, optimizer, tmp_path, every=6):
        trained(model, optimizer, 6)
    tau = model[1].values()[0].detach()
    last = history(tmp_path).histograms["1/tau"][6]
    assert last["low"] == pytest.approx(float(tau.min()))
    assert last["high"] == pytest.approx(float(tau.max()))
    assert sum(last["counts"]) == 6


def test_the_table_has_what_moved_furthest_first(run):
    text = history(run[0]).table()
    assert "3 records, from step 0 to 10" in text
    assert text.splitlines()[2].split()[0] in ("1/tau", "1/theta")
    assert str(history(run[0])) == text


def test_a_run_is_not_written_over_another_but_continued(run):
    folder, model = run
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 0.1))
    with pytest.raises(ValueError, match="holds a run already; give another folder, or start="):
        record(model, optimizer, folder)
    with pytest.raises(ValueError, match="start is the steps made before, 0 or more; got -1"):
        record(model, optimizer, folder, start=-1)
    with record(model, optimizer, folder, every=5, start=12):
        trained(model, optimizer, 8)
    assert history(folder).steps == (0, 5, 10, 15, 20)


def test_a_run_that_goes_back_leaves_out_what_it_undoes(run):
    folder, model = run
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 0.1))
    with record(model, optimizer, folder, every=3, start=4):
        trained(model, optimizer, 3)
    with pytest.warns(UserWarning, match="go back.* of steps 10 to 12 is left out"):
        found = history(folder)
    assert found.steps == (0, 5, 6)
    assert {step for step, _ in found.texts} == {7}


def test_a_run_that_resumes_after_half_a_line_loses_no_record_of_its_own(run):
    folder, model = run
    path = folder / "gates.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 0.1))
    with record(model, optimizer, folder, every=5, start=12):
        trained(model, optimizer, 4)
    with pytest.warns(UserWarning, match="is damaged and left out"):
        assert history(folder).steps[-1] == 15


def test_a_channel_that_dies_is_warned_of_and_in_the_history(tmp_path):
    model = network()
    with torch.no_grad():
        model[0].bias[2] = -100.0
    optimizer = torch.optim.SGD(tg.training.param_groups(model, 1e-3))
    rule = Rule(values=8, patience=1)
    recording = record(model, optimizer, tmp_path, every=2, rule=rule)
    with pytest.warns(GateWarning, match="channel 2"), recording:
        trained(model, optimizer, 2)
    found = history(tmp_path)
    assert any("channel 2 (axis 1) is dead" in text for _, text in found.texts)
    assert found.scalars["1/stuck"][2] == 1


def test_a_line_that_was_cut_off_is_left_out_and_the_others_are_read(run):
    path = run[0] / "gates.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    with pytest.warns(UserWarning, match=f"line {len(lines)} of {len(lines)} is damaged"):
        found = history(path)
    assert found.steps[:2] == (0, 5)
    assert found.damaged == (len(lines),)


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"histograms": {}}',
        b'{"step": "5", "scalars": {}}',
        b'{"step": 7, "histograms": {"gates/1/tau": {"low": 1.0}}}',
        b'{"step": 7, "histograms": {"gates/1/tau": {"low": "x", "high": 2, "counts": [1]}}}',
        b'{"step": 7, "scalars": 3}',
        b'{"step": 7, "scalars": {"gates/1/tau/mean": null}}',
    ],
)
def test_whatever_a_damaged_line_holds_nothing_else_is_lost(run, line):
    path = run[0] / "gates.jsonl"
    whole = history(path)
    kept = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([kept[0], line, *kept[1:]]) + b"\n")
    with pytest.warns(UserWarning, match="line 2 of"):
        found = history(path)
    assert found.histograms == whole.histograms
    assert found.scalars == whole.scalars


def test_a_tau_that_became_0_by_rounding_is_what_moved_furthest(tmp_path):
    ends = {
        0: {"tau": (1.0, 2.0), "theta": (0.0, 0.0)},
        1: {"tau": (0.0, 0.0), "theta": (9.0, 9.0)},
    }
    lines = []
    for step, rows in ends.items():
        made = {f"gates/a/{w}": {"low": a, "high": b, "counts": []} for w, (a, b) in rows.items()}
        lines.append(json.dumps({"step": step, "histograms": made}) + "\n")
    (tmp_path / "gates.jsonl").write_text("".join(lines))
    assert history(tmp_path).table().splitlines()[2].split() == ["a/tau", "1", "to", "2", "0"]


@pytest.mark.parametrize("content", ["", "{}\n", "hello\nworld\n", '{"step": 1, "scalars": {}}\n'])
def test_a_file_without_a_record_is_refused(tmp_path, content):
    (tmp_path / "gates.jsonl").write_text(content)
    with pytest.raises(ValueError, match="is a record of gates; give the file that record"):
        history(tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        history(tmp_path / "nowhere")


def test_gates_that_are_nan_are_told_as_not_finite(tmp_path):
    model = network()
    with torch.no_grad():
        model[1].rho.fill_(math.nan)
    with record(model, torch.optim.SGD(tg.training.param_groups(model, 0.1)), tmp_path):
        pass
    assert "none is finite" in history(tmp_path).table()


def test_a_network_whose_gates_learn_nothing_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), tg.Activation("relu"))
    with pytest.raises(ValueError, match="has no gate that learns"):
        record(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path)
    assert not (tmp_path / "gates.jsonl").exists()
