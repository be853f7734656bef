"""Tables 2 and 3: exact rows against torch, fitted rows against their own figures."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import Activation, kernels
from threshold_gating.instance import TG
from threshold_gating.taxonomy import (
    NOT_REPRESENTABLE,
    ROWS,
    TABLE2,
    TAXONOMY,
    affine,
    celu,
    elu,
    family,
    key_of,
    leaky_relu,
    measure,
    name_of,
    softplus,
    swish,
)

INF = math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# torch's function -> gate, bitwise in value (sign of zero excepted) in every dtype. Why: a hard
# gate selects a branch and the branches do torch's own arithmetic.
BITWISE = [
    *("relu", "leaky_relu", "prelu", "hardtanh", "relu6", "threshold", "hardshrink", "softshrink"),
    *("hardsigmoid", "hardtanh_clamp", "relu6_clamp", "hardsigmoid_clamp", "rrelu", "abs"),
]
KINKS = [-3.0, -1.0, -0.5, 0.0, -0.0, 0.1, 0.5, 1.0, 3.0, 6.0]

# (row, largest error in ulp of the float32 result, where). Why: each is a few correctly rounded
# operations on torch's sigmoid (2.5 ulp), exp and tanh; torch's own SiLU is at 2.4, Mish at 2.9.
ULP = [
    ("sigmoid", 2.5, -87.0),
    ("silu", 3.3, -80.0),
    ("tanh", 0.7, -128.0),
    ("mish", 4.7, -80.0),
    ("hardsigmoid", 1.34, -128.0),
]


def inputs(dtype):
    info = torch.finfo(dtype)
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(20_003, generator=g) * 4, torch.randn(1003, generator=g) * 1e-3])
    tiny = [info.tiny, -info.tiny, info.tiny / 4, -info.tiny / 4]  # the last two subnormal
    edge = torch.tensor([*KINKS, INF, -INF, math.nan, info.max, info.min, *tiny], dtype=dtype)
    return torch.cat([x.to(dtype), edge])


def finite_values(dtype):
    """Every finite value of a 16-bit dtype."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    return x[x.isfinite()]


def same(a, b):
    return (a == b) | (a.isnan() & b.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", BITWISE)
def test_piecewise_linear_rows_are_bitwise_torch_with_its_gradient(key, dtype):
    t, f = TAXONOMY[key], ROWS[key].f
    x, z = inputs(dtype).requires_grad_(), inputs(dtype).requires_grad_()
    have, want = t(x), f(z)
    assert x[~same(have, want)].tolist() == []
    (g,), (h,) = torch.autograd.grad(have.sum(), x), torch.autograd.grad(want.sum(), z)
    specified = ~x.isnan() & ((x != 0) if key == "abs" else True)
    if key.startswith("hardsigmoid") and dtype == torch.float64:
        # torch's backward has 1/6 in float32 precision
        torch.testing.assert_close(g[specified], h[specified], rtol=1e-7, atol=0)
    else:
        assert x[(g != h) & specified].tolist() == []


def test_tanh_and_sigmoid_are_bitwise_torch_in_float32_and_float64():
    for dtype in (torch.float32, torch.float64):
        x = inputs(dtype)
        assert torch.equal(TAXONOMY["tanh"](x)[:-7], torch.tanh(x)[:-7])
        assert same(TAXONOMY["sigmoid"](x), torch.sigmoid(x)).all()


@pytest.mark.parametrize(("key", "bound", "low"), ULP)
def test_soft_rows_stay_within_their_ulp_of_float64(key, bound, low):
    g = torch.Generator().manual_seed(1)
    exponent = torch.rand(1_000_000, generator=g) * 47 - 40  # 2^-40 <= |x| < 2^7
    x = torch.exp2(exponent) * torch.sign(torch.randn(1_000_000, generator=g))
    x = x[x > low]
    want = ROWS[key].f(x.double())
    ulp = torch.exp2(torch.floor(torch.log2(want.abs())) - 23)
    error = ((TAXONOMY[key](x).double() - want).abs() / ulp)[want != 0]
    assert error.max() <= bound


# (row, how many of the 65,280 finite bf16 values may differ from torch). Evaluated in float32 and
# rounded once they are the correctly rounded value, and so is torch's.
@pytest.mark.parametrize(
    "key",
    ["sigmoid", "tanh", "silu", "mish", "hardsigmoid", "relu", "leaky_relu", "hardtanh", "relu6"],
)
def test_every_finite_bfloat16_input_gives_torchs_value(key):
    x = finite_values(torch.bfloat16)
    assert len(x) == 65_280
    assert x[TAXONOMY[key](x) != ROWS[key].f(x)].tolist() == []


@pytest.mark.parametrize(
    ("key", "differ"), [("sigmoid", 0), ("tanh", 0), ("silu", 1), ("mish", 2), ("leaky_relu", 0)]
)
def test_float16_differs_from_torch_in_at_most_two_values_by_one_ulp(key, differ):
    x = finite_values(torch.float16)
    have, want = TAXONOMY[key](x), ROWS[key].f(x)
    wrong = have != want
    assert int(wrong.sum()) <= differ
    steps = have[wrong].view(torch.int16).int() - want[wrong].view(torch.int16).int()
    assert steps.abs().le(1).all()


@pytest.mark.parametrize("key", [k for k, row in ROWS.items() if row.exact])
def test_exact_rows_are_their_function_in_float64(key):
    error = measure(TAXONOMY[key], ROWS[key].f)
    # Values reach 1e4 (1e8 for quadratic branches), whose float64 ulp is 2e-12 (2e-8).
    assert error.sup <= (1e-7 if TAXONOMY[key].q else 1e-11)
    assert error.rel_rms <= 2e-15


@pytest.mark.parametrize("key", [k for k, row in ROWS.items() if not row.exact])
def test_approximate_rows_have_the_errors_they_state(key):
    row = ROWS[key]
    have = measure(TAXONOMY[key], row.f)
    # the figures are printed to three digits, so half a unit of the third
    for stated, measured in zip((row.sup, row.rms, row.rel_rms), have, strict=True):
        assert measured == pytest.approx(stated, rel=6e-3)


ALGEBRAIC = ("softsign", "softsign_k8")  # it comes to its tails as 1 / x, and no gate does


@pytest.mark.parametrize("key", [k for k, r in ROWS.items() if not (r.exact or k in ALGEBRAIC)])
def test_approximate_rows_have_the_tails_of_their_function(key):
    x = torch.tensor([-1e4, 1e4, -2e4, 2e4], dtype=torch.float64)
    torch.testing.assert_close(TAXONOMY[key](x), ROWS[key].f(x), rtol=1e-14, atol=1e-12)


# (instance, function, largest error relative to the function at 1e-3 <= |x| <= 10, where |f| >= 1e-3)
RELATIVE = {
    "elu": (TAXONOMY["elu"], F.elu, 2.4e-6),
    "elu(0.3)": (elu(0.3), lambda x: F.elu(x, 0.3), 2.4e-6),
    "elu(5)": (elu(5.0), lambda x: F.elu(x, 5.0), 2.4e-6),
    "celu(3)": (celu(3.0), lambda x: F.celu(x, 3.0), 2.4e-6),
    "celu(0.2)": (celu(0.2), lambda x: F.celu(x, 0.2), 2.4e-6),
    "selu": (TAXONOMY["selu"], F.selu, 2.4e-6),
    "erf": (TAXONOMY["erf"], torch.erf, 4.3e-6),
    "softsign": (TAXONOMY["softsign"], F.softsign, 7.6e-3),
    "softplus": (TAXONOMY["softplus"], F.softplus, 1.4e-3),
    "softplus(4)": (softplus(4.0), lambda x: F.softplus(x, 4.0, 200.0), 1.9e-4),
    "logsigmoid": (TAXONOMY["logsigmoid"], F.logsigmoid, 1.4e-3),
    "gelu": (TAXONOMY["gelu"], F.gelu, 2.4e-2),
    "gelu_tanh": (TAXONOMY["gelu_tanh"], ROWS["gelu_tanh"].f, 3.8e-2),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_default_instances_are_near_where_the_function_is_small(name):
    t, f, bound = RELATIVE[name]
    x = torch.logspace(-3, 1, 4001, dtype=torch.float64)
    x = torch.cat([-x, x])
    y = f(x)
    relative = ((t(x) - y) / y)[y.abs() >= 1e-3].abs().max().item()
    assert bound / 1.2 < relative <= bound  # the figure is the function's own, and no looser


@pytest.mark.parametrize(("key", "bound"), [("softsign", 7.6e-3), ("erf", 4.3e-6)])
def test_odd_rows_are_near_at_every_size(key, bound):
    x = torch.logspace(-6, 3, 9001, dtype=torch.float64)
    for z in (x, -x):
        y = ROWS[key].f(z)
        assert ((TAXONOMY[key](z) - y) / y).abs().max() <= bound


@pytest.mark.parametrize("alpha", [0.05, 1.0, 7.0])
def test_elu_of_any_alpha_needs_no_fit(alpha):
    def f(x):
        return F.elu(x, alpha)

    sup = measure(elu(alpha), f).sup
    # e^-13 / 4 of alpha, and the difference of slopes over what lies between 0 and the corner
    assert sup <= alpha * math.exp(-13) / 4 + abs(1 - alpha) * 16 / 2**22 + 1e-8
    z = torch.zeros(1, requires_grad=True)  # on the lower side, as torch has it
    slope = torch.autograd.grad(elu(alpha)(z).sum(), z)[0].item()
    assert slope == pytest.approx(alpha, rel=1e-3)  # rounding times the sharpness, 2**14
    x = (torch.cat([torch.linspace(-20, 20, 4001), torch.logspace(-3, 1, 500)])).requires_grad_()
    for t in (elu(alpha), celu(alpha)):
        z = x.detach().clone().requires_grad_()
        want = f(z) if t == elu(alpha) else F.celu(z, alpha)
        (g,), (h,) = (torch.autograd.grad(y.sum(), v) for y, v in ((t(x), x), (want, z)))
        smooth = x.abs() > 1e-3 * max(1, alpha)
        assert (g - h)[smooth].abs().max() <= 2e-5 * max(1, alpha)


def test_measure_sees_a_gate_that_is_sharper_than_its_grid():
    sharp = TG(1e6, 0, (0, 1), (0, 0))
    # mathematics: sup |x sigmoid(tau x) - relu(x)| is 0.27846 / tau, at tau x = 1.28; of a grid of
    # step 5e-4 only 0 comes near
    assert measure(sharp, F.relu).sup == pytest.approx(0.27846e-6, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [2, 3, 4, 5, 6, 7, 8])
def test_gelu_rows_keep_zero_at_zero(K, dtype):
    zero = torch.zeros(1, dtype=dtype)
    assert TAXONOMY[f"gelu_k{K}"](zero).item() == 0.0
    if K <= 5:
        assert TAXONOMY[f"gelu_tanh_k{K}"](zero).item() == 0.0


# In float32: the error that the row states, and six roundings (2^-24) of x; torch's own takes 5.6.
IN_FLOAT32 = {6: 1.33e-6, 7: 5.07e-7, 8: 2.48e-8}


@pytest.mark.parametrize("K", IN_FLOAT32)
def test_gelu_rows_reach_the_rounding_of_float32(K, step_by_step):
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.logspace(-6, 1, 2003)])
    off = (Activation(f"gelu_k{K}")(x).double() - F.gelu(x.double())).abs()
    with kernels.use("reference"):
        plain = (Activation(f"gelu_k{K}")(x).double() - F.gelu(x.double())).abs()
    bound = IN_FLOAT32[K] + 6 * 2**-24 * x.double().abs().clamp(min=1)
    assert (off <= bound).all()
    assert (plain <= bound).all()
    assert ROWS[f"gelu_k{K}"].sup == IN_FLOAT32[K]
    step_by_step("interpret_row.py", f"gelu_k{K}", 6)


def test_gelu_with_eight_branches_is_as_near_in_float32_as_torchs_own():
    x = torch.linspace(-12, 12, 1_000_003)
    exact = F.gelu(x.double())
    ours, theirs = ((y.double() - exact).abs().max() for y in (TAXONOMY["gelu_k8"](x), F.gelu(x)))
    assert ours <= 1.2 * theirs  # 9.6e-7 and 1.2e-6 with AVX-512; torch's erf is another elsewhere


def test_the_papers_figure_for_gelu_is_off_in_every_norm():
    error = measure(TAXONOMY["gelu_paper"], F.gelu)
    assert error.sup == pytest.approx(0.02033, rel=1e-3)
    assert error.rel_rms == pytest.approx(0.0106, rel=1e-2)
    assert min(error) > 0.003  # the paper: "<= 0.3 % element-wise"


def test_mish_is_exact_at_three_branches_and_not_with_product_gates():
    x = torch.linspace(-60, 60, 100_001, dtype=torch.float64)
    assert (TAXONOMY["mish"](x) - F.mish(x)).abs().max() <= 1.5e-14  # 2 ulp of 60
    assert ROWS["mish"].exact
    assert not ROWS["mish_k3_product"].exact


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "delta", "eps"),
    [(1, 2, 0, 0, 0), (-1, -1, 0, 0, 0), (0.5, -3, 0.7, 0.2, -1), (2, 0.25, -1, 0, 3)],
)
@pytest.mark.parametrize(
    "key",
    [
        *("relu", "hardtanh", "softshrink", "hardswish", "silu", "tanh"),
        *("mish", "gelu", "elu", "gelu_k3_product"),
    ],
)
def test_affine_maps_before_and_after_stay_in_the_family(key, alpha, beta, gamma, delta, eps):
    t = TAXONOMY[key]
    mapped = affine(t, alpha=alpha, beta=beta, gamma=gamma, delta=delta, eps=eps)
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    want = alpha * t(beta * x + gamma) + delta * x + eps
    torch.testing.assert_close(mapped(x), want, rtol=1e-12, atol=1e-12)
    assert mapped.K == t.K


def test_a_reversed_hard_gate_keeps_the_owner_of_its_threshold():
    step = TG(INF, 1, (0, 0), (0, 1))  # 1 above 1, and 0 at 1
    mirrored = affine(step, beta=-1)
    x = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    assert mirrored(x).tolist() == step(-x).tolist() == [1.0, 0.0, 0.0]


def test_families_made_by_a_parameter_agree_with_torch():
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    assert (softplus(2.5)(x) - F.softplus(x, beta=2.5)).abs().max() <= ROWS[
        "softplus"
    ].sup / 2.5 + 1e-9
    assert (celu(2.0)(x) - F.celu(x, 2.0)).abs().max() <= 2 * ROWS["elu"].sup * 1.01
    torch.testing.assert_close(swish(1.5)(x), x * torch.sigmoid(1.5 * x))


def test_family_is_read_off_the_branches():
    expected = {
        "multiplicative": ["relu", "leaky_relu", "silu", "gelu", "elu", "mish", "relu_squared"],
        "saturating": [
            "hardtanh",
            "relu6",
            "hardsigmoid",
            "hardtanh_clamp",
            "relu6_clamp",
            "dsilu",
        ],
        "constant": ["sigmoid", "tanh", "dsigmoid", "sigmoid_squared", "lecun_tanh"],
    }
    for word, keys in expected.items():
        assert {family(TAXONOMY[k]) for k in keys} == {word}


def test_family_of_a_layer_follows_its_learned_parameters():
    act = Activation("sigmoid", share="channel", channels=3, train=("s", "c"))
    assert family(act) == ["constant"] * 3
    with torch.no_grad():
        act.s[1, 2] = 0.05
    assert family(act) == ["constant", "constant", "multiplicative"]
    assert family(act, tol=0.1) == ["constant"] * 3
    assert family(Activation("tanh")) == "constant"


def test_table_2_has_every_row_of_the_paper_in_both_forms():
    assert len(TABLE2) == 13
    assert set(TABLE2) <= set(TAXONOMY)
    for name in ("hardtanh", "hardsigmoid", "relu6"):
        three, clamped = TAXONOMY[name], TAXONOMY[f"{name}_clamp"]
        assert (three.K, clamped.K) == (3, 2)
        assert three.clamp is None
        assert clamped.clamp is not None


def test_names_lead_to_instances_and_back():
    assert key_of("silu") == key_of("SiLU") == "silu"
    assert key_of("Leaky-ReLU") == "leaky_relu"
    assert name_of(swish(1.702)) == "quick_gelu"
    assert name_of(leaky_relu(0.37)) is None
    assert set(ROWS) == set(TAXONOMY)


def _theirs():
    """(name, function) of every activation that transformers, timm and torch have by a name."""
    from timm.layers.create_act import _ACT_FN_DEFAULT, _ACT_LAYER_DEFAULT
    from transformers.activations import ACT2FN

    found = [(name, ACT2FN[name]) for name in ACT2FN if name != "xielu"]  # a package of its own
    found += [(type(f).__name__, f) for _, f in found]
    found += [*_ACT_FN_DEFAULT.items(), *((name, f()) for name, f in _ACT_LAYER_DEFAULT.items())]
    modules = [getattr(nn, name) for name in nn.modules.activation.__all__]
    found += [(f"torch.nn.{f.__name__}", f()) for f in modules if f not in _WITH_ARGUMENTS]
    found += [(f"F.{name}", f) for name, f in vars(F).items() if name in _FUNCTIONS]
    return found


_WITH_ARGUMENTS = {nn.Threshold, nn.MultiheadAttention, nn.Softmax2d}
_FUNCTIONS = (
    *("celu", "elu", "elu_", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh"),
    *("leaky_relu", "logsigmoid", "mish", "relu", "relu_", "relu6", "rrelu", "selu", "sigmoid"),
    *("silu", "softplus", "softshrink", "tanh", "tanhshrink"),
)
_NOT_ROWS = {
    *("gelu_10", "ClippedGELUActivation", "laplace", "LaplaceActivation", "hard_mish"),
    *("sqrtsoftplus", "SqrtSoftplusActivation"),
    *(f"torch.nn.{name}" for name in ("Softmax", "Softmin", "LogSoftmax", "GLU")),
}


@pytest.mark.filterwarnings("ignore")  # of transformers, about itself
def test_names_of_torch_transformers_and_timm_mean_their_functions():
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    x = torch.linspace(-9, 9, 3001, dtype=torch.float64)
    theirs, refused = _theirs(), set()
    for name, f in theirs:
        try:
            row = ROWS[key_of(name)]
        except ValueError:
            refused.add(name)
            continue
        f = f.double().eval() if isinstance(f, nn.Module) else f
        with torch.no_grad():
            # Formulas of their own round otherwise; torch's softplus is x from 20 on.
            torch.testing.assert_close(row.f(x), f(x.clone()), rtol=0, atol=2e-7, msg=name)
    assert refused == _NOT_ROWS
    assert len(theirs) > 100
    assert key_of("swish") == "silu"


def test_what_is_said_of_names_without_a_row_is_so():
    from timm.layers.activations import hard_mish

    x = torch.linspace(-9, 9, 3001, dtype=torch.float64)
    for name, f in (
        ("hard_mish", hard_mish),
        ("laplace", lambda x: (1 + torch.erf((x - 0.707107) / 0.282095 / 2**0.5)) / 2),
    ):
        with pytest.raises(ValueError, match=f"^'{name}' has no instance: ") as caught:
            key_of(name)
        words = str(caught.value).partition("instance: ")[2].partition(" is it")[0]
        t = eval(words, {"TG": TG, "affine": affine, "TAXONOMY": TAXONOMY})
        bound = 1e-12 if name == "hard_mish" else ROWS["erf"].sup / 2 + 1e-5  # its digits printed
        assert (t(x) - f(x)).abs().max() < bound


MEANT = {"swich": "silu", "geluu": "gelu", "gelu_nwe": "gelu_tanh", "hard_swis": "hardswish"}
MEANT |= {"LeakyReL": "leaky_relu", "sigmod": "sigmoid", "tahn": "tanh", "softpluss": "softplus"}


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
def test_the_first_suggestion_is_what_was_meant(name, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        key_of(name)


@pytest.mark.parametrize("name", ["x*torch.tanh", "-relu", "LeakyReLU(0.2)", "", ".", "relu.6"])
def test_what_is_more_than_a_name_is_not_taken_for_one(name):
    with pytest.raises(ValueError, match="no activation"):
        key_of(name)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="no activation") as caught:
        key_of("sillu")
    assert str(caught.value).startswith(
        "no activation 'sillu' in the taxonomy; did you mean 'silu'"
    )
    with pytest.raises(ValueError, match="no slope at infinity") as caught:
        key_of("snake")
    assert str(caught.value).startswith("'snake' has no instance: x + sin(x)^2 has no slope")
    assert set(NOT_REPRESENTABLE) == {"snake", "sin"}


def test_affine_refuses_what_it_cannot_represent():
    for t, beta in ((TAXONOMY["silu"], 0), (TAXONOMY["relu6_clamp"], 2)):
        with pytest.raises(ValueError, match="affine: needs beta != 0"):
            affine(t, beta=beta)
