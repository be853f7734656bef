"""Trained networks with every nonlinearity in integers: what 16, 12, 10 and 8 bits cost.

    python -m experiments.fixed_point [NAME ...] [--samples N] [--search]

Formats are chosen by the inputs that a network was converted with. Linear layers stay as they are:
what is lost is lost by gates. Last measured results stand in docs/digital.md.
"""

import argparse
import time
import warnings

import threshold_gating as tg
from experiments.evidence.run import CASES, missing
from threshold_gating.hardware import fixed_point

SAMPLES = {"resnet20": 1000, "char-lstm": 20, "stories260k": 50}
BITS = (16, 12, 10, 8)


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
            continue
        loaded = CASES[name].load(args.samples or SAMPLES.get(name, True))
        gated = tg.convert(loaded.model, inputs=loaded.inputs)
        base = loaded.evaluate(gated)
        print(f"{name}: float {_text(base.metrics)}", flush=True)
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
        if args.search:
            key = next(iter(base.metrics))

            def score(model: object, key: str = key, loaded: object = loaded) -> float:
                return loaded.evaluate(model).metrics[key]  # type: ignore[attr-defined]

            made = fixed_point.convert(gated, 16, inputs=loaded.inputs)
            widths = fixed_point.narrowest(made, score, base.metrics[key] * 0.995)
            print("  narrowest:", widths, _text(loaded.evaluate(made).metrics), flush=True)


def _text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.5g}" for key, value in metrics.items())


if __name__ == "__main__":
    main()
