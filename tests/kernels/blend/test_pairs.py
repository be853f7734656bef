"""Every kernel equals its reference: in eager torch on a CPU, under Triton's interpreter, on a GPU."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.utils.parametrize
import torch.utils.checkpoint

from benchmarks import checking, timing
from benchmarks.pairs import ALLOWED, PAIRS, disagreement
from threshold_gating import TAXONOMY, TG, Activation, kernels, primitive
from threshold_gating.kernels import runtime, structure, weights
from threshold_gating.kernels.attention import function as attending
from threshold_gating.kernels.blend import cpu, gpu, one_pass, steps
from threshold_gating.kernels.blend import function as blending
from threshold_gating.kernels.call import of_call
from threshold_gating.kernels.product import formula, function

ROOT = Path(__file__).parents[3]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (1, 63), (1003, 3), (5, 7, 3, 5)]
# Gates from tensors of their own take any shape; what a module or a layer runs takes its own.
GATES = {name: pair for name, pair in PAIRS.items() if pair.family in ("blend", "times")}
COMPILED = [name for name, pair in PAIRS.items() if pair.family == "compiled"]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Few elements go through the tiles, too, where `auto` takes the reference's own formulas."""
    monkeypatch.setattr(blending, "_FEW", 0)


def check(pair, shape, dtype, device="cpu", kernel=None):
    for name, error in disagreement(pair, pair.inputs(shape, dtype, device), kernel).items():
        assert error <= pair.bound(name, dtype), f"{pair.name} {shape} {dtype} {name}: {error:.1e}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GATES)
def test_the_cpu_path_equals_the_reference(name, shape):
    for dtype in DTYPES:
        check(PAIRS[name], shape, dtype)


@pytest.fixture
def by_tiles(monkeypatch):
    """The steps of torch, as where there is no C compiler."""
    monkeypatch.setattr(one_pass, "ready", lambda *given: None)


@pytest.mark.parametrize("name", [n for n in GATES if not n.startswith(("hardtanh", "leaky"))])
def test_the_tiles_equal_the_reference(name, by_tiles):
    for dtype in DTYPES[1:3]:
        check(PAIRS[name], (5, 7, 3, 5), dtype)


@pytest.mark.parametrize("name", [n for n in PAIRS if n not in GATES and n not in COMPILED])
def test_what_modules_and_layers_run_on_a_cpu_equals_the_reference(name):
    for dtype in DTYPES[1:]:
        check(PAIRS[name], PAIRS[name].shapes[0], dtype)


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_equals_the_reference(name):
    check(PAIRS[name], PAIRS[name].shapes[0], torch.float32)


compiles = pytest.mark.compile


def slightly_off(f):
    """`f` with the first tensor that it gives off by a hundredth."""

    def run(*args, **options):
        found = f(*args, **options)
        if isinstance(found, torch.Tensor):
            return found * 1.01
        first = next(k for k, t in enumerate(found) if t is not None)
        made = [t * 1.01 if k == first else t for k, t in enumerate(found)]
        return type(found)(made)

    return run


@pytest.mark.parametrize(
    ("owner", "function", "name"),
    [
        (cpu.Plan, "forward", "silu channel"),
        (cpu.Plan, "forward", "gelu frozen"),
        (cpu.Plan, "backward", "silu channel module"),
        (one_pass.Ready, "forward", "gelu frozen"),
        (one_pass.Ready, "backward_into", "silu channel module"),
        (one_pass.Ready, "backward_into", "gelu_tanh frozen"),
        *(
            pytest.param(one_pass.Ready, what, f"{key} module compiled of many", marks=compiles)
            for what in ("forward", "backward_into")
            for key in ("silu channel", "gelu layer")
        ),
        (function._Two, "value", "two soft channel product"),
        (function._Two, "gradients", "two soft channel product"),
        (formula.Formula, "product", "three soft layer convolution"),
        (formula.Formula, "product_gradients", "hard channel product"),
        (attending.logits, "attend", "attention fused"),
        pytest.param(steps, "_blended", "silu channel read compiled", marks=compiles),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_a_cpu_runs_is_caught_when_it_is_broken(owner, function, name, monkeypatch):
    if owner is one_pass.Ready and not one_pass.status()[0]:
        pytest.skip(one_pass.status()[1])
    assert checking.check("cpu", [PAIRS[name]]) == []
    monkeypatch.setattr(owner, function, slightly_off(getattr(owner, function)))
    wrong = checking.check("cpu", [PAIRS[name]])
    assert wrong
    assert all(line.startswith(name) and ": error " in line for line in wrong)


# what is caught when it is broken was reached
@pytest.mark.parametrize("what", [pytest.param("reach", marks=pytest.mark.slow), "break"])
def test_every_kernel_of_triton_is_reached_and_caught_when_it_is_broken(what, step_by_step):
    step_by_step("every_kernel.py", what)


def test_what_has_no_pair_cannot_be_timed():
    with pytest.raises(
        ValueError, match=r"what is timed is checked first, by pairs of .*\('new',\)"
    ):
        timing.Work("s", "w", dict, {"copy": 1.0}, ("new",))
    with pytest.raises(ValueError, match=r"got pairs=\(\)"):
        timing.Work("s", "w", dict, {"copy": 1.0}, ())


@pytest.mark.parametrize(
    "name", ["silu channel", "gelu neuron", "hardtanh channel", "silu channel read"]
)
def test_tiles_of_any_size_give_the_same(name, by_tiles, monkeypatch):
    for size in (1, 7, 64):
        monkeypatch.setattr(cpu, "_TILE", {True: size, False: size})
        check(PAIRS[name], (5, 7, 3, 5), torch.float32)


@pytest.mark.parametrize("name", GATES)
def test_channels_last_is_kept_and_equal(name):
    pair = PAIRS[name]
    inputs = pair.inputs((2, 6, 5, 3), torch.float32, "cpu")
    for key in {"x", "v", "up"} & set(inputs):
        last = inputs[key].detach().to(memory_format=torch.channels_last)
        inputs[key] = last.requires_grad_()
    assert pair.kernel(inputs).is_contiguous(memory_format=torch.channels_last)
    for name, error in disagreement(pair, inputs).items():
        assert error <= pair.bound(name, torch.float32), name


def traced(pair):
    """`pair` by the steps for a compiler."""
    gates = pair.kernel.__self__

    def run(w):
        call = of_call(*gates.values(w), **gates.options())
        return steps.steps(w["x"], None, *call)

    return run


@pytest.mark.parametrize(
    "name", ["silu channel", "gelu layer", "gelu neuron", "gelu_k4 layer", "mish channel"]
)
def test_the_steps_for_a_compiler_equal_the_reference(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(PAIRS[name], (5, 7, 3, 5), dtype, kernel=traced(PAIRS[name]))


def wrong(w):
    return PAIRS["silu channel"].kernel({n: -t if n == "theta 0" else t for n, t in w.items()})


def test_a_kernel_that_is_wrong_on_purpose_fails():
    with pytest.raises(AssertionError, match="silu channel"):
        check(PAIRS["silu channel"], (1, 63), torch.float32, kernel=wrong)


def test_a_wrong_gradient_alone_fails():
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * 1.0001

    with pytest.raises(AssertionError, match="dx"):
        check(
            PAIRS["silu layer"],
            (1, 63),
            torch.float32,
            kernel=lambda w: Off.apply(PAIRS["silu layer"].kernel(w)),
        )


@pytest.mark.parametrize("name", ["silu channel", "gelu channel", "gelu_k4 layer", "tanh channel"])
def test_gradients_have_gradients(name):
    pair = PAIRS[name]
    inputs = pair.inputs((3, 2), torch.float64, "cpu")
    given = [t.detach().double().requires_grad_() for t in inputs.values()]

    def f(*tensors):
        return pair.kernel(dict(zip(inputs, tensors, strict=True)))

    assert torch.autograd.gradgradcheck(f, given)


def test_only_wanted_gradients_are_computed():
    pair = PAIRS["silu channel"]
    inputs = pair.inputs((4, 6), torch.float32, "cpu")
    for t in list(inputs.values())[1:]:
        t.requires_grad_(False)
    found = [
        torch.autograd.grad(f(inputs).sum(), inputs["x"])[0] for f in (pair.kernel, pair.reference)
    ]
    torch.testing.assert_close(*found)


def test_x_alone_is_kept_for_the_backward_pass():
    pair = PAIRS["gelu channel"]
    inputs = pair.inputs((64, 6, 5, 5), torch.float32, "cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pair.kernel(inputs)
    large = [t for t in kept if t.numel() == inputs["x"].numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == inputs["x"].data_ptr()


def test_tensors_that_are_negated_when_they_are_read_are_themselves():
    check_negated()


def test_thresholds_may_be_far_out(by_tiles):
    check_far_thresholds()


def test_what_the_branches_read_may_be_huge(by_tiles):
    check_huge_inputs_of_branches()


def test_transforms_of_functions_still_work():
    def f(x):
        return kernels.blend(x, torch.tensor(1.3), [torch.tensor(0.2)], (0.0, 1.0), (0.0, 0.0))

    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.func.vmap(f)(x), f(x))
    one = torch.ones_like(x)
    slope = torch.func.jvp(f, (x,), (one,))[1]
    x.requires_grad_()
    torch.testing.assert_close(slope, torch.autograd.grad(f(x).sum(), x)[0])


def test_thresholds_too_far_apart_for_one_exponential_take_the_other_way():
    x = torch.linspace(-60, 60, 1001)
    far = (-40.0, 0.0, 40.0)
    parameters = (
        torch.tensor(4.0),
        [torch.tensor(t) for t in far],
        (0.0, 0.3, 0.7, 1.0),
        (0.0,) * 4,
    )
    want = primitive.blend(x.double(), 4.0, far, *parameters[2:]).float()
    torch.testing.assert_close(kernels.blend(x, *parameters), want, rtol=1e-5, atol=1e-5)


def test_nan_is_passed_on_and_infinity_stays_with_hard_gates():
    x = torch.tensor([float("nan"), float("-inf"), float("inf"), 1e38, -1e38])
    hard = kernels.blend(x, float("inf"), [torch.tensor(0.0)], (0.0, 1.0), (0.0, 0.0))
    assert hard[0].isnan()
    assert hard[1:].tolist() == torch.relu(x[1:]).tolist()
    for K in (2, 5):
        theta = [torch.tensor(float(k)) for k in range(K - 1)]
        s = [torch.tensor(k / (K - 1)) for k in range(K)]
        y = kernels.blend(x, torch.tensor(2.0), theta, s, (0.0,) * K)
        assert y[0].isnan()
        assert y[3:].tolist() == pytest.approx([1e38, 0.0])


# Triton


def check_special(device="cpu"):
    """What the table does not reach: extremes, fallback, no elements, layouts."""
    x = torch.tensor([float("nan"), float("-inf"), float("inf"), 1e38, -1e38], device=device)
    hard = kernels.blend(
        x, float("inf"), [torch.tensor(0.0, device=device)], (0.0, 1.0), (0.0, 0.0)
    )
    assert hard[0].isnan()
    assert hard[1:].tolist() == torch.relu(x[1:]).tolist()
    x = torch.linspace(-60, 60, 1001, device=device)
    far = (-40.0, 0.0, 40.0)
    theta = [torch.tensor(t, device=device) for t in far]
    s, c = (0.0, 0.3, 0.7, 1.0), (0.0,) * 4
    want = primitive.blend(x.double(), 4.0, far, s, c).float()
    have = kernels.blend(x, torch.tensor(4.0, device=device), theta, s, c)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    assert kernels.blend(x[:0], 1.0, (0.0,), (0.0, 1.0), (0.0, 0.0)).shape == (0,)
    image = torch.randn(2, 6, 5, 3, device=device).to(memory_format=torch.channels_last)
    tau = torch.rand(1, 6, 1, 1, device=device) + 0.5
    have = kernels.blend(image, tau, [0.1 * tau], (0.0, 1.0), (0.0, 0.0))
    assert have.is_contiguous(memory_format=torch.channels_last)
    want = primitive.blend(image.contiguous(), tau, [0.1 * tau], (0.0, 1.0), (0.0, 0.0))
    torch.testing.assert_close(have, want)
    strided = torch.randn(6, 9, device=device)[:, ::2]
    have = kernels.blend(strided, 1.0, (0.0,), (0.0, 1.0), (0.0, 0.0))
    torch.testing.assert_close(have, torch.nn.functional.silu(strided))
    for key in ("gelu", "gelu_k4", "gelu_tanh", "mish"):  # frozen, and x learns
        x = torch.randn(5, 7, device=device, requires_grad=True)
        (have,) = torch.autograd.grad(Activation(key).to(device)(x).sum(), x)
        z = x.detach().double().requires_grad_()
        (want,) = torch.autograd.grad(TAXONOMY[key](z).sum(), z)
        torch.testing.assert_close(have, want.float(), rtol=1e-5, atol=1e-5)
    for key in ("gelu", "gelu_k4", "gelu_tanh", "elu", "hardtanh", "tanh"):  # frozen
        for x in (image, strided, strided[:0], image.bfloat16()):
            have, t = Activation(key).to(device)(x), TAXONOMY[key]
            assert have.dtype == x.dtype
            assert have.stride() == x.stride() or x.shape != image.shape
            error = (have.double() - t(x.double())).abs().max() if x.numel() else 0.0
            assert error <= 4 * ALLOWED[x.dtype], f"{key}: {error:.1e}"  # values up to 4
    t, x = TAXONOMY["gelu"], torch.randn(3, device=device)
    assert kernels.blend(x, t).equal(kernels.blend(x, t))
    assert structure.exact.cache_info().hits > 0
    far = torch.tensor([float("nan"), 1e30, -1e30, 80.0, -80.0], device=device)
    for key in ("gelu", "gelu_tanh"):
        have = Activation(key).to(device)(far)
        assert have[0].isnan()
        torch.testing.assert_close(have[1:], torch.relu(far[1:]))
    check_own_taus(device)
    check_far_thresholds(device)
    check_huge_inputs_of_branches(device)
    check_negated(device)
    check_jumps_of_a_gated_unit(device)
    for key in ("silu", "gelu", "gelu_tanh"):  # gated units
        x, up = (torch.randn(9, 5, device=device).requires_grad_() for _ in range(2))
        found = []
        for given, f in (((x, up), kernels.blend), ((x.double(), up.double()), gated_unit)):
            y = f(given[0], TAXONOMY[key], up=given[1])
            dx, dup = torch.autograd.grad(y.square().sum(), (x, up), create_graph=True)
            found.append((y, dx, dup, torch.autograd.grad(dx.square().sum(), x)[0]))
        for have, want in zip(*found, strict=True):  # the last has a dozen roundings behind it
            torch.testing.assert_close(have, want.float(), rtol=1e-4, atol=1e-4)


# A tau per threshold: the same from either end, with a branch to the left and constants, and not.
OWN_TAUS = (
    TAXONOMY["gelu_tanh"],
    TG((1.5, 2.0, 1.5), (-2.0, 0.1, 2.0), (0.2, -0.3, 1.2, 1.0), (0.1, 0.5, -0.4, 0.3)),
    TG((1.5, 2.0, 1.4), (-2.0, 0.1, 2.0), (0.2, -0.3, 1.2, 1.0), (0.1, 0.5, -0.4, 0.3)),
)


def check_far_thresholds(device="cpu"):
    """Gates with one tau are those of x - theta, however far out thresholds are."""
    for far, near in ((20.0, (-1.2131, 1.2144)), (5000.0, (-1.2131, 0.1, 0.3, 1.2144))):
        J, x = len(near), far + torch.linspace(-3, 3, 501, device=device)
        values = 32.0, *[far + t for t in near], *range(-1, J), *range(J + 1)
        for shape in ((), x.shape):  # those of a layer are numbers to a CPU
            rows = [torch.full(shape, float(w), device=device) for w in values]
            have, want = (
                f(z, tau, thetas[:J], thetas[J : 2 * J + 1], thetas[2 * J + 1 :])
                for f, (z, tau, *thetas) in (
                    (kernels.blend, [x, *rows]),
                    (primitive.blend, [w.double() for w in (x, *rows)]),
                )
            )
            assert (have - want).abs().max() <= 5e-6 * want.abs().max(), (far, shape)


def check_huge_inputs_of_branches(device="cpu"):
    """What the branches read may be near the end of float32 where gates are open."""
    for key in ("silu", "mish", "gelu", "gelu_k4"):
        found = []
        for dtype, f in ((torch.float32, kernels.blend), (torch.float64, primitive.blend)):
            t, option = TAXONOMY[key], {"dtype": dtype, "device": device}
            theta = [torch.full((1,), w, **option).requires_grad_() for w in t.theta]
            x = torch.linspace(-3, 3, 14, **option).requires_grad_()
            v = torch.linspace(3e35, 1e36, 14, **option).requires_grad_()
            y = f(x, t.tau, theta, t.s, t.c, v=v)
            found.append((y, *torch.autograd.grad(y.sum(), (x, v, *theta))))
        for have, want in zip(*found, strict=True):
            assert (have - want).abs().max() <= 1e-5 * want.abs().max(), key


def check_negated(device="cpu"):
    """Tensors that torch negates when it reads them, as the imaginary part of a conjugate."""

    def results(x, dy, up, tau):
        x, up, tau = (t.detach().requires_grad_() for t in (x, up, tau))
        found = []
        for option in ({}, {"up": up}, {"v": up}):
            y = kernels.blend(x, tau, (0.1,), (0.2, 1.0), (0.0, 0.3), known=True, **option)
            found += [y, *torch.autograd.grad(y, (x, tau, *option.values()), dy)]
        return found

    x, dy, up = torch.randn(3, 4, 5, device=device)
    tau = torch.rand(1, device=device) + 0.5
    want = results(x, dy, up, tau)
    for k in range(4):
        given = [torch._neg_view(-t) if k == at else t for at, t in enumerate((x, dy, up, tau))]
        assert given[k].is_neg()
        for have, true in zip(results(*given), want, strict=True):
            torch.testing.assert_close(have, true, rtol=1e-4, atol=1e-5)


def check_jumps_of_a_gated_unit(device="cpu"):
    """What multiplies y multiplies the gradient of a threshold at which y jumps."""
    jump = TG(float("inf"), (0.3,), (0.5, -2.0), (1.0, 0.25))
    act = Activation(jump, train=("theta", "s"), share="channel", channels=5, axis=-1).to(device)
    x, up = (torch.randn(9, 5, device=device) for _ in range(2))
    found = []
    for m, z, w in ((act, x, up), (copy.deepcopy(act).double(), x.double(), up.double())):
        y = kernels.blend(z, m._structure, m._held, up=w)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(m.parameters()))))
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want.float(), rtol=1e-4, atol=1e-4)


def check_own_taus(device="cpu"):
    """Frozen ones have half of the exponentials where they can, and stand still far out."""
    assert [weights._are_mirrored(t) for t in OWN_TAUS] == [True, True, False]
    near = torch.linspace(-40, 40, 1201)
    points = torch.cat([near, torch.tensor([-1e4, 1e4, -1e30, 1e30, -3e38, 3e38])])
    for t in OWN_TAUS:
        x, z = points.to(device).requires_grad_(), points.double().requires_grad_()
        have, want = kernels.blend(x, t), t(z)
        torch.testing.assert_close(have.cpu(), want.float(), rtol=2e-6, atol=2e-6)
        slope, true = torch.autograd.grad(have.sum(), x)[0], torch.autograd.grad(want.sum(), z)[0]
        # terms of 40 times a slope cancel in it: 4e-6 in float32
        torch.testing.assert_close(slope.cpu(), true.float(), rtol=1e-5, atol=1e-5)
    # thresholds so far out that tau x - tau theta would lose digits: as exact as the formulas are
    far = TG((1.5, 2.0, 1.5), (98.0, 100.1, 102.0), (0.2, -0.3, 1.2, 1.0), (0.1, 0.5, -0.4, 0.3))
    assert not weights._are_small(far)
    x = torch.linspace(90, 110, 1201, device=device)
    have, plain, want = kernels.blend(x, far), far(x), far(x.double())
    assert (have - want).abs().max() <= 1.5 * (plain - want).abs().max()
    # gates so steep that in the middle, where y is flat, a difference of means would be 1e-4
    for tau in (150.0, (150.0, 149.0)):
        steep = TG(tau, (-0.1, 0.1), (0.0, 0.0, 1.0), (0.0, 1.7, 0.0))
        assert not weights._are_small(steep)
        x = torch.linspace(-0.02, 0.02, 101, device=device, requires_grad=True)
        z = x.detach().double().requires_grad_()
        slope = torch.autograd.grad(kernels.blend(x, steep).sum(), x)[0]
        true = torch.autograd.grad(steep(z).sum(), z)[0]
        torch.testing.assert_close(slope.double(), true, rtol=1e-4, atol=1e-8)


def gated_unit(x, t, up):
    return t(x) * up


def check_learned(device="cpu"):
    """A learned activation as a whole: its parameters go to the kernel as they are."""
    every = ("tau", "theta", "s", "c")
    cases = (("silu", every[:2]), ("silu", every), ("tanh", every[:2]), ("mish", every[:2]))
    cases += (("gelu", every), ("gelu_k4", every), ("sigmoid", ("theta", "c")))
    cases += (("gelu", every[:2]), ("relu", ("theta", "s")), ("leaky_relu", every[1:]))
    cases += (("hardtanh", ("theta",)), ("hardtanh", ("s", "c")), ("relu6", every[1:3]))
    image = torch.randn(2, 6, 3, 4, device=device)
    last = image.to(memory_format=torch.channels_last)
    for key, train in cases:
        for options, x in (
            ({}, torch.randn(3, 5, device=device)),
            ({"share": "channel", "channels": 6}, image),
            ({"share": "channel", "channels": 6}, last),
            ({"share": "neuron", "channels": (6, 3, 4)}, image),
        ):
            act = Activation(key, train=train, **options).to(device)
            with torch.no_grad():
                for p in act.parameters():
                    p.add_(torch.randn_like(p), alpha=0.2)
            agree(act, x, f"{key} {train} {options}")
    tokens, positions = {"share": "channel", "axis": -1}, {"share": "neuron", "axis": -1}
    many = gpu.MANY_GROUPS + 3
    for key, train, options, shape in (  # sums of several parts, and of one large one
        ("silu", every, {}, (41, 1003)),
        ("relu", ("theta", "s"), {}, (41, 1003)),
        ("silu", ("tau", "c"), {**tokens, "channels": 63}, (1003, 63)),
        ("gelu", ("theta",), {**tokens, "channels": 300}, (301, 300)),
        ("silu", every, {**positions, "channels": (many,)}, (2, many)),
    ):
        act = Activation(key, train=train, **options).to(device)
        agree(act, torch.randn(shape, device=device), f"{key} {train} {options}")
    far = Activation("silu", train=("tau",)).to(device)
    with torch.no_grad():
        far.rho.fill_(8.0)  # beyond the bound nothing moves
    far(image).sum().backward()
    assert far.rho.grad.item() == 0.0
    x = torch.randn(4, 6, device=device, requires_grad=True)
    act = Activation("mish", share="channel", channels=6, train=every[:2]).to(device)
    (slope,) = torch.autograd.grad(act(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x)
    with kernels.use("reference"):
        (slope,) = torch.autograd.grad(act(x).sum(), x, create_graph=True)
        torch.testing.assert_close(curve, torch.autograd.grad(slope.square().sum(), x)[0])


class Doubled(torch.nn.Module):
    def forward(self, w):
        return 2 * w


def check_given(device="cpu"):
    """Parameters that are computed, changed too early, or used in a forward that is repeated."""
    every = ("tau", "theta", "s", "c")
    made = Activation("silu", share="channel", channels=6, train=every).to(device)
    x = torch.randn(3, 6, device=device, requires_grad=True)
    leaves = {n: torch.randn_like(p).mul(0.3).requires_grad_() for n, p in made.named_parameters()}

    def of_others(z):
        computed = {n: 1.5 * w for n, w in leaves.items()}
        return torch.func.functional_call(made, computed, (z,))

    def repeated(z):
        return torch.utils.checkpoint.checkpoint(made, z, use_reentrant=False)

    same(of_others, [x, *leaves.values()])
    same(repeated, [x, *made.parameters()])
    y = made(x)
    with torch.no_grad():
        made.dtheta.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    for name in ("rho", "s"):
        torch.nn.utils.parametrize.register_parametrization(made, name, Doubled())
    same(made, [x, *made.parameters()])


def same(f, inputs):
    """f has the gradients of the reference, and theirs."""
    found = []
    for name in (kernels.backend(), "reference"):
        with kernels.use(name):
            y = f(inputs[0])
            slopes = torch.autograd.grad(y.square().sum(), inputs)
            first = torch.autograd.grad(f(inputs[0]).square().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(sum(d.square().sum() for d in first), inputs)
        found.append((y, *slopes, *first, *second))
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def agree(act, x, what):
    dy, found = torch.randn(x.shape, device=x.device), []
    exact = copy.deepcopy(act).double()
    for own, z in ((act, x), (exact, x.double())):
        z = z.detach().clone().requires_grad_()
        with kernels.use("reference") if own is exact else contextlib.nullcontext():
            y = own(z)
            y.backward(dy.to(z.dtype))
        found.append({"y": y, "dx": z.grad, **{n: p.grad for n, p in own.named_parameters()}})
    for name, want in found[1].items():
        have, want = found[0][name].detach().double(), want.detach()
        error = float((have - want).abs().max() / want.abs().max().clamp_min(1e-3))
        assert error < 3e-5, f"{what} {name}: {error:.1e}"  # sums of a hundred float32 terms


@pytest.mark.parametrize("part", range(4))
def test_the_triton_kernels_equal_the_reference_step_by_step(part, step_by_step):
    step_by_step("interpret_pairs.py", part)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATES)
def test_the_triton_kernels_equal_the_reference(name):
    # Each shape and each dtype, not each pair of them: a kernel is compiled for every one.
    for shape in (*SHAPES, (4096, 1031), (8, 64, 56, 56)):
        check(PAIRS[name], shape, torch.float32, "cuda")
    for dtype in (torch.bfloat16, torch.float16):
        check(PAIRS[name], (8, 64, 56, 56), dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PAIRS if name not in GATES])
def test_what_modules_and_layers_launch_equals_the_reference(name):
    assert checking.check("cuda", [PAIRS[name]]) == []


@pytest.mark.gpu
def test_the_triton_kernels_at_the_edges():
    check_special("cuda")
    check_learned("cuda")
    check_given("cuda")


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    pair = PAIRS["gelu channel"]
    inputs = pair.inputs((8192, 1031), torch.bfloat16, "cuda")
    y, of = pair.kernel(inputs), [*inputs.values()]
    first = torch.autograd.grad(y, of, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, of, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_a_compiled_call_holds_the_kernels():
    pair = PAIRS["silu channel"]
    inputs = pair.inputs((512, 64), torch.bfloat16, "cuda")
    f, of = torch.compile(pair.kernel, fullgraph=True), [*inputs.values()]
    for have, want in zip(
        torch.autograd.grad(f(inputs).sum(), of),
        torch.autograd.grad(pair.kernel(inputs).sum(), of),
        strict=True,
    ):
        torch.testing.assert_close(have, want)


def test_triton_is_refused_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(kernels.BackendError) as caught:
        kernels.use("triton")
    assert str(caught.value) == (
        "the backend 'triton' needs a GPU, and torch sees none; use 'auto', or set "
        "TRITON_INTERPRET=1 to step through the kernels on the CPU."
    )
    monkeypatch.setattr(runtime, "is_installed", lambda: False)
    with pytest.raises(kernels.BackendError, match="not installed"):
        kernels.use("triton")
    assert kernels.backend() == "auto"
