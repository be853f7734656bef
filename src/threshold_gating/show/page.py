"""Pages in HTML: a template filled in, as one file that needs no other file and no network.

Everything on a page is escaped by jinja2 (names come from networks of users); no script runs but
`page.js`, whose digest stands in the page's policy. Without scripts a page shows all but its JSON,
in the order in which it was written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from threshold_gating.conversion.text import jsonable


class Figure(NamedTuple):
    """A picture as an SVG element, and what stands below it: labels with their colour, words.

    `name` is that of the function, `title` says what it is.
    """

    name: str
    title: str
    svg: str
    words: str
    lines: Sequence[tuple[int, str]] = ()


class Row(NamedTuple):
    """A row of a table: cells as text, what to sort them by where that is not the text, and what a
    click opens."""

    cells: Sequence[str]
    keys: Sequence[Any] | None = None
    wrong: bool = False
    facts: Mapping[str, str] | None = None
    figures: Sequence[Figure] = ()


class Table(NamedTuple):
    """Rows under a header, and what its columns mean."""

    header: Sequence[str]
    rows: Sequence[Row]
    legend: Mapping[str, str]


def plain(header: Sequence[str], rows: Sequence[Sequence[str]], **legend: str) -> Table:
    """A table of which nothing opens."""
    return Table(header, [Row(cells) for cells in rows], legend)


def needed() -> Any:
    """jinja2, or how to get it."""
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a page needs jinja2, which is not installed: pip install 'threshold-gating[report]'",
            name="jinja2",
        ) from error
    return jinja2


@cache
def _environment() -> Any:
    jinja2 = needed()
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__.rpartition(".")[0], "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return made


def render(
    template: str,
    *,
    title: str,
    facts: Mapping[str, str],
    data: Mapping[str, Any] | None = None,
    **context: Any,
) -> str:
    """The whole document.

    Args:
        template: its file in `templates`.
        title: of the page.
        facts: how it was made.
        data: what "Download JSON" gives; a number that JSON has not (inf, nan) is a string.
        context: what else the template names.
    """
    environment = _environment()
    script, _, _ = environment.loader.get_source(environment, "page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    about = {"title": title, "facts": facts, "script": script, "digest": digest}
    text: str = environment.get_template(template).render(
        **about, **context, data=None if data is None else jsonable(dict(data))
    )
    return text


_PARTS: dict[str, Any] = {"tiles": (), "failed": (), "warnings": (), "aside": "", "beside": {}}


def report(template: str = "report.html", **context: Any) -> str:
    """A page on the sites of a network; what is not given of a template's parts is left out."""
    return render(template, **{**_PARTS, **context})


def write(path: Path | str, text: str) -> None:
    """Write a page; what UTF-8 has no character for (a name may hold anything) is spelled out."""
    Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
