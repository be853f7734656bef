"""Pictures layer by layer: `ridges` of a reading, and `film`, of a recorded run.

Colours are Okabe and Ito's, told apart with every kind of colour blindness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.conversion.text import some
from threshold_gating.insight.recording import History
from threshold_gating.insight.records import Reading, SiteReading
from threshold_gating.show.instances import colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, GREEN, ORANGE, VERMILION = colours(5)
QUIET = "#666666"
_POINTS = 160  # of a ridge
_TALL = 0.88  # of the distance between two rows
_MOST = 120  # rows in a picture


def save(figure: Figure, path: str | Path | None) -> Figure:
    """The figure, written to `path` if there is one."""
    if path is not None:
        figure.savefig(path)
    return figure


def blank(width: float, rows: int) -> Figure:
    """A figure as high as its rows need, without a window or any state of matplotlib's."""
    from matplotlib.figure import Figure

    each = 0.5 if rows <= 8 else 0.32 if rows <= 20 else 0.24
    return Figure(figsize=(width, 1.6 + each * max(3, rows)), dpi=110, layout="constrained")


class _Column(NamedTuple):
    """One panel of `ridges`: what it shows of a site, its label, and its ends, if they are set."""

    label: str
    values: Callable[[SiteReading], Tensor | None]
    ends: tuple[float, float] | None = None


def _input(site: SiteReading) -> Tensor | None:
    return None if site.values is None else site.values.sample


def _flat(site: SiteReading) -> Tensor | None:
    return None if site.values is None else site.values.flat


def _open(site: SiteReading) -> Tensor | None:
    return None if site.values is None else site.values.open[-1]


COLUMNS = {
    "input": _Column("what the site is given, coloured by branch; black: thresholds", _input),
    "open": _Column("share of the highest branch, by channel", _open, (0, 1)),
    "flat": _Column("share of flat values, by channel", _flat, (0, 1)),
    "theta": _Column("theta, by channel", lambda site: site.theta.flatten()),
    "tau": _Column("log2 tau, by channel", lambda s: None if s.start.hard else s.tau.log2()),
}


def ridges(
    reading: Reading, path: str | Path | None = None, *, what: Sequence[str] | None = None
) -> Figure:
    """Draw the distributions of a reading, a ridge for each site, in the order of the run.

    Args:
        reading: of `tg.insight.read`.
        path: where the picture goes, .png or .svg; None writes nothing.
        what: panels among "input", "open", "flat", "theta", "tau". By default what there is to see:
            inputs and flat values where the network ran, numbers that differ by channel.
    """
    chosen = _chosen(reading) if what is None else list(what)
    if unknown := [w for w in chosen if w not in COLUMNS]:
        raise ValueError(f"ridges: what is some of {', '.join(COLUMNS)}; got {unknown[0]!r}.")
    sites = reading.sites[:_MOST]
    each = [_finite(COLUMNS[w].values(site)) for w in chosen for site in sites]
    if all(values is None for values in each):
        raise ValueError(
            f"ridges: {reading!r} has no values of {some(chosen) or 'any channel'} to draw; read "
            "the network with inputs, read(model, x)."
        )
    figure = blank(3.2 + 3.2 * len(chosen), len(sites))
    axes = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for ax, word in zip(axes, chosen, strict=True):
        _draw_column(ax, sites, COLUMNS[word], word)
    _label_rows(axes[0], [site.name for site in sites])
    left = len(reading.sites) - len(sites)
    more = f"; {left} more sites are not drawn" if left else ""
    ran = f"on {reading.inputs}" if reading.inputs else "nothing ran"
    figure.suptitle(f"{reading.model}, {ran}{more}".replace("$", r"\$"), fontsize=11)
    return save(figure, path)


def _chosen(reading: Reading) -> list[str]:
    seen = ["input", "flat"] if any(s.values is not None for s in reading.sites) else []
    for what in ("theta", "tau"):
        each = [getattr(site, what) for site in reading.sites if what in site.learned]
        if any(bool((rows != rows[:, :1]).any()) for rows in each):
            seen.append(what)
    return seen or ["theta"]


def _draw_column(ax: Axes, sites: Sequence[SiteReading], column: _Column, word: str) -> None:
    each = [_finite(column.values(site)) for site in sites]
    low, high = column.ends or _ends([v for v in each if v is not None])
    x = torch.linspace(low, high, _POINTS, dtype=torch.float64)
    for row, (site, values) in enumerate(zip(sites, each, strict=True)):
        ax.axhline(row, color="#E4E4E4", linewidth=0.6, zorder=0)
        if values is None:
            continue
        y = _density(values, x)
        if word == "input":
            _draw_by_branch(ax, site, x, y, row)
        else:
            ridge(ax, x, y, row, BLUE)
        if word == "flat" and site.values is not None:
            states = site.values.states
            stuck = [f"{states[w]} {w}" for w in ("dead", "saturated") if states[w]]
            ax.text(1.03, row, ", ".join(stuck), fontsize=7, va="bottom", color=VERMILION)
    _tidy(ax, column.label)
    ax.set_xlim(low, high)
    if word == "flat":  # room for what is dead
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
        ax.set_xlim(low, high + 0.28 * (high - low))


def _draw_by_branch(ax: Axes, site: SiteReading, x: Tensor, y: Tensor, row: int) -> None:
    """A ridge whose parts have the colour of the branch that is open there, in the mean."""
    edges = [float(x[0]), *sorted(site.theta.nanmean(1).tolist()), float(x[-1])]
    for colour, first, last in zip(colours(site.K), edges, edges[1:], strict=False):
        inside = (x >= first - float(x[1] - x[0])) & (x <= last)
        if bool(inside.any()):
            ridge(ax, x[inside], y[inside], row, colour)
    for theta in site.theta:  # its range over the channels
        shown = theta[theta.isfinite()].clamp(float(x[0]), float(x[-1]))
        if len(shown):
            ends = [float(shown.min()), float(shown.max())]
            ax.plot(ends, [row, row], color="black", linewidth=2.2, solid_capstyle="butt")
            ax.plot([float(shown.mean())], [row], "|", color="black", markersize=5)


def ridge(ax: Axes, x: Tensor, y: Tensor, row: float, colour: str) -> None:
    """A curve of heights 0 to 1 over the line of its row; rows run downwards."""
    top = row - _TALL * y
    ax.fill_between(x.numpy(), top.numpy(), row, color=colour, alpha=0.55, linewidth=0)
    ax.plot(x.numpy(), top.numpy(), color=colour, linewidth=0.8)


def _density(values: Tensor, x: Tensor) -> Tensor:
    """How many values lie around each point, smoothed over a few, the largest 1."""
    low, high = float(x[0]), float(x[-1])
    counts = torch.histc(values, len(x), low, high)  # what lies beyond is not counted
    width = torch.arange(-6, 7, dtype=torch.float64)
    kernel = torch.exp(-(width**2) / 8)
    smooth = torch.nn.functional.conv1d(counts.view(1, 1, -1), kernel.view(1, 1, -1), padding=6)
    found: Tensor = smooth.flatten() / smooth.max().clamp_min(1e-30)
    return found


def _finite(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    kept = values[values.isfinite()].double()
    return kept if len(kept) else None


def _ends(each: Sequence[Tensor]) -> tuple[float, float]:
    """Ends of an axis that show nearly all values of nearly all sites, and 0."""
    ends = torch.tensor([0.002, 0.998], dtype=torch.float64)
    quantiles = torch.stack([v.quantile(ends) for v in each])
    low, high = float(quantiles[:, 0].quantile(0.1)), float(quantiles[:, 1].quantile(0.9))
    low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set_ylim(len(names) - 0.5, -1.1)
    ax.set_ylabel("site, in the order of the run", fontsize=8)


def _tidy(ax: Axes, label: str) -> None:
    ax.set_xlabel(label, fontsize=8)
    ax.tick_params(axis="x", labelsize=7)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def film(
    run: History, path: str | Path | None = None, *, what: str = "theta", frames: int = 8
) -> Figure:
    """Draw how learned numbers drift in training: frames of a run, a ridge for each site in each.

    The outline is the first frame, so that what moved stands out of it.

    Args:
        run: of `tg.insight.history`.
        path: where the picture goes, .png or .svg; None writes nothing.
        what: "tau" (its logarithm is drawn), "theta", "s" or "c".
        frames: how many records at most, evenly spaced, the first and the last among them.
    """
    names = [n for n in run.histograms if n.rpartition("/")[2].partition("_")[0] == what]
    if not names:
        there = sorted({n.rpartition("/")[2].partition("_")[0] for n in run.histograms})
        raise ValueError(f"film: {run.path} has no {what!r}; recorded are {', '.join(there)}.")
    if frames < 2:
        raise ValueError(f"film: frames are 2 or more; got {frames}.")
    steps = _spaced([s for s in run.steps if any(s in run.histograms[n] for n in names)], frames)
    names = names[:_MOST]
    bars = {n: {s: _bars(run.histograms[n].get(s), what == "tau") for s in steps} for n in names}
    low, high = _ends([x for each in bars.values() for b in each.values() if b for x in [b.x]])
    figure = blank(2.4 + 1.5 * len(steps), len(names))
    axes = figure.subplots(1, len(steps), sharey=True, sharex=True, squeeze=False)[0]
    for ax, step in zip(axes, steps, strict=True):
        for row, name in enumerate(names):
            ax.axhline(row, color="#E4E4E4", linewidth=0.6, zorder=0)
            now, first = bars[name][step], bars[name][steps[0]]
            if now is not None:
                _draw_bars(ax, now, row)
            if first is not None and step != steps[0]:
                top = row - _TALL * first.y
                ax.plot(first.x, top, color=QUIET, linewidth=0.7, linestyle=":")
        ax.axvline(0, color=QUIET, linewidth=0.5, linestyle=":")
        ax.set_title(f"step {step:,}", fontsize=8)
        ax.set_xlim(low, high)
        _tidy(ax, f"log2 {what}" if what == "tau" else what)
    _label_rows(axes[0], [n.removesuffix(f"/{what}") for n in names])
    title = f"{what} of every channel, layer by layer; dotted: step {steps[0]:,}"
    figure.suptitle(title, fontsize=11)
    return save(figure, path)


class _Bars(NamedTuple):
    """A histogram as an outline: points and heights, the largest 1."""

    x: Tensor
    y: Tensor


def _bars(histogram: Mapping[str, Any] | None, log: bool) -> _Bars | None:
    if histogram is None or histogram["low"] is None:
        return None
    low, high = (float(histogram[end]) for end in ("low", "high"))
    counts = torch.tensor(histogram["counts"], dtype=torch.float64)
    edges = torch.linspace(low, high, len(counts) + 1, dtype=torch.float64)
    edges = edges.log2() if log else edges
    ends = torch.zeros(1, dtype=torch.float64)
    heights = torch.cat([ends, counts.repeat_interleave(2) / counts.max(), ends])
    return _Bars(edges.repeat_interleave(2), heights)


def _draw_bars(ax: Axes, bars: _Bars, row: int) -> None:
    top = row - _TALL * bars.y
    ax.fill_between(bars.x.numpy(), top.numpy(), row, color=BLUE, alpha=0.55, linewidth=0)
    ax.plot(bars.x, top, color=BLUE, linewidth=1.2)


def _spaced(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    at = torch.linspace(0, len(steps) - 1, most).round().long().tolist()
    return [steps[k] for k in at]
