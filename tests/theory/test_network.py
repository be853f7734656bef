"""What a live model is told of its activations, against measured gradients and its other form."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating import Activation, audit, convert
from threshold_gating.theory.meanfield import moments
from threshold_gating.theory.network import layer_report


def _deep_tanh(width, depth, sigma_w):
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(linear.weight, std=sigma_w / math.sqrt(width))
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers)


def test_chi_of_a_layer_is_the_growth_of_its_squared_gradient():
    """Width 800, 64 inputs: a ratio of squared norms scatters by about sqrt(2 / 800), 5 %."""
    model = _deep_tanh(800, 6, 1.4)
    x = torch.randn(64, 800)
    report = layer_report(model, x)
    assert [r.name for r in report] == ["1", "3", "5", "7", "9", "11"]
    states, z = [], x
    for layer in model:
        z = layer(z)
        if isinstance(layer, nn.Linear):
            z.retain_grad()
            states.append(z)
    (z * torch.randn_like(z)).sum().backward()
    for k in range(5):
        growth = (states[k].grad.pow(2).sum() / states[k + 1].grad.pow(2).sum()).item()
        assert report[k].sigma_w == pytest.approx(1.4, rel=0.01)
        assert report[k].chi == pytest.approx(growth, rel=0.12)
    assert report[5].chi is None  # nothing reads the last one


def test_layer_report_measures_what_reaches_a_site():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(1000), nn.Linear(1000, 7))
    x = 0.5 + 2 * torch.randn(200, 1000)
    (site,) = layer_report(model, x.clone())
    assert (site.mean, site.variance) == pytest.approx(
        (x.mean().item(), x.var(correction=0).item()), rel=1e-5
    )
    above = 0.5 * math.erfc(-0.25 / math.sqrt(2))  # P(x > 0) for N(1/2, 4)
    assert site.gain == pytest.approx(above, rel=5e-3)  # the sampled mean is not 1/2
    assert site.measured_gain == pytest.approx(above, rel=1e-2)  # 1e5 values
    assert site.critical == pytest.approx(site.gain**-0.5)
    assert (site.sigma_w, site.chi, site.beta) == (None, None, 0)  # a norm stands between


def test_layer_report_takes_activations_with_parameters_per_channel():
    learned = Activation("tanh", share="channel", channels=3, train=("tau",))
    with torch.no_grad():
        learned.rho.copy_(torch.tensor([-0.5, 0.0, 0.5]))
    x = torch.randn(5000, 3)
    (site,) = layer_report(nn.Sequential(learned), x)
    q = x.var(correction=0).item()
    instances = [moments(t, q, x.mean().item()).slope for t in learned.instances()]
    assert site.gain == pytest.approx(sum(instances) / 3, rel=1e-6)
    (prelu,) = layer_report(nn.Sequential(nn.PReLU(3)), x)
    assert prelu.gain == pytest.approx((1 + 0.25**2) / 2, rel=0.02)


@pytest.mark.parametrize(
    "slopes",
    [
        torch.eye(64)[0],  # one of 64 channels differs
        torch.linspace(0, 1, 33),
        torch.linspace(0, 1, 63),
        torch.linspace(0, 1, 1000),
    ],
)
def test_figures_of_a_site_are_means_over_all_of_its_channels(slopes):
    model = nn.Sequential(nn.PReLU(len(slopes)))
    model[0].weight.data.copy_(slopes)
    x = torch.randn(2, len(slopes))
    x = torch.cat([x, -x])  # as many values on either side, so P(x > 0) = 1/2
    (site,) = layer_report(model, x)
    want = (1 + slopes.double().square().mean().item()) / 2
    # The mean of a^2 over 32 places in 0..1 is off by up to 1 / (6 * 31), the gain by half of it.
    off = 1 / (12 * 31) if len(slopes.unique()) > 32 else 1e-6
    assert site.gain == pytest.approx(want, abs=off)
    assert site.measured_gain == pytest.approx(want, abs=off)


class TwoForms(nn.Module):
    """One network whose activations are modules, or calls in its forward."""

    def __init__(self, functional):
        super().__init__()
        torch.manual_seed(0)
        self.functional = functional
        self.first, self.conv = nn.Linear(64, 64), nn.Conv1d(64, 8, 3)
        self.last = nn.Linear(6, 6)
        self.prelu = nn.PReLU(8)
        if not functional:
            self.acts = nn.ModuleList([nn.ReLU(inplace=True), nn.GELU(), nn.Sigmoid()])
            self.leaky = nn.LeakyReLU(0.2)

    def forward(self, x):
        x = self.first(x)
        x = F.relu_(x) if self.functional else self.acts[0](x)
        x = self.conv(x.unfold(0, 8, 8))
        x = F.gelu(x) if self.functional else self.acts[1](x)
        x = F.linear(x, self.last.weight, self.last.bias) if self.functional else self.last(x)
        x = x.sigmoid() if self.functional else self.acts[2](x)
        x = x - 0.5
        x = F.leaky_relu(x, 0.2) if self.functional else self.leaky(x)
        return F.prelu(x, self.prelu.weight) if self.functional else self.prelu(x)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
NAMES = ["acts.0", "acts.1", "acts.2", "leaky", "prelu:prelu#0"]
CALLS = [":relu#0", ":gelu#0", ":sigmoid#0", ":leaky_relu#0", ":prelu#0"]


def _rows(report):
    return [replace(row, name="") for row in report]


@pytest.mark.parametrize("converted", ["plain", "with inputs", "without inputs"])
def test_layer_report_says_the_same_of_calls_as_of_modules(converted):
    def made(functional):
        model = TwoForms(functional)
        if converted == "plain":
            return model
        return convert(model, inputs=X if converted == "with inputs" else None)

    modules, calls = layer_report(made(False), X), layer_report(made(True), X)
    assert [row.name for row in modules] == NAMES
    assert [row.name for row in calls] == CALLS
    for a, b in zip(_rows(modules), _rows(calls), strict=True):
        # gates of a module and of a call round on their own ways: 1e-4 is for differences of them
        assert (a.kind, a.sigma_w) == (b.kind, b.sigma_w)
        figures = [
            (u, v) for u, v in zip(vars(a).values(), vars(b).values(), strict=True) if u != v
        ]
        assert all(u == pytest.approx(v, rel=1e-4) for u, v in figures)
    assert [row.sigma_w is None for row in calls] == [True, False, True, True, True]
    assert modules.skipped == calls.skipped == {}


@pytest.mark.parametrize("functional", [False, True])
def test_layer_report_names_the_sites_of_a_network_as_an_audit_does(functional):
    gated = convert(TwoForms(functional), inputs=X)
    names = [site.name for site in audit(gated, X).sites if site.calls]
    assert names == [row.name for row in layer_report(gated, X)]
    assert names == [row.name for row in layer_report(TwoForms(functional), X)]


def test_layer_report_tells_calls_of_one_module_apart():
    act = nn.Tanh()
    model = nn.Sequential(act, nn.Linear(64, 64), act)
    first, second = layer_report(model, X)
    assert (first.name, second.name) == ("0", "0#1")
    assert first.variance != second.variance
    assert first.sigma_w == pytest.approx(8 * model[1].weight.square().mean().sqrt().item())


class Whole(nn.Module):
    """An activation beside what is not one element-wise function."""

    def __init__(self):
        super().__init__()
        self.act, self.lstm, self.ours = nn.Tanh(), nn.LSTM(64, 8), tg.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.tiered = tg.Linear(8, 8)

    def forward(self, x):
        x = self.ours(self.lstm(self.act(x))[0])[0]
        x = self.tiered(self.attention(x, x, x)[0])
        return F.glu(F.scaled_dot_product_attention(x, x, x).softmax(-1))


def test_layer_report_says_what_it_says_nothing_of():
    with pytest.warns(UserWarning, match="skips lstm:lstm#0: lstm is not one element"):
        report = layer_report(Whole(), X)
    assert [row.name for row in report] == ["act"]
    calls = (":scaled_dot_product_attention#0", ":softmax#0", ":glu#0")
    attention = "attention:multi_head_attention_forward#0"
    assert list(report.skipped) == ["lstm:lstm#0", "ours", attention, "tiered", *calls]
    printed = str(report).splitlines()
    assert printed[0].split()[:4] == ["site", "kind", "mean", "variance"]
    assert printed[2].split()[:2] == ["act", "tanh"]
    assert ":glu#0: glu is not one element-wise function" in printed
    with pytest.raises(ValueError, match=r"Softmax ran no element-wise site.*:softmax#0: softmax"):
        layer_report(nn.Softmax(-1), X)
    with pytest.raises(ValueError, match=r"Linear ran no element-wise site.*give a network with"):
        layer_report(nn.Linear(64, 2), X)


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def test_layer_report_reads_a_module_as_the_function_that_it_is():
    """Also one that no gate computes; one that is nowhere near finite is skipped."""
    model = nn.Sequential(
        Function(lambda x: x * torch.sigmoid(2 * x)), Function(torch.sin), Function(torch.log)
    )
    with pytest.warns(UserWarning, match="skips 2: .*NaN at x"):
        swish, sine = layer_report(model, X.abs())
    q, mean = X.abs().var(correction=0).item(), X.abs().mean().item()
    want = moments(lambda x: x * torch.sigmoid(2 * x), q, mean)
    assert (swish.name, swish.gain) == ("0", pytest.approx(want.slope, rel=1e-6))
    assert sine.gain == pytest.approx(moments(torch.sin, sine.variance, sine.mean).slope)


def test_a_layer_with_an_activation_of_its_own_is_looked_into():
    class Both(nn.Linear):
        def forward(self, x):
            return F.relu(super().forward(x))

    first, second = layer_report(nn.Sequential(Both(64, 64), Both(64, 3)), X)
    assert (first.name, second.name) == ("0:relu#0", "1:relu#0")
    assert first.sigma_w is not None


def test_layer_report_skips_what_is_random_and_passes_a_scripted_part():
    class Random(nn.Module):
        def forward(self, x):
            return F.rrelu(x, training=self.training) + torch.relu(x)

    model = nn.Sequential(torch.jit.script(nn.Linear(64, 64)), Random())
    with pytest.warns(UserWarning, match="skips 1:rrelu#0"):
        (site,) = layer_report(model, X)
    assert site.name == "1:relu#0"
    assert [row.name for row in layer_report(model.eval(), X)] == ["1:rrelu#0", "1:relu#0"]


@pytest.mark.parametrize("bad", [torch.zeros(0, 4), torch.full((2, 4), torch.nan)])
def test_layer_report_skips_a_site_without_finite_inputs(bad):
    with pytest.raises(ValueError, match="0: its inputs are empty, NaN or infinite"):
        layer_report(nn.Sequential(nn.Tanh()), bad)


def test_layer_report_leaves_model_and_inputs_as_they_were():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Dropout())
    state = copy.deepcopy(model.state_dict())
    x, numbers = torch.randn(9, 2), torch.get_rng_state()
    (site,) = layer_report(model, x)
    assert site.variance == pytest.approx(1, rel=1e-3)  # normed by the batch, as in training
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), numbers)
    layer_report(nn.Sequential(nn.ReLU(inplace=True)), x)
    assert (x < 0).any()
    with pytest.raises(RuntimeError):
        layer_report(model, torch.randn(3))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
