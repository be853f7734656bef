"""Draw the paper's Figures 1 and 2 from the library, for docs/paper.md.

python tools/paper_figures.py   # writes docs/images/figure1.svg and figure2.svg
"""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

import threshold_gating as tg

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# Okabe and Ito's colours, which colour-blind people tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


def sharpness() -> None:
    """Figure 1: one gate from soft to hard, and what it makes of the branches 0 and x."""
    x = torch.linspace(-6, 6, 1201)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    taus = {0.5: BLUE, 1.0: GREEN, 2.0: ORANGE, 5.0: RED, float("inf"): "black"}
    for tau, colour in taus.items():
        name = "τ = ∞, hard" if tau == float("inf") else f"τ = {tau:g}"
        left.plot(x, tg.gates(x, tau, (0.0,))[1], color=colour, label=name)
        right.plot(x, tg.TG(tau, 0.0, (0, 1), (0, 0))(x), color=colour)
    left.set(title="the upper gate g(x; τ, θ = 0)", xlabel="x")
    right.set(title="g(x) x: from SiLU (τ = 1) to ReLU", xlabel="x", xlim=(-4, 4), ylim=(-0.6, 4))
    left.legend(frameon=False)
    save(figure, "figure1.svg")


def box(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    style = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour}
    axes.text(x, y, text, ha="center", va="center", bbox=style, fontsize=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    line = {"arrowstyle": "-|>", "color": colour, "shrinkA": 16, "shrinkB": 16}
    axes.annotate("", xy=end, xytext=start, arrowprops=line)


def neuron() -> None:
    """Figure 2: sum, then activate; or gate each input between branches, then sum."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    inputs = {"x₁": 2.0, "x₂": 1.0, "x₃": 0.0}
    for axes in (left, right):
        axes.set(xlim=(-0.5, 4.6), ylim=(-0.7, 2.7))
        axes.axis("off")
    left.set_title("conventional: weights, sum, activation")
    right.set_title("gated: branch weights for each input, sum")
    for name, y in inputs.items():
        box(left, 0, y, name, GREY)
        box(left, 1.4, y, "W x", BLUE)
        arrow(left, (0, y), (1.4, y), GREY)
        arrow(left, (1.4, y), (2.8, 1), GREY)
        box(right, 0, y, name, GREY)
        for shift, part, colour in (
            (0.24, "upper g₂ · w² x", ORANGE),
            (-0.24, "lower g₁ · w¹ x", BLUE),
        ):
            box(right, 1.75, y + shift, part, colour)
            arrow(right, (0, y), (1.3, y + shift), GREY)
            arrow(right, (2.2, y + shift), (3.6, 1), GREY)
    box(left, 2.8, 1, "Σ", "black")
    box(left, 4.0, 1, "σ", RED)
    arrow(left, (2.8, 1), (4.0, 1), GREY)
    box(right, 3.8, 1, "Σ", "black")
    save(figure, "figure2.svg")


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(IMAGES / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "threshold-gating"  # the same file every time
    sharpness()
    neuron()
