"""Reports as text and as JSON: lines of a table, long lists in few words, numbers JSON has not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

WIDTH = 100


def jsonable(value: Any) -> Any:
    """The same in JSON's terms: lists alone, and texts for the numbers it has not (inf, nan)."""
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table under its header, within `WIDTH`.

    A long kind is cut; a name that is too long has a line to itself, above its row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for column, least in ((1, 12), (0, 0)):
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] -= max(0, min(excess, widths[column] - least))
    lines = []
    for first, second, *rest in (rows[0], ["-" * w for w in widths], *rows[1:]):
        if len(first) > widths[0]:
            lines.append(first[-WIDTH:])
            first = ""
        second = second if len(second) <= widths[1] else second[: widths[1] - 1] + "…"
        cells = zip((first, second, *rest), widths, strict=True)
        lines.append("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    return lines


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
