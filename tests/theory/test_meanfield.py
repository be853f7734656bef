"""Mean-field figures against test vectors, closed forms and measured networks."""

import math

import pytest
import torch
import torch.nn.functional as F

from threshold_gating import TG
from threshold_gating.theory.meanfield import (
    correlation_map,
    edge_of_chaos,
    measured_correlations,
    moments,
    xi,
)

# (phi, q): E[phi'^2], E[phi''^2], sigma_w, sigma_b^2, beta_q, chi_q, as printed by an independent
# computation; beta and chi are None where there is no edge.
EDGES = [
    (torch.tanh, 0.5, 0.59243, 0.32432, 1.299, 0.0380, 7.31, 0.548),
    (torch.tanh, 1.0, 0.46440, 0.30020, 1.467, 0.1510, 3.09, 0.391),
    (torch.erf, 0.5, 0.73511, 0.49007, 1.166, 0.0466, 6.00, 0.500),
    (F.gelu, 0.5, 0.40725, 0.35872, 1.567, 0.0345, 4.54, 1.100),
    (F.gelu, 1.0, 0.45585, 0.27566, 1.481, 0.0672, 3.31, 1.067),
    (F.silu, 0.5, 0.33471, 0.17652, 1.728, 0.0262, 7.58, 1.093),
    (F.silu, 1.0, 0.37948, 0.14383, 1.623, 0.0625, 5.28, 1.099),
    (F.mish, 1.0, 0.47908, 0.19688, 1.445, 0.0558, 4.87, 1.016),
    (F.elu, 1.0, 0.66810, 0.16810, 1.223, 0.0347, 7.95, 0.860),
    (torch.sigmoid, 1.0, 0.04484, 0.00474, 4.723, -5.54, None, None),
    (F.softplus, 1.0, 0.29338, 0.04484, 1.846, -2.14, None, None),
]


@pytest.mark.parametrize(
    ("f", "q", "slope", "curvature", "sigma_w", "sigma_b2", "beta", "chi_q"),
    EDGES,
    ids=lambda v: getattr(v, "__name__", None),
)
def test_edge_of_chaos_to_the_printed_digits(
    f, q, slope, curvature, sigma_w, sigma_b2, beta, chi_q
):
    edge = edge_of_chaos(f, q)
    assert edge.moments.slope == pytest.approx(slope, abs=5.1e-6)
    assert edge.moments.curvature == pytest.approx(curvature, abs=5.1e-6)
    assert edge.sigma_w == pytest.approx(sigma_w, abs=5.1e-4)
    assert edge.chi_1 == pytest.approx(1, abs=1e-12)
    if beta is None:
        assert edge.sigma_b2 == pytest.approx(sigma_b2, abs=5.1e-3)
        assert (edge.valid, edge.beta, edge.chi_q) == (False, None, None)
    else:
        assert edge.sigma_b2 == pytest.approx(sigma_b2, abs=5.1e-5)
        assert edge.valid
        assert edge.beta == pytest.approx(beta, abs=5.1e-3)
        assert edge.chi_q == pytest.approx(chi_q, abs=5.1e-4)


@pytest.mark.parametrize("q", [0.01, 0.3, 1.0, 7.0, 400.0])
def test_moments_have_their_closed_forms(q):
    relu = moments(F.relu, q)
    assert (relu.value, relu.slope, relu.growth) == pytest.approx((q / 2, 0.5, 0.5), rel=1e-11)
    assert relu.curvature == math.inf
    erf = moments(torch.erf, q)
    closed = [
        2 / math.pi * math.asin(2 * q / (1 + 2 * q)),
        4 / math.pi / math.sqrt(1 + 4 * q),
        16 / math.pi * q / (1 + 4 * q) ** 1.5,
        2 / math.pi * 2 / (1 + 2 * q) / math.sqrt(1 + 4 * q),  # the derivative of the first
    ]
    assert [erf.value, erf.slope, erf.curvature, erf.growth] == pytest.approx(closed, rel=1e-9)
    # phi''^2 of ELU is exp(2x) below 0 and jumps there
    elu = math.exp(2 * q) * 0.5 * math.erfc(2 * math.sqrt(q / 2)) if q < 100 else None
    if elu is not None:
        assert moments(F.elu, q).curvature == pytest.approx(elu, rel=1e-9)


@pytest.mark.parametrize("f", [torch.tanh, F.gelu, F.silu, F.mish, torch.sigmoid])
def test_moments_agree_with_gauss_hermite_on_200_nodes(f):
    n = torch.arange(1, 200, dtype=torch.float64)
    nodes, vectors = torch.linalg.eigh(torch.diag(n.sqrt(), -1))
    x = nodes.requires_grad_()
    (slope,) = torch.autograd.grad(f(x).sum(), x)
    weight = vectors[0] ** 2
    found = moments(f, 1.0)
    # 1e-7: what 200 Hermite nodes leave of tanh, whose poles are near
    assert found.value == pytest.approx((weight * f(x) ** 2).sum().item(), rel=1e-7)
    assert found.slope == pytest.approx((weight * slope**2).sum().item(), rel=1e-7)


def test_moments_about_another_mean():
    m = moments(torch.clone, 2.0, mean=3.0)
    assert (m.value, m.slope, m.curvature) == pytest.approx((11, 1, 0), abs=1e-10)


def test_steep_functions_are_resolved():
    """tanh(100 x) against its own scaling: the figures of tanh at q = 1e4."""
    steep, plain = moments(lambda x: torch.tanh(100 * x), 1.0), moments(torch.tanh, 1e4)
    assert steep.value == pytest.approx(plain.value, rel=1e-9)
    assert steep.slope == pytest.approx(1e4 * plain.slope, rel=1e-9)
    assert steep.curvature == pytest.approx(1e8 * plain.curvature, rel=1e-9)


def test_a_step_has_no_edge_of_chaos():
    edge = edge_of_chaos(torch.sign, 1.0)
    assert edge.moments.slope == math.inf
    assert not edge.valid


def test_a_constant_has_no_edge_of_chaos():
    edge = edge_of_chaos(lambda x: torch.full_like(x, 3.0), 1.0)
    assert (edge.moments.slope, edge.moments.curvature) == (0.0, 0.0)
    assert not edge.valid


def test_a_variance_must_be_positive():
    with pytest.raises(ValueError, match=r"moments: the variance q must be positive; got 0\.0"):
        moments(torch.tanh, 0.0)


@pytest.mark.parametrize("f", [torch.sigmoid, F.softplus])
@pytest.mark.parametrize("q", [0.05, 0.2, 1.0, 3.0, 8.0])
def test_sigmoid_and_softplus_have_no_edge_at_any_variance(f, q):
    assert not edge_of_chaos(f, q).valid


def test_rescaling_the_input_changes_kappa_and_nothing_else():
    """tanh(ax)/a at q/a^2: kappa is 2 a^2, sigma_w, beta and chi_q are the same."""
    edges = [edge_of_chaos(lambda x, a=a: torch.tanh(a * x) / a, 0.5 / a**2) for a in (0.5, 1, 2)]
    for figure in ("sigma_w", "beta", "chi_q"):
        values = [getattr(e, figure) for e in edges]
        assert values == pytest.approx([values[1]] * 3, rel=1e-9)
    assert edges[1].beta == pytest.approx(7.307, abs=5e-4)


@pytest.mark.parametrize(
    ("f", "chi_q"),
    [(torch.tanh, 0.55), (torch.erf, 0.50), (F.elu, 0.87), (F.silu, 1.09), (F.gelu, 1.10)],
)
def test_chi_q_is_the_slope_of_the_variance_map(f, chi_q):
    edge, h = edge_of_chaos(f, 0.5), 1e-4
    maps = [edge.sigma_w**2 * moments(f, 0.5 + d).value for d in (-h, h)]
    assert edge.chi_q == pytest.approx((maps[1] - maps[0]) / (2 * h), rel=1e-6)
    assert edge.chi_q == pytest.approx(chi_q, abs=5.1e-3)


def _relu_kernel(c):
    return (math.sqrt(1 - c**2) + (math.pi - math.acos(c)) * c) / math.pi


@pytest.mark.parametrize("c", [-0.5, 0.0, 0.3, 0.9, 0.99])
def test_correlation_maps_have_their_closed_forms(c):
    relu = correlation_map(F.relu, 1.0, math.sqrt(2), 0.0)
    assert relu(c) == pytest.approx(_relu_kernel(c), abs=1e-9)
    erf = correlation_map(torch.erf, 0.5, 1.2, 0.1)
    kernel = [0.1 + 1.44 * 2 / math.pi * math.asin(0.5 * r) for r in (c, 1.0)]
    assert erf(c) == pytest.approx(kernel[0] / kernel[1], abs=1e-13)


def test_the_series_behind_a_corner_holds_close_to_one():
    """1 - c after one layer, where 1000 terms are not enough and the rest stands for them."""
    relu = correlation_map(F.relu, 1.0, math.sqrt(2), 0.0)
    for c in (0.999, 0.9999, 0.99999):
        assert 1 - relu(c) == pytest.approx(1 - _relu_kernel(c), rel=3e-3)


@pytest.mark.parametrize("f", [torch.tanh, torch.erf, F.gelu, F.silu])
def test_on_the_edge_correlations_approach_one_as_beta_over_depth(f):
    edge = edge_of_chaos(f, 0.5)
    path = correlation_map(f, 0.5, edge.sigma_w, edge.sigma_b2).after(0.3, 400)
    # the law is asymptotic: its correction is of order log(l)/l, 4 % at 400 for GELU
    assert (1 - path[400]) * 400 / edge.beta == pytest.approx(1, abs=0.05)


def test_relu_correlations_approach_one_as_the_square_of_depth():
    """1 - c ~ (9 pi^2 / 2) / l^2: beta is 0, which the record says."""
    assert edge_of_chaos(F.relu, 1.0).beta == 0
    path = correlation_map(F.relu, 1.0, math.sqrt(2), 0.0).after(0.3, 200)
    ratios = [(1 - path[n]) * n**2 / (4.5 * math.pi**2) for n in (50, 200)]
    assert 0.6 < ratios[0] < ratios[1] < 1  # log corrections, from below


def test_depth_scale_of_the_ordered_phase_is_that_of_chi_1():
    scale = xi(torch.erf, 0.9, 0.3)
    assert scale.phase == "ordered"
    q = scale.q
    assert q == pytest.approx(0.09 + 0.81 * 2 / math.pi * math.asin(2 * q / (1 + 2 * q)), rel=1e-9)
    chi = 0.81 * 4 / math.pi / math.sqrt(1 + 4 * q)
    assert scale.xi == pytest.approx(-1 / math.log(chi), rel=1e-9)


def test_depth_scale_of_the_chaotic_phase_is_the_rate_of_the_map():
    scale = xi(torch.tanh, 1.8, 0.3)
    assert scale.phase == "chaotic"
    assert scale.c < 1
    path = correlation_map(torch.tanh, scale.q, 1.8, 0.09).after(0.99, 120)
    rate = (path[120] - scale.c) / (path[119] - scale.c)
    assert scale.xi == pytest.approx(-1 / math.log(rate), rel=1e-4)  # not quite linear yet


def test_depth_scale_on_the_edge_is_infinite_and_growing_variance_is_named():
    edge = edge_of_chaos(torch.tanh, 0.5)
    on_it = xi(torch.tanh, edge.sigma_w, math.sqrt(edge.sigma_b2), start=0.5)
    assert (on_it.phase, on_it.xi) == ("edge", math.inf)
    assert xi(F.relu, 1.5, 0.1).phase == "diverging"
    assert xi(torch.tanh, 0.5, 0.0).xi == pytest.approx(-1 / math.log(0.25), rel=1e-9)  # q = 0


def _measured(f, sigma_w, sigma_b2, depth):
    paths = [
        measured_correlations(
            f, q=0.5, sigma_w=sigma_w, sigma_b2=sigma_b2, c=0.3, depth=depth, seed=seed
        )
        for seed in range(3)
    ]
    return torch.tensor(paths, dtype=torch.float64)  # (seed, layer, [variance, correlation])


@pytest.mark.parametrize("f", [torch.tanh, torch.erf])
def test_a_random_network_follows_the_correlation_map(f):
    """Width 1000, depth 40, mean of three networks. One network's 1 - c scatters by about
    sqrt(depth / width) / 2, 10 %, at the end; three by 6 %, so 15 % is two and a half of those."""
    edge = edge_of_chaos(f, 0.5)
    theory = correlation_map(f, 0.5, edge.sigma_w, edge.sigma_b2).after(0.3, 40)
    measured = _measured(f, edge.sigma_w, edge.sigma_b2, 40).mean(0)
    for layer, tolerance in ((1, 0.04), (5, 0.06), (20, 0.1), (40, 0.15)):
        assert 1 - measured[layer, 1].item() == pytest.approx(1 - theory[layer], rel=tolerance)
        assert measured[layer, 0].item() == pytest.approx(0.5, rel=tolerance)


def test_off_the_edge_the_same_comparison_fails():
    """The comparison can tell: with a tenth less sigma_w correlations die much faster."""
    edge = edge_of_chaos(torch.tanh, 0.5)
    on_it = correlation_map(torch.tanh, 0.5, edge.sigma_w, edge.sigma_b2).after(0.3, 40)
    measured = _measured(torch.tanh, 0.9 * edge.sigma_w, edge.sigma_b2, 40).mean(0)
    assert 1 - measured[40, 1].item() < 0.5 * (1 - on_it[40])


def test_an_unstable_variance_leaves_its_fixed_point():
    """chi_q is 1.10 for GELU and 0.55 for tanh: after 50 layers GELU is off by factors."""
    spread = {}
    for f in (F.gelu, torch.tanh):
        edge = edge_of_chaos(f, 0.5)
        last = _measured(f, edge.sigma_w, edge.sigma_b2, 50)[:, 50, 0]
        spread[f] = (last / 0.5).log().abs().max().exp().item()
    assert spread[torch.tanh] < 1.3
    assert spread[F.gelu] > 3


@pytest.mark.parametrize("tau", [30.0, 1e3, 1e5])
def test_moments_of_sharp_gates_follow_their_laws(tau):
    """A gate of width 1/tau: its slope squared is tau/6, its curvature squared tau^3/30, times the
    density at the threshold, up to terms of 1/tau^2."""
    q, theta = 0.7, 0.1234
    found = moments(TG(tau, theta, (0, 0), (0, 1)), q)
    density = math.exp(-(theta**2) / (2 * q)) / math.sqrt(2 * math.pi * q)
    near = 10 / tau**2 + 1e-8
    assert found.slope == pytest.approx(tau / 6 * density, rel=near)
    assert found.curvature == pytest.approx(tau**3 / 30 * density, rel=near)


def test_moments_that_do_not_settle_say_so():
    with pytest.warns(UserWarning, match="have not settled"):
        moments(lambda x: torch.sin(3000 * x), 1.0)
