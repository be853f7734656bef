"""HTML report on networks that were converted: table, curves, and how it was made.

A plain function of records: `page(report)` is a whole HTML document that needs no other file and no
network. `style` has its looks.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from threshold_gating.show.css import document, listed
from threshold_gating.show.svg import Panel, draw

# Units in the last place of the largest score (float32) that exact gates may move any score by.
# Two at most were seen; how torch adds up differs with the machine, and a wrong gate is far off.
ROUNDING = 64


@dataclass(frozen=True)
class Row:
    """A network before and after conversion: fractions of the images, and scores (logits).

    `gates` says in which way it was converted, "" where there is one. `difference` is the largest
    between scores, `rms` the root mean square, `largest` the largest score of the original. `sites`
    counts those where gates were seen to run.
    """

    network: str
    gates: str
    K: int
    sites: int
    exact: bool
    baseline: float
    converted: float
    agreement: float
    difference: float
    rms: float
    largest: float

    @property
    def name(self) -> str:
        """The network, and in which way it was converted."""
        return ", ".join(filter(None, (self.network, self.gates)))

    @property
    def delta(self) -> float:
        """What the conversion adds to the accuracy."""
        return self.converted - self.baseline

    @property
    def bound(self) -> float:
        """The difference that rounding explains."""
        return ROUNDING * 2.0**-23 * self.largest

    @property
    def holds(self) -> bool:
        """Whether it is as its class says: an exact network answers the same, to rounding."""
        return not self.exact or (self.agreement == 1 and self.difference <= self.bound)


@dataclass(frozen=True)
class Report:
    """Everything on the page; a sample is a digit and its 8 x 8 grey values."""

    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]
    samples: tuple[tuple[int, bytes], ...]
    facts: Mapping[str, str]
    images: int


HEADER = (
    *("network", "K", "sites", "gates are", "before"),
    *("after", "delta", "same", "max diff", "rms diff"),
)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text."""
    what = "approximate" if not row.exact else "exact" if row.holds else "NOT EXACT"
    shares = f"{row.baseline:.2%}", f"{row.converted:.2%}", f"{100 * row.delta:+.2f}"
    differences = row.difference, row.rms
    return (
        *(row.name, str(row.K), str(row.sites), what),
        *(*shares, f"{row.agreement:.2%}", *(f"{d:.1e}" if d else "0" for d in differences)),
    )


LEGEND = {
    "K": "the most straight lines that one gate blends",
    "sites": "places where gates now stand; an LSTM or a GRU is one place with several inside",
    "gates are": "exact: the same function, to rounding; approximate: close to it",
    "before, after, delta": "test images read correctly (accuracy) by the original network and by "
    "the converted one, and the difference in percentage points",
    "same": "images that get the same answer from both networks, right or wrong",
    "max diff, rms diff": "the largest and the root mean square difference between the scores "
    "(logits) that the two networks give to each digit of each image",
}


def meaning(report: Report) -> list[str]:
    """The table in sentences, made from its numbers."""
    exact = [row for row in report.rows if row.exact]
    good = [row for row in exact if row.holds]
    said = [
        f"{row.name} should be exact and is not: {row.agreement:.2%} of the answers are the same, "
        f"and scores move by up to {row.difference:.1e} where rounding explains {row.bound:.1e}."
        for row in exact
        if not row.holds
    ]
    if good:
        names, most = _listed([row.name for row in good]), max(row.difference for row in good)
        said.append(
            f"Exact ({names}): every nonlinearity is the same function as before, written as a "
            f"gate. All {report.images} test images get the same answer, and no score moves by "
            f"more than {most:.1e}, which is rounding: scores reach "
            f"{max(row.largest for row in good):.0f}."
        )
    if close := [row for row in report.rows if not row.exact]:
        moves = _listed([f"{row.difference:.2g} ({row.name})" for row in close])
        least = min(row.agreement for row in close)
        same = (
            "every answer stays the same" if least == 1 else f"at least {least:.2%} of answers stay"
        )
        said.append(
            f"Approximate: GELU is no blend of a few straight lines, so its gates come close "
            f"instead, the closer the more lines they blend. Scores move by {moves}; {same}."
        )
    return said


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def page(report: Report) -> str:
    """The whole document."""
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in meaning(report))
    legend = f"<details><summary>What the columns mean</summary>{listed(LEGEND)}</details>"
    return document(
        _TITLE,
        f'<header><h1>{_TITLE}</h1><p class="lead">{_LEAD}</p>{_tiles(report)}</header>',
        f"<section><h2>What was done</h2>{_STEPS}{_digits(report)}</section>",
        f"<section><h2>Before and after</h2>{_table(report)}{paragraphs}{legend}</section>",
        f"<section><h2>Every gate, one by one</h2>{_KEY}{_curves(report)}</section>",
        f"<section><h2>How this page was made</h2>{listed(report.facts)}</section>",
    )


_TITLE = "Different networks, one kind of gate"
_LEAD = (
    "A neural network alternates sums with nonlinearities: functions such as ReLU, SiLU, GELU, "
    "tanh or softmax that bend what passes through. They look like many unrelated formulas. Here "
    "one part stands in the place of all of them, a <b>gate</b>: a few straight lines, and soft or "
    "hard switches that say which line counts where."
)
_STEPS = (
    "<ol><li>Small networks of different kinds learned to read handwritten digits, each with its "
    "usual nonlinearities.</li><li>Each nonlinearity was replaced by a gate. The weights, that is "
    "what was learned, stayed as they are; nothing was trained again.</li><li>Both versions read "
    "images that neither had seen, and their answers were compared one by one. Torch’s own "
    "functions were turned off: the gates were really evaluated.</li></ol>"
)
_KEY = (
    '<p class="key"><span class="k-original"></span> original function '
    '<span class="k-gate"></span> gate <span class="k-seen"></span> inputs that the place really '
    'gets <span class="k-rounding"></span> rounding of the computer (error below 1e−15)</p>'
    "<p>Above, the function and its gate over the number x that comes in: where they are the same, "
    "the thin line lies on the thick one. Below, how far they are apart, in powers of ten "
    "(1e−4 is 0.0001), computed with 16 digits. “Off by” is the largest distance on the inputs "
    "seen, with the 7 digits (float32) that the networks themselves compute with.</p>"
)


def _tiles(report: Report) -> str:
    exact = [row for row in report.rows if row.exact]
    sites = sum({row.network: row.sites for row in report.rows}.values())
    tiles = [
        (str(len({row.network for row in report.rows})), "networks, each of another kind"),
        (str(sites), "nonlinearities replaced by gates"),
    ]
    if exact:
        least = f"{min(row.agreement for row in exact):.2%}".replace(".00", "")
        tiles.append((least, "of the answers unchanged where gates are exact"))
    return (
        f'<div class="tiles">{"".join(f"<div><b>{n}</b>{text}</div>" for n, text in tiles)}</div>'
    )


def _digits(report: Report) -> str:
    pictures = "".join(
        f'<img width="56" height="56" alt="handwritten digit {digit}, 8 by 8 pixels" '
        f'src="data:image/png;base64,{base64.b64encode(_png(grey)).decode()}">'
        for digit, grey in report.samples
    )
    return f'<div class="digits">{pictures}</div><p class="small">Ten of the test images.</p>'


def _png(grey: bytes, side: int = 8) -> bytes:
    """A square of grey values as a PNG file; dark is high, as ink on paper."""
    lines = b"".join(
        b"\0" + bytes(255 - v for v in grey[k : k + side]) for k in range(0, len(grey), side)
    )
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _table(report: Report) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADER)
    body = ""
    for row in report.rows:
        first, *rest = cells(row)
        look = "" if row.holds else ' class="wrong"'
        body += f'<tr{look}><th scope="row">{escape(first)}</th>'
        pairs = zip(HEADER[1:], rest, strict=True)
        body += "".join(f'<td data-label="{k}">{escape(v)}</td>' for k, v in pairs) + "</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _curves(report: Report) -> str:
    parts = []
    for network, panels in groupby(report.panels, key=lambda panel: panel.network):
        figures = "".join(map(_figure, panels))
        parts.append(f'<h3>{escape(network)}</h3><div class="panels">{figures}</div>')
    return "".join(parts)


def _figure(panel: Panel) -> str:
    part = f"<br>{escape(panel.part)}" if panel.part else ""
    lines = "".join(
        f'<li><span class="mark g{k}"></span>{escape(line.label or f"K = {line.K}")}'
        f"{', exact' if line.exact else ''}: {_off(line.worst)}</li>"
        for k, line in enumerate(panel.lines)
    )
    return (
        f"<figure><figcaption><b>{escape(panel.kind)}</b> <code>{escape(panel.site)}</code>{part}"
        f"</figcaption>{draw(panel)}<ul>{lines}</ul><p>{panel.seen:,} inputs seen</p></figure>"
    )


def _off(worst: float) -> str:
    return f"off by {worst:.1e} at most" if worst else "no difference at all"
