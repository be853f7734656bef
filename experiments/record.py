"""Rows of results: what was measured, on which data, where, when and by which command.

An experiment lists its cases as plain dicts (arm, seed, steps, ...). `complete` runs those that its
file does not hold yet and appends one line of JSON for each as it ends, so a run can be stopped at
any time and goes on, and points add up over several runs and machines:

    asked = record.options("fig3_depth", __doc__).parse_args(argv)
    rows = record.complete("fig3_depth", cases(asked), run, asked)

`run(case, asked)` returns the figures of one case; it must be a function of a module, since with
`--jobs N` it is called in N processes (in Ray's where Ray is installed: on one machine, or on a
cluster whose machines share the folders of code, data and rows). A case is bounded in steps, never
in seconds. Under torchrun every process runs each case and the first one writes.

An experiment module that is named in `experiments.results.PAGES` also has `page(rows)`, which
returns its tables as Markdown, `verdicts(rows)`, a list of `Verdict`, and, if it has pictures,
`draw(rows, folder)`. Rows of `--smoke` go to a folder of their own and are refused there.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import threshold_gating as tg
from experiments.spread import Word

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
CHECKPOINTS = ROOT / "results" / "checkpoints"  # ignored by git

Case = dict[str, Any]
Run = Callable[[Case, argparse.Namespace], dict[str, Any]]
Cost = Callable[[Case], float]  # how long a case takes, in any unit
Ended = tuple[Case, Any, float]  # a case, its figures or the text of its error, seconds
RunAll = Callable[[list[Case], argparse.Namespace], Iterator[Ended]]


class Row(NamedTuple):
    """One case and what came of it; `about` says where, when and by which command."""

    case: Case
    figures: dict[str, Any]
    seconds: float
    smoke: bool
    about: dict[str, str]


class Verdict(NamedTuple):
    """One claim of the paper, its figure, ours with its spread, and what follows."""

    claim: str
    paper: str
    ours: str
    verdict: Word


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options that every experiment has; an experiment adds its own."""
    first = about.strip().splitlines()[0] if about else None
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{name}", description=first)
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ["TG_DATA"]) if "TG_DATA" in os.environ else None,
        help="the folder with the data sets (default: what TG_DATA names)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at the same time")
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE", help="these cases")
    parser.add_argument("--list", action="store_true", help="print the cases and whether they ran")
    parser.add_argument(
        "--smoke", action="store_true", help="seconds, on made-up data; keeps nothing"
    )
    parser.add_argument("--out", "-o", type=Path, default=None, help="the file of rows")
    return parser


def file_of(name: str, asked: argparse.Namespace | None = None) -> Path:
    if asked is not None and asked.out is not None:
        return asked.out
    if asked is not None and asked.smoke:
        return Path(tempfile.gettempdir()) / f"tg-smoke-{os.getpid()}" / f"{name}.jsonl"
    return RESULTS / f"{name}.jsonl"


def rows(file: Path) -> list[Row]:
    """Every row of a file; a line that was cut off is an error that says where."""
    if not file.exists():
        return []
    found = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            found.append(Row(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, line {number} is no row ({error}); delete it") from None
    return found


def key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


def check_data(rows: Iterable[Row]) -> None:
    """Refuse rows of one data set that were measured on different files."""
    known: dict[str, str] = {}
    for row in rows:
        name, sha = str(row.case.get("images", "")), row.about.get("data", "")
        if sha and known.setdefault(name, sha) != sha:
            raise ValueError(
                f"rows of different data: {_said(row.case)} has the hash {sha[:12]}, rows before "
                f"it {known[name][:12]}; keep them in files of their own (--out)"
            )


def measured(rows: Iterable[Row]) -> str:
    """Where, with what and when; of rows from several places, how many are from each."""
    names = ("device", "torch", "date", "commit")
    places = Counter(
        ", ".join(
            f"{name} {row.about[name]}" if name in ("torch", "commit") else row.about[name]
            for name in names
            if name in row.about
        )
        for row in rows
    )
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{count} rows: {place}" for place, count in places.items())


def curve(values: dict[str, float]) -> dict[int, float]:
    """Values by step, in the order of steps: rows have their keys in that of words."""
    return dict(sorted((int(step), value) for step, value in values.items()))


def matching(cases: Iterable[Case], only: Iterable[str]) -> list[Case]:
    """The cases with every KEY=VALUE of `only`; VALUE may be several, divided by commas."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        name, found, values = text.partition("=")
        if not found:
            raise SystemExit(f"--only {text}: KEY=VALUE is needed, for example --only seed=0,1")
        wanted[name] = set(values.split(","))
    cases = list(cases)
    unknown = [n for n in wanted if not any(n in case for case in cases)]
    if unknown:
        known = sorted({n for case in cases for n in case})
        raise SystemExit(f"--only: no case has {', '.join(unknown)}; there are {', '.join(known)}")
    for name, values in wanted.items():  # one wrong word of several would be left out unseen
        have = dict.fromkeys(str(case[name]) for case in cases if name in case)
        if strange := sorted(values - have.keys()):
            said = f"no case has {name}={', '.join(strange)}; there are {', '.join(have)}"
            raise SystemExit(f"--only {name}={','.join(sorted(values))}: {said}")
    chosen = [c for c in cases if all(str(c.get(n)) in values for n, values in wanted.items())]
    if not chosen:
        raise SystemExit(f"--only {' '.join(only)}: no case is left; --list prints them")
    return chosen


def complete(
    name: str,
    cases: Iterable[Case],
    run: Run | None,
    asked: argparse.Namespace,
    *,
    data: str = "",
    cost: Cost | None = None,
    run_all: RunAll | None = None,
) -> list[Row]:
    """Run what the file does not hold yet; return the rows of all the chosen cases.

    `data` is the hash of the data that the cases read. With `--jobs` the cases of the highest
    `cost` begin first, so that no long one is left alone in the end. `run_all`, instead of `run`,
    is an experiment's own way to run all that are left; it gives each with figures and seconds.
    """
    chosen = matching(cases, asked.only)
    file = file_of(name, asked)
    asked = argparse.Namespace(**{**vars(asked), "out": file})  # to other processes, the same file
    found = rows(file)
    done = {key(row.case): row for row in found}
    left = [case for case in chosen if key(case) not in done]
    if cost is not None and asked.jobs > 1:
        left.sort(key=cost, reverse=True)  # equal ones stay in their order
    if asked.list:
        for case in chosen:
            print("done" if key(case) in done else "    ", _said(case))
        raise SystemExit(0)
    about = _about(name, asked.device, data)
    check_data([*found, *(Row(case, {}, 0.0, False, about) for case in left)])
    print(f"{len(chosen)} cases, {len(left)} to run on {about['device']}; rows go to {file}")
    print(about["command"], flush=True)
    ended = run_all(left, asked) if run_all is not None else _run_all(left, run, asked)
    done |= {key(row.case): row for row in _kept(ended, len(left), file, asked.smoke, about)}
    return [done[key(case)] for case in chosen]


def _kept(
    ended: Iterable[Ended], total: int, file: Path, smoke: bool, about: dict[str, str]
) -> Iterator[Row]:
    """A row of each case as it ends, once it is in the file; all failures are one error at last."""
    failed = []
    for count, (case, figures, seconds) in enumerate(ended, 1):
        which = f"[{count}/{total}] {_said(case)}"
        if isinstance(figures, str):
            failed.append(f"{_said(case)}: {figures.splitlines()[-1]}")
            print(f"{which} failed:\n{figures}", flush=True)
            continue
        row = Row(case, _plain(figures), round(seconds, 2), bool(smoke), about)
        if first_process():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                # one write a line: processes may share it
                out.write(json.dumps(row._asdict()) + "\n")
        shown = {n: v for n, v in row.figures.items() if isinstance(v, int | float | str)}
        print(f"{which}: {_said(shown)} ({seconds:.0f} s)", flush=True)
        yield row
    if failed:
        raise RuntimeError(f"{len(failed)} of {total} cases failed: {'; '.join(failed)}")


def in_turn(parts: dict[str, Callable[[], None]]) -> None:
    """Call one after the other. A RuntimeError, as of `complete`, stops no other part; all that
    were raised are raised as one in the end."""
    failed = []
    for name, part in parts.items():
        try:
            part()
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))


def first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def checkpoint(name: str, case: Case) -> Path:
    """Where a case keeps its state while it runs, so that it goes on after a stop."""
    digest = hashlib.sha256(key(case).encode()).hexdigest()[:16]
    return CHECKPOINTS / name / f"{digest}.pt"


def _run_all(cases: list[Case], run: Run, asked: argparse.Namespace) -> Iterator[Ended]:
    """The cases as they end: side by side if `--jobs` says so, else one after the other."""
    if asked.jobs <= 1 or len(cases) <= 1:
        for case in cases:
            yield _timed(run, case, asked)
    elif (ray := _ray()) is not None:
        share = 1 / asked.jobs if asked.device.startswith("cuda") else 0
        task = ray.remote(num_cpus=1, num_gpus=share)(_timed_there)
        waiting = [task.remote(*_name_of(run), case, asked) for case in cases]
        while waiting:
            ready, waiting = ray.wait(waiting)
            yield ray.get(ready[0])
    else:
        with ProcessPoolExecutor(asked.jobs, get_context("spawn"), _one_thread) as pool:
            for ended in as_completed([pool.submit(_timed, run, case, asked) for case in cases]):
                yield ended.result()


def _timed(run: Run, case: Case, asked: argparse.Namespace) -> Ended:
    """A case with its figures, or with the text of its error: the others are still to run."""
    begun = time.perf_counter()
    try:
        figures: Any = run(case, asked)
    except Exception:
        figures = traceback.format_exc()
    return case, figures, time.perf_counter() - begun


def _name_of(run: Run) -> tuple[str, str]:
    """Module and name: Ray would take a function of the program itself by value, with all that its
    module holds, caches of data among it."""
    spec = sys.modules["__main__"].__spec__
    return (spec.name if run.__module__ == "__main__" and spec else run.__module__), run.__name__


def _timed_there(module: str, name: str, case: Case, asked: argparse.Namespace) -> Ended:
    return _timed(getattr(importlib.import_module(module), name), case, asked)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        return None
    ray.init(ignore_reinit_error=True, log_to_driver=True)
    return ray


def _about(name: str, device: str, data: str) -> dict[str, str]:
    return {
        "command": shlex.join(["python", "-m", f"experiments.{name}", *_general(sys.argv[1:])]),
        "commit": _commit(),
        "data": data,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "version": tg.__version__,
    }


_PLACES = {
    "--data": "DATA",
    "--out": "ROWS",
    "-o": "ROWS",
    "--weights": "WEIGHTS",
    "--gpt2": "GPT2",
}


def _general(arguments: list[str]) -> list[str]:
    """The arguments without the folders of one machine."""
    return [
        _PLACES.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)
    ]


def _processor() -> str:
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def _commit() -> str:
    """The commit of the code that runs; TG_COMMIT names it where the copy has no history."""
    if "TG_COMMIT" in os.environ:
        return os.environ["TG_COMMIT"]
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _said(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in values.items()
    )


def _plain(value: Any) -> Any:
    """Numbers that JSON has: NaN and infinity become their names, tensors lists."""
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(n): _plain(v) for n, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
