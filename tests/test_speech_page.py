"""The section on AN4: what its tables, tests, verdicts and picture say of the rows."""

import json

import pytest
import torch

from experiments import speech_page
from experiments.record import Row
from experiments.speech_networks import ARMS
from experiments.speech_runs import bootstrap


def made_rows(better=0.0, widths=(128, 256), seeds=(0, 1, 2)):
    """Rows as runs make them: contenders but the standard have `better` errors less of 100."""
    generator = torch.Generator().manual_seed(0)
    about = {"device": "a device", "date": "2000-01-01", "command": "c", "data": ""}
    rows = []
    for hidden in widths:
        for seed in seeds:
            base = torch.randint(0, 3, (130,), generator=generator)
            for arm in ARMS:
                fewer = torch.rand(130, generator=generator) < (better if arm != "standard" else 0)
                errors = (base - fewer.long()).clamp(min=0)
                wer = 100 * errors.sum().item() / 773
                curve = [100.0 - (100 - wer) * min(1, (k + 1) / 8) for k in range(12)]
                for rate in speech_page.RATES if (hidden, seed) == (128, 0) else (8e-4,):
                    figures = {
                        "wer": wer, "validation": 20.0 + abs(rate - 8e-4), "errors": errors.tolist(),
                        "words": [6] * 123 + [5] * 7, "curve_test": curve, "recorded": True,
                        "curve_step": [100 * (k + 1) for k in range(12)],
                    }  # fmt: skip
                    case = {"kind": "train", "epochs": 60, "hidden": hidden, "seed": seed}
                    rows.append(Row({**case, "rate": rate, "arm": arm}, figures, 1.0, False, about))
    for arm in ARMS:
        ms = {"ms": 10.0 if arm == "standard" else 20.0, "recorded": True}
        rows.append(Row({"kind": "time", "hidden": 128, "arm": arm}, ms, 1.0, False, about))
    return [Row(**json.loads(json.dumps(row._asdict()))) for row in rows]


def test_the_page_has_intervals_and_says_what_was_cut():
    text = speech_page.page(made_rows(0.3))
    assert "constant - control" in text
    assert "Not run: standard at H = 192 (3 of 3 seeds)" in text
    assert "control at H = 1024 (3 of 3 seeds)" in text
    assert "0.0008" in text
    assert "| 128 | constant |" in text
    words = {v.claim[:20]: v.verdict for v in speech_page.verdicts(made_rows(0.3))}
    assert list(words.values()) == ["partly", "not", "not run", "not"]  # two widths of four
    whole = speech_page.verdicts(made_rows(0.3, widths=speech_page.HIDDEN))
    assert [v.verdict for v in whole[:2]] == ["reproduced", "not"]
    one = speech_page.verdicts(made_rows(0.3, widths=speech_page.HIDDEN, seeds=(0,)))
    assert one[0].verdict == "not"  # one seed says nothing of others
    assert next(v.verdict for v in speech_page.verdicts(made_rows(0.0))) == "not"


def test_the_page_says_how_networks_were_trained():
    rows = made_rows(0.3)
    assert "stacked" not in speech_page.page(rows)
    for row in rows[:5]:
        row.figures["stacked"] = 4
    runs = sum("wer" in row.figures for row in rows)
    assert f"Of {runs} runs 5 were trained with the contenders" in speech_page.page(rows)


def test_a_run_that_diverged_is_named_and_counts_in_no_mean():
    rows = made_rows(0.3)
    which = {"arm": "constant", "hidden": 128, "seed": 1, "rate": 8e-4}
    for row in rows:
        if which.items() <= row.case.items():
            row.figures.update(wer="inf", validation="inf", errors=[9] * 130)
        if row.case.get("rate") == 2e-3 and row.case["arm"] == "released":
            row.figures.update(wer="inf", validation="inf")
    text = speech_page.page(rows)
    said = "Diverged: released at H = 128, rate 0.002, seed 0; constant at H = 128, rate 0.0008"
    assert said in text
    assert "constant at H = 128 (" not in text  # among those that were not run
    assert "(2 seeds)" in next(line for line in text.splitlines() if line.startswith("| 128 | "))
    assert " inf" not in text
    assert "| diverged | 0.0008 |" in text
    drawn = speech_page.runs_of(rows)
    assert bootstrap(drawn.of("constant", 128), drawn.of("standard", 128)).seeds == 2


def continued_rows(rows, start, rate=3e-4, seeds=(0, 1, 2)):
    """Runs that go on from starts which end at a WER of `start`, "constant" with fewer errors."""
    like = next(row for row in rows if row.case["arm"] == "standard")
    made = []
    for seed in seeds:
        case = {"hidden": 1024, "seed": seed, "rate": rate}
        ended = {**like.figures, "wer": start, "validation": start}
        begun = {"kind": "start", "epochs": 60, "arm": "standard", **case}
        made.append(like._replace(case=begun, figures=ended))
        for arm, errors in (("standard", [2] * 130), ("constant", [1] * 130)):
            own = {"kind": "continued", "epochs": 20, "before": 60, "arm": arm, **case}
            curve = [start, sum(errors) / 7.73]
            figures = {**like.figures, "errors": errors, "wer": curve[-1], "curve_test": curve}
            made.append(like._replace(case=own, figures=figures))
    return made


def test_a_start_that_was_not_trained_gives_no_verdict():
    rows = made_rows(0.3)
    limit = speech_page.worst(speech_page.runs_of(rows))
    verdict = speech_page.verdicts([*rows, *continued_rows(rows, limit)])[2]
    assert (verdict.verdict, verdict.ours[:6]) == ("reproduced", "-16.82")
    untrained = [*rows, *continued_rows(rows, limit + 0.1)]
    verdict = speech_page.verdicts(untrained)[2]
    assert verdict.verdict == "not run"
    assert verdict.ours.startswith("no start was trained (-16.82")
    assert "Rates of a start not tried: 0.0001, 0.0008." in speech_page.page(untrained)


def test_of_several_rates_of_a_start_the_best_counts():
    rows = made_rows(0.3)
    both = [*continued_rows(rows, 20.0), *continued_rows(rows, 90.0, rate=8e-4)]
    for order in (both, both[::-1]):
        found = speech_page.continued([*rows, *order])
        assert {f["curve_test"][0] for own in found.values() for f in own.values()} == {20.0}


def test_the_page_stands_with_no_rows_and_with_few():
    assert [v.verdict for v in speech_page.verdicts([])] == ["not run"] * 4
    few = made_rows(0.3, widths=(128,), seeds=(0,))
    assert "(1 seed)" in speech_page.page(few)
    speech_page.page([row for row in few if row.case["arm"] == "standard"])
    speech_page.page(few[:1])


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    speech_page.draw(made_rows(0.2), tmp_path)
    assert 1000 < (tmp_path / "fig3_speech.svg").stat().st_size < 150_000
