"""The section on AN4 of docs/results.md: tables, tests, verdicts and the picture, from the rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from experiments.record import Row, Verdict, measured
from experiments.speech_networks import ARMS
from experiments.speech_runs import (
    DRAWS,
    Figures,
    Interval,
    Runs,
    bootstrap,
    checkpoints,
    chosen,
    ends,
    having,
    reached,
    signs,
)
from experiments.spread import Word, judged_factor, paired, spread
from experiments.sweep import edge
from experiments.tables import table

NAME = "fig3_speech"
HIDDEN = (128, 256, 512, 192)  # in order of importance
RATES = (3e-4, 8e-4, 2e-3)
SEEDS = (0, 1, 2)
STARTED = 1024  # trained as the standard network first, with the best of rates of its own
STARTS = (1e-4, 3e-4, 8e-4)
PAPER = {
    "constant": {128: 15.01, 192: 13.07, 256: 12.29, 512: 10.35},
    "released": {128: 16.82, 192: 15.52, 256: 13.58, 512: 12.42},
    "standard": {128: 19.53, 192: 15.91, 256: 13.45, 512: 11.77},
}


def runs_of(rows: Sequence[Row]) -> Runs:
    lengths = Counter(row.case["epochs"] for row in having(rows, kind="train"))
    epochs = lengths.most_common(1)[0][0] if lengths else 0
    rates = chosen(rows, RATES, SEEDS[0], kind="train", hidden=HIDDEN[0], epochs=epochs)
    each: dict[tuple[str, int], dict[int, Figures]] = {}
    for arm, rate in rates.items():
        for row in having(rows, kind="train", epochs=epochs, arm=arm, rate=rate):
            if not math.isfinite(float(row.figures["wer"])):
                continue
            own = each.setdefault((arm, row.case["hidden"]), {})
            own[row.case["seed"]] = row.figures
    return Runs(epochs, rates, each)


def times(rows: Sequence[Row]) -> dict[tuple[str, int], Figures]:
    return {(r.case["arm"], r.case["hidden"]): r.figures for r in having(rows, kind="time")}


def continued(rows: Sequence[Row]) -> dict[str, dict[int, Figures]]:
    """The runs from a trained network, by contender and seed; of the best rate of the starts."""
    by_arm: dict[str, dict[int, Figures]] = {}
    tried = having(rows, kind="start", seed=SEEDS[0])
    best = min(tried, key=lambda r: float(r.figures["validation"])).case["rate"] if tried else None
    for row in having(rows, kind="continued", rate=best):
        by_arm.setdefault(row.case["arm"], {})[row.case["seed"]] = row.figures
    return by_arm


def page(rows: list[Row]) -> str:
    runs = runs_of(rows)
    texts = [_about(rows, runs)]
    if runs.each:
        texts += [_rates(runs), f"![WER on AN4 by width and along the run](images/{NAME}.svg)"]
        texts += [_differences(runs), _tests(runs), _speed(rows, runs)]
    texts += [_continued(rows, runs), _sweep(rows, runs), _cut(rows, runs)]
    return "\n\n".join(text for text in texts if text)


def _about(rows: Sequence[Row], runs: Runs) -> str:
    return (
        "A DeepSpeech2-type network (two convolutions, five bidirectional LSTMs, CTC over letters) "
        "on AN4: 853 utterances, 95 for validation, 130 (773 words) for the test; "
        f"{runs.epochs} epochs of AdamW; {measured(rows)}. All contenders start from the same "
        "weights and see the same batches; gates are evaluated for every figure. "
        f"{_trained(rows)}The control has "
        "tau and theta on i, f, g, o alone: torch's LSTM in other coordinates, so that what it "
        "gains is a matter of training and not of functions. `python -m experiments.fig3_speech`."
    )


def _trained(rows: Sequence[Row]) -> str:
    stacked, runs = (sum(name in r.figures for r in rows) for name in ("stacked", "wer"))
    if not stacked:
        return ""
    return (
        f"Of {runs} runs {stacked} were trained with the contenders of a seed stacked into "
        "one network, its recurrence in plain torch formulas of the gates, and not by the "
        "library's kernel; every network was evaluated by the library's own LSTM. "
    )


def _rates(runs: Runs) -> str:
    """WER by width: mean +- standard deviation over seeds, the paper's in brackets."""
    lines = []
    for hidden in runs.widths:
        cells = []
        for arm in ARMS:
            theirs = PAPER.get(arm, {}).get(hidden)
            ours = spread([*runs.wer(arm, hidden).values()])
            cells.append(ours + (f" ({theirs})" if theirs is not None else ""))
        lines.append([hidden, *cells])
    words = "WER in % at the end of the run, mean +- standard deviation (the paper's):"
    return f"{words}\n\n{table(['H', *ARMS], lines)}"


PAIRS = (
    ("constant", "standard"),
    ("released", "standard"),
    ("control", "standard"),
    ("constant", "control"),
    ("released", "constant"),
)


def _differences(runs: Runs) -> str:
    head = ["H", "difference", "points of WER, over utterances", "over seeds", "seeds"]
    lines = []
    for hidden in runs.widths:
        for ours, theirs in PAIRS:
            drawn = bootstrap(runs.of(ours, hidden), runs.of(theirs, hidden))
            seeds = paired(runs.wer(ours, hidden), runs.wer(theirs, hidden))
            lines.append([hidden, f"{ours} - {theirs}", drawn, seeds, drawn.seeds])
    return (
        f"Differences; negative is better. Over utterances: paired bootstrap, {DRAWS:,} draws of "
        "the 130, 95 %; it knows nothing of other seeds, nor that ten speakers said them. Over "
        "seeds: Student's t, 95 %.\n\n" + table(head, lines)
    )


def _tests(runs: Runs) -> str:
    head = ["contender", "checkpoints of all runs", "ends of runs"]
    others = [arm for arm in ARMS if arm != "standard"]
    lines = [[arm, signs(checkpoints(runs, arm)), signs(ends(runs, arm))] for arm in others]
    lines.append(["constant over control", "", signs(ends(runs, "constant", "control"))])
    return (
        "Sign tests against the standard LSTM (wins without ties). The paper's takes the "
        "checkpoints at the same steps as independent; those of one run are not, and its p is far "
        "too small. Beside it each run counts once, at its end.\n\n" + table(head, lines)
    )


def _speed(rows: Sequence[Row], runs: Runs) -> str:
    head = ["H", "contender", "speed-up in steps", "arrive", "ms a step", "speed-up in time"]
    lines, clock = [], times(rows)
    for hidden in runs.widths:
        for arm in ARMS:
            each = reached(runs, arm, hidden)
            there = [r.speedup for r in each if r.speedup is not None]
            own, base = (clock.get((a, hidden)) for a in (arm, "standard"))
            cell, ms = "not timed", "not timed"
            if own and base:
                ms = f"{own['ms']:.1f}"
                cell = spread([s * base["ms"] / own["ms"] for s in there]) if there else "never"
            if each:
                steps = spread(there) if there else "never"
                lines.append([hidden, arm, steps, f"{len(there)} of {len(each)}", ms, cell])
    return (
        "Steps to the baseline's converged level (App. D: mean of its last six evaluations, curves "
        "smoothed over three); 1.52 +- 0.21 in the paper. Means are over the runs that arrive. "
        "Times are of a step alone on the GPU, recorded.\n\n" + table(head, lines)
    )


def _continued(rows: Sequence[Row], runs: Runs) -> str:
    found = having(rows, kind="continued")
    if not found:
        return ""
    head = ["contender", "WER before", "WER at the end", "minus standard, over utterances"]
    lines, by_arm = [], continued(rows)
    for arm, own in by_arm.items():
        before, end = ([float(f["curve_test"][k]) for f in own.values()] for k in (0, -1))
        drawn = bootstrap(own, by_arm.get("standard", {}))
        lines.append([arm, spread(before), spread(end), drawn if arm != "standard" else ""])
    ended = [
        f"{float(r.figures['wer']):.1f} (rate {r.case['rate']:g}, seed {r.case['seed']})"
        for r in having(rows, kind="start")
    ]
    tried = {r.case["rate"] for r in having(rows, kind="start", seed=SEEDS[0])}
    left = ", ".join(f"{rate:g}" for rate in STARTS if rate not in tried)
    return (
        f"H = {STARTED} from a standard network ({found[0].case['before']} epochs), converted, "
        f"then {found[0].case['epochs']} more; the paper starts from a checkpoint of 9.573 %. The "
        f"starts end at a WER of {', '.join(ended)}. "
        + (f"Rates of a start not tried: {left}. " if left else "")
        + f"One that is above {worst(runs):.1f} %, the worst standard run of a smaller H, is no "
        "trained network: the verdict leaves it out.\n\n" + table(head, lines)
    )


def worst(runs: Runs) -> float:
    """The highest WER at which a standard network ended that was trained from nothing."""
    return max((w for h in runs.widths for w in runs.wer("standard", h).values()), default=0.0)


def from_trained(rows: Sequence[Row], runs: Runs) -> dict[str, dict[int, Figures]]:
    """Those of the continued runs whose start had learned to listen."""
    limit = worst(runs)
    return {
        arm: {seed: f for seed, f in own.items() if float(f["curve_test"][0]) <= limit}
        for arm, own in continued(rows).items()
    }


def _sweep(rows: Sequence[Row], runs: Runs) -> str:
    head = ["contender", *(f"{rate:g}" for rate in RATES), "chosen"]
    lines = []
    setting = {"kind": "train", "hidden": HIDDEN[0], "seed": SEEDS[0], "epochs": runs.epochs}
    for arm in ARMS:
        found = {r.case["rate"]: r.figures for r in having(rows, arm=arm, **setting)}
        values = {rate: float(figures["validation"]) for rate, figures in found.items()}
        cells = [
            "not run" if rate not in values else f"{values[rate]:.1f}"
            if math.isfinite(values[rate]) else "diverged"
            for rate in RATES
        ]  # fmt: skip
        lines.append([arm, *cells, f"{runs.rates[arm]:g}" if arm in runs.rates else ""])
    return (
        "Rates, by the WER on validation (mean of the last three evaluations) at "
        f"H = {HIDDEN[0]} with seed {SEEDS[0]}; gates learn at a quarter of the rate."
        f"{edge(runs.rates, RATES, {}) if runs.rates else ''}\n\n" + table(head, lines)
    )


def _cut(rows: Sequence[Row], runs: Runs) -> str:
    """What is missing of the plan, and how this setting differs from the paper's."""
    setting = {"kind": "train", "epochs": runs.epochs}  # a run that diverged was run
    count = {
        (arm, h): len(having(rows, **setting, arm=arm, hidden=h, rate=runs.rates.get(arm)))
        for h in sorted(HIDDEN)
        for arm in ARMS
    }
    later = ("standard", "constant", "control")
    count |= {(arm, STARTED): len(continued(rows).get(arm, {})) for arm in later}
    short = [
        f"{arm} at H = {hidden} ({len(SEEDS) - n} of {len(SEEDS)} seeds)"
        for (arm, hidden), n in count.items()
        if n < len(SEEDS)
    ]
    called = sum(not r.figures.get("recorded", True) for r in rows)
    lost = [
        f"{r.case['arm']} at H = {r.case['hidden']}, rate {r.case['rate']:g}, seed {r.case['seed']}"
        for r in rows
        if not math.isfinite(float(r.figures.get("wer", 0)))
    ]
    others = sum(r.case["epochs"] != runs.epochs for r in having(rows, kind="train"))
    return " ".join(
        sentence
        for sentence in (
            f"Not run: {', '.join(short)}." if short else "All of the plan ran.",
            f"Diverged: {'; '.join(lost)}." if lost else "",
            f"Left out: {others} runs of another length." if others else "",
            f"Steps of {called} rows were called, not recorded." if called else "",
            "Other than in the paper: 13 cepstra instead of spectrograms, convolutions over time "
            "alone, 25 frames a second (50), layer norms, batches of 16 (8), the rate rises for 3 "
            "epochs and falls by 5 % an epoch (1 %). The same: AdamW, weight decay 1e-5, none on "
            "gates, gates at a quarter of the rate, clipping at 400. Texts are decoded greedily, "
            "without a language model.",
        )
        if sentence
    )


def verdicts(rows: list[Row]) -> list[Verdict]:
    runs = runs_of(rows)
    gates = "AN4 (Fig. 3c): tau and theta on the gates lower the WER of an LSTM at every H"
    free = "AN4: releasing the constant family makes it worse at every H"
    later = f"AN4, H = {STARTED}: gates on a trained LSTM lower its WER"
    speed = "AN4 (Fig. 3d): steps to the baseline's level"
    widths = [h for h in runs.widths if runs.of("constant", h) and runs.of("standard", h)]
    found = [
        _verdict(gates, "-1.2 to -4.5 points", runs, "constant", "standard", widths, -1),
        _verdict(free, "+1.3 to +2.5 points", runs, "released", "constant", widths, 1),
    ]
    found.append(_later(later, rows, runs))
    each = [r for h in widths for r in reached(runs, "constant", h)]
    there = [r.speedup for r in each if r.speedup is not None]
    ours_said = f"{spread(there) if there else 'never'}; {len(there)} of {len(each)} runs arrive"
    word = judged_factor([r.speedup for r in each], 1.52)
    found.append(Verdict(speed, "1.52 +- 0.21", ours_said if each else "", word))
    return found


def _later(claim: str, rows: Sequence[Row], runs: Runs) -> Verdict:
    fair, every = (
        bootstrap(on.get("constant", {}), on.get("standard", {}))
        for on in (from_trained(rows, runs), continued(rows))
    )
    word: Word = _word([fair], -1) if fair.seeds else "not run"
    said = f"{fair} points" if fair.seeds else ""
    if not fair.seeds and every.seeds:
        said = f"no start was trained ({every} points from starts above {worst(runs):.1f} %)"
    return Verdict(claim, "-1.2 points or more", said, word)


def _verdict(
    claim: str, paper: str, runs: Runs, ours: str, theirs: str, widths: Sequence[int], sign: int
) -> Verdict:
    drawn = {h: bootstrap(runs.of(ours, h), runs.of(theirs, h)) for h in widths}
    drawn = {h: d for h, d in drawn.items() if d.seeds}
    if not drawn:
        return Verdict(claim, paper, "", "not run")
    said = "; ".join(f"{d} at H = {h}" for h, d in drawn.items())
    control = [bootstrap(runs.of(ours, h), runs.of("control", h)) for h in drawn]
    if ours == "constant" and all(c.seeds for c in control):
        said += f"; minus control {mean(c.mean for c in control):+.2f} on average"
    word = _word(list(drawn.values()), sign)
    if lost := [str(h) for h in sorted(HIDDEN) if h not in drawn]:
        said += f"; H = {', '.join(lost)} not run"
        word = "partly" if word == "reproduced" else word  # the claim is of every H
    return Verdict(claim, paper, f"{said} (points)", word)


def _word(drawn: Sequence[Interval], sign: int) -> Word:
    """Reproduced if each interval and all seeds are on this side of 0, more than one of them;
    partly if at one width.

    An interval over utterances does not know how much seeds differ, so the seeds have to agree.
    """
    right = [d.agree and d.seeds > 1 and (d.high < 0 if sign < 0 else d.low > 0) for d in drawn]
    wrong = [d.low > 0 if sign < 0 else d.high < 0 for d in drawn]
    return "reproduced" if all(right) else "partly" if any(right) and not any(wrong) else "not"


# Okabe and Ito's colours, which differ for every eye, and markers beside them.
LOOKS = {
    "standard": ("#000000", "o"),
    "constant": ("#0072B2", "s"),
    "released": ("#D55E00", "^"),
    "control": ("#009E73", "D"),
}


def draw(rows: list[Row], folder: Path) -> None:
    """WER by width with the paper's, and WER along the runs of the first width."""
    from matplotlib.figure import Figure

    runs = runs_of(rows)
    if not runs.each:
        return
    figure = Figure((9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, (colour, marker) in LOOKS.items():
        own = {h: [*runs.wer(arm, h).values()] for h in runs.widths}
        own = {h: values for h, values in own.items() if values}
        low, high = ([abs(f(v) - mean(v)) for v in own.values()] for f in (min, max))
        style = {"color": colour, "marker": marker, "label": arm, "capsize": 3}
        left.errorbar(list(own), [mean(v) for v in own.values()], yerr=[low, high], **style)
        if arm in PAPER:
            left.plot(*zip(*sorted(PAPER[arm].items()), strict=True), color=colour, ls=":", lw=1)
        curves = [*runs.of(arm, HIDDEN[0]).values()]
        if curves:
            steps = curves[0]["curve_step"]
            means = [mean(v) for v in zip(*(f["curve_test"] for f in curves), strict=True)]
            right.plot(steps, means, color=colour, label=arm)
    left.set(xscale="log", xlabel="H", ylabel="WER in %", title="at the end (dotted: the paper)")
    left.set_xticks(sorted(HIDDEN), [str(h) for h in sorted(HIDDEN)], minor=False)
    left.minorticks_off()
    right.set(xlabel="step", title=f"along the run, H = {HIDDEN[0]}", ylim=(0, 102))
    left.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / f"{NAME}.svg", metadata={"Date": None})
