"""Runs of promoted networks: on every path they are the network as it was, or an error."""

import copy
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from threshold_gating.training import PromotionError, difference, promote

# a handful of sums in another order
ROUNDING = 2e-6


class Net(nn.Module):
    """A module, a call, an in-place module; dropout, moves and a product on the way; options that
    take another path than the one that is promoted."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.checkpointed, self.path = checkpointed, ""
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.up, self.conv = nn.Linear(6, 6), nn.Conv1d(8, 8, 1)
        self.act, self.drop, self.relu = nn.SiLU(), nn.Dropout(0.3), nn.ReLU(inplace=True)

    def part(self, x):
        x = self.a(x)
        h = self.act(x)
        if self.path == "write":
            h.mul_(2)
        if self.path == "write to a view":
            h[0].mul_(2)
        if self.path == "write to the input":
            x.mul_(2)
        if self.path == "read":
            return self.b(h) + h
        if self.path == "other input":
            return self.b(h + 1)
        h = self.b(self.drop(h))
        h = self.c(F.tanh(h) * self.up(x))
        return self.conv(torch.sigmoid(h).transpose(1, 2).reshape(-1, 8, 6))

    def forward(self, x):
        h = self.part(x)
        if self.checkpointed is not None:
            h = checkpoint(self.part, x, use_reentrant=self.checkpointed)
        h = self.relu(h)
        return self.d(h[:, 1:]) + h.mean()


@pytest.fixture(scope="module")
def x():
    return torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))


def _made(**options):
    torch.manual_seed(0)
    return Net(**options).eval()


def _run(net, x, seed=0):
    """The output, and the gradients of the input and of what both networks have alike."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = net(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, net.a.weight.grad, net.a.bias.grad, net.up.weight.grad]


def _same(one, other, tol=20 * ROUNDING):  # gradients add up over the batch
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tier", ["W", "S", "general"])
def test_values_and_gradients_are_those_of_the_network_dropout_included(tier, training, x):
    net = _made()
    new = promote(net, tier, inputs=x)
    assert new.promotion.layers == ("b", "c", "conv", "d")
    _same(_run(net.train(training), x), _run(new.train(training), x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # when promoted
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_followed_again_in_the_backward_pass(reentrant, x):
    net = _made(checkpointed=reentrant)
    _same(_run(net.train(), x), _run(promote(net, inputs=x).train(), x))


def test_copies_pickles_and_state_dicts_go_on_being_followed(x):
    net = promote(_made(), inputs=x)
    other = promote(_made(), inputs=x)
    for p in other.parameters():
        nn.init.ones_(p)
    other.load_state_dict(net.state_dict())
    for new in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), other):
        assert isinstance(new, Net)
        assert difference(net, new, x) == 0
        _same(_run(net, x), _run(new, x), 0)


def test_what_others_read_of_an_activation_is_the_activation_on_any_path(x):
    net = _made()
    new = promote(net, inputs=x)
    net.path = new.path = "read"
    _same(_run(net, x), _run(new, x))


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
WRITES = ["write", "write to a view", "write to the input"]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("path", [*WRITES, "other input"])
def test_a_path_on_which_a_layer_would_read_something_else_is_right_or_refused(path, mode, x):
    net = _made()
    new = promote(net, inputs=x)
    net.path = new.path = path
    if path == "write to the input" and mode is torch.inference_mode:  # it had a copy
        with mode():
            _same([net(x)], [new(x)])
        return
    said = "does not come from there" if path == "other input" else "overwritten|does not come"
    with (
        mode(),
        pytest.raises(PromotionError, match=f"b was promoted together with silu.*({said})"),
    ):
        new(x)
    with pytest.raises(PromotionError, match="b was promoted together with silu"):
        new.b(x)


def test_what_is_overwritten_on_the_way_is_not_promoted(x):
    for path in WRITES:
        net = _made()
        net.path = path
        new = promote(net, inputs=x)
        assert "b" not in new.promotion.layers
        assert "overwritten on the way" in new.promotion.kept["b"]
        assert difference(net, new, x) < ROUNDING


def test_gradients_that_were_cut_at_the_activation_stay_cut():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                h = self.act(self.first(x))
            return self.last(h) + self.last(self.act(self.first(x)).detach())

    new = promote(Cut(), inputs=torch.randn(3, 4))
    new(torch.randn(3, 4)).sum().backward()
    assert new.promotion.layers == ("last",)
    assert new.first.weight.grad is None
    assert new.last.weight.grad.any()


def test_threads_transforms_and_autocast_are_followed(x):
    new = promote(_made(), inputs=x)
    want, seen = new(x).detach(), []

    def work():
        seen.extend(torch.equal(new(x), want) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 20
    torch.testing.assert_close(torch.vmap(new)(torch.stack([x, x]))[1], want)
    torch.testing.assert_close(
        torch.func.functional_call(new, dict(new.named_parameters()), (x,)), want
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = new(x)
    assert y.dtype == torch.bfloat16
    assert (y - want).abs().max() < 0.1 * want.abs().max()  # eight bits


def test_a_compiled_network_is_one_graph_that_is_followed(x):
    new = promote(_made(), inputs=x)
    compiled = torch.compile(new, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), new(x))
    new.path = "write"  # as refused as without
    with pytest.raises((PromotionError, torch._dynamo.exc.Unsupported), match="PromotionError"):
        compiled(x)
    torch._dynamo.reset()


def test_what_leaves_the_network_is_a_plain_tensor(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.last = nn.SiLU(), nn.Linear(4, 4)

        def forward(self, x):
            h = self.act(x)
            return {"features": h, "logits": self.last(h)}

    features = promote(Both(), inputs=torch.randn(3, 4))(torch.randn(3, 4))["features"]
    assert not vars(features)
    torch.save(features, tmp_path / "features.pt")
    assert torch.equal(torch.load(tmp_path / "features.pt", weights_only=True), features)


def test_a_promoted_network_can_be_converted_and_back(x):
    new = promote(_made(), inputs=x)
    gated = tg.convert(new, inputs=x)
    assert difference(new, gated, x) < ROUNDING
    _same(_run(new.train(), x), _run(gated.train(), x))
    back = tg.conversion.revert(gated.eval())
    assert difference(new.eval(), back, x) == 0


def test_graph_modules_are_networks_like_others(x):
    net = torch.fx.symbolic_trace(_made())
    new = promote(net, inputs=x)
    assert new.promotion.layers == ("b", "c", "conv", "d")
    for each in (new, copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert difference(net, each, x) < ROUNDING


def test_calls_with_unlike_instances_are_told_apart_or_left_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(F.relu(self.a(F.relu(x))))

    net, x = Twice(), torch.randn(5, 4)
    gated = tg.convert(net, {":relu#1": "silu"}, inputs=x, tol=math.inf)
    with pytest.raises(ValueError, match="a: reads one of several calls of one kind that have unl"):
        promote(gated, inputs=x)
    alike = tg.convert(net, {"re:.*relu.*": "silu"}, inputs=x, tol=math.inf)
    new = promote(alike, inputs=x)
    assert new.promotion.layers == ("a", "b")
    assert difference(alike, new, x) < ROUNDING < difference(net, new, x)


class Called(nn.Module):
    """An activation, whatever is done to its result, and a layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 5), nn.Linear(5, 3), None

    def forward(self, x):
        h = F.silu(self.a(x))
        if self.write is not None:
            self.write(h)
        return self.b(h)


def _assign(h):
    h[0] = 1.0


def _augment(h):
    h += 1


OVERWRITES = {
    "relu": lambda h: F.relu(h, inplace=True),
    "relu by position": lambda h: F.relu(h, True),
    "relu by name": lambda h: F.relu(input=h, inplace=True),
    "sigmoid_": lambda h: torch.sigmoid_(h),
    "hardtanh": lambda h: F.hardtanh(h, -0.1, 0.1, True),
    "leaky_relu_": lambda h: F.leaky_relu_(h, -2.0),
    "the same activation": lambda h: F.silu(h, inplace=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.9, True, True),
    "add out": lambda h: torch.add(h, 1, out=h),
    "mul out": lambda h: torch.mul(h, 3, out=h),
    "product out": lambda h: torch.mul(h, h + 2, out=h),
    "tanh out": lambda h: torch.tanh(h, out=h),
    "max out": lambda h: torch.sort(-h, out=(h, torch.empty(0, dtype=torch.long))),
    "foreach": lambda h: torch._foreach_mul_([h], 3.0),
    "foreach of a part": lambda h: torch._foreach_add_([h[0], h[1]], 3.0),
    "init": lambda h: nn.init.constant_(h, 0.7),
    "op": lambda h: torch.ops.aten.mul_(h, 3.0),
    "overload": lambda h: torch.ops.aten.mul_.Tensor(h, torch.tensor(3.0)),
    "assignment": _assign,
    "augmented": _augment,
}


@pytest.fixture(scope="module")
def called():
    torch.manual_seed(0)
    net, x = Called(), torch.randn(6, 4)
    return net, promote(net, share="channel", inputs=x), x


def _same_or_refused(want, run, x):
    """A result is what the network computed before; else there is none."""
    try:
        got = run(x)
    except PromotionError:
        return
    torch.testing.assert_close(got, want, atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", OVERWRITES)
def test_whatever_overwrites_an_activation_is_refused_also_where_nobody_counts(called, write, mode):
    net, new, x = called
    net.write = new.write = OVERWRITES[write]
    try:
        with mode():
            torch.manual_seed(1)
            want = net(x)
            torch.manual_seed(1)
            _same_or_refused(want, new, x)
    finally:
        net.write = new.write = None


@pytest.mark.parametrize("write", ["relu", "mul out"])
def test_whatever_overwrites_an_activation_is_refused_in_graphs(called, write):
    net, new, x = called
    net.write = new.write = OVERWRITES[write]
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            _same_or_refused(net(x), torch.compile(new, backend="eager"), x)
    except torch._dynamo.exc.TorchDynamoException as error:
        assert "PromotionError" in str(error)  # noqa: PT017
    finally:
        net.write = new.write = None


class Buffered(nn.Module):
    """Writes what it computed, and what it was given, to buffers by `out`."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = F.silu(self.a(x))
        y = self.b(h.flip(0))
        twice, first = torch.zeros_like(y), torch.zeros_like(h[:2])
        with torch.no_grad():
            torch.mul(y.detach(), 2.0, out=twice)
            torch.index_select(h.detach(), 0, torch.tensor([0, 1]), out=first)
        return y + twice, first


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_network_writes_by_out_is_written_once_promoted(mode):
    torch.manual_seed(0)
    net, x = Buffered(), torch.randn(6, 4)
    new = promote(net, share="channel", inputs=x)
    assert new.promotion.layers == ("b",)
    with mode():
        torch.testing.assert_close(new(x), net(x), atol=ROUNDING, rtol=ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_hook_before_a_promoted_layer_sees_what_it_did_or_is_refused(compiled):
    torch.manual_seed(0)
    net, x, seen = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(6, 4), []
    new = promote(net, share="channel", inputs=x)
    run = torch.compile(new, backend="eager") if compiled else new
    later = new[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    with pytest.raises(PromotionError, match=r"2 was promoted.*prepend=True"):
        run(x)
    later.remove()
    first = new[2].register_forward_pre_hook(lambda m, args: seen.append(args[0]), prepend=True)
    torch.testing.assert_close(run(x), net(x), atol=ROUNDING, rtol=ROUNDING)
    assert torch.equal(seen[0], net[:2](x))
    first.remove()
    new[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,), prepend=True)
    with pytest.raises(PromotionError, match="does not come from there"):
        run(x)


class _Hidden(nn.Module):
    """A reentrant checkpoint between an activation and the layer that reads it."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.b, self.act(self.a(x)), use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_around_a_layer_alone_says_what_to_use():
    x = torch.randn(2, 3, requires_grad=True)
    hidden = promote(_Hidden(True), inputs=x)
    with pytest.raises(PromotionError, match="use_reentrant=False"):
        hidden(x).sum().backward()
    hidden.reentrant = False
    hidden(x).sum().backward()
    assert x.grad is not None
