"""What a function is said to see is what it gets: the values make the network's own output."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.show import functions
from threshold_gating.show.seen import look


def values_of(seen):
    return seen.values.kept.sample().sort().values


def same(seen, x):
    torch.testing.assert_close(values_of(seen), x.detach().flatten().float().sort().values)


class Net(nn.Module):
    """Every kind of site."""

    def __init__(self):
        super().__init__()
        self.inp, self.act, self.idle = nn.Linear(4, 8), nn.GELU(), nn.SiLU()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.prelu = nn.PReLU(8, 0.3)
        self.rnn = nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True)
        self.cell, self.out = nn.GRUCell(12, 8), nn.RNN(8, 8, nonlinearity="relu")

    def forward(self, x):
        x = self.act(self.act(self.inp(x)))
        x = self.mha(x, x, x)[0] + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        x = self.prelu(x.transpose(1, 2)).transpose(1, 2)
        x = F.glu(torch.cat([x, x], -1)).clamp(max=torch.ones(8))
        x = torch.minimum(torch.maximum(x, 0.5 * x), x + 1)
        x = self.out(self.cell(self.rnn(x)[0][:, 0]))[0]
        return F.softmin(x, 1) + F.leaky_relu(x, 0.2)


X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(3)
    return Net().eval()


@pytest.mark.parametrize(
    ("train", "share"), [((), "layer"), (("tau", "theta"), "layer"), (("tau", "theta"), "channel")]
)
def test_every_site_of_the_audit_is_seen_before_and_after_conversion(net, train, share):
    if train:
        sites = {":glu#0": tg.GateConfig(axis=-1), "idle": None}
        with pytest.warns(UserWarning, match="is learned"):
            gated = tg.convert(net, sites, inputs=X, train=train, share=share)
    else:
        gated = tg.convert(net, inputs=X)
    seen = look(gated, X)
    names = [site.name for site in tg.audit(gated, X).sites]
    assert list(dict.fromkeys(each.site for each in seen)) == sorted(names, key=names.index)
    before = {each.name: each for each in look(net, X)}
    assert set(before) - {"idle"} == {each.name for each in seen} - {"idle"}
    for each in seen:
        if each.site != "idle":
            # gates are within 5e-5 of GELU, the only function that is not exact
            torch.testing.assert_close(
                values_of(each), values_of(before[each.name]), atol=5e-4, rtol=1e-3
            )
            assert each.values.seen == before[each.name].values.seen > 0
            assert each.values.apart == before[each.name].values.apart
    learned = {each.site for each in seen if each.exact is False}
    if train:
        assert {"rnn:lstm#0", "mha:multi_head_attention_forward#0", ":glu#0"} <= learned
    else:
        assert learned == {"act", "act#1"}


def test_a_function_is_the_original_and_its_gate_is_the_one_that_stands_there(net):
    gated = tg.convert(net, {"act": 4, "act#1": 5}, inputs=X)
    seen = {each.name: each for each in look(gated, X)}
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(seen["act#1"].f(x), F.gelu(x))
    assert [seen[name].gates[0].K for name in ("act", "act#1")] == [4, 5]
    assert torch.equal(seen[":leaky_relu#0"].f(x), F.leaky_relu(x, 0.2))
    assert seen[":leaky_relu#0"].gates == (tg.taxonomy.leaky_relu(0.2),)
    torch.testing.assert_close(seen[":glu#0"].gates[0](x), torch.sigmoid(x))
    torch.testing.assert_close(seen[":minimum#0"].gates[0](x), x.clamp(max=0))
    assert seen[":clamp_by_tensors#0"].gates == ()
    assert seen["idle"].gates == (tg.TAXONOMY["silu"],)
    assert seen["idle"].values.seen == 0


def parts(model, x, name):
    return {each.part: each for each in look(model, x) if each.site == name}


def test_the_inputs_inside_an_lstm_make_its_output():
    rnn = nn.LSTM(4, 6, batch_first=True)
    x = torch.randn(3, 1, 4)
    inside = parts(nn.Sequential(rnn), x, "0:lstm#0")
    assert sorted(inside) == ["cell", "f", "g", "i", "o"]
    a = F.linear(x, rnn.weight_ih_l0, rnn.bias_ih_l0 + rnn.bias_hh_l0)
    for name, wanted in zip("ifgo", a.chunk(4, -1), strict=True):
        same(inside[name], wanted)
    same(inside["cell"], rnn(x)[1][1])
    assert [inside[p].f for p in ("i", "g")] == [torch.sigmoid, torch.tanh]


@pytest.mark.parametrize("train", [(), ("tau",)])
def test_the_inputs_inside_a_gru_of_the_library_are_those_of_its_step(train):
    layer, x = tg.GRU(4, 6, train=train), torch.randn(1, 3, 4)
    inside = parts(nn.Sequential(layer), x, "0")
    assert sorted(inside) == ["n", "r", "z"]
    a, b = F.linear(x, layer.weight_ih_l0, layer.bias_ih_l0).chunk(3, -1), layer.bias_hh_l0.chunk(3)
    same(inside["r"], a[0] + b[0])
    same(inside["z"], a[1] + b[1])
    same(inside["n"], a[2] + torch.sigmoid(a[0] + b[0]) * b[2])


def test_the_gates_of_attention_make_its_weights():
    q, k = torch.randn(2, 2, 3, 5, 4)

    class Attention(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    (seen,) = look(Attention(), (q, k))
    z = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = z.softmax(-1)
    decided = weights[(weights > 0) & (weights < 1)]
    torch.testing.assert_close(values_of(seen).sigmoid(), decided.sort().values)
    assert seen.values.apart == 6 * (10 + 1)  # masked keys, and the first query has one key alone
    assert seen.values.seen == 6 * 25


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min])
def test_keys_that_a_mask_turns_off_are_not_seen(low):
    class Masked(nn.Module):
        def forward(self, z):
            return (z + torch.tensor([0.0, 0.0, low])).softmax(-1)

    (seen,) = look(Masked(), torch.randn(4, 3))
    assert (seen.values.seen, seen.values.apart, seen.values.infinite) == (12, 4, 0)
    assert seen.values.low > -10


def test_channels_that_learned_have_gates_of_their_own():
    act = tg.Activation("silu", share="channel", channels=3, train=("tau", "theta"))
    with torch.no_grad():
        act.rho.copy_(torch.tensor([0.0, 0.5, 1.0]))
    (seen,) = look(nn.Sequential(nn.Linear(3, 3), act), torch.randn(4, 3))
    assert [t.tau for t in seen.gates] == pytest.approx([1, 1.6487, 2.7183], rel=1e-4)
    assert seen.f is None
    assert "had this gate before" in seen.note


def test_of_very_many_gates_the_start_is_shown_and_that_is_said(monkeypatch):
    monkeypatch.setattr(functions, "_MOST", 5)
    act = tg.Activation("silu", share="neuron", channels=(2, 3), train=("tau",))
    with torch.no_grad():
        act.rho.fill_(1.0)
    (seen,) = look(nn.Sequential(act), torch.randn(4, 2, 3))
    assert seen.gates == (tg.TAXONOMY["silu"],)
    assert "of 6 gates that learned only their start is shown" in seen.note


def test_a_block_that_runs_several_times_adds_up():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            for _ in range(3):
                x = F.silu(self.block(x))
            return x

    counts = {each.name: each.values.seen for each in look(Loop(), torch.randn(2, 4))}
    assert counts == {
        **{"block.1": 8, "block.1#1": 8, "block.1#2": 8},
        **{":silu#0": 8, ":silu#1": 8, ":silu#2": 8},
    }


def test_looking_leaves_the_network_and_its_inputs_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)).train()
    x = torch.randn(6, 4)
    state, given = {k: v.clone() for k, v in model.state_dict().items()}, x.clone()
    (seen,) = look(model, x)
    assert model.training
    assert torch.equal(x, given)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert seen.values.low < 0  # what came in, not what ReLU wrote over it


@pytest.mark.parametrize("off", [-10000.0, -1e9, -math.inf])
def test_keys_that_a_large_negative_number_masks_are_apart_whatever_the_number(off):
    class Masked(nn.Module):
        def forward(self, x):
            return (x + torch.full((5, 5), off).triu(1)).softmax(-1)

    torch.manual_seed(5)
    net, x = Masked(), torch.randn(2, 5, 5)
    (seen,) = look(tg.convert(net, inputs=x), x)
    assert seen.values.apart == 2 * (10 + 1)  # above the diagonal, and the first row's only key
    weights = torch.sigmoid(values_of(seen))
    kept = net(x)[:, 1:].flatten()
    torch.testing.assert_close(weights, kept[kept > 0].sort().values)


def test_a_logit_that_is_no_number_is_no_mask():
    net = nn.Softmax(-1)
    (seen,) = look(net, torch.tensor([[1.0, math.nan, 2.0], [0.0, 1.0, math.inf]]))
    assert (seen.values.apart, seen.values.nan + seen.values.infinite > 0) == (0, True)


def test_the_gate_inside_a_layer_of_the_library_is_no_site_of_its_own():
    seen = look(nn.Sequential(tg.Linear(4, 3)), X)
    assert [each.name for each in seen] == ["0"]
    assert seen[0].values.seen == X.numel()
