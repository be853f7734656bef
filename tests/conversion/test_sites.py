"""What counts as a nonlinearity, and recognising it by what it computes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from threshold_gating.conversion import sites


def test_every_spelling_of_torch_is_known():
    wanted = [
        *(F.relu, torch.relu, Tensor.relu, F.relu_, torch.relu_, Tensor.relu_),
        *(torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_, torch.special.expit, F.sigmoid),
        *(torch.tanh, Tensor.tanh, Tensor.tanh_, F.tanh, F.silu, F.gelu, F.mish, F.glu),
        *(F.hardtanh, F.hardtanh_, F.relu6, F.leaky_relu, F.leaky_relu_, F.prelu, torch.prelu),
        *(torch.softmax, Tensor.softmax, F.softmax, F.scaled_dot_product_attention),
        *(torch.clamp, Tensor.clamp, Tensor.clamp_, Tensor.clip, torch.clamp_min, Tensor.clamp_max),
        *(F.softplus, F.logsigmoid, F.elu, F.selu, F.celu, F.hardswish, F.hardsigmoid),
        *(F.multi_head_attention_forward, F.threshold, F.hardshrink, F.softshrink, F.tanhshrink),
    ]
    assert all(f in sites.FUNCTIONS for f in wanted)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.clamp(x, -0.5, 0.5, out=out),
        lambda x, out: torch.clamp_min(x, 0.1, out=out),
        lambda x, out: torch.clamp_max(x, 0.1, out=out),
        lambda x, out: F.gelu(x, out=out),
    ],
)
def test_a_call_that_writes_where_it_is_told_is_read(call):
    class Writes(nn.Module):
        def forward(self, x):
            out = torch.empty_like(x)
            call(x, out)
            return out

    x = torch.randn(5, 6)
    gated = tg.convert(Writes(), inputs=x)
    with tg.kernels.use("reference"):
        torch.testing.assert_close(gated(x), Writes()(x), rtol=0, atol=1e-4)  # GELU's instance


CALLS = [
    (F.leaky_relu, (0.2,), {}),
    (F.leaky_relu, (), {"negative_slope": 0.3}),
    (F.hardtanh, (-2.0, 0.5), {}),
    (F.hardtanh, (), {"max_val": 3.0}),
    (F.threshold, (0.1, 5.0), {}),
    (F.softplus, (2.0,), {}),
    (F.elu, (), {}),
    (F.celu, (2.0,), {}),
    (F.gelu, (), {"approximate": "tanh"}),
    (F.gelu, (), {}),
    (torch.clamp, (), {"min": 0}),
    (torch.clamp, (-1.0, 2.0), {}),
    (torch.clamp, (-1.0, True), {}),
    (Tensor.clamp_max, (0.5,), {}),
    (F.rrelu, (), {}),
    (F.softshrink, (0.2,), {}),
    (torch.erf, (), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS, ids=range(len(CALLS)))
def test_the_instance_of_a_call_is_the_function_called(function, args, kwargs):
    x = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    kind = sites.read(function, (x, *args), kwargs)
    call = sites.KINDS[kind].read(x, *args, **kwargs)
    found = sites.of_call(kind, call.parameters)
    want = function(x, *args, **kwargs)
    assert (found.t(x) - want).abs().max() <= found.sup * 1.01 + 1e-14
    torch.testing.assert_close(sites.function(kind, call.parameters)(x), want)


def test_clamp_keeps_torchs_gradient_at_its_bounds():
    bounds = torch.tensor([-1.0, 0.0, 2.0])
    inf = float("inf")
    for low, high in (
        *((-1.0, 2.0), (-1.0, None), (None, 2.0), (-1.0, inf), (-inf, inf)),
        *((2.0, -1.0), (0.0, 0.0), (inf, 2.0)),
    ):
        x, z = bounds.clone().requires_grad_(), bounds.clone().requires_grad_()
        sites.of_call("clamp", (low, high)).t(x).sum().backward()
        torch.clamp(z, low, high).sum().backward()
        assert torch.equal(x.grad, z.grad)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        *((F.hardtanh, (1.0, 1.0)), (F.hardtanh, (-math.inf, 1.0)), (F.hardtanh, (-1.0, math.inf))),
        *((F.hardshrink, (-0.5,)), (F.hardshrink, (0.0,)), (F.softshrink, (0.0,))),
        *((torch.clamp, (2.0, 1.0)), (torch.clamp, (1.0, 1.0)), (F.leaky_relu, (-2.0,))),
    ],
)
def test_parameters_that_leave_no_room_give_torchs_values_and_gradients(function, parameters):
    points = [-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0]
    found = []
    for f in (function, lambda x, *p: sites.of_call(function.__name__, p).t(x)):
        x = torch.tensor(points, requires_grad=True)
        y = f(x, *parameters)
        found.append((y.detach(), torch.autograd.grad((y * 3).sum(), x)[0]))
    (y, slope), (z, gate_slope) = found
    assert torch.equal(y, z)
    assert torch.equal(slope, gate_slope)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        *(("clamp", (math.nan, None)), ("clamp", (math.inf, None)), ("softplus", (0.0, 20.0))),
        *(("threshold", (0.0, math.inf)), ("hardshrink", (math.nan,)), ("celu", (math.inf,))),
    ],
)
def test_parameters_that_no_gate_has_are_refused_with_a_way_out(kind, parameters):
    with pytest.raises(ValueError, match=rf"no gate is {kind} .*None}} leaves the call to torch"):
        sites.of_call(kind, parameters)


@pytest.mark.parametrize("threshold", [1.0, -1.0, 5.0])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_a_softplus_that_jumps_stays_as_it_is_and_is_told_of(beta, threshold):
    """torch goes over to x at the threshold, however much softplus differs from x there."""
    at = torch.tensor([threshold / beta], dtype=torch.float64)
    jump = float(F.softplus(at, beta, 100.0) - at)

    class Calls(nn.Module):
        def forward(self, x):
            return F.softplus(x, beta, threshold) + torch.relu(x)

    x = torch.linspace(-6, 6, 97)
    said = rf"jumps by {jump:.2g} at x = {threshold / beta:g}\)"
    for net in (Calls(), nn.Sequential(nn.Softplus(beta, threshold), nn.ReLU())):
        with pytest.warns(UserWarning, match=rf"softplus#0 stays as it is: .*{said}"):
            gated = tg.convert(net, inputs=x)
        assert torch.equal(gated(x), net(x))
    with pytest.raises(tg.conversion.ConversionError, match=rf"'relu' and has .*{said}; give None"):
        tg.convert(Calls(), {":softplus#0": "relu"}, inputs=x)
    left = tg.convert(Calls(), {":softplus#0": None}, inputs=x)
    assert torch.equal(left(x), Calls()(x))
    assert sites.of_call("softplus", (beta, 20.0)).t == tg.taxonomy.softplus(beta)


def test_calls_on_integers_are_no_nonlinearity():
    assert sites.read(torch.clamp, (torch.arange(3), 0, 2), {}) is None
    assert sites.read(torch.add, (torch.ones(3), 1), {}) is None
    assert sites.read(F.relu, (torch.ones(3),), {}) == "relu"


def test_a_clamp_by_tensors_is_a_gate_whose_thresholds_are_data():
    x = torch.cat(
        [torch.randn(4, 5, 60), torch.tensor([math.nan, math.inf, -math.inf]).expand(4, 5, 3)], -1
    )
    low, high = torch.randn(5, 1) - 1, torch.randn(4, 1, 1) + 2
    for function, args, kwargs in [
        (torch.clamp, (x, low, high), {}),
        (torch.Tensor.clamp, (x,), {"min": low}),
        (torch.clamp, (x, torch.tensor(-0.5), torch.tensor(math.inf)), {}),
        (torch.clamp_max, (x, high), {}),
        (torch.clamp_min, (x, low), {}),
    ]:
        kind = sites.read(function, args, kwargs)
        assert kind.endswith("_by_tensors")
        assert torch.equal(
            sites.WHOLE[kind](*args, **kwargs).nan_to_num(9),
            function(*args, **kwargs).nan_to_num(9),
        )


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (1.0, 1.0), (-1.0, 1.0)])
def test_crossed_and_equal_bounds_have_torchs_values_and_gradients(low, high):
    found = []
    for function in (torch.clamp, sites.WHOLE["clamp_by_tensors"]):
        x = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0], requires_grad=True)
        bounds = [torch.full((7,), b, requires_grad=True) for b in (low, high)]
        y = function(x, *bounds)
        found.append([y.detach(), *torch.autograd.grad((y * 3).sum(), (x, *bounds))])
    assert all(torch.equal(want, have) for want, have in zip(*found, strict=True))


def test_bounds_that_are_no_number_give_none():
    x, nan, one = torch.linspace(-3, 3, 7), torch.tensor([math.nan]), torch.tensor([1.0])
    for bounds in ((nan, one), (one, nan), (nan, None), (None, nan)):
        assert torch.clamp(x, *bounds).isnan().all()
        assert sites.WHOLE["clamp_by_tensors"](x, *bounds).isnan().all()
    mixed = torch.tensor([math.nan] * 3 + [1.0] * 4)
    want, have = (f(x, mixed) for f in (torch.clamp, sites.WHOLE["clamp_by_tensors"]))
    torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("axes", [(1, 1), (1, 0), (0, 1), (0, 0)])
@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("second", [*TYPES, torch.int64])
def test_tensors_of_two_types_are_promoted_as_torch_does_it(first, second, axes):
    generator = torch.Generator().manual_seed(0)
    x, b = (
        (torch.randn((64,) * k, generator=generator, dtype=torch.float64) * 3).to(t)
        for k, t in zip(axes, (first, second), strict=True)
    )
    calls = [(torch.clamp, (x, b)), (torch.clamp, (x, b, b.double())), (torch.clamp, (x, None, b))]
    if second.is_floating_point:
        calls += [(torch.maximum, (x, b)), (torch.minimum, (x, b))]
    for function, args in calls:
        want = function(*args)
        have = sites.WHOLE[sites.read(function, args, {})](*args)
        assert have.dtype == want.dtype
        assert torch.equal(have, want)


def test_the_larger_of_two_tensors_is_a_gate_and_a_reduction_is_none():
    a = torch.cat([torch.randn(3, 60), torch.tensor([math.nan, math.inf, 1.0]).expand(3, 3)], -1)
    b = torch.randn(3, 1)
    for function, args in [
        (torch.maximum, (a, b)),
        (torch.max, (a, b)),
        (torch.Tensor.min, (a, b)),
        (torch.minimum, (b, a)),
    ]:
        kind = sites.read(function, args, {})
        assert kind in ("maximum", "minimum")
        assert torch.equal(sites.WHOLE[kind](*args).nan_to_num(9), function(*args).nan_to_num(9))
        # of two equal ones each has half of the gradient
        for gated in (function, sites.WHOLE[kind]):
            x = torch.zeros(3, requires_grad=True)
            gated(x, torch.zeros(3)).sum().backward()
            assert x.grad.tolist() == [0.5] * 3
    assert sites.read(torch.max, (a,), {}) is None
    assert sites.read(torch.max, (a, 1), {}) is None
    assert sites.read(torch.Tensor.min, (a,), {"dim": 1}) is None


def test_slopes_that_are_drawn_in_training_are_no_site():
    x = torch.randn(4)
    assert sites.read(F.rrelu, (x, 0.1, 0.3), {}) == "rrelu"
    assert sites.read(F.rrelu, (x, 0.1, 0.3, True), {}) is None
    assert sites.read(torch.rrelu_, (x,), {"training": True}) is None


def test_in_place_is_read_from_name_position_and_keyword():
    x = torch.ones(3)
    read = sites.KINDS["leaky_relu"].read
    assert [read(x, 0.1, True).inplace, read(x, inplace=True).inplace, read(x).inplace] == [
        True,
        True,
        False,
    ]
    assert sites.FUNCTIONS[Tensor.relu_] == ("relu", True)


def test_the_type_of_a_softmax_is_read_by_position_and_by_name():
    x, wide = torch.randn(3, 4), torch.float64
    want = torch.softmax(x, -1, wide)
    for rest, named in (((wide,), {}), ((3, wide), {}), ((), {"dtype": wide})):
        have = sites.WHOLE["softmax"](x, -1, *rest, **named)
        torch.testing.assert_close(have, want)
