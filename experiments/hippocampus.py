"""Fig. 3(d), last pair: segmentation of the hippocampus in MR crops, steps to the baseline's Dice.

The paper trains MambaMIM (state-space layers and a U-Net, 42 M parameters, 30,000 steps of one
volume of 64^3) and reaches the level of SiLU in 1 / 1.47 of the steps with tier W. Its Mamba part
is not built here: this is a small 3-D U-Net with 13 activations on 130 crops (104 for training, 26
for the test). Of the recipe there are: AdamW, gates at 4 times the rate and not decayed, tier W
with K = 2 per channel at every activation, c_2 = -0.05, cosine after a warm-up of a sixtieth of the
steps, gradients clipped to norm 1, and a running mean of the weights over a third of the steps,
which is what 0.9999 is of 30,000. With fewer steps the rate has to be higher: it is swept for
SiLU and for tier W alike (seed 0, an eighth of the training volumes held out, 400 steps).

    silu   the baseline
    W      tier W at equal width: about twice the weights
    wide   SiLU with as many parameters as W

    python -m experiments.hippocampus --data DIR --jobs 3     # the sweep first, then all
    python -m experiments.hippocampus --smoke

Last result: claims: 1 not; 15 rows, NVIDIA H200, seeds 0, 1, 2, 292 s of runs (some side by side),
2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments import record, sweep
from experiments.cifar_training import Recipe, _keep, _optimiser, _resumed, _Step, _wait
from experiments.data import Volumes, hippocampus
from experiments.record import Case, Row, Verdict
from experiments.spread import judged_factor, paired, spread
from experiments.sweep import Rates, best_rates
from experiments.volumes import Split, UNet, Unit, cropped, split

NAME = "hippocampus"
SEEDS, RATES = (0, 1, 2), (3e-4, 1e-3, 3e-3)
ARMS = {"silu": "SiLU", "W": "tier W", "wide": "SiLU, wider"}
GATE_RATE, C_2, DECAY, CLIP = 4.0, -0.05, 0.01, 1.0
# c_2 is the constant of the branch below the threshold, whose slope is 0: here the first.
START = tg.TG(tau=1.0, theta=(0.0,), s=(0.0, 1.0), c=(C_2, 0.0))


class Size(NamedTuple):
    """Channels of each level, for W and for a baseline of as many parameters; grid; steps."""

    widths: tuple[int, ...] = (16, 32, 64)
    wide: tuple[int, ...] = (24, 40, 96)
    grid: tuple[int, int, int] = (40, 56, 40)  # holds every labelled voxel of the 130
    margin: int = 4  # of the crops in training, to each side
    batch: int = 2
    steps: int = 1500
    sweep: int = 400
    evaluations: int = 30


SMOKE = Size((2, 4, 4), (4, 4, 4), (8, 8, 8), 2, 2, steps=6, sweep=2, evaluations=6)


def network(arm: str, seed: int, size: Size) -> UNet:
    torch.manual_seed(seed)
    model = UNet(size.wide if arm == "wide" else size.widths)
    if arm == "W":
        for unit in [m for m in model.modules() if isinstance(m, Unit)]:
            unit.act = nn.Identity()
            unit.conv = tg.Conv3d.from_dense(unit.conv, START, train=("tau", "theta", "c"))
    return model


class Plan(NamedTuple):
    """What each step reads, from the seed alone: volumes, corners, contrast, share of the rate."""

    rows: Tensor
    corners: Tensor
    contrast: Tensor
    rate: Tensor

    @classmethod
    def of(cls, count: int, steps: int, size: Size, seed: int, device: str) -> Plan:
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-steps * size.batch // count)
        order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
        each = (steps, size.batch)
        corners = torch.randint(0, 2 * size.margin + 1, (*each, 3), generator=generator)
        contrast = 0.1 * torch.randn((*each, 2), generator=generator)
        rise = max(1, steps // 60)
        at = torch.arange(steps)
        fall = 0.5 * (1 + torch.cos(math.pi * (at - rise) / (steps - rise)))
        rate = torch.where(at < rise, (at + 1) / rise, fall)
        rows = order[: steps * size.batch].view(each)
        return cls(*(t.to(device) for t in (rows, corners, contrast, rate.float())))


# Training


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, and 1 - Dice of the two parts over the batch."""
    share = logits.softmax(1)[:, 1:]
    wanted = torch.stack([labels == part for part in (1, 2)], 1)
    both, either = ((a.sum((0, 2, 3, 4))) for a in (share * wanted, share + wanted))
    dice = (2 * both + 1) / (either + 1)
    return F.cross_entropy(logits, labels) + 1 - dice.mean()


@torch.no_grad()
def judged(model: UNet, test: tuple[Tensor, Tensor], size: Size) -> list[float]:
    """Dice of both parts in percent, each the mean over volumes, with every gate evaluated."""
    model.eval()
    found = []
    middle = torch.full((1, 3), size.margin, device=test[0].device)
    with tg.kernels.use("triton" if test[0].is_cuda else "reference"):
        for x, y in zip(test[0].split(4), test[1].split(4), strict=True):
            corners = middle.expand(len(x), 3)
            seen = model(cropped(x, corners, size.grid)[:, None]).argmax(1)
            wanted = cropped(y, corners, size.grid)
            for part in (1, 2):
                ours, theirs = (t.eq(part).flatten(1) for t in (seen, wanted))
                sizes = ours.sum(1) + theirs.sum(1)
                dice = 2 * (ours & theirs).sum(1) / sizes.clamp(min=1)
                found.append(torch.where(sizes == 0, 1.0, dice))  # none asked for, none found
    per_part = [torch.cat(found[part::2]).double().mean().item() for part in (0, 1)]
    return [100 * value for value in per_part]


def train(
    model: UNet, data: Split, case: Case, size: Size, device: str, kept: Path | None
) -> dict[str, Any]:
    """Train in place; the curves of the running mean of the weights and of the weights."""
    recipe = Recipe(case["steps"], rate=case["rate"], gate_rate=GATE_RATE, decay=DECAY, adam=True)
    steps, keep = recipe.steps, 3 / recipe.steps  # 1e-4 of 30,000
    images, labels = (t.to(device) for t in data.train)
    test = data.test[0].to(device), data.test[1].to(device)
    model.to(device)
    both = nn.ModuleDict({"now": model, "mean": copy.deepcopy(model)})
    mine, slow = (list(both[name].parameters()) for name in ("now", "mean"))
    optimiser = _optimiser(model, recipe)
    bases = [group["lr"] for group in optimiser.param_groups]
    for group in optimiser.param_groups:
        group["lr"] = torch.tensor(0.0, device=device)
    plan = Plan.of(len(images), steps, size, case["seed"], device)

    def step() -> None:
        rows, corners, contrast, rate = (t[at][0] for t in plan)
        for group, base in zip(optimiser.param_groups, bases, strict=True):
            group["lr"].copy_(base * rate)
        gain, shift = (contrast[:, k, None, None, None] for k in (0, 1))
        x = cropped(images[rows], corners, size.grid) * (1 + gain) + shift
        optimiser.zero_grad(set_to_none=False)
        with torch.autocast(torch.device(device).type, torch.bfloat16, device != "cpu"):
            out = model(x[:, None])
        loss_of(out.float(), cropped(labels[rows], corners, size.grid)).backward()
        nn.utils.clip_grad_norm_(mine, CLIP)
        optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(slow, mine, keep)
        at.add_(1)

    first, curve = _resumed(kept, both, optimiser, device)
    at = torch.full((1,), first, device=device)
    called, parts = _Step(step, device), []  # milliseconds of a step between evaluations
    marks = {round((n + 1) * steps / size.evaluations) for n in range(size.evaluations)}
    begun, since = time.perf_counter(), first
    for done in range(first + 1, steps + 1):
        called()
        if done in marks or done == steps:
            _wait(device)
            parts.append(1e3 * (time.perf_counter() - begun) / (done - since))
            points = [value for name in ("mean", "now") for value in judged(both[name], test, size)]
            curve.append((done, *points))
            _keep(kept, done, both, optimiser, curve)
            model.train()
            begun, since = time.perf_counter(), done
    if kept is not None:
        kept.unlink(missing_ok=True)
    return {
        "dice": mean(curve[-1][1:3]),
        "anterior": curve[-1][1],
        "posterior": curve[-1][2],
        "curve": {str(p[0]): mean(p[1:3]) for p in curve},
        "raw": {str(p[0]): mean(p[3:5]) for p in curve},
        "step ms": median(parts[1:] or parts),  # the first has compilers in it
        "recorded": called.recorded,
        "parameters": sum(p.numel() for p in model.parameters()),
        "went on from": first,
    }


# The cases


def sweeps(arms: Iterable[str], size: Size) -> list[Case]:
    """The wider baseline takes the rate of the other."""
    wanted = sorted({"silu" if arm == "wide" else arm for arm in arms})
    return [
        {"arm": arm, "seed": 0, "steps": size.sweep, "rate": rate, "part": "sweep"}
        for arm in wanted
        for rate in RATES
    ]


def cases(rates: Rates, size: Size) -> list[Case]:
    return [
        {"arm": arm, "seed": seed, "steps": size.steps, "part": "main",
         "rate": rates.get("silu" if arm == "wide" else arm)}
        for seed in SEEDS
        for arm in ARMS
    ]  # fmt: skip


def work(case: Case) -> float:
    """About how long a case takes, in steps of the baseline: weights twice, and gates."""
    return float(case["steps"] * {"silu": 1, "wide": 2, "W": 3}[case["arm"]])


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    size = SMOKE if asked.smoke else Size()
    data = split(made_up() if asked.smoke else loaded(asked.data), size.grid, size.margin)
    if case["part"] == "sweep":
        (x, y), held = data.train, torch.arange(len(data.train[0])) % 8 == 7
        data = data._replace(train=(x[~held], y[~held]), test=(x[held], y[held]))
    model = network(case["arm"], case["seed"], size)
    kept = record.checkpoint(NAME, case)
    figures = train(model, data, case, size, asked.device, kept)
    return {**figures, "side by side": asked.jobs}


loaded = functools.cache(hippocampus)  # once in each process


def made_up() -> Volumes:
    """Noise around a bright ball of two halves."""
    generator = np.random.default_rng(0)
    images, labels = [], []
    for n in range(20):
        grid = np.stack(
            np.meshgrid(*[np.arange(m) - 5 for m in (9 + n % 3, 11, 10)], indexing="ij")
        )
        inside = (grid**2).sum(0) < 9
        labels.append((inside * (1 + (grid[0] > 0))).astype(np.uint8))
        noise = generator.normal(size=inside.shape)
        images.append((noise + 3 * labels[-1]).astype(np.float32))
    return Volumes(images, labels, [str(n) for n in range(20)], "made up")


# The page


def by_seed(rows: Iterable[Row], arm: str) -> dict[int, dict[str, Any]]:
    return {row.case["seed"]: row.figures for row in counting(rows) if row.case["arm"] == arm}


def counting(rows: Iterable[Row]) -> list[Row]:
    def own(case: Case) -> Rates:
        return {"silu" if case["arm"] == "wide" else case["arm"]: case["rate"]}

    return sweep.counting(list(rows), "dice", own)


def speedups(rows: list[Row], arm: str, other: str, curve: str = "curve") -> dict[int, Any]:
    """Steps of `other` to its converged level over those of `arm`, each seed; None for never."""
    ours, theirs = by_seed(rows, arm), by_seed(rows, other)
    return {
        seed: tg.training.steps_to_baseline(
            *(record.curve(f[seed][curve]) for f in (theirs, ours))
        ).speedup
        for seed in sorted(ours.keys() & theirs.keys())
    }


def _factors(found: dict[int, float | None]) -> str:
    """Mean and spread where all arrive, else each seed."""
    values = [v for v in found.values() if v is not None]
    if len(values) == len(found):
        return spread(values)
    return ", ".join("never" if v is None else f"{v:.2f}" for v in found.values())


def page(rows: list[Row]) -> str:
    size, runs = Size(), counting(rows)
    steps = runs[0].case["steps"] if runs else size.steps
    rates = sweep.said(best_rates(rows, "dice"), RATES, ARMS)
    parts = [
        "A 3-D U-Net on 130 crops of the hippocampus (Medical Segmentation Decathlon, task 4), 104 "
        f"for training, 26 for the test; {steps} steps of {size.batch} volumes, bf16; "
        f"{record.measured(rows)}. The paper's network is MambaMIM, whose state-space "
        "layers are not built here, and its steps are 30,000: this shows the recipe for gates on "
        f"another network. {cut(rows)} {rates}",
        table(rows),
        "Dice is the mean of both parts over the test volumes, of the running mean of the weights; "
        "mean +- standard deviation over seeds. Steps are those of the baseline to the mean of its "
        "last 6 values over those of the other, both smoothed by 3 (App. D); in time they are "
        "multiplied by the ratio of the times of a step"
        + f", taken with {_beside(rows)} at the same time.",
        comparisons(rows),
        f"![Dice of the test volumes along the runs](images/{NAME}.svg)",
    ]
    return "\n\n".join(part for part in parts if part)


def _beside(rows: list[Row]) -> str:
    most = max(row.figures["side by side"] for row in rows)
    own = f"up to {most} runs of it" if most > 1 else "one run of it"
    return f"{own} and whatever else ran on the device"


def cut(rows: list[Row]) -> str:
    missing = [
        f"{title} ({len(SEEDS) - n} of {len(SEEDS)} seeds)"
        for arm, title in ARMS.items()
        if (n := len(by_seed(rows, arm))) < len(SEEDS)
    ]
    others = sum(row.case["part"] == "main" for row in rows) - len(counting(rows))
    left_out = f" Left out: {others} runs of another length or rate." if others else ""
    said = f"Not run: {', '.join(missing)}." if missing else "All cases ran."
    return said + left_out


def table(rows: list[Row]) -> str:
    lines = [
        "| arm | parameters | anterior | posterior | Dice | of the weights themselves | ms a step "
        "| seeds |",
        "| --- " * 8 + "|",
    ]
    for arm, title in ARMS.items():
        runs = list(by_seed(rows, arm).values())
        if runs:
            dice = [spread([r[name] for r in runs]) for name in ("anterior", "posterior", "dice")]
            last = [list(record.curve(r["raw"]).values())[-1] for r in runs]
            step = mean(r["step ms"] for r in runs)
            cells = [title, f"{runs[0]['parameters']:,}", *dice, spread(last), f"{step:.2f}"]
            lines.append(f"| {' | '.join([*cells, str(len(runs))])} |")
    return "\n".join(lines)


def comparisons(rows: list[Row]) -> str:
    lines = [
        "| tier W against | Dice, paired, 95 % | steps | of the weights themselves | time | "
        "values won |",
        "| --- " * 6 + "|",
    ]
    for other, title in ARMS.items():
        ours, theirs = by_seed(rows, "W"), by_seed(rows, other)
        shared = sorted(ours.keys() & theirs.keys())
        if other == "W" or not shared:
            continue
        dice = paired(*({s: f["dice"] for s, f in runs.items()} for runs in (ours, theirs)))
        steps, raw = speedups(rows, "W", other), speedups(rows, "W", other, "raw")
        slower = {s: ours[s]["step ms"] / theirs[s]["step ms"] for s in shared}
        timed = {s: None if v is None else v / slower[s] for s, v in steps.items()}
        won = [
            ours[s]["curve"][n] > v for s in shared for n, v in theirs[s]["curve"].items()
            if n in ours[s]["curve"]
        ]  # fmt: skip
        cells = [title, str(dice), _factors(steps), _factors(raw), _factors(timed)]
        lines.append(f"| {' | '.join(cells)} | {sum(won)} of {len(won)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def verdicts(rows: list[Row]) -> list[Verdict]:
    claim = (
        "Fig. 3(d): steps to SiLU's Dice on the hippocampus, tier W (here a U-Net, not MambaMIM)"
    )
    paper, found = "1.47 +- 0.08 times fewer", speedups(rows, "W", "silu")
    if not found:
        return [Verdict(claim, paper, "", "not run")]
    wide = _factors(speedups(rows, "W", "wide")) or "not run"
    text = f"{_factors(found)} at equal width, {wide} at equal parameters ({len(found)} seeds)"
    return [Verdict(claim, paper, text, judged_factor([*found.values()], 1.47))]


def draw(rows: list[Row], folder: Path) -> None:
    """Dice along the run: the running mean of the weights, one line a seed."""
    from matplotlib.figure import Figure

    figure = Figure((6, 3.6), layout="constrained")
    place = figure.subplots()
    for (arm, title), colour in zip(ARMS.items(), ("#000000", "#0072B2", "#E69F00"), strict=True):
        for number, figures in enumerate(by_seed(rows, arm).values()):
            steps, values = zip(*record.curve(figures["curve"]).items(), strict=True)
            label = title if number == 0 else None
            place.plot(steps, values, color=colour, linewidth=1.2, label=label)
    place.set_xlabel("steps")
    place.set_ylabel("Dice of the test volumes, %")
    place.legend(fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{NAME}.svg", metadata={"Date": None})


def main(argv: list[str] | None = None) -> None:
    parser = record.options(NAME, __doc__)
    asked = parser.parse_args(argv)
    if asked.data is None and not (asked.smoke or asked.list):
        parser.error("--data DIR with hippocampus-130.zip is needed, or --smoke")
    size = SMOKE if asked.smoke else Size()
    data = "" if asked.list else (made_up() if asked.smoke else loaded(asked.data)).sha256
    parts = (functools.partial(part, size=size) for part in (sweeps, cases))
    print(page(sweep.complete(NAME, asked, run, *parts, metric="dice", data=data, cost=work)))


if __name__ == "__main__":
    main()
