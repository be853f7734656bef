"""tg simulate, as it is typed."""

import json

import pytest

from tests.show.test_page import check_page
from threshold_gating.hardware import devices
from threshold_gating.show import simulation

NETWORK = "to_convert.py"
ASKED = ("simulate", "net.py:make_model", "--inputs", "5,4", "--draws", "3")


def test_a_network_is_simulated_and_told_of_site_by_site(folder, tg):
    code, out, err = tg(*ASKED, "--preset", "sky130-weak", "--sensitivity")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["site", "kind", "K"]
    assert [line.split()[0] for line in lines[1:3]] == ["act", ":tanh#0"]
    assert "physical gates of sky130-weak on each of 3 chips" in out
    assert "RMS error of the output over its RMS: median" in out
    alone = out.partition("this site alone analog:")[2]
    assert {line.split()[-1] for line in alone.strip().splitlines()} == {"act", ":tanh#0"}
    assert "Inputs are random" in err


def test_json_has_the_volts_the_chips_and_the_sources_of_the_preset(folder, tg):
    code, out, _ = tg(*ASKED, "--preset", "sky130-npn", "--json", "-", "--adc-bits", "6")
    report = json.loads(out)
    assert code == 0
    assert report["preset"] == "sky130-npn"
    preset = devices.preset("sky130-npn")
    tanh = next(row for row in report["sites"] if row["name"] == ":tanh#0")
    assert tanh["volts"] == pytest.approx(2 / preset.tau)
    assert [row["chip"] for row in report["chips"]] == [0, 1, 2]
    assert all(row["adc_bits"] == 6 for row in report["layers"])
    assert report["device"]["tau"]["source"]
    again = json.loads(tg(*ASKED, "--preset", "sky130-npn", "--json", "-", "--adc-bits", "6")[1])
    assert again == report  # noise included


def test_the_page_is_whole_and_says_what_is_not_simulated(folder, tg):
    given = ("--preset", "sky130-weak", "--html", "page.html", "--sensitivity", "--rows", "64")
    code, _, err = tg(*ASKED, *given)
    assert code == 0
    assert "Written to" in err
    page = " ".join(check_page((folder / "page.html").read_text()).text)
    for text in ("net.py:make_model on sky130-weak", "What is not simulated", "Which sites decide"):
        assert text in page
    assert "Crossbars" in page
    assert "more are in the JSON" not in page


def test_sites_that_a_page_has_no_room_for_are_counted(folder, tg, monkeypatch):
    monkeypatch.setattr(simulation, "_ALONE", 1)
    given = ("--preset", "sky130-weak", "--html", "page.html", "--sensitivity", "--json", "r.json")
    assert tg(*ASKED, *given)[0] == 0
    alone = json.loads((folder / "r.json").read_text())["alone"]
    page = " ".join(check_page((folder / "page.html").read_text()).text)
    assert len(alone) > 1
    assert f"The largest are drawn; {len(alone) - 1} more are in the JSON." in page


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--preset", "sky130-weka"), "no preset 'sky130-weka'; did you mean 'sky130-weak'?"),
        (("--preset", "sky130-weak", "--rail", "0.01"), "does not hold the swing of sky130-weak"),
        (("--preset", "sky130-weak", "--celsius", "900"), "sky130-weak was measured from"),
        (("--preset", "sky130-weak", "--adc-bits", "1"), "adc_bits must be from 2 to 24"),
        (("--preset", "sky130-weak", "--draws", "0"), "from 1 to 100000 chips; got 0"),
        (("--preset", "sky130-weak", "--draws", "1000000000"), "--draws must be from 1 to 100000"),
        (("--preset", "sky130-weak", "--rail", "-inf"), "--rail: a finite number is needed"),
        (("--preset", "sky130-weak", "--rows", "1.5"), "--rows: a whole number is needed; got"),
        (("--preset", "sky130-weak", "--html", "no/page.html"), "there is no no; make it"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(folder, tg, given, said):
    code, out, err = tg("simulate", "net.py:make_model", "--inputs", "5,4", *given)
    assert code == 2
    assert said in err
    assert not out
