"""What every test gets: a fixed seed, and NaN in whatever the library leaves unwritten."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Triton decides when it is imported whether it interprets kernels. Tests of attention need that on a
# CPU, and whatever is collected before them may import it.
if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ModuleNotFoundError):
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

# Whether somebody has built what makes calls in C++ must not decide what is tested: tests of it load
# it themselves.
os.environ["TG_HOST"] = "python"

collect_ignore = ["programs"]  # run by tests, in processes of their own

settings.register_profile("loaded machine", deadline=None)
settings.load_profile("loaded machine")

# `with torch.device(...)` remembers, at its first use, which functions allocate: let it see torch's.
with torch.device("cpu"):
    torch.empty(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share what a module makes once run in one worker: two would make it twice."""
    for item in items:
        info = getattr(item, "_fixtureinfo", None)  # an example in a docstring may have none
        made = info.name2fixturedefs.values() if info else ()
        if any(each.scope == "module" for definitions in made for each in definitions):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every test, whichever ran before and in whichever worker."""
    torch.manual_seed(0)


def _poisoned(allocate):
    """`allocate`, with NaN in the new tensor when the library itself asked for it."""

    def allocate_and_fill(*args, **kwargs):
        out = allocate(*args, **kwargs)
        if torch.compiler.is_compiling():  # a traced graph should hold the library's own steps
            return out
        caller = sys._getframe(1).f_globals.get("__name__") or ""
        if caller.partition(".")[0] == "threshold_gating" and (
            out.is_floating_point() or out.is_complex()
        ):
            with torch.no_grad():
                out.fill_(float("nan"))
        return out

    return allocate_and_fill


@pytest.fixture(autouse=True)
def poison(monkeypatch, request):
    """An output that is allocated but not written is NaN, so it cannot pass a test by luck.

    Tests marked `compile` see torch as it is: Dynamo looks these functions up by name.
    """
    if request.node.get_closest_marker("compile") is None:
        for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
            monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _process(**more):
    """A function that runs one of `programs`, which ends by printing ok, with this environment."""
    pytest.importorskip("triton")
    here = Path(__file__).parent
    rooms = (p for p in (here / "kernels").iterdir() if p.is_dir())
    folders = [here.parent, *rooms, here / "benchmarks", os.environ.get("PYTHONPATH", "")]

    def run(program, *words):
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders)), **more}
        command = [sys.executable, here / "programs" / program, *map(str, words)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.stdout == "ok\n", done.stderr[-3000:]

    return run


@pytest.fixture
def step_by_step():
    """Run a program in a process where Triton interprets its kernels.

    Triton asks for that when it is imported, so it cannot be this process.
    """
    return _process(TRITON_INTERPRET="1")


@pytest.fixture
def with_triton():
    """Run a program in a process where Triton is as it comes, whatever it is in this one."""
    return _process()


@pytest.fixture
def tg(capsys):
    """Run a command line; gives (exit code, stdout, stderr)."""
    from threshold_gating.cli import main

    def run(*words):
        try:
            code = main(list(words))
        except SystemExit as end:  # how argparse leaves
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def pdk(monkeypatch):
    """Transistor models and ngspice; tests of them are skipped where one of the two is not there."""
    if shutil.which("ngspice") is None:
        pytest.skip("ngspice is not installed")
    if not os.environ.get("TG_PDK"):
        beside = Path(__file__).parents[2] / "shared" / "data" / "hardware"
        if not beside.is_dir():
            pytest.skip("no transistor models: TG_PDK is not set")
        monkeypatch.setenv("TG_PDK", str(beside))


@pytest.fixture(scope="session")
def programs():
    """The folder of the programs that tests run elsewhere than in their own process."""
    return Path(__file__).parent / "programs"


@pytest.fixture
def folder(tmp_path, monkeypatch, request, programs):
    """The folder that a command runs in, with the module's NETWORK of tests/programs as net.py."""
    shutil.copy(programs / request.module.NETWORK, tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path
