"""What values say of a gate: compared with sums in float64, on ragged sizes and broken values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.insight import read, tally
from threshold_gating.insight.gates import frozen
from threshold_gating.training.health import Rule


def tallied(name, *calls, rule=None):
    made = tally.Tally(frozen("act", tg.TAXONOMY[name]), rule or Rule(values=1))
    for z in calls:
        made.add(z)
    return made.values()


@pytest.mark.parametrize("size", [1, 63, 1003])
def test_figures_are_those_of_all_values(size, monkeypatch):
    monkeypatch.setattr(tally, "_AT_ONCE", 500)  # so that a call is taken in parts
    z = 2 * torch.randn(3, size) + torch.tensor([[0.0], [1.0], [-2.0]])
    v = tallied("sigmoid", z)
    x = z.double()
    g = x.sigmoid()
    torch.testing.assert_close(v.mean, x.mean(1))
    torch.testing.assert_close(v.std, x.std(1, correction=0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v.open, torch.stack([1 - g, g]).mean(2), rtol=1e-6, atol=1e-7)
    assert torch.equal(v.saturation, ((g >= 0.99) | (g <= 0.01)).double().mean(1))
    # the derivative in float32 may be on the other side of the limit by rounding: not on these
    flat = g * (1 - g) <= 0.01 * 0.25
    torch.testing.assert_close(v.flat, flat.double().mean(1), rtol=1e-6, atol=1e-7)


def test_calls_add_up_to_one():
    a, b = torch.randn(4, 50), torch.randn(4, 7)
    once, twice = tallied("silu", torch.cat([a, b], 1)), tallied("silu", a, b)
    assert (once.calls, twice.calls, once.count) == (1, 2, twice.count)
    for what in ("mean", "std", "open", "saturation", "flat", "level"):
        one, two = getattr(once, what), getattr(twice, what)
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_relu_is_flat_where_it_is_closed():
    z = torch.randn(5, 400)
    v = tallied("relu", z)
    torch.testing.assert_close(v.flat, (z <= 0).double().mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(v.open[1], (z > 0).double().mean(1))
    assert v.saturation.tolist() == [1.0] * 5  # a hard gate has always decided
    assert set(v.state) == {"alive"}


@pytest.mark.parametrize(
    ("name", "at", "state"),
    [
        ("relu", -3.0, "dead"),
        ("relu", 3.0, "alive"),
        ("sigmoid", 20.0, "saturated"),
        ("sigmoid", -20.0, "dead"),
        ("tanh", 20.0, "saturated"),
        ("silu", 20.0, "alive"),
        ("hardtanh", 5.0, "saturated"),
    ],
)
def test_a_stuck_channel_is_dead_where_its_output_is_0_and_saturated_where_not(name, at, state):
    z = at + 0.1 * torch.randn(2, 3000)
    z[1] = torch.randn(3000)
    assert tallied(name, z, rule=Rule()).state == (state, "alive")


def test_states_are_those_of_a_watched_run():
    from threshold_gating.training.health import Health, look, scale_of

    z = torch.randn(6, 4000)
    z[1], z[4] = z[1] - 50, z[4] + 50
    rule = Rule(patience=1)
    for name in ("relu", "sigmoid", "tanh"):
        t = tg.TAXONOMY[name]
        seen = look(t, z.T, 1, scale_of(t), rule)
        found = {s.channel: s.what for s in Health(rule).judge("act", seen, 1)}
        ours = {k: s for k, s in enumerate(tallied(name, z, rule=rule).state) if s != "alive"}
        assert ours == found


def test_a_step_is_stuck_only_if_its_output_never_moves():
    step = tg.TG(math.inf, 0.0, (0, 0), (0, 1))
    made = tally.Tally(frozen("act", step), Rule(values=1))
    made.add(torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [1.0, 2.0]]))
    made.add(torch.tensor([[-1.0], [1.0], [3.0]]))
    assert made.values().state == ("dead", "alive", "saturated")


def test_values_that_are_not_finite_are_counted_and_left_out():
    z = torch.tensor([[1.0, math.nan, 3.0, math.inf], [math.nan] * 4])
    v = tallied("silu", z)
    assert v.lost == 6
    assert v.mean[0] == 2.0
    assert v.sample.isfinite().all()
    assert v.state == ("alive", "")  # nothing is known of a channel without values
    assert all(w[..., 1].isnan().all() for w in (v.mean, v.std, v.open, v.saturation, v.flat))


@pytest.mark.parametrize("t", ["relu", "step"])
def test_a_dead_channel_is_dead_also_where_some_of_its_inputs_are_nan(t):
    t = tg.TG(math.inf, 0.0, (0, 0), (0, 1)) if t == "step" else tg.TAXONOMY[t]
    z = torch.full((2, 100), -3.0)
    z[0, :20] = math.nan
    for values, state in ((80, ("dead", "dead")), (81, ("unknown", "dead"))):
        made = tally.Tally(frozen("act", t), Rule(values=values))
        made.add(z)
        assert made.values().state == state
        assert made.values().flat.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(8, 1000), (16, 4096), (4, 64 * 64 * 8)])
def test_the_sample_has_every_channel_and_no_place_alone(shape):
    channel = torch.arange(shape[0]).unsqueeze(1).expand(shape)
    place = torch.arange(shape[1]).expand(shape)
    of_channels = tallied("silu", channel.double()).sample
    shares = torch.bincount(of_channels.long(), minlength=shape[0]) / len(of_channels)
    # one value of each of 4,096 equal parts: a channel has its share up to a part at either end
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / shape[0]), rtol=0, atol=2 / 4096)
    columns = tallied("silu", (place % 8).double()).sample.long().bincount(minlength=8)
    assert columns.min() > 4096 / 8 - 6 * math.sqrt(4096 / 8)  # six standard deviations


def test_of_a_long_loop_the_sample_has_calls_from_start_to_end():
    v = tallied("silu", *(torch.full((2, 3), float(k)) for k in range(200)))
    assert v.sample.unique().tolist() == list(range(0, 200, 16))


def test_no_values_are_no_reading():
    assert tallied("silu") is None
    assert tallied("silu", torch.zeros(3, 0)) is None


@pytest.mark.parametrize("make", [nn.LSTM, tg.LSTM])
def test_what_reaches_the_gates_of_an_lstm_is_what_its_equations_say(make):
    plain = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 6, 3)
    if make is nn.LSTM:
        model, name = tg.convert(plain, inputs=x), ":lstm#0.{}_0"
    else:
        model, name = nn.Sequential(tg.LSTM.from_torch(plain)), "0.{}_l0"
    reading = read(model, x)
    h = c = torch.zeros(2, 4)
    heard = {g: [] for g in ("i", "f", "g", "o", "cell")}
    for t in range(6):
        a = F.linear(x[:, t], plain.weight_ih_l0, plain.bias_ih_l0)
        a = a + F.linear(h, plain.weight_hh_l0, plain.bias_hh_l0)
        for gate, part in zip("ifgo", a.chunk(4, 1), strict=True):
            heard[gate].append(part)
        i, f, g, o = a.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        heard["cell"].append(c)
        h = o.sigmoid() * c.tanh()
    for gate, parts in heard.items():
        values = torch.cat(parts).detach().double()
        seen = reading[name.format(gate)].values
        torch.testing.assert_close(seen.mean, values.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen.std, values.std(0, correction=0), rtol=1e-4, atol=1e-6)
        assert seen.count == 12


def test_cells_and_packed_sequences_are_heard_too():
    x = torch.randn(5, 3, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
    model = nn.Sequential(tg.GRU(3, 4, 2, bidirectional=True))
    reading = read(model, packed)
    assert {s.values.count for s in reading.sites} == {11}
    assert len(reading.sites) == 3 * 4
    cell = tg.convert(nn.GRUCell(3, 4), inputs=torch.randn(2, 3))
    assert {s.values.count for s in read(cell, torch.randn(7, 3)).sites} == {7}


@pytest.mark.parametrize("mean", [1e6, -1e8])
def test_the_deviation_is_right_beside_a_large_mean(mean, monkeypatch):
    monkeypatch.setattr(tally, "_AT_ONCE", 500)  # so that parts are merged
    z = mean + torch.randn(3, 4000).double() * torch.tensor([[1.0], [0.1], [0.0]])
    z[0, ::7] = math.nan
    z[1, :600] = math.nan  # of whole parts nothing is known
    v = tallied("identity", z[:, :1003], z[:, 1003:])
    for k, row in enumerate(z):
        x = row[row.isfinite()]
        assert v.mean[k] == pytest.approx(x.mean().item(), rel=1e-15)
        # a mean that is off by one unit in the last place is as far off as it is here
        assert v.std[k] == pytest.approx(x.std(correction=0).item(), rel=1e-9, abs=1e-7)
