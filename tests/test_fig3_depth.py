"""Fig. 3(b, d): which networks run, how rates are chosen, what the page makes of rows."""

import argparse

import pytest
import torch

from experiments import depth_page, fig3_depth, record
from experiments.data import Labelled, cifar100
from experiments.record import Row

ABOUT = {"command": "python -m x", "device": "H200", "torch": "2.11", "date": "2026-11-18"}


def made_rows(accuracy, module=fig3_depth, along=lambda case, done: done, keep=lambda case: True):
    """Rows as a run would leave them: the accuracy of a case, and how its curve goes there."""
    rows = []
    for case in filter(keep, module.cases()):
        end, count = accuracy(case), 40 if case["part"] == "grid" else 4
        curve = [end - 20 * (1 - along(case, (n + 1) / count)) for n in range(count)]
        figures = {"accuracy": end, "curve": curve, "at": [100 * (n + 1) for n in range(count)]}
        figures |= {
            "step_ms": 2.0 if case["arm"] == "tier W" else 1.0,
            "recorded": True,
            "rate": case.get("rate", fig3_depth.RATES[-1]),
        }
        if case["part"] == "grid" and case["arm"] == "tier W":
            figures |= {"hard": end - 3, "hard_tuned": end - 1, "soft_tuned": end}
        rows.append(Row(case, figures, 1.0, False, ABOUT))
    return rows


def test_the_grid_has_every_arm_budget_and_depth_once_in_order_of_weight():
    cases = fig3_depth.cases()
    assert len({record.key(case) for case in cases}) == len(cases)
    assert [c["part"] for c in cases] == sorted(
        (c["part"] for c in cases), key="time sweep grid beyond".find
    )
    grid = [(c["arm"], c["depth"], c["width"]) for c in cases if c["part"] == "grid"]
    assert grid[0] == ("tier W", 14, 16)
    for width, depth in (
        (16, 8),
        (16, 14),
        (16, 20),
        (23, 8),
        (23, 14),
        (23, 20),
        (21, 14),
        (22, 14),
    ):
        assert grid.count(("silu", depth, width)) == grid.count(("relu", depth, width)) == 3
    assert {c["rate"] for c in cases if c["part"] == "sweep"} == set(fig3_depth.RATES)
    assert {c["images"] for c in fig3_depth.cases("cifar100")} == {"cifar100"}


def sweep_row(rate: float, **figures) -> Row:
    return Row({"part": "sweep", "arm": "silu", "rate": rate}, figures, 1.0, False, ABOUT)


def test_the_rate_is_the_best_of_those_that_end():
    rows = [sweep_row(0.05, accuracy=70.0), sweep_row(0.15, accuracy=80.0)]
    rows.append(sweep_row(0.45, diverged="the loss is nan"))
    assert fig3_depth.rate_of("silu", rows) == 0.15
    with pytest.raises(RuntimeError, match="run --only part=sweep arm='silu' first"):
        fig3_depth.rate_of("silu", rows[:2])  # 0.45 was not tried
    with pytest.raises(RuntimeError, match="run --only part=sweep arm='relu' first"):
        fig3_depth.rate_of("relu", rows)


def test_the_sweep_never_sees_the_test_images():
    images = torch.arange(10).byte().view(10, 1, 1, 1).expand(10, 3, 32, 32)
    data = Labelled((images, torch.arange(10)), (images + 100, torch.arange(10)), "")
    swept = fig3_depth.left_out(data, 3)
    assert swept.train[1].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert swept.test[1].tolist() == swept.test[0][:, 0, 0, 0].tolist() == [7, 8, 9]


def test_one_network_is_trained_hardened_and_tuned():
    smoke = argparse.Namespace(data=None, smoke=True, device="cpu", out=None)
    swept, *_, last = fig3_depth.cases(smoke=True)[3:]
    figures = fig3_depth.run(swept, smoke)
    assert len(figures["curve"]) == len(figures["at"]) == 8
    assert figures["rate"] == swept["rate"]
    with pytest.raises(RuntimeError, match="has no rate yet"):
        fig3_depth.run(last, smoke)


@pytest.mark.slow
def test_smoke_runs_every_part(tmp_path):
    rows = fig3_depth.main(["--smoke", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl")])
    assert [row.case["part"] for row in rows] == ["time"] * 2 + ["sweep"] * 4 + ["grid"] * 2
    assert {"hard", "hard_tuned", "soft_tuned"} <= rows[-1].figures.keys()
    assert all(row.smoke for row in rows)


def test_a_part_that_fails_does_not_stop_the_next(tmp_path):
    def failing(case, asked):
        if case["part"] == "sweep":
            raise ValueError("no rate")
        return {"value": 1.0}

    words = ["--smoke", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl")]
    asked = record.options("name", None).parse_args(words)
    with pytest.raises(RuntimeError, match="sweep: 4 of 4 cases failed"):
        fig3_depth.in_parts("name", fig3_depth.cases(smoke=True), failing, asked)
    assert [row.case["part"] for row in record.rows(asked.out)] == ["time"] * 2 + ["grid"] * 2


def test_a_network_that_goes_twice_as_fast_is_seen_as_such():
    fast = made_rows(lambda case: 90.0, along=lambda c, t: min(1, t * (1 + (c["arm"] == "tier W"))))
    found = {v.claim: v for v in fig3_depth.verdicts(fast)}
    steps = found["3d: times fewer steps to the level of SiLU, CIFAR-10"]
    # both curves are smoothed over 3 of 40 evaluations, and the level is that of the last 6
    factor = float(steps.ours.split()[0])
    assert steps.verdict == "reproduced"
    assert factor == pytest.approx(2, rel=0.1)
    assert "| SiLU, w = 16 |" in fig3_depth.page(fast)
    equal = made_rows(lambda case: 90.0)
    assert {
        v.verdict
        for v in fig3_depth.verdicts(equal)
        if "3d: times fewer steps to the level of SiLU" in v.claim
    } == {"not"}


def test_verdicts_follow_the_accuracies():
    better = {"tier W": 92.0, "tier W K=3": 92.1}
    rows = made_rows(lambda c: better.get(c["arm"], 90.0 + (c["width"] > 16) * 3 + c["seed"] / 10))
    words = [v.verdict for v in fig3_depth.verdicts(rows)]
    assert words == [
        *("reproduced", "not", "reproduced", "not", "reproduced"),
        *("not", "not", "no data here"),  # 1.1 times fewer is not 2.04
    ]
    page = fig3_depth.page(rows)
    assert "123 of 123 cases ran." in page
    assert (
        "| ReLU, w = 23 | 1.03 | 1.04 | 1.04 | 1.07 | 1.12 | 93.10 +- 0.10 | -1.10 [-1.35, -0.85] |"
        in page
    )
    assert "| depth 14 | 92.00 +- 0.00 | 89.00 +- 0.00 | 91.00 +- 0.00 | 92.00 +- 0.00 |" in page


def test_a_sweep_that_ends_at_its_edge_is_said_to():
    rows = made_rows(lambda c: 90.0 + c.get("rate", 0))
    said = "0.45, the highest that was tried, is the best for every arm: the sweep ends at its edge"
    assert said in fig3_depth.page(rows)
    inside = made_rows(lambda c: 90.0 - abs(c.get("rate", 0.15) - 0.15))
    assert "edge" not in fig3_depth.page(inside)
    lowest = made_rows(lambda c: 90.0 - c.get("rate", 0) * (c["arm"] == "silu"))
    assert "0.05, the lowest that was tried, is the best for SiLU:" in fig3_depth.page(lowest)


def test_rows_of_another_length_or_rate_are_not_mixed_in_unseen():
    rows = made_rows(lambda c: 90.0 + c.get("rate", 0))
    case = next(row.case for row in rows if row.case["part"] == "grid")
    longer = Row({**case, "epochs": 200}, {"accuracy": 99.0, "rate": 0.45}, 1.0, False, ABOUT)
    page = fig3_depth.page([*rows, longer])
    assert "Left out: 1 rows of another number of epochs." in page
    assert "99.0" not in page
    assert fig3_depth.verdicts([*rows, longer]) == fig3_depth.verdicts(rows)
    moved = [
        row._replace(figures={**row.figures, "rate": 0.15}) if row.case == case else row
        for row in rows
    ]
    said = "Runs at another rate than the sweep chooses: 1 of tier W at 0.15 (the sweep: 0.45)."
    assert said in fig3_depth.page(moved)
    assert "another rate" not in fig3_depth.page(rows)


def test_a_page_says_when_the_baselines_come_to_their_level():
    rows = made_rows(lambda c: 90.0)
    assert "come to their level at 98 % of the run" in fig3_depth.page(rows)


def test_fewer_layers_at_one_depth_alone_is_not_the_whole_claim():
    def one(case):
        return case["part"] == "grid" and case["depth"] < 20

    level = {"tier W": 92.0}
    for keep, word in ((lambda case: True, "reproduced"), (one, "partly")):
        rows = made_rows(lambda c: level.get(c["arm"], 90.0), keep=keep)
        found = {v.claim: v for v in fig3_depth.verdicts(rows)}
        assert found["3b: tier W needs fewer layers than ReLU of the same width"].verdict == word


def test_a_page_of_few_rows_says_what_was_cut():
    few = made_rows(
        lambda c: 90.0, keep=lambda c: c["part"] == "grid" and c["width"] == 16 and c["seed"] < 2
    )
    diverged = Row({**few[0].case, "seed": 2}, {"diverged": "nan"}, 1.0, False, ABOUT)
    page = fig3_depth.page([*few, diverged])
    assert "Not run:" in page
    assert "ReLU depth 14 w 23 (grid)" in page
    assert "SiLU depth 14 w 16 (grid), seed 2" in page
    assert "Diverged: tier W" in page
    assert "not timed" in page
    assert "| 90.00 +- 0.00 (2 seeds) |" in page
    assert {v.verdict for v in fig3_depth.verdicts([])} == {"not run", "no data here"}


def test_the_picture_is_small_and_works_without_the_other_depths(tmp_path):
    rows = made_rows(lambda case: 90.0 + case["seed"] + case["depth"] / 10)
    fig3_depth.draw(rows, tmp_path)
    file = tmp_path / "fig3_depth.svg"
    assert file.stat().st_size < 150_000
    first = file.read_bytes()
    fig3_depth.draw(rows, tmp_path)
    assert file.read_bytes() == first
    fig3_depth.draw([row for row in rows if row.case["depth"] == 14], tmp_path)
    assert file.read_bytes() != first


def test_speedups_say_how_many_never_arrive():
    rows = made_rows(lambda c: 90.0 + (c["arm"] == "silu") * (4 * c["seed"] - 2))
    runs = depth_page.grouped(rows)
    found = depth_page.reached(runs[depth_page.OURS], runs["silu", 14, 16])
    assert "1 of 3 never" not in depth_page.speedups([])
    assert [r.candidate is None for r in found] == [False, True, True]
    assert depth_page.speedups(found).endswith("; 2 of 3 never")


def test_rows_of_cifar100_have_a_line_and_a_verdict_of_their_own():
    rows = made_rows(lambda c: 70.0, along=lambda c, t: min(1, t * (1 + (c["arm"] == "tier W"))))
    assert "`--images cifar100`" in fig3_depth.page(rows)
    other = [row._replace(case={**row.case, "images": "cifar100"}) for row in rows]
    page = fig3_depth.page([*rows, *other])
    assert "CIFAR-100, with the rates of CIFAR-10: tier W 70.00 +- 0.00 %, GELU 70.00" in page
    assert fig3_depth.verdicts([*rows, *other])[-1].verdict == "reproduced"


def test_missing_cifar100_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="CIFAR100"):
        cifar100(tmp_path)


def test_cifar100_is_read_with_its_fine_labels(tmp_path):
    import pickle

    for name, first, count in (("train", 0, 10), ("test", 10, 2)):
        data = torch.zeros(count, 3072).byte().numpy()
        labels = list(range(first, first + count))
        part = {b"data": data, b"fine_labels": labels, b"coarse_labels": [0] * count}
        (tmp_path / name).write_bytes(pickle.dumps(part))
    found = cifar100(tmp_path)
    assert found.train[1].tolist() == list(range(10))
    assert found.test[1].tolist() == [10, 11]
