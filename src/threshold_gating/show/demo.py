"""The page of the demo: networks before and after, the curves of their gates, how it was made."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from threshold_gating.show import page
from threshold_gating.show.page import Table
from threshold_gating.show.panel import Panel
from threshold_gating.show.svg import draw

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


def html(report: Report) -> str:
    """The whole document."""
    digits = [(digit, base64.b64encode(_png(grey)).decode()) for digit, grey in report.samples]
    groups = groupby(report.panels, key=lambda panel: panel.network)
    return page.render(
        "demo.html",
        title="Different networks, one kind of gate",
        facts=report.facts,
        tiles=_tiles(report),
        digits=digits,
        table=Table(HEADER, [page.Row(cells(r), wrong=not r.holds) for r in report.rows], LEGEND),
        meaning=meaning(report),
        curves=[(network, [*map(_figure, panels)]) for network, panels in groups],
    )


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    exact = [row for row in report.rows if row.exact]
    sites = sum({row.network: row.sites for row in report.rows}.values())
    tiles = [
        (str(len({row.network for row in report.rows})), "networks, each of another kind", ""),
        (str(sites), "nonlinearities replaced by gates", ""),
    ]
    if exact:
        least = f"{min(row.agreement for row in exact):.2%}".replace(".00", "")
        tiles.append((least, "of the answers unchanged where gates are exact", ""))
    return tiles


def _figure(panel: Panel) -> page.Figure:
    lines = [
        (k, f"{line.label or f'K = {line.K}'}{', exact' if line.exact else ''}: {_off(line.worst)}")
        for k, line in enumerate(panel.lines)
    ]
    title = " ".join(filter(None, (panel.kind, panel.site, panel.part)))
    return page.Figure(panel.site, title, draw(panel), panel.words, lines)


def _off(worst: float | None) -> str:
    return f"off by {worst:.1e} at most" if worst else "no difference at all"


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
