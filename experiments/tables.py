"""Tables in Markdown, for the pages that experiments make of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    made = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in made)
