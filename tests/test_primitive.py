"""Eqs. 2-5: the gates against closed forms, float64 and finite differences."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from threshold_gating import Activation, kernels
from threshold_gating.instance import TG
from threshold_gating.primitive import blend, gated_linear, gates, straight_through
from threshold_gating.taxonomy import ROWS, TAXONOMY, affine

INF = math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
finite = st.floats(-20, 20, allow_subnormal=False)
EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 50.0, -50.0, 1e4, -1e4]


def extremes(dtype):
    top = torch.finfo(dtype).max
    return torch.tensor([*EXTREMES, top, -top, top / 2, -top / 3], dtype=dtype)


def parameters(K, group=(), own_tau=False, seed=0, dtype=torch.float64):
    """Random tensors (tau, theta, s, c) with K branches and the given group shape."""
    g = torch.Generator().manual_seed(seed)
    make = lambda n: torch.randn(n, *group, generator=g, dtype=dtype)  # noqa: E731
    tau = make(K - 1).abs() + 0.5
    theta = torch.cumsum(make(K - 1).abs() + 0.2, 0) - K / 2
    return (tau if own_tau else tau[0]), theta, make(K), make(K)


def direct(x, tau, theta, s, c, form):
    """Eq. 3 written down as the paper has it, naive and in float64."""
    taus = tau if tau.dim() == theta.dim() else tau.expand_as(theta)
    a = torch.sigmoid(taus * (x - theta))
    if form == "softmax":
        logits = torch.cumsum(torch.cat([torch.zeros_like(a[:1]), taus * (x - theta)]), 0)
        g = torch.exp(logits) / torch.exp(logits).sum(0)
    else:
        g = torch.cat([1 - a[:1], a[:-1] * (1 - a[1:]), a[-1:]])
        g = g / g.sum(0)
    return (g * (s * x + c)).sum(0)


@pytest.mark.parametrize("form", ["softmax", "product"])
@pytest.mark.parametrize("own_tau", [False, True])
@pytest.mark.parametrize("K", [2, 3, 4, 5, 8])
def test_blend_is_equation_3_written_down(K, own_tau, form):
    x = torch.linspace(-6, 6, 63, dtype=torch.float64)
    p = [w.unsqueeze(-1) for w in parameters(K, own_tau=own_tau)]
    p[0] = p[0] if own_tau else p[0].squeeze(-1)
    expected = direct(x, *p, form)
    # 63 sums of K products of order 10 in float64: a few ulp of 10
    torch.testing.assert_close(blend(x, *p, form=form), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["softmax", "product"])
@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_gates_sum_to_one_for_every_finite_input(K, form, dtype):
    theta = tuple(float(k) - K / 2 for k in range(K - 1))
    g = gates(extremes(dtype), 1.7, theta, form=form)
    assert g.shape == (K, len(extremes(dtype)))
    assert bool((g >= 0).all())
    assert bool((g <= 1).all())
    # K gates, each rounded once: 4 eps covers K <= 8
    assert (g.double().sum(0) - 1).abs().max() <= 4 * torch.finfo(dtype).eps


@settings(max_examples=60, deadline=None)
@given(
    x=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5),
    tau=st.floats(1e-3, 1e3),
    theta=st.lists(finite, min_size=1, max_size=6).map(sorted),
    form=st.sampled_from(["softmax", "product"]),
    hard=st.booleans(),
)
def test_gates_are_a_partition_of_unity(x, tau, theta, form, hard):
    z = torch.tensor(x, dtype=torch.float64)
    g = gates(z, INF if hard else tau, tuple(theta), form=form)
    assert not g.isnan().any()
    assert (g.sum(0) - 1).abs().max() <= 4 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", ["hardswish", "relu_squared", "star_relu"])
def test_a_parabola_that_is_not_taken_leaves_no_nan_at_infinity(name):
    """hardswish is a straight line there, and so is its gradient."""
    x = torch.tensor([-INF, INF], requires_grad=True)
    (grad,) = torch.autograd.grad(TAXONOMY[name](x).sum(), x)
    assert grad.tolist() == [0.0, 1.0 if name == "hardswish" else INF]


@pytest.mark.parametrize("K", [2, 3, 5])
@pytest.mark.parametrize("end", [-INF, INF])
def test_the_slope_of_a_hard_branch_that_is_not_taken_has_a_gradient_of_zero_at_infinity(end, K):
    theta = tuple(range(K - 1))
    s = torch.arange(1.0, K + 1, requires_grad=True)
    (grad,) = torch.autograd.grad(blend(torch.tensor([end]), INF, theta, s, (0.0,) * K), s)
    taken = 0 if end < 0 else K - 1
    assert grad.tolist() == [end if k == taken else 0.0 for k in range(K)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["softmax", "product"])
@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_no_finite_input_gives_nan(K, form, dtype):
    tau, theta, s, c = (tuple(w.tolist()) for w in parameters(K, own_tau=True))
    y = blend(extremes(dtype), tau, theta, s, c, form=form)
    assert not y.isnan().any()
    x = extremes(dtype).requires_grad_()
    (grad,) = torch.autograd.grad(blend(x, tau, theta, s, c, form=form).sum(), x)
    assert not grad.isnan().any()


def test_a_saturated_gate_meets_no_overflowed_branch():
    x = torch.tensor([3e38, -3e38])
    steep = blend(x, 1.0, (0.0,), (2.0, 0.5), (0.0, 0.0))  # 2 x overflows where its gate is 0
    torch.testing.assert_close(steep, torch.tensor([1.5e38, -INF]))
    lisht = blend(x, 2.0, (0.0,), (-1.0, 1.0), (0.0, 0.0))  # the branches are 6e38 apart
    torch.testing.assert_close(lisht, torch.tensor([3e38, 3e38]))


@pytest.mark.parametrize("form", ["softmax", "product"])
@pytest.mark.parametrize("own_tau", [False, True])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_every_gradient_passes_gradcheck_twice(K, own_tau, form):
    x = torch.tensor([[-2.0, -0.3], [0.0, 1.7], [0.4, 9.0]], dtype=torch.float64)
    tau, theta, s, c = parameters(K, (2,), own_tau)
    theta[0, 0] = 0.0  # an element exactly at a threshold
    inputs = [w.requires_grad_() for w in (x, tau, theta, s, c)]

    def f(*p):
        return blend(*p, form=form)

    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("K", [2, 3, 4])
def test_gradients_are_the_covariances_of_the_branches_under_the_gates(K):
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)[:, None].requires_grad_()
    tau, theta, s, c = (w.requires_grad_() for w in parameters(K, (1,), own_tau=True))
    y = blend(x, tau, theta, s, c)
    dx, dtau, dtheta, ds, dc = torch.autograd.grad(y.sum(), (x, tau, theta, s, c))
    with torch.no_grad():
        g = gates(x, tau, theta)
        line = s[:, None] * x + c[:, None]

        def cov(w):
            return (g * w * line).sum(0) - (g * w).sum(0) * (g * line).sum(0)

        above = [torch.stack([torch.full_like(x, k > m) for k in range(K)]) for m in range(K - 1)]
        sharp = sum(tau[m] * above[m] for m in range(K - 1))
        expected = (
            (g * s[:, None]).sum(0) + cov(sharp),
            torch.stack([((x - theta[m]) * cov(above[m])).sum(0) for m in range(K - 1)]),
            torch.stack([(-tau[m] * cov(above[m])).sum(0) for m in range(K - 1)]),
            (g * x).sum(1),
            g.sum(1),
        )
    for have, want in zip((dx, dtau, dtheta, ds, dc), expected, strict=True):
        torch.testing.assert_close(
            have, want, rtol=1e-12, atol=1e-12
        )  # 41 float64 terms of order 10


@pytest.mark.parametrize(
    ("t", "f"),
    [
        (TG(1, 0, (0, 0), (0, 1)), lambda x: 1 / (1 + mpmath.exp(-x))),
        (TG(2, 0, (0, 0), (-1, 1)), mpmath.tanh),
        (TG(1, 0, (0, 1), (0, 0)), lambda x: x / (1 + mpmath.exp(-x))),
        (
            TG(1, (0, math.log(2)), (0, 1, 1), (0, 0, 0)),
            lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x))),
        ),
    ],
    ids=["sigmoid", "tanh", "silu", "mish"],
)
@pytest.mark.parametrize("at", [0.0, -1.3])
def test_derivatives_up_to_the_third_agree_with_mpmath(t, f, at):
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    have = [t(x)]
    for _ in range(3):
        have.append(torch.autograd.grad(have[-1], x, create_graph=True)[0])
    with mpmath.workdps(40):
        want = [float(mpmath.diff(f, at, n)) for n in range(4)]
    assert [float(h.detach()) for h in have] == pytest.approx(want, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hard_gates_are_indicators_that_respect_the_owner(dtype):
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, math.nan], dtype=dtype)
    low = gates(x, INF, (-1.0, 1.0))
    outer = gates(x, INF, (-1.0, 1.0), owner=("lo", "hi"))
    assert low[:, :5].argmax(0).tolist() == [0, 0, 1, 1, 2]
    assert outer[:, :5].argmax(0).tolist() == [0, 0, 1, 2, 2]
    assert low[:, 5].isnan().all()


def test_a_hard_gate_is_not_the_limit_of_a_large_tau_in_the_sup_norm():
    x = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    for tau in (1e1, 1e2, 1e3):
        gap = (gates(x, tau, (0.0,))[1] - (x > 0).double()).abs().max()
        assert gap == pytest.approx(0.5)
        silu_to_relu = (blend(x, tau, (0.0,), (0.0, 1.0), (0.0, 0.0)) - F.relu(x)).abs().max()
        assert silu_to_relu == pytest.approx(0.2784645427609 / tau, rel=1e-4)  # grid of 2e-5


def test_parameters_broadcast_per_layer_channel_and_neuron():
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    for group in [(), (4, 1, 1), (4, 5, 6), (1, 6)]:
        tau, theta, s, c = parameters(3, group)
        y = blend(x, tau, theta, s, c)
        assert y.shape == x.shape
        if group:
            full = [
                w.expand(*w.shape[: w.dim() - len(group)], 4, 5, 6)
                if len(group) == 3
                else w[..., None, :, :].expand(*w.shape[: w.dim() - 2], 4, 5, 6)
                for w in (tau, theta, s, c)
            ]
            one = blend(x[1, 2, 3, 4], *(w[..., 2, 3, 4] for w in full))
        else:
            one = blend(x[1, 2, 3, 4], tau, theta, s, c)
        torch.testing.assert_close(y[1, 2, 3, 4], one, rtol=0, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), K=st.integers(2, 4), own_tau=st.booleans())
def test_parameters_broadcast_as_torch_broadcasts(data, K, own_tau):
    """A value for each parameter and element, by torch's own expansion, gives the same."""
    full = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))

    def shrunk():
        kept = tuple(data.draw(st.sampled_from((1, n))) for n in full)
        return kept[data.draw(st.integers(0, len(full) - 1)) :]

    x = torch.randn(full, dtype=torch.float64)
    group = shrunk()
    tau, theta, s, c = parameters(K, group, own_tau)
    whole = [
        w.view(*w.shape[: w.dim() - len(group)], *(1,) * (len(full) - len(group)), *group).expand(
            *w.shape[: w.dim() - len(group)], *full
        )
        for w in (tau, theta, s, c)
    ]
    torch.testing.assert_close(blend(x, tau, theta, s, c), blend(x, *whole), rtol=1e-14, atol=1e-14)
    assert gates(x, tau, theta).shape == (K, *full)


def test_numbers_and_tensors_give_the_same_function():
    x = torch.randn(1003, dtype=torch.float64)
    for K in (2, 3, 5):
        p = parameters(K, own_tau=True)
        numbers = [tuple(w.tolist()) for w in p]
        torch.testing.assert_close(blend(x, *p), blend(x, *numbers), rtol=1e-14, atol=1e-14)


def test_centred_evaluation_is_the_same_function_with_more_digits():
    x = torch.tensor([1e-6, -1e-5, 0.3, 8.0])
    tau, theta = torch.tensor(2.0), torch.zeros(1)
    s, c = torch.zeros(2), torch.tensor([-1.0, 1.0])
    plain, centred = blend(x, tau, theta, s, c), blend(x, tau, theta, s, c, centred=True)
    assert torch.equal(centred, torch.tanh(x))
    torch.testing.assert_close(plain, centred, rtol=0, atol=1e-7)
    assert not torch.equal(plain, centred)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_input_gates_are_the_gated_linear_units(dtype):
    a, b = torch.randn(2, 4, 1003).to(dtype)
    silu, relu = TG(1, 0, (0, 1), (0, 0)), TG(INF, 0, (0, 1), (0, 0))
    # One rounding of the product instead of two: 2 units of the dtype's rounding.
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(silu(b, a), F.glu(torch.cat([a, b]), 0), **close)
    torch.testing.assert_close(silu(b, (a.float() * b.float())), (F.silu(b) * a).to(dtype), **close)
    torch.testing.assert_close(relu(b, a * b), F.relu(b) * a, **close)


def test_geglu_inherits_the_error_of_gelu_times_the_other_input():
    a, b = torch.randn(2, 1003, dtype=torch.float64)
    error = (TAXONOMY["gelu"](b, a * b) - F.gelu(b) * a).abs()
    assert (error <= ROWS["gelu"].sup * 1.01 * a.abs()).all()  # sup is stated to three digits


@pytest.mark.parametrize("dtype", DTYPES)
def test_prelu_is_a_hard_gate_with_a_slope_per_channel(dtype):
    x, slope = torch.randn(5, 7, 9).to(dtype), torch.randn(7).to(dtype)
    x[0, 0, :3] = torch.tensor([0.0, math.nan, INF])

    def gated(x, slope):
        return blend(x, INF, (0.0,), (slope.view(7, 1), 1.0), (0.0, 0.0))

    assert torch.equal(gated(x, slope).nan_to_num(9.0), F.prelu(x, slope).nan_to_num(9.0))
    x, wanted = x.nan_to_num(), []
    for f in (gated, F.prelu):
        inputs = x.clone().requires_grad_(), slope.clone().requires_grad_()
        wanted.append(torch.autograd.grad(f(*inputs).sum(), inputs))
    assert torch.equal(wanted[0][0], wanted[1][0])
    # sums of 45 terms in another order; torch rounds them in the dtype
    close = {"rtol": 50 * torch.finfo(dtype).eps, "atol": 50 * torch.finfo(dtype).eps}
    torch.testing.assert_close(wanted[0][1], wanted[1][1], **close)


def test_the_maximum_is_a_hard_gate_with_an_input_for_each_branch():
    a, b = torch.randn(2, 1003)
    pick = TG(INF, 0, (1, 1), (0, 0))
    assert torch.equal(pick(a - b, (b, a)), torch.maximum(a, b))
    assert pick(torch.tensor([math.nan]), (b[:1], a[:1])).isnan().all()


def test_soft_gates_take_an_input_for_each_branch():
    x, a, b = torch.randn(3, 63, dtype=torch.float64)
    g = gates(x, 1.5, (0.2,))
    have = blend(x, 1.5, (0.2,), (2.0, -1.0), (0.5, 0.0), v=(a, b))
    torch.testing.assert_close(have, g[0] * (2 * a + 0.5) - g[1] * b)


def test_quadratic_branches_blend_without_overflow():
    x = torch.tensor([-1e30, -1.0, 0.0, 2.0, 1e10])
    have = blend(x, 1.0, (0.0,), (0.0, 0.0), (0.0, 0.0), q=(0.0, 1.0))
    torch.testing.assert_close(have, torch.tensor([0.0, 0.26894143, 0.0, 3.5231884, 1e20]))


def test_clamp_has_the_gradient_of_hardtanh_at_its_bounds():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, math.nan], requires_grad=True)
    y = blend(x, INF, (0.0,), (1.0, 1.0), (0.0, 0.0), clamp=(-1.0, 1.0))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y[:5].tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]
    assert y[5].isnan()
    assert grad[:5].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(0,), (), (1,), (63,), (3, 0, 2)])
def test_empty_and_zero_dimensional_inputs_keep_their_shape(shape):
    x = torch.randn(shape)
    for tau in (1.0, INF):
        assert blend(x, tau, (0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)).shape == shape
        assert gates(x, tau, (0.0, 1.0)).shape == (3, *shape)


def test_strided_and_channels_last_inputs_give_the_same_and_keep_their_layout():
    x = torch.randn(2, 8, 5, 6)
    last = x.to(memory_format=torch.channels_last)
    for K in (2, 3, 5):
        tau, theta, s, c = parameters(K, (8, 1, 1), dtype=torch.float32)
        y = blend(last, tau, theta, s, c)
        assert y.is_contiguous(memory_format=torch.channels_last)
        # torch's sigmoid differs by an ulp between layouts, so equality is to rounding
        torch.testing.assert_close(y, blend(x, tau, theta, s, c))
        hard = blend(last, INF, (0.0,), s[:2], c[:2])
        assert hard.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        blend(x[..., ::2], 1.0, (0.0,), (0.0, 1.0), (0.0, 0.0)), F.silu(x)[..., ::2]
    )


def test_vmap_and_functional_gradients_agree_with_the_loop():
    x = torch.randn(5, 7, dtype=torch.float64)
    tau, theta, s, c = parameters(3)

    def f(row):
        return blend(row, tau, theta, s, c).sum()

    per_sample = torch.func.vmap(torch.func.grad(f))(x)
    loop = torch.stack([torch.func.grad(f)(row) for row in x])
    torch.testing.assert_close(per_sample, loop)
    _, tangent = torch.func.jvp(lambda z: blend(z, tau, theta, s, c), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, per_sample)


def test_autocast_leaves_the_gates_in_float32():
    x = torch.randn(64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for K in (2, 3):
            tau, theta, s, c = parameters(K, dtype=torch.float32)
            y = blend(x, tau, theta, s, c)
            assert y.dtype == torch.float32
            torch.testing.assert_close(
                y, direct(x, *(w.view(-1, 1, 1) for w in (tau, theta, s, c)), "softmax")
            )


@pytest.mark.parametrize("K", [2, 3, 4])
def test_dense_layers_absorb_the_activation(K):
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    w, b = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    tau, theta, s, c = parameters(K, (7,))
    expected = F.linear(blend(x, tau, theta, s, c), w, b)
    weight, const = w[:, None] * s, w[:, None] * c  # Eq. 5, (O, K, I)
    shared = gated_linear(x, tau, theta, weight, const, b)
    torch.testing.assert_close(shared, expected)
    synapse = gated_linear(
        x, tau.expand(4, 7), theta[:, None].expand(K - 1, 4, 7), weight, const, b
    )
    torch.testing.assert_close(synapse, expected)
    assert torch.autograd.gradcheck(
        lambda *p: gated_linear(x[0, :2], *p),
        [w.clone().requires_grad_() for w in (tau, theta, weight, const, b)],
    )


def test_gates_per_synapse_are_evaluated_per_synapse():
    x = torch.randn(2, 3, dtype=torch.float64)
    theta, weight = (
        torch.randn(1, 4, 3, dtype=torch.float64),
        torch.randn(4, 2, 3, dtype=torch.float64),
    )
    have = gated_linear(x, 2.0, theta, weight)
    for o in range(4):
        g = gates(x, 2.0, theta[:, o])
        torch.testing.assert_close(
            have[:, o], sum((g[k] * x * weight[o, k]).sum(-1) for k in (0, 1))
        )


MESSAGES = [
    (TypeError, lambda x: gates(x.int(), 1.0, (0.0,)), "gates need a real floating-point tensor, got torch.int32; convert it first."),
    (TypeError, lambda x: blend(x.to(torch.complex64), 1.0, 0.0, (0, 1), (0, 0)), "gates need a real floating-point tensor, got torch.complex64; convert it first."),
    (TypeError, lambda x: gates([1.0], 1.0, (0.0,)), "gates need a real floating-point tensor, got list; convert it first."),
    (ValueError, lambda x: gates(x, 0.0, (0.0,)), "tau must be positive (inf for a hard gate); got 0.0."),
    (ValueError, lambda x: gates(x, math.nan, (0.0,)), "tau must be positive (inf for a hard gate); got nan."),
    (ValueError, lambda x: gates(x, torch.tensor(INF), (0.0,)), "tau must be positive; got a tensor with inf. For hard gates give the number float('inf'); for a sharpness that is learned give tau0 * rho.exp()."),
    (ValueError, lambda x: gates(x, [torch.tensor(1.0), torch.tensor(-2.0)], (0.0, 1.0)), "tau must be positive; got a tensor with -2.0. For hard gates give the number float('inf'); for a sharpness that is learned give tau0 * rho.exp()."),
    (ValueError, lambda x: blend(x, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), 0.0, (0, 1), (0, 0)), "tau must be positive; got a tensor with 0.0. For hard gates give the number float('inf'); for a sharpness that is learned give tau0 * rho.exp()."),
    (ValueError, lambda x: gates(x, INF, (math.nan,)), "theta must be finite numbers or tensors; got (nan,)."),
    (ValueError, lambda x: blend(x, INF, (0.0, math.nan), (0, 1, 2), (0, 0, 0)), "theta must be finite numbers or tensors; got (0.0, nan)."),
    (ValueError, lambda x: blend(x, 1.0, 0.0, (0.0, INF), (0, 0)), "s must be finite numbers or tensors; got (0.0, inf)."),
    (ValueError, lambda x: blend(x, 1.0, 0.0, (0, 1), (0.0, 0.0), clamp=(0.0, math.nan)), "clamp must be finite numbers or tensors; got (0.0, nan)."),
    (ValueError, lambda x: gates(x, (1.0, INF), (0.0, 1.0)), "tau is inf (hard gates) at every threshold or at none; got (1.0, inf)."),
    (ValueError, lambda x: gates(x, 1.0, (0.0,), form="sum"), "form is 'softmax' or 'product'; got 'sum'."),
    (ValueError, lambda x: gates(x, INF, (1.0, 0.0)), "hard and product-form gates need non-decreasing thresholds; got theta=(1.0, 0.0)."),
    (ValueError, lambda x: gates(x, INF, (0.0,), owner=("low",)), "owner is 'lo' or 'hi' for each of the 1 thresholds; got ('low',)."),
    (ValueError, lambda x: gates(x, (1.0, 2.0), (0.0,)), "tau needs 1 entries along its first axis to fit the thresholds; got 2."),
    (ValueError, lambda x: blend(x, 1.0, (0.0,), (0.0,), (0.0, 0.0)), "s needs 2 entries along its first axis to fit the thresholds; got 1."),
    (ValueError, lambda x: blend(x, 1.0, (0.0,), (0.0, 1.0), (0.0, 0.0), v=(x,)), "v is one tensor or one for each of the K = 2 branches; got 1."),
    (ValueError, lambda x: gated_linear(x, 1.0, (0.0,), torch.ones(4, 3, 5)), "gated_linear: 1 thresholds and x of shape (5,) need a weight of shape (O, 2, 5), that is (O, K, I); got (4, 3, 5)."),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(error, call, message):
    with pytest.raises(error) as caught:
        call(torch.zeros(5))
    assert str(caught.value) == message


def test_a_slope_of_zero_on_both_sides_meets_no_infinity():
    x = torch.tensor([-math.inf, 0.0, math.inf])
    assert blend(x, 2.0, (0.0,), (0.0, 0.0), (-1.0, 1.0)).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.compile
@pytest.mark.parametrize("key", ["silu", "tanh", "mish"])  # a sigmoid, about the midpoint, K = 3
def test_soft_gates_are_traced_whole_with_their_derivatives(key):
    """Dynamo reads the backward of each function, and refuses one that calls another's."""
    t, x = TAXONOMY[key], torch.randn(6, requires_grad=True)
    torch._dynamo.reset()
    have, want = torch.compile(t, fullgraph=True, backend="eager")(x), t(x)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (have, want)))


class Gated(torch.nn.Module):
    """An instance at x or at -x, its numbers as tensors, which a converted network holds."""

    def __init__(self, t, mirrored):
        super().__init__()
        for name, sign in (("tau", 1), ("theta", -1), ("s", -1), ("c", 1)):
            row = torch.tensor(getattr(t, name))
            self.register_buffer(name, sign * row.flip(0) if mirrored else row)

    def forward(self, x):
        return blend(x, self.tau, self.theta, self.s, self.c)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("key", ["selu", "elu"])
def test_the_gradient_of_an_exported_gate_keeps_its_digits_however_sharp_it_is(key, mirrored):
    net = Gated(TAXONOMY[key], mirrored)
    x = torch.cat([torch.linspace(-3, 3, 121), net.theta]).requires_grad_()
    graph = torch.export.export(net, (x.detach(),), strict=False).module()
    want, have = (torch.autograd.grad(f(x).sum(), x)[0] for f in (net, graph))
    # the same products in another order; a tau of 4e6 times what did not cancel was 0.25
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tau", [INF, -1.0, 0.0, math.nan])
def test_a_tensor_tau_that_nobody_may_look_at_gives_nan(tau):
    def run(x, tau):
        return blend(x, tau, (0.0, 1.0), (0.0, 1.0, 2.0), (0.0, 0.0, 0.0))

    x, given = torch.linspace(-3, 3, 7), torch.tensor([tau, 2.0])
    y = torch.vmap(run, in_dims=(None, 0))(x, given)
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], run(x, given[1]))


def test_a_hard_threshold_that_is_nan_is_nowhere():
    theta = torch.tensor([[0.0, math.nan]])
    x = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    y = blend(x, INF, theta, (0.0, 0.0), (3.0, 4.0))
    assert y[:, 0].tolist() == [3.0, 4.0]
    assert y[:, 1].isnan().all()
    g = gates(x, INF, theta)
    assert g[..., 0].sum(0).tolist() == [1.0, 1.0]
    assert g[..., 1].isnan().all()


@pytest.mark.parametrize("t", [TG(1.702, (-8.4992, 0.0150), (58.2, -3e37, -1.0), (-1.0, 0.0, 0.0)), TG(1.0, (0.0,), (-3e38, 3e38), (3e38, -3e38)), TG(0.001, (0.0,), (0.0, 3e37), (0.0, 0.0))])  # fmt: skip
def test_slopes_that_overflow_before_a_gate_makes_them_small_do_not(t):
    x = torch.tensor([-300.0, -2.209, -1e-3, 0.0, 1e-3, 2.0, 300.0], requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, want = t(x), t(wide)
    pairs = (
        (y, want),
        (torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(want.sum(), wide)[0]),
    )
    for have, truth in pairs:
        # rounded once from float64
        torch.testing.assert_close(have, truth.float(), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("at", [INF, -INF])
def test_a_jump_at_an_infinite_threshold_has_no_gradient_and_keeps_its_value(at):
    x, theta = torch.tensor([-INF, -1.0, 1.0, INF]), torch.tensor(at, requires_grad=True)
    y = blend(x, INF, [theta], (0.0, 0.0), (3.0, 4.0))
    have = straight_through(x, y, [theta], (0.0, 1.0), (3.0, INF))
    assert torch.equal(have, y)
    assert torch.autograd.grad(have.sum(), theta)[0] == 0


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_threshold_jumps_by_what_branches_of_another_input_differ(backend):
    act = Activation(TG(INF, 0.0, (0.5, 2.0), (0.25, 0.25)), train=("theta",)).double()
    x, v = torch.tensor([[0.1, -0.2, 0.4], [3.0, -10.0, 7.0]]).double()
    with kernels.use(backend):
        kernels.blend(x, act._structure, act.tensors(), (), v=v).sum().backward()
    step = torch.sigmoid(4 * x)
    slope = torch.where(x > 0, 2.0, 0.5)  # constants are anchored at the threshold
    want = -(slope + 4 * step * (1 - step) * 1.5 * v).sum()
    torch.testing.assert_close(act.dtheta.grad.flatten(), want.view(1).to(act.dtheta.dtype))


CANCELLING = [
    TAXONOMY["tanhshrink"],
    affine(TAXONOMY["tanhshrink"], alpha=0.7, beta=1.3, eps=0.25),
    affine(TAXONOMY["tanhshrink"], alpha=30.0, beta=1 / 30),
]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("t", CANCELLING)
def test_a_gradient_that_cancels_is_off_by_roundings_of_the_largest_slope(t, backend):
    x = torch.tensor([0.0, 1e-28, 1e-4, 0.01, -0.01, 0.3, 3.0])
    dy = torch.tensor([1.0, 0.3, -0.7, 1.1, 0.9, -1.3, 0.1])
    slope = (t.s[0], t.tau * (t.c[1] - t.c[0]) / 4)  # s + tau g0 g1 (c1 - c0), and 4 g0 g1 <= 1
    swing = torch.tanh(t.tau / 2 * x.double())
    want = dy * (sum(slope) - slope[1] * swing**2)  # (1 - swing) (1 + swing) is 4 g0 g1
    act = Activation(t)
    with kernels.use(backend):
        start = x.clone().requires_grad_()
        have = torch.autograd.grad((act(start) * dy).sum(), start)[0]
    # s, tau, c1 - c0, two gates, their product, times dy and the sum: 8 roundings of eps / 2 each
    bound = 4 * torch.finfo(torch.float32).eps * max(map(abs, slope))
    assert ((have - want).abs() <= bound * dy.abs()).all()
