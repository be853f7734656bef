"""Records of a reading: `Reading`, of all gates of a network, and `SiteReading`, of one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.conversion.text import WIDTH, jsonable, some
from threshold_gating.insight import text
from threshold_gating.insight.attention import Heads
from threshold_gating.insight.gates import IN_WEIGHTS, TWO_INPUTS
from threshold_gating.insight.nearest import Nearest
from threshold_gating.insight.tally import Values
from threshold_gating.instance import TG
from threshold_gating.primitive import Value
from threshold_gating.training.health import Rule
from threshold_gating.training.telemetry import LearnedSite

BROKEN = "nan"  # the family of a gate whose numbers are not finite


@dataclass(frozen=True, eq=False, repr=False)
class SiteReading:
    """A gate: its numbers now, [rows, groups], and what its values show, if any reached it.

    `tau` has one row or one for each threshold, `theta` K - 1, `s` and `c` K. `family` and
    `nearest` have a word for each group; a group whose numbers are not finite is of the family
    "nan", and where the branches are no numbers of the gate the word says where they are. `values`
    is None where nothing was seen, and `unread` says why.
    """

    name: str
    start: TG
    share: str
    learned: tuple[str, ...]
    tau: Tensor
    theta: Tensor
    s: Tensor
    c: Tensor
    family: tuple[str, ...]
    nearest: tuple[Nearest, ...]
    values: Values | None = None
    unread: str = ""

    @property
    def K(self) -> int:
        """Number of branches."""
        return len(self.s)

    @property
    def groups(self) -> int:
        """Gates with numbers of their own."""
        return self.s.shape[1]

    @property
    def started(self) -> str:
        """The row of the taxonomy that it started from, or how many branches it has."""
        if TWO_INPUTS in self.family:
            return "glu"
        return taxonomy.name_of(self.start) or f"K = {self.K}"

    def __repr__(self) -> str:
        return f"<{self.name}: {' '.join(text.numbers(self)[1:])}>"

    def at(self, x: Tensor) -> Tensor:
        """y of points x, by the numbers of the gates now: [groups, points].

        Where the branches are no numbers of the gate, it is the branch that is open, 0 the lowest,
        in the mean of the gates.
        """
        theta, s, c = (list(w) for w in (self.theta, self.s, self.c))
        tau: list[Value] = [math.inf] if self.start.hard else list(self.tau)
        site = LearnedSite(self.name, self.learned, self.start, tau, theta, s, c)
        whole, x = mended(site), x.double().expand(self.groups, -1)
        if self.family[0] in (IN_WEIGHTS, TWO_INPUTS):
            branch = torch.arange(self.K, dtype=x.dtype)
            y = torch.einsum("k,kgp->gp", branch, whole.gates(x))
        else:
            y = whole.blend(x)
        return torch.where(broken_groups(site).unsqueeze(1), torch.nan, y)


@dataclass(frozen=True, eq=False, repr=False)
class Reading:
    """The gates of a network, in the order in which they ran, and its heads; printed, a table."""

    model: str
    inputs: str  # shapes; "" where nothing ran
    sites: tuple[SiteReading, ...]
    heads: tuple[Heads, ...]
    notes: tuple[str, ...]
    rule: Rule

    def __getitem__(self, name: str) -> SiteReading:
        """A site by its name."""
        found = [site for site in self.sites if site.name == name]
        if not found:
            names = some([site.name for site in self.sites], 8)
            raise KeyError(f"{self.model} has no site {name!r}; there are {names}.")
        return found[0]

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        channels = sum(len(s.values.mean) for s in self.sites if s.values is not None)
        seen = f"{channels} channels on {self.inputs}" if self.inputs else "nothing ran"
        heads = f", {len(self.heads)} attentions" if self.heads else ""
        return f"<Reading of {self.model}: {len(self.sites)} sites{heads}, {seen}>"

    def table(self) -> str:
        """The reading as text: a line for each site, for each head, the definitions, the notes."""
        parts = text.site_lines(self.sites, self.inputs, self.rule) if self.sites else []
        parts += text.head_lines(self.heads) if self.heads else []
        parts += [fill(note, WIDTH) for note in self.notes]
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values: every figure of every channel, but not the samples."""
        found = {
            "model": self.model,
            "inputs": self.inputs,
            "rule": vars(self.rule),
            "sites": [_plain(site) for site in self.sites],
            "heads": [_plain(heads) for heads in self.heads],
            "notes": list(self.notes),
        }
        return dict(jsonable(found))

    def to_json(self) -> str:
        """The same as a text."""
        return json.dumps(self.to_dict(), allow_nan=False)


def mended(site: LearnedSite) -> LearnedSite:
    """The gate with the numbers of its start where it has none that are finite."""
    broken = broken_groups(site)
    if site.start is None or not broken.any():
        return site
    taus = site.start.tau if isinstance(site.start.tau, tuple) else (site.start.tau,)
    starts = {"tau": taus, "theta": site.start.theta, "s": site.start.s, "c": site.start.c}

    def whole(w: Value, at: float) -> Value:
        return torch.where(broken.to(w.device), at, w) if isinstance(w, Tensor) else w

    pairs = {what: zip(getattr(site, what), at, strict=True) for what, at in starts.items()}
    return site._replace(**{what: [whole(*p) for p in each] for what, each in pairs.items()})  # type: ignore[arg-type]


def broken_groups(site: LearnedSite) -> Tensor:
    """The groups with a number that is not finite, bool [groups]; a hard gate has tau = inf."""
    rows = [w for row in (site.tau, site.theta, site.s, site.c) for w in row]
    held = [w.cpu().expand(site.groups) for w in rows if isinstance(w, Tensor)]
    return ~torch.stack(held).isfinite().all(0) if held else torch.zeros(1, dtype=torch.bool)


def _plain(record: Any) -> Any:
    """A record as JSON values, without samples."""
    found = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name != "sample":
            found[field.name] = _value(value)
    return found


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Values):
        return _plain(value)
    if isinstance(value, TG):
        return value.to_dict()
    if isinstance(value, tuple):
        return [v._asdict() if isinstance(v, Nearest) else v for v in value]
    return value
