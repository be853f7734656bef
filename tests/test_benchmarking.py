"""`tg bench`: what it refuses, prints and writes."""

import json

import pytest

from threshold_gating import benchmarking, cli, kernels
from threshold_gating.benchmarking import Row


def test_a_small_run_checks_times_and_writes(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--smoke", "--json", str(path), "--only", "frozen"]) == 0
    data = json.loads(path.read_text())
    assert data["wrong"] == []
    assert {row["work"] for row in data["rows"]} == {"silu fp32", "relu fp32", "tanh fp32"}
    assert "torch" in data["machine"]
    assert "| silu fp32 |" in benchmarking.report(data)
    assert "0 wrong" in capsys.readouterr().out


def test_a_wrong_kernel_is_not_timed_and_fails(monkeypatch, capsys):
    right = kernels.fused._forward
    monkeypatch.setattr(kernels.fused, "_forward", lambda *a: right(*a) * 1.01)
    assert cli.main(["bench", "--smoke", "--only", "frozen"]) == 1
    out = capsys.readouterr().out
    assert "WRONG silu layer" in out
    assert "| silu fp32" not in out


def test_a_missed_limit_is_named():
    rows = [Row("s", "slow", {"copy": 1.0, "ours": 3.0}, "copy", 2.0)]
    rows.append(Row("s", "fast", {"copy": 1.0, "liger": 2.0, "ours": 1.5}, "best", 2.0))
    assert [row.verdict for row in rows] == ["MISSED", "ok"]
    assert "| 3.00 | 2.00 | MISSED |" in benchmarking.table(rows)


def test_the_slope_is_that_of_large_work():
    times = {24: 9.0, 25: 1.0, 26: 2.0, 27: 4.0}
    rows = [
        Row("growth", "", {"copy": 1.0, "ours": t}, "copy", None, {"power": p})
        for p, t in times.items()
    ]
    assert benchmarking.slope_of(rows) == pytest.approx(1.0)
    assert benchmarking.slope_of(rows[:2]) is None
