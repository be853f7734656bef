"""The Verilog of the gate unit: the same codes as the integers, in two simulators."""

import shutil

import pytest
import torch

from threshold_gating.hardware import fixed_point as fp
from threshold_gating.hardware import rtl
from threshold_gating.hardware.digital import bench
from threshold_gating.hardware.digital.format import CHOSEN, Unit, unit_for
from threshold_gating.taxonomy import TABLE2, TAXONOMY

needs_iverilog = pytest.mark.skipif(
    shutil.which("iverilog") is None, reason="iverilog is not installed"
)
needs_verilator = pytest.mark.skipif(
    shutil.which("verilator") is None, reason="verilator is not installed"
)
needs_yosys = pytest.mark.skipif(shutil.which("yosys") is None, reason="yosys is not installed")

TWO = {name: TAXONOMY[name] for name in TABLE2}
MORE = {name: TAXONOMY[name] for name in ("identity", "silu", "gelu_k5", "softplus", "abs")}
SQUARED = {name: TAXONOMY[name] for name in ("hardswish", "relu_squared", "silu", "mish")}
HARD = {name: TAXONOMY[name] for name in ("relu", "relu6", "leaky_relu", "hardshrink")}


@needs_iverilog
@pytest.mark.parametrize("small", [0, 4])
@pytest.mark.parametrize("rows", [TWO, MORE, SQUARED, HARD], ids=["table 2", "K", "x^2", "hard"])
def test_verilog_and_integers_agree_at_every_code(rows, small):
    found = rtl.verify(rows, 8, simulators=("iverilog",), small=small)
    assert found.exact
    assert [o.codes for o in found.outcomes["iverilog"]] == [256] * len(rows)


@needs_iverilog
def test_verilog_and_integers_agree_in_odd_widths_and_lean_units():
    for bits, more in ((5, {}), (11, {"slope": 2, "tau": 3}), (12, {"guard": 1, "headroom": 1})):
        rows = {name: TAXONOMY[name] for name in ("silu", "tanh", "relu")}
        unit = unit_for(*rows.values(), bits=bits, **more)
        assert rtl.verify(rows, unit=unit, simulators=("iverilog",)).exact


@needs_iverilog
@needs_verilator
@pytest.mark.parametrize("small", [0, 2])
def test_a_product_may_be_narrower_than_the_bits_it_is_kept_in(small):
    rows = {"silu": TAXONOMY["silu"]}
    unit = unit_for(*rows.values(), bits=4, tau=1, finer=0)
    formats = {"silu": fp.Format(4, 6, 7)}
    found = rtl.verify(rows, unit=unit, formats=formats, simulators=("iverilog",), small=small)
    assert found.exact
    assert found.lint == ""


@needs_iverilog
@needs_verilator
@pytest.mark.parametrize("small", [0, 1, 3])
def test_registers_of_shifts_may_be_narrower_than_the_shift_of_a_gate(small):
    """One bit of shift, where a gate of 7 bits needs three."""
    rows = {name: TAXONOMY[name] for name in ("sigmoid", "gelu_k3")}
    formats = dict.fromkeys(rows, fp.Format(8, -2, 2))
    unit = unit_for(*rows.values(), bits=8, shift=1)
    found = rtl.verify(rows, unit=unit, formats=formats, simulators=("iverilog",), small=small)
    assert found.exact
    assert found.lint == ""


@needs_iverilog
def test_a_wrong_code_is_counted():
    """The bench compares: one y that is off by one is found."""
    t = TAXONOMY["silu"]
    unit = unit_for(t, bits=8)
    right = bench.case("silu", fp.registers(t, fp.format_for(t, 8), unit), fp.every_code(8), unit)
    y = right.y.clone()
    y[[7, 99]] += 1
    assert [o.differ for o in bench.check(rtl.circuit(unit), [right, right._replace(y=y)])] == [
        0,
        2,
    ]


@needs_iverilog
@pytest.mark.parametrize("name", ["silu", "gelu_k3", "relu6", "hardswish"])
def test_the_small_unit_takes_as_many_cycles_as_it_says(name, tmp_path):
    """A bench that counts edges of the clock, for one code."""
    t = TAXONOMY[name]
    unit, small = unit_for(t, bits=8), 3
    r = fp.registers(t, fp.format_for(t, 8), unit)
    bench.write(
        tmp_path, rtl.circuit(unit, small), [bench.case(name, r, fp.every_code(8)[:1], unit)]
    )
    source = (tmp_path / "bench.v").read_text()
    counting = (
        "    integer edges = 0;\n    always @(posedge clk) edges = edges + 1;\n    initial begin"
    )
    source = source.replace("    initial begin", counting)
    source = source.replace("$finish", '$display("edges %0d", edges); $finish')
    (tmp_path / "bench.v").write_text(source)
    assert f"edges {rtl.cycles(unit, small)}\n" in bench._iverilog(tmp_path)


@needs_iverilog
def test_branches_read_v():
    t, f = TAXONOMY["silu"], fp.Format(8, 4, 4)
    unit = unit_for(t, bits=8)
    x, v = torch.randint(-128, 128, (2, 400))
    r = fp.registers(t, f, unit)
    case = bench.case("glu", r, x, unit, v)
    assert bench.check(rtl.circuit(unit), [case])[0] == ("glu", 400, 0)
    assert not torch.equal(case.y, bench.case("silu", r, x, unit).y)


@pytest.mark.slow
@needs_iverilog
@needs_verilator
def test_two_simulators_agree_with_the_integers_at_all_codes_of_16_bits():
    found = rtl.verify(TWO, 16, simulators=("verilator",))
    assert found.exact
    one = {"gelu_k3": TAXONOMY["gelu_k3"]}
    assert rtl.verify(one, 16).exact
    assert rtl.verify(one, 16, simulators=("verilator",), small=4).exact


@needs_verilator
@pytest.mark.parametrize("small", [0, 4])
@pytest.mark.parametrize(
    "unit",
    [
        Unit(),
        Unit(branches=4),
        Unit(gate=None, log=None),
        Unit(square=True),
        Unit(slope=2, tau=1, shift=4),
        unit_for(TAXONOMY["mish"], bits=8),
    ],
    ids=["16", "four branches", "hard", "x^2", "powers of two", "8"],
)
def test_the_linter_finds_nothing(unit, small):
    assert rtl.lint(unit, small) == ""


def test_one_text_serves_every_activation():
    unit = unit_for(*(TAXONOMY[name] for name in TABLE2))
    written = {fp.registers(TAXONOMY[n], fp.format_for(TAXONOMY[n]), unit) for n in TABLE2}
    assert len(written) > 8
    text = rtl.text(unit)
    assert not any(name in text for name in ("silu", "tanh", "gelu"))
    assert text.count("module tg_sigmoid") == 1


def test_a_missing_tool_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(rtl.ToolError, match=r"iverilog is not installed: apt-get install"):
        rtl.verify({"relu": TAXONOMY["relu"]}, 8)


@needs_yosys
def test_a_hard_unit_of_powers_of_two_needs_no_multiplier(pdk):
    """It is a small part of one with gates and slopes of 8 bits."""
    hard = rtl.synthesise(Unit(8, slope=2, shift=3, gate=None, log=None), pipeline=False)
    gate, _ = CHOSEN[8]
    soft = rtl.synthesise(Unit(8, slope=8, gate=gate, log=None), pipeline=False)
    assert 0 < hard.area < soft.area / 3
    assert 0 < hard.delay < soft.delay
    assert hard.flops == soft.flops == 0


@needs_yosys
def test_fpga_counts_see_the_pipeline():
    unit = Unit(8, slope=2, shift=3, gate=None, log=None)
    flat, piped = rtl.on_ice40(unit, pipeline=False), rtl.on_ice40(unit)
    assert flat.luts > 0
    assert flat.flops == 0 < piped.flops
