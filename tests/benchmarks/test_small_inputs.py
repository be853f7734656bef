"""The rows of small inputs: both backends run, at every size, and what is above the limit is said."""

import pytest
from small import FAKE

from benchmarks import small_inputs
from benchmarks.sections import here
from benchmarks.timing import Clock, measure
from threshold_gating import Activation, kernels


def test_every_gate_is_timed_by_both_backends(monkeypatch):
    monkeypatch.setattr(small_inputs, "GATES", {"silu": (("tau",),), "relu": (("theta",),)})
    seen, forward = [], Activation.forward
    monkeypatch.setattr(
        Activation, "forward", lambda act, x: seen.append(kernels.backend()) or forward(act, x)
    )
    works = list(small_inputs.small_inputs(range(6, 7)))
    rows = [row for work in works for row in measure(work, FAKE)]
    assert [row.work for row in rows] == [
        "silu learned 2^6 forward",
        "silu learned 2^6 + backward",
        "relu learned 2^6 forward",
        "relu learned 2^6 + backward",
    ]
    assert {row.failed for row in rows} == {""}
    # four calls make one time; ours is checked, then the clock of the tests asks for two of each
    assert seen == 4 * (4 * ["auto"] + 2 * (4 * ["auto"] + 4 * ["reference"]))


@pytest.mark.parametrize(("ours", "verdict"), [(1.04, "ok"), (1.06, "MISSED")])
def test_a_row_above_the_limit_is_missed(ours, verdict):
    clock = Clock("", lambda contenders, slow: {"ours": [ours], "reference": [1.0]}, None)
    (row,) = measure(next(small_inputs.small_inputs(range(6, 7))), clock)
    assert (row.limit, row.verdict) == (1.05, verdict)


def test_every_power_of_two_from_64_to_four_million_has_its_row():
    names = {work.name for work in here(smoke=False)["small inputs"]()}
    assert {f"gelu frozen 2^{power} forward" for power in range(6, 23)} <= names
    assert not any("2^5 " in name or "2^23 " in name for name in names)
