"""Readings as text: a line for each site and for each head, and the definitions below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

from torch import Tensor

from threshold_gating.conversion.text import WIDTH, columns
from threshold_gating.insight.attention import Heads
from threshold_gating.insight.nearest import Nearest
from threshold_gating.training.health import Rule

LEGEND = (
    "gates: how many, and what of them is learned. tau, theta: from the least to the largest. "
    "nearest: the name that most gates are nearest to, and the largest relative RMS distance to "
    "it, {under}; '=' is below 1e-6. "
    "open: mean of the highest branch's gate. saturation: share of values at which one gate has "
    "0.99 or more (always, where gates are hard). flat: share at which |dy/dx| is at most {flat:g} "
    "of the steepest slope of the start. dead, stuck: channels with {share:g} of at least "
    "{values:,} values in flat parts, where the output is 0 and where it is not."
)
_FAMILIES = {"multiplicative": "mult", "constant": "const", "saturating": "sat"}


def site_lines(sites: Sequence[Any], inputs: str, rule: Rule) -> list[str]:
    """The table of the sites, and what its columns mean."""
    header = ("site", "start", "gates", "tau", "theta", "family", "nearest")
    seen = ("open", "satur.", "flat", "dead", "stuck") if inputs else ()
    rows = [(*numbers(site), *(_shares(site) if seen else ())) for site in sites]
    under = "at what the site was given" if inputs else "at x from N(0, 1)"
    legend = LEGEND.format(under=under, **vars(rule))
    legend = legend if inputs else legend.partition(" open:")[0]
    return ["\n".join(columns([(*header, *seen), *rows])), fill(legend, WIDTH)]


def head_lines(heads: Sequence[Heads]) -> list[str]:
    """The table of the heads, and what its columns mean."""
    return ["\n".join(columns([_HEAD_COLUMNS, *_head_rows(heads)])), fill(_HEAD_LEGEND, WIDTH)]


def numbers(site: Any) -> tuple[str, ...]:
    """The name of a site, and its numbers in a few words each."""
    learned = "all" if len(site.learned) == 4 else "+".join(site.learned) or "frozen"
    words = Counter(site.family)
    short = " ".join(
        f"{_FAMILIES.get(word, word)}{f' {n}' if len(words) > 1 else ''}"
        for word, n in words.most_common()
    )
    return (
        site.name,
        site.started,
        f"{site.groups} {learned}",
        "hard" if site.start.hard else _spread(site.tau),
        _spread(site.theta),
        short,
        _nearest(site.nearest),
    )


def _spread(rows: Tensor) -> str:
    """The least and the largest, or the one number that all have."""
    finite = rows[rows.isfinite()]
    if not len(finite):
        return "nan" if len(rows) else ""
    low, high = finite.min().item(), finite.max().item()
    return f"{low:.3g}" if high - low < 1e-6 else f"{low:.2g}..{high:.2g}"


def _nearest(near: tuple[Nearest, ...]) -> str:
    names = Counter(n.name for n in near if n.name)
    if not names:
        return ""
    name, count = names.most_common(1)[0]
    worst = max((n for n in near if n.name == name), key=lambda n: n.distance)
    return f"{worst}{f' {count}/{len(near)}' if count < len(near) else ''}"


def _shares(site: Any) -> tuple[str, ...]:
    v = site.values
    if v is None:
        return ("", "", "", "", "")
    states = v.states
    flat = "" if v.flat.isnan().all() else f"{v.flat.nanmean():.2f}"
    dead, stuck = f"{states['dead']}/{len(v.state)}", str(states["saturated"])
    if states["unknown"]:
        dead = stuck = "?"
    if states[""] == len(v.state):
        dead = stuck = ""
    hard = "hard" if site.start.hard else f"{v.saturation.nanmean():.2f}"
    return f"{v.open[-1].nanmean():.2f}", hard, flat, dead, stuck


_HEAD_COLUMNS = ("attention", "tau", "head", "theta 10 %", "median", "90 %", "keys", "decided")
_HEAD_LEGEND = (
    "theta: quantiles of the thresholds log sum exp of the other logits (Eq. 11) over queries and "
    "keys. keys: mean of exp(entropy) of a query's weights, of those it can see (a weight of 1e-38 "
    "or more). decided: share of queries of which one key has 0.99 or more."
)


def _head_rows(attentions: Iterable[Heads]) -> Iterable[tuple[str, ...]]:
    for a in attentions:
        for h in range(a.heads):
            low, median, high = a.theta[:, h].tolist()
            keys = f"{a.keys[h]:.1f} of {a.live[h]:.1f}"
            tau = f"{a.tau[h]:.3g}" if a.learned else "1"
            first = a.name if h == 0 else ""
            figures = f"{low:.2f}", f"{median:.2f}", f"{high:.2f}", keys, f"{a.decided[h]:.2f}"
            yield first, tau, str(h), *(figures if a.queries else [""] * 5)
