"""`convert(train=...)`: gates that learn where they stand, in any network."""

import copy
import functools
import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import learning
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from threshold_gating import GateConfig, kernels
from threshold_gating.conversion import (
    ConversionError,
    convert,
    convert_,
    gate_parameters,
    learned_gates,
    revert,
)
from threshold_gating.conversion.checkpoint import schema
from threshold_gating.training import check_decay, param_groups

BOTH = ("tau", "theta")
NETWORKS = list(learning.NETWORKS)


def quietly(model, sites=None, **options):
    """Converted, without the warning of what some sites cannot learn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert(model, sites, **options)


@pytest.fixture(scope="module")
def learned():
    """Every network, converted with gates that learn per channel."""
    return {name: learning.converted(name) for name in NETWORKS}


@pytest.fixture(scope="module")
def trained(learned, tmp_path_factory):
    """The networks after some steps, saved, and what a fresh process and this one made of them."""
    folder = tmp_path_factory.mktemp("learned")
    after = {}
    for name, net in learned.items():
        model = copy.deepcopy(net)
        optimizer = learning.optimizer_of(model)
        learning.train(name, model, optimizer, 0, learning.STEPS)
        tg.conversion.save(model, folder / name)
        torch.save(optimizer.state_dict(), folder / name / "optimizer.pt")
        moved = copy.deepcopy(model)
        learning.train(name, model, optimizer, learning.STEPS, learning.MORE)
        after[name] = moved, model.state_dict()
    source = Path(tg.__file__).parents[1]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    command = [sys.executable, learning.__file__, str(folder)]
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: (*after[name], torch.load(folder / name / "after.pt")) for name in NETWORKS}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_whose_gates_learn_has_the_modules_and_keys_of_the_original(name, learned):
    original, net = learning.made(name), learned[name]
    assert [n for n, _ in net.named_modules()] == [n for n, _ in original.named_modules()]
    keys = original.state_dict().keys()
    assert [k for k in net.state_dict() if k in keys] == list(keys)
    missing = copy.deepcopy(net).load_state_dict(original.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) == net.state_dict().keys() - keys
    assert gate_parameters(net).keys() <= set(missing.missing_keys)


@pytest.mark.parametrize("name", NETWORKS)
def test_gates_that_learn_start_at_the_frozen_ones_to_the_bit(name, learned):
    x, net = learning.inputs(name), copy.deepcopy(learned[name]).eval()
    frozen = convert(learning.made(name).eval(), inputs=x)
    with kernels.use("reference"):
        y, z = learning.output(net, x), learning.output(frozen, x)
        assert torch.equal(y, z)
        grads = [
            torch.autograd.grad(out.square().sum(), [dict(m.named_parameters())[n] for n in names])
            for names in [[n for n, p in frozen.named_parameters() if p.requires_grad]]
            for m, out in ((net, y), (frozen, z))
        ]
    for a, b in zip(*grads, strict=True):
        # the gates' own gradients are added up beside those of x, in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_gate_gets_a_gradient_and_moves(name, learned, trained):
    moved, _, _ = trained[name]
    start = gate_parameters(learned[name])
    assert not [n for n, p in gate_parameters(moved).items() if torch.equal(p, start[n])]
    assert all(p.isfinite().all() for p in gate_parameters(moved).values())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_was_saved_goes_on_to_the_bit_in_a_fresh_process(name, trained):
    _, here, there = trained[name]
    assert here.keys() == there.keys()
    assert all(torch.equal(here[k], there[k]) for k in here)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fresh_network_is_verified_and_a_trained_one_says_what_moved(name, learned, trained):
    x, original = learning.inputs(name), learning.made(name).eval()
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    fresh = tg.verify(original, learned[name], *args, **kwargs)
    assert fresh.ok
    assert not fresh.trained
    assert {row.site for row in fresh.rows if row.learns} == set(sites_that_learn(learned[name]))
    assert not any(row.has_moved for row in fresh.rows)
    after = tg.verify(original, trained[name][0], *args, **kwargs)
    assert after.ok
    assert "trained since it was converted" in after.trained
    text = str(after)
    assert max(map(len, text.splitlines())) <= 100
    assert "not held to the original's" in " ".join(text.split())
    assert "|d log tau|" in text
    assert all(row.has_moved for row in after.rows if row.learns and row.calls)


def test_what_was_changed_beside_weights_and_gates_is_found_although_gates_moved():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.second = nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 3)
            self.scale = 1.0

        def forward(self, x):
            return self.scale * self.second(self.act(self.first(x)))

    model, x = Scaled().eval(), torch.randn(6, 4)
    gated = convert(model, inputs=x, train=BOTH, share="channel")
    with torch.no_grad():
        for p in gated.parameters():
            p.add_(0.1)
    assert tg.verify(model, gated, x).ok
    gated.scale = 7.0
    assert "beside weights and gates" in tg.verify(model, gated, x).failed["start"]


def sites_that_learn(model):
    sites = {}
    for module in model.modules():
        plan = vars(module).get("tg_sites") or {}
        own = vars(module).get("sites") or [vars(module).get("site")]
        sites |= {s.name: s for s in (*plan.values(), *own) if s is not None and s.learns}
    return sites


class Net(nn.Module):
    """Layers and activations, modules and calls, for what one network shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act, self.out = nn.Conv2d(3, 4, 3), nn.GELU(), nn.Linear(4, 5)

    def forward(self, x):
        x = F.relu(self.act(self.conv(x)))
        return torch.tanh(self.out(x.mean((2, 3))))


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def net(**options):
    return quietly(Net(), inputs=X, train=BOTH, share="channel", **options)


def test_parameters_have_readable_names_and_the_size_of_what_shares_them():
    shapes = {n: tuple(p.shape) for n, p in gate_parameters(net()).items()}
    assert shapes == {
        "tg_relu_0_dtheta": (1, 4),
        "tg_tanh_0_rho": (5,),
        "tg_tanh_0_dtheta": (1, 5),
        "act.rho": (4,),
        "act.dtheta": (4, 4),  # GELU is five branches
    }
    everything = quietly(Net(), inputs=X, train=("tau", "theta", "s", "c"))
    assert tuple(everything.tg_tanh_0_s.shape) == (2, 1)
    assert tuple(everything.tg_relu_0_v.shape) == (2, 1)
    with pytest.warns(UserWarning, match=r"another size are refused: act \(4, 4, 4\)"):
        positions = convert(Net(), inputs=X, train="theta", share="neuron")
    assert tuple(positions.tg_relu_0_dtheta.shape) == (1, 4, 4, 4)


def test_what_a_site_cannot_learn_is_said_once_with_the_sites():
    with pytest.warns(UserWarning, match="only theta is learned, because a hard gate") as said:
        convert(Net(), inputs=X, train=BOTH)
    assert len(said) == 1
    assert ":relu#0" in str(said[0].message)


def test_quadratic_instances_stay_frozen_unless_another_is_chosen():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Hardswish(), nn.GELU()), torch.randn(5, 3)
    with pytest.warns(UserWarning, match=r"1: nothing is learned, .*'hardswish_k3'"):
        frozen = convert(model, inputs=x, train=BOTH)
    assert not frozen[1].learned
    chosen = convert(model, {"1": "hardswish_k3"}, inputs=x, train=BOTH, tol=torch.inf)
    assert chosen[1].learned == BOTH
    with pytest.raises(ConversionError, match=r"1 .* is to learn tau, theta and cannot"):
        convert(model, {"1": GateConfig(train=BOTH)}, inputs=x)


@pytest.mark.parametrize("act", [nn.Tanhshrink, nn.Hardsigmoid, nn.LogSigmoid, nn.SELU, nn.ReLU6])
def test_branches_that_learn_are_verified_where_they_cancel(act):
    x = torch.cat([torch.randn(40, 1), torch.tensor([[1e-4], [-3.0001]])])
    model = quietly(nn.Sequential(act()), inputs=x, train=("tau", "theta", "s", "c"))
    assert len(list(model.parameters())) >= 3


def test_rows_of_a_linear_layer_may_have_more_axes_later():
    model = convert(
        nn.Sequential(nn.Linear(3, 4), nn.SiLU()),
        inputs=torch.randn(2, 3),
        train=BOTH,
        share="channel",
    )
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(model(x)[0], model(x[0]))


def test_nothing_that_can_learn_is_an_error_that_says_why():
    with pytest.raises(ConversionError, match=r"no site learns anything .* quadratic branches"):
        convert(nn.Sequential(nn.Hardswish()), inputs=torch.randn(3), train=BOTH)
    with pytest.raises(ConversionError, match=r"no site learns anything .* no sharpness"):
        convert(nn.Sequential(nn.ReLU()), inputs=torch.randn(3), train="tau")


class Data(nn.Module):
    """Calls whose thresholds are data, and PReLU."""

    def __init__(self):
        super().__init__()
        self.prelu, self.low = nn.PReLU(), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return torch.maximum(self.prelu(x), torch.clamp(x, self.low)).sigmoid()


def test_sites_with_thresholds_of_their_own_stay_and_are_named():
    with pytest.warns(UserWarning, match="nothing is learned") as said:
        model = convert(Data(), inputs=torch.randn(3, 4), train=BOTH)
    text = str(said[0].message)
    for part in ("prelu:prelu#0", "PReLU has a weight", ":maximum#0", ":clamp_by_tensors#0"):
        assert part in text
    assert set(gate_parameters(model)) == {"tg_sigmoid_0_rho", "tg_sigmoid_0_dtheta"}


def test_gates_that_learn_need_inputs():
    with pytest.raises(ConversionError, match="need inputs="):
        convert(Net(), train=BOTH)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"train": "slope"}, ValueError, "train takes tau, theta, s, c"),
        ({"train": True}, TypeError, "train names what is learned"),
        ({"train": BOTH, "share": "net"}, ValueError, "take 'layer'"),
        ({"train": BOTH, "share": "synapse"}, ValueError, "share is one of"),
        ({"train": BOTH, "share": "head"}, ConversionError, "no heads"),
        ({"train": BOTH, "config": GateConfig()}, ValueError, "config and train were both given"),
        ({"share": "channel", "config": GateConfig()}, ValueError, "config and share"),
        ({"config": GateConfig(init="relu")}, ValueError, "would stand at every site"),
        ({"config": {"train": BOTH}}, TypeError, "config must be a GateConfig"),
        ({"share": "channel"}, ValueError, "it says share or axis.*train names nothing"),
        ({"config": GateConfig(axis=1)}, ValueError, "it says share or axis"),
        ({"sites": {"act": GateConfig(share="layer")}}, ValueError, r"sites\['act'\] says share"),
        ({"sites": {"re:(": None}}, ValueError, "no regular expression"),
        ({"sites": {"9": GateConfig(train="tau")}}, ConversionError, "'9' matches no site"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_changed(options, error, says):
    model = Net()
    before = {n: (type(m), dict(vars(m))) for n, m in model.named_modules()}
    with pytest.raises(error, match=says):
        convert_(model, inputs=X, **options)
    assert {n: (type(m), dict(vars(m))) for n, m in model.named_modules()} == before


class Sequence(nn.Module):
    def forward(self, x):
        return x.relu()


def test_an_axis_that_nobody_knows_is_refused_with_the_shape_and_can_be_said():
    x = torch.randn(2, 5, 4)
    with pytest.raises(ConversionError, match=r"shape \(2, 5, 4\).*GateConfig\(axis=1\)"):
        convert(Sequence(), inputs=x, train="theta", share="channel")
    said = convert(
        Sequence(), {":relu#0": GateConfig(axis=1)}, inputs=x, train="theta", share="channel"
    )
    assert tuple(said.tg_relu_0_dtheta.shape) == (1, 5)
    with pytest.raises(ConversionError, match=r"shape \(2, 5, 4\) has no axis 3"):
        convert(
            Sequence(), {":relu#0": GateConfig(axis=3)}, inputs=x, train="theta", share="channel"
        )


def test_an_input_of_another_size_than_its_gates_is_refused_with_its_shape():
    model = convert(Sequence(), inputs=torch.randn(2, 5), train="theta", share="channel")
    with pytest.raises(ValueError, match=r"\(5,\) at axis .* shape \(2, 7\)"):
        model(torch.randn(2, 7))


class Then(nn.Module):
    """A layer, something, and an activation."""

    def __init__(self, layer, between):
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x):
        return F.silu(self.between(self.layer(x)))


@pytest.mark.parametrize(
    ("layer", "between", "shape"),
    [
        (nn.Conv1d(5, 6, 1), lambda y: y.reshape(-1, 7), (2, 5, 7)),
        (nn.Conv2d(3, 6, 1), lambda y: y.flatten(1), (2, 3, 4, 4)),
        (nn.Linear(5, 5), lambda y: torch.cdist(y, torch.ones(5, 5)), (2, 4, 5)),
        (nn.Conv1d(3, 4, 1), nn.LayerNorm(9), (2, 3, 9)),
        (nn.Linear(3, 4), nn.BatchNorm1d(9), (2, 9, 3)),
    ],
)  # fmt: skip
def test_channels_that_are_no_axis_any_more_are_refused_whatever_the_shape(layer, between, shape):
    with pytest.raises(ConversionError, match=r"not known to keep the channels.*share='layer'"):
        convert(Then(layer, between), inputs=torch.randn(shape), train="tau", share="channel")


@pytest.mark.parametrize("first", [(3, 8, 8), (6, 3, 8, 8)])
def test_gates_behind_a_convolution_are_per_channel_with_and_without_a_batch(first):
    images = torch.randn(6, 3, 8, 8)
    inputs = images if len(first) == 4 else images[0]
    net = convert(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.SiLU()), inputs=inputs, train="theta", share="channel"
    )
    with torch.no_grad():
        net[1].dtheta.copy_(torch.randn(1, 6))
    torch.testing.assert_close(torch.stack([net(image) for image in images]), net(images))


class Scores(nn.Module):
    """Attention whose logits are (batch, query, head, key)."""

    def forward(self, x):
        return torch.einsum("bqhd,bkhd->bqhk", x, x).mul(0.5).softmax(-1)


def test_queries_are_not_taken_for_heads():
    x = torch.randn(2, 5, 2, 4)
    with pytest.warns(UserWarning, match="no heads"):
        net = convert(Scores(), inputs=x, train="tau", share="channel")
    assert [tuple(p.shape) for p in gate_parameters(net).values()] == [(1,)]
    with pytest.raises(ConversionError, match="no heads"):
        convert(Scores(), inputs=x, train="tau", share="head")


def test_what_learns_is_listed_as_one_reads_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with pytest.warns(UserWarning, match="only theta, s and c are learned"):
        convert(model, inputs=torch.randn(2, 3), train=("tau", "theta", "s", "c"))


class Attention(nn.Module):
    def __init__(self, heads=2, softmax=False):
        super().__init__()
        self.heads, self.softmax = heads, softmax

    def forward(self, x):
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if not self.softmax:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)
        z = q @ q.transpose(-2, -1)
        hidden = torch.ones(z.shape[-2:]).triu(1).bool()
        return z.masked_fill(hidden, -torch.inf).softmax(-1) @ q


@pytest.mark.parametrize("softmax", [False, True])
def test_a_temperature_for_each_head_is_that_of_the_formula(softmax):
    model, x = Attention(softmax=softmax), torch.randn(3, 5, 8)
    net = convert(model, inputs=x, train="tau", share="head")
    (rho,) = gate_parameters(net).values()
    with torch.no_grad():
        rho.copy_(torch.tensor([0.3, -0.4]))
    q = x.unflatten(-1, (2, -1)).transpose(1, 2).double()
    scale = 1.0 if softmax else q.shape[-1] ** -0.5
    z = q @ q.transpose(-2, -1) * rho.double().exp()[:, None, None] * scale
    z = z.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(net(x).double(), z.softmax(-1) @ q, rtol=1e-5, atol=1e-5)
    net(x).square().sum().backward()
    assert rho.grad.isfinite().all()
    assert rho.grad.all()
    net.heads = 4
    with pytest.raises(ValueError, match=r"2 heads .* called with 4"):
        net(x)


def test_a_row_that_is_masked_altogether_stays_as_it_is():
    class Rows(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    x = torch.randn(2, 1, 3, 4)
    x[0, 0, 1] = torch.finfo(torch.float32).min
    model = convert(Rows(), inputs=x, train="tau")
    with torch.no_grad():
        model.tg_softmax_0_rho.fill_(1.0)
    assert torch.equal(model(x)[0, 0, 1], torch.full((4,), 0.25))
    torch.testing.assert_close(model(x)[1], (x[1] * torch.e).softmax(-1))


def test_multi_head_attention_has_the_temperature_of_each_head():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    net = quietly(model, inputs=(x, x, x), train=BOTH, share="channel")
    with torch.no_grad():
        net.tg_multi_head_attention_forward_0_rho.copy_(torch.tensor([0.5, -1.0]))
        factor = torch.tensor([0.5, -1.0]).exp().repeat_interleave(4)
        model.in_proj_weight[:8] *= factor[:, None]
        model.in_proj_bias[:8] *= factor
    for options in ({"need_weights": False}, {"average_attn_weights": False}):
        for a, b in zip(net(x, x, x, **options), model(x, x, x, **options), strict=True):
            assert (a is b is None) or torch.allclose(a, b, atol=1e-6)


def test_a_recurrent_layer_learns_as_the_one_that_is_made_by_hand():
    torch.manual_seed(0)
    plain, x = nn.GRU(3, 4, bidirectional=True), torch.randn(5, 2, 3)
    net = convert(plain, inputs=x, train=BOTH, share="channel")
    hand = tg.GRU.from_torch(plain, train=BOTH)
    with torch.no_grad():
        for name in ("rho", "dtheta"):
            values = torch.randn(2, 3, 4) / 4
            getattr(net, f"tg_gru_0_{name}").copy_(values)
            getattr(hand, f"gate_{name}_l0").copy_(values[0])
            getattr(hand, f"gate_{name}_l0_reverse").copy_(values[1])
    for a, b in zip(net(x), hand(x), strict=True):
        assert torch.equal(a, b)


def test_a_recurrent_relu_learns_its_threshold():
    plain, x = nn.RNN(3, 4, nonlinearity="relu"), torch.randn(5, 2, 3)
    net = quietly(plain, inputs=x, train=BOTH, share="channel")
    with torch.no_grad():
        net.tg_rnn_relu_0_dtheta.fill_(0.3)
    h, want = torch.zeros(2, 4), []
    for each in x:
        a = each @ plain.weight_ih_l0.T + plain.bias_ih_l0 + h @ plain.weight_hh_l0.T
        h = (a + plain.bias_hh_l0 - 0.3).relu()
        want.append(h)
    torch.testing.assert_close(net(x)[0], torch.stack(want))


def test_a_gated_linear_unit_learns_the_gate_of_its_second_half():
    model, x = nn.Sequential(nn.Linear(3, 8), nn.GLU()), torch.randn(5, 3)
    net = convert(model, inputs=x, train=BOTH, share="channel")
    glu = net[1]
    with torch.no_grad():
        glu.tg_glu_0_rho.fill_(0.7)
        glu.tg_glu_0_dtheta.fill_(0.2)
    a, b = model[0](x).chunk(2, -1)
    want = a * (torch.tensor(0.7).exp() * (b - 0.2)).sigmoid()
    torch.testing.assert_close(net(x), want)


def test_configs_by_site_beat_that_of_the_network():
    config = GateConfig(
        train=BOTH,
        share="channel",
        sites={
            "re:.*": GateConfig(train=("theta",)),
            ":tanh#0": GateConfig(share="layer", train=BOTH),
            "act": None,
        },
    )
    model = quietly(Net(), inputs=X, config=GateConfig.from_json(config.to_json()))
    assert {n: tuple(p.shape) for n, p in gate_parameters(model).items()} == {
        "tg_relu_0_dtheta": (1, 4),
        "tg_tanh_0_rho": (1,),
        "tg_tanh_0_dtheta": (1, 1),
    }
    assert type(model.act) is not tg.Activation


def moved():
    model = net()
    with torch.no_grad():
        for p in gate_parameters(model).values():
            p.add_(0.1 * torch.randn_like(p))
    return model


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_compute_the_same_and_learn_by_themselves(again):
    model = moved()
    other = again(model)
    assert torch.equal(other(X), model(X))
    assert gate_parameters(other).keys() == gate_parameters(model).keys()
    with torch.no_grad():
        other.tg_tanh_0_rho += 1
    assert not torch.equal(other(X), model(X))


def test_a_graph_module_keeps_what_its_calls_have_learned():
    graph = torch.fx.symbolic_trace(Net())
    model = quietly(graph, inputs=X, train=BOTH, share="channel")
    with torch.no_grad():
        model.tg_tanh_0_rho += 0.5
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), model(X))
        assert "tg_tanh_0_rho" in dict(other.named_parameters())


def test_functional_call_and_averages_see_the_gates():
    model = moved()
    swapped = {n: p + 0.2 if n == "tg_tanh_0_rho" else p for n, p in model.named_parameters()}
    want = copy.deepcopy(model)
    with torch.no_grad():
        want.tg_tanh_0_rho += 0.2
    torch.testing.assert_close(functional_call(model, swapped, (X,)), want(X))
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average.update_parameters(want)
    mean = (model.tg_tanh_0_rho + want.tg_tanh_0_rho) / 2
    torch.testing.assert_close(average.module.tg_tanh_0_rho, mean)


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_gates_stay_float32_in_a_network_of_16_bits(cast):
    model = getattr(moved(), cast)()
    assert {p.dtype for p in gate_parameters(model).values()} == {torch.float32}
    assert model.conv.weight.element_size() == 2


def test_a_network_in_float64_has_gates_with_all_digits():
    model = quietly(Net(), {":relu#0": "gelu_tanh"}, inputs=X, train=BOTH, tol=torch.inf).double()
    exact = convert(Net(), {":relu#0": "gelu_tanh"}, inputs=X, tol=torch.inf).double()
    assert {p.dtype for p in gate_parameters(model).values()} == {torch.float64}
    torch.testing.assert_close(model(X.double()), exact(X.double()), rtol=1e-14, atol=1e-15)


def test_memory_that_is_unset_is_given_its_start():
    model = copy.deepcopy(net()).to("meta").to_empty(device="cpu")
    model.reset_parameters()
    model.act.reset_parameters()
    for name, t in gate_parameters(net()).items():
        assert torch.equal(dict(model.named_parameters())[name], t)
    assert torch.equal(model.tg_tanh_0_tau0, net().tg_tanh_0_tau0)
    assert torch.equal(model.tg_tanh_0_s, net().tg_tanh_0_s)


def test_a_parametrized_gate_is_read_where_it_is_made():
    class Halved(nn.Module):
        def forward(self, rho):
            return rho / 2

    model, want = moved(), moved()
    want.load_state_dict(model.state_dict())
    with torch.no_grad():
        want.tg_tanh_0_rho /= 2
    torch.nn.utils.parametrize.register_parametrization(model, "tg_tanh_0_rho", Halved())
    assert torch.equal(model(X), want(X))


def test_a_state_dict_of_another_start_does_not_load():
    model, other = net(), net(sites={":tanh#0": GateConfig(init="sigmoid")}, tol=torch.inf)
    with pytest.raises(RuntimeError, match="tg_tanh_0 was saved with"):
        model.load_state_dict(other.state_dict())


class Everything(nn.Module):
    """Modules called once and twice, calls, attention, a gated unit, and some that stay."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.wide = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 16)
        self.twice, self.often, self.stays = nn.SiLU(), nn.Tanh(), nn.ReLU()
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        h = self.stays(self.twice(self.twice(self.conv(x)))).flatten(2).transpose(1, 2)
        h = torch.sigmoid(torch.sigmoid(self.linear(self.often(self.often(h)))))
        q = h.unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return self.rnn(F.glu(self.wide(h)))[0]


def test_what_was_saved_says_how_to_convert_so_again(tmp_path):
    torch.manual_seed(0)
    net, x = Everything().eval(), torch.randn(2, 3, 4, 4)
    sites = {
        "often": GateConfig(train=(), init="tanh"),
        "often#1": GateConfig(train=()),
        "stays": None,
        ":sigmoid#1": None,
        "twice#1": GateConfig(share="neuron"),
    }
    gated = quietly(net, sites, train=BOTH, share="channel", inputs=x)
    config = tg.conversion.load(tg.conversion.save(gated, tmp_path)).config
    again = quietly(net, config=GateConfig.from_json(config.to_json()), inputs=x)
    assert schema.structure(again) == schema.structure(gated)
    assert gate_parameters(again).keys() == gate_parameters(gated).keys()
    plain = tg.convert(net)  # whose calls are not known
    tg.conversion.save(plain, tmp_path)
    every = tg.convert(net, config=tg.conversion.load(tmp_path).config, inputs=x)
    assert isinstance(every.stays, tg.Activation)
    assert {":sigmoid#0", ":sigmoid#1"} <= {row.site for row in tg.verify(net, every, x).rows}


def test_reverting_takes_the_parameters_away():
    model = revert(moved())
    assert list(model.state_dict()) == list(Net().state_dict())
    assert torch.equal(model(X), Net()(X))
    assert type(model) is Net


def test_groups_have_every_gate_without_decay():
    model = net()
    groups = {g["name"]: g for g in param_groups(model, 0.1, weight_decay=0.1)}
    assert set(groups["gates"]["param_names"]) == set(gate_parameters(model))
    assert not check_decay(groups.values(), model)


def test_gates_of_calls_are_seen_as_activations_around_the_same_tensors():
    model = moved()
    found = dict(learned_gates(model))
    assert set(found) == {"act", ":relu#0", ":tanh#0"}
    gate = found[":tanh#0"]
    assert gate.rho is model.tg_tanh_0_rho
    with kernels.use("reference"):
        x = torch.randn(3, 5)
        want = [t(x[:, k]) for k, t in enumerate(gate.instances())]
        torch.testing.assert_close(gate(x), torch.stack(want, 1))


class Inside(nn.Module):
    """A checkpointed region in its own forward."""

    reentrant = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def part(self, x):
        return torch.tanh(F.silu(self.linear(torch.tanh(x))))

    def forward(self, x):
        if self.reentrant is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_have_the_gradients_of_those_that_are_not(reentrant):
    x = torch.randn(3, 4, requires_grad=True)
    grads = []
    model = convert(Inside(), inputs=x.detach(), train=BOTH, share="channel")
    with torch.no_grad():
        for p in gate_parameters(model).values():
            p.add_(0.1 * torch.randn_like(p))
    for way in (reentrant, None):
        model.reentrant = way
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(g.any() for g in grads[0])


def test_autocast_trains_the_gates():
    model = moved()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    grads = [p.grad for p in gate_parameters(model).values()]
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.compile
def test_a_compiled_network_is_one_graph_with_the_gradients_of_eager():
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    model = quietly(nn.Sequential(Block(), nn.ReLU()), inputs=x, train=BOTH, share="channel")
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    have = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums in another order


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return F.silu(self.linear(x)).softmax(-1)


@pytest.mark.compile
def test_blocks_that_differ_in_their_values_share_one_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(3, 4)
    model = quietly(
        nn.Sequential(*(Block() for _ in range(4))), inputs=x, train=BOTH, share="channel"
    )
    for block in model:
        block.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(x.requires_grad_()).square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(p.grad is not None for p in gate_parameters(model).values())


class Held(nn.Module):
    """Modules that are called by a method which somebody keeps, in every kind of place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.SELU(), nn.SiLU(), nn.Tanh()
        self.first, self.steps = self.a.forward, [{"then": self.b.forward}]
        self.last = functools.partial(self.c.forward)

    def forward(self, x):
        return self.last(self.steps[0]["then"](self.first(x)))


def test_a_method_that_is_kept_learns_one_gate_and_pickle_keeps_it():
    x = torch.randn(4, 3)
    net = quietly(Held(), inputs=x, train=BOTH)
    assert {name.rpartition("_")[0] for name in gate_parameters(net)} == {
        *("tg_selu_0", "tg_silu_0", "tg_tanh_0")
    }
    with torch.no_grad():
        for p in gate_parameters(net).values():
            p.add_(torch.rand_like(p))
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(twin(x), net(x))


def test_gates_without_weights_around_them_have_the_type_of_the_inputs():
    x = torch.randn(5, 3, dtype=torch.float64)
    net, frozen = (
        quietly(nn.Sequential(nn.LogSigmoid()), inputs=x, **o) for o in ({"train": "s"}, {})
    )
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    with kernels.use("reference"):
        assert torch.equal(net(x), frozen(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


class ByFunction(nn.Module):
    def forward(self, x):
        return F.silu(Doubled.apply(x))


def test_a_call_in_an_autograd_function_learns_nothing_and_this_is_said():
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"tanh#0: nothing is learned, .* whose backward knows no"):
        gated = tg.convert(ByFunction(), train=("tau",), inputs=x)
    assert all("silu" in name for name, _ in gated.named_parameters())
    with pytest.raises(
        tg.conversion.ConversionError, match=r"tanh.* cannot: it is in an autograd.Fu"
    ):
        tg.convert(ByFunction(), sites={":tanh#0": tg.GateConfig(train=("tau",))}, inputs=x)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 1, 5, 4), (2, 2, 1, 5, 4)])
def test_learned_attention_has_the_shape_of_torchs_for_every_number_of_axes(shape):
    class Attend(nn.Module):
        def forward(self, z):
            return F.scaled_dot_product_attention(z, z, value=z)

    net = tg.convert(Attend(), inputs=torch.randn(2, 1, 5, 4), train=("tau",))
    z = torch.randn(shape)
    torch.testing.assert_close(net(z), Attend()(z))
