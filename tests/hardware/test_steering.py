"""The branch cell: its gates and branches are those of the instance, by sources and by mirrors."""

import re

import pytest
import torch

from threshold_gating.cli.spice_tables import FAMILIES
from threshold_gating.hardware import steering
from threshold_gating.hardware.cells import MIRROR
from threshold_gating.hardware.steering import Cell
from threshold_gating.instance import TG
from threshold_gating.taxonomy import TAXONOMY

CELLS = {name: t for named in FAMILIES.values() for name, t in named.items()}


def ideal(cell, x):
    """What a cell of ideal transistors gives, from the currents and voltages of its design."""
    volts = torch.tensor([[cell.gate(k, v) for v in x] for k in range(cell.instance.K)])
    amps = torch.tensor([[cell.branch(k, v) for v in x] for k in range(cell.instance.K)])
    out = (torch.softmax(cell.tau * volts.double(), 0) * amps.double()).sum(0)
    return (out - cell.base) / cell.unit


@pytest.mark.parametrize("name", CELLS)
def test_steered_currents_add_up_to_the_instance(name):
    cell = Cell(name, CELLS[name])
    t = cell.instance
    soft = TG(tau=cell.taus, theta=t.theta, s=t.s, c=t.c) if t.hard else t
    x = torch.linspace(-cell.span, cell.span, 41, dtype=torch.float64)
    # Voltages pass through float32 tensors in `ideal`, at 1 V and 26 logits to a volt.
    assert torch.allclose(ideal(cell, x.tolist()), soft(x), rtol=0, atol=1e-5 * soft(x).abs().max())


@pytest.mark.parametrize("name", CELLS)
def test_no_branch_current_is_negative_and_gates_stay_between_the_rails(name):
    cell = Cell(name, CELLS[name])
    for k in range(cell.instance.K):
        for x in (-cell.span, cell.span):
            assert -1e-20 <= cell.branch(k, x) <= 2.001 * cell.bias
            assert 0 <= cell.gate(k, x) <= cell.supply - steering.SATURATION


def currents(lines, node, x_current, bias):
    """The current that mirrors draw out of a node, from their drawn sizes."""
    total = 0.0
    for line in lines:
        words = line.split()
        if line[0] != "x" or words[1] != node or words[2] not in ("mx", "mb", "px", "pb"):
            continue
        w, length = (float(re.search(rf" {key}=([-.\de]+)", line)[1]) for key in "wl")
        ratio = (w / length) / (MIRROR[0] / MIRROR[1])
        total += (
            ratio * (x_current if words[2][1] == "x" else bias) * (1 if words[2][0] == "m" else -1)
        )
    return total


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("share", [-1.0, 0.3, 1.0])
def test_mirrors_and_resistors_make_the_same_gates_and_branches(name, share):
    cell = Cell(name, CELLS[name])
    lines, x = steering.netlist(cell).elements, share * cell.span
    x_current = cell.bias + x * cell.x_unit
    value = {
        line.split()[0]: float(line.split()[3])
        for line in lines
        if line[0] in "r" or line[:2] == "vr"
    }
    for k in range(cell.instance.K):
        drawn = currents(lines, f"t{k}_", x_current, cell.bias)
        # Widths are written with six digits.
        assert drawn == pytest.approx(cell.branch(k, x), rel=1e-4, abs=1e-4 * cell.bias)
        volts = value["vr"] - value[f"rg{k}_"] * currents(lines, f"g{k}_", x_current, cell.bias)
        assert volts == pytest.approx(cell.gate(k, x), abs=1e-4)


def test_a_tanh_is_one_pair_and_silu_two():
    steer = {
        name: sum(line.startswith("xs") for line in steering.netlist(Cell(name, t)).elements)
        for name, t in CELLS.items()
    }
    assert steer["tanh"] == steer["sigmoid"] == 2
    assert steer["silu"] == steer["relu"] == steer["gelu_k2"] == 4
    assert steer["mish"] == steer["hardtanh"] == 9


SILU = TAXONOMY["silu"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"swing": 0.7}, "a swing of 0.7 V does not fit between the rails: .* up to 0.6 V"),
        ({"swing": -0.1}, "a swing of -0.1 V does not fit"),
        ({"supply": 1.1}, "a supply of 1.1 V leaves no room: .* give 1.4 V or more"),
        ({"supply": 3.3}, "bear up to 1.95 V; got a supply of 3.3 V"),
        ({"bias": 1e-3}, "the bias current must be from 1e-09 to 1e-05 A"),
        ({"instance": TAXONOMY["hardtanh_clamp"]}, "has a clamp"),
        ({"instance": TAXONOMY["relu_squared"]}, r"branches with x\^2"),
        ({"instance": TAXONOMY["gelu_k3_product"]}, "product form"),
        ({"instance": TAXONOMY["softsign"]}, "-79.9508 to 79.9508; up to 20 apart"),
        ({"instance": TAXONOMY["leaky_relu"]}, "the slope 0.01, a mirror of ratio 0.01; from 0.02"),
        ({"instance": TAXONOMY["elu"]}, "Give a smaller swing or span|a mirror of ratio"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_with_what_can(given, said):
    with pytest.raises(ValueError, match=said):
        Cell(**{"name": "n", "instance": SILU, **given})


def test_tau_between_the_presets_lies_between_theirs():
    assert 24.03 < steering.expected_tau("nfet", 1e-7) < 28.84
    assert steering.expected_tau("nfet", 1e-9) == pytest.approx(28.84)
    assert steering.expected_tau("npn", 1e-7) == pytest.approx(37.15)


def test_area_is_of_drawn_gates_and_resistors():
    cell = Cell("silu", SILU, real=False)
    assert steering.area(steering.netlist(cell)) == pytest.approx(4 * 5 * 1)
    real = steering.netlist(Cell("silu", SILU))
    ohms = [float(line.split()[3]) for line in real.elements if line[0] == "r"]
    gates = 4 * 5 + 10 * 20  # four pairs' transistors, ten of mirrors
    assert steering.area(real) == pytest.approx(gates + sum(ohms) / 2000 * 0.35**2, rel=1e-6)
