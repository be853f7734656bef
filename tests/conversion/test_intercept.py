"""Owners look at every call they make, and answer those of their plan."""

import copy
import functools
import gc
import math
import pickle
import random
import weakref
from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import threshold_gating as tg
from threshold_gating.conversion import (
    ConversionError,
    answering,
    gate_parameters,
    revert,
    sites,
)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x):
        return F.relu(self.linear(x)) + x.sigmoid()


class Outer(nn.Module):
    """An approximate call of its own around a part whose calls are exact."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return F.gelu(self.inner(x)) + F.relu(x)


@pytest.fixture
def looks(monkeypatch):
    """The plans that were looked up, one for each run of an owner."""
    plans = []
    start = answering.Answering.__init__

    def counted(self, plan, *counts):
        plans.append(sorted(plan))
        start(self, plan, *counts)

    monkeypatch.setattr(answering.Answering, "__init__", counted)
    return plans


@pytest.fixture
def x():
    return torch.randn(5, 7)


def test_an_owner_looks_in_every_run_and_its_parts_answer_for_themselves(looks, x):
    network = Outer()
    gated = tg.convert(network, inputs=x)
    for backend in ("auto", "reference", "auto"):
        looks.clear()
        with tg.kernels.use(backend):
            y = gated(x)
        assert looks == [["gelu#0", "relu#0"], ["relu#0", "sigmoid#0"]]
    expected = tg.TAXONOMY["gelu"](network.inner(x)) + F.relu(x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-6)  # the fast path's rounding


def test_an_audit_sees_what_runs_natively(looks, x):
    gated = tg.convert(nn.Sequential(Inner()), inputs=x)
    looks.clear()
    audit = tg.audit(gated, x)
    assert looks == [["relu#0", "sigmoid#0"]]
    assert [(site.name, site.native) for site in audit.sites] == [
        ("0:relu#0", True),
        ("0:sigmoid#0", True),
    ]
    assert not audit.left


def test_reverting_leaves_nothing_behind(x):
    network = nn.Sequential(Inner())
    before = dict(vars(network[0]))
    tg.conversion.convert_(network, inputs=x)
    assert vars(tg.conversion.revert(network)[0]).keys() == before.keys()


OVERWRITING = {
    "F.relu_": F.relu_,
    "F.silu": lambda x: F.silu(x, inplace=True),
    "sigmoid_": lambda x: x.sigmoid_(),
    "tanh_": torch.tanh_,
    "out": lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", OVERWRITING)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_call_in_place_overwrites_its_input_and_has_the_gradients_of_torchs(name, backend, x):
    class Overwrites(nn.Module):
        def forward(self, x):
            h = 2 * x
            y = OVERWRITING[name](h)
            return y * 3 + h

    network = Overwrites()
    x.requires_grad_(name != "out")  # torch has no gradient for what is written into `out`
    gated = tg.convert(network, inputs=x.detach())
    want = network(x)
    with tg.kernels.use(backend):
        have = gated(x)
    torch.testing.assert_close(have, want)
    if x.requires_grad:
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (have, want)))


def test_an_instance_of_ones_own_in_place_has_the_gradients_of_its_gates(x):
    """Its gates keep their input for the backward, which must not be what is overwritten."""

    class Overwrites(nn.Module):
        def forward(self, x):
            return F.silu(2 * x, inplace=True)

    t = tg.TG(2.0, 0.3, (0.1, 1.0), (0.2, -0.1))
    gated = tg.convert(Overwrites(), {":silu#0": t}, inputs=x, strict=False)
    x.requires_grad_()
    have, want = gated(x), t(2 * x)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (have, want)))


def test_a_call_that_changes_nothing_gives_a_tensor_of_its_own():
    class Same(nn.Module):
        def forward(self, x):
            h = x + 0
            F.hardshrink(h, -0.5).add_(1)
            return h.clamp(-math.inf, math.inf).add_(2) + h

    x = torch.linspace(-2, 2, 9)
    gated = tg.convert(Same(), inputs=x)
    for backend in ("reference", "auto"):
        with tg.kernels.use(backend):
            assert torch.equal(gated(x), Same()(x))


OUT = {
    "element": torch.sigmoid,
    "whole": lambda x, out: torch.softmax(x, -1, out=out),
    "two": lambda x, out: torch.maximum(x, x.flip(0), out=out),
}


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("kind", OUT)
def test_out_is_written_as_torch_writes_it(kind, backend):
    class Out(nn.Module):
        def forward(self, x, out):
            y = OUT[kind](x, out=out)
            assert y is out
            return y * 1

    x = torch.randn(4, 6)
    gated = tg.convert(Out(), inputs=(x, torch.zeros(4, 6)))
    with tg.kernels.use(backend), torch.no_grad():
        for make in (lambda: torch.zeros(3, 4, 6), lambda: torch.zeros(24)):
            with pytest.warns(UserWarning, match="was resized since it had shape"):
                torch.testing.assert_close(gated(x, make()), Out()(x, torch.empty(0)))
        for out in (torch.empty(0), torch.zeros(6, 4).t()):
            strides = out.stride()
            torch.testing.assert_close(gated(x, out), Out()(x, torch.empty(0)))
            assert out.shape == (4, 6)
            assert out.stride() == (strides if len(strides) == 2 else (6, 1))
        with pytest.raises(RuntimeError):
            gated(x, torch.zeros(4, 6, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        gated(x.clone().requires_grad_(), torch.zeros(4, 6))


class Switch(nn.Module):
    on = False

    def forward(self, x):
        return x


GLOBAL = [False]


class Decides(nn.Module):
    """Which calls it makes is decided by anything that Python can see."""

    def __init__(self):
        super().__init__()
        self.options, self.config, self.part = (
            {"also": False},
            SimpleNamespace(also=False),
            Switch(),
        )
        self.then = torch.abs

    def forward(self, x, k=-1):
        y = self.then(F.relu(self.part(x)))
        also = self.options["also"] or self.config.also or self.part.on or GLOBAL[0]
        also = also or k == -2 or x.stride(0) == 1 or torch.is_autocast_enabled("cpu")
        return torch.sigmoid(y) if also or random.random() > 1 else y


@contextmanager
def setting(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        (patch.setitem if isinstance(owner, dict | list) else patch.setattr)(owner, name, value)
        yield


DECIDING = {
    "a setting in a dict": lambda net: setting(net.options, "also", True),
    "a setting in an object": lambda net: setting(net.config, "also", True),
    "a setting of a part": lambda net: setting(net.part, "on", True),
    "a function that it holds": lambda net: setting(net, "then", torch.sigmoid),
    "a global": lambda net: setting(globals(), "GLOBAL", [True]),
    "chance": lambda net: setting(random, "random", lambda: 2.0),
    "autocast": lambda net: torch.autocast("cpu"),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_call_that_was_not_planned_is_refused_whatever_decided_it(backend, x):
    gated = tg.convert(Decides(), inputs=x)
    with tg.kernels.use(backend):
        for _ in range(2):  # what was seen before proves nothing
            gated(x)
        for decide in DECIDING.values():
            with decide(gated), pytest.raises(ConversionError, match="sigmoid#0 was not made"):
                gated(x)
            gated(x)
        for given in ((x, -2), (x.t().contiguous().t(),)):
            with pytest.raises(ConversionError, match="sigmoid#0 was not made"):
                gated(*given)


def test_the_class_of_an_owner_goes_with_the_last_of_its_networks(x):
    class Passing(Inner):
        pass

    kept = weakref.ref(Passing)
    gated = tg.convert(Passing(), inputs=x)
    assert copy.deepcopy(gated).__class__ is gated.__class__
    del Passing, gated
    gc.collect()
    gc.collect()  # the subclass went before, and with it what held its base
    assert kept() is None


class Packed(Inner):
    """Its state is no dict."""

    def __getstate__(self):
        return [dict(self.__dict__)]

    def __setstate__(self, state):
        self.__dict__.update(state[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_an_owner_with_a_state_of_its_own_making_is_copied_with_its_gates(copied, x):
    gated = copied(tg.convert(Packed(), inputs=x))
    assert [site.kind for site in tg.audit(gated, x).sites] == ["relu", "sigmoid"]


class Plain(torch.Tensor):
    """A subclass that does nothing of its own."""


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        return y * 2 if func is torch.relu else y


class Relu(nn.Module):
    def forward(self, x):
        return torch.relu(x)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_tensor_with_functions_of_its_own_is_refused_with_a_way_out(backend):
    x = torch.randn(8)
    with tg.kernels.use(backend):
        gated = tg.convert(Relu(), inputs=x)
        with pytest.raises(ConversionError, match=r"as_subclass\(torch\.Tensor\)"):
            gated(x.as_subclass(Doubling))
        assert torch.equal(gated(x.as_subclass(Plain)), x.relu())
        assert torch.equal(gated(x.as_subclass(Doubling).as_subclass(torch.Tensor)), x.relu())


class Tied(nn.Module):
    """A traced part whose weight is also that of another layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 7)
        self.traced = torch.fx.symbolic_trace(Inner())
        self.traced.linear.weight = self.head.weight

    def forward(self, x):
        return self.head(self.traced(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_traced_part_keeps_its_gates_and_its_ties(copied, x):
    gated = tg.convert(Tied(), inputs=x)
    assert isinstance(gated.traced, torch.fx.GraphModule)
    new = copied(gated)
    assert new.traced.linear.weight is new.head.weight
    assert new.head.weight is not gated.head.weight
    assert torch.equal(new(x), gated(x))
    assert [s.name for s in tg.audit(new, x).sites] == ["traced:relu#0", "traced:sigmoid#0"]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda m: m.recompile()])
def test_a_traced_network_has_its_gates_while_it_is_copied(copied, x, monkeypatch):
    """Another thread may run it then."""
    gated = tg.convert(torch.fx.symbolic_trace(Inner()), inputs=x)
    classes = []
    for name in ("__deepcopy__", "__reduce__", "recompile"):
        original = getattr(torch.fx.GraphModule, name)

        def noting(self, *args, _original=original):
            classes.append((type(gated), "tg_sites" in vars(gated)))
            return _original(self, *args)

        monkeypatch.setattr(torch.fx.GraphModule, name, noting)
    owned = type(gated)
    copied(gated)
    assert set(classes) == {(owned, True)}


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


class Owner(nn.Linear):
    def forward(self, x):
        return F.relu(super().forward(x))


@pytest.mark.parametrize("kind", [nn.Linear, Owner])
def test_parametrizations_are_removed_from_a_converted_layer_alone(kind, x):
    network = nn.Sequential(kind(7, 7), nn.Sigmoid())
    for name in ("weight", "bias"):
        parametrize.register_parametrization(network[0], name, Doubled())
    gated, want = tg.convert(network, inputs=x), network(x)
    names = [site.name for site in tg.audit(gated, x).sites]
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(gated[0], name)
        torch.testing.assert_close(gated(x), want)
        assert torch.equal(network(x), want)
        assert [site.name for site in tg.audit(gated, x).sites] == names
    assert set(gated.state_dict()) == {"0.bias", "0.weight"}
    reverted = tg.conversion.revert(gated)
    assert type(reverted[0]) is kind
    torch.testing.assert_close(reverted(x), want)


def test_what_was_parametrized_since_stays_so_when_the_conversion_is_undone(x):
    gated = tg.convert(nn.Sequential(Owner(7, 7)), inputs=x)
    parametrize.register_parametrization(gated[0], "weight", Doubled())
    want = gated(x)
    torch.testing.assert_close(tg.conversion.revert(gated)(x), want)
    assert parametrize.is_parametrized(gated[0], "weight")
    assert "tg_sites" not in vars(gated[0])


class Twice(nn.Module):
    def forward(self, x):
        return F.gelu(F.gelu(x) - 0.1)


def test_a_region_that_is_compiled_by_itself_is_answered_if_its_calls_are_alike(x):
    gated = tg.convert(Twice(), inputs=x)
    with tg.kernels.use("reference"):
        for plan in (gated.tg_sites, None):
            run = answering.Answering(plan)._inside(Twice().forward)
            assert torch.equal(run(x), gated(x))
    unlike = tg.convert(Twice(), {":gelu#1": 2}, inputs=x, tol=math.inf).tg_sites
    with pytest.raises(tg.conversion.ConversionError, match="cannot be told apart there"):
        answering.Answering(unlike)._inside(Twice().forward)


# What Dynamo does not hand to a mode by itself: F.selu_, torch.relu_, F.hardswish and others.
SEEN = set().union(*torch.overrides.get_overridable_functions().values())
PASSED_OVER = {f: kind for f, (kind, _) in sites.FUNCTIONS.items() if f not in SEEN}
GIVEN = {"threshold": (0.1, -1.0), "clamp": (-0.5, 0.5), "clamp_min": (0.0,), "clamp_max": (0.5,)}


class PassedOver(nn.Module):
    def forward(self, x):
        return [f(x * 1, *GIVEN.get(kind, ())) for f, kind in PASSED_OVER.items()]


@pytest.mark.compile
def test_every_spelling_of_a_call_is_answered_in_a_compiled_graph(x):
    assert {F.selu_, torch.relu_, F.hardswish} <= set(PASSED_OVER)
    wish = tg.TG(2.0, 0.5, (-0.5, 1.0), (1.0, -1.0))
    gated = tg.convert(PassedOver(), {"re:.*#.*": wish}, inputs=x, tol=math.inf)
    compiled = torch.compile(gated, backend="aot_eager", fullgraph=True)(x)
    for y, f in zip(compiled, PASSED_OVER, strict=True):
        # the graph takes the same formula in other steps: a few roundings
        torch.testing.assert_close(y, wish(x), rtol=1e-5, atol=1e-6, msg=str(f))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(7, 7, batch_first=True)

    def forward(self, x):
        y, (h, _) = self.lstm(torch.tanh(x))
        return y, h


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at a tensor
@pytest.mark.parametrize("needed", [False, True])
def test_a_compiled_lstm_has_the_values_the_states_and_the_gradients_of_torch(needed):
    net, x = Remembers(), torch.randn(3, 5, 7).requires_grad_(needed)
    compiled = torch.compile(tg.convert(net, inputs=x), backend="aot_eager")
    found = []
    for run, weights in ((net, net), (compiled, compiled._orig_mod)):
        y, h = run(x)
        grads = torch.autograd.grad(y.sum() + h.square().sum(), list(weights.parameters()))
        found.append([y, h, *grads])
    torch.testing.assert_close(*found)


class Learns(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(F.silu(self.a(x)))


def through(forward, *args, **kwargs):
    return forward(*args, **kwargs)


def wrapped_by_wraps(net):
    forward = net.forward
    net.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))


def wrapped_by_partial(net):
    net.forward = functools.partial(through, net.forward)


def wrapped_as_a_method(net):  # as accelerate does it
    forward = net.forward.__func__
    net.forward = MethodType(lambda self, *args: forward(self, *args), net)


def moved(net, x):
    gated = tg.convert(net, train=("tau", "theta"), share="channel", inputs=x)
    gate_parameters(gated)["tg_silu_0_dtheta"].data.add_(1.0)
    return gated


@pytest.mark.parametrize("wrap", [wrapped_by_wraps, wrapped_by_partial, wrapped_as_a_method])
def test_a_forward_that_others_wrap_after_the_conversion_has_its_gates(wrap, x):
    net = Learns()
    gated = moved(net, x)
    want = gated(x)
    assert not torch.allclose(want, net(x))
    wrap(gated)
    assert torch.equal(gated(x), want)
    compiled = torch.compile(gated, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)  # other formulas, other roundings
    gated(x).sum().backward()
    assert gate_parameters(gated)["tg_silu_0_dtheta"].grad.abs().max() > 0
    assert torch.equal(revert(gated)(x), net(x))


COPIES = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]


@pytest.mark.parametrize("copied", COPIES)
def test_a_wrapped_forward_is_answered_once_also_by_a_copy(copied, x):
    net = Learns()
    want = moved(net, x)(x)
    after = moved(net, x)
    wrapped_by_partial(after)
    wrapped_by_partial(net)
    both = moved(net, x)
    wrapped_by_partial(both)
    for gated in (after, both, moved(net, x)):
        assert torch.equal(copied(gated)(x), want)
        assert torch.equal(type(gated).forward(copied(gated), x), want)


class Crossed(nn.Module):
    """Two layers with a call each, whose order `flag` decides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x, flag=True):
        if flag:
            u = torch.tanh(self.a(x))
            v = torch.tanh(
                self.b(x),
            )
        else:
            v = torch.tanh(self.b(x))
            u = torch.tanh(self.a(x))
        return u - 2 * v


class Either(Crossed):
    def forward(self, x, flag=True):
        if flag:
            return torch.tanh(self.a(x))
        return torch.tanh(self.b(x))


class Repeated(Crossed):
    def forward(self, x, times=3):
        for _ in range(times):
            x = torch.tanh(self.a(x))
        return x


OTHER_PATHS = [
    (Crossed, False, "tanh#0 is made by"),
    (Either, False, "tanh#0 is made by"),
    (Repeated, 2, "called 2 times and 3 times"),
]


@pytest.mark.compile
@pytest.mark.parametrize(("kind", "other", "says"), OTHER_PATHS)
def test_a_gate_that_learns_is_refused_to_another_call_also_in_a_compiled_graph(
    kind, other, says, x
):
    torch._dynamo.reset()
    gated = tg.convert(kind(), inputs=x, train="tau", share="channel")
    compiled = torch.compile(gated, backend="aot_eager")
    whole = torch.compile(gated, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(x), gated(x))
    for net in (gated, compiled):
        for _ in range(2):  # what was refused once is not kept as if it were right
            with pytest.raises(ConversionError, match=says):
                net(x, other)
            torch.testing.assert_close(net(x), gated(x))


@pytest.mark.compile
def test_unlike_instances_keep_their_calls_in_a_compiled_graph(x):
    torch._dynamo.reset()
    gated = tg.convert(Crossed(), {":tanh#0": "hardtanh"}, inputs=x, tol=math.inf)
    compiled = torch.compile(gated, backend="aot_eager")
    torch.testing.assert_close(compiled(x), gated(x))
    with pytest.raises(ConversionError, match="tanh#0 is made by"):
        compiled(x, False)


class Whole(nn.Module):
    """A call of what it is given, and one of whole numbers, as for an index."""

    def forward(self, x):
        return F.relu(x) + torch.arange(-2, x.shape[0] - 2).relu()[:, None]


@pytest.mark.parametrize("options", [{"train": ("theta", "s")}, {"sites": {":relu#0": "silu"}}])
def test_whole_numbers_are_torchs_own_but_not_where_another_function_stands(options):
    x = torch.randn(4, 3)
    net = tg.convert(Whole(), inputs=x, tol=math.inf, **options)
    assert net(x).shape == x.shape
    for given in (x.long(), x.short()):
        with pytest.raises(ConversionError, match=r"give x\.float\(\)"):
            net(given)
    assert torch.equal(tg.convert(Whole(), inputs=x)(x.long()), Whole()(x.long()))


def ops_of(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    return {event.key for event in seen.key_averages()}


def test_torchs_own_attention_keeps_its_fast_path_where_nobody_looks():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    fast, inputs = "aten::_native_multi_head_attention", (x, x, x)
    gated = tg.convert(attention, inputs=inputs)
    with torch.no_grad():
        assert fast in ops_of(lambda: gated(*inputs))
        assert torch.equal(gated(*inputs)[0], attention(*inputs)[0])
        assert not tg.audit(gated, *inputs).left  # who looks sees the site
        with tg.kernels.use("reference"):
            assert fast not in ops_of(lambda: gated(*inputs))
            torch.testing.assert_close(gated(*inputs)[0], attention(*inputs)[0])
    learner = tg.convert(attention, train="tau", share="layer", inputs=inputs)
    with torch.no_grad():
        assert fast not in ops_of(lambda: learner(*inputs))
        next(iter(tg.conversion.gate_parameters(learner).values())).fill_(1.0)
        assert not torch.allclose(learner(*inputs)[0], attention(*inputs)[0])
