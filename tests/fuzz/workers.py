"""Networks and gates tried in processes of their own, each network with a limit of time."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.check import ALL, FAST, Failure, check
from tests.fuzz.gates import check_gates
from tests.fuzz.network import draw

_CHUNK = 200  # networks of a process: torch keeps what it compiled
_LIMIT = 120  # seconds for a network; its process is ended after twice that


@dataclass(frozen=True)
class Tried:
    """What came of one network."""

    seed: int
    failures: tuple[Failure, ...] = ()
    refusal: str = ""
    converted: bool = False


def inductor(seed: int) -> bool:
    """Two networks of a hundred are compiled by Inductor."""
    return seed % 50 == 0


def heavy(seed: int, fast: bool = False) -> frozenset[str]:
    return FAST if fast else ALL | ({"inductor"} if inductor(seed) else set())


class SlowError(BaseException):
    """No Exception: nobody on the way is to take it for his own."""


def _too_slow(*_: Any) -> None:
    raise SlowError


def tried(seed: int, fast: bool, limit: int = _LIMIT) -> Tried:
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(limit)
    try:
        trial = check(draw(seed), heavy(seed, fast))
    except SlowError:
        return Tried(seed, (Failure("too slow", f"it takes more than {limit} s"),))
    except Exception as error:  # of the tester, as likely as of the library
        return Tried(seed, (Failure(f"crash {type(error).__name__}", str(error)),))
    finally:
        signal.alarm(0)
    return Tried(seed, tuple(trial.failures), trial.refusal, hasattr(trial, "gated"))


def _work(seeds: range, fast: bool, pipe: Any) -> None:
    """The networks of a process, reported as they are done, up to one that fails.

    A trace that was cut off, by an error or by the limit of time, may leave torch in a state in
    which every later one fails: what comes after a failure is for a process of its own.
    """
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # of graphs that the original has not either
    for seed in seeds:
        found = tried(seed, fast)
        pipe.send(found)
        if found.failures:
            break
    pipe.close()


@dataclass
class Worker:
    """A process, what it has to do, and since when it does it."""

    seeds: range
    fast: bool
    fresh: bool = True  # nothing was tried in it yet
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work, args=(self.seeds, self.fast, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def read(self) -> Tried | None:
        """The next result, None at the end; one of our own if the process is gone."""
        try:
            found: Tried = self.pipe.recv()
        except EOFError:
            if not self.seeds:
                return None
            self.process.join()
            found = self._lost(f"its process ended with {self.process.exitcode}")
        self.seeds, self.since = self.seeds[1:], time.monotonic()
        return found

    def hangs(self) -> bool:
        return time.monotonic() - self.since > 2 * _LIMIT + 60

    def _lost(self, why: str) -> Tried:
        return Tried(self.seeds[0], (Failure("process lost", why),))

    def end(self) -> Tried:
        self.process.kill()
        found = self._lost(f"it hangs for more than {2 * _LIMIT} s")
        self.seeds = self.seeds[1:]
        return found


def results(seeds: range, jobs: int, fast: bool) -> Iterator[Tried]:
    """What came of every network; a failure only where it is that of a fresh process."""
    waiting = [seeds[k : k + _CHUNK] for k in range(0, len(seeds), _CHUNK)]
    if len(waiting) < jobs:
        waiting = [seeds[k::jobs] for k in range(jobs) if seeds[k::jobs]]
    working: list[Worker] = []
    while waiting or working:
        while waiting and len(working) < jobs:
            working.append(Worker(waiting.pop(0), fast))
        ready = multiprocessing.connection.wait([w.pipe for w in working], timeout=5)
        for worker in list(working):
            if worker.pipe in ready:
                found = worker.read()
            elif worker.hangs():
                found = worker.end()
            else:
                continue
            if found is None or found.failures or not worker.seeds:
                working.remove(worker)
                waiting[:0] = [worker.seeds] if worker.seeds else []
            if found is None:
                continue
            if found.failures and not worker.fresh:
                waiting.insert(0, range(found.seed, found.seed + 1))
            else:
                yield found
            worker.fresh = False


def some_gates(seed: int, count: int) -> list[str]:
    """What differs among so many gates, with a thread of their own."""
    torch.set_num_threads(1)
    return check_gates(seed, count, compiled=8)
