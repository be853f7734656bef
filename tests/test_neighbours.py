"""Other learned activations beside tier W: their formulas, their size, their page."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.kan import KAN
from experiments import neighbours
from experiments.cifar_networks import ARMS, cost
from experiments.neighbours import INTERVALS, NEIGHBOURS, ORDER, REACH, SplineConv, splines
from tests.test_fig3_depth import made_rows

X = torch.linspace(-6, 6, 997)


def test_splines_are_those_of_the_layer_that_is_checked_against_scipy():
    layer = KAN(1, 1, INTERVALS, ORDER)  # tests/benchmarks/test_kan.py
    want = layer.splines((X / REACH).unsqueeze(1))[:, 0]
    assert want.sum() > 100
    # float32, and cubes of numbers up to 2
    torch.testing.assert_close(splines(X)[:, 1:], want, rtol=0, atol=3e-6)
    assert torch.equal(splines(X)[:, 0], F.silu(X))


def test_a_spline_convolution_of_one_pixel_is_a_kan_layer():
    conv, layer = SplineConv(3, 2, 1), KAN(3, 2, INTERVALS, ORDER)
    weight = conv.weight.detach()[:, :, 1, 1].unflatten(1, (3, -1))
    layer.base.data, layer.coefficients.data = weight[..., 0], weight[..., 1:]
    x = torch.randn(50, 3, 1, 1)
    # the base sees x itself, the splines x over the range
    want = (
        layer(x[:, :, 0, 0] / REACH) + (F.silu(x) - F.silu(x / REACH))[:, :, 0, 0] @ layer.base.t()
    )
    torch.testing.assert_close(conv(x)[:, :, 0, 0], want, rtol=1e-4, atol=1e-5)


def test_pau_is_its_rational_function_and_starts_near_leaky_relu():
    unit = neighbours.PAU(1)
    x = X.double()
    top, bottom = (p.detach().double().numpy()[::-1] for p in (unit.top, unit.bottom))
    want = np.polyval(top, x) / (1 + np.abs(np.polyval(bottom, x) * x.numpy()))
    torch.testing.assert_close(unit(X).double(), torch.from_numpy(want), rtol=1e-5, atol=1e-6)
    inside = X[X.abs() <= 3]
    assert (unit(inside) - F.leaky_relu(inside, 0.01)).abs().max() < 0.07
    assert unit(X.bfloat16()).dtype == torch.bfloat16


def test_acon_contains_silu_and_apl_starts_as_relu():
    image = X.view(1, 1, -1, 1).expand(1, 2, -1, 1)
    acon = neighbours.ACON(2)
    acon.p1.data.fill_(1.0)
    acon.p2.data.fill_(0.0)
    torch.testing.assert_close(acon(image), F.silu(image))
    acon.p2.data.fill_(0.25)
    want = 0.75 * image * torch.sigmoid(0.75 * image) + 0.25 * image
    torch.testing.assert_close(acon(image), want)
    apl = neighbours.APL(2)
    assert torch.equal(apl(image), F.relu(image))
    apl.a[0].data[1] = -0.5  # of the second channel, the hinge at -0.5
    want = F.relu(image).clone()
    want[:, 1] -= 0.5 * (-0.5 - image[:, 1]).clamp(min=0)
    torch.testing.assert_close(apl(image), want)


def test_neighbours_have_the_parameters_and_multiplications_of_tier_w():
    most = cost(ARMS["tier W"], 14, 16)
    for case in neighbours.cases():
        own = cost(NEIGHBOURS[case["arm"]], case["depth"], case["width"])
        # a channel more or less is 5 % of a width of 23, and 10 % of its square
        assert own.parameters == pytest.approx(most.parameters, rel=0.05)
        assert own.macs == pytest.approx(most.macs, rel=0.05)


def test_the_page_and_the_verdict_say_who_is_better():
    beside = made_rows(lambda case: 90.0 + (case["arm"] == "tier W"))
    rows = made_rows(lambda case: 92.0 if case["arm"] == "pau" else 89.0, neighbours)
    page = neighbours.page(rows, beside)
    assert "| PAU (rational) | 23 | 355,329 (1.03) | 1.04 | 92.00 +- 0.00 | -1.00" in page
    assert "30 of 30 cases ran" in page
    (verdict,) = neighbours.verdicts(rows, beside)
    assert verdict.verdict == "partly"
    assert "PReLU +2.00" in verdict.ours
    page = neighbours.page(rows[:16], [])
    assert "Not run: prelu depth 14 w 23 (grid), seed 1,2" in page
    assert "Tier W itself has no rows yet" in page
    assert neighbours.verdicts([], beside)[0].verdict == "not run"
    worse = made_rows(lambda case: 89.0, neighbours)
    assert neighbours.verdicts(worse, beside)[0].verdict == "reproduced"
    one = [row for row in worse if row.case["arm"] == "prelu"]
    (verdict,) = neighbours.verdicts(one, beside)
    assert verdict.verdict == "partly"  # the claim is of all of them
    assert "not run: ACON-C, APL, PAU (rational), KAN-type" in verdict.ours
    swept = [row for row in worse if row.case["part"] == "sweep"]
    assert "No neighbour was trained to the end" in neighbours.page(swept, beside)


@pytest.mark.slow
def test_smoke_trains_every_neighbour():
    rows = neighbours.main(["--smoke", "--device", "cpu"])
    assert {row.case["arm"] for row in rows} == set(NEIGHBOURS)
    assert all(row.figures["loss"] < 10 for row in rows)
