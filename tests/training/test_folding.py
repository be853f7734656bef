"""BatchNorm into gates: the function is kept to rounding, or the network is and says why."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.training import difference, fold_batchnorm, promote

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: tg.Conv1d, 2: tg.Conv2d, 3: tg.Conv3d}
LEARNED = ("tau", "theta", "s", "c")
# Units of a dtype's eps: sums of some ten products in another order, on numbers up to some 10.
ROUNDING = 16


def norm_of(channels, spatial=2, **options):
    """A BatchNorm that does something; some of its scales are negative."""
    norm = NORMS[spatial](channels, **options)
    if norm.running_mean is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.3, 1.5)
        norm.weight.data *= torch.randint(0, 2, (channels,)) * 2 - 1
        nn.init.normal_(norm.bias)
    return norm.eval()


def moved(part, by=0.1):
    """Gates away from their start."""
    with torch.no_grad():
        for name, p in part.named_parameters():
            if name.rpartition(".")[2] in ("rho", "dtheta", "s", "c", "v"):
                p.add_(by * torch.randn(p.shape))
    return part


class Readers(nn.Module):
    """x, its BatchNorm, and what reads that; each result is averaged over positions."""

    def __init__(self, norm, readers, then=None):
        super().__init__()
        self.norm, self.readers, self.then = norm, nn.ModuleList(readers), then

    def forward(self, x):
        x = x * 1.0
        z = self.norm(x)
        if self.then == "x overwritten":
            x.mul_(3.0)
        y = [] if self.then == "not read" else [reader(z) for reader in self.readers]
        if self.then == "not read":
            y = [reader(x) for reader in self.readers]
        if self.then == "also read":
            y.append(z)
        if self.then == "called again":
            y.append(self.readers[0](2 * x))
        if self.then == "norm called again":
            y.append(self.norm(2 * x))
        if self.then == "weight read" and hasattr(self.readers[0], "weight"):
            y.append(self.readers[0].weight.sum() * x)
        return sum(each.flatten(1).mean(1) for each in y)


ACTS = ("relu", "silu", "tanh", "sigmoid", "gelu", "mish", "leaky_relu", "hardtanh", "hardsigmoid")
HARD = ("relu", "leaky_relu", "hardtanh", "hardsigmoid")
NEVER = ("hardswish", "hardtanh_clamp", "identity")


def activation(draw, channels):
    key = draw.choice(ACTS)
    train = LEARNED[1:] if key in HARD else LEARNED
    per = {"share": "channel", "channels": channels}
    options = draw.choice([
        {}, {"train": train}, {"train": train, **per}, {"train": train, **per}, {"inplace": True},
        {"train": train, **per, "axis": -1}, {"share": "neuron", "channels": (channels,)},
    ])  # fmt: skip
    if draw.random() < 0.1:
        key, options = draw.choice([k for k in NEVER if k in tg.TAXONOMY]), {}
    return moved(tg.Activation(key, **options))


def tiered(draw, channels, spatial):
    key = draw.choice(ACTS)
    tier, share = draw.choice(
        [("W", "layer"), ("W", "channel")] * 3
        + [("S", "channel"), ("S", "synapse"), ("general", None)]
    )
    options = {"tier": tier, "share": share, "init": key}
    if draw.random() < 0.3 and tier == "W":
        options["train"] = ("theta", "c")
    if spatial == 0:
        return moved(tg.Linear(channels, 6, **options))
    groups = draw.choice([1, 2])
    more = {
        "padding": draw.choice([0, 1]), "stride": draw.choice([1, 2]), "groups": groups,
        "padding_mode": draw.choice(["zeros", "zeros", "circular"]), "bias": draw.random() < 0.7,
    }  # fmt: skip
    return moved(CONVS[spatial](channels, 6, draw.choice([1, 3]), **options, **more))


def network(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spatial, channels = draw.choice([0, 0, 1, 2, 3]), 4
    make = draw.choice([{}] * 8 + [{"affine": False}, {"track_running_stats": False}])
    norm = norm_of(channels, spatial or 1, **make)
    if norm.affine and draw.random() < 0.15:
        norm.weight.data[draw.randrange(channels)] = draw.choice([0.0, 1e-41, 1e-30, 1e-6])
    readers = [
        draw.choice([activation, lambda d, c: tiered(d, c, spatial)])(draw, channels)
        for _ in range(draw.choice([1, 1, 1, 2, 2, 3]))
    ]
    if draw.random() < 0.05:
        readers.append(nn.Tanh())
    then = draw.choice([
        *(None,) * 12, "x overwritten", "x overwritten", "also read", "called again",
        "norm called again", "weight read",
    ])  # fmt: skip
    model = Readers(norm, readers, then).eval()
    if draw.random() < 0.05:
        draw.choice([norm, *readers]).register_forward_hook(lambda m, args, y: y * 1.5)
    if draw.random() < 0.05:
        norm.train()
    dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    return model.to(dtype), 2 * torch.randn(5, channels, *(4,) * spatial, dtype=dtype)


def same(model, folded, x):
    """Whether two networks agree: bitwise if nothing was folded, else to rounding."""
    with torch.no_grad():
        y, z = copy.deepcopy(model)(x), folded(x)  # a norm in training counts what it sees
    if not folded.folded:
        return torch.equal(y, z)
    error = (y - z).abs().max() / y.abs().max().clamp_min(1)
    return bool(error <= ROUNDING * torch.finfo(x.dtype).eps)


ONE_SIDED = [
    (lambda: tg.Linear(4, 3), lambda: tg.Linear(4, 3, tier="S", share="synapse")),
    (lambda: tg.Linear(4, 3), lambda: tg.Linear(4, 3, init="sigmoid")),
    (lambda: tg.Activation("silu"), lambda: tg.Activation("hardswish")),
]


@pytest.mark.parametrize(("first", "second"), ONE_SIDED)
def test_if_one_of_several_readers_cannot_fold_none_is_changed(first, second):
    norm, x = norm_of(4, 1), torch.randn(5, 4)
    norm.weight.data[0] = -1
    for readers in ([first(), second()], [second(), first()]):
        model = Readers(norm, readers).eval()
        new = fold_batchnorm(model)
        assert new.folded == ()
        assert "reads it" in new.kept["norm"]
        assert same(model, new, x)
        state = new.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("change", "why"), [
    (lambda m: m.norm.weight.data.__setitem__(1, 0.0), "a channel has the scale 0, so its input is lost"),
    (lambda m: m.norm.weight.data.__setitem__(1, 1e-42), "readers.0, which reads it, would have values beyond float32"),
    (lambda m: setattr(m, "then", "norm called again"), "it is called several times"),
    (lambda m: setattr(m, "then", "called again"), "readers.0, which reads it, is called several times"),
    (lambda m: setattr(m, "then", "also read"), "flatten, which reads it, has no gates per channel"),
    (lambda m: setattr(m, "then", "not read"), "nothing reads it"),
    (lambda m: m.norm.train(), "it normalises by the batch"),
    (lambda m: m.norm.register_forward_hook(lambda m, args, y: 2 * y), "it has hooks"),
    (lambda m: m.readers[0].register_forward_pre_hook(lambda m, args: (-args[0],)), "readers.0, which reads it, has hooks"),
    (lambda m: m.readers.append(nn.Tanh()), "readers.1, which reads it, has no gates per channel"),
    (lambda m: m.readers.__setitem__(0, tg.Activation("silu", share="channel", channels=4, axis=-1)), "readers.0, which reads it, has gates that are not per channel"),
    (lambda m: m.readers.extend([tg.Activation("relu", inplace=True)]), "readers.1 overwrites what others read"),
])  # fmt: skip
def test_a_batchnorm_that_stays_says_why_and_the_function_is_bitwise_the_same(change, why):
    model, x = Readers(norm_of(4, 1), [tg.Activation("silu")]).eval(), torch.randn(5, 4)
    assert fold_batchnorm(model).folded == ("norm",)
    change(model)
    new = fold_batchnorm(model)
    assert (new.folded, new.kept) == ((), {"norm": why})
    assert same(model, new, x)


def test_weights_that_a_function_reads_too_stay():
    model, x = Readers(norm_of(4, 1), [tg.Linear(4, 4)], "weight read").eval(), torch.randn(5, 4)
    new = fold_batchnorm(model)
    assert "parameters that are read elsewhere" in new.kept["norm"]
    assert same(model, new, x)


def test_two_batchnorms_in_a_row_both_go():
    model = nn.Sequential(norm_of(4), norm_of(4), tg.Activation("mish"), nn.Conv2d(4, 2, 1)).eval()
    new = fold_batchnorm(model)
    assert (new.folded, new.kept) == (("0", "1"), {})
    assert same(model, new, torch.randn(2, 4, 3, 3))


def test_tied_weights_are_folded_each_for_its_own_batchnorm():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = norm_of(4, 1), norm_of(4, 1)
            self.a, self.b = tg.Linear(4, 4), tg.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.n2(self.a(self.n1(x))))

    model = Tied().eval()
    new = fold_batchnorm(model)
    assert new.folded == ("n1", "n2")
    assert same(model, new, torch.randn(5, 4))


def test_a_layer_whose_channels_are_on_another_axis_refuses_the_input():
    model = nn.Sequential(norm_of(4, 1), tg.Linear(4, 3)).eval()
    new = fold_batchnorm(model)
    assert same(model, new, torch.randn(5, 4))
    with pytest.raises(
        ValueError, match=r"belongs to axis 1 of inputs with 2 axes; got the shape \(5, 4, 4\)"
    ):
        new(torch.randn(5, 4, 4))  # the norm's channels are in the middle, the layer's at the end
    assert copy.deepcopy(new)(torch.randn(5, 4)).shape == (5, 3)
    images = nn.Sequential(norm_of(4), tg.Linear(4, 3)).eval()
    stays = fold_batchnorm(images)
    assert stays.folded == ()
    assert same(images, stays, torch.randn(2, 4, 4, 4))


@pytest.mark.parametrize("owner", [("lo", "lo"), ("hi", "lo"), ("lo", "hi"), ("hi", "hi")])
def test_at_a_threshold_the_same_branch_answers_also_where_a_channel_is_turned_round(owner):
    steps = tg.TG(float("inf"), (-1, 1), (0, 0, 0), (-5, 0, 7), owner=owner)
    norm = nn.BatchNorm1d(2, eps=0.0).eval()
    norm.weight.data = torch.tensor([2.0, -2.0])  # with mean 0 and variance 1: z = 2 x, -2 x
    model = nn.Sequential(norm, tg.Activation(steps)).eval()
    x = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])[:, None].repeat(
        1, 2
    )  # z is at a threshold at 0.5
    new = fold_batchnorm(model)
    assert new.folded == ("0",)
    assert torch.equal(new(x), model(x))
    assert torch.equal(model(x)[:, 1], steps(-2 * x[:, 1]))


def test_a_network_with_hooks_of_its_own_is_refused_with_the_way_out():
    model = Readers(norm_of(4, 1), [tg.Activation("silu")]).eval()
    model.register_forward_hook(lambda m, args, y: y - 1)
    with pytest.raises(ValueError, match=r"Readers has hooks, .* register them on the result"):
        fold_batchnorm(model)


def test_a_network_in_training_is_refused():
    with pytest.raises(ValueError, match=r"fixed in evaluation only; call eval\(\)"):
        fold_batchnorm(nn.Sequential(nn.BatchNorm1d(2), tg.Activation("silu")))


def test_batchnorms_behind_convolutions_fold_into_promoted_layers():
    """A whole network: what feeds the norm and what the layer feeds stay as they were."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm_of(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        norm_of(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 2),
    ).eval()  # fmt: skip
    wide = promote(model, inputs=torch.randn(2, 3, 4, 4))
    new = fold_batchnorm(wide)
    assert new.folded == ("1",)
    assert "flatten" in new.kept["4"].lower() or "6" in new.kept["4"]
    assert difference(model, new, torch.randn(2, 3, 4, 4)) < 2e-6


def test_random_networks_are_folded_to_rounding_or_untouched():
    folded = 0
    for seed in range(60):
        model, x = network(seed)
        before = copy.deepcopy(model.state_dict())
        new = fold_batchnorm(model)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), seed
        assert [*new.folded, *new.kept] == ["norm"], seed
        assert same(model, new, x), (seed, model, new.folded, new.kept)
        folded += len(new.folded)
    assert 15 < folded < 45


def test_a_converted_network_is_folded_where_it_was_given_its_instances():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.act, self.own = (
                norm_of(4),
                norm_of(4),
                nn.SiLU(),
                nn.Tanh(),
            )

        def forward(self, x):
            return self.own(self.second(self.act(self.act(self.first(x)))))

    x = torch.randn(2, 4, 3, 3)
    steep = tg.TG(3.0, 0.1, (0, 1), (0, 0))
    model = tg.convert(Twice().eval(), {"act#1": steep}, inputs=x, strict=False)
    new = fold_batchnorm(model)
    assert (new.folded, list(new.kept)) == (("first", "second"), [])  # each call by itself
    assert same(model, new, x)
    assert same(model, new, x)


def test_a_folded_gate_takes_its_argument_by_the_name_that_it_had():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = norm_of(4), nn.SiLU()

        def forward(self, x):
            return self.act(input=self.norm(x))

    x = torch.randn(2, 4, 3, 3)
    model = tg.convert(Named().eval(), inputs=x)
    new = fold_batchnorm(model)
    assert new.folded == ("norm",)
    assert same(model, new, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_computed_in_float64_whatever_the_norm_is_kept_in(dtype):
    norm = norm_of(4).to(dtype)
    new = fold_batchnorm(nn.Sequential(norm, tg.Activation("silu")).eval())
    tau = new.get_submodule("1").values()[0]
    var, weight = norm.running_var.double(), norm.weight.detach().double()
    want = weight.abs() / (var + norm.eps).sqrt()
    assert torch.equal(tau, want.float())  # rounded once


class Calls(nn.Module):
    """Nonlinearities as calls, of itself and of a part that runs twice, around a norm."""

    class Part(nn.Module):
        def forward(self, x):
            return torch.tanh(F.relu(x))

    def __init__(self):
        super().__init__()
        self.part, self.norm = self.Part(), nn.BatchNorm1d(4)
        self.act, self.last = nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.act(self.norm(self.part(x))).clamp(max=torch.ones(4))
        return self.last(F.relu(self.part(x))) + x.softmax(1)


def test_calls_are_answered_as_they_were_before():
    """Also those whose instance is not torch's function: it must not come back."""
    torch.manual_seed(0)
    net, x = Calls().eval(), torch.randn(5, 4)
    net.norm.running_mean.uniform_(-1, 1)
    chosen = {":relu#0": "silu", "part:relu#0": "gelu"}
    gated = tg.convert(net, chosen, inputs=x, tol=math.inf)
    with tg.kernels.use("reference"):
        want, folded, tiered = gated(x), fold_batchnorm(gated), promote(gated, inputs=x)
        assert (want - net(x)).abs().max() > 0.01
        for new in (folded, tiered, copy.deepcopy(tiered)):
            torch.testing.assert_close(new(x), want)
            seen = tg.audit(new, x).sites
            calls = sum(site.calls for site in seen if site.kind in ("relu", "tanh", "softmax"))
            assert calls == 7
            assert not any(site.native for site in seen)


def test_what_torch_fx_does_not_follow_keeps_its_gates():
    """Torch's own modules, as attention, are leaves to torch.fx."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.act, self.attention = nn.ReLU(), nn.MultiheadAttention(4, 2)

        def forward(self, x):
            x = torch.tanh(self.act(self.norm(x)))
            return self.attention(x, x, x, need_weights=False)[0]

    x = torch.randn(5, 4)
    gated = tg.convert(Net().eval(), inputs=x)
    with tg.kernels.use("reference"):
        folded = fold_batchnorm(gated)
        torch.testing.assert_close(folded(x), gated(x))
        ran = {site.kind: site.native for site in tg.audit(folded, x).sites}
    assert folded.folded == ("norm",)
    assert not ran["tanh"]
    assert not ran["multi_head_attention_forward"]


def test_a_call_that_torch_fx_does_not_see_where_it_was_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.norm(F.relu(x))
            return F.relu(x) if self.training or "twice" in vars(self) else x

    gated = tg.convert(Net().eval(), inputs=torch.randn(5, 4))
    gated.twice = True
    with pytest.raises(ValueError, match=r"relu#0, relu#1 in torch.fx, and made relu#0 when"):
        fold_batchnorm(gated)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return F.gelu(self.linear(x))


def test_a_network_converted_without_inputs_keeps_its_gates():
    parts = (Block(), nn.PReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SiLU(), nn.Linear(4, 4))
    net, x = nn.Sequential(*parts).eval(), torch.randn(5, 4)
    gated = tg.convert(net)
    with tg.kernels.use("reference"):
        want = gated(x)
        for new in (fold_batchnorm(gated), promote(gated, inputs=x)):
            torch.testing.assert_close(new(x), want)
            seen = tg.audit(new, x)
            assert not seen.left
            assert {"gelu", "prelu"} <= {site.kind for site in seen.sites}


def test_an_owner_that_loses_its_calls_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.bent = nn.BatchNorm1d(4), True

        def forward(self, x):
            x = self.norm(x)
            return F.relu(x) if self.bent else x

    gated = tg.convert(Net().eval(), inputs=torch.randn(5, 4))
    gated.bent = False
    with pytest.raises(ValueError, match=r"makes no call in torch.fx, and made relu#0"):
        fold_batchnorm(gated)


class Parted(nn.Module):
    """A linear layer behind each half of an activation, one cut off and one indexed."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(6), nn.SiLU(inplace=True)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        y = self.act(self.norm(x))
        return self.first(y.chunk(2, 1)[0]) + self.second(y[:, 3:])


def test_promoted_layers_behind_parts_of_an_activation_are_read_off_the_graph():
    torch.manual_seed(0)
    net, x = Parted().double(), torch.randn(8, 6, dtype=torch.float64)
    net(x)  # in training, for the statistics of the norm
    wide = promote(net.eval(), inputs=x)
    assert wide.promotion.layers == ("first", "second")
    assert difference(net, fold_batchnorm(wide), x) < 1e-12


def test_float64_is_kept_through_promotion():
    torch.manual_seed(0)
    parts = (nn.Linear(4, 4), norm_of(4, 1), nn.SiLU(), nn.Linear(4, 4))
    net, x = nn.Sequential(*parts).double().eval(), torch.randn(5, 4).double()
    assert difference(net, fold_batchnorm(promote(net, inputs=x)), x) < 1e-14
