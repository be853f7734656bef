"""A module that is more than one function of its input keeps its forward."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.conversion.purity import obstacle

TEMPERATURE = [1.0]
SCALE = 2.0
annealed = 1.0


def module(forward, **attributes):
    """A module with this forward."""
    made = type("Act", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Called(nn.ReLU):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-1, 1) * (ctx.saved_tensors[0] > 0)


def stores(self, x):
    self.penalty = torch.relu(x).sum()
    return torch.relu(x)


def hooked(self, x):
    y = torch.tanh(x)
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-1, 1))
    return y


def half_wide(self, x):
    return torch.sigmoid(x.float()) if x.dtype == torch.float16 else torch.sigmoid(x)


def overwrites_and_copies(self, x):
    x.relu_()
    return x * 1


IMPURE = {
    "called in its own way": Called(),
    "more than one input": module(lambda self, x, scale=1.0: torch.tanh(x) * scale),
    "settings": module(lambda self, x: F.leaky_relu(x, self.d["s"]), d={"s": 0.1}),
    "a tensor": module(lambda self, x: torch.tanh(x) * self.t, t=torch.tensor(1.0)),
    "a global list": module(lambda self, x: torch.tanh(x * TEMPERATURE[0]) * annealed),
    "keeps something": module(stores, penalty=0.0),
    "in place in evaluation": module(lambda self, x: F.relu(x, inplace=not self.training)),
    "in place without gradients": module(
        lambda self, x: F.relu(x) if x.requires_grad else F.relu_(x)
    ),
    "overwrites and copies": module(overwrites_and_copies),
    "another function of images": module(lambda self, x: F.relu(x) * (2 if x.dim() == 3 else 1)),
    "another function of many": module(lambda self, x: F.relu(x) * (2 if x.numel() > 5000 else 1)),
    "another function of halves": module(
        lambda self, x: F.relu(x) * (2 if x.dtype == torch.float16 else 1)
    ),
    "a little more in bfloat16": module(  # 24 ulp of values near 1; 16 would be rounding
        lambda self, x: F.relu(x) + (24 * 2**-7 if x.dtype == torch.bfloat16 else 0)
    ),
    "another type of halves": module(half_wide),
    "gradients": module(lambda self, x: F.relu(x) + float(torch.is_grad_enabled())),
    "autocast": module(lambda self, x: F.relu(x) + float(torch.is_autocast_enabled("cpu"))),
    "a clipped gradient": module(lambda self, x: Clipped.apply(x)),
    "a hook": module(hooked),
}
PURE = {
    "torch's": nn.Hardshrink(0.1),
    "a function of its own": module(lambda self, x: x * torch.sigmoid(1.702 * x)),
    "numbers of its own": module(lambda self, x: F.leaky_relu(x, self.slope), slope=0.3),
    "a constant": module(lambda self, x: SCALE * torch.tanh(x)),
    "a function that it holds": module(lambda self, x: self.act(x), act=F.gelu),
    "a partial": module(lambda self, x: self.act(x), act=functools.partial(F.elu, alpha=0.5)),
    "in place": module(lambda self, x: F.relu_(x)),
}


@pytest.mark.parametrize("name", IMPURE)
def test_a_module_that_does_more_is_seen(name):
    assert obstacle(IMPURE[name])


@pytest.mark.parametrize("name", PURE)
def test_a_function_is_seen_to_be_one(name):
    assert obstacle(PURE[name]) == ""


def test_what_a_module_stores_takes_arguments_and_settings_keep_working():
    x = torch.randn(4, 8)
    net = nn.Sequential(nn.Linear(8, 8), IMPURE["keeps something"], IMPURE["settings"])
    gated = tg.convert(net, inputs=x)
    names = [site.name for site in tg.audit(gated, x).sites]
    assert names == ["1:relu#0", "1:relu#1", "2:leaky_relu#0"]
    for each in (net, gated):
        each(x)
    assert torch.equal(net[1].penalty, gated[1].penalty)
    gated[2].d["s"] = 0.5
    with pytest.raises(tg.conversion.ConversionError, match="is called with"):
        gated(x)


def test_under_another_default_device_nothing_becomes_in_place():
    net, x = nn.Sequential(nn.SiLU()), torch.randn(5)
    with torch.device("meta"):
        gated = tg.convert(net)
    before = x.clone()
    gated(x)
    assert torch.equal(x, before)
