"""`python -m tests.fuzz --networks 10000 --gates 100000`: prints seeds, shrinks what fails.

A failure ends as a Python program of its own. Failures of the same kind, in networks that hold all
the parts of one that was shrunk already, are counted and not shrunk again.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch

from tests.fuzz.check import ALL, FAST, Failure, check, walk
from tests.fuzz.network import Network, draw, shrunk
from tests.fuzz.printing import program

_CHUNK = 20
Found = tuple[int, Failure, Network]


def inductor(seed: int) -> bool:
    """Two networks of a hundred are compiled by Inductor."""
    return seed % 50 == 0


def heavy(seed: int, fast: bool = False) -> frozenset[str]:
    return FAST if fast else ALL | ({"inductor"} if inductor(seed) else set())


def failing(seeds: range, fast: bool) -> tuple[list[Found], Counter[str], int]:
    """What is wrong with these networks, why convert refused others, and how many it did not."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)  # of graphs that the original has not either
    found: list[Found] = []
    refused: Counter[str] = Counter()
    for seed in seeds:
        network = draw(seed)
        trial = check(network, heavy(seed, fast))
        found += [(seed, failure, network) for failure in trial.failures]
        if trial.refusal:
            refused[trial.refusal] += 1
    return found, refused, len(seeds)


def reduced(network: Network, failure: Failure) -> tuple[Network, Failure]:
    """A small network that fails in the same way."""
    ways = frozenset(way for way in (*ALL, "inductor") if failure.stage.startswith(way))
    ways |= {"compile"} if failure.stage.startswith("aot") else set()

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
    """Failures by cause, printed as they come."""

    def __init__(self, shrink: bool) -> None:
        self.shrink = shrink
        self.causes: list[tuple[str, Counter[str], list[int]]] = []

    def add(self, seed: int, failure: Failure, network: Network) -> None:
        held = kinds(network)
        for stage, needed, seeds in self.causes:
            if stage == failure.stage and needed <= held:
                seeds.append(seed)
                return
        if self.shrink:
            network, failure = reduced(network, failure)
        self.causes.append((failure.stage, kinds(network), [seed]))
        print(f"\n# ---- seed {seed}: {failure.stage}\n{program(network, failure)}", flush=True)


def results(seeds: range, jobs: int, fast: bool) -> Iterator[tuple[list[Found], Counter[str], int]]:
    chunks = [seeds[k : k + _CHUNK] for k in range(0, len(seeds), _CHUNK)]
    if jobs == 1:
        yield from (failing(chunk, fast) for chunk in chunks)
        return
    # A new process for every few chunks: torch keeps what it compiled.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=10) as pool:
        waiting = [pool.apply_async(failing, (chunk, fast)) for chunk in chunks]
        yield from (result.get() for result in waiting)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--networks", "-n", type=int, default=10_000)
    parser.add_argument("--gates", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first network")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="not compiled, not exported")
    parser.add_argument("--no-shrink", action="store_true")
    asked = parser.parse_args()
    report, refused, done, start = Report(not asked.no_shrink), Counter[str](), 0, time.time()
    seeds = range(asked.seed, asked.seed + asked.networks)
    for found, said, count in results(seeds, asked.jobs, asked.fast):
        refused += said
        done += count
        for seed, failure, network in found:
            report.add(seed, failure, network)
        minutes = (time.time() - start) / 60
        print(f"{done} networks, {refused.total()} refused, {minutes:.1f} min", file=sys.stderr)
    print(f"\nnetworks {seeds.start} to {seeds.stop - 1}: {refused.total()} refused")
    for stage, needed, which in sorted(report.causes, key=lambda cause: -len(cause[2])):
        parts = ", ".join(sorted(needed.elements()))
        print(f"{len(which):5} {stage} ({parts}): seeds {which[:8]}")
    wrong = [] if not asked.gates else gates(asked.seed, asked.gates)
    for line in wrong:
        print(line)
    print(f"{len(report.causes)} causes in networks, {len(wrong)} gates differ")
    return 1 if report.causes or wrong else 0


def gates(seed: int, count: int) -> list[str]:
    from tests.fuzz.gates import check_gates

    return check_gates(seed, count)


if __name__ == "__main__":
    sys.exit(main())
