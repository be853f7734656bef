"""tg report, and --html of the other commands, as they are typed."""

import json
import os
import sys

import pytest

from tests.show.test_page import check_page

NETWORK = "to_convert.py"
GIVEN = ("net.py:make_model", "--inputs", "5,4")
ODD = """
import torch, threshold_gating as tg
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.add_module("<script>x='1'</script>", nn.ReLU())

    def forward(self, x):
        return getattr(self, "<script>x='1'</script>")(self.a(x))

def linear():
    return nn.Linear(4, 4)

def gated():
    return nn.Sequential(nn.Linear(4, 4), tg.Activation("silu", train=("tau",)))
"""


def page(folder, name="tg_report.html"):
    return check_page((folder / name).read_text("utf-8"))


def test_a_report_is_written_and_has_the_figures_that_are_printed(folder, tg):
    code, out, err = tg("report", *GIVEN, "--json", "r.json")
    assert code == 0
    assert "2 of 2 sites evaluated with native off: ok" in out
    assert f"Written to {folder / 'tg_report.html'}" in err
    read = page(folder)
    assert read.data == json.loads((folder / "r.json").read_text())
    assert read.data["random_inputs"] is True
    assert "tg report net.py:make_model --inputs 5,4 --json r.json" in read.text
    assert any("Inputs are random" in text for text in read.text)
    _, converted, _ = tg("convert", *GIVEN, "--json", "-")
    both = json.loads(converted)
    for name in ("certificate", "audit", "ok"):
        assert read.data[name] == both[name]


def test_saved_gates_are_reported(folder, tg):
    tg("convert", "net.py:smooth", "--inputs", "5,4", "--site", "act=4", "-o", "saved")
    code, _, _ = tg(
        "report", "net.py:smooth", "--inputs", "5,4", "--gates", "saved", "-o", "p.html"
    )
    assert code == 0
    assert [row["K"] for row in page(folder, "p.html").data["certificate"]["rows"]] == [4]
    (folder / "saved" / "tg_config.json").write_text("{")
    code, _, err = tg("report", "net.py:smooth", "--inputs", "5,4", "--gates", "saved")
    assert code == 2
    assert "tg_config.json" in err
    assert not (folder / "tg_report.html").exists()


def test_a_network_that_is_off_has_a_page_and_fails(folder, tg):
    words = ("report", "net.py:smooth", "--inputs", "5,4", "--site", "act=2", "--tol", "0")
    code, out, _ = tg(*words)
    assert code == 1
    assert "failed" in out
    assert "NOT OK" in page(folder).text


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (("convert", *GIVEN), ()),
        (("calibrate", "net.py:smooth", "--inputs", "50,4"), ("-K", "4")),
        (("verify", "net.py:make_model", "saved", "--inputs", "5,4"), ()),
        (("simulate", *GIVEN), ("--preset", "sky130-weak", "--draws", "2", "--rows", "64")),
    ],
)
def test_other_commands_write_a_page_with_their_json(folder, tg, command, more):
    if command[0] == "verify":
        tg("convert", *GIVEN, "-o", "saved")
    code, _, err = tg(*command, *more, "--html", "p.html", "--json", "r.json")
    assert code == 0
    assert "p.html" in err
    read = page(folder, "p.html")
    found = json.loads((folder / "r.json").read_text())
    have = {**read.data, **(read.data.get("certificate") or {})}  # verify's JSON is a certificate
    both = {*found} & {*have}
    assert len(both) > 3
    assert {k: have[k] for k in both} == {k: found[k] for k in both}
    assert read.alts


def test_names_of_a_network_are_text_and_a_network_with_gates_is_reported_as_it_is(folder, tg):
    (folder / "odd.py").write_text(ODD)
    assert tg("report", "odd.py:Odd", "--inputs", "5,4")[0] == 0
    assert page(folder).data["audit"]["sites"][0]["name"] == "<script>x='1'</script>"
    code, out, _ = tg("report", "odd.py:gated", "--inputs", "5,4", "--json", "-")
    assert code == 0
    assert json.loads(out)["certificate"] is None
    code, _, err = tg("report", "odd.py:gated", "--inputs", "5,4", "--tol", "1")
    assert (code, "has its gates already" in err) == (2, True)
    code, _, err = tg("report", "odd.py:linear", "--inputs", "5,4")
    assert (code, err.splitlines()[-1]) == (
        2,
        "tg report: nothing to convert in Linear: it ran without a nonlinearity.",
    )


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("no/such/page.html", "there is no no/such; make it."),
        (".", "is a directory; give a file"),
        ("shut/page.html", "you may not write there."),
    ],
)
def test_where_no_page_can_be_written_is_said_before_the_work(folder, tg, monkeypatch, out, said):
    (folder / "shut").mkdir()
    may = os.access  # root may do anything
    monkeypatch.setattr(os, "access", lambda path, *how: path.name != "shut" and may(path, *how))
    for words in (("report", *GIVEN, "-o", out), ("convert", *GIVEN, "--html", out)):
        code, _, err = tg(*words)
        assert code == 2
        assert said in err
        assert "converting" not in err


def test_without_jinja2_it_is_said_before_the_work(folder, tg, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = tg("report", *GIVEN)
    assert (code, err) == (
        2,
        "tg report: a page needs jinja2, which is not installed: pip install "
        "'threshold-gating[report]'\n",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "net.py:wrong", "--inputs", "5,4"), "not a torch.nn.Module"),
        (("report", "net.py:make_model"), "give --inputs"),
        (("report", *GIVEN, "--site", "act=2", "--gates", "saved"), "give one"),
        (("report", "net.py:make_model", "--inputs", "damaged.pt"), "does not load as tensors"),
        (("verify", "saved", "saved", "--html", "p.html"), "is for a network that runs"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(folder, tg, words, said):
    (folder / "damaged.pt").write_bytes(b"PK\3\4 no more")
    tg("convert", *GIVEN, "-o", "saved")
    code, _, err = tg(*words)
    assert code == 2
    assert said in err.splitlines()[-1]
