"""The nearest named activation, with its distance, at inputs that are said."""

import math

import pytest
import torch

import threshold_gating as tg
from threshold_gating.insight.gates import frozen
from threshold_gating.insight.nearest import POINTS, nearest, points
from threshold_gating.taxonomy import ROWS
from threshold_gating.training.telemetry import site_of

EXACT = [
    "identity",
    "relu",
    "silu",
    "quick_gelu",
    "sigmoid",
    "tanh",
    "hardtanh",
    "mish",
]


@pytest.mark.parametrize("name", EXACT)
def test_a_row_is_nearest_to_itself(name):
    (found,) = nearest(frozen("act", tg.TAXONOMY[name]), points(None))
    assert found.name == name
    assert found.distance <= 1e-6
    assert str(found) == f"= {name}"


def test_an_approximate_row_is_as_far_from_its_function_as_the_taxonomy_says():
    (found,) = nearest(frozen("act", tg.TAXONOMY["gelu"]), points(None))
    assert found.name == "gelu"
    assert found.distance == pytest.approx(ROWS["gelu"].rel_rms, rel=0.05)


def test_a_learned_gate_is_as_far_as_the_integral_says():
    act = tg.Activation("silu", share="channel", channels=3, train=("tau", "s"))
    with torch.no_grad():
        act.rho[1] = 0.4
        act.s[1, 2] = 0.5
    found = nearest(site_of("act", act), points(None))
    assert found[0].name == "silu"
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2)
    for k in (1, 2):
        y = act.instance(k)(x)
        each = {
            key: ((weight * (row.f(x) - y) ** 2).sum() / (weight * y**2).sum()).sqrt().item()
            for key, row in ROWS.items()
            if key not in ("threshold",)
        }
        best = min(each, key=each.get)
        assert found[k].name == best
        # 1,024 quantiles have less of the tails than the integral
        assert found[k].distance == pytest.approx(each[best], rel=0.02)


def test_points_are_quantiles_of_what_is_given():
    values = torch.randn(5000).double() * 3 + 1
    x = points(values)
    assert len(x) == POINTS
    assert float(x.mean()) == pytest.approx(float(values.mean()), abs=0.01)
    assert float(x.std()) == pytest.approx(float(values.std()), rel=0.01)
    normal = points(None)
    assert float(normal.std()) == pytest.approx(1, abs=2e-3)
    assert torch.equal(points(torch.zeros(0)), normal)
    assert points(torch.tensor([2.0])).tolist() == [2.0] * POINTS


def test_where_inputs_are_positive_relu_is_the_identity():
    (found,) = nearest(frozen("act", tg.TAXONOMY["relu"]), points(torch.rand(100) + 1))
    assert str(found) == "= identity"


def test_a_gate_whose_output_is_0_is_near_nothing():
    (found,) = nearest(frozen("act", tg.TAXONOMY["relu"]), points(-torch.rand(100) - 1))
    assert found.name == ""
    assert math.isnan(found.distance)
    assert str(found) == "none"


def test_many_groups_are_taken_in_parts(monkeypatch):
    from threshold_gating.insight import nearest as module

    act = tg.Activation("silu", share="channel", channels=11, train=("tau",))
    with torch.no_grad():
        act.rho.copy_(torch.linspace(-1, 1, 11))
    whole = nearest(site_of("act", act), points(None))
    monkeypatch.setattr(module, "_AT_ONCE", 4)
    assert nearest(site_of("act", act), points(None)) == whole


@pytest.mark.parametrize("name", ["silu", "mish", "softplus", "elu", "tanhshrink"])
@pytest.mark.parametrize("huge", [1e4, 1e10, 1e150])
def test_a_few_huge_values_do_not_hide_what_a_gate_is(name, huge):
    values = torch.randn(4000).double()
    want = nearest(frozen("act", tg.TAXONOMY[name]), points(values))
    values[:8] *= huge
    (found,) = nearest(frozen("act", tg.TAXONOMY[name]), points(values))
    assert found.name == want[0].name == name
    act = tg.Activation("silu", share="channel", channels=2, train=("tau",))
    with torch.no_grad():
        act.rho[1] = 0.4
    same, other = nearest(site_of("act", act), points(values))
    assert str(same) == "= silu"
    assert other.distance > 0.01  # and not "=": it is another function where nearly all values are


def test_values_are_drawn_in_only_where_they_are_far_outside():
    values = torch.randn(5000).double().pow(3)  # with a long tail
    ordered = values.sort().values
    at = ((torch.arange(POINTS) + 0.5) / POINTS * 5000).long()
    inner = ordered[at][POINTS // 200 : -(POINTS // 200)]
    reach = 30 * (inner - ordered[at][POINTS // 2]).square().mean().sqrt()
    assert ordered.abs().max() < reach
    assert torch.equal(points(values), ordered[at])
    sparse = torch.zeros(5000).double()
    sparse[:20] = 3.0  # the rest has no spread to measure by
    assert points(sparse).max() == 3.0


@pytest.mark.parametrize("name", ["silu", "mish", "relu"])
def test_the_nearest_name_is_found_where_squares_cancel(name):
    values = torch.cat([torch.randn(2000), 1e9 * torch.rand(2000)]).double()
    x = points(values)  # |y|^2 is 1e17, and what tells these names apart is below 1
    (found,) = nearest(frozen("act", tg.TAXONOMY[name]), x)
    y = ROWS[name].f(x)
    far = {key: (row.f(x) - y).square().mean().item() for key, row in ROWS.items()}
    assert far["relu" if name == "silu" else "silu"] > 1e-3
    assert found.name == name
    assert far[found.name] == min(far.values())
