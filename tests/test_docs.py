"""Every path and every dotted name in the maintainers' pages exists."""

import importlib
import re
from pathlib import Path

import pytest

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
