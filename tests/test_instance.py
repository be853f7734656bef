"""The record TG: what it accepts, what it prints, what it refuses."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threshold_gating.instance import TG

INF = math.inf
numbers = st.floats(-100, 100)


@st.composite
def instances(draw):
    """Any valid record: K up to 5, soft and hard, both forms, with and without the extras."""
    K = draw(st.integers(1, 5))
    hard = draw(st.booleans())
    form = draw(st.sampled_from(["softmax", "product"]))
    theta = draw(st.lists(numbers, min_size=K - 1, max_size=K - 1, unique=True))
    if hard or form == "product":
        theta = sorted(theta)
    taus = st.floats(1e-3, 1e3)
    tau = INF if hard else draw(taus | st.lists(taus, min_size=K - 1, max_size=K - 1))
    tau = 1.0 if tau == [] else tau
    each = st.lists(numbers, min_size=K, max_size=K)
    owners = st.lists(st.sampled_from(["lo", "hi"]), min_size=K - 1, max_size=K - 1)
    return TG(
        tau,
        theta,
        draw(each),
        draw(each),
        form=form,
        owner=draw(st.none() | owners) if hard else None,
        q=draw(st.none() | each),
        clamp=draw(st.none() | st.just((-3.0, 7.0))),
    )


@settings(max_examples=200, deadline=None)
@given(t=instances())
def test_repr_and_json_give_the_same_instance_back(t):
    assert eval(repr(t)) == t
    again = TG.from_dict(json.loads(json.dumps(t.to_dict(), allow_nan=False)))
    assert again == t
    assert hash(again) == hash(t)


def test_repr_shows_only_what_is_not_the_default():
    assert repr(TG(1, 0, (0, 1), (0, 0))) == "TG(tau=1.0, theta=(0.0,), s=(0.0, 1.0), c=(0.0, 0.0))"
    relu = TG(INF, 0, (0, 1), (0, 0))
    assert repr(relu) == "TG(tau=float('inf'), theta=(0.0,), s=(0.0, 1.0), c=(0.0, 0.0))"
    outer = TG(INF, (0, 6), (0, 1, 0), (0, 0, 6), owner=("lo", "hi"))
    assert repr(outer).endswith("owner=('lo', 'hi'))")


def test_instances_that_are_the_same_function_are_equal():
    silu = TG(1, 0, (0, 1), (0, 0))
    assert silu == TG((1.0,), (0.0,), [0, 1], [0, 0], form="product", q=(0, 0))
    assert TG((2, 2), (0, 1), (0, 1, 1), (0, 0, 0)) == TG(2, (0, 1), (0, 1, 1), (0, 0, 0))
    assert TG(INF, 0, (0, 1), (0, 0)) == TG(INF, 0, (0, 1), (0, 0), owner=("lo",))
    assert silu != TG(1, 0, (1, 0), (0, 0))
    assert len({silu, TG(1.0, (0,), (0.0, 1.0), (0, 0))}) == 1


def test_an_instance_cannot_be_changed():
    with pytest.raises(AttributeError):
        TG(1, 0, (0, 1), (0, 0)).tau = 2.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_at_infinity_the_value_is_the_limit_and_nan_stays_nan(dtype):
    x = torch.tensor([INF, -INF, math.nan], dtype=dtype)
    silu, tanh = TG(1, 0, (0, 1), (0, 0)), TG(2, 0, (0, 0), (-1, 1))
    mish = TG(1, (0, math.log(2)), (0, 1, 1), (0, 0, 0))
    square = TG(1, 0, (0, -1), (0, 0), q=(1, 0))
    capped = TG(1, 0, (0, 1), (0, 0), clamp=(-1, 5))
    for t, limits in [
        (silu, [INF, 0.0]),
        (mish, [INF, 0.0]),
        (tanh, [1.0, -1.0]),
        (square, [-INF, INF]),
        (capped, [5.0, 0.0]),
    ]:
        y = t(x)
        assert y[:2].tolist() == limits
        assert y[2].isnan()


def test_gradients_at_infinity_are_the_slopes_of_the_outer_branches():
    x = torch.tensor([INF, -INF], requires_grad=True)
    (grad,) = torch.autograd.grad(TG(1, 0, (0.25, 1), (0, 0))(x).sum(), x)
    assert grad.tolist() == [1.0, 0.25]


@settings(max_examples=100, deadline=None)
@given(
    tau=st.floats(0.1, 10),
    low=st.floats(-5, 5),
    gap=st.floats(0, 5),
    s=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    c=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
)
def test_the_product_form_is_a_softmax_form_in_closed_form(tau, low, gap, s, c):
    product = TG(tau, (low, low + gap), s, c, form="product")
    softmax = product.as_form("softmax")
    x = torch.linspace(-15, 15, 301, dtype=torch.float64)
    # slopes and constants up to 2, |x| up to 15: values up to 32, 1e-13 is 30 of their ulp
    torch.testing.assert_close(softmax(x), product(x), rtol=0, atol=1e-13 * 32)
    back = softmax.as_form("product")
    torch.testing.assert_close(
        back(x), product(x), rtol=0, atol=1e-10
    )  # at r = 1/2 it is sqrt-like


def test_mish_has_no_product_form():
    mish = TG(1, (0, math.log(2)), (0, 1, 1), (0, 0, 0))
    with pytest.raises(ValueError, match="product gates cannot overlap this much") as caught:
        mish.as_form("product")
    assert str(caught.value) == (
        "TG.as_form: product gates cannot overlap this much, they need thresholds ln(8)/tau = "
        "2.07944 apart; these are 0.693147 apart. Keep form='softmax'."
    )


def test_forms_coincide_for_two_branches_and_for_hard_gates():
    silu = TG(1, 0, (0, 1), (0, 0))
    assert silu.as_form("product") is silu
    hard = TG(INF, (0, 1), (0, 1, 0), (0, 0, 1))
    assert hard.as_form("product") is hard


MESSAGES = [
    (ValueError, lambda: TG(0, 0, (0, 1), (0, 0)), "TG: tau must be positive (inf for a hard gate); got 0."),
    (ValueError, lambda: TG(-1.5, 0, (0, 1), (0, 0)), "TG: tau must be positive (inf for a hard gate); got -1.5."),
    (ValueError, lambda: TG(math.nan, 0, (0, 1), (0, 0)), "TG: tau must be positive (inf for a hard gate); got nan."),
    (ValueError, lambda: TG((1.0, INF), (0, 1), (0, 1, 0), (0, 0, 0)), "TG: every tau is inf (hard) or none is; got (1.0, inf)."),
    (ValueError, lambda: TG((1, 2), 0, (0, 1), (0, 0)), "TG: tau is one number or one per threshold (1); got (1, 2)."),
    (ValueError, lambda: TG(1, (0, 1), (0, 1), (0, 0, 0)), "TG: 2 thresholds make K = 3 regions, so s needs 3 entries; got 2."),
    (ValueError, lambda: TG(1, (0, 1), (0, 1, 1), (0, 0)), "TG: 2 thresholds make K = 3 regions, so c needs 3 entries; got 2."),
    (ValueError, lambda: TG(INF, (1, 0), (0, 1, 0), (0, 0, 0)), "TG: hard gates need non-decreasing thresholds; got theta=(1.0, 0.0). Sort them, or use soft gates with form='softmax'."),
    (ValueError, lambda: TG(1, (1, 0), (0, 1, 0), (0, 0, 0), form="product"), "TG: product-form gates need non-decreasing thresholds; got theta=(1.0, 0.0). Sort them, or use soft gates with form='softmax'."),
    (ValueError, lambda: TG(1, 0, (0, math.nan), (0, 0)), "TG: s must be finite; got (0, nan)."),
    (ValueError, lambda: TG(1, INF, (0, 1), (0, 0)), "TG: theta must be finite; got inf."),
    (ValueError, lambda: TG(1, 0, (0, 1), (0, 0), form="sum"), "TG: form is 'softmax' or 'product'; got 'sum'."),
    (ValueError, lambda: TG(1, 0, (0, 1), (0, 0), owner=("lo",)), "TG: owner is for hard gates (tau=inf) only; got owner=('lo',)."),
    (ValueError, lambda: TG(INF, 0, (0, 1), (0, 0), owner=("up",)), "TG: owner is 'lo' or 'hi' for each of the 1 thresholds; got ('up',)."),
    (ValueError, lambda: TG(INF, (1, 1), (0, 1, 0), (0, 0, 0), owner=("lo", "hi")), "TG: at the equal thresholds 1.0 the owners 'lo', 'hi' give x == theta to two regions; use any other pair."),
    (ValueError, lambda: TG(INF, 0, (0, 1), (0, 0), anchor=(None, (1, 2))), "TG: anchor 1 must be a point of its (not constant) branch, which is 1 at 1; got (1, 2)."),
    (ValueError, lambda: TG(1, 0, (0, 1), (0, 0), clamp=(1, 1)), "TG: clamp is (low, high) with low < high; got (1, 1)."),
    (ValueError, lambda: TG(1, 0, (0, 1), (0, 0), q=(1,)), "TG: q needs one entry for each of the K = 2 branches; got 1."),
    (TypeError, lambda: TG(1, torch.zeros(3), (0, 1), (0, 0)), "TG: theta is a number or a tuple of numbers; got Tensor. Parameters per channel belong in an Activation."),
    (TypeError, lambda: TG("1", 0, (0, 1), (0, 0)), "TG: tau is a number or a tuple of numbers; got str. Parameters per channel belong in an Activation."),
    (TypeError, lambda: TG(1, 0, (0, "1"), (0, 0)), "TG: s is a number or a tuple of numbers; got (0, '1')."),
    (ValueError, lambda: TG.from_dict({"tau": 1, "sigma": 2}), "TG.from_dict: unknown key 'sigma'; known: tau, theta, s, c, form, owner, q, anchor, clamp."),
    (ValueError, lambda: TG.from_dict({"tau": 1}), "TG.from_dict: missing key 'theta'; got tau."),
    (ValueError, lambda: TG(1, 0, (0, 1), (0, 0)).as_form("sum"), "TG.as_form: form is 'softmax' or 'product'; got 'sum'."),
    (ValueError, lambda: TG((1, 2), (0, 1), (0, 1, 1), (0, 0, 0)).as_form("product"), "TG.as_form: the closed form is for K = 3, one tau and affine branches; this is TG(tau=(1.0, 2.0), theta=(0.0, 1.0), s=(0.0, 1.0, 1.0), c=(0.0, 0.0, 0.0))."),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_bad_input_is_answered_with_what_would_work(error, call, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("off", [1e-9, -1e-11])
def test_an_anchor_a_little_off_its_branch_is_refused(off):
    with pytest.raises(ValueError, match="anchor 1 must be a point"):
        TG(float("inf"), (0,), (0, 2), (0, 3), anchor=(None, (1, 5 + off)))
    TG(float("inf"), (0,), (0, 2), (0, 3), anchor=(None, (1, 5 + 5e-13)))  # rounding is not


def test_a_constant_branch_has_no_anchor():
    with pytest.raises(
        ValueError, match=r"anchor 0 must be a point of its \(not constant\) branch"
    ):
        TG(float("inf"), (0,), (0, 2), (1, 3), anchor=((-1, 1), None))
