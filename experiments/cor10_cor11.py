"""Corollaries 10 and 11, tested by measurement: does kappa = |f'''| govern step size and depth?

What it should show if the paper is right: the largest stable step falls like 1/sqrt(kappa)
(Cor. 10) and the trainable depth like 1/kappa^2 (Cor. 11), across activations and, within one, when
its input is rescaled: tanh(ax)/a has kappa = 2 a^2.

What is measured: plain networks on the edge of chaos (q = 0.5, and q = 0.5/a^2 for tanh(ax)/a),
hidden weights trained by full-batch gradient descent on a product of inputs; biases, input and
output maps are frozen, which makes the networks of tanh(ax)/a the same function of the weights.

- largest stable step: the largest rate below which no run's loss doubles, depth 8;
- trainable depth: the largest depth at which the best of five rates halves the variance;
- trust radius in z: where f'(z)^2 has changed by a tenth, which is what App. C really bounds.

Sigmoid has no edge of chaos; it runs at the sigma_w that gives it the longest xi, and does not
count in the rank correlations.

Last measured result (seeds 0, 1, 2; 262 s on one CPU core; torch 2.13): both refuted. Rank
correlation over six activations with what the paper says: learning rate +0.21, trust radius -0.76,
depth -0.89 (with -chi_q instead: +0.93). tanh(x/2)*2 against tanh(2x)/2, kappa 0.5 and 8: the same
rate and the same depth for every seed (predicted: factors 4 and 256), trust radius factor 4.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from threshold_gating import theory

WIDTH, BATCH, INPUTS = 64, 32, 8
SEEDS = (0, 1, 2)
Q = 0.5
STEP_DEPTH, STEP_STEPS = 8, 60
STEPS = 100
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)  # divided by the depth
DEPTHS = tuple(round(2 ** (k / 2)) for k in range(4, 18))  # 4, 6, 8, 11, ... 362
RATE_GRID = tuple(10 ** (k / 20) for k in range(-50, 31))  # 0.003 to 32, 12 % apart
AGREES = 0.8  # the rank correlation from which a corollary counts as confirmed


class Case(NamedTuple):
    """An activation with its initialisation; `ranked` cases count in the rank correlations."""

    name: str
    f: Callable[[Tensor], Tensor]
    kappa: float
    q: float
    sigma_w: float
    sigma_b2: float
    beta: float
    chi_q: float
    ranked: bool


class Measured(NamedTuple):
    """What came out for one case, one entry per seed."""

    steps: list[float]
    depths: list[int]
    radius: float


def scaled_tanh(a: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(a * x) / a


def cases() -> list[Case]:
    six = {"tanh": torch.tanh, "erf": torch.erf, "relu": F.relu}
    six |= {"gelu": F.gelu, "silu": F.silu, "mish": F.mish}
    found = [on_the_edge(name, f, Q, ranked=True) for name, f in six.items()]
    for a in (0.5, 2.0):
        found.append(on_the_edge(f"tanh({a:g}x)/{a:g}", scaled_tanh(a), Q / a**2, ranked=False))
    return [*found, without_edge("sigmoid", torch.sigmoid)]


def on_the_edge(name: str, f: Callable[[Tensor], Tensor], q: float, ranked: bool) -> Case:
    edge, kappa = theory.edge_of_chaos(f, q), theory.kappa(f)
    assert edge.valid
    # ReLU has no third derivative at its corner and 0 everywhere else; 0 is the paper's reading.
    kappa = 0.0 if kappa is None else kappa
    return Case(name, f, kappa, q, edge.sigma_w, edge.sigma_b2, edge.beta, edge.chi_q, ranked)


def without_edge(name: str, f: Callable[[Tensor], Tensor]) -> Case:
    found = [(s, theory.xi(f, s, 0.0)) for s in (1, 2, 3, 4, 6, 8, 12, 16)]
    sigma_w, scale = max(found, key=lambda p: p[1].xi)
    return Case(name, f, theory.kappa(f), scale.q, sigma_w, 0.0, 0.0, scale.chi_q, False)


def train(case: Case, depth: int, rates: tuple[float, ...], steps: int, device: str) -> Tensor:
    """Losses (steps + 1, seeds, rates) of seeds x rates independent networks, trained as one batch.

    Shapes: R runs, B batch, N width. The same seed gives the same network and data at every rate.
    """
    size = theory.moments(case.f, case.q).value
    drawn = []
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH, INPUTS, generator=g)
        y = x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3]
        z = x @ torch.randn(INPUTS, WIDTH, generator=g)
        w = torch.randn(depth, WIDTH, WIDTH, generator=g) * (case.sigma_w / math.sqrt(WIDTH))
        b = torch.randn(depth, WIDTH, generator=g) * math.sqrt(case.sigma_b2)
        v = torch.randn(WIDTH, generator=g) / math.sqrt(WIDTH * size)  # an output of variance 1
        y, z = (y - y.mean()) / y.std(), z * math.sqrt(case.q) / z.pow(2).mean().sqrt()
        drawn.append((y, z, w, b, v))
    y, z, w, b, v = (  # (R, B), (R, B, N), (R, depth, N, N), (R, depth, N), (R, N)
        torch.stack(t).repeat_interleave(len(rates), 0).to(device) for t in zip(*drawn, strict=True)
    )
    rate = torch.tensor(rates, device=device).repeat(len(SEEDS))[:, None, None]
    weights = [layer.clone().requires_grad_() for layer in w.unbind(1)]
    losses = []
    for _ in range(steps + 1):
        h = z
        for weight, bias in zip(weights, b.unbind(1), strict=True):
            h = torch.baddbmm(bias[:, None], case.f(h), weight)
        out = (case.f(h) @ v[:, :, None]).squeeze(-1)
        loss = (out - y).pow(2).mean(1)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(
            loss.sum(), weights
        )  # runs do not mix, NaN stays in its own
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(rate * gradient)
    return torch.stack(losses).view(steps + 1, len(SEEDS), len(rates)).cpu()


def largest_stable_steps(
    case: Case, grid: tuple[float, ...], steps: int, device: str
) -> list[float]:
    """Per seed the largest rate up to which no loss doubles at any step."""
    losses = train(case, STEP_DEPTH, grid, steps, device)
    stable = (losses <= 2 * losses[0]).all(0)  # a NaN is not <= anything
    counts = stable.long().cumprod(-1).sum(-1).tolist()
    return [grid[n - 1] if n else 0.0 for n in counts]


def trainable_depths(case: Case, depths: tuple[int, ...], steps: int, device: str) -> list[int]:
    """Per seed the largest depth up to which the best rate brings the loss under 1/2."""
    reached, alive = [0] * len(SEEDS), [True] * len(SEEDS)
    for depth in depths:
        last = train(case, depth, tuple(r / depth for r in RATES), steps, device)[-1]
        best = last.nan_to_num(math.inf).min(-1).values.tolist()
        # the target has variance 1, so this is half of it explained
        alive = [a and b < 0.5 for a, b in zip(alive, best, strict=True)]
        reached = [depth if a else r for a, r in zip(alive, reached, strict=True)]
        if not any(alive):
            break
    return reached


def ranks(values: list[float]) -> list[float]:
    """Average ranks, ties shared."""
    return [sum((w < v) + 0.5 * (w == v) for w in values) for v in values]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's; 0 where one side has no order."""
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    x, y = (torch.tensor(ranks(v), dtype=torch.float64) for v in (a, b))
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def geometric(values: list[float]) -> float:
    return math.exp(sum(math.log(max(v, 1e-9)) for v in values) / len(values))


def power(kappa: float, exponent: float) -> float:
    return math.inf if kappa == 0 else kappa**exponent


def verdicts(rows: list[tuple[Case, Measured]]) -> dict[str, dict[str, float | str]]:
    """The rank correlation of each measurement with what its corollary says it goes with."""
    six = [(c, m) for c, m in rows if c.ranked]
    tanhs = [(c, m) for c, m in rows if c.name.startswith("tanh")]
    tanhs.sort(key=lambda row: row[0].kappa)
    questions = {
        "Cor. 10, learning rate": (lambda m: geometric(m.steps), -0.5),
        "Cor. 10, trust radius in z": (lambda m: m.radius, -0.5),
        "Cor. 11, trainable depth": (lambda m: geometric(m.depths), -2.0),
    }
    answers = {}
    for name, (measured, exponent) in questions.items():
        found = [measured(m) for _, m in six]
        rho = rank_correlation(found, [power(c.kappa, exponent) for c, _ in six])
        low, high = tanhs[0], tanhs[-1]
        ratio = measured(low[1]) / measured(high[1])
        predicted = (low[0].kappa / high[0].kappa) ** exponent
        scales = abs(math.log(ratio / predicted)) < math.log(1.25)
        answers[name] = {
            "rank correlation": rho,
            "tanh(x/2)*2 against tanh(2x)/2": ratio,
            "predicted": predicted,
            "verdict": "confirmed" if rho >= AGREES and scales else "refuted",
        }
    depth = [geometric(m.depths) for _, m in six]
    answers["for comparison: trainable depth"] = {
        "rank correlation with -chi_q": rank_correlation(depth, [-c.chi_q for c, _ in six]),
        "rank correlation with beta_q": rank_correlation(depth, [c.beta for c, _ in six]),
    }
    return answers


def table(rows: list[tuple[Case, Measured]]) -> str:
    lines = ["activation      kappa  beta_q  chi_q  stable rate (3 seeds)  radius  depth (3 seeds)"]
    for c, m in rows:
        steps = " ".join(f"{s:6.3f}" for s in m.steps)
        depths = " ".join(f"{d:4d}" for d in m.depths)
        figures = f"{c.kappa:8.4f} {c.beta:7.2f} {c.chi_q:6.3f}"
        lines.append(f"{c.name:<12} {figures}   {steps}  {m.radius:6.4f}   {depths}")
    return "\n".join(lines)


def picture(rows: list[tuple[Case, Measured]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    line = torch.logspace(-1.3, 1, 50)
    tanh = next(m for c, m in rows if c.name == "tanh")
    panels = (
        (
            axes[0],
            lambda m: m.steps,
            -0.5,
            "1/sqrt(kappa)",
            "Cor. 10: largest stable learning rate",
        ),
        (axes[1], lambda m: m.depths, -2.0, "1/kappa^2", "Cor. 11: trainable depth"),
    )
    flat = [c.name for c, _ in rows if c.kappa == 0]
    place = {name: 0.006 * i for i, name in enumerate(flat)}
    for ax, values, exponent, law, title in panels:
        through = geometric(values(tanh)) * (line / 2) ** exponent
        ax.plot(line, through, "--", color="#666666", label=f"the paper: {law}, drawn through tanh")
        for c, m in rows:
            colour = "#0072B2" if c.ranked else "#E69F00" if "tanh" in c.name else "#D55E00"
            x = place.get(c.name, c.kappa)  # those with kappa = 0 side by side
            ax.plot([x] * len(SEEDS), values(m), ".-", color=colour, markersize=4, linewidth=1)
            ax.plot([x], [geometric(values(m))], "o", color=colour)
            below = c.name in ("erf", "sigmoid")  # their neighbours have the place above
            ax.annotate(
                c.name,
                (x, min(values(m)) if below else max(values(m))),
                (0, -12 if below else 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        everything = [v for _, m in rows for v in values(m)]
        ax.set_xscale("symlog", linthresh=0.05)
        ax.set_yscale("log")
        ax.set_xticks([0, 0.1, 1, 10], ["0", "0.1", "1", "10"])
        ax.set_ylim(min(everything) / 4, max(everything) * 3)
        ax.set(xlabel="kappa = |f'''(0)|", title=title, xlim=(-0.012, 25))
        ax.legend(loc="lower left", fontsize=8)
    figure.supxlabel(
        "large dots: mean of three seeds (small dots); orange: the same network rescaled; "
        "red: no edge of chaos",
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, dict[str, float | str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="three tiny cases, in seconds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/cor10_cor11"))
    args = parser.parse_args(argv)
    start = time.perf_counter()
    chosen, depths, grid, steps = cases(), DEPTHS, RATE_GRID, STEPS
    if args.smoke:
        chosen = [c for c in chosen if "tanh" in c.name or c.name == "gelu"]
        depths, grid, steps = (4, 8), RATE_GRID[::10], 5
    rows = []
    for case in chosen:
        stable = largest_stable_steps(case, grid, min(steps, STEP_STEPS), args.device)
        reached = trainable_depths(case, depths, steps, args.device)
        rows.append((case, Measured(stable, reached, theory.trust_radius(case.f))))
        print(f"{time.perf_counter() - start:6.1f} s  {case.name}", flush=True)
    answers = verdicts(rows)
    print(table(rows))
    for name, answer in answers.items():
        figures = (f"{k} {v if isinstance(v, str) else f'{v:.3g}'}" for k, v in answer.items())
        print(f"{name}: {'; '.join(figures)}")
    args.out.mkdir(parents=True, exist_ok=True)
    picture(rows, args.out / "cor10_cor11.png")
    record = {
        "rows": [
            {k: v for k, v in {**c._asdict(), **m._asdict()}.items() if k != "f"} for c, m in rows
        ],
        "verdicts": answers,
        "seeds": SEEDS,
        "seconds": time.perf_counter() - start,
        "device": args.device,
        "torch": torch.__version__,
        "source": Path(__file__).read_text(),
    }
    (args.out / "cor10_cor11.json").write_text(json.dumps(record, indent=1))
    return answers


if __name__ == "__main__":
    main()
