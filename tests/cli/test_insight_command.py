"""tg insight, as it is typed."""

import json

import pytest
import torch

import threshold_gating as tgl
from threshold_gating.insight import record

NETWORK = "to_convert.py"
ASKED = ("insight", "net.py:make_model", "--inputs", "5,4")


def trained(folder, name, theta=0.0):
    """A saved network whose gates have learned."""
    from net import make_model

    model = tgl.convert(make_model(), train=("theta",), share="channel", inputs=torch.randn(5, 4))
    with torch.no_grad():
        model.act.dtheta[0, 3] = theta
    tgl.conversion.save(model, folder / name)
    return folder / name


@pytest.fixture
def saved(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    yield trained(folder, "before"), trained(folder, "after", 0.5)
    __import__("sys").modules.pop("net", None)


def test_a_network_is_converted_read_and_drawn(folder, tg):
    pytest.importorskip("matplotlib")
    code, out, err = tg(*ASKED, "--plot", "pictures")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert out.splitlines()[2].split()[:2] == ["act", "relu"]
    assert "flat: share at which |dy/dx|" in " ".join(out.split())
    assert "net.py:make_model has no gates: converting it" in err
    assert "Inputs are random" in err
    assert sorted(p.name for p in (folder / "pictures").iterdir()) == ["chaos.png", "ridges.png"]


def test_json_has_the_channels_and_what_was_random(folder, tg):
    code, out, _ = tg(*ASKED, "--json", "-")
    found = json.loads(out)
    assert code == 0
    assert [site["name"] for site in found["sites"]] == ["act", ":tanh#0"]
    assert len(found["sites"][0]["values"]["flat"]) == 8
    assert found["random_inputs"]
    assert found["notes"]


def test_two_folders_are_compared_without_running(saved, tg):
    code, out, err = tg("insight", "after", "--against", "before")
    assert code == 0
    assert "theta 0.5" in out
    assert "at x from N(0, 1)" in " ".join(out.split())
    assert "random" not in err


def test_a_network_with_saved_gates_is_compared_on_its_inputs(saved, tg):
    code, out, _ = tg(*ASKED, "--gates", "after", "--against", "before", "--json", "-")
    changes = json.loads(out)["changes"]
    assert code == 0
    assert changes["sites"][0]["site"] == "act"
    assert changes["sites"][0]["channel"] == 3
    assert changes["inputs"] == "on the first's inputs (5x4)"


def test_a_folder_is_read_by_its_numbers(saved, tg):
    code, out, _ = tg("insight", "after")
    assert code == 0
    assert "8 theta" in out
    assert "Nothing ran" in out


def recorded(folder):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), tgl.Activation("silu", train=("tau",)))
    optimizer = torch.optim.SGD(tgl.training.param_groups(model, 0.1))
    with record(model, optimizer, folder / "run", every=2):
        for _ in range(4):
            model(torch.randn(8, 3)).sum().backward()
            optimizer.step()


def test_a_recorded_run_is_shown_and_drawn_damaged_or_not(folder, tg):
    pytest.importorskip("matplotlib")
    recorded(folder)
    code, out, err = tg("insight", "run", "--plot", "pictures")
    assert code == 0
    assert "3 records, from step 0 to 4" in out
    assert (folder / "pictures" / "film_tau.png").is_file()
    with (folder / "run" / "gates.jsonl").open("a") as file:
        file.write('{"step": 6, "sca')
    code, out, err = tg("insight", "run", "--json", "-")
    assert code == 0
    assert "is damaged and left out; 3 steps are read" in err
    assert json.loads(out)["damaged"] == [
        len((folder / "run/gates.jsonl").read_text().splitlines())
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("insight", "nowhere"), "no network 'nowhere'"),
        (
            ("insight", "after", "--inputs", "5,4"),
            "whose network does not run; it takes no --inputs",
        ),
        (("insight", "after", "--pretrained"), "does not run; it takes no --pretrained"),
        (("insight", "run", "--against", "before"), "is a recorded run; it takes no --against"),
        (("insight", "after", "--plot", "net.py"), "--plot net.py is a file"),
        (("insight", "after", "--against", "run"), "tg_config.json cannot be read"),
        ((*ASKED, "--against", "other"), "other/tg_config.json cannot be read"),
        (("insight", "net.py:plain", "--inputs", "5,4"), "tg insight: "),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(saved, folder, tg, words, says):
    recorded(folder)
    with (folder / "net.py").open("a") as file:
        file.write("\n\ndef plain():\n    return nn.Linear(4, 4)\n")
    code, out, err = tg(*words)
    assert code == 2
    assert says in err
    assert not out


def test_an_empty_run_is_refused_in_a_line(folder, tg):
    (folder / "run").mkdir()
    (folder / "run" / "gates.jsonl").write_text("")
    code, _, err = tg("insight", "run")
    assert code == 2
    assert "is a record of gates" in err
