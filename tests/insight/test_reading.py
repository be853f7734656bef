"""A reading has the numbers of the gates, whatever they are, and says what it cannot read."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.conversion import CheckpointError
from threshold_gating.insight import read
from threshold_gating.insight.gates import gate_sites
from threshold_gating.training import Rule

EVERY = ("tau", "theta", "s", "c")
# what some site cannot learn, or inputs do not reach
pytestmark = pytest.mark.filterwarnings("ignore:convert:UserWarning")


def stirred(model, by=0.2):
    """The network with its learned gates moved off their start."""
    with torch.no_grad():
        for p in tg.training.gate_parameters(model).values():
            p.add_(by * torch.randn_like(p))
    return model


class Calls(nn.Module):
    """Functions of torch, one module used twice, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 8)
        self.act, self.unused = nn.GELU(), nn.SiLU()

    def forward(self, x):
        y = self.act(self.b(self.act(self.a(x)).sigmoid()))
        return F.glu(self.c(F.leaky_relu(y, 0.2)))


def small(train=(), share="layer", network=None, x=None):
    network = network or nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 4), nn.GELU())
    return tg.convert(
        network, train=train, share=share, inputs=torch.randn(7, 6) if x is None else x
    )


@pytest.mark.parametrize("hard", [False, True])
def test_the_numbers_are_those_of_the_instances(hard):
    acts = (nn.ReLU(), nn.Hardtanh()) if hard else (nn.SiLU(), nn.GELU())
    network = nn.Sequential(nn.Linear(6, 5), acts[0], nn.Linear(5, 4), acts[1])
    model = stirred(small(EVERY[hard:], "channel", network))
    for name, channels in (("1", 5), ("3", 4)):
        site, act = read(model)[name], model[int(name)]
        assert (site.groups, site.share, site.learned) == (channels, "channel", EVERY[hard:])
        for k, t in enumerate(act.instances()):
            taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
            for row, want in (
                (site.tau, taus),
                (site.theta, t.theta),
                (site.s, t.s),
                (site.c, t.c),
            ):
                assert row[:, k].tolist() == list(want)
            assert site.family[k] == tg.family(t, 1e-3)
            x = torch.linspace(-3, 3, 21, dtype=torch.float64)
            torch.testing.assert_close(site.at(x)[k], t(x))


def test_every_site_that_an_audit_lists_is_read():
    x = torch.randn(7, 6)
    model = tg.convert(Calls(), inputs=x)
    reading = read(model, x)
    audited = {site.name for site in tg.audit(model, x).sites}
    assert audited <= {s.name for s in reading.sites}
    assert [s.name for s in reading.sites] == [
        "act",
        ":sigmoid#0",
        "act#1",
        ":leaky_relu#0",
        ":glu#0",
        "unused",
    ]
    assert reading["unused"].unread == "never called on these inputs"
    notes = " ".join(reading.notes)
    assert "Not read at unused: never called on these inputs." in notes
    assert ":glu#0: the branches of a gated linear unit are its other input" in notes
    assert "No gate learns" in notes
    assert reading[":leaky_relu#0"].s.tolist() == [[0.2], [1.0]]


def test_a_call_that_is_used_twice_is_two_sites_with_numbers_of_their_own():
    x = torch.randn(7, 6)
    model = stirred(tg.convert(Calls(), train=("tau",), share="channel", inputs=x))
    reading = read(model, x)
    first, second = reading["act"], reading["act#1"]
    assert first.tau.shape == second.tau.shape == (1, 6)
    assert not torch.equal(first.tau, second.tau)
    assert reading[":glu#0"].groups == 4
    assert reading[":glu#0"].values.count == 7


def test_gates_of_each_neuron_are_read_one_by_one():
    act = tg.Activation("silu", share="neuron", channels=(2, 3, 3), axis=1, train=("theta",))
    model = stirred(nn.Sequential(nn.Conv2d(1, 2, 3), act))
    x = torch.randn(4, 1, 5, 5)
    site = read(model, x)["1"]
    assert site.groups == 18
    given = model[0](x).detach().double()
    torch.testing.assert_close(site.values.mean, given.mean(0).flatten(), rtol=1e-5, atol=1e-6)
    assert site.values.count == 4
    assert len(site.nearest) == len(site.family) == 18


def test_prelu_is_read_with_its_own_slopes():
    x = torch.randn(3, 4)
    prelu = nn.PReLU(4)
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([0.0, 0.25, 1.0, -1.0]))
    model = tg.convert(nn.Sequential(nn.Linear(4, 4), prelu), inputs=x)
    (site,) = read(model, x).sites
    assert site.s.tolist() == [[0.0, 0.25, 1.0, -1.0], [1.0] * 4]
    assert [n.name for n in site.nearest] == ["relu", "prelu", "identity", "abs"]


def test_a_layer_of_tier_w_has_its_branches_in_its_weights():
    model = nn.Sequential(tg.Linear(6, 5, K=2), tg.Linear(5, 4, tier="S", init="silu"))
    x = torch.randn(50, 6)
    reading = read(model, x)
    wide = reading["0.gate"]
    assert set(wide.family) == {"in the weights"}
    assert wide.values.flat.isnan().all()
    torch.testing.assert_close(wide.values.mean, x.double().mean(0), rtol=1e-5, atol=1e-6)
    notes = " ".join(reading.notes)
    assert "each synapse has a gate" in notes
    assert "0.gate, 1.gate: the branches are in the weights, so no family" in notes


@pytest.mark.parametrize("train", [(), ("tau", "theta")])
def test_a_layer_of_tier_w_is_read_by_itself_too(train, tmp_path):
    layer, x = tg.Linear(6, 5, K=2, train=train), torch.randn(50, 6)
    tg.conversion.save(layer, tmp_path)
    for reading in (read(layer), read(layer, x), read(tmp_path)):
        (site,) = reading.sites
        assert (site.name, set(site.family)) == ("gate", {"in the weights"})
    gate = torch.sigmoid(x.double()).mean(0)
    torch.testing.assert_close(read(layer, x)["gate"].values.open[1], gate, rtol=1e-5, atol=1e-6)


def test_reading_leaves_the_network_and_the_inputs_as_they_were():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Dropout())
    x = torch.randn(7, 6)
    gated = tg.convert(model, train=("theta",), share="channel", inputs=x).train()
    before, given = copy.deepcopy(gated.state_dict()), x.clone()
    state = torch.get_rng_state()
    read(gated, x)
    assert gated.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    for key, value in gated.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for m in gated.modules() if m is not gated
    )
    assert all(p.grad is None for p in gated.parameters())


def test_without_inputs_the_numbers_are_read_and_the_rest_is_said_to_be_missing():
    reading = read(small())
    assert reading.inputs == ""
    assert all(site.values is None for site in reading.sites)
    assert "Nothing ran" in reading.notes[0]
    assert "at x from N(0, 1)" in " ".join(reading.table().split())
    assert "open:" not in reading.table()


def test_what_is_left_to_torch_is_named():
    x = torch.randn(7, 6)
    model = tg.convert(nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.ReLU()), {"2": None}, inputs=x)
    assert any("Left to torch, so not read: 2" in note for note in read(model, x).notes)


def test_a_number_that_is_not_finite_costs_its_channel_alone():
    model = small(EVERY, "channel")
    with torch.no_grad():
        model[1].rho[3] = math.nan
        model[3].s[0, 1] = math.inf
    reading = read(model, torch.randn(9, 6))
    site = reading["1"]
    assert site.family[3] == "nan"
    assert site.nearest[3].name == ""
    assert site.values.state[3] == ""
    assert site.values.open[:, 3].isnan().all()
    others = [0, 1, 2, 4]
    assert {site.nearest[k].name for k in others} == {"silu"}
    assert site.values.open[:, others].isfinite().all()
    assert reading["3"].family[1] == "nan"
    assert "1: tau, theta, s or c of 3 is not finite" in " ".join(reading.notes)
    json.loads(reading.to_json(), parse_constant=pytest.fail)


def test_inputs_that_are_not_finite_are_left_out_and_said():
    model = small()
    x = torch.randn(8, 6)
    x[0, 0], x[1, 1] = math.nan, math.inf
    site = read(model, x)["1"]
    finite = model[0](x[2:]).double()
    assert site.values.lost == 10
    torch.testing.assert_close(site.values.mean, finite.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_types_keep_the_digits_of_the_gates(dtype):
    model = stirred(small(EVERY, "channel"))
    want = read(model)["1"].tau
    x = torch.randn(64, 6)
    site = read(model.to(dtype), x.to(dtype))["1"]
    torch.testing.assert_close(site.tau, want, rtol=1e-6, atol=0)
    seen = model[0](x.to(dtype)).double()
    torch.testing.assert_close(site.values.mean, seen.mean(0), rtol=1e-5, atol=1e-6)


def test_channels_are_found_from_the_layers_and_a_guess_is_said():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(6, 5), nn.ReLU()

        def forward(self, x):
            return self.act(self.linear(x).transpose(1, 2))

    x = torch.randn(2, 9, 6)
    site = read(tg.convert(Tokens(), inputs=x), x)["act"]
    assert (site.values.axis, len(site.values.mean), site.values.guessed) == (1, 5, False)
    alone = nn.Sequential(tg.Activation("relu"))
    reading = read(alone, x)
    assert (reading["0"].values.axis, reading["0"].values.guessed) == (2, True)
    assert "No layer says where the channels of 0 are" in " ".join(reading.notes)


def test_few_values_do_not_make_a_channel_dead():
    model = small(network=nn.Sequential(nn.Linear(6, 5), nn.ReLU()))
    with torch.no_grad():
        model[0].bias[2] = -100.0
    x = torch.randn(50, 6)
    reading = read(model, x)
    assert reading["1"].values.state[2] == "unknown"
    assert "3,000 are needed" in " ".join(reading.notes)
    assert "?" in reading.table()
    assert read(model, x, rule=Rule(values=50))["1"].values.state[2] == "dead"


@pytest.mark.parametrize("gates_only", [False, True])
def test_a_folder_is_read_without_its_network(tmp_path, gates_only):
    x = torch.randn(7, 6)
    model = stirred(tg.convert(Calls(), train=EVERY, share="channel", inputs=x))
    tg.conversion.save(model, tmp_path, gates_only=gates_only)
    want, have = read(model), read(tmp_path)
    assert {s.name for s in have.sites} == {s.name for s in want.sites}
    assert have.model == "Calls"
    for site in have.sites:
        for what in EVERY:
            assert torch.equal(getattr(site, what), getattr(want[site.name], what)), site.name
        assert site.nearest == want[site.name].nearest


def test_recurrent_gates_that_learn_are_read_from_a_folder_of_their_calls(tmp_path):
    x = torch.randn(2, 5, 3)
    model = stirred(
        tg.convert(nn.LSTM(3, 4, batch_first=True), train=("tau",), share="channel", inputs=x)
    )
    tg.conversion.save(model, tmp_path)
    want, have = read(model), read(tmp_path)
    assert [s.name for s in have.sites] == [f":lstm#0.{g}_0" for g in ("i", "f", "g", "o", "cell")]
    for site in have.sites:
        assert torch.equal(site.tau, want[site.name].tau)


def test_a_folder_with_a_learning_lstm_of_ours_says_that_it_needs_the_network(tmp_path):
    model = nn.Sequential(tg.LSTM(3, 4, train=("tau",)), tg.GRU(4, 4), tg.Activation("relu"))
    model = nn.Sequential(nn.Linear(3, 3), tg.Activation("relu"), tg.LSTM(3, 4, train=("tau",)))
    tg.conversion.save(model, tmp_path)
    reading = read(tmp_path)
    assert [s.name for s in reading.sites] == ["1"]
    assert "read the network, not its folder" in " ".join(reading.notes)
    tg.conversion.save(tg.LSTM(3, 4, train=("tau",)), tmp_path / "alone")
    with pytest.raises(ValueError, match="lstm: a recurrent layer with learned gates"):
        read(tmp_path / "alone")


def test_a_folder_of_one_gate_has_the_name_that_the_gate_has(tmp_path):
    gate = tg.Activation("silu", train=("tau",))
    tg.conversion.save(gate, tmp_path)
    assert [s.name for s in read(tmp_path).sites] == [s.name for s in read(gate).sites]


class Steps(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = self.cell(x)
        return self.cell(x, state)[0]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_is_read_without_a_run_by_the_names_that_a_run_gives(kind):
    x = torch.randn(3, 2)
    gated = tg.convert(Steps(kind(2, 4)).eval(), inputs=x)
    alone, seen = read(gated), read(gated, x)
    assert alone.sites
    assert {s.name for s in alone.sites} == {s.name for s in seen.sites}


def test_attention_that_only_a_run_shows_is_not_called_a_network_without_gates():
    class Attend(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 3, 4)
    gated = tg.convert(Attend(), inputs=x)
    says = r"^read: no gate of Attend is read \(.*#0: its gates show in a run; give inputs.*\)\.$"
    with pytest.raises(ValueError, match=says):
        read(gated)
    assert read(gated, x).heads


@pytest.mark.parametrize(
    ("model", "inputs", "error", "says"),
    [
        (
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            (),
            ValueError,
            "has no gate to read. Make its",
        ),
        (nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),), ValueError, "has no gate to read"),
        (nn.Sequential(tg.Activation("relu")).to("meta"), (), ValueError, "on the meta device"),
        (
            nn.Sequential(nn.LazyLinear(2)),
            (),
            ValueError,
            "has no shape before the network has run",
        ),
        ("nowhere", (), CheckpointError, "cannot be read"),
        ("nowhere", (torch.ones(1),), ValueError, "only a network runs; load it with tg.load"),
        (7, (), TypeError, "model is a torch.nn.Module or a folder"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(model, inputs, error, says):
    with pytest.raises(error, match=says):
        read(model, *inputs)


def test_a_site_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(KeyError, match="Sequential has no site 'act'; there are 1, 3"):
        read(small())["act"]


def test_the_table_fits_a_page_and_defines_its_columns():
    text = read(stirred(small(EVERY, "channel")), torch.randn(9, 6)).table()
    assert max(map(len, text.splitlines())) <= 110
    for word in ("saturation:", "flat:", "dead, stuck:", "nearest:", "open:"):
        assert word in text
    assert "at most 0.01 of the steepest slope" in " ".join(text.split())


def test_json_has_every_channel():
    reading = read(stirred(small(EVERY, "channel")), torch.randn(9, 6))
    found = json.loads(reading.to_json(), parse_constant=pytest.fail)
    (first, _) = found["sites"]
    assert first["theta"] == reading["1"].theta.tolist()
    assert first["values"]["flat"] == reading["1"].values.flat.tolist()
    assert first["start"] == tg.TAXONOMY["silu"].to_dict()
    assert first["nearest"][0].keys() == {"name", "distance"}
    assert found["rule"]["values"] == 3000


def test_gates_of_a_network_that_was_converted_without_inputs_are_found_as_they_come():
    model = tg.convert(Calls())
    x = torch.randn(7, 6)
    assert {s.name for s in read(model, x).sites} >= {"act", ":sigmoid#0", ":leaky_relu#0"}


def test_compiled_and_wrapped_networks_are_read_by_their_own_names():
    model = small()
    wrapped = nn.DataParallel(model)
    assert [s.name for s in read(wrapped, torch.randn(3, 6)).sites] == ["1", "3"]
    assert list(gate_sites(model)) == ["1", "3"]


def test_a_gate_that_is_used_in_two_places_is_read_at_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
            self.act = tg.Activation("silu", train=("tau",))

        def forward(self, x):
            return self.act(self.b(self.act(self.a(x))))

    model, x = Twice(), torch.randn(8, 6)
    with torch.no_grad():
        model.act.rho.fill_(math.nan)
    reading = read(model, x)
    assert [len(s.values.mean) for s in reading.sites] == [6, 3]
    assert [s.name for s in reading.sites] == ["act", "act#1"]
    assert {s.family for s in reading.sites} == {("nan",)}


def test_an_empty_batch_is_said_to_be_empty():
    reading = read(small(), torch.zeros(0, 6))
    assert all(site.values is None for site in reading.sites)
    assert "Not read at 1, 3: it was given no values." in reading.notes


@pytest.mark.parametrize("train", [(), ("tau", "theta")])
def test_a_gated_linear_unit_is_read_as_a_gate_and_not_as_silu(train):
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x):
            return F.glu(self.linear(x))

    x = torch.randn(50, 6)
    model = stirred(
        tg.convert(Unit(), train=train, share="channel" if train else "layer", inputs=x)
    )
    reading = read(model, x)
    (site,) = reading.sites
    assert (site.started, set(site.family)) == ("glu", {"of two inputs"})
    assert {near.name for near in site.nearest} == {""}
    assert set(site.values.state) == {""}
    assert site.values.flat.isnan().all()
    b = model.linear(x)[:, 4:].detach().double()
    gate = torch.sigmoid(site.tau * (b - site.theta))
    torch.testing.assert_close(site.values.open[1], gate.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(site.values.mean, b.mean(0), rtol=1e-5, atol=1e-6)
    assert "the branches of a gated linear unit are its other input" in " ".join(reading.notes)
    assert [s.name for s in read(model).sites] == [site.name]


class Mixed(nn.Module):
    """What is no element-wise function: recurrent layers, attention, PReLU, GLU, a maximum."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cell, self.prelu, self.act = nn.GRUCell(8, 8), nn.PReLU(8), nn.ReLU()

    def forward(self, x):
        y = self.lstm(x)[0]
        y = self.attention(y, y, y, need_weights=False)[0]
        y = self.act(self.prelu(self.cell(y.flatten(0, 1))))
        return F.glu(torch.maximum(y, y.flip(0)))


@pytest.mark.parametrize("train", [(), ("tau", "theta")])
def test_a_folder_shows_what_its_network_shows_without_a_run(tmp_path, train):
    x = torch.randn(3, 5, 4)
    model = tg.convert(Mixed().eval(), train=train, inputs=x)
    with torch.no_grad():
        model.prelu.weight.copy_(torch.linspace(-1, 1, 8))
    stirred(model)
    tg.conversion.save(model, tmp_path)
    want, have = read(model), read(tmp_path)
    assert {s.name for s in have.sites} == {s.name for s in want.sites}
    assert len(have.sites) == 4 * 5 + 3 + 3  # gates of the LSTM and the cell; ReLU, PReLU and GLU
    for site in have.sites:
        for what in EVERY:
            assert torch.equal(getattr(site, what), getattr(want[site.name], what)), site.name
        assert site.family == want[site.name].family
    assert have["prelu:prelu#0"].s[0].tolist() == model.prelu.weight.tolist()
    notes = " ".join(have.notes)
    assert ":maximum#0: maximum: its threshold is data" in notes
    attention = "attention:multi_head_attention_forward#0"
    assert [a.name for a in have.heads] == ([attention] if train else [])
    assert (f"Not read at {attention}: its gates show in a run; load the" in notes) == (not train)


def test_a_folder_without_weights_says_that_it_does_not_show_the_gates_of_an_lstm(tmp_path):
    model = tg.convert(Mixed().eval(), inputs=torch.randn(3, 5, 4))
    tg.conversion.save(model, tmp_path, gates_only=True)
    reading = read(tmp_path)
    assert {s.name.partition(".")[0] for s in reading.sites} == {"act", ":glu#0", "cell:gru_cell#0"}
    (note,) = [note for note in reading.notes if "tg.load" in note]
    for name in ("lstm:lstm#0", "prelu:prelu#0", "attention:multi_head_attention_forward#0"):
        assert name in note


def test_a_folder_knows_the_gates_of_our_lstm_by_the_names_of_the_network(tmp_path):
    model = nn.Sequential(tg.GRU(3, 4, 2, bidirectional=True))
    tg.conversion.save(model, tmp_path)
    assert {s.name for s in read(tmp_path).sites} == {s.name for s in read(model).sites}


def test_a_folder_knows_a_layer_whose_branches_are_in_its_weights(tmp_path):
    model = nn.Sequential(tg.Linear(6, 5, K=2), tg.Linear(5, 4, tier="S", init="silu"))
    tg.conversion.save(model, tmp_path)
    for site in read(tmp_path).sites:
        assert set(site.family) == {"in the weights"}
        assert {near.name for near in site.nearest} == {""}


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRU, nn.PReLU])
def test_calls_that_are_answered_as_they_come_are_said_to_need_a_run(kind, tmp_path):
    model = tg.convert(kind() if kind is nn.PReLU else kind(3, 4))
    tg.conversion.save(model, tmp_path)
    for what, way_out in ((model, "give inputs"), (tmp_path, "load the network with tg.load")):
        with pytest.raises(
            ValueError, match=f"answered as they come, and show in a run; {way_out}"
        ):
            read(what)
    assert read(model, torch.randn(2, 3)).sites


def test_a_module_that_is_left_to_torch_is_named_without_a_run(tmp_path):
    x = torch.randn(7, 6)
    model = tg.convert(nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.ReLU()), {"2": None}, inputs=x)
    tg.conversion.save(model, tmp_path)
    for reading in (read(model), read(tmp_path)):
        assert "Not read at 2: it is left to torch." in reading.notes


def assert_same_values(have, want):
    for one, two in zip(have.sites, want.sites, strict=True):
        for what in ("mean", "std", "open", "saturation", "flat"):
            figures = getattr(one.values, what), getattr(two.values, what)
            assert torch.equal(*figures), (one.name, what)


def test_in_inference_mode_the_reading_is_the_same():
    model, x = stirred(small(EVERY, "channel")), torch.randn(40, 6)
    with torch.inference_mode():
        have = read(model, x)
    assert_same_values(have, read(model, x))


def test_weights_that_were_made_in_inference_mode_are_read():
    x = torch.randn(40, 6)
    model = tg.convert(nn.Sequential(nn.Linear(6, 5), nn.PReLU(5)), inputs=x)
    with torch.inference_mode():
        made = copy.deepcopy(model)
    assert made[1].weight.is_inference()
    assert_same_values(read(made, x), read(model, x))


def test_what_is_compiled_in_a_network_is_read_as_it_was_written():
    x = torch.randn(40, 6)
    model = stirred(small(("tau", "theta"), "channel"))
    want = read(model, x)
    model[1] = torch.compile(model[1], backend="eager")
    model[3].compile(backend="eager")
    have = read(torch.compile(model, backend="eager"), x)
    assert [s.name for s in have.sites] == ["1", "3"]
    assert_same_values(have, want)
    assert "_orig_mod" in model[1]._modules  # as it was
    (gate,) = read(torch.compile(model[3], backend="eager"), x[:, :4]).sites
    assert torch.equal(gate.tau, want["3"].tau)
