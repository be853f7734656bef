"""Figures keep their node: what is of two processes does not add up."""

import pytest

from threshold_gating.hardware.figure import Figure


def test_figures_of_two_nodes_are_refused_until_one_is_scaled():
    old = Figure(13.0, "pJ", 130, "measured", slope=1.0, why="as C")
    new = Figure(1.0, "pJ", 32, "published")
    with pytest.raises(ValueError, match=r"130 nm and 32 nm do not add up; scale one"):
        old + new
    both = old.at(32) + new
    assert both.value == pytest.approx(13.0 * 32 / 130 + 1.0)
    assert both.node == 32
    assert "13 pJ at 130 nm" in both.source


def test_a_figure_without_a_rule_cannot_be_scaled():
    with pytest.raises(ValueError, match="no rule to scale it to 130 nm"):
        Figure(1.0, "pJ", 32, "published").at(130)


def test_units_do_not_mix_and_a_number_needs_a_source():
    with pytest.raises(ValueError, match="do not add up"):
        Figure(1.0, "pJ", 32, "a") + Figure(1.0, "um^2", 32, "b")
    with pytest.raises(ValueError, match="needs a unit and a source"):
        Figure(1.0, "pJ", 32, "")
    with pytest.raises(ValueError, match="from 3 to 350 nm; got 1000"):
        Figure(1.0, "pJ", 1000, "a")
    with pytest.raises(ValueError, match="0 or more; got -1"):
        Figure(-1.0, "pJ", 32, "a")
