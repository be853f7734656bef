"""Fig. 3(a): a ResMLP on CIFAR-10, accuracy against parameters, multiplications and memory.

The paper's claim: tier W (K = 2) at expansion h = 1 matches ReLU at h = 2 to 3 with about as many
parameters; tier S, a gate for each synapse, gains less for its parameters. Arms:

    relu      the baseline
    W         the second linear layer of each block gated, K = 2 soft branches, learned per channel
    S         the same with tau and theta for each synapse
    transfer  ReLU for half of the steps, then once tier W with those weights and new gates (the
              paper's half transfer) and once ReLU again, each for the other half
    silu      a control: what of it is the smooth activation, not the gates

W and S start from the weights of the ReLU network of the same seed, their low branch at 0. All have
one optimiser (AdamW, decay 0.05), one schedule, the same batches; the rate of each arm is the best
of four for seed 0 at h = 1, over 6 epochs, on 5,000 training images that this sweep leaves out.
The paper trains for 300 epochs, here it is 20. A transfer takes the rates of ReLU and of W.

    python -m experiments.fig3_width --data DIR --jobs 8            # the sweep first, then all
    python -m experiments.fig3_width --data DIR --only arm=relu,W   # some of it; rows add up
    python -m experiments.fig3_width --smoke

The plan, the tables and the verdicts are in `width_page`.

Last result: claims: 2 not, 1 partly; 94 rows, NVIDIA H200, seeds 0, 1, 2, 5,575 s of runs (some
side by side), 2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from experiments import record, sweep
from experiments.cifar_training import Curve, Recipe, judged, train
from experiments.data import Labelled, cifar10
from experiments.record import Case
from experiments.resmlp import ResMLP, counted, gated, peaks
from experiments.sweep import Rates
from experiments.width_page import (
    BEYOND,
    EPOCHS,
    NAME,
    RATES,
    SEEDS,
    WIDTHS,
    Size,
    draw,
    page,
    verdicts,
)

__all__ = ["draw", "page", "verdicts"]

DECAY = 0.05
SMOKE = Size(dim=8, depth=1, batch=16, steps=4, sweep=2)


def network(arm: str, h: float, seed: int, size: Size) -> ResMLP:
    torch.manual_seed(seed)
    plain = ResMLP(size.dim, size.depth, h, nn.SiLU if arm == "silu" else nn.ReLU)
    return gated(plain, arm) if arm == "W" or arm == "S" else plain


# The cases


def sweeps(arms: Iterable[str], size: Size) -> list[Case]:
    kinds = {"transfer": ("relu", "W")}
    wanted = sorted({kind for arm in arms for kind in kinds.get(arm, (arm,))})
    return [
        {"arm": arm, "h": 1, "seed": 0, "steps": size.sweep, "rate": rate, "part": "sweep"}
        for arm in wanted
        for rate in RATES
    ]


def cases(rates: Rates, size: Size) -> list[Case]:
    """In the order in which they say most; last a rate past the sweep."""
    found: list[Case] = []
    for arm, widths in WIDTHS.items():
        for seed in SEEDS:
            for h in widths:
                case: Case = {"arm": arm, "h": h, "seed": seed, "steps": size.steps}
                case["rate"] = rates.get("relu" if arm == "transfer" else arm)
                if arm == "transfer":
                    case["rate_after"] = rates.get("W")
                found.append({**case, "part": "main"})
    past: Case = {"h": 1, "seed": 0, "steps": size.sweep, "part": "beyond"}
    arms = [arm for arm in WIDTHS if arm != "transfer"]
    return found + [{"arm": arm, **past, "rate": rate} for arm in arms for rate in BEYOND]


def work(case: Case) -> float:
    """About how long a case takes, in steps: a gate for each synapse is most of its network."""
    each = {"S": 4 * case["h"], "transfer": 1.5}.get(case["arm"], 1.0)
    return float(case["steps"] * each)


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    size, arm = SMOKE if asked.smoke else Size(), case["arm"]
    data = made_up() if asked.smoke else loaded(asked.data)
    recipe = Recipe(
        case["steps"], size.batch, case["rate"], decay=DECAY, evaluations=EPOCHS, adam=True
    )
    if arm == "transfer":
        return transferred(case, size, data, recipe, asked.device)
    model = network(arm, case["h"], case["seed"], size)
    kept = record.checkpoint(NAME, case)
    if case["part"] in ("sweep", "beyond"):
        (images, labels), tenth = data.train, len(data.train[0]) // 10
        data = data._replace(
            train=(images[tenth:], labels[tenth:]), test=(images[:tenth], labels[:tenth])
        )
        try:
            curve = train(model, data, recipe, seed=0, device=asked.device, kept=kept)
        except RuntimeError as error:
            if "try a lower rate" not in str(error):
                raise
            return {"failed": str(error)}
        return figures_of(curve)
    costs = {**counted(model), **peaks(model, size.batch, asked.device)}
    curve = train(model, data, recipe, seed=case["seed"], device=asked.device, kept=kept)
    return {**figures_of(curve), **costs}


def transferred(
    case: Case, size: Size, data: Labelled, recipe: Recipe, device: str
) -> dict[str, Any]:
    """Half of the steps with ReLU, and the other half once with gates and once more with ReLU."""
    halves = recipe.steps // 2, recipe.steps - recipe.steps // 2
    seed, kept = case["seed"], record.checkpoint(NAME, case)
    model, done = network("relu", case["h"], seed, size), kept.with_suffix(".half")
    options: dict[str, Any] = {"seed": seed, "device": device, "kept": kept}
    if done.exists():  # the run was stopped in its second half
        model.load_state_dict(torch.load(done, map_location=device, weights_only=True))
        model.to(device)
    else:
        train(model, data, recipe._replace(steps=halves[0], evaluations=1), **options)
        done.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), done)
    test = tuple(t.to(device) for t in data.test)
    later = recipe._replace(steps=halves[1], evaluations=EPOCHS // 2)
    options["seed"] = seed + len(SEEDS)  # other batches than in the first half, the same for both
    new = gated(model, "W")
    start = {"before": judged(model, test)[0], "moved": judged(new, test)[0]}
    costs = {**counted(new), **peaks(new, size.batch, device)}
    after = train(new, data, later._replace(rate=case["rate_after"]), **options)
    options["kept"] = kept.with_suffix(".again")  # stopped here, the gates are trained once more
    again = train(model, data, later, **options)
    done.unlink()
    return {**figures_of(after), **start, **costs, "again": figures_of(again)}


def figures_of(curve: Curve) -> dict[str, Any]:
    return {
        "accuracy": curve.accuracy[-1],
        "loss": curve.loss,
        "curve": dict(zip(map(str, curve.steps), curve.accuracy, strict=True)),
        "training seconds": curve.seconds,
        "recorded": curve.recorded,
    }


loaded = functools.cache(cifar10)  # once in each process, which runs many cases


def made_up() -> Labelled:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (80, 3, 32, 32), generator=generator).byte()
    labels = torch.arange(80) % 10
    return Labelled((images[:64], labels[:64]), (images[64:], labels[64:]), "made up")


def main(argv: list[str] | None = None) -> None:
    parser = record.options(NAME, __doc__)
    asked = parser.parse_args(argv)
    if asked.data is None and not (asked.smoke or asked.list):
        parser.error("--data DIR with CIFAR-10 is needed, or --smoke")
    size = SMOKE if asked.smoke else Size()
    data = "" if asked.list else made_up().sha256 if asked.smoke else loaded(asked.data).sha256
    parts = (functools.partial(part, size=size) for part in (sweeps, cases))
    rows = sweep.complete(NAME, asked, run, *parts, metric="accuracy", data=data, cost=work)
    print(page(rows))


if __name__ == "__main__":
    main()
