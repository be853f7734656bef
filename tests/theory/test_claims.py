"""Theorem, lemma, corollaries and remarks as computed: tables, bounds, and the page about them."""

import importlib.util
import json
import math
import re
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from threshold_gating import TAXONOMY, TG, theory

ROOT = Path(__file__).parents[2]


def gompertz(x):
    return torch.exp(-torch.exp(-x))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize(
    ("f", "x", "floor"),
    [
        (F.relu, 0, 0),
        (F.silu, 0, 0),
        (F.gelu, 0, 0),
        (F.mish, 0, 0),
        (F.hardswish, 0, 0),
        (F.softplus, 0, math.log(2)),
        (F.logsigmoid, 0, math.log(2)),
        (F.elu, -1, 1 / math.e),
        (lambda x: F.celu(x, 2.0), -2, 2 / math.e),
        (F.selu, -1.6732632423543772, 0.329879),
    ],
)
def test_crossing_and_floor(f, x, floor):
    cross = theory.crossing(f)
    assert cross.x == pytest.approx(x, abs=1e-9)
    assert cross.floor == pytest.approx(floor, abs=5e-7)  # six digits are known of SELU's


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (torch.tanh, "parallel asymptotes"),
        (F.hardshrink, "one line for both"),
        (torch.sin, "no asymptote: oscillating"),
        (lambda x: F.relu(x) ** 2, "no asymptote: diverging"),
        (torch.asinh, "no asymptote: slope exists but no intercept"),
    ],
)
def test_no_crossing_has_a_reason(f, reason):
    assert theory.crossing(f) == theory.Crossing(None, None, None, reason)


@pytest.mark.parametrize("f", [F.elu, F.softplus, F.selu])
def test_every_k2_instance_with_these_tails_meets_the_floor(f):
    """The corrected theorem: through (x*, L(x*)) whatever tau and theta, soft or hard."""
    tails, cross = theory.asymptotes(f), theory.crossing(f)
    s = (tails.low.slope, tails.high.slope)
    c = (tails.low.intercept, tails.high.intercept)
    at = torch.tensor([cross.x], dtype=torch.float64)
    for tau in (*torch.logspace(-1, 2, 7).tolist(), math.inf):
        for theta in torch.linspace(-3, 3, 7).tolist():
            t = TG(tau, theta, s, c)
            assert t(at).item() == pytest.approx(cross.line, abs=1e-12)
            assert (t(at) - f(at)).abs().item() >= cross.floor - 1e-12


# (kappa, order, coefficient) of the construction of Lemma 9 at 0; order None: no residual.
RESIDUALS = {
    torch.sigmoid: (0.125, None, 0),
    torch.tanh: (2, None, 0),
    torch.erf: (2.2568, 3, 0.10277),
    torch.atan: (2, 3, -0.19824),
    gompertz: (0.3679, 0, -0.1321),
    F.silu: (0, None, 0),
    quick_gelu: (0, None, 0),
    F.gelu: (0, 4, 0.01817),
    F.softplus: (0, 4, -0.00260),
    F.mish: (0.096, 1, 0.1),
}


@pytest.mark.parametrize("f", RESIDUALS, ids=lambda f: f.__name__)
def test_kappa_and_the_true_residual(f):
    kappa, order, coefficient = RESIDUALS[f]
    assert theory.kappa(f) == pytest.approx(kappa, abs=5.1e-5)
    found = theory.residual(f)
    assert found.order == order
    assert found.coefficient == pytest.approx(coefficient, abs=5.1e-5)


@pytest.mark.parametrize("f", [torch.erf, torch.atan, F.gelu, F.softplus, F.mish, gompertz])
@pytest.mark.parametrize("h", [0.1, 0.02])
def test_the_residual_is_what_a_small_step_shows(f, h):
    """f - t at h against coefficient h^order; the next term is of relative order h (10 h at most)."""
    found = theory.residual(f)
    x = torch.tensor([h], dtype=torch.float64)
    shown = (f(x) - found.t(x)).item() / h**found.order
    assert shown == pytest.approx(found.coefficient, rel=10 * h)


def test_the_residual_of_any_instance_at_any_centre():
    def shifted(x):
        return 3 * (x - 0.7) ** 2 + F.silu(x)

    found = theory.residual(shifted, TAXONOMY["silu"], at=0.7)
    assert (found.order, found.coefficient) == (2, pytest.approx(3, rel=1e-9))
    corner = theory.residual(F.relu, TAXONOMY["silu"])  # 1/2 from the right, -1/2 from the left
    assert (corner.order, abs(corner.coefficient)) == (1, pytest.approx(0.5, rel=1e-6))


def test_a_residual_that_cannot_be_has_a_reason():
    assert theory.residual(torch.sin).reason == "sin has no slope at infinity: oscillating."
    missing = "elu has no derivative of order 2 at x = 0 to match."
    assert theory.residual(F.elu).reason == missing


def test_the_lemmas_sharpness_is_that_of_the_table():
    """App. F: SiLU 1, Sigmoid 1, Tanh 2 exactly, GELU 2 f''(0) = 1.5957691."""
    for name, f in (("silu", F.silu), ("sigmoid", torch.sigmoid), ("tanh", torch.tanh)):
        assert theory.lemma_instance(f) == TAXONOMY[name]
    assert theory.lemma_instance(F.relu) == TAXONOMY["relu"]
    assert theory.lemma_instance(F.tanhshrink) == TAXONOMY["tanhshrink"]
    assert theory.lemma_instance(F.gelu).tau == pytest.approx(1.5957691, abs=5e-8)


def test_kappa_depends_on_the_units_of_x():
    scaled = [theory.kappa(lambda x, a=a: torch.tanh(a * x) / a) for a in (0.5, 1, 2)]
    assert scaled == pytest.approx([0.5, 2, 8], rel=1e-12)
    assert theory.kappa(F.elu) is None


@pytest.mark.parametrize(
    ("f", "ok", "reason"),
    [
        (torch.tanh, True, "inflection at x = 0"),
        (torch.sigmoid, True, "inflection at x = 0"),
        (F.relu, True, "corner at x = 0"),
        (F.softsign, True, "inflection at x = 0"),
        (F.softplus, False, "no transition point: neither an inflection nor a corner"),
        (F.elu, False, "no transition point: neither an inflection nor a corner"),
        (F.silu, False, "no dominant transition: x (strength) -2.39936 (0.0998), 2.39936 (0.0998)"),
        (F.hardtanh, False, "no dominant transition: x (strength) -1 (1), 1 (1)"),
        (torch.sign, False, "not continuous at x = 0"),
        (torch.sin, False, "no slope at infinity: oscillating"),
        (lambda x: F.relu(x) ** 2, False, "no slope at infinity: diverging"),
        (lambda x: F.relu(x) + 0.1 * torch.tanh(x - 3), True, "corner at x = 0"),
    ],
)
def test_definition_7_with_its_reason(f, ok, reason):
    found = theory.well_behaved(f)
    assert (found.ok, found.reason) == (ok, reason)


def test_a_single_soft_gate_has_two_inflections_unless_the_slopes_are_equal():
    """The paper says at most one. They are at u = +-2.3993572805 if the branches meet at theta."""
    x = theory.inflections(TG(3, 0.5, (0.2, 1.1), (0, -0.45)))  # both branches 0.1 at 0.5
    assert x == pytest.approx([0.5 - 2.3993572805 / 3, 0.5 + 2.3993572805 / 3], abs=1e-9)
    assert len(theory.inflections(TG(3, 0.5, (0.2, 0.2), (0, 1)))) == 1


def test_remarks_12_and_13():
    rows = {r.name: r for r in theory.remarks_12_13()}
    assert {name: len(r.inflections) for name, r in rows.items()} == {
        "mish": 2,
        "gelu": 2,
        "elu": 0,
        "silu": 2,
    }
    assert [name for name, r in rows.items() if r.monotone] == ["elu"]


def test_remark_6_the_gradient_of_the_constant_family_goes_through_the_gates_alone():
    for name in ("sigmoid", "tanh"):
        path = theory.gradient_path(TAXONOMY[name])
        assert path.slopes == 0
        assert path.gates > 0
    relu = theory.gradient_path(TAXONOMY["relu"])
    assert (relu.slopes, relu.gates) == (pytest.approx(math.sqrt(0.5), rel=1e-10), 0)
    clamped = theory.gradient_path(TAXONOMY["hardtanh_clamp"])
    assert clamped.slopes == pytest.approx(math.sqrt(math.erf(1 / math.sqrt(2))), rel=1e-10)


def test_remark_6_the_two_parts_of_silu_are_sigma_and_x_sigma_prime():
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2) / torch.exp(-(x**2) / 2).sum()
    g = torch.sigmoid(x)
    path = theory.gradient_path(TAXONOMY["silu"])
    assert path.slopes == pytest.approx((weight @ g**2).sqrt().item(), rel=1e-9)
    assert path.gates == pytest.approx((weight @ (x * g * (1 - g)) ** 2).sqrt().item(), rel=1e-9)
    assert (path.low, path.high) == (0, 1)


@pytest.mark.parametrize("tau", [0.1, 1.0, 37.0, 1e4])
def test_appendix_a_the_gate_stays_a_half_away_and_the_blend_converges(tau):
    gap = theory.hardening(tau)
    assert gap.gate == 0.5
    assert gap.relu * tau == pytest.approx(0.2784645427609, abs=1e-10)


def test_appendix_b_is_no_approximation_at_working_variances():
    ratios = [theory.curvature_ratio(torch.tanh, q) for q in (0.01, 0.1, 0.5, 1.0, 2.0)]
    assert ratios == pytest.approx([1.08, 1.84, 6.17, 13.3, 32.1], rel=5e-3)
    assert theory.curvature_ratio(F.silu, 0.5) == 0
    assert math.isnan(theory.curvature_ratio(F.elu, 0.5))


def test_appendix_c_holds_for_tanh_and_fails_for_silu():
    """tanh: 1 - f'^2 = 1 - sech^4, a tenth at acosh(0.9^(-1/4)); the paper's sqrt(delta/2) is near.
    SiLU: of first order, delta / 2, though kappa is 0."""
    exact = math.acosh(0.9**-0.25)
    assert theory.trust_radius(torch.tanh, delta=0.1) == pytest.approx(exact, rel=1e-9)
    assert exact == pytest.approx(math.sqrt(0.1 / 2), rel=0.04)
    assert theory.trust_radius(F.silu, delta=1e-3) == pytest.approx(5e-4, rel=1e-3)
    assert theory.trust_radius(F.relu) == 0
    assert theory.trust_radius(torch.clone) == math.inf


def test_branches_for_asks_for_the_fewest_branches(monkeypatch):
    fitting = types.ModuleType("threshold_gating.fitting")
    asked = {}
    fitting.fit = lambda f, **options: asked.update(options) or "a fit"
    monkeypatch.setitem(__import__("sys").modules, "threshold_gating.fitting", fitting)
    assert theory.branches_for(F.gelu, 1e-3) == "a fit"
    assert asked == {"over": "line", "K": "auto", "max_error": 1e-3}


def test_branches_for_finds_two_branches_for_a_coarse_gelu():
    fitting = pytest.importorskip("threshold_gating.fitting")
    if not hasattr(fitting, "fit"):
        pytest.skip("fitting has no fit yet")
    pytest.importorskip("scipy")
    found = theory.branches_for(F.gelu, 0.02)  # K = 2 reaches 1.39e-2
    assert found.t.K == 2
    assert found.sup <= 0.02


EXPLAINED = [
    *(F.gelu, F.mish, F.elu, F.selu, F.softplus, F.hardsigmoid, F.hardswish, F.hardshrink),
    *(torch.tanh, torch.sin, torch.sign, torch.asinh, TAXONOMY["gelu"], torch.nn.LeakyReLU()),
]


@pytest.mark.parametrize("f", EXPLAINED, ids=lambda f: getattr(f, "__name__", type(f).__name__))
def test_an_explanation_fits_100_columns_and_is_json(f):
    found = theory.explain(f)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["name"] == lines[0]
    assert len(data["edges"]) == 4


def test_an_explanation_says_what_is_known_of_gelu():
    found = theory.explain(F.gelu)
    assert found.name == "gelu"
    assert found.crossing == theory.Crossing(0.0, 0.0, 0.0)
    assert found.residual.order == 4
    assert found.well_behaved.ok is False
    assert found.edges[1].beta == pytest.approx(4.54, abs=5e-3)
    assert "K=2 residual  0.0181678 x^4 + ..." in str(found)
    assert "at +inf       1 x + 0" in str(found)
    assert theory.explain(TAXONOMY["mish"]).name == "mish"
    assert theory.explain(F.gelu, name="mine", at=0.5, q=(1.0,)).derivatives.at == 0.5


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (torch.sqrt, "sqrt is NaN at x = -16"),
        (torch.nn.Softmax(-1), "Softmax is not element-wise"),
        (torch.mean, "mean must keep the shape of its input"),
    ],
)
def test_explain_refuses_what_is_no_activation(f, message):
    with pytest.raises(ValueError, match=message):
        theory.explain(f)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x: torch.full_like(x, 3.0), "E[f'^2] is 0"),
        (torch.zeros_like, "E[f'^2] is 0"),
        (lambda x: torch.from_numpy(0 * x.detach().numpy() + 3.1), "E[f'^2] is 0"),
        (torch.sign, "E[f'^2] is not finite"),
        (torch.sigmoid, "sigma_b^2 < 0"),
    ],
    ids=["constant", "zero", "constant from numpy", "step", "sigmoid"],
)
def test_an_explanation_says_why_there_is_no_edge_of_chaos(f, why):
    *_, line = str(theory.explain(f, q=(1.0,))).splitlines()
    assert line.endswith(f"  none: {why}")


def test_every_public_name_exists():
    assert all(hasattr(theory, name) for name in theory.__all__)


@pytest.fixture(scope="module")
def experiment():
    path = ROOT / "experiments" / "cor10_cor11.py"
    spec = importlib.util.spec_from_file_location("cor10_cor11", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_experiment_runs_and_rescaled_networks_are_the_same(experiment, tmp_path):
    pytest.importorskip("matplotlib")
    answers = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert answers["Cor. 11, trainable depth"]["verdict"] == "refuted"
    record = json.loads((tmp_path / "cor10_cor11.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    half, double = rows["tanh(0.5x)/0.5"], rows["tanh(2x)/2"]
    assert double["kappa"] == pytest.approx(16 * half["kappa"])
    assert half["depths"] == double["depths"]
    assert half["steps"] == double["steps"]
    assert half["radius"] == pytest.approx(4 * double["radius"], rel=1e-6)
    assert (tmp_path / "cor10_cor11.png").stat().st_size > 10_000


def test_the_experiments_rank_correlation_is_spearmans(experiment):
    assert experiment.rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert experiment.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert experiment.rank_correlation([1, 2, 3], [1, 1, 2]) == pytest.approx(math.sqrt(3) / 2)


def test_the_experiment_would_confirm_a_law_that_holds(experiment):
    """The verdict can come out either way: figures made up to follow the corollaries are."""
    rows = []
    for name, kappa, ranked in [
        *((n, k, True) for n, k in zip("abcdef", (0.1, 0.5, 1, 2, 3, 4), strict=True)),
        ("tanh(0.5x)/0.5", 0.5, False),
        ("tanh(2x)/2", 8.0, False),
    ]:
        case = experiment.Case(name, None, kappa, 0.5, 1, 0, 1, 1, ranked)
        rows.append((case, experiment.Measured([kappa**-0.5], [kappa**-2], kappa**-0.5)))
    answers = experiment.verdicts(rows)
    verdicts = [a["verdict"] for a in answers.values() if "verdict" in a]
    assert verdicts == ["confirmed"] * 3


def test_the_page_names_every_claim():
    page = (ROOT / "docs" / "theory.md").read_text()
    claims = ("Def. 7", "Thm. 8", "Lemma 9", "Cor. 10", "Cor. 11", "Remark 6", "Remark 12")
    for claim in (*claims, "Remark 13", "App. A", "App. B", "App. C"):
        assert re.search(rf"^\| {re.escape(claim)}\b", page, re.MULTILINE), claim
