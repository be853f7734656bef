"""What opens below a site in a table: pictures of its functions, and facts in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from threshold_gating import taxonomy
from threshold_gating.instance import TG
from threshold_gating.show.page import Figure, Row, Table
from threshold_gating.show.panel import line, panel
from threshold_gating.show.seen import Seen
from threshold_gating.show.svg import draw

# Characters of a page, of which a site takes this many without a picture; a picture takes 3,500.
_PAGE, _SITE = 4_700_000, 2_400
_LINES = 4  # gates that a picture has
_LISTED = 64  # gates of a site that are written out
_NO_PICTURE = "No picture: the page would be too large. Its numbers are in the JSON."


def figures(seen: Iterable[Seen], worst: Mapping[str, float | None]) -> dict[str, list[Figure]]:
    """The pictures of each site, by its name; those of the largest error first, as far as a page
    has room. `worst` has the error of each site."""
    order = sorted(seen, key=lambda each: -(worst.get(each.site) or 0.0))
    room, found = _PAGE - _SITE * len(order), dict[str, list[Figure]]()
    for each in order:
        made = _figure(each, worst.get(each.site), room > 0)
        room -= len(made.svg)
        found.setdefault(each.site, []).append(made)
    return found


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    legend: Mapping[str, str],
    seen: Sequence[Seen],
) -> Table:
    """A table whose first cells name sites ("act"), or one function of them ("lstm#0/i"), which
    open."""
    pictures, made = figures(seen, {}), []
    for cells in rows:
        name, site = cells[0], cells[0].partition("/")[0]
        one = [each for each in seen if each.name == name]
        of = one or [each for each in seen if each.site == site]
        shown = [f for f in pictures.get(site, ()) if not one or f.name == name]
        facts = dict(zip(header[1:], cells[1:], strict=True))
        facts["instance"] = gates(of) if of else "no more is known of it"
        made.append(Row(cells, facts=facts, figures=shown))
    return Table(header, made, legend)


def _figure(seen: Seen, worst: float | None, drawn: bool) -> Figure:
    title = f"{seen.kind}: {seen.note}" if seen.note else seen.kind
    if not drawn:
        return Figure(seen.name, title, "", f"{seen.values.described()}. {_NO_PICTURE}")
    n, many = min(len(seen.gates), _LINES), len(seen.gates)
    chosen = [round(k * (many - 1) / max(n - 1, 1)) for k in range(n)]
    labels = [f"gate {k + 1} of {many}" if many > 1 else "" for k in chosen]
    pairs = zip(chosen, labels, strict=True)
    lines = [line(seen, seen.gates[k], label, bool(seen.exact), worst) for k, label in pairs]
    made = panel("", seen, lines)
    keys = [(k, label) for k, label in enumerate(labels) if label]
    return Figure(seen.name, title, draw(made), made.words, keys)


def gates(seen: Sequence[Seen]) -> str:
    """The gates of a site in words; of several functions each by its name."""
    named = {each.part or each.kind: _gates(each.gates) for each in seen if each.gates}
    if len(seen) == 1:
        return next(iter(named.values()), "none that is one function for every element")
    return "; ".join(f"{part}: {text}" for part, text in named.items())


def _gates(each: tuple[TG, ...]) -> str:
    if len(each) == 1:
        name = taxonomy.name_of(each[0])
        return f"{name}, {each[0]}" if name else repr(each[0])
    spans = []
    for what in ("tau", "theta", "s", "c"):
        rows = [_numbers(getattr(t, what)) for t in each]
        spans += [
            f"{what}{k if len(rows[0]) > 1 else ''} {min(column):.4g} to {max(column):.4g}"
            for k, column in enumerate(zip(*rows, strict=True))
        ]
    return f"{len(each)} different ones, K = {each[0].K}: {', '.join(spans)}"


def _numbers(value: Any) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def functions(seen: Iterable[Seen]) -> list[dict[str, Any]]:
    """What was seen, as JSON values: of many gates the first are written out."""
    return [
        {
            "site": each.site,
            "part": each.part,
            "kind": each.kind,
            "note": each.note,
            "exact": each.exact,
            "gates": [t.to_dict() for t in each.gates[:_LISTED]],
            "different_gates": len(each.gates),
            **each.values.to_dict(),
        }
        for each in seen
    ]


def finite(value: float | None) -> float | None:
    """What a column is sorted by: nothing for NaN."""
    return None if value is None or math.isnan(value) else value
