"""LSTM, GRU, RNN and their cells: torch's results with the gates evaluated, torch's op without."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from threshold_gating import TAXONOMY, TG, kernels
from threshold_gating.nn import rnn

T, B, D, H = 7, 4, 5, 6

# name: torch's class, ours, arguments both take
KINDS = {
    "LSTM": (nn.LSTM, rnn.LSTM, {}),
    "GRU": (nn.GRU, rnn.GRU, {}),
    "RNN": (nn.RNN, rnn.RNN, {}),
    "RNN relu": (nn.RNN, rnn.RNN, {"nonlinearity": "relu"}),
}
CELLS = {
    "LSTMCell": (nn.LSTMCell, rnn.LSTMCell, {}),
    "GRUCell": (nn.GRUCell, rnn.GRUCell, {}),
    "RNNCell": (nn.RNNCell, rnn.RNNCell, {}),
    "RNNCell relu": (nn.RNNCell, rnn.RNNCell, {"nonlinearity": "relu"}),
}
OPTIONS = {
    "one layer": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "two bidirectional layers": {"num_layers": 2, "bidirectional": True},
    "projected": {"proj_size": 3},
    "projected, two bidirectional layers, no bias": {
        "proj_size": 3,
        "num_layers": 2,
        "bidirectional": True,
        "bias": False,
    },
}
CASES = [(k, o) for k in KINDS for o in OPTIONS if k == "LSTM" or "proj" not in o]
LAYOUTS = ["time first", "batch first", "unbatched", "packed", "packed unsorted", "one step"]


@pytest.fixture
def reference():
    with kernels.use("reference"):
        yield


def pair(kind, dtype=torch.float64, **options):
    """Torch's module and ours with the same parameters."""
    plain, gated, fixed = {**KINDS, **CELLS}[kind]
    theirs = plain(D, H, dtype=dtype, **fixed, **options)
    ours = gated(D, H, dtype=dtype, **fixed, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def example(layout, dtype=torch.float64):
    """Leaves, and what makes the module's input of them."""
    if layout.startswith("packed"):
        lengths = [5, 1, 7, 3] if "unsorted" in layout else [7, 5, 5, 1]
        leaves = [torch.randn(n, D, dtype=dtype, requires_grad=True) for n in lengths]
        return leaves, lambda *rows: pack_sequence(rows, enforce_sorted="unsorted" not in layout)
    shape = {
        "time first": (T, B, D),
        "batch first": (B, T, D),
        "unbatched": (T, D),
        "one step": (1, 1, D),
    }
    return [torch.randn(shape[layout], dtype=dtype, requires_grad=True)], lambda x: x


def start(module, layout):
    """Random h0 (and c0 for an LSTM) for `module`, leaves of the graph."""
    count = module.num_layers * (2 if module.bidirectional else 1)
    batch = {"unbatched": (), "one step": (1,)}.get(layout, (B,))
    sizes = [module.proj_size or H, H] if isinstance(module, nn.LSTM) else [H]
    dtype = module.weight_ih_l0.dtype
    return [torch.randn(count, *batch, n, dtype=dtype, requires_grad=True) for n in sizes]


def hx_of(leaves):
    return None if not leaves else leaves[0] if len(leaves) == 1 else tuple(leaves)


def tensors(result):
    """All tensors of a result in order; the structure is compared by `same_structure`."""
    if isinstance(result, torch.Tensor):
        return [result]
    parts = [result.data] if isinstance(result, PackedSequence) else result
    return [t for part in parts for t in tensors(part)]


def same_structure(a, b):
    if isinstance(b, PackedSequence):
        assert isinstance(a, PackedSequence)
        for have, want in zip(a[1:], b[1:], strict=True):
            assert (have is None and want is None) or torch.equal(have, want)
    elif isinstance(b, tuple):
        assert isinstance(a, tuple)
        for have, want in zip(a, b, strict=True):
            same_structure(have, want)
    else:
        assert a.shape == b.shape
        assert a.dtype == b.dtype


def results(module, leaves, make, hidden):
    """The result, its tensors, and the gradients of a fixed functional of them."""
    result = module(make(*leaves), hx_of(hidden))
    out = tensors(result)
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in out]
    loss = sum((w * t).sum() for w, t in zip(weights, out, strict=True))
    return result, out, torch.autograd.grad(loss, [*leaves, *hidden, *module.parameters()])


def compare(theirs, ours, layout, with_hx, atol):
    leaves, make = example(layout)
    hidden = start(theirs, layout) if with_hx else []
    want, want_out, want_grad = results(theirs, leaves, make, hidden)
    have, have_out, have_grad = results(ours, leaves, make, hidden)
    same_structure(have, want)
    for a, b in zip([*have_out, *have_grad], [*want_out, *want_grad], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_evaluated_gates_give_torchs_results_and_gradients(kind, options, layout):
    theirs, ours = pair(kind, batch_first=layout == "batch first", **OPTIONS[options])
    # Values and gradients are of order 1 to 10 over at most 2 x 7 steps: 1e-14 is seen.
    compare(theirs, ours, layout, with_hx=True, atol=1e-12)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_not_given_is_zero(kind, layout):
    theirs, ours = pair(kind, batch_first=layout == "batch first", num_layers=2, bidirectional=True)
    compare(theirs, ours, layout, with_hx=False, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_native_is_torchs_result_bit_by_bit(kind, options, layout):
    theirs, ours = pair(kind, batch_first=layout == "batch first", **OPTIONS[options])
    for backend in ("auto", "native"):
        with kernels.use(backend):
            compare(theirs, ours, layout, with_hx=True, atol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(B, D), (1, D), (0, D), (D,)])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("with_hx", [False, True], ids=["from zero", "h given"])
def test_cells_give_torchs_results_and_gradients(kind, shape, bias, with_hx):
    theirs, ours = pair(kind, bias=bias)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    count = (2 if "LSTM" in kind else 1) * with_hx
    hidden = [
        torch.randn(*shape[:-1], H, dtype=torch.float64, requires_grad=True) for _ in range(count)
    ]
    want, want_out, want_grad = results(theirs, [x], lambda x: x, hidden)
    for backend, atol in (("native", 0), ("reference", 1e-12)):
        with kernels.use(backend):
            have, have_out, have_grad = results(ours, [x], lambda x: x, hidden)
        same_structure(have, want)
        for a, b in zip([*have_out, *have_grad], [*want_out, *want_grad], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


# Units of the last place of 1 against float64, the largest of 5 draws: float32 1 (LSTM), 1 (GRU),
# 3 (RNN); bfloat16 0.3, 0.5, 0.7; torch's own lie between 0.2 and 3. Four times that is allowed.
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "ulps"), [("LSTM", 4), ("GRU", 4), ("RNN", 12)])
def test_low_precision_stays_near_float64_over_100_steps(kind, dtype, ulps):
    theirs, ours = pair(kind, dtype, num_layers=2)
    exact = pair(kind, num_layers=2)[0]
    exact.load_state_dict(theirs.state_dict())
    x = torch.randn(100, B, D).to(dtype)
    have, want = ours(x)[0], exact(x.double())[0]
    assert have.dtype == dtype
    torch.testing.assert_close(have.double(), want, rtol=0, atol=ulps * torch.finfo(dtype).eps)
    with kernels.use("native"):
        assert torch.equal(ours(x)[0], theirs(x)[0])


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_autocast_gives_torchs_types(kind, dtype):
    theirs, ours = pair(kind, torch.float32)
    x = torch.randn((B, D) if kind in CELLS else (T, B, D)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        have, want = ours(x), theirs(x)
    same_structure(have, want)
    for a, b in zip(tensors(have), tensors(want), strict=True):
        # Values of order 1, rounded to 8 bits at each of a few steps on both sides.
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=8 * 2**-8)


@pytest.mark.parametrize("layout", ["time first", "batch first", "packed unsorted"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_torchs_numbers(kind, layout):
    theirs, ours = pair(
        kind, num_layers=3, dropout=0.4, bidirectional=True, batch_first=layout == "batch first"
    )
    leaves, make = example(layout)

    def run(module, seed):
        torch.manual_seed(seed)
        return tensors(module(make(*leaves)))[0]

    want = run(theirs, 1)
    assert torch.equal(run(ours, 1), want)
    with kernels.use("reference"):
        torch.testing.assert_close(run(ours, 1), want, rtol=0, atol=1e-12)
        assert not torch.equal(run(ours, 2), run(ours, 1))
        ours.eval(), theirs.eval()
        assert torch.equal(run(ours, 2), run(ours, 1))
        torch.testing.assert_close(run(ours, 1), run(theirs, 1), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_between_layers_only(kind):
    ours = pair(kind, num_layers=2, dropout=1.0)[1]
    x, other = torch.randn(2, T, B, D, dtype=torch.float64)
    (y, h), (y_other, h_other) = ours(x), ours(other)
    h, h_other = tensors(h)[0], tensors(h_other)[0]
    assert torch.equal(y, y_other)  # nothing of the first layer arrives
    assert y.abs().max() > 0  # but what the last layer puts out is kept
    assert not torch.equal(h[0], h_other[0])


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_breaking_one_gate_moves_the_result(kind):
    ours = pair(kind)[1]
    shape = (B,) if kind in CELLS else (T, B)
    x = torch.randn(*shape, D, dtype=torch.float64)
    hidden = [torch.randn(*(1, B)[-len(shape) :], H, dtype=torch.float64) for _ in range(2)]
    hx = hidden if "LSTM" in kind else hidden[0]
    before = tensors(ours(x, hx))[0]
    for site, t in rnn.SITES[_sites(ours)].items():
        broken = (t.tau, 0, (0.01, 1)) if t.hard else (1.01 * t.tau, t.theta, t.s)
        ours.gates[site] = TG(*broken, t.c)
        # 1 % of the slope of a gate times values of order 0.1 to 1
        assert (tensors(ours(x, hx))[0] - before).abs().max() > 1e-5, site
        ours.gates[site] = t
    assert torch.equal(tensors(ours(x, hx))[0], before)


def _sites(module):
    kind = type(module).__name__.removesuffix("Cell").lower()
    return kind if kind != "rnn" else f"rnn_{module.nonlinearity}"


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "GRUCell"])
def test_gates_that_are_not_torchs_are_never_lowered(kind):
    theirs, ours = pair(kind)
    site = next(iter(ours.gates))
    ours.gates[site] = TAXONOMY["hardsigmoid"]
    x = torch.randn((B, D) if kind in CELLS else (T, B, D), dtype=torch.float64)
    with kernels.use("reference"):
        want = tensors(ours(x))[0]
    assert torch.equal(tensors(ours(x))[0], want)
    assert not torch.allclose(want, tensors(theirs(x))[0])
    with kernels.use("native"), pytest.raises(kernels.BackendError, match="no native op"):
        ours(x)
    with pytest.raises(ValueError, match="to_torch") as caught:
        ours.to_torch()
    if kind == "LSTM":
        assert str(caught.value) == (
            "LSTM.to_torch: the gates of torch.nn.LSTM are sigmoid x3, tanh x2; "
            "these are hardsigmoid, sigmoid x2, tanh x2."
        )


def test_every_gate_of_a_step_can_be_another_instance():
    keys = dict(zip("ifgo", ("hardsigmoid", "sigmoid", "hardtanh", "silu"), strict=True))
    for kind in ("LSTM", "LSTMCell"):
        ours = pair(kind)[1]
        ours.gates |= {site: TAXONOMY[key] for site, key in keys.items()}
        x = torch.randn(B, D, dtype=torch.float64)
        w_ih, w_hh, b_ih, b_hh = ours.parameters()
        h = c = torch.zeros(B, H, dtype=torch.float64)
        for _ in range(1 if kind == "LSTMCell" else 3):
            a = (x @ w_ih.T + b_ih + h @ w_hh.T + b_hh).chunk(4, -1)
            i, f, g, o = (TAXONOMY[key](z) for key, z in zip(keys.values(), a, strict=True))
            c = f * c + i * g
            h = o * c.tanh()
        have = ours(x)[0] if kind == "LSTMCell" else ours(x.expand(3, B, D))[0][-1]
        torch.testing.assert_close(have, h, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("kind", "calls"), [("LSTM", 3), ("GRU", 2), ("RNN", 1)])
def test_the_gates_run_once_a_step_with_native_off_and_not_at_all_with_native_on(
    kind, calls, monkeypatch
):
    seen = []
    blend = kernels.blend
    monkeypatch.setattr(
        kernels, "blend", lambda x, *a, **p: seen.append(x.shape) or blend(x, *a, **p)
    )
    ours = pair(kind, num_layers=2, bidirectional=True)[1]
    x = torch.randn(T, B, D, dtype=torch.float64)
    ours(x)
    assert not seen
    with kernels.use("reference"):
        ours(x)
    assert len(seen) == 4 * T * calls  # the three sigmoids of an LSTM are one call


@pytest.mark.parametrize("op", rnn.FUNCTIONS, ids=lambda op: op.__name__)
def test_each_fused_op_has_a_function_that_evaluates_its_gates(op):
    name = op.__name__.removesuffix("_cell")
    rows = H * {"lstm": 4, "gru": 3}.get(name, 1)
    shapes = [(rows, D), (rows, H), (rows,), (rows,)]
    params = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    h = torch.randn(B, H, dtype=torch.float64)
    x = torch.randn(B, D, dtype=torch.float64)
    if op.__name__.endswith("cell"):
        args = (x, (h, h) if name == "lstm" else h, *params)
    else:
        hx = (h[None], h[None]) if name == "lstm" else h[None]
        args = (x.expand(T, B, D), hx, params, True, 1, 0.0, False, False, False)
    have, want = rnn.FUNCTIONS[op](*args), op(*args)
    for a, b in zip(tensors(have), tensors(want), strict=True):
        # weights of order 1 make the ReLU network grow by a few each step
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_checkpoints_load_strictly_both_ways(options):
    options = {**OPTIONS[options], "dtype": torch.float64}
    theirs, ours, back = (
        nn.LSTM(D, H, **options),
        rnn.LSTM(D, H, **options),
        nn.LSTM(D, H, **options),
    )
    file = io.BytesIO()
    torch.save(theirs.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))
    back.load_state_dict(ours.state_dict())
    assert list(back.state_dict()) == list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(T, B, D, dtype=torch.float64)
    assert torch.equal(ours(x)[0], theirs(x)[0])
    assert torch.equal(back(x)[0], theirs(x)[0])


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_the_same_seed_makes_the_same_parameters_as_torch(kind):
    plain, gated, fixed = {**KINDS, **CELLS}[kind]
    torch.manual_seed(1)
    theirs = plain(D, H, **fixed)
    torch.manual_seed(1)
    ours = gated(D, H, **fixed)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
@pytest.mark.parametrize("train", [True, False])
def test_conversion_shares_parameters_and_keeps_the_rest(kind, train):
    plain, gated, fixed = {**KINDS, **CELLS}[kind]
    theirs = plain(D, H, **fixed, dtype=torch.float64).train(train)
    calls = []
    theirs.register_forward_hook(lambda *_: calls.append(1))
    theirs.weight_ih_l0.requires_grad_(False) if kind in KINDS else None
    ours = gated.from_torch(theirs)
    back = ours.to_torch()
    x = torch.randn((B, D) if kind in CELLS else (T, B, D), dtype=torch.float64)
    want = tensors(theirs(x))[0]
    assert type(ours) is gated
    assert isinstance(ours, plain)
    assert type(back) is plain
    for module in (ours, back):
        assert module.training == train
        for a, b in zip(module.parameters(), theirs.parameters(), strict=True):
            assert a is b
        assert torch.equal(tensors(module(x))[0], want)
    assert len(calls) == 3
    # What one of them gets later is not seen by the other.
    weight = next(n for n, _ in theirs.named_parameters())
    setattr(ours, weight, nn.Parameter(torch.zeros_like(getattr(ours, weight))))
    ours.register_forward_hook(lambda *_: calls.append(2))
    assert torch.equal(tensors(theirs(x))[0], want)
    backends = ("auto", "native", "reference")
    for backend in backends:
        with kernels.use(backend):
            assert not torch.equal(tensors(ours(x))[0], want)
    assert calls.count(2) == len(backends)


def test_only_torchs_plain_modules_are_converted():
    own = nn.LSTM(D, H)
    own.forward = lambda x: x  # as accelerate does
    cases = [(nn.GRU(D, H), "GRU"), (own, "LSTM with its own forward"), (nn.ReLU(), "ReLU")]
    normed = nn.utils.parametrizations.weight_norm(nn.LSTM(D, H), "weight_hh_l0")
    for module, name in [*cases, (normed, "ParametrizedLSTM")]:
        with pytest.raises(TypeError) as caught:
            rnn.LSTM.from_torch(module)
        assert str(caught.value) == (f"LSTM.from_torch: takes a plain torch.nn.LSTM; got {name}.")


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_copies_and_pickles_work_and_are_independent(kind):
    ours = pair(kind)[1]
    ours.gates[next(iter(ours.gates))] = TAXONOMY["hardsigmoid"]
    x = torch.randn((B, D) if kind in CELLS else (T, B, D), dtype=torch.float64)
    want = tensors(ours(x))[0]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.gates == ours.gates
        assert torch.equal(tensors(other(x))[0], want)
        with torch.no_grad():
            next(other.parameters()).zero_()
        other.gates.clear()
        assert torch.equal(tensors(ours(x))[0], want)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_meta_modules_have_shapes_without_memory(kind, dtype, backend):
    plain, gated, fixed = {**KINDS, **CELLS}[kind]
    theirs = plain(D, H, **fixed, device="meta", dtype=dtype)
    ours = gated.from_torch(theirs)
    assert ours.state_dict().keys() == gated(D, H, **fixed, device="meta").state_dict().keys()
    x = torch.zeros((B, D) if kind in CELLS else (T, B, D), device="meta", dtype=dtype)
    with kernels.use(backend):
        same_structure(ours(x), theirs(x))


def test_functional_call_reaches_the_evaluated_gates():
    theirs, ours = pair("LSTM")
    x = torch.randn(T, B, D, dtype=torch.float64)
    half = {name: p.detach() / 2 for name, p in theirs.named_parameters()}
    want = torch.func.functional_call(theirs, half, (x,))[0]
    with kernels.use("reference"):
        have = torch.func.functional_call(ours, half, (x,))[0]
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=0, atol=1e-12)


_x, _h = torch.zeros(T, B, D), torch.zeros(1, B, H)
_packed = pack_sequence([torch.zeros(3, D), torch.zeros(2, D)])
BAD_INPUT = {
    "a 4-D input": (_x[None], None),
    "a wrong number of features": (_x[..., 1:], None),
    "another type": (_x.double(), None),
    "no time steps": (_x[:0], None),
    "an unbatched state": (_x, _h[:, 0]),
    "a batched state for one sequence": (_x[:, 0], _h),
    "a state with too few rows": (_x, _h[:, :1]),
    "a state with too few columns": (_x, _h[..., :1]),
    "a packed input and a state with too many rows": (_packed, _h),
    "a packed input and a state with too few rows": (_packed, _h[:, :1]),
    "a packed input and a state with too few columns": (_packed, _h[:, :2, :1]),
    "a list": ([1.0], None),
}


@pytest.mark.parametrize("what", BAD_INPUT)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_wrong_input_raises_what_torch_raises(kind, what):
    theirs, ours = pair(kind, torch.float32)
    x, h = BAD_INPUT[what]
    hx = (h, h) if kind == "LSTM" and h is not None else h
    with pytest.raises(Exception) as want:  # noqa: PT011  (whatever it is)
        theirs(x, hx)
    with kernels.use("reference"), pytest.raises(want.type) as have:
        ours(x, hx)
    if not (isinstance(x, PackedSequence) and kind == "LSTM"):  # refused only inside torch's op
        assert str(have.value) == str(want.value)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("shape", [(1, H), (B, 1), (B - 1, H), (B, H + 1), (1, B, H)])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_wrong_states_of_a_cell_raise_what_torch_raises(kind, shape, which):
    theirs, ours = pair(kind, torch.float32)
    hx = [torch.zeros(B, H), torch.zeros(B, H)]
    hx[which] = torch.zeros(shape)
    hx = hx if kind == "LSTMCell" else hx[which]
    with pytest.raises((ValueError, RuntimeError)) as want:
        theirs(torch.zeros(B, D), hx)
    with kernels.use("reference"), pytest.raises(want.type):
        ours(torch.zeros(B, D), hx)


def test_wrong_arguments_raise_what_torch_raises():
    for arguments in ({"hidden_size": 0}, {"hidden_size": 4, "proj_size": 4}):
        with pytest.raises(ValueError, match="hidden_size") as want:
            nn.LSTM(D, **arguments)
        with pytest.raises(ValueError, match="hidden_size") as have:
            rnn.LSTM(D, **arguments)
        assert str(have.value) == str(want.value)
    with pytest.raises(ValueError, match="Unknown nonlinearity 'gelu'"):
        rnn.RNN(D, H, nonlinearity="gelu")
    with pytest.raises(RuntimeError, match="Unknown nonlinearity: gelu"):
        rnn.RNNCell(D, H, nonlinearity="gelu")(torch.zeros(B, D))


def test_the_text_form_says_what_the_gates_are():
    assert repr(rnn.LSTM(2, 3, proj_size=1)) == (
        "LSTM(2, 3, proj_size=1, gates: sigmoid x3, tanh x2, exact)"
    )
    assert repr(rnn.GRU(2, 3)) == "GRU(2, 3, gates: sigmoid x2, tanh, exact)"
    assert repr(rnn.RNN(2, 3, nonlinearity="relu")) == "RNN(2, 3, gates: relu, exact)"
    cell = rnn.GRUCell(2, 3)
    cell.gates["z"] = TAXONOMY["hardsigmoid"]
    assert repr(cell) == "GRUCell(2, 3, gates: sigmoid, hardsigmoid, tanh)"


@pytest.mark.compile
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("kind", ["LSTM", "GRUCell"])
def test_the_evaluated_gates_compile_to_one_graph(kind):
    ours = pair(kind)[1]
    x = torch.randn((B, D) if kind in CELLS else (2, B, D), dtype=torch.float64)
    with torch._dynamo.config.patch(allow_rnn=True):  # as torch's own LSTM needs
        have = torch.compile(ours, fullgraph=True, backend="eager")(x)
    assert torch.equal(tensors(have)[0], tensors(ours(x))[0])
    torch._dynamo.reset()


# Torch's own LSTM warns of the list it keeps of its weights.
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
def test_an_exported_graph_holds_the_gates_and_the_parameters():
    ours = pair("LSTM", bidirectional=True)[1]
    x = torch.randn(3, B, D, dtype=torch.float64)
    program = torch.export.export(ours, (x,))
    ops = {str(node.target) for node in program.graph.nodes}
    assert {"aten.sigmoid.default", "aten.tanh.default"} <= ops
    assert not [op for op in ops if "lstm" in op]
    assert set(program.state_dict) == set(ours.state_dict())
    have = program.module()(x)
    same_structure(have, ours(x))
    for a, b in zip(tensors(have), tensors(ours(x)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
