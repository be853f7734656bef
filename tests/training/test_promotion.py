"""Tiers up and down, gates to hard ones, BatchNorm into gates: on networks nobody made easy."""

import copy
import math
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.training import (
    anneal_,
    demote,
    difference,
    fold_batchnorm,
    half_transfer,
    harden,
    promote,
)

# a handful of sums in another order
ROUNDING = 2e-6


class Block(nn.Module):
    """A residual block whose one in-place ReLU is called twice, its result read twice."""

    def __init__(self, channels, act):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1, groups=2)
        self.b2, self.act = nn.BatchNorm2d(channels), act()

    def forward(self, x):
        y = self.b2(self.c2(self.act(self.b1(self.c1(x)))))
        return self.act(y + x)


class Network(nn.Module):
    """Functional calls, residual sums, BatchNorm, an activation with two layers behind it."""

    def __init__(self, act):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), Block(8, act), Block(8, act)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 36, 16), nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x):
        x = self.b(self.a(self.stem(x).relu_())).flatten(1)
        h = F.silu(self.fc1(x))
        return self.fc2(h) * 0.5 + self.fc3(h)


ACTS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
    "hardtanh": nn.Hardtanh,
    "sigmoid": nn.Sigmoid,
    "mish": nn.Mish,
    "leaky": lambda: nn.LeakyReLU(0.2),
}
EVERY = ("a.c1", "a.c2", "b.c1", "b.c2", "fc1", "fc2", "fc3")


def _network(act="relu"):
    """A network whose BatchNorms do something, also turn channels round."""
    torch.manual_seed(0)
    network = Network(ACTS[act]).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.normal_(module.bias)
    return network


@pytest.fixture
def x():
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def _moved(model, by=0.2, seed=2):
    """Learned gates away from their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.rpartition(".")[2] in ("rho", "dtheta", "s", "c", "v"):
                p.add_(torch.randn(p.shape, generator=generator), alpha=by)
    return model


def _learned(**options):
    torch.manual_seed(0)
    every = ("tau", "theta", "s", "c")
    return _moved(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            tg.Activation("silu", share="channel", channels=8, train=every),
            nn.Conv2d(8, 6, 3, groups=2),
            tg.Activation("relu", train=every[1:]),
            nn.Flatten(),
            nn.Linear(24, 4),
        )
    )


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("tier", ["W", "S", "general"])
def test_a_trained_network_in_a_higher_tier_computes_the_same(act, tier, x):
    network = _network(act)
    before = copy.deepcopy(network.state_dict())
    new = promote(network, tier, inputs=x)
    assert new.promotion.layers == EVERY
    assert difference(network, new, x) < ROUNDING
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert {m.tier for m in new.modules() if hasattr(m, "tier")} == {tier}


@pytest.mark.parametrize("tier", ["W", "S", "general"])
def test_no_branch_is_dead_after_promotion(tier, x):
    new = promote(_network(), tier, inputs=x).train()
    (new(x) * torch.randn(4, 10)).sum().backward()
    for name, p in new.named_parameters():
        assert p.grad is not None, name
        branches = (
            p.grad.transpose(0, 1).flatten(1) if p.dim() > 2 and "gate" not in name else p.grad
        )
        assert branches.abs().flatten(1 if branches.dim() > 1 else 0).sum(-1).gt(0).all(), name


@pytest.mark.parametrize("inputs", [False, True])
def test_a_converted_network_is_promoted_with_the_instances_it_was_given(inputs, x):
    network = _network("relu")
    choice = {"re:.*act": tg.TG(3.0, 0.2, (0.1, 1), (0, 0))}
    gated = tg.convert(network, choice, inputs=x if inputs else None, strict=False)
    new = promote(gated, inputs=x)
    assert new.promotion.layers == EVERY
    assert difference(gated, new, x) < ROUNDING < difference(network, new, x)


def test_step_by_step_is_the_same_as_at_once(x):
    network = _network()
    w = promote(network, inputs=x)
    s = promote(w, "S", "synapse")
    general = promote(s, "general")
    assert max(difference(network, each, x) for each in (w, s, general)) < ROUNDING


@pytest.mark.parametrize("tier", ["W", "general"])
def test_learned_gates_slopes_and_constants_are_carried_along(tier, x):
    network = _learned()
    new = promote(network, tier, inputs=x)
    assert new.promotion.layers == ("2", "5")
    assert difference(network, new, x) < ROUNDING


def test_a_promoted_network_trains_and_its_keys_are_those_of_the_old_one(x):
    network = _network()
    new = promote(network, inputs=x).train()
    old = set(network.state_dict())
    assert old <= set(new.state_dict())
    optimizer, losses = torch.optim.Adam(new.parameters(), 1e-3), []
    for _ in range(30):
        loss = new(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_what_cannot_be_promoted_is_named_with_its_reason():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = F.hardswish(self.a(torch.relu(x)))
            return self.a(F.silu(self.b(x))).tanh()

    net, x = nn.Sequential(Shared(), nn.ReLU(), nn.Linear(4, 2), nn.LSTM(2, 2)), torch.randn(3, 4)
    new = promote(net, inputs=x)
    assert new.promotion.layers == ("2",)
    kept = new.promotion.kept
    assert kept["0.a"] == "is called 2 times, on relu and silu"
    assert "hardswish" in kept["0.b"]
    assert kept["0:tanh#0"] == "feeds no layer but 1"
    assert "inside of its step" in kept["3"]
    assert kept["0.c"] == "is not called with these inputs"
    with pytest.raises(
        ValueError,
        match=r"no layer of Sequential can be promoted: 0: reads no activation; 1: feeds no",
    ):
        promote(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), inputs=torch.randn(3, 2))
    with pytest.raises(
        ValueError, match=r"LSTM can be promoted: \(network\): .* tg\.LSTM and tg\.GRU"
    ):
        promote(nn.LSTM(2, 2), inputs=torch.randn(3, 2))
    with pytest.raises(
        ValueError, match="inputs is needed, because the network is followed by run"
    ):
        promote(net)


def test_going_down_undoes_going_up(x):
    network = _network()
    general = promote(network, "general", inputs=x)
    for tier in ("S", "W", "A"):
        down = demote(general, tier, inputs=x)
        assert down.output < ROUNDING
        assert max(down.lost.values()) < 1e-6
        assert set(down.lost) == set(EVERY)
    with pytest.raises(ValueError, match="has no layer above tier S"):
        demote(promote(network, inputs=x), "S")
    with pytest.raises(ValueError, match="tier must be one of A, W, S; got 'general'"):
        demote(general, "general")


def test_going_down_reports_what_untied_weights_lose(x):
    new = promote(_network(), inputs=x)
    torch.manual_seed(3)
    with torch.no_grad():
        new.fc1.weight.add_(torch.randn_like(new.fc1.weight), alpha=0.1)
    down = demote(new, "A", inputs=x)
    others = [lost for name, lost in down.lost.items() if name != "fc1"]
    assert max(others) < 1e-6 < 0.1 < down.lost["fc1"]
    # the projection is the nearest: the norm that is lost is what the singular values say
    w = new.fc1.weight.permute(2, 1, 0)  # channel, branch, output
    sigma = torch.linalg.svdvals(w.detach())
    assert down.lost["fc1"] == pytest.approx(float(sigma[:, 1].norm() / sigma.norm()), rel=1e-4)
    assert down.output > 0.01


def test_from_tier_s_gates_are_averaged_by_the_weight_of_their_synapses():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2))
    s = promote(network, "S", inputs=torch.randn(5, 3))
    with torch.no_grad():
        s.get_submodule("2").gate.dtheta[0, 1] = 1.0  # every gate of the second output
    w = demote(s, "W").model.get_submodule("2")
    share = s.get_submodule("2").weight.square().sum(1)
    expected = share[1] / share.sum(0)
    torch.testing.assert_close(w.gate.values()[1][0], expected)


def test_half_transfer_keeps_the_weights_and_starts_the_gates_anew(x):
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    new = half_transfer(network, inputs=x)
    silu = nn.Sequential(network[0], nn.SiLU(), network[2])
    assert difference(silu, new, x) < ROUNDING < difference(network, new, x)
    layer = new.get_submodule("2")
    assert layer.gate.learned == ("tau", "theta")
    assert not layer.gate.init.hard
    assert torch.equal(layer.weight[:, 1], network[2].weight)
    with pytest.raises(ValueError, match="has 2 branches, and mish gives gates for 3"):
        half_transfer(network, "mish", inputs=x)


@pytest.mark.parametrize("act", ["relu", "silu", "hardtanh", "mish"])
def test_batchnorm_folds_into_the_gates_of_tier_w(act, x):
    new = promote(_network(act), inputs=x)
    folded = fold_batchnorm(new)
    assert folded.folded == ("a.b1", "b.b1")
    assert difference(new, folded, x) < ROUNDING
    assert not any("b1" in name for name, _ in folded.named_modules())


@pytest.mark.parametrize("act", ["relu", "silu", "mish", "sigmoid", "leaky_relu", "gelu_k4"])
@pytest.mark.parametrize("train", [(), ("tau", "theta", "s", "c")])
def test_batchnorm_folds_into_an_activation(act, train, x):
    if act in ("relu", "leaky_relu"):
        train = train[1:]
    norm = _network().a.b1
    options = {"share": "channel", "channels": 8} if train else {}
    gate = _moved(tg.Activation(act, train=train, **options), by=0.02)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), norm, gate, nn.Conv2d(8, 2, 1)).eval()
    folded = fold_batchnorm(network)
    assert folded.folded == ("1",)
    assert norm.weight.lt(0).any()
    assert difference(network, folded, x) < ROUNDING


def test_a_batchnorm_that_others_read_as_well_stays(x):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(3), tg.Activation("silu")

        def forward(self, x):
            z = self.norm(x)
            return self.act(z) + z

    both = Both().eval()
    folded = fold_batchnorm(both)
    assert folded.folded == ()
    assert difference(both, folded, x) == 0
    with pytest.raises(ValueError, match="in evaluation only"):
        fold_batchnorm(both.train())


def test_hardening_says_what_it_cost_at_each_site_and_in_all(x):
    network = _learned()
    hard = harden(network, inputs=x)
    assert set(hard.sites) == {"1"}  # the other gate is hard already
    assert hard.output == pytest.approx(difference(network, hard.model, x))
    y = network[0](x)
    t = [replace_tau(t) for t in network[1].instances()]
    expected = torch.stack([tk(y[:, k]) for k, tk in enumerate(t)], 1)
    torch.testing.assert_close(hard.model[1](y), expected)
    assert "output, max|d| / max|y|" in str(hard)


def replace_tau(t):
    return tg.TG(float("inf"), t.theta, t.s, t.c)


def test_after_annealing_hardening_costs_little(x):
    network = _learned()
    before = harden(network, inputs=x)
    anneal_(network, 300.0)
    after = harden(network, inputs=x)
    # sup |x sigma(tau x) - relu(x)| is 0.278 / tau, and the constants move within 1 / tau of theta
    assert after.sites["1"] < 0.02 < before.sites["1"]
    with pytest.raises(ValueError, match="factor must be positive"):
        anneal_(network, 0.0)


@pytest.mark.parametrize("tier", ["W", "S", "general"])
def test_tiered_layers_harden_and_keep_their_weights(tier, x):
    network = promote(_network("silu"), tier, inputs=x)
    hard = harden(network, inputs=x)
    assert set(hard.sites) == set(EVERY) - {"a.c1"}  # behind the ReLU of the stem
    assert torch.equal(hard.model.fc1.weight, network.fc1.weight)
    relu = promote(_network("silu"), tier, inputs=x)
    anneal_(relu, 1e4)
    assert difference(relu, hard.model, x) < 1e-3


def test_gates_without_a_hard_form_stay_soft_and_say_so():
    unordered = tg.Activation("softplus")
    hard = harden(nn.Sequential(unordered, tg.Activation("silu")))
    assert set(hard.kept) == {"0"}
    assert "not in order" in hard.kept["0"]
    assert hard.model[1].init.hard
    with pytest.raises(ValueError, match="no soft gates to harden"):
        harden(nn.Sequential(nn.ReLU()))


def test_a_hardened_gate_still_learns_its_threshold(x):
    hard = harden(_learned()).model
    (hard(x) * torch.randn(4, 4)).sum().backward()
    assert hard[1].dtheta.grad.any()


def _timm(name, **options):
    return lambda: pytest.importorskip("timm").create_model(name, num_classes=5, **options)


def _transformers(name, **options):
    def make():
        from_library = pytest.importorskip("transformers")
        config = getattr(from_library, name.replace("Model", "Config"))
        return getattr(from_library, name)(config(vocab_size=50, **options))

    return make


def _torchvision(name):
    return lambda: getattr(pytest.importorskip("torchvision").models, name)(num_classes=5)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 8, 2), nn.GRU(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.head(self.gru(self.lstm(x)[0])[0])


IMAGES, TOKENS = (
    torch.zeros(2, 3, 32, 32).uniform_(-1, 1),
    {"input_ids": torch.arange(14).view(2, 7)},
)
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
# a network, its inputs, the last parts of the names of what is promoted, and what these read
ARCHITECTURES = {
    "ViT": (_timm("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=2, embed_dim=24), IMAGES, ["mlp.fc2"] * 2, "gelu"),
    "ConvNeXt": (_timm("convnext_atto", depths=(1,) * 4, dims=(8,) * 4), IMAGES, ["mlp.fc2"] * 4, "gelu"),
    "Swin": (_timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,)), IMAGES, ["mlp.fc2"] * 2, "gelu"),
    "ResNet": (_torchvision("resnet18"), IMAGES, ["conv2", "conv1", "conv2", *["conv1", "conv2", "downsample.0", "conv1", "conv2"] * 3], "relu"),
    "BERT": (_transformers("BertModel", **SIZES), TOKENS, ["output.dense"] * 2, "gelu"),
    "GPT-2": (_transformers("GPT2Model", n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1), TOKENS, ["mlp.c_proj"] * 2, "gelu_tanh"),
    "Llama": (_transformers("LlamaModel", num_key_value_heads=2, **SIZES), TOKENS, ["mlp.down_proj"] * 2, "silu"),
    "ALBERT": (_transformers("AlbertModel", embedding_size=8, **SIZES), TOKENS, ["ffn_output"], "gelu_tanh"),
    "encoder of torch": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2), (torch.ones(2, 5, 6),), ["linear2"] * 2, "relu"),
    "recurrent": (Recurrent, torch.ones(5, 2, 6), ["head.2"], "relu"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_networks_of_every_kind_are_promoted_within_their_bound(name):
    make, inputs, ends, act = ARCHITECTURES[name]
    torch.manual_seed(0)
    net = make().eval()
    new = promote(net, inputs=inputs)
    done = new.promotion
    assert len(done.layers) == len(ends)
    assert all(layer.endswith(end) for layer, end in zip(done.layers, ends, strict=True))
    for error in done.errors.values():
        assert error.act == act
        assert error.sup == tg.taxonomy.ROWS[act].sup
        assert error.measured <= error.bound + ROUNDING * error.scale
        assert (error.bound > 0) == (act in ("gelu", "gelu_tanh"))
    # layers of attention, norms and residual sums make of it what they like, but not much
    assert done.output == difference(net, new, inputs) < (1e-3 if "gelu" in act else 2 * ROUNDING)
    assert isinstance(new, type(net))
    assert net.state_dict().keys() <= new.state_dict().keys()
    assert [n for n, _ in net.named_children()] == [n for n, _ in new.named_children()]
    assert max(map(len, str(done).splitlines())) <= 100
    assert difference(new, pickle.loads(pickle.dumps(new)), inputs) == 0
    # singular values: some more roundings
    assert demote(new, inputs=inputs).output < 10 * ROUNDING


def test_the_bound_of_a_layer_holds_wherever_its_inputs_are():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 3)).double()
    new = promote(net, inputs=torch.randn(2, 4).double())
    error = new.promotion.errors["2"]
    assert error.bound == pytest.approx(error.sup * net[2].weight.abs().sum(1).max().item())
    z = torch.linspace(-12, 12, 20_001).double()[:, None].expand(-1, 64)
    apart = (new[2].forward(z) - net[2](F.gelu(z))).abs().max()
    assert 0.05 * error.bound < apart <= error.bound
    # the worst signs of the weights reach it
    with torch.no_grad():
        net[2].weight.abs_()
    worst = promote(net, inputs=torch.randn(2, 4).double())
    apart = (worst[2].forward(z) - net[2](F.gelu(z))).abs().max()
    assert 0.9 * worst.promotion.errors["2"].bound < apart <= worst.promotion.errors["2"].bound


def test_what_is_multiplied_and_summed_is_the_gated_input(x):
    """A layer with a factor, in every tier, against torch."""
    torch.manual_seed(0)
    by = torch.randn(4, 3, 6, 6)
    for tier in ("W", "S", "general"):
        conv = nn.Conv2d(3, 6, 3, padding=1, groups=3, padding_mode="reflect")
        linear = nn.Linear(6, 5)
        for layer, ours in ((conv, tg.Conv2d), (linear, tg.Linear)):
            new = ours.from_dense(layer, "mish", tier=tier)
            torch.testing.assert_close(new(x, by), layer(F.mish(x) * by), atol=2e-6, rtol=2e-6)


def test_learned_gates_that_layers_alone_read_learn_there(x):
    network = _learned()
    new = promote(network, inputs=x)
    assert not any(p.requires_grad for k in (1, 3) for p in new[k].parameters())
    new(x).sum().backward()
    assert all(p.grad is not None for p in new.parameters() if p.requires_grad)
    with torch.no_grad():
        network[1].s[0, 3] = 0  # SiLU's lower branch has the slope 1 in other channels
        network[1].c[0, 3] = 1
    new = promote(network, inputs=x)
    assert new.promotion.layers == ("5",)
    assert "a slope in some channels" in new.promotion.kept["2"]


MOVES = {
    "nn.Flatten": nn.Flatten(),
    "torch.flatten": lambda x: torch.flatten(x, 1),
    "method flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(len(x), -1) if isinstance(x, torch.Tensor) else x.view(4, -1),
    "reshape": lambda x: torch.reshape(x, (4, -1)),
    "permute": lambda x: torch.permute(x, (0, 2, 3, 1)).contiguous().view(4, -1),
    "transpose": lambda x: x.transpose(1, 3).reshape(4, -1),
    "dropout of nothing": nn.Sequential(nn.Dropout(0.0), nn.Identity(), nn.Flatten()),
}


class Moved(nn.Module):
    def __init__(self, act, move, layer):
        super().__init__()
        self.act, self.move, self.layer = act, move, layer

    def forward(self, x):
        return self.layer(self.move(self.act(x)))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("train", [(), ("tau", "theta", "s", "c")])
def test_moves_between_an_activation_and_its_layer_are_kept(move, train, x):
    act = _moved(tg.Activation("silu", train=train))
    network = Moved(act, MOVES[move], nn.Linear(108, 5))
    new = promote(network, inputs=x)
    assert new.promotion.layers == ("layer",)
    assert difference(network, new, x) < ROUNDING


@pytest.mark.parametrize(
    ("axis", "move", "layer"),
    [
        (1, lambda x: x.transpose(1, 2), nn.Linear(6, 5)),
        (-1, lambda x: x.transpose(1, 2), nn.Linear(6, 5)),
        (-1, lambda x: x, nn.Conv1d(6, 5, 1)),
        (2, lambda x: x, nn.Linear(6, 5)),
        (1, nn.Flatten(), nn.Linear(36, 5)),
    ],
)
def test_gates_per_channel_that_are_not_where_the_layer_has_them_stay(axis, move, layer):
    act = tg.Activation("silu", share="channel", channels=6, axis=axis, train=("theta",))
    with pytest.raises(
        ValueError,
        match="promote: no layer of Moved can be promoted: layer: reads gates that differ by position",
    ):
        promote(Moved(act, move, layer), inputs=torch.randn(6, 6, 6))


def test_a_layer_whose_channels_are_on_another_axis_refuses_the_input():
    act = tg.Activation("silu", share="channel", channels=6, train=("theta",))
    network = Moved(_moved(act, by=1.0), lambda x: x, nn.Linear(6, 5))
    new = promote(network, inputs=torch.randn(3, 6))
    assert difference(network, new, torch.randn(3, 6)) < ROUNDING
    with pytest.raises(ValueError, match=r"belongs to axis 1 of inputs with 2 axes"):
        new(torch.randn(3, 6, 6))  # there the activation's channels are not the layer's


class Steps(nn.Module):
    """A random program over a matrix that torch.fx can follow, with much that is overwritten."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.acts = nn.ModuleList([nn.ReLU(inplace=True), nn.SiLU(), nn.Hardtanh(inplace=True)])
        names = [n.removeprefix("step_") for n in dir(self) if n.startswith("step_")]
        self.program = [(draw.choice(names), draw.randrange(4)) for _ in range(draw.randint(3, 9))]
        self.program += [("act", 0), ("layer", 3)]
        if draw.random() < 0.1:
            self.layers[draw.randrange(4)].register_forward_hook(lambda m, args, y: 2 * y)

    def step_layer(self, h, k):
        return self.layers[k](h)

    def step_act(self, h, k):
        return self.acts[k % 3](h)

    step_act_again = step_act

    def step_call(self, h, k):
        return [F.silu, torch.tanh, lambda h: F.relu(h, True), lambda h: F.silu(h, inplace=True)][
            k
        ](h)

    def step_method(self, h, k):
        return [h.relu, h.relu_, h.sigmoid_, h.tanh_][k]()

    def step_result_dropped(self, h, k):
        [h.relu_, h.sigmoid_, lambda: h.add_(0.5), lambda: h.mul_(0.5)][k]()
        return h

    def step_keep(self, h, k):
        self.kept.append([h, h.view(2, 3, 6), h.flatten(1), h[:, :]][k])
        return h

    def step_residual(self, h, k):
        return h + sum(each.reshape(6, 6) for each in self.kept)

    def step_add_in_place(self, h, k):
        h += 0.25 * k
        return h

    def step_move(self, h, k):
        return [h.reshape(6, 6), h.t(), h.transpose(0, 1), h.contiguous()][k]

    def step_weight(self, h, k):
        return h + self.layers[k].weight if k == 2 else h

    def forward(self, x):
        self.kept, h = [], x * 1.0
        for name, k in self.program:
            h = getattr(self, f"step_{name}")(h, k)
        return h


def promoted(model, tier, x):
    """The promoted network, or None where `promote` refuses it."""
    try:
        return promote(model, tier, inputs=x)
    except ValueError:
        with pytest.raises(ValueError, match="promote: no layer of Steps can be promoted: "):
            promote(model, tier, inputs=x)
        return None


def test_random_programs_are_promoted_to_rounding_or_refused():
    x, layers, networks = torch.randn(6, 6), 0, 0
    for seed in range(60):
        model = Steps(seed).eval()
        new = promoted(model, ("W", "S", "general")[seed % 3], x)
        if new is None:
            continue
        networks, layers = networks + 1, layers + len(new.promotion.layers)
        assert difference(model, new, x) < 2 * ROUNDING, (seed, model.program)
        # projections are made of singular values: some more roundings
        assert difference(model, demote(new, "A").model, x) < 10 * ROUNDING, (seed, model.program)
    assert networks > 25
    assert layers > 30


def test_modes_of_parts_are_kept(x):
    """A part in another mode than the network, as Dropout by Monte Carlo is, stays in it."""
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.ReLU(), nn.Linear(108, 4)).eval()
    network[1].train()
    new = promote(network, inputs=x)
    assert new.get_submodule("1").training
    assert not new.training
    assert not new.get_submodule("3").training


REFUSED = [
    (TypeError, lambda net: promote("resnet18"), "promote: model must be a torch.nn.Module; got 'resnet18'."),
    (ValueError, lambda net: promote(net, tier="w"), "promote: no tier 'w'; did you mean 'W'?"),
    (ValueError, lambda net: promote(net, tier="X"), "promote: tier is one of W, S, general; got 'X'."),
    (ValueError, lambda net: promote(net, share="row"), "promote: tier W has share layer, channel, neuron (Table 1); got 'row'."),
    (TypeError, lambda net: promote(net, inputs=torch.randn(3, 2), train=True), 'Linear: train names what is learned, some of tau, theta, s, c, as in train=("tau", "theta"), or () for nothing; got True.'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_asked_for_is_answered_with_what_can(kind, call, message):
    with pytest.raises(kind) as caught:
        call(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert str(caught.value) == message


def test_a_shared_gate_is_hardened_under_each_of_its_names():
    act = tg.Activation("silu")
    hard = harden(nn.Sequential(act, nn.Linear(2, 2), act), inputs=torch.randn(3, 2)).model
    assert hard[0] is hard[2]
    assert hard[0].init.hard
    assert harden(act).model.init.hard  # a network that is one gate


def test_a_shared_layer_changes_its_tier_under_each_of_its_names():
    layer, x = tg.Linear(4, 4), torch.randn(3, 4)
    up = promote(nn.Sequential(layer, nn.Tanh(), layer), "S")
    assert up[0] is up[2]
    assert up[0].tier == "S"
    assert promote(layer, "S").tier == "S"
    down = demote(up, "W")
    assert down.model[0] is down.model[2]
    assert down.model[0].tier == "W"
    assert difference(up, down.model, x) < ROUNDING


def test_soft_gates_that_hardening_does_not_reach_are_named():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.lstm = nn.SiLU(), nn.LSTM(4, 4)

        def forward(self, x):
            return self.lstm(self.act(x).sigmoid() + F.relu(x))[0]

    gated = tg.convert(Calls(), inputs=torch.randn(3, 4))
    hard = harden(gated)
    assert hard.model.act.init.hard
    why = "it is a call in a forward, not a module"
    assert hard.kept == {":sigmoid#0": why, "lstm:lstm#0": why}
    cells = harden(nn.Sequential(tg.Activation("silu"), tg.LSTM(4, 4)))
    assert cells.kept == {"1": "it is recurrent, and its gates are within its step"}
    with pytest.raises(ValueError, match=r"no soft gates to harden\. \(network\): it is recurrent"):
        harden(tg.LSTM(4, 4))


def test_hooks_and_float64_are_kept_by_hardening():
    act, seen = _moved(tg.Activation("silu", train=("tau", "theta")).double()), []
    act.register_forward_hook(lambda m, args, kwargs, y: seen.append(m), with_kwargs=True)
    hard = harden(nn.Sequential(act)).model
    x = torch.randn(9, dtype=torch.float64)
    theta = act.values()[1][0].item()
    torch.testing.assert_close(hard(x), torch.where(x > theta, x, 0.0), rtol=0, atol=0)
    assert seen == [hard[0]]


class Over(nn.Module):
    """A call that overwrites, read by a layer and by a sum."""

    def __init__(self, call):
        super().__init__()
        self.first, self.second, self.call = nn.Linear(4, 4), nn.Linear(4, 4), call

    def forward(self, x):
        y = self.first(x)
        OVER[self.call](y)
        return self.second(y) + y


OVER = {
    "method": lambda y: y.relu_(),
    "function": lambda y: F.relu_(y),
    "argument": lambda y: F.relu(y, True),
    "keyword": lambda y: F.leaky_relu(y, negative_slope=0.3, inplace=True),
    "clamp": lambda y: y.clamp_min_(0.1),
}


@pytest.mark.parametrize("call", OVER)
@pytest.mark.parametrize("wish", [None, "silu"])
def test_a_call_that_overwrites_keeps_its_gate(call, wish):
    net, x = Over(call).eval(), torch.randn(5, 4)
    name = {"keyword": "leaky_relu", "clamp": "clamp_min"}.get(call, "relu")
    sites = None if wish is None else {f":{name}#0": wish}
    gated = tg.convert(net, sites, inputs=x, tol=None if wish is None else math.inf)
    with tg.kernels.use("reference"):
        new = promote(gated, inputs=x)
        torch.testing.assert_close(new(x), gated(x))
        seen = tg.audit(new, x)
    assert not seen.left
    assert not any(site.native for site in seen.sites)
    torch.testing.assert_close(pickle.loads(pickle.dumps(new))(x), new(x))


def test_a_module_with_an_instance_for_each_call_is_kept_and_that_is_said():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.act(self.second(self.act(self.first(x))))

    net, x = Net().eval(), torch.randn(5, 4)
    gated = tg.convert(net, {"act#1": "silu"}, inputs=x, tol=math.inf)
    with pytest.raises(ValueError, match="an instance for each of its calls"):
        promote(gated, inputs=x)


class Telling(nn.Module):
    """A network that asks for the class of its layer."""

    def __init__(self, noise=False):
        super().__init__()
        self.a, self.b, self.noise = nn.Linear(4, 5), nn.Linear(5, 3), noise

    def forward(self, x):
        y = self.b(torch.relu(self.a(x)))
        if self.noise:
            return y + torch.randn_like(y)
        return y if type(self.b) is nn.Linear else y + 1


def test_a_network_that_computes_something_else_once_promoted_is_refused():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"the output differs by .* between the layers"):
        promote(Telling(), inputs=x)
    assert promote(Telling(noise=True), inputs=x).promotion.layers == ("b",)


def test_a_layer_that_computes_something_else_once_promoted_is_named(monkeypatch):
    forward = tg.Linear.forward
    monkeypatch.setattr(tg.Linear, "forward", lambda self, *given: forward(self, *given) * 1.01)
    with pytest.raises(ValueError, match=r"promote: b would differ by .* more than rounding"):
        promote(Telling(), inputs=torch.ones(6, 4))
