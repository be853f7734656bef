"""Two networks on the same samples are compared sample by sample."""

import math
import re

import pytest
import torch

from threshold_gating.conversion import paired

# (right before and after, only before, only after, neither) -> McNemar's exact p, 95 % interval.
# p = 2 sum_{k <= min(b, c)} C(b + c, k) / 2^(b + c), by hand; the interval is Agresti and Min's.
COUNTS = [
    ((5, 0, 0, 5), 1.0, (-1.959964 / 12, 1.959964 / 12)),
    ((2, 5, 1, 0), 2 * (1 + 6) / 64, (-0.85545, 0.05545)),
    ((0, 0, 10, 0), 2 / 1024, (0.56662, 1.0)),
    ((90, 3, 3, 4), 1.0, (-0.05084, 0.05084)),
]


@pytest.mark.parametrize(("counts", "p", "interval"), COUNTS)
def test_accuracies_are_compared_by_mcnemar(counts, p, interval):
    both, lost, won, neither = counts
    before = torch.tensor([1] * (both + lost) + [0] * (won + neither)).bool()
    after = torch.tensor([1] * both + [0] * lost + [1] * won + [0] * neither).bool()
    metric = paired.compare(("accuracy", lambda y: y), before, after)
    n = sum(counts)
    assert metric.p == pytest.approx(p, rel=1e-12)
    assert metric.interval == pytest.approx(interval, abs=1e-4)
    assert metric.delta == pytest.approx((won - lost) / n)
    assert (metric.baseline, metric.converted) == pytest.approx(
        ((both + lost) / n, (both + won) / n)
    )
    assert metric.agreement == pytest.approx((both + neither) / n)


def test_values_are_compared_by_the_mean_of_their_differences():
    before, after = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, 3.0, 4.5])
    metric = paired.compare(("loss", lambda y: y), before, after)
    half = 1.959963984540054 * math.sqrt((4 * 0.25**2) / 3) / 2  # differences 0, .5, 0, .5
    assert metric.delta == pytest.approx(0.25)
    assert metric.interval == pytest.approx((0.25 - half, 0.25 + half))
    assert metric.agreement == 0.5
    assert metric.p is None
    assert paired.compare(itself, before[:1], after[1:2]).interval == (-math.inf, math.inf)


def itself(y):
    return y


def test_a_metric_without_values_is_refused():
    message = "metric 'acc': needs one value for each sample of either network; got 3 and 2."
    with pytest.raises(ValueError, match=re.escape(message)):
        paired.compare(("acc", lambda y: y), torch.ones(3), torch.ones(2))
