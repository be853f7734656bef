"""Learned gates in a compiled graph, by interpreted kernels: values and gradients of the reference."""

from unittest import mock

import torch

from threshold_gating import Activation, kernels
from threshold_gating.kernels.blend import gpu

ALL = ("tau", "theta", "s", "c")
CHANNEL = {"share": "channel", "channels": 6}
CASES = (
    ("relu", ("theta", "s"), {}),
    ("leaky_relu", ALL[1:], CHANNEL),
    ("silu", ALL, CHANNEL),
    ("tanh", ALL[:2], {}),
    ("gelu", ("tau",), CHANNEL),
    ("gelu", ALL, {}),
    ("gelu_tanh", (), {}),
    ("gelu_paper", (), {}),
)
for key, train, share in CASES:
    torch.manual_seed(0)
    act = Activation(key, train=train, **share)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, bias=False), torch.nn.BatchNorm2d(6), act)
    with torch.no_grad():
        for p in act.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    torch._dynamo.reset()  # it counts compilations by code
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    inputs = torch.randn(2, 3, 7, 7), torch.randn(3, 3, 5, 6)  # from the second on sizes may vary
    for x in [inputs[0], *(x.to(memory_format=torch.channels_last) for x in inputs)]:
        found = []
        for name, f in (("reference", net), ("triton", compiled)):
            with kernels.use(name), mock.patch.object(gpu, "prepared", wraps=gpu.prepared) as calls:
                net.zero_grad()
                y = f(x)
                y.square().sum().backward()
            back = [call for call in calls.call_args_list if len(call.args) == 4]
            assert len(back) == (name == "triton"), (key, name)
            found.append([y.detach(), *(p.grad.clone() for p in net.parameters())])
        for have, want in zip(*found, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
print("ok")
