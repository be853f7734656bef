"""What is found in a network, what the caller may choose, and what is refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating import TAXONOMY, TG
from threshold_gating.conversion import ConversionError, apply, convert, convert_
from threshold_gating.conversion.plan import make_plan
from threshold_gating.conversion.site import Site


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.gelu = nn.ReLU(), nn.GELU()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.gelu(self.b(self.drop(self.act(self.act(self.a(x))))))
        return F.silu(x) + F.silu(x + 1) + x.softmax(-1)


X = torch.randn(2, 4)


def names(plan):
    modules = [site.name for sites in plan.modules.values() for site in sites]
    calls = [f"{owner}:{call}" for owner, found in plan.calls.items() for call in found]
    return modules, calls


def test_sites_are_named_by_module_and_call():
    modules, calls = names(make_plan(Net(), None, X))
    assert modules == ["act", "act#1", "gelu"]
    assert calls == [":silu#0", ":silu#1", ":softmax#0"]


def test_an_exact_name_beats_a_pattern_and_the_last_pattern_wins():
    wishes = {"re:.*silu.*": "gelu", "re::silu#.": "quick_gelu", ":silu#1": "mish"}
    plan = make_plan(Net(), wishes, X)
    assert plan.calls[""]["silu#0"].t == TAXONOMY["quick_gelu"]
    assert plan.calls[""]["silu#1"].t == TAXONOMY["mish"]


def test_a_number_of_branches_takes_the_row_or_a_fit():
    plan = make_plan(Net(), {"gelu": 3, ":silu#0": 2}, X)
    site = next(s[0] for s in plan.modules.values() if s[0].name == "gelu")
    assert site.t == TAXONOMY["gelu_k3"]
    assert not site.exact
    assert site.sup == pytest.approx(4.21e-3, rel=1e-2)
    assert plan.calls[""]["silu#0"].t == TAXONOMY["silu"]
    assert plan.calls[""]["silu#0"].exact


def test_none_leaves_a_site_alone():
    model = Net().eval()
    gated = convert(model, {"act": None, "gelu": None, ":softmax#0": None}, inputs=X)
    assert isinstance(gated.act, nn.ReLU)
    assert gated.tg_sites["softmax#0"] is None
    with torch.no_grad():
        torch.testing.assert_close(gated(X), model(X))
        torch.testing.assert_close(convert(model, {"act": None, "gelu": None})(X), model(X))


class Clamped(nn.Module):
    def forward(self, x):
        return x.clamp(max=float("inf"), min=float("inf")).reciprocal() + x.relu()


def test_a_call_that_no_gate_is_stays_as_it_is_and_is_told_of_unless_asked_for():
    with pytest.warns(UserWarning, match=r":clamp#0 stays as it is: no gate is clamp"):
        gated = convert(Clamped(), inputs=X)
    torch.testing.assert_close(gated(X), Clamped()(X))
    gated = convert(Clamped(), {":clamp#0": None}, inputs=X)
    torch.testing.assert_close(gated(X), Clamped()(X))


def test_an_instance_of_the_callers_own_is_judged_against_the_function():
    exact, off = TG(1, 0, (0, 1), (0, 0)), TG(1.1, 0, (0, 1), (0, 0))
    plan = make_plan(Net(), {":silu#0": exact, ":silu#1": off}, X)
    assert plan.calls[""]["silu#0"].exact
    assert not plan.calls[""]["silu#1"].exact
    x = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    assert plan.calls[""]["silu#1"].sup == pytest.approx((off(x) - F.silu(x)).abs().max().item())


class Scaled(nn.Module):
    def forward(self, x):
        return 3 * x


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def test_modules_that_only_scale_are_no_nonlinearity():
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.ReLU())
    assert names(make_plan(model, None, X))[0] == ["2"]


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class Asked(nn.Module):
    def forward(self, x):
        return torch.relu(x)


class Quantized(nn.Module):
    __module__ = "torch.ao.nn.quantized.modules"


MESSAGES = [
    (lambda: convert(nn.Linear(4, 4), inputs=X), "nothing to convert in Linear: it ran without a nonlinearity."),
    (lambda: convert(nn.Sequential(nn.ReLU()), {"0": None}, inputs=X), "nothing to convert in Sequential: every site was given None; leave at least one site to the gates."),
    (lambda: convert(Asked(), {":relu#0": None}, inputs=X), "nothing to convert in Asked: every site was given None; leave at least one site to the gates."),
    (lambda: convert(Net(), {"nothing": "relu"}, inputs=X), "sites: 'nothing' matches no site of this network; give the name of one, as ':softmax#0', 'act', 'gelu', 'act#1', ':silu#1'; `tg.audit(model, inputs)` lists them."),
    (lambda: convert(Net(), {"re:layer.*": None}), "sites: 're:layer.*' matches no site of this network; give the name of one, as 'act', 'gelu'; `tg.audit(model, inputs)` lists them."),
    (lambda: convert(Net(), {"act": 1}, inputs=X), "act: sites takes a TG, a key of TAXONOMY, a number of branches K >= 2 or None; got 1."),
    (lambda: convert(Net(), {"act": 2.5}, inputs=X), "act: sites takes a TG, a key of TAXONOMY, a number of branches K >= 2 or None; got 2.5."),
    (lambda: convert(Net(), {":softmax#0": "relu"}, inputs=X), ":softmax#0 is not one element-wise function, so no instance can be chosen for it; give None to leave it alone."),
    (lambda: convert(Net(), inputs=torch.randn(2, 5)), "Net does not run on the inputs given (RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)); give a tensor, a tuple of arguments or a dict of keyword arguments that it takes."),
    (lambda: convert(Net(), inputs={"y": X}), "Net does not run on the inputs given (TypeError: Net.forward() got an unexpected keyword argument 'y'); give a tensor, a tuple of arguments or a dict of keyword arguments that it takes."),
    (lambda: convert_(nn.Sequential(Quantized())), "0 is quantised (Quantized); convert the network before it is quantised."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(call, message):
    with pytest.raises(ConversionError) as caught:
        call()
    assert str(caught.value) == message


def test_a_scripted_module_is_refused():
    with pytest.warns(DeprecationWarning, match="deprecated"):
        model = scripted()
    with pytest.raises(ConversionError) as caught:
        convert_(model)
    assert str(caught.value) == (
        "the network is a scripted module, whose inside cannot be changed; "
        "convert the network it was scripted from."
    )


@pytest.mark.parametrize("sites", [None, {"2": None}])
def test_a_function_without_instance_stays_is_named_and_the_rest_converts(sites):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Sine())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gated = tg.convert(model, sites, inputs=X)
    assert [str(w.message) for w in said] == [
        "convert: 2 (Sine) stays as it is: no gate computes it "
        "(fit: f has no asymptote at -inf: oscillating)."
    ] * (sites is None)
    assert isinstance(gated[1], tg.Activation)
    assert isinstance(gated[2], Sine)
    assert torch.equal(gated(X), model(X))


def test_a_choice_for_a_module_that_has_to_stay_is_refused():
    with pytest.raises(ConversionError, match="has to stay as it is: no gate computes it"):
        tg.convert(nn.Sequential(nn.ReLU(), Sine()), {"1": "relu"}, inputs=X)


class Noisy(nn.Module):
    def forward(self, x):
        return F.dropout(F.relu(x), 0.5, self.training)


class Hidden(nn.Module):
    """Without a call that could be answered instead, in training another function."""

    def forward(self, x):
        y = torch.where(x > 0, x, 0.1 * x)
        return y * (2 if self.training else 1)


def test_what_trains_differently_keeps_that():
    torch.manual_seed(0)
    x = torch.rand(64, 4) + 0.5
    gated = tg.convert(nn.Sequential(Noisy()), inputs=x)
    assert [site.name for site in tg.audit(gated, x).sites] == ["0:relu#0"]
    gated.train()
    assert 0.3 < (gated(x) == 0).float().mean() < 0.7
    with pytest.warns(
        UserWarning,
        match="0 .Hidden. stays as it is: it depends on the shape, the type or the mode",
    ):
        gated = tg.convert(nn.Sequential(Hidden(), nn.ReLU()), inputs=x)
    assert torch.equal(gated.train()(x), 2 * x)


def test_a_gradient_at_a_kink_that_no_gate_has_is_named():
    class Half(nn.Module):
        def forward(self, x):
            return (x + x.abs()) / 2

    with pytest.warns(UserWarning, match="0 .Half.: the gradient at x = 0 is that of one side"):
        gated = tg.convert(nn.Sequential(Half()), inputs=X)
    assert isinstance(gated[0], tg.Activation)


def test_random_slopes_are_drawn_in_training_and_gates_in_evaluation():
    x = torch.full((1000,), -1.0)
    gated = tg.convert(nn.Sequential(nn.RReLU(0.1, 0.9)), inputs=x)
    with tg.kernels.use("reference"):
        torch.testing.assert_close(gated.eval()(x), torch.full((1000,), -0.5))
        assert gated.train()(x).std() > 0.2


def test_a_network_that_fails_half_way_is_left_as_it_was(monkeypatch):

    model = Net()
    before = [type(m) for m in model.modules()]
    monkeypatch.setattr(apply, "intercept_calls", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_(model, inputs=X)
    assert [type(m) for m in model.modules()] == before


def test_a_wish_for_a_module_that_its_calls_answer_is_refused_with_their_names():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = Bounds()

        def forward(self, x):
            return self.f(x)

    class Bounds:
        def __call__(self, x):
            return x.clamp(-0.5, 0.5)

    net = nn.Sequential(nn.Linear(4, 4), Clamped(), nn.Hardtanh())
    name, _ = [site.name for site in tg.audit(tg.convert(net, inputs=X), X).sites]
    assert name == "1:clamp#0"  # what else an object holds is not known, so its call is answered
    with pytest.raises(ConversionError, match=f"'1' matches no site .* as '{name}'"):
        convert(net, {"1": "tanh"}, inputs=X, tol=float("inf"))
    met = convert(net, {name: "tanh"}, inputs=X, tol=float("inf"))
    torch.testing.assert_close(met(X), net[2](torch.tanh(net[0](X))))
    torch.testing.assert_close(convert(net, {"1": None}, inputs=X)(X), net(X), rtol=0, atol=0)


def test_torchs_op_and_the_line_of_code_are_no_part_of_what_a_site_is():
    here, there = Site("a", "relu", op=F.relu, line="a.py:1"), Site("a", "relu", line="b.py:2")
    assert here == there
    assert repr(here) == repr(there)
