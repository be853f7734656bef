"""Which rows there are on this machine, and one run over them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks import attention, elementwise, host, llm, networks, recurrent, synapse, tier_w
from benchmarks.before import NOTHING, Works, begun, split, warm_side_by_side
from benchmarks.calibration import calibration
from benchmarks.calls import answered_calls
from benchmarks.checking import check, code_of, found_right, keep_right, machine, unchecked
from benchmarks.conversion import conversion
from benchmarks.cpu import on_cpu
from benchmarks.cpu_networks import NETWORKS, SMALL, cpu_networks
from benchmarks.exact import WrongError
from benchmarks.pairs import PAIRS
from benchmarks.rows import UNMEASURED, Row, remarks, slope_of, table
from benchmarks.small_inputs import small_inputs
from benchmarks.timing import ON_CPU, ON_GPU, Clock, Place, Work, called_once, measure
from benchmarks.training import training
from benchmarks.units import frozen, gated_units, growth
from threshold_gating import kernels
from threshold_gating.conversion.text import jsonable
from threshold_gating.kernels.compiler import CompilerError

Sections = dict[str, Callable[[], Iterator[Work]]]


class Sizes(NamedTuple):
    """How large the work of each section is."""

    elementwise: elementwise.Sizes
    tier_w: tier_w.Sizes
    synapse: synapse.Sizes
    powers: range
    host: host.Sizes
    images: tuple[int, int, int, int]
    networks: dict[str, networks.Network]
    attention: attention.Sizes
    llm: llm.Sizes
    recurrent: recurrent.Size = (256, 64, 512)


LARGE = Sizes(
    elementwise.Sizes((16384, 4096), (64, 256, 56, 56), (64, 256, 64, 64)),
    tier_w.Sizes(
        products=((8192, 4096, 4096), (16384, 8192, 8192)),
        batches=(1, 2, 4, 8, 16, 32, 64),
        width=4096,
        image=(64, 256, 28, 28),
        vectors=(4096, 8192),
    ),
    synapse.Sizes(
        cubes=(2048, 512),
        image=(64, 64, 28, 28),
        batches=(64, 256, 1024, 4096, 16384),
        width=1024,
        most=4096,
    ),
    range(12, 29),
    host.Sizes((16384, 4096), (64, 197, 3072), 400),
    (64, 3, 224, 224),
    networks.NETWORKS,
    attention.Sizes(
        {(4, 16, 4096, 128): 2.0, (8, 16, 2048, 64): 2.5}, 16, (2048, 4096, 8192, 16384)
    ),
    llm.LARGE,
)


def on_gpu(place: Place, sizes: Sizes) -> Sections:
    """The sections for a GPU; another device only shows that they run."""
    return {
        "elementwise": lambda: elementwise.elementwise(sizes.elementwise, place),
        "gated units": lambda: gated_units(sizes.elementwise.rows, place),
        "host": lambda: host.host(sizes.host, place),
        "frozen": lambda: frozen(sizes.elementwise.rows, torch.bfloat16, place),
        "tier W": lambda: tier_w.tier_w(sizes.tier_w, place),
        "tier S": lambda: synapse.synapse(sizes.synapse, place),
        "growth": lambda: growth(sizes.powers, place),
        "networks": lambda: networks.networks(sizes.networks, sizes.images, place),
        "attention": lambda: attention.attend(sizes.attention, place),
        "llm": lambda: llm.llm(sizes.llm, place),
        "recurrent": lambda: recurrent.recurrent(sizes.recurrent, place, 1.1, 3.0),
    }


def here(smoke: bool) -> Sections:
    """The sections for one thread of a CPU."""
    elements = 2**17 if smoke else 2**22
    place = Place("cpu", None if smoke else torch.compile)
    steps = (4, 2, 8) if smoke else (64, 16, 256)
    return {
        "cpu": lambda: on_cpu(elements, place),
        "calls": lambda: answered_calls((6,) if smoke else (6, 12, 16)),
        "host": lambda: host.small_calls(
            2 if smoke else 400, place, {("ours", "PReLU"): 1.2}, {("ours", "PReLU"): 1.35}
        ),
        "cpu networks": lambda: cpu_networks(SMALL if smoke else NETWORKS, place),
        "small inputs": lambda: small_inputs(range(6, 8 if smoke else 23)),
        "frozen": lambda: frozen((elements,), torch.float32, place),
        "growth": lambda: growth(range(12, 17 if smoke else 25, 2), place),
        "training": lambda: training(place, 2 if smoke else 64),
        "recurrent": lambda: recurrent.recurrent(steps, place, 1.5, None),
        "conversion": lambda: conversion(1 if smoke else 8),
        "calibration": lambda: calibration(*((1_000, (2,)) if smoke else (100_000, (None, 3, 2)))),
    }


def whole(gpu: bool, smoke: bool = False) -> Sections:
    """All that there is to time on a machine."""
    return on_gpu(Place("cuda", torch.compile), LARGE) if gpu else here(smoke)


def not_timed(rows: Iterable[Row], gpu: bool) -> list[str]:
    """The sections of a machine that are not whole in these rows."""
    found, lacking = {row.key for row in rows}, []
    for name, works in whole(gpu).items():
        every = {row.key for work in works() for row in work.rows()}
        if left := len(every - found):
            lacking.append(name if left == len(every) else f"{name} ({left} of {len(every)} rows)")
    return lacking


def run(
    smoke: bool,
    path: Path | None,
    only: list[str] | None = None,
    *,
    warm: bool = False,
    match: str = "",
    checked: Path | None = None,
    jobs: int = 0,
    go_on: bool = False,
) -> int:
    """Check what is timed, time it, print; 1 if a kernel is wrong. `only` names sections, and of
    these the rows with `match` in their name are timed.

    What the file `checked` says was found right is not checked again, and what is right now is
    added to it. `warm` calls everything once and times nothing: what it compiles lies in the caches
    of Triton and torch for the next run. `jobs` sections are checked and warmed at a time, in
    processes of their own, before this one times them. `go_on` keeps the rows at `path` that the
    same code wrote on such a machine.
    """
    gpu = torch.cuda.is_available() and not smoke
    if not gpu:
        torch.set_num_threads(1)
    device, clock = ("cuda", ON_GPU) if gpu else ("cpu", ON_CPU)
    chosen = _chosen(whole(gpu, smoke), only, match)
    if not chosen:
        return 2
    if not smoke:  # calls are timed as somebody has them who did that
        _build()
    info = machine()
    print(", ".join(f"{k} {v}" for k, v in info.items()), clock.how, sep="\n", flush=True)
    code = code_of(device)
    data: dict[str, Any] = {"machine": info, "how": clock.how, "smoke": smoke, "code": code}
    try:
        earlier = begun(path, data) if go_on and path is not None else NOTHING
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    rows, left = split(earlier.rows, chosen)
    with TemporaryDirectory() as folder:
        right = checked or Path(folder) / "checked"
        if jobs:
            names = [name for name, works in left.items() if works]
            warm_side_by_side(names, [*["--smoke"] * smoke, "--match", match], right, jobs)
        data["wrong"] = _wrong(device, _families(left), right)
    if beyond := unchecked(device):
        print(beyond, flush=True)
    if warm:
        called = [called_once(work) for works in left.values() for work in works]
        return max(called, default=0) or int(bool(data["wrong"]))
    data |= {"checked": sorted(earlier.checked | _families(chosen)), "unchecked": beyond}
    data["runs"] = earlier.runs + any(left.values())
    return _timed_all(path, data, rows, left, clock)


def _chosen(sections: Sections, only: list[str] | None, match: str) -> Works:
    """What is asked for, of each section; none if there is no such thing, which is said."""
    if unknown := sorted(set(only or ()) - set(sections)):
        there = ", ".join(sections)
        print(f"benchmarks: no section {unknown[0]!r} here; there are {there}.", file=sys.stderr)
        return {}
    every = {n: list(works()) for n, works in sections.items() if not only or n in only}
    chosen = {n: [w for w in works if match in w.name] for n, works in every.items()}
    if not any(chosen.values()):
        print(f"benchmarks: no row of {', '.join(every)} has {match!r}.", file=sys.stderr)
        return {}
    return chosen


def _build() -> None:
    try:
        kernels.build()
    except CompilerError as error:
        print(f"calls of gates are Python's: {error}", flush=True)


def _families(works: Works) -> set[str]:
    return {family for each in works.values() for work in each for family in work.pairs}


def _timed_all(
    path: Path | None, data: dict[str, Any], rows: list[Row], left: Works, clock: Clock
) -> int:
    """Time what is left and write after every row; 1 if something is wrong."""
    wrong = data["wrong"]  # and so is written with the rest
    _write(path, data, rows)
    for name, works in () if wrong else ((n, w) for n, w in left.items() if w):
        for row in _timed(name, works, clock, data["smoke"]):
            rows.append(row)
            if row.failed.startswith(WrongError.__name__):
                wrong.append(f"{row.section}, {row.work}: {row.failed}")
            _write(path, data, rows)  # what was measured stays, whatever happens to the rest
    print(f"\n{len(wrong)} wrong, {_summary([row.verdict for row in rows])}")
    return 1 if wrong else 0


def _summary(verdicts: list[str]) -> str:
    missed, unmeasured = verdicts.count("MISSED"), verdicts.count(UNMEASURED)
    held = missed + verdicts.count("ok")
    more = f", {unmeasured} {UNMEASURED}" if unmeasured else ""
    return f"{missed} of {held} limits missed{more}"


def _wrong(device: str, families: set[str], checked: Path) -> list[str]:
    """Check and print; what the file says was found right before is not looked at."""
    before = found_right(checked, device) & families
    if before:
        print(f"found right before, by the same code: {', '.join(sorted(before))}", flush=True)
    left = families - before
    wrong = check(device, [pair for pair in PAIRS.values() if pair.family in left])
    for line in wrong:
        print(f"WRONG {line}")
    if left and not wrong:
        keep_right(checked, device, left)
    return wrong


def _timed(name: str, works: list[Work], clock: Clock, smoke: bool) -> Iterator[Row]:
    print(f"\n{name}\n{table([]).splitlines()[0]}", flush=True)
    start = time.perf_counter()
    for work in works:
        for row in measure(work, clock):
            row.limit = None if smoke else row.limit  # they are for large work
            _print(row)
            yield row
    print(f"{time.perf_counter() - start:.0f} s")


def _write(path: Path | None, data: dict[str, Any], rows: list[Row]) -> None:
    if path is not None:
        found = {"rows": [asdict(row) for row in rows], "slope": slope_of(rows)}
        path.write_text(json.dumps(jsonable(data | found), indent=1, allow_nan=False) + "\n")


def _print(row: Row) -> None:
    print(table([row]).splitlines()[-1])
    unit = f" {row.unit}" if row.unit != "ms" else ""
    others = ", ".join(f"{n} {v:.4g}{unit}" for n, v in row.times.items() if n != row.ours)
    said = [line.removeprefix(f"{row.work}: ") for line in remarks([row])]
    if line := "; ".join(filter(None, (others, *said))):
        print(f"  {'ms: ' if row.unit == 'ms' else ''}{line}", flush=True)
