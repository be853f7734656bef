"""A sweep of rates, and what is run with them."""

import pytest

from experiments import record, sweep

RATES = (0.1, 0.2)


def swept(arms):
    return [{"part": "sweep", "arm": arm, "rate": rate} for arm in sorted(arms) for rate in RATES]


def main(rates):
    return [{"part": "main", "arm": arm, "rate": rates.get(arm)} for arm in ("relu", "gates")]


def completed(tmp_path, run, *more):
    words = ["--out", str(tmp_path / "rows.jsonl"), "--device", "cpu", *more]
    asked = record.options("name", None).parse_args(words)
    return sweep.complete("name", asked, run, swept, main, metric="accuracy", data="")


def test_each_arm_is_run_at_its_best_rate(tmp_path):
    def run(case, asked):
        return {"accuracy": case["rate"] if case["arm"] == "relu" else -case["rate"]}

    rows = completed(tmp_path, run, "--only", "arm=gates")
    assert [row.case for row in rows if row.case["part"] == "main"] == [
        {"part": "main", "arm": "gates", "rate": 0.1}
    ]
    assert {row.case["arm"] for row in rows} == {"gates"}  # the sweep of no other arm
    rows = completed(tmp_path, run)
    assert rows[-1].case == {"part": "main", "arm": "relu", "rate": 0.2}
    assert len(rows) == 6


def test_an_arm_whose_sweep_fails_stops_no_other_and_has_no_rate(tmp_path):
    def run(case, asked):
        if case["part"] == "sweep" and case["arm"] == "gates" and case["rate"] == 0.2:
            raise ValueError("no memory")
        return {"accuracy": 1.0}

    with pytest.raises(RuntimeError, match=r"sweep: 1 of 4 cases failed.*no memory"):
        completed(tmp_path, run)
    rows = record.rows(tmp_path / "rows.jsonl")
    assert [row.case["arm"] for row in rows if row.case["part"] == "main"] == ["relu"]
    assert len(completed(tmp_path, lambda case, asked: {"accuracy": 1.0})) == 6


def test_a_rate_past_the_sweep_chooses_nothing_and_says_what_it_would_have_been():
    def row(part, arm, rate, **figures):
        return record.Row({"part": part, "arm": arm, "rate": rate}, figures, 0.0, False, {})

    rows = [
        row("sweep", "relu", 0.1, accuracy=80.0),
        row("sweep", "relu", 0.2, accuracy=81.0),
        row("sweep", "gates", 0.2, accuracy=82.0),
        row("beyond", "relu", 0.4, accuracy=83.0),
    ]
    assert sweep.best_rates(rows, "accuracy") == {"relu": 0.2, "gates": 0.2}
    said = sweep.beyond(rows, "accuracy", {"relu": "ReLU"})
    assert "ReLU 83.00 at 0.4 (81.00 in the sweep)" in said
    assert said.endswith("Better than in the sweep: ReLU by 2.00.")
    worse = [*rows[:3], row("beyond", "relu", 0.8, accuracy=80.5), row("beyond", "relu", 0.4)]
    worse += [row("beyond", "gates", 0.4, accuracy="nan"), row("beyond", "new", 0.4, accuracy=9)]
    said = sweep.beyond(worse, "accuracy", {})
    assert "relu diverged at 0.4, 80.50 at 0.8 (81.00 in the sweep)" in said
    assert "gates diverged at 0.4" in said
    assert said.endswith("Better than in the sweep: new by inf.")
    assert sweep.beyond(rows[:3], "accuracy", {}) == ""


def test_a_run_that_diverged_is_not_the_best_whatever_its_row_has():
    rows = [
        record.Row({"part": "sweep", "arm": "relu", "rate": rate}, figures, 0.0, False, {})
        for rate, figures in ((0.3, {"accuracy": float("nan")}), (0.1, {"accuracy": 80.0}))
    ]
    rows.append(rows[0]._replace(figures={"accuracy": "nan"}))
    assert sweep.best_rates(rows, "accuracy") == {"relu": 0.1}
