"""tg energy, as it is typed."""

import json
from dataclasses import asdict

import pytest

from threshold_gating.cli.options import BUDGET
from threshold_gating.hardware.assumptions import Assumptions

NETWORK = "to_convert.py"
ASKED = ("energy", "net.py:make_model", "--inputs", "5,4")


def test_a_network_is_counted_layer_by_layer(folder, tg):
    code, out, err = tg(*ASKED, "--plot", "bars.svg")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    for text in ("ADC, survey p10", "area, 32 nm", "Not counted"):
        assert text in out
    assert "One run on 5x4." in err
    assert "Inputs are random; --inputs with a file of tensors or FILE.py:FUNCTION" in err
    assert "give --inputs" not in err  # which was given
    assert (folder / "bars.svg").read_text().rstrip().endswith("</svg>")


def test_json_has_the_settings_that_were_given(folder, tg):
    code, out, _ = tg(*ASKED, "--json", "-", "--rows", "64", "--adc-bits", "8", "--node", "130")
    found = json.loads(out)
    assert code == 0
    assert (found["assumptions"]["rows"], found["assumptions"]["adc_bits"]) == (64, 8)
    assert {f["node"] for f in found["figures"].values()} == {130}
    assert found["inputs"] == ["5x4"]


def test_every_setting_is_an_option_with_the_same_default():
    given = {name.replace("-", "_"): default for name, (default, _) in BUDGET.items()}
    assert given == asdict(Assumptions())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--adc-bits", "4"), "5 to 16 bits; got 4"),
        (("--node", "1"), "from 3 to 350 nm; got 1"),
        (("--preset", "none"), "there are sky130-weak"),
        (("--rows", "0"), "rows must be whole and from 1 to 1048576; got 0"),
        (("--rows", "1.5"), "--rows: a whole number is needed; got '1.5'"),
        (("--read", "-1n"), "--read: a finite number is needed, without a unit; got '-1n'"),
        (("--plot", "nowhere/x.svg"), "cannot be written"),
        (("--plot", "x.what"), "x.what"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(folder, tg, given, says):
    code, _, err = tg(*ASKED, *given)
    assert code == 2
    assert says in err
