"""Fig. 3(b) and (d): ResNets of 8, 14 and 20 layers on CIFAR-10 with gates and with activations.

The paper's claims: tier W (K = 2) reaches the ReLU network's peak at depth 14 (90.81 %) in 1.34
times fewer epochs, K = 3 adds little (b), and it reaches the SiLU network's level in 2.04 times
fewer steps (d). Here every contender is also given the width at which it costs as much as tier W
with w = 16: in parameters, MACs, weight bytes read and ADC conversions. Afterwards tier W is
hardened.

    python -m experiments.fig3_depth --data DIR --jobs 8    # times, the sweep, then the grid
    python -m experiments.fig3_depth --data DIR --only part=grid depth=14 arm=silu,"tier W"
    python -m experiments.fig3_depth --data DIR --images cifar100
    python -m experiments.fig3_depth --smoke

All have one loop, schedule and batches (`cifar_training`): SGD, 30 epochs, batch 256, bf16, three
seeds. The rate is the best of three for each arm: depth 14, w = 16, seed 0, 8 epochs, judged on
5,000 training images that the sweep leaves out; it is held for all depths and widths. Times of a
step are taken with nothing beside them. The paper trains for 200 epochs with one seed.

Last result: claims: 2 reproduced, 2 partly, 3 not, 1 no data here; 123 rows, NVIDIA H200, seeds 0,
1, 2, 13,257 s of runs (some side by side), 2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import copy
import functools
from pathlib import Path
from typing import Any

import torch

import threshold_gating as tg
from experiments import depth_page, record
from experiments.cifar_networks import ARMS, Arm, Network, cost, matched
from experiments.cifar_training import DivergedError, Recipe, judged, train
from experiments.data import Labelled, cifar10, cifar100, noise
from experiments.record import Case, Row

NAME = "fig3_depth"
SEEDS, RATES, BEYOND = (0, 1, 2), (0.05, 0.15, 0.45), (0.9,)
EPOCHS, SWEEP_EPOCHS, TIMED_EPOCHS = 30, 8, 1
BATCH, HELD_OUT = 256, 5_000
READ = {"cifar10": (cifar10, 10), "cifar100": (cifar100, 100)}

page, verdicts, draw = depth_page.page, depth_page.verdicts, depth_page.draw


def cases(images: str = "cifar10", smoke: bool = False) -> list[Case]:
    """Step times, the sweep, then the grid, what matters most first; last a rate past the sweep."""
    if smoke:
        tried = [{"arm": arm, "depth": 8, "width": 4} for arm in ("silu", "tier W")]
        return [*times(tried), *sweep(tried, (0.1, 0.2)), *grid(tried, (0,))]
    if images == "cifar100":  # panel (d) has GELU there
        return grid([_at("gelu"), _at("tier W")], images=images)
    wide = {b: matched(ARMS["silu"], 14, b, cost(ARMS["tier W"], 14, 16)) for b in BUDGETS}
    equal = wide["parameters"]
    first = [_at(arm) for arm in ("tier W", "silu", "relu")]
    first += [_at("relu", equal), _at("silu", equal), _at("crelu"), _at("gelu"), _at("tier A")]
    first += [_at("tier W per layer"), _at("gelu", equal), _at("tier W K=3")]
    other = [_at(arm, 16, depth) for depth in (8, 20) for arm in ("tier W", "silu", "relu")]
    other += [_at(arm, equal, depth) for depth in (8, 20) for arm in ("relu", "silu")]
    last = [_at(arm, w) for w in sorted({*wide.values()} - {16, equal}) for arm in ("relu", "silu")]
    last += [_at("tier A", equal)]
    timed = [*first, _at("relu", 24), _at("silu", 24)]  # 24: a width that GPUs like
    every = [_at(arm) for arm in ARMS]
    swept, higher = sweep(every), [{**c, "part": "beyond"} for c in sweep(every, BEYOND)]
    return [*times(timed), *swept, *grid([*first, *other, *last]), *higher]


BUDGETS = ("parameters", "macs", "hard_macs", "adc_128", "adc_512")


def _at(arm: str, width: int = 16, depth: int = 14) -> Case:
    return {"arm": arm, "depth": depth, "width": width}


def times(networks: list[Case]) -> list[Case]:
    own = {"part": "time", "images": "cifar10", "seed": 0, "epochs": TIMED_EPOCHS}
    return [{**own, **network} for network in networks]


def sweep(networks: list[Case], rates: tuple[float, ...] = RATES) -> list[Case]:
    own = {"part": "sweep", "images": "cifar10", "seed": 0, "epochs": SWEEP_EPOCHS}
    return [{**own, **network, "rate": rate} for network in networks for rate in rates]


def grid(
    networks: list[Case], seeds: tuple[int, ...] = SEEDS, images: str = "cifar10"
) -> list[Case]:
    own = {"part": "grid", "images": images, "epochs": EPOCHS}
    return [{**own, **network, "seed": seed} for network in networks for seed in seeds]


@functools.cache
def _data(images: str, folder: Path | None, smoke: bool) -> Labelled:
    """Read once in a process."""
    if smoke:
        return noise(64, READ[images][1])
    if folder is None:
        raise SystemExit(f"--data FOLDER (or TG_DATA) must say where {images} is; see --help")
    return READ[images][0](folder)


def rate_of(arm: str, rows: list[Row], rates: tuple[float, ...] = RATES) -> float:
    """The rate with the best accuracy on what the sweep left out; all rates have to be there."""
    tried = [row for row in rows if row.case["part"] == "sweep" and row.case["arm"] == arm]
    ended = [row for row in tried if "diverged" not in row.figures]
    if not ended or not set(rates) <= {row.case["rate"] for row in tried}:
        raise RuntimeError(f"{arm} has no rate yet: run --only part=sweep arm={arm!r} first")
    best: float = max(ended, key=lambda row: row.figures["accuracy"]).case["rate"]
    return best


def work(case: Case) -> float:
    """About how long a case takes: its MACs, which gates are part of by their branches."""
    return float(case["epochs"] * cost(ARMS[case["arm"]], case["depth"], case["width"]).macs)


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    return trained(NAME, ARMS[case["arm"]], case, asked)


def trained(name: str, arm: Arm, case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """One network: what it costs, its curve and its end."""
    data = _data(case["images"], asked.data, asked.smoke)
    if case["part"] in ("sweep", "beyond"):
        data = left_out(data, len(data.train[0]) // 10 if asked.smoke else HELD_OUT)
        rate = case["rate"]
    else:
        timed = case["part"] == "time"  # the rate does not matter for it
        swept = [] if timed else record.rows(record.file_of(name, asked))
        rates = () if asked.smoke else RATES
        rate = RATES[0] if timed else rate_of(case["arm"], swept, rates)
    recipe = _recipe(case, len(data.train[0]), rate, asked.smoke)
    torch.manual_seed(case["seed"])
    model = Network(arm, case["depth"], case["width"], READ[case["images"]][1])
    figures = {**cost(arm, case["depth"], case["width"])._asdict(), "rate": rate}
    kept = None if asked.smoke else record.checkpoint(name, {**case, "rate": rate})
    try:
        curve = train(model, data, recipe, seed=case["seed"], device=asked.device, kept=kept)
    except DivergedError as error:
        return {**figures, "diverged": str(error)}
    figures |= {"accuracy": curve.accuracy[-1], "curve": curve.accuracy, "at": curve.steps}
    figures |= {"loss": curve.loss, "seconds": curve.seconds, "step_ms": curve.step_ms}
    figures |= {"recorded": curve.recorded, "started_at": curve.started_at}
    if case["part"] == "grid" and case["arm"] == "tier W":
        figures |= hardened(model, data, recipe, case["seed"], asked.device)
    return figures


def _recipe(case: Case, count: int, rate: float, smoke: bool) -> Recipe:
    if smoke:
        return Recipe(steps=8, batch=8, rate=rate, evaluations=8)
    steps = case["epochs"] * (count // BATCH)
    return Recipe(steps, BATCH, rate, evaluations=40 if case["part"] == "grid" else 4)


def left_out(data: Labelled, count: int) -> Labelled:
    """Training images alone, the last `count` of them for the test."""
    images, labels = data.train
    train_part, rest = slice(0, -count), slice(-count, None)
    return Labelled(
        (images[train_part], labels[train_part]), (images[rest], labels[rest]), data.sha256
    )


def hardened(
    model: Network, data: Labelled, recipe: Recipe, seed: int, device: str
) -> dict[str, Any]:
    """Accuracy with every gate hard, at once and after a tenth of the steps at a tenth of the rate;
    and that of the soft network after the same steps, which is what to compare it with."""
    test = tuple(t.to(device) for t in data.test)
    short = recipe._replace(steps=max(1, recipe.steps // 10), rate=recipe.rate / 10, evaluations=1)
    hard = tg.training.harden(model).model
    soft = copy.deepcopy(model)
    at_once, loss = judged(hard, test)
    figures: dict[str, Any] = {"hard": at_once, "hard_loss": loss}
    for name, network in (("hard_tuned", hard), ("soft_tuned", soft)):
        try:
            curve = train(network, data, short, seed=seed + 100, device=device)
        except DivergedError as error:
            figures[f"{name}_diverged"] = str(error)
        else:
            figures[name] = curve.accuracy[-1]
    return figures


def main(argv: list[str] | None = None) -> list[Row]:
    parser = record.options(NAME, __doc__)
    parser.add_argument("--images", choices=sorted(READ), default="cifar10", help="the data set")
    asked = parser.parse_args(argv)
    return in_parts(NAME, cases(asked.images, asked.smoke), run, asked, work)


def in_parts(
    name: str,
    every: list[Case],
    run: record.Run,
    asked: argparse.Namespace,
    work: record.Cost | None = None,
) -> list[Row]:
    """Times alone on the device, the sweep, whose rates the grid takes, and a rate past it."""
    chosen = record.matching(every, asked.only)
    asked.only = []
    if asked.list:
        return record.complete(name, chosen, run, asked)
    sha = _data(chosen[0]["images"], asked.data, asked.smoke).sha256
    rows: list[Row] = []

    def run_part(part: str) -> None:
        given = copy.copy(asked)
        given.jobs = 1 if part == "time" else asked.jobs
        if own := [case for case in chosen if case["part"] == part]:
            rows.extend(record.complete(name, own, run, given, data=sha, cost=work))

    parts = ("time", "sweep", "grid", "beyond")
    record.in_turn({part: functools.partial(run_part, part) for part in parts})
    return rows


if __name__ == "__main__":
    main()
