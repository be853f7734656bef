"""Activation: the module around an instance, frozen and learned."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from threshold_gating import TAXONOMY, TG, Activation, kernels
from threshold_gating.conversion import convert
from threshold_gating.taxonomy import ROWS

INF = math.inf
SOFT = [key for key, t in TAXONOMY.items() if not t.hard]
HARD = [key for key, t in TAXONOMY.items() if t.hard and t.K > 1 and t.q is None]


@pytest.fixture
def reference():
    with kernels.use("reference"):
        yield


def same(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("key", TAXONOMY)
def test_a_frozen_activation_is_its_instance(key, dtype):
    act = Activation(key).to(dtype)
    x = torch.cat([torch.randn(1003) * 4, torch.tensor([0.0, -1.0, 1.0, 3.0, 6.0])]).to(dtype)
    have, want = act(x), TAXONOMY[key](x)
    if TAXONOMY[key].hard:
        x = torch.cat([x, torch.tensor([math.nan, INF, -INF], dtype=dtype)])
        assert same(act(x), TAXONOMY[key](x))
    else:
        # Tensor parameters are multiplied where numbers 0 and 1 are not: a few roundings of terms
        # of order 10. In float64 the buffers hold the record's own digits.
        tol = {torch.float32: 2e-6, torch.float64: 2e-14, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(have, want, rtol=tol, atol=tol)
    assert have.dtype == dtype


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("key", ["relu", "silu", "sigmoid", "tanh", "hardsigmoid", "leaky_relu"])
def test_with_native_off_it_is_as_exact_as_the_record(key):
    x = torch.randn(100_003) * 4
    assert torch.equal(Activation(key)(x), TAXONOMY[key](x))


def test_frozen_activations_add_nothing_to_a_checkpoint():
    plain = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2))
    gated = nn.Sequential(nn.Linear(4, 4), Activation("silu"), nn.Linear(4, 2))
    assert gated.state_dict().keys() == plain.state_dict().keys()
    gated.load_state_dict(plain.state_dict())
    plain.load_state_dict(gated.state_dict())
    assert list(gated[1].parameters()) == []


@pytest.mark.parametrize("key", [*SOFT, *HARD])
@pytest.mark.parametrize("share", ["layer", "channel", "neuron"])
def test_a_learned_activation_starts_as_its_instance(key, share):
    t = TAXONOMY[key]
    train = ("theta", "s", "c") if t.hard else ("tau", "theta", "s", "c")
    channels = {"layer": None, "channel": 6, "neuron": (6, 5)}[share]
    act = Activation(key, share=share, channels=channels, train=train)
    x = torch.randn(3, 6, 5) * 3
    y = act(x)
    torch.testing.assert_close(y, t(x), rtol=2e-6, atol=4e-6)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in act.parameters())
    names = {"dtheta", "s", "v"} if t.hard else {"rho", "dtheta", "s", "c"}
    assert {n for n, _ in act.named_parameters()} == names


@pytest.mark.parametrize(
    "key", ["relu", "leaky_relu", "hardtanh", "relu6", "softshrink", "silu", "tanh"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learning_the_gate_alone_starts_exactly(key, dtype):
    t = TAXONOMY[key]
    act = Activation(key, train=("theta",) if t.hard else ("tau", "theta"))
    x = (torch.randn(10_003) * 4).to(dtype)
    if t.hard:
        assert torch.equal(act(x), t(x))
    else:  # compiled code: an argument of 16 is off by its rounding, and a result by one of its own
        rtol = max(2e-6, torch.finfo(dtype).eps)
        torch.testing.assert_close(act(x), t(x), rtol=rtol, atol=0)


@pytest.mark.parametrize("share", ["layer", "channel", "neuron"])
@pytest.mark.parametrize("key", ["silu", "tanh", "gelu_k3", "gelu_k4", "relu", "hardtanh"])
def test_gradients_of_learned_parameters_agree_with_finite_differences(key, share):
    t = TAXONOMY[key]
    train = ("theta", "s", "c") if t.hard else ("tau", "theta", "s", "c")
    channels = {"layer": None, "channel": 2, "neuron": (2, 3)}[share]
    act = Activation(key, share=share, channels=channels, train=train).double()
    x = torch.linspace(-3.03, 3.11, 12, dtype=torch.float64).view(2, 2, 3).requires_grad_()
    names = [n for n, _ in act.named_parameters()]

    def f(x, *values):
        return torch.func.functional_call(act, dict(zip(names, values, strict=True)), (x,))

    start = [p.detach().clone().requires_grad_() for p in act.parameters()]
    assert torch.autograd.gradcheck(f, (x, *start))


def test_a_hard_threshold_learns_through_the_value_it_anchors():
    act = Activation("relu", train=("theta",))
    x = torch.tensor([-1.0, 0.5, 2.0])
    act(x).sum().backward()
    assert act.dtheta.grad.item() == -2.0  # minus the slope, for each element of the upper branch


def test_channels_can_be_on_any_axis():
    for shape, axis, view in [
        ((2, 6, 3, 4), 1, (1, 6, 1, 1)),
        ((2, 3, 6), -1, (1, 1, 6)),
        ((2, 3, 6), 2, (1, 1, 6)),
        ((6,), 0, (6,)),
    ]:
        act = Activation("silu", share="channel", channels=6, axis=axis, train=("tau",))
        with torch.no_grad():
            act.rho.copy_(torch.linspace(-1, 1, 6))
        x = torch.randn(shape)
        torch.testing.assert_close(act(x), x * torch.sigmoid(act.rho.detach().exp().view(view) * x))


def test_one_module_in_several_places_shares_its_gates_over_the_net():
    act = Activation("silu", share="net", train=("tau",))
    net = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    net(torch.randn(3, 4)).sum().backward()
    assert sum(p.numel() for n, p in net.named_parameters() if "rho" in n) == 1


def test_tau_stays_positive_wherever_the_optimiser_goes():
    act = Activation("silu", train=("tau",))
    for rho in (-1e30, -200.0, 200.0, 1e30):
        with torch.no_grad():
            act.rho.fill_(rho)
        assert 0 < act.instance().tau < INF
        assert act(torch.randn(5)).isfinite().all()


def test_a_learned_tau_inside_a_converted_network_is_its_own_business():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = Activation("silu", train=("tau",))

        def forward(self, x):
            return torch.relu(self.act(x))

    x = torch.randn(5)
    torch.testing.assert_close(convert(Net(), inputs=x)(x), Net()(x))


def test_gate_tensors_stay_float32_in_16_bit_models_and_become_float64():
    for train in ((), ("tau", "theta", "s", "c")):
        act = Activation("quick_gelu", train=train)
        for half in (act.bfloat16, act.half, lambda act=act: act.to(torch.bfloat16)):
            half()
            tensors = [*act.parameters(), *act.buffers()]
            assert {t.dtype for t in tensors} == {torch.float32}
            assert act.tau0.item() == torch.tensor(1.702).item()
        act.double()
        assert {t.dtype for t in [*act.parameters(), *act.buffers()]} == {torch.float64}
    assert Activation("quick_gelu").double().tau0.item() == 1.702


def test_moving_through_the_meta_device_brings_the_frozen_gates_back():
    with torch.device("meta"):
        act = Activation("gelu")
    assert act.theta0.is_meta
    act.to_empty(device="cpu")
    x = torch.randn(63)
    assert torch.equal(act(x), Activation("gelu")(x))


@pytest.mark.parametrize("train", [(), ("tau", "theta", "s", "c")])
def test_copies_and_pickles_and_checkpoints_compute_the_same(train):
    act = Activation("gelu_k3", share="channel", channels=4, train=train)
    with torch.no_grad():
        for p in act.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(2, 4, 7)
    file = io.BytesIO()
    torch.save(act.state_dict(), file)
    file.seek(0)
    loaded = Activation("gelu_k3", share="channel", channels=4, train=train)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(act), pickle.loads(pickle.dumps(act)), loaded):
        assert torch.equal(other(x), act(x))


def test_a_checkpoint_carries_the_start_of_what_was_learned():
    act = Activation("quick_gelu", train=("tau",))
    other = Activation("silu", train=("tau",))
    other.load_state_dict(act.state_dict())
    x = torch.randn(63)
    assert torch.equal(other(x), act(x))


def test_instances_give_the_learned_function_of_each_channel():
    act = Activation("gelu_k4", share="channel", channels=3, train=("tau", "theta", "s", "c"))
    with torch.no_grad():
        for p in act.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    x = torch.randn(5, 3)
    y = act(x)
    for k, t in enumerate(act.instances()):
        assert isinstance(t, TG)
        torch.testing.assert_close(t(x[:, k]), y[:, k])
    assert act.instance(2) == act.instances()[2]
    assert Activation("gelu").instance() == TAXONOMY["gelu"]


def test_printing_a_model_shows_row_branches_and_exactness():
    net = nn.Sequential(
        Activation("relu"), Activation("gelu"), Activation(TG(1.1, 0, (0, 1), (0, 0)))
    )
    assert str(net) == (
        "Sequential(\n"
        "  (0): Activation(relu, K=2, exact)\n"
        "  (1): Activation(gelu, K=5, sup 5.0e-05)\n"
        "  (2): Activation(TG(tau=1.1, theta=(0.0,), s=(0.0, 1.0), c=(0.0, 0.0)), K=2)\n"
        ")"
    )
    learned = Activation("silu", share="channel", channels=8, train=("theta", "tau"))
    assert repr(learned) == "Activation(silu, K=2, train=(tau, theta), share=channel, channels=8)"
    assert repr(Activation(TAXONOMY["mish"])) == "Activation(mish, K=3, exact)"


def test_timm_builds_a_network_with_gates():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    gated = timm.create_model("test_resnet", act_layer=Activation).eval()
    torch.manual_seed(0)
    plain = timm.create_model("test_resnet", act_layer=nn.SiLU).eval()
    assert sum(isinstance(m, Activation) for m in gated.modules()) >= 5
    plain.load_state_dict(gated.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), kernels.use("reference"):
        torch.testing.assert_close(gated(x), plain(x))


@pytest.mark.parametrize("key", ["relu", "silu", "leaky_relu", "hardswish", "softshrink"])
def test_inplace_overwrites_by_torchs_own_op_and_by_gates(key):
    x = torch.randn(63)
    want = ROWS[key].f(x)
    with kernels.use("reference"):
        before = x.clone()
        torch.testing.assert_close(Activation(key, inplace=True)(before), want)
        torch.testing.assert_close(before, want)
    assert torch.equal(Activation(key, inplace=True)(x), want)
    assert torch.equal(x, want)  # also where torch has none that overwrites: softshrink


def test_autocast_keeps_the_dtype_of_the_input():
    act = Activation("gelu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert act(torch.randn(4, 4)).dtype == torch.float32
        h = nn.Linear(4, 4)(torch.randn(2, 4))
        assert h.dtype == act(h).dtype == torch.bfloat16


@pytest.mark.compile
@pytest.mark.usefixtures("reference")
def test_one_compiled_graph_serves_every_layer_of_the_same_shape():
    compiled = torch.compile(lambda act, x: act(x), fullgraph=True)
    x = torch.randn(8, 64)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for init in (
            "silu",
            "quick_gelu",
            TG(1.3, 0.2, (0, 1), (0, 0)),
            TG(0.7, -2, (0, 1), (0, 0)),
        ):
            act = Activation(init)
            torch.testing.assert_close(compiled(act, x), act(x))


@pytest.mark.compile
def test_a_learned_network_compiles_whole_forward_and_backward():
    torch._dynamo.reset()

    def make():
        torch.manual_seed(0)
        learn = {"share": "channel", "channels": 16, "axis": -1}
        soft = Activation("gelu_k3", train=("tau", "theta", "s", "c"), **learn)
        hard = Activation("hardtanh", train=("theta", "s", "c"), **learn)
        return nn.Sequential(nn.Linear(4, 16), soft, nn.Linear(16, 16), hard)

    x = torch.randn(9, 4)
    eager, compiled = make(), make()
    want = eager(x)
    have = torch.compile(compiled, fullgraph=True)(x)
    torch.testing.assert_close(have, want)
    want.sum().backward()
    have.sum().backward()
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)  # sums in another order


def ops(program):
    return {str(n.target) for n in program.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_holds_the_gates_and_not_the_activation(strict):
    net = nn.Sequential(
        nn.Linear(4, 4), Activation("relu"), Activation("silu"), Activation("gelu")
    ).eval()
    x = torch.randn(3, 4)
    program = torch.export.export(net, (x,), strict=strict)
    assert not {o for o in ops(program) if any(w in o for w in ("relu", "silu", "gelu"))}
    torch.testing.assert_close(program.module()(x), net(x))


@pytest.mark.parametrize("key", ["relu", "silu", "tanh", "hardsigmoid", "hardswish", "gelu", "elu"])
def test_onnxruntime_computes_the_same(key, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    net = nn.Sequential(nn.Linear(5, 6), Activation(key)).eval()
    x = torch.randn(7, 5) * 3
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (have,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad(), kernels.use("reference"):
        assert abs(torch.from_numpy(have) - net(x)).max() <= 1e-6


MESSAGES = [
    (ValueError, lambda: Activation("reluu"), "no activation 'reluu' in the taxonomy; did you mean 'relu', 'rrelu', 'relu6'?"),
    (TypeError, lambda: Activation(3.0), "Activation: init is a TG or a key of TAXONOMY; got 3.0."),
    (ValueError, lambda: Activation("silu", share="synapse"), "Activation: an activation acts before the weights and cannot differ per synapse; share is 'net', 'layer', 'channel', 'head' or 'neuron'."),
    (ValueError, lambda: Activation("silu", share="row"), "Activation: share is one of net, layer, channel, head, neuron; got 'row'."),
    (ValueError, lambda: Activation("silu", share="channel"), "Activation: share='channel' needs channels, their number; got None."),
    (ValueError, lambda: Activation("silu", share="channel", channels=(3, 4)), "Activation: share='channel' needs channels, their number; got (3, 4)."),
    (ValueError, lambda: Activation("silu", share="neuron"), "Activation: share='neuron' needs channels, the shape of the positions, as (C, H, W); got None."),
    (ValueError, lambda: Activation("silu", channels=4), "Activation: share='layer' takes no channels; got 4."),
    (ValueError, lambda: Activation("silu", train=("bias",)), "Activation: train takes tau, theta, s, c; got 'bias'."),
    (TypeError, lambda: Activation("silu", train=True), 'Activation: train names what is learned, some of tau, theta, s, c, as in train=("tau", "theta"), or () for nothing; got True.'),
    (ValueError, lambda: Activation("relu", train=("tau",)), "Activation: a hard gate (tau = inf) has no sharpness to learn; train theta, s, c, or start from a soft instance."),
    (ValueError, lambda: Activation("identity", train=("theta",)), "Activation: one branch (K = 1) has no gate to learn; train s, c only."),
    (ValueError, lambda: Activation("hardswish", train=("s",)), "Activation: instances with quadratic branches stay frozen; train one with affine branches instead (for hardswish: 'hardswish_k3')."),
    (ValueError, lambda: Activation("silu", share="channel", channels=4, train="s")(torch.zeros(2, 3)), "Activation: channel sharing of (4,) at axis 1 does not fit an input of shape (2, 3); set channels and axis to match it."),
    (ValueError, lambda: Activation("silu", share="channel", channels=4, train="s")(torch.zeros(4)), "Activation: channel sharing of (4,) at axis 1 does not fit an input of shape (4,); set channels and axis to match it."),
    (TypeError, lambda: Activation("gelu")(torch.zeros(2, dtype=torch.int64)), "gates need a real floating-point tensor, got torch.int64; convert it first."),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(error, call, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_every_row_that_torch_has_can_be_printed():
    assert all(key in repr(Activation(key)) for key in ROWS)


def test_a_head_has_its_gates_as_a_channel_has():
    x = torch.randn(2, 3, 5, 5)
    head = Activation("sigmoid", share="head", channels=3, train=("tau", "theta"))
    channel = Activation("sigmoid", share="channel", channels=3, train=("tau", "theta"))
    with torch.no_grad():
        for p in head.parameters():
            p.normal_()
    channel.load_state_dict(head.state_dict())
    assert torch.equal(head(x), channel(x))
    assert "share=head, channels=3" in repr(head)


@pytest.mark.parametrize("share", ["layer", "channel"])
def test_a_threshold_at_a_jump_learns_straight_through(share):
    step = TG(math.inf, 0.0, (0, 0), (0, 1))
    channels = 2 if share == "channel" else None
    act = Activation(step, share=share, channels=channels, train=("theta",))
    frozen, x = Activation(step), torch.randn(200, 2, requires_grad=True)
    assert torch.equal(act(x), frozen(x))
    # a step that should open at 0.5: theta goes there, and x gets no gradient through the gate
    optimizer = torch.optim.Adam(act.parameters(), 0.05)
    wanted = (x.detach() > 0.5).float()
    for _ in range(60):
        optimizer.zero_grad()
        (act(x) - wanted).square().mean().backward()
        optimizer.step()
    assert not x.grad.any()
    assert all(abs(t.theta[0] - 0.5) < 0.1 for t in act.instances())


def test_a_continuous_hard_gate_has_no_surrogate():
    x = torch.randn(50, requires_grad=True)
    act = Activation("relu", train=("theta",))
    act(x).sum().backward()
    assert act.dtheta.grad.item() == -(x > 0).sum().item()  # -s of the open branch, exactly


KINDS = [
    ("relu", ()),
    ("elu", ()),
    ("hardshrink", ()),
    ("silu", ("tau",)),
    ("hardtanh", ("theta",)),
]


class Residual(nn.Module):
    """What in-place activations are dangerous in: the input is read again."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        x = 2 * x
        return self.act(x) + x


def residuals(name, train):
    gated = Residual(Activation(name, train=train, inplace=True))
    plain = Activation(name, train=train)
    return gated, lambda x: 2 * plain(2 * x)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("name", "train"), KINDS)
def test_in_place_overwrites_the_input_value_and_gradient(name, train, backend):
    gated, plain = residuals(name, train)
    torch._dynamo.reset()
    x = torch.randn(4, 5, requires_grad=True)
    with kernels.use(backend):
        for module in (gated, torch.compile(gated, backend="aot_eager", fullgraph=True)):
            have, want = module(x), plain(x)
            torch.testing.assert_close(have, want)
            dy = torch.randn_like(want)
            grads = (torch.autograd.grad(y, x, dy)[0] for y in (have, want))
            torch.testing.assert_close(*grads)
        y = torch.randn(3)
        with torch.no_grad():
            assert gated.act(y) is y
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            gated.act(torch.randn(3, requires_grad=True))


def test_an_exported_graph_overwrites_too():
    gated, plain = residuals("elu", ())
    x = torch.randn(4, 5)
    exported = torch.export.export(gated, (x,)).module()
    torch.testing.assert_close(exported(x), plain(x))


def crossed():
    act = Activation("hardtanh", train=("theta", "s", "c"))
    with torch.no_grad():
        act.dtheta.copy_(torch.tensor([[3.0], [-3.0]]))  # thresholds at 2 and -2
        act.s.add_(torch.tensor([[0.5], [0.1], [-0.2]]))
    return act


def test_a_hard_threshold_that_passes_its_neighbour_takes_its_place_in_every_backend():
    act, x = crossed(), torch.linspace(-4, 4, 17).requires_grad_()
    _, theta, s, c = act.values()
    assert torch.stack(theta).flatten().tolist() == [-2.0, 2.0]
    # each branch has the value that it keeps at the threshold of its place
    kept = [a * t + b for a, b, t in zip(s, c, [theta[0], *theta], strict=True)]
    torch.testing.assert_close(torch.stack(kept), act.v)
    torch._dynamo.reset()
    region = sum((x > t).long() for t in theta)
    region[x == 2] = 2  # owners: "lo" of the lower threshold, "hi" of the upper one
    want = torch.stack([a * x + b for a, b in zip(s, c, strict=True)]).gather(0, region[None])[0]
    slope = torch.autograd.grad(want.sum(), x, retain_graph=True)[0]
    for name in ("auto", "reference"):
        with kernels.use(name):
            for run in (act, torch.compile(act, backend="eager"), act.instance()):
                y = run(x)
                torch.testing.assert_close(y, want)
                torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], slope)


SHELF = TG(math.inf, (-1, 0, 1), (0, 0.5, 0.25, 0), (-1, 0, 0.5, 2), owner=("lo", "hi", "lo"))
SOFT_SHELF = TG(2.0, (-1, 0, 1), (0, 0.5, 0.25, 0), (-1, 0, 0.5, 2), form="product")


@pytest.mark.parametrize(
    ("t", "learned"),
    [(SHELF, ("theta",)), (SHELF, ("theta", "s", "c")), (SOFT_SHELF, ("theta",))],
)
def test_thresholds_keep_their_order_while_they_learn(t, learned):
    """Steps so large that thresholds would cross: what is read is in order, and is what was
    trained."""
    torch.manual_seed(0)
    act = Activation(t, share="channel", channels=3, train=learned)
    start, x = Activation(t), torch.randn(64, 3)
    assert torch.equal(act(x), start(x))
    branches = [p for p in act.parameters() if p is not act.dtheta]
    groups = [{"params": [act.dtheta], "lr": 0.5}, {"params": branches, "lr": 0.05}]
    optimizer, passed = torch.optim.Adam(groups), 0
    for _ in range(60):
        optimizer.zero_grad()
        (act(x) - 2 * torch.sin(4 * x)).square().mean().backward()
        optimizer.step()
        passed += bool(((act.theta0 + act.dtheta).diff(dim=0) < 0).any())
        assert (torch.stack(act.values()[1]).diff(dim=0) >= 0).all()
    assert passed > 5  # they would have crossed
    for k, record in enumerate(act.instances()):
        torch.testing.assert_close(record(x[:, k]), act(x)[:, k])
        assert list(record.theta) == sorted(record.theta)


@pytest.mark.parametrize("t", [SHELF, SOFT_SHELF])
def test_ordered_thresholds_have_the_gradient_of_the_places_they_hold(t):
    """The same function, with its thresholds given in order, has the same gradients."""
    kwargs = {"share": "channel", "channels": 3, "train": ("theta", "s", "c")}
    crossed, placed = Activation(t, **kwargs), Activation(t, **kwargs)
    with torch.no_grad():
        crossed.dtheta.copy_(torch.tensor([[0.25, 3.0, 0.0], [-2.0, 0.0, 0.0], [0.0, -3.0, -0.5]]))
        places = (crossed.theta0 + crossed.dtheta).argsort(0)
        placed.set_values(None, (crossed.theta0 + crossed.dtheta).gather(0, places))
    x, dy = torch.randn(50, 3), torch.randn(50, 3)
    for act in (crossed, placed):
        act(x).backward(dy)
    torch.testing.assert_close(crossed(x), placed(x), rtol=0, atol=0)
    torch.testing.assert_close(crossed.dtheta.grad.gather(0, places), placed.dtheta.grad)
    torch.testing.assert_close(crossed.s.grad, placed.s.grad)


def test_ordered_thresholds_in_transforms_averages_and_compiled_graphs():
    act, x = crossed(), torch.randn(40)
    want = act(x)
    own = {name: p.detach() for name, p in act.named_parameters()}
    assert torch.equal(torch.func.functional_call(act, own, (x,)), want)
    gradient = torch.func.grad(lambda p: torch.func.functional_call(act, p, (x,)).sum())(own)
    want.sum().backward()
    torch.testing.assert_close(gradient["dtheta"], act.dtheta.grad)
    averaged = torch.optim.swa_utils.AveragedModel(act)
    assert torch.equal(averaged(x), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(act(x), want)
    compiled = torch.compile(act, backend="aot_eager", fullgraph=True)
    act.zero_grad()
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(act.dtheta.grad, gradient["dtheta"])
    state = crossed()
    state.load_state_dict(act.state_dict())
    assert torch.equal(state(x), want)


@pytest.mark.parametrize("name", ["init", "share", "group", "learned"])
def test_what_is_fixed_cannot_be_set_later(name):
    act = Activation("silu")
    with pytest.raises(AttributeError, match=f"{name} is fixed when it is made"):
        setattr(act, name, "relu")
    act.inplace = True
    x = torch.randn(3)
    assert act(x) is x


LEARNED = [
    ("silu", "softplus", {"train": ("tau",)}, "K = 2 and not"),
    ("gelu_k3", "gelu_tanh_k3", {"train": ("theta", "s")}, "tau = 2.21"),
    ("relu", "hardtanh", {"train": ("s",)}, "K = 2 and not 3"),
    ("leaky_relu", "relu", {"train": ("theta",)}, r"s = \[0.01, 1.0\] and not \[0.0, 1.0\]"),
]


@pytest.mark.parametrize(("one", "other", "how", "said"), LEARNED)
def test_a_learned_state_does_not_load_into_another_function(one, other, how, said, tmp_path):
    first, second = Activation(one, **how), Activation(other, **how)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    with pytest.raises(RuntimeError, match=said):
        nn.ModuleDict({"act": second}).load_state_dict(nn.ModuleDict({"act": first}).state_dict())
    with pytest.raises(RuntimeError, match="make this one with the init and axis of the other"):
        second.load_state_dict(saved)
    assert Activation(one, **how).load_state_dict(saved).missing_keys == []


def test_a_state_without_record_loads_as_ever_and_has_the_same_keys():
    learned = Activation("silu", train=("tau",))
    assert list(learned.state_dict()) == ["rho", "tau0"]
    assert Activation("mish", train=("tau",)).load_state_dict(dict(learned.state_dict()))
    assert not Activation("silu").state_dict()


def test_a_state_loads_where_all_that_differs_was_learned():
    x = torch.linspace(-4, 4, 33)
    first = Activation(TG(1.0, 0.5, (0, 1), (0, 0.25)), train=("tau", "theta", "s", "c"))
    second = Activation(TG(2.0, 0.0, (1, 0), (1, 2)), train=("tau", "theta", "s", "c"))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(x), first(x))


def test_a_state_of_channels_on_another_axis_is_refused():
    kwargs = {"share": "channel", "channels": 3, "train": ("tau",)}
    with pytest.raises(RuntimeError, match="axis = 1 and not -1"):
        Activation("silu", axis=-1, **kwargs).load_state_dict(
            Activation("silu", **kwargs).state_dict()
        )


def test_an_axis_before_the_first_is_refused():
    act = Activation("silu", share="channel", channels=3, axis=-5, train=("tau",))
    with pytest.raises(ValueError, match="does not fit an input of shape"):
        act(torch.randn(4, 3, 5))
