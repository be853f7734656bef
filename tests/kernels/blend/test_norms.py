"""Gates behind a batch norm in a compiled graph make the sums that its backward pass needs."""

import copy

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

import threshold_gating as tg
from threshold_gating.kernels.blend import norms


def test_a_graph_with_the_sums_taken_along_has_the_gradients_of_one_without(with_triton):
    with_triton("norm_graphs.py")


def test_the_kernel_sums_dx_and_dx_times_what_the_norm_was_given(step_by_step):
    step_by_step("interpret_norms.py")


def test_where_the_compiler_is_another_one_nothing_is_taken_along(monkeypatch):
    post_grad = pytest.importorskip("torch._inductor.fx_passes.post_grad")
    matcher = pytest.importorskip("torch._inductor.pattern_matcher")
    registered = []
    monkeypatch.setattr(
        matcher, "register_graph_pattern", lambda kernel, pass_dict: registered.append
    )
    norms.register.__wrapped__()
    assert len(registered) == 1
    monkeypatch.delattr(post_grad, "pass_patterns")
    norms.register.__wrapped__()
    assert len(registered) == 1


def test_names_of_arguments_are_those_of_the_kernel():
    kernels = pytest.importorskip("threshold_gating.kernels.blend.kernels")
    names = list(kernels.blend_backward.arg_names)
    every = (*norms._CONSTANTS, *norms._WANTED)
    at = names.index(every[0])
    assert tuple(names[at : at + len(every)]) == every
    assert set(norms._SUMS) < set(names)
    sums = pytest.importorskip("threshold_gating.kernels.blend.sums")
    assert set(norms._GRADIENTS) < set(sums.add_parts.arg_names)


class Block(nn.Module):
    """Norms right before gates, before what is added, and on both ways."""

    def __init__(self, key, train):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(3))
        kind = {"share": "channel", "channels": 64, "train": train}
        self.acts = nn.ModuleList(tg.Activation(key, **kind) for _ in range(2))

    def forward(self, x):
        conv, norm, act = self.convs, self.norms, self.acts
        y = act[0](norm[0](conv[0](x)))
        return act[1](norm[1](conv[1](y)) + norm[2](conv[2](x)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", ["relu", "silu", "gelu"])
def test_compiled_for_a_gpu_norms_and_gates_have_the_gradients_of_float64(key, dtype, monkeypatch):
    taken = []
    look = norms.take_along
    monkeypatch.setattr(norms, "take_along", lambda node: taken.append(look(node)))
    torch._dynamo.reset()
    train = ("theta", "s") if key == "relu" else ("tau", "theta", "s", "c")
    net = Block(key, train).cuda()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    x = torch.randn(8, 64, 33, 17, device="cuda").to(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    found = {}
    # a graph that torch has kept is not looked at again
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for name, kind in (("reference", torch.float64), ("auto", dtype)):
        own = copy.deepcopy(net).to(kind)
        f = torch.compile(own, fullgraph=True) if name == "auto" else own
        with tg.kernels.use(name):
            y = f(x.to(kind))
            y.backward(dy.to(kind))
        found[kind] = [y.detach().double(), *(p.grad.double() for p in own.parameters())]
    assert taken.count(True) == (0 if key == "gelu" else 2), taken
    # bfloat16 rounds weights, every layer's output and its gradient; rounding moves some inputs of
    # a hard gate to its other side, a hundredth of them by bfloat16, and each of these is as far
    # off as the gradient itself: a tenth in this norm
    near = 2e-3 if dtype == torch.float32 else 0.1 if key == "relu" else 3e-2
    for have, want in zip(found[dtype], found[torch.float64], strict=True):
        assert (have - want).norm() <= near * want.norm() + 1e-4, (key, tuple(want.shape))
