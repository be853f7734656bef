"""The model against published designs, and the two claims in its currency."""

import pytest

from threshold_gating.hardware import published
from threshold_gating.hardware.assumptions import Assumptions


@pytest.fixture(scope="module")
def checks():
    return {check.what: check for check in published.checks()}


def test_isaacs_converter_is_within_a_fifth_and_its_share_of_the_chip_close(checks):
    converter = checks["ADC, 8 bits, 1.2 GHz, 32 nm"]
    assert converter.published == pytest.approx(1.67, abs=0.005)
    assert abs(converter.off) < 0.2
    share = checks["ADC share of chip power"]
    assert share.published == pytest.approx(0.49, abs=0.005)  # 32.3 W of 65.8 W
    assert abs(share.off) < 0.2


def test_where_the_model_is_far_off_it_says_so(checks):
    assert checks["256 x 256 product, HERMES, 14 nm"].off < -0.8  # silicon costs ten times as much
    later = checks["256 x 256 product, 64 cores, 1 phase"]
    assert later.published == pytest.approx(2 * 256**2 / 9.76e3, rel=1e-6)  # nJ
    assert later.off < -0.8
    assert checks["ADC area, same"].off > 3
    assert all(check.source for check in checks.values())


def test_tier_w_is_free_while_its_branches_fit_a_tile():
    for t in published.tier_w():
        if t.K * t.width <= t.rows:
            assert t.branches == t.dense
        assert t.dense <= t.branches <= t.K * t.dense
        wider = t.equal_width + 1
        assert wider * -(-wider // t.rows) > t.branches


def test_analog_attention_saves_orders_of_energy_but_a_slow_pair_takes_longer_than_a_gpu():
    slow, fast = (
        published.attention(settings=Assumptions(preset=name))
        for name in ("sky130-weak", "sky130-strong")
    )
    assert 2 < slow.orders[0] < fast.orders[0] < 4
    assert slow.orders[1] < 0 < fast.orders[1]
    assert fast.gpu == pytest.approx(2 * 1024 * 64 * 16 * published.HBM)


def test_converters_read_the_second_product_of_analog_attention():
    short, long = (
        published.attention(keys=90, width=10, settings=Assumptions(read=read))
        for read in (100e-9, 300e-9)
    )
    joules = 0.2**2 * 25e-6 * 200e-9 * 1e12  # of a cell at activity 1, in pJ: V^2 G t
    assert long.analog - short.analog == pytest.approx(90 * 10 / 9 * joules)
    assert long.digital - short.digital == pytest.approx(2 * 90 * 10 / 9 * joules)
    assert long.analog_seconds - short.analog_seconds == pytest.approx(200e-9)
