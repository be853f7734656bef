"""The section on width: what its tables, verdicts and picture say of the rows."""

import pytest

from experiments import sweep, width_page
from experiments.fig3_width import cases, sweeps
from experiments.record import Row
from experiments.sweep import best_rates
from experiments.width_page import NAME, Size

RATES = {"relu": 1e-3, "W": 2e-3, "S": 2e-3, "silu": 1e-3}


def made_up(level, arms=tuple(width_page.WIDTHS)):
    """Rows whose accuracy is what `level(arm, h)` says, and 0.1 more for each seed."""
    rows = []
    for case in [*sweeps(arms, Size()), *cases(RATES, Size())]:
        if case["arm"] not in arms:
            continue
        value = level(case["arm"], case["h"]) + 0.1 * case["seed"]
        figures = {"accuracy": value, "loss": 1.0, "curve": {str(n): value for n in (1, 2, 3)}}
        if case["part"] == "sweep":
            figures["accuracy"] = 50 - abs(case["rate"] - RATES[case["arm"]])
        else:
            figures |= {"parameters": int(1e5 * case["h"]), "macs": 10**7, "gates": 0}
            figures |= {"hidden": 100, "peak training": 10**8, "peak inference": None}
        if case["arm"] == "transfer":
            figures |= {"before": 70.0, "moved": 60.0}
            figures["again"] = {"accuracy": value - 1, "loss": 1.0, "curve": {}}
        about = {"device": "a GPU", "date": "2026-11-18"}
        rows.append(Row(case, figures, 1.0, False, about))
    return rows


def like(**gains):
    return lambda arm, h: 70 + 2 * h + gains.get(arm, 0)


@pytest.mark.parametrize(
    ("gain", "verdict", "worth"),
    [
        (2.5, "reproduced", "at h = 2.25"),
        (1.5, "partly", "at h = 1.75"),
        (0.5, "not", "at h = 1.25"),
        (-1, "not", "below h = 1"),
    ],
)
def test_a_verdict_is_how_wide_relu_has_to_be(gain, verdict, worth):
    rows = made_up(like(W=gain, S=0, transfer=9))
    scratch, transfer, synapses = width_page.verdicts(rows)
    assert scratch.verdict == verdict
    assert f"as ReLU {worth}:" in scratch.ours
    assert transfer.verdict == "reproduced"
    assert "above h = 4" in transfer.ours
    # S at 1 against ReLU at 2.5 is -3, W at 1 against ReLU at 1.5 its gain less 1
    assert synapses.verdict == ("reproduced" if gain > 1 else "partly")
    assert ("tier W itself gains nothing" in synapses.ours) == (gain < 1)


def test_the_page_has_the_chosen_rates_the_differences_and_what_was_cut(tmp_path):
    rows = made_up(like(W=1.5, S=1, transfer=2, silu=0.5))
    assert best_rates(rows, "accuracy") == RATES
    text = width_page.page(rows)
    assert "All cases ran" in text
    assert "0.002 for tier W" in text
    assert "| tier W, h = 1 | ReLU, h = 1.5 | +0.50 [+0.50, +0.50] | equal parameters |" in text
    assert "| half transfer, h = 2 | ReLU, twice half, h = 2 | +1.00 [+1.00, +1.00] |" in text
    assert "from 70.0 to 60.0 % (mean of 12 runs)" in text
    fewer = [row for row in rows if row.case["arm"] != "S" and row.case["seed"] == 0]
    text = width_page.page(fewer)
    assert "tier S at h = 1 (3 of 3 seeds)" in text
    assert "ReLU at h = 4 (2 of 3 seeds)" in text
    assert "(1 seed)" in text
    width_page.draw(fewer, tmp_path)
    assert 0 < (tmp_path / f"{NAME}.svg").stat().st_size < 150_000


def test_runs_of_another_length_or_rate_are_left_out_and_counted():
    rows = made_up(like(W=1.5))
    case = next(row.case for row in rows if row.case["part"] == "main")
    strange = [
        rows[-1]._replace(case={**case, **change}, figures={"accuracy": 5.0})
        for change in ({"steps": 9}, {"rate": 0.5})
    ]
    assert "Left out: 2 runs of another length or rate." in width_page.page([*rows, *strange])
    assert width_page.gathered([*rows, *strange]) == width_page.gathered(rows)
    assert "Left out" not in width_page.page(rows)


def test_what_a_width_is_worth_is_read_from_runs_of_the_same_seeds():
    rows = made_up(like(W=1.5))
    one = [r for r in rows if r.case["arm"] != "relu" or r.case["h"] != 2 or r.case["seed"] == 2]
    line = {h: width_page.accuracy(width_page.gathered(one), "relu", h) for h in (1.5, 2)}
    assert [len(own) for own in line.values()] == [3, 1]
    # h = 2 has one seed of three, and is left out of the line between 1.5 and 2.5
    assert width_page.worth(width_page.gathered(one), "W", 1) == "at h = 1.75"
    assert "1 seed" in width_page.page(one)


def test_curves_are_read_in_the_order_of_steps_and_the_sweeps_edge_is_said():
    rows = made_up(like())
    for row in rows:
        steps = {"10": 60.0, "100": 70.0, "1000": 71.0, "20": 65.0, "5": 50.0}
        if row.case["arm"] == "W":
            steps |= {"20": 71.0}
        if "curve" in row.figures:
            row.figures["curve"] = steps
    assert "h = 1: 50.00, 50.00, 50.00" in width_page.page(rows)  # 1000 over 20
    said = sweep.said({"relu": 8e-3, "W": 4e-3}, width_page.RATES, width_page.TITLES)
    assert "0.008, the highest that was tried, is the best for ReLU: the sweep ends at" in said
    assert "edge" not in sweep.said({"W": 2e-3}, width_page.RATES, width_page.TITLES)


def test_without_rows_nothing_is_claimed():
    assert {verdict.verdict for verdict in width_page.verdicts([])} == {"not run"}
    alone = [row for row in made_up(like()) if row.case["arm"] == "transfer"]
    assert "half transfer" in width_page.page(alone)


def test_a_rate_that_fails_in_the_sweep_is_not_chosen():
    rows = made_up(like())
    first = rows[0]._replace(figures={"failed": "the loss is nan"})
    assert best_rates([first, *rows[1:]], "accuracy").keys() == RATES.keys()
