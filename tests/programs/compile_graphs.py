"""Graphs made for a GPU where there is none: which kernels and ops they hold."""

import importlib
from collections import Counter

import torch
import triton
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from triton.backends.compiler import GPUTarget

import threshold_gating as tg


class NoGPU:  # what Triton asks a GPU's driver for before it looks at a kernel
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


triton.runtime.driver.set_active(NoGPU())
importlib.import_module("threshold_gating.kernels.backend").runs_triton = lambda x, name: True


def graph_of(module, x, cleaned=False):
    """The kernels and ops of a graph; `cleaned`, without what the compiler leaves out later on."""
    kernels, ops = Counter(), Counter()

    def look(graph, inputs, **rest):
        if cleaned:
            remove_noop_ops(graph.graph)
        for n in graph.graph.nodes:
            ops[str(n.target)] += 1
            if "triton_kernel_wrapper" in str(n.target):
                kernel = kernel_side_table.get_kernel(n.kwargs["kernel_idx"])
                kernels[getattr(kernel, "fn", kernel).__name__] += 1
        raise RuntimeError("enough")  # nothing here could run them

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=None, partition_fn=look)
    try:
        torch.compile(module, backend=backend, fullgraph=True)(x)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "enough" not in str(error):
            raise
    return kernels, ops


# the kernels themselves, and not calls of ops
net = nn.Sequential(nn.Linear(4, 4), tg.Activation("gelu", train=("tau", "theta")))
assert graph_of(net, torch.randn(3, 4))[0] == {"blend_forward": 1, "blend_backward": 1}
# with two branches the compiler has the formula, which it fuses with its neighbours
net[1] = tg.Activation("relu", train=("theta", "s"))
assert graph_of(net, torch.randn(3, 4))[0] == {"blend_backward": 1}
# neither an input nor its slope is copied
for key in ("relu", "gelu"):
    act = tg.Activation(key, share="channel", channels=4, train=("theta", "s"))
    x = torch.randn(2, 4, 5, 3)
    for laid in (x, x.to(memory_format=torch.channels_last)):
        kernels, ops = graph_of(act, laid.detach().requires_grad_(), cleaned=True)
        assert kernels["blend_backward"] == 1, kernels
        assert not [op for op in ops if "clone" in op or "copy" in op], (key, ops)
print("ok")
