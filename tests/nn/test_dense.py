"""Tiers W, S and general: against torch, an explicit unfold in float64, and Table 1's counts."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.instance import TG
from threshold_gating.nn.dense import SHARES, TIERED, parameter_count

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
}
PAIRS = [(tier, share) for tier, shares in SHARES.items() for share in shares]
CONVOLUTIONS = {
    "plain": {},
    "strided": {"padding": 1, "stride": 2},
    "grouped and dilated": {"groups": 2, "padding": (1, 2), "dilation": (1, 2)},
    "depthwise": {"groups": 4, "padding": 1},
    "same": {"padding": "same"},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "replicate": {"padding": (2, 1), "padding_mode": "replicate", "groups": 2},
    "circular": {"padding": 1, "padding_mode": "circular", "stride": (1, 2)},
}
# `same` with an even kernel pads unevenly; torch says that it copies for that
EVEN = "ignore:Using padding='same' with even kernel:UserWarning"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _conv(options, channels=4, out=8, kernel=(3, 2)):
    return nn.Conv2d(channels, out, kernel, **options).double()


def _size(share, x):
    return tuple(x.shape[2:]) if share == "neuron" and x.dim() > 2 else ()


def _moved(layer):
    """`layer` with weights and gates away from their start."""
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if "gate" in name else 0.3)
    return layer


@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_linear_layer_starts_as_the_activation_followed_by_the_dense_layer(act, tier, share):
    dense, x = nn.Linear(5, 6).double(), torch.randn(3, 2, 5).double()
    layer = tg.Linear.from_dense(dense, act, tier=tier, share=share)
    # the gate's constants are float32: 1e-7 of the largest of them, 3
    torch.testing.assert_close(layer(x), dense(ACTIVATIONS[act](x)), atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings(EVEN)
@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_a_convolution_starts_as_the_activation_followed_by_the_dense_one(options, tier, share):
    dense, x = _conv(options), torch.randn(2, 4, 7, 6).double()
    for act in ("silu", "sigmoid"):  # sigmoid(0) is not 0: padding must come after the gates
        layer = tg.Conv2d.from_dense(dense, act, tier=tier, share=share, size=_size(share, x))
        torch.testing.assert_close(layer(x), dense(ACTIVATIONS[act](x)))


def _unfolded(layer, x):
    """Eq. 4 written out: every padded input to every synapse, gates and branches in float64."""
    spatial = x.dim() - 2
    pad, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
    padded = F.pad(x, pad, "constant" if mode == "zeros" else mode)
    outside = F.pad(torch.zeros_like(x), pad, "constant", 1.0) if mode == "zeros" else None
    own = _per_synapse(layer, padded, pad)
    sizes = layer(x).shape[2:]
    result = torch.zeros(len(x), layer.weight.shape[0], *sizes, dtype=x.dtype)
    per_group = layer.weight.shape[0] // layer.groups
    for o, i in itertools.product(range(layer.weight.shape[0]), range(layer.weight.shape[2])):
        channel = (o // per_group) * layer.weight.shape[2] + i
        for tap in itertools.product(*map(range, layer.kernel_size)):
            where = [
                slice(t * d, t * d + s * (n - 1) + 1, s)
                for t, d, s, n in zip(tap, layer.dilation, layer.stride, sizes, strict=True)
            ]
            z = padded[(slice(None), channel, *where)]
            y = torch.zeros_like(z)
            tau, theta, s, c = own(o, channel, i, tap, where)
            g = tg.gates(z, tau, theta, form=layer.init.form, owner=layer.init.owner)
            for k in range(layer.K):
                w = layer.weight[(o, k, i, *tap)]
                constant = c[k] * w if layer.const is None else layer.const[(o, k, i, *tap)]
                y = y + g[k] * (s[k] * w * z + constant)
            if outside is not None:
                y = y * (1 - outside[(slice(None), channel, *where)])
            result[:, o] += y
    bias = 0 if layer.bias is None else layer.bias.view(-1, *(1,) * spatial)
    return result + bias


def _per_synapse(layer, padded, pad):
    """(output, channel, input, tap, where) -> the gate parameters that apply there."""
    tau, theta, s, c = layer.gate.values()

    def at(w, o, channel, i, tap, where):
        if not isinstance(w, torch.Tensor):
            return w
        if layer.share == "layer":
            return w.view(())
        if layer.share == "channel":
            return w[channel]
        if layer.share == "neuron":
            if layer.padding_mode == "zeros":  # any gate will do where nothing is
                grown = F.pad(w[None], pad, "constant", 1.0)
            else:
                grown = F.pad(w[None], pad, layer.padding_mode)
            return grown[0][(channel, *where)]
        return w[(o, i, *(min(t, n - 1) for t, n in zip(tap, w.shape[2:], strict=True)))]

    def own(*place):
        constants = c if layer.c is None else list(layer.c.unbind(0))
        return (
            at(tau, *place),
            [at(t, *place) for t in theta],
            [at(w, *place) for w in s],
            [at(w, *place) if layer.c is None else w.view(()) for w in constants],
        )

    return own


@pytest.mark.filterwarnings(EVEN)
@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_with_weights_and_gates_of_their_own_it_equals_an_explicit_unfold(options, tier, share):
    x = torch.randn(1, 4, 5, 4).double()
    layer = tg.Conv2d(
        4, 4, (3, 2), tier=tier, share=share, size=_size(share, x), init="sigmoid", **options
    )
    layer = _moved(layer.double())
    torch.testing.assert_close(layer(x), _unfolded(layer, x))


@pytest.mark.parametrize("tier", ["W", "S"])
def test_learned_constants_enter_as_multiples_of_the_weights(tier):
    x = torch.randn(2, 3, 4, 4).double()
    share = None if tier == "W" else "channel_pair"
    layer = tg.Conv2d(3, 2, 2, tier=tier, share=share, padding=1, train=("tau", "theta", "c"))
    layer = _moved(layer.double())
    torch.testing.assert_close(layer(x), _unfolded(layer, x))


@pytest.mark.parametrize(("ours", "x"), [(tg.Conv1d, (2, 4, 9)), (tg.Conv3d, (2, 4, 4, 5, 3))])
@pytest.mark.parametrize("tier", ["W", "general"])
def test_one_and_three_dimensions_equal_an_explicit_unfold(ours, x, tier):
    x = torch.randn(x).double()
    layer = _moved(ours(4, 2, 3, tier=tier, padding=1, groups=2, init="mish").double())
    torch.testing.assert_close(layer(x), _unfolded(layer, x))
    torch.testing.assert_close(layer(x[0]), layer(x)[0])  # without a batch, as torch takes it


def test_tier_s_with_gates_per_channel_is_tier_w():
    x = torch.randn(3, 4, 5, 5)
    w = _moved(tg.Conv2d(4, 6, 3, tier="W", share="channel"))
    s = tg.Conv2d(4, 6, 3, tier="S", share="channel")
    s.load_state_dict(w.state_dict())
    assert torch.equal(s(x), w(x))
    pairs = tg.Conv2d(4, 6, 3, tier="S", share="channel_pair")
    with torch.no_grad():
        pairs.weight.copy_(w.weight), pairs.bias.copy_(w.bias)
        pairs.gate.rho.copy_(w.gate.rho.view(1, 4, 1, 1).expand(6, 4, 1, 1))
        pairs.gate.dtheta.copy_(w.gate.dtheta.view(1, 1, 4, 1, 1).expand(1, 6, 4, 1, 1))
    torch.testing.assert_close(pairs(x), w(x))


def test_tier_s_equals_the_primitive_with_a_gate_per_synapse():
    x = torch.randn(7, 5).double()
    layer = _moved(tg.Linear(5, 3, tier="S", init="mish").double())
    tau, theta, s, c = layer.gate.values()
    assert (s, c) == ([1.0] * 3, [0.0] * 3)
    expected = tg.primitive.gated_linear(x, tau, theta, layer.weight, bias=layer.bias)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("init", ["silu", "mish"])
def test_parameter_counts_are_those_of_table_1(tier, share, constants, init):
    train = ("tau", "theta", "c") if constants and tier != "general" else ("tau", "theta")
    layers = [
        (tg.Linear(6, 5, init=init, tier=tier, share=share, train=train), nn.Linear(6, 5)),
        (
            tg.Conv2d(
                4,
                6,
                3,
                groups=2,
                init=init,
                tier=tier,
                share=share,
                train=train,
                size=_size(share, torch.zeros(1, 4, 9, 8)),
            ),
            nn.Conv2d(4, 6, 3, groups=2),
        ),
    ]
    for layer, dense in layers:
        weights = dense.weight.numel()
        gates = {"layer": 1, "synapse": weights, "channel_pair": math.prod(dense.weight.shape[:2])}
        G = gates.get(share, math.prod(layer.gate.group))
        count = sum(p.numel() for p in layer.parameters()) - dense.bias.numel()
        table = "W" if share == "channel" else tier  # S per channel is W
        assert count == parameter_count(weights, layer.K, table, G, c=len(train) == 3)
        total = sum(p.numel() for p in dense.parameters())
        assert f"+{100 * ((count + dense.bias.numel()) / total - 1):.3g}%" in repr(layer)


def test_the_counts_per_synapse_are_2k_and_3k():
    assert parameter_count(1000, 3, "S", gates=1000) == 2 * 3 * 1000
    assert parameter_count(1000, 3, "general", gates=1000) == 3 * 3 * 1000


@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("act", ["relu", "silu", "hardtanh", "sigmoid", "mish"])
def test_every_weight_and_gate_gets_a_gradient_from_the_start(act, tier, share):
    x = torch.randn(64, 5, requires_grad=True)
    layer = tg.Linear(5, 3, init=act, tier=tier, share=share)
    (layer(x) * torch.randn(64, 3)).sum().backward()
    assert x.grad.abs().sum() > 0
    for name, p in layer.named_parameters():
        assert p.grad.flatten(2).abs().sum(-1).gt(0).all() if name == "weight" else p.grad.any(), (
            name
        )


@pytest.mark.parametrize(("tier", "share"), [*PAIRS, ("W", "layer")])
@pytest.mark.parametrize("init", ["silu", "mish", "gelu_k4", "sigmoid"])
def test_gradients_are_right_to_second_order(tier, share, init):
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    layer = _moved(tg.Linear(3, 2, init=init, tier=tier, share=share).double())
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize("tier", ["W", "S", "general"])
@pytest.mark.parametrize(
    "options", [{}, {"padding": 1, "groups": 2}, {"padding": 1, "padding_mode": "circular"}]
)
def test_gradients_of_a_convolution_are_right(tier, options):
    x = torch.randn(1, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    layer = _moved(tg.Conv2d(4, 2, 2, init="sigmoid", tier=tier, **options).double())
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", ["silu", "relu", "mish"])
def test_the_fast_product_agrees_with_the_reference_in_every_gradient(dtype, init):
    layer, x = _moved(tg.Linear(17, 5, init=init)).to(dtype), torch.randn(3, 7, 17).to(dtype)
    assert layer.gate.theta0.dtype == torch.float32
    dy, grads = torch.randn(3, 7, 5).to(dtype), []
    for backend in ("auto", "reference"):
        own, z = copy.deepcopy(layer), x.clone().requires_grad_()
        with tg.kernels.use(backend):
            own(z).backward(dy)
        grads.append([z.grad, *(p.grad for p in own.parameters())])
    # sums of 21 products in another order; 16-bit results are rounded once each
    tol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tol * float(theirs.abs().max()), rtol=tol)


def test_tier_w_keeps_only_its_input_for_the_backward_pass():
    saved = []
    x = torch.randn(32, 64, requires_grad=True)
    layer = tg.Linear(64, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    large = [t for t in saved if t.numel() >= x.numel() and t.shape[0] == len(x)]
    assert y.requires_grad
    assert large
    assert all(t.data_ptr() == x.data_ptr() for t in large)


def test_pytorchs_transforms_go_through():
    layer, x = _moved(tg.Linear(4, 3)), torch.randn(6, 4)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    jacobian = torch.func.vmap(torch.func.jacrev(layer))(x)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(jacobian.sum(-1), tangent)


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (63, 4), (2, 0, 4), (4,)])
def test_any_batch_goes_through(shape):
    x = torch.randn(shape, requires_grad=True)
    for tier in ("W", "S"):
        layer = tg.Linear(4, 3, tier=tier)
        y = layer(x)
        assert y.shape == (*shape[:-1], 3)
        y.sum().backward()
        torch.testing.assert_close(y, F.linear(F.silu(x), layer.weight[:, 1], layer.bias))


def test_nan_spreads_and_does_not_vanish():
    x = torch.tensor([[math.nan, 1.0], [2.0, 3.0]])
    for tier, init in itertools.product(("W", "S"), ("silu", "relu")):
        y = tg.Linear(2, 3, tier=tier, init=init)(x)
        assert y[0].isnan().all()
        assert not y[1].isnan().any()


def test_weights_start_as_torch_draws_them_and_return_there():
    torch.manual_seed(1)
    dense = nn.Conv2d(3, 4, 3)
    torch.manual_seed(1)
    layer = tg.Conv2d(3, 4, 3, init="relu")
    assert torch.equal(layer.weight[:, 1], dense.weight)
    assert not layer.weight[:, 0].any()
    assert torch.equal(layer.bias, dense.bias)
    torch.manual_seed(1)
    moved = _moved(copy.deepcopy(layer))
    torch.manual_seed(1)
    moved.reset_parameters()
    for ours, theirs in zip(moved.parameters(), layer.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_is_copied_pickled_and_saved_like_any_module(tmp_path):
    layer, x = _moved(tg.Conv2d(2, 3, 3, tier="S")), torch.randn(1, 2, 5, 5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    torch.save(layer.state_dict(), tmp_path / "w.pt")
    fresh = tg.Conv2d(2, 3, 3, tier="S")
    fresh.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_network_moves_to_channels_last_and_computes_the_same(tier, share, groups):
    size = (5, 6) if share == "neuron" else ()
    options = {"tier": tier, "share": share, "groups": groups, "padding": 1}
    ours = _moved(tg.Conv2d(4, 8, 3, size=size, **options))
    net = nn.Sequential(nn.Conv2d(4, 4, 1), ours, nn.Sequential(nn.Conv2d(8, 2, 3)))
    x = torch.randn(2, 4, 5, 6)
    before, state = net(x), {k: v.clone() for k, v in net.state_dict().items()}
    assert net.to(memory_format=torch.channels_last) is net
    assert list(net.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    flat = ours.weight.detach().flatten(1, 2)
    assert flat.is_contiguous(memory_format=torch.channels_last)
    assert flat.data_ptr() == ours.weight.data_ptr()  # what the convolution reads is no copy
    y = net(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(y, before, rtol=1e-5, atol=1e-5)  # sums in another order
    y.sum().backward()
    assert ours.weight.grad.shape == ours.weight.shape
    again = copy.deepcopy(net).to(memory_format=torch.contiguous_format, dtype=torch.float64)
    assert again[1].weight.is_contiguous()
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again(x.double()).float(), before, rtol=1e-4, atol=1e-5)


def test_a_convolution_in_channels_last_gives_one_in_channels_last():
    dense = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    weight = tg.Conv2d.from_dense(dense, "silu").weight
    assert weight.flatten(1, 2).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight[:, 1], dense.weight)
    assert tg.Conv2d.from_dense(nn.Conv2d(4, 8, 3), "silu").weight.is_contiguous()


def test_it_moves_with_its_gradients_where_torch_swaps_tensors():
    layer, x = tg.Conv2d(4, 8, 3), torch.randn(1, 4, 5, 5)
    layer(x).sum().backward()
    with torch.no_grad():  # a graph would hold the parameters, which torch refuses
        before = layer(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to(memory_format=torch.contiguous_format).to(memory_format=torch.channels_last)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)  # sums in another order
    assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.parametrize("tier", ["W", "general"])
def test_one_and_three_dimensions_move_as_torchs_own(tier):
    line = _moved(tg.Conv1d(4, 6, 3, tier=tier))
    x, weight = torch.randn(2, 4, 9), line.weight
    before = line(x)
    line.to(memory_format=torch.channels_last)  # says nothing of three axes
    assert line.weight.is_contiguous()
    assert torch.equal(line(x), before)
    assert line.weight is weight
    volume = _moved(tg.Conv3d(4, 6, 2, tier=tier))
    x = torch.randn(2, 4, 3, 4, 5)
    before = volume(x)
    volume.to(memory_format=torch.channels_last_3d)
    assert volume.weight.flatten(1, 2).is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(volume(x), before, rtol=1e-5, atol=1e-5)  # sums in another order


def test_it_says_its_tier_branches_family_and_true_overhead():
    assert repr(tg.Linear(512, 512)) == (
        "Linear(in_features=512, out_features=512, bias=True, tier=W, K=2, share=channel, "
        "multiplicative, +100% parameters)"
    )
    assert "constant, +429%" in repr(tg.Conv2d(4, 8, (3, 2), groups=4, tier="general", init="tanh"))


def test_pairs_that_table_1_does_not_have_are_refused():
    with pytest.raises(
        ValueError, match=r"tier W has share layer, channel, neuron .* got 'synapse'"
    ):
        tg.Linear(2, 2, share="synapse")
    with pytest.raises(ValueError, match=r"tier general has share synapse .* got 'layer'"):
        tg.Conv1d(2, 2, 3, tier="general", share="layer")
    with pytest.raises(ValueError, match=r"tier A is tg\.Activation"):
        tg.Linear(2, 2, tier="A")
    with pytest.raises(ValueError, match=r"tier is one of W, S, general; got 'X'"):
        tg.Linear(2, 2, tier="X")


def test_what_it_cannot_start_from_is_refused():
    with pytest.raises(ValueError, match="K = 3 was asked for, but init has 2"):
        tg.Linear(2, 2, 3, init="silu")
    with pytest.raises(ValueError, match="K = 9 needs init"):
        tg.Linear(2, 2, 9)
    for init in ("hardswish", "hardsigmoid_clamp", TG(1, (), (1,), (0,))):
        with pytest.raises(ValueError, match="two or more affine branches and no clamp"):
            tg.Linear(2, 2, init=init)
    with pytest.raises(ValueError, match="slopes are in the weights"):
        tg.Linear(2, 2, train=("s",))
    with pytest.raises(ValueError, match="needs size, the 2 spatial"):
        tg.Conv2d(2, 2, 3, share="neuron")
    with pytest.raises(TypeError, match=r"takes a plain torch\.nn\.Linear; got Conv2d"):
        tg.Linear.from_dense(nn.Conv2d(2, 2, 1), "relu")


@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_k_alone_chooses_a_start(K):
    assert tg.Linear(2, 2, K).K == K == tg.Conv1d(2, 2, 1, K).K


def test_each_dense_layer_of_torch_has_its_tiered_one():
    assert all(issubclass(ours, theirs) for theirs, ours in TIERED.items())


def test_a_layer_with_one_input_trains():
    layer, x = tg.Linear(1, 4), torch.randn(3, 1)
    grads = []
    for name in ("auto", "reference"):
        layer.zero_grad()
        with tg.kernels.use(name):
            layer(x).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    assert grads[0]
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want)


STEP, SOFT_STEP = (TG(tau, 0.3, (0, 0), (0.5, -1)) for tau in (math.inf, 4.0))


@pytest.mark.parametrize(("tier", "share"), PAIRS)
@pytest.mark.parametrize("convolves", [False, True])
def test_a_threshold_at_a_jump_has_the_gradient_of_a_soft_gate(tier, share, convolves):
    """That of the width which `primitive.straight_through` has; x and the weights keep theirs."""
    dense = (nn.Conv2d(2, 3, (3, 2), padding=1) if convolves else nn.Linear(4, 3)).double()
    x = torch.randn(5, 2, 4, 3).double() if convolves else torch.randn(6, 4).double()
    found = []
    for t in (STEP, SOFT_STEP):
        layer = TIERED[type(dense)].from_dense(
            copy.deepcopy(dense), t, tier=tier, share=share, train="theta", size=_size(share, x)
        )
        torch.manual_seed(1)
        with torch.no_grad():
            free = layer.weight if layer.const is None else layer.const
            free.add_(torch.randn_like(free))
        z = x.clone().requires_grad_()
        y = layer(z)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).double())
        found.append((z.grad, layer.gate.dtheta.grad))
    (dx, hard), (_, soft) = found
    assert not dx.any()
    assert (soft.abs() > 1e-3).any()
    torch.testing.assert_close(hard, soft)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_branches_that_part_at_a_threshold_move_it(backend):
    """Tier W by hand in float64: exact along the branches, straight through at what jumps."""
    layer = _moved(tg.Linear(4, 3, init="hardtanh", train=("theta", "c")).double())
    x, dy = torch.randn(50, 4).double(), torch.randn(50, 3).double()
    theta = (layer.gate.theta0 + layer.gate.dtheta).detach().requires_grad_()
    v, low, high = layer.gate.v.detach(), *theta
    branches = [v[0] + 0 * x, v[1] + (x - low), v[2] + 0 * x]  # slopes 0, 1, 0
    region = (x > low).long() + (x >= high).long()
    ends = [[v[0], v[1]], [v[1] + (high - low), v[2]]]
    rises = [torch.sigmoid(4 * (x - t)) for t in theta]
    parts = [b * (region == k) for k, b in enumerate(branches)]
    for k, (below, above) in enumerate(ends):
        parts[k] = parts[k] - below.detach() * rises[k]
        parts[k + 1] = parts[k + 1] + above.detach() * rises[k]
    want = sum(p @ layer.weight[:, k].T for k, p in enumerate(parts))
    want.backward(dy)
    layer.zero_grad()
    with tg.kernels.use(backend):
        layer(x).backward(dy)
    torch.testing.assert_close(layer.gate.dtheta.grad, theta.grad)


@pytest.mark.parametrize(("tier", "share"), PAIRS)
def test_every_tier_learns_where_a_step_is(tier, share):
    dense = nn.Linear(1, 1, bias=False)
    nn.init.ones_(dense.weight)
    step = TG(math.inf, 0.0, (0, 0), (0, 1))
    layer = tg.Linear.from_dense(dense, step, tier=tier, share=share, train="theta")
    optimizer = torch.optim.Adam([layer.gate.dtheta], 0.05)
    x = torch.randn(400, 1)
    for _ in range(60):
        optimizer.zero_grad()
        (layer(x) - (x > 0.5).float()).square().mean().backward()
        optimizer.step()
    assert abs(layer.gate.instance().theta[0] - 0.5) < 0.1  # a few of the 400 points apart


@pytest.mark.parametrize(("tier", "share"), PAIRS)
def test_two_branches_that_meet_have_no_surrogate(tier, share):
    """ReLU's: the gradient in theta is that of the open branches, exactly."""
    dense, x = nn.Linear(4, 1, bias=False), torch.randn(30, 4)
    layer = tg.Linear.from_dense(dense, "relu", tier=tier, share=share)
    layer(x).sum().backward()
    want = -(dense.weight.detach() * (x > 0)).sum(0)
    have = layer.gate.dtheta.grad.flatten()
    torch.testing.assert_close(have, want if len(have) > 1 else want.sum(0, keepdim=True))


@pytest.mark.parametrize("tier", ["W", "S", "general"])
def test_thresholds_of_a_tier_keep_their_order(tier):
    layer = tg.Linear(3, 2, init="hardtanh", tier=tier)
    with torch.no_grad():
        layer.gate.dtheta[0].fill_(3.0)
    x, record = torch.randn(40, 3), layer.gate.instance()
    assert list(record.theta) == [1.0, 2.0]
    act = TG(math.inf, record.theta, (0, 1, 0), (-1, -2, 1), owner=record.owner)
    want = F.linear(act(x), layer.weight[:, 1], layer.bias)  # s_k W: the middle one has slope 1
    torch.testing.assert_close(layer(x), want)
