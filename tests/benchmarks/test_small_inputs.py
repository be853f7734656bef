"""The row of small inputs: both backends are timed, and what is above the limit is said."""

from benchmarks import small_inputs
from benchmarks.small_inputs import LIMIT, Row


def test_every_gate_is_timed_in_both_backends(monkeypatch):
    monkeypatch.setattr(small_inputs, "GATES", {"silu": (("tau",),), "relu": (("theta",),)})
    found = list(small_inputs.rows(sizes=(64,), rounds=1))
    assert [row.what for row in found] == [
        "silu learned forward",
        "silu learned + backward",
        "relu learned forward",
        "relu learned + backward",
    ]
    assert all(row.auto > 0 and row.reference > 0 and row.ratio >= 1 for row in found)


def test_a_row_above_the_limit_fails(monkeypatch, capsys):
    for auto, code in ((1.04, 0), (1.06, 1)):
        monkeypatch.setattr(small_inputs, "rows", lambda auto=auto: [Row("silu", 64, auto, 1.0)])
        assert small_inputs.main() == code
        assert ("above the limit" in capsys.readouterr().out.splitlines()[0]) == bool(code)
    assert Row("silu", 64, 1.0, 2.0).ratio == 1  # faster than the reference is as good as equal
    assert LIMIT == 1.05
