"""What stays soft in a hardened network is named; `test_promotion` has the rest."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.nn.rnn import RNN
from threshold_gating.training import harden

CALL = "it is a call in a forward, not a module"
TORCH = "it is torch's own, not a gate; convert the network first"
X = torch.randn(7, 6)


class Mixed(nn.Module):
    """Gates beside what torch computes, soft and hard."""

    def __init__(self):
        super().__init__()
        self.gate, self.act, self.relu = tg.Activation("silu"), nn.GELU(), nn.ReLU()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x):
        x = F.relu(F.gelu(self.gate(x))) + self.relu(self.act(x)).sigmoid()
        x = self.lstm(x)[0].clamp(-1, 1)
        return torch.maximum(x, F.softplus(x, 1.0, 2.0)).softmax(-1)


def test_calls_of_torch_that_are_soft_are_named():
    hard = harden(Mixed(), inputs=X)
    assert set(hard.sites) == {"gate"}
    names = (":gelu#0", ":sigmoid#0", "lstm:lstm#0", ":softplus#0", ":softmax#0")
    assert hard.kept == {"act": TORCH, **dict.fromkeys(names, CALL)}
    assert all(f"{name} kept soft: {CALL}" in str(hard) for name in names)
    assert harden(Mixed()).kept == {"act": TORCH}  # without inputs nothing is run


def test_a_network_whose_soft_sites_are_all_calls_is_told_so():
    class Calls(nn.Module):
        def forward(self, x):
            return F.gelu(x).relu()

    with pytest.raises(ValueError, match=rf"no soft gates to harden\. :gelu#0: {CALL}\.$"):
        harden(Calls(), inputs=X)


def test_calls_answered_as_they_come_are_named_with_inputs_and_mentioned_without():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x):
            return torch.sigmoid(self.act(x))

    gated = tg.convert(Calls())
    assert harden(gated, inputs=X).kept == {":sigmoid#0": CALL}
    assert "give inputs" in harden(gated).kept[""]


def test_the_cost_of_a_gate_that_works_in_place_is_that_of_its_input():
    act = tg.Activation("silu", inplace=True)
    cost = harden(nn.Sequential(nn.Identity(), act), inputs=X.clone()).sites["1"]
    y = F.silu(X)
    want = (X.relu() - y).square().mean().sqrt() / y.square().mean().sqrt()
    assert cost == pytest.approx(want.item(), rel=1e-5)  # float32


@pytest.mark.parametrize("where", ["before", "behind"])
def test_the_cost_of_a_gate_is_that_of_what_it_computes_between_the_hooks_of_its_user(where):
    model = nn.Sequential(nn.Identity(), tg.Activation("silu"))
    if where == "before":
        model[1].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    else:
        model[1].register_forward_hook(lambda module, args, y: y * 3)
    x = X * 3 if where == "before" else X
    y = F.silu(x)
    want = (x.relu() - y).square().mean().sqrt() / y.square().mean().sqrt()
    assert harden(model, inputs=X).sites["1"] == pytest.approx(want.item(), rel=1e-5)  # float32


@pytest.mark.parametrize("sites", [None, {"act#1": "sigmoid"}])
def test_a_hardened_gate_takes_its_argument_by_the_name_that_it_had(sites):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x):
            return self.act(input=self.act(input=x))

    hard = harden(tg.convert(Named(), sites, inputs=X, strict=False), inputs=X)
    want = X.relu().relu() if sites is None else (X.relu() > 0).float()
    assert list(hard.sites) == ["act", "act#1"]
    assert torch.equal(hard.model(X), want)


def test_each_call_of_a_gate_has_its_cost():
    act = tg.Activation("silu")
    hard = harden(nn.Sequential(act, nn.Linear(6, 6), act), inputs=X)
    assert list(hard.sites) == ["0", "0#1"]
    assert hard.sites["0"] != hard.sites["0#1"]


def test_soft_recurrent_gates_of_every_class_are_named():
    soft = nn.Sequential(tg.Activation("silu"), RNN(4, 4))
    assert list(harden(soft).kept) == ["1"]
    relu = nn.Sequential(tg.Activation("silu"), RNN(4, 4, nonlinearity="relu"))
    assert harden(relu).kept == {}


def test_a_soft_module_beside_a_call_has_its_cost():
    """The owner of the call answers no arithmetic of ours."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), nn.SiLU()

        def forward(self, x):
            return torch.tanh(self.act(self.linear(x)))

    net, x = Net().eval(), torch.randn(64, 4)
    plain, gated = (harden(n, inputs=x) for n in (tg.convert(net), tg.convert(net, inputs=x)))
    assert gated.sites["act"] == pytest.approx(plain.sites["act"], rel=1e-5)
