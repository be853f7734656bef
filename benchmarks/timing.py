"""How everything here is timed: contenders in turn, so that clocks and noise hit all alike.

On a GPU a contender's time is the median of `triton.testing.do_bench`, the call as a user makes it
with the L2 cache emptied before, and of a few rounds the least: the noise of a machine that others
use only ever adds to it. A row says so where the slowest round took far more. All contenders run in
turn before, untimed, to heat the GPU: after a rest it draws more power for some 0.2 s than it can
sustain, and products of whoever came first were up to 16 % faster. All threads of the process are
on one core meanwhile, the one that is quickest just then: torch's thread for backward passes
otherwise wakes on another one, which on a shared host takes longer than the kernels. The time of a
recorded graph stands beside it: it leaves out what Python costs, and comes last, on a GPU that is
hot. On a CPU it is the least processor time of many runs of one thread; slow work has fewer, quick
work more, because what others do to a shared core leaves short pauses only. Memory is not given
back to the system in between, for getting it anew can take longer than the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.pairs import PAIRS
from benchmarks.rows import Row, Times

Contenders = dict[str, Callable[[], Any]]
Rounds = dict[str, list[float]]  # milliseconds of each contender
CORES = 16
# By whether the work is slow: rounds, milliseconds of a round on a GPU, least runs on a CPU.
ROUNDS, REP, RUNS = {False: 5, True: 3}, {False: 20, True: 400}, {False: 40, True: 9}
AT_LEAST_MS, MOST_RUNS = 300, 4000  # of a contender on a CPU
HEAT_S = 0.4  # at least, of contenders in turn before a GPU is timed
FAMILIES = {pair.family for pair in PAIRS.values()}
# Among contenders: not timed, but called first, and it raises if ours is wrong at this size.
CHECK = "check"
ELSEWHERE = "checked at other sizes only"


class Clock(NamedTuple):
    """A way of timing: in words, as the call is made, and replayed where that exists."""

    how: str
    called: Callable[[Contenders, bool], Rounds]
    replayed: Callable[[Contenders], Times] | None
    loose: Callable[[Contenders, bool], Rounds] | None = None  # as called, on whatever cores


class Place(NamedTuple):
    """Where contenders run, and what compiles those that are compiled (None leaves them out)."""

    device: str
    compile: Callable[..., Any] | None

    def compiled(self, f: Any) -> dict[str, Any]:
        """{"compile": f, compiled}, or nothing."""
        if self.compile is None:
            return {}
        # Dynamo counts compilations by code, and after eight of one function stays eager.
        torch._dynamo.reset()
        return {"compile": self.compile(f)}


@dataclass(frozen=True)
class Work:
    """A row that is still to be timed.

    Args:
        build: makes the contenders when it is their turn, `ours` among them, and `CHECK` where
            what is timed can be checked itself; a row without says so.
        limits: what `ours` is divided by and the most that may come out, a row for each; a name and
            what it is divided by where several contenders are ours.
        pairs: the families of pairs that checked what is timed; there is no timing without.
        backward: whether the contenders need derivatives.
        replay: whether a recorded graph is timed too.
        aim: a ratio that is more than was asked for, named where it is met.
        slow: whether fewer runs have to do.
        pinned: whether all threads are kept on one core, where the clock does that.
        alone: whether the backward pass runs in the thread that calls it, as
            `torch.autograd.set_multithreading_enabled(False)` makes it.
        unit: "ms" is timed; else the contenders are called once and give a figure in this unit.
    """

    section: str
    name: str
    build: Callable[[], Contenders]
    limits: Mapping[str, float | None] | Mapping[tuple[str, str], float | None]
    pairs: tuple[str, ...]
    backward: bool = False
    replay: bool = True
    aim: float | None = None
    note: str = ""
    power: int | None = None
    slow: bool = False
    unit: str = "ms"
    pinned: bool = True
    alone: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.pairs if name not in FAMILIES]
        if unknown or not self.pairs:
            raise ValueError(
                f"{self.section}, {self.name}: what is timed is checked first, by pairs of "
                f"benchmarks.pairs; got pairs={self.pairs}, there are "
                f"{', '.join(sorted(FAMILIES))}."
            )

    def ratios(self) -> list[tuple[str, str]]:
        """(ours, over) of each limit."""
        return [w if isinstance(w, tuple) else ("ours", w) for w in self.limits]

    def rows(self) -> Iterator[Row]:
        """What it gives, before it is timed."""
        for (ours, over), limit in zip(self.ratios(), self.limits.values(), strict=True):
            name = self.name if ours == "ours" else f"{self.name} {ours}"
            row = Row(self.section, name, {}, over, limit, note=self.note)
            row.power, row.unit, row.ours = self.power, self.unit, ours
            yield row


class Found(NamedTuple):
    """What was measured of a piece of work, or why nothing was."""

    rounds: Rounds
    replayed: Times
    failed: str = ""
    checked: bool = False  # what was timed, at its own size


def measure(work: Work, clock: Clock) -> Iterator[Row]:
    """The rows of a piece of work; what fails is a row that says so, and the next can go on."""
    rounds, replayed, failed, checked = _measured(work, clock)
    times = {name: min(each) for name, each in rounds.items()}
    for row in work.rows():
        row.times, row.replayed, row.failed = times, replayed, failed
        said = [row.note]
        if work.unit == "ms" and not (checked or failed):
            said.append(ELSEWHERE)
        if work.aim is not None and row.ratio is not None and row.ratio <= work.aim:
            said.append(f"within {work.aim}, the aim")
        slower = max(rounds[row.ours]) / times[row.ours] if times.get(row.ours) else 1.0
        if slower > 1.25:
            said.append(f"the slowest round took {slower:.2f} times that")
        row.note = "; ".join(filter(None, said))
        yield row


def _measured(work: Work, clock: Clock) -> Found:
    torch.manual_seed(0)
    threads = torch.autograd.set_multithreading_enabled(not work.alone)
    try:
        with threads:
            contenders = work.build()
            check = contenders.pop(CHECK, None)
            with torch.set_grad_enabled(work.backward):
                if check is not None:
                    check()
                return _timed(work, clock, contenders)._replace(checked=check is not None)
    except Exception as error:  # whatever it is, the other rows do not depend on it
        first = str(error).strip().splitlines()
        return Found({}, {}, f"{type(error).__name__}: {first[0] if first else ''}"[:200])


def called_once(work: Work) -> int:
    """Build the contenders and call each; 1, and a line, if that fails."""
    if failed := _measured(work, _ONCE).failed:
        print(f"{work.section}, {work.name}: {failed}", flush=True)
    return int(bool(failed))


def _timed(work: Work, clock: Clock, contenders: Contenders) -> Found:
    if work.unit != "ms":
        return Found({name: [float(f())] for name, f in contenders.items()}, {})
    called = clock.called if work.pinned or clock.loose is None else clock.loose
    rounds = called(contenders, work.slow)
    if clock.replayed is None or not work.replay:
        return Found(rounds, {})
    every = any(over == "best" for _, over in work.ratios())
    needed = set(contenders) if every else {name for pair in work.ratios() for name in pair}
    return Found(rounds, clock.replayed({n: f for n, f in contenders.items() if n in needed}))


def _in_turn(contenders: Contenders, i: int) -> list[tuple[str, Callable[[], Any]]]:
    """Back and forth, so that nobody always follows the same one."""
    return list(contenders.items())[:: -1 if i % 2 else 1]


def _in_rounds(contenders: Contenders, slow: bool, pinned: bool = True) -> Rounds:
    from triton.testing import do_bench

    taken: Rounds = {name: [] for name in contenders}
    for f in contenders.values():
        f()  # what has to be compiled is, by all cores
    with _on_one_core() if pinned else contextlib.nullcontext():
        start = time.monotonic()
        while time.monotonic() - start < HEAT_S:
            for f in contenders.values():
                do_bench(f, warmup=5, rep=REP[False])
        for i in range(ROUNDS[slow]):
            for name, f in _in_turn(contenders, i):
                taken[name].append(do_bench(f, warmup=5, rep=REP[slow], return_mode="median"))
    return taken


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Every thread of this process on the quickest of its cores; nothing where that cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        _move({min(sorted(before)[-CORES:], key=_slowness)})
        yield
    finally:
        _move(before)


def _slowness(core: int) -> float:
    """Seconds for a little work on this core: others of a shared host may be using it, too."""
    os.sched_setaffinity(0, {core})
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        sum(range(20_000))
        taken.append(time.perf_counter() - start)
    return max(taken)


def _move(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may have ended
            os.sched_setaffinity(int(thread), cores)


def _replayed(contenders: Contenders) -> Times:
    """Milliseconds of those that can be recorded."""
    found = {name: _replay(f) for name, f in contenders.items()}
    return {name: ms for name, ms in found.items() if ms is not None}


def _replay(f: Callable[[], Any]) -> float | None:
    from triton.testing import do_bench_cudagraph

    try:
        _refuse_to_wait(f)
        ms: float = do_bench_cudagraph(f, rep=10, return_mode="median")
    except Exception:  # it decides nothing: the times of the calls stand without it
        return None
    return ms


def _refuse_to_wait(f: Callable[[], Any]) -> None:
    """Raise if f waits for the GPU: trying to record that would leave a recording half done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            f()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def host_times(contenders: Contenders, device: str, calls: int) -> Times:
    """Microseconds that the host takes for a call of each, least of several rounds in turn, on
    whatever cores: what the device does goes on beside it."""
    taken: Rounds = {name: [] for name in contenders}
    for i in range(2 * ROUNDS[False]):
        for name, f in _in_turn(contenders, i):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                f()
            taken[name].append(1e6 * (time.perf_counter() - start) / calls)
    return {name: min(each) for name, each in taken.items()}


def _least(contenders: Contenders, slow: bool) -> Rounds:
    taken: Rounds = {name: [] for name in contenders}
    with _keeping_memory():
        for f in (*contenders.values(), *contenders.values()):
            f()
        for i in range(MOST_RUNS):
            for name, f in _in_turn(contenders, i):
                start = time.process_time()
                f()
                taken[name].append(1e3 * (time.process_time() - start))
            if i + 1 >= RUNS[slow] and max(map(sum, taken.values())) >= AT_LEAST_MS:
                break
    return {name: [min(each)] for name, each in taken.items()}


@contextlib.contextmanager
def _keeping_memory() -> Iterator[None]:
    """The C library serves every size from its heap and never shrinks that; elsewhere nothing."""
    try:
        mallopt: Any = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        yield
        return
    thresholds = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    usual = 128 * 1024
    for what in thresholds:
        mallopt(what, 2**30)
    try:
        yield
    finally:
        for what in thresholds:
            mallopt(what, usual)


def peak(f: Callable[[], Any], device: str) -> float:
    """MiB: the most memory that f has at once, beyond what was there before."""
    f()  # what is made once is there
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        f()
    seen: Any = record.profiler
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0) / 2**20


def _each_once(contenders: Contenders, slow: bool) -> Rounds:
    for f in contenders.values():
        f()
    return {}


_ONCE = Clock("", _each_once, None)
ON_GPU = Clock(
    f"Medians of triton.testing.do_bench, contenders in turn, least of {ROUNDS[False]} "
    f"rounds ({ROUNDS[True]} where a call is slow) after {HEAT_S} s or more that heat the GPU, all "
    "threads on the quickest core; what is in other units is taken once. 'replayed' is the ratio "
    "of recorded graphs, without what Python costs, and decides nothing.",
    _in_rounds,
    _replayed,
    partial(_in_rounds, pinned=False),
)
ON_CPU = Clock(
    f"One thread, the least processor time of {RUNS[False]} runs ({RUNS[True]} where one takes "
    f"seconds, more until they take {AT_LEAST_MS} ms), contenders in turn: the noise of a shared "
    "machine only adds time. Memory is kept between runs.",
    _least,
    None,
)
