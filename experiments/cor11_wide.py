"""Corollary 11 in the setting that it is stated for: wide random networks on the edge of chaos.

The paper: the depth that a random network can be trained at goes with 1 / kappa^2, kappa = |f'''|
at the inflection, after Hayou et al. (2019), who bound it by E[f'^2] / E[f''^2]. Here kappa is read
both ways: at 0, as the paper does for SiLU and GELU, and at the strongest true inflection.

    python -m experiments.cor11_wide            # 14 activations, width 1024, three networks each
    python -m experiments.cor11_wide --smoke

What is measured: pairs of inputs of correlation 0 go through one random network of width 1024 with
the sigma_w and sigma_b of the edge of chaos at q = 0.5. Their correlation c tends to 1, and with it
all that told them apart is lost. The depth is the first layer at which 1 - c is below 0.1; the
theory has 1 - c = beta / depth for smooth functions and a faster law behind a corner. What is said
of it by rank correlation (Spearman) over the activations: 1 / kappa^2 of either reading, beta,
E[f'^2] / E[f''^2] and -chi_q. `experiments/cor10_cor11.py` trains networks of width 64.

Last result: claims: 1 not; 42 rows, CPU (x86_64, 2 cores, 1 threads), seeds 0, 1, 2, 500 s of runs
(some side by side), 2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import record
from experiments.record import Case, Row, Verdict
from threshold_gating import TAXONOMY, theory

NAME = "cor11_wide"
Q, APART, SEEDS = 0.5, 0.1, (0, 1, 2)
WIDTH, DEPTH, PAIRS = 1024, 200, 16
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "erf": torch.erf, "atan": torch.atan, "asinh": torch.asinh,
    "softsign": F.softsign, "hardtanh": F.hardtanh, "relu": F.relu, "leaky_relu": F.leaky_relu,
    "elu": F.elu, "selu": F.selu, "gelu": F.gelu, "silu": F.silu, "mish": F.mish,
    "quick_gelu": TAXONOMY["quick_gelu"],
}  # fmt: skip
SMOKE = ("tanh", "relu", "gelu")


def cases(smoke: bool) -> list[Case]:
    names, seeds = (SMOKE, (0,)) if smoke else (FUNCTIONS, SEEDS)
    width, depth = (64, 40) if smoke else (WIDTH, DEPTH)
    return [{"f": f, "seed": s, "width": width, "depth": depth} for f in names for s in seeds]


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    f = FUNCTIONS[case["f"]]
    edge, moments = theory.edge_of_chaos(f, Q), theory.moments(f, Q)
    if not edge.valid:
        raise ValueError(f"{case['f']} has no edge of chaos at q = {Q}")
    path = theory.measured_correlations(
        f, q=Q, sigma_w=edge.sigma_w, sigma_b2=edge.sigma_b2, c=0.0, depth=case["depth"],
        width=case["width"], pairs=PAIRS, seed=case["seed"],
    )  # fmt: skip
    near = [layer for layer, (_, c) in enumerate(path) if 1 - c < APART]
    return {
        "depth": near[0] if near else None,
        "variance at the end": path[-1][0],
        "kappa at 0": theory.kappa(f),
        "kappa at inflection": _steepest(f),
        "beta": edge.beta,
        "chi_q": edge.chi_q,
        "moments": moments.slope / moments.curvature if moments.curvature else math.inf,
    }


def _steepest(f: Callable[[Tensor], Tensor]) -> float | None:
    """kappa at the inflection where it is largest; at 0 where there is none."""
    found = [theory.kappa(f, at) for at in theory.inflections(f)]
    known = [k for k in found if k is not None]
    return max(known) if known else theory.kappa(f)


PREDICTIONS: dict[str, Callable[[dict[str, Any]], float]] = {
    "1 / kappa^2, kappa at 0": lambda r: _inverse_square(r["kappa at 0"]),
    "1 / kappa^2, kappa at the inflection": lambda r: _inverse_square(r["kappa at inflection"]),
    "E[f'^2] / E[f''^2] (Hayou et al.)": lambda r: float(r["moments"]),
    "beta": lambda r: r["beta"],
    "-chi_q": lambda r: -r["chi_q"],
}


def _inverse_square(kappa: float | None) -> float:
    return math.inf if not kappa else kappa**-2  # a corner counts with 0, as the paper reads it


def ranks(values: list[float]) -> list[float]:
    """Ranks from 1 on; equal values share the mean of theirs."""
    return [
        mean(k for k, other in enumerate(sorted(values), 1) if other == value) for value in values
    ]


def spearman(a: list[float], b: list[float]) -> float:
    x, y = (torch.tensor(ranks(v), dtype=torch.float64) for v in (a, b))
    x, y = x - x.mean(), y - y.mean()
    return (x @ y / (x.norm() * y.norm())).item()


def gathered(rows: list[Row]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.case["f"], []).append(row.figures)
    return found


def depth_of(runs: list[dict[str, Any]], never: int) -> float:
    """The mean over the networks; one that stays apart counts with the last layer."""
    return mean(never if run["depth"] is None else run["depth"] for run in runs)


def stays(runs: list[dict[str, Any]]) -> bool:
    """Whether the variance is still near q at the end; with chi_q > 1 it leaves, and the network is
    no longer on the edge that it began on."""
    return all(Q / 3 < float(run["variance at the end"]) < 3 * Q for run in runs)


def correlations(rows: list[Row], on_the_edge: bool = False) -> dict[str, float]:
    found = {n: runs for n, runs in gathered(rows).items() if stays(runs) or not on_the_edge}
    depths = [depth_of(runs, rows[0].case["depth"]) for runs in found.values()]
    return {
        name: spearman(depths, [predicted(runs[0]) for runs in found.values()])
        for name, predicted in PREDICTIONS.items()
    }


def page(rows: list[Row]) -> str:
    found, last = gathered(rows), rows[0].case["depth"]
    lines = [
        f"Random networks of width {rows[0].case['width']}, q = {Q}, pairs of correlation 0. Depth "
        f"is the first layer at which 1 - c is below {APART}, for each network; '> {last}' counts "
        f"as {last}. {rows[0].about['device']}, {rows[0].about['date']}.",
        "",
        "| activation | depth | kappa at 0 | kappa at the inflection | E[f'^2]/E[f''^2] | beta "
        "| chi_q | variance at the end |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in sorted(found.items(), key=lambda item: -depth_of(item[1], last)):
        depths = ", ".join(f"> {last}" if r["depth"] is None else str(r["depth"]) for r in runs)
        one = runs[0]
        kappas = ["none" if one[k] is None else f"{one[k]:.3g}" for k in
                  ("kappa at 0", "kappa at inflection")]  # fmt: skip
        cells = [name, depths, *kappas, f"{float(one['moments']):.3g}", f"{one['beta']:.3g}",
                 f"{one['chi_q']:.3f}",
                 ", ".join(f"{float(r['variance at the end']):.2g}" for r in runs)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    every, kept = correlations(rows), correlations(rows, on_the_edge=True)
    count = sum(map(stays, found.values()))
    lines += [
        "",
        f"The variance begins at {Q}. Where it leaves (more than a factor of 3 in {last} layers; "
        "chi_q above 1), the network does not stay on the edge, and its depth is not what the "
        f"theory speaks of. Rank correlation of the depth over all {len(found)} activations, and "
        f"over the {count} that stay:",
        "",
        "| with | all | those that stay |",
        "| --- | --- | --- |",
        *(f"| {name} | {every[name]:+.2f} | {kept[name]:+.2f} |" for name in every),
    ]
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> list[Verdict]:
    claim, paper = (
        "Cor. 11: trainable depth goes with 1 / kappa^2 (random networks)",
        "proportional",
    )
    if len(gathered(rows)) < 12:
        return [Verdict(claim, paper, "", "not run")]
    found, kept = correlations(rows), correlations(rows, on_the_edge=True)
    at_0, there = (found[name] for name in list(PREDICTIONS)[:2])
    ours = (
        f"rank correlation {at_0:+.2f} (kappa at 0), {there:+.2f} (at the inflection) over "
        f"{len(gathered(rows))} activations, width {rows[0].case['width']}; with beta "
        f"{kept['beta']:+.2f} over those that stay on the edge"
    )
    best = max(at_0, there)
    return [
        Verdict(
            claim, paper, ours, "reproduced" if best > 0.8 else "partly" if best > 0.5 else "not"
        )
    ]


def main(argv: list[str] | None = None) -> list[Row]:
    asked = record.options(NAME, __doc__).parse_args(argv)
    rows = record.complete(NAME, cases(asked.smoke), run, asked)
    print(page(rows))
    return rows


if __name__ == "__main__":
    main()
