"""One more branch changes no value, and functions of straight lines are found as they are."""

import math

import pytest
import torch
import torch.nn.functional as F

from threshold_gating.fitting import embed
from threshold_gating.instance import TG
from threshold_gating.taxonomy import TAXONOMY

X = torch.cat(
    [torch.linspace(-30, 30, 6001), torch.logspace(1.5, 4, 100), -torch.logspace(1.5, 4, 100)]
).double()

INSTANCES = {
    "one tau": TAXONOMY["gelu_k5"],
    "one tau, out of order": TG(0.9, (4.0, -4.0, 1.0), (0.1, -60, 3, 0.1), (-1.6, 0, 2, 1.6)),
    "two branches": TAXONOMY["silu"],
    "own tau": TAXONOMY["gelu_k4"],
    "own tau, out of order": TAXONOMY["softplus_k4"],
    "slow and sharp": TAXONOMY["softsign_k8"],
    "product": TAXONOMY["gelu_k3_product_offset"],
    "hard": TAXONOMY["hardtanh"],
    "hard, with a jump": TAXONOMY["hardshrink"],
}


@pytest.mark.parametrize("name", INSTANCES)
def test_one_more_branch_is_the_same_function(name):
    t = INSTANCES[name]
    for more in embed.with_one_more(t):
        assert more.K == t.K + 1
        assert more.form == t.form
        assert isinstance(more.tau, tuple) == isinstance(t.tau, tuple)
        assert (more.s[0], more.c[0], more.s[-1], more.c[-1]) == (t.s[0], t.c[0], t.s[-1], t.c[-1])
        y = t(X)
        # a branch of weight exp(-36), and a few roundings of what is blended (up to 60 |x|)
        size = 1e-13 * (1 + max(map(abs, t.s)) * X.abs() + max(map(abs, t.c)))
        assert ((more(X) - y).abs() <= size).all()


@pytest.mark.parametrize("name", ["one tau", "two branches", "own tau", "product", "hard"])
def test_thresholds_in_order_stay_so(name):
    for more in embed.with_one_more(INSTANCES[name]):
        assert list(more.theta) == sorted(more.theta)


def test_lines_through_the_origin_stay_so():
    assert all(set(more.c) == {0.0} for more in embed.with_one_more(TAXONOMY["gelu_k5"]))


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (F.relu, TAXONOMY["relu"]),
        (F.hardtanh, TAXONOMY["hardtanh"]),
        (F.relu6, TAXONOMY["relu6"]),
        (F.hardshrink, TAXONOMY["hardshrink"]),
        (torch.abs, TAXONOMY["abs"]),
        (lambda x: F.relu(1 - x.abs()), TG(math.inf, (-1, 0, 1), (0, 1, -1, 0), (0, 1, 1, 0))),
    ],
)
def test_functions_of_straight_lines_are_hard_instances(f, expected):
    t = embed.lines(f)
    assert (t.tau, t.theta, t.s) == (expected.tau, expected.theta, expected.s)
    torch.testing.assert_close(t(X), f(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("f", [F.gelu, F.elu, F.hardswish, torch.clone, torch.sin])
def test_a_function_that_bends_is_none(f):
    assert embed.lines(f) is None


def test_a_function_that_is_not_defined_everywhere_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        embed.lines(torch.sqrt)
