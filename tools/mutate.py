"""Mutation testing of the core: `python -m tools.mutate --files training/folding.py --n 20`.

A mutant is the library with one small change (`<` for `<=`, `and` for `or`, a statement less); the
tests of its file should fail. One that survives is a hole in the tests, or changes nothing. Mutants
are made in a copy of src/ that the tests import; the working tree is not touched. mutmut and
cosmic-ray were not taken: the first wraps every function, which Dynamo and Triton then trace, the
second needs a database of sessions; both change the sources in place.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import pytest

ROOT = Path(__file__).parents[1]
_FORKS = multiprocessing.get_context("forkserver")
_LONG = 5.0  # seconds: a change that only a longer test notices is one that survives
# The tests of each file of the core.
TESTS = {
    "primitive/__init__.py": ("primitive", "blend", "taxonomy", "gates"),
    "primitive/arguments.py": ("primitive", "blend", "taxonomy", "gates"),
    "primitive/branches.py": ("primitive", "blend", "taxonomy", "gates"),
    "primitive/hard.py": ("primitive", "blend", "taxonomy", "gates"),
    "primitive/soft.py": ("primitive", "blend", "taxonomy", "gates"),
    "instance.py": ("instance", "taxonomy"),
    "conversion/sites.py": ("sites", "recognise", "plan", "apply", "audit"),
    "conversion/plan.py": ("plan", "recognise", "apply", "intercept"),
    "conversion/choices.py": ("plan", "apply"),
    "conversion/apply.py": ("apply", "intercept", "plan"),
    "conversion/gate.py": ("apply", "intercept", "plan"),
    "conversion/intercept.py": ("intercept", "apply", "audit"),
    "conversion/answering.py": ("intercept", "apply", "audit"),
    "conversion/quick.py": ("quick", "intercept"),
    "conversion/site_error.py": ("certificate", "outputs", "apply"),
    "conversion/certificate.py": ("certificate", "outputs", "apply"),
    "conversion/verification.py": ("certificate", "outputs", "apply"),
    "conversion/watch.py": ("watch", "plan", "apply", "certificate", "audit"),
    "conversion/recomputing.py": ("apply", "intercept"),
    "conversion/outputs.py": ("outputs", "certificate"),
    "conversion/recognise.py": ("recognise", "plan"),
    "conversion/purity.py": ("purity", "recognise", "plan"),
    "conversion/proof.py": ("proof", "prove", "certificate"),
    "kernels/blend/tiles.py": ("blend", "pairs", "gates"),
    "kernels/blend/function.py": ("blend", "pairs", "gates"),
    "kernels/lowering.py": ("lowering",),
    "kernels/call.py": ("structure", "blend", "pairs", "gates"),
    "kernels/structure.py": ("structure", "blend", "pairs", "gates", "two_soft"),
    "training/folding.py": ("folding",),
}
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add},
    **{ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd},
}


class Mutant(NamedTuple):
    """A change of one file: where, what was there, what is there now, and the whole text."""

    line: int
    before: str
    after: str
    text: bytes

    def __str__(self) -> str:
        before, after = (" ".join(t.split())[:60] for t in (self.before, self.after))
        return f"line {self.line}: {before}  ->  {after}"


def mutants(source: bytes) -> Iterator[Mutant]:
    """Every mutant of a file. Messages, annotations and decorators are left alone."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    imported = {a.asname or a.name for n in found for a in n.names}
    for node in _nodes(tree):
        for new in _changed(node):
            if new.strip("()") in imported:  # torch.stack(w) -> torch: nobody writes that
                continue
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            text = source[:first] + new.encode() + source[last:]
            try:
                compile(text, "mutant", "exec")
            except SyntaxError:  # a part of a pattern or of a type
                continue
            yield Mutant(node.lineno, source[first:last].decode(), new, text)


def _nodes(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.Raise | ast.JoinedStr):
                if isinstance(node, ast.expr | ast.stmt):
                    yield node
                yield from _nodes(node)


def _changed(node: ast.expr | ast.stmt) -> Iterator[str]:
    """What may stand in the place of `node`."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in _SWAPS:
            yield f"({ast.unparse(ast.Compare(left, [_SWAPS[type(op)]()], [right]))})"
        case ast.BoolOp(op, values):
            yield f"({ast.unparse(ast.BoolOp(_SWAPS[type(op)](), values))})"
        case ast.BinOp(left, op, right) if type(op) in _SWAPS:
            yield f"({ast.unparse(ast.BinOp(left, _SWAPS[type(op)](), right))})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield str(value + 1)
        case ast.Call(ast.Attribute(value), args, []) if len(args) < 2:
            yield f"({ast.unparse(value)})"  # x.clone() -> x
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue():
            yield "pass"
        case ast.If(test, body, []) if not isinstance(test, ast.Name):
            lines = ast.unparse(ast.If(ast.Constant(False), body, []))
            yield lines.replace("\n", "\n" + " " * node.col_offset)


class _Quickest:
    """Orders tests by how long each took at first, and leaves out those that took too long."""

    def __init__(self, file: Path) -> None:
        self.file, self.new = file, dict[str, float]()
        self.took: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        short = [item for item in items if self.took.get(item.nodeid, 0.0) < _LONG]
        items[:] = [i for i in short if "step_by_step" not in getattr(i, "fixturenames", ())]
        items.sort(key=lambda item: self.took.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.new[report.nodeid] = self.new.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps({**self.new, **self.took}))


def _test(root: Path, folder: Path, tests: tuple[str, ...]) -> None:
    """Run the tests of `root` with the library in `folder`; the exit status says how it went."""
    os.setsid()
    os.chdir(root)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    quickest = _Quickest(folder / "took.json")
    command = [
        *("-x", "-q", "--assert=plain", "-p", "no:cacheprovider"),
        *("-m", "not slow and not gpu and not compile"),
        *(str(path) for name in tests for path in root.glob(f"tests/**/test_{name}.py")),
    ]
    sys.exit(pytest.main(command, plugins=[quickest]))


def survives(file: str, text: bytes, folder: Path, tests: tuple[str, ...], limit: float) -> bool:
    """Whether the tests pass with `text` as that file. A run that hangs is a failed one."""
    path = folder / "threshold_gating" / file
    before = path.read_bytes()
    path.write_bytes(text)
    # Each run is forked from a process that has imported what takes long, and nothing of ours.
    process = _FORKS.Process(target=_test, args=(ROOT, folder, tests))
    process.start()
    try:
        process.join(limit)
        return process.exitcode == 0
    finally:
        if process.exitcode is None:
            os.killpg(cast(int, process.pid), signal.SIGKILL)
            process.join()
        path.write_bytes(before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("--files", nargs="+", default=list(TESTS), choices=list(TESTS), metavar="F")
    parser.add_argument("--n", type=int, default=20, help="mutants of each file, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    _FORKS.set_forkserver_preload(["torch", "torch._dynamo", "timm", "scipy.optimize"])
    killed = survived = 0
    took: dict[str, float] = {}  # seconds of each test file with nothing changed
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        for file in given.files:
            source = (folder / "threshold_gating" / file).read_bytes()
            for name in TESTS[file]:
                if name not in took:
                    start = time.monotonic()
                    if not survives(file, source, folder, (name,), 1800):
                        raise SystemExit(f"test_{name}.py fails without a mutant, too")
                    took[name] = time.monotonic() - start
            limit = 60 + 2 * sum(took[name] for name in TESTS[file])
            every = list(mutants(source))
            drawn = random.Random(given.seed).sample(every, min(given.n, len(every)))
            alive = []
            for mutant in drawn:
                if survives(file, mutant.text, folder, TESTS[file], limit):
                    alive.append(mutant)
                    print(f"survived  {file} {mutant}", flush=True)
            killed, survived = killed + len(drawn) - len(alive), survived + len(alive)
            done = f"{len(drawn) - len(alive)} of {len(drawn)} killed"
            print(f"{file}: {done} ({len(every)} in all)", flush=True)
    print(f"killed {killed}, survived {survived}; seed {given.seed}")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
