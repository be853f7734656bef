"""`Certificate`: what `verify` measured, site by site and at the output, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from threshold_gating.conversion import outputs, paired
from threshold_gating.conversion.outputs import Output
from threshold_gating.conversion.text import WIDTH, columns, jsonable

# Why nothing was compared at a site.
NEVER, EMPTY, NOTHING = "never called", "no values", "nothing finite"


@dataclass(frozen=True)
class Row:
    """A site's local error over all its calls, in the original's inputs.

    `rel_rms` is relative to the original's values; `ulp` (of exact sites) counts units in the last
    place of each value, or of the largest one for softmax, attention and recurrence. `bound` is
    what is allowed: ulp for an exact site, else `rel_rms`. `elements` counts the finite values
    compared. `scope` says whether the row holds for every input or was measured on these alone.
    `ok` is None where nothing was compared, and `note` says why. A site that `learns` is compared
    as it was at its start; `moved` says how far it is from there ("log tau", "theta", "s", "c": the
    largest distance of any), and `input_rms` how large its inputs are.
    """

    site: str
    kind: str
    K: int | None
    exact: bool
    max: float = 0.0
    rms: float = 0.0
    rel_rms: float = 0.0
    ulp: float | None = None
    bitwise: bool | None = None
    bound: float | None = None
    elements: int = 0
    calls: int = 0
    ok: bool | None = None
    scope: str = "these inputs"
    note: str = ""
    learns: tuple[str, ...] = ()
    moved: Mapping[str, float] | None = None
    input_rms: float = 0.0

    @property
    def has_moved(self) -> bool:
        return any((self.moved or {}).values())


@dataclass(frozen=True)
class Certificate:
    """What `verify` measured; `failed` says for each place that is not as it should be why.

    `outputs` has one record for each tensor and number that the networks give; `tol` is the bound
    that the caller gave for them; `beside` names what else bends the data, or was not looked at;
    `uncompared` names what the output holds and cannot be compared. `trained` says what of a
    network with gates that learn is no longer as it was converted: then sites are held to what they
    started from, and the output to nothing.
    """

    rows: tuple[Row, ...]
    outputs: tuple[Output, ...]
    metric: paired.Metric | None
    failed: Mapping[str, str]
    tol: float | None = None
    beside: str = ""
    uncompared: tuple[str, ...] = ()
    trained: str = ""

    @property
    def ok(self) -> bool:
        """Whether every site that ran was compared and is within its bound, the output is within
        its own, and nothing was left out unasked. Modules that never ran are in `unseen`."""
        return not self.failed

    @property
    def output(self) -> Output | None:
        """The output that is worst against its bound; None where there is nothing to compare."""
        seen = [o for o in self.outputs if o.elements]
        return max(seen, key=lambda o: (o.excess, o.relative), default=None)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Sites of which these inputs show nothing: never called, or called without a value."""
        return tuple(r.site for r in self.rows if r.ok is None and r.note in (NEVER, EMPTY))

    def table(self) -> str:
        """The certificate as text, within 100 columns."""
        lines = columns([HEADER, *map(cells, self.rows)])
        if any(row.has_moved for row in self.rows):
            lines += ["", *columns([_MOVED, *(_moved(row) for row in self.rows if row.has_moved)])]
        said = [*self.sentences, *self.failed.values()]
        return "\n".join([*lines, "", *(fill(s, WIDTH, subsequent_indent="  ") for s in said)])

    @property
    def sentences(self) -> list[str]:
        """What the rows come to, and what they do not say."""
        m, trained = self.metric, bool(self.trained)
        said = [self.trained] if trained else []
        said.append(outputs.described(self.output, self.outputs, self.tol, trained))
        if m is not None:
            span = f"[{m.interval[0]:+.4g}, {m.interval[1]:+.4g}]"
            said.append(
                f"{m.name}: {m.baseline:.6g} -> {m.converted:.6g}, difference {m.delta:+.4g} "
                f"{span} (95 %), equal on {m.agreement:.2%} of {m.n}"
            )
        done, always = self._done, sum(row.scope == "every input" for row in self.rows)
        said.append(
            f"holds for every input: {always} of {done} sites (on record, see tg prove); on "
            f"these inputs: {done - always}, and the output"
        )
        said += [f"not seen on these inputs: {', '.join(self.unseen)}"] if self.unseen else []
        said += [self.beside] if self.beside else []
        verdict = f"{done} of {len(self.rows)} sites evaluated with native off: {self._verdict}"
        if self.uncompared:
            verdict += f"; not compared at the output: {', '.join(self.uncompared)}"
        return [*said, verdict]

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Certificate: {self._done} of {len(self.rows)} sites evaluated, {self._verdict}>"

    @property
    def _done(self) -> int:
        return sum(row.ok is not None for row in self.rows)

    @property
    def _verdict(self) -> str:
        return "ok" if self.ok else f"{len(self.failed)} failed"

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        worst = None if self.output is None else asdict(self.output)
        more = {"failed": dict(self.failed), "output": worst, "unseen": self.unseen, "ok": self.ok}
        return {**asdict(self), **more}

    def to_json(self) -> str:
        """The same as JSON text; a number that JSON has not (inf, nan) is a string."""
        return json.dumps(jsonable(self.to_dict()), indent=2, allow_nan=False)


HEADER = ("site", "kind", "K", "max", "rms", "rel", "ulp", "bound", "calls", "class")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text."""
    K = "" if row.K is None else str(row.K)
    if row.ok is None:
        return (row.site, row.kind, K, *("",) * 5, str(row.calls), row.note)
    errors = (f"{e:.1e}" if e else "0" for e in (row.max, row.rms, row.rel_rms))
    ulp = "" if row.ulp is None else "bitwise" if row.bitwise else f"{row.ulp:.3g}"
    bound = f"{row.bound:g} ulp" if row.exact else f"{row.bound:.2g} rel"
    kind = "learned" if row.learns else "exact" if row.exact else "approximate"
    what = "FAILED" if not row.ok else row.note or kind
    return (row.site, row.kind, K, *errors, ulp, bound, str(row.calls), what)


_MOVED = ("moved since", "kind", "|d log tau|", "|d theta|", "over inputs", "|ds|", "|dc|")


def _moved(row: Row) -> tuple[str, ...]:
    """How far a site has moved; its thresholds also over the RMS of what reaches it."""
    far = row.moved or {}
    tau, theta, s, c = (f"{far[k]:.2g}" if k in far else "" for k in ("log tau", "theta", "s", "c"))
    over = f"{far['theta'] / row.input_rms:.2g} rms" if "theta" in far and row.input_rms else ""
    return row.site, row.kind, tau, theta, over, s, c
