"""Rows of results: what is run, what is kept, what is refused."""

import json

import pytest

from experiments import record, results
from experiments.record import Row, Verdict

CASES = [{"arm": arm, "seed": seed} for arm in ("relu", "gates") for seed in range(2)]


def double(case, asked):
    return {"value": 2.0 * case["seed"], "curve": [1, 2], "bad": float("nan")}


def asked(tmp_path, *more):
    words = ["--out", str(tmp_path / "rows.jsonl"), "--device", "cpu", *more]
    return record.options("name", "What it shows.\n").parse_args(words)


def test_every_case_is_run_once_and_its_row_says_where_it_comes_from(tmp_path, capsys):
    first = record.complete("name", CASES[:3], double, asked(tmp_path), data="abc")
    again = record.complete("name", CASES, double, asked(tmp_path), data="abc")
    assert [row.case for row in again] == CASES
    assert again[:3] == first
    assert "4 cases, 1 to run" in capsys.readouterr().out
    kept = record.rows(tmp_path / "rows.jsonl")
    assert [row.figures["value"] for row in kept] == [0, 2, 0, 2]
    assert kept[0].figures["bad"] == "nan"
    assert kept[0].about["data"] == "abc"
    assert {"commit", "device", "torch", "version", "date", "command"} <= set(kept[0].about)
    assert not kept[0].smoke


@pytest.mark.slow
def test_cases_run_in_several_processes(tmp_path):
    rows = record.complete("name", CASES, double, asked(tmp_path, "--jobs", "2"))
    assert [row.figures["value"] for row in rows] == [0, 2, 0, 2]


def test_a_case_that_fails_stops_no_other_and_is_an_error_in_the_end(tmp_path, capsys):
    def failing(case, given):
        if case == CASES[1]:
            raise ValueError("no such thing")
        return double(case, given)

    said = "1 of 4 cases failed: arm relu, seed 1: ValueError: no such thing"
    with pytest.raises(RuntimeError, match=said):
        record.complete("name", CASES, failing, asked(tmp_path))
    assert [row.case for row in record.rows(tmp_path / "rows.jsonl")] == [CASES[0], *CASES[2:]]
    assert "Traceback" in capsys.readouterr().out


def test_only_chooses_cases_and_says_what_there_is(tmp_path):
    given = asked(tmp_path, "--only", "arm=gates", "seed=0,1")
    assert [row.case for row in record.complete("name", CASES, double, given)] == CASES[2:]
    for only, said in (
        ("depth=1", "there are arm, seed"),
        ("arm=x", "no case is left"),
        ("arm", "KEY=VALUE"),
    ):
        with pytest.raises(SystemExit, match=said):
            record.complete("name", CASES, double, asked(tmp_path, "--only", only))


def test_a_damaged_file_says_which_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    record.complete("name", CASES[:1], double, asked(tmp_path))
    file.write_text(file.read_text() + '{"case": {"arm"')
    with pytest.raises(ValueError, match="line 2 is no row"):
        record.complete("name", CASES, double, asked(tmp_path))


def test_smoke_rows_go_elsewhere_and_are_refused_by_the_page(tmp_path, monkeypatch):
    given = record.options("name", None).parse_args(["--smoke"])
    assert record.RESULTS not in record.file_of("name", given).parents
    row = Row({}, {}, 1.0, True, {})
    (tmp_path / "made.jsonl").write_text(json.dumps(row._asdict()) + "\n")
    monkeypatch.setattr(results, "PAGES", ("made",))
    with pytest.raises(SystemExit, match="smoke run"):
        results.gathered(tmp_path)
    monkeypatch.setattr(results, "PAGES", ())
    with pytest.raises(SystemExit, match=r"no experiment in PAGES: made\.jsonl"):
        results.gathered(tmp_path)


def test_a_page_is_filled_between_its_markers_and_nowhere_else():
    page = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    filled = results.filled(page, {"x": "new"}, results.README)
    assert filled == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    with pytest.raises(SystemExit, match="has no place for y"):
        results.filled(page, {"y": "new"}, results.PAGE)
    with pytest.raises(SystemExit, match="but not"):
        results.filled("<!-- x:begin -->\n", {"x": "new"}, results.PAGE)


def test_a_verdict_is_one_line_of_the_table():
    table = results.verdict_table([Verdict("faster", "2.04", "1.07 +- 0.02", "not")])
    assert table.splitlines()[-1] == "| faster | 2.04 | 1.07 +- 0.02 | not |"


def test_the_pages_are_what_the_rows_say():
    results.main(["--check"])


def test_the_short_table_counts_every_verdict_once():
    words = ("reproduced", "partly", "not", "not run", "no data here", "not")
    verdicts = {"fig3_speech": [Verdict("c", "p", "o", word) for word in words]}
    line = next(row for row in results.summary(verdicts).splitlines() if "speech" in row)
    assert [cell.strip() for cell in line.split("|")[2:6]] == ["1", "1", "2", "2"]
