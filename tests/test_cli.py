"""What `tg` prints, with which exit code, and that it is measured where it says so."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest
import torch

import threshold_gating
from threshold_gating import TAXONOMY, TG, cli, kernels, taxonomy
from threshold_gating.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tg(capsys):
    """Run a command line; gives (exit code, stdout, stderr)."""

    def run(*words):
        try:
            code = main(list(words))
        except SystemExit as end:  # how argparse leaves
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


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
    assert err.endswith("tg: error: no command 'qqq'; there are table, env, demo.\n")


def test_interruption_ends_with_130_and_no_traceback(tg, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "table", interrupted)
    assert tg("table") == (130, "", "")


def test_the_module_runs_as_a_program():
    words = [sys.executable, "-m", "threshold_gating", "table", "relu"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert names_in(done.stdout) == ["relu"]


def test_a_reader_that_leaves_is_no_error():
    words = [sys.executable, "-m", "threshold_gating", "table", "--all", "--format", "json"]
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
    assert "- softsign: its tails" in out


def test_json_gives_back_the_instances_that_run(tg):
    _, out, _ = tg("table", "--all", "--format", "json")
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
    code, out, err = tg("table", "relu", "slu", "softsign", "qqq")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "tg table: no activation 'slu' in the taxonomy; did you mean 'silu', 'selu', 'dsilu'?",
        f"tg table: 'softsign' has no instance: {taxonomy.NOT_REPRESENTABLE['softsign']}",
        "tg table: no activation 'qqq' in the taxonomy; `tg table --all` lists them.",
    ]


def test_names_and_all_together_are_refused(tg):
    code, out, err = tg("table", "relu", "--all")
    assert (code, out) == (2, "")
    assert err == "tg table: give names or --all, not both.\n"


# tg env


def test_env_tries_every_backend(tg):
    code, out, _ = tg("env")
    assert code == 0
    for name in kernels.BACKENDS:
        assert re.search(rf"^{name}( \(in use\))? +cpu +works \(max error \d", out, re.MULTILINE)
    assert re.search(rf"^{kernels.backend()} \(in use\)", out, re.MULTILINE)


def test_env_as_json_has_versions_devices_and_backends(tg, monkeypatch):
    def none_is_installed(name):
        raise cli.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.metadata, "version", none_is_installed)
    code, out, _ = tg("env", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["versions"]["torch"] == torch.__version__
    assert data["versions"]["threshold_gating"] == threshold_gating.__version__
    assert data["versions"]["timm"] is None
    assert "cpu" in data["devices"]
    assert list(data["backends"]) == list(kernels.BACKENDS)
    assert all(on["cpu"]["works"] for on in data["backends"].values())


def test_env_reports_a_backend_that_fails(tg, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "blend", broken)
    before = kernels.backend()
    code, out, _ = tg("env")
    assert code == 1
    assert re.search(r"^reference +cpu +fails: RuntimeError: no such instruction$", out, re.M)
    assert re.search(r"^native +cpu +works", out, re.MULTILINE)
    assert kernels.backend() == before


@pytest.mark.parametrize("off_by", [1e-3, math.nan])
def test_env_reports_a_backend_that_gives_wrong_values(tg, monkeypatch, off_by):
    right = kernels.blend
    monkeypatch.setattr(kernels, "blend", lambda *args, **kw: right(*args, **kw) + off_by)
    code, out, _ = tg("env")
    assert code == 1
    assert re.search(r"^reference +cpu +gives wrong values \(max error (1.0e-03|nan)", out, re.M)


def test_env_reports_a_wrong_gradient(tg, monkeypatch):
    right = kernels.blend
    monkeypatch.setattr(
        kernels, "blend", lambda x, *args, **kw: right(x, *args, **kw) + (x - x.detach())
    )
    assert "reference         cpu   gives wrong values (max error 1.0e+00)" in tg("env")[1]


# tg demo


@pytest.fixture
def demo(tg, tmp_path):
    """Run the demo, the picture into a folder that is still to be made."""
    folder = tmp_path / "new" / "folder"

    def run():
        return *tg("demo", "--out", str(folder)), folder / "tg_demo.png"

    return run


def test_the_demo_measures_and_draws(demo):
    pytest.importorskip("matplotlib")
    code, out, err, picture = demo()
    assert (code, err) == (0, "")
    assert picture.read_bytes().startswith(PNG)
    assert f"Written to {picture}" in out
    assert max(map(len, out.replace(str(picture), "").splitlines())) <= 100
    error = taxonomy.measure(TAXONOMY["gelu_k3"], torch.nn.functional.gelu)
    for word, value in zip(("sup", "RMS", "rel"), error, strict=True):
        assert f"{word} {value:.4g}" in out
    exact = [name for name in taxonomy.TABLE2 if taxonomy.ROWS[name].exact]
    compared = out.partition("Largest difference to torch")[2]
    assert re.findall(r"^    (\w+) +(?:none|\d.* at x = )", compared, re.MULTILINE) == exact


def test_the_demo_finds_a_wrong_instance(demo, monkeypatch):
    """ReLU with slope 1e-3 below 0 is off by 10 at -1e4, where the measured line ends."""
    monkeypatch.setitem(TAXONOMY, "relu", taxonomy.leaky_relu(1e-3))
    monkeypatch.setattr(cli, "_draw", lambda path: 0)
    code, out, err, _ = demo()
    assert code == 1
    assert re.search(r"^relu .* sup 10$", out, re.MULTILINE)
    assert err == "tg demo: not exact, against what is claimed: relu.\n"


def test_the_demo_compares_the_gates_not_torch_with_itself(demo, monkeypatch):
    """With the gates off by 1e-3 every row must show it: no native op may stand in for them."""
    right = kernels.blend
    monkeypatch.setattr(kernels, "blend", lambda *args, **kw: right(*args, **kw) + 1e-3)
    monkeypatch.setattr(cli, "_draw", lambda path: 0)
    _, out, _, _ = demo()
    compared = out.partition("of either sign:\n")[2].partition("\n\n")[0].splitlines()
    assert len(compared) == 11
    assert not any(line.endswith("none") for line in compared)


def test_without_matplotlib_the_demo_says_how_to_get_it(demo, monkeypatch):
    monkeypatch.setattr(taxonomy, "TABLE2", ("relu6", "relu6_clamp"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err, picture = demo()
    assert code == 1
    assert "relu6_clamp" in out
    assert err == (
        "tg demo: the picture needs matplotlib, which is not installed: "
        "pip install 'threshold-gating[demo]'\n"
    )
    assert not picture.exists()


def test_a_folder_that_cannot_be_made_is_said(tg, tmp_path, monkeypatch):
    monkeypatch.setattr(taxonomy, "TABLE2", ("relu6", "relu6_clamp"))
    (tmp_path / "file").touch()
    code, out, err = tg("demo", "--out", str(tmp_path / "file"))
    assert code == 1
    assert "relu6_clamp" in out
    assert err.startswith(f"tg demo: cannot write {tmp_path / 'file' / 'tg_demo.png'}: ")
