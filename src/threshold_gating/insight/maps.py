"""Maps: `heads`, every head of every attention, and `chaos_map`, layers at the edge of chaos."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.fitting.shape import curve
from threshold_gating.insight.attention import Heads
from threshold_gating.insight.drawing import QUIET, blank, save
from threshold_gating.insight.records import Reading
from threshold_gating.theory.meanfield import moments
from threshold_gating.theory.network import LayerReport, LayerTheory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NONE = "#DDDDDD"  # where there is no head
_GRID = 17  # variances at which the map is computed; between them it is smooth


def heads(reading: Reading, path: str | Path | None = None) -> Figure:
    """Draw the thresholds of attention: a row for each attention, a square for each head.

    The panels are the median threshold, the spread between its 10 and 90 % quantiles, the share of
    the visible keys that a query weighs, and the learned temperatures, where there are any.
    """
    found = [a for a in reading.heads if a.queries]
    if not found:
        why = "it has no attention" if reading.inputs else "nothing ran; give read inputs"
        raise ValueError(f"heads: {reading!r} has no thresholds of attention to draw: {why}.")
    panels = {
        "median threshold": [a.theta[1] for a in found],
        "its spread, 10 to 90 %": [a.theta[2] - a.theta[0] for a in found],
        "keys weighed / keys seen": [a.keys / a.live.clamp_min(1) for a in found],
    }
    if any(a.learned for a in found):
        panels["log2 tau, learned"] = [a.tau.log2() for a in found]
    width = max(a.heads for a in found)
    figure = blank(2.2 + len(panels) * (1.6 + 0.17 * min(width, 16)), len(found))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        _draw_heads(figure, ax, title, rows, width)
    axes[0].set_yticks(range(len(found)), [_short(a) for a in found], fontsize=7)
    figure.suptitle(f"{reading.model}, heads on {reading.inputs}".replace("$", r"\$"), fontsize=11)
    return save(figure, path)


def _short(a: Heads) -> str:
    """The name without the long words for the call, which all of them share."""
    return a.name.replace(":scaled_dot_product_attention", "").replace(
        ":multi_head_attention_forward", ""
    )


def _draw_heads(figure: Figure, ax: Axes, title: str, rows: Sequence[Tensor], width: int) -> None:
    table = torch.full((len(rows), width), math.nan, dtype=torch.float64)
    for k, row in enumerate(rows):
        table[k, : len(row)] = row
    ax.set_facecolor(_NONE)
    image = ax.imshow(table.numpy(), cmap="cividis", aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=ax, location="bottom", aspect=18)
    bar.ax.tick_params(labelsize=7)
    ax.set_title(title, fontsize=9)
    ax.set_xlabel("head", fontsize=8)
    every = max(1, math.ceil(width / 8))
    ax.set_xticks(range(0, width, every), [str(h) for h in range(0, width, every)], fontsize=7)
    ax.tick_params(length=0)


def chaos_map(
    report: LayerReport, path: str | Path | None = None, *, activation: str | None = None
) -> Figure:
    """Draw the edge of chaos with the layers of a network on it.

    The map is chi = sigma_w^2 E[phi'^2], the growth of a squared gradient through a layer, for one
    activation at inputs from N(0, q): over the edge (chi = 1) gradients grow, below it they shrink.
    A layer stands at the sigma_w of the weights that read its site and at the variance q of what
    the site is given, coloured by its own chi, which has the mean that was measured and its own
    gates. Where the two colours differ, the map's assumptions do not hold.

    Args:
        report: `tg.theory.layer_report(model, x)`.
        path: where the picture goes, .png or .svg; None writes nothing.
        activation: the phi of the map, a key of the taxonomy; by default what most layers have.
    """
    rows = [row for row in report if row.sigma_w and row.variance > 0 and row.chi]
    if not rows:
        raise ValueError(
            f"chaos_map: of {len(report)} sites none is read by weights directly, so that none has "
            "a sigma_w; a norm or a sum stands behind each."
        )
    key, counted = _activation(rows, activation)
    figure = blank(10.5, max(18, len(rows)))
    map_, side = figure.subplots(1, 2, width_ratios=(2.6, 1))
    image = _draw_chi(map_, rows, key)
    figure.colorbar(image, ax=map_, location="left", label="log10 chi", aspect=30, pad=0.02)
    side.set_axis_off()
    listed = [f"{k}: {row.name}, chi {row.chi:.2g}" for k, row in enumerate(rows, start=1)]
    left = len(report) - len(rows) + len(report.skipped)
    if left:
        many = "1 site" if left == 1 else f"{left} sites"
        listed += ["", f"not on the map: {many},", "not read by weights directly"]
    size = 8 if len(listed) <= 34 else 8 * 34 / len(listed)
    side.text(0, 1, "\n".join(listed), fontsize=size, va="top", transform=side.transAxes)
    figure.suptitle(f"Edge of chaos of {key} ({counted}), and the layers", fontsize=11)
    figure.draw_without_rendering()  # labels are placed by the pixels that it will have
    _draw_layers(map_, rows, image)
    return save(figure, path)


def _activation(rows: Sequence[LayerTheory], asked: str | None) -> tuple[str, str]:
    """The phi of the map, and how many of the layers have it."""
    kinds = Counter(row.kind for row in rows)
    if asked is not None:
        key = taxonomy.key_of(asked)
        return key, f"as asked; {kinds[key]} of {len(rows)} layers have it"
    for kind, count in kinds.most_common():
        if kind in taxonomy.TAXONOMY:
            return kind, f"{count} of {len(rows)} layers have it"
    raise ValueError(
        f"chaos_map: no layer has a named activation ({', '.join(kinds)}); name one, as in "
        "chaos_map(report, activation='relu')."
    )


def _draw_chi(ax: Axes, rows: Sequence[LayerTheory], key: str) -> Any:
    """The map, and the line on which chi is one."""
    variances = [row.variance for row in rows]
    spreads = [row.sigma_w for row in rows if row.sigma_w]
    q = torch.logspace(math.log10(min(variances) / 3), math.log10(max(variances) * 3), _GRID)
    phi = curve(taxonomy.ROWS[key].f)
    slopes = [moments(phi, float(each)).slope for each in q]
    if not all(0 < slope < math.inf for slope in slopes):
        raise ValueError(f"chaos_map: {key} has no slope, or an infinite one, and so no edge.")
    spreads += [slope**-0.5 for slope in slopes]  # so that the edge is seen
    w = torch.logspace(math.log10(min(spreads) / 1.3), math.log10(max(spreads) * 1.3), 120)
    log_chi = (torch.tensor(slopes)[:, None] * w[None, :] ** 2).log10().numpy()
    at = w.numpy(), q.numpy()
    image = ax.pcolormesh(
        *at, log_chi, cmap="PuOr_r", vmin=-1, vmax=1, shading="gouraud", rasterized=True
    )
    edge = ax.contour(*at, log_chi, levels=[0.0], colors="black", linewidths=1.6)
    ax.clabel(edge, fmt={0.0: "chi = 1"}, fontsize=8)
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    ax.tick_params(which="both", labelsize=7)
    ax.set_xlabel("sigma_w of the weights that read the site", fontsize=9)
    ax.set_ylabel("variance q of what the site is given", fontsize=9)
    return image


def _draw_layers(ax: Axes, rows: Sequence[LayerTheory], image: Any) -> None:
    """A point for each layer, and its number where no other number is."""
    x = [row.sigma_w or math.nan for row in rows]
    y = [row.variance for row in rows]
    colours = [math.log10(row.chi) for row in rows if row.chi]
    ax.scatter(
        x, y, c=colours, cmap=image.cmap, norm=image.norm, s=34, edgecolors="black", zorder=3
    )
    at = torch.tensor(ax.transData.transform(list(zip(x, y, strict=True))).tolist())
    for k, (point, label) in enumerate(zip(zip(x, y, strict=True), _apart(at), strict=True)):
        place = tuple(ax.transData.inverted().transform(label.tolist()))
        ax.annotate(
            str(k + 1),
            point,
            place,
            fontsize=8,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.6},
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            zorder=4,
        )


def _apart(points: Tensor, room: float = 24.0) -> Tensor:
    """Places for labels near their points, in pixels, pushed away from points and each other."""
    turn = torch.arange(len(points), dtype=torch.float64) * 2.4  # no two the same
    labels = points + room * torch.stack([turn.cos(), turn.sin()], 1)
    for _ in range(200):
        others = torch.cat([labels, points])
        away = labels[:, None] - others[None]
        far = away.norm(dim=2).clamp_min(1e-6)
        push = (away / far[..., None]) * (room - far).clamp_min(0)[..., None] / 4
        push[range(len(labels)), range(len(labels))] = 0
        labels = labels + push.sum(1)
    return labels
