"""Values are counted whatever they are, and the histogram says how many it holds."""

import math

import pytest
import torch

from threshold_gating.show.values import Values


def test_all_values_are_held_where_there_are_few():
    values, x = Values(), torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    values.add(x[:20])
    values.add(x[20:])
    found = values.to_dict()
    assert (found["seen"], found["kept"]) == (1000, 1000)
    assert (found["min"], found["max"]) == (x.min().item(), x.max().item())
    at = values.histogram
    wanted = torch.histogram(x.flatten().double(), 48, range=(at.low, at.high)).hist
    assert list(at.counts) == wanted.long().tolist()
    assert values.described() == f"All 1,000 values, from {x.min():.3g} to {x.max():.3g}"


def test_of_many_an_even_sample_is_held_and_the_ends_are_those_of_all():
    values = Values(1000)
    for k in range(10):
        values.add(torch.full((10_000,), float(k)))
    at = values.histogram
    assert at.kept == 1000
    assert sum(n > 0 for n in at.counts) == 10
    assert max(at.counts) < 200  # of 100 for each, 5 standard deviations of 10 and some
    assert values.described() == (
        "100,000 values came, the histogram holds 1,000, drawn evenly, from 0 to 9"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_no_number_is_counted_apart(dtype):
    values = Values()
    values.add(torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0], dtype=dtype), apart=3)
    found = values.to_dict()
    assert [found[k] for k in ("seen", "nan", "infinite", "apart", "kept")] == [8, 1, 2, 3, 2]
    assert values.described() == (
        "8 values came, 1 NaN, 2 infinite, 3 keys masked or alone in their row, the histogram "
        "holds 2, from 1 to 2"
    )


@pytest.mark.parametrize("x", [torch.zeros(0), torch.tensor([math.nan, math.inf])])
def test_nothing_finite_is_no_histogram_and_no_error(x):
    values = Values()
    values.add(x)
    found = values.to_dict()
    assert (found["kept"], found["min"], sum(found["histogram"]["counts"])) == (0, None, 0)
    empty = "No value reached it on these inputs"
    assert values.described() == (
        "2 values came, 1 NaN, 1 infinite, the histogram holds 0" if x.numel() else empty
    )


def test_one_value_far_out_does_not_squeeze_the_picture():
    values = Values()
    values.add(torch.cat([torch.linspace(-1, 1, 9999), torch.tensor([1e30])]))
    at = values.histogram
    assert (at.low, at.high, at.above) == (-4, 4, 1)
    assert "1 beyond the picture" in values.described()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1e39, 1e200, 1.7e308])
def test_values_beyond_the_range_of_float32_are_in_the_histogram_or_counted_outside(size, sign):
    values, x = Values(), torch.linspace(0.1, 1, 40, dtype=torch.float64) * size * sign
    values.add(x)
    at, found = values.histogram, values.to_dict()
    assert (found["min"], found["max"]) == (x.min().item(), x.max().item())
    assert at.below == int((x < at.low).sum())
    assert at.above == int((x > at.high).sum())
    assert math.isfinite(at.high - at.low)
    if size < 1e300:  # the ends alone are outside
        assert sum(at.counts) >= 38
        assert sum(n > 0 for n in at.counts) > 30
