"""Modules that have become gates: what may be done with their results is what it was before."""

import copy

import pytest
import torch
from torch import nn

from threshold_gating import kernels
from threshold_gating.conversion import convert
from threshold_gating.conversion.gate import Gate, PerCall


class Mask(nn.Module):
    def forward(self, x):
        return x * (x > 0)


class MaskOver(nn.Module):
    def forward(self, x):
        return x.mul_(x > 0)


class SigmoidByExp(nn.Module):
    def forward(self, x):
        return 1 / (1 + torch.exp(-x))


class Overwriting(nn.Module):
    """Writes over the result of an activation, whose backward may want it."""

    def __init__(self, act, calls=1):
        super().__init__()
        self.act, self.calls = act, calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.act(x).mul_(2.0)
        return x


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)

    def forward(self, x):
        return self.act(self.second(self.act(self.first(x))))


X = torch.linspace(-2, 2, 25)


def gradient(net):
    x = X.clone().requires_grad_()
    y = net(x * 1.0)
    return y.detach(), torch.autograd.grad((y * X.cos()).sum(), x)[0]


def same(net, gated):
    for want, have in zip(gradient(net), gradient(gated), strict=True):
        torch.testing.assert_close(have, want)  # a sigmoid by exp rounds a few times more


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
@pytest.mark.parametrize("act", [Mask(), MaskOver(), SigmoidByExp(), nn.Threshold(0, 0)])
def test_a_result_that_could_be_overwritten_still_can_be(act, backend):
    net = Overwriting(act).eval()
    gated = convert(net, inputs=X)
    assert isinstance(gated.act, Gate)
    with kernels.use(backend):
        same(net, gated)
        same(net, copy.deepcopy(gated))


@pytest.mark.parametrize("act", [Mask(), MaskOver(), nn.Threshold(0, 0)])
def test_so_it_can_where_each_call_has_an_instance(act):
    net = Overwriting(act, calls=2).eval()
    gated = convert(net, {"act#1": "leaky_relu"}, inputs=X, tol=float("inf"))
    assert isinstance(gated.act, PerCall)
    positive = X > 0
    value, slope = (t[positive] for t in gradient(gated))
    torch.testing.assert_close(value, 4 * X[positive])
    torch.testing.assert_close(slope, 4 * X[positive].cos())


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at x * 1
def test_so_it_can_in_a_graph():
    net = Overwriting(Mask()).eval()
    same(net, torch.compile(convert(net, inputs=X), backend="aot_eager"))


@pytest.mark.compile
def test_an_activation_used_twice_learns_in_a_graph_without_a_warning():
    x = torch.randn(3, 5)
    gated = convert(Twice(), inputs=x, train=("theta", "s"), share="channel")
    assert isinstance(gated.act, PerCall)
    torch.compile(gated, backend="aot_eager", fullgraph=True)(x).sum().backward()
    found = {name: p.grad for name, p in gated.named_parameters()}
    gated.zero_grad()
    gated(x).sum().backward()
    for name, p in gated.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_a_result_that_torch_keeps_is_not_copied():
    gated = convert(nn.Sequential(nn.ReLU()).eval(), inputs=X)
    y = gated(X.clone().requires_grad_() * 1.0)
    assert y.grad_fn.name() == "ReluBackward0"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(convert(Overwriting(nn.ReLU()).eval(), inputs=X))


def test_a_result_that_has_no_gradient_is_not_copied():
    gated = convert(nn.Sequential(Mask()).eval(), inputs=X)
    with torch.profiler.profile() as seen, torch.no_grad():
        gated(X)
    assert "aten::clone" not in {event.name for event in seen.events()}
