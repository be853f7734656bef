"""Contenders in turn, the least time, one core, and rows that fail."""

import os
import threading
from functools import partial
from itertools import accumulate, cycle

import pytest
import torch
from small import FAKE

from benchmarks import pages, rows, timing
from benchmarks.timing import Clock, Work

PAIRS = ("module",)


def test_a_row_that_fails_says_so_is_missed_and_lets_the_others_run():
    def fails():
        raise RuntimeError("no such kernel\nand much more")

    found = list(timing.measure(Work("s", "broken", fails, {"copy": None}, PAIRS), FAKE))
    works = [Work("s", "fine", lambda: {"copy": int, "ours": int}, {"copy": 1.0}, PAIRS)]
    found += [row for work in works for row in timing.measure(work, FAKE)]
    assert [row.verdict for row in found] == ["MISSED", "ok"]
    data = {
        "machine": {"gpu": "none"},
        "how": "once",
        "wrong": [],
        "rows": [vars(r) for r in found],
    }
    page = pages.report(data)
    assert "- broken: failed: RuntimeError: no such kernel\n" in page
    assert "| broken |  | copy |  |  |  | MISSED |" in page


def test_a_row_says_whether_what_was_timed_was_checked_itself():
    seen = []
    both = {"copy": int, "ours": int}

    def checked():
        return {**both, timing.CHECK: lambda: seen.append("checked")}

    clock = Clock("", lambda contenders, slow: seen.append(list(contenders)) or once, None)
    once = {name: [2.0] for name in both}
    for build, note in ((checked, ""), (lambda: dict(both), "checked at other sizes only")):
        [row] = timing.measure(Work("s", "w", build, {"copy": 1.0}, PAIRS), clock)
        assert row.note == note
    assert seen == ["checked", ["copy", "ours"], ["copy", "ours"]]  # before, and it is not timed


def test_contenders_take_turns_and_the_least_time_counts(monkeypatch):
    calls, now = [], iter(range(10**6))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(now) ** 2)
    times = timing.ON_CPU.called({n: partial(calls.append, n) for n in ("copy", "ours")}, False)
    # twice before the clock is read
    turns = ["copy", "ours", "ours", "copy"] * (timing.RUNS[False] // 2)
    assert calls == ["copy", "ours", "copy", "ours", *turns]
    # each call lasts longer than the one before
    assert times == {"copy": [1e3 * (1**2 - 0**2)], "ours": [1e3 * (3**2 - 2**2)]}
    assert timing.RUNS[False] >= 15


@pytest.mark.parametrize(("ms", "runs"), [(10, 40), (2, 150), (0, 4000)])
def test_quick_work_has_more_runs_and_an_end(monkeypatch, ms, runs):
    calls, now = [], accumulate(cycle([1.0, ms / 1e3]))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(now))
    timing.ON_CPU.called({"ours": partial(calls.append, 1)}, False)
    assert len(calls) - 2 == pytest.approx(runs, abs=1)  # seconds are added up in floats


def test_on_a_gpu_the_least_of_the_rounds_counts_and_a_slow_one_is_named(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    monkeypatch.setattr(timing, "ROUNDS", {False: 3})
    monkeypatch.setattr(timing, "HEAT_S", 0.0)
    taken = iter([5.0, 2.0, 2.1, 3.0, 4.0, 2.6])
    monkeypatch.setattr(triton, "do_bench", lambda f, **_: next(taken))
    work = Work("s", "w", lambda: {"copy": int, "ours": int}, {"copy": 1.0}, PAIRS)
    [row] = timing.measure(work, timing.ON_GPU._replace(replayed=None))
    assert row.times == {"copy": 3.0, "ours": 2.0}
    assert row.note == f"{timing.ELSEWHERE}; the slowest round took 1.30 times that"


def test_a_gpu_that_rested_is_heated_by_all_contenders_before_any_is_timed(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    now, called = [0.0], []

    def fake(f, **_):
        called.append(f())
        now[0] += 0.15
        return 1.0 if now[0] < 0.6 else 2.0  # quicker while it is cool

    monkeypatch.setattr(triton, "do_bench", fake)
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    contenders = {"copy": lambda: "copy", "ours": lambda: "ours"}
    rounds = timing._in_rounds(contenders, False, pinned=False)
    assert called[:4] == ["copy", "ours"] * 2  # 0.6 s: nobody is left out of the last turn
    assert rounds == {name: [2.0] * timing.ROUNDS[False] for name in contenders}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_on_a_gpu_all_threads_are_timed_on_one_core_and_have_all_again_afterwards(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    before, seen = os.sched_getaffinity(0), []

    def cores():
        return {t: os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")}

    quickest = min(before)
    monkeypatch.setattr(timing, "_slowness", lambda core: core)
    started, end = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (started.set(), end.wait()))
    other.start()
    started.wait()
    monkeypatch.setattr(timing, "HEAT_S", 0.0)
    monkeypatch.setattr(triton, "do_bench", lambda f, **_: seen.append(cores()) or 1.0)
    timing.ON_GPU.called({"copy": lambda: seen.append(cores())}, False)
    known = str(other.native_id)
    assert seen[0][known] == before  # called once to compile, with every core
    assert {frozenset(c) for each in seen[1:] for c in each.values()} == {frozenset({quickest})}
    assert cores()[known] == os.sched_getaffinity(0) == before
    end.set()
    other.join()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_a_core_is_judged_by_what_it_takes_there(monkeypatch):
    before, seen, now = os.sched_getaffinity(0), [], iter([0, 1, 2, 5, 6, 8])
    monkeypatch.setattr(
        timing.time, "perf_counter", lambda: seen.append(os.sched_getaffinity(0)) or next(now)
    )
    try:
        assert timing._slowness(min(before)) == 3  # the worst of three
        assert seen == [{min(before)}] * 6
    finally:
        os.sched_setaffinity(0, before)


def test_what_cannot_be_recorded_has_no_replayed_time(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    monkeypatch.setattr(triton, "do_bench_cudagraph", lambda f, **_: 1.5)
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert timing.ON_GPU.replayed({"copy": int, "ours": waits}) == {"copy": 1.5}
    assert modes == ["error", "default"] * 2


def test_more_than_was_asked_for_is_named_only_where_it_is_met():
    for ours, note in ((1.02, ["within 1.03, the aim"]), (1.05, [])):
        clock = Clock("", lambda _, slow, ours=ours: {"copy": [1.0], "ours": [ours]}, None)
        work = Work("s", "w", dict, {"copy": 1.08}, PAIRS, aim=1.03)
        [row] = timing.measure(work, clock)
        assert row.note == "; ".join([timing.ELSEWHERE, *note])


def test_a_figure_that_is_no_time_is_taken_once_and_has_its_limit_itself():
    calls = []
    work = Work(
        "s", "w", lambda: {"ours": lambda: calls.append(1) or 3.0}, {"": 2.0}, PAIRS, unit="s"
    )
    [row] = timing.measure(work, timing.ON_CPU)
    assert calls == [1]
    assert (row.ratio, row.verdict) == (3.0, "MISSED")
    assert "| w | 3 s |  | 3.000 |  | 2.000 | MISSED |" in rows.table([row])


def test_several_of_ours_have_a_row_each_over_the_fastest_of_others():
    times = {"a": [2.0], "b": [4.0], "fused": [3.0], "literal": [8.0]}
    clock = Clock("", lambda _, slow: times, None)
    limits = {("fused", "a|b"): 1.0, ("literal", "b"): 2.0}
    found = list(timing.measure(Work("s", "w", dict, limits, PAIRS), clock))
    assert [(row.work, row.ratio) for row in found] == [("w fused", 1.5), ("w literal", 2.0)]
    assert [row.verdict for row in found] == ["MISSED", "ok"]
    assert rows.times_table(found).count("| w |") == 1


def test_peak_memory_is_the_most_at_once():
    def f():
        a = torch.ones(2**18)  # a MiB
        b = a + 1
        return b.sum()

    assert timing.peak(f, "cpu") == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("pinned", "alone"), [(True, False), (False, False), (False, True)])
def test_a_row_says_on_which_cores_and_in_which_thread_it_is_timed(pinned, alone):
    seen = []

    def clock(name, contenders, slow):
        seen.append((name, torch.autograd.is_multithreading_enabled()))
        return {n: [1.0] for n in contenders}

    work = Work("host", "row", lambda: {"copy": int, "ours": int}, {"copy": 1.0}, ("module",),
                pinned=pinned, alone=alone)  # fmt: skip
    called, loose = partial(clock, "called"), partial(clock, "loose")
    list(timing.measure(work, Clock("", called, None, loose)))
    assert seen == [("called" if pinned else "loose", not alone)]
    assert torch.autograd.is_multithreading_enabled()
