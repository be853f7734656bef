"""SVG panel of one gate: the function and its gate, the error, and the inputs.

Plain text, so that a page needs no other file; colours are classes of the page's own style, which
lets one picture serve light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Line:
    """One choice of gates: its values at the panel's x, and its error in the same places.

    `error` is the largest in the neighbourhood of each x, in float64; `worst` is the largest on
    all inputs that the site saw, as it runs, in float32.
    """

    label: str
    K: int
    exact: bool
    y: tuple[float, ...]
    error: tuple[float, ...]
    worst: float


@dataclass(frozen=True)
class Panel:
    """A function at a site, its gates, and how many of its `seen` inputs fall into equal bins of x.

    `part` says which function it is where a site has several.
    """

    network: str
    site: str
    part: str
    kind: str
    x: tuple[float, ...]
    original: tuple[float, ...]
    lines: tuple[Line, ...]
    counts: tuple[float, ...]
    seen: int


_WIDTH, _LEFT, _RIGHT = 360, 40, 352
_TOP, _BOTTOM = 10, 158  # of the curves
_HIGH, _LOW = 186, 240  # of the error
_HEIGHT = 262
# How many powers of ten below 1 the error is drawn: float64 rounds at 1e-16; fits are far above.
_EXACT, _FITTED = 17, 8


def draw(panel: Panel) -> str:
    """The panel as an SVG element with a description of what is to be seen."""
    low, high = _span(panel)
    across = _Scale(panel.x[0], panel.x[-1], _LEFT, _RIGHT)
    up = _Scale(low, high, _BOTTOM, _TOP)
    decades = _EXACT if any(line.exact for line in panel.lines) else _FITTED
    error = _Scale(-decades, 0, _LOW, _HIGH)
    words = escape(described(panel), quote=True)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}">',
        _histogram(panel),
        *_axes(across, up, error),
        f'<path class="original" d="{_path(panel.x, panel.original, across, up)}"/>',
    ]
    for k, line in enumerate(panel.lines):
        logs = [math.log10(max(e, 10.0**-decades)) for e in line.error]
        style = f'class="gate g{k}"'
        parts += [
            f'<path {style} d="{_path(panel.x, line.y, across, up)}"/>',
            f'<path {style} d="{_path(panel.x, logs, across, error)}"/>',
        ]
    return "".join([*parts, "</svg>"])


def described(panel: Panel) -> str:
    """The picture in words, for those who cannot see it."""
    what = " ".join(filter(None, (panel.network, panel.site, panel.part)))
    gates = "; ".join(
        f"{line.label + ', ' if line.label else ''}{line.K} branches, "
        f"largest error on its inputs {line.worst:.1e}"
        for line in panel.lines
    )
    return f"{what}: {panel.kind} and its gate over {panel.seen:,} inputs seen. {gates}."


@dataclass(frozen=True)
class _Scale:
    """From values to places in the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _span(panel: Panel) -> tuple[float, float]:
    values = [*panel.original, *(y for line in panel.lines for y in line.y)]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _path(x: Sequence[float], y: Sequence[float], across: _Scale, up: _Scale) -> str:
    return "M" + " ".join(
        f"{across(a):.1f} {up(b):.2f}".replace(".00", "") for a, b in zip(x, y, strict=True)
    )


def _histogram(panel: Panel) -> str:
    """What the site sees, as high as half the curves' field at the fullest bin."""
    most, step = max(*panel.counts, 1.0), (_RIGHT - _LEFT) / len(panel.counts)
    height = (_BOTTOM - _TOP) / 2
    bars = "".join(
        f"M{_LEFT + k * step:.1f} {_BOTTOM}v{-height * count / most:.1f}h{step:.1f}V{_BOTTOM}"
        for k, count in enumerate(panel.counts)
        if count
    )
    return f'<path class="seen" d="{bars}"/>'


def _axes(across: _Scale, up: _Scale, error: _Scale) -> list[str]:
    frame = f"M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}M{_LEFT} {_HIGH}V{_LOW}H{_RIGHT}"
    parts = [
        f'<text x="{_LEFT}" y="{_HIGH - 7}">distance of gate and original</text>',
        f'<path class="axis" d="{frame}"/>',
    ]
    for tick in _ticks(across.low, across.high):
        x = f"{across(tick):.1f}"
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{_BOTTOM}M{x} {_HIGH}V{_LOW}"/>')
        parts.append(f'<text x="{x}" y="{_LOW + 14}" text-anchor="middle">{_number(tick)}</text>')
    heights = [(up(tick), _number(tick)) for tick in _ticks(up.low, up.high)]
    powers = (0, -8, -16) if error.low < -_FITTED else (0, -4, -8)
    heights += [(error(k), f"1e−{-k}" if k else "1") for k in powers]
    for at, label in heights:
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    if error.low < -_FITTED:
        high, width = error(-15), _RIGHT - _LEFT
        place = f'x="{_LEFT}" y="{high:.1f}" width="{width}" height="{_LOW - high:.1f}"'
        parts.insert(0, f'<rect class="rounding" {place}/>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, four to nine of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= max(m for m in (1, 2, 5) if (high - low) / (m * step) >= 4)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:g}".replace("-", "−")
