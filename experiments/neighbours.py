"""Tier W beside other learned activations and splines, at equal parameters and training FLOPs.

The ResNet of 14 layers of `fig3_depth`, with its loop, schedule, batches and sweep of rates. Each
neighbour has the width at which it comes nearest to the parameters of tier W with w = 16; nearly
all of its work is in convolutions, so its MACs, and with them its training FLOPs, come out near
tier W's as well. The page prints both.

    prelu   max(x, 0) + a min(x, 0), one a for each channel, from 0.25
    acon    ACON-C (Ma et al. 2021): d x sigmoid(b d x) + p x, with b, p and d + p for each channel
    apl     max(x, 0) + sum of two a max(b - x, 0) (Agostinelli et al. 2015), for each channel
    pau     a rational function of degree 5 over 4 for each layer (Molina et al. 2020)
    kan     SiLU and 7 cubic splines for each synapse, as in KAN (Liu et al. 2024), on a grid of 4
            intervals in [-3, 3] that does not move (pykan's default is 3 in [-1, 1])

    python -m experiments.neighbours --data DIR --jobs 8
    python -m experiments.neighbours --smoke

Rows of tier W, SiLU and ReLU are those of `fig3_depth`. On a GPU all but prelu are compiled in
training (TORCHDYNAMO_DISABLE=1 leaves that out, and takes several times as long).

Last result: claims: 1 partly; 30 rows, NVIDIA H200, seeds 0, 1, 2, 3,288 s of runs (some side by
side), 2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import depth_page, fig3_depth, record
from experiments.cifar_networks import ARMS, Arm, cost, matched
from experiments.record import Case, Row, Verdict
from experiments.spread import Word, paired, spread

NAME = "neighbours"
DEPTH, INTERVALS, ORDER, REACH = 14, 4, 3, 3.0  # splines are cubic: ORDER is 3


def channels(count: int, value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), value))


def each(w: Tensor) -> Tensor:
    """One number for each channel of an image."""
    return w.view(-1, 1, 1)


class ACON(nn.Module):
    """ACON-C, from where its authors start: p1 and p2 from N(0, 1), b = 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.p1, self.p2 = (nn.Parameter(torch.randn(count)) for _ in range(2))
        self.beta = channels(count, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return compiled(acon, x)(x, self.p1, self.p2, self.beta)


def acon(x: Tensor, p1: Tensor, p2: Tensor, beta: Tensor) -> Tensor:
    d = each(p1 - p2) * x
    return (d * torch.sigmoid(each(beta) * d) + each(p2) * x).to(x.dtype)


class APL(nn.Module):
    """From ReLU: a = 0, and the two hinges at -0.5 and 0.5."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.a = nn.ParameterList([channels(count, 0.0) for _ in range(2)])
        self.b = nn.ParameterList([channels(count, at) for at in (-0.5, 0.5)])

    def forward(self, x: Tensor) -> Tensor:
        return compiled(apl, x)(x, *self.a, *self.b)


def apl(x: Tensor, a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor) -> Tensor:
    hinges = (each(a) * F.relu(each(b) - x) for a, b in ((a0, b0), (a1, b1)))
    return (F.relu(x) + sum(hinges)).to(x.dtype)


# As their authors start: near leaky ReLU (0.01) on [-3, 3].
_TOP = (0.02979246, 0.61837738, 2.32335207, 3.05202660, 1.48548002, 0.25103717)
_BOTTOM = (1.14201226, 4.39322834, 0.87154450, 0.34720652)


def rational(x: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    """(a0 + a1 x + ..) / (1 + |b1 x + b2 x^2 + ..|), in float32."""
    z = x.float()
    above, below = top[-1], bottom[-1]
    for a in top[:-1].flip(0).unbind(0):
        above = above * z + a
    for b in bottom[:-1].flip(0).unbind(0):
        below = below * z + b
    return (above / (1 + (below * z).abs())).to(x.dtype)


class PAU(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.top, self.bottom = (nn.Parameter(torch.tensor(w)) for w in (_TOP, _BOTTOM))

    def forward(self, x: Tensor) -> Tensor:
        return compiled(rational, x)(x, self.top, self.bottom)


def splines(x: Tensor) -> Tensor:
    """SiLU and the cubic B-splines of each value, on a new last axis; 0 beyond the last knots."""
    step = 2 * REACH / INTERVALS
    which = torch.arange(INTERVALS + ORDER, device=x.device)  # the first has its middle at -1 step
    u = (((x.float() + REACH) / step + 1).unsqueeze(-1) - which).abs()
    found = (F.relu(2 - u) ** 3 - 4 * F.relu(1 - u) ** 3) / 6
    return torch.cat([F.silu(x).unsqueeze(-1), found.to(x.dtype)], -1)


class SplineConv(nn.Conv2d):
    """A KAN layer as a convolution: one of the splines, which are functions of x alone."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs * (1 + INTERVALS + ORDER), outputs, 3, stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)  # as an image in channels_last lies
        found = compiled(splines, x)(rows).flatten(-2)
        return super().forward(found.permute(0, 3, 1, 2))


@functools.cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def compiled(function: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    """In training on a GPU, where each elementwise op would be a pass over memory."""
    return _compile(function) if x.is_cuda and torch.is_grad_enabled() else function


NEIGHBOURS: dict[str, Arm] = {
    "prelu": Arm(nn.PReLU),
    "acon": Arm(ACON),
    "apl": Arm(APL),
    "pau": Arm(PAU),
    "kan": Arm(lambda _: nn.SiLU(), SplineConv, 1 + INTERVALS + ORDER),
}
TITLES = {
    "prelu": "PReLU",
    "acon": "ACON-C",
    "apl": "APL",
    "pau": "PAU (rational)",
    "kan": "KAN-type",
}


def cases(smoke: bool = False) -> list[Case]:
    if smoke:
        tried = [{"arm": arm, "depth": 8, "width": 4} for arm in NEIGHBOURS]
        return [*fig3_depth.sweep(tried, (0.1,)), *fig3_depth.grid(tried, (0,))]
    most = cost(ARMS["tier W"], DEPTH, 16)
    networks = [
        {"arm": name, "depth": DEPTH, "width": matched(arm, DEPTH, "parameters", most)}
        for name, arm in NEIGHBOURS.items()
    ]
    return [*fig3_depth.sweep(networks), *fig3_depth.grid(networks)]


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    return fig3_depth.trained(NAME, NEIGHBOURS[case["arm"]], case, asked)


def page(rows: list[Row], beside: list[Row] | None = None) -> str:
    """`beside` are the rows of `fig3_depth`, by default those on record."""
    beside = record.rows(record.RESULTS / "fig3_depth.jsonl") if beside is None else beside
    theirs = depth_page.grouped(rows)
    wide = (16, depth_page.EQUAL)
    known = {
        (arm, depth, width): runs
        for (arm, depth, width), runs in depth_page.grouped(beside).items()
        if depth == DEPTH and width in wide and arm in _SHOWN
    }
    base, ours = cost(ARMS["tier W"], DEPTH, 16), known.get(depth_page.OURS, {})
    lines = []
    for network, runs in {**known, **theirs}.items():
        own = cost({**ARMS, **NEIGHBOURS}[network[0]], DEPTH, network[2])
        ends = depth_page.accuracies(runs)
        gain = "" if network == depth_page.OURS else str(paired(depth_page.accuracies(ours), ends))
        lines.append(
            [
                TITLES.get(network[0], depth_page.TITLES.get(network[0], network[0])),
                str(network[2]),
                f"{own.parameters:,} ({own.parameters / base.parameters:.2f})",
                f"{own.macs / base.macs:.2f}",
                spread([*ends.values()]),
                gain,
            ]
        )
    head = ["network", "w", "parameters", "MACs over tier W's", "test %", "tier W minus it"]
    words = (
        f"ResNets of {DEPTH} layers with other learned activations and about the parameters of "
        "tier W (training FLOPs are three times twice the MACs), trained by the loop, schedule, "
        "batches and sweep of `fig3_depth`, whose rows those of tier W, tier A, ReLU, SiLU and "
        f"CReLU are (`{rows[-1].about['command']}`; {record.measured(rows)})."
    )
    missing = depth_page.said_missing(cases(), rows)
    if not theirs:
        missing += " No neighbour was trained to the end: the table has none of them."
    if not ours:
        missing += " Tier W itself has no rows yet: `python -m experiments.fig3_depth`."
    return "\n\n".join([words, missing, depth_page.table(head, lines), depth_page.rates(rows)])


_SHOWN = ("tier W", "tier A", "relu", "silu", "crelu")


def verdicts(rows: list[Row], beside: list[Row] | None = None) -> list[Verdict]:
    """The paper compares with no other learned activation: this says how many tier W beats."""
    beside = record.rows(record.RESULTS / "fig3_depth.jsonl") if beside is None else beside
    ours = depth_page.accuracies(depth_page.grouped(beside).get(depth_page.OURS, {}))
    gains = {
        network[0]: paired(ours, depth_page.accuracies(runs))
        for network, runs in depth_page.grouped(rows).items()
    }
    have = {name: gain for name, gain in gains.items() if gain.pairs}
    claim = "tier W beats PReLU, ACON-C, APL, PAU and KAN-type layers with as many parameters"
    if not have:
        return [Verdict(claim, "not compared", "", "not run")]
    said = "; ".join(f"{TITLES[name]} {gain}" for name, gain in have.items())
    clear = [gain.mean - gain.half > 0 for gain in have.values()]
    whole = all(clear) and len(have) == len(NEIGHBOURS)
    word: Word = "reproduced" if whole else "partly" if any(clear) else "not"
    if lost := [TITLES[name] for name in NEIGHBOURS if name not in have]:
        said += f"; not run: {', '.join(lost)};"
    return [Verdict(claim, "not compared", f"{said} points", word)]


def main(argv: list[str] | None = None) -> list[Row]:
    asked = record.options(NAME, __doc__).parse_args(argv)
    return fig3_depth.in_parts(NAME, cases(asked.smoke), run, asked)


if __name__ == "__main__":
    main()
