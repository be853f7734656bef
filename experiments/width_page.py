"""The section on width of docs/results.md: tables, verdicts and the picture, from the rows.

It also says what was planned, so the plan is here, and `fig3_width` takes it from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import threshold_gating as tg
from experiments import record, sweep
from experiments.record import Case, Row, Verdict
from experiments.spread import MARGIN, Word, judged_gain, paired, spread
from experiments.sweep import Rates, best_rates
from experiments.tables import table

NAME = "fig3_width"
SEEDS = (0, 1, 2)
# ReLU has the parameters of W at 1 at h = 1.5, of S at 1 at 2.5, of W at 2 at 3 (but for 1 %).
WIDTHS = {
    "relu": (1, 1.5, 2, 2.5, 3, 4),
    "W": (1, 2, 3, 4),
    "transfer": (1, 2, 3, 4),
    "S": (1, 2),
    "silu": (1, 1.5, 3),
}
RATES, BEYOND = (1e-3, 2e-3, 4e-3, 8e-3), (16e-3, 32e-3, 64e-3)
BATCH, IMAGES, EPOCHS = 512, 50_000, 20
TITLES = {
    "relu": "ReLU",
    "W": "tier W",
    "S": "tier S",
    "transfer": "half transfer",
    "again": "ReLU, twice half",
    "silu": "SiLU",
}


class Size(NamedTuple):
    """The network but for its expansion, and how long it is trained."""

    dim: int = 128
    depth: int = 4
    batch: int = BATCH
    steps: int = EPOCHS * (IMAGES // BATCH)
    sweep: int = 6 * (IMAGES // BATCH)


_SAME = "equal parameters"
_PAIRS: tuple[tuple[str, float, str, float, str], ...] = (
    *(("W", 1, "relu", h, _SAME if h == 1.5 else "") for h in (1, 1.5, 2, 3)),
    *(("W", h, "relu", h, "") for h in (2, 3, 4)),
    ("W", 2, "relu", 3, _SAME),
    *(("transfer", h, "again", h, "control") for h in WIDTHS["transfer"]),
    *(("transfer", 1, arm, h, note) for arm, h, note in (("relu", 2, ""), ("W", 1, ""))),
    *(("S", 1, arm, h, note) for arm, h, note in (("relu", 2.5, _SAME), ("W", 1, ""))),
    ("S", 2, "W", 2, ""),
    *(("silu", h, "relu", h, "control") for h in WIDTHS["silu"]),
    *(("W", h, "silu", 1.5 * h, _SAME) for h in (1, 2)),
)
Runs = dict[int, dict[str, Any]]  # the figures by seed
Found = dict[tuple[str, float], Runs]  # of each arm and width


def counting(rows: Iterable[Row]) -> list[Row]:
    def own(case: Case) -> Rates:
        if case["arm"] == "transfer":
            return {"relu": case["rate"], "W": case["rate_after"]}
        return {case["arm"]: case["rate"]}

    return sweep.counting(list(rows), "accuracy", own)


def gathered(rows: Iterable[Row]) -> Found:
    """The figures of each arm and width, by seed; those of ReLU once more as an arm of its own."""
    found: Found = {}
    for row in counting(rows):
        arm, h, seed = (row.case[n] for n in ("arm", "h", "seed"))
        found.setdefault((arm, h), {})[seed] = row.figures
        if arm == "transfer":
            found.setdefault(("again", h), {})[seed] = row.figures["again"]
    for (arm, h), runs in found.items():
        if arm == "again" and ("relu", h) in found:  # whose network it is
            plain = next(iter(found["relu", h].values()))
            runs.update({seed: {**plain, **figures} for seed, figures in runs.items()})
    return found


def accuracy(found: Found, arm: str, h: float) -> dict[int, float]:
    return {seed: figures["accuracy"] for seed, figures in found.get((arm, h), {}).items()}


def by_width(found: Found, arm: str) -> dict[float, Runs]:
    return {h: found[arm, h] for h in sorted(width for name, width in found if name == arm)}


def worth(found: Found, arm: str, h: float) -> str:
    """The expansion at which ReLU is as accurate, between the widths that were run."""
    ours = accuracy(found, arm, h)
    widths = {w: accuracy(found, "relu", w) for w in by_width(found, "relu")}
    line = [
        (w, mean(own[seed] for seed in ours))
        for w, own in widths.items()
        if ours and ours.keys() <= own.keys()
    ]  # of the same seeds
    if not ours or len(line) < 2:
        return "not known"
    level = mean(ours.values())
    if level < line[0][1]:
        return f"below h = {line[0][0]}"
    for (low, a), (high, b) in itertools.pairwise(line):
        if a <= level < b:
            return f"at h = {low + (high - low) * (level - a) / (b - a):.2f}"
    return f"above h = {line[-1][0]}"


def page(rows: list[Row]) -> str:
    found, steps = gathered(rows), next((r.case["steps"] for r in counting(rows)), Size().steps)
    parts = [
        f"ResMLP, {Size().depth} blocks of {Size().dim} channels, 64 patches, {steps} steps of "
        f"{BATCH} images ({steps * BATCH / IMAGES:.0f} epochs; the paper has 300), bf16; "
        f"{record.measured(rows)}. {cut(rows)}",
        costs(found),
        "Multiplications and gates are of one image. Hidden units are the bytes of one image "
        "between the two linear layers of a block in bf16; the peaks are what a step of "
        f"{BATCH} images allocates beyond parameters, gradients and images (measured). Accuracy "
        "is of all 10,000 test images, mean +- standard deviation over seeds.",
        sweep.said(best_rates(rows, "accuracy"), RATES, TITLES)
        + " It was made at h = 1 with seed 0, on training images alone, and holds for all widths. "
        + sweep.beyond(rows, "accuracy", TITLES),
        differences(found),
        transfers(found),
        speeds(found),
        f"![Accuracy against parameters, MACs and memory](images/{NAME}.svg)",
    ]
    return "\n\n".join(part.strip() for part in parts if part)


def cut(rows: list[Row]) -> str:
    runs = counting(rows)
    ran = {(row.case["arm"], row.case["h"], row.case["seed"]) for row in runs}
    others = sum(row.case["part"] == "main" for row in rows) - len(runs)
    left_out = f" Left out: {others} runs of another length or rate." if others else ""
    missing = [
        f"{TITLES[arm]} at h = {h} ({len(SEEDS) - n} of {len(SEEDS)} seeds)"
        for arm, widths in WIDTHS.items()
        for h in widths
        if (n := sum((arm, h, seed) in ran for seed in SEEDS)) < len(SEEDS)
    ]
    asked = "Tier S has h = 1 and 2 only: a gate for each synapse costs near 90 times a product."
    said = f"Not run: {', '.join(missing)}." if missing else "All cases ran."
    return f"{asked} {said}{left_out}"


def costs(found: Found) -> str:
    """What each network costs, and how accurate it is."""
    head = ["arm", "h", "parameters", "M MACs", "M gates", "hidden kB", "peak training MB"]
    lines = []
    for arm in TITLES:
        for h, runs in by_width(found, arm).items():
            one = next(iter(runs.values()))
            if "parameters" not in one:  # of ReLU trained twice, where ReLU itself was not run
                continue
            memory = [
                "not measured" if one[name] is None else f"{one[name] / 1e6:.0f}"
                for name in ("peak training", "peak inference")
            ]
            lines.append([
                TITLES[arm], f"{h:g}", f"{one['parameters']:,}", f"{one['macs'] / 1e6:.1f}",
                f"{one['gates'] / 1e6:.2f}", f"{one['hidden'] / 1e3:.1f}", *memory,
                spread([*accuracy(found, arm, h).values()]), len(runs),
            ])  # fmt: skip
    return table([*head, "peak inference MB", "accuracy", "seeds"], lines)


def differences(found: Found) -> str:
    lines = [
        "Differences in percentage points, paired by seed, with 95 % intervals (Student's t):",
        "",
        "| ours | against | difference | |",
        "| --- | --- | --- | --- |",
    ]
    for arm, h, other, width, note in _PAIRS:
        difference = paired(accuracy(found, arm, h), accuracy(found, other, width))
        if difference.pairs:
            names = f"{TITLES[arm]}, h = {h:g} | {TITLES[other]}, h = {width:g}"
            lines.append(f"| {names} | {difference} | {note} |")
    return "\n".join(lines) if len(lines) > 4 else ""


def transfers(found: Found) -> str:
    moved = [f for (arm, _), runs in found.items() if arm == "transfer" for f in runs.values()]
    if not moved:
        return ""
    before, after = (mean(f[name] for f in moved) for name in ("before", "moved"))
    return (
        f"Half transfer starts gates at tau = 1, which turns ReLU into SiLU: accuracy goes from "
        f"{before:.1f} to {after:.1f} % (mean of {len(moved)} runs) before the second half begins. "
        "In total its steps are those of the other arms."
    )


def speeds(found: Found) -> str:
    """Steps of ReLU to its best accuracy over those of W to the same, at equal width (App. D)."""
    cells = []
    for h in WIDTHS["W"]:
        ours, theirs = found.get(("W", h), {}), found.get(("relu", h), {})
        reached = [
            tg.training.steps_to_peak(
                *(record.curve(runs[seed]["curve"]) for runs in (theirs, ours))
            ).speedup
            for seed in sorted(ours.keys() & theirs.keys())
        ]
        if reached:
            factors = ", ".join("never" if r is None else f"{r:.2f}" for r in reached)
            cells.append(f"h = {h}: {factors}")
    if not cells:
        return ""
    return (
        "Steps of ReLU to its best test accuracy over those of tier W of the same h to reach it, "
        f"each seed ({EPOCHS} values a run): {'; '.join(cells)}."
    )


def verdicts(rows: list[Row]) -> list[Verdict]:
    found = gathered(rows)
    narrow = "Fig. 3(a): {} at h = 1 matches ReLU at h = 2 to 3 with about as many parameters"
    return [
        _narrow(found, "W", narrow.format("tier W from scratch")),
        _narrow(found, "transfer", narrow.format("half transfer to tier W")),
        _synapses(found),
    ]


def _narrow(found: Found, arm: str, claim: str) -> Verdict:
    ours, paper = accuracy(found, arm, 1), "as ReLU at h = 2 to 3"
    level = worth(found, arm, 1)
    if level == "not known":
        return Verdict(claim, paper, "", "not run")
    against = [
        f"{paired(ours, accuracy(found, 'relu', h))} points over h = {h}" for h in (1.5, 2, 3)
    ]
    text = f"as ReLU {level}: {spread(list(ours.values()))} %, {', '.join(against)}"
    number = -1.0 if level.startswith("below") else float(level.rpartition(" ")[2])
    # what is above ReLU at h = 2 on average has to be so beyond what three seeds can tell
    sure = (gain := paired(ours, accuracy(found, "relu", 2))).mean - gain.half > -MARGIN
    word: Word = "reproduced" if number >= 2 and sure else "partly" if number > 1.5 else "not"
    return Verdict(claim, paper, text, word)


def _synapses(found: Found) -> Verdict:
    claim = "Fig. 3(a): tier S gains less than tier W for its parameters"
    each = {
        arm: (accuracy(found, arm, 1), accuracy(found, "relu", h))
        for arm, h in (("W", 1.5), ("S", 2.5))
    }
    gains = {arm: paired(*both) for arm, both in each.items()}
    if not all(gain.pairs for gain in gains.values()):
        return Verdict(claim, "diminished gains", "", "not run")
    text = ", ".join(f"{TITLES[arm]} {gain}" for arm, gain in gains.items())
    text += " points over ReLU with as many parameters (h = 1)"
    w, s = ({n: a[n] - b[n] for n in a.keys() & b.keys()} for a, b in each.values())
    word = judged_gain(paired(w, s))
    if gains["W"].mean - gains["W"].half <= 0:  # of a gain that is none nothing is less
        text += "; tier W itself gains nothing"
        word = "partly" if word == "reproduced" else word
    return Verdict(claim, "diminished gains", text, word)


def draw(rows: list[Row], folder: Path) -> None:
    """Accuracy against parameters, multiplications and peak memory, one line an arm."""
    from matplotlib.figure import Figure

    found = gathered(rows)
    colours = dict(
        zip(TITLES, ("#000000", "#0072B2", "#D55E00", "#009E73", "#999999", "#CC79A7"), strict=True)
    )
    axes = (("parameters", 1e3, "thousand parameters"), ("macs", 1e6, "million MACs an image"),
            ("peak training", 1e6, "peak MB of a training step"))  # fmt: skip
    figure = Figure((10, 3.4), layout="constrained")
    for place, (name, unit, title) in zip(figure.subplots(1, 3, sharey=True), axes, strict=True):
        for arm, colour in colours.items():
            points = [
                (one[name] / unit, [f["accuracy"] for f in runs.values()])
                for runs in by_width(found, arm).values()
                if (one := next(iter(runs.values()))).get(name)
            ]
            if points:
                x, values = zip(*points, strict=True)
                low, middle, high = ([f(v) for v in values] for f in (min, mean, max))
                style = "o--" if arm == "again" else "o-"
                place.plot(x, middle, style, color=colour, label=TITLES[arm], markersize=4)
                place.vlines(x, low, high, color=colour, linewidth=1)
        place.set_xlabel(title)
    place = figure.axes[0]
    place.set_ylabel("test accuracy, % (lines: all seeds)")
    place.legend(fontsize=8, loc="lower right")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{NAME}.svg", metadata={"Date": None})
