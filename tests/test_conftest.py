"""The poison of conftest.py reaches the library's allocations and nobody else's."""

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
