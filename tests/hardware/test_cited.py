"""Numbers of others: none without unit, source and how it was checked."""

import re
from pathlib import Path

import pytest

from threshold_gating.hardware import assumptions, cited, published
from threshold_gating.hardware.assumptions import Assumptions


@pytest.mark.parametrize("name", cited.NUMBERS)
def test_every_cited_number_says_where_it_is_from_and_how_it_was_checked(name):
    number = cited.NUMBERS[name]
    assert number.value > 0
    assert number.unit
    assert re.search(r"20\d\d|NVIDIA", number.source)
    assert number.certainty in cited.CERTAINTY


def test_every_figure_from_a_paper_says_how_sure_it_is():
    for name, figure in Assumptions().figures().items():
        if "ISAAC" in figure.source:
            assert any(word in figure.source for word in cited.CERTAINTY), name
    for check in published.checks():
        if check.source != published.KULL:  # a row of the survey, which is at hand
            assert any(word in check.source for word in cited.CERTAINTY), check.what


@pytest.mark.parametrize("module", [assumptions, published])
def test_no_number_of_a_paper_is_typed_in_beside_the_table(module):
    text = Path(module.__file__).read_text()
    # As they were typed before: milliwatts and areas of ISAAC, TOPS/W, pJ a bit, bytes a second.
    for typed in ("0.52", "170 /", "65.8", "10.5", "3.9", "3.35e12", "2.4,", "1200"):
        assert typed not in text, typed


def test_the_table_is_printed_with_every_source(capsys):
    cited.main()
    out = capsys.readouterr().out
    assert out.count("\n") >= 2 * len(cited.NUMBERS)
    assert "no copy was found to check it against" in out
    assert max(map(len, out.splitlines())) <= 100


def test_numbers_of_two_sources_have_no_common_one():
    with pytest.raises(ValueError, match="too many values"):
        cited.source("ISAAC chip power", "HBM2 access")
