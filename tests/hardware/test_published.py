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


def test_attention_is_counted_as_by_hand():
    """1024 keys of 64 on tiles of 128 x 128: 8 tiles for the keys, 8 for the values."""
    settings = Assumptions(preset="sky130-weak")
    f = {name: figure.value for name, figure in settings.figures().items()}
    found = published.attention(keys=1024, width=64, heads=12, settings=settings)
    dac, adc, macs = f["DAC"], f["ADC, survey median"], 2 * 1024 * 64 / 9
    # DACs write a key and a value, and drive the query into 8 tiles; 8 sums of 64 are converted.
    ends = (64 + 64 + 8 * 64) * dac + 8 * 64 * adc
    # A gate for each key, and three cells of the tree; or scores converted there and back.
    # Gates read the product with the keys, converters that with the values.
    cells = macs / 2 * (f["crossbar, gated"] + f["crossbar, converted"])
    analog = ends + 4 * 1024 * f["gate"] + cells
    scores = 1024 * (adc + dac + f["activation unit"])
    assert found.analog == pytest.approx(analog)
    assert found.digital == pytest.approx(ends + scores + macs * f["crossbar, converted"])
    # Twelve heads share the memory; a product, gates, a tree of 10 levels up and down, and a read.
    assert found.gpu_seconds == pytest.approx(12 * 2 * 1024 * 64 * 2 / 3.35e12)
    assert found.analog_seconds == pytest.approx((2 + 2 * 10) * settings.settling + 100e-9)


def test_a_chip_with_its_converters_a_column_is_counted_as_by_hand(checks):
    """256 conversions of 8 bits at 7.7 MHz, 256 inputs, and 256 x 256 cells for 127 ns at 1/9."""
    f = Assumptions(
        node=14, rows=256, columns=256, adc_bits=8, dac_bits=8, adc_rate=7.7e6, read=127e-9
    ).figures()
    cells = 256 * 256 / 9 * 0.2**2 * 25e-6 * 127e-9 * 1e9  # nJ
    ends = 256 * (f["ADC, regression"].value + f["DAC"].value) / 1e3
    assert checks["256 x 256 product, HERMES, 14 nm"].ours == pytest.approx(cells + ends)
