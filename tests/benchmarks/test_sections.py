"""What a run refuses, prints and writes, and that every row for a GPU can be built."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small import FAKE, SMALL, fake_rows

from benchmarks import checking, pages, sections, timing, units
from benchmarks.__main__ import main
from benchmarks.conversion import OF_TIMM
from benchmarks.sections import here
from benchmarks.timing import Place, measure
from threshold_gating import Activation, kernels
from threshold_gating.kernels.blend import cpu


def named(rows):
    return {row.work: row for row in rows}


@pytest.mark.parametrize(
    "name",
    [
        *("elementwise", "gated units", "frozen", "host", "tier W", "tier S", "growth", "networks"),
        *("attention", "recurrent"),
    ],
)
def test_every_contender_of_every_row_for_a_gpu_runs(name):
    rows = fake_rows(Place("cpu", None), name)
    assert rows
    assert {row.work: row.failed for row in rows if row.failed} == {}
    assert all(row.ratio == 1 for row in rows if row.unit == "ms")
    assert all(row.ratio > 0 or row.unit == "error" for row in rows)


@pytest.mark.parametrize(
    "name",
    ["cpu", "calls", "host", "frozen", "growth", "training", "recurrent", "conversion"],
)
def test_the_rows_for_a_cpu_run(name):
    works = [w for w in here(smoke=True)[name]() if not w.name.startswith(tuple(OF_TIMM))]
    assert len(works) > 1
    rows = [row for work in works for row in measure(work, FAKE)]
    assert {row.work: row.failed for row in rows if row.failed} == {}
    assert {row.work for row in rows if row.unit == "error" and row.verdict != "ok"} == set()


@pytest.mark.slow  # each kernel is interpreted by the tests of pairs as well
def test_every_contender_runs_by_the_kernels_themselves(step_by_step):
    """But for attention, whose kernels the pairs run."""
    step_by_step("interpret_benchmarks.py")


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    ["elementwise", "gated units", pytest.param("networks", marks=pytest.mark.slow), "llm"],
)
def test_every_compiled_contender_for_a_gpu_can_be_traced(name):
    rows = fake_rows(Place("cpu", partial(torch.compile, backend="eager", fullgraph=True)), name)
    assert {row.work: row.failed for row in rows if row.failed} == {}
    compiled = [row for row in rows if "compile" in row.times or "compile" in row.work]
    assert compiled


def test_the_limits_are_those_that_were_set():
    rows = named(fake_rows(Place("cpu", None), "elementwise"))
    limits = {2: (1.08, 2.9), 3: (1.3, 4.0), 5: (1.8, 4.5)}
    for K, (forward, both) in limits.items():
        for share in ("channel", "layer"):
            assert rows[f"K={K} {share} bf16 forward"].limit == forward
            assert rows[f"K={K} {share} bf16 + backward"].limit == both
            assert rows[f"K={K} {share} fp32 + backward"].limit == (both if K < 5 else None)
    assert rows["K=2 channel fp16 forward"].limit == 1.08
    met = {work for work, row in rows.items() if "aim" in row.note}  # in 16 bits, 1.03 is more
    assert met == {
        f"{name} forward"
        for name in ("K=2 channel bf16", "K=2 layer bf16", "K=2 channel fp16", "K=2 neuron bf16",
                     "hard channel bf16", "K=2 channels_last bf16")
    }  # fmt: skip
    assert [rows[f"K={K} layer fp32 forward"].limit for K in (2, 3, 5)] == [1.03, 1.08, 1.2]
    assert rows["K=2 neuron bf16 forward"].limit == rows["hard channel bf16 forward"].limit == 1.08
    assert rows["K=2 neuron bf16 + backward"].limit == 2.9
    of_images = rows["K=2 neuron of images bf16 + backward"]  # more to read than a limit allows
    assert of_images.limit is None
    assert "2.84" in of_images.note
    assert rows["K=2 channels_last bf16 + backward"].limit == 2.9
    large = [row for row in fake_rows(Place("cpu", None), "tier W") if "4x6x6" in row.work]
    assert [(row.over, row.limit) for row in large] == [
        ("linear", 2.15),
        ("silu+linear", 2.05),
        ("linear", 2.25),
    ]


@pytest.fixture
def few(monkeypatch):
    """A check of some pairs: the tests of pairs have them all."""
    some = {name: pair for name, pair in checking.PAIRS.items() if pair.family == "blend"}
    monkeypatch.setattr(checking, "PAIRS", some)


def test_a_small_run_checks_times_and_writes(tmp_path, capsys, few):
    path = tmp_path / "bench.json"
    assert main(["--smoke", "--json", str(path), "--only", "frozen"]) == 0
    data = json.loads(path.read_text())
    assert data["wrong"] == []
    assert {row["work"] for row in data["rows"]} == {
        "silu fp32",
        "relu fp32",
        "tanh fp32",
        "relu in place fp32",
    }
    assert "torch" in data["machine"]
    assert data["smoke"] is True
    assert data["checked"] == ["frozen module"]
    page = pages.report(data)
    assert "| silu fp32 |" in page
    assert max(map(len, page.split("\n|", 1)[1].splitlines())) <= 100
    out = capsys.readouterr().out
    assert "0 wrong" in out
    assert "only adds time" in out
    assert "not checked and not timed, for Triton needs a GPU: blend_forward, blend_backward" in out


@pytest.mark.parametrize("option", ["--json", "--checked"])
@pytest.mark.parametrize("given", ["", "nowhere/bench.json", "file/bench.json", "."])
def test_a_file_that_cannot_be_written_is_known_before_anything_is_checked(
    monkeypatch, tmp_path, capsys, option, given
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("benchmarks.__main__.run", None)
    with pytest.raises(SystemExit) as stopped:
        main(["--smoke", "--only", "frozen", option, given])
    assert stopped.value.code == 2
    assert (
        f"argument {option}: {given!r} cannot be written; give a file in a folder that exists"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "nowhere").exists()


def test_json_to_stdout_stands_alone(capsys, few):
    assert main(["--smoke", "--only", "frozen", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["wrong"] == []
    assert "limits missed" in err


def test_warming_calls_every_contender_and_times_nothing(monkeypatch, capsys, few):
    calls = []
    ours = timing._each_once
    monkeypatch.setattr(
        timing, "_ONCE", timing.Clock("", lambda c, slow: calls.extend(c) or ours(c, slow), None)
    )
    assert main(["--smoke", "--warm", "--only", "frozen"]) == 0
    assert "ours" in calls
    assert "limits missed" not in capsys.readouterr().out


def test_a_section_that_is_not_there_is_an_error(capsys):
    assert main(["--smoke", "--only", "made up"]) == 2
    assert (
        "no section 'made up' here; there are cpu, calls, host, cpu networks, small inputs, frozen, "
        in capsys.readouterr().err
    )


def test_rows_are_chosen_by_what_is_in_their_name(capsys, few):
    assert main(["--smoke", "--only", "frozen", "--match", "tanh"]) == 0
    out = capsys.readouterr().out
    assert "| tanh fp32" in out
    assert "| silu fp32" not in out
    assert main(["--smoke", "--only", "frozen", "--match", "no such row"]) == 2
    assert "no row of frozen has 'no such row'" in capsys.readouterr().err


def test_what_was_found_right_by_the_same_code_is_not_checked_again(
    monkeypatch, capsys, few, tmp_path
):
    file, seen = tmp_path / "right.jsonl", []
    first = sections.check
    monkeypatch.setattr(sections, "check", lambda d, pairs: seen.append(pairs) or first(d, pairs))
    asked = ["--smoke", "--only", "frozen", "--match", "relu", "--checked", str(file)]
    assert main([*asked, "--warm"]) == 0
    assert main(asked) == 0
    assert [bool(pairs) for pairs in seen] == [True, False]
    assert "found right before, by the same code: frozen module" in capsys.readouterr().out
    monkeypatch.setattr(checking, "SOURCES", checking.SOURCES[:1])  # other code
    assert main(asked) == 0
    assert seen[-1]


@pytest.mark.parametrize("cut", ['{"of": ["9', '{"of": [], "fam\n', "[]\n", "{}\n", "\xff\n"])
def test_a_line_of_a_run_that_was_stopped_is_left_out_and_said(tmp_path, capsys, cut):
    file = tmp_path / "right.jsonl"
    checking.keep_right(file, "cpu", ["module"])
    with file.open("a", encoding="latin-1") as out:
        out.write(cut)
    checking.keep_right(file, "cpu", ["blend"])  # behind half a line it begins one of its own
    assert checking.found_right(file, "cpu") == {"module", "blend"}
    assert f"line 2 of {file} is not whole and is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "named", "size"),
    [
        ("cpu", "", 2**17),
        ("frozen", "", 2**17),
        ("growth", "2^16", 2**16),
        ("host", "", 32 * 256),
        ("small inputs", "2^7", 2**7),
    ],
)
def test_gates_that_are_wrong_only_at_the_size_that_is_timed_are_not_timed(
    monkeypatch, section, named, size
):
    right, works = Activation.forward, [w for w in here(smoke=True)[section]() if named in w.name]
    assert works
    for most, begins in ((-1, ""), (size, "WrongError: ")):
        monkeypatch.setattr(
            Activation,
            "forward",
            lambda self, x, most=most: right(self, x) * (1.05 if x.numel() == most else 1),
        )
        failed = [row.failed for work in works for row in measure(work, FAKE)]
        assert {each[: len("WrongError: ")] for each in failed} == {begins}


@pytest.mark.parametrize("backward", [False, True])
def test_gated_units_that_are_wrong_are_not_timed(monkeypatch, backward):
    right = kernels.blend
    monkeypatch.setattr(kernels, "blend", lambda *a, **options: right(*a, **options) * 1.05)
    works = list(sections.on_gpu(Place("cpu", None), SMALL)["gated units"]())
    rows = [row for w in works if w.backward == backward for row in measure(w, FAKE)]
    assert [row.failed.split()[:2] for row in rows] == [
        ["WrongError:", "dx" if backward else "y"]
    ] * 3


def test_gated_units_without_liger_say_so(monkeypatch):
    def notes():
        return {w.name: w.note for w in units.gated_units((4, 8), Place("cuda", None))}

    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    said = "without Liger, which is not installed"
    ways = ("forward", "+ backward")
    assert {name for name, note in notes().items() if note == said} == {
        f"{unit} {way}" for unit in ("swiglu", "geglu tanh") for way in ways
    }
    for module, function in units._LIGER.values():
        apply = SimpleNamespace(apply=max)
        found = SimpleNamespace(**{function: apply})
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{module}", found)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    assert set(notes().values()) == {""}
    assert units._liger("swiglu") == {"liger": max}


def test_what_is_wrong_at_its_own_size_fails_the_run_and_is_written(monkeypatch, tmp_path, few):
    right, file = Activation.forward, tmp_path / "bench.json"
    monkeypatch.setattr(
        Activation, "forward", lambda self, x: right(self, x) * (1 + (x.numel() == 2**17))
    )
    asked = ["--smoke", "--only", "frozen", "--match", "tanh"]
    assert main([*asked, "--json", str(file)]) == 1
    [line] = json.loads(file.read_text())["wrong"]
    assert line.startswith("frozen, tanh fp32: WrongError: y of 131072: error ")
    assert main([*asked, "--warm"]) == 1


def test_a_wrong_kernel_is_not_kept_as_right(monkeypatch, few, tmp_path):
    right, file = cpu.Plan.forward, tmp_path / "right.jsonl"
    monkeypatch.setattr(cpu.Plan, "forward", lambda *a: right(*a) * 1.01)
    for more in ([], ["--warm"]):
        assert main(["--smoke", "--only", "frozen", "--checked", str(file), *more]) == 1
        assert not file.exists()


def test_a_wrong_kernel_is_not_timed_and_fails(monkeypatch, capsys, few):
    right = cpu.Plan.forward
    monkeypatch.setattr(cpu.Plan, "forward", lambda *a: right(*a) * 1.01)
    assert main(["--smoke", "--only", "frozen"]) == 1
    out = capsys.readouterr().out
    assert "WRONG gelu frozen module" in out
    assert "| silu fp32" not in out


def test_what_another_backend_or_device_found_right_is_checked_again(tmp_path):
    file = tmp_path / "right.jsonl"
    with kernels.use("reference"):
        checking.keep_right(file, "cpu", ["module"])
        assert checking.found_right(file, "cpu") == {"module"}
        assert checking.found_right(file, "cuda") == set()
    assert checking.found_right(file, "cpu") == set()
