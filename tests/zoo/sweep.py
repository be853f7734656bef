"""Sweep the zoo: build, convert, audit, verify and break every network; resumable.

What is done is kept in results/zoo.jsonl and skipped, until the library or the zoo changes.
"""

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

FAILURES = Path(__file__).parent / "failures.json"
ROUND = 50  # networks for one set of workers


def main():
    given = _arguments()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")
    from . import networks

    if given.choose:
        return networks.choose_timm()
    wanted = _wanted(networks.names(), given.only)
    # What was found with other code, or by breaking fewer sites, is not done.
    basis = {"source": _source(), "limit": given.limit}
    before = {} if given.again else _read(given.results)
    done = {n: r for n, r in before.items() if basis.items() <= r.items()}
    todo = [n for n in wanted if n not in done]
    print(f"{len(wanted)} networks, {len(wanted) - len(todo)} done before ({given.results})")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tasks = [(name, given.limit, given.timeout) for name in todo]
    for k, result in enumerate(_results(tasks, given.jobs), 1):
        result |= basis
        with given.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        done[result["name"]] = result
        print(f"[{k}/{len(todo)}] {_line(result)}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    return _summary([done[name] for name in wanted])


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=["*"], help='names or patterns: vit "timm:r*"')
    parser.add_argument("--limit", type=int, default=8, help="sites broken in each network")
    parser.add_argument("--thorough", action="store_true", help="break every site")
    parser.add_argument("--again", action="store_true", help="do what was done before, too")
    parser.add_argument("--choose", action="store_true", help="only choose timm's members anew")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one network")
    parser.add_argument("--results", type=Path, default=Path("results/zoo.jsonl"))
    given = parser.parse_args()
    given.limit = None if given.thorough else given.limit
    return given


def _wanted(names, patterns):
    """The names that fit a pattern, with or without their source: "vit" is "hf:vit"."""
    fits = {
        p: [n for n in names if fnmatch.fnmatch(n if ":" in p else n.partition(":")[2], p)]
        for p in patterns
    }
    if lost := [p for p, found in fits.items() if not found]:
        raise SystemExit(f"python -m tests.zoo: no network is called {', '.join(lost)}")
    return [n for n in names if any(n in found for found in fits.values())]


def _results(tasks, jobs):
    """The results as they come; workers are made anew now and then, for their memory."""
    spawn = multiprocessing.get_context("spawn")
    for at in range(0, len(tasks), ROUND):
        with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            futures = [pool.submit(_one, task) for task in tasks[at : at + ROUND]]
            for future in as_completed(futures):
                yield future.result()


def _source():
    """A hash of the library and of the zoo, but for this file."""
    here = Path(__file__).parent
    files = [*here.parents[1].glob("src/**/*.py"), *here.glob("*.py"), here / "timm.json"]
    read = (f.read_bytes() for f in sorted(files) if f.name != Path(__file__).name)
    return hashlib.sha256(b"".join(read)).hexdigest()[:12]


def _read(results):
    lines = results.read_text().splitlines() if results.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def _one(task):
    """Build and check one network; an error of whatever kind is its result."""
    name, limit, timeout = task
    import torch

    from .check import check
    from .networks import build

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(timeout)
    start = time.perf_counter()
    result = {"name": name}
    try:
        model, inputs = build(name)
        result["built"] = round(time.perf_counter() - start, 2)
        result |= check(model, inputs, limit)
    except Exception as error:
        result["failed"] = [f"{type(error).__name__}: {error}"]
    finally:
        signal.alarm(0)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**result, "total": round(time.perf_counter() - start, 2), "gib": round(memory, 2)}


def _too_long(*_):
    raise TimeoutError("took too long")


def _line(result):
    if result["failed"]:
        more = f" (and {len(result['failed']) - 1} more)" if len(result["failed"]) > 1 else ""
        said = f"FAILED  {result['failed'][0]}{more}"
    else:
        said = f"{result['sites']} sites, off by {result['error']:.1e}"
        said += f", {len(result['unseen'])} of {result['broken']} broken unseen"
    return f"{result['name']:32} {result['total']:6.1f} s  {said}"


def _summary(results):
    failed = {r["name"]: r["failed"] for r in results if r["failed"]}
    good = [r for r in results if not r["failed"]]
    sites, broken = (sum(r[key] for r in good) for key in ("sites", "broken"))
    unseen = {r["name"]: r["unseen"] for r in good if r["unseen"]}
    print(f"\n{len(good)} of {len(results)} networks pass, with {sites} sites.")
    print(f"{broken} sites were broken, {sum(map(len, unseen.values()))} of them unseen.")
    for name, these in unseen.items():
        print(f"  unseen in {name}: {', '.join(these)}")
    known = json.loads(FAILURES.read_text())
    for name, reasons in failed.items():
        print(f"FAILED {name}: {known.get(name, 'a new failure')}")
        for reason in reasons[:6]:
            print(f"    {reason}")
    repaired = [r["name"] for r in good if r["name"] in known]
    for name in repaired:
        print(f"{name} passes; take it out of {FAILURES.name}.")
    return 1 if repaired or any(name not in known for name in failed) else 0
