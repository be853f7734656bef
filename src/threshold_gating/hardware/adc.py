"""Energy and area of an A/D converter: a regression and the survey of what was published.

The regression is that of arXiv 2404.06553 with the coefficients of Accelergy-Project/hwcomponents-
adc, 246af7e0: the best energy to expect at a resolution, rate and process. The survey is B.
Murmann's (bmurmann/ADC-survey, ddf3c1bb): the 10th percentile and the median of the converters of a
resolution. `python -m threshold_gating.hardware.adc FILE.csv` prints the table of here anew.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from threshold_gating.hardware.figure import Figure, check_node

REGRESSION = "regression of arXiv 2404.06553, hwcomponents-adc 246af7e0"
MURMANN = "ADC survey of B. Murmann, ddf3c1bb"
# Schreier's figure of merit in dB: the lesser of a line in ln(rate) and a limit of the resolution.
INTERCEPT, PER_LOG_RATE = 213.7806687348118, -2.8719030399529957
LIMIT, PER_BIT = 128.3068287398817, 3.2205115109775538
# and a correction of the energy: exp(level + node_slope ln(nm) + bits_slope ln(bits)), in pJ
LEVEL, NODE_SLOPE, BITS_SLOPE = (
    26.0496215686518 - 1.4702022133784405,
    1.8800369206815,
    -2.82912560506,
)
# ln(area / um^2) = AREA . (1, ln nm, ln Hz, ln pJ)
AREA = (1.3461916439910742, 0.9932794744745022, 0.18071538424508238, 0.29912426192653485)
BITS = range(4, 17)  # whole ones: between them the regression is a sawtooth
RATES = (1e3, 1e10)  # Hz; the regression says nothing above
SINCE = 2015  # converters of before cost two to three times as much
WITHIN = 0.5  # of the effective bits
FEWEST = 15  # converters that a row of the table stands on


class Row(NamedTuple):
    """Converters of one resolution: pJ a conversion, how many, and where and how fast they are."""

    low: float  # 10th percentile
    median: float
    converters: int
    node: float  # median, nm
    rate: float  # median, Hz


# By effective bits; printed by this module.
SURVEY = {
    5: Row(1.0858, 1.9608, 20, 19, 2.8e10),
    6: Row(1.4778, 4.3063, 20, 28, 4.75e09),
    7: Row(1.28, 3.1364, 15, 28, 4.8e09),
    8: Row(5.0125, 7.3551, 22, 28, 2.6e09),
    9: Row(1.033, 38.427, 30, 28, 6e08),
    10: Row(4.5967, 18.879, 35, 28, 3.03e08),
    11: Row(9.68, 31, 37, 40, 8e07),
    12: Row(7.12, 81.5, 37, 28, 5e07),
    13: Row(50.24, 230, 23, 40, 7e06),
    14: Row(89.44, 810, 15, 65, 2e05),
    15: Row(533.33, 1250, 21, 55, 4.8e04),
    16: Row(2122.5, 7850, 17, 65, 4e04),
}


def energy(bits: int, rate: float, node: float) -> Figure:
    """Of a conversion by the regression; `bits` are effective ones."""
    _check(bits, rate, node)
    merit = min(INTERCEPT + PER_LOG_RATE * math.log(rate), LIMIT + PER_BIT * bits)
    ideal = 0.5 * 10 ** ((6.02 * bits + 1.76 - merit) / 10)
    value = ideal * math.exp(LEVEL + NODE_SLOPE * math.log(node) + BITS_SLOPE * math.log(bits))
    return Figure(value, "pJ", node, REGRESSION, rate, NODE_SLOPE, "its own slope")


def area(bits: int, rate: float, node: float) -> Figure:
    """Of a converter by the regression, which follows the smallest tenth of what was published."""
    logs = (1.0, math.log(node), math.log(rate), math.log(energy(bits, rate, node).value))
    value = math.exp(sum(a * b for a, b in zip(AREA, logs, strict=True)))
    slope = AREA[1] + AREA[3] * NODE_SLOPE
    return Figure(value, "um^2", node, REGRESSION, rate, slope, "its own slope")


def survey(bits: int) -> tuple[Figure, Figure]:
    """10th percentile and median of a conversion's energy, at the median node of its converters."""
    if bits not in SURVEY:
        raise ValueError(
            f"the ADC survey has at least {FEWEST} converters since {SINCE} for "
            f"{min(SURVEY)} to {max(SURVEY)} bits; got {bits}."
        )
    row = SURVEY[bits]
    said = (
        f"{MURMANN}, {row.converters} converters since {SINCE} of {bits} +- {WITHIN} effective bits"
    )
    why = "the slope of arXiv 2404.06553"
    low, high = (
        Figure(value, "pJ", row.node, f"{what}, {said}", row.rate, NODE_SLOPE, why)
        for what, value in (("10th percentile", row.low), ("median", row.median))
    )
    return low, high


def survey_of(path: Path) -> dict[int, Row]:
    """The table from the survey's own rows."""
    with path.open(encoding="utf-8", newline="") as file:
        recent = [row for row in csv.DictReader(file) if int(row["year"]) >= SINCE]
    table = {}
    for bits in range(1, 25):
        near = [r for r in recent if abs(float(r["enob_from_sndr"]) - bits) <= WITHIN]
        if len(near) >= FEWEST:
            costs, rates, nodes = (
                [float(r[key]) for r in near if r[key]]
                for key in ("pJ_per_conversion", "fsnyq_Hz", "node_nm")
            )
            low = statistics.quantiles(costs, n=10, method="inclusive")[0]
            median, node, rate = map(statistics.median, (costs, nodes, rates))
            table[bits] = Row(low, median, len(near), node, rate)
    return table


def _check(bits: int, rate: float, node: float) -> None:
    if bits not in BITS:
        raise ValueError(f"an ADC has {BITS[0]} to {BITS[-1]} whole bits; got {bits:g}.")
    low, high = RATES
    if not low <= rate <= high:
        raise ValueError(f"an ADC's rate must be from {low:g} to {high:g} Hz; got {rate:g}.")
    check_node(node)


if __name__ == "__main__":
    for bits, row in survey_of(Path(sys.argv[1])).items():
        numbers = f"{row.low:.5g}, {row.median:.5g}, {row.converters}, {row.node:g}, {row.rate:.3g}"
        print(f"    {bits}: Row({numbers}),")
