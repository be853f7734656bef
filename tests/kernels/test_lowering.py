"""Torch's op for an instance: the one whose function it is, and none for what is nearly one."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from threshold_gating import TAXONOMY, TG, Activation, taxonomy
from threshold_gating.conversion import sites
from threshold_gating.kernels.lowering import lowered, native, native_call, overwritten

X = torch.cat([torch.linspace(-8, 8, 641), torch.tensor([-0.0, 1e-30, -1e-30, 40.0, -40.0])])
# (instance, torch's function)
KNOWN = {
    "relu": (TAXONOMY["relu"], F.relu),
    "silu": (TAXONOMY["silu"], F.silu),
    "sigmoid": (TAXONOMY["sigmoid"], torch.sigmoid),
    "tanh": (TAXONOMY["tanh"], torch.tanh),
    "mish": (TAXONOMY["mish"], F.mish),
    "relu6": (TAXONOMY["relu6"], F.relu6),
    "hardswish": (TAXONOMY["hardswish"], F.hardswish),
    "hardsigmoid": (TAXONOMY["hardsigmoid"], F.hardsigmoid),
    "hardsigmoid_clamp": (TAXONOMY["hardsigmoid_clamp"], F.hardsigmoid),
    "hardtanh_clamp": (TAXONOMY["hardtanh_clamp"], F.hardtanh),
    "hardtanh": (taxonomy.hardtanh(-0.5, 2.0), lambda x: F.hardtanh(x, -0.5, 2.0)),
    "leaky_relu": (taxonomy.leaky_relu(0.3), lambda x: F.leaky_relu(x, 0.3)),
    "threshold": (taxonomy.threshold(0.5, -2.0), lambda x: F.threshold(x, 0.5, -2.0)),
    "hardshrink": (taxonomy.hardshrink(0.7), lambda x: F.hardshrink(x, 0.7)),
    "hardshrink 0": (taxonomy.hardshrink(0.0), lambda x: F.hardshrink(x, 0.0)),
    "softshrink": (taxonomy.softshrink(0.7), lambda x: F.softshrink(x, 0.7)),
    "softshrink 0": (taxonomy.softshrink(0.0), lambda x: F.softshrink(x, 0.0)),
    "clamp": (sites.of_call("clamp", (-0.5, 2.0)).t, lambda x: x.clamp(-0.5, 2.0)),
    "clamp below": (sites.of_call("clamp", (-0.5, None)).t, lambda x: x.clamp(min=-0.5)),
    "clamp above": (sites.of_call("clamp", (None, 2.0)).t, lambda x: x.clamp(max=2.0)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_instance_has_the_op_of_its_function(name):
    t, function = KNOWN[name]
    op = native(t)
    assert torch.equal(op(X), function(X))
    x = X.clone()
    assert torch.equal(lowered(native_call(t), x, inplace=True), function(X))
    assert torch.equal(x, function(X))


@pytest.mark.parametrize("name", ["clamp", "clamp below", "clamp above", "hardtanh"])
def test_at_a_bound_the_gradient_is_that_of_torchs_function(name):
    t, function = KNOWN[name]
    x = torch.tensor([-1.0, -0.5, 0.0, 2.0, 3.0], requires_grad=True)
    have, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (native(t), function))
    assert torch.equal(have, want)
    assert have.tolist() == torch.autograd.grad(t(x).sum(), x)[0].tolist()


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_nearly_a_function_has_no_op(name):
    t, _ = KNOWN[name]
    near = [
        replace(t, c=(*t.c[:-1], t.c[-1] + 1e-6), anchor=None),
        replace(t, s=(*t.s[:-1], t.s[-1] + 1e-6), anchor=None),
        replace(t, q=(1e-6, *(t.q or (0.0,) * t.K)[1:]), anchor=None),
    ]
    if t.K > 1:
        near.append(replace(t, theta=(t.theta[0] - 0.125, *t.theta[1:]), anchor=None))
    if not t.hard:
        near.append(replace(t, tau=1.25))
    lowered = [n for n in near if (op := native(n)) and not torch.allclose(op(X), n(X), 1e-5, 1e-7)]
    assert lowered == []
    assert any(native(n) is None for n in near)


def test_bounds_around_another_function_are_no_hardtanh():
    for t in (
        TG(1.0, 0.0, (0, 1), (0, 0), clamp=(-1, 1)),
        TG(1.0, 0.0, (1, 1), (0, 1), clamp=(-1, 1)),
        TG(1.0, (), (1,), (0,), q=(1.0,), clamp=(-1, 1)),
    ):
        assert native(t) is None


def test_gradients_through_what_is_overwritten_lie_as_the_images_do():
    norm, last = torch.nn.BatchNorm2d(3), {"memory_format": torch.channels_last}
    x = torch.randn(2, 3, 4, 5).to(**last)
    seen = []
    y = norm(x)
    y.register_hook(seen.append)
    overwritten(y, torch.sin).square().sum().backward()
    assert seen[0].is_contiguous(**last)
    want = torch.autograd.grad(norm(x).sin().square().sum(), norm.weight)[0]
    torch.testing.assert_close(norm.weight.grad, want)


def _over(x, f=torch.sin):
    return overwritten(x * 1.0, f)


def _over_a_part(x):
    y = x * 1.0
    overwritten(y[1:3], torch.sin)
    return y


def _part(x):
    return torch.cat([x[:1], x[1:3].sin(), x[3:]])


@pytest.mark.parametrize(("f", "same"), [(_over, torch.sin), (_over_a_part, _part)])
def test_what_is_overwritten_has_gradients_of_every_order_and_kind(f, same):
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(f(x), same(x))
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, x)
    along = torch.randn_like(x)
    for transformed in (torch.func.jacrev, torch.func.jacfwd, torch.func.vmap):
        torch.testing.assert_close(transformed(f)(x[None]), transformed(same)(x[None]))
    torch.testing.assert_close(
        torch.func.jvp(f, (x,), (along,))[1], torch.func.jvp(same, (x,), (along,))[1]
    )


def test_a_leaf_that_learns_is_not_overwritten():
    x = torch.randn(3, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        overwritten(x, torch.sin)
    assert torch.equal(x.detach(), before)
    with torch.no_grad():
        assert torch.equal(overwritten(x, torch.sin), before.sin())


@pytest.mark.filterwarnings("ignore")  # that torch.jit is old
def test_what_is_overwritten_is_traced():
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), Activation("gelu_tanh", inplace=True))
    traced = torch.jit.trace(network, torch.randn(2, 3), check_trace=False)
    x = torch.randn(5, 3)
    torch.testing.assert_close(traced(x), network(x))
