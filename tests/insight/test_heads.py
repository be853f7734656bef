"""Thresholds of attention, head by head, against log-sum-exp of the others in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.insight import read
from threshold_gating.insight.attention import HeadTally


class Attention(nn.Module):
    def __init__(self, keys=4, **options):
        super().__init__()
        self.q, self.kv, self.options = nn.Linear(12, 24), nn.Linear(12, 12 * keys // 4), options
        self.keys = keys

    def project(self, x):
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (self.keys, -1)).transpose(1, 2)
        return q, F.pad(kv, (0, 6 - kv.shape[-1]))

    def forward(self, x):
        q, k = self.project(x)
        return F.scaled_dot_product_attention(q, k, k, **self.options)


def expected(z):
    """[heads] figures of logits [batch, heads, queries, keys], one threshold at a time."""
    z = z.double()
    thetas, keys, decided = [], [], []
    for head in z.unbind(1):
        rows = head.flatten(0, 1)
        own = []
        for row in rows:
            live = row[row > -math.inf]
            for j in range(len(live)):
                others = torch.cat([live[:j], live[j + 1 :]])
                if len(others):
                    own.append(others.logsumexp(0))
        p = rows.softmax(-1)
        entropy = -torch.special.xlogy(p, p).sum(1)
        thetas.append(torch.stack(own).quantile(torch.tensor([0.1, 0.5, 0.9]).double()))
        keys.append(entropy.exp().mean())
        decided.append((p.amax(1) >= 0.99).double().mean())
    return torch.stack(thetas, 1), torch.stack(keys), torch.stack(decided)


def check(found, z):
    theta, keys, decided = expected(z.detach())
    torch.testing.assert_close(found.theta, theta, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.keys, keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.decided, decided)


def logits(model, x, causal=False, mask=None):
    q, k = model.project(x)
    z = q @ k.repeat_interleave(4 // model.keys, 1).transpose(-1, -2) / math.sqrt(6)
    if causal:
        mask = torch.ones(z.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return z
    return z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask


@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_the_thresholds_of_a_head_are_those_of_its_logits(keys, causal):
    model = Attention(keys, is_causal=causal, enable_gqa=keys < 4)
    x = 3 * torch.randn(2, 7, 12)
    (found,) = read(tg.convert(model, inputs=x), x).heads
    assert (found.heads, found.queries, found.learned) == (4, 14, False)
    check(found, logits(model, x, causal))
    live = torch.arange(1, 8).double().mean() if causal else 7.0
    assert found.live.tolist() == [float(live)] * 4


@pytest.mark.parametrize("shape", [(7, 7), (2, 1, 7, 7), (1, 4, 7, 7)])
def test_masks_count(shape):
    mask = torch.randn(shape)
    model = Attention(attn_mask=mask)
    x = torch.randn(2, 7, 12)
    (found,) = read(tg.convert(model, inputs=x), x).heads
    check(found, logits(model, x, mask=mask))


def test_without_heads_each_of_a_batch_has_its_own_mask():
    class Bare(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, mask = torch.randn(3, 5, 6), torch.randn(3, 5, 5)
    (found,) = read(tg.convert(Bare(), inputs=(q, mask)), q, mask).heads
    check(found, (q @ q.transpose(1, 2) / math.sqrt(6) + mask).unsqueeze(1))


def test_the_thresholds_that_are_kept_are_of_all_keys():
    z = torch.tensor([5.0, 0.0, 0.0, 0.0]).expand(4096, 4)
    tally = HeadTally(1, None)
    tally.add([z])  # one threshold in four is kept, and one in four is low
    low, high = math.log(3), math.log(math.exp(5) + 2)
    assert tally.reading("a").theta.flatten().tolist() == pytest.approx([low, high, high])


def test_queries_with_a_logit_that_is_nan_are_left_out_and_said():
    model, x = Attention(), torch.randn(2, 7, 12)
    gated = tg.convert(model, inputs=x)
    x[1, 3] = math.nan  # a key of all seven queries
    reading = read(gated, x)
    (found,) = reading.heads
    check(found, logits(model, x[:1]))
    assert (found.lost, found.queries) == (28, 7)
    assert any("28 queries of its heads have a logit that is NaN" in n for n in reading.notes)


def test_a_temperature_that_is_not_finite_is_said():
    x = torch.randn(2, 7, 12)
    model = tg.convert(Attention(), train=("tau",), share="channel", inputs=x)
    with torch.no_grad():
        next(iter(tg.training.gate_parameters(model).values()))[..., 2] = math.nan
    for reading in (read(model), read(model, x)):
        assert any("tau of head 2 is not finite" in note for note in reading.notes)


def test_a_learned_temperature_is_read_and_multiplies_the_logits():
    model = Attention()
    x = torch.randn(2, 7, 12)
    learner = tg.convert(model, train=("tau",), share="head", inputs=x)
    with torch.no_grad():
        (rho,) = tg.training.gate_parameters(learner).values()
        rho.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
    (found,) = read(learner, x).heads
    torch.testing.assert_close(found.tau, rho.detach().double().exp(), rtol=1e-6, atol=0)
    assert found.learned
    check(found, logits(model, x) * rho.exp().view(4, 1, 1))


def test_a_softmax_over_keys_shows_its_heads():
    class Written(Attention):
        def forward(self, x):
            q, k = self.project(x)
            return (q @ k.transpose(-1, -2) / math.sqrt(6)).softmax(-1) @ k

    model = Written()
    x = torch.randn(2, 7, 12)
    (found,) = read(tg.convert(model, inputs=x), x).heads
    assert found.heads == 4
    check(found, logits(model, x))


def test_a_softmax_without_heads_is_one():
    model = tg.convert(nn.Sequential(nn.Linear(5, 9), nn.Softmax(-1)), inputs=torch.randn(3, 5))
    x = torch.randn(6, 5)
    (found,) = read(model, x).heads
    assert found.heads == 1
    check(found, model[0](x)[None, None])


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_multi_head_attention_is_opened(need_weights):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[0]

    model = Block()
    x = torch.randn(2, 5, 12)
    (found,) = read(tg.convert(model, inputs=x), x).heads
    own = model.attention
    q, k, _ = F.linear(x, own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
    q, k = (w.unflatten(-1, (3, 4)).transpose(1, 2) for w in (q, k))
    check(found, q @ k.transpose(-1, -2) / 2)


@pytest.mark.filterwarnings("ignore:convert:UserWarning")  # ReLU has no tau to learn
def test_the_thresholds_of_a_learned_multi_head_attention_are_said_not_to_be_read():
    model = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    reading = read(tg.convert(model, train=("tau",), share="head", inputs=x), x)
    (found,) = reading.heads
    assert found.tau.tolist() == [1.0] * 3
    assert found.theta.isnan().all()
    assert "its learned temperatures are in its weights" in " ".join(reading.notes)


def test_a_query_that_sees_one_key_has_no_threshold():
    z = torch.full((1, 1, 2, 3), -math.inf)
    z[..., 0] = 1.0
    model = tg.convert(nn.Softmax(-1), inputs=z)
    (found,) = read(model, z).heads
    assert found.theta.isnan().all()
    assert found.keys.tolist() == [1.0]
    assert found.decided.tolist() == [1.0]
    assert "nan" in read(model, z).table()


def test_a_mask_of_the_lowest_number_is_a_mask():
    class Masked(Attention):
        def forward(self, x):
            q, k = self.project(x)
            z = q @ k.transpose(-1, -2) / math.sqrt(6)
            return (z + self.mask).softmax(-1) @ k

    model, x = Masked(), torch.randn(2, 7, 12)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    model.mask = torch.zeros(7, 7).masked_fill(~causal, torch.finfo(torch.float32).min)
    (found,) = read(tg.convert(model, inputs=x), x).heads
    assert found.live.tolist() == [4.0] * 4
    check(found, logits(model, x, causal=True))


def test_temperatures_are_read_without_a_run_and_from_a_folder(tmp_path):
    x = torch.randn(2, 7, 12)
    model = tg.convert(Attention(), train=("tau",), share="head", inputs=x)
    with torch.no_grad():
        next(iter(tg.training.gate_parameters(model).values())).copy_(torch.arange(4) / 4)
    tg.conversion.save(model, tmp_path)
    for reading in (read(model), read(tmp_path)):
        (found,) = reading.heads
        torch.testing.assert_close(found.tau, (torch.arange(4) / 4).exp().double())
        assert (found.queries, found.learned) == (0, True)
        assert found.keys.isnan().all()
        assert "nan" not in reading.table()
        assert not any("No gate learns" in note for note in reading.notes)


class Written(Attention):
    """Attention in torch's own steps, with a mask that is added."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        q, k = self.project(x)
        z = q @ k.transpose(-1, -2) / math.sqrt(6)
        return (z + self.mask.to(z)).softmax(-1) @ k


CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()


@pytest.mark.parametrize("low", [-100.0, -1e4, -65504.0, -1e9, -3e38, -math.inf])
@pytest.mark.parametrize("written", [False, True])
def test_a_key_whose_weight_is_0_is_not_seen_whatever_number_masks_it(low, written):
    mask = torch.zeros(7, 7).masked_fill(~CAUSAL, low)
    model, x = Written(mask) if written else Attention(attn_mask=mask), torch.randn(2, 7, 12)
    (found,) = read(tg.convert(model, inputs=x), x).heads
    assert found.live.tolist() == [4.0] * 4
    check(found, logits(model, x, causal=True))


@pytest.mark.parametrize("tau", [0.01, 0.4, 3.0])
@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("written", [False, True])
def test_a_temperature_does_not_open_a_mask(tau, low, written):
    mask = torch.zeros(7, 7).masked_fill(~CAUSAL, low)
    model, x = Written(mask) if written else Attention(attn_mask=mask), torch.randn(2, 7, 12)
    learner = tg.convert(model, train=("tau",), share="head", inputs=x)
    with torch.no_grad():
        next(iter(tg.training.gate_parameters(learner).values())).fill_(math.log(tau))
    (found,) = read(learner, x).heads
    # written out, the temperature is a factor of the mask, too: -1e4 is -100 at 0.01
    assert found.live.tolist() == [4.0] * 4
    check(found, tau * logits(model, x, causal=True))


def test_a_mask_that_a_temperature_makes_weak_lets_keys_be_seen():
    model = tg.convert(nn.Softmax(-1), train=("tau",), inputs=torch.randn(2, 3))
    with torch.no_grad():
        next(iter(tg.training.gate_parameters(model).values())).fill_(math.log(1e-3))
    z = torch.tensor([[0.0, 1.0, -1e4]])
    assert model(z)[0, 2] > 1e-5  # so the network sees it
    (found,) = read(model, z).heads
    assert found.live.tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("low", ["min", -1e4])
def test_masks_of_other_types_are_masks(dtype, low):
    class Plain(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(2, 4, 7, 6).to(dtype)
    mask = torch.zeros(7, 7, dtype=dtype)
    mask.masked_fill_(~CAUSAL, torch.finfo(dtype).min if low == "min" else low)
    (found,) = read(tg.convert(Plain(), inputs=(q, mask)), q, mask).heads
    assert found.live.tolist() == [4.0] * 4
    wide = q.double()
    check(found, (wide @ wide.mT / math.sqrt(6)).masked_fill(~CAUSAL, -math.inf))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("written", [False, True])
def test_a_query_that_is_masked_whole_is_left_out(dtype, written):
    class Plain(nn.Module):
        def forward(self, q, mask):
            if written:
                return (q @ q.mT / math.sqrt(6) + mask).softmax(-1)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(2, 4, 7, 6).to(dtype)
    mask = torch.zeros(7, 7, dtype=dtype)
    mask[:3] = torch.finfo(dtype).min
    (found,) = read(tg.convert(Plain(), inputs=(q, mask)), q, mask).heads
    assert found.queries == 2 * 4
    assert found.live.tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 1, 5, 6), (2, 3, 7, 6)),
        ((2, 3, 5, 6), (2, 1, 7, 6)),
        ((1, 3, 5, 6), (2, 3, 7, 6)),
        ((3, 5, 6), (2, 3, 7, 6)),
    ],
)
def test_heads_of_queries_and_of_keys_may_stretch(q, k):
    class Plain(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    q, k = torch.randn(q), torch.randn(k)
    (found,) = read(tg.convert(Plain(), inputs=(q, k)), q, k).heads
    assert (found.heads, found.queries) == (3, 10)
    check(found, q.double() @ k.double().mT / math.sqrt(6))


def test_attention_without_a_key_has_no_figures():
    class Plain(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    model = tg.convert(Plain(), inputs=(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)))
    (found,) = read(model, torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)).heads
    assert found.queries == 0
    assert found.keys.isnan().all()


def test_thresholds_that_are_numbers_are_not_read_as_those_of_softmax():
    x = torch.randn(2, 7, 12)
    model = tg.conversion.fixed_thresholds(Attention(), [x])
    with pytest.raises(ValueError, match="its thresholds are numbers of its own"):
        read(model, x)
