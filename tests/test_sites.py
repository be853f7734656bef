"""What counts as a nonlinearity, and recognising it by what it computes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import sites, taxonomy
from threshold_gating.taxonomy import TAXONOMY


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class ErfGELU(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


# (module, key of the row, exact); the four GELUs are four functions.
KNOWN = [
    (nn.ReLU(), "relu", True),
    (nn.ReLU(inplace=True), "relu", True),
    (nn.SiLU(), "silu", True),
    (nn.GELU(), "gelu", False),
    (nn.GELU("tanh"), "gelu_tanh", False),
    (QuickGELU(), "quick_gelu", True),
    (NewGELU(), "gelu_tanh", False),
    (ErfGELU(), "gelu", False),
    (nn.Mish(), "mish", True),
    (nn.Sigmoid(), "sigmoid", True),
    (nn.Tanh(), "tanh", True),
    (nn.Hardswish(), "hardswish", True),
    (nn.Hardsigmoid(), "hardsigmoid", True),
    (nn.ReLU6(), "relu6", True),
    (nn.Tanhshrink(), "tanhshrink", True),
    (nn.ELU(), "elu", False),
    (nn.SELU(), "selu", False),
    (nn.Softplus(), "softplus", False),
    (nn.LogSigmoid(), "logsigmoid", False),
]


@pytest.mark.parametrize(
    ("module", "key", "exact"), KNOWN, ids=[f"{k}-{i}" for i, (_, k, _) in enumerate(KNOWN)]
)
def test_activations_are_recognised_by_what_they_compute(module, key, exact):
    found = sites.recognise(module)
    assert (found.t, found.exact) == (TAXONOMY[key], exact)
    assert found.sup == (0.0 if exact else taxonomy.ROWS[key].sup)


@pytest.mark.parametrize(
    ("f", "t"),
    [
        (nn.LeakyReLU(0.2), taxonomy.leaky_relu(0.2)),
        (nn.Hardtanh(-2, 3), taxonomy.hardtanh(-2, 3)),
        (nn.Threshold(0.3, 2), taxonomy.threshold(0.3, 2)),
        (nn.Hardshrink(0.1), taxonomy.hardshrink(0.1)),
        (nn.Softshrink(0.3), taxonomy.softshrink(0.3)),
        (lambda x: torch.maximum(x, 0.3 * x), taxonomy.leaky_relu(0.3)),
        (lambda x: torch.sign(x) * F.relu(x.abs() - 0.7), taxonomy.softshrink(0.7)),
    ],
)
def test_parameters_are_read_off_the_call_or_the_values(f, t):
    found = sites.recognise(f)
    assert found.exact
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    torch.testing.assert_close(found.t(x), t(x), rtol=1e-12, atol=1e-12)


def test_swish_of_any_sharpness_is_exact():
    found = sites.recognise(lambda x: x * torch.sigmoid(1.3 * x))
    assert found.exact
    assert found.t.tau == pytest.approx(1.3, rel=1e-14)


def test_what_no_row_is_gets_a_fit_with_its_error():
    pytest.importorskip("scipy")

    def f(x):
        return x * torch.sigmoid(x) ** 1.5

    found = sites.recognise(f)
    assert not found.exact
    x = torch.linspace(-40, 40, 80_001, dtype=torch.float64)
    assert (found.t(x) - f(x)).abs().max() <= found.sup * 1.01
    assert found.sup < 1e-2


@pytest.mark.parametrize(
    ("f", "elementwise", "bent"),
    [
        (nn.ReLU(), True, True),
        (nn.Identity(), True, False),
        (lambda x: 0.5 * x + 1, True, False),
        (nn.Dropout().eval(), True, False),
        (nn.Softmax(-1), False, False),
        (lambda x: x - x.mean(), False, False),
        (lambda x: x.cumsum(0), False, False),
        (nn.Flatten(), False, False),
        (nn.MaxPool2d(2), False, False),
        (lambda x: None, False, False),
    ],
)
def test_only_bent_element_wise_functions_are_activations(f, elementwise, bent):
    assert sites.is_elementwise(f) == elementwise
    assert sites.is_bent(f) == bent


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
    for low, high in ((-1.0, 2.0), (-1.0, None), (None, 2.0), (-1.0, inf), (-inf, inf)):
        x, z = bounds.clone().requires_grad_(), bounds.clone().requires_grad_()
        sites.of_call("clamp", (low, high)).t(x).sum().backward()
        torch.clamp(z, low, high).sum().backward()
        assert torch.equal(x.grad, z.grad)


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
    assert sites.read(torch.max, (a,), {}) is None
    assert sites.read(torch.max, (a, 1), {}) is None
    assert sites.read(torch.Tensor.min, (a,), {"dim": 1}) is None


def test_random_slopes_are_refused():
    with pytest.raises(ValueError, match="draws its slopes at random"):
        sites.of_call("rrelu", (0.1, 0.3, 1.0))


def test_in_place_is_read_from_name_position_and_keyword():
    x = torch.ones(3)
    read = sites.KINDS["leaky_relu"].read
    assert [read(x, 0.1, True).inplace, read(x, inplace=True).inplace, read(x).inplace] == [
        True,
        True,
        False,
    ]
    assert sites.FUNCTIONS[Tensor.relu_] == ("relu", True)
