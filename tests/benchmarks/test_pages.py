"""Rows, the tables they make, and a page from what was written."""

import json

import pytest
from small import fake_rows

from benchmarks import pages, rows
from benchmarks.rows import Row
from benchmarks.timing import Place


def test_the_ratio_of_replays_stands_beside_and_decides_nothing():
    row = Row("s", "w", {"copy": 1.0, "ours": 3.0}, "copy", 2.0, {"copy": 1.0, "ours": 1.1})
    assert "| w | 3 | copy | 3.000 | 1.100 | 2.000 | MISSED |" in rows.table([row])


def test_a_missed_limit_is_named():
    found = [Row("s", "slow", {"copy": 1.0, "ours": 3.0}, "copy", 2.0)]
    found.append(Row("s", "fast", {"copy": 1.0, "liger": 2.0, "ours": 1.5}, "best", 2.0))
    assert [row.verdict for row in found] == ["MISSED", "ok"]
    assert "| 3.000 |  | 2.000 | MISSED |" in rows.table(found)


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
