"""Error against K: the figures against closed forms, and what the page says of made-up rows."""

import math

import pytest
import torch.nn.functional as F

import threshold_gating as tg
from experiments import activation_count, error_against_k
from experiments.record import Row

ABOUT = {"device": "CPU", "torch": "2.13", "date": "2026-11-18"}


def made(sup):
    """Rows of every fit, with the error that `sup(function, K)` gives."""
    return [
        Row(case, {"sup": sup(case["function"], case["K"])}, 1.0, False, ABOUT)
        for case in error_against_k.cases()
        if case["what"] == "fit"
    ]


def test_a_geometric_and_an_algebraic_fall_are_told_apart():
    geometric = error_against_k.fall({K: 3 * 7.0**-K for K in range(2, 9)})
    assert geometric.better == "geometric"
    assert (geometric.factor, geometric.geometric) == pytest.approx((7, 1))
    algebraic = error_against_k.fall({K: 2 * K**-2.5 for K in range(2, 9)})
    assert algebraic.better == "algebraic"
    assert (algebraic.order, algebraic.algebraic) == pytest.approx((2.5, 1))
    stairs = error_against_k.fall({K: 4.0 ** -(K // 2 * 2) for K in range(3, 9)})
    assert stairs.better == "undecided"
    assert error_against_k.fall({2: 1.0, 3: 0.1, 4: 0.01}) is None


def test_the_best_line_is_that_of_chebyshev():
    # GELU - x / 2 is even and grows from 0 to 3, so the best line is x / 2 + 3 / 2
    assert error_against_k.best_line("gelu") == pytest.approx(1.5, abs=1e-7)
    assert error_against_k.best_line("exp(-x^2)") == pytest.approx(0.5, abs=1e-9)


def test_1702_is_neither_nearest_sharpness():
    found = error_against_k.nearest_tau()
    assert found["L2 tau"] == pytest.approx(1.7010, abs=5e-5)
    assert found["sup tau"] == pytest.approx(1.7017, abs=5e-5)
    for norm in ("L2", "sup"):
        assert found[f"{norm} there"] < found[f"{norm} 1.702"]


def test_gelu_k8_in_float32_is_as_near_as_torch_up_to_4():
    found = error_against_k.in_float32()
    assert found["gelu_k8"]["4"] < found["torch"]["4"] < found["gelu_k6"]["4"]


def test_activations_are_sorted_by_what_gates_do_with_them():
    kinds = {name: activation_count.kind_of(name) for name in ("SiLU", "Mish", "gelu_new", "relu2")}
    assert kinds == {
        "SiLU": activation_count.EXACT,
        "Mish": activation_count.THREE,
        "gelu_new": activation_count.NEAR,
        "relu2": activation_count.SQUARE,
    }
    assert activation_count.kind_of("sqrtsoftplus") == activation_count.NEVER
    assert activation_count.at_two("softplus") == pytest.approx(math.log(2))  # the floor: theory
    assert "no asymptote" in activation_count.at_two("relu_squared")


def test_the_page_and_the_verdicts_follow_the_rows(tmp_path):
    rows = made(lambda name, K: K**-2.0 if name == "elu" else 10.0**-K)
    page = error_against_k.page(rows)
    assert "Not run: line, tau, float32, names." in page
    elu = next(line for line in page.splitlines() if line.startswith("| elu"))
    assert elu.endswith("2.0 (off by 1.00x) | algebraic |")
    assert "1.00e-08 | 10.0 (off by 1.00x)" in page
    one, rate, misses, tau = error_against_k.verdicts(rows)
    assert "by 10.0 to 10.0 for analytic functions and by 1.5 to 10.0 for others" in rate.ours
    assert rate.ours.endswith("algebraic: elu; undecided: none")
    assert {one.verdict, misses.verdict, tau.verdict} == {"not run"}
    assert "erf at K = 8" in error_against_k.page(rows[:-9])
    error_against_k.draw(rows, tmp_path)
    assert (tmp_path / "error_against_k.svg").stat().st_size < 150_000


def test_a_network_counts_if_k_2_misses_one_of_its_activations():
    networks = {"a": ["relu", "gelu"], "b": ["silu"], "c": []}
    assert activation_count.missed({"networks": networks}) == (1, 2)


def test_smoke_runs_every_kind_of_case():
    rows = error_against_k.main(["--smoke", "--device", "cpu"])
    assert {row.case["what"] for row in rows} == {"line", "tau", "float32", "names", "fit"}


@pytest.mark.slow
def test_gelu_with_one_tau_is_found_again_at_k_8():
    found = tg.fit(F.gelu, K=8, zero=False, starts=1, start=error_against_k.START)
    # 3 %: as for the rows of the taxonomy, tests/fitting
    assert found.sup <= 1.03 * 1.28e-7
