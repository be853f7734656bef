"""The demo's page shows the numbers that it was given."""

import base64
import io
import re
from dataclasses import replace

import pytest

from tests.show.test_page import check_page
from tests.show.test_svg import PANEL
from threshold_gating.show.demo import HEADER, LEGEND, Report, Row, cells, html, meaning

EXACT = Row("CNN", "", 2, 3, True, 0.95, 0.95, 1.0, 3e-6, 1e-6, 20.0)
CLOSE = Row("ViT", "K = 3", 3, 4, False, 0.96, 0.9578, 0.9978, 0.05, 0.01, 10.0)
REPORT = Report((EXACT, CLOSE), (PANEL,), ((7, bytes(range(64))),), {"torch": "2.x <1>"}, 450)


def test_the_page_is_whole_and_needs_nothing_else():
    read = check_page(html(REPORT))
    assert len(read.alts) == 2
    text = " ".join(read.text)
    for row in REPORT.rows:
        assert all(cell in text for cell in cells(row))
    assert all(
        word in text
        for word in (*HEADER, *LEGEND.values(), "features.act", "All 1,234 values", "2.x <1>")
    )


def test_names_from_a_network_are_text_and_not_markup():
    odd = replace(PANEL, site='<script>"x"&', network="<b>")
    check_page(html(replace(REPORT, panels=(odd,), rows=(replace(EXACT, network="<i>"),))))


def test_a_digit_is_a_png_of_its_grey_values():
    image = pytest.importorskip("PIL.Image")
    found = re.search(r"base64,([^\"]+)", html(REPORT))
    picture = image.open(io.BytesIO(base64.b64decode(found[1])))
    assert picture.size == (8, 8)
    assert picture.tobytes() == bytes(255 - v for v in range(64))  # dark ink on paper


@pytest.mark.parametrize("change", [{"agreement": 0.998}, {"difference": 1e-3}])
def test_an_exact_network_that_is_off_cannot_hide(change):
    row = replace(EXACT, **change)
    assert EXACT.holds
    assert not row.holds
    assert "NOT EXACT" in cells(row)
    (said,) = meaning(replace(REPORT, rows=(row,)))
    assert said.startswith("CNN should be exact and is not: ")
    assert '<tbody class="wrong">' in html(replace(REPORT, rows=(row,)))
    assert '<tbody class="wrong">' not in html(REPORT)


def test_the_sentences_are_made_from_the_numbers():
    exact, close = meaning(REPORT)
    assert "All 450 test images get the same answer" in exact
    assert "3.0e-06" in exact
    assert "0.05 (ViT, K = 3)" in close
    assert "at least 99.78%" in close
