"""`python -m tests.fuzz --networks 10000 --gates 100000`: prints seeds, shrinks what fails.

Networks are tried in processes of their own, each with a limit of time: one that hangs, or that
takes its process with it, is a failure like any other. The seed of a failure is printed at once; at
the end every cause is shrunk to a Python program. Failures of the same kind, in networks that hold
all the parts of one that was shrunk already, are counted and not shrunk again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.check import ALL, Failure, check, walk
from tests.fuzz.network import Network, draw, shrunk
from tests.fuzz.printing import program
from tests.fuzz.workers import results, some_gates

_CAUSES = 20  # shrunk at the end


def reduced(network: Network, failure: Failure) -> tuple[Network, Failure]:
    """A small network that fails in the same way."""
    stage = failure.stage.removeprefix("learned ").removeprefix("itself ")
    ways = frozenset(way for way in (*ALL, "inductor") if stage.startswith(way))
    ways |= {"compile"} if stage.startswith("aot") else set()

    def same(candidate: Network) -> Failure | None:
        try:
            failures = check(candidate, ways, failure.stage).failures
        except Exception:  # a smaller text need not make sense
            return None
        return next((f for f in failures if f.stage == failure.stage), None)

    small = shrunk(network, lambda n: same(n) is not None)
    return small, same(small) or failure


def kinds(network: Network) -> Counter[str]:
    return Counter(part.kind for part in walk(network.parts))


class Report:
    """Failures by cause; seeds are printed as they come."""

    def __init__(self) -> None:
        self.causes: list[tuple[Failure, Network, list[int]]] = []

    def add(self, seed: int, failure: Failure) -> None:
        print(f"seed {seed}: {failure.stage}: {failure.message[:300]}", flush=True)
        network = draw(seed)
        for known, small, seeds in self.causes:
            if known.stage == failure.stage and kinds(small) <= kinds(network):
                seeds.append(seed)
                return
        self.causes.append((failure, network, [seed]))

    def show(self, shrink: bool) -> None:
        for failure, network, seeds in self.causes[:_CAUSES]:
            if shrink and not failure.stage.startswith(("too slow", "process lost")):
                network, failure = reduced(network, failure)
            print(
                f"\n# ---- seed {seeds[0]}: {failure.stage}\n{program(network, failure)}",
                flush=True,
            )
        for failure, network, seeds in sorted(self.causes, key=lambda cause: -len(cause[2])):
            parts = ", ".join(sorted(kinds(network).elements()))
            print(f"{len(seeds):5} {failure.stage} ({parts}): seeds {seeds[:8]}")


def networks(seeds: range, jobs: int, fast: bool, shrink: bool) -> int:
    """How many of the networks fail; the whole story is printed."""
    report, count, start, last = Report(), Counter[str](), time.monotonic(), 0.0
    for found in results(seeds, jobs, fast):
        count["done"] += 1
        count["refused"] += bool(found.refusal)
        count["converted"] += found.converted
        count["failed"] += bool(found.failures)
        for failure in found.failures:
            report.add(found.seed, failure)
        if time.monotonic() - last > 10 or count["done"] == len(seeds):
            last = time.monotonic()
            said = f"{count['done']} of {len(seeds)} networks, {count['refused']} refused, "
            said += f"{count['failed']} failed, {(last - start) / 60:.1f} min"
            print(said, file=sys.stderr, flush=True)
    report.show(shrink)
    print(
        f"{count['done']} networks: converted {count['converted']}, refused {count['refused']}, "
        f"failed {count['failed']} (seeds {seeds.start} to {seeds.stop - 1}, "
        f"{len(report.causes)} causes)",
        flush=True,
    )
    return count["failed"]


def gates(seed: int, count: int, jobs: int) -> int:
    """How many gates differ, of so many in each of the processes."""
    start, parts = time.monotonic(), 4 * jobs
    sizes = [n for k in range(parts) if (n := count // parts + (k < count % parts))]
    wrong: list[str] = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(some_gates, range(seed, seed + len(sizes)), sizes):
            for line in found:
                print(line, flush=True)
            wrong += found
    minutes = (time.monotonic() - start) / 60
    print(f"{count} gates: {len(wrong)} differences, {minutes:.1f} min", flush=True)
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--networks", "-n", type=int, default=10_000)
    parser.add_argument("--gates", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first network")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="not compiled, not exported")
    parser.add_argument("--no-shrink", action="store_true")
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.networks)
    failed = networks(seeds, asked.jobs, asked.fast, not asked.no_shrink) if seeds else 0
    wrong = gates(asked.seed, asked.gates, asked.jobs) if asked.gates else 0
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
