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
