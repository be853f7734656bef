"""Depth of wide random networks against kappa."""

import pytest

from experiments import cor11_wide
from experiments.record import Row


def row(name, depth, kappa, beta):
    figures = {"depth": depth, "kappa at 0": kappa, "kappa at inflection": kappa, "beta": beta}
    figures |= {"chi_q": 1.0 - beta / 100, "moments": beta, "variance at the end": 1.0}
    about = {"device": "CPU", "date": "today"}
    return Row({"f": name, "seed": 0, "width": 8, "depth": 50}, figures, 1.0, False, about)


def test_it_runs_and_says_where_a_network_stays_apart(capsys, tmp_path):
    cor11_wide.main(["--smoke", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl")])
    assert "| gelu | > 40 |" in capsys.readouterr().out


def test_ranks_share_what_is_equal_and_correlate_as_scipy_does():
    scipy = pytest.importorskip("scipy.stats")
    a, b = [3.0, 1.0, 1.0, float("inf"), 2.0], [1.0, 2.0, 2.0, 5.0, 0.0]
    assert cor11_wide.ranks(a) == [4, 1.5, 1.5, 5, 3]
    expected = scipy.spearmanr(cor11_wide.ranks(a), cor11_wide.ranks(b)).statistic
    assert cor11_wide.spearman(a, b) == pytest.approx(expected)


@pytest.mark.parametrize(("sign", "word"), [(1, "reproduced"), (-1, "not")])
def test_the_verdict_follows_the_rank_correlation(sign, word):
    rows = [row(str(k), 10 + k, (20.0 - sign * k) or 1.0, 1.0 + k) for k in range(14)]
    (verdict,) = cor11_wide.verdicts(rows)
    assert verdict.verdict == word
    assert cor11_wide.verdicts(rows[:11])[0].verdict == "not run"
    assert "| 13 | 23 |" in cor11_wide.page(rows)
