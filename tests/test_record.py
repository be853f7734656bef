"""Rows of results: what is run, what is kept, what is refused."""

import argparse
import json
import pickle
import sys
import tempfile
from functools import partial

import pytest

from experiments import fig3_depth, record, results
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


def test_ray_is_told_the_name_of_what_it_calls(tmp_path, monkeypatch):
    class Ray:
        """Calls where it stands, with what a worker would get."""

        def remote(self, **_):
            return lambda f: argparse.Namespace(
                remote=lambda *given: partial(f, *pickle.loads(pickle.dumps(given)))
            )

        def wait(self, waiting):
            return waiting[:1], waiting[1:]

        def get(self, call):
            return call()

    monkeypatch.setattr(record, "_ray", Ray)
    rows = record.complete("x", CASES, double, asked(tmp_path, "--jobs", "2"))
    assert [row.figures["value"] for row in rows] == [0, 2, 0, 2]
    monkeypatch.setattr(double, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", argparse.Namespace(name="a.b"))
    assert record._name_of(double) == ("a.b", "double")


def test_a_smoke_run_in_several_processes_reads_its_own_rows(tmp_path, monkeypatch):
    # by default its rows have the name of this process, and other tests would read them
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = fig3_depth.main(["--smoke", "--jobs", "2"])
    swept = {(r.case["arm"], r.case["rate"]) for r in rows if r.case["part"] == "sweep"}
    used = {(r.case["arm"], r.figures["rate"]) for r in rows if r.case["part"] == "grid"}
    assert used
    assert used <= swept


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


def test_of_several_at_once_the_longest_begin_first(tmp_path, monkeypatch):
    begun = []

    def side_by_side(cases, run, given):
        begun.append([case["seed"] for case in cases])
        return ((case, double(case, given), 0.0) for case in cases)

    monkeypatch.setattr(record, "_run_all", side_by_side)
    for jobs in ("1", "2"):
        given = asked(tmp_path, "--jobs", jobs, "--out", str(tmp_path / jobs))
        rows = record.complete("name", CASES, double, given, cost=lambda case: case["seed"])
        assert [row.case for row in rows] == CASES
    assert begun == [[0, 1, 0, 1], [1, 1, 0, 0]]


def test_only_chooses_cases_and_says_what_there_is(tmp_path):
    given = asked(tmp_path, "--only", "arm=gates", "seed=0,1")
    assert [row.case for row in record.complete("name", CASES, double, given)] == CASES[2:]
    for only, said in (
        ("depth=1", "there are arm, seed"),
        ("arm=x", "no case has arm=x; there are relu, gates"),
        ("arm=relu,gate", "no case has arm=gate; there are relu, gates"),
        ("arm", "KEY=VALUE"),
    ):
        with pytest.raises(SystemExit, match=said):
            record.complete("name", CASES, double, asked(tmp_path, "--only", only))


def test_values_that_no_case_has_together_leave_none(tmp_path):
    given = asked(tmp_path, "--only", "arm=relu", "seed=7")
    with pytest.raises(SystemExit, match="no case is left"):
        record.complete("name", [*CASES, {"arm": "gates", "seed": 7}], double, given)


def test_rows_of_other_data_are_refused_where_they_would_be_mixed(tmp_path, monkeypatch):
    file = tmp_path / "made.jsonl"
    record.complete("name", CASES[:2], double, asked(tmp_path, "--out", str(file)), data="a" * 64)
    given = asked(tmp_path, "--out", str(file))
    with pytest.raises(ValueError, match="seed 0 has the hash bbbbbbbbbbbb, rows before it aaaa"):
        record.complete("name", CASES, double, given, data="b" * 64)
    assert len(record.rows(file)) == 2
    monkeypatch.setattr(results, "PAGES", ("made",))
    results.gathered(tmp_path)
    row = record.rows(file)[0]
    other = row._replace(about={**row.about, "data": "b" * 64})
    file.write_text(file.read_text() + json.dumps(other._asdict()) + "\n")
    with pytest.raises(ValueError, match="rows of different data"):
        results.gathered(tmp_path)
    # an experiment may have several data sets, each with files of its own
    record.check_data([row, other._replace(case={**row.case, "images": "cifar100"})])


def test_rows_of_several_places_are_all_named():
    first = Row({}, {}, 1.0, False, {"device": "a GPU", "torch": "2.11", "commit": "abc"})
    other = first._replace(about={**first.about, "commit": "def"})
    assert record.measured([first, first]) == "a GPU, torch 2.11, commit abc"
    said = "2 rows: a GPU, torch 2.11, commit abc; 1 rows: a GPU, torch 2.11, commit def"
    assert record.measured([first, first, other]) == said


def test_a_curve_has_the_order_of_its_steps():
    kept = json.loads(json.dumps({"50": 1.0, "100": 2.0, "1000": 3.0}, sort_keys=True))
    assert list(kept) == ["100", "1000", "50"]
    assert list(record.curve(kept).items()) == [(50, 1.0), (100, 2.0), (1000, 3.0)]


def _write(file, number):
    def long(case, given):
        return {"value": [number] * 20_000}

    given = record.options("name", None).parse_args(["--out", str(file), "--device", "cpu"])
    record.complete("name", [{"n": number, "k": k} for k in range(20)], long, given)


@pytest.mark.slow
def test_two_processes_may_write_one_file(tmp_path):
    from multiprocessing import get_context

    file = tmp_path / "rows.jsonl"
    both = [get_context("spawn").Process(target=_write, args=(file, n)) for n in (1, 2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert len(record.rows(file)) == 40  # lines far longer than a buffer, and none is torn


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


def test_the_docstring_of_an_experiment_ends_with_what_its_rows_say():
    about = {"device": "GPU", "date": "2026-01-02"}
    rows = [record.Row({"seed": seed}, {}, 1.5, False, about) for seed in (1, 0)]
    said = results.last_result(rows, [Verdict("faster", "2", "1", "not")])
    assert said.startswith("Last result: claims: 1 not; 2 rows, GPU, seeds 0, 1, 3 s of runs")
    assert "2026-01-02" in said
    source = '"""A claim.\n\nLast result: old,\non two lines.\n"""\n\nx = 1\n'
    new = results.dated(source, said, results.PAGE)
    assert new == f'"""A claim.\n\n{said}\n"""\n\nx = 1\n'
    with pytest.raises(SystemExit, match="does not end with a paragraph"):
        results.dated('"""A claim.\n"""\n', said, results.PAGE)
    assert results.last_result([], []) == "Last result: not measured yet."


def test_a_page_is_filled_between_its_markers_and_nowhere_else():
    page = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    filled = results.filled(page, {"x": "new"}, results.PAGE)
    assert filled == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    for name, file in (("y", results.PAGE), ("summary", results.README)):
        with pytest.raises(SystemExit, match=f"has no place for {name}"):
            results.filled(page, {name: "new"}, file)
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
