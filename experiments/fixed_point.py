"""Trained networks with every nonlinearity in integers: what 16, 12, 10 and 8 bits cost.

    python -m experiments.fixed_point [NAME ...] [--samples N] [--search]

Formats are chosen by the inputs that a network was converted with. Linear layers stay as they are:
what is lost is lost by gates. `--search` looks for the narrowest format of each site instead, with
a loss of half a percent of the metric on few samples, and measures what it found on more. Last
measured results stand in docs/digital.md.
"""

import argparse
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

import threshold_gating as tg
from experiments.evidence.common import Loaded
from experiments.evidence.run import CASES, missing
from threshold_gating.hardware import fixed_point

# Of stories260k one story, or all of them.
SAMPLES: dict[str, Any] = {"resnet20": 1000, "char-lstm": 20, "stories260k": True}
SEARCHED: dict[str, Any] = {"resnet20": 300, "char-lstm": 10, "stories260k": True}
TESTED: dict[str, Any] = {"resnet20": 2000, "char-lstm": 100, "stories260k": False}
BITS = (16, 12, 10, 8)
NARROW = (16, 12, 10, 8, 7, 6, 5, 4)
LOSS = 0.005  # of the metric
LOW_IS_GOOD = {"perplexity", "bits/char"}


@torch.no_grad()
def main() -> None:
    """Print a row for each network and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SAMPLES), metavar="NAME")
    parser.add_argument("--samples", type=int, metavar="N")
    parser.add_argument("--search", action="store_true", help="the narrowest format of each site")
    args = parser.parse_args()
    for name in args.names:
        if lost := missing(CASES[name]):
            print(f"{name}: skipped, missing: {', '.join(lost)}")
        elif args.search:
            search(name, args.samples)
        else:
            widths(name, args.samples)


def widths(name: str, samples: int | None) -> None:
    """The metric with the same bits at every site."""
    loaded = CASES[name].load(samples or SAMPLES.get(name, True))
    gated = tg.convert(loaded.model, inputs=loaded.inputs)
    base = loaded.evaluate(gated)
    print(f"{name}: float {_text(base.metrics)}, {_size(base.predictions)}", flush=True)
    for bits in BITS:
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = fixed_point.convert(gated, bits, inputs=loaded.inputs)
        found = loaded.evaluate(made)
        same = (found.predictions == base.predictions).double().mean().item()
        print(
            f"  {bits:2} bits: {_text(found.metrics)}, {same:.2%} of the decisions the same, "
            f"{len(made.sites())} sites, {time.perf_counter() - start:.0f} s"
            + "".join(f"; {each.message}" for each in said),
            flush=True,
        )


def search(name: str, samples: int | None) -> None:
    """The fewest bits of each site, found on few samples and measured on others as well."""
    start = time.perf_counter()
    few = CASES[name].load(samples or SEARCHED.get(name, True))
    gated = tg.convert(few.model, inputs=few.inputs)
    made = fixed_point.convert(gated, max(NARROW), inputs=few.inputs)
    calls = []

    def score(model: nn.Module) -> float:
        calls.append(model)
        return _score(few, model)

    base = _score(few, gated)
    found = fixed_point.narrowest(made, score, base - LOSS * abs(base), NARROW)
    counts = ", ".join(f"{n} x {bits}" for bits, n in sorted(Counter(found.values()).items()))
    print(f"{name}: bits {counts}, mean {sum(found.values()) / len(found):.2f}; {found}")
    print(f"  {len(calls)} evaluations, {time.perf_counter() - start:.0f} s", flush=True)
    many = CASES[name].load(TESTED.get(name, False))
    for what, loaded in (("searched", few), ("tested", many)):
        before, after = loaded.evaluate(gated), loaded.evaluate(made)
        same = (after.predictions == before.predictions).double().mean().item()
        print(
            f"  {what} on {_size(before.predictions)}: float {_text(before.metrics)}, narrowest "
            f"{_text(after.metrics)}, {same:.2%} of the decisions the same",
            flush=True,
        )


def _score(loaded: Loaded, model: nn.Module) -> float:
    (key, value), *_ = loaded.evaluate(model).metrics.items()
    return -value if key in LOW_IS_GOOD else value


def _size(predictions: Any) -> str:
    return f"{predictions.numel():,} predictions"


def _text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.5g}" for key, value in metrics.items())


if __name__ == "__main__":
    main()
