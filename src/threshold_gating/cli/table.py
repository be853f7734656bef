"""`tg table`: rows of the taxonomy as text, Markdown or JSON, from the dicts that the code runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill, wrap
from typing import NamedTuple

from threshold_gating import taxonomy
from threshold_gating.cli.printing import UsageError, say, show
from threshold_gating.instance import TG
from threshold_gating.taxonomy import Row

WIDTH = 100


def table(args: argparse.Namespace) -> int:
    """`tg table`."""
    if args.all and args.names:
        raise UsageError("give names or --all, not both.")
    names, unknown = [], []
    for name in args.names:
        try:
            names.append(taxonomy.key_of(name))
        except ValueError as error:
            unknown.append(f"tg table: {error}")
    if unknown:
        say("\n".join(unknown))
        return 2
    keys = taxonomy.TAXONOMY if args.all else names or taxonomy.TABLE2
    entries = [Entry(key, taxonomy.TAXONOMY[key], taxonomy.ROWS[key]) for key in keys]
    missing = taxonomy.NOT_REPRESENTABLE if args.all else {}
    show(args, as_json(entries, missing), FORMATS[args.format](entries, missing))
    return 0


class Entry(NamedTuple):
    """A row to print: the key, the instance that runs under it, and what is known of it."""

    name: str
    t: TG
    row: Row


HEADER = ("activation", "family", "K", "tau", "theta", "s", "c", "other")
_SHORT = {"multiplicative": "mult.", "saturating": "satur.", "constant": "const."}
_MEANING = (
    "Errors: sup is the largest |error| over the line, RMS the root mean square error for inputs "
    "from N(0, 1), rel that RMS divided by the RMS of the function itself."
)
_READING = (
    "Settings: K branches s x + c, low to high in x, cut by K - 1 thresholds theta with sharpness "
    "tau (inf: a switch)"
)
_OTHER = {
    "clamp": "the bounds of the output",
    "own": "the side, lo or hi, that x == theta belongs to, where it is not lo throughout",
    "q": "coefficients of x^2",
    "product": "the gates of the paper's appendix",
}
_NORMS = {"sup": "sup", "RMS": "rms", "rel": "rel_rms"}
_FAMILIES = (
    "Families: mult. (multiplicative), an outer branch carries x on; satur. (saturating), only "
    "inner ones do, or a clamp bounds the output; const. (constant), no branch does."
)


def as_json(entries: Iterable[Entry], missing: dict[str, str]) -> str:
    """Every digit: `TG.from_dict(row["instance"])` is the instance that runs."""
    rows = [
        {
            "name": name,
            "family": taxonomy.family(t),
            **{k: getattr(row, k) for k in ("exact", "sup", "rms", "rel_rms", "paper", "note")},
            "instance": t.to_dict(),
        }
        for name, t, row in entries
    ]
    return json.dumps({"rows": rows, "not_representable": missing}, indent=2, allow_nan=False)


def as_markdown(entries: Iterable[Entry], missing: dict[str, str]) -> str:
    """One line for each row, for a page that is rendered."""
    entries = list(entries)
    header = (*HEADER, *_NORMS, "paper", "note")
    rows: list[Sequence[str]] = [header, ("---",) * len(header)]
    for entry in entries:
        row = entry.row
        errors = (_number(getattr(row, field)) for field in _NORMS.values())
        shown = ("exact", "", "") if row.exact else errors
        rows.append((*_cells(entry), *shown, row.paper, row.note))
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if missing:
        lines += ["", "Not representable:", ""]
        lines += [f"- {name}: {reason}" for name, reason in missing.items()]
    return "\n".join([*lines, "", _MEANING, "", _reading(entries)])


def as_text(entries: Iterable[Entry], missing: dict[str, str]) -> str:
    """Within `WIDTH` columns: long lists of parameters go on in the lines below."""
    entries = list(entries)
    rows: list[Sequence[str]] = [(*HEADER, "error")]
    for entry in entries:
        name, family, *numbers, other = _cells(entry)
        rows.append((name, _SHORT[family], *numbers, other.replace(", ", "\n"), _error(entry.row)))
    lines = _aligned(rows, [_remark(entry.row) for entry in entries])
    if missing:
        lines += ["", "Not representable:"]
        lines += [_indented(f"{name}: {reason}") for name, reason in missing.items()]
    same = "exact*: the paper's Table 2 calls it exact too. "
    starred = any(entry.row.exact and entry.row.paper == "exact" for entry in entries)
    legend = ((same if starred else "") + _MEANING, _reading(entries), _FAMILIES)
    return "\n".join([*lines, "", *(fill(text, WIDTH) for text in legend)])


FORMATS: dict[str, Callable[[Iterable[Entry], dict[str, str]], str]] = {
    "text": as_text,
    "markdown": as_markdown,
}


def _cells(entry: Entry) -> tuple[str, ...]:
    name, t, _ = entry
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    other = []
    if t.clamp is not None:
        other.append(f"clamp {_numbers(t.clamp)}")
    if t.owner is not None and "hi" in t.owner:
        other.append(f"own {' '.join(t.owner)}")
    if t.q is not None:
        other.append(f"q {_numbers(t.q)}")
    if t.form != "softmax":
        other.append(t.form)
    lists = (_numbers(w) for w in (taus, t.theta, t.s, t.c))
    return name, taxonomy.family(t), str(t.K), *lists, ", ".join(other)


def _reading(entries: Iterable[Entry]) -> str:
    """How the settings are to be read, as far as these rows use them."""
    used = " ".join(_cells(entry)[-1] for entry in entries).split()
    other = (f"{word}: {meaning}" for word, meaning in _OTHER.items() if word in used)
    return "; ".join([_READING, *other]) + "."


def _number(value: float) -> str:
    if 1e4 <= abs(value) < 1e7:
        return f"{value:.0f}"  # shorter than 4.424e+05
    return f"{value + 0.0:.4g}"  # adding 0 turns -0 into 0


def _numbers(values: Iterable[float]) -> str:
    return " ".join(map(_number, values))


def _error(row: Row) -> str:
    if row.exact:
        return "exact*" if row.paper == "exact" else "exact"
    return "\n".join(f"{word} {_number(getattr(row, field))}" for word, field in _NORMS.items())


def _remark(row: Row) -> str:
    """What stands under a row: the paper's word where it is not ours, and the note."""
    paper = "" if row.exact and row.paper == "exact" else row.paper
    return "; ".join(filter(None, (paper and f"paper: {paper}", row.note)))


def _indented(text: str) -> str:
    return fill(text, WIDTH, initial_indent="    ", subsequent_indent="      ")


def _aligned(rows: Sequence[Sequence[str]], remarks: Sequence[str]) -> list[str]:
    """Lines of a table under its header, with the remark of each row below it."""
    widths = _widths(rows)
    lines = []
    for row, remark in zip(rows, ["", *remarks], strict=True):
        cells = [_lines(cell, width) for cell, width in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            parts = [cell[k] if k < len(cell) else "" for cell in cells]
            line = "  ".join(part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
        lines += [_indented(remark)] if remark else []
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """As wide as the contents, then the widest that can be broken narrowed until all fit."""
    columns = list(zip(*rows, strict=True))
    widths = [max(len(line) for cell in col for line in cell.split("\n")) for col in columns]
    words = [max(len(word) for cell in col for word in [*cell.split(), ""]) for col in columns]
    # Lists of numbers are broken first, what else is set only if that is not enough.
    for breakable in (range(3, 7), range(3, len(HEADER))):
        while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
            spare = [k for k in breakable if widths[k] > words[k]]
            if not spare:
                break
            widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def _lines(cell: str, width: int) -> list[str]:
    return [
        part
        for line in cell.split("\n")
        for part in wrap(line, width, break_long_words=False, break_on_hyphens=False)
    ] or [""]
