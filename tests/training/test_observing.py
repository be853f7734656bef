"""What the gates of a network see in one step."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import threshold_gating as tg
from threshold_gating.training import observing
from threshold_gating.training.observing import observed


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Linear(4, 5), (3, 4), 1),
        (nn.Linear(4, 5), (3, 7, 4), 2),
        (nn.Linear(4, 5), (3, 5, 5, 4), 3),  # channels last, as ConvNeXt has them
        (nn.Conv1d(4, 5, 1), (3, 4, 5), 1),
        (nn.Conv2d(4, 5, 1), (3, 4, 6, 6), 1),
        (nn.BatchNorm2d(4), (3, 4, 6, 6), 1),
        (nn.LayerNorm(4), (3, 6, 4), 2),
        (nn.Identity(), (3, 4, 6, 6), 1),
        (nn.Identity(), (3, 6, 4), 2),
    ],
)
def test_the_layer_before_says_where_the_channels_of_a_whole_layers_gate_are(layer, shape, axis):
    model = nn.Sequential(layer, tg.Activation("relu"))
    with observed(model) as seen:
        y = model(torch.randn(shape))
    assert seen.seen["1"].axis == axis
    assert len(seen.seen["1"].flat) == y.shape[axis]
    dead = (y.movedim(axis, 0).flatten(1) == 0).float().mean(1)
    torch.testing.assert_close(seen.seen["1"].flat, dead)


def test_a_large_input_is_sampled_by_whole_samples(monkeypatch):
    monkeypatch.setattr(observing, "ELEMENTS", 40)
    act = tg.Activation("relu")
    x = torch.randn(50, 8)
    with observed(act) as seen:
        act(x)
    assert seen.seen["activation"].values == 5


def test_runs_without_gradients_are_not_looked_at():
    act = tg.Activation("relu")
    with observed(act) as seen, torch.no_grad():
        act(torch.randn(5, 3))
    assert not seen.seen


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_part_is_seen_once(reentrant):
    act = nn.Sequential(nn.Linear(3, 4), tg.Activation("silu", train=("tau",)))
    x = torch.randn(5, 3, requires_grad=True)
    with observed(act) as seen:
        y = torch.utils.checkpoint.checkpoint(act, x, use_reentrant=reentrant)
        y.sum().backward()
    assert seen.seen["1"].values == 5


@pytest.mark.parametrize("layer", [tg.LSTM, tg.GRU])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_is_judged_by_what_reaches_its_gates(layer, batch_first):
    """Step by step with torch's own cell in float64."""
    run = layer(3, 4, train=("theta",), batch_first=batch_first, num_layers=2, bidirectional=True)
    x = torch.randn(6, 5, 3)
    state = torch.get_rng_state()
    with observed(run) as seen:
        run(x if batch_first else x.transpose(0, 1))
    assert torch.equal(state, torch.get_rng_state())
    name = type(run).__name__.lower()
    sites = {f"{name}.{site}" for site in run.learned_gates()}
    assert set(seen.seen) == sites
    assert all(s.values == 30 and len(s.flat) == 4 for s in seen.seen.values())


def test_the_forget_gate_of_an_lstm_is_flat_where_torchs_pre_activations_say_so():
    run = tg.LSTM(3, 4, train=("theta",), batch_first=True)
    with torch.no_grad():
        run.bias_ih_l0[4:8] += torch.tensor([0.0, 4.0, 5.0, 9.0])
    x = torch.randn(6, 5, 3)
    with observed(run) as seen:
        h, _ = run(x)
    before = torch.cat([torch.zeros(6, 1, 4), h[:, :-1]], 1)
    a = F.linear(x, run.weight_ih_l0, run.bias_ih_l0) + F.linear(
        before, run.weight_hh_l0, run.bias_hh_l0
    )
    f = torch.sigmoid(a[..., 4:8])
    want = (f * (1 - f) <= 0.01 * 0.25).flatten(0, 1).float().mean(0)
    assert 0 < want[2] < 1
    torch.testing.assert_close(seen.seen["lstm.f_l0"].flat, want.detach())


def test_packed_sequences_and_what_is_not_element_wise_are_named():
    run = tg.LSTM(3, 4, train=("theta",))
    with observed(run) as seen:
        run(nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(4, 3)]))
    assert seen.unjudged == {"lstm": "it is given packed sequences"}

    class Soft(nn.Module):
        def forward(self, x):
            return torch.relu(x).softmax(-1)

    x = torch.randn(5, 3)
    model = tg.convert(Soft(), inputs=x)
    with observed(model) as seen:
        model(x)
    assert set(seen.seen) == {":relu#0"}
    assert seen.unjudged == {":softmax#0": "softmax is not one element-wise function"}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tier", ["W", "S", "general"])
def test_a_channel_of_a_tier_is_flat_where_no_output_moves_with_it(tier, groups):
    layer = tg.Conv2d(4, 4, 3, padding=1, init="relu", tier=tier, groups=groups)
    x = torch.randn(3, 4, 6, 6)
    x[:, 2] -= 100
    with observed(layer) as seen:
        layer(x)
    (found,) = seen.seen.values()
    assert found.flat[2] == 1.0
    assert (found.flat[[0, 1, 3]] < 0.9).all()
