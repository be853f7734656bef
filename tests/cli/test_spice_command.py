"""`tg spice`: the netlist without a simulator, tables with one, and refusals with the way out."""

import json
import shutil

import pytest
import torch

from threshold_gating.cli import options, spice_cell, spice_pair, spice_tables
from threshold_gating.cli.spice_tables import shares
from threshold_gating.hardware import cell_error, characterise, devices, measure, steering
from threshold_gating.hardware.cells import Pair
from threshold_gating.hardware.measure import Fit, Spread
from threshold_gating.hardware.steering import Cell
from threshold_gating.taxonomy import TAXONOMY

WORDS = ["silu", "gelu_k2", "tanh", "relu", "mish", "hardtanh", "pair", "lse"]


@pytest.mark.parametrize("what", WORDS)
def test_the_netlist_needs_neither_ngspice_nor_models(tg, monkeypatch, tmp_path, what):
    monkeypatch.setenv("TG_PDK", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, out, err = tg("spice", what)
    assert code == 0
    assert out.startswith(("branch cell", "differential pair", "log sum exp"))
    assert out.rstrip().endswith(".end")
    assert "apt-get install ngspice" in err
    assert "Set TG_PDK" in err


def test_a_netlist_is_written_whole(tg, tmp_path):
    code, out, err = tg("spice", "silu", "-o", str(tmp_path / "silu.cir"))
    assert (code, out) == (0, "")
    assert f"wrote {tmp_path / 'silu.cir'}" in err
    text = (tmp_path / "silu.cir").read_text()
    assert sum(line.startswith("xs") for line in text.splitlines()) == 4


def test_without_ngspice_run_prints_the_netlist_and_says_what_is_missing(tg, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, out, err = tg("spice", "silu", "--run")
    assert code == 2
    assert out.startswith("branch cell silu")
    assert "ngspice is not installed: apt-get install ngspice" in err


def test_a_cell_is_measured_in_a_table_of_a_hundred_columns(tg, pdk, monkeypatch, tmp_path):
    monkeypatch.setattr(spice_cell, "CELSIUS", (27.0,))
    tails = [cell_error.Tail(2e-8, 28.5, 1e-7)]  # its steps take long, and have tests of their own
    monkeypatch.setattr(cell_error, "over_branch", lambda cell, **conditions: tails)
    steps = cell_error.Steps(6e-7, 4e-7)
    monkeypatch.setattr(cell_error, "steps", lambda cell, **conditions: steps)
    picture = tmp_path / "silu.svg"
    code, out, err = tg(
        "spice", "silu", "--run", "--tail", "ideal", "--draws", "3", "--plot", str(picture)
    )
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 100
    assert "mismatch, median of 3" in out
    assert "devices              4 nfet" in out
    assert "20 nA           28.50      100 ns" in out
    assert all(f"corner {name} " in out for name in ("ff", "ss", "sf", "fs"))
    assert "settling, x up    600 ns" in out
    assert "% of full scale, rms" in out.replace("%   of", "% of")
    assert picture.read_text().startswith("<?xml")


@pytest.mark.slow
def test_log_sum_exp_is_measured_as_json(tg, pdk):
    code, out, _ = tg("spice", "lse", "--run", "--draws", "2", "--json", "-")
    assert code == 0
    rows = json.loads(out)["lse"]
    assert [row["circuit"] for row in rows] == ["softplus", "one stage", "tree of pairs"]
    assert max(row["error"] for row in rows) < 0.03
    assert max(row["gates"] for row in rows) < 0.01
    for row in rows[1:]:
        assert row["temperature"]["-40"]["tau"] > row["tau"] > row["temperature"]["125"]["tau"]
        assert len(row["mismatch"]) == len(row["trimmed"]) == 2


def test_a_pair_is_measured_in_a_table_with_what_its_capacitor_is_worth(tg, monkeypatch):
    """Measurements with known answers in place of ngspice."""
    v = torch.linspace(-0.4, 0.4, 81, dtype=torch.float64)
    answers = {
        "transfer": (v, torch.sigmoid(20 * v)),
        "over_temperature": [Fit(tau, 0.0, 0.0) for tau in (26.0, 20.0, 15.0)],
        "over_corners": [Fit(tau, 0.0, 0.0) for tau in (20.0, 20.1, 19.9, 20.2, 19.8)],
        "mismatch": Spread(5, 0.004, 0.002),
        "mismatch_parts": {"voff": Spread(5, 0.003, 0.001)},
        "noise": 3e-4,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(measure, name, lambda *a, answer=answer, **k: answer)
    settling = lambda spec, tau, **conditions: 2e-7 if spec.decoupling else 5e-7  # noqa: E731
    monkeypatch.setattr(measure, "settling", settling)
    code, out, err = tg("spice", "pair", "--run", "--tail", "real")
    assert code == 0, err
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "tau 20.00 1/V logistic fit",
        "tau 15.00 1/V at 125 C",
        "tau 19.80 1/V corner fs",
        "sigma(theta) 3.00 mV of voff alone",
        "tau sigma(theta) 0.0800 what a network sees",
        "settling 500 ns without the 10 pF on the bias line",
        "energy 9 fJ without the 10 pF on the bias line",  # 10 nA x 1.8 V x 500 ns
        "energy 3.6 fJ tail x supply x settling",
        "power 18 nW of the tail",
    ):
        assert row in rows
    _, out, _ = tg("spice", "pair", "--run", "--tail", "real", "--json", "-")
    found = json.loads(out)
    assert found["tau"] == pytest.approx(20.0)
    assert found["tau_at"] == {"-40": 26.0, "27": 20.0, "125": 15.0}


def test_a_class_ab_cell_copies_halves_of_x_where_a_biased_one_copies_x():
    """Counted in the circuit: x to a tail, to a pfet mirror and from it to a gate."""
    biased, halves = (
        spice_tables.copies(steering.netlist(Cell("silu", TAXONOMY["silu"], quiet=quiet)))
        for quiet in (0.0, 10e-9)
    )
    assert biased == 3
    assert halves == 2 * 3  # each half to its tail, to its other mirror, and to the gate


def test_tau_is_turned_into_a_tail_and_what_no_pair_has_is_refused(monkeypatch):
    def over_tails(spec, tails):
        return [Fit(30.0 - 2 * k, 0.0, 0.0) for k in range(len(tails))]

    monkeypatch.setattr(measure, "over_tails", over_tails)
    assert spice_pair.tail_for(Pair(), 28.0) == pytest.approx(spice_pair.TAILS[1])
    assert spice_pair.TAILS[1] < spice_pair.tail_for(Pair(), 27.0) < spice_pair.TAILS[2]
    with pytest.raises(
        ValueError, match=r"tau 50 per volt .* from 10 \(at 0\.0001 A\) to 30 \(at 1e-09"
    ):
        spice_pair.tail_for(Pair(), 50.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["silu", "--swing", "0.9"], "a swing of 0.9 V does not fit between the rails"),
        (["silu", "--supply", "1.0"], "a supply of 1 V leaves no room"),
        (["silu", "--bias", "lots"], "--bias is a current above 0 in amperes, as 10n or 1e-8; got"),
        (["silu", "--models", "gf180"], "cells are made of sky130 transistors"),
        (["silu", "--tau", "20"], "--tau is of a pair"),
        (["silu", "--corner", "xx"], "no corner 'xx'"),
        (["silu", "--draws", "1"], "--draws must be from 2 to 10000; got 1"),
        (["silu", "--corner", "zz"], "tg spice: models sky130 have no corner 'zz'; there are tt"),
        (["silu", "--plot", "a.svg"], "give --run too"),
        (["pair", "--run", "--plot", "no/a.svg"], "--plot no/a.svg cannot be written; give a file"),
        (["presets", "--run", "-o", "no/a.json"], "--out no/a.json cannot be written; give a file"),
        (["silu", "--draws", "99999999999999999999"], "--draws must be from 2 to 10000; got 9999"),
        (["silu", "--seed", "99999999999999999999"], "--seed must be from 1 to 1000000000; got 99"),
        (["presets", "--bias", "1u"], "--bias has no effect on presets, which takes --draws"),
        (["tradeoff", "--celsius", "85"], "--celsius has no effect on tradeoff"),
        (["families", "--corner", "ss"], "--corner has no effect on families"),
        (["lse", "--transistor", "npn"], "--transistor has no effect on lse"),
        (["silu", "--swing", "0"], "--swing must be above 0; got 0"),
        (["pair", "--supply", "0"], "--supply must be above 0; got 0"),
        (["pair", "--tau", "-5"], "--tau must be above 0; got -5"),
        (["silu", "--seed", "-1"], "--seed must be from 1 to 1000000000; got -1"),
        (["silu", "--celsius", "1000"], "hold from -55 to 150 C; got 1000 C"),
        (["silu", "--class-ab", "0"], "--class-ab is a current above 0 in amperes"),
        (["tanh", "--class-ab", "10n"], "makes x times one gate (silu, gelu_k2, relu); tanh"),
        (["silu", "--class-ab", "10n", "--transistor", "npn"], "nfet pairs with real tails"),
        (["pair", "--class-ab", "10n"], "--class-ab has no effect on pair"),
        (["lse", "--supply", "0.4"], "the supply of a tree in V must be from 1.7 to 1.95; got 0.4"),
        (["sillu"], "sillu"),
        (["leaky_relu"], "a mirror of ratio 0.01"),
        (["pair", "--bias", "1"], "the tail current in A must be from 1e-10 to 0.0001"),
        (["pair", "--swing", "2"], "does not fit between the rails"),
        (["lse", "--bias", "1u"], "keeps the transistors in weak inversion"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_what_can(tg, words, said):
    code, out, err = tg("spice", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


CURRENTS = (("silu", "bias"), ("silu", "class-ab"), ("pair", "bias"), ("lse", "bias"))


@pytest.mark.parametrize(("what", "name"), CURRENTS)
@pytest.mark.parametrize(
    "given", ["-1n", "0n", "nan", "-inf", "", "1.2.3n", "10nV", "10x", "10 n", "10µ", "٣n"]
)
def test_a_current_that_is_none_is_refused_with_one_that_would_do(tg, what, name, given):
    code, out, err = tg("spice", what, f"--{name}", given)
    assert (code, out) == (2, "")
    said = f"--{name} is a current above 0 in amperes, as 10n or 1e-8; got {given!r}."
    assert err == f"tg spice: {said}\n"


@pytest.mark.parametrize("given", ["10nA", "1E-8", "+10N", ".01u", "10.n"])
def test_a_current_may_have_its_unit_and_any_form_of_a_number(tg, given):
    assert tg("spice", "pair", "--bias", given)[1] == tg("spice", "pair", "--bias", "10n")[1]


def test_a_current_at_a_limit_is_within_it(tg):
    code, _, err = tg("spice", "silu", "--class-ab", "100n")  # 100 x 1e-9 is above 1e-7
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--swing", "0.2V"], "--swing: a finite number is needed, without a unit; got '0.2V'"),
        (["--celsius", "-inf"], "--celsius: a finite number is needed, without a unit"),
        (["--draws", "1e3"], "--draws: a whole number is needed; got '1e3'"),
    ],
)
def test_a_word_that_is_no_number_is_refused_with_the_word(tg, words, said):
    code, out, err = tg("spice", "silu", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_presets_are_written_as_the_library_reads_them(tg, monkeypatch, tmp_path):
    shipped = devices.presets()
    monkeypatch.setattr(characterise, "measured", lambda **options: shipped)
    path = tmp_path / "presets.json"
    code, out, _ = tg("spice", "presets", "--run", "-o", str(path))
    assert code == 0
    assert devices.presets(path) == shipped
    assert max(map(len, out.splitlines())) <= 100
    assert path.read_text() == devices.PRESETS.read_text()


def test_a_pair_can_be_of_every_transistor_that_is_an_option():
    for kind in options.TRANSISTORS:
        assert Pair("sky130", kind).device == kind


def test_few_draws_have_a_largest_and_no_quantile_of_95_percent():
    assert shares(2) == ((0.5, "median"), (1.0, "largest"))
    assert shares(20) == ((0.5, "median"), (0.95, "95 %"))
