"""What is compiled beside our modules is the same function."""

import pytest
import torch
from small import SMALL

from benchmarks import elementwise
from threshold_gating import TAXONOMY, kernels


def test_the_keys_have_the_branches_that_rows_name_and_one_tau():
    for K, key in elementwise.KEYS.items():
        assert TAXONOMY[key].K == K
        assert isinstance(TAXONOMY[key].tau, float)


@pytest.mark.parametrize("case", [case for _, case, _ in elementwise._cases(SMALL.elementwise)])
def test_what_is_compiled_computes_what_the_module_does(case):
    act, x = case.activation("cpu"), case.input("cpu").requires_grad_()
    with torch.no_grad():
        for parameter in act.parameters():
            parameter.add_(torch.rand_like(parameter).mul(0.3))
    with kernels.use("reference"):
        want = act(x)
    have = elementwise.plain(act, case.group())(x)
    assert torch.equal(have, want)
    of = [x, *act.parameters()]
    pairs = zip(*(torch.autograd.grad(y.sum(), of) for y in (have, want)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_is_compiled_calls_no_kernel_of_ours(monkeypatch):
    monkeypatch.setattr(kernels, "blend", None)
    case = next(case for _, case, _ in elementwise._cases(SMALL.elementwise))
    elementwise.plain(case.activation("cpu"), case.group())(case.input("cpu"))
    with pytest.raises(TypeError):
        case.activation("cpu")(case.input("cpu"))
