"""Learned gates in the weights on the way: torch's own op gives what evaluated gates give."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import threshold_gating as tg
from threshold_gating import TAXONOMY, TG, kernels
from threshold_gating.nn import rnn, rnn_buffer, rnn_fold, rnn_steps

T, B, D, H = 7, 4, 5, 6
BOTH = ("tau", "theta")
LEARNING = {
    "LSTM": {"sites": tuple("ifgo")},
    "LSTM forgetting": {"sites": "f", "train": "tau"},
    "LSTM cell": {},
    "LSTM output": {"sites": "cell", "train": "tau"},
    "GRU": {},
    "GRU new": {"sites": "n", "train": "theta"},
}
OPTIONS = {
    "one layer": {},
    "no bias": {"bias": False},
    "two bidirectional layers": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "projected": {"proj_size": 3, "num_layers": 2, "bidirectional": True},
    "projected, no bias": {"proj_size": 3, "bias": False},
}
CASES = [(k, o) for k in LEARNING for o in OPTIONS if "LSTM" in k or "proj" not in o]
FUSED = [k for k in LEARNING if k not in ("LSTM cell", "LSTM output")]
LAYOUTS = ["padded", "unbatched", "packed"]
SEVERAL = ("two bidirectional layers", "projected, no bias")  # in all layouts
CALLS = [(k, o, at) for k, o in CASES for at in (LAYOUTS if o in SEVERAL else LAYOUTS[:1])]


def make(kind, options="one layer", dtype=torch.float64, size=0.5, **more):
    """A layer whose gates have moved."""
    torch.manual_seed(1)
    learning = {"train": BOTH, **LEARNING[kind], **more}
    cls = getattr(tg, kind.split()[0])
    layer = cls(D, H, **OPTIONS[options], dtype=dtype, **learning)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.startswith("gate_"):
                p.add_(size * torch.randn_like(p))
    return layer


def example(layer, layout="padded"):
    """The input with its leaves, and a state to start from."""
    torch.manual_seed(2)
    dtype = layer.weight_ih_l0.dtype
    if layout == "packed":
        leaves = [torch.randn(n, D).to(dtype).requires_grad_() for n in (5, 1, 7, 3)]
        x = pack_sequence(leaves, enforce_sorted=False)
    else:
        shape = (T, D) if layout == "unbatched" else (B, T, D) if layer.batch_first else (T, B, D)
        leaves = [torch.randn(shape).to(dtype).requires_grad_()]
        x = leaves[0]
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or H, H] if isinstance(layer, nn.LSTM) else [H]
    batch = () if layout == "unbatched" else (B,)
    state = [torch.randn(count, *batch, n).to(dtype).requires_grad_() for n in sizes]
    return x, leaves, state


def results(layer, x, leaves, state):
    y, last = layer(x, tuple(state) if len(state) > 1 else state[0])
    out = [y.data if hasattr(y, "batch_sizes") else y, *(last if len(state) > 1 else (last,))]
    ways = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in out]
    of = [*leaves, *state, *layer.parameters()]
    found = torch.autograd.grad(out, of, ways, retain_graph=True)  # of what packs the leaves
    return [*out, *found]


def compare(layer, layout, atol):
    given = example(layer, layout)
    with kernels.use("native"):
        have = results(layer, *given)
    with kernels.use("reference"):
        want = results(layer, *given)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# Torch says so of its own op.
projections = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")


@projections
@pytest.mark.parametrize(("kind", "options", "layout"), CALLS)
def test_values_and_every_gradient_are_those_of_evaluated_gates(kind, options, layout):
    # values of order 1 and gradients of order 10 over 2 x 7 steps: 1e-14 is seen
    compare(make(kind, options), layout, 1e-12)


@pytest.mark.parametrize("kind", LEARNING)
def test_gates_that_do_not_start_at_torchs_numbers_fold(kind):
    layer = make(kind)
    for site in layer.learning.sites:
        t = layer.gates[site]
        layer.gates[site] = TG(1.5 * t.tau, 0.3, t.s, t.c)
    compare(layer, "padded", 1e-12)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("kind", LEARNING)
def test_torchs_op_runs_and_no_gate(kind, backend, train, monkeypatch):
    layer = make(kind, "two bidirectional layers").train(train)
    calls = []
    monkeypatch.setattr(kernels, "blend", lambda *a, **k: calls.append(1))
    with kernels.use(backend):
        results(layer, *example(layer))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_the_start_is_torchs_result_bit_by_bit(kind, dtype):
    layer = make(kind, "two bidirectional layers", dtype, size=0.0)
    theirs = getattr(nn, kind.split()[0])(D, H, num_layers=2, bidirectional=True, dtype=dtype)
    state = {n: p for n, p in layer.state_dict().items() if not n.startswith("gate_")}
    theirs.load_state_dict(state)
    x = example(layer)[0]
    assert torch.equal(layer(x)[0], theirs(x)[0])


@pytest.mark.parametrize("kind", ["LSTM", "LSTM cell", "GRU"])
def test_16_bits_have_the_error_of_16_bit_weights(kind):
    layer = make(kind, dtype=torch.float32).bfloat16()
    x, leaves, state = example(layer)
    have = results(layer, x, leaves, state)
    assert {p.dtype for n, p in layer.named_parameters() if "gate_" in n} == {torch.float32}
    exact = copy.deepcopy(layer).double()
    leaves, state = ([t.detach().double().requires_grad_() for t in ts] for ts in (leaves, state))
    want = results(exact, leaves[0], leaves, state)
    for a, b in zip(have, want, strict=True):
        # rounded weights, and as many roundings as there are steps; twice what is seen
        assert (a - b).abs().max() <= 8 * 2**-8 * b.abs().max()


@pytest.mark.parametrize("steps", [1, T])
@pytest.mark.parametrize("options", ["one layer", "two bidirectional layers", "no bias"])
@pytest.mark.parametrize("kind", ["LSTM", "LSTM forgetting", "LSTM cell"])
def test_autocast_to_float16_runs_on_a_cpu_whose_lstm_has_no_such_type(kind, options, steps):
    layer = make(kind, options, torch.float32)
    x = torch.randn(steps, B, D)
    for backend in ("auto", "native"):
        layer.zero_grad()
        with kernels.use(backend), torch.autocast("cpu", torch.float16):
            y = layer(x)[0]
        assert y.dtype == torch.float16
        y.float().sum().backward()
        exact = copy.deepcopy(layer).double()
        want = exact(x.double())[0]
        want.sum().backward()
        pairs = [(y, want), (layer.gate_rho_l0.grad, exact.gate_rho_l0.grad)]
        for a, b in pairs:
            # rounded weights, and as many roundings as there are steps; twice what is seen
            assert (a - b).abs().max() <= 8 * 2**-11 * b.abs().max()


def test_bfloat16_runs_on_a_cpu_whose_lstm_has_no_such_type(monkeypatch):
    layer, calls = make("LSTM", dtype=torch.float32), []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(rnn_fold, "fold", lambda *args: calls.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(T, B, D))[0]
    assert y.dtype == torch.bfloat16
    assert not calls


@pytest.mark.parametrize("kind", ["LSTM", "LSTM cell", "GRU"])
def test_autocast_gives_torchs_types(kind):
    layer, theirs = make(kind, dtype=torch.float32), getattr(nn, kind.split()[0])(D, H)
    x = example(layer)[0].detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)[0]
        assert y.dtype == theirs(x)[0].dtype
    y.float().sum().backward()
    assert layer.gate_rho_l0.grad.dtype == torch.float32
    assert (layer.gate_rho_l0.grad != 0).any()


@projections
@pytest.mark.parametrize("steps", [1, rnn_steps.FEW])
@pytest.mark.parametrize(("kind", "options", "layout"), CALLS)
def test_few_steps_are_not_worth_a_copy_of_the_weights(kind, options, steps, layout, monkeypatch):
    layer = make(kind, options)
    x, leaves, state = example(layer, layout)
    first = 0 if layout == "unbatched" or not layer.batch_first else 1
    if layout == "packed":
        leaves = [t.detach()[:steps].requires_grad_() for t in leaves]
        x = pack_sequence(leaves, enforce_sorted=False)
    else:
        x = x.detach().narrow(first, 0, steps).requires_grad_()
        leaves = [x]
    with kernels.use("reference"):
        want = results(layer, x, leaves, state)
    with monkeypatch.context() as m:
        m.setattr(rnn_fold, "_STEP", 0)  # so cheap that the smallest weights are not copied
        m.setattr(rnn_fold, "_UNIT", 0)
        m.delattr(rnn_fold, "fold")
        m.delattr(kernels, "blend")
        have = results(layer, x, leaves, state)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "units", "sequences", "most"),
    [
        ("LSTM", 32, 1, 0),  # to copy few weights is quicker than any step
        ("LSTM", 512, 1, 2),  # more steps of an LSTM are one call of mkldnn
        ("LSTM", 512, 64, 1),
        ("GRU", 128, 1, 0),
        ("GRU", 512, 1, 5),
        ("GRU", 512, 64, 1),
    ],
)
def test_weights_are_copied_where_that_is_quicker_than_the_steps(
    kind, units, sequences, most, monkeypatch
):
    layer = getattr(tg, kind)(units, units, train=BOTH, **LEARNING[kind])
    folds, fold = [], rnn_fold.fold
    monkeypatch.setattr(rnn_fold, "fold", lambda *a: folds.append(1) or fold(*a))
    for steps in range(1, 9):
        folds.clear()
        x = torch.randn(steps, sequences, units)
        with torch.no_grad():
            y = layer(x)[0]
            packed = layer(pack_sequence(list(x.unbind(1))))[0].data
        assert len(folds) == (2 if steps > most else 0)
        torch.testing.assert_close(packed.view_as(y), y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [1, T])
@pytest.mark.parametrize("options", ["one layer", "two bidirectional layers", "batch first"])
@pytest.mark.parametrize("kind", LEARNING)
def test_results_may_be_overwritten(kind, options, steps):
    layer = make(kind, options, torch.float32)  # in which a CPU has an op that keeps its results
    x = torch.randn(steps, B, D)
    x = x.transpose(0, 1) if layer.batch_first else x

    def gradients(change):
        y, last = layer(x)
        out = [change(t) for t in (y, *(last if isinstance(last, tuple) else (last,)))]
        return torch.autograd.grad(sum(t.square().sum() for t in out), list(layer.parameters()))

    for a, b in zip(gradients(lambda t: t.mul_(3)), gradients(lambda t: t * 3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["one layer", "two bidirectional layers", "batch first"])
@pytest.mark.parametrize("kind", FUSED)
def test_results_of_cudnn_may_be_overwritten(kind, options):
    layer = make(kind, options, torch.float32).cuda()
    x = torch.randn((B, T, D) if layer.batch_first else (T, B, D), device="cuda")

    def gradients(change):
        y, last = layer(x)
        out = [change(t) for t in (y, *(last if isinstance(last, tuple) else (last,)))]
        return torch.autograd.grad(sum(t.square().sum() for t in out), list(layer.parameters()))

    for a, b in zip(gradients(lambda t: t.mul_(3)), gradients(lambda t: t * 3), strict=True):
        # cuDNN may add in another order
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max() + 1))


def test_rho_has_a_gradient_up_to_its_bound_and_none_beyond():
    layer = make("GRU")
    with torch.no_grad():
        layer.gate_rho_l0.zero_()[:, :4] = torch.tensor([7.0, -7.0, 7.001, -7.001])
    compare(layer, "padded", 1e-8)  # tau is 1100: gradients of order 1e4
    layer(example(layer)[0])[0].square().sum().backward()
    used = layer.gate_rho_l0.grad != 0
    assert used[:, :2].any(0).all()
    assert not used[:, 2:4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_of_rho_is_within(dtype):
    rho = torch.tensor([-7.0, 7.0, -7.0001, 7.0001, 0.0], dtype=dtype)
    slope = rnn_fold._within(torch.ones_like(rho), rho)
    assert slope.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_batch_runs_without_a_mode_and_a_mode_around_it_sees_no_call_of_torchs(kind, state):
    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    layer, seen = make(kind), []
    x, _, hx = example(layer)
    given = [x, tuple(hx) if kind == "LSTM" else hx[0]][: 1 + state]
    with pytest.MonkeyPatch.context() as m:
        m.delattr(rnn, "_Folded")
        want = layer(*given)[0]
        with Noting():
            have = layer(*given)[0]
    assert torch.equal(have, want)
    op = getattr(torch, kind.lower())
    assert op not in seen
    assert rnn_fold.OPS[op][0] in seen
    assert torch.clamp not in seen
    assert torch.Tensor.clamp not in seen


WRONG = {
    "other features": (torch.zeros(T, B, D + 1), None),
    "other type": (torch.zeros(T, B, D, dtype=torch.float64), None),
    "one dimension": (torch.zeros(D), None),
    "state of another batch": (torch.zeros(T, B, D), torch.zeros(1, B + 1, H)),
    "state of other layers": (torch.zeros(T, B, D), torch.zeros(2, B, H)),
    "state without batch": (torch.zeros(T, B, D), torch.zeros(1, H)),
    "state with batch": (torch.zeros(T, D), torch.zeros(1, B, H)),
    "state of another type": (torch.zeros(T, B, D), torch.zeros(1, B, H, dtype=torch.float64)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_wrong_inputs_have_torchs_errors(kind, wrong):
    x, h = WRONG[wrong]
    hx = h if h is None or kind == "GRU" else (h, h)
    theirs = getattr(nn, kind)(D, H)
    with pytest.raises(Exception) as want:  # noqa: PT011
        theirs(x, hx)
    with pytest.raises(type(want.value)) as have:
        make(kind, dtype=torch.float32)(x, hx)
    assert str(have.value) == str(want.value)


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_of_one_or_three_tensors_has_torchs_error(count):
    hx = (torch.zeros(1, B, H),) * count
    with pytest.raises(Exception) as want:  # noqa: PT011
        nn.LSTM(D, H)(torch.zeros(T, B, D), hx)
    with pytest.raises(type(want.value)):
        make("LSTM", dtype=torch.float32)(torch.zeros(T, B, D), hx)


def test_the_forward_is_that_of_the_layer_itself():
    class Counting(tg.GRU):
        calls = 0

        def check_forward_args(self, *args):
            self.calls += 1
            self.seen = self.training, self.dropout
            super().check_forward_args(*args)

    layer = Counting(D, H, num_layers=2, dropout=0.5, train=BOTH).eval()
    for _ in range(2):
        layer(torch.randn(T, B, D))
    assert layer.calls == 2
    assert layer.seen == (False, 0.5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_dropout_draws_torchs_numbers_and_none_in_evaluation(kind):
    torch.manual_seed(1)
    layer = getattr(tg, kind)(D, H, num_layers=3, dropout=0.4, train=BOTH, **LEARNING[kind])
    theirs, x = layer.fold().to_torch(), torch.randn(T, B, D)

    def run(module, seed):
        torch.manual_seed(seed)
        return module(x)[0]

    assert torch.equal(run(layer, 1), run(theirs, 1))
    assert not torch.equal(run(layer, 1), run(layer, 2))
    layer.eval()
    assert torch.equal(run(layer, 1), run(layer, 2))


@pytest.mark.parametrize("kind", ["LSTM", "LSTM cell", "GRU"])
def test_gradients_have_gradients(kind):
    layer = make(kind)
    x = example(layer)[0]

    def twice():
        first = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), [x, *layer.parameters()])

    have = twice()
    with kernels.use("reference"):
        want = twice()
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_weights_of_a_parametrization_fold_on_the_way():
    layer = nn.utils.parametrizations.weight_norm(make("GRU"), "weight_hh_l0")
    compare(layer, "padded", 1e-12)


def test_frozen_weights_leave_gradients_for_gates_alone():
    layer = make("LSTM")
    for name, p in layer.named_parameters():
        p.requires_grad_(name.startswith("gate_"))
    x = example(layer)[0].detach()
    layer(x)[0].sum().backward()
    have = layer.gate_dtheta_l0.grad.clone()
    layer.zero_grad()
    with kernels.use("reference"):
        layer(x)[0].sum().backward()
    torch.testing.assert_close(have, layer.gate_dtheta_l0.grad, rtol=0, atol=1e-12)
    assert layer.weight_hh_l0.grad is None


@pytest.mark.parametrize(
    ("learning", "gates"),
    [
        ({"family": "free"}, {}),
        ({"sites": "cell"}, {"cell": TG(2.0, 0.0, (0, 0), (-1, 2))}),
        ({}, {"cell": TAXONOMY["hardtanh"]}),
        ({}, {"g": TAXONOMY["silu"]}),
        ({"sites": "f"}, {"i": TG(1.1, 0.0, (0, 0), (0, 1))}),
    ],
)
def test_what_does_not_fold_is_evaluated(learning, gates):
    layer = make("LSTM", size=0.1, **learning)
    layer.gates |= gates
    given = example(layer)
    have = results(layer, *given)
    with kernels.use("reference"):
        want = results(layer, *given)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    with kernels.use("native"), pytest.raises(kernels.BackendError, match="no native op"):
        layer(given[0])


def test_transforms_of_functions_evaluate_the_gates():
    layer = make("GRU")
    x = example(layer)[0].detach()

    def run(x):
        return layer(x)[0]

    many = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(run)(many)[1], run(2 * x), rtol=0, atol=1e-12)
    slope = torch.func.jvp(run, (x,), (torch.ones_like(x),))[1]
    step = (run(x + 1e-6) - run(x - 1e-6)) / 2e-6
    torch.testing.assert_close(slope, step, rtol=0, atol=1e-8)


@pytest.mark.parametrize("share", ["layer", "channel"])
@pytest.mark.parametrize("kind", ["GRU", "RNN", "LSTM"])
def test_recurrent_calls_that_learn_in_a_network_fold(kind, share):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = getattr(nn, kind)(D, H, num_layers=2, bidirectional=True)

        def forward(self, x):
            return self.layer(x)[0]

    torch.manual_seed(1)
    net, x = Net().double(), torch.randn(T, B, D, dtype=torch.float64)
    new = tg.convert(net, inputs=x, train=BOTH, share=share)
    with torch.no_grad():
        for name, p in new.named_parameters():
            if "rho" in name or "dtheta" in name:
                p.add_(0.3 * torch.randn_like(p))

    def run():
        y = new(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(new.parameters()))]

    have = run()
    with kernels.use("reference"):
        want = run()
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for steps in (1, T):
        (site,) = tg.audit(new, x[:steps]).sites
        assert site.native
    with kernels.use("reference"):
        (site,) = tg.audit(new, x).sites
    assert not site.native


@pytest.mark.parametrize("options", ["no bias", "two bidirectional layers", "projected"])
def test_all_weights_are_written_into_one_buffer_where_that_is_wanted(options, monkeypatch):
    """As for cuDNN, with places as they might be: one after the other from the second number on."""
    layer = make("LSTM", options, train="tau")
    seen = []

    def offsets(network):
        sizes = [torch.Size(shape).numel() for shape in network.shapes]
        starts = tuple(1 + sum(sizes[:k]) for k in range(len(sizes)))
        return 2 + sum(sizes), starts

    def noted(*args):
        found = fold(*args)
        seen[:] = found[0]
        return found

    fold = rnn_fold.fold
    monkeypatch.setattr(rnn_buffer, "_are_in_one_buffer", lambda w: True)
    monkeypatch.setattr(rnn_buffer, "_offsets", offsets)
    monkeypatch.setattr(rnn_buffer, "_layout", rnn_buffer._layout.__wrapped__)
    monkeypatch.setattr(rnn_fold, "fold", noted)
    compare(layer, "padded", 1e-12)
    first = seen[0].untyped_storage()
    assert all(w.untyped_storage().data_ptr() == first.data_ptr() for w in seen)
    flat = torch.empty(0, dtype=torch.float64).set_(first)
    want = [torch.zeros(1), *(w.detach().reshape(-1) for w in seen), torch.zeros(1)]
    assert torch.equal(flat, torch.cat(want).double())


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")  # torch warns of weights that it has to copy
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "options"), [(k, o) for k, o in CASES if k in FUSED])
def test_cudnn_finds_the_folded_weights_where_it_wants_them(kind, options, layout, train):
    layer = make(kind, options).cuda().train(train)
    x, leaves, state = example(layer, layout)
    leaves = [t.detach().cuda().requires_grad_() for t in leaves]
    state = [t.detach().cuda().requires_grad_() for t in state]
    x = pack_sequence(leaves, enforce_sorted=False) if layout == "packed" else leaves[0]

    def run():
        y, last = layer(x, tuple(state) if len(state) > 1 else state[0])
        out = [y.data if layout == "packed" else y, *(last if len(state) > 1 else (last,))]
        loss = sum(t.square().sum() for t in out)
        of = [*leaves, *state, *layer.parameters()]
        return [*out, *torch.autograd.grad(loss, of, retain_graph=True)]

    with kernels.use("native"):
        have = run()
    with kernels.use("reference"):
        want = run()
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.detach().abs().max() + 1))


def test_the_pairs_of_a_layer_are_found_by_their_numbers():
    standard = dict.fromkeys("ab", TAXONOMY["sigmoid"])
    moved = standard | {"a": TG(3.0, 0.5, (0, 0), (0, 1))}
    assert rnn_fold.Pairs.of(standard, moved, ("a",)) == rnn_fold.Pairs(((3.0, 0.5), None))
    of_cell = rnn_fold.Pairs.of({"cell": TAXONOMY["tanh"]}, {"cell": TAXONOMY["tanh"]}, ("cell",))
    assert of_cell.cell
    assert of_cell.blocks == 0
    assert rnn_fold.Pairs.of(standard, moved, ("b",)) is None  # a is frozen at another place
    assert rnn_fold.Pairs.of(standard, moved, ("a",)) is rnn_fold.Pairs.of(standard, moved, ["a"])
    e, theta = rnn_fold.Pairs(((3.0, 0.5), None)).values(torch.zeros(1, 2), None)
    assert torch.equal(e, torch.tensor([[3.0, 3.0], [1.0, 1.0]]))
    assert torch.equal(theta, torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
