"""Activations in integers against float64, over every code."""

import itertools
import math
import re

import pytest
import torch

from threshold_gating.hardware import fixed_point as fp
from threshold_gating.hardware.fixed_point import Format, FormatError
from threshold_gating.instance import TG
from threshold_gating.taxonomy import TABLE2, TAXONOMY

# These hold an exponential as a gate far above x, of which 16 bits see nothing.
FAR = {"elu", "elu_k3", "celu", "selu", "selu_k3"}
WIDE = {"softsign", "softsign_k8"}  # with thresholds at +-80


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", sorted(set(TAXONOMY) - FAR - WIDE))
def test_every_code_of_every_row_is_near_float64(name, bits):
    t = TAXONOMY[name]
    f = fp.format_for(t, bits)
    # Gates are known to 6 of 2^-15 (1.5 of 2^-7 in 8 bits), and branches differ by twice y's range.
    assert fp.error(t, f) <= (18 if bits == 16 else 3.2)


@pytest.mark.parametrize("name", ["relu", "hardtanh", "relu6", "relu6_clamp", "abs", "hardshrink"])
@pytest.mark.parametrize("bits", [5, 8, 11, 16])
def test_hard_gates_with_slopes_of_powers_of_two_are_exact(name, bits):
    t = TAXONOMY[name]
    assert fp.error(t, fp.format_for(t, bits)) == 0


@pytest.mark.parametrize("owner", ["lo", "hi"])
@pytest.mark.parametrize("theta", [-1.0, 0.0, 0.3, 0.3125, 1 / 3])
def test_a_hard_gate_compares_as_real_numbers_do_between_codes_and_at_them(theta, owner):
    t = TG(math.inf, theta, (0, 0), (-1, 1), owner=(owner,))
    f = Format(8, 4, 4)
    x = fp.every_code(8)
    assert torch.equal(fp.real(fp.evaluate(t, x, f), 4), t(fp.real(x, 4)))


def test_softmax_gates_in_steps_are_softmax_gates():
    """The recursion of the unit in float64, with no rounding, against the instance."""
    t = TAXONOMY["softplus_k4"]
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    d, y = None, t.s[0] * x + t.c[0]
    for k, (tau, theta) in enumerate(zip(t.tau, t.theta, strict=True)):
        u = tau * (x - theta)
        d = u if d is None else u - torch.nn.functional.softplus(-d, threshold=100)
        y = y + torch.sigmoid(d) * (t.s[k + 1] * x + t.c[k + 1] - y)
    assert torch.allclose(y, t(x), rtol=0, atol=1e-13)


REFUSED = {
    r"theta = 20 lies outside of .* where \|x\| < 16": (
        TG(1, 20.0, (0, 1), (0, 0)),
        Format(16, 11, 11),
    ),
    "theta = -9 lies outside": (TG(math.inf, -9.0, (0, 1), (0, 0)), Format(8, 4, 4)),
    "theta = 0.2 and 0.7 have no code between": (
        TG(math.inf, (0.2, 0.7), (0, 1, 0), (0, 0, 0)),
        Format(8, 0, 0),
    ),
    "tau = 5000 is too large": (TG(5000.0, 0.0, (0, 1), (0, 0)), Format(12, 8, 8)),
    "tau = 1e-09 is too small": (TG(1e-9, 0.0, (0, 1), (0, 0)), Format(12, 8, 8)),
    "c = 100 is too large": (TG(1, 0.0, (0, 0), (0, 100)), Format(8, 4, 4)),
    "s = 900 is too large": (TG(1, 0.0, (0, 900), (0, 0)), Format(8, 4, 4)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_format_too_narrow_is_refused_and_the_one_named_would_do(why):
    t, f = REFUSED[why]
    codes = torch.tensor([0])
    with pytest.raises(FormatError, match=why) as refused:
        fp.evaluate(t, codes, f)
    named = re.search(
        r"Format\((\d+), fraction=(-?\d+), out=(-?\d+)\) would do", str(refused.value)
    )
    fp.evaluate(t, codes, Format(*map(int, named.groups())))


@pytest.mark.parametrize("name", sorted(FAR))
def test_rows_that_need_an_exponential_are_refused_in_words(name):
    with pytest.raises(FormatError, match=r"no format near it .* take another row"):
        fp.evaluate(TAXONOMY[name], torch.tensor([0]), fp.format_for(TAXONOMY[name], 16))


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("quick_gelu", {"tau": 1}, r"tau = 1.702 is not within 2\^-6 of any with 1 bits of tau"),
        ("leaky_relu", {"slope": 2}, r"s = 0.01 is not within 2\^-4 of any with 2 bits of slope"),
    ],
)
def test_a_unit_of_powers_of_two_does_not_take_other_numbers_for_them(name, more, why):
    t = TAXONOMY[name]
    with pytest.raises(FormatError, match=why):
        fp.evaluate(t, torch.tensor([0]), fp.format_for(t), fp.unit_for(t, **more))
    assert fp.error(TAXONOMY["relu"], Format(16, 12, 12), fp.unit_for(t, **more)) == 0


def test_codes_are_the_nearest_and_end_at_the_range():
    x = torch.tensor([0.03, 0.04, -0.04, 1e30, -math.inf, math.inf, math.nan])
    assert fp.quantise(x, 4, 8).tolist() == [0, 1, -1, 127, -128, 127, 0]
    assert fp.real(torch.tensor([3]), 4).item() == 3 / 16


def test_branches_may_read_another_input():
    """GLU: the gate reads x, the branch v."""
    t, f = TAXONOMY["silu"], Format(12, 8, 8)
    x, v = fp.quantise(torch.randn(2, 500), 8, 12)
    wanted = fp.real(v, 8) * torch.sigmoid(fp.real(x, 8))
    got = fp.real(fp.evaluate(t, x, f, v=v), 8)
    assert (got - wanted).abs().max() < 1.1 * 2**-8
    assert torch.equal(fp.evaluate(t, x, f, v=x), fp.evaluate(t, x, f))


def test_table_2_fits_one_unit():
    every = [TAXONOMY[name] for name in TABLE2]
    unit = fp.unit_for(*every, bits=16)
    assert unit.branches == 3
    for t in every:
        f = fp.format_for(t)
        assert torch.equal(
            fp.evaluate(t, fp.every_code(16), f, unit), fp.evaluate(t, fp.every_code(16), f)
        )


def test_hard_thresholds_need_a_code_between_them_whoever_owns_them():
    t = TG(math.inf, (0.306, 0.371), (0, 0, 0), (0, 1, 2), owner=("hi", "lo"))
    assert fp.error(t, Format(8, 4, 5)) == 0
    assert 1 in fp.real(fp.evaluate(t, fp.every_code(8), Format(8, 4, 5)), 5)
    with pytest.raises(FormatError, match="have no code between them"):
        fp.evaluate(t, torch.tensor([0]), Format(8, 3, 5))


@pytest.mark.parametrize("owners", list(itertools.product(("lo", "hi"), repeat=2)))
def test_formats_of_hard_gates_are_refused_exactly_where_a_branch_has_no_code(owners):
    x = fp.every_code(8)
    for theta in [(0.3, 0.4), (0.25, 0.3), (0.26, 0.3125), (0.25, 0.3125), (0.26, 0.27)]:
        t = TG(math.inf, theta, (0, 0, 0), (0, 1, 2), owner=owners)
        wanted = t(fp.real(x, 4))
        try:
            found = fp.evaluate(t, x, Format(8, 4, 4))
        except FormatError:
            assert 1 not in wanted
        else:
            assert torch.equal(fp.real(found, 4), wanted)
            assert 1 in wanted


@pytest.mark.parametrize("theta", [1e-4, 0.005, -0.007])
def test_a_soft_threshold_near_0_is_rounded_as_any_other(theta):
    f = Format(8, 4, 4)
    off = fp.error(TG(1, theta, (0, 1), (0, 0)), f)
    # An eighth of the last bit of x, at a slope of y below 2.
    assert off <= fp.error(TAXONOMY["silu"], f) + 2 / 8


BUMP = TG(1, (0, 0.1), (0, 20, 0), (0, 0, 0))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("t", [BUMP, TG(0.25, 0.0, (-30, 30), (0, 0))])
def test_branches_larger_than_y_have_room(t, bits):
    assert fp.error(t, fp.format_for(t, bits)) <= (18 if bits == 16 else 3.2)  # as every row


@pytest.mark.parametrize(
    ("t", "f"),
    [
        (BUMP, Format(16, 12, 13)),
        (TG(1, 0.0, (0, 0), (0, 0), q=(-2, 2)), Format(16, 12, 8)),  # q x + s has no room
    ],
)
def test_a_branch_that_leaves_the_sum_where_its_gate_is_open_is_refused(t, f):
    with pytest.raises(FormatError, match=r"leaves the 2 bits above y .* would do") as refused:
        fp.evaluate(t, torch.tensor([0]), f)
    named = re.search(r"Format\((\d+), fraction=(\d+), out=(-?\d+)\)", str(refused.value))
    assert fp.error(t, Format(*map(int, named.groups()))) <= 18


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: Format(8, 2.5, 3), "Format: fraction must be a whole number"),
        (lambda: Format(8.0), "Format: bits must be a whole number"),
        (lambda: fp.Unit(guard=0), "Unit: guard must be 1 or more"),
        (lambda: fp.Unit(tau=60), "up to 63 bits, .* got 79 for x - theta and tau"),
        (lambda: fp.Unit(slope=60), "got 78 for x, a slope and guard"),
        (lambda: fp.Unit(headroom=40), "got 75 for branches and a gate"),
        (lambda: fp.Unit(finer=20), "got 70 for thresholds of a softmax"),
        (lambda: fp.Unit(shift=7), "shift = 7"),
        (lambda: fp.Unit(slope=2.5), "Unit: slope must be a whole number"),
        *(
            (
                lambda reach=reach: fp.format_for(TAXONOMY["silu"], 8, reach),
                "reach must be a number",
            )
            for reach in (0, -1, math.nan, math.inf)
        ),
    ],
)
def test_what_is_no_format_is_refused_in_words(ask, said):
    with pytest.raises(FormatError, match=said):
        ask()


def test_only_codes_of_the_format_are_evaluated():
    t, f = TAXONOMY["silu"], Format(8, 4, 4)
    with pytest.raises(TypeError, match=r"codes are integers; got torch.float32. Give quantise"):
        fp.evaluate(t, torch.tensor([1.5]), f)
    for codes in (torch.tensor([128]), torch.tensor([0, -129])):
        with pytest.raises(ValueError, match="are from -128 to 127"):
            fp.evaluate(t, codes, f)
        with pytest.raises(ValueError, match="are from -128 to 127"):
            fp.evaluate(t, torch.tensor([0]), f, v=codes)
    assert fp.evaluate(t, torch.tensor([], dtype=torch.long), f).numel() == 0


@pytest.mark.parametrize(("theta", "tau"), [((10.0, 0.0), (5.0, 2.0)), ((5.0, -5.0), 10.0)])
def test_soft_thresholds_that_fall_too_far_are_refused(theta, tau):
    t = TG(tau, theta, (0, 1, 0.5), (0, 0, 0))
    with pytest.raises(FormatError, match="take an instance whose thresholds rise"):
        fp.error(t, fp.format_for(t, 16, 16.0))
    near = TG(1, (4.0, -4.0), (0, 1, 0.5), (0, 0, 0))  # as far as there is room
    assert fp.error(near, fp.format_for(near, 16, 16.0)) <= 18
