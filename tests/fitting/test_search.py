"""More freedom is never worse, over functions of every kind; figures that a better search found."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from threshold_gating.fitting import fit


def softplus(x):
    return F.softplus(x, threshold=50)  # torch's default is x from 20 on


def log_cosh(x):
    return softplus(2 * x) - x - math.log(2)


def gudermann(x):
    return 2 * torch.atan(torch.tanh(x / 2))


FUNCTIONS = {  # over the line
    "gelu": F.gelu,  # one slope is 0
    "gauss": lambda x: torch.exp(-x.square()),  # even, bounded
    "log cosh": log_cosh,  # even, unbounded
    "erf": torch.erf,  # odd, bounded
    "isru": lambda x: x / torch.sqrt(1 + x.square()),  # odd, tails like 1/x^2
    "elu": F.elu,  # its second derivative jumps
    "selu": F.selu,  # a corner, and not straight
    "softsign": F.softsign,  # tails like 1/x
    "gompertz": lambda x: torch.exp(-torch.exp(-x)),  # neither even nor odd
    "two steps": lambda x: torch.tanh(x - 3) + torch.tanh(2 * x + 5),
    "hardtanh": F.hardtanh,
    "triangle": lambda x: F.relu(1 - x.abs()),
    "step": lambda x: (x > 0).double(),
    "silu": F.silu,  # exact with two
    "mish": F.mish,  # exact with three
    "affine": lambda x: 2 * x - 1,
    "constant": lambda x: 0 * x + 3,
    "odd and growing": lambda x: x * gudermann(x).abs() / 2,
    "wide": lambda x: F.gelu(x / 100 - 3),
    "hardswish": F.hardswish,  # a parabola between corners
    "swish with a bump": lambda x: F.silu(x) + torch.exp(-x.square()),
    "atan": torch.atan,
}
INTERVALS = {  # without an asymptote
    "asinh": (torch.asinh, (-6.0, 6.0)),
    "exp": (torch.exp, (-3.0, 2.0)),
    "sin": (torch.sin, (-4.0, 4.0)),
    "log": (torch.log, (0.1, 9.0)),
    "sqrt": (torch.sqrt, (0.0, 4.0)),
    "square": (torch.square, (-2.0, 2.0)),
}
SOME = ("gelu", "log cosh", "elu", "hardtanh", "step", "mish", "affine", "asinh")


def no_worse(freer, stricter):
    """Rounding aside: the same instance with one more branch is blended in another order."""
    height = max(1.0, *(abs(v) for v in stricter.t.c + stricter.t.s))
    assert freer.error <= stricter.error * (1 + 1e-6) + 1e-13 * height


def fits(name, **options):
    if name in INTERVALS:
        f, over = INTERVALS[name]
        options = {"over": over, "tails": "free", **options}
    else:
        f = FUNCTIONS[name]
    return fit(f, **options)


def check_more_branches(name, most, **options):
    for fewer, more in itertools.pairwise(fits(name, K=K, **options) for K in range(2, most + 1)):
        no_worse(more, fewer)


@pytest.mark.parametrize("name", SOME)
def test_a_branch_more_is_never_worse(name):
    check_more_branches(name, 4 if name == "gelu" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUNCTIONS, *INTERVALS])
def test_branches_up_to_five_are_never_worse(name):
    check_more_branches(name, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"own_tau": True},
        {"ordered": True},
        {"form": "product"},
        {"form": "product", "own_tau": True},
        {"zero": False},
        {"over": "normal"},
        {"over": "normal", "tails": "free", "zero": False},
        {"over": (-3.0, 4.0), "objective": "rms"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gelu", "log cosh", "elu", "isru", "triangle"])
def test_branches_are_never_worse_whatever_else_is_asked_for(name, options):
    check_more_branches(name, 4, **options)


@pytest.mark.slow
def test_softplus_gains_with_every_branch_up_to_eight():
    check_more_branches("log cosh", 8)
    errors = [fit(softplus, K=K).sup for K in (6, 7, 8)]
    assert errors == sorted(errors, reverse=True)


# (what is stricter, what is freer), both beside what is asked for already
FREEDOMS = [
    ({"ordered": True}, {}),
    ({}, {"own_tau": True}),
    ({"ordered": True}, {"ordered": True, "own_tau": True}),
    ({"zero": True}, {"zero": "value"}),
    ({"zero": "value"}, {"zero": False}),
    ({"over": (-3.0, 4.0)}, {"over": (-3.0, 4.0), "tails": "free"}),
    ({"over": "normal"}, {"over": "normal", "tails": "free"}),
    ({"form": "product"}, {}),  # with one tau every product form is a softmax form
]


@pytest.mark.parametrize(("stricter", "freer"), FREEDOMS, ids=str)
def test_more_freedom_is_never_worse(stricter, freer):
    no_worse(fits("gelu", K=3, **freer), fits("gelu", K=3, **stricter))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "K"), [*((name, 3) for name in FUNCTIONS), ("elu", 4), ("log cosh", 4), ("atan", 4)]
)
def test_more_freedom_is_never_worse_for_any_function(name, K):
    for stricter, freer in FREEDOMS:
        no_worse(fits(name, K=K, **freer), fits(name, K=K, **stricter))


@pytest.mark.parametrize("name", ["gelu", "asinh"])
def test_each_objective_is_best_in_its_own_norm(name):
    options = {"K": 3} if name in INTERVALS else {"K": 3, "over": (-4.0, 4.0)}
    by_sup, by_rms = (fits(name, objective=objective, **options) for objective in ("sup", "rms"))
    assert by_sup.sup <= by_rms.sup
    assert by_rms.rms <= by_sup.rms * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 3, 4])
@pytest.mark.parametrize("name", [*FUNCTIONS, *INTERVALS])
def test_each_objective_is_best_in_its_own_norm_for_any_function(name, K):
    options = {} if name in INTERVALS else {"over": (-4.0, 4.0)}
    by_sup, by_rms = (fits(name, K=K, objective=how, **options) for how in ("sup", "rms"))
    # in a long valley the search stops within 1e-8 of the function's size ("wide": 6e-9)
    slack = 1e-8 * by_sup.rms / by_sup.rel_rms if by_sup.rel_rms else 0.0
    assert by_sup.sup <= by_rms.sup * (1 + 1e-9) + slack + 1e-13
    # where both end at the bound of the coefficients the least squares stop a little before it
    assert by_rms.rms <= by_sup.rms * (1 + 1e-3) + 1e-13


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("log cosh", {"K": 4, "own_tau": True}, 1.46e-6),  # in order: 1.1e-4
        ("asinh", {"K": 3}, 1.6e-3),  # in order: 1.1e-2
        ("elu", {"K": 3}, 6.3e-3),  # in order: 1.9e-2
    ],
)
def test_what_a_better_search_found_is_found(name, options, error):
    assert fits(name, **options).error <= error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("elu", {"K": 4, "own_tau": True}),
        ("gelu", {"K": 6}),
        ("atan", {"K": 4}),
        ("asinh", {"K": 4}),
    ],
)
def test_five_times_as_many_starts_find_nothing_much_better(name, options):
    assert fits(name, **options).error <= 1.05 * fits(name, starts=80, seed=7, **options).error


@pytest.mark.parametrize(
    ("name", "K"), [("hardtanh", 3), ("hardtanh", 5), ("triangle", 4), ("step", 2), ("step", 3)]
)
def test_straight_lines_are_found_as_they_are(name, K):
    found = fits(name, K=K)
    assert found.sup == 0
    assert found.t.hard


def test_a_function_that_is_nan_between_the_points_of_the_first_look_is_refused():
    def holed(x):
        return torch.where((x > 0.0301) & (x < 0.0309), math.nan, F.gelu(x))

    with pytest.raises(ValueError, match=r"^fit: f\(0.03\d*\) = nan, and f must be finite"):
        fit(holed, K=2)
