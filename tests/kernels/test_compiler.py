"""C files are compiled once, kept where nobody else writes, and what goes wrong is said."""

import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from threshold_gating.kernels import compiler

SOURCE = "int answer(void) { return ANSWER; }\n"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A cache of its own; the compiler is looked for anew."""
    kept = (compiler._compiler, compiler._identity, compiler._folder)
    monkeypatch.setattr(compiler, "_failed", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def real():
    found = next(filter(None, map(shutil.which, compiler._NAMES["CC"])), None)
    if found is None:
        pytest.skip("no C compiler")
    return found


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_file_is_compiled_once_for_each_set_of_definitions(source, real, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("CC", script(tmp_path / "cc", f'echo run >> {log}\nexec {real} "$@"'))
    for number in (41, 42, 41, 42):
        assert compiler.library(source, [f"ANSWER={number}"]).answer() == number
    assert log.read_text().count("run") == 2


def test_another_source_is_another_file(source, real):
    assert compiler.library(source, ["ANSWER=1"]).answer() == 1
    source.write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    assert compiler.library(source, ["ANSWER=1"]).answer() == 2


def test_several_at_once_do_not_disturb_each_other(source, real, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: compiler.library(source, ["ANSWER=7"]).answer(), range(4))
    assert list(found) == [7] * 4
    assert len(os.listdir(tmp_path / "cache" / "threshold_gating")) == 1


def test_no_compiler_is_said(source, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        compiler.CompilerError, match=r"no C compiler was found \(there is no cc, g"
    ):
        compiler.library(source, [])
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(compiler.CompilerError, match=r"was found \(CC=no-such-cc\)"):
        compiler.library(source, [])


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("echo strange flag >&2; exit 1", "fails: strange flag"),
        ("exit 3", "fails: status 3"),
        ("sleep 5", r"did not end within 0\.2 s"),
        ('while [ "$1" != -o ]; do shift; done; echo garbage > "$2"', "cannot be loaded"),
        ("exit 0", "makes no file"),
        (r"printf '\\377\\376 bad' >&2; exit 1", "fails: .* bad"),
    ],
)
def test_a_compiler_that_does_not_work_is_said(source, tmp_path, monkeypatch, does, words):
    monkeypatch.setattr(compiler, "SECONDS", 0.2)
    monkeypatch.setenv("CC", script(tmp_path / "cc", does))
    with pytest.raises(compiler.CompilerError, match=words):
        compiler.library(source, ["ANSWER=1"])


def test_a_compiler_that_hangs_is_waited_for_once_and_ended_with_its_children(
    source, tmp_path, monkeypatch
):
    child = tmp_path / "child"
    monkeypatch.setattr(compiler, "SECONDS", 0.5)
    monkeypatch.setenv("CC", script(tmp_path / "cc", f"sleep 60 & echo $! > {child}; wait"))
    for number in (1, 2):
        before = time.monotonic()
        with pytest.raises(compiler.CompilerError, match=r"did not end within 0\.5 s"):
            compiler.library(source, [f"ANSWER={number}"])
    assert time.monotonic() - before < 0.4
    state = Path(f"/proc/{int(child.read_text())}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_compiler_may_have_arguments(source, real, monkeypatch):
    monkeypatch.setenv("CC", f"{real} '-DANSWER=6 * 7'")
    assert compiler.library(source, []).answer() == 42
    monkeypatch.setenv("CC", "cc 'x")
    compiler._compiler.cache_clear()
    with pytest.raises(compiler.CompilerError, match="CC=cc 'x cannot be read"):
        compiler.library(source, [])


def test_a_source_that_is_not_there_is_said(real, tmp_path):
    with pytest.raises(compiler.CompilerError, match=r"nothing can be compiled \(.*none\.c"):
        compiler.library(tmp_path / "none.c", [])


@pytest.mark.parametrize("size", [0, 100, 8000])
def test_a_file_that_was_cut_off_is_not_loaded_but_made_anew(source, real, tmp_path, size):
    folder = tmp_path / "cache" / "threshold_gating"
    stem = compiler._compiled([real, *compiler._FLAGS, "-DANSWER=5", str(source)], "answer")
    whole, name = stem.read_bytes(), stem.name
    stem.write_bytes(whole[:size])  # nothing has loaded it
    assert not compiler._is_whole(folder / name)
    again = compiler._compiled([real, *compiler._FLAGS, "-DANSWER=5", str(source)], "answer")
    assert again.name == name
    assert again.read_bytes() == whole


def test_a_folder_in_the_place_of_a_file_is_said(source, real, tmp_path):
    compiler.library(source, ["ANSWER=5"])
    (made,) = (tmp_path / "cache" / "threshold_gating").iterdir()
    made.unlink()
    made.mkdir()
    with pytest.raises(compiler.CompilerError, match="is in the way, delete it"):
        compiler.library(source, ["ANSWER=5"])


def test_without_a_home_no_folder_is_made(source, real, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does without a home
    monkeypatch.chdir(tmp_path)
    before = os.listdir()
    with pytest.raises(compiler.CompilerError, match="there is no home folder"):
        compiler.library(source, ["ANSWER=1"])
    assert os.listdir() == before


def test_a_home_that_cannot_be_written_to_is_said(source, real, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder, for root either
    with pytest.raises(compiler.CompilerError, match="there is no cache folder"):
        compiler.library(source, ["ANSWER=1"])


def test_a_cache_that_others_can_write_to_is_not_used(source, real, tmp_path):
    folder = tmp_path / "cache" / "threshold_gating"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(compiler.CompilerError, match="can be written to by others"):
        compiler.library(source, ["ANSWER=1"])
