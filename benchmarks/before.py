"""What a run has before it times: rows of one that was cut off, sections warmed side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import Row, row_of
from benchmarks.timing import Work

Works = dict[str, list[Work]]  # of each section


class Begun(NamedTuple):
    """What runs before this one wrote: how many they were, their rows, what they found right."""

    runs: int
    rows: list[Row]
    checked: set[str]


NOTHING = Begun(0, [], set())


def begun(path: Path, data: dict[str, Any]) -> Begun:
    """What the same code wrote there on such a machine, but for rows that failed.

    Raises:
        ValueError: it is no file of rows, which a run would write over.
    """
    if not path.exists():
        print(f"{path} is not there: every row is timed.", flush=True)
        return NOTHING
    try:
        found = json.loads(path.read_text())
        same = all(found[name] == data[name] for name in ("code", "smoke"))
        rows = [row_of(row) for row in found["rows"]] if same else []
        before = Begun(found["runs"], [row for row in rows if not row.failed], {*found["checked"]})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} does not hold what --go-on can keep ({type(error).__name__}: {error}); "
            "leave --go-on out to time every row and write over it, or name another file"
        ) from None
    if not same:
        print(f"{path} is of other code or another machine: every row is timed.", flush=True)
        return NOTHING
    print(f"rows kept of {path}: {len(before.rows)}", flush=True)
    return before


def split(rows: list[Row], works: Works) -> tuple[list[Row], Works]:
    """The rows that stay, and of each section what is left to do: all rows of a work, or none."""
    there = {row.key for row in rows}
    left = {
        name: [work for work in each if any(row.key not in there for row in work.rows())]
        for name, each in works.items()
    }
    again = {row.key for each in left.values() for work in each for row in work.rows()}
    return [row for row in rows if row.key not in again], left


def warm_side_by_side(sections: list[str], options: list[str], checked: Path, jobs: int) -> None:
    """Check and compile sections in processes, so many at a time; what was found right is kept.

    A process that fails leaves its checks to the one that asks, which finds out for itself.
    """
    start = time.perf_counter()

    def one(name: str) -> str:
        command = [sys.executable, "-m", "benchmarks", "--warm", "--only", name, *options]
        done = subprocess.run([*command, "--checked", str(checked)], capture_output=True, text=True)
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return "" if done.returncode == 0 else f"{name}: {''.join(last)}"

    with ThreadPoolExecutor(jobs) as pool:
        failed = [line for line in pool.map(one, sections) if line]
    for line in failed:
        print(f"not warmed: {line}", flush=True)
    warmed, took = len(sections) - len(failed), time.perf_counter() - start
    print(f"{warmed} of {len(sections)} sections warmed in {took:.0f} s", flush=True)
