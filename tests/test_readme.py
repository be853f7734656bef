"""The README says what is so: its code runs, its names are the public ones, it stays short.

Every ```python block runs, in order, in one namespace. A ```text block that is announced by the
line `<!-- output -->` is what the block before it prints. The pages under docs/ are run likewise;
blocks of `>>>` lines are doctests.
"""

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

import threshold_gating as tg
from threshold_gating.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\s*^<!-- output -->\s*^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def blocks(text):
    """(line of the fence, code, printed text or None) of every Python block of a page."""
    for block in _BLOCK.finditer(text):
        if block["code"].startswith(">>>"):
            continue
        yield text.count("\n", 0, block.start()) + 1, block["code"], block["output"]


def run(text, name):
    """Run the blocks of a page; what they print must be what the page says they print."""
    namespace = {"__name__": "__main__"}
    for line, code, output in blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # the blank lines make tracebacks name the line
            exec(compile("\n" * line + code, name, "exec"), namespace)
        if output is not None:
            assert printed.getvalue().strip() == output.strip(), f"{name}, line {line}"


def between(text, marker):
    """What stands between `<!-- marker:begin -->` and `<!-- marker:end -->`."""
    found = re.findall(f"<!-- {marker}:begin -->(.*?)<!-- {marker}:end -->", text, re.DOTALL)
    assert len(found) == 1, f"{len(found)} parts are marked {marker!r}, not one"
    return found[0].strip()


@pytest.fixture
def readme():
    return (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a block may write files
    run(page.read_text(), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_doctest_of_a_page_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = len(re.findall(r"^>>> ", page.read_text(), re.MULTILINE))
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0
    assert tried == lines


def test_hello_world_starts_within_the_first_30_lines(readme):
    line, code, _ = next(blocks(readme))
    assert line <= 30
    assert "threshold_gating" in code


def test_every_output_belongs_to_a_block(readme):
    assert readme.count("<!-- output -->") == sum(out is not None for *_, out in blocks(readme))


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_two_commands_are_there(readme, command):
    assert re.search(rf"\b{command}\b(?!-)", readme)


def test_the_public_names_are_those_of_the_package(readme):
    assert sorted(re.findall(r"`([^`\s]+)`", between(readme, "names"))) == sorted(tg.__all__)
    assert len(set(tg.__all__)) == len(tg.__all__)
    assert all(hasattr(tg, name) for name in tg.__all__)


def test_table_2_is_what_the_code_prints(capsys):
    assert not main(["table", "--format", "markdown"])
    page = (ROOT / "docs" / "results.md").read_text()
    assert between(page, "table2") == capsys.readouterr().out.strip()


def test_the_first_screen_converts_a_network_and_audits_it(readme):
    _, code, output = next(blocks(readme))
    assert "tg.convert(" in code
    assert "tg.audit(gated" in code
    assert ", 0 left," in output


def test_it_stays_short_and_its_cells_are_short(readme):
    assert readme.count("\n") < 200
    cells = [c for row in re.findall(r"^\|.*\|$", readme, re.MULTILINE) for c in row.split("|")]
    assert max(len(cell.split()) for cell in cells) <= 15  # figures that need more: docs/results.md


def test_a_wrong_page_is_found():
    with pytest.raises(AssertionError, match="made up, line 2"):
        run("\n```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n", "made up")
    with pytest.raises(ZeroDivisionError):
        run("```python\nx = 0\n```\ntext\n```python\n1 / x\n```\n", "made up")
    with pytest.raises(AssertionError, match="0 parts are marked 'names'"):
        between("<!-- names:begin --> `a`", "names")


def test_a_right_page_is_let_through():
    run("```python\nx = 1\n```\n```python\nprint(x)\n```\n<!-- output -->\n```text\n1\n```\n", "ok")
    assert between("<!-- names:begin --> `a` <!-- names:end -->", "names") == "`a`"
