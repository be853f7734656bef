"""Every path and every dotted name in the maintainers' pages exists."""

import importlib
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

import threshold_gating as tg
from tests.test_readme import blocks
from threshold_gating.cli import main, options
from threshold_gating.nn.spec import Share

ROOT = Path(__file__).parents[1]
PAGES = ["docs/architecture.md", "CONTRIBUTING.md"]

_FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(\(.*\))?")
_SUFFIXES = (".py", ".md", ".toml", ".txt")


def spans(text):
    """The pieces of `text` in single backticks, outside fenced blocks."""
    return _SPAN.findall(_FENCED.sub("", text))


def is_path(span):
    return not re.search(r"[\s()]", span) and ("/" in span or span.endswith(_SUFFIXES))


def path_exists(span):
    """Whether `span` is in the tree; a placeholder (`tests/test_<module>.py`) matches anything."""
    pattern = re.sub(r"<[^>]*>", "*", span.rstrip("/"))
    found = list(ROOT.glob(pattern))
    return any(path.is_dir() for path in found) if span.endswith("/") else bool(found)


def resolves(name):
    """Whether `name` can be reached by importing modules and reading attributes."""
    if name == "tg" or name.startswith("tg."):
        name = "threshold_gating" + name.removeprefix("tg")
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def mistakes(text):
    """What `text` mentions in backticks and does not exist."""
    wrong = []
    for span in spans(text):
        if is_path(span):
            if not path_exists(span):
                wrong.append(f"no such path: {span}")
        elif (dotted := _DOTTED.fullmatch(span)) and not resolves(dotted[1]):
            wrong.append(f"no such name: {span}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_name_exists(page):
    text = (ROOT / page).read_text()
    assert spans(text)
    assert not mistakes(text)


def test_mistakes_are_found():
    page = """
    Look into `src/threshold_gating/made_up.py`, `NOWHERE.md`, `tests/made_up_<module>.py` and
    `pyproject.toml/`; call `tg.made_up`, `tg.made_up.blend(x)`, `threshold_gating.made_up` or
    `torch.nn.MadeUp`; `made_up.name` is nothing.
    """
    assert mistakes(page) == [
        "no such path: src/threshold_gating/made_up.py",
        "no such path: NOWHERE.md",
        "no such path: tests/made_up_<module>.py",
        "no such path: pyproject.toml/",
        "no such name: tg.made_up",
        "no such name: tg.made_up.blend(x)",
        "no such name: threshold_gating.made_up",
        "no such name: torch.nn.MadeUp",
        "no such name: made_up.name",
    ]


def test_what_exists_and_what_is_no_name_is_let_through():
    page = """
    `src/threshold_gating/` has `src/threshold_gating/__init__.py`; `tests/test_<module>.py` tests
    it with `tg.__version__`, `torch.nn.Module`, `torch.nn.functional.silu(x)`, `x`, `make test`,
    `s_k x + c_k`, `0.5` and `a / b`.

    ```python
    made.up()  # `also.made.up`
    ```
    """
    assert mistakes(page) == []


TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()
# Messages of torch, and names of classes; the others are ours.
NOT_OURS = {"operator torchvision::nms does not exist", "Missing key(s) in state_dict"}


@pytest.mark.parametrize(
    "message", sorted(set(re.findall(r"^`(.+?)`", TROUBLE, re.MULTILINE)) - NOT_OURS)
)
def test_every_message_of_the_troubleshooting_page_is_one_that_the_code_prints(message):
    files = (ROOT / "src").rglob("*.py")
    # strings are joined over lines, and names are filled in
    text = "\n".join(re.sub(r'"\s*f?"', "", file.read_text()) for file in files)
    parts = [part.strip(" ;") for part in message.split("...")]
    assert all(part in text for part in parts if part)


def commands(text):
    """The lines of shell blocks that call `tg`, without their comments."""
    shell = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(shell).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("tg ")]
    return [words[: words.index("|")] if "|" in words else words for words in found]


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_command_of_a_page_is_one_that_there_is(page):
    for words in commands(page.read_text()):
        options.parser().parse_args(words)  # ends the test if an option is not there


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "export"])
def test_the_commands_of_the_cookbook_run_on_the_network_it_gives(
    command, tmp_path, monkeypatch, capsys
):
    text = (ROOT / "docs/cookbook.md").read_text()
    (made,) = (code for _, code, _ in blocks(text) if "def make():" in code)
    (words,) = (words for words in commands(text) if words[0] == command)
    (tmp_path / "net.py").write_text(made)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0, capsys.readouterr().err


def test_families_and_shares_of_the_glossary_are_those_that_there_are():
    rows = dict(re.findall(r"^\| (\w+) \| (.+?) \|", (ROOT / "docs/glossary.md").read_text(), re.M))
    families = {tg.family(t) for t in tg.TAXONOMY.values()}
    assert set(re.findall(r"\w+", rows["family"].split(":")[1])) - {"or", "Table", "3"} == families
    assert re.findall(r"`(\w+)`", rows["share"]) == sorted(get_args(Share), key=rows["share"].find)
