"""Outputs are compared tensor by tensor, each within a bound of its own."""

import dataclasses
import functools
import itertools
import json
import math
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating.conversion import ConversionError, convert
from threshold_gating.conversion.outputs import Output, agree, compare, described, leaves
from threshold_gating.conversion.verification import verify

X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)) * 2


class Calls(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f, self.linear = f, nn.Linear(6, 6)

    def forward(self, x):
        return self.f(self, x)


def bump(x):
    """Small beside the values of GELU, so that its error is large beside it."""
    return F.gelu(x) - x.relu()


THREE = {":gelu#0": 3}  # sup 4e-3 of values to 0.17, an error of 2.5 %


def test_an_approximation_that_moves_the_output_too_far_is_refused():
    with pytest.raises(ConversionError) as caught:
        convert(Calls(lambda m, x: bump(x)), THREE, inputs=X)
    message = str(caught.value)
    assert caught.value.site == "output"
    assert message.startswith("the output is off by 0.02")
    assert "; 0.01 is allowed (the original's own rounding is " in message
    assert "The sites with the largest errors are :gelu#0 (gelu, K = 3: 0.00" in message
    assert "`tg.calibrate` fits them to your data, sites={':gelu#0': K} takes more" in message
    assert "tol= sets a bound of your own" in message
    assert convert(Calls(lambda m, x: bump(x)), inputs=X)  # five branches are enough


def test_the_worst_sites_come_first():
    model = Calls(lambda m, x: F.gelu(x) * 1e-3 + bump(m.linear(x)))
    converted = convert(model, {"re:.*gelu.*": 3, ":gelu#1": 2}, inputs=X, tol=math.inf)
    message = verify(model, converted, X).failed["output"]
    assert message.index(":gelu#1 (gelu, K = 2") < message.index(":gelu#0 (gelu, K = 3")


def test_tol_is_the_bound_to_the_digit():
    model = Calls(lambda m, x: bump(x))
    converted = convert(model, THREE, inputs=X, tol=math.inf)
    off = verify(model, converted, X, tol=math.inf).output.relative
    assert 0.01 < off < 0.1
    assert verify(model, converted, X, tol=off).ok
    certificate = verify(model, converted, X, tol=off * 0.999)
    assert set(certificate.failed) == {"output"}
    assert "is what tol allows" in certificate.failed["output"]
    assert convert(model, THREE, inputs=X, tol=off)
    with pytest.raises(ConversionError, match="what tol allows"):
        convert(model, THREE, inputs=X, tol=off * 0.999)


def test_tol_may_ask_for_more_than_the_default():
    model = Calls(lambda m, x: bump(x))
    with pytest.raises(ConversionError, match="1e-05 is what tol allows"):
        convert(model, inputs=X, tol=1e-5)
    assert verify(
        nn.Sequential(nn.ReLU()), convert(nn.Sequential(nn.ReLU()), inputs=X), X, tol=0
    ).ok


def test_a_small_output_does_not_hide_beside_a_large_one():
    model = Calls(lambda m, x: {"large": x.relu() * 1e6, "small": [1, (bump(x) * 1e-3,)]})
    certificate = verify(model, convert(model, THREE, inputs=X, strict=False), X)
    assert certificate.output.name == "['small'][1][0]"
    assert certificate.failed["output"].startswith("the output ['small'][1][0] is off by 0.02")
    assert [o.name for o in certificate.outputs] == [
        *("['large']", "['small'][0]", "['small'][1][0]")
    ]
    assert "output ['small'][1][0], the worst of 3: max" in certificate.table()


@pytest.mark.parametrize(
    "choose", [lambda y: y.argsort(-1), lambda y: y > -0.1, lambda y: (y * 1e4).long()]
)
def test_choices_that_differ_are_counted_and_refused(choose):
    model = Calls(lambda m, x: choose(bump(x)))
    converted = convert(model, {":gelu#0": 2}, inputs=X, tol=math.inf)
    certificate = verify(model, converted, X)
    differ, n = int((model(X) != choose(bump_by_two(X))).sum()), model(X).numel()
    assert differ > 0
    message = certificate.failed["output"]
    assert message.startswith(
        f"the output is off by {differ} of {n} whole numbers; 0.01 is allowed"
    )
    assert f"{differ} of {n} whole numbers differ" in certificate.table()
    assert verify(model, converted, X, tol=math.inf).ok


def bump_by_two(x):
    from threshold_gating import TAXONOMY

    return TAXONOMY["gelu_k2"](x) - x.relu()


@dataclasses.dataclass
class Answer:
    loss: float
    ids: torch.Tensor


def test_numbers_arrays_and_complex_tensors_are_outputs():
    tree = {"a": Answer(0.5, torch.tensor([1])), "b": [np.float32([1, 2]), True, "no", None]}
    found = dict(leaves({**tree, "c": torch.tensor([1 + 2j]), "s": torch.eye(2).to_sparse()}))
    assert list(found) == ["['a'].loss", "['a'].ids", "['b'][0]", "['b'][1]", "['c']", "['s']"]
    assert found["['a'].loss"].item() == 0.5
    assert found["['b'][0]"].tolist() == [1, 2]
    assert found["['c']"].tolist() == [[1, 2]]
    assert torch.equal(found["['s']"], torch.eye(2))


@pytest.mark.parametrize(
    "give", [lambda y: y.mean().item(), lambda y: y.numpy(), lambda y: torch.complex(y, y)]
)
def test_an_output_that_is_no_real_tensor_is_bounded_too(give):
    model = Calls(lambda m, x: give(bump(x)))
    with pytest.raises(ConversionError, match=r"the output is off by 0\.0"):
        convert(model, THREE, inputs=X)


class Held:
    """An output of somebody's own class, which also holds itself."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, y):
        self.y, self.slot, self.around = y, y + 1, self


HOLDING = {
    "distribution": lambda y: torch.distributions.Normal(y, 1.0),
    "mixture": lambda y: torch.distributions.Independent(
        torch.distributions.TransformedDistribution(
            torch.distributions.Normal(y, 1.0), [torch.distributions.ExpTransform()]
        ),
        1,
    ),
    "namespace": lambda y: SimpleNamespace(a=[y]),
    "object": Held,
    "set": lambda y: {y, y.abs().sum() + 7},
    "deque": lambda y: deque([y]),
    "complex": lambda y: complex(0, y.mean()),
    "complex array": lambda y: torch.complex(y, y).numpy(),
    "nested": lambda y: torch.nested.nested_tensor([y[0], y[1, :2]]),
    "jagged": lambda y: torch.nested.nested_tensor([y[0], y[1, :2]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("holding", HOLDING)
def test_what_an_output_holds_is_compared_beside_a_tensor(holding):
    model = Calls(lambda m, x: (x.relu(), HOLDING[holding](bump(x))))
    with pytest.raises(ConversionError, match=r"the output \[1\].* is off by 0\.0"):
        convert(model, THREE, inputs=X)
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok, certificate.table()
    assert not certificate.uncompared


def test_a_set_is_compared_whatever_its_order():
    a, b = {torch.zeros(3), torch.ones(3), 2, "x"}, {2, "x", torch.ones(3), torch.zeros(3)}
    first, second = (dict(leaves(each)) for each in (a, b))
    assert list(first) == list(second)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_words_must_be_equal():
    model = Calls(lambda m, x: (x.relu(), {"words": "yes"}, torch.float32))
    converted = convert(model, inputs=X)
    assert verify(model, converted, X).ok
    converted.f = lambda m, x: (x.relu(), {"words": "no"}, torch.float32)
    assert verify(model, converted, X).failed == {
        "output": "the outputs [1]['words'] differ: 'yes' and, converted, 'no'."
    }


def test_what_cannot_be_compared_is_listed():
    model = Calls(lambda m, x: (x.relu(), iter([x]), SimpleNamespace(f=chaotic, g=1)))
    with pytest.warns(UserWarning, match=r"not compared at the output: \[1\] \(list_iterator\), "):
        converted = convert(model, inputs=X)
    certificate = verify(model, converted, X)
    assert certificate.ok
    assert certificate.uncompared == ("[1] (list_iterator)", "[2].f (function)")
    said = "ok; not compared at the output: [1] (list_iterator), [2].f (function)"
    assert said in " ".join(certificate.table().split())
    assert json.loads(certificate.to_json())["uncompared"] == list(certificate.uncompared)


def test_outputs_of_other_shapes_are_refused():
    model = Calls(lambda m, x: (x.relu(), x))
    converted = convert(model, inputs=X)
    converted.f = lambda m, x: (x.relu()[0], x)
    assert verify(model, converted, X).failed == {
        "output": "the outputs [0] differ in shape: (4, 5, 6) and, converted, (5, 6)."
    }


def test_outputs_of_other_types_are_refused():
    model = Calls(lambda m, x: (x.relu(), x))
    converted = convert(model, inputs=X)
    converted.f = lambda m, x: (x.relu().double(), x)
    assert verify(model, converted, X, tol=math.inf).failed == {
        "output": "the outputs [0] differ in type: torch.float32 and, converted, torch.float64."
    }


def test_infinities_where_the_original_has_none_fail_whatever_tol_is():
    model = Calls(lambda m, x: x.relu())
    converted = convert(model, inputs=X)
    for f in (lambda m, x: x.relu() / 0, lambda m, x: x.relu() * math.nan):
        converted.f = f
        failed = verify(model, converted, X, tol=math.inf).failed
        assert failed["output"] == (
            "the output is infinite or NaN at other places than the original's; "
            "give inputs on which both are finite, or sites={name: None} for what overflows."
        )


def test_an_output_with_nothing_to_compare_proves_nothing_unless_it_is_accepted():
    model = Calls(lambda m, x: {"words": str(x.relu().shape)})
    with pytest.raises(ConversionError, match=r"no tensor or number to compare; tol=math\.inf"):
        convert(model, inputs=X)
    certificate = verify(model, convert(model, inputs=X, tol=math.inf), X, tol=math.inf)
    assert certificate.ok
    assert certificate.output is None
    assert "output: nothing to compare" in certificate.table()


# The original's own rounding


def chaotic(m, x, rounds=16):
    """Each round doubles what rounding made of the last one."""
    h = F.silu(x).sigmoid()
    for _ in range(rounds):
        h = 3.9 * h * (1 - h)
    return h


def test_a_network_that_amplifies_its_own_rounding_is_not_refused():
    model = Calls(chaotic)
    certificate = verify(model, convert(model, inputs=X), X)
    output = certificate.output
    assert 1024 * 2**-23 < output.relative < 0.1
    assert certificate.ok
    assert output.rounding == pytest.approx(relative(model(X), chaotic(None, X.double())))
    assert output.bound == 2 * output.rounding
    assert "allowed, twice the original's own rounding)" in certificate.table()


class OfItsType(nn.Module):
    """Computes another function in the wider type."""

    def forward(self, x):
        h = F.gelu(x)
        return (h * 1e4).sin() if x.dtype == torch.float32 else h * 0


@pytest.mark.parametrize(
    "model", [Calls(functools.partial(chaotic, rounds=60)), OfItsType()], ids=["chaos", "type"]
)
def test_a_rounding_that_leaves_no_digit_is_no_excuse(model):
    with pytest.raises(ConversionError) as caught:
        convert(model, inputs=X)
    message = str(caught.value)
    assert "0.1 is allowed (the original's own rounding is" in message
    assert ", of which 0.1 at most is allowed for). In a wider type it gives something" in message
    assert "tol= sets a bound of your own" in message
    certificate = verify(model, convert(model, inputs=X, tol=math.inf), X)
    assert not certificate.ok
    assert certificate.output.bound == 0.1
    assert certificate.output.rounding > 0.05
    assert "(0.1 allowed, the most; the original's own rounding is" in certificate.table()
    assert verify(model, convert(model, inputs=X, tol=math.inf), X, tol=math.inf).ok


def relative(y, true):
    return ((y.double() - true).abs().max() / y.double().abs().max()).item()


def test_networks_in_16_bits_are_measured_against_float32():
    """GELU at 4 is rounded to 0.016, and what is left of it here is 0.17."""
    model, x = Calls(lambda m, x: bump(x)).bfloat16(), torch.linspace(-4, 4, 5001).bfloat16()
    certificate = verify(model, convert(model, inputs=x), x)
    assert certificate.output.relative > 0.01
    assert certificate.ok, certificate.table()
    assert certificate.output.rounding == pytest.approx(
        relative(model(x), bump(x.float()).double())
    )


@pytest.mark.parametrize("kind", ["random", "counting", "float64"])
def test_what_is_no_rounding_is_no_excuse(kind):
    """It gives another output when it is run again, or has no wider type."""
    runs = itertools.count()

    class Other(Calls):
        def forward(self, x):
            noise = {"random": torch.randn_like(x), "counting": next(runs)}.get(kind, 0.0)
            return super().forward(x) + noise * 1e3

    model = Other(lambda m, x: bump(x) * 1e4)
    x = X.double() if kind == "float64" else X
    model = model.double() if kind == "float64" else model
    converted = convert(model, {":gelu#0": 2}, inputs=x, strict=False)
    certificate = verify(model, converted, x)
    assert certificate.output.rounding is None
    assert certificate.output.bound == 0.01
    assert certificate.output.relative > 0.01
    assert not certificate.ok


def test_measuring_the_rounding_leaves_the_model_alone():
    model = Calls(chaotic)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    converted = convert(model, inputs=X)
    assert verify(model, converted, X).output.rounding is not None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.linear.weight.dtype == torch.float32
    assert model.training


@pytest.mark.parametrize(
    ("rounding", "bound", "said"),
    [
        (0.04, 0.08, "0.08 allowed, twice the original's own rounding)"),
        (0.06, 0.1, "0.1 allowed, the most; the original's own rounding is 0.06)"),
    ],
)
def test_the_table_says_how_much_of_the_originals_rounding_is_allowed_for(rounding, bound, said):
    output = Output("", 1, 0.01, 0.01, 0.01, 0.01, bound, rounding)
    assert said in described(output, [output], None)


def test_outputs_of_other_shapes_do_not_agree():
    y = torch.zeros(3)
    assert agree([y], [y], None, lambda: [y])
    for other in ([torch.zeros(2)], [y, y], [], {"a": y}):
        assert not agree([y], other, None, lambda: [y])


def test_the_error_beside_an_original_of_zeros_is_relative_to_one():
    (output,) = compare(torch.zeros(2), torch.tensor([0.3, 0.4]), True, math.inf, lambda: None)
    assert output.relative == output.max == pytest.approx(0.4)
    assert output.rel_rms == output.rms == pytest.approx(math.sqrt(0.125))
