"""Pictures of instances: gates, branches with their blend, and the error against a function.

The `draw_*` functions each fill one matplotlib axes and can be put together at will; matplotlib is
an extra, imported only where a figure is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.instance import TG
from threshold_gating.primitive import gates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Function = Callable[[Tensor], Tensor]

# Okabe and Ito's palette, told apart with every kind of colour blindness. Branches run from blue
# (lowest in x) to vermilion (highest), the inner ones between.
_BLUE, _SKY, _GREEN, _ORANGE, _VERMILION = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
_ORDERED = {
    1: [_BLUE],
    2: [_BLUE, _VERMILION],
    3: [_BLUE, _GREEN, _VERMILION],
    4: [_BLUE, _SKY, _ORANGE, _VERMILION],
    5: [_BLUE, _SKY, _GREEN, _ORANGE, _VERMILION],
}
_BLEND, _TARGET, _QUIET = "#CC79A7", "black", "#666666"
# Gates and blends are drawn in float64, where values of order 1 are rounded at 1e-16.
_FLOOR, _ROUNDING = 1e-17, 1e-15
# `taxonomy.measure` looks as far as 1e4, where float64 rounds at 1e-12: less than this is nothing.
EXACT_BELOW = 1e-11


def colours(K: int) -> list[str]:
    """A colour for each of K branches, low to high; they repeat beyond five."""
    return [_ORDERED[min(K, 5)][k % 5] for k in range(K)]


def draw_gates(ax: Axes, t: TG, x: Tensor) -> None:
    """The gates g_k over `x`, and a dotted line at each threshold."""
    for theta in t.theta:
        ax.axvline(theta, color=_QUIET, linewidth=0.8, linestyle=":")
    each = gates(x, t.tau, t.theta, form=t.form, owner=t.owner)
    for g, colour in zip(each, colours(t.K), strict=True):
        # The area shows whose region it is where lines of hard gates lie on each other.
        ax.fill_between(x.numpy(), g.numpy(), color=colour, alpha=0.13, linewidth=0)
        ax.plot(x.numpy(), g.numpy(), color=colour, linewidth=2)
    ax.set_ylim(-0.06, 1.06)


def draw_branches(ax: Axes, t: TG, x: Tensor, f: Function | None = None) -> None:
    """The branches over `x`, faint; their blend, thick; and the function it stands for, dashed."""
    curves = t.q or (0.0,) * t.K
    for q, s, c, colour in zip(curves, t.s, t.c, colours(t.K), strict=True):
        ax.plot(x.numpy(), (q * x**2 + s * x + c).numpy(), color=colour, linewidth=1.5, alpha=0.6)
    ax.plot(x.numpy(), t(x).numpy(), color=_BLEND, linewidth=5, alpha=0.8)
    if f is not None:
        ax.plot(x.numpy(), f(x).numpy(), color=_TARGET, linewidth=1.3, dashes=(4, 2.5))


def draw_error(ax: Axes, t: TG, x: Tensor, f: Function) -> None:
    """|t(x) - f(x)| on a logarithmic axis, with the reach of rounding shaded."""
    error = (t(x) - f(x)).abs()
    ax.axhspan(_FLOOR, _ROUNDING, color="#EEEEEE", linewidth=0)
    if error.max() == 0:
        middle = (_FLOOR * _ROUNDING) ** 0.5
        ax.text(float(x.mean()), middle, "no difference", ha="center", va="center", color=_QUIET)
    else:
        # Points, not a line: rounding errors jump between 0, which has no logarithm, and an ulp.
        ax.plot(x.numpy(), error.numpy(), ".", color=_TARGET, markersize=1.6)
    ax.set_yscale("log")
    ax.set_ylim(_FLOOR, 1)


def plot_instances(names: Sequence[str], path: str | Path) -> Path:
    """Draw rows of the taxonomy side by side and write the picture to `path`; returns it.

    One column for each name: its gates, its branches with the blend and the function, its error.
    """
    from matplotlib.figure import Figure  # no pyplot: no window system, no state left behind

    keys = [taxonomy.key_of(name) for name in names]
    rows = [(key, taxonomy.TAXONOMY[key], taxonomy.ROWS[key].f) for key in keys]
    reach = max([4.0, *(1.3 * abs(theta) for _, t, _ in rows for theta in t.theta)])
    # An even number of steps puts a point on 0, where most functions have their kink.
    x = torch.linspace(-reach, reach, 2001, dtype=torch.float64)
    figure = Figure(figsize=(2.5 * len(rows) + 0.8, 8.6), dpi=110, layout="constrained")
    axes = figure.subplots(3, len(rows), sharex=True, sharey="row", squeeze=False)
    for column, (name, t, f) in zip(axes.T, rows, strict=True):
        draw_gates(column[0], t, x)
        draw_branches(column[1], t, x, f)
        draw_error(column[2], t, x, f)
        column[0].set_title(f"{name}\n{_summary(t, f)}", fontsize=12)
        column[2].set_xlabel("x")
    _finish(figure, axes, x, [f(x) for _, _, f in rows])
    path = Path(path)
    figure.savefig(path)
    return path


def _summary(t: TG, f: Function) -> str:
    sup = taxonomy.measure(t, f).sup
    return f"K = {t.K}, " + ("exact" if sup < EXACT_BELOW else f"max error {sup:.0e}")


def _finish(figure: Figure, axes: Any, x: Tensor, values: Sequence[Tensor]) -> None:
    """What the panels share: limits, labels, grid, title and legend."""
    low, high = min(v.min().item() for v in values), max(v.max().item() for v in values)
    room = 0.06 * (high - low)
    axes[1][0].set_ylim(low - 3 * room, high + room)
    labels = ("gates  $g_k(x)$", "branches and their blend", "|error| in float64")
    for row, label in zip(axes, labels, strict=True):
        row[0].set_ylabel(label, fontsize=11)
    for ax in axes.flat:
        ax.set_xlim(float(x[0]), float(x[-1]))
        ax.grid(color="#E4E4E4", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(r"$y = \sum_k\, g_k(x)\,(s_k x + c_k)$", fontsize=16)
    figure.legend(
        handles=_legend(), loc="outside lower center", ncols=5, frameon=False, fontsize=11
    )


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=_BLUE, linewidth=2, label="lowest branch and its gate"),
        Line2D([], [], color=_VERMILION, linewidth=2, label="highest branch and its gate"),
        Line2D([], [], color=_BLEND, linewidth=5, alpha=0.8, label="blend of the branches"),
        Line2D([], [], color=_TARGET, dashes=(4, 2.5), linewidth=1.3, label="torch's function"),
        Patch(color="#EEEEEE", label="within rounding"),
    ]
