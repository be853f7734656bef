"""`python -m benchmarks`: check every kernel against float64, then time it, then compare.

Nothing is timed that disagrees with the reference, and nothing that has no pair in the table of
kernels. A limit that is missed is printed as MISSED, and so is a row that fails. Exit status: 0, 1
if a kernel is wrong, 2 if there is no such section or row, or a file cannot be written.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.sections import run

STDOUT = Path("-")


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_first_line())
    parser.add_argument("--smoke", action="store_true", help="small sizes on the CPU, in seconds")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="these sections only")
    parser.add_argument(
        "--warm", action="store_true", help="compile what the sections need, and time nothing"
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        metavar="N",
        default=0,
        help="first check and compile the sections in processes of their own, N at a time",
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="keep what the file of --json has of the same code on such a machine, time the rest",
    )
    parser.add_argument("--match", metavar="TEXT", default="", help="rows with this in their name")
    parser.add_argument(
        "--checked", metavar="FILE", type=_file, help="what was found right: read, and added to"
    )
    parser.add_argument("--json", metavar="FILE|-", type=_file, help="write the rows there as JSON")
    args = parser.parse_args(argv)
    if args.go_on and args.json in (None, STDOUT):
        parser.error("--go-on goes with --json FILE, whose rows it keeps")
    options: dict[str, Any] = {"warm": args.warm, "match": args.match, "checked": args.checked}
    options |= {"jobs": args.jobs, "go_on": args.go_on}
    if args.json != STDOUT:
        return run(args.smoke, args.json, args.only, **options)
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        path = Path(folder) / "bench.json"
        code = run(args.smoke, path, args.only, **options)
        found = path.read_text() if path.exists() else ""  # else there was nothing to do
    print(found, end="")
    return code


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes, such as 4")
    return int(text)


def _file(text: str) -> Path:
    """A file that can be written, which is to be known before anything is timed."""
    path = Path(text)
    folder = path.absolute().parent
    can = folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)
    if path != STDOUT and (path.is_dir() or not can):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; give a file in a folder that exists"
        )
    return path


def _first_line() -> str:
    return (__doc__ or "").splitlines()[0].partition(": ")[2]


if __name__ == "__main__":
    raise SystemExit(main())
