"""Pictures of instances and functions: gates, branches with their blend, errors, derivatives.

The `draw_*` functions each fill one matplotlib axes and can be put together at will; matplotlib is
an extra, imported only where a figure is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.fitting.shape import Curve, curve, discontinuities
from threshold_gating.instance import TG
from threshold_gating.primitive import gates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from threshold_gating.fitting import Fit
    from threshold_gating.theory import Explanation

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
# Fits from the least accurate to the most: matplotlib's plasma, which darkens evenly, and black.
_FITS = ("#FCA636", "#E16462", "#B12A90", "#6A00A8", "#0D0887", "black")
# Gates and blends are drawn in float64, where values of order 1 are rounded at 1e-16.
_FLOOR, _ROUNDING = 1e-17, 1e-15
# `taxonomy.measure` looks as far as 1e4, where float64 rounds at 1e-12: less than this is nothing.
EXACT_BELOW = 1e-11


def probes() -> Tensor:
    """Points that two functions are compared at: 64 to the unit as far as 32, and on to 1e4."""
    far = torch.logspace(math.log10(32), 4, 200, dtype=torch.float64)
    return torch.cat([torch.linspace(-32, 32, 4097, dtype=torch.float64), far, -far])


def values(f: Function, x: Tensor) -> Tensor:
    """f(x) without a graph, whether or not f works in place."""
    with torch.no_grad():
        return f(x.clone())


def rounding(x: Tensor, y: Tensor) -> Tensor:
    """By how much two ways to compute y = f(x) in float64 may differ at each of `probes`.

    A few 1e-15 of what is summed were seen: of y itself, and of what f reaches where it bends.
    """
    near = y[x.abs() <= 32]
    return 1e-11 * (near.max() - near.min()) / 32 + 1e-14 * y.abs()


def is_exact(sup: float, f: Function) -> bool:
    """Whether an instance that is `sup` from f at most is f, to rounding."""
    x = probes()
    return sup <= rounding(x, values(f, x)).max().item()


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


def draw_error(ax: Axes, t: TG, x: Tensor, f: Function, *, colour: str = _TARGET) -> None:
    """|t(x) - f(x)| on a logarithmic axis, with the reach of rounding shaded."""
    error = (t(x) - f(x)).abs()
    ax.axhspan(_FLOOR, _ROUNDING, color="#EEEEEE", linewidth=0)
    if error.max() == 0:
        middle = (_FLOOR * _ROUNDING) ** 0.5
        words = ax.text(float(x.mean()), middle, "no difference", clip_on=True, color=_QUIET)
        words.set(ha="center", va="center")
    else:
        # Points, not a line: rounding errors jump between 0, which has no logarithm, and an ulp.
        ax.plot(x.numpy(), error.numpy(), ".", color=colour, markersize=1.6)
    ax.set_yscale("log")
    ax.set_ylim(_FLOOR, 1)


def draw_function(ax: Axes, f: Function, x: Tensor, e: Explanation) -> None:
    """f over `x` with what `e` says of it: asymptotes, corners, inflections, the K = 2 floor."""
    y = _broken(curve(f)(x), x, [k.at for k in e.corners if k.step])
    for line, colour, end in ((e.asymptotes.low, _BLUE, "−"), (e.asymptotes.high, _VERMILION, "+")):
        if line.slope is not None and line.intercept is not None:
            label = f"asymptote at {end}∞: {_affine(line.slope, line.intercept)}"
            tail = (line.slope * x + line.intercept).numpy()
            ax.plot(x.numpy(), tail, color=colour, linewidth=1.5, dashes=(5, 3), label=label)
    ax.plot(x.numpy(), y.numpy(), color=_TARGET, linewidth=2.2, label="f")
    marks = (
        ("step", [k.at for k in e.corners if k.step], "s", _ORANGE),
        ("corner", [k.at for k in e.corners if not k.step], "D", _ORANGE),
        ("inflection", list(e.inflections), "o", "white"),
    )
    for word, places, marker, colour in marks:
        at = torch.tensor([p for p in places if x[0] <= p <= x[-1]], dtype=torch.float64)
        if len(at):
            label = f"{word} at {_listed(at.tolist())}"
            (drawn,) = ax.plot(at, curve(f)(at), marker, color=_TARGET, zorder=4, label=label)
            drawn.set(markersize=7, markerfacecolor=colour)
    if e.crossing.x is not None and e.crossing.line is not None and e.crossing.floor:
        _draw_floor(ax, f, e.crossing.x, e.crossing.line)
    _span(ax, y)


def draw_derivatives(ax: Axes, f: Function, x: Tensor) -> None:
    """f', f'' and f''' over `x`, with gaps where they do not exist.

    Where f' jumps, f'' has a point mass as large as the jump: an arrow of that height.
    """
    c = curve(f)
    jumps = discontinuities(c)  # of f, f' and f''
    ax.axhline(0, color=_QUIET, linewidth=0.8)
    styles = (("f'", _BLUE, "-"), ("f''", _VERMILION, "--"), ("f'''", _GREEN, ":"))
    drawn = []
    for order, (name, colour, line) in enumerate(styles, start=1):
        cuts = [at for places in jumps[: order + 1] for at in places]
        # Differences look 0.08 to either side, autograd no further than the point itself.
        y = _broken(c(x, order), x, cuts, 0.09 if order > c.orders else 0.0)
        ax.plot(x.numpy(), y.numpy(), line, color=colour, linewidth=2, label=name)
        drawn.append(y)
    for at in jumps[1]:
        if x[0] <= at <= x[-1]:
            left, right = c(torch.tensor([at - 1e-6, at + 1e-6], dtype=torch.float64), 1).tolist()
            arrow = {"arrowstyle": "-|>", "color": _VERMILION, "linewidth": 2, "shrinkA": 0}
            ax.annotate("", (at, right - left), (at, 0), arrowprops={**arrow, "shrinkB": 0})
            drawn.append(torch.tensor([right - left], dtype=torch.float64))
    _span(ax, torch.cat(drawn))


def draw_residuals(ax: Axes, fits: Sequence[Fit], x: Tensor, f: Function) -> None:
    """|f - t| of each fit on a logarithmic axis, the least accurate lightest."""
    fits = sorted(fits, key=lambda each: -each.sup)
    spread = (len(_FITS) - 1) / max(1, len(fits) - 1)
    for i, each in enumerate(fits):
        colour = _FITS[-1 - round((len(fits) - 1 - i) * spread)]
        draw_error(ax, each.t, x, f, colour=colour)
        sup = "exact" if is_exact(each.sup, f) else f"sup {each.sup:.1e}"
        ax.plot([], [], "o", color=colour, markersize=6, label=f"{_count(each.t)}: {sup}")
    if is_exact(fits[-1].sup, f):
        ax.fill_between([], [], color="#EEEEEE", label="within rounding")
    else:
        ax.set_ylim(fits[-1].sup * 1e-4, fits[0].sup * 3)


def plot_explanation(
    f: Function, fits: Sequence[Fit], explanation: Explanation, path: str | Path
) -> Path:
    """Draw a function, its best instance and what the others miss into `path`, .png or .svg.

    The function with its asymptotes, corners and inflections stands over its derivatives, the
    branches of the fit with the least sup over its gates, and the errors of all fits beside them.
    Without fits there is the function alone. Returns the path.
    """
    from matplotlib.figure import Figure

    c = curve(f)
    best = min(fits, key=lambda each: each.sup, default=None)
    x = _window(c, explanation, best)
    figure = Figure(figsize=(16 if best else 7, 9.8), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 3 if best else 1, width_ratios=(1, 1, 0.85) if best else None)
    top = figure.add_subplot(grid[0, 0])
    under = figure.add_subplot(grid[1, 0], sharex=top)
    draw_function(top, c, x, explanation)
    draw_derivatives(under, c, x)
    top.set_title("the function")
    under.set_title("its derivatives" + (" (arrow: point mass)" if under.texts else ""))
    panels = [top, under]
    if best is not None:
        panels += _draw_best(figure, grid, best, x, c, top)
        residual = figure.add_subplot(grid[:, 2], sharex=top)
        draw_residuals(residual, fits, x, c)
        residual.set_title("error |f − instance| for each K")
        panels.append(residual)
    title = explanation.name if len(explanation.name) <= 80 else f"{explanation.name[:77]}..."
    if best is not None:
        how = "exact" if is_exact(best.sup, c) else f"largest error {best.sup:.1e}"
        title += f"  ({taxonomy.family(best.t, tol=1e-9)}; {how} with {_count(best.t)})"
    figure.suptitle(title.replace("$", r"\$"), fontsize=17)
    _finish_explanation(figure, panels, x)
    path = Path(path)
    figure.savefig(path)
    return path


def _draw_best(
    figure: Figure, grid: Any, best: Fit, x: Tensor, f: Function, like: Axes
) -> list[Axes]:
    """Branches over gates, with the span of the axes `like`."""
    branches = figure.add_subplot(grid[0, 1], sharex=like, sharey=like)
    below = figure.add_subplot(grid[1, 1], sharex=like)
    draw_branches(branches, best.t, x, f)
    draw_gates(below, best.t, x)
    curves = best.t.q or (0.0,) * best.t.K
    for line, q, s, c in zip(branches.get_lines(), curves, best.t.s, best.t.c, strict=False):
        line.set_label(_affine(s, c, q))
    blend, target = branches.get_lines()[-2:]
    blend.set_label("their blend")
    target.set_label("f")
    branches.set_title(f"the branches of its best instance, {_count(best.t)}")
    below.set_title("their gates, in the same colours")
    return [branches, below]


def _finish_explanation(figure: Figure, panels: Sequence[Axes], x: Tensor) -> None:
    for ax in panels:
        _tidy(ax, x)
        ax.set_xlabel("x")
        _put_legend(ax, tall=ax is panels[-1] and len(panels) > 2)
    figure.get_layout_engine().set(h_pad=0.09, w_pad=0.08)  # type: ignore[union-attr, call-arg]


def _tidy(ax: Axes, x: Tensor) -> None:
    ax.set_xlim(float(x[0]), float(x[-1]))
    ax.grid(color="#E4E4E4", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _put_legend(ax: Axes, tall: bool) -> None:
    """Under the panel: inside there is no place that every function leaves free."""
    count = len(ax.get_legend_handles_labels()[0])
    columns = 2 if tall or count in (4, 5) else 3
    if count:
        ax.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.05 if tall else -0.12),
            ncols=columns,
            fontsize=9.5,
            frameon=False,
        )


def _window(c: Curve, e: Explanation, best: Fit | None) -> Tensor:
    """Points around all that is marked, as far as the tails bend, 0 among them."""
    marked = [e.derivatives.at, *(k.at for k in e.corners), *(best.t.theta if best else ())]
    marked += [v for v in (e.crossing.x, *e.inflections) if v is not None and abs(v) <= 8]
    reach = max([4.0, *(1.4 * abs(v) for v in marked)])
    out = torch.linspace(0, 8, 801, dtype=torch.float64)
    for side, line in ((-out, e.asymptotes.low), (out, e.asymptotes.high)):
        if line.slope is not None and line.intercept is not None:
            off = (c(side) - (line.slope * side + line.intercept)).abs()
            reach = max([reach, *out[off > 0.03 * off.max()][-1:].tolist()])
    return _points(reach)


def _points(reach: float) -> Tensor:
    """2001 points from -reach to reach, one of them 0, where most functions have their kink."""
    return reach * (torch.arange(-1000, 1001, dtype=torch.float64) / 1000)


def _count(t: TG) -> str:
    return f"K = {t.K}" + (", own τ" if isinstance(t.tau, tuple) else "")


def _span(ax: Axes, y: Tensor) -> None:
    seen = y[y.isfinite()]
    low, high = seen.min().item(), seen.max().item()
    room = 0.08 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)


def _draw_floor(ax: Axes, f: Function, x: float, line: float) -> None:
    value = float(curve(f)(torch.tensor([x], dtype=torch.float64)))
    arrow = {"arrowstyle": "<->", "color": _BLEND, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (x, value), (x, line), arrowprops=arrow)
    ax.plot([], [], color=_BLEND, linewidth=1.8, label=f"K = 2 misses {abs(value - line):.3g} here")


def _broken(y: Tensor, x: Tensor, cuts: Sequence[float], beside: float = 0.0) -> Tensor:
    """`y` with NaN at the points nearest to each cut, so that no line is drawn across it."""
    step = float(x[1] - x[0])
    for at in cuts:
        y = y.masked_fill((x - at).abs() <= max(beside, 0.51 * step), torch.nan)
    return y


def _affine(s: float, c: float, q: float = 0.0) -> str:
    """q x² + s x + c to three digits, without the terms that are 0."""
    text = ""
    for v, unit in ((q, " x²"), (s, " x"), (c, "")):
        if abs(v) > 5e-13:
            size = f"{abs(v):.4g}{unit}"
            size = size.removeprefix("1 ")  # 1 x is x
            text += f" {'−' if v < 0 else '+'} {size}"
    return text.removeprefix(" + ").replace(" − ", "−", int(text.startswith(" −"))) or "0"


def _listed(values: Sequence[float]) -> str:
    words = [f"{v:.3g}".replace("-", "−") for v in values[:4]]
    return ", ".join(words) + (" ..." if len(values) > 4 else "")


def plot_instances(names: Sequence[str], path: str | Path) -> Path:
    """Draw rows of the taxonomy side by side and write the picture to `path`; returns it.

    One column for each name: its gates, its branches with the blend and the function, its error.
    """
    from matplotlib.figure import Figure  # no pyplot: no window system, no state left behind

    keys = [taxonomy.key_of(name) for name in names]
    rows = [(key, taxonomy.TAXONOMY[key], taxonomy.ROWS[key].f) for key in keys]
    reach = max([4.0, *(1.3 * abs(theta) for _, t, _ in rows for theta in t.theta)])
    x = _points(reach)
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
        _tidy(ax, x)
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
