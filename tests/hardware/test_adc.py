"""Converters: the regression's and the survey's figures, found again from their data."""

import math
from pathlib import Path

import pytest

from threshold_gating.hardware import adc

HERE = Path(__file__).parents
DATA = next((p for up in HERE if (p := up / "shared/data/hardware/adc").exists()), Path("none"))
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the ADC survey is not in ../shared/data")


def test_six_bits_cost_what_the_two_sources_say():
    assert adc.energy(6, 1.2e9, 32).value == pytest.approx(1.06, abs=0.005)  # to the digits given
    low, median = (f.value for f in adc.survey(6))
    assert (round(low, 1), round(median, 1)) == (1.5, 4.3)


@needs_data
def test_the_table_of_the_survey_is_that_of_its_rows():
    found = adc.survey_of(DATA / "adc_survey_min.csv")
    assert found.keys() == adc.SURVEY.keys()
    for bits, row in adc.SURVEY.items():
        assert found[bits] == pytest.approx(row, rel=1e-4)  # printed to five digits


@needs_data
def test_the_regression_has_the_coefficients_of_its_file():
    numbers = {}
    section = ""
    by_bits = []
    for line in (DATA / "hwcomponents_adc_model.yaml").read_text().splitlines():
        key, _, value = line.strip().rpartition(": ")
        if line.strip().startswith("- "):
            by_bits.append(float(line.strip()[2:]))
        elif line.endswith(":") and not line.startswith(" "):
            section = line[:-1]
        elif key and value.lstrip("-").replace(".", "").isdigit():
            numbers[section, key] = float(value)
    merit = "FOMS_hf [dB]"
    assert numbers[merit, "intercept"] == adc.INTERCEPT
    assert numbers[merit, "frequency (Hz)"] == adc.PER_LOG_RATE
    level = numbers[merit, "tech intercept"] + numbers[merit, "energy (pJ/op) res"]
    assert (level, numbers[merit, "tech slope"]) == pytest.approx((adc.LEVEL, adc.NODE_SLOPE))
    assert numbers[merit, "enob slope"] == pytest.approx(adc.BITS_SLOPE)
    assert [adc.LIMIT + adc.PER_BIT * k for k in range(21)] == pytest.approx(by_bits)
    keys = ("intercept", "tech node (nm)", "frequency (Hz)", "energy (pJ/op)")
    assert tuple(numbers["area (um^2)", key] for key in keys) == adc.AREA
    assert math.exp(numbers["frequency (Hz)", "max value"]) == pytest.approx(adc.RATES[1])


def test_a_slow_converter_is_limited_by_its_bits_and_a_fast_one_by_its_rate():
    assert adc.energy(8, 1e6, 32).value == adc.energy(8, 1e8, 32).value
    # 10 dB of merit are a factor of ten in energy
    times = adc.energy(8, 1e10, 32).value / adc.energy(8, 5e9, 32).value
    assert times == pytest.approx(10 ** (-adc.PER_LOG_RATE * math.log(2) / 10))


def test_scaling_a_regression_is_the_regression_at_the_other_node():
    assert adc.energy(6, 1e9, 130).at(32).value == pytest.approx(adc.energy(6, 1e9, 32).value)
    assert adc.area(6, 1e9, 130).at(32).value == pytest.approx(adc.area(6, 1e9, 32).value)


def test_an_area_goes_with_powers_of_node_rate_and_energy():
    """As the regression's file has them, to four digits."""
    energy = adc.energy(8, 1.2e9, 32).value
    want = math.exp(1.3462) * 32**0.99328 * 1.2e9**0.18072 * energy**0.29912
    assert adc.area(8, 1.2e9, 32).value == pytest.approx(want, rel=3e-4)  # 1e-5 of ln(1.2e9) = 21


@pytest.mark.parametrize(
    ("bits", "rate", "node", "says"),
    [
        (3, 1e9, 32, "4 to 16 whole bits; got 3"),
        (6.5, 1e9, 32, "whole bits; got 6.5"),
        (6, 1e11, 32, r"from 1000 to 1e\+10 Hz; got 1e\+11"),
        (6, 1e9, 2, "from 3 to 350 nm; got 2"),
    ],
)
def test_what_the_regression_does_not_cover_is_refused(bits, rate, node, says):
    with pytest.raises(ValueError, match=says):
        adc.energy(bits, rate, node)


def test_bits_that_the_survey_hardly_has_are_refused():
    with pytest.raises(ValueError, match="5 to 16 bits; got 4"):
        adc.survey(4)
