"""`tg bench`: check against float64, then time every contender in one process, then compare.

Nothing is timed that disagrees with the reference. A limit that is missed is printed as MISSED, and
so is a row that fails. How times are taken says `timing`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from threshold_gating.benchmarking import elementwise, networks, tier_w
from threshold_gating.benchmarking.checking import check, machine
from threshold_gating.benchmarking.cpu import on_cpu
from threshold_gating.benchmarking.pages import picture, report
from threshold_gating.benchmarking.rows import Row, remarks, slope_of, table
from threshold_gating.benchmarking.timing import ON_CPU, ON_GPU, Clock, Place, Work, measure
from threshold_gating.benchmarking.units import frozen, gated_units, growth
from threshold_gating.cli.options import STDOUT
from threshold_gating.conversion.audit import jsonable

__all__ = [
    "LARGE",
    "Clock",
    "Place",
    "Row",
    "Sizes",
    "bench",
    "measure",
    "on_gpu",
    "picture",
    "report",
    "run",
    "slope_of",
    "table",
]

Sections = dict[str, Callable[[], Iterator[Work]]]


class Sizes(NamedTuple):
    """How large the work of each section is."""

    elementwise: elementwise.Sizes
    tier_w: tier_w.Sizes
    powers: range
    images: tuple[int, int, int, int]
    networks: dict[str, networks.Network]


LARGE = Sizes(
    elementwise.Sizes((16384, 4096), (64, 256, 56, 56), (64, 256, 64, 64)),
    tier_w.Sizes(
        products=((8192, 4096, 4096), (16384, 8192, 8192)),
        batches=(1, 2, 4, 8, 16, 32, 64),
        width=4096,
        image=(64, 256, 28, 28),
        vectors=(4096, 8192),
    ),
    range(12, 29),
    (64, 3, 224, 224),
    networks.NETWORKS,
)


def bench(args: argparse.Namespace) -> int:
    """`tg bench`."""
    if args.json != STDOUT:
        return run(args.smoke, args.json, args.only)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        code = run(args.smoke, path, args.only)
        if path.exists():  # else there was nothing to do
            print(path.read_text(), end="", file=args.stdout)
    return code


def run(smoke: bool, path: Path | None, only: list[str] | None = None) -> int:
    """Check, time, print; 1 if a kernel is wrong. `only` leaves the other sections out."""
    gpu = torch.cuda.is_available() and not smoke
    if not gpu:
        torch.set_num_threads(1)
    large = on_gpu(Place("cuda", torch.compile), LARGE)
    sections, clock = (large, ON_GPU) if gpu else (_here(smoke), ON_CPU)
    if unknown := sorted(set(only or ()) - set(sections)):
        there = ", ".join(sections)
        print(f"tg bench: no section {unknown[0]!r} here; there are {there}.", file=sys.stderr)
        return 2
    info = machine()
    print(", ".join(f"{k} {v}" for k, v in info.items()), clock.how, sep="\n", flush=True)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    wrong = check("cuda" if gpu else "cpu", dtypes, (1031, 63) if gpu else (63, 7))
    for line in wrong:
        print(f"WRONG {line}")
    rows: list[Row] = []
    data: dict[str, Any] = {"machine": info, "how": clock.how, "wrong": wrong}
    _write(path, data, rows)
    for name in [] if wrong else [n for n in sections if not only or n in only]:
        rows += _timed(name, sections[name](), clock, smoke)
        _write(path, data, rows)  # what was measured stays, whatever happens to the rest
    missed = sum(row.verdict == "MISSED" for row in rows)
    held = sum(bool(row.verdict) for row in rows)
    print(f"\n{len(wrong)} wrong, {missed} of {held} limits missed")
    return 1 if wrong else 0


def _timed(name: str, works: Iterator[Work], clock: Clock, smoke: bool) -> list[Row]:
    print(f"\n{name}\n{table([]).splitlines()[0]}", flush=True)
    rows, start = [], time.perf_counter()
    for work in works:
        for row in measure(work, clock):
            row.limit = None if smoke else row.limit  # they are for large work
            rows.append(row)
            _print(row)
    print(f"{time.perf_counter() - start:.0f} s")
    return rows


def _write(path: Path | None, data: dict[str, Any], rows: list[Row]) -> None:
    if path is not None:
        found = {"rows": [asdict(row) for row in rows], "slope": slope_of(rows)}
        text = json.dumps(jsonable(data | found), indent=1, allow_nan=False)
        path.write_text(f"{text}\n")


def _print(row: Row) -> None:
    print(table([row]).splitlines()[-1])
    others = ", ".join(f"{name} {ms:.4g}" for name, ms in row.times.items() if name != "ours")
    said = [line.removeprefix(f"{row.work}: ") for line in remarks([row])]
    print(f"  ms: {'; '.join(filter(None, (others, *said)))}", flush=True)


def on_gpu(place: Place, sizes: Sizes) -> Sections:
    """The sections for a GPU; another device only shows that they run."""
    return {
        "elementwise": lambda: elementwise.elementwise(sizes.elementwise, place),
        "gated units": lambda: gated_units(sizes.elementwise.rows, place),
        "frozen": lambda: frozen(sizes.elementwise.rows, torch.bfloat16, place),
        "tier W": lambda: tier_w.tier_w(sizes.tier_w, place),
        "growth": lambda: growth(sizes.powers, place),
        "networks": lambda: networks.networks(sizes.networks, sizes.images, place),
    }


def _here(smoke: bool) -> Sections:
    elements = 2**17 if smoke else 2**22
    place = Place("cpu", None if smoke else torch.compile)
    return {
        "cpu": lambda: on_cpu(elements, place),
        "frozen": lambda: frozen((elements,), torch.float32, place),
        "growth": lambda: growth(range(12, 17 if smoke else 25, 2), place),
    }
