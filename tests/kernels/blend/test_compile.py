"""A converted network under torch.compile: the graph of the original where torch's own ops run."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from tests.kernels.graphs import Graphs
from threshold_gating.conversion import answering

pytestmark = pytest.mark.compile


class Block(nn.Module):
    """A module that overwrites, torch's own attention, and calls of a module's own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = (
            nn.Conv1d(6, 8, 1),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
        )
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x))).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.leaky_relu(x, 0.2) * torch.sigmoid(x)


class Approximate(nn.Module):
    """Calls that no op of torch equals, around a part whose calls are exact."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return F.gelu(self.inner(x)) + F.softplus(x.mean())


def block():
    return Block().eval(), (torch.randn(2, 6, 5),)


def resnet():
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=5).eval(), (torch.randn(2, 3, 32, 32),)


def vision_transformer():
    torchvision = pytest.importorskip("torchvision")
    network = torchvision.models.VisionTransformer(32, 16, 2, 4, 32, 48, num_classes=5)
    nn.init.normal_(network.heads.head.weight)  # zeros, which would let every output pass
    return network.eval(), (torch.randn(2, 3, 32, 32),)


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.LlamaConfig(**sizes, **heads)
    return transformers.LlamaForCausalLM(config).eval(), (torch.randint(50, (2, 6)),)


def output(y):
    return getattr(y, "logits", y)


class Compiled(Graphs):
    """A network compiled to be looked at."""

    def __call__(self, inputs):
        return output(self.run(*inputs))


@pytest.fixture(params=["inputs", "as it comes"])
def convert(request):
    return lambda model, x: tg.convert(model, inputs=x if request.param == "inputs" else None)


@pytest.mark.parametrize("make", [block, resnet, vision_transformer, llama])
def test_compiled_for_inference_a_converted_network_is_one_graph_of_the_same_ops(make, convert):
    model, x = make()
    plain, gated = Compiled(model), Compiled(convert(model, x))
    with torch.no_grad():
        want = plain(x)
        have = [gated(x) for _ in range(3)]
    assert gated.count == 1
    assert not plain.ops - gated.ops - Counter({"aten.gelu.default": 2})
    if (
        "aten.gelu.default" in plain.ops
    ):  # the one approximate site here: its gates are in the graph
        assert "aten.gelu.default" not in gated.ops
    else:
        assert gated.ops == plain.ops
        assert all(torch.equal(y, want) for y in have)


@pytest.mark.parametrize("make", [block, vision_transformer])
def test_compiled_for_training_it_is_one_graph_with_the_gradients_of_eager(make, convert):
    model, x = make()
    gated = convert(model, x)
    for module in gated.modules():  # so that two runs are the same
        module.train(not isinstance(module, nn.BatchNorm1d))
    weights = list(gated.parameters())
    want = torch.autograd.grad(output(gated(*x)).square().mean(), weights, allow_unused=True)
    compiled = Compiled(gated)
    for _ in range(2):
        have = torch.autograd.grad(compiled(x).square().mean(), weights, allow_unused=True)
        for a, b in zip(have, want, strict=True):
            # float32 sums in another order: 3e-6 of the largest, as both are from float64
            assert (a is b is None) or (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert compiled.count == 1


@pytest.mark.parametrize("make", [block, vision_transformer])
def test_compiled_with_native_off_the_gates_are_evaluated_in_one_graph(make, convert):
    model, x = make()
    gated = convert(model, x)
    compiled = Compiled(gated)
    with torch.no_grad(), tg.kernels.use("reference"):
        torch.testing.assert_close(compiled(x), gated(*x))
        compiled(x)
    assert compiled.count == 1
    own = ("relu", "gelu", "attention")  # the gates of three and more branches are a softmax
    assert not [op for op in compiled.ops if any(name in op for name in own)]


def test_calls_that_are_approximate_compile_with_their_measured_stand_ins(convert):
    model, x = Approximate().eval(), (torch.randn(2, 6, 5),)
    gated = convert(model, x)
    compiled = Compiled(gated)
    with torch.no_grad(), tg.kernels.use("reference"):
        torch.testing.assert_close(compiled(x), gated(*x))
        compiled(x)
    assert compiled.count == 1
    assert {"aten.gelu.default", "aten.softplus.default"}.isdisjoint(compiled.ops)


def test_a_call_that_came_while_compiling_is_the_same_site_afterwards(monkeypatch):
    monkeypatch.setattr(answering, "_NAMES", {})
    x = (torch.randn(2, 6, 5),)
    gated = tg.convert(Block().eval())
    compiled = Compiled(gated)
    with torch.no_grad():
        compiled(x)
        made = dict(answering._NAMES)
        gated(*x)
    assert ("leaky_relu", (0.2,)) in made
    assert made == answering._NAMES


def test_another_backend_compiles_again_and_is_not_answered_by_the_old_graph(convert):
    model, x = block()
    gated = convert(model, x)
    compiled = Compiled(gated)
    with torch.no_grad():
        compiled(x)
        with tg.kernels.use("reference"):
            compiled(x)
    assert compiled.count == 2
    assert compiled.ops["aten.relu.default"] == 1


def test_compiled_learned_gates_have_the_kernels_for_their_gradients(step_by_step):
    step_by_step("compile_learned.py")


def test_a_compiled_graph_holds_the_kernels_themselves_and_copies_nothing(with_triton):
    with_triton("compile_graphs.py")


@pytest.mark.gpu
@pytest.mark.parametrize("share", [{}, {"share": "channel", "channels": 6}])
@pytest.mark.parametrize("key", ["relu", "silu", "gelu", "gelu_tanh"])
def test_compiled_for_a_gpu_gates_have_the_gradients_of_the_reference(key, share):
    torch._dynamo.reset()
    every = ("tau", "theta", "s", "c")
    train = {"relu": every[1:], "gelu_tanh": ()}.get(key, every)
    act = tg.Activation(key, train=train, **share)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), act).cuda()
    with torch.no_grad():
        for p in act.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    compiled = torch.compile(net, fullgraph=True)
    for shape in ((2, 3, 7, 7), (5, 3, 9, 8), (3, 3, 6, 6)):  # from the second on sizes may vary
        x = torch.randn(shape, device="cuda").to(memory_format=torch.channels_last)
        found = []
        for name, f in (("reference", net), ("auto", compiled)):
            net.zero_grad()
            with tg.kernels.use(name):
                y = f(x)
                y.square().mean().backward()
            found.append([y.detach(), *(p.grad.clone() for p in net.parameters())])
        for have, want in zip(*found[::-1], strict=True):
            # float32 in another order, and convolutions in TF32 by one algorithm or another
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)


class Checkpointed(nn.Module):
    """One part computed again for the backward pass, and one behind it that is not."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tg.Activation("silu", train=("tau", "theta", "s", "c")),
        lambda: tg.Activation("gelu", train=("tau", "theta", "s", "c")),
        lambda: tg.Linear(6, 6, share="channel"),
    ],
)
def test_gates_inside_and_outside_of_a_checkpointed_region_are_one_graph_for_every_size(make):
    torch._dynamo.reset()
    net = Checkpointed(nn.Sequential(make()), make())
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 5):
        x = torch.randn(rows, 6)
        found = []
        for f in (net, compiled):
            net.zero_grad()
            y = f(x)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in net.parameters())])
        for have, want in zip(*found[::-1], strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("key", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("as_a_call", [False, True])
def test_a_frozen_instance_of_small_weights_compiles_to_one_exponential_for_each_tau(
    key, as_a_call
):
    t = tg.TAXONOMY[key]
    compiled = Compiled((lambda x: tg.kernels.blend(x, t)) if as_a_call else tg.Activation(t))
    ends = torch.tensor([-torch.inf, -1e30, -40.0, 40.0, 1e30, torch.inf])
    x = torch.cat([ends, torch.linspace(-12, 12, 4001)])
    with torch.no_grad():
        y = compiled((x,))
    assert compiled.ops["aten.exp2.default"] == (len(t.tau) if isinstance(t.tau, tuple) else 1)
    # tau (x - theta), at most 16 where gates turn, rounded twice: 2 * 16 * 2^-24 of a gate
    torch.testing.assert_close(y.double(), t(x.double()), atol=4e-6, rtol=2e-6)


@pytest.mark.parametrize("key", ["gelu_k5", "elu_k4_one_tau", "hardswish_k4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_frozen_call_compiled_for_every_size_has_the_digits_of_its_type(key, dtype):
    t = tg.TAXONOMY[key]
    torch._dynamo.reset()
    f = torch.compile(lambda x: tg.kernels.blend(x, t), backend="aot_eager", dynamic=True)
    for size in (33, 200):
        x = torch.linspace(-30, 30, size, dtype=dtype)
        with torch.no_grad():
            y = f(x)
        most = 64 * torch.finfo(dtype).eps  # tau theta is 16 at most, twice
        torch.testing.assert_close(y.double(), t(x.double()), atol=most, rtol=most)
