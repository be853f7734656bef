"""Gates of each synapse by Triton: interpreted in a process of its own, compiled where marked gpu."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import threshold_gating as tg
from tests.kernels.layers import moved, results
from threshold_gating.kernels.synapse import function, gpu
from threshold_gating.kernels.synapse.formula import Formula
from threshold_gating.training import tiers

# Over the largest true value. float32: sums of hundreds of terms in another order. 16 bits: the
# arithmetic is float32; the sum, which the bias may take to a smaller number, and the result are
# rounded, each by half a unit in the last place; a gradient is rounded once.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
OWN_TAUS = tg.TG((1.3, 2.0), (-0.6, 0.8), (0.2, -0.5, 1.0), (0.1, 0.4, -0.3))
EVERY = ("tau", "theta", "c")
# (features in, features out, options): two and three branches, one tau and two, constants that are
# none, numbers of the instance, K that are learned, or those of each synapse; slopes that are none.
LINEAR = [
    (9, 5, {"tier": "S"}),
    (5, 33, {"tier": "S", "init": "sigmoid", "train": EVERY}),
    (33, 3, {"tier": "general", "init": "tanh", "bias": False}),
    (6, 4, {"tier": "S", "init": "gelu_k3"}),
    (9, 2, {"tier": "S", "init": OWN_TAUS, "train": EVERY}),
    (7, 3, {"tier": "general", "init": OWN_TAUS}),
    (7, 3, {"tier": "S", "share": "channel_pair", "train": ()}),
    (4, 3, {"tier": "S", "init": "tanh"}),
]
ROWS = [(7,), (1,), (3, 2), (0,)]
# (kind, channels in, out, kernel, options, size of the image)
IMAGES = [
    ("Conv1d", 4, 2, 3, {"stride": 2, "padding": 2, "groups": 2}, (9,)),
    ("Conv2d", 3, 4, 2, {"padding": 1, "tier": "general", "init": "sigmoid"}, (2, 3)),
    (
        "Conv2d",
        2,
        3,
        (3, 2),
        {"stride": (2, 1), "dilation": (1, 2), "share": "channel_pair"},
        (4, 4),
    ),
    ("Conv2d", 2, 3, (2, 3), {"padding": "same", "init": "gelu_k3"}, (2, 3)),
    ("Conv2d", 2, 2, (1, 3), {"padding": (0, 1), "padding_mode": "circular"}, (2, 4)),
    ("Conv2d", 4, 2, 2, {"padding": 1, "groups": 2, "share": "channel_pair"}, (2, 3)),
    ("Conv1d", 2, 3, 3, {"padding": 1, "share": "channel_pair", "init": OWN_TAUS}, (5,)),
    ("Conv3d", 2, 2, 2, {"padding": (1, 0, 0)}, (1, 2, 3)),
    ("Conv1d", 2, 3, 2, {"share": "channel_pair", "init": "tanh"}, (4,)),
    ("Conv1d", 3, 3, 2, {"share": "channel_pair", "init": "sigmoid"}, (18,)),
]


def check(layer, x, tolerance=None):
    """The kernels against the same layer in float64."""
    with torch.no_grad(), tg.kernels.use("reference"):
        dy = torch.randn(layer(x).shape, device=x.device).to(x.dtype)
    have = results(layer, x, dy, "triton")
    want = results(copy.deepcopy(layer).double(), x.double(), dy.double(), "reference")
    for name, true in want.items():
        assert have[name].shape == true.shape, name
        if true.numel():
            size = max(float(true.abs().max()), 1e-30)
            error = float((have[name].double() - true).abs().max()) / size
            allowed = tolerance or TOLERANCE[x.dtype]
            assert error <= allowed, f"{layer} {name} {tuple(x.shape)} {x.dtype}: {error:.1e}"


def check_all(device, dtype, times=1):
    """Ragged shapes, none at all, memory in another order; `times` as wide."""
    torch.manual_seed(0)
    for k, (given, outputs, options) in enumerate(LINEAR):
        layer = moved(tg.Linear(given * times, outputs * times, **options)).to(device, dtype)
        for rows in ROWS if k == 0 else ROWS[:1]:
            x = torch.randn(*rows, given * times, device=device).to(dtype)
            check(layer, x.t().contiguous().t() if k == 1 else x)
    for k, (kind, given, outputs, kernel, options, size) in enumerate(IMAGES):
        known = {"tier": "S", **options}
        layer = moved(getattr(tg, kind)(given * times, outputs * times, kernel, **known))
        image = torch.randn(1 + (k < 2), given * times, *size, device=device).to(dtype)
        image = image.to(memory_format=torch.channels_last) if k == 1 else image
        check(layer.to(device, dtype), image)
        if k == 1:
            check(layer, image[:0])


def check_values(device):
    """Without derivatives, twice derived, with odd numbers, mixed types, and in a transform."""
    torch.manual_seed(0)
    layer = moved(tg.Linear(8, 4, tier="S")).to(device)
    x = torch.randn(5, 8, device=device)
    with tg.kernels.use("triton"):
        y = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        y.mul_(2)  # a user may
        assert layer(x.bfloat16()).dtype == torch.float32  # as the formulas have it
        with torch.autocast(device, torch.bfloat16):
            assert layer(x).dtype == torch.float32
        odd = x.clone()
        odd[1, 2], odd[3, 4] = float("nan"), 1e30
        found = layer(odd)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2, 4]], layer(x)[[0, 2, 4]])
        torch.testing.assert_close(torch.func.vmap(layer)(x[None])[0], layer(x))
        check_refused(device)
    check_wanted(device)
    with tg.kernels.use("reference"):
        torch.testing.assert_close(found[3], layer(odd)[3])
    grads = []
    for backend in ("triton", "reference"):
        with tg.kernels.use(backend):
            z = x.clone().requires_grad_()
            (dx,) = torch.autograd.grad(layer(z).square().sum(), z, create_graph=True)
            given = [z, layer.weight, layer.gate.rho, layer.gate.dtheta]
            grads.append(torch.autograd.grad(dx.square().sum(), given))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def check_constants(device):
    """The K constants of a layer in 16 bits: their gradients, and those of the weights they go
    with, are sums of float32 that are rounded once, those of the gates not at all."""
    once = 2.0**-8 + TOLERANCE[torch.float32]
    for seed in range(3):  # terms of either sign: rounded one by one they were up to 1e-2 off
        torch.manual_seed(seed)
        layer = moved(tg.Linear(9, 2, tier="S", init=OWN_TAUS, train=EVERY))
        layer = layer.to(device, torch.bfloat16)
        x = torch.randn(7, 9, device=device).bfloat16()
        dy = torch.randn(7, 2, device=device).bfloat16()
        have = results(layer, x, dy, "triton")
        want = results(copy.deepcopy(layer).double(), x.double(), dy.double(), "reference")
        for name in ("c", "weight", "gate.rho", "gate.dtheta"):
            error = (have[name].double() - want[name]).abs().max() / want[name].abs().max()
            allowed = TOLERANCE[torch.float32] if name.startswith("gate") else once
            assert float(error) <= allowed, f"{seed} {name}: {float(error):.1e}"


def check_extremes(device):
    """Steep gates, far inputs, thresholds that have crossed: the gates are those of float64."""
    torch.manual_seed(0)
    for init in ("silu", OWN_TAUS):
        layer = moved(tg.Linear(12, 5, tier="general", init=init)).to(device)
        for tau, spread in ((30.0, 3.0), (1000.0, 1.0), (0.01, 100.0)):
            with torch.no_grad():
                layer.gate.tau0.fill_(tau)
                layer.gate.rho.zero_()
                layer.gate.dtheta.normal_(std=spread)  # the upper one is below as often as not
            x = 4 * torch.randn(6, 12, device=device)
            exact = copy.deepcopy(layer).double()
            with tg.kernels.use("triton"):
                y = layer(x).detach()
            with tg.kernels.use("reference"):
                want = exact(x.double()).detach()
            # the difference of x and theta is rounded, and tau times that moves a gate by tau / 4
            bound = 2**-23 * (8 + tau * spread) * 12 * float(want.abs().max())
            assert float((y - want).abs().max()) < bound


def check_far(device):
    """Where gates are nearly 1 or nearly 0 and at huge inputs, gradients have float64's digits."""
    torch.manual_seed(0)
    pairs = {"tier": "S", "share": "channel_pair", "padding": 1}
    for init in ("silu", "sigmoid", OWN_TAUS):
        line = tg.Linear(3, 2, tier="S", init=init).to(device)
        image = tg.Conv1d(2, 2, 3, init=init, **pairs).to(device)
        # 2^-60 is reached at 60 log(2) / 2 = 20.8 for a tau of 2
        check(line, 14 + torch.rand(2, 3, device=device))
        check(image, 14 + torch.rand(1, 2, 3, device=device))
        x = torch.randn(3, 3, device=device)
        x[1, 2] = -1e20
        check(moved(line), x)
    steep = tg.Linear(3, 2, tier="S").to(device)
    torch.nn.init.constant_(steep.gate.rho, 7.0)
    check(steep, torch.rand(2, 3, device=device) / 50, 1e-4)  # tau is 1097: digits of x - theta
    fast = tg.Linear(1, 1, tier="S", init="sigmoid", accuracy="fast", bias=False).to(device)
    torch.nn.init.constant_(fast.gate.dtheta, 100.0)
    torch.nn.init.constant_(fast.gate.rho, 3.0)
    x = (100 + torch.linspace(-0.1, 0.1, 9, device=device)).view(-1, 1)
    with torch.no_grad(), tg.kernels.use("triton"):
        y = fast(x)
    with torch.no_grad(), tg.kernels.use("reference"):
        want = copy.deepcopy(fast).double()(x.double())
    # half a unit in the last place of x - theta is that of x, which is given; the rest is tanh's
    assert float((y - want).abs().max()) < (1e-6 if device == "cpu" else 8e-6)
    check_fast_far(device)


def check_fast_far(device):
    """Fast gates: what is closed has no gradient, and what lies far out does not disturb it; the
    threshold may be as far as it likes, for x - theta is made before it is scaled."""
    torch.manual_seed(0)
    layer = moved(tg.Linear(3, 2, tier="S", accuracy="fast", bias=False)).to(device)
    x, dy = torch.randn(3, 3, device=device), torch.randn(3, 2, device=device)
    rest = results(layer, x[[0, 2]], dy[[0, 2]], "triton")["weight"]
    for far, closed in ((-1e20, 1), (1e20, 0)):
        x[1] = far
        found = results(layer, x, dy, "triton")
        torch.testing.assert_close(found["weight"][:, closed], rest[:, closed])
        for name in ("gate.rho", "gate.dtheta"):
            assert found[name].isfinite().all()
    steep = tg.Linear(1, 1, tier="S", init="sigmoid", accuracy="fast", bias=False).to(device)
    for tau, theta in ((1.0, 30.0), (30.0, -1.0), (3.0, 10.0), (0.1, 300.0)):
        torch.nn.init.constant_(steep.gate.rho, math.log(tau))
        torch.nn.init.constant_(steep.gate.dtheta, theta)
        z = (theta + torch.linspace(-4, 4, 33, device=device) / tau).view(-1, 1)
        with torch.no_grad(), tg.kernels.use("triton"):
            y = steep(z)
        with torch.no_grad(), tg.kernels.use("reference"):
            want = copy.deepcopy(steep).double()(z.double())
        # one sigmoid: 4e-6 on an H200, and exact but for float32's digits where it is interpreted
        assert float((y - want).abs().max()) < (1e-6 if device == "cpu" else 8e-6), (tau, theta)


def check_wanted(device):
    """A gradient is the same whether others are asked for or not."""
    torch.manual_seed(0)
    for layer, shape in (
        (tg.Linear(5, 3, tier="S"), (4, 5)),
        (tg.Conv1d(3, 2, 3, tier="S", padding=1, share="channel_pair"), (3, 3, 7)),
    ):
        moved(layer).to(device)
        x = torch.randn(shape, device=device).requires_grad_()
        given = [x, *layer.parameters()]
        with tg.kernels.use("triton"):
            every = torch.autograd.grad(layer(x).square().sum(), given)
            (alone,) = torch.autograd.grad(layer(x).square().sum(), given[:1])
            others = torch.autograd.grad(layer(x.detach()).square().sum(), given[1:])
        for ours, one in zip(every, (alone, *others), strict=True):
            assert torch.equal(ours, one)


def check_unseen(device):
    """What no tap of a kernel sees changes nothing, whatever it is, and has the gradient 0."""
    torch.manual_seed(0)
    for share in ("channel_pair", "synapse"):
        layer = moved(tg.Conv1d(2, 2, 2, tier="S", share=share, stride=2, dilation=2, padding=1))
        x = torch.randn(2, 2, 6, device=device)
        dy = torch.randn(2, 2, 3, device=device)
        want = results(layer.to(device), x, dy, "triton")
        x[0, 0, 2], x[1, 1, 4] = float("nan"), float("inf")
        have = results(layer, x, dy, "triton")
        for name, true in want.items():
            assert torch.equal(have[name], true), (share, name)
        assert have["x"][0, 0, 2] == have["x"][1, 1, 4] == 0


def check_refused(device):
    """Inputs that do not fit are refused before anything is read beyond its end."""
    for tier in ("S", "W"):
        line, image = tg.Linear(5, 3, tier=tier), tg.Conv2d(4, 2, 3, tier=tier, padding=(1, 0))
        for layer, shape, words in (
            (line, (4, 10), r"takes 5 features.*got x of shape \(4, 10\)"),
            (line, (4, 1), "takes 5 features"),
            (line, (0, 4), "takes 5 features"),
            (line, (), "takes 5 features"),
            (image, (1, 3, 4, 4), "takes 4 channels and 2 spatial axes"),
            (image, (1, 8, 4, 4), "takes 4 channels"),
            (image, (4, 4), "takes 4 channels"),
            (image, (0, 4, 4, 2), r"covers \(3, 3\).*got \(6, 2\)"),
            (image, (4, 4, 2), r"covers \(3, 3\)"),
        ):
            with pytest.raises(RuntimeError, match=words):
                layer.to(device)(torch.randn(shape, device=device))
        for layer, shape in ((line, (4, 5)), (image, (4, 4, 5, 4))):
            x = torch.randn(shape, device=device)
            assert layer(x, torch.ones_like(x)).isfinite().all()
            for other in ((x.numel(),), shape[::-1], (1, *shape[1:]), (*shape[:-1], 1)):
                with pytest.raises(ValueError, match="factor: one number for each of x"):
                    layer(x, torch.ones(other, device=device))


def check_compiled(device, backend):
    """In a graph without breaks, with the same kernels as nodes."""
    torch.manual_seed(0)
    layer, x = moved(tg.Linear(5, 4, tier="general")).to(device), torch.randn(3, 5, device=device)
    given, found = [x.requires_grad_(), *layer.parameters()], []
    with tg.kernels.use("triton"):
        for f in (torch.compile(layer, backend=backend, fullgraph=True), layer):
            y = f(x)
            found.append([y, *torch.autograd.grad(y.square().sum(), given)])
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


def check_ops(device):
    """What the compiler is told of the ops' results is what they are."""
    torch.manual_seed(0)
    tests = ("test_schema", "test_faketensor")
    layer = tg.Conv2d(4, 2, 2, padding=1, groups=2, tier="S").to(device)
    x, weight = torch.randn(1, 4, 1, 2, device=device), layer.weight.detach()
    formula = Formula("softmax", None, False, layer._conv()._replace(pad=(1,) * 4))
    plan = function.Plan(formula, 2, 1, False, False, layer.kernel_size)
    given = x, torch.rand_like(weight), weight, plan.numbers(), plan.window(x)
    torch.library.opcheck(function.synapse_forward, given, test_utils=tests)
    dy = torch.randn_like(function.synapse_forward(*given))
    given = dy, *given, [True, True]
    torch.library.opcheck(function.synapse_backward, given, test_utils=tests)


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that anything makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // 4)
        return found


def check_memory(device):
    """Nothing is as large as batch x inputs x outputs: the largest are sums of the parameters."""
    layer, x = tg.Linear(16, 12, tier="general").to(device), torch.randn(60, 16, device=device)
    with tg.kernels.use("triton"), Largest() as seen:
        layer(x.requires_grad_()).sum().backward()
    assert seen.elements <= 60 * 16 * 12 // 2


def check_fast(device, tolerance):
    """Sigmoids by one special function; interpreted they are exact."""
    torch.manual_seed(0)
    layers = [
        tg.Linear(9, 5, tier="S", accuracy="fast"),
        tg.Linear(9, 5, tier="general", init="sigmoid", accuracy="fast"),
        tg.Conv2d(3, 4, 2, tier="S", padding=1, share="channel_pair", accuracy="fast"),
        tg.Conv2d(3, 3, 2, tier="S", init="sigmoid", share="channel_pair", accuracy="fast"),
    ]
    for layer in layers:
        shape = (7, 9) if isinstance(layer, tg.Linear) else (1, 3, 3, 3)
        check(moved(layer).to(device), torch.randn(shape, device=device), tolerance)


def test_the_kernels_have_float64s_values_at_odd_numbers_and_fit_in_a_graph(step_by_step):
    step_by_step("interpret_synapse.py", "few")


@pytest.mark.slow  # the pairs interpret these kernels as well
def test_the_kernels_equal_float64_step_by_step(step_by_step):
    step_by_step("interpret_synapse.py", "every")


def test_fast_is_refused_where_it_does_not_exist_and_said_where_it_does():
    assert "accuracy=fast" in repr(tg.Linear(3, 2, tier="S", accuracy="fast"))
    assert "accuracy" not in repr(tg.Linear(3, 2, tier="S"))
    for options in ({"tier": "W"}, {"tier": "S", "init": "relu"}, {"tier": "S", "K": 3}):
        with pytest.raises(ValueError, match=r"two soft branches .* Leave it out"):
            tg.Linear(3, 2, accuracy="fast", **options)
    with pytest.raises(ValueError, match="'full' or 'fast'; got 'half'"):
        tg.Conv1d(3, 2, 3, tier="S", accuracy="half")
    layer = tg.Linear.from_dense(torch.nn.Linear(3, 2), "silu", tier="S", accuracy="fast")
    assert layer.accuracy == "fast"
    layer.accuracy = "full"
    assert "accuracy" not in repr(layer)
    with pytest.raises(ValueError, match="Leave it out"):
        tg.Linear(3, 2).accuracy = "fast"


def test_fast_stays_on_the_way_up_and_ends_where_there_is_none():
    layer = tg.Linear(3, 2, tier="S", accuracy="fast")
    assert tiers.lifted(layer, "general").accuracy == "fast"
    assert tiers.projected(layer, "W")[0].accuracy == "full"


def test_on_a_cpu_fast_changes_nothing():
    layer, x = moved(tg.Linear(9, 5, tier="S")), torch.randn(7, 9)
    y = layer(x)
    layer.accuracy = "fast"
    assert torch.equal(layer(x), y)


@pytest.mark.compile
@pytest.mark.parametrize("tier", ["S", "general"])
@pytest.mark.parametrize("kind", ["Linear", "Conv1d"])
def test_on_a_cpu_a_layer_compiles_to_one_graph(kind, tier):
    sizes, shape = ((5, 4), (7, 5)) if kind == "Linear" else ((2, 3, 2), (3, 2, 6))
    layer = moved(getattr(tg, kind)(*sizes, tier=tier, share="synapse"))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(shape, requires_grad=True)
    inputs = [x, *layer.parameters()]
    have, want = (torch.autograd.grad(f(x).square().sum(), inputs) for f in (compiled, layer))
    for h, w in zip(have, want, strict=True):  # the same steps in another order
        torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-5)


def test_tables_say_which_row_a_tap_sees():
    """Against the unfolded numbers of the rows themselves."""
    window = gpu.Window((4, 5), (2, 5), (3, 2), (2, 1), (1, 1), (1, 2))
    seen, seeing = gpu.tables(window, torch.device("cpu"))
    numbers = torch.arange(1.0, 21.0).view(1, 1, 4, 5)
    unfolded = torch.nn.functional.unfold(
        numbers, (3, 2), dilation=(1, 2), padding=(1, 1), stride=(2, 1)
    )
    assert torch.equal(seen + 1, unfolded[0].int())
    for tap, row in (seen >= 0).nonzero().tolist():
        assert seeing[tap, seen[tap, row]] == row
    assert (seeing >= 0).sum() == (seen >= 0).sum()


def test_inputs_that_do_not_fit_are_refused_by_the_formulas_too():
    check_refused("cpu")
    layer = tg.Conv1d(2, 2, 1, share="neuron", size=(4,))
    with pytest.raises(RuntimeError, match=r"each of \(4,\) positions; got x of shape \(1, 2, 1\)"):
        layer(torch.ones(1, 2, 1))


def test_tables_made_for_a_cuda_graph_are_not_kept(monkeypatch):
    """They are filled when the graph runs: eager code would find them empty."""
    window, cpu = gpu.Window((3,), (2,), (2,), (1,), (0,), (1,)), torch.device("cpu")
    kept = gpu.tables(window, cpu)[0]
    assert gpu.tables(window, cpu)[0] is kept
    monkeypatch.setattr(gpu, "_captures", lambda device: True)
    made = gpu.tables(window, cpu)[0]
    assert made is not kept
    assert torch.equal(made, kept)
    assert gpu.tables(window, cpu)[0] is not made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernels_equal_float64(dtype):
    check_all("cuda", dtype)
    check_all("cuda", dtype, times=11)


@pytest.mark.gpu
def test_values_extremes_and_memory_on_a_gpu():
    check_values("cuda")
    check_ops("cuda")
    check_constants("cuda")
    check_extremes("cuda")
    check_far("cuda")
    check_unseen("cuda")
    check_memory("cuda")
    check_fast("cuda", 1e-4)  # 4e-6 of a sigmoid was measured, over all numbers


@pytest.mark.gpu
def test_a_compiled_graph_has_the_kernels_on_a_gpu():
    check_compiled("cuda", "inductor")
