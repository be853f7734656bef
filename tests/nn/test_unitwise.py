"""LSTM and GRU with gates learned for each unit: an independent loop, the start, and the fold."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import threshold_gating as tg
from threshold_gating import TAXONOMY, TG, kernels

D, H = 5, 6
LENGTHS = [4, 7, 1, 5]
KINDS = {"LSTM": (nn.LSTM, tg.LSTM, "i f g o cell"), "GRU": (nn.GRU, tg.GRU, "r z n")}
OPTIONS = {
    "one layer": {},
    "no bias": {"bias": False},
    "two bidirectional layers": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "projected": {"proj_size": 3, "num_layers": 2, "bidirectional": True},
}
CASES = [(k, o) for k in KINDS for o in OPTIONS if k == "LSTM" or o != "projected"]
BOTH = ("tau", "theta")


@pytest.fixture(autouse=True)
def reference():
    with kernels.use("reference"):
        yield


def moved(module, size=0.5):
    """`module` with its gate parameters away from their start."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.startswith("gate_"):
                p.add_(size * torch.randn_like(p))
    return module


def make(kind, options="one layer", dtype=torch.float64, **learning):
    torch.manual_seed(1)
    return KINDS[kind][1](D, H, **OPTIONS[options], dtype=dtype, **{"train": BOTH, **learning})


def padded(module, dtype=torch.float64):
    torch.manual_seed(2)
    x = torch.randn(7, 4, D, dtype=dtype)
    return x.transpose(0, 1) if module.batch_first else x


def gate(p, suffix, row, centre, a):
    """One gate by the formulas alone; `centre` is tanh, which starts at tau = 2, c = (-1, 1)."""
    tau, theta = 2.0 if centre else 1.0, 0.0
    s, c = (0.0, 0.0), ((-1.0, 1.0) if centre else (0.0, 1.0))
    if f"gate_rho{suffix}" in p:
        tau = tau * p[f"gate_rho{suffix}"][row].exp()
    if f"gate_dtheta{suffix}" in p:
        theta = p[f"gate_dtheta{suffix}"][row]
    if f"gate_s{suffix}" in p:
        s, c = p[f"gate_s{suffix}"][row], p[f"gate_c{suffix}"][row]
    high = 1 / (1 + torch.exp(-tau * (a - theta)))
    return (1 - high) * (s[0] * a + c[0]) + high * (s[1] * a + c[1])


def step(kind, p, suffix, x, state):
    """One step of one sequence; returns (h, c)."""
    h, c = state
    a, b = p[f"weight_ih{suffix}"] @ x, p[f"weight_hh{suffix}"] @ h
    if f"bias_ih{suffix}" in p:
        a, b = a + p[f"bias_ih{suffix}"], b + p[f"bias_hh{suffix}"]
    if kind == "LSTM":
        i, f, g, o = (gate(p, suffix, k, k == 2, z) for k, z in enumerate((a + b).chunk(4)))
        c = f * c + i * g
        h = o * gate(p, suffix, 4, True, c)
        return (p[f"weight_hr{suffix}"] @ h if f"weight_hr{suffix}" in p else h), c
    a_r, a_z, a_n = a.chunk(3)
    b_r, b_z, b_n = b.chunk(3)
    r, z = gate(p, suffix, 0, False, a_r + b_r), gate(p, suffix, 1, False, a_z + b_z)
    n = gate(p, suffix, 2, True, a_n + r * b_n)
    return (1 - z) * n + z * h, c


def loop(kind, module, x):
    """The layer over one sequence (T, D), one step and one unit vector at a time."""
    p = dict(module.named_parameters())
    out = getattr(module, "proj_size", 0) or H
    for layer in range(module.num_layers):
        sides = []
        for reverse in range(1 + module.bidirectional):
            suffix = f"_l{layer}" + "_reverse" * reverse
            state, seen = (x.new_zeros(out), x.new_zeros(H)), []
            for row in x.flip(0) if reverse else x:
                state = step(kind, p, suffix, row, state)
                seen.append(state[0])
            sides.append(torch.stack(seen[::-1] if reverse else seen))
        x = torch.cat(sides, -1)
    return x


def gradients(module, ys):
    loss = sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in ys)
    return torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.parametrize("family", ["constant", "free"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_values_and_every_gradient_are_those_of_an_explicit_loop(kind, options, layout, family):
    # Free branches let the state grow: they stay near.
    module = moved(make(kind, options, family=family), 0.5 if family == "constant" else 0.1)
    torch.manual_seed(2)
    sequences = [torch.randn(n, D, dtype=torch.float64) for n in LENGTHS]
    if layout == "padded":
        x = padded(module)
        have = list(module(x)[0].unbind(0 if module.batch_first else 1))
        sequences = list(x.unbind(0 if module.batch_first else 1))
    else:
        packed = module(pack_sequence(sequences, enforce_sorted=False))[0]
        assert isinstance(packed, PackedSequence)
        have = list(nn.utils.rnn.unpack_sequence(packed))
    want = [loop(kind, module, x) for x in sequences]
    # Values of order 1 and gradients of order 10 over 2 x 7 steps: 1e-14 is seen.
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    names = [name for name, _ in module.named_parameters()]
    for name, a, b in zip(names, gradients(module, have), gradients(module, want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda m, name=name: name + m)
        assert a.abs().max() > 0, name


@pytest.mark.parametrize("family", ["constant", "free"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gate_parameters_pass_gradcheck(kind, family):
    module = moved(make(kind, family=family))
    x = padded(module)[:3, :2]
    gates = {n: p.detach().clone() for n, p in module.named_parameters() if n.startswith("gate_")}
    leaves = [p.requires_grad_() for p in gates.values()]

    def run(*values):
        return torch.func.functional_call(module, dict(zip(gates, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, leaves)


# Torch says so of its own op.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
@pytest.mark.parametrize("learning", [{}, {"family": "free"}, {"sites": "cell"}, {"train": "tau"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_start_is_the_frozen_layer_bit_by_bit(kind, options, dtype, learning):
    if learning.get("sites") == "cell" and kind == "GRU":
        learning = {"sites": "n"}
    ours = make(kind, options, dtype, **learning)
    plain, gated, _ = KINDS[kind]
    theirs = plain(D, H, **OPTIONS[options], dtype=dtype)
    weights = {n: p for n, p in ours.state_dict().items() if not n.startswith("gate_")}
    theirs.load_state_dict(weights)
    x = padded(ours, dtype)
    have = ours(x)[0]
    assert torch.equal(have, gated.from_torch(theirs)(x)[0])
    # Outputs below 1, 7 steps and 2 layers: half a unit of the last place of 1 is seen.
    atol = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(have, theirs(x)[0], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "site"), [("LSTM", "f"), ("GRU", "r")])
def test_sites_that_part_the_sigmoids_start_within_rounding(kind, site, dtype):
    # Parted, the sigmoids are calls of other widths, and torch's vectorised sigmoid rounds its
    # last few elements differently: half a unit of the last place of 1 is seen.
    ours, frozen = make(kind, dtype=dtype, sites=site), make(kind, dtype=dtype, train=())
    x, atol = padded(ours, dtype), 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours(x)[0], frozen(x)[0], rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_learned_by_default(kind):
    plain, gated, _ = KINDS[kind]
    ours = gated(D, H)
    assert ours.exact
    assert list(ours.state_dict()) == list(plain(D, H).state_dict())
    assert list(gated.from_torch(plain(D, H)).state_dict()) == list(plain(D, H).state_dict())


@pytest.mark.parametrize(("kind", "rows"), [("LSTM", 5), ("GRU", 3)])
def test_parameters_have_the_names_and_shapes_that_are_documented(kind, rows):
    module = make(kind, "two bidirectional layers", family="free")
    ends = ["_l0", "_l0_reverse", "_l1", "_l1_reverse"]
    shapes = {"rho": (rows, H), "dtheta": (rows, H), "s": (rows, 2, H), "c": (rows, 2, H)}
    want = {f"gate_{n}{end}": shapes[n] for n, end in itertools.product(shapes, ends)}
    have = {n: tuple(p.shape) for n, p in module.named_parameters() if n.startswith("gate_")}
    assert have == want
    assert not module.exact


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_layer_of_torch_is_taken_with_its_weights(kind):
    plain, gated, _ = KINDS[kind]
    theirs = plain(D, H)
    ours = gated.from_torch(theirs, train=BOTH)
    assert ours.weight_hh_l0 is theirs.weight_hh_l0
    assert "gate_rho_l0" not in dict(theirs.named_parameters())
    moved(ours)
    x = padded(ours, torch.float32)
    assert not torch.allclose(ours(x)[0], theirs(x)[0], atol=1e-3)


@pytest.mark.parametrize("size", [1e6, -1e6, float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_tau_is_positive_wherever_the_optimiser_goes(kind, size):
    module = make(kind, dtype=torch.float32)
    with torch.no_grad():
        module.gate_rho_l0.fill_(size)
    for t in module.learned_gates().values():
        assert t.tau.min() > 0
        assert t.tau.isfinite().all()
    y = module(padded(module, torch.float32))[0]
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(module, [y]))


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_every_gate_and_leaves_the_family_constant(kind):
    module = make(kind, "two bidirectional layers", torch.float32)
    before = copy.deepcopy(module.state_dict())
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    x, losses = padded(module, torch.float32), []
    for _ in range(20):
        loss = (module(x)[0] - 0.3).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for name, value in module.state_dict().items():
        assert (value != before[name]).all(), name
    for t in module.learned_gates().values():
        assert (t.s, t.c) == (t.start.s, t.start.c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_folding_keeps_the_function(kind, options, dtype):
    train = "tau" if options == "no bias" else BOTH
    module = moved(make(kind, options, dtype, train=train))
    before = copy.deepcopy(module.state_dict())
    folded = module.fold()
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    x = padded(module, dtype)
    (y, ends), (z, folded_ends) = module(x), folded(x)
    rtol = 1e-6 if dtype == torch.float32 else 1e-13
    pairs = zip([y, *ends], [z, *folded_ends], strict=True)
    assert all((a - b).abs().max() <= rtol * a.abs().max() for a, b in pairs)
    if kind == "GRU":
        assert folded.exact
        theirs = folded.to_torch()
        assert type(theirs) is nn.GRU
        assert list(theirs.state_dict()) == list(nn.GRU(D, H, **OPTIONS[options]).state_dict())
        assert (theirs(x)[0] - y).abs().max() <= rtol * y.abs().max()
    else:
        assert folded.learning.sites == ("cell",)
        assert torch.equal(folded.gate_rho_l0, module.gate_rho_l0[4:])


def test_folding_a_gate_that_does_not_start_at_zero_keeps_the_function():
    module = moved(make("LSTM"))
    module.gates["f"] = tg.TG(3.0, (0.4,), (0.0, 0.0), (-0.5, 2.0))
    x = padded(module)
    torch.testing.assert_close(module.fold()(x)[0], module(x)[0], rtol=0, atol=1e-13)


def test_a_folded_layer_evaluates_torchs_gates_and_trains_its_cell_output(monkeypatch):
    folded = moved(make("LSTM")).fold()
    seen, blend = [], kernels.blend

    def spied(x, tau, *a, **k):
        seen.append(type(tau))
        return blend(x, tau, *a, **k)

    monkeypatch.setattr(kernels, "blend", spied)
    folded(padded(folded)[:1])[0].sum().backward()
    assert seen == [TG, TG, torch.Tensor]  # frozen, frozen, learned
    assert folded.gate_rho_l0.shape == (1, H)
    assert (folded.gate_dtheta_l0.grad != 0).all()


def test_checkpoints_before_and_after_the_fold_are_not_confused():
    module = moved(make("LSTM"))
    folded, fresh = module.fold(), make("LSTM", sites="cell")
    fresh.load_state_dict(folded.state_dict())
    x = padded(module)
    assert torch.equal(fresh(x)[0], folded(x)[0])
    for target, source in ((folded, module), (module, folded)):
        with pytest.raises(RuntimeError, match="size mismatch for gate_rho_l0"):
            target.load_state_dict(source.state_dict())


def test_gates_without_the_cell_output_fold_to_torchs_lstm():
    module = moved(make("LSTM", "projected", sites=tuple("ifgo")))
    x = padded(module)
    theirs = module.fold().to_torch()
    assert type(theirs) is nn.LSTM
    torch.testing.assert_close(theirs(x)[0], module(x)[0], rtol=0, atol=1e-13)


def test_what_cannot_fold_is_refused():
    no_bias, silu, normed = moved(make("GRU", "no bias")), make("LSTM"), make("LSTM")
    silu.gates["g"] = TAXONOMY["silu"]
    nn.utils.parametrizations.weight_norm(normed, "weight_hh_l0")
    shared = make("GRU", "two bidirectional layers")
    shared.weight_hh_l0_reverse = shared.weight_hh_l0
    for module, message in [
        (
            no_bias,
            "GRU.fold: a threshold that has moved folds into the bias, and the layer has none; "
            "make it with bias=True, or with train='tau'.",
        ),
        (
            make("LSTM", family="free"),
            "LSTM.fold: tau and theta fold into the weights, learned branches (family='free') "
            "do not.",
        ),
        (
            silu,
            "LSTM.fold: the gate g is silu, whose branches carry its input on; only gates of the "
            "constant family fold.",
        ),
        (
            normed,
            "LSTM.fold: its weights are shared or computed (a parametrization, weight norm); fold "
            "needs parameters of its own to write to.",
        ),
        (
            shared,
            "GRU.fold: its weights are shared or computed (a parametrization, weight norm); fold "
            "needs parameters of its own to write to.",
        ),
    ]:
        module.__class__.__name__ = module.__class__.__name__.removeprefix("Parametrized")
        with pytest.raises(ValueError, match="fold") as caught:
            module.fold()
        assert str(caught.value) == message
    assert make("GRU", "no bias").fold().exact  # no threshold has moved


@pytest.mark.parametrize(
    ("learning", "message"),
    [
        (
            {"train": ("tau", "s")},
            "LSTM: train takes tau, theta; got 's'. The branches, s and c, are learned beside them "
            "with family='free'.",
        ),
        (
            {"train": "tau", "family": "multiplicative"},
            "LSTM: family is 'constant' or 'free'; got 'multiplicative'.",
        ),
        (
            {"train": "tau", "sites": ("cell", "n")},
            "LSTM: sites are some of i, f, g, o, cell; got 'cell', 'n'.",
        ),
        (
            {"train": "tau", "sites": ()},
            "LSTM: sites are some of i, f, g, o, cell; got none.",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused(learning, message):
    for asked in (
        lambda: tg.LSTM(D, H, **learning),
        lambda: tg.LSTM.from_torch(nn.LSTM(D, H), **learning),
    ):
        with pytest.raises(ValueError, match="LSTM") as caught:
            asked()
        assert str(caught.value) == message


def test_a_learned_gate_is_soft_and_has_two_branches():
    module = make("LSTM", sites=tuple("ifgo"))
    module.gates["cell"] = TAXONOMY["hardtanh"]
    module(padded(module))  # not learned
    module.gates["o"] = TAXONOMY["hardsigmoid"]
    with pytest.raises(ValueError, match="a soft instance of two affine branches; 'o' is TG"):
        module(padded(module))


def test_learned_branches_are_never_lowered_to_torchs_ops():
    module = make("LSTM", family="free")
    with kernels.use("auto"):
        y = module(padded(module))[0]
    # another order of the same sums, over 7 steps of values below 1
    torch.testing.assert_close(y, module(padded(module))[0], rtol=0, atol=1e-14)
    with kernels.use("native"), pytest.raises(kernels.BackendError, match="no native op"):
        module(padded(module))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_learns_is_no_layer_of_torch(kind):
    with pytest.raises(ValueError, match=r"to_torch: the gates .* are learned; fold\(\)"):
        make(kind).to_torch()


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_parameters_stay_float32_when_the_layer_is_cast_to_16_bits(kind, cast):
    module = moved(make(kind, dtype=torch.float32))
    module(padded(module, torch.float32))[0].sum().backward()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    cast(module)
    for name, p in module.named_parameters():
        wide = name.startswith("gate_")
        assert (p.dtype == p.grad.dtype == torch.float32) is wide
        assert torch.equal(p.float(), before[name]) or not wide
    narrow = module.weight_ih_l0.dtype
    y = module(padded(module, narrow))[0]
    assert y.dtype == narrow
    module.double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    # The outputs are near 1; 7 steps of 8 bits or 11.
    exact = module(padded(module, narrow).double())[0]
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=8 * torch.finfo(narrow).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_torchs_types_and_float32_gradients_of_gates(kind, dtype):
    module, theirs = make(kind, dtype=torch.float32), KINDS[kind][0](D, H)
    x = padded(module, torch.float32).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)[0]
        assert y.dtype == theirs(x)[0].dtype
    y.float().sum().backward()
    assert module.gate_rho_l0.grad.dtype == torch.float32
    assert (module.gate_rho_l0.grad != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_resetting_returns_gates_to_their_start(kind):
    module = moved(make(kind, "two bidirectional layers", family="free"))
    fresh = make(kind, "two bidirectional layers", family="free")
    torch.manual_seed(1)
    module.reset_parameters()
    for (name, a), b in zip(module.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("kind", "calls"), [("LSTM", 3), ("GRU", 2)])
def test_learned_sigmoids_are_one_call(kind, calls, monkeypatch):
    module = moved(make(kind))
    x = padded(module)
    want = module(x)[0]
    seen, blend = [], kernels.blend
    monkeypatch.setattr(
        kernels, "blend", lambda x, *a, **p: seen.append(x.shape) or blend(x, *a, **p)
    )
    assert torch.equal(module(x)[0], want)
    assert len(seen) == 7 * calls
    seen.clear()
    alone = make(kind, sites="f" if kind == "LSTM" else "r")  # splits the sigmoids
    alone(x)
    assert len(seen) == 7 * (calls + 2 if kind == "LSTM" else calls + 1)


def test_copies_and_pickles_keep_what_is_learned():
    module = moved(make("LSTM", sites=("f", "cell")))
    x = padded(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.learning == module.learning
        assert torch.equal(other(x)[0], module(x)[0])
        moved(other)
        assert not torch.equal(other(x)[0], module(x)[0])


def test_the_text_form_says_what_is_learned_and_what_it_costs():
    module = tg.LSTM(10, 20, train=BOTH)
    weights = 4 * 20 * (10 + 20 + 2)
    assert f"{2 * 5 * 20 / weights:.2%}" == "7.81%"
    assert repr(module) == (
        "LSTM(10, 20, gates: sigmoid x3, tanh x2, train=(tau, theta), +7.81% parameters)"
    )
    assert repr(module.fold()) == (
        "LSTM(10, 20, gates: sigmoid x3, tanh x2, train=(tau, theta), sites=(cell), "
        "+1.56% parameters)"
    )
    assert repr(tg.GRU(10, 20, train="theta", family="free")) == (
        "GRU(10, 20, gates: sigmoid x2, tanh, train=(theta, s, c), family=free, +15.62% parameters)"
    )


def test_meta_layers_learn_without_memory():
    module = tg.LSTM(D, H, num_layers=2, train=BOTH, device="meta")
    assert module.gate_rho_l1.is_meta
    assert module(torch.zeros(7, 4, D, device="meta"))[0].shape == (7, 4, H)


def test_a_converted_network_keeps_learned_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.act = moved(make("LSTM")), nn.Sigmoid()

        def forward(self, x):
            return self.act(self.rnn(x)[0])

    net = Net()
    x = padded(net.rnn)
    new = tg.convert(net, inputs=x)
    assert list(new.state_dict()) == list(net.state_dict())
    assert isinstance(new.rnn, tg.LSTM)
    torch.testing.assert_close(new(x), net(x), rtol=0, atol=1e-14)


@pytest.mark.compile
@pytest.mark.parametrize("kind", KINDS)
def test_learned_gates_compile_to_one_graph(kind):
    module = moved(make(kind))
    x = padded(module)[:2]
    with torch._dynamo.config.patch(allow_rnn=True):  # as torch's own layers need
        have = torch.compile(module, fullgraph=True, backend="eager")(x)[0]
    assert torch.equal(have, module(x)[0])
    torch._dynamo.reset()


# Torch's own LSTM warns of the list it keeps of its weights.
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
def test_an_exported_graph_holds_the_learned_gates():
    module = moved(make("LSTM"))
    x = padded(module)[:2]
    program = torch.export.export(module, (x,))
    assert set(program.state_dict) == set(module.state_dict())
    torch.testing.assert_close(program.module()(x)[0], module(x)[0], rtol=0, atol=1e-14)
