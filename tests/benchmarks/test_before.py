"""Runs that go on where one was cut off, and sections that are warmed side by side before."""

import json
import subprocess

import pytest
from small import once

from benchmarks import before, checking, sections
from benchmarks.__main__ import main
from benchmarks.rows import Row
from benchmarks.timing import Work

ASKED = ["--smoke", "--only", "frozen"]


@pytest.fixture
def timed(monkeypatch):
    """The rows that a run times, by a clock that calls each once; its checks find nothing wrong."""
    works = []

    def measured(work, clock):
        works.append(work.name)
        for row in work.rows():
            yield Row(*row.key[:2], {"ours": 2.0, "native": 2.0}, row.key[2], row.limit)

    monkeypatch.setattr(sections, "measure", measured)
    monkeypatch.setattr(sections, "check", lambda device, pairs: [])
    return works


def test_a_run_that_goes_on_times_only_what_is_missing(tmp_path, capsys, timed):
    file = tmp_path / "bench.json"
    assert main([*ASKED, "--json", str(file), "--match", "relu", "--go-on"]) == 0
    assert "is not there: every row is timed" in capsys.readouterr().out
    first = json.loads(file.read_text())
    assert (first["runs"], timed) == (1, ["relu fp32", "relu in place fp32"])
    first["rows"][1]["failed"] = "OutOfMemoryError"
    file.write_text(json.dumps(first))
    timed.clear()
    assert main([*ASKED, "--json", str(file), "--go-on"]) == 0
    assert f"rows kept of {file}: 1" in capsys.readouterr().out
    assert sorted(timed) == ["relu in place fp32", "silu fp32", "tanh fp32"]
    whole = json.loads(file.read_text())
    assert whole["runs"] == 2
    assert whole["rows"][0] == first["rows"][0]
    assert len({row["work"] for row in whole["rows"]}) == len(whole["rows"]) == 4
    assert not any(row["failed"] for row in whole["rows"])


def test_a_run_with_nothing_left_to_time_is_not_counted(tmp_path, timed):
    file = tmp_path / "bench.json"
    for _ in range(2):
        assert main([*ASKED, "--json", str(file), "--go-on"]) == 0
        assert json.loads(file.read_text())["runs"] == 1
    assert len(timed) == 4


def test_what_other_sections_wrote_stays_with_what_they_found_right(tmp_path, timed):
    file = tmp_path / "bench.json"
    for section in ("frozen", "recurrent"):
        asked = ["--smoke", "--only", section, "--json", str(file), "--go-on"]
        assert main(asked) == 0
    data = json.loads(file.read_text())
    assert {row["section"] for row in data["rows"]} == {"frozen", "recurrent"}
    assert "frozen module" in data["checked"]


def test_rows_of_other_code_are_not_kept_and_that_is_said(monkeypatch, tmp_path, capsys, timed):
    file = tmp_path / "bench.json"
    asked = [*ASKED, "--json", str(file), "--go-on"]
    assert main(asked) == 0
    monkeypatch.setattr(checking, "SOURCES", checking.SOURCES[:1])
    timed.clear()
    assert main(asked) == 0
    assert len(timed) == 4
    assert "is of other code or another machine: every row is timed" in capsys.readouterr().out
    assert json.loads(file.read_text())["runs"] == 1


@pytest.mark.parametrize("held", ["", "{", "[]", "{}", '{"code": [], "smoke": true}', "\xff"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, capsys, timed, held):
    file = tmp_path / "bench.json"
    file.write_text(held, encoding="latin-1")
    assert main([*ASKED, "--json", str(file), "--go-on"]) == 2
    assert "does not hold what --go-on can keep" in capsys.readouterr().err
    assert file.read_text(encoding="latin-1") == held
    assert timed == []


def test_going_on_needs_a_file(capsys):
    for more in ([], ["--json", "-"]):
        with pytest.raises(SystemExit):
            main([*ASKED, "--go-on", *more])
        assert "--go-on goes with --json FILE" in capsys.readouterr().err


def test_of_a_work_with_a_row_missing_every_row_is_timed():
    limits = {("ours", "native"): 1.0, ("ours", "copy"): 2.0}
    one, two = (Work("s", name, once, limits, ("blend",)) for name in ("one", "two"))
    rows = [row for work in (one, two) for row in work.rows()]
    assert len(rows) == 4
    stay, left = before.split(rows[1:], {"s": [one, two]})
    assert stay == rows[2:]
    assert left == {"s": [one]}


def test_sections_are_warmed_by_processes_of_their_own(monkeypatch, tmp_path, capsys, timed):
    calls = []

    def ended(command, **options):
        calls.append(command[command.index("--only") + 1 :])
        failed = "frozen" in command
        return subprocess.CompletedProcess(command, int(failed), "", "so it ended\n" * failed)

    monkeypatch.setattr(before.subprocess, "run", ended)

    asked = ["--smoke", "--only", "frozen", "host", "--match", "relu", "--jobs", "2"]
    right = tmp_path / "right"
    assert main([*asked, "--checked", str(right)]) == 0
    assert calls == [["frozen", "--smoke", "--match", "relu", "--checked", str(right)]]
    out = capsys.readouterr().out
    assert "not warmed: frozen: so it ended" in out
    assert "0 of 1 sections warmed" in out
    assert timed == ["relu fp32", "relu in place fp32"]


def test_what_a_process_found_right_is_not_checked_again(monkeypatch, tmp_path, timed):
    def ended(command, **options):
        with monkeypatch.context() as apart:
            apart.setattr(sections, "warm_side_by_side", None)
            code = main(command[command.index("--warm") :])
        return subprocess.CompletedProcess(command, code, "", "")

    seen = []
    monkeypatch.setattr(before.subprocess, "run", ended)
    monkeypatch.setattr(sections, "called_once", lambda work: 0)
    monkeypatch.setattr(sections, "check", lambda device, pairs: seen.append(bool(pairs)) or [])
    assert main([*ASKED, "--match", "relu", "--jobs", "1"]) == 0
    assert seen == [True, False]


@pytest.mark.parametrize("given", ["-1", "two", "1.5", ""])
def test_a_number_of_processes_is_a_number(capsys, given):
    with pytest.raises(SystemExit):
        main([*ASKED, f"--jobs={given}"])
    assert f"{given!r} is no number of processes, such as 4" in capsys.readouterr().err
