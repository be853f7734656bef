"""Gates behind batch norms in graphs made for a GPU: the graphs run here with kernels in torch."""

import copy
import importlib

import torch
import triton
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from torch._inductor.codegen.wrapper import (
    user_defined_triton_kernel_transitive_closure_source_code as source_of,
)
from torch._inductor.decomposition import select_decomp_table
from triton.backends.compiler import GPUTarget

import threshold_gating as tg
from threshold_gating.kernels.blend import gpu, kernels, norms
from threshold_gating.kernels.structure import Role


class NoGPU:  # what Triton asks a GPU's driver for before it looks at a kernel
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


triton.runtime.driver.set_active(NoGPU())
importlib.import_module("threshold_gating.kernels.backend").runs_triton = lambda x, name: True
gpu.FEW_TILES = 0  # few rows here are summed in parts, as many are


class Run(fx.Interpreter):
    """A graph whose kernels are computed by the reference, sums in two of their parts."""

    def __init__(self, graph, act):
        super().__init__(graph)
        self.act = act

    def call_function(self, target, args, kwargs):
        if target is not triton_kernel_wrapper_functional:
            return super().call_function(target, args, kwargs)
        kernel = kernel_side_table.get_kernel(kwargs["kernel_idx"])
        return getattr(self, getattr(kernel, "fn", kernel).__name__)(kwargs["kwargs"], **kwargs)

    def blend_backward(self, given, **rest):
        dy = given["dy_p"].double()
        if given["ROLE"] == Role.JOINED:
            dy = dy + given["dtheta_p"].double()
        x = given["x_p"].detach().double().requires_grad_()
        act = copy.deepcopy(self.act)
        with torch.enable_grad(), tg.kernels.use("reference"):
            y = act(x)
            dx, *rows = torch.autograd.grad(y, [x, *ordered(act)], dy)
        rows = [row for each in rows for row in each.view(-1, given["G"])]
        if given["ROLE"] in (Role.NORMED, Role.JOINED):
            # as the kernel does: a column of memory has one mean
            laid, z = (columns(t, given["N"]) for t in (dx, given["other_p"].double()))
            rows += [laid.sum(0), (laid * (z - given["dother_p"].double().view(-1))).sum(0)]
        sums = given["dtau_p"].zero_()
        assert sums.shape[1:] == (len(rows), given["G"]), (sums.shape, len(rows))
        sums[0] = sums[-1] = torch.stack(rows) / 2
        return {"dx_p": dx.to(given["x_p"].dtype), "dtau_p": sums}

    def blend_forward(self, given, **rest):
        with tg.kernels.use("reference"):
            return {"y_p": self.act(given["x_p"].double()).to(given["x_p"].dtype)}

    def add_parts(self, given, grid=None, **rest):
        parts, rows, G = given["sums_p"].shape
        assert (given["parts"], given["TAUS"], given["G"]) == (parts, rows, G)
        assert (given["part_step"], given["row_step"]) == (rows * G, G)
        assert grid[0][0] == rows * -(-G // given["CB"])
        assert given["APART"] == 0
        return {"tau_p": given["sums_p"].sum(0)}


def columns(t, count):
    """A dense tensor as its memory is: rows of so many neighbours."""
    order = sorted(range(t.dim()), key=lambda k: -t.stride(k))
    return t.permute(order).reshape(-1, count)


def ordered(act):
    own = dict(act.named_parameters())
    return [own[name] for name in ("rho", "dtheta", "s", "c", "v") if name in own]


def gradients(net, inputs, roles=None):
    """Of all parameters and inputs; compiled if `roles` is a list, which gets those of kernels."""
    own = copy.deepcopy(net)
    given = [t.detach().clone().requires_grad_() for t in inputs]

    def backward(graph, inputs):
        for node in list(graph.graph.nodes):
            if node.target is triton_kernel_wrapper_functional:
                took = norms.take_along(node)
                role = node.kwargs["kwargs"].get("ROLE", Role.ALONE)  # add_parts has none
                assert took == (role != Role.ALONE)
                roles.extend([Role(role)] if "ROLE" in node.kwargs["kwargs"] else [])
        graph.graph.lint()
        graph.recompile()
        return make_boxed_func(Run(graph, own.act).run)

    f = own
    if roles is not None:
        torch._dynamo.reset()
        compiler = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(Run(graph, own.act).run),
            bw_compiler=backward,
            decompositions=select_decomp_table(),
        )
        f = torch.compile(own, backend=compiler, fullgraph=True)
    y = f(*given)
    y = y if isinstance(y, torch.Tensor) else sum(y)
    (y * WEIGHTS.to(y.dtype)).sum().backward()
    tensors = [*given, *own.parameters()]
    return [None if t.grad is None else t.grad.double() for t in tensors]


class Net(nn.Module):
    def __init__(self, key, train, channels=6, way="plain", axis=1):
        super().__init__()
        self.bn, self.other = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.act = tg.Activation(key, share="channel", channels=channels, train=train, axis=axis)
        self.way = way
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)

    def forward(self, z, r):
        x = self.bn(z)
        if self.way == "added":
            x = x + r
        elif self.way == "two norms":
            x = x + self.other(r)
        elif self.way == "scaled":
            x = 2 * x
        y = self.act(x)
        if self.way == "joined":
            return y.sin(), y.cos()
        return (y, x) if self.way == "used twice" else y


def check(net, z, r, role, dtype=torch.float32):
    net, z, r = net.to(dtype), z.to(dtype), r.to(dtype)
    roles = []
    have, want = gradients(net, [z, r], roles), gradients(net.double(), [z.double(), r.double()])
    assert roles == [role], (net.way, roles)
    for a, b in zip(have, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:  # bfloat16 rounds the mean, dx and y, and its norm's own sums of them
            near = 0.05 if dtype == torch.bfloat16 else 1e-5
            error = (a - b).norm() / b.norm().clamp_min(1e-3 * b.numel() ** 0.5)
            assert error < near, (net.way, dtype, tuple(a.shape), error)


torch.manual_seed(0)
shape = 4, 6, 6, 6  # as many channels as columns
WEIGHTS = torch.randn(shape)
z, r = (torch.randn(shape).to(memory_format=torch.channels_last) for _ in range(2))
LEARNED = {"relu": ("theta", "s"), "silu": ("tau", "theta", "s", "c")}
for key, train in LEARNED.items():
    for way in ("plain", "added", "two norms"):
        check(Net(key, train, way=way), z, r, Role.NORMED)
    check(Net(key, train, way="joined"), z, r, Role.JOINED)
    check(Net(key, train), z, r, Role.NORMED, torch.bfloat16)
    # dx goes to what is not a norm, or to it and something else: the norm's dx is not the gates'
    check(Net(key, train, way="scaled"), z, r, Role.ALONE)
    check(Net(key, train, way="used twice"), z, r, Role.ALONE)
    check(Net(key, train).eval(), z, r, Role.NORMED)  # sums for its weights, by the running mean
    # gates of another axis than the norm's, with as many channels
    check(Net(key, train, axis=-1), z.contiguous(), r.contiguous(), Role.ALONE)
    # parameters along rows: nothing is taken along
    check(Net(key, train), z.contiguous(), r.contiguous(), Role.ALONE)
# by this a graph that is kept on disk is known: another `norms` is another graph
assert str(norms.VERSION) in source_of(kernels.blend_backward)
check(Net("gelu", ("tau", "theta")), z, r, Role.ALONE)  # it has no registers left for them
print("ok")
