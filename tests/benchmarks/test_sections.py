"""What a run refuses, prints and writes, and that every row for a GPU can be built."""

import json
from functools import partial

import pytest
import torch
from small import FAKE, fake_rows

from benchmarks import checking, pages, sections, timing
from benchmarks.__main__ import main
from benchmarks.conversion import OF_TIMM
from benchmarks.sections import here
from benchmarks.timing import Place, measure
from threshold_gating import kernels
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
    page = pages.report(data)
    assert "| silu fp32 |" in page
    assert max(map(len, page.split("\n|", 1)[1].splitlines())) <= 100
    out = capsys.readouterr().out
    assert "0 wrong" in out
    assert "only adds time" in out
    assert "not checked and not timed, for Triton needs a GPU: blend_forward, blend_backward" in out


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
