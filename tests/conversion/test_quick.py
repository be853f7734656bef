"""Calls that are answered in few steps: the same answers, and the same refusals."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.conversion import ConversionError, answering, quick, sites


class Calling(nn.Module):
    """Calls a function, as often as it is told."""

    def __init__(self, f):
        super().__init__()
        self.f, self.times = f, 1

    def forward(self, x):
        for _ in range(self.times):
            y = self.f(x)
        return y


@pytest.fixture
def long_way(monkeypatch):
    """The kinds of calls that were not answered in few steps."""
    kinds, read = [], answering.sites.read

    def spy(*given):
        kinds.append(read(*given))
        return kinds[-1]

    monkeypatch.setattr(answering.sites, "read", spy)
    return kinds


FUNCTIONS = {
    "clamp": lambda x: torch.clamp(x, -1.0, 1.0),
    "by name": lambda x: x.clamp(min=-0.5, max=0.5),
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax": lambda x: F.softmax(x, dim=-1),
    "glu": lambda x: F.glu(x, -1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "relu, in place": lambda x: F.relu(x * 1.0, inplace=True),
    "clamp, in place": lambda x: (x * 1.0).clamp_(max=0.5),
    "elu, in place": lambda x: F.elu(x * 1.0, 1.0, True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_is_converted_is_answered_in_few_steps(name, backend, long_way):
    x = torch.randn(2, 3, 8, 4)
    net, f = tg.convert(Calling(FUNCTIONS[name]), inputs=x), FUNCTIONS[name]
    long_way.clear()
    with tg.kernels.use(backend):
        y = net(x)
    assert not long_way
    bound = 2.0e-2 if name == "gelu" else 1e-6  # gelu's instance is an approximation
    torch.testing.assert_close(y, f(x), rtol=0, atol=bound)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_call_in_place_writes_over_its_input_and_over_nothing_else(backend, learns):
    given = []

    def f(x):
        given.append(x * 1.0)
        return F.hardtanh(given[-1], -0.5, 0.5, True)

    x = torch.randn(8, 4).requires_grad_(learns)
    net = tg.convert(Calling(f), inputs=x)
    with tg.kernels.use(backend):
        y, before = net(x), x.detach().clone()
    assert y.data_ptr() == given[-1].data_ptr()
    assert torch.equal(x, before)
    assert torch.equal(y, before.clamp(-0.5, 0.5))
    if learns:
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, (before.abs() < 0.5).to(dx.dtype))
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            tg.convert(Calling(F.relu_), inputs=torch.randn(3))(x)


def test_a_call_in_place_is_made_by_torch_only_where_it_is_its_own_instance(monkeypatch):
    x, own = torch.randn(64), Calling(lambda x: torch.relu_(x * 1.0))
    net = tg.convert(own, inputs=x)
    other = tg.convert(own, sites={":relu#0": "silu"}, inputs=x, strict=False)
    made, overwritten = [], tg.kernels.overwritten
    monkeypatch.setattr(tg.kernels, "overwritten", lambda x, f: made.append(x) or overwritten(x, f))
    assert torch.equal(net(x), torch.relu(x))
    assert not made  # a pass over memory less, with gradients three
    assert torch.equal(other(x), F.silu(x))
    assert len(made) == 1


@pytest.mark.parametrize("name", ["clamp", "softmax"])
def test_the_backend_is_asked_in_every_call(name, monkeypatch):
    x, asked = torch.randn(4, 4), []
    net = tg.convert(Calling(FUNCTIONS[name]), inputs=x)

    def gates(*given, **named):
        asked.append(given)
        return torch.zeros(4, 4)

    quick._ROWS.pop(net)  # `convert` has run it
    monkeypatch.setattr(tg.kernels, "evaluate", gates)
    monkeypatch.setitem(sites.WHOLE, "softmax", gates)
    for backend, by_gates in (("auto", 0), ("reference", 1), ("native", 0), ("reference", 1)):
        with tg.kernels.use(backend):
            net(x)
        assert len(asked) == by_gates
        asked.clear()


def test_other_parameters_are_refused_after_calls_that_were_answered():
    net, x = tg.convert(Calling(FUNCTIONS["clamp"]), inputs=torch.randn(9)), torch.randn(9)
    net(x)
    net.f = lambda x: torch.clamp(x, -1.0, 2.0)
    with pytest.raises(ConversionError, match=r"was converted with \(-1.0, 1.0\) and is called"):
        net(x)
    net.f = FUNCTIONS["clamp"]
    net.times = 2
    with pytest.raises(ConversionError, match="clamp#1 was not made when the network was"):
        net(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_plan_that_has_changed_is_answered_by_what_it_has(in_place):
    net, x = tg.convert(Calling(F.relu), inputs=torch.randn(9)), torch.randn(9)
    net(x)
    plan = vars(net)["tg_sites"]
    if not in_place:
        plan = vars(net)["tg_sites"] = dict(plan)
    ((name, site),) = plan.items()
    other = tg.TAXONOMY["silu"]
    plan[name] = type(site)(site.name, site.kind, other, False, 0.3, site.parameters)
    torch.testing.assert_close(net(x), F.silu(x), rtol=0, atol=1e-6)
    plan["relu#1"] = plan.pop(name)
    with pytest.raises(ConversionError, match="the call relu#0 was not made"):
        net(x)


def test_what_is_kept_of_calls_does_not_keep_their_network():
    net = tg.convert(Calling(F.relu), inputs=torch.randn(9))
    net(torch.randn(9))
    gone = weakref.ref(net)
    assert net in quick._ROWS
    del net
    gc.collect()
    assert gone() is None


def test_arguments_that_are_new_in_every_call_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(quick, "_MOST", 8)
    rows = {}
    for k in range(30):
        quick.new_row(rows, {}, torch.clamp, (0.0, float(k)), {}, lambda kind: False)
    assert len(rows) <= 8


@pytest.mark.parametrize("rest", [(float("nan"), 1.0), (torch.zeros(3), None)])
def test_parameters_that_equal_nothing_take_the_long_way(rest):
    assert quick.new_row({}, {}, torch.clamp, rest, {}, lambda kind: False) is None


def test_a_result_is_written_where_the_call_says():
    out = torch.empty(0)
    net = tg.convert(Calling(lambda x: torch.softmax(x, -1)), inputs=torch.randn(3, 4))
    net.f = lambda x: torch.softmax(x, -1, out=out)
    x = torch.randn(3, 4)
    assert net(x) is out
    torch.testing.assert_close(out, x.softmax(-1))


def test_a_mask_of_another_class_does_not_answer_attention():
    class Mask(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("the class of the mask was asked")

    class Attention(nn.Module):
        def forward(self, x, mask):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, mask = torch.randn(1, 2, 3, 4), torch.zeros(3, 3)
    net = tg.convert(Attention(), inputs=(x, mask))
    with torch._C.DisableTorchFunction():
        foreign = mask.as_subclass(Mask)
    torch.testing.assert_close(net(x, foreign), net(x, mask))
