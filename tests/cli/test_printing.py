"""Results on stdout and nothing beside them, notes and progress on stderr."""

import io
import json
import shutil
import sys
import time
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.cli import demo, main, printing
from threshold_gating.conversion import Audit, aten_ops, perplexity, proof
from threshold_gating.conversion.audit import Op


def refused(word):
    raise AssertionError(f"{word} is no JSON")


def strict(text):
    """The value of a JSON text, in which NaN and Infinity have no place."""
    return json.loads(text, parse_constant=refused)


QUICK = [
    "table --all",
    "explain sin -K 2",
    "env",
    "prove relu --dtype bfloat16",
    "convert loud.py:Loud --inputs 64,4 -o out",
    "calibrate loud.py:Loud --inputs 64,4 -K 2 --tol inf",
    "audit loud.py:Loud --inputs 64,4",
    "report loud.py:Loud --inputs 64,4",
    "demo",
]


@pytest.fixture
def folder(tmp_path, monkeypatch, programs):
    shutil.copy(programs / "loud.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    whole = demo.run
    monkeypatch.setattr(
        demo, "run", lambda out, **more: whole(out, networks=("GRU",), epochs=1, **more)
    )
    return tmp_path


@pytest.mark.parametrize("line", QUICK, ids=lambda line: line.split()[0])
def test_json_to_stdout_is_strict_and_alone(folder, capsys, line):
    if line.split()[0] in ("calibrate", "explain"):
        pytest.importorskip("scipy")
    if line == "demo":
        pytest.importorskip("sklearn")
    assert main([*line.split(), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert isinstance(strict(captured.out), dict)
    assert ("runs\n" in captured.err) == ("loud.py" in line)


@pytest.mark.parametrize("line", ["table relu", "audit loud.py:Loud --inputs 3,4"])
def test_json_in_a_file_is_beside_the_text_and_the_same(folder, capsys, line):
    assert main(line.split()) == 0
    text = capsys.readouterr().out
    assert main([*line.split(), "--json", "found.json"]) == 0
    assert capsys.readouterr().out == text
    assert main([*line.split(), "--json", "-"]) == 0
    assert (folder / "found.json").read_text() == capsys.readouterr().out


def test_a_file_may_have_the_name_of_standard_output(folder, capsys):
    assert main(["table", "relu"]) == 0
    text = capsys.readouterr().out
    assert main(["table", "relu", "--json", "./-"]) == 0
    assert capsys.readouterr().out == text
    assert strict((folder / "-").read_text())["rows"]


@pytest.mark.parametrize("path", ["nowhere/x.json", "."])
@pytest.mark.parametrize("command", ["env", "table", "demo"])
def test_json_that_cannot_be_written_is_refused_before_the_work(folder, capsys, command, path):
    assert main([command, "--json", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"tg {command}: --json {path} cannot be written; give a file in a directory, or -.\n"
    )


def test_numbers_that_json_has_not_are_texts(capsys):
    args = Namespace(json=printing.STDOUT, stdout=sys.stdout)
    printing.show(args, {"a": [float("inf"), float("nan"), 1.5]}, "text")
    assert strict(capsys.readouterr().out) == {"a": ["inf", "nan", 1.5]}


# Progress


@pytest.fixture
def stderr(monkeypatch):
    """A stream in the place of stderr, which is a terminal if asked."""

    def put(terminal):
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return put


def report():
    with printing.progress("silu") as tell:
        tell("begun")
        tell("half", 0.5)


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(stderr):
    pytest.importorskip("tqdm")
    stream = stderr(True)
    report()
    said = stream.getvalue()
    assert "silu: begun 00:00" in said
    assert "silu: half  50% |##########          |" in said.replace("█", "#")
    assert "\n" not in said
    assert said.split("\r")[-2].strip() == ""  # wiped


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("prove relu --dtype bfloat16", "relu, bfloat16 100% |"),
        ("explain relu -K 2 3", "relu: K = 3: exact with K = 2 already 00:"),
        (
            "calibrate loud.py:Loud --inputs 64,4 -K 2",
            "loud.py:Loud: calibrate: 1 sites fitted 100% |",
        ),
    ],
)
def test_commands_that_take_long_say_how_far_they_are(folder, stderr, line, shown):
    pytest.importorskip("tqdm")
    pytest.importorskip("scipy")
    stream = stderr(True)
    main(line.split())
    assert shown in stream.getvalue()


def test_nothing_is_shown_elsewhere(stderr, monkeypatch):
    stream = stderr(False)
    report()
    assert stream.getvalue() == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    stream = stderr(True)
    report()
    assert stream.getvalue() == ""


def test_long_work_is_announced_in_a_line_where_there_is_no_bar(stderr, monkeypatch):
    stream = stderr(False)
    with printing.working("verifying"):
        pass
    assert stream.getvalue() == "verifying ...\n"


def test_long_work_shows_its_time_on_a_terminal(stderr, monkeypatch):
    pytest.importorskip("tqdm")
    stream = stderr(True)
    monkeypatch.setattr(printing, "_TICK", 0.001)
    until = time.monotonic() + 60
    with printing.working("verifying"):
        while stream.getvalue().count("verifying") < 3 and time.monotonic() < until:
            time.sleep(0.001)  # a tick writes it again
    assert stream.getvalue().count("verifying") >= 3
    assert "verifying 00:00" in stream.getvalue()
    assert "\n" not in stream.getvalue()


def test_a_line_of_progress_fits_a_narrow_terminal(stderr, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = stderr(True)
    with printing.progress("a long name " * 9) as tell:
        tell("and what is done")
    assert 30 < max(map(len, stream.getvalue().split("\r"))) <= 40


def test_a_bar_goes_when_the_work_fails(stderr):
    pytest.importorskip("tqdm")
    stream = stderr(True)
    with pytest.raises(ZeroDivisionError), printing.progress("silu") as tell:
        tell("half", 1 / 0)
    assert stream.getvalue().split("\r")[-2].strip() == ""


# What the library returns, printed


class Wordy(nn.Module):
    """Long names, a site that is left, and much that is not linear beside."""

    def __init__(self):
        super().__init__()
        setattr(self, "a_name_that_goes_on" * 8, nn.GELU())
        self.smooth = nn.SiLU()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)])

    def forward(self, x):
        for module in self.children():
            x = x if isinstance(module, nn.ModuleList) else module(x)
        for norm in self.norms:
            x = norm(x)
        return torch.cummax(x.sort().values * x, -1).values / x.square().sum(-1, True).sqrt()


def results():
    x = torch.randn(64, 8)
    model = Wordy()
    gated = tg.convert(model, {"smooth": None}, inputs=x)
    yield tg.audit(model, x)
    yield tg.audit(gated, x)
    yield tg.verify(model, gated, x)
    yield tg.verify(model, gated, x, tol=0.0)
    yield tg.calibrate(model, [x], K=2, progress=lambda text, share: None)
    yield proof.prove(tg.TAXONOMY["silu"], F.silu, torch.bfloat16, name="a name " * 20)
    score = perplexity.Score(12.5, 0.0, 1.0)
    yield perplexity.Evaluation({"sm": score, "both": score}, 3, 70, {"softmax": 1})


def test_results_print_as_tables_within_100_columns_and_are_short_in_a_prompt():
    pytest.importorskip("scipy")
    seen = list(results())
    for result in seen:
        text, brief = str(result), repr(result)
        assert len(text.splitlines()) > 2
        assert max(map(len, text.splitlines())) <= 100
        assert "\n" not in brief
        assert brief.startswith(f"<{type(result).__name__}: ")
        assert len(brief) < 200
    assert repr(seen[2]) == "<Certificate: 1 of 2 sites evaluated, ok>"
    assert repr(seen[3]).endswith(" failed>")


def test_the_counts_of_an_audit_are_wrapped():
    bending = next(iter(aten_ops.BENDING))
    others = tuple(Op("m", f"native_something_backward_{k}", 123, group=bending) for k in range(9))
    text = str(Audit((), (), others))
    assert max(map(len, text.splitlines())) <= 100
    assert "not linear (native_something_backward_0 123" in " ".join(text.split())
