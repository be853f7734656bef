"""An LSTM with one kernel a step: every length, size and direction, against float64."""

import pytest
import torch

from benchmarks.pairs import PAIRS, disagreement
from benchmarks.subjects import Recurrent
from threshold_gating import LSTM, TAXONOMY, TG, kernels
from threshold_gating.kernels import runtime
from threshold_gating.kernels.recurrent import gates, lstm

# Steps, sequences, units: one of each, and no multiple of a tile.
SHAPES = [(1, 1, 1), (2, 17, 7), (2, 2, 33)]
LAYERS = [name for name, pair in PAIRS.items() if pair.family == "recurrent"]


def check(name, shape, device, dtype=torch.float32):
    pair = PAIRS[name]
    for what, error in disagreement(pair, pair.inputs(shape, dtype, device)).items():
        assert error <= pair.bound(what, dtype), f"{name} {shape} {dtype} {what}: {error:.1e}"


def check_all(device, shapes, dtypes):
    for name in LAYERS:
        for shape in shapes:
            for dtype in dtypes:
                check(name, shape, device, dtype)


def check_others(device):
    """What no pair has: no gates that learn, no bias, other instances, gradients twice."""
    r = Recurrent(learns=False, both=True, packed=True)
    torch.manual_seed(0)
    given = r.draw((2, 3, 5), torch.float32, device)
    want, have = r.reference({n: t.double() for n, t in given.items()}), r.module(given)
    for name, t in want.items():
        assert (have[name] - t).abs().max() <= 1e-6
    layer = LSTM(2, 3, bias=False, train=("tau", "theta"), device=device)
    layer.gates |= {
        "g": TG(1.5, 0.2, (0.1, 0.7), (-0.3, 0.4)),
        "cell": TG(2.0, 0.1, (0, 0), (0, 3)),
    }
    x = torch.randn(2, 2, 2, device=device, requires_grad=True)

    def gradients():
        y, (h, c) = layer(x)
        first = torch.autograd.grad(y.square().sum() + h.sum() + c.sum(), x, create_graph=True)[0]
        return [y, first, *torch.autograd.grad(first.square().sum(), [x, *layer.parameters()])]

    have = gradients()
    with kernels.use("reference"):
        want = gradients()
    for a, b in zip(have, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()

    def overwritten(change):
        loss = sum(change(t).square().sum() for t in (layer(x)[0], *layer(x)[1]))
        return torch.autograd.grad(loss, list(layer.parameters()))

    pairs = zip(overwritten(lambda t: t.mul_(3)), overwritten(lambda t: 3 * t), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_every_gradient_equals_float64_step_by_step(step_by_step):
    step_by_step("interpret_lstm.py")


@pytest.mark.gpu
def test_every_gradient_equals_float64_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    check_all("cuda", [*SHAPES, (5, 70, 130)], [torch.float32, torch.bfloat16, torch.float16])
    with kernels.use("triton"):
        check_others("cuda")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_course_names_the_row_before_and_after_each(reverse):
    sizes = (4, 4, 2, 1)
    path = lstm.course(sizes, reverse, torch.device("cpu"))
    assert path.rows == 11
    rows = [(t, b) for t, n in enumerate(sizes) for b in range(n)]  # as packed rows lie
    back = 1 if reverse else -1
    for here, (t, b) in enumerate(rows):
        before = (t + back, b)
        came = rows.index(before) if before in rows else path.rows + b
        assert path.before[here] == came
    ends = [[k for k, (_, b) in enumerate(rows) if b == at] for at in range(4)]
    pick = (-1, 0) if reverse else (0, -1)
    for have, k in ((path.first, pick[0]), (path.last, pick[1])):
        assert have.tolist() == [each[k] for each in ends]
    order = range(4)[::-1] if reverse else range(4)
    assert [(line[2], line[3]) for line in path.steps.tolist()] == [
        (rows.index((t, 0)), sizes[t]) for t in order
    ]


def test_kernels_leave_what_they_do_not_have():
    x, state = torch.randn(2, 3), torch.zeros(2, 4)
    tensors = (x, torch.zeros(16, 3), torch.zeros(16, 4), None, state, state)
    sigmoid = TAXONOMY["sigmoid"]
    sites = [(sigmoid, sigmoid.tau, 0.0, sigmoid.s, sigmoid.c)] * 5
    assert kernels.lstm(tensors, sites, [2], False, None) is None  # no GPU, and nobody asked


def test_what_kernels_read_of_gates_comes_back():
    t = TG(1.5, 0.2, (0.1, 0.7), (-0.3, 0.4))
    own = torch.tensor([2.0, 3.0])
    sites = [gates.Site(t, own, 0.2, t.s, t.c), gates.Site(t, 1.5, 0.2, (own, 0.7), t.c)]
    whole = gates.packed(sites, 2, torch.device("cpu"))
    assert whole.shape == (2, 6, 2)
    assert gates.form(sites) == gates.Form(0, True)
    for have, want in zip(gates.unpacked(whole, sites), sites, strict=True):
        assert have.start == want.start
        for a, b in zip(
            [have.tau, have.theta, *have.s, *have.c],
            [want.tau, want.theta, *want.s, *want.c],
            strict=True,
        ):
            assert torch.equal(a, torch.as_tensor(b).expand(2))


@pytest.mark.parametrize("key", ["relu", "hardsigmoid", "gelu", "relu6_clamp"])
def test_kernels_take_two_soft_branches_only(key):
    assert not gates.is_soft(TAXONOMY[key])
    assert gates.is_soft(TAXONOMY["silu"])


def test_what_a_graph_reads_is_not_forgotten(monkeypatch):
    key = ((3, 2), False, torch.device("cpu"))
    lstm.course.cache_clear()
    first = runtime.cached(lstm.course, *key)
    lstm.course.cache_clear()  # as when many other lengths have come
    assert not any(v is first for v in runtime._READ_BY_GRAPHS.values())
    monkeypatch.setattr(runtime, "_READ_BY_GRAPHS", {})
    monkeypatch.setattr(runtime, "capturing", lambda: True)
    read = runtime.cached(lstm.course, *key)
    lstm.course.cache_clear()
    assert [v is read for v in runtime._READ_BY_GRAPHS.values()] == [True]


def test_rows_that_a_graph_fills_are_not_given_to_others(monkeypatch):
    sites = [gates.Site(TAXONOMY["tanh"], 2.0, 0.0, (0.0, 0.0), (-1.0, 1.0))] * lstm.SITES
    gates._row.cache_clear()
    monkeypatch.setattr(gates, "capturing", lambda: True)
    made = gates.packed(sites, 3, torch.device("cpu"))
    assert gates._row.cache_info().currsize == 0
    monkeypatch.undo()
    assert torch.equal(gates.packed(sites, 3, torch.device("cpu")), made)
    assert gates._row.cache_info().currsize > 0


@pytest.mark.gpu
def test_a_captured_call_runs_after_its_tables_were_forgotten():
    layer = LSTM(5, 6, train=("tau", "theta"), device="cuda")
    x = torch.randn(4, 3, 5, device="cuda")
    with torch.no_grad():
        want = layer(x)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            have = layer(x)[0]
        lstm.course.cache_clear()
        gates._row.cache_clear()
        others = [torch.zeros(8, device="cuda") for _ in range(64)]  # where they were
        graph.replay()
    assert len(others) == 64
    assert torch.equal(have, want)
