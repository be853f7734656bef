"""What `tg` prints, with which exit code, and that it is measured where it says so."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import threshold_gating
from threshold_gating import TAXONOMY, TG, cli, kernels, taxonomy
from threshold_gating.cli import demo, explain, main, table

PNG = b"\x89PNG\r\n\x1a\n"


def names_in(text):
    """The first word of each row of a text table: not indented, under the rule."""
    rows = text.split("\n\n")[0].splitlines()[2:]
    return [line.split()[0] for line in rows if not line.startswith(" ")]


def parsed(markdown):
    """The rows of a Markdown table as dicts."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header, rule, *rows = cells
    assert set(rule) == {"---"}
    return [dict(zip(header, row, strict=True)) for row in rows]


def numbers(cell):
    return [float(word) for word in cell.split()]


# tg, its options and its ways to end


def test_the_version_is_that_of_the_package(tg):
    assert tg("--version") == (0, f"tg {threshold_gating.__version__}\n", "")


def test_no_command_shows_the_help(tg):
    code, out, _ = tg()
    assert code == 2
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(tg, command):
    code, out, _ = tg(command, "--help")
    assert code == 0
    assert f"usage: tg {command}" in out


def test_an_unknown_command_gets_the_nearest(tg):
    code, _, err = tg("tabel", "--all")
    assert code == 2
    assert err.endswith("tg: error: no command 'tabel'; did you mean 'table'?\n")


def test_a_command_like_no_other_gets_the_list(tg):
    code, _, err = tg("qqq")
    assert code == 2
    assert err.endswith(
        "tg: error: no command 'qqq'; there are table, explain, convert, calibrate, audit, verify, "
        "insight, report, evaluate, prove, spice, simulate, energy, rtl, export, explore, env, demo.\n"
    )


def test_bench_says_where_it_went_and_waits_for_nothing():
    """Whatever it is given; a script that calls it fails, and says why."""
    code = "import sys; from threshold_gating.cli import main; "
    code += (
        "end = main(['bench', '--smoke', '--json', 'x']); sys.exit(end + ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tg bench: the benchmarks are not in the package any more")
    assert "`PYTHONPATH=src python -m benchmarks [--smoke]" in done.stderr


def test_interruption_ends_with_130_and_no_traceback(tg, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "table", interrupted)
    assert tg("table") == (130, "", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "x.pt"), "tg table: Permission denied: x.pt"),
        (IndexError("no\n  such"), "tg table: IndexError: no such (TG_TRACEBACK=1 shows where)"),
        (AssertionError(), "tg table: AssertionError (TG_TRACEBACK=1 shows where)"),
    ],
)
def test_a_failure_that_nobody_foresaw_is_one_line(tg, monkeypatch, error, line):
    def fails(args):
        raise error

    monkeypatch.setattr(table, "table", fails)
    assert tg("table") == (2, "", f"{line}\n")
    monkeypatch.setenv("TG_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["table"])


def test_the_module_runs_as_a_program():
    words = [sys.executable, "-m", "threshold_gating", "table", "relu"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert names_in(done.stdout) == ["relu"]


def test_a_reader_that_leaves_is_no_error():
    words = [sys.executable, "-m", "threshold_gating", "table", "--all", "--json", "-"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


# tg table


def test_the_table_is_table_2(tg):
    code, out, err = tg("table")
    assert (code, err) == (0, "")
    assert names_in(out) == list(taxonomy.TABLE2)


@pytest.mark.parametrize("words", [[], ["--all"], ["gelu"], ["softplus", "hardswish"]])
def test_text_fits_100_columns(tg, words):
    _, out, _ = tg("table", *words)
    assert max(map(len, out.splitlines())) <= 100


def test_a_row_that_must_be_broken_loses_no_number(tg):
    """GELU with K = 5 and the widest neighbours: its words, over all its lines, are its cells."""
    _, out, _ = tg("table", "--all")
    lines = out.splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("gelu "))
    end = next(k for k in range(start + 1, len(lines)) if not lines[k].startswith(" " * 8))
    words = sorted(" ".join(lines[start:end]).split())
    t, row = TAXONOMY["gelu"], taxonomy.ROWS["gelu"]
    values = [t.tau, *t.theta, *t.s, *t.c, row.sup, row.rms, row.rel_rms]
    expected = ["gelu", "mult.", "5", "sup", "RMS", "rel", *(f"{v:.4g}" for v in values)]
    assert words == sorted(expected)


def test_the_text_says_what_the_errors_mean(tg):
    _, out, _ = tg("table")
    assert out.count("sup is the largest |error| over the line") == 1


def test_the_paper_stands_beside_our_figure(tg):
    _, out, _ = tg("table", "gelu_paper", "mish", "relu")
    assert "paper: 0.3 %, norm not stated" in out
    assert "paper: approximate; exact" in out
    assert re.search(r"^relu .* exact\*$", out, re.MULTILINE)
    assert re.search(r"^mish .* exact$", out, re.MULTILINE)


def test_only_what_a_table_uses_is_explained(tg):
    assert "clamp:" in tg("table", "relu6_clamp")[1]
    assert "clamp:" not in tg("table", "relu")[1]


def test_all_ends_with_what_has_no_instance_and_why(tg):
    _, out, _ = tg("table", "--all")
    assert names_in(out) == list(TAXONOMY)
    rest = " ".join(out.partition("Not representable:")[2].split())
    for name, reason in taxonomy.NOT_REPRESENTABLE.items():
        assert f"{name}: {reason}" in rest


def test_names_are_taken_in_other_spellings(tg):
    assert names_in(tg("table", "ReLU", "leaky-relu")[1]) == ["relu", "leaky_relu"]


def test_markdown_has_the_same_rows(tg):
    _, out, _ = tg("table", "--all", "--format", "markdown")
    rows = parsed(out)
    assert [row["activation"] for row in rows] == list(TAXONOMY)
    for row in rows:
        t, known = TAXONOMY[row["activation"]], taxonomy.ROWS[row["activation"]]
        assert (row["family"], int(row["K"])) == (taxonomy.family(t), t.K)
        taus = t.tau if isinstance(t.tau, tuple) else [t.tau]
        for column, values in (("tau", taus), ("theta", t.theta), ("s", t.s), ("c", t.c)):
            assert numbers(row[column]) == pytest.approx(values, rel=5e-4)  # 4 digits are shown
        if known.exact:
            assert (row["sup"], row["RMS"], row["rel"]) == ("exact", "", "")
        else:
            shown = [float(row[norm]) for norm in ("sup", "RMS", "rel")]
            assert shown == pytest.approx([known.sup, known.rms, known.rel_rms], rel=5e-4)
        assert (row["paper"], row["note"]) == (known.paper, known.note)
        assert ("clamp" in row["other"]) == (t.clamp is not None)
        assert ("product" in row["other"]) == (t.form == "product")
    assert "- snake: x + sin(x)^2" in out


def test_json_gives_back_the_instances_that_run(tg):
    _, out, _ = tg("table", "--all", "--json", "-")
    data = json.loads(out)
    assert {row["name"]: TG.from_dict(row["instance"]) for row in data["rows"]} == TAXONOMY
    for row in data["rows"]:
        known = taxonomy.ROWS[row["name"]]
        fields = ("exact", "sup", "rms", "rel_rms", "paper", "note")
        assert [row[k] for k in fields] == [getattr(known, k) for k in fields]
        assert row["family"] == taxonomy.family(TAXONOMY[row["name"]])
    assert data["not_representable"] == taxonomy.NOT_REPRESENTABLE


def test_the_table_comes_from_the_dict_the_code_runs(tg, monkeypatch):
    monkeypatch.setitem(TAXONOMY, "relu", taxonomy.leaky_relu(0.375))
    assert "0.375" in tg("table")[1]


def test_unknown_names_get_the_nearest_and_exit_2(tg):
    code, out, err = tg("table", "relu", "slu", "snake", "qqq")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "tg table: no activation 'slu' in the taxonomy; did you mean 'silu', 'selu', 'dsilu'?",
        f"tg table: 'snake' has no instance: {taxonomy.NOT_REPRESENTABLE['snake']}",
        "tg table: no activation 'qqq' in the taxonomy; `tg table --all` lists them.",
    ]


def test_names_and_all_together_are_refused(tg):
    code, out, err = tg("table", "relu", "--all")
    assert (code, out) == (2, "")
    assert err == "tg table: give names or --all, not both.\n"


# tg explain


def test_explain_prints_the_report_and_how_to_get_a_picture(tg):
    pytest.importorskip("scipy")
    code, out, err = tg("explain", "x*sigmoid(1.3*x)")
    assert code == 0
    assert out.startswith("x*sigmoid(1.3*x)\n  family        multiplicative")
    assert "\n  exact, K = 2  TG(tau=1.3, theta=(0.0,), s=(0.0, 1.0), c=(0.0, 0.0))\n" in out
    assert "\n  edge of chaos " in out
    assert err == "For a picture: tg explain 'x*sigmoid(1.3*x)' -o x_sigmoid_1_3_x.png\n"


@pytest.mark.parametrize(("suffix", "start"), [("png", PNG), ("svg", b"<?xml")])
def test_explain_draws_a_picture(tg, tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"silu.{suffix}"
    code, _, err = tg("explain", "silu", "-K", "2", "-o", str(path))
    assert (code, err) == (0, f"Written to {path}\n")
    assert path.read_bytes().startswith(start)


def test_explain_as_json_is_json_alone(tg, tmp_path):
    pytest.importorskip("scipy")
    (tmp_path / "own.py").write_text(
        "print('loading')\ndef f(x):\n    print('called')\n    return x.relu()"
    )
    words = ["-K", "3", "2", "--at", "-1.5", "--json", "-"]
    code, out, err = tg("explain", f"{tmp_path / 'own.py'}:f", *words)
    data = json.loads(out)
    assert (code, data["picture"], data["theory"]["derivatives"]["at"]) == (0, None, -1.5)
    assert [each["K"] for each in data["fits"]] == [2, 3]
    assert TG.from_dict(data["fits"][0]["instance"]) == TAXONOMY["relu"]
    assert err.startswith("loading\ncalled\n")  # what the user's own code prints goes elsewhere


def test_explain_as_json_names_the_picture(tg, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sin.svg"
    code, out, _ = tg("explain", "sin", "--json", "-", "--out", str(path))
    assert (code, json.loads(out)["picture"]) == (0, str(path))
    assert path.exists()


# (what, how the message begins)
NOT_EXPLAINED = [
    ("slu", "no activation 'slu'; did you mean 'silu', 'selu', 'dsilu'? There are the names"),
    (
        "x*sigmod(x)",
        "no function 'sigmod'; did you mean 'sigmoid'?\n    x*sigmod(x)\n      ^^^^^^\n",
    ),
    ("log(x)", "log(x) is NaN at x = -16 (33 of 65 points in [-16, 16] are not finite); a finite"),
    ("none.py:f", "no file 'none.py'"),
]


@pytest.mark.parametrize(("what", "message"), NOT_EXPLAINED)
def test_what_cannot_be_explained_ends_with_2_and_no_traceback(tg, what, message):
    code, out, err = tg("explain", what)
    assert (code, out) == (2, "")
    assert err.startswith(f"tg explain: {message}")


# (options, the error)
WRONG_OPTIONS = [
    (["-K", "1"], "argument -K: the number of branches must be from 2 to 8; got '1'"),
    (["-K", "two"], "argument -K: the number of branches must be from 2 to 8; got 'two'"),
    (["--at", "nan"], "argument --at: a finite number is needed, without a unit; got 'nan'"),
    (["--at", "left"], "argument --at: a finite number is needed, without a unit; got 'left'"),
    (["--out", "mish.jpg"], "argument -o/--out: FILE must end in .png or .svg; got 'mish.jpg'"),
]


@pytest.mark.parametrize(("options", "error"), WRONG_OPTIONS)
def test_wrong_options_of_explain_are_refused_at_once(tg, options, error):
    code, out, err = tg("explain", "gelu", *options)
    assert (code, out) == (2, "")
    assert err.endswith(f"tg explain: error: {error}\n")


def test_the_help_says_that_a_file_is_run(tg):
    assert "FILE.py is imported, which runs what it says" in " ".join(
        tg("explain", "--help")[1].split()
    )


@pytest.fixture
def no_fits(monkeypatch):
    def missing(*args, **options):
        raise ModuleNotFoundError("fit needs scipy") from ModuleNotFoundError("", name="scipy")

    monkeypatch.setattr(explain, "fit", missing)


@pytest.mark.usefixtures("no_fits")
def test_without_scipy_explain_says_how_to_get_it_and_loses_nothing_else(tg, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "gelu.png"
    code, out, err = tg("explain", "gelu", "--out", str(path))
    assert code == 1
    assert "\n  fits          none: they need scipy.\n" in out
    assert "\n  edge of chaos " in out
    assert err.splitlines() == [
        "tg explain: the fits need scipy, which is not installed: "
        "pip install 'threshold-gating[fit]'",
        f"Written to {path}",
    ]
    assert path.read_bytes().startswith(PNG)
    code, out, _ = tg("explain", "gelu", "--json", "-")
    assert (code, json.loads(out)["missing"]) == (1, "scipy")


@pytest.mark.parametrize("words", [[], ["--json", "-"]])
def test_without_matplotlib_explain_says_how_to_get_it(tg, tmp_path, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = tg("explain", "sin", "--out", str(tmp_path / "sin.png"), *words)
    assert code == 1
    assert "oscillating" in out
    assert err == (
        "tg explain: the picture needs matplotlib, which is not installed: "
        "pip install 'threshold-gating[plot]'\n"
    )


def test_a_picture_that_cannot_be_written_is_said(tg, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "sin.png"
    code, out, err = tg("explain", "sin", "--out", str(path))
    assert code == 1
    assert "oscillating" in out
    assert err.startswith(f"tg explain: -o {path} cannot be written: ")


# tg demo


@pytest.fixture
def reduced(monkeypatch):
    """One network and one round of training."""
    pytest.importorskip("sklearn")
    whole = demo.run

    def run(out, **options):
        return whole(out, networks=("ReLU CNN",), epochs=1, **options)

    monkeypatch.setattr(demo, "run", run)


@pytest.mark.usefixtures("reduced")
def test_the_demo_prints_a_table_and_writes_a_page(tg, tmp_path):
    code, out, err = tg("demo", "--out", str(tmp_path / "new" / "folder"), "--seed", "5")
    assert (code, err) == (0, "")
    assert re.search(r"^ReLU CNN +2 +3 +exact +[\d.]+% +[\d.]+% +\+0.00 +100.00%", out, re.M)
    page = tmp_path / "new" / "folder" / demo.FILE
    assert out.endswith(f"{page}\n")
    assert "tg demo --seed 5" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("reduced")
def test_a_gate_that_is_not_what_it_is_called_ends_the_demo_with_1(tg, tmp_path, monkeypatch):
    """The certificate of the conversion is the first to see it."""
    right = kernels.blend
    monkeypatch.setattr(kernels, "blend", lambda *args, **kw: right(*args, **kw) + 1e-3)
    code, _, err = tg("demo", "--out", str(tmp_path))
    assert code == 1
    assert err.startswith("tg demo: act1 (relu) is exact and is off by 0.001")


@pytest.mark.usefixtures("reduced")
def test_an_exact_network_that_answers_otherwise_ends_the_demo_with_1(tg, tmp_path, monkeypatch):
    right = demo.compare
    monkeypatch.setattr(demo, "compare", lambda *args: replace(right(*args), agreement=0.99))
    code, out, err = tg("demo", "--out", str(tmp_path))
    assert code == 1
    assert "NOT EXACT" in out
    assert err == "tg demo: these should be exact and are not: ReLU CNN.\n"


def test_without_scikit_learn_the_demo_says_how_to_get_it(tg, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, _, err = tg("demo", "--out", str(tmp_path))
    assert code == 1
    assert err == (
        "tg demo: the images need scikit-learn, which is not installed: "
        "pip install 'threshold-gating[demo]'\n"
    )


@pytest.mark.usefixtures("reduced")
def test_a_folder_that_cannot_be_made_is_said_before_the_work(tg, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = tg("demo", "--out", str(tmp_path / "file"))
    assert code == 1
    assert "Networks learn" not in out
    assert err.startswith("tg demo: ")
    assert str(tmp_path / "file") in err
