"""Tier W by Triton: interpreted on a CPU in a process of its own, compiled where marked gpu."""

import copy

import pytest
import torch

import threshold_gating as tg
from tests.kernels.layers import moved, results
from threshold_gating.kernels.product import function, two_soft
from threshold_gating.kernels.product.formula import Formula
from threshold_gating.kernels.structure import Tensors

# Over the largest true value, and for a gate's gradient over the terms it is a sum of: these are
# differences of products that 16 bits have rounded, so their errors are as large as the terms,
# however far these cancel (1e-1 of a sum was seen in bf16). float32: a thousand terms in
# another order; 16 bits: the halves, the first product and the result are rounded, each by
# half a unit in the last place.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
SHAPES = [(1, 17), (63, 5), (300, 17), (3, 7, 33), (0, 4)]


def sizes_of_terms(layer, x, dy):
    """For each gradient of the gate the largest sum of |terms|: one for each element that it gates."""
    tau, theta, s, c = layer.gate.values()
    shape = (-1, *(1,) * (x.dim() - 2)) if x.dim() == 4 else (-1,)
    tau, theta = tau.view(shape), [theta[0].view(shape)]
    own = [w.detach().expand_as(x).clone().requires_grad_() for w in (tau, theta[0])]
    conv = layer._conv() if x.dim() == 4 else None
    with tg.kernels.use("reference"):
        y = tg.kernels.gated_product(x, own[0], [own[1]], s, c, layer.weight, conv=conv)
    dtau, dtheta = torch.autograd.grad(y, own, dy)
    rest = [d for d in range(x.dim()) if d != (1 if x.dim() == 4 else x.dim() - 1)]
    every = range(x.dim()) if layer.share == "layer" else rest
    terms = {"gate.rho": dtau * own[0].detach(), "gate.dtheta": dtheta}
    return {name: float(t.abs().sum(tuple(every)).max()) for name, t in terms.items()}


def check(layer, x):
    """The kernels against the same layer in float64."""
    with torch.no_grad():
        dy = torch.randn(layer(x).shape, device=x.device).to(x.dtype)
    have = results(layer, x, dy, "triton")
    exact = copy.deepcopy(layer).double()
    want = results(exact, x.double(), dy.double(), "reference")
    terms = sizes_of_terms(exact, x.double(), dy.double()) if x.numel() else {}
    for name, true in want.items():
        assert have[name].shape == true.shape, name
        if true.numel():
            size = max(float(true.abs().max()), terms.get(name, 0.0), 1e-30)
            error = float((have[name].double() - true).abs().max()) / size
            assert error < TOLERANCE[x.dtype], f"{name} {tuple(x.shape)} {x.dtype}: {error:.1e}"


def check_all(device, dtypes):
    torch.manual_seed(0)
    for dtype in dtypes:
        for share in ("channel", "layer"):
            for shape in SHAPES:
                layer = moved(tg.Linear(shape[-1], 5, share=share, bias=shape[0] != 63))
                check(layer.to(device, dtype), torch.randn(shape, device=device).to(dtype))
            image = torch.randn(2, 6, 5, 4, device=device).to(dtype)
            conv = moved(tg.Conv2d(6, 5, 3, padding=1, stride=2, share=share)).to(device, dtype)
            check(conv, image.to(memory_format=torch.channels_last))


def check_values():
    """Without derivatives, with views to overwrite, with numbers of other types, twice derived."""
    layer, x = moved(tg.Linear(8, 4, share="channel")), torch.randn(3, 2, 8)
    with tg.kernels.use("triton"):
        y = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
            torch.testing.assert_close(layer(x[0, 0]), y[0, 0])  # one row is another product
        y.mul_(2)  # a user may
        layer.gate.rho.data[0] = 9.0  # beyond the bound of tau: no gradient
        layer.zero_grad()
        layer(x).sum().backward()
        assert layer.gate.rho.grad[0] == 0
        assert layer.gate.rho.grad[1:].all()
    grads = []
    for backend in ("triton", "reference"):
        with tg.kernels.use(backend):
            z = x.clone().requires_grad_()
            (dx,) = torch.autograd.grad(layer(z).square().sum(), z, create_graph=True)
            given = [z, *layer.parameters()]
            grads.append(torch.autograd.grad(dx.square().sum(), given, allow_unused=True))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)  # the same formulas but for x's own
    gate = [torch.rand(8).double().requires_grad_() for _ in range(2)]  # as a function, in float64
    for backend in ("triton", "reference"):
        with tg.kernels.use(backend):
            given = (gate[0], [gate[1]], [1.0, 1.0], [0.0, 0.0], layer.weight, layer.bias)
            y = tg.kernels.gated_product(x, *given)
            grads.append([y, *torch.autograd.grad(y.sum(), gate)])
    for ours, theirs in zip(*grads[2:], strict=True):
        # gates in float64, but x and the kernels are in float32
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_the_kernels_equal_float64_step_by_step(step_by_step):
    step_by_step("interpret_two_soft.py")


def test_memory_that_is_no_matrix_and_gates_that_do_not_fit_are_left_to_the_formulas():
    soft = tg.Linear(6, 3).gate._structure
    formula = Formula(soft, (), None)
    one, three = (Tensors(tau0=torch.ones(n), theta0=torch.zeros(n)) for n in (1, 3))
    assert two_soft.takes(formula, torch.randn(4, 6), one)
    assert not two_soft.takes(formula, torch.randn(4, 6), three)
    assert not two_soft.takes(formula, torch.randn(6, 4).t(), one)
    image = Formula(soft, (3, 1, 1), tg.kernels.Conv((1, 1), (0, 0), (1, 1), 1))
    x = torch.randn(2, 3, 4, 4)
    assert not two_soft.takes(image, x, three)
    assert two_soft.takes(image, x.to(memory_format=torch.channels_last), three)


def test_a_gradient_for_a_start_beside_what_moves_it_is_left_to_the_formulas():
    held = Tensors(torch.zeros(6), torch.zeros(1, 6), tau0=torch.ones(6), theta0=torch.zeros(1, 6))
    formula, x = Formula(tg.Linear(6, 3).gate._structure, (6,), None), torch.randn(4, 6)
    assert two_soft.takes(formula, x, held)
    assert not two_soft.takes(formula, x, held._replace(tau0=torch.ones(6, requires_grad=True)))


def test_a_layer_on_another_device_is_left_to_the_formulas_which_say_so():
    layer, x = tg.Linear(4, 3).to("meta"), torch.randn(2, 4)
    formula = Formula(layer.gate._structure, (4,), None)
    held = layer.gate.tensors()
    assert function._launched(formula, x, layer.weight, layer.bias, held) is None
    with pytest.raises(RuntimeError, match="device"):
        layer(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernels_equal_float64(dtype):
    check_all("cuda", [dtype])
    torch.manual_seed(0)
    layer = moved(tg.Linear(515, 130)).to("cuda", dtype)
    check(layer, torch.randn(1003, 515, device="cuda").to(dtype))


@pytest.mark.gpu
def test_gradients_have_gradients_and_autocast_works():
    torch.manual_seed(0)
    layer = moved(tg.Linear(8, 4)).cuda()
    x = torch.randn(300, 8, device="cuda", requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert x.grad.isfinite().all()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.gate.rho.grad.isfinite().all()
