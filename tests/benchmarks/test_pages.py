"""Rows, the tables they make, and a page from what was written."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from small import fake_rows

from benchmarks import pages, rows, sections
from benchmarks.rows import Row
from benchmarks.timing import Place

STORED = Path(pages.__file__).parent


def stored(folder):
    """All that is stored of a machine, as one run."""
    parts = [json.loads(path.read_text()) for path in sorted((STORED / folder).glob("*.json"))]
    return parts[0] | {"rows": [row for part in parts for row in part["rows"]]}


def whole():
    """A run with every row of a GPU, whether the stored one has them all or not."""
    data = stored("h200")
    have = {(row["section"], row["work"], row["over"]) for row in data["rows"]}
    every = [
        row for works in sections.whole(True).values() for work in works() for row in work.rows()
    ]
    lost = [asdict(row) for row in every if (row.section, row.work, row.over) not in have]
    return data | {"rows": [*data["rows"], *lost]}


def page_of(tmp_path, *files):
    """The page of a folder with these files in it."""
    (tmp_path / "here").mkdir(exist_ok=True)
    for name, data in zip(("bench", "more"), files, strict=False):
        (tmp_path / "here" / f"{name}.json").write_text(json.dumps(data))
    pages.main(tmp_path / "here", out=tmp_path)
    return (tmp_path / "RESULTS.md").read_text()


def test_the_ratio_of_replays_stands_beside_and_decides_nothing():
    row = Row("s", "w", {"copy": 1.0, "ours": 3.0}, "copy", 2.0, {"copy": 1.0, "ours": 1.1})
    assert "| w | 3 | copy | 3.000 | 1.100 | 2.000 | MISSED |" in rows.table([row])


def test_a_missed_limit_is_named():
    found = [Row("s", "slow", {"copy": 1.0, "ours": 3.0}, "copy", 2.0)]
    found.append(Row("s", "fast", {"copy": 1.0, "liger": 2.0, "ours": 1.5}, "best", 2.0))
    assert [row.verdict for row in found] == ["MISSED", "ok"]
    assert "| 3.000 |  | 2.000 | MISSED |" in rows.table(found)


@pytest.mark.parametrize(
    ("times", "over"),
    [
        ({"ours": 1.0}, "copy"),
        ({"copy": 1.0}, "copy"),
        ({"ours": 1.0}, "best"),
        ({}, ""),
        ({"a": 1.0, "ours": 1.0}, "a|b"),  # the faster of two is not known from one
        ({"copy": 0.0, "ours": 1.0}, "copy"),
        ({"copy": math.inf, "ours": 1.0}, "copy"),  # 0.0 would be within any limit
        ({"copy": math.nan, "ours": 1.0}, "copy"),
    ],
)
def test_a_limit_whose_ratio_is_missing_was_not_measured(times, over):
    row = Row("s", "w", times, over, 2.0)
    assert row.verdict == "not measured"
    assert rows.table([row]).endswith("| 2.000 | not measured |")
    assert Row("s", "w", times, over, None).verdict == ""


@pytest.mark.parametrize("ours", [math.nan, math.inf])
def test_a_figure_that_is_no_number_misses_its_limit(ours):
    for over in ("copy", ""):
        assert Row("s", "w", {"copy": 1.0, "ours": ours}, over, 2.0).verdict == "MISSED"


def test_the_summary_counts_what_was_not_measured_apart():
    assert sections._summary(["ok", "MISSED", ""]) == "1 of 2 limits missed"
    counted = sections._summary(["ok", "not measured", "not measured"])
    assert counted == "0 of 1 limits missed, 2 not measured"


def test_the_slope_is_that_of_large_work():
    times = {24: 9.0, 25: 1.0, 26: 2.0, 27: 4.0}
    found = [Row("growth", "", {"ours": t}, "copy", None, power=p) for p, t in times.items()]
    assert rows.slope_of(found) == pytest.approx(1.0)
    assert rows.slope_of(found[:2]) is None


def test_a_page_and_a_picture_are_made_from_what_was_written(tmp_path):
    pytest.importorskip("matplotlib")
    found = fake_rows(Place("cpu", None), "growth")
    data = {
        "machine": {"gpu": "none"},
        "how": "once",
        "wrong": [],
        "rows": [vars(r) for r in found],
    }
    (tmp_path / "bench.json").write_text(json.dumps(data))
    pages.main(tmp_path, out=tmp_path)
    assert "| 2^3 fp32 | 2 | copy | 1.000 | 1.000 |" in (tmp_path / "RESULTS.md").read_text()
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_the_page_of_the_stored_runs_is_the_one_that_is_kept(tmp_path):
    pytest.importorskip("matplotlib")
    pages.main(STORED / "h200", STORED / "cpu", out=tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == (STORED / "RESULTS.md").read_text()


def test_a_page_of_a_whole_run_has_nothing_to_say_about_what_is_missing(tmp_path):
    pytest.importorskip("matplotlib")
    data = whole()
    assert "Not the whole benchmark" not in page_of(tmp_path, data)


def test_a_page_names_the_sections_and_counts_the_rows_that_were_not_run(tmp_path):
    pytest.importorskip("matplotlib")
    data = whole()
    first = data["rows"][0]
    data["rows"] = [
        row
        for row in data["rows"]
        if row["section"] not in ("host", "llm") and (row["section"], row) != ("elementwise", first)
    ]
    page = page_of(tmp_path, data)
    assert (
        "## On an NVIDIA H200\n\n"
        "Not the whole benchmark: not run were elementwise (1 of 34 rows), host, llm.\n"
    ) in page


def test_the_files_of_a_folder_are_one_run_together(tmp_path):
    pytest.importorskip("matplotlib")
    data = whole()
    parts = [
        data | {"rows": [r for r in data["rows"] if (r["section"] == "llm") == own]}
        for own in (False, True)
    ]
    assert "not run were llm.\n" in page_of(tmp_path, parts[0])
    assert "Not the whole benchmark" not in page_of(tmp_path, *parts)


def test_a_run_that_was_stopped_before_its_first_row_is_no_whole_run(tmp_path):
    data = stored("cpu") | {"rows": []}
    lacking = ", ".join(sections.here(smoke=False))
    assert f"Not the whole benchmark: not run were {lacking}.\n" in page_of(tmp_path, data)


def test_a_smoke_run_is_called_one_and_stands_for_no_section(tmp_path):
    data = stored("cpu") | {"smoke": True}
    data["machine"]["gpu"] = "NVIDIA H200"  # which it does not use
    page = page_of(tmp_path, data)
    assert "## On a CPU\n\nNot the whole benchmark: not run were cpu, calls, host, " in page
    assert "A smoke run: small sizes on the CPU" in page


def test_the_page_names_the_families_that_were_checked():
    data = stored("cpu")
    data.pop("checked", None)  # an earlier run did not name them
    assert "Checks: all pairs agree." in pages.report(data)
    data["checked"] = ["frozen module", "module"]
    assert "Checks: all pairs of frozen module, module agree." in pages.report(data)


@pytest.mark.parametrize("figure", ["nan", "inf", math.nan, math.inf])
def test_figures_that_are_no_numbers_are_shown_and_miss(tmp_path, figure):
    """A run writes them as texts, which JSON has."""
    pytest.importorskip("matplotlib")
    data = stored("h200")
    for row in data["rows"]:
        if row["section"] in ("frozen", "growth"):
            row["times"]["ours"] = row["replayed"]["ours"] = figure
    page = page_of(tmp_path, data)
    assert f"| silu bf16 | {figure} | native | {figure} | {figure} | 1.020 | MISSED |" in page
    assert "th power of the work" not in page
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def _without(row, name):
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: [], "it has no rows of a machine"),
        (lambda d: _without(d, "machine"), "it has no rows of a machine"),
        (lambda d: d | {"rows": [d["rows"][0] | {"new": 1}]}, "a row has new, which this version"),
        (lambda d: d | {"rows": [_without(d["rows"][0], "over")]}, "a row has no over"),
        (lambda d: d | {"rows": [d["rows"][0] | {"times": {"ours": "x"}}]}, "could not convert"),
        (lambda d: d | {"rows": [d["rows"][0] | {"times": [1.0]}]}, "AttributeError: 'list'"),
        (lambda d: d | {"machine": {}}, "KeyError: 'gpu'"),
        (lambda d: d | {"rows": 3}, "TypeError: 'int' object is not iterable"),
    ],
)
def test_a_file_that_no_run_of_this_version_wrote_is_named_with_what_would_work(
    tmp_path, change, said
):
    with pytest.raises(SystemExit, match=rf"bench\.json: {said}") as refused:
        page_of(tmp_path, change(stored("cpu")))
    assert "; run `python -m benchmarks --json FILE` again, or make the page" in str(refused.value)
    assert not (tmp_path / "RESULTS.md").exists()


def test_each_folder_is_a_machine_with_a_heading_of_its_own(tmp_path):
    for name, gpu in (("fast", "NVIDIA H200"), ("slow", "none")):
        row = Row("frozen", f"silu {name}", {"native": 1.0, "ours": 1.5}, "native", 2.0)
        data = {"machine": {"gpu": gpu}, "how": "once", "wrong": [], "rows": [vars(row)]}
        (tmp_path / name).mkdir()
        (tmp_path / name / "bench.json").write_text(json.dumps(data))
    pages.main(tmp_path / "fast", tmp_path / "slow", out=tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    fast, slow = page.index("## On an NVIDIA H200"), page.index("## On a CPU")
    assert fast < page.index("silu fast") < slow < page.index("silu slow")


def test_a_folder_without_rows_is_an_error_and_the_page_stays(tmp_path):
    (tmp_path / "RESULTS.md").write_text("as it was")
    with pytest.raises(SystemExit, match="nowhere holds no JSON"):
        pages.main(tmp_path / "nowhere", out=tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == "as it was"


def test_times_of_an_older_format_are_refused(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps({"machine": {}, "wrong": [], "rows": []}))
    with pytest.raises(
        SystemExit, match=r"an older benchmark.*run `python -m benchmarks --json FILE` again"
    ):
        pages.main(tmp_path, out=tmp_path)
    assert not (tmp_path / "RESULTS.md").exists()


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "bench.json").write_text('{"rows": [')
    with pytest.raises(SystemExit, match=r"bench\.json: Expecting value"):
        pages.main(tmp_path, out=tmp_path)
    assert not (tmp_path / "RESULTS.md").exists()
