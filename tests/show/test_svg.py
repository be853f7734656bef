"""The picture of a gate shows the numbers that it was given."""

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from threshold_gating.show.panel import Line, Panel
from threshold_gating.show.svg import described, draw

X = tuple(k / 10 - 4 for k in range(81))
PANEL = Panel(
    *("CNN", "features.act", "", "silu", X, tuple(x / (1 + math.exp(-x)) for x in X)),
    lines=(Line("", 2, True, X, (0.0,) * 81, 2.5e-7),),
    counts=(1.0, 3.0, 0.0, 2.0),
    words="All 1,234 values",
)


def paths(svg, kind):
    """The points of every path of a class that a picture has."""
    found = [p for p in ET.fromstring(svg).iter("path") if kind in p.get("class").split()]
    return [
        [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", p.get("d"))]
        for p in found
    ]


def test_the_curves_are_those_of_the_records_though_points_on_a_line_are_left_out():
    svg = draw(PANEL)
    (original,) = paths(svg, "original")
    gate, error = paths(svg, "gate")
    # The gate of this panel is the straight line x from -4 to 4: it shows where a value lies.
    (left, low), (right, high) = gate
    assert 30 < len(original) < len(X)
    for x, y in zip(X, PANEL.original, strict=True):
        at = left + (x + 4) / 8 * (right - left)
        after = next(k for k, point in enumerate(original) if point[0] >= at - 0.06)
        (x0, y0), (x1, y1) = original[max(after - 1, 0)], original[max(after, 1)]
        drawn = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
        assert drawn == pytest.approx(low + (y + 4) / 8 * (high - low), abs=0.2)  # one digit
    assert len({y for _, y in error}) == 1  # no error anywhere: the floor of the scale


def test_what_is_not_finite_is_left_out_and_a_missing_function_too():
    lines = (Line("", 2, False, (math.nan, math.inf, *X[2:]), (math.nan, *(1e-3,) * 80), None),)
    svg = draw(replace(PANEL, lines=lines, original=()))
    assert "nan" not in svg
    assert "inf" not in svg
    assert paths(svg, "original") == []
    nothing = replace(PANEL, lines=(), original=(), counts=(0.0,) * 4)
    assert paths(draw(nothing), "gate") == []


def test_a_larger_error_is_drawn_higher():
    lines = tuple(Line(f"K = {k}", k, False, X, (e,) * 81, e) for k, e in ((2, 1e-2), (3, 1e-4)))
    first, second = (path[0][1] for path in paths(draw(replace(PANEL, lines=lines)), "gate")[1::2])
    assert first < second  # y points down


def test_the_bars_of_the_histogram_are_as_high_as_its_bins():
    seen = next(p for p in ET.fromstring(draw(PANEL)).iter("path") if p.get("class") == "seen")
    floor, *tops, last = [float(h) for h in re.findall(r"(?:40 |V)([\d.]+)", seen.get("d"))]
    assert last == floor
    heights = [floor - top for top in tops]
    assert heights == pytest.approx([n / 3 * heights[1] for n in PANEL.counts], abs=0.1)
    assert heights[1] == 74


def test_the_picture_is_described_in_words():
    assert described(replace(PANEL, part="gate i")) == (
        "CNN features.act gate i: silu and its gate, 2 branches, largest error on its inputs "
        "2.5e-07. All 1,234 values."
    )


def test_an_error_above_one_is_drawn_where_it_is():
    """Up to the power of ten above the largest, with its number at the axis."""
    lines = (replace(PANEL.lines[0], exact=False, error=(30.0,) * 40 + (1e-4,) * 41),)
    svg = draw(replace(PANEL, lines=lines))
    (_, error), words = paths(svg, "gate"), [t.text for t in ET.fromstring(svg).iter("text")]
    (_, top), (_, bottom) = error[0], error[-1]
    assert "100" in words
    # 30 and 1e-4 in a field of powers from -8 to 2, which is 54 high
    assert bottom - top == pytest.approx(54 * (math.log10(30) + 4) / 10, abs=0.11)
    assert "100" not in [t.text for t in ET.fromstring(draw(PANEL)).iter("text")]
