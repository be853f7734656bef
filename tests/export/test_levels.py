"""Gates as counts of thresholds against the gates themselves, in float64."""

import math

import pytest
import torch

import threshold_gating as tg
from threshold_gating.export.levels import thresholds


def evaluated(t, x, bits):
    """y = b_0 + sum_j G_j (b_j - b_{j-1}) with gates that are counts of thresholds, in float64."""
    b = [s * x + c for s, c in zip(t.s, t.c, strict=True)]
    y = b[0]
    for j, table in enumerate(thresholds(t, bits), 1):
        g = (x[:, None] >= table.double()).double().mean(1)
        y = y + g * (b[j] - b[j - 1])
    return y


@pytest.mark.parametrize(
    "key", ["silu", "quick_gelu", "tanh", "gelu", "mish", "elu", "softplus", "dsilu"]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_soft_gates_are_off_by_half_a_level_of_each_gate(key, bits):
    t = tg.TAXONOMY[key]
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    b = torch.stack([s * x + c for s, c in zip(t.s, t.c, strict=True)])
    # each G_j is rounded to the nearest of 2^bits - 1 levels; thresholds are float32
    bound = b.diff(dim=0).abs().sum(0) * (0.5 / (2**bits - 1)) + 1e-6
    assert ((evaluated(t, x, bits) - t(x)).abs() <= bound).all()


def test_thresholds_of_one_gate_are_the_logits_of_its_levels():
    t = tg.TG(1.7, 0.3, (0, 1), (0, 0))
    (found,) = thresholds(t, 4)
    g = torch.sigmoid(1.7 * (found.double() - 0.3))
    assert torch.allclose(
        g, (torch.arange(1, 16).double() - 0.5) / 15, atol=1e-6
    )  # found is float32


@pytest.mark.parametrize(
    "key", ["relu", "leaky_relu", "hardtanh", "hardshrink", "threshold", "abs"]
)
def test_hard_gates_are_equal_at_their_thresholds_too(key):
    t = tg.TAXONOMY[key]
    at = torch.tensor([*t.theta, 0.0, 1.0])
    near = torch.cat([at, at.nextafter(at + 1), at.nextafter(at - 1), torch.randn(99)])
    want = t(near).double()  # thresholds are float32, as a network has them
    assert torch.allclose(evaluated(t, near.double(), 8), want, rtol=0, atol=1e-6)  # float32


@pytest.mark.parametrize("owner", [("lo", "lo"), ("hi", "hi"), ("lo", "hi"), ("hi", "lo")])
def test_a_tie_belongs_to_its_owner(owner):
    t = tg.TG(math.inf, (-1.0, 1.0), (1.0, 2.0, 1.0), (0.0, 4.0, -8.0), owner=owner)
    x = torch.tensor([-1.0, 1.0, 0.0, -2.0, 2.0], dtype=torch.float64)
    assert torch.equal(evaluated(t, x, 8), t(x))


def test_product_gates_that_do_not_rise_together_are_refused_or_inverted():
    t = tg.TAXONOMY["gelu_k3_product"]
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    assert (evaluated(t, x, 8) - t(x)).abs().max() < 0.05  # half a level of 255 times 6
