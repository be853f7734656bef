"""`tg bench`: check against float64, then time every contender in one process, then compare.

Nothing is timed that disagrees with the reference. A limit that is missed is printed as MISSED.
Times are medians, of events on a GPU and of wall-clock time on a CPU; single kernels on a GPU are
timed as recorded graphs, networks as they are called.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import TAXONOMY, Activation, convert, kernels
from threshold_gating.kernels.pairs import PAIRS, Pair, disagreement

Contenders = dict[str, Callable[[], Any]]
ALL = ("tau", "theta", "s", "c")
# Largest error against float64 over the largest value, by dtype: one unit in the last place.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass
class Row:
    """One piece of work: milliseconds of each contender, and the ratio that has a limit."""

    section: str
    work: str
    times: dict[str, float]
    over: str  # the contender that `ours` is divided by; "best" for the fastest other one
    limit: float | None
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        others = [ms for name, ms in self.times.items() if name != "ours"]
        return self.times["ours"] / (min(others) if self.over == "best" else self.times[self.over])

    @property
    def verdict(self) -> str:
        return "" if self.limit is None else "ok" if self.ratio <= self.limit else "MISSED"


def machine() -> dict[str, str]:
    """What the figures belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"gpu": gpu, "cpu": platform.machine(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if kernels.launch.is_installed():
        import triton

        found["triton"] = triton.__version__
    return found


def check(device: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> list[str]:
    """Every pair of the table against float64; what is wrong, as sentences."""
    wrong = []
    for pair in PAIRS.values():
        for dtype in dtypes:
            torch.manual_seed(0)
            errors = disagreement(pair, pair.inputs(shape, dtype, device))
            bound = ALLOWED[dtype] * (3 if pair.second == "times" else 1)
            wrong += [
                f"{pair.name} {dtype} {name}: error {error:.1e} above {bound:.1e}"
                for name, error in errors.items()
                if not error <= bound
            ]
    return wrong


def timed(
    contenders: Contenders, device: str, runs: int = 9, kernels_only: bool = False
) -> dict[str, float]:
    """Milliseconds of each; on a CPU in turn, so that all see the same noise.

    `kernels_only` replays a recorded graph, so that Python's share, which for every contender is
    longer than such kernels run, does not count.
    """
    if device == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        if kernels_only:
            return {n: _replayed(do_bench_cudagraph, f) for n, f in contenders.items()}
        return {
            n: do_bench(f, warmup=10, rep=50, return_mode="median") for n, f in contenders.items()
        }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(runs + 2):
        for name, f in contenders.items():
            start = time.perf_counter()
            f()
            if i > 1:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in taken.items()}


def _replayed(bench: Any, f: Callable[[], Any]) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        ms: float = bench(f, rep=30, return_mode="median")
    return ms


def gradients(f: Callable[..., Tensor], inputs: list[Tensor], slope: Tensor) -> Any:
    return torch.autograd.grad(f(*inputs), inputs, slope)


def elementwise(shape: tuple[int, int], compile_too: bool) -> Iterator[Row]:
    """Forward, and forward with backward and every gradient, over a copy."""
    limits = {  # by dtype and K: forward, forward and backward
        (torch.bfloat16, 2): (1.08, 2.9), (torch.bfloat16, 3): (1.3, 4.0),
        (torch.bfloat16, 5): (1.8, None), (torch.float32, 2): (1.03, 2.9),
        (torch.float32, 3): (1.08, 4.0), (torch.float32, 5): (1.2, None),
    }  # fmt: skip
    for (dtype, K), (forward, both) in limits.items():
        for share in ("channel", "layer"):
            pair = PAIRS[f"{ {2: 'silu', 3: 'mish', 5: 'gelu'}[K] } {share}"]
            inputs = pair.inputs(shape, dtype, "cuda")
            x, slope = inputs[0].detach(), torch.randn(shape, device="cuda").to(dtype)
            out, r = torch.empty_like(x), x.clone().requires_grad_()
            ways: dict[str, Callable[..., Tensor]] = {"ours": _as_function(pair, pair.kernel)}
            if K == 2:
                ways["eager"] = _as_function(pair, pair.reference)
                if compile_too:
                    ways["compile"] = torch.compile(ways["eager"])
            work = f"K={K} {share} {_short(dtype)}"
            with torch.no_grad():
                contenders = {"copy": _bound(out.copy_, [x]), "silu": _bound(F.silu, [x])}
                contenders |= {n: _bound(f, inputs) for n, f in ways.items()}
                yield Row(
                    "elementwise", f"{work} forward", timed(contenders, "cuda"), "copy", forward
                )
            contenders = {"copy": _bound(out.copy_, [x])}
            contenders["silu"] = _bound(gradients, [F.silu, [r], slope])
            contenders |= {n: _bound(gradients, [f, inputs, slope]) for n, f in ways.items()}
            yield Row(
                "elementwise",
                f"{work} + backward",
                timed(contenders, "cuda", kernels_only=True),
                "copy",
                both,
            )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _as_function(pair: Pair, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: pair.call(f, list(inputs))


def _bound(f: Callable[..., Any], inputs: list[Any]) -> Callable[[], Any]:
    return lambda: f(*inputs)


def gated_units(shape: tuple[int, int]) -> Iterator[Row]:
    """SwiGLU and GEGLU in one pass against eager, torch.compile and Liger's kernels."""
    functions: dict[str, tuple[Callable[..., Tensor], str]] = {
        "swiglu": (lambda x, up: F.silu(x) * up, "silu"),
        "geglu": (lambda x, up: F.gelu(x, approximate="tanh") * up, "gelu_tanh"),
    }
    x, up, slope = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given = [x.requires_grad_(), up.requires_grad_()]
    for name, (plain, key) in functions.items():
        t = TAXONOMY[key]

        def ours(x: Tensor, up: Tensor, t: Any = t) -> Tensor:
            return kernels.blend_times(x, up, t.tau, t.theta, t.s, t.c)

        ways = {"eager": plain, "compile": torch.compile(plain), "ours": ours, **_liger(name)}
        with torch.no_grad():
            steps = {n: _bound(f, given) for n, f in ways.items()}
            times = timed(steps, "cuda", kernels_only=True)
            yield Row("gated units", f"{name} forward", times, "best", 1.02)
        steps = {n: _bound(gradients, [f, given, slope]) for n, f in ways.items()}
        times = timed(steps, "cuda", kernels_only=True)
        yield Row("gated units", f"{name} + backward", times, "best", 1.02)


def _liger(name: str) -> dict[str, Callable[..., Tensor]]:
    try:
        from liger_kernel.ops import geglu, swiglu  # type: ignore[import-not-found]
    except ImportError:
        return {}
    made = {"swiglu": swiglu.LigerSiLUMulFunction, "geglu": geglu.LigerGELUMulFunction}[name]
    return {"liger": made.apply}


def frozen(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Exact instances under `auto` are torch's own op."""
    x = torch.randn(shape, device=device, dtype=dtype)
    for key, op in (("silu", F.silu), ("relu", F.relu), ("tanh", torch.tanh)):
        act = Activation(key)
        times = timed({"native": _bound(op, [x]), "ours": _bound(act, [x])}, device)
        yield Row("frozen", f"{key} {_short(dtype)}", times, "native", 1.02)


def products(sizes: tuple[tuple[int, int, int], ...]) -> Iterator[Row]:
    """Tier W, K = 2, over one dense layer of the same size."""
    from threshold_gating import Linear

    for (rows, inner, outer), forward, both in zip(sizes, (2.15, 2.10), (2.25, 2.15), strict=True):
        dense = nn.Linear(inner, outer, bias=False, device="cuda", dtype=torch.bfloat16)
        layer = Linear.from_dense(dense, TAXONOMY["silu"]).to("cuda")
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        slope = torch.randn(rows, outer, device="cuda", dtype=torch.bfloat16)
        work = f"K=2 {rows}x{inner}x{outer} bf16"
        with torch.no_grad():
            contenders: Contenders = {"linear": _bound(dense, [x]), "ours": _bound(layer, [x])}
            contenders["silu+linear"] = lambda d=dense, x=x: d(F.silu(x))  # type: ignore[misc]
            yield Row("tier W", f"{work} forward", timed(contenders, "cuda"), "linear", forward)
        steps = {
            name: _bound(_step, [m, x, slope]) for name, m in (("linear", dense), ("ours", layer))
        }
        yield Row("tier W", f"{work} + backward", timed(steps, "cuda"), "linear", both)


def _step(model: nn.Module, x: Tensor, slope: Tensor) -> Any:
    return torch.autograd.grad(model(x), [x, *model.parameters()], slope, allow_unused=True)


def networks(batch: int, compile_too: bool) -> Iterator[Row]:
    """Whole networks, bf16: inference of a conversion, a training step with learned gates."""
    import torchvision

    makers = {
        "resnet50": (torchvision.models.resnet50, 1.02),
        "vit_b_16": (torchvision.models.vit_b_16, 1.10),
    }
    for name, (make, limit) in makers.items():
        plain = make().to("cuda", torch.bfloat16, memory_format=torch.channels_last).eval()
        x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last)
        gated = convert(plain)
        trained = _with_learned_gates(
            make().to("cuda", torch.bfloat16, memory_format=torch.channels_last)
        )
        for how in ("eager", "compile") if compile_too else ("eager",):
            wrap = torch.compile if how == "compile" else lambda f: f
            pair = {"original": wrap(plain), "ours": wrap(gated)}
            with torch.no_grad():
                times = timed({n: _bound(m, [x]) for n, m in pair.items()}, "cuda")
            yield Row("networks", f"{name} inference {how}", times, "original", limit)
            steps = {"original": wrap(plain.train()), "ours": wrap(trained.train())}
            times = timed({n: _bound(_training_step, [m, x]) for n, m in steps.items()}, "cuda")
            plain.eval()
            yield Row("networks", f"{name} training {how}", times, "original", 1.05)


def _with_learned_gates(model: nn.Module) -> nn.Module:
    """Every ReLU and GELU as a learned instance, one for each layer."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, Activation("relu", train=("theta", "s")).to("cuda"))
            elif isinstance(child, nn.GELU):
                setattr(parent, name, Activation("gelu", train=("tau", "theta")).to("cuda"))
    return model


def _training_step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()


def growth(largest: int) -> Iterator[Row]:
    """Cost as the work grows."""
    for power in range(12, largest + 1, 2 if largest < 25 else 1):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.randn(2**power, device=device)
        out = torch.empty_like(x)
        t = torch.tensor(1.1, device=device)
        ours = _bound(kernels.blend, [x, t, [t], (0.0, 1.0), (0.0, 0.0)])
        pair = {"copy": _bound(out.copy_, [x]), "ours": ours}
        times = timed(pair, device, kernels_only=True)
        yield Row("growth", f"2^{power} fp32", times, "copy", None, {"power": power})


def on_cpu(elements: int, compile_too: bool) -> Iterator[Row]:
    """One thread: learned K = 2 against F.silu, and a whole training step against ReLU's."""
    x = torch.randn(elements // 65536, 64, 32, 32).requires_grad_()
    slope = torch.randn_like(x)
    for share, channels in (("channel", 64), ("layer", None)):
        act = Activation("silu", share=share, channels=channels, train=ALL)
        limits = {"eager": (5.0, 7.0), "compiled": (1.6, 5.0 if channels else 2.0)}
        for how, (forward, both) in limits.items():
            if how == "compiled" and not compile_too:
                continue
            f = torch.compile(act) if how == "compiled" else act
            with torch.no_grad():
                times = timed({"silu": _bound(F.silu, [x]), "ours": _bound(f, [x])}, "cpu")
            yield Row("cpu", f"K=2 {share} forward {how}", times, "silu", forward)
            steps: Contenders = {"silu": _bound(gradients, [F.silu, [x], slope])}
            steps["ours"] = lambda f=f, act=act: torch.autograd.grad(  # type: ignore[misc]
                f(x), [x, *act.parameters()], slope
            )
            yield Row("cpu", f"K=2 {share} + backward {how}", timed(steps, "cpu"), "silu", both)


def table(rows: list[Row]) -> str:
    """The rows as Markdown that fits a terminal."""
    lines = ["| work | ms | contenders over ours | over | ratio | limit | |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        ours = row.times["ours"]
        rest = " ".join(f"{n} {ms / ours:.2f}" for n, ms in row.times.items() if n != "ours")
        limit = "" if row.limit is None else f"{row.limit:.2f}"
        cells = (row.work, f"{ours:.4g}", rest, row.over, f"{row.ratio:.2f}", limit, row.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_HOW = (
    "Element-wise kernels, gated units and growth are timed as replays of a recorded graph, all "
    "contenders alike, which leaves out what Python costs; the rest is timed as it is called. "
    "LOG.md has what the two ways of timing give where they differ."
)


def report(data: dict[str, Any]) -> str:
    """A page of results from what `--json` wrote; nothing in it is typed by hand."""
    rows = [Row(**row) for row in data["rows"]]
    parts = ["# Results", "", "Written from the JSON of `tg bench`, nothing by hand.", "", _HOW, ""]
    parts += [", ".join(f"{k} {v}" for k, v in data["machine"].items()) + ".", ""]
    parts += [f"Checks: {'all pairs agree' if not data['wrong'] else '; '.join(data['wrong'])}."]
    for section in dict.fromkeys(row.section for row in rows):
        parts += ["", f"## {section}", "", table([r for r in rows if r.section == section])]
    if (slope := data.get("slope")) is not None:
        parts += ["", f"Time grows as the {slope:.3f}th power of the work from 2^25 elements on."]
    return "\n".join(parts) + "\n"


def slope_of(rows: list[Row], start: int = 25) -> float | None:
    """d log(time) / d log(elements) of our times from 2^start on."""
    points = [(r.notes["power"], r.times["ours"]) for r in rows if r.section == "growth"]
    points = [p for p in points if p[0] >= start]
    if len(points) < 2:
        return None
    (a, t), (b, u) = points[0], points[-1]
    return (math.log2(u) - math.log2(t)) / (b - a)


def picture(data: dict[str, Any], path: Path) -> None:
    """Time against elements on logarithmic axes, ours and a copy."""
    from matplotlib.figure import Figure

    rows = [Row(**row) for row in data["rows"] if row["section"] == "growth"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [2 ** int(row.notes["power"]) for row in rows]
    for name in ("copy", "ours"):
        axes.loglog(sizes, [row.times[name] for row in rows], "o-", label=name, base=2)
    axes.set(xlabel="elements", ylabel="milliseconds", title=data["machine"]["gpu"])
    axes.legend()
    figure.savefig(path)


def run(smoke: bool, path: Path | None, sections: list[str] | None = None) -> int:
    """Check, time, print; 1 if a kernel is wrong. `sections` leaves the others out."""
    gpu = torch.cuda.is_available() and not smoke
    if not gpu:
        torch.set_num_threads(1)
    info = machine()
    print(", ".join(f"{k} {v}" for k, v in info.items()), flush=True)
    dtypes = (torch.float32, torch.bfloat16)
    wrong = check("cuda" if gpu else "cpu", dtypes, (1031, 63) if gpu else (63, 7))
    for line in wrong:
        print(f"WRONG {line}")
    rows: list[Row] = []
    for name, section in (_on_gpu() if gpu else _here(smoke)).items():
        if wrong or (sections and name not in sections):
            continue
        print(f"\n{name}", flush=True)
        for row in section():
            row.limit = None if smoke else row.limit  # they are for large work
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
    data: dict[str, Any] = {"machine": info, "wrong": wrong, "rows": [asdict(r) for r in rows]}
    data["slope"] = slope_of(rows)
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")
    missed = sum(r.verdict == "MISSED" for r in rows)
    print(
        f"\n{len(wrong)} wrong, {missed} of {sum(r.limit is not None for r in rows)} limits missed"
    )
    return 1 if wrong else 0


def _on_gpu() -> dict[str, Callable[[], Iterator[Row]]]:
    return {
        "elementwise": lambda: elementwise((16384, 4096), True),
        "gated units": lambda: gated_units((16384, 4096)),
        "frozen": lambda: frozen((16384, 4096), "cuda", torch.bfloat16),
        "tier W": lambda: products(((8192, 4096, 4096), (16384, 8192, 8192))),
        "networks": lambda: networks(64, False),
        "growth": lambda: growth(28),
    }


def _here(smoke: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    elements = 2**17 if smoke else 2**22
    return {
        "cpu": lambda: on_cpu(elements, not smoke),
        "frozen": lambda: frozen((elements,), "cpu", torch.float32),
        "growth": lambda: growth(16 if smoke else 24),
    }
