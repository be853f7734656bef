"""`gather`: all that is known of a converted network, site by site, as one page and as JSON.

The errors are those of `tg.verify`, what runs is what `tg.audit` says, and the values that a site
sees come from one more run (`seen.look`): nothing is measured here in a second way.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from threshold_gating import conversion
from threshold_gating._version import __version__
from threshold_gating.conversion.audit import Audit
from threshold_gating.conversion.calibration import Calibration
from threshold_gating.conversion.certificate import Certificate
from threshold_gating.conversion.checkpoint.card import shapes
from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.text import some
from threshold_gating.show import details, page
from threshold_gating.show.seen import Seen, look

_FAILED = 8  # sites that stand before the table
NATIVE_OFF = "native ops off (tg.kernels.use('reference')): the gates are really evaluated"


@dataclass(frozen=True)
class Report:
    """What is known of a network with gates; `certificate` is None where there is no original.

    `notes` is what a reader of the figures has to know (random weights), `facts` how they were
    made, `more` goes into the JSON as it is.
    """

    name: str
    certificate: Certificate | None
    audit: Audit
    seen: tuple[Seen, ...]
    calibration: Calibration | None = None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is as it should be, and nothing is left unasked."""
        left = [op for op in self.audit.left if not op.asked]
        return not left and (self.certificate is None or self.certificate.ok)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values; certificate and audit as `tg convert --json` has them."""
        return {
            "network": self.name,
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "audit": self.audit.to_dict(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "ok": self.ok,
            "functions": details.functions(self.seen),
            "notes": list(self.notes),
            "facts": dict(self.facts),
            **self.more,
        }

    def html(self) -> str:
        """The page, one file."""
        certificate = self.certificate
        fits = {} if self.calibration is None else self.calibration.fits
        return page.report(
            title=self.name,
            facts=self.facts,
            data=self.to_dict(),
            tiles=_tiles(self),
            failed=() if certificate is None else _failed(certificate),
            warnings=_warnings(self),
            sentences=_ALONE if certificate is None else certificate.sentences,
            sites=details.sites(certificate, self.audit, self.seen, fits),
            aside="Beside the gates",
            beside=_beside(self.audit),
        )

    def write(self, path: Path | str) -> None:
        """Write the page."""
        page.write(path, self.html())


_ALONE = [
    "The network came with its gates, so there is no original to compare them with and no error is "
    "stated. What runs, and what each gate sees, is below."
]


def gather(
    model: nn.Module | None,
    converted: nn.Module,
    inputs: Any,
    *,
    name: str | None = None,
    tol: float | None = None,
    calibration: Calibration | None = None,
) -> Report:
    """Verify, audit and look at a converted network, for a page or for JSON.

    Args:
        model: the original; None for a network that was built with gates, of which no error is
            known.
        converted: what `tg.convert` made of it, or the network with gates.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        name: the title, by default that of the class.
        tol: as `tg.verify` takes it.
        calibration: what `tg.calibrate` gave, if `converted` was made with it.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.GELU())
    >>> x = torch.randn(50, 2)
    >>> gather(model, conversion.convert(model, inputs=x), x).ok
    True
    """
    args, kwargs = arguments(inputs)
    certificate = None
    if model is not None:
        certificate = conversion.verify(model, converted, *args, tol=tol, **kwargs)
    audit = conversion.audit(converted, *args, **kwargs)
    title = type(model or converted).__name__ if name is None else name
    return of(title, certificate, audit, converted, inputs, calibration=calibration)


def of(
    name: str,
    certificate: Certificate | None,
    audit: Audit,
    converted: nn.Module,
    inputs: Any,
    facts: Mapping[str, str] | None = None,
    **more: Any,
) -> Report:
    """The report on what is already verified and audited; `more` are fields of it."""
    if not audit.sites:
        raise conversion.ConversionError(
            f"{name} has no site with a gate, so there is nothing to report; tg.audit lists what "
            "it executes."
        )
    made = {
        **(facts or {}),
        "inputs": ", ".join(shapes("", inputs)) or "none that are tensors",
        "errors": NATIVE_OFF,
        "threshold_gating": __version__,
        "torch": str(torch.__version__),
        "Python": f"{platform.python_version()} on {platform.system()}, {platform.machine()}",
    }
    return Report(name, certificate, audit, tuple(look(converted, inputs)), facts=made, **more)


# What stands first


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    sites, certificate = report.audit.sites, report.certificate
    if certificate is None:
        learned = sum(site.learns for site in sites)
        return [(str(len(sites)), "sites", ""), (str(learned), "of them learned", "")]
    rows = certificate.rows
    done = [row for row in rows if row.ok is not None]
    close = sum(not row.exact for row in done)
    within = "every site and the output within bounds"
    if certificate.tol == math.inf:
        within = "nothing failed, but any error was accepted (tol = inf)"
    elif certificate.trained:
        within = "every site within bounds at its start; trained since, so the output is its own"
    tiles = [
        ("ok", within, "ok") if report.ok else ("NOT OK", "see below", "bad"),
        (f"{len(done)} of {len(rows)}", "sites compared, with native ops off", ""),
        (f"{len(done) - close} + {close}", "exact and approximate sites among them", ""),
    ]
    if (worst := certificate.output) is not None:
        tiles.append((f"{worst.relative:.1e}", "largest change of the output over its largest", ""))
    return tiles


def _failed(certificate: Certificate) -> list[str]:
    """Why it failed: beside the sites first; of many sites some, for each says it by itself."""
    rows = {row.site for row in certificate.rows}
    beside = [text for name, text in certificate.failed.items() if name not in rows]
    own = [text for name, text in certificate.failed.items() if name in rows]
    more = [f"{len(own) - _FAILED} more sites failed; the table marks them."]
    return [*beside, *own[:_FAILED], *(more if len(own) > _FAILED else ())]


def _warnings(report: Report) -> list[str]:
    """What the figures do not show, or only a part of."""
    said, certificate = list(report.notes), report.certificate
    idle = [site.name for site in report.audit.sites if not site.calls]
    if idle:
        said.append(f"Never called on these inputs, so nothing is known of it: {some(idle, 6)}.")
    if certificate is not None and (moved := [r.site for r in certificate.rows if r.has_moved]):
        said.append(
            f"Trained since the conversion: {some(moved, 6)}. Errors in the table are those of the "
            "start; the pictures show the gates as they are now."
        )
    if certificate is not None and (close := [r for r in certificate.rows if not r.exact]):
        names = some([row.site for row in close], 6)
        said.append(f"Approximate, not the same function; the table says how far off: {names}.")
    if certificate is not None and certificate.tol is not None:
        said.append(
            f"The caller gave the bound tol = {certificate.tol:g}, of the output and of "
            "approximate sites; what the usual bound does not allow is marked as accepted by it."
        )
    odd = [each.name for each in report.seen if each.values.nan or each.values.infinite]
    if odd:
        said.append(f"NaN or infinite values reached {some(odd, 6)}; no histogram holds them.")
    if native := sum(site.native for site in report.audit.sites):
        said.append(
            f"In use, {native} of {len(report.audit.sites)} sites run torch's own op, which is the "
            "same function (backend auto). No error on this page was measured so."
        )
    if report.audit.unseen:
        said.append(f"Not looked at: {', '.join(report.audit.unseen)}.")
    return said


def _beside(audit: Audit) -> dict[str, str]:
    """What executes beside the gates."""
    left = [
        f"{op.op} in {op.module or 'the network itself'} ({op.calls})"
        + (", as asked" if op.asked else "")
        for op in audit.left
    ]
    found = {
        "in short": audit.counts,
        "left to torch": ", ".join(left),
        "not linear": ", ".join(f"{op.op} in {op.module or 'the network'}" for op in audit.bending),
        "not looked at": ", ".join(audit.unseen),
    }
    return {what: words for what, words in found.items() if words}
