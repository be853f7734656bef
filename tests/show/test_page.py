"""The page is a whole, needs nothing else, and shows the numbers that it was given."""

import base64
import io
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from threshold_gating.show.page import HEADER, LEGEND, Report, Row, cells, meaning, page
from threshold_gating.show.svg import Line, Panel, described, draw

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Reads a document: elements that are not closed in order, references, and all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.mistakes, self.refers, self.alts, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        self.mistakes += self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.refers += [given[k] for k in ("src", "href", "xlink:href", "data") if k in given]
        if tag == "img" or given.get("role") == "img":
            self.alts.append(given.get("alt") or given.get("aria-label"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass  # <path/>

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(f"/{tag}")

    def handle_data(self, data):
        self.text.append(data)


def check_page(text):
    """A page with nothing left open, no reference to anything outside, a word for each picture."""
    read = Page(text)
    assert not read.mistakes
    assert all(address.startswith("data:image/png;base64,") for address in read.refers)
    assert all(read.alts)
    assert not re.search(r"https?://|file:|url\(|@import|<script|<link|/tmp|/home", text)
    return read


X = tuple(k / 10 - 4 for k in range(81))
PANEL = Panel(
    *("CNN", "features.act", "", "silu", X, tuple(x / (1 + math.exp(-x)) for x in X)),
    lines=(Line("", 2, True, X, (0.0,) * 81, 2.5e-7),),
    counts=(1.0, 3.0, 0.0, 2.0),
    seen=1234,
)
EXACT = Row("CNN", "", 2, 3, True, 0.95, 0.95, 1.0, 3e-6, 1e-6, 20.0)
CLOSE = Row("ViT", "K = 3", 3, 4, False, 0.96, 0.9578, 0.9978, 0.05, 0.01, 10.0)
REPORT = Report((EXACT, CLOSE), (PANEL,), ((7, bytes(range(64))),), {"torch": "2.x <1>"}, 450)


def test_the_page_is_whole_and_needs_nothing_else():
    read = check_page(page(REPORT))
    assert len(read.alts) == 2
    text = " ".join(read.text)
    for row in REPORT.rows:
        assert all(cell in text for cell in cells(row))
    assert all(
        word in text for word in (*HEADER, *LEGEND.values(), "features.act", "1,234", "2.x <1>")
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "<p><b>bold</p>",
        "<p>",
        '<img src="picture.png" alt="a picture">',
        '<a href="https://example.org">there</a>',
        '<svg role="img"></svg>',
        "<style>@import 'other.css';</style>",
    ],
)
def test_a_wrong_page_is_found(wrong):
    with pytest.raises(AssertionError):
        check_page(page(REPORT).replace("<main>", f"<main>{wrong}"))


def test_names_from_a_network_are_text_and_not_markup():
    odd = replace(PANEL, site='<script>"x"&', network="<b>")
    check_page(page(replace(REPORT, panels=(odd,), rows=(replace(EXACT, network="<i>"),))))


def test_a_digit_is_a_png_of_its_grey_values():
    image = pytest.importorskip("PIL.Image")
    found = re.search(r"base64,([^\"]+)", page(REPORT))
    picture = image.open(io.BytesIO(base64.b64decode(found[1])))
    assert picture.size == (8, 8)
    assert picture.tobytes() == bytes(255 - v for v in range(64))  # dark ink on paper


def paths(svg, kind):
    """The points of every path of a class that a picture has."""
    found = [p for p in ET.fromstring(svg).iter("path") if kind in p.get("class").split()]
    return [
        [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", p.get("d"))]
        for p in found
    ]


def test_the_curves_are_those_of_the_records():
    svg = draw(PANEL)
    (original,) = paths(svg, "original")
    gate, error = paths(svg, "gate")
    assert len(original) == len(gate) == len(error) == len(X)
    # The gate of this panel is the straight line x: equal steps, and y points down.
    steps = {round(a[1] - b[1], 1) for a, b in pairwise(gate)}
    assert max(steps) - min(steps) <= 0.11  # coordinates have one or two digits
    assert gate[-1][1] < gate[0][1]
    assert gate[0][1] > original[0][1]  # x is below SiLU at -4
    assert len({y for _, y in error}) == 1  # no error anywhere: the floor of the scale


def test_a_larger_error_is_drawn_higher():
    lines = tuple(Line(f"K = {k}", k, False, X, (e,) * 81, e) for k, e in ((2, 1e-2), (3, 1e-4)))
    first, second = (path[0][1] for path in paths(draw(replace(PANEL, lines=lines)), "gate")[1::2])
    assert first < second  # y points down


def test_the_histogram_has_a_bar_for_each_bin_that_is_not_empty():
    seen = next(p for p in ET.fromstring(draw(PANEL)).iter("path") if p.get("class") == "seen")
    heights = [float(h) for h in re.findall(r"v-([\d.]+)", seen.get("d"))]
    assert len(heights) == 3
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)


def test_the_picture_is_described_in_words():
    words = described(replace(PANEL, part="gate i"))
    assert words == (
        "CNN features.act gate i: silu and its gate over 1,234 inputs seen. "
        "2 branches, largest error on its inputs 2.5e-07."
    )


@pytest.mark.parametrize("change", [{"agreement": 0.998}, {"difference": 1e-3}])
def test_an_exact_network_that_is_off_cannot_hide(change):
    row = replace(EXACT, **change)
    assert EXACT.holds
    assert not row.holds
    assert "NOT EXACT" in cells(row)
    (said,) = meaning(replace(REPORT, rows=(row,)))
    assert said.startswith("CNN should be exact and is not: ")
    assert '<tr class="wrong">' in page(replace(REPORT, rows=(row,)))
    assert '<tr class="wrong">' not in page(REPORT)


def test_the_sentences_are_made_from_the_numbers():
    exact, close = meaning(REPORT)
    assert "All 450 test images get the same answer" in exact
    assert "3.0e-06" in exact
    assert "0.05 (ViT, K = 3)" in close
    assert "at least 99.78%" in close
