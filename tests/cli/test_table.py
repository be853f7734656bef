"""Rows of the taxonomy as text; what `tg table` prints of them is tested in test_cli."""

from threshold_gating.cli import table
from threshold_gating.taxonomy import ROWS, TAXONOMY


def entries(*names):
    return [table.Entry(name, TAXONOMY[name], ROWS[name]) for name in names]


def test_a_column_that_cannot_be_narrowed_enough_stays_whole():
    rows = [("name" * 30, *"abcdefgh"), ("x", *"abcdefgh")]
    assert table._aligned(rows, [""])[0].startswith("name" * 30)


def test_every_format_shows_every_row():
    names = ("relu", "gelu", "hardswish")
    for form in table.FORMATS.values():
        text = form(entries(*names), {})
        assert all(name in text for name in names)


def test_negative_zero_is_printed_as_zero():
    assert table._number(-0.0) == "0"
