"""Netlists: what they may hold, and what ngspice answers."""

import math
import re
import shutil

import pytest
import torch

from threshold_gating.cli.spice_tables import FAMILIES
from threshold_gating.hardware import lse, spice, steering
from threshold_gating.hardware.cells import Pair, pair
from threshold_gating.hardware.spice import Analysis, Netlist, SpiceError, check, number, run

DEVICE = "sky130_fd_pr__nfet_01v8"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("b1 out 0 v=1/(1+exp(-v(in)))", "a behavioural source"),
        ("e1 out 0 in 0 2", "a controlled voltage source"),
        ("f1 out 0 vx 2", "a controlled current source"),
        ("G1 out 0 in 0 1m", "a controlled current source"),
        ("h1 out 0 vx 2", "a controlled voltage source"),
        ("a1 in out gain", "a code model"),
        ("s1 a b c d sw", "a switch"),
        (".func f(x) {x}", "a directive"),
        ("* B1", "no device"),
        ("m1 d g s b mine", "no device"),
        ("r1 a b r='v(a)*2'", "an expression"),
        ("r1 a b {2*k}", "an expression"),
        ("v1 a 0 v(b)", "an expression"),
        ("x1 a b sigmoid", "calls sigmoid, which is no device of sky130"),
        ("", "one element a line"),
        ("r1 a b 1\nb1 a 0 v=1", "one element a line"),
    ],
)
def test_whatever_would_compute_in_place_of_a_transistor_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        Netlist("t", (line,))


def every_netlist():
    yield from (pair(Pair()), pair(Pair(real=True)), pair(Pair("sky130", "npn"), copies=3))
    yield from (pair(Pair(), one_sided=True, drive="pwl(0 0 1 1)"), pair(Pair("gf180")))
    for named in FAMILIES.values():
        for name, t in named.items():
            yield from (
                steering.netlist(steering.Cell(name, t, real=real)) for real in (True, False)
            )
    yield from (lse.netlist(lse.Tree()), lse.netlist(lse.Tree(flat=True)))


def test_our_cells_are_of_transistors_r_c_and_independent_sources():
    made = list(every_netlist())
    assert len(made) > 20
    for netlist in made:
        check(netlist.elements, netlist.models)
        assert {line[0] for line in netlist.elements} <= set("xrcvi")
        names = [line.split()[0] for line in netlist.elements]
        assert len(names) == len(set(names)), netlist.title
        assert netlist.count().keys() <= {"nfet", "pfet", "npn", "res", "cap"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("10n", 1e-8), ("2.5MEG", 2.5e6), ("1e-7", 1e-7), ("5m", 5e-3), ("1uA", 1e-6), ("100n", 1e-7)],
)
def test_numbers_are_read_as_spice_writes_them(text, value):
    assert number(text, "A") == value


@pytest.mark.parametrize("text", ["ten", "nan", "", "1.2.3", "1e", "10x", "10nV", "٣n", "-", "."])
def test_what_is_no_number_of_the_unit_is_refused(text):
    with pytest.raises(ValueError, match=rf"such as 10n.*, in A; got {re.escape(repr(text))}"):
        number(text, "A")


def test_the_text_is_whole_and_the_seed_turns_mismatch_on():
    text = pair(Pair("sky130"), seed=7, corner="ss", celsius=85).text()
    assert "seed=7" in text
    assert " ss_mm\n" in text
    assert ".temp 85" in text
    assert text.endswith(".end\n")
    assert " tt\n" in pair(Pair("sky130")).text()


DIVIDER = Netlist("rc", ("v1 in 0 1 ac 1", "r1 in out 1k", "r2 out 0 1k", "c1 out 0 1n"))


def test_what_ngspice_answers_is_what_an_rc_circuit_does(pdk):
    op, ac = run(
        DIVIDER, Analysis("op", ("v(out)",)), Analysis("ac dec 1 1e3 1e6", ("v(out)", "v(in)"))
    )
    # ngspice solves to reltol = 1e-5.
    assert op["v(out)"].item() == pytest.approx(0.5, rel=1e-5)
    f = ac["scale"].real
    exact = 0.5 / (1 + 2j * math.pi * f * 500 * 1e-9)
    assert torch.allclose(ac["v(out)"] / ac["v(in)"], exact, rtol=1e-5)


def test_more_vectors_than_write_takes_are_put_together_again(pdk):
    n = 1200
    parts = [f"r{k}a in m{k} 1k" for k in range(n)] + [f"r{k}b m{k} 0 {k + 1}k" for k in range(n)]
    names = tuple(f"v(m{k})" for k in range(n))
    (plot,) = run(Netlist("many", ("v1 in 0 1", *parts)), Analysis("op", names))
    got = torch.stack([plot[name][0] for name in names])
    k = torch.arange(1, n + 1, dtype=torch.float64)
    assert torch.allclose(got, k / (k + 1), rtol=1e-5)


def test_a_run_that_fails_is_an_error_with_the_words_of_ngspice(pdk):
    with pytest.raises(SpiceError, match=r"ngspice failed on rc: .*nowhere"):
        run(DIVIDER, Analysis("op", ("v(nowhere)",)))
    loop = Netlist("loop", ("v1 a 0 1", "v2 a 0 2", "r1 a 0 1"))
    with pytest.raises(SpiceError, match=r"ngspice failed on loop: .*(?i:singular)"):
        run(loop, Analysis("op", ("v(a)",)))


def test_a_run_that_takes_too_long_is_ended(pdk):
    with pytest.raises(SpiceError, match=r"took longer than 0\.001 s on rc"):
        run(DIVIDER, Analysis("op", ("v(out)",)), timeout=0.001)


def test_without_ngspice_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert spice.ngspice() is None
    with pytest.raises(SpiceError, match="apt-get install ngspice"):
        run(DIVIDER, Analysis("op", ("v(out)",)))


@pytest.mark.parametrize("copies", [1, 20, 21, 100])
def test_many_cells_are_several_netlists_with_a_seed_each(copies):
    parts = spice.batches(copies, seed=3)
    sizes, seeds = zip(*parts, strict=True)
    assert sum(sizes) == copies
    assert max(sizes) <= 20
    assert seeds[0] == 3
    near = {seed for user in range(1, 1000) for _, seed in spice.batches(copies, user)}
    assert len(near) == 999 * len(parts)  # no draw of one seed is a draw of another
