"""Gates of compiled graphs on a CPU: nodes that run compiled C, or formulas where that does not."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import threshold_gating as tg
from tests.kernels.graphs import Graphs
from tests.kernels.layers import moved
from threshold_gating.kernels.blend import graph_cpu, one_pass

GELU = tg.Activation("gelu")
EVERY = ("tau", "theta", "s", "c")
SHAPE = (6, 7, 11, 13)  # 6006 elements, more than a node needs

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not one_pass.status()[0], reason="no C compiler"),
]


def nodes(graphs):
    """How many nodes of ours there are, forward and backward."""
    return tuple(
        sum(n for op, n in graphs.ops.items() if name in op)
        for name in ("one_pass_forward", "one_pass_backward")
    )


def found(f, act, x, dy):
    act.zero_grad()
    x = x.clone().requires_grad_()
    y = f(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in act.parameters())]


CASES = {
    "silu": ("silu", EVERY, {}),
    "silu channel": ("silu", EVERY, {"share": "channel", "channels": 7}),
    "silu last": ("silu", ("tau", "s"), {"share": "channel", "channels": 13, "axis": -1}),
    "tanh": ("tanh", ("tau", "theta"), {}),
    "gelu": ("gelu", (), {}),
    "gelu channel": ("gelu", EVERY, {"share": "channel", "channels": 7}),
    "gelu_tanh": ("gelu_tanh", (), {}),
    "gelu_tanh learned": ("gelu_tanh", ("theta", "c"), {}),
    "mish": ("mish", ("s",), {}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CASES),
        *(("gelu channel", dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_a_node_has_the_bits_of_the_eager_call_and_all_its_gradients(name, dtype):
    key, train, share = CASES[name]
    act = moved(tg.Activation(key, train=train, **share))
    graphs = Graphs(act)
    for channels_last in (False, True):
        x = torch.randn(SHAPE).mul(3).to(dtype)
        dy = torch.randn(SHAPE).to(dtype)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        have, want = found(graphs.run, act, x, dy), found(act, act, x, dy)
        assert have[0].stride() == want[0].stride()
        for a, b in zip(have, want, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
    assert nodes(graphs) == (2, 2), graphs.ops


def test_only_gradients_that_are_asked_for_are_made():
    act = moved(tg.Activation("gelu", train=EVERY, share="channel", channels=7))
    graphs = Graphs(act)
    x = torch.randn(SHAPE)
    for p in act.parameters():
        p.requires_grad_(p is act.dtheta or p is act.c)
    have = torch.autograd.grad(graphs.run(x).square().sum(), [act.dtheta, act.c])
    want = torch.autograd.grad(act(x).square().sum(), [act.dtheta, act.c])
    assert all(map(torch.equal, have, want))
    assert nodes(graphs) == (1, 1)
    with torch.no_grad():
        assert torch.equal(graphs.run(x), act(x))


def test_two_tensors_that_make_one_parameter_both_have_their_gradients():
    act = moved(tg.Activation("silu", train=("tau", "theta")))
    act.tau0.requires_grad_()
    act.theta0.requires_grad_()
    graphs = Graphs(act)
    x, of = torch.randn(SHAPE), [act.rho, act.tau0, act.dtheta, act.theta0]
    have = torch.autograd.grad(graphs.run(x).square().sum(), of)
    with tg.kernels.use("reference"):
        want = torch.autograd.grad(act(x).square().sum(), of)
    for a, b in zip(have, want, strict=True):  # sums of 6006 terms in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert nodes(graphs) == (0, 0)


def test_parameters_of_another_shape_are_refused_as_in_an_eager_call():
    act = tg.Activation("gelu", train=EVERY, share="channel", channels=7)
    act.s = nn.Parameter(act.s.detach().reshape(7, 5))
    with pytest.raises(ValueError, match="gates of 5 branches for 7 groups have a row"):
        act(torch.randn(SHAPE))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="check_fits"):  # one graph or none
        Graphs(act).run(torch.randn(SHAPE))


def test_what_c_does_not_take_goes_the_long_way_of_an_eager_call():
    act = tg.Activation("gelu", train=EVERY)
    graphs = Graphs(act)
    ends = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-40, 0.0])
    odd = torch.cat([ends, torch.randn(6006)])
    dy = torch.randn_like(odd)
    for shift in (0.0, 5.0):  # then weights beyond float32
        with torch.no_grad():
            act.rho.fill_(shift)
            act.dtheta.copy_(torch.linspace(-40, 40, 4)[:, None] * shift)
        have, want = found(graphs.run, act, odd, dy), found(act, act, odd, dy)
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert graphs.count == 1
    assert nodes(graphs) == (1, 1)


def test_without_compiled_code_where_a_kept_graph_runs_the_engine_computes(monkeypatch):
    act = moved(tg.Activation("silu", train=EVERY, share="channel", channels=7))
    graphs = Graphs(act)
    x, dy = torch.randn(SHAPE), torch.randn(SHAPE)
    found(graphs.run, act, x, dy)
    graph_cpu._prepared.cache_clear()
    monkeypatch.setattr(one_pass, "kind_of", lambda structure, dtype: None)
    have = found(graphs.run, act, x, dy)
    graph_cpu._prepared.cache_clear()
    assert graphs.count == 1
    assert nodes(graphs) == (1, 1)
    with tg.kernels.use("reference"):
        want = found(act, act, x, dy)
    for a, b in zip(have, want, strict=True):  # float32 sums of 6006 terms in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (tg.Activation("silu"), torch.randn(63, 64)),
        (tg.Activation("silu"), torch.randn(SHAPE, dtype=torch.float64)),
        (tg.Activation("relu", train=("s",)), torch.randn(SHAPE)),
        (torch.vmap(GELU), torch.randn(SHAPE)),
        (
            torch.func.grad(lambda x: GELU(x).square().sum()),
            torch.randn(SHAPE),
        ),
        (
            lambda x: torch.func.jvp(GELU, (x,), (torch.ones_like(x),))[1],
            torch.randn(SHAPE),
        ),
    ],
    ids=["few elements", "float64", "hard", "vmap", "grad", "jvp"],
)
def test_elsewhere_gates_are_formulas(f, x):
    graphs = Graphs(f)
    want = f(x)
    # float32 in other steps; a derivative of GELU's sums up what five gates leave
    torch.testing.assert_close(graphs.run(x), want, rtol=1e-4, atol=1e-4)
    assert graphs.count == 1
    assert nodes(graphs) == (0, 0)


def test_sizes_that_vary_are_one_graph_of_formulas():
    act = moved(tg.Activation("silu", train=EVERY))
    graphs = Graphs(act, dynamic=True)
    for rows in (1, 3, 300, 5000):
        x = torch.randn(rows + 1, 16)
        have, want = found(graphs.run, act, x, x), found(act, act, x, x)
        for a, b in zip(have, want, strict=True):
            # sums of up to 80,000 terms in another order
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert graphs.count == 1
    assert nodes(graphs) == (0, 0)


def test_many_elements_in_each_row_are_a_node_for_every_batch():
    act = moved(tg.Activation("gelu", train=EVERY, share="channel", channels=7))
    graphs = Graphs(act)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 7, 33, 31)
        have, want = found(graphs.run, act, x, x), found(act, act, x, x)
        assert all(map(torch.equal, have, want))
    assert graphs.count == 2  # of the first batch, and of every batch
    assert nodes(graphs) == (2, 2)


@pytest.mark.parametrize(
    ("shape", "rows"), [((64, 7, 11, 13), (7, 1, 13)), ((5000, 1), (7,))], ids=["apart", "wider"]
)
def test_groups_that_are_no_run_of_axes_are_formulas(shape, rows):
    x, theta = torch.randn(shape), torch.randn(rows)

    def f(x, theta):
        return tg.kernels.blend(x, 1.5, (theta,), (0.0, 1.0), (0.2, 0.0))

    graphs = Graphs(f)
    torch.testing.assert_close(graphs.run(x, theta), f(x, theta), rtol=1e-5, atol=1e-6)
    assert nodes(graphs) == (0, 0)


def test_the_long_way_back_has_the_gradients_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(one_pass.Ready, "backward_into", lambda *args: None)
    act = moved(tg.Activation("gelu", train=EVERY, share="channel", channels=7))
    graphs, x = Graphs(act), torch.randn(SHAPE).bfloat16()
    for p in act.parameters():
        p.requires_grad_(p is act.rho or p is act.s)
    have = torch.autograd.grad(graphs.run(x).float().square().sum(), [act.rho, act.s])
    want = torch.autograd.grad(act(x).float().square().sum(), [act.rho, act.s])
    assert all(map(torch.equal, have, want))
    assert nodes(graphs) == (1, 1)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_values_are_formulas():
    graphs = Graphs(lambda x: GELU(x[x[:, 0] > 0]))
    for x in (torch.randn(999, 64), -torch.ones(9, 64)):
        # the same gates, in steps of a compiler
        torch.testing.assert_close(graphs.run(x), GELU(x[x[:, 0] > 0]), rtol=1e-5, atol=1e-5)
    assert nodes(graphs) == (0, 0)


def test_calls_with_other_numbers_share_a_graph_once_numbers_vary():
    first, *others = [tg.TG(1.0 + k / 8, (0.1,), (0.0, 1.0), (0.2, 0.0)) for k in range(12)]
    x = torch.randn(SHAPE)
    graphs = Graphs(lambda x, tau, theta: tg.kernels.blend(x, tau, theta, (0.0, 1.0), (0.2, 0.0)))
    for t in (first, *others):
        with torch.no_grad():
            y = graphs.run(x, t.tau, t.theta[0])
        # numbers are rounded to float32 in a graph: tau x at 12, half a unit in the last place
        torch.testing.assert_close(y.double(), t(x.double()), rtol=3e-6, atol=1e-6)
    assert graphs.count == 2
    assert nodes(graphs) == (2, 0)


def test_compiled_for_a_cpu_a_network_of_nodes_has_the_gradients_of_eager():
    torch._dynamo.reset()
    act = moved(tg.Activation("silu", train=EVERY, share="channel", channels=24, axis=-1))
    net = nn.Sequential(nn.Linear(16, 24), tg.Activation("gelu"), nn.Linear(24, 24), act)
    compiled, x = torch.compile(net, fullgraph=True), torch.randn(200, 16)

    def gradients(f):
        net.zero_grad()
        f(x).square().mean().backward()
        return [p.grad for p in net.parameters()]

    with torch._inductor.config.patch(fx_graph_cache=False):
        have, code = run_and_get_code(gradients, compiled)
    for a, b in zip(have, gradients(net), strict=True):
        # products of 200 and 24 terms in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    calls = "".join(code).count
    assert calls("one_pass_forward.default(") == calls("one_pass_backward.default(") == 2


@pytest.mark.parametrize("part", [slice(None), slice(1, None)])
def test_a_result_lies_as_in_an_eager_call(part):
    act = moved(tg.Activation("silu", train=("theta",), share="neuron", channels=(12, 16), axis=2))
    x, graphs = torch.randn(9, 8, 16, 12).transpose(2, 3)[part], Graphs(act)
    have, want = graphs.run(x), act(x)
    assert nodes(graphs) == (1, 0)
    assert have.stride() == want.stride()
    assert torch.equal(have, want)


def test_what_stands_beside_a_node_is_computed_after_it():
    # here torch 2.13 computed the sum before an op had written y to memory that it was given
    def f(x):
        h = x + 0
        return GELU(h) + torch.slice_scatter(h, h[:, :3] * 7, 1, 0, 3).exp()

    torch._dynamo.reset()
    x = torch.randn(96, 64)
    with torch.no_grad():
        # the same gates, an exponential of the compiler's: 2 ulp
        torch.testing.assert_close(torch.compile(f, fullgraph=True)(x), f(x), rtol=1e-6, atol=1e-6)
