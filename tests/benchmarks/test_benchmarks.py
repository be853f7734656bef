"""`tg bench`: what it refuses, prints and writes, and that every row for a GPU can be built."""

import json
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from threshold_gating import TAXONOMY, Activation, benchmarking, cli, kernels
from threshold_gating.benchmarking import Place, Row, Sizes, elementwise, tier_w, timing
from threshold_gating.benchmarking.checking import check
from threshold_gating.benchmarking.networks import Network
from threshold_gating.benchmarking.timing import Clock, Work

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import results


def small_resnet():
    from torchvision.models import resnet18

    return resnet18()


def small_vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64
    )


SMALL = Sizes(
    elementwise.Sizes((6, 4), (2, 4, 3, 3), (2, 4, 2, 2)),
    tier_w.Sizes(((4, 6, 6), (5, 4, 4)), (1, 3), 8, (2, 4, 5, 5), (8,)),
    range(2, 4),
    (2, 3, 32, 32),
    {"resnet": Network(small_resnet, 1.02), "vit": Network(small_vit, 1.10)},
)


def once(contenders, rep=20):
    """A clock that calls every contender and finds them equally fast."""
    for f in contenders.values():
        f()
    return dict.fromkeys(contenders, 2.0)


FAKE = Clock("once", lambda contenders, rep: {n: [ms] for n, ms in once(contenders).items()}, once)


def fake_rows(place, name):
    works = benchmarking.on_gpu(place, SMALL)[name]()
    return [row for work in works for row in benchmarking.measure(work, FAKE)]


def named(rows):
    return {row.work: row for row in rows}


@pytest.mark.parametrize(
    "name", ["elementwise", "gated units", "frozen", "tier W", "growth", "networks"]
)
def test_every_contender_of_every_row_for_a_gpu_runs(name):
    rows = fake_rows(Place("cpu", None), name)
    assert rows
    assert {row.work: row.failed for row in rows if row.failed} == {}
    assert all(row.ratio == 1 for row in rows)


STEP_BY_STEP = """
import torch
from threshold_gating import benchmarking, kernels
from threshold_gating.benchmarking import checking, elementwise, tier_w
kernels.use("triton")
sizes = benchmarking.LARGE._replace(
    elementwise=elementwise.Sizes((6, 4), (2, 4, 3, 3), (2, 4, 2, 2)),
    tier_w=tier_w.Sizes(((4, 6, 6), (5, 4, 4)), (1, 3), 8, (2, 4, 5, 5), (8,)),
    powers=range(2, 4),
)
called = lambda contenders, rep: {name: [f(), 1.0][1:] for name, f in contenders.items()}
clock = benchmarking.Clock("once", called, None)
sections = benchmarking.on_gpu(benchmarking.Place("cpu", None), sizes)
del sections["networks"]
rows = [r for s in sections.values() for w in s() for r in benchmarking.measure(w, clock)]
failed = {row.work: row.failed for row in rows if row.failed}
assert rows and not failed, failed
wrong = checking.check("cpu", (torch.float32,), (6, 4))
assert not wrong, wrong
print("ok")
"""


def test_every_contender_runs_by_the_kernels_themselves(step_by_step):
    step_by_step(STEP_BY_STEP)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["elementwise", "gated units", "networks"])
def test_every_compiled_contender_for_a_gpu_can_be_traced(name):
    rows = fake_rows(Place("cpu", partial(torch.compile, backend="eager", fullgraph=True)), name)
    assert {row.work: row.failed for row in rows if row.failed} == {}
    compiled = [row for row in rows if "compile" in row.times or row.work.endswith("compile")]
    assert compiled


def test_the_limits_are_those_that_were_set():
    rows = named(fake_rows(Place("cpu", None), "elementwise"))
    limits = {2: (1.08, 2.9), 3: (1.3, 4.0), 5: (1.8, None)}
    for K, (forward, both) in limits.items():
        for share in ("channel", "layer"):
            assert rows[f"K={K} {share} bf16 forward"].limit == forward
            assert rows[f"K={K} {share} bf16 + backward"].limit == both
            assert rows[f"K={K} {share} fp32 + backward"].limit == both
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


def test_the_keys_have_the_branches_that_rows_name_and_one_tau():
    for K, key in elementwise.KEYS.items():
        assert TAXONOMY[key].K == K
        assert isinstance(TAXONOMY[key].tau, float)


@pytest.mark.parametrize("case", [case for _, case, _ in elementwise._cases(SMALL.elementwise)])
def test_what_is_compiled_computes_what_the_module_does(case):
    act, x = case.activation("cpu"), case.input("cpu").requires_grad_()
    with torch.no_grad():
        for parameter in act.parameters():
            parameter.add_(torch.rand_like(parameter).mul(0.3))
    with kernels.use("reference"):
        want = act(x)
    have = elementwise.plain(act, case.group())(x)
    assert torch.equal(have, want)
    of = [x, *act.parameters()]
    pairs = zip(*(torch.autograd.grad(y.sum(), of) for y in (have, want)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_is_compiled_calls_no_kernel_of_ours(monkeypatch):
    monkeypatch.setattr(kernels, "blend", None)
    monkeypatch.setattr(kernels, "launches", None)
    case = next(case for _, case, _ in elementwise._cases(SMALL.elementwise))
    elementwise.plain(case.activation("cpu"), case.group())(case.input("cpu"))
    with pytest.raises(TypeError):
        case.activation("cpu")(case.input("cpu"))


def test_a_row_that_fails_says_so_is_missed_and_lets_the_others_run():
    def fails():
        raise RuntimeError("no such kernel\nand much more")

    rows = list(benchmarking.measure(Work("s", "broken", fails, {"copy": None}), FAKE))
    works = [Work("s", "fine", lambda: {"copy": int, "ours": int}, {"copy": 1.0})]
    rows += [row for work in works for row in benchmarking.measure(work, FAKE)]
    assert [row.verdict for row in rows] == ["MISSED", "ok"]
    data = {"machine": {"gpu": "none"}, "how": "once", "wrong": [], "rows": [vars(r) for r in rows]}
    page = benchmarking.report(data)
    assert "- broken: failed: RuntimeError: no such kernel\n" in page
    assert "| broken |  | copy |  |  |  | MISSED |" in page


def test_contenders_take_turns_and_the_least_time_counts(monkeypatch):
    calls, now = [], iter(range(10**6))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(now) ** 2)
    times = timing.ON_CPU.called({n: partial(calls.append, n) for n in ("copy", "ours")}, 20)
    assert calls == ["copy", "ours", "ours", "copy"] * (timing.RUNS // 2 + 1)
    # each call lasts longer than the one before; the first two rounds read the clock four times
    assert times == {"copy": [1e3 * (5**2 - 4**2)], "ours": [1e3 * (7**2 - 6**2)]}
    assert timing.RUNS >= 15


def test_on_a_gpu_the_least_of_the_rounds_counts_and_a_slow_one_is_named(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    monkeypatch.setattr(timing, "ROUNDS", 3)
    taken = iter([5.0, 2.0, 2.1, 3.0, 4.0, 2.6])
    monkeypatch.setattr(triton, "do_bench", lambda f, **_: next(taken))
    work = Work("s", "w", lambda: {"copy": int, "ours": int}, {"copy": 1.0})
    [row] = benchmarking.measure(work, timing.ON_GPU._replace(replayed=None))
    assert row.times == {"copy": 3.0, "ours": 2.0}
    assert row.note == "the slowest round took 1.30 times that"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_on_a_gpu_all_threads_are_timed_on_one_core_and_have_all_again_afterwards(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    before, seen = os.sched_getaffinity(0), []

    def cores():
        return {t: os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")}

    quickest = min(before)
    monkeypatch.setattr(timing, "_slowness", lambda core: core)
    started, end = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (started.set(), end.wait()))
    other.start()
    started.wait()
    monkeypatch.setattr(triton, "do_bench", lambda f, **_: seen.append(cores()) or 1.0)
    timing.ON_GPU.called({"copy": lambda: seen.append(cores())}, 20)
    known = str(other.native_id)
    assert seen[0][known] == before  # called once to compile, with every core
    assert {frozenset(c) for each in seen[1:] for c in each.values()} == {frozenset({quickest})}
    assert cores()[known] == os.sched_getaffinity(0) == before
    end.set()
    other.join()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_a_core_is_judged_by_what_it_takes_there(monkeypatch):
    before, seen, now = os.sched_getaffinity(0), [], iter([0, 1, 2, 5, 6, 8])
    monkeypatch.setattr(
        timing.time, "perf_counter", lambda: seen.append(os.sched_getaffinity(0)) or next(now)
    )
    try:
        assert timing._slowness(min(before)) == 3  # the worst of three
        assert seen == [{min(before)}] * 6
    finally:
        os.sched_setaffinity(0, before)


def test_what_cannot_be_recorded_has_no_replayed_time(monkeypatch):
    triton = pytest.importorskip("triton.testing")
    monkeypatch.setattr(triton, "do_bench_cudagraph", lambda f, **_: 1.5)
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert timing.ON_GPU.replayed({"copy": int, "ours": waits}) == {"copy": 1.5}
    assert modes == ["error", "default"] * 2


def test_the_ratio_of_replays_stands_beside_and_decides_nothing():
    row = Row("s", "w", {"copy": 1.0, "ours": 3.0}, "copy", 2.0, {"copy": 1.0, "ours": 1.1})
    assert "| w | 3 | copy | 3.000 | 1.100 | 2.000 | MISSED |" in benchmarking.table([row])


def test_more_than_was_asked_for_is_named_only_where_it_is_met():
    for ours, note in ((1.02, "within 1.03, the aim"), (1.05, "")):
        clock = Clock("", lambda _, rep, ours=ours: {"copy": [1.0], "ours": [ours]}, None)
        work = Work("s", "w", dict, {"copy": 1.08}, aim=1.03)
        assert [row.note for row in benchmarking.measure(work, clock)] == [note]


def test_a_small_run_checks_times_and_writes(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--smoke", "--json", str(path), "--only", "frozen"]) == 0
    data = json.loads(path.read_text())
    assert data["wrong"] == []
    assert {row["work"] for row in data["rows"]} == {"silu fp32", "relu fp32", "tanh fp32"}
    assert "torch" in data["machine"]
    page = benchmarking.report(data)
    assert "| silu fp32 |" in page
    assert max(map(len, page.split("\n|", 1)[1].splitlines())) <= 100
    out = capsys.readouterr().out
    assert "0 wrong" in out
    assert "only adds time" in out


def test_a_section_that_is_not_there_is_an_error(capsys):
    assert cli.main(["bench", "--smoke", "--only", "made up"]) == 2
    assert "no section 'made up' here; there are cpu, frozen, growth." in capsys.readouterr().err


def test_a_wrong_kernel_is_not_timed_and_fails(monkeypatch, capsys):
    right = kernels.fused._forward
    monkeypatch.setattr(kernels.fused, "_forward", lambda *a: right(*a) * 1.01)
    assert cli.main(["bench", "--smoke", "--only", "frozen"]) == 1
    out = capsys.readouterr().out
    assert "WRONG silu layer" in out
    assert "| silu fp32" not in out


def test_a_module_that_is_wrong_where_its_kernel_is_right_is_found(monkeypatch):
    right = Activation.values

    def moved(self):
        tau, theta, s, c = right(self)
        return tau, theta, s, [ck + 0.1 for ck in c]

    monkeypatch.setattr(Activation, "values", moved)
    wrong = check("cpu", (torch.float32,), (33, 5))
    assert wrong
    assert all(" module torch.float32" in line for line in wrong)


def test_a_missed_limit_is_named():
    rows = [Row("s", "slow", {"copy": 1.0, "ours": 3.0}, "copy", 2.0)]
    rows.append(Row("s", "fast", {"copy": 1.0, "liger": 2.0, "ours": 1.5}, "best", 2.0))
    assert [row.verdict for row in rows] == ["MISSED", "ok"]
    assert "| 3.000 |  | 2.000 | MISSED |" in benchmarking.table(rows)


def test_the_slope_is_that_of_large_work():
    times = {24: 9.0, 25: 1.0, 26: 2.0, 27: 4.0}
    rows = [Row("growth", "", {"ours": t}, "copy", None, power=p) for p, t in times.items()]
    assert benchmarking.slope_of(rows) == pytest.approx(1.0)
    assert benchmarking.slope_of(rows[:2]) is None


def test_a_page_and_a_picture_are_made_from_what_was_written(tmp_path):
    pytest.importorskip("matplotlib")
    rows = fake_rows(Place("cpu", None), "growth")
    data = {"machine": {"gpu": "none"}, "how": "once", "wrong": [], "rows": [vars(r) for r in rows]}
    (tmp_path / "bench.json").write_text(json.dumps(data))
    results.main(tmp_path, tmp_path)
    assert "| 2^3 fp32 | 2 | copy | 1.000 | 1.000 |" in (tmp_path / "RESULTS.md").read_text()
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_times_of_an_older_format_are_refused(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps({"machine": {}, "wrong": [], "rows": []}))
    with pytest.raises(SystemExit, match=r"older `tg bench`.*run `tg bench --json FILE` again"):
        results.main(tmp_path, tmp_path)
    assert not (tmp_path / "RESULTS.md").exists()


def test_networks_are_compiled_after_all_have_run_as_they_are_called():
    works = benchmarking.on_gpu(Place("cpu", torch.compile), benchmarking.LARGE)["networks"]()
    names = [work.name for work in works]
    assert names[:4] == [
        f"{name} {what} eager"
        for name in ("resnet50", "vit_b_16")
        for what in ("inference", "training")
    ]
    assert names[4:] == [name.replace("eager", "compile") for name in names[:4]]


def test_a_network_that_cannot_be_made_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    works = benchmarking.on_gpu(Place("cpu", None), benchmarking.LARGE)["networks"]()
    rows = [row for work in works for row in benchmarking.measure(work, FAKE)]
    assert [row.verdict for row in rows] == ["MISSED"] * 4
    assert all("torchvision" in row.failed for row in rows)


def test_learned_gates_take_the_place_of_activations():
    from threshold_gating.benchmarking.networks import with_learned_gates

    model = with_learned_gates(nn.Sequential(nn.ReLU(), nn.Sequential(nn.GELU())))
    assert [m.learned for m in (model[0], model[1][0])] == [("theta", "s"), ("tau", "theta")]
