"""What opens below a site in a table: pictures of its functions, and facts in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from threshold_gating import taxonomy
from threshold_gating.conversion import certificate as certificates
from threshold_gating.conversion.audit import HEADER, Audit, cells
from threshold_gating.conversion.calibration import SiteFit
from threshold_gating.conversion.certificate import Certificate
from threshold_gating.conversion.certificate import Row as Certified
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


LEGEND = {
    "K": "straight lines that a gate blends; nothing for what is more than one function",
    "max, rms": "largest and root mean square distance from the original at this site alone, given "
    "the original's inputs",
    "rel": "the RMS distance over the RMS of the original's values",
    "ulp": "the largest distance in units in the last place, of exact sites; bitwise: none at all",
    "bound": "what is allowed, of ulp or of rel",
    "calls": "of the site in one run",
    "class": "exact: the same function, to rounding; approximate: another one, within the bound; "
    "accepted by tol: within the caller's bound alone; learned: compared as it was at its start",
}
AUDITED = {
    "K": LEGEND["K"],
    "class": "exact: one of torch's functions, to rounding; learned: what training made of it",
    "ran": "gates, or native: torch's own op, which is the same function",
    "calls": LEGEND["calls"],
}


def sites(
    certificate: Certificate | None,
    audit: Audit,
    seen: Sequence[Seen],
    fits: Mapping[str, SiteFit],
) -> Table:
    """The table of a certificate, or where there is none of an audit, whose rows open."""
    known: dict[str, list[Seen]] = {}
    for each in seen:
        known.setdefault(each.site, []).append(each)
    audited = {site.name: site for site in audit.sites}
    rows = {} if certificate is None else {row.site: row for row in certificate.rows}
    # of a site that was trained since no error is known as it is now
    worst = {n: row.max for n, row in rows.items() if row.ok is not None and not row.has_moved}
    pictures = figures(seen, worst)

    def opening(name: str, row: Row, facts: dict[str, str]) -> Row:
        of = known.get(name, ())
        facts["gates"] = gates(of) if of else "it was not seen running by itself"
        if at := audited.get(name):
            ran = "torch's own op, the same function" if at.native else "its gates"
            facts["in use"] = ran if at.calls else "never called on these inputs"
        facts |= _calibrated(fits[name]) if name in fits else {}
        return row._replace(facts=facts, figures=pictures.get(name, ()))

    if certificate is None:
        made = [opening(n, Row(cells(s)), {"function": s.kind}) for n, s in audited.items()]
        return Table(HEADER, made, AUDITED)
    made = [opening(n, *_certified(row, certificate.failed.get(n))) for n, row in rows.items()]
    return Table(certificates.HEADER, made, LEGEND)


def _certified(row: Certified, failed: str | None) -> tuple[Row, dict[str, str]]:
    """A row of a certificate, and what it says in words."""
    shown, facts = certificates.cells(row), {"function": row.kind}
    errors: tuple[float | None, ...] = (None,) * 3
    if row.ok is not None:
        errors = (row.max, row.rms, row.rel_rms)
        pairs = zip(certificates.HEADER[3:8], shown[3:8], strict=True)
        facts["error"] = ", ".join(f"{name} {text}" for name, text in pairs if text)
        facts["holds for"] = f"{row.scope}; {row.elements:,} finite values were compared"
    if row.learns:
        far = ", ".join(f"{k} {v:.2g}" for k, v in (row.moved or {}).items())
        facts["learned"] = f"{', '.join(row.learns)}; moved since its start by {far}"
    facts |= {"note": row.note} if row.note else {}
    facts |= {"failed": failed} if failed else {}
    ulp = 0.0 if row.bitwise else row.ulp
    keys = (None, None, row.K, *errors, ulp, row.bound, None, None)
    return Row(shown, keys, wrong=row.ok is False or bool(failed)), facts


def _calibrated(fit: SiteFit) -> dict[str, str]:
    words = (
        f"{fit.chosen}: {fit.fit.objective} error {fit.error:.3g} fitted and "
        f"{fit.default_error:.3g} by default, on {fit.heldout:,} values held out of "
        f"{fit.values:,} kept of {fit.seen:,}"
    )
    return {"calibration": words} | ({"warning": fit.fit.warning} if fit.fit.warning else {})


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    legend: Mapping[str, str],
    seen: Sequence[Seen],
) -> Table:
    """A table whose first cells name sites ("act"), or one function of them ("lstm#0/i"), which
    open."""
    pictures, made = figures(seen, {}), []
    for row in rows:
        name = row[0]
        of = [each for each in seen if name in (each.name, each.site)]
        # a part that has no picture of its own ("attn/key") has those of its site
        of = of or [each for each in seen if each.site == name.partition("/")[0]]
        shown = [f for each in of for f in pictures[each.site] if f.name == each.name]
        facts = dict(zip(header[1:], row[1:], strict=True))
        facts["instance"] = gates(of) if of else "no more is known of it"
        made.append(Row(row, facts=facts, figures=shown))
    return Table(header, made, legend)


def _figure(seen: Seen, worst: float | None, drawn: bool) -> Figure:
    title = " ".join(filter(None, (seen.kind, seen.part)))
    title = f"{title}: {seen.note}" if seen.note else title
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
