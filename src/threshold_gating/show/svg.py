"""SVG panel of one gate: the function and its gate, the error, and the inputs.

Plain text, so that a page needs no other file; colours are classes of the page's own style, which
lets one picture serve light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from threshold_gating.show.panel import Panel

_WIDTH, _LEFT, _RIGHT = 360, 40, 352
_TOP, _BOTTOM = 10, 158  # of the curves
_HIGH, _LOW = 186, 240  # of the error
_HEIGHT = 262
# How many powers of ten below 1 the error is drawn: float64 rounds at 1e-16; fits are far above.
_EXACT, _FITTED = 17, 8
_SEEN = 0.02  # of the picture's units: what is nearer to a line lies on it


def draw(panel: Panel) -> str:
    """The panel as an SVG element with a description of what is to be seen."""
    low, high = _span(panel)
    across = _Scale(panel.x[0], panel.x[-1], _LEFT, _RIGHT)
    up = _Scale(low, high, _BOTTOM, _TOP)
    decades = _EXACT if any(line.exact for line in panel.lines) else _FITTED
    error = _Scale(-decades, _top(panel), _LOW, _HIGH)
    words = escape(described(panel), quote=True)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}">',
        _histogram(panel),
        *_axes(across, up, error),
        _path("original", panel.x, panel.original, across, up),
    ]
    for k, line in enumerate(panel.lines):
        logs = [math.log10(max(e, 10.0**-decades)) for e in line.error]
        parts.append(_path(f"gate g{k}", panel.x, line.y, across, up))
        parts.append(_path(f"gate g{k}", panel.x, logs, across, error))
    return "".join([*parts, "</svg>"])


def described(panel: Panel) -> str:
    """The picture in words, for those who cannot see it."""
    what = " ".join(filter(None, (panel.network, panel.site, panel.part)))
    gates = "; ".join(
        f"{line.label + ', ' if line.label else ''}{line.K} branches"
        + (f", largest error on its inputs {line.worst:.1e}" if line.worst is not None else "")
        for line in panel.lines
    )
    said = f"{panel.kind} and its gate, {gates}" if gates else panel.kind
    return f"{what}: {said}. {panel.words}."


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
    every = (*panel.original, *(y for line in panel.lines for y in line.y))
    values = [y for y in every if math.isfinite(y)] or [0.0, 1.0]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _top(panel: Panel) -> int:
    """The power of ten that no error is above, 0 at least."""
    errors = [e for line in panel.lines for e in line.error if math.isfinite(e)]
    return max(0, math.ceil(math.log10(max([*errors, 1.0]))))


def _path(kind: str, x: Sequence[float], y: Sequence[float], across: _Scale, up: _Scale) -> str:
    """A line of straight pieces; points on the piece between their neighbours are left out."""
    points = [(across(a), up(b)) for a, b in zip(x, y, strict=bool(y)) if math.isfinite(b)]
    if not points:
        return ""
    drawn = [points[0]]
    for k in range(1, len(points) - 1):
        (x0, y0), (x1, y1), (x2, y2) = drawn[-1], points[k], points[k + 1]
        if abs(y0 + (y2 - y0) * (x1 - x0) / (x2 - x0) - y1) > _SEEN:
            drawn.append(points[k])
    drawn.append(points[-1])
    return f'<path class="{kind}" d="M' + " ".join(f"{a:.1f} {b:.1f}" for a, b in drawn) + '"/>'


def _histogram(panel: Panel) -> str:
    """What the site sees, as high as half the curves' field at the fullest bin."""
    most, step = max(*panel.counts, 1.0), (_RIGHT - _LEFT) / len(panel.counts)
    height = (_BOTTOM - _TOP) / 2
    tops = "".join(f"V{_BOTTOM - height * count / most:.1f}h{step:g}" for count in panel.counts)
    return f'<path class="seen" d="M{_LEFT} {_BOTTOM}{tops}V{_BOTTOM}"/>'


def _axes(across: _Scale, up: _Scale, error: _Scale) -> list[str]:
    frame = f"M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}M{_LEFT} {_HIGH}V{_LOW}H{_RIGHT}"
    grid, words = "", f'<text x="{_LEFT}" y="{_HIGH - 7}">distance of gate and original</text>'
    for tick in _ticks(across.low, across.high):
        x = f"{across(tick):.1f}"
        grid += f"M{x} {_TOP}V{_BOTTOM}M{x} {_HIGH}V{_LOW}"
        words += f'<text x="{x}" y="{_LOW + 14}" text-anchor="middle">{_number(tick)}</text>'
    heights = [(up(tick), _number(tick)) for tick in _ticks(up.low, up.high)]
    powers = (error.high, -8, -16) if error.low < -_FITTED else (error.high, -4, -8)
    heights += [(error(k), _number(10.0**k) if k > -4 else f"1e−{-k}") for k in powers]
    for at, label in heights:
        grid += f"M{_LEFT} {at:.1f}H{_RIGHT}"
        words += f'<text x="{_LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>'
    parts = [f'<path class="grid" d="{grid}"/><path class="axis" d="{frame}"/>{words}']
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
