"""The architecture page shows the tree as it is."""

import pytest

from tools import architecture


def test_the_page_and_the_picture_are_those_of_the_sources():
    """If not: `python -m tools.architecture` writes them."""
    assert architecture.PAGE.read_text() == architecture.page()
    assert architecture.PICTURE.read_text() == architecture.picture()


def test_no_module_is_said_to_be_tested_elsewhere_that_has_tests_of_its_name():
    for module, tests in architecture.HELD_BY.items():
        path = architecture.SOURCE / module
        assert path.is_file()
        assert architecture.tests_of(path) == f"`tests/{tests}`"


def test_a_module_without_tests_is_an_error(monkeypatch):
    monkeypatch.setattr(architecture, "HELD_BY", {})
    with pytest.raises(
        ValueError, match=r"logits\.py has no tests/test_logits\.py; say in HELD_BY"
    ):
        architecture.tests_of(architecture.SOURCE / "logits.py")


def test_folders_stand_above_what_they_import():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert architecture.levels(graph) == {"a": 2, "b": 1, "c": 0}
    assert architecture.direct(graph) == [("a", "b"), ("b", "c")]
    with pytest.raises(ValueError, match="imports go round: a -> b -> a"):
        architecture.levels({"a": {"b"}, "b": {"a"}})
