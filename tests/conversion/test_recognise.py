"""Functions are recognised by what they compute, as a whole."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import taxonomy
from threshold_gating.conversion import recognise
from threshold_gating.taxonomy import TAXONOMY


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class ErfGELU(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


# (module, key of the row, exact); the four GELUs are four functions.
KNOWN = [
    (nn.ReLU(), "relu", True),
    (nn.ReLU(inplace=True), "relu", True),
    (nn.SiLU(), "silu", True),
    (nn.GELU(), "gelu", False),
    (nn.GELU("tanh"), "gelu_tanh", False),
    (QuickGELU(), "quick_gelu", True),
    (NewGELU(), "gelu_tanh", False),
    (ErfGELU(), "gelu", False),
    (nn.Mish(), "mish", True),
    (nn.Sigmoid(), "sigmoid", True),
    (nn.Tanh(), "tanh", True),
    (nn.Hardswish(), "hardswish", True),
    (nn.Hardsigmoid(), "hardsigmoid", True),
    (nn.ReLU6(), "relu6", True),
    (nn.Tanhshrink(), "tanhshrink", True),
    (nn.ELU(), "elu", False),
    (nn.SELU(), "selu", False),
    (nn.Softplus(), "softplus", False),
    (nn.LogSigmoid(), "logsigmoid", False),
]


@pytest.mark.parametrize(
    ("module", "key", "exact"), KNOWN, ids=[f"{k}-{i}" for i, (_, k, _) in enumerate(KNOWN)]
)
def test_activations_are_recognised_by_what_they_compute(module, key, exact):
    found = recognise.recognise(module)
    assert (found.t, found.exact) == (TAXONOMY[key], exact)
    assert found.sup == (0.0 if exact else taxonomy.ROWS[key].sup)


@pytest.mark.parametrize(
    ("f", "t"),
    [
        (nn.LeakyReLU(0.2), taxonomy.leaky_relu(0.2)),
        (nn.Hardtanh(-2, 3), taxonomy.hardtanh(-2, 3)),
        (nn.Threshold(0.3, 2), taxonomy.threshold(0.3, 2)),
        (nn.Hardshrink(0.1), taxonomy.hardshrink(0.1)),
        (nn.Softshrink(0.3), taxonomy.softshrink(0.3)),
        (lambda x: torch.maximum(x, 0.3 * x), taxonomy.leaky_relu(0.3)),
        (lambda x: torch.sign(x) * F.relu(x.abs() - 0.7), taxonomy.softshrink(0.7)),
    ],
)
def test_parameters_are_read_off_the_call_or_the_values(f, t):
    found = recognise.recognise(f)
    assert found.exact
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    torch.testing.assert_close(found.t(x), t(x), rtol=1e-12, atol=1e-12)


def test_swish_of_any_sharpness_is_exact():
    found = recognise.recognise(lambda x: x * torch.sigmoid(1.3 * x))
    assert found.exact
    assert found.t.tau == pytest.approx(1.3, rel=1e-14)


def test_what_no_row_is_gets_a_fit_with_its_error():
    pytest.importorskip("scipy")

    def f(x):
        return x * torch.sigmoid(x) ** 1.5

    found = recognise.recognise(f)
    assert not found.exact
    x = torch.linspace(-40, 40, 80_001, dtype=torch.float64)
    assert (found.t(x) - f(x)).abs().max() <= found.sup * 1.01
    assert found.sup < 1e-2


@pytest.mark.parametrize(
    ("f", "elementwise", "bent"),
    [
        (nn.ReLU(), True, True),
        (nn.Identity(), True, False),
        (lambda x: 0.5 * x + 1, True, False),
        (nn.Dropout().eval(), True, False),
        (nn.Softmax(-1), False, False),
        (lambda x: x - x.mean(), False, False),
        (lambda x: x.cumsum(0), False, False),
        (nn.Flatten(), False, False),
        (nn.MaxPool2d(2), False, False),
        (lambda x: None, False, False),
    ],
)
def test_only_bent_element_wise_functions_are_activations(f, elementwise, bent):
    assert recognise.is_elementwise(f) == elementwise
    assert recognise.is_bent(f) == bent


GRID = torch.cat([torch.linspace(-50, 50, 4001), torch.tensor([-1e6, -2e4, 2e4, 1e6])]).double()
EXACT = {
    "tanh(x / 30)": lambda x: torch.tanh(x / 30),
    "30 tanh(x / 30)": lambda x: 30 * torch.tanh(x / 30),
    "1 - sigmoid": lambda x: torch.sigmoid(-x),
    "shifted SiLU": lambda x: F.silu(x - 1.5) + 2,
    "SiLU and a line": lambda x: 0.5 * F.silu(2 * x) - 0.25 * x,
    "mirrored ReLU": lambda x: -2 * F.relu(3 - x),
    "tanh of LeCun": lambda x: 1.7159 * torch.tanh(2 / 3 * x),
    "sigmoid by hand": lambda x: 1 / (1 + torch.exp(1 - 3 * x)),
    "Swish by hand": lambda x: x / (1 + torch.exp(-1.3 * x)),
    "Keras' hard sigmoid": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "ReLU up to 20000": lambda x: F.relu(x).clamp(max=20000),
    "step": lambda x: (x > 0.3).to(x.dtype),
    "jump and kink": lambda x: torch.where(x > 1, x + 3, (-x).clamp(min=0)),
    "where": lambda x: torch.where(x > 0, x, 0.3 * x),
    "tiny": lambda x: 1e-6 * torch.tanh(x),
    "in float32": lambda x: F.relu(x.float()).to(x.dtype),
}


@pytest.mark.parametrize("name", EXACT)
def test_scaled_shifted_mirrored_and_piecewise_forms_are_exact(name):
    f = EXACT[name]
    found = recognise.recognise(f)
    assert found.exact
    x = GRID.float().double()
    torch.testing.assert_close(found.t(x), f(x), rtol=1e-11, atol=1e-11 * f(x).abs().max().item())


@pytest.mark.parametrize(
    ("f", "alpha", "key"),
    [
        (lambda x: F.gelu(2 * x), 1.0, "gelu"),
        (lambda x: 3 * F.gelu(x) + 1, 3.0, "gelu"),
        (lambda x: F.softplus(x) - math.log(2), 1.0, "softplus"),
        (lambda x: 1000 * F.elu(x / 1000), 1000.0, "elu"),
    ],
)
def test_affine_forms_of_approximate_functions_keep_their_instance_and_scale_its_error(
    f, alpha, key
):
    found = recognise.recognise(f)
    assert not found.exact
    # measured, and on record with three digits
    assert found.sup == pytest.approx(alpha * taxonomy.ROWS[key].sup, rel=5e-3)
    x = torch.linspace(-8, 8, 4001).double()
    assert (found.t(x) - f(x)).abs().max() <= 1.01 * found.sup


@pytest.mark.parametrize(
    "f",
    [torch.sin, torch.square, torch.exp, torch.round, torch.sign, lambda x: x.abs().log1p()],
)
def test_what_no_gate_computes_is_refused(f):
    with pytest.raises(ValueError, match=r"asymptote|no gate comes near"):
        recognise.recognise(f)


def test_a_function_that_differs_only_far_out_is_another_function():
    with pytest.raises(ValueError, match="it is not a known function"):
        recognise.recognise(lambda x: F.relu(x).clamp(max=1e20), fit=False)
    found = recognise.recognise(lambda x: F.relu(x).clamp(max=1e5), fit=False)
    assert found.exact
    assert found.t(torch.tensor([2e5]).double()).item() == 1e5


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize(
    ("f", "alike"),
    [
        (F.gelu, True),
        (nn.ReLU(inplace=True), True),
        (lambda x: x * (x > 0), True),
        *((lambda x, a=a: torch.tanh(a * x), True) for a in (200.0, -200.0)),
        (Straight.apply, False),
        (lambda x: F.relu(x).detach(), False),
        (lambda x: x + (x.clamp(0, 1) - x).detach(), False),
    ],
)
def test_a_backward_of_its_own_is_seen(f, alike):
    assert recognise.trains_as_it_computes(f) == alike


def test_a_gradient_at_a_kink_that_no_side_has_is_seen():
    relu = TAXONOMY["relu"]
    assert recognise.kinks_apart(F.relu, relu) == []
    assert recognise.kinks_apart(lambda x: (x + x.abs()) / 2, relu) == [0.0]


def test_overwriting_is_seen_by_what_happens():
    assert recognise.overwrites(nn.ELU(inplace=True))
    assert recognise.overwrites(torch.relu_)
    assert not recognise.overwrites(nn.ELU())


SPECIAL = {
    "nan": (lambda x: torch.where(x.isnan(), 5.0, torch.relu(x)), [math.nan]),
    "-0": (lambda x: torch.where(x.signbit() & (x == 0), 3.0, torch.relu(x)), [-0.0]),
    "large": (lambda x: torch.where(x > 1e31, 1.0, torch.relu(x)), [math.inf, 3e38]),
    "none": (torch.relu, []),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_numbers_that_a_function_treats_apart_are_found(name):
    f, want = SPECIAL[name]
    assert list(map(repr, recognise.specials_apart(f, TAXONOMY["relu"]))) == list(map(repr, want))


@pytest.mark.parametrize("threshold", [0.1, 0.3, -2.5, 7.1])
@pytest.mark.parametrize("value", [-1.0, 0.0, 20.0, 0.7])
def test_a_bare_call_is_its_own_instance_to_the_last_digit(threshold, value):
    found = recognise.recognise(nn.Threshold(threshold, value).forward)
    assert found.t == taxonomy.threshold(threshold, value)
    assert found.exact
