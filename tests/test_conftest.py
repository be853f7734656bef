"""The poison of conftest.py reaches the library's allocations and nobody else's; no test hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def _allocate(module, expression):
    """Evaluate `expression` as a line of `module` would be."""
    return eval(expression, {"__name__": module, "torch": torch})


@pytest.mark.parametrize(
    "expression",
    [
        "torch.empty(3)",
        "torch.empty((2, 2), dtype=torch.bfloat16)",
        "torch.empty(3, requires_grad=True)",
        "torch.empty(3, dtype=torch.complex64)",
        "torch.empty_like(torch.zeros(3))",
        "torch.empty_strided((2, 2), (1, 2))",
    ],
)
def test_the_library_gets_nan(expression):
    for module in ("threshold_gating", "threshold_gating.kernels.made_up"):
        assert _allocate(module, expression).isnan().all()


def test_integers_and_other_callers_are_left_alone():
    assert _allocate("threshold_gating.made_up", "torch.empty(3, dtype=torch.int64)").shape == (3,)
    for module in ("threshold_gating_elsewhere", "torch.nn.modules.linear"):
        assert (_allocate(module, "torch.empty(3, out=torch.ones(3))") == 1).all()


def test_nothing_is_filled_under_a_trace():
    class Allocates(torch.nn.Module):
        def forward(self, x):
            return _allocate("threshold_gating.made_up", "torch.empty(3)") + x

    program = torch.export.export(Allocates(), (torch.ones(3),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert not any("fill" in target for target in targets), targets


@given(st.integers(1, 3))
def test_hypothesis_tests_are_poisoned_too(n):
    assert _allocate("threshold_gating", f"torch.empty({n})").isnan().all()


@pytest.mark.parametrize("_", range(2))
def test_every_test_starts_from_the_same_seed(_):
    expected = torch.Generator().manual_seed(0)
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=expected), rtol=0, atol=0)


HANGS = """
import ctypes

def test_that_passes():
    pass

def test_that_waits_with_the_lock():
    ctypes.PyDLL(None).pause()  # a signal would end it, were there one; no other thread runs
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "worker"])
def test_a_wait_that_holds_the_lock_fails_the_run_and_says_where(workers, tmp_path):
    (tmp_path / "test_it.py").write_text(HANGS)
    settings = Path(__file__).parents[1] / "pyproject.toml"
    command = [
        *(sys.executable, "-m", "pytest", "-c", settings, "--rootdir", tmp_path),
        *("-p", "no:cacheprovider", "-o", "faulthandler_timeout=1", *workers, tmp_path),
    ]
    here = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'test_it.py", line 8 in test_that_waits_with_the_lock' in done.stderr
    if workers:  # its place is taken by another, and the run goes to its end
        assert "1 failed, 1 passed" in done.stdout
