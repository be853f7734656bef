"""What changed between two states of a network: the most first, in a norm that is said."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.insight import compare, read
from threshold_gating.training import Rule

EVERY = ("tau", "theta", "s", "c")


@pytest.fixture
def before():
    net = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))
    return tg.convert(net, train=EVERY, share="channel", inputs=torch.randn(8, 6))


@pytest.fixture
def after(before):
    new = copy.deepcopy(before)
    with torch.no_grad():
        new[1].dtheta[0, 2] = 0.25
        new[3].s[-1, 1] = 2.0
    return new


def test_the_gate_that_changed_most_comes_first(before, after):
    found = compare(before, after)
    assert [change.site for change in found.sites] == ["3", "1"]
    gelu, silu = found.sites
    assert gelu.channel == 1
    assert gelu.moved["s"] == pytest.approx(1)
    assert silu.moved == {"log tau": 0, "theta": 0.25, "s": 0, "c": 0}
    assert silu.channel == 2
    assert found.inputs == "at x from N(0, 1)"
    x = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2)
    was, now = (model[1].instance(2)(x) for model in (before, after))
    want = ((weight * (now - was) ** 2).sum() / (weight * was**2).sum()).sqrt().item()
    assert silu.distance == pytest.approx(want, rel=0.02)  # 1,024 quantiles have less of the tails
    assert silu.mean == pytest.approx(silu.distance / 5)


def test_nothing_changed_says_so(before):
    found = compare(before, copy.deepcopy(before))
    assert all(change.distance == 0 for change in found.sites)
    assert "2 of 2 sites that were read are the same" in str(found)


def test_on_inputs_it_is_their_distance_and_states_that_count(before):
    x = torch.randn(60, 6)
    rule = Rule(values=60)
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[0].bias[1] = -100.0  # the channel dies, its gate is as it was
    found = compare(read(before, x, rule=rule), read(after, x, rule=rule))
    assert {c.site: c.state for c in found.sites}["1"] == {"alive to dead": 1}
    assert "on the first's inputs (60x6)" in found.table().replace("\n", " ")


def test_a_gate_that_became_nan_is_the_largest_change(before, after):
    with torch.no_grad():
        after[1].rho[4] = math.nan
    found = compare(before, after)
    assert found.sites[0].site == "1"
    assert math.isnan(found.sites[0].distance)
    assert found.sites[0].channel == 4
    assert found.sites[0].family == {"multiplicative to nan": 1}
    assert math.isfinite(found.sites[0].mean)
    json.loads(found.to_json(), parse_constant=pytest.fail)


def test_folders_give_what_their_networks_give(before, after, tmp_path):
    for name, model in (("a", before), ("b", after)):
        tg.conversion.save(model, tmp_path / name, gates_only=name == "b")
    assert compare(tmp_path / "a", str(tmp_path / "b")) == compare(before, after)


def test_temperatures_of_heads_are_compared():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x):
            q = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q)

    x = torch.randn(2, 3, 4)
    one = tg.convert(Attention(), train=("tau",), share="head", inputs=x)
    two = copy.deepcopy(one)
    with torch.no_grad():
        next(iter(tg.training.gate_parameters(two).values()))[1] = -0.5
    found = compare(read(one, x), read(two, x))
    assert found.heads == {":scaled_dot_product_attention#0": pytest.approx(0.5)}
    assert "moved by 0.5" in found.table()


def test_a_temperature_that_only_the_second_learns_has_changed():
    class Attention(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 4, 8)
    one = tg.convert(Attention(), inputs=q)
    two = tg.convert(Attention(), train=("tau",), share="channel", inputs=q)
    with torch.no_grad():
        next(iter(tg.training.gate_parameters(two).values())).add_(0.5)
    for pair in ((one, two), (two, one)):
        (moved,) = compare(*(read(model, q) for model in pair)).heads.values()
        assert moved == pytest.approx(0.5)


def test_a_hard_gate_that_is_soft_now_has_moved_its_tau():
    hard, soft = (
        tg.convert(nn.Sequential(nn.Linear(3, 2), act), inputs=torch.randn(4, 3))
        for act in (nn.ReLU(), nn.SiLU())
    )
    for pair in ((hard, soft), (soft, hard)):
        assert compare(*pair).sites[0].moved["log tau"] == math.inf
    assert compare(hard, hard).sites[0].moved["log tau"] == 0


def test_two_networks_are_refused(before):
    other = nn.Sequential(tg.Activation("relu"))
    with pytest.raises(ValueError, match="only the first has 1, 3; only the second has 0"):
        compare(before, other)
    net = nn.Sequential(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 4), nn.GELU(), nn.Linear(4, 2))
    wider = tg.convert(net, train=EVERY, share="channel", inputs=torch.randn(8, 6))
    with pytest.raises(ValueError, match="1 has 5 gates of K = 2 in the first and 7 of K = 2"):
        compare(before, wider)


def test_a_long_list_is_counted_and_a_table_has_a_page():
    model = nn.Sequential(*[tg.Activation("silu", train=EVERY) for _ in range(25)])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for k, act in enumerate(other):
            act.dtheta.fill_(0.01 * (k + 1))
    text = compare(model, other).table()
    assert "and 5 more" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("how", ["networks", "folders", "readings"])
def test_slopes_of_prelu_that_moved_are_a_change(how, tmp_path):
    x = torch.randn(50, 6)
    net = nn.Sequential(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 4), nn.ReLU())
    one = tg.convert(net, inputs=x)
    two = copy.deepcopy(one)
    with torch.no_grad():
        two[1].weight[3] = 7.0
    pair = [one, two]
    if how == "folders":
        for k, model in enumerate(pair):
            tg.conversion.save(model, tmp_path / str(k))
        pair = [tmp_path / "0", tmp_path / "1"]
    found = compare(*[read(m, x) for m in pair] if how == "readings" else pair)
    change = found.sites[0]
    assert (change.site, change.channel) == ("1:prelu#0", 3)
    assert change.moved == {"log tau": 0, "theta": 0, "s": 6.75, "c": 0}
    assert found.sites[1].distance == 0
    assert "s 6.8" in str(found)


def test_what_the_readings_could_not_read_is_said():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            q = self.act(self.linear(x))
            return nn.functional.scaled_dot_product_attention(q, q, q)

    x = torch.randn(2, 3, 4)
    one = tg.convert(Attention(), inputs=x)
    two = copy.deepcopy(one)
    found = compare(one, two)
    assert "1 of 1 sites that were read are the same" in str(found)
    assert any("Not read at :scaled_dot_product" in note for note in found.notes)
    assert all(note in " ".join(str(found).split()) for note in found.notes)
    assert json.loads(found.to_json())["notes"] == list(found.notes)
    with torch.no_grad():
        two.linear.bias[0] = math.nan
    notes = compare(read(one, x), read(two, x)).notes
    assert "In the second: act: 6 of its inputs are NaN or infinite, and left out." in notes


def test_a_channel_that_died_is_not_among_the_same(before):
    x, rule = torch.randn(60, 6), Rule(values=60)
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[0].bias[1] = -100.0
    text = str(compare(read(before, x, rule=rule), read(after, x, rule=rule)))
    assert "1 alive to dead" in text
    assert "1 of 2 sites that were read are the same" in text


@pytest.mark.parametrize("kind", ["glu", "tier"])
def test_gates_whose_branches_are_not_theirs_are_compared_as_gates(kind):
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x):
            return nn.functional.glu(self.linear(x))

    if kind == "glu":
        one = tg.convert(Unit(), train=("theta",), share="channel", inputs=torch.randn(9, 6))
    else:
        one = nn.Sequential(tg.Linear(4, 2, K=2, train=("theta",)))
    two = copy.deepcopy(one)
    (shift,) = [p for n, p in two.named_parameters() if n.endswith("dtheta")]
    with torch.no_grad():
        shift[..., 2] = 0.5
    (change,) = compare(one, two).sites
    x = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2)
    was, now = torch.sigmoid(x), torch.sigmoid(x - 0.5)
    want = ((weight * (now - was) ** 2).sum() / (weight * was**2).sum()).sqrt().item()
    assert change.channel == 2
    assert change.distance == pytest.approx(want, rel=0.02)


def test_another_number_of_heads_is_refused():
    class Attention(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q)

    readings = [
        read(tg.convert(Attention(), train=("tau",), share="head", inputs=q))
        for q in (torch.randn(1, 2, 4, 8), torch.randn(1, 3, 4, 8))
    ]
    with pytest.raises(ValueError, match="has 2 heads in the first and 3 in the second; give two"):
        compare(*readings)
