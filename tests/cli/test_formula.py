"""Expressions mean what they say, and nothing but expressions is read."""

import contextlib
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threshold_gating.cli.formula import DEEPEST, FUNCTIONS, LONGEST, parse

F = torch.nn.functional
X = torch.linspace(-3, 3, 13, dtype=torch.float64)

# (text, the same in torch)
MEANINGS = [
    ("x*sigmoid(1.3*x)", X * torch.sigmoid(1.3 * X)),
    ("x/(1 + exp(-x))", X / (1 + torch.exp(-X))),
    ("-x**2", -(X**2)),  # the power first, as in Python
    ("2**-x", 2**-X),
    ("2**3**2 + 0*x", torch.full_like(X, 512)),
    ("1 - x - 1", -X),  # from the left
    ("x/2/4", X / 8),
    ("+x - -x", 2 * X),
    ("x*(x > 0)", X * (X > 0)),
    ("(x >= 1) + (x < -1) + (x <= 0)", (X >= 1).double() + (X < -1) + (X <= 0)),
    ("-1 < x < 1", (X.abs() < 1).double()),
    ("where(x > 0, x, exp(x) - 1)", F.elu(X)),
    ("where(x, 1, 2)", torch.where(X != 0, 1.0, 2.0).double()),
    ("min(x, 1)", X.clamp(max=1)),
    ("max(x, 0, 2*x)", torch.maximum(X, X.clamp(min=0)).maximum(2 * X)),
    ("clamp(x, -1, 2)", X.clamp(-1, 2)),
    ("0.5*x*(1 + erf(x/sqrt(2)))", F.gelu(X)),
    ("sin(pi*x) + e", torch.sin(math.pi * X) + math.e),
    ("1e-3*x + 1_000 + .5", 1e-3 * X + 1000.5),
    ("7", torch.full_like(X, 7)),
]


@pytest.mark.parametrize(("text", "wanted"), MEANINGS, ids=[text for text, _ in MEANINGS])
def test_an_expression_means_what_it_says(text, wanted):
    torch.testing.assert_close(parse(text)(X), wanted)


@pytest.mark.parametrize("name", [n for n, known in FUNCTIONS.items() if known.takes(1)])
def test_a_function_is_torchs_of_that_name(name):
    named = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    function = named.get(name) or getattr(torch, name, None) or getattr(F, name)
    torch.testing.assert_close(parse(f"{name}(x)")(X), function(X), equal_nan=True)


def test_softplus_does_not_switch_to_x_at_20():
    x = torch.tensor([20.5], dtype=torch.float64)
    assert parse("softplus(x)")(x).item() == pytest.approx(math.log1p(math.exp(20.5)), rel=1e-15)


def test_the_name_is_the_text():
    assert parse("  x *\n sigmoid(x) ").__name__ == "x * sigmoid(x)"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (63,), (3, 5, 2)])
def test_shape_and_dtype_are_those_of_x(dtype, shape):
    for text in ("x*sigmoid(1.3*x) + 1", "pi", "where(x > 0, x, 0.1)", "x > 0"):
        y = parse(text)(torch.randn(shape).to(dtype))
        assert (y.dtype, y.shape) == (dtype, shape)


def test_integers_become_floats():
    assert parse("x/2")(torch.tensor([1])).tolist() == [0.5]


def test_gradients_go_through():
    x = X.clone().requires_grad_()
    for text in ("x*sigmoid(1.3*x)", "where(x > 0.1, x**3, exp(x))", "x**2 + 2**x"):
        assert torch.autograd.gradcheck(parse(text), x)
        assert torch.autograd.gradgradcheck(parse(text), x)


def test_where_computes_each_side_for_its_own_x_alone():
    """torch.where gives NaN for both gradients: 0 times the infinite one of the other side."""
    x = torch.tensor([-4.0, 1000.0], dtype=torch.float64, requires_grad=True)
    y = parse("where(x > 0, x, exp(x) - 1) + where(x > 0, sqrt(x), 0)")(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.tolist() == pytest.approx([math.exp(-4), 1 + 0.5 / math.sqrt(1000)])


def test_what_has_no_real_value_is_inf_or_nan_and_no_error():
    x = torch.tensor([0.0, -8.0], dtype=torch.float64)
    assert parse("1/x")(x)[0] == math.inf
    assert parse("x**(1/3)")(x)[1].isnan()
    assert parse("10**100*10**100*10**100*10**100")(x)[0] == math.inf


# Against an evaluation of its own: each strategy draws (text, function of a float).

_LEAVES = st.one_of(
    st.just(("x", lambda v: v)),
    st.just(("pi", lambda v: math.pi)),
    st.floats(0.01, 9).map(lambda c: (repr(c), lambda v: c)),
    st.integers(0, 9).map(lambda c: (str(c), lambda v: c)),
)
_UNARY = {
    "-": lambda a: -a,
    "tanh": math.tanh,
    "sin": math.sin,
    "abs": abs,
    "erf": math.erf,
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)) if a > -700 else 0.0,
    "relu": lambda a: max(a, 0.0),
}
_BINARY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "min": min,
    "max": max,
}


def _apply_one(drawn):
    name, (text, f) = drawn
    g = _UNARY[name]
    return f"{name}({text})", lambda v: g(f(v))


def _apply_two(drawn):
    name, (left, f), (right, h) = drawn
    g = _BINARY[name]
    text = f"{name}({left}, {right})" if name.isalpha() else f"({left}) {name} ({right})"
    return text, lambda v: g(f(v), h(v))


def _choose(drawn):
    (left, f), (right, h) = drawn
    return f"where({left} > {right}, {left}, {right})", lambda v: max(f(v), h(v))


_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(_UNARY)), inner).map(_apply_one),
        st.tuples(st.sampled_from(sorted(_BINARY)), inner, inner).map(_apply_two),
        inner.map(lambda d: (f"({d[0]})**2", lambda v: d[1](v) ** 2)),
        st.tuples(inner, inner).map(_choose),
    ),
    max_leaves=10,
)


@given(_EXPRESSIONS, st.floats(-3, 3))
@settings(max_examples=200, deadline=None)
def test_random_expressions_agree_with_an_evaluation_in_plain_floats(drawn, v):
    text, function = drawn
    if len(text) > LONGEST:
        return
    try:
        wanted = function(v)
    except OverflowError:
        return
    got = parse(text)(torch.tensor([v], dtype=torch.float64)).item()
    if math.isfinite(wanted) and abs(wanted) < 1e12:
        # sin of a large number loses what its argument was rounded by
        slack = 1e-9 if "sin" not in text else 1e-3
        assert got == pytest.approx(wanted, rel=slack, abs=slack)


@given(st.text("x01.+-*/()<>=,_ eij^[]{}'\"\\:@!~%&|;#\n\tsinlambdaforif", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused_with_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert parse(text)(X).shape == X.shape


# Refusals, word for word. (text, message)

REFUSED = [
    ("", "an expression in x is needed, such as x*sigmoid(1.3*x); this one is empty."),
    (
        "x*sigmod(x)",
        "no function 'sigmod'; did you mean 'sigmoid'?\n    x*sigmod(x)\n      ^^^^^^",
    ),
    ("1 + y", "no name 'y'; there are x, pi, e and abs, asinh, atan,"),
    ("X + 1", "no name 'X'; did you mean 'x'?\n    X + 1\n    ^"),
    ("2*relu", "relu is a function; write relu(x).\n    2*relu\n      ^^^^"),
    ("clamp", "clamp is a function; write clamp(x, low, high).\n    clamp\n    ^^^^^"),
    ("x(2)", "only a function can be called; write * for a product.\n    x(2)\n    ^"),
    ("2(x + 1)", "only a function can be called; write * for a product.\n    2(x + 1)\n    ^"),
    (
        "sin(x)(x)",
        "only a function can be called; write * for a product.\n    sin(x)(x)\n    ^^^^^^",
    ),
    ("tanh()", "write tanh(x); 0 given.\n    tanh()\n    ^^^^^^"),
    ("tanh(x, 2)", "write tanh(x); 2 given.\n    tanh(x, 2)\n    ^^^^^^^^^^"),
    ("clamp(x, 1)", "write clamp(x, low, high); 2 given."),
    ("where(x, 1)", "write where(condition, a, b); 2 given."),
    ("max(x)", "write max(a, b, ...); 1 given."),
    ("relu(x=1)", "arguments have no names here; write relu(x).\n    relu(x=1)\n           ^"),
    ("relu(**x)", "arguments have no names here; write relu(x).\n    relu(**x)\n           ^"),
    ("relu(*x)", "arguments are written one by one.\n    relu(*x)\n         ^^"),
    ("x^2", "'^' has no place in an expression; write ** for a power.\n    x^2\n     ^"),
    ("2×x", "'×' has no place in an expression; write *.\n    2×x\n     ^"),
    ("x[0]", "'[' has no place in an expression; use round brackets.\n    x[0]\n     ^"),
    ("x % 2", "'%' has no place in an expression; write an expression such as x*sigmoid(1.3*x)."),
    ("x // 2", "an expression has + - * / ** and < <= > >= only.\n    x // 2\n    ^^^^^^"),
    ("x == 1", "an expression has + - * / ** and < <= > >= only.\n    x == 1\n    ^^^^^^"),
    ("not x", "an expression has + - * / ** and < <= > >= only.\n    not x\n    ^^^^^"),
    ("x and 1", "write min(a, b) instead of a and b, max(a, b) instead of a or b."),
    ("1 if x else 2", "write where(condition, a, b) instead of if and else."),
    ("x, 1", "one value is needed here, not several between commas.\n    x, 1\n    ^^^^"),
    ("2x", "this cannot be read (invalid decimal literal); write * for every product, and close"),
    ("(x", "this cannot be read ('(' was never closed); write * for every product, and close"),
    ("x +", "this cannot be read (invalid syntax); write * for every product, and close"),
    ("1j*x", "1j is not a real number.\n    1j*x\n    ^^"),
    ("True", "True is not a real number.\n    True\n    ^^^^"),
    ("x + ...", "Ellipsis is not a real number.\n    x + ...\n        ^^^"),
    (
        "x + 1e999",
        "this number is too large; the largest is 1.8e308.\n    x + 1e999\n        ^^^^^",
    ),
    ("1" * 400, "this number is too large; the largest is 1.8e308."),
    ("9**9**9", "the exponent is 3.8742e+08; it may be 100 at most.\n    9**9**9\n       ^^^^"),
    ("x**-101", "the exponent is -101; it may be 100 at most.\n    x**-101\n       ^^^^"),
    ("x**(1/0)", "the exponent is inf; it may be 100 at most.\n    x**(1/0)\n        ^^^"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text[:20] for text, _ in REFUSED])
def test_a_refusal_says_where_and_what_would_work(text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        parse(text)
    assert str(caught.value).startswith(message)


ATTACKS = [
    *("__import__('os').system('true')", "x.__class__", "x.data", "().__class__.__bases__"),
    *("[x for x in x]", "{x}", "{x: x}", "lambda x: x", "(lambda: x)()", "x[0]", "x[:]", "'x'"),
    *('"x"', "b'x'", "f'{x}'", "(y := 2)", "y = 2", "x; x", "x\nimport os", "import os", "del x"),
    *("eval(x)", "exec(x)", "open(x)", "getattr(x, x)", "__builtins__", "_", "print(x)", "x.y(x)"),
    *("await x", "yield x", "(yield)", "*x", "**x", "x if x else x", "x or x", "x is x", "x in x"),
    *("~x", "x @ x", "x << 9", "x & x", "x | x", "not x", "x != x", "None", "...", "x\0", "#x"),
    *("9**9**9", "9**(9**9)", "x**(9**9)", "1/x**1e9", "globals()", "sin.real", "1 .real", "1..x"),
]


@pytest.mark.parametrize("text", ATTACKS)
def test_nothing_but_an_expression_is_read(text):
    with pytest.raises(ValueError, match=r"\^"):  # with the place
        parse(text)


DEEP = {
    "brackets": "sin(" * 150 + "x" + ")" * 150,
    "signs": "-" * 900 + "x",
    "powers": "x**" * 300 + "2",
    "round brackets": "(" * 400 + "x" + ")" * 400,
    "wheres": "where(x, 1, " * 70 + "x" + ")" * 70,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_depth_is_bounded(text):
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=r"within each other|too many nested"):
        parse(text)
    assert time.perf_counter() - begin < 2


def test_the_bound_on_depth_is_where_it_says():
    parse("sin(" * DEEPEST + "x" + ")" * DEEPEST)(X)
    with pytest.raises(ValueError, match=f"more than {DEEPEST} brackets"):
        parse("sin(" * (DEEPEST + 1) + "x" + ")" * (DEEPEST + 1))


def test_a_long_sum_is_not_deep():
    torch.testing.assert_close(parse("+".join(["x"] * 500))(X), 500 * X)


def test_the_bound_on_length_is_where_it_says():
    parse("x" + "+1" * ((LONGEST - 1) // 2))
    with pytest.raises(ValueError, match=r"at most 1000 characters is read; this one has 1001\."):
        parse("x" + "+1" * (LONGEST // 2))


def test_a_long_text_is_shown_around_the_place():
    with pytest.raises(ValueError, match="no name 'y'") as caught:
        parse("x + " * 100 + "y" + " + x" * 100)
    shown, carets = str(caught.value).splitlines()[-2:]
    assert len(shown) <= 84
    assert shown[carets.index("^")] == "y"
