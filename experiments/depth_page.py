"""Tables, verdicts and pictures of `fig3_depth`, from its rows alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from experiments.cifar_networks import ARMS, cost, matched
from experiments.record import Case, Row, Verdict, measured
from experiments.spread import (
    Difference,
    Word,
    judged_factor,
    judged_gain,
    judged_match,
    judged_small,
    paired,
    spread,
)
from experiments.sweep import best_rates, beyond, edge
from experiments.tables import table
from threshold_gating.training import Reached, steps_to_baseline, steps_to_peak

Network = tuple[str, int, int]  # arm, depth, width
TITLES = {
    "relu": "ReLU",
    "silu": "SiLU",
    "gelu": "GELU",
    "crelu": "CReLU",
    "tier W K=3": "tier W, K = 3",
    "tier W per layer": "tier W, per layer",
}
OURS: Network = ("tier W", 14, 16)
EQUAL = matched(ARMS["silu"], 14, "parameters", cost(ARMS["tier W"], 14, 16))  # a width
Seeds = Mapping[int, Row]


def title(network: Network) -> str:
    arm, _, width = network
    return f"{TITLES.get(arm, arm)}, w = {width}"


def grouped(
    rows: Sequence[Row], part: str = "grid", images: str = "cifar10"
) -> dict[Network, dict[int, Row]]:
    """The rows of each network by seed, of today's length, without those that diverged."""
    found: dict[Network, dict[int, Row]] = {}
    for row in rows:
        c = row.case
        own = c["part"] == part and c["images"] == images and c["epochs"] == _epochs(part)
        if own and "diverged" not in row.figures:
            found.setdefault((c["arm"], c["depth"], c["width"]), {})[c["seed"]] = row
    return found


def _epochs(part: str) -> int:
    from experiments import fig3_depth as plan

    lengths = {"grid": plan.EPOCHS, "time": plan.TIMED_EPOCHS}
    return lengths.get(part, plan.SWEEP_EPOCHS)


def accuracies(runs: Seeds) -> dict[int, float]:
    return {seed: row.figures["accuracy"] for seed, row in runs.items()}


def reached(ours: Seeds, theirs: Seeds, peak: bool = False) -> list[Reached]:
    """When ours comes to the level of theirs, seed by seed."""
    measure = steps_to_peak if peak else steps_to_baseline
    curves = [
        [dict(zip(runs[seed].figures["at"], runs[seed].figures["curve"], strict=True))
         for runs in (theirs, ours)]
        for seed in sorted(ours.keys() & theirs.keys())
    ]  # fmt: skip
    return [measure(baseline, candidate) for baseline, candidate in curves]


def speedups(found: Sequence[Reached], factor: float = 1.0) -> str:
    """Mean and spread over the seeds that arrive, and how many do not."""
    values = [r.speedup * factor for r in found if r.speedup is not None]
    late = len(found) - len(values)
    never = f"; {late} of {len(found)} never" if late and values else ""
    return f"never ({late} of {late})" if late and not values else spread(values) + never


def page(rows: list[Row]) -> str:
    from experiments import fig3_depth

    runs, times = grouped(rows), grouped(rows, "time")
    parts = [
        f"Residual networks on CIFAR-10, {fig3_depth.EPOCHS} epochs, three seeds, all 10,000 test "
        "images. Every arm has the same loop, schedule and batches; its rate is the best of "
        f"{len(fig3_depth.RATES)} at depth 14, w = 16, seed 0 and {fig3_depth.SWEEP_EPOCHS} "
        "epochs, chosen on training images that the sweep leaves out, and held for other depths "
        f"and widths (`{rows[-1].about['command']}`; {measured(rows)}). +- is a standard "
        "deviation over seeds, [ ] a 95 % interval of paired differences.",
        said_missing(fig3_depth.cases(), rows),
        "Depth 14. A cost is that of one image over tier W's with w = 16. A weight is read once "
        "for each MAC, so bytes read go as MACs. Hard gates and CReLU take one branch for each "
        "input: half of the MACs and bytes, those of w = 16. Conversions (tiles of 128 and 512 "
        "rows) are the same for soft and hard gates.",
        _depth_14(runs),
        _depths(runs),
        _speed(runs, times),
        _hundred(rows),
        _hardening(runs),
        rates(rows),
        "![Accuracy by depth, and along training](images/fig3_depth.svg)",
    ]
    return "\n\n".join(part for part in parts if part)


def said_missing(wanted: list[Case], rows: Sequence[Row]) -> str:
    """What was cut, and what came to nothing."""
    have = [row.case for row in rows]
    left = [case for case in wanted if case not in have]
    words = f"{len(wanted) - len(left)} of {len(wanted)} cases ran."
    if left:
        names: dict[str, list[str]] = {}
        for c in left:
            label = f"{TITLES.get(c['arm'], c['arm'])} depth {c['depth']} w {c['width']}"
            names.setdefault(f"{label} ({c['part']})", []).append(str(c["seed"]))
        some = (
            f"{n}{f', seed {chr(44).join(s)}' if '(grid)' in n and len(s) < 3 else ''}"
            for n, s in names.items()
        )
        words += f" Not run: {'; '.join(some)}."
    lost = [row.case for row in rows if "diverged" in row.figures]
    if lost:
        words += (
            " Diverged: "
            + "; ".join(f"{c['arm']} at rate {c.get('rate', 'chosen')} ({c['part']})" for c in lost)
            + "."
        )
    others = [row for row in rows if row.case["epochs"] != _epochs(row.case["part"])]
    if others:
        words += f" Left out: {len(others)} rows of another number of epochs."
    words += _other_rates(rows)
    slow = [row.case for row in rows if not row.figures.get("recorded", True)]
    if slow and not rows[0].about["device"].startswith("CPU"):
        words += f" {len(slow)} runs were called step by step, not recorded as CUDA graphs."
    return words


def _other_rates(rows: Sequence[Row]) -> str:
    """Runs at a rate that the sweep, as it is now, would not choose."""
    best = best_rates(rows, "accuracy")
    strange = Counter(
        f"{TITLES.get(arm, arm)} at {row.figures['rate']:g} (the sweep: {best[arm]:g})"
        for row in rows
        if (arm := row.case["arm"]) in best
        and row.case["part"] == "grid"
        and row.figures.get("rate", best[arm]) != best[arm]
    )
    said = "; ".join(f"{count} of {name}" for name, count in strange.items())
    return f" Runs at another rate than the sweep chooses: {said}." if said else ""


def _depth_14(runs: dict[Network, dict[int, Row]]) -> str:
    ours, base = runs.get(OURS, {}), cost(ARMS["tier W"], 14, 16)
    lines = []
    for network in sorted((n for n in runs if n[1] == 14), key=lambda n: (n[2], n[0])):
        own = cost(ARMS[network[0]], 14, network[2])
        shares = [f"{a / b:.2f}" for a, b in zip(own, base, strict=True)]
        shares[2] = f"{own.hard_macs / base.macs:.2f}"
        gain = "" if network == OURS else str(paired(accuracies(ours), accuracies(runs[network])))
        lines.append([title(network), *shares, spread([*accuracies(runs[network]).values()]), gain])
    head = ["network", "parameters", "MACs, bytes read", "one branch at a time", "ADC, 128 rows"]
    return table([*head, "ADC, 512 rows", "test %", "tier W minus it"], lines)


def _depths(runs: dict[Network, dict[int, Row]]) -> str:
    kinds = dict.fromkeys((arm, width) for arm, depth, width in runs if depth != 14)
    lines = []
    for arm, width in kinds:
        cells = []
        for depth in (8, 14, 20):
            found = runs.get((arm, depth, width), {})
            size = cost(ARMS[arm], depth, width).parameters / 1e3
            cells.append(f"{spread([*accuracies(found).values()])} ({size:.0f} k)")
        lines.append([title((arm, 14, width)), *cells])
    words = "Depths. Accuracy in percent, with parameters in thousands:"
    return f"{words}\n\n{table(['network', 'depth 8', '14', '20'], lines)}" if lines else ""


def _speed(runs: dict[Network, dict[int, Row]], times: dict[Network, dict[int, Row]]) -> str:
    ours, lines, begun = runs.get(OURS, {}), [], []
    for baseline in [n for n in runs if n[1] == 14 and n[0] in ("relu", "silu", "gelu", "crelu")]:
        found = reached(ours, runs[baseline])
        begun += [r.baseline / r.end for r in found if r.baseline is not None]
        step = step_ms(times, baseline)
        ratio = step / step_ms(times, OURS)
        wall = "not timed" if math.isnan(ratio) else speedups(found, ratio)
        levels = spread([r.level for r in found])
        peak = speedups(reached(ours, runs[baseline], peak=True))
        timed = "not timed" if math.isnan(step) else f"{step:.2f} ms"
        lines.append([title(baseline), levels, speedups(found), peak, timed, wall])
    if not lines or not ours:
        return ""
    own = step_ms(times, OURS)
    head = ["baseline", "its level", "steps", "steps to its peak", "its step", "wall clock"]
    others = [n for n in times if n not in runs]
    more = "; ".join(f"{title(n)}: {step_ms(times, n):.2f} ms" for n in others)
    note = (
        ""
        if math.isnan(own)
        else f"A step of tier W takes {own:.2f} ms. {more}{'.' if more else ''}"
    )
    words = (
        "Steps until tier W (w = 16, depth 14) reaches a baseline's level, as ratios of first "
        "crossings: of the mean of its last 6 evaluations, smoothed over 3 (panel d), and of its "
        "peak (panel b). The last columns have the time of a training step, recorded, nothing "
        "beside it, and the ratio in wall-clock time."
    )
    if begun:
        ends = dict.fromkeys(f"{100 * f(begun):.0f}" for f in (min, max))
        words += (
            f" The baselines themselves come to their level at {' to '.join(ends)} % of the run, "
            "for the rate falls to 0 at its end: a network "
            "that learns faster before that is seen in these ratios only if it is better at the "
            "end as well."
        )
    return "\n\n".join(part for part in (words, table(head, lines), note) if part)


def _hundred(rows: Sequence[Row]) -> str:
    found = grouped(rows, images="cifar100")
    ours, theirs = found.get(OURS, {}), found.get(("gelu", 14, 16), {})
    if not ours or not theirs:
        return "CIFAR-100 was not here; `--images cifar100` runs panel (d) on it, against GELU."
    ends = [spread([*accuracies(runs).values()]) for runs in (ours, theirs)]
    return (
        f"CIFAR-100, with the rates of CIFAR-10: tier W {ends[0]} %, GELU {ends[1]} %, steps to "
        f"its level {speedups(reached(ours, theirs))}."
    )


def step_ms(times: dict[Network, dict[int, Row]], network: Network) -> float:
    found = times.get(network, {})
    return mean(row.figures["step_ms"] for row in found.values()) if found else math.nan


def _hardening(runs: dict[Network, dict[int, Row]]) -> str:
    lines = []
    for network, found in runs.items():
        hard = [row.figures for row in found.values() if "hard" in row.figures]
        if hard:
            keys = ("accuracy", "hard", "hard_tuned", "soft_tuned")
            cells = [spread([f[key] for f in hard if key in f]) for key in keys]
            lines.append([f"depth {network[1]}", *cells])
    if not lines:
        return ""
    head = ["tier W, w = 16", "soft", "hard at once", "hard, tuned", "soft, tuned as long"]
    words = (
        "Every gate made a comparison after training (`tg.training.harden`), the shortcuts' SiLU "
        "too; then 3 epochs at a tenth of the rate, with the gates hard and, beside it, soft:"
    )
    return f"{words}\n\n{table(head, lines)}"


def rates(rows: Sequence[Row]) -> str:
    found: dict[str, dict[float, str]] = {}
    for row in rows:
        if row.case["part"] == "sweep":
            value = row.figures.get("accuracy")
            said = "diverged" if value is None else f"{value:.2f}"
            found.setdefault(row.case["arm"], {})[row.case["rate"]] = said
    if not found:
        return ""
    rates = sorted({rate for tried in found.values() for rate in tried})
    lines = [
        [TITLES.get(arm, arm), *(tried.get(r, "not run") for r in rates)]
        for arm, tried in found.items()
    ]
    words = "The sweep of rates, percent of 5,000 training images left out; the best is held:"
    whole = {arm: rate for arm, rate in best_rates(rows, "accuracy").items() if len(found[arm]) > 1}
    said = edge(whole, rates, TITLES).strip() if whole else ""
    shown = table(["rate", *(f"{r:g}" for r in rates)], lines)
    higher = beyond(rows, "accuracy", TITLES)
    return "\n\n".join(part for part in (words, shown, f"{said} {higher}".strip()) if part)


def verdicts(rows: list[Row]) -> list[Verdict]:
    runs = grouped(rows)
    ours = runs.get(OURS, {})

    def against(network: Network) -> Difference:
        return paired(accuracies(ours), accuracies(runs.get(network, {})))

    wide, narrow, k3 = (
        against((arm, 14, w)) for arm, w in (("relu", EQUAL), ("relu", 16), ("tier W K=3", 16))
    )
    more = Difference(-k3.mean, k3.half, k3.pairs)
    relu = runs.get(("relu", 14, 16), {})
    same, beats = "3b: tier W, K = 2, beats ReLU of its width, depth 14", "matches or beats"
    equal = f"3b: it matches or beats ReLU with as many parameters (w = {EQUAL})"
    third = "3b: K = 3 adds only marginal gains over K = 2"
    peak = "3b: times fewer epochs to the peak of ReLU, depth 14"
    found = [
        Verdict(same, "higher", points(narrow), judged_gain(narrow)),
        Verdict(equal, beats, points(wide), judged_match(wide)),
        Verdict(third, "marginal", points(more), judged_small(more)),
        _speed_verdict(peak, "1.34", 1.34, ours, relu, peak=True),
        _depth_verdict(runs),
    ]
    for label, width in (("", 16), (", equal parameters", EQUAL)):
        found.append(
            _speed_verdict(
                f"3d: times fewer steps to the level of SiLU, CIFAR-10{label}",
                "2.04 +- 0.19", 2.04, ours, runs.get(("silu", 14, width), {}),
            )
        )  # fmt: skip
    other = grouped(rows, images="cifar100")
    hundred = _speed_verdict(
        "3d: times fewer steps to the level of GELU, CIFAR-100", "1.98 +- 0.35", 1.98,
        other.get(OURS, {}), other.get(("gelu", 14, 16), {}),
    )  # fmt: skip
    return [*found, hundred if other else hundred._replace(ours="", verdict="no data here")]


def points(gain: Difference) -> str:
    return f"{gain} points" if gain.pairs else ""


def _depth_verdict(runs: dict[Network, dict[int, Row]]) -> Verdict:
    pairs = [((*OURS[:1], a, 16), ("relu", b, 16)) for a, b in ((8, 14), (14, 20))]
    gains = [paired(accuracies(runs.get(x, {})), accuracies(runs.get(y, {}))) for x, y in pairs]
    ours = "; ".join(
        f"{a[1]} against {b[1]} layers: {g}" for (a, b), g in zip(pairs, gains, strict=True)
    )
    words = [judged_match(gain) for gain in gains if gain.pairs]
    word: Word = "partly"
    if len(set(words)) < 2:
        word = words[0] if words else "not run"
    if word == "reproduced" and len(words) < len(pairs):
        word = "partly"  # the other depths were not run
    ours = ours if words else ""
    return Verdict(
        "3b: tier W needs fewer layers than ReLU of the same width", "a depth less", ours, word
    )


def _speed_verdict(
    claim: str, paper: str, factor: float, ours: Seeds, theirs: Seeds, peak: bool = False
) -> Verdict:
    found = reached(ours, theirs, peak)
    if not found:
        return Verdict(claim, paper, "", "not run")
    word = judged_factor([r.speedup for r in found], factor)
    return Verdict(claim, paper, speedups(found), word)


def draw(rows: list[Row], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "fig3"  # the same file every time
    runs = grouped(rows)
    plt.style.use("tableau-colorblind10")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    shown = [("tier W", 16), *((arm, width) for width in (16, EQUAL) for arm in ("relu", "silu"))]
    kinds = [
        (arm, width) for arm, width in shown if any((arm, d, width) in runs for d in (8, 14, 20))
    ]
    for number, (arm, width) in enumerate(kinds):
        own = [(d, runs[arm, d, width]) for d in (8, 14, 20) if (arm, d, width) in runs]
        at = [d + 0.25 * (number - len(kinds) / 2) for d, _ in own]
        ends = [[*accuracies(found).values()] for _, found in own]
        style = {"color": f"C{number}", "marker": "osv^D"[number % 5]}
        left.plot(at, [mean(e) for e in ends], label=title((arm, 14, width)), markersize=0, **style)
        sizes = [cost(ARMS[arm], d, width).parameters / 5e3 for d, _ in own]
        left.scatter(at, [mean(e) for e in ends], s=sizes, **style)
        left.vlines(at, [min(e) for e in ends], [max(e) for e in ends], color=f"C{number}")
    left.set(
        xlabel="layers",
        ylabel="test accuracy in %",
        xticks=[8, 14, 20],
        title="(b) depth; size: parameters",
    )
    for number, network in enumerate([OURS, ("silu", 14, 16), ("silu", 14, EQUAL)]):
        curves = [row.figures for row in runs.get(network, {}).values()]
        if curves:
            middle = [mean(values) for values in zip(*(f["curve"] for f in curves), strict=True)]
            right.plot(
                curves[0]["at"],
                middle,
                "-" if number == 0 else ["--", ":"][number - 1],
                color=f"C{number}",
                label=title(network),
            )
    right.set(xlabel="steps", ylabel="test accuracy in %", title="(d) depth 14, mean over seeds")
    right.set_ylim(bottom=70)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "fig3_depth.svg", metadata={"Date": None})
    plt.close(figure)
