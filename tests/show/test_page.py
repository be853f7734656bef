"""A page is a whole, needs nothing else, and shows names of networks as text, whatever they are."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from threshold_gating.show import page
from threshold_gating.show.page import Figure, Row, Table

VOID = {"meta", "img", "br"}
ODD = "<script>alert('x')</script>\"&'] --> </style> \u202e ünïcode {{ 7*7 }}"


class Page(HTMLParser):
    """Reads a document: elements that are not closed in order, references, scripts, all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.mistakes, self.refers, self.alts, self.text = [], [], [], [], []
        self.scripts, self.ids, self.policy = [], [], ""
        self.feed(text)
        self.close()
        self.mistakes += self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.refers += [given[k] for k in ("src", "href", "xlink:href", "data") if k in given]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag == "img" or given.get("role") == "img":
            self.alts.append(given.get("alt") or given.get("aria-label"))
        if tag == "script":
            self.scripts.append([given.get("type"), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass  # <path/>

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(f"/{tag}")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def data(self):
        """What "Download JSON" gives."""
        (text,) = (text for kind, text in self.scripts if kind == "application/json")
        return json.loads(text, parse_constant=pytest.fail)


def check_page(text):
    """A page with nothing left open, no reference to anything outside, a word for each picture, and
    one script that runs, which its policy names."""
    read = Page(text)
    assert not read.mistakes
    assert all(a.startswith(("data:image/png;base64,", "#")) for a in read.refers)
    assert {a[1:] for a in read.refers if a.startswith("#")} <= set(read.ids)
    assert len(set(read.ids)) == len(read.ids)
    assert all(read.alts)
    assert not re.search(r"https?://|file:|url\(|@import|<link|/tmp/|/home/", text)
    (script,) = (text for kind, text in read.scripts if kind is None)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert read.policy.startswith("default-src 'none'; ")
    assert read.policy.endswith(f"script-src 'sha256-{digest}'")
    return read


def made(name="act", **more):
    figure = Figure(name, name, '<svg role="img" aria-label="a curve"></svg>', name, [(0, name)])
    row = Row((name, "1"), (None, 2.5), False, {name: name}, (figure,))
    about = {"title": name, "facts": {"of": name}, "sentences": [name], "warnings": [name]}
    return page.report(**about, sites=Table(("site", "n"), [row], {"n": name}), **more)


def test_a_page_is_whole_and_opens_its_rows_by_links():
    read = check_page(made(data={"a": [1, float("nan"), float("inf")]}))
    assert read.data == {"a": [1, "nan", "inf"]}
    assert set(read.refers) == {"#site1-more", "#site1"}


def test_names_are_text_and_not_markup_wherever_they_stand():
    text = made(ODD, data={ODD: ODD})
    read = check_page(text)
    assert read.data == {ODD: ODD}
    # title, heading, sentence, warning; cell, heading, three of a figure, two facts; two lists
    assert read.text.count(ODD) == 13
    assert "<script>alert" not in text


def test_what_utf_8_has_no_character_for_is_spelled_out(tmp_path):
    page.write(tmp_path / "odd.html", made("a\ud800b"))
    assert r"a\ud800b" in (tmp_path / "odd.html").read_text("utf-8")


@pytest.mark.parametrize(
    "wrong",
    [
        "<p><b>bold</p>",
        "<p>",
        '<img src="picture.png" alt="a picture">',
        '<a href="https://example.org">there</a>',
        '<a href="#nowhere">there</a>',
        '<svg role="img"></svg>',
        "<style>@import 'other.css';</style>",
        "<script>other()</script>",
    ],
)
def test_a_wrong_page_is_found(wrong):
    with pytest.raises((AssertionError, ValueError)):
        check_page(made().replace("<main>", f"<main>{wrong}"))


def test_without_jinja2_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page._environment.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"jinja2.*'threshold-gating\[report\]'"):
        made()
