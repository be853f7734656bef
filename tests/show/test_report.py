"""The report has the figures of verify, audit and calibrate, and says what they do not show."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from tests.show.test_page import ODD, check_page
from threshold_gating.conversion.certificate import cells
from threshold_gating.conversion.text import jsonable
from threshold_gating.show import details, report
from threshold_gating.show.seen import look


class Net(nn.Module):
    def __init__(self, name="act"):
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(4, 8), nn.Linear(8, 3), nn.SiLU()
        self.name = name.replace(".", "")
        self.add_module(self.name, nn.GELU())

    def forward(self, x):
        return torch.tanh(self.b(getattr(self, self.name)(self.a(x))))


@pytest.fixture
def x():
    return torch.randn(50, 4)


@pytest.fixture
def model():
    return Net().eval()


def text_of(read):
    return " ".join("".join(read.text).split())


def test_the_figures_are_those_of_verify_and_audit(model, x):
    gated = tg.convert(model, inputs=x)
    found = report.gather(model, gated, x)
    read = check_page(found.html())
    assert read.data == json.loads(json.dumps(jsonable(found.to_dict())))
    assert read.data["certificate"] == json.loads(tg.verify(model, gated, x).to_json())
    assert read.data["audit"] == tg.audit(gated, x).to_dict()
    assert read.data["ok"] is True
    text, certificate = text_of(read), tg.verify(model, gated, x)
    for row in certificate.rows:
        assert "".join(cells(row)) in text
    assert all(sentence in text for sentence in certificate.sentences)


def test_a_site_shows_its_function_gates_error_and_what_it_sees(model, x):
    gated = tg.convert(model, inputs=x)
    read = check_page(report.gather(model, gated, x).html())
    text = text_of(read)
    assert repr(gated.act.init) in text
    at = model.a(x)
    assert f"All 400 values, from {at.min():.3g} to {at.max():.3g}" in text
    (act, tanh, idle) = read.data["functions"]
    assert (act["site"], act["seen"], act["kept"]) == ("act", 400, 400)
    assert tg.TG.from_dict(act["gates"][0]) == gated.act.init
    assert sum(act["histogram"]["counts"]) == 400
    assert (tanh["site"], tanh["seen"]) == (":tanh#0", 150)
    assert idle["seen"] == 0
    assert len(read.alts) == 3


def test_it_says_what_the_figures_do_not_show(model, x):
    x[0, 0] = math.nan
    gated = tg.convert(model, inputs=x, strict=False)
    found = report.gather(model, gated, x, tol=math.inf)
    text = text_of(check_page(found.html()))
    for words in (
        "Never called on these inputs, so nothing is known of it: idle.",
        "Approximate, not the same function; the table says how far off: act.",
        "NaN or infinite values reached act, :tanh#0; no histogram holds them.",
        "In use, 1 of 3 sites run torch's own op",
        "No error on this page was measured so.",
        "The caller gave the bound tol = inf, of the output and of approximate sites",
        "400 values came, 8 NaN, the histogram holds 392",
        "float32 50 x 4",
        "native ops off",
    ):
        assert words in text


def test_a_network_that_fails_has_a_page_that_says_why(model, x):
    gated = tg.convert(model, inputs=x)
    gated.act = tg.Activation("relu")
    found = report.gather(model, gated, x)
    assert not found.ok
    page = found.html()
    text = text_of(check_page(page))
    assert "NOT OK" in text
    assert all(message in text for message in found.certificate.failed.values())
    assert '<tbody class="wrong">' in page


def test_of_many_sites_that_fail_the_first_stand_before_the_table(x):
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.GELU())))
    gated = tg.convert(model, {"re:.*": 2}, inputs=x, strict=False)
    found = report.gather(model, gated, x)
    failed = found.certificate.failed
    page = found.html()
    before, after = page.split("<h2>Sites</h2>")
    assert len(failed) > 9
    assert "output" in failed
    assert page.count('<tbody class="wrong">') == len(failed) - 1
    assert f"{len(failed) - 1 - 8} more sites failed; the table marks them." in before
    assert before.index("more sites failed") > before.index("is off by")
    assert after.count("<dt>failed</dt>") == len(failed) - 1


def test_a_network_that_came_with_gates_states_no_error():
    act = tg.Activation("silu", share="channel", channels=8, train=("tau", "theta"))
    with torch.no_grad():
        act.rho.copy_(torch.linspace(0, 1, 8))
    model = nn.Sequential(nn.Linear(4, 8), act, tg.LSTM(8, 5))
    found = report.gather(None, model, torch.randn(6, 4))
    read = check_page(found.html())
    text = text_of(read)
    assert "no original to compare them with and no error is stated" in text
    assert "8 different ones, K = 2: tau 1 to 2.718" in text
    assert "gate 1 of 8" in text
    assert read.data["certificate"] is None
    assert [f["part"] for f in read.data["functions"]] == ["", "i", "f", "o", "g", "cell"]
    assert read.data["functions"][0]["different_gates"] == 8


def test_calibration_stands_beside_what_it_changed(model, x):
    fits = tg.calibrate(model, [x], K=3)
    gated = tg.convert(model, fits, inputs=x, tol=math.inf)
    found = report.gather(model, gated, x, tol=math.inf, calibration=fits)
    read = check_page(found.html())
    assert read.data["calibration"] == fits.to_dict()
    fit = fits.fits["act"]
    assert f"{fit.chosen}: rms error {fit.error:.3g} fitted" in text_of(read)


def test_names_from_a_network_are_text_and_not_markup(x):
    model = Net(ODD).eval()
    found = report.gather(model, tg.convert(model, inputs=x), x, name=ODD)
    read = check_page(found.html())
    site = read.data["certificate"]["rows"][0]["site"]
    assert site == ODD.replace(".", "")
    assert site in read.text


def test_without_a_site_there_is_nothing_to_report():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(tg.conversion.ConversionError, match="no site with a gate"):
        report.gather(None, model, torch.randn(2, 3))


def test_inputs_without_a_value_are_told_of(model, x):
    gated = tg.convert(model, inputs=x)
    found = report.gather(model, gated, torch.zeros(0, 4))
    text = text_of(check_page(found.html()))
    assert not found.ok
    assert "No value reached it on these inputs" in text


class Deep(nn.Module):
    """Many sites, half of them calls."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.acts = nn.ModuleList(nn.GELU() for _ in range(depth))

    def forward(self, x):
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = F.silu(x + act(layer(x))) + 0.5
        return x


@pytest.mark.parametrize("depth", [15, pytest.param(160, marks=pytest.mark.slow)])
def test_320_sites_stay_below_5_mb_and_none_is_lost(depth, monkeypatch):
    model, x = Deep(depth).eval(), torch.randn(40, 8)
    found = report.gather(model, tg.convert(model, inputs=x, strict=False), x)
    page, sites = found.html(), 2 * depth
    read = check_page(page)
    assert len(page.encode()) < 20_000 + 8_000 * sites < 5_000_000
    assert len(read.alts) == len(read.data["functions"]) == sites
    # where there is no room, pictures are left out, those of small errors first
    monkeypatch.setattr(details, "_PAGE", sites * details._SITE + 30_000)
    small = found.html()
    read = check_page(small)
    assert len(small.encode()) < sites * details._SITE + 60_000
    assert 5 < len(read.alts) < 12
    assert all("gelu" in words for words in read.alts)  # SiLU is exact
    assert text_of(read).count("No picture: the page would be too large.") == sites - len(read.alts)
    assert len(read.data["functions"]) == sites


def test_a_network_that_was_trained_since_is_not_said_to_have_its_output_within_bounds(model, x):
    gated = tg.convert(model, {"idle": None}, inputs=x, train=("tau", "theta"), share="channel")
    start = check_page(report.gather(model, gated, x).html())
    assert "every site and the output within bounds" in text_of(start)
    with torch.no_grad():
        for p in tg.training.gate_parameters(gated).values():
            p.add_(0.3)
    found = report.gather(model, gated, x)
    assert found.certificate.output.relative > 0.01
    read = check_page(found.html())
    assert "the output within bounds" not in text_of(read)
    assert "Trained since the conversion: act" in text_of(read)
    # the error of the start is not told as that of the curve in the picture
    pictures = [words for words in read.alts if "gelu" in words]
    assert pictures
    assert not any("largest error" in words for words in pictures)


def test_a_site_whose_name_has_a_slash_opens_with_its_picture():
    class Slash(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("a/b", nn.SiLU())
            self.add_module("a", nn.Tanh())

        def forward(self, x):
            return self.get_submodule("a")(self.get_submodule("a/b")(x))

    x = torch.randn(6, 3)
    seen = look(tg.convert(Slash(), inputs=x), x)
    made = details.table(["site", "kind"], [["a/b", "silu"], ["a", "tanh"]], {}, seen)
    assert [[f.title for f in row.figures] for row in made.rows] == [["silu"], ["tanh"]]
    assert made.rows[0].facts["instance"].startswith("silu")


def test_what_only_the_callers_bound_allows_is_not_called_close_or_within_bounds(model, x):
    line = tg.TG(math.inf, (), (1,), (0,))
    gated = tg.convert(model, {"act": line}, inputs=x, tol=math.inf)
    found = report.gather(model, gated, x, tol=math.inf)
    row = next(row for row in found.certificate.rows if row.site == "act")
    assert row.rel_rms > 0.1
    text = text_of(check_page(found.html()))
    assert "nothing failed, but any error was accepted (tol = inf)" in text
    assert "accepted by tol=inf" in text
    assert "within bounds" not in text
    assert "close to" not in text
