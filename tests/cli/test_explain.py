"""A report says of a function what is true of it, in text and in JSON alike."""

import json
import re
import sys
from functools import cache

import pytest
import torch

from threshold_gating import TAXONOMY, TG, fitting, taxonomy, theory
from threshold_gating.cli.explain import as_json, as_text, report
from threshold_gating.show.instances import is_exact

pytest.importorskip("scipy")

F = torch.nn.functional


@pytest.fixture(scope="module")
def explained():
    """Reports by what was asked, each made once."""
    return cache(report)


def fitted(r):
    return [a for a in r.attempts if a.fit is not None]


# (what, family, row, K of the exact instance or None)
KNOWN = [
    ("relu", "multiplicative", "relu", 2),
    ("mish", "multiplicative", "mish", 3),
    ("x*tanh(softplus(x))", "multiplicative", "mish", 3),
    ("x*sigmoid(x)", "multiplicative", "silu", 2),
    ("x*sigmoid(1.3*x)", "multiplicative", None, 2),
    ("1e5*silu(x)", "multiplicative", None, 2),  # off by 1e-9 far out, where it is 1e9
    ("2/(1 + exp(-2*x)) - 1", "constant", "tanh", 2),
    ("relu6_clamp", "saturating", "relu6_clamp", 2),
    ("clamp(2*x, -1, 3)", "saturating", None, 3),
    ("relu(x - 100)", "multiplicative", None, 2),
    ("x > 1", "constant", None, 2),
    ("relu(x)**2", "multiplicative", "relu_squared", 2),
    ("x", "multiplicative", "identity", 1),
    ("sin", "none", None, None),
    ("exp(x)", "none", None, None),
]


@pytest.mark.parametrize(("what", "family", "row", "K"), KNOWN, ids=[k[0] for k in KNOWN])
def test_family_row_and_exactness(explained, what, family, row, K):
    r = explained(what)
    assert (r.family, r.row, r.exact) == (family, row, K is not None)
    assert (r.best and r.best.K) == K
    if K is not None:
        assert is_exact(taxonomy.measure(r.best.t, r.target.f).sup, r.target.f)


def test_a_small_function_is_not_called_exact_for_its_size():
    """1e-8 GELU with K = 2 is off by 1.4e-10, less than what rounding does to SiLU at 1e4."""
    r = report("1e-8*gelu(x)", [2])
    assert not r.exact
    assert r.best.rel_rms == pytest.approx(0.0136, rel=0.01)


def test_gelu_has_five_fits_with_the_known_errors(explained):
    r = explained("gelu")
    assert [(a.K, a.own_tau) for a in r.attempts] == [
        *((2, False), (3, False), (4, False), (4, True), (5, False))
    ]
    sups = [a.fit.sup for a in r.attempts]
    for sup, most in zip(sups, (1.4e-2, 4.3e-3, 1.2e-3, 1.3e-4, 5.1e-5), strict=True):
        assert 0.9 * most < sup <= most
    for a in r.attempts:
        error = taxonomy.measure(a.fit.t, F.gelu)
        assert (a.fit.sup, a.fit.rms) == pytest.approx(error[:2], rel=1e-6)
        assert a.fit.t(torch.zeros(1)).item() == 0  # f(0), as promised
        assert (a.fit.t.s[0], a.fit.t.s[-1]) == (0, 1)  # and the tails
        assert 0 < a.seconds < 10
    assert r.best is r.attempts[-1].fit
    assert (r.row, r.exact) == ("gelu", False)


def test_nothing_is_fitted_beyond_an_exact_fit(explained):
    r = explained("mish")
    assert [a.K for a in fitted(r)] == [2, 3]
    assert [(a.K, a.note) for a in r.attempts[2:]] == [
        (4, "exact with K = 3 already"),
        (5, "exact with K = 3 already"),
    ]
    assert r.best.t == TAXONOMY["mish"]  # not the search's, which is off in the last digit


def test_quadratic_branches_do_not_stand_for_affine_fits():
    r = report("hardswish", [3])
    assert (r.best.t, r.exact) == (TAXONOMY["hardswish"], True)
    assert r.attempts[0].fit.t.q is None
    assert r.attempts[0].fit.sup == pytest.approx(0.0658, rel=0.01)
    assert r.fits == [r.best, r.attempts[0].fit]


def test_the_centre_and_the_branches_are_those_asked_for():
    r = report("tanh", [3, 2, 3], at=0.5)
    assert [a.K for a in r.attempts] == [2, 3]
    assert r.explanation == theory.explain(torch.tanh, 0.5, name="tanh")


def test_each_fit_is_told_of_as_it_ends():
    heard = []
    report("softplus", [2], tell=heard.append)
    report("sin", [2], tell=heard.append)
    assert re.fullmatch(r"K = 2: sup 0\.693, \d+\.\d s", heard[0])
    assert heard[1].startswith("K = 2: f has no asymptote at -inf")


def test_a_function_without_tails_has_no_fit_and_a_reason(explained):
    r = explained("sin")
    assert (fitted(r), r.best, r.fits) == ([], None, [])
    text = as_text(r)
    assert "  family        none: no slope at infinity, oscillating\n" in text
    assert "  exact         no, it has no slope at infinity, so no finite K follows it" in text
    assert text.count("f has no asymptote at -inf") == 1  # once, not for each K


@pytest.mark.parametrize("what", [k[0] for k in KNOWN])
def test_text_fits_100_columns(explained, what):
    assert max(map(len, as_text(explained(what)).splitlines())) <= 100


def test_a_long_expression_fits_too():
    text = as_text(report("+".join(["0.1*relu(x)"] * 12), [2]))
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("0.1*relu(x)+0.1*relu(x)")


def test_the_text_has_family_fits_best_and_theory(explained):
    r = explained("gelu")
    text = as_text(r)
    assert "  family        multiplicative: an outer branch carries x on\n" in text
    assert (
        "  exact         no; the taxonomy's row gelu is not exact either (`tg table gelu`)" in text
    )
    for a in r.attempts:
        label = f"{a.K}, own tau" if a.own_tau else f"{a.K}"
        figures = f"{a.fit.sup:10.3g} {a.fit.rms:10.3g} {a.fit.rel_rms:10.3g} {a.seconds:8.1f}"
        assert f"\n  {label:<13} {figures}\n" in text
    best = text.partition("  best, K = 5 ")[2].partition("\n\n")[0]
    assert eval(best.strip(), {"TG": TG}) == r.best.t
    assert text.endswith("\n\n" + str(r.explanation).partition("\n")[2])


def test_the_text_of_an_exact_row_says_which(explained):
    text = as_text(explained("x*tanh(softplus(x))"))
    assert "  exact         yes, with K = 3, as the row mish of the taxonomy (tanh(softplus" in text
    assert "\n  4, 5          exact with K = 3 already\n" in text
    assert "\n  exact, K = 3  TG(tau=1.0, theta=(0.0, 0.6931471805599453), s=" in text
    text = as_text(explained("x*sigmoid(1.3*x)"))
    assert "  exact         yes, with K = 2, though the taxonomy has no such row\n" in text


def test_a_note_of_a_fit_stands_under_it():
    lines = as_text(report("softplus", [2])).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  2 "))
    assert lines[at + 1].startswith(" " * 16 + "TG(0) = f(0) = 0.6931 is out of reach of K = 2")


@pytest.mark.parametrize("what", [k[0] for k in KNOWN])
def test_json_is_strict_and_has_everything(explained, what):
    r = explained(what)
    data = json.loads(as_json(r, "f.png"), parse_constant=pytest.fail)
    assert data["name"] == r.target.name
    assert data["family"] == (None if r.family == "none" else r.family)
    assert (data["row"] and data["row"]["key"], data["exact"]) == (r.row, r.exact)
    assert data["theory"] == r.explanation.to_dict()
    assert (data["picture"], data["missing"]) == ("f.png", None)
    best = data["best"] and TG.from_dict(data["best"])
    assert best == (r.best and r.best.t)
    for each, a in zip(data["fits"], r.attempts, strict=True):
        assert (each["K"], each["own_tau"], each["note"]) == (a.K, a.own_tau, a.note)
        if a.fit is None:
            assert each["instance"] is None
        else:
            assert TG.from_dict(each["instance"]) == a.fit.t
            assert [each[k] for k in ("sup", "rms", "over")] == [
                *(a.fit.sup, a.fit.rms, a.fit.over)
            ]


def test_a_relative_error_of_nothing_is_null():
    """f is 0 wherever N(0, 1) looks, and an instance that is not has no relative error."""
    r = report("relu", [2])
    wrong = fitting.Fit(TAXONOMY["silu"], 1.0, 1.0, float("inf"), "", "sup")
    attempt = r.attempts[0]._replace(fit=wrong)
    changed = type(r)(**{**vars(r), "attempts": (attempt,)})
    assert json.loads(as_json(changed))["fits"][0]["rel_rms"] is None


# (what, the message)
REFUSED = [
    ("log(x)", r"^log\(x\) is NaN at x = -16 \(33 of 65 points"),
    ("1/x", r"^1/x is infinite at x = 0 "),
    ("x*sigmod(x)", r"^no function 'sigmod'; did you mean 'sigmoid'\?"),
]


@pytest.mark.parametrize(("what", "message"), REFUSED)
def test_what_cannot_be_explained_is_refused(what, message):
    with pytest.raises(ValueError, match=message):
        report(what)


# (body of a function, the message)
OWN = {
    "x.cumsum(0)": "is not element-wise: its value at x = ",
    "x[::2]": r"must keep the shape of its input; \(65,\) became \(33,\)",
    "x.float()": "must compute in the dtype of its input, float64; it returned torch.float32",
    "x.tolist()": "must return a tensor; got list",
    "x @ x.view(8, 8)": r"fails on a float64 tensor of shape \(65,\): RuntimeError: ",
    "torch.rand_like(x)": "is random: two calls on the same input differ by",
}


@pytest.mark.parametrize("body", OWN)
def test_a_callable_that_is_no_activation_is_refused(tmp_path, body):
    path = tmp_path / "own.py"
    path.write_text(f"import torch\ndef f(x):\n    return {body}")
    with pytest.raises(ValueError, match=f"^own.py:f {OWN[body]}"):
        report(f"{path}:f")


@pytest.fixture
def no_scipy(monkeypatch):
    for name in list(sys.modules):
        if name.startswith("threshold_gating.fitting."):  # to be imported again
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)


@pytest.mark.usefixtures("no_scipy")
def test_without_scipy_all_but_the_fits_is_there():
    r = report("gelu")
    assert (r.missing, r.attempts, r.best) == ("scipy", (), None)
    assert (r.family, r.row) == ("multiplicative", "gelu")
    text = as_text(r)
    assert "  fits          none: they need scipy.\n" in text
    assert text.endswith(str(theory.explain(F.gelu, name="gelu")).partition("\n")[2])
    assert json.loads(as_json(r))["missing"] == "scipy"


@pytest.mark.usefixtures("no_scipy")
def test_without_scipy_an_exact_row_is_still_known():
    r = report("x*sigmoid(x)")
    assert (r.missing, r.exact, r.best.t) == ("scipy", True, TAXONOMY["silu"])


def test_another_missing_module_is_not_hidden(monkeypatch):
    def broken(*args, **options):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr("threshold_gating.cli.explain.fit", broken)
    with pytest.raises(ModuleNotFoundError, match="other"):
        report("relu")
