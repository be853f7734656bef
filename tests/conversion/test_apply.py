"""convert, convert_ and revert: the same function, the same keys, nothing lost."""

import copy
import inspect
import io
import math
import pickle
import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune, weight_norm
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from threshold_gating import TAXONOMY, TG, Activation, kernels
from threshold_gating.conversion import ConversionError, convert, convert_, revert
from threshold_gating.conversion.gate import PerCall


@pytest.fixture(autouse=True)
def reference():
    """Gates are really evaluated in every test of this file, unless it says otherwise."""
    with kernels.use("reference"):
        yield


class Functional(nn.Module):
    """Calls of every kind, in place and not, inside and outside modules."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.prelu = nn.PReLU(8)
        self.linear = nn.Linear(8, 8)
        self.softmax = nn.Softmax(-1)

    def forward(self, x):
        x = F.silu(self.prelu(self.act(self.conv(x))), inplace=True)
        x = self.linear(x.flatten(2).transpose(1, 2)).relu_()
        x = torch.tanh(x) * x.sigmoid() + F.hardtanh(x, -0.5, 0.5) + x.clamp(min=0.1)
        x = F.glu(torch.cat([x, F.leaky_relu(x, 0.2)], -1)) + F.relu6(x).add(1)
        if x.mean() > -1e9:  # control flow in Python is no obstacle
            x = F.scaled_dot_product_attention(x, x, x)
        return self.softmax(x) + torch.softmax(x, 1) + x.softmax(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(self.mha(x, x, x, need_weights=False)[0] + self.mha(x, x, x)[0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x):
        x = self.gru(self.lstm(x)[0])[0]
        return self.cell(x[:, -1])[0]


class Block(nn.Module):
    """One activation, used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.b(self.act(self.a(x))))


NETWORKS = [
    (Functional, (2, 3, 6, 6)),
    (Attention, (2, 5, 8)),
    (Recurrent, (3, 7, 8)),
    (Block, (2, 4)),
]


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "none"])
@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=[n.__name__ for n, _ in NETWORKS])
def test_an_exact_network_computes_the_same(network, shape, given):
    model, x = network().eval().double(), torch.randn(shape, dtype=torch.float64)
    gated = convert(model, inputs=x if given else None)
    with torch.no_grad():
        torch.testing.assert_close(gated(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=[n.__name__ for n, _ in NETWORKS])
def test_gradients_of_inputs_and_weights_are_the_same(network, shape):
    model, x = network().eval().double(), torch.randn(shape, dtype=torch.float64)
    gated = convert(model, inputs=x)
    gradients = []
    for net in (model, gated):
        z = x.clone().requires_grad_()
        net(z).square().sum().backward()
        gradients.append([z.grad, *(p.grad for p in net.parameters())])
    for want, have in zip(*gradients, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=[n.__name__ for n, _ in NETWORKS])
def test_keys_types_and_modes_stay(network, shape):
    model = network().train()
    model.requires_grad_(False)
    gated = convert(model, inputs=torch.randn(shape))
    assert list(gated.state_dict()) == list(model.state_dict())
    assert isinstance(gated, network)
    assert type(gated).__name__ == network.__name__
    assert all(m.training for m in gated.modules())
    assert not any(p.requires_grad for p in gated.parameters())
    gated.load_state_dict(model.state_dict())
    model.load_state_dict(gated.state_dict())


@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=[n.__name__ for n, _ in NETWORKS])
def test_copies_pickles_and_checkpoints_compute_the_same(network, shape):
    x = torch.randn(shape)
    gated = convert(network().eval(), inputs=x)
    file = io.BytesIO()
    torch.save(gated.state_dict(), file)
    file.seek(0)
    fresh = convert(network().eval(), inputs=x)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        want = gated(x)
        for other in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated)), fresh):
            assert torch.equal(other(x), want)


@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=[n.__name__ for n, _ in NETWORKS])
def test_revert_gives_the_network_back_with_the_weights_of_now(network, shape):
    model, x = network().eval(), torch.randn(shape)
    gated = convert(model, inputs=x)
    with torch.no_grad():
        for p, q in zip(model.parameters(), gated.parameters(), strict=True):
            q.add_(0.01)
            p.add_(0.01)
        back = revert(gated)
        assert torch.equal(back(x), model(x))
    assert [type(m) for m in back.modules()] == [type(m) for m in model.modules()]


def test_convert_leaves_the_original_alone_and_convert_in_place_copies_nothing():
    model = Functional().eval()
    x = torch.randn(2, 3, 6, 6)
    before = [type(m) for m in model.modules()]
    convert(model, inputs=x)
    assert [type(m) for m in model.modules()] == before
    pointers = [p.data_ptr() for p in model.parameters()]
    assert convert_(model, inputs=x) is model
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_breaking_a_gate_moves_the_output():
    x = torch.randn(2, 3, 6, 6)
    model = Functional().eval()
    gated = convert(model, inputs=x)
    sites = dict(gated.tg_sites)
    with torch.no_grad():
        want = gated(x)
        for name, site in sites.items():
            if site.t is None:
                continue
            data = site.t.to_dict()
            data["c"] = [c + 0.1 for c in data["c"]]
            data.pop("anchor", None)
            broken = type(site)(
                site.name, site.kind, TG.from_dict(data), parameters=site.parameters
            )
            gated.tg_sites[name] = broken
            assert not torch.allclose(gated(x), want), name
            gated.tg_sites[name] = site


def test_in_place_calls_write_into_their_input():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 1
            F.relu_(y)
            y.sub_(0.5)
            y.tanh_()
            torch.sigmoid(y, out=y)
            y.clamp_(torch.full((63,), 0.4), torch.full((63,), 0.6))
            return y

    x = torch.randn(63)
    gated = convert(InPlace(), inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(gated(x), InPlace()(x))


def test_shared_activations_stay_shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model.append(model[1])
    gated = convert(model)
    assert isinstance(gated[1], Activation)
    assert gated[1] is gated[3]


def test_a_shared_activation_can_have_an_instance_for_each_call():
    model, x = Block(), torch.randn(3, 4)
    gated = convert(model, {"act#1": "silu"}, inputs=x, tol=math.inf)
    assert isinstance(gated.act, PerCall)
    for _ in range(2):  # the count starts again with each run
        torch.testing.assert_close(gated(x), F.silu(model.b(F.relu(model.a(x)))))
    with pytest.raises(RuntimeError):
        gated(torch.randn(3, 5))
    torch.testing.assert_close(gated(x), F.silu(model.b(F.relu(model.a(x)))))
    assert type(revert(gated).act) is nn.ReLU
    assert not gated._forward_pre_hooks


SLOPES = [TG(math.inf, 0, (slope, 1), (0, 0)) for slope in (0.5, 0.25)]


def test_a_call_of_a_shared_activation_can_be_left_alone():
    model, x = Block(), torch.randn(3, 4)
    gated = convert(model, {"act": SLOPES[0], "act#1": None}, inputs=x, tol=math.inf)
    want = F.relu(model.b(F.leaky_relu(model.a(x), 0.5)))
    for same in (gated, copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        torch.testing.assert_close(same(x), want)
    assert [(op.op, op.asked) for op in tg.audit(gated, x).left] == [("relu", True)]


def test_calls_beyond_the_planned_ones_and_missing_ones_are_refused():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x, n=2):
            for _ in range(n):
                x = self.act(x - 0.1)
            return x

    x = torch.randn(5)
    gated = convert(Loop(), {"act#1": SLOPES[0]}, inputs=x, tol=math.inf)
    for backend in ("auto", "reference"):
        with kernels.use(backend):
            gated(x)
            with pytest.raises(ConversionError, match="act is called more often than the 2 times"):
                gated(x, 3)
            with pytest.raises(ConversionError, match="act was called 1 times in a run and 2"):
                gated(x, 1)
            with pytest.raises(ConversionError, match="call the network as a whole"):
                gated.act(x)
    assert torch.equal(convert(Loop(), inputs=x)(x, 5), Loop()(x, 5))  # one instance for all


def test_a_missing_call_of_a_function_with_other_instances_is_refused():
    class Skips(nn.Module):
        def forward(self, x, skip=False):
            return F.leaky_relu(x if skip else F.leaky_relu(x, 0.1), 0.1)

    x = torch.randn(5)
    gated = convert(Skips(), {":leaky_relu#1": SLOPES[0]}, inputs=x, tol=math.inf)
    with pytest.raises(ConversionError, match="leaky_relu was called 1 times and 2 times when"):
        gated(x, skip=True)
    same = convert(Skips(), inputs=x)
    assert torch.equal(same(x, skip=True), F.leaky_relu(x, 0.1))


def test_a_call_from_another_line_is_refused_where_instances_differ():
    class Moves(nn.Module):
        def forward(self, x, skip=False):
            y = x if skip else F.relu(x - 0.3)
            y = F.relu(y + 0.1)
            return F.relu(y - 0.2) if skip else y

    x = torch.randn(5)
    gated = convert(Moves(), {":relu#0": SLOPES[0]}, inputs=x, tol=math.inf)
    gated(x)
    with pytest.raises(ConversionError, match=r"the call relu#0 is made by .* and was made by"):
        gated(x, skip=True)
    assert torch.equal(convert(Moves(), inputs=x)(x, skip=True), Moves()(x, skip=True))


class Bare(nn.Module):
    def forward(self, x):
        return torch.relu(x)


class Written(nn.Module):
    def forward(self, x):
        return x * (x > 0)


@pytest.mark.parametrize(
    ("act", "is_told"), [(nn.ReLU(), False), (Bare(), False), (Written(), True)]
)
def test_a_module_recognised_by_its_values_that_no_input_reached_is_told_of(act, is_told):
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.spare = nn.ReLU(), act

        def forward(self, x, spare=False):
            return self.spare(x) if spare else self.act(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gated = convert(Spare(), inputs=torch.randn(5))
    said = " ".join(str(each.message) for each in caught)
    assert isinstance(gated.spare, tg.Activation)
    assert ("these inputs do not reach spare, so that is not verified" in said) == is_told


def test_a_missing_call_is_no_matter_where_the_lines_of_the_others_tell_them_apart():
    class Ends(nn.Module):
        def forward(self, x, last=True):
            x = F.leaky_relu(x, 0.1)
            if last:
                x = F.leaky_relu(x - 0.3, 0.1)
            return x

    x = torch.randn(5)
    gated = convert(Ends(), {":leaky_relu#1": SLOPES[0]}, inputs=x, tol=math.inf)
    assert torch.equal(gated(x, last=False), F.leaky_relu(x, 0.1))
    left = convert(Ends(), {":leaky_relu#1": None}, inputs=x)  # has no line to tell it by
    with pytest.raises(ConversionError, match="leaky_relu was called 1 times and 2 times when"):
        left(x, last=False)


def test_a_copy_of_a_traced_network_has_the_lines_of_the_first():
    class Unlike(nn.Module):
        def forward(self, x):
            return F.softplus(F.softplus(x, 2.0))

    x = torch.randn(5)
    gated = convert(torch.fx.symbolic_trace(Unlike()), inputs=x)
    copied = copy.deepcopy(gated)
    assert torch.equal(copied(x), gated(x))


def test_a_run_that_fails_half_way_leaves_no_count_behind():
    class Fails(Block):
        def forward(self, x, fail=False):
            y = self.act(x)
            return self.act(y[:, 99] if fail else y)

    x = torch.randn(3, 4)
    gated = convert(Fails(), {"act#1": SLOPES[0]}, inputs=x, tol=math.inf)
    with pytest.raises(IndexError):
        gated(x, fail=True)
    with pytest.raises(ConversionError, match="call the network as a whole"):
        gated.act(x)
    gated(x)


def test_a_run_that_is_interrupted_leaves_no_count_behind():
    class Stops(Block):
        def forward(self, x, stop=False):
            y = self.act(x)
            if stop:
                raise KeyboardInterrupt  # after which torch calls no hook
            return self.act(y - 0.1)

    x = torch.randn(3, 4)
    gated = convert(Stops(), {"act#1": SLOPES[0]}, inputs=x, tol=math.inf)
    want = gated(x)
    with pytest.raises(KeyboardInterrupt):
        gated(x, stop=True)
    assert torch.equal(gated(x), want)


def test_what_would_lose_the_gates_is_refused():
    class Calls(nn.Module):
        def forward(self, x):
            return F.gelu(x) * torch.sigmoid(x)

    gated = convert(Calls(), inputs=torch.randn(5))
    with pytest.raises(ConversionError, match=r"torch.fx would record .* use torch.export"):
        torch.fx.symbolic_trace(gated)
    with pytest.raises(ConversionError, match="Calls is converted already"):
        convert(gated, inputs=torch.randn(5))


def test_instances_for_each_call_hold_in_many_threads():
    model, x = Block(), torch.randn(64, 4)
    gated = convert(model, {"act": SLOPES[0], "act#1": SLOPES[1]}, inputs=x, tol=math.inf)
    want, wrong = gated(x), []

    def work():
        wrong.extend(1 for _ in range(40) if not torch.equal(gated(x), want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Aliased(nn.Module):
    """Holds its activation in every way there is."""

    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), nn.ReLU()
        self.steps = [self.lin, self.act]
        self.pair, self.named = (self.act,), {"act": self.act}

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.named["act"](self.pair[0](x) - 0.1)


def test_whoever_holds_an_activation_sees_the_gate():
    model, x = Aliased(), torch.randn(3, 4)
    want = model(x)
    gated = convert_(model, inputs=x)
    assert gated.steps[1] is gated.act is gated.pair[0] is gated.named["act"]
    assert isinstance(gated.act, Activation)
    assert torch.equal(gated(x), want)
    assert sum(site.calls for site in tg.audit(gated, x).sites) == 3
    revert(gated)
    assert type(gated.steps[1]) is nn.ReLU
    assert torch.equal(gated(x), want)


def test_an_attribute_that_would_do_nothing_cannot_be_set():
    gated = convert(nn.Sequential(nn.LeakyReLU(0.1)), inputs=torch.randn(3))
    with pytest.raises(AttributeError, match=r"LeakyReLU.negative_slope cannot be set"):
        gated[0].negative_slope = 0.9
    gated[0].tag = "mine"
    gated[0].inplace = True
    revert(gated)
    gated[0].negative_slope = 0.9
    assert gated(torch.tensor([-1.0])).item() == pytest.approx(-0.9)


def test_an_owner_keeps_the_signature_of_its_forward():
    class Keywords(nn.Module):
        def forward(self, x, *, mask=None, scale: float = 1.0):
            return F.relu(x) * scale

    gated = convert(Keywords(), inputs=torch.randn(3))
    assert inspect.signature(gated.forward) == inspect.signature(Keywords().forward)
    gated.forward = Keywords().forward  # on the instance, as accelerate does
    again = convert(gated, inputs=torch.randn(3), strict=False)
    assert inspect.signature(again.forward) == inspect.signature(Keywords().forward)


def test_a_network_that_was_pickled_when_its_classes_stood_elsewhere_is_read():
    homes = {"gate": "apply", "site": "plan"}  # where they stand, and where they stood
    x = torch.randn(2, 3)
    gated = convert(nn.Sequential(nn.SiLU(), nn.GRUCell(3, 3)), inputs=x, train=("tau",))
    pickled = pickle.dumps(gated, protocol=0)  # in which names are lines of text
    for now, then in homes.items():
        start = b"cthreshold_gating.conversion."
        assert start + now.encode() in pickled
        pickled = pickled.replace(start + now.encode(), start + then.encode())
    assert torch.equal(pickle.loads(pickled)(x), gated(x))


def test_a_graph_module_keeps_its_gates_when_copied_pickled_and_recompiled():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return torch.tanh(self.act(self.lin(x)))

    model, x = torch.fx.symbolic_trace(Small()), torch.randn(3, 4)
    gated = convert(model, inputs=x)
    others = [copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))]
    gated.recompile()
    for same in (gated, *others):
        assert torch.equal(same(x), gated(x))
        assert [site.name for site in tg.audit(same, x).sites] == ["act", ":tanh#0"]
        assert isinstance(same, torch.fx.GraphModule)
    assert torch.equal(revert(gated)(x), model(x))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.hidden, self.runs, self.log = nn.Linear(4, 4), None, 0, []
        self.register_buffer("steps", torch.zeros(4))
        self.register_buffer("unset", torch.full((2,), float("nan")))

    def forward(self, x):
        self.runs += 1
        self.steps += 1
        self.log.append(self.runs)
        self.hidden = torch.tanh(self.lin(x) + (0 if self.hidden is None else self.hidden))
        return self.hidden + F.dropout(self.steps, 0.5)


@pytest.mark.parametrize("how", [convert, convert_])
def test_a_network_with_a_state_is_run_into_no_other_one(how):
    model, x = Stateful(), torch.randn(3, 4)
    before = torch.get_rng_state()
    gated = how(model, inputs=x)
    assert torch.equal(torch.get_rng_state(), before)
    for each in (model, gated):
        assert (each.hidden, each.runs, each.log) == (None, 0, [])
        assert not each.steps.any()
        assert each.unset.isnan().all()
    tg.audit(gated, x)
    assert gated.runs == 0


def test_what_a_graph_of_before_keeps_is_not_written_to():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0, 3.0]))

        def forward(self, x):
            return F.relu(x) * self.scale

    model, x = Scaled(), torch.tensor([1.0, -1.0], requires_grad=True)
    y = model(x)
    convert_(model, inputs=x)
    y.sum().backward()  # torch refuses where what it keeps was overwritten since
    assert x.grad.tolist() == [2.0, 0.0]


def test_a_parameter_that_a_run_changes_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                self.w += 1
            return F.relu(x + self.w)

    with pytest.raises(ValueError, match="Writes changes its parameter 'w' when it runs"):
        convert(Writes(), inputs=torch.randn(3))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.reentrant, self.on = reentrant, True

    def part(self, x):
        return self.act(torch.tanh(self.b(F.gelu(self.act(x)))))

    def forward(self, x):
        x = F.gelu(self.a(x))
        for _ in range(2):
            again = {"use_reentrant": self.reentrant}
            x = checkpoint(self.part, x, **again) if self.on else self.part(x)
        return F.silu(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_what_checkpointing_computes_again_is_answered_again(reentrant, backend):
    model, x = Checkpointed(reentrant), torch.randn(6, 4)
    sites = {"act": SLOPES[0], "act#2": SLOPES[1], ":gelu#1": "gelu_k2"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reentrant checkpoints, that nothing needs gradients
        gated = convert(model, sites, inputs=x, tol=math.inf)
    grads = []
    for gated.on in (True, False):
        gated.zero_grad()
        with kernels.use(backend):
            gated(x).square().sum().backward()
        grads.append([p.grad.clone() for p in gated.parameters()])
    for again, plain in zip(*grads, strict=True):
        assert torch.equal(again, plain)


def test_hooks_keep_firing():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda *a: seen.append("module"))
    model.register_forward_pre_hook(lambda *a: seen.append("root"))
    convert(model)(torch.randn(2, 4))
    assert seen == ["root", "module"]


def test_an_activation_that_is_held_but_never_called_is_no_obstacle():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()

        def forward(self, x):
            return F.silu(x)

    x = torch.randn(5)
    gated = convert(Idle(), inputs=x)
    assert isinstance(gated.act, Activation)
    assert list(gated.tg_sites) == ["silu#0"]
    torch.testing.assert_close(gated(x), F.silu(x))


def test_calls_of_a_module_made_on_the_way_are_those_of_its_maker():
    class Maker(nn.Module):
        def forward(self, x):
            return nn.SiLU()(x) + F.silu(x)

    x = torch.randn(5)
    gated = convert(Maker(), inputs=x)
    assert list(gated.tg_sites) == ["silu#0", "silu#1"]
    torch.testing.assert_close(gated(x), 2 * F.silu(x))


def test_a_float64_network_gets_float64_gates():
    class QuickGELU(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    x = torch.randn(5, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4), QuickGELU(), nn.LeakyReLU(0.1)).double()
    gated = convert(model, inputs=x)
    assert gated[1].tau0.item() == 1.702
    torch.testing.assert_close(gated(x), model(x), rtol=1e-15, atol=1e-15)


def test_half_precision_and_meta_networks_convert():
    model = Functional().eval().bfloat16()
    x = torch.randn(2, 3, 6, 6).bfloat16()
    gated = convert(model, inputs=x)
    with torch.no_grad():
        # bf16 rounds each step at 2^-8; some twenty of them, on outputs of order 1
        torch.testing.assert_close(gated(x), model(x), rtol=0.1, atol=0.1)
    with torch.device("meta"):
        model = Functional()
    convert_(model)
    assert model.act.theta0.is_meta
    model.to_empty(device="cpu")
    model.load_state_dict(Functional().state_dict())
    assert model.act(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_the_fused_path_of_an_encoder_does_not_slip_past():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=True
    ).eval()
    x, pad = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    pad[1, 3:] = True
    # not strict: at padded positions the fused path gives something else, and that is refused
    gated = convert(encoder, inputs={"src": x, "src_key_padding_mask": pad}, strict=False)
    with torch.no_grad():
        live = ~pad[..., None]
        want = encoder(x)
        torch.testing.assert_close(gated(x), want)
        assert (gated(x, src_key_padding_mask=pad) * live).isfinite().all()
        gated.layers[0].tg_sites["relu#0"] = (
            gated.layers[0].tg_sites["relu#0"].__class__("x", "relu", TAXONOMY["tanh"])
        )
        assert not torch.allclose(gated(x), want)


def test_the_fused_path_of_a_layer_with_an_activation_module_does_not_slip_past():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation=nn.ReLU()).eval()
    x = torch.randn(3, 5, 16)
    gated = convert(layer, inputs=x)  # the certificate would name what is left
    with torch.no_grad():
        torch.testing.assert_close(gated(x), layer(x))


def test_converting_a_network_in_training_leaves_its_statistics_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    before = model[1].running_mean.clone()
    gated = convert_(model, inputs=torch.randn(2, 3, 8, 8))
    assert torch.equal(gated[1].running_mean, before)
    assert gated[1].training


def test_a_certificate_that_is_not_ok_is_an_error_that_names_the_site(monkeypatch):
    from threshold_gating.conversion import apply

    def worse(module, *given):
        original(module, *given)
        module.theta0 += 0.01

    original = apply.become
    monkeypatch.setattr(apply, "become", worse)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with pytest.raises(ConversionError) as caught:
        convert_(model, inputs=x)
    assert caught.value.site == "1"
    assert type(model[1]) is nn.ReLU
    assert isinstance(convert(model, inputs=x, strict=False)[1], Activation)


def test_a_tolerance_at_the_output_is_held():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(8, 4)
    convert(model, inputs=x, tol=1e-2)
    with pytest.raises(
        ConversionError, match=r"the output is off by .* of its largest value; 1e-09 is what tol"
    ):
        convert(model, inputs=x, tol=1e-9)


def test_a_path_that_was_not_run_is_refused_loudly():
    class Branching(nn.Module):
        def forward(self, x):
            return torch.relu(x) if x.sum() > 0 else torch.tanh(x)

    gated = convert(Branching(), inputs=torch.ones(3))
    assert gated(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ConversionError) as caught:
        gated(-torch.ones(3))
    assert str(caught.value) == (
        "the call tanh#0 was not made when the network was converted (then: relu#0); "
        "convert it with inputs that take the same path, or without inputs, so that calls are "
        "answered as they come."
    )


def test_a_parameter_that_changes_is_refused_loudly():
    class Changing(nn.Module):
        slope = 0.1

        def forward(self, x):
            return F.leaky_relu(x, self.slope)

    gated = convert(Changing(), inputs=torch.ones(3))
    gated.slope = 0.2
    with pytest.raises(
        ConversionError, match=r"was converted with \(0.1,\) and is called with \(0.2,\)"
    ):
        gated(torch.ones(3))


def test_a_forward_set_on_the_instance_is_wrapped():
    """accelerate puts its own forward there, which a swapped class would not reach."""
    model = Functional().eval()
    original = model.forward
    model.forward = lambda *args: original(*args)
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        want = model(x)
    # strict=False: the copy to compare with would still call this network, through the closure
    convert_(model, inputs=x, strict=False)
    model.tg_sites["tanh#0"] = None
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)
    model.tg_sites.clear()
    with pytest.raises(ConversionError):
        model(x)
    revert(model)
    with torch.no_grad():
        assert torch.equal(model(x), want)


def test_accelerate_dispatched_networks_convert():
    accelerate = pytest.importorskip("accelerate")
    model = Functional().eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        want = model(x)
    accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    convert_(model, inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)
    model.tg_sites.clear()
    with pytest.raises(ConversionError):
        model(x)


@pytest.mark.compile
def test_a_converted_network_compiles_whole_and_keeps_its_gates():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.block = nn.Linear(4, 4), Block()

        def forward(self, x):
            return self.block(F.gelu(self.linear(x))) * torch.sigmoid(x)

    torch._dynamo.reset()
    x = torch.randn(3, 4)
    model = Small().eval()
    gated = convert(model, inputs=x)
    compiled = torch.compile(gated, fullgraph=True)
    torch.testing.assert_close(compiled(x), gated(x))
    names = [name for name, _ in gated.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_an_exported_network_holds_no_activation():
    x = torch.randn(2, 5, 8)
    gated = convert(Attention().eval(), inputs=x)
    with kernels.use("auto"):
        program = torch.export.export(gated, (x,), strict=False)
    ops = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not {o for o in ops if "relu" in o or "softmax" in o or "attention" in o}
    torch.testing.assert_close(program.module()(x), gated(x))


def test_timm_networks_convert():
    timm = pytest.importorskip("timm")
    for name in ("test_resnet", "test_efficientnet"):
        model = timm.create_model(name).eval()
        x = torch.randn(2, 3, 96, 96)
        gated = convert(model, inputs=x)
        with torch.no_grad():
            want, have = model(x), gated(x)
        # exact rows, so only rounding: 3e-6 of the largest output
        assert (have - want).abs().max() <= 3e-6 * want.abs().max()


def test_hooks_of_every_kind_are_called_as_they_were_registered():
    def run(network):
        seen = []
        act = network[1]
        act.register_forward_pre_hook(lambda m, args: seen.append("pre"))
        act.register_forward_pre_hook(
            lambda m, args, kw: seen.append(("pre", kw)), with_kwargs=True
        )
        act.register_forward_hook(lambda m, args, y: seen.append("post"))
        act.register_forward_hook(
            lambda m, args, kw, y: seen.append(("post", kw)), with_kwargs=True
        )
        act.register_forward_hook(lambda m, args, y: seen.append("always"), always_call=True)
        act.register_full_backward_pre_hook(lambda m, dy: seen.append("backward pre"))
        act.register_full_backward_hook(lambda m, dx, dy: seen.append("backward"))
        return seen

    network, x = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    seen = run(network)
    network(x).sum().backward()
    want = list(seen)
    assert len(want) == 7
    convert_(network)
    assert isinstance(network[1], Activation)
    seen.clear()
    network(x).sum().backward()
    assert seen == want
    # one that is always called is called when the activation fails, too
    seen.clear()
    with pytest.raises((AttributeError, TypeError)):
        network[1]("no tensor")
    assert seen == ["pre", ("pre", {}), "always"]


@pytest.mark.parametrize("training", [True, False])
def test_what_is_reverted_is_in_the_mode_of_now(training):
    model = nn.Sequential(nn.Linear(4, 4), nn.RReLU()).train(not training)
    model[1].eval()  # in training it draws its slopes at random, and has no instance
    convert_(model)
    model.train(training)
    revert(model)
    assert type(model[1]) is nn.RReLU
    assert model[1].training is training


@pytest.mark.parametrize("training", [True, False])
def test_a_gate_that_is_reverted_is_in_the_mode_of_now(training):
    model = convert_(nn.Sequential(nn.SiLU()).train(not training))
    assert isinstance(model[0], Activation)
    assert revert(model.train(training))[0].training is training


ODD = [
    ((nn.ReLU(), torch.randn(3)), "the second argument is sites, .*convert(model, inputs=x)"),
    ((nn.ReLU(), (torch.randn(3),)), "the second argument is sites"),
    (("resnet18",), "timm.create_model('resnet18', pretrained=True) makes one"),
    ((nn.ReLU,), "ReLU is a class; give a network, ReLU(...)"),
    ((torch.relu,), "model must be a torch.nn.Module; got builtin"),
    ((nn.ReLU(), "gelu"), "sites must be a dict from site names to choices"),
    ((nn.ReLU(), {0: "gelu"}), "names of sites must be strings"),
]


@pytest.mark.parametrize(("args", "message"), ODD, ids=range(len(ODD)))
def test_arguments_that_are_something_else_are_answered_with_what_was_meant(args, message):
    pattern = re.escape(message).replace(r"\.\*", ".*")
    for call in (convert, convert_):
        with pytest.raises(TypeError, match=pattern.replace(r"convert\(", r"convert_?\(")):
            call(*args)


class Named(nn.Module):
    """Activations that are called by the name of their argument."""

    class Own(nn.Module):
        def forward(self, hidden):
            return torch.tanh(hidden / 3)

    def __init__(self):
        super().__init__()
        self.gelu, self.own, self.relu = nn.GELU(), self.Own(), nn.ReLU()

    def forward(self, x):
        x = self.own(hidden=self.gelu(input=x))
        return self.relu(input=x) + self.relu(x - 1)


@pytest.mark.parametrize("sites", [None, {"relu#1": "silu"}])
def test_an_activation_is_called_by_the_name_that_its_argument_had(sites):
    net, x = Named(), torch.randn(5, 4)
    gated = convert(net, sites, inputs=x, tol=None if sites is None else math.inf)
    calls = {site.name: site.calls for site in tg.audit(gated, x).sites}
    assert calls["gelu"] == calls["own"] == 1
    if sites is None:
        torch.testing.assert_close(gated(x), net(x), rtol=0, atol=1e-4)  # that of gelu is 5e-5
    torch.testing.assert_close(copy.deepcopy(gated)(x), gated(x), rtol=0, atol=0)
    with pytest.raises(TypeError, match="takes one argument, 'hidden'; got 0 by position and x by"):
        gated.own(x=x)


def _lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))


@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: convert(net, inputs=x),
        lambda net, x: convert_(net, inputs=x, strict=False),
        lambda net, x: tg.audit(net, x),
        lambda net, x: tg.verify(net, net, x),
        lambda net, x: tg.calibrate(net, [x]),
        lambda net, x: tg.training.promote(net, inputs=x),
    ],
)
def test_a_lazy_network_is_refused_until_it_has_run(use):
    with pytest.raises(ConversionError, match=r"0\.weight .* run it once, as model\(x\)") as caught:
        use(_lazy(), torch.randn(2, 3))
    assert caught.value.site == "0"


def test_a_lazy_network_that_has_run_is_converted():
    net, x = _lazy(), torch.randn(2, 3)
    want = net(x)
    assert torch.equal(convert(net, inputs=x)(x), want)


def test_in_inference_mode_a_network_is_converted_to_the_same_that_can_train():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.ReLU(inplace=True)), torch.randn(5, 3)
    want = convert(net, inputs=x, train=("theta", "s"))
    with torch.inference_mode():
        inside = torch.randn(5, 3)
        have = convert(net, inputs=inside, train=("theta", "s"))
        assert str(tg.audit(have, inside)) == str(tg.audit(want, x))
        assert list(tg.calibrate(net, [torch.randn(64, 3)])) == ["1"]
    assert list(have.state_dict()) == list(want.state_dict())
    have(x).sum().backward()
    assert all(p.grad is not None for p in have.parameters())
    with torch.inference_mode(), pytest.raises(ValueError, match="outside of it"):
        tg.training.promote(net, inputs=inside)


class _Pruned(nn.Module):
    """Weights that hooks make anew in each run, and an output that is kept with its history."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.SiLU()
        prune.l1_unstructured(self.a, "weight", 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            weight_norm(self.b)
        self.kept = []

    def forward(self, x):
        self.kept = [F.relu(self.b(self.act(self.a(x))))]
        return self.kept[0]


@pytest.mark.parametrize("train", [(), ("theta", "s")])
def test_a_pruned_network_is_converted_and_learns_under_its_mask(train):
    net, x = _Pruned(), torch.randn(5, 6)
    net(x)
    gated = convert(net, inputs=x, train=train)
    with torch.no_grad():
        for each in (net, gated):
            each.a.weight_orig.mul_(1.5)
            each.b.weight_g.mul_(0.5)
    torch.testing.assert_close(gated(x), net(x))
    gated(x).sum().backward()
    assert not gated.a.weight_orig.grad[gated.a.weight_mask == 0].any()
    prune.remove(gated.a, "weight")
    torch.testing.assert_close(gated(x), net(x))
