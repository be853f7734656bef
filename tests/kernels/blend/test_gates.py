"""Random gates in every backend against long double; `python -m tests.fuzz.gates` runs many."""

import pytest
import torch

from tests.fuzz import gates
from threshold_gating import kernels, primitive


def test_random_gates_are_within_their_bound_in_every_backend():
    assert gates.check_gates(seed=0, n=60, compiled=2) == []


def test_many_gates_of_few_structures_are_within_their_bound():
    assert gates.check_gates(seed=1, n=2000) == []


def test_gates_of_every_number_of_branches_and_anchored_ones_are_drawn():
    found = [g for seed in range(8) for g, _ in gates.batches(seed, 200)]
    assert {g.K for g in found} == {1, 2, 3, 4, 5, 6, 8}
    assert any(g.a is not None and g.q is None for g in found)


@pytest.mark.parametrize("run", [primitive.blend, kernels.blend])
def test_hard_thresholds_that_crossed_are_counted_at_infinite_inputs_too(run):
    theta = [torch.tensor(at, requires_grad=True) for at in (1.0, -1.0)]
    c = [torch.tensor(w, requires_grad=True) for w in (10.0, 20.0, 30.0)]
    x = torch.tensor([float("-inf"), -2.0, 0.0, 2.0, float("inf")], requires_grad=True)
    y = run(x, float("inf"), theta, (0.0, 0.0, 0.0), c)
    assert y.tolist() == [10.0, 10.0, 20.0, 30.0, 30.0]


def test_the_kernels_of_triton_are_within_the_same_bound(step_by_step):
    step_by_step("interpret_gates.py", 4, 60, 10)
    step_by_step("interpret_gates.py", 5, 150, 1)


def test_small_gradients_of_large_branches_keep_their_digits_in_triton(step_by_step):
    step_by_step("interpret_gates.py", 3, 60, 10)


@pytest.mark.parametrize("error", [1e-4, float("nan")])
def test_the_comparison_sees_a_wrong_value_and_prints_a_program(error):
    def wrong(x, *parameters, **options):
        y = primitive.blend(x, *parameters, **options)
        return y + error * y.abs().max().detach()

    g, how = next(iter(gates.batches(0, 250)))
    found = gates.differences(g, how, {"wrong": wrong})
    assert found
    program = found[0].split("\n", 1)[1]
    exec(program, {})  # it runs as it is


CANCELLING = (1000.0, 0.001)


@pytest.mark.parametrize("s", [CANCELLING, CANCELLING[::-1]])
@pytest.mark.parametrize("run", [primitive.blend, kernels.blend])
def test_two_gates_do_not_cancel_where_one_is_nearly_shut(run, s):
    x = torch.tensor([40.0, -40.0], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    rows = [torch.tensor(w, requires_grad=True) for w in s]
    wide = [torch.tensor(w, dtype=torch.float64, requires_grad=True) for w in s]
    found = []
    for z, w in ((x, rows), (exact, wide)):
        y = run(z, 1.0, (0.0,), w, (0.0, 0.0))
        found.append([y, *torch.autograd.grad(y.sum(), [z, *w])])
    for have, want in zip(*found, strict=True):
        # 40 units of rounding in the exponent, each 6e-8
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=0)
