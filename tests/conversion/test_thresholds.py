"""Attention with fixed thresholds: measured on a network, learnable, without a sum over the keys."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.conversion import fixed_thresholds
from threshold_gating.conversion.thresholds import _bucket


class Attention(nn.Module):
    """Two heads of size 4, causal."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.qkv, self.scale = nn.Linear(8, 24), scale

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return y.transpose(1, 2).flatten(-2)


class Net(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.a, self.b = Attention(scale), Attention(scale)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def test_rows_fall_into_half_octaves_of_the_keys_they_see():
    z = torch.zeros(13, 13).masked_fill(torch.ones(13, 13).triu(1).bool(), -math.inf)
    assert _bucket(z).tolist() == [0, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7]


def test_logits_that_are_all_equal_have_the_thresholds_that_softmax_has():
    """theta = log(n - 1) + z then, the same in every row of n keys, so nothing is lost at 1 to 4."""
    net, x = Net(scale=1e-9), torch.randn(3, 4, 8)
    fixed = fixed_thresholds(net, [x, x[:1]])
    torch.testing.assert_close(fixed(x), net(x))
    want = torch.tensor([math.log(n - 1) for n in (2, 3, 4)]).expand(2, 3)
    torch.testing.assert_close(fixed.a.thresholds.theta.data[:, 2:], want)


def test_a_threshold_is_the_mean_of_those_that_were_measured():
    net, batches = Net(), [torch.randn(2, 6, 8), torch.randn(5, 3, 8)]
    seen = [[] for _ in range(6)]
    for x in batches:
        q, k, _ = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in net.a.qkv(x).chunk(3, -1))
        z = (q @ k.transpose(-2, -1)).double()
        for i in range(1, x.shape[1]):
            for j in range(i + 1):
                others = torch.cat([z[:, :, i, :j], z[:, :, i, j + 1 : i + 1]], -1)
                bucket = round(2 * math.log2(i + 1))
                seen[bucket].append(others.logsumexp(-1))
    theta = fixed_thresholds(net, batches).a.thresholds.theta
    for bucket in (2, 3, 4, 5):
        want = torch.cat(seen[bucket]).mean(0)
        torch.testing.assert_close(theta[:, bucket].double(), want, rtol=1e-5, atol=1e-5)


def test_a_gate_does_not_see_the_other_keys():
    """Another key changes what it adds itself, and nothing of what the others add."""
    net, x = Net(), torch.randn(1, 6, 8)
    fixed = fixed_thresholds(net, [x]).a
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    gated = fixed.thresholds
    other = k.clone()
    other[:, :, 2] += 1
    before, after = (gated(q, keys, v.index_fill(2, torch.tensor(2), 0.0)) for keys in (k, other))
    assert torch.equal(before, after)
    assert not torch.allclose(gated(q, k, v), gated(q, other, v))


def test_the_thresholds_are_all_that_is_new_and_they_learn():
    net, x = Net(), torch.randn(4, 6, 8)
    state = copy.deepcopy(net.state_dict())
    fixed = fixed_thresholds(net, [x])
    new = [name for name, _ in fixed.named_parameters() if name not in state]
    assert new == ["a.thresholds.theta", "b.thresholds.theta"]
    assert all(torch.equal(net.state_dict()[name], state[name]) for name in state)
    want = net(x).detach()
    theta = [p for name, p in fixed.named_parameters() if name in new]
    optimizer = torch.optim.Adam(theta, lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(fixed(x), want)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    again = copy.deepcopy(fixed)
    torch.testing.assert_close(again(x), fixed(x))
    with torch.no_grad():
        again.a.thresholds.theta += 1  # a copy has thresholds of its own, and they are what runs
    assert not torch.allclose(again(x), fixed(x))


def test_longer_rows_than_measured_take_the_last_threshold():
    net = Net()
    fixed = fixed_thresholds(net, [torch.randn(2, 4, 8)])
    assert fixed.a.thresholds.theta.shape == (2, 5)
    assert fixed(torch.randn(2, 50, 8)).isfinite().all()


def test_what_it_cannot_do_is_said():
    with pytest.raises(tg.conversion.ConversionError, match="one call of scaled_dot_product"):
        fixed_thresholds(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [torch.randn(2, 3)])


def test_saving_it_as_a_conversion_is_refused(tmp_path):
    fixed = fixed_thresholds(Net(), [torch.randn(2, 4, 8)])
    with pytest.raises(tg.conversion.CheckpointError, match="keep the state dict"):
        tg.conversion.save(fixed, tmp_path)
