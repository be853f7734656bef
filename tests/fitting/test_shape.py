"""The measured shape of functions: tails, corners, inflections, derivatives, and what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import TAXONOMY
from threshold_gating.fitting.shape import (
    Asymptote,
    Corner,
    Curve,
    asymptotes,
    corners,
    curve,
    derivatives,
    discontinuities,
    inflections,
    is_monotone,
)

SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

# name: (function, (slope, intercept) at -inf, at +inf, corners (at, jump), inflections, monotone).
# Inflections of SiLU at u = +-2.3993572805: the roots of u tanh(u/2) = 2.
SHAPES = {
    "relu": (F.relu, (0, 0), (1, 0), [(0, 1)], [], True),
    "leaky_relu": (F.leaky_relu, (0.01, 0), (1, 0), [(0, 0.99)], [], True),
    "abs": (torch.abs, (-1, 0), (1, 0), [(0, 2)], [], False),
    "relu6": (F.relu6, (0, 0), (0, 6), [(0, 1), (6, -1)], [], True),
    "hardtanh": (F.hardtanh, (0, -1), (0, 1), [(-1, 1), (1, -1)], [], True),
    "hardswish": (F.hardswish, (0, 0), (1, 0), [(-3, -0.5), (3, -0.5)], [], False),
    "softshrink": (F.softshrink, (1, 0.5), (1, -0.5), [(-0.5, -1), (0.5, 1)], [], True),
    "selu": (
        F.selu,
        (0, -SELU_SCALE * SELU_ALPHA),
        (SELU_SCALE, 0),
        [(0, SELU_SCALE * (1 - SELU_ALPHA))],
        [],
        True,
    ),
    "elu": (F.elu, (0, -1), (1, 0), [], [], True),
    "celu_2": (lambda x: F.celu(x, 2.0), (0, -2), (1, 0), [], [], True),
    "softplus": (F.softplus, (0, 0), (1, 0), [], [], True),
    "logsigmoid": (F.logsigmoid, (1, 0), (0, 0), [], [], True),
    "sigmoid": (torch.sigmoid, (0, 0), (0, 1), [], [0], True),
    "tanh": (torch.tanh, (0, -1), (0, 1), [], [0], True),
    "erf": (torch.erf, (0, -1), (0, 1), [], [0], True),
    "atan": (torch.atan, (0, -math.pi / 2), (0, math.pi / 2), [], [0], True),
    "softsign": (F.softsign, (0, -1), (0, 1), [], [0], True),
    "tanhshrink": (F.tanhshrink, (1, 1), (1, -1), [], [0], True),
    "gompertz": (lambda x: torch.exp(-torch.exp(-x)), (0, 0), (0, 1), [], [0], True),
    "silu": (F.silu, (0, 0), (1, 0), [], [-2.3993572805, 2.3993572805], False),
    "gelu": (F.gelu, (0, 0), (1, 0), [], [-math.sqrt(2), math.sqrt(2)], False),
    "mish": (F.mish, (0, 0), (1, 0), [], [-2.2563763964, 1.4905711795], False),
    "identity": (torch.clone, (1, 0), (1, 0), [], [], True),
    "zero": (torch.zeros_like, (0, 0), (0, 0), [], [], True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_known_activations(name):
    f, low, high, kinks, bends, monotone = SHAPES[name]
    tails = asymptotes(f)
    # 1e-9: an algebraic tail (atan) is extrapolated from |x| = 2^20, the others are read off.
    for side, (slope, intercept) in ((tails.low, low), (tails.high, high)):
        assert side.exists
        assert side.slope == pytest.approx(slope, abs=1e-12)
        assert side.intercept == pytest.approx(intercept, abs=1e-9)
    found = corners(f)
    assert [k.at for k in found] == pytest.approx([at for at, _ in kinks], abs=1e-12)
    assert [k.jump for k in found] == pytest.approx([jump for _, jump in kinks], abs=1e-9)
    assert all(k.step == 0 for k in found)
    assert inflections(f) == pytest.approx(bends, abs=1e-10)
    assert is_monotone(f) is monotone


def test_hardsigmoid_has_torchs_own_slope():
    """Its backward has 1/6 in float32, so the jump is off by 5e-9."""
    assert [k.at for k in corners(F.hardsigmoid)] == [-3.0, 3.0]
    assert corners(F.hardsigmoid)[0].jump == pytest.approx(1 / 6, abs=1e-8)


@pytest.mark.parametrize(
    ("f", "low", "high"),
    [
        (torch.sin, "oscillating", "oscillating"),
        (lambda x: x + torch.sin(x) ** 2, "oscillating", "oscillating"),
        (lambda x: F.relu(x) ** 2, "", "diverging"),
        (lambda x: x**2, "diverging", "diverging"),
        (torch.exp, "", "diverging"),
        (torch.asinh, *["slope exists but no intercept"] * 2),
        (lambda x: (1 + x**2) ** 0.25, *["slope exists but no intercept"] * 2),
    ],
)
def test_missing_asymptotes_have_a_reason(f, low, high):
    tails = asymptotes(f)
    assert (tails.low.reason, tails.high.reason) == (low, high)
    assert tails.low.exists is (low == "")
    assert not tails.high.exists


def test_a_slope_without_intercept_is_still_reported():
    assert asymptotes(torch.asinh).high == Asymptote(0.0, None, "slope exists but no intercept")


def test_overflow_far_out_does_not_hide_the_asymptote():
    """x exp(x) / (1 + exp(x)) is NaN beyond 709; the points before it are enough."""
    tails = asymptotes(lambda x: x * torch.exp(x) / (1 + torch.exp(x)))
    assert tails.low == Asymptote(0.0, 0.0)
    assert tails.high == Asymptote(1.0, 0.0)


@pytest.mark.parametrize("name", [n for n, t in TAXONOMY.items() if t.q is None and not t.clamp])
def test_asymptotes_of_an_instance_are_its_outer_branches(name):
    t, tails = TAXONOMY[name], asymptotes(TAXONOMY[name])
    found = [tails.low.slope, tails.high.slope, tails.low.intercept, tails.high.intercept]
    # 1e-7: a slope that is no round number is off by 1 ulp, which 2^5 to 2^6 times x magnifies.
    assert found == pytest.approx([t.s[0], t.s[-1], t.c[0], t.c[-1]], abs=1e-7)


def test_a_corner_anywhere_is_located_to_1e_12():
    (corner,) = corners(lambda x: F.relu(3 * (x - 0.123456789012345)))
    assert corner.at == pytest.approx(0.123456789012345, abs=1e-12)
    assert corner.jump == pytest.approx(3, abs=1e-9)


def test_steps_are_told_from_corners():
    assert corners(torch.sign) == (Corner(0.0, 0.0, 2.0),)
    assert corners(F.hardshrink) == (Corner(-0.5, -1.0, 0.5), Corner(0.5, 1.0, 0.5))


@pytest.mark.parametrize("f", [torch.exp, lambda x: torch.tanh(1000 * x), lambda x: 1e6 * x])
def test_what_is_only_steep_has_no_corner(f):
    assert corners(f) == ()


def test_jumps_of_the_second_derivative_are_found():
    steps, kinks, bends = discontinuities(lambda x: F.elu(x - 0.3))
    assert (steps, kinks) == ((), ())
    assert bends == pytest.approx([0.3], abs=1e-12)
    assert discontinuities(F.relu) == ((), (0.0,), ())
    assert discontinuities(F.gelu) == ((), (), ())


@pytest.mark.parametrize(
    ("f", "at", "expected"),
    [
        (torch.tanh, 0.0, (0, 1, 0, -2)),
        (torch.sigmoid, 0.0, (0.5, 0.25, 0, -0.125)),
        (F.mish, 0.0, (0, 0.6, 0.64, -0.096)),
        (F.gelu, 0.0, (0, 0.5, math.sqrt(2 / math.pi), 0)),
        (torch.sin, 0.7, (math.sin(0.7), math.cos(0.7), -math.sin(0.7), -math.cos(0.7))),
        (TAXONOMY["tanh"], 0.0, (0, 1, 0, -2)),
        (TAXONOMY["mish"], 0.0, (0, 0.6, 0.64, -0.096)),
    ],
)
def test_derivatives_are_those_of_the_closed_form(f, at, expected):
    d = derivatives(f, at)
    assert (d.value, d.first, d.second, d.third) == pytest.approx(expected, abs=1e-12)
    assert d.by == "autograd"


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: 1e3 * F.silu(x), (0, 500, 500, 0)),
        (lambda x: 1e-3 * F.silu(x), (0, 5e-4, 5e-4, 0)),
        (lambda x: 1e6 * torch.tanh(x), (0, 1e6, 0, -2e6)),
        (lambda x: torch.tanh(1e3 * x), (0, 1e3, 0, -2e9)),
        (lambda x: 1e3 + 1e-5 * F.silu(x), (1e3, 5e-6, 5e-6, 0)),
    ],
    ids=["1e3 silu", "1e-3 silu", "1e6 tanh", "tanh(1e3 x)", "1e3 + 1e-5 silu"],
)
def test_derivatives_exist_at_any_scale_of_f_and_x(f, expected):
    d = derivatives(f)
    assert (d.value, d.first, d.second, d.third) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert d.by == "autograd"


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize(("f", "existing"), [(torch.sign, 0), (F.relu, 1), (F.elu, 2)])
def test_a_jump_is_seen_at_any_scale_of_f(f, existing, scale):
    d = derivatives(lambda x: scale * f(x))
    values = [d.value, d.first, d.second, d.third]
    assert [v is not None for v in values] == [True] * existing + [False] * (4 - existing)


def test_an_op_without_double_backward_falls_back_and_says_so():
    d = derivatives(F.hardsigmoid)
    assert d.by == "autograd to order 1, then finite differences"
    assert (d.second, d.third) == pytest.approx((0, 0), abs=1e-8)


def test_a_function_from_numpy_is_differentiated_by_differences():
    def tanh(x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    d = derivatives(tanh)
    assert d.by == "finite differences"
    # nine points 0.02 apart: 1e-16 / 0.02^3 = 1e-11 of noise, 0.02^8 of truncation times f''''...
    assert (d.first, d.second, d.third) == pytest.approx((1, 0, -2), abs=1e-7)
    assert asymptotes(tanh).high == Asymptote(0.0, 1.0)
    (corner,) = corners(lambda x: torch.from_numpy(np.maximum(x.detach().numpy(), 0)))
    assert (corner.at, corner.jump) == pytest.approx((0, 1), abs=2e-6)


def test_a_corner_of_a_function_from_numpy_has_no_derivative():
    """Differences turn the jump of f' into a slope, which an extrapolation would follow."""
    d = derivatives(lambda x: torch.from_numpy(np.maximum(x.detach().numpy(), 0)))
    assert (d.value, d.first) == (0.0, None)


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_a_missing_backward_is_noticed_at_any_scale_of_f(scale):
    f = curve(lambda x: torch.from_numpy(scale * np.tanh(x.detach().numpy())))
    assert f.orders == 0
    assert derivatives(f).first == pytest.approx(scale, rel=1e-6)


def test_a_constant_from_numpy_has_derivatives_that_are_exactly_zero():
    f = Curve(lambda x: torch.full_like(x, 3.1), "constant", 0)
    assert not f(torch.linspace(-5, 5, 11, dtype=torch.float64), 1).any()


@pytest.mark.parametrize("edge", [0.0, 8.0])
def test_a_gradient_that_is_nan_is_not_trusted(edge):
    """Where the root is not taken its gradient is 0 times NaN; beyond 8 no probe sees it."""

    def root(x):
        return torch.where(x < edge, torch.sqrt(edge - x), torch.zeros_like(x))

    c = curve(root)
    assert c.orders == 0
    x = torch.tensor([-2.0, edge + 1.0], dtype=torch.float64)
    assert c(x, 1).tolist() == pytest.approx([-0.5 / math.sqrt(edge + 2), 0], abs=1e-9)
    assert derivatives(root, -2.0).by == "finite differences"
    at_edge = derivatives(root, edge)
    assert (at_edge.value, at_edge.first) == (0.0, None)
    assert not any(k.step for k in corners(root))


def test_a_backward_that_is_silently_wrong_is_not_trusted():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.tanh(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (1 - torch.tanh(x) ** 2) / 2

    assert curve(Halved.apply).orders == 0
    assert derivatives(Halved.apply).first == pytest.approx(1, abs=1e-9)


def test_autograd_through_an_absolute_value_is_corrected_at_zero():
    """exp(-|x|) has gradient 0 at 0, which makes this sigmoid's slope 0 there instead of 1/4."""

    def sigmoid(x):
        e = torch.exp(-x.abs())
        return torch.where(x < 0, e, torch.ones_like(e)) / (1 + e)

    d = derivatives(sigmoid)
    assert (d.first, d.third) == pytest.approx((0.25, -0.125), abs=1e-9)
    assert d.by == "autograd beside the point"


@pytest.mark.parametrize(
    ("f", "existing"), [(torch.sign, 0), (F.relu, 1), (F.elu, 2), (F.softsign, 2), (F.silu, 4)]
)
def test_a_derivative_with_two_sides_is_none_and_so_are_those_above(f, existing):
    d = derivatives(f)
    values = [d.value, d.first, d.second, d.third]
    assert [v is not None for v in values] == [True] * existing + [False] * (4 - existing)


@pytest.mark.parametrize(
    ("f", "monotone"),
    [
        (lambda x: F.threshold(x, 0.1, 20.0), False),  # rises, but for a step down by 19.9
        (lambda x: F.threshold(x, 0.1, -20.0), True),
        (lambda x: x - 0.02 * (x > 0), False),
        (F.hardshrink, True),
        (lambda x: -torch.sign(x), True),
        (lambda x: torch.sign(x) - 2 * torch.sign(x - 1), False),
    ],
    ids=["threshold", "threshold below", "small step", "hardshrink", "falling step", "up and down"],
)
def test_a_step_against_the_slope_or_another_step_is_not_monotone(f, monotone):
    assert is_monotone(f) is monotone


def test_a_module_that_works_in_place_is_left_alone():
    assert corners(nn.ReLU(inplace=True)) == (Corner(0.0, 1.0),)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (3, TypeError, "f must be a function of a tensor or a TG; got int."),
        (
            torch.log,
            ValueError,
            r"log is NaN at x = -16 \(33 of 65 points in \[-16, 16\] are not finite\); a finite "
            "value is needed everywhere.",
        ),
        (torch.reciprocal, ValueError, "reciprocal is infinite at x = 0 "),
        (torch.sum, ValueError, r"sum must keep the shape of its input; \(65,\) became \(\)."),
        (torch.Tensor.tolist, TypeError, "tolist must return a tensor; got list."),
        (
            torch.Tensor.float,
            TypeError,
            "float must compute in the dtype of its input, float64; it returned torch.float32.",
        ),
        (
            nn.Softmax(0),
            ValueError,
            "Softmax is not element-wise: its value at x = .* changes when the other elements do.",
        ),
        (lambda x: x.cumsum(0), ValueError, "is not element-wise"),
        (lambda x: x - x.mean(), ValueError, "is not element-wise"),
        (lambda x: x.flip(0), ValueError, "is not element-wise"),
        (
            nn.Dropout(),
            ValueError,
            "Dropout is random: two calls on the same input differ by .*; put it into evaluation "
            "mode or fix its seed.",
        ),
        (
            nn.Linear(3, 3),
            ValueError,
            r"Linear fails on a float64 tensor of shape \(65,\): RuntimeError: ",
        ),
    ],
)
def test_what_is_no_activation_is_refused_with_a_reason(f, error, message):
    with pytest.raises(error, match=message):
        curve(f)
