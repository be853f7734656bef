"""Fig. 3(c) and the speech bar of (d): do learned gates make an LSTM a better or faster listener?

The paper puts tau and theta of each unit on the five gates of every LSTM of a DeepSpeech2 and finds
the word error rate (WER) on AN4 1.2 to 4.5 points lower; with learned slopes the gain is gone. Four
contenders start from the same weights and see the same batches:

    standard   torch's LSTM
    constant   tau, theta of each unit for i, f, g, o and the cell's output (tier A)
    released   the same with learned branches, s and c
    control    tau, theta for i, f, g, o alone

The control is what the paper lacks. sigmoid(tau (w x + b - theta)) is the sigmoid of another affine
map, so its pairs add no function: `fold` makes it torch's LSTM again. What they change is training.
With v = tau w, a step of size r along the gradient G of v moves v by -r (tau^2 + w w^T) G: a
learning rate of its own for each unit, which tau learns, and a longer step along w. So "constant"
minus "control" is what the one new function, the cell output's pair, is worth; "control" minus
"standard" is what a re-parametrisation is worth to AdamW.

    python -m experiments.fig3_speech --smoke
    python -m experiments.fig3_speech --data DIR --stage sweep --jobs 3       # the rates, then held
    python -m experiments.fig3_speech --data DIR --stage runs time --jobs 3 --only hidden=128,256
    python -m experiments.fig3_speech --data DIR --stage start continued --jobs 3   # H = 1024

The contenders of one seed and rate are trained as one network, a lane. Its recurrence is plain
formulas of torch (`stacked_lstm`). Each contender is then evaluated by itself, by the library's
LSTM with its gates evaluated. Rows with `stacked` were made so; rows without were trained one by
one, by the library's LSTM. The stage `time` times a step of the library's LSTM. `--jobs` is how
many lanes share the GPU, in one process.

The rate is swept at H = 128 with one seed. It is chosen for each contender by the WER on 95
utterances for validation; the test's 130 choose nothing. AN4 is here as 13 cepstra and not as
audio, so the front end is two convolutions over time (25 frames a second, the paper's 50). Batches
have 16 utterances (8), the rate rises for 3 epochs and falls by 5 % an epoch (1 %), and a run has
60 epochs (not stated).

Where to read on: `speech_networks` has the network, `stacked_lstm` its recurrence in training,
`speech_training` the steps and the word error rates, `speech_page` the tables and verdicts.

Last result: claims: 4 not; 94 rows, NVIDIA H200, seeds 0, 1, 2, 17,788 s of runs (some side by
side), 2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from experiments import record
from experiments.data import Spoken, an4
from experiments.record import Case, Row
from experiments.speech_networks import ARMS, Listener
from experiments.speech_page import (
    HIDDEN,
    NAME,
    RATES,
    SEEDS,
    STARTED,
    STARTS,
    chosen,
    draw,
    page,
    verdicts,
)
from experiments.speech_training import Corpus, Lane, Recipe, corpus, milliseconds, side_by_side

__all__ = ["draw", "page", "verdicts"]

STAGES = ("sweep", "runs", "time", "start", "continued")
EPOCHS, AFTER = 60, 20  # of a run, and of one that goes on from a checkpoint


def cases(stage: str, asked: argparse.Namespace, rows: Sequence[Row]) -> list[Case]:
    """In order of importance. All but the sweep's have the rates that the sweep's rows chose."""
    if stage in ("start", "continued"):
        return started_cases(stage, asked, rows)
    hidden, rates, seeds = ((8,), (1e-2,), (0,)) if asked.smoke else (HIDDEN, RATES, SEEDS)
    train = {"kind": "train", "epochs": asked.epochs}
    if stage == "sweep":
        own = {**train, "hidden": hidden[0], "seed": seeds[0]}
        return [{**own, "rate": rate, "arm": arm} for rate in rates for arm in ARMS]
    if stage == "time":
        timed = [(h, arm) for h in hidden for arm in ARMS]
        return [{"kind": "time", "hidden": h, "arm": arm} for h, arm in timed]
    rate = chosen(rows, rates, seeds[0], **train, hidden=hidden[0])
    if "standard" not in rate:
        raise SystemExit(f"no rate is chosen for {stage}: run --stage sweep first")
    if missing := [arm for arm in ARMS if arm not in rate]:
        print(f"left out, for the sweep has not all of their rates: {', '.join(missing)}")
    each = [(h, seed, arm) for h in hidden for seed in seeds for arm in rate]
    return [{**train, "hidden": h, "seed": s, "rate": rate[a], "arm": a} for h, s, a in each]


def started_cases(stage: str, asked: argparse.Namespace, rows: Sequence[Row]) -> list[Case]:
    """Standard networks with rates of their own, and what goes on from those of the best rate.

    The rate of H = 128 is too high here: with it three starts of 1024 ended at 46 to 97 % WER.
    """
    hidden, rates, seeds = (8, (1e-2,), (0,)) if asked.smoke else (STARTED, STARTS, SEEDS)
    begun = {"kind": "start", "epochs": asked.epochs, "hidden": hidden, "arm": "standard"}
    if stage == "start":
        return [{**begun, "seed": seeds[0], "rate": rate} for rate in rates]
    setting = {name: value for name, value in begun.items() if name != "arm"}
    rate = chosen(rows, rates, seeds[0], **setting).get("standard")
    if rate is None:
        raise SystemExit("no rate is chosen for continued: run --stage start first")
    on = {**begun, "kind": "continued", "epochs": asked.after, "before": asked.epochs}
    each = [(seed, arm) for seed in seeds for arm in ("standard", "constant", "control")]
    return [
        *({**begun, "seed": seed, "rate": rate} for seed in seeds),
        *({**on, "seed": seed, "arm": arm, "rate": rate} for seed, arm in each),
    ]


def run(
    left: list[Case], asked: argparse.Namespace, data: Corpus
) -> Iterator[tuple[Case, Any, float]]:
    """The cases as they end: lanes of one kind and width side by side, but times alone.

    Where some that are side by side fail, those behind them are still to run.
    """
    for group in side_groups(lane_cases(left), max(1, asked.jobs)):
        begun = time.perf_counter()
        going = {record.key(case): case for own in group for case in own}
        try:
            for case, figures in together(group, asked, data):
                yield going.pop(record.key(case)), figures, time.perf_counter() - begun
        except Exception:
            error = traceback.format_exc()
            yield from ((case, error, time.perf_counter() - begun) for case in going.values())


def together(
    group: list[list[Case]], asked: argparse.Namespace, data: Corpus
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases of lanes that run side by side, as they end, with their figures."""
    kind, begun = group[0][0]["kind"], time.perf_counter()
    lanes = [lane(own, asked, data) for own in group]
    how = f"{sum(own.recorded for own in lanes)} of {len(lanes)} lanes recorded"
    print(f"{kind}: {how}, ready in {time.perf_counter() - begun:.0f} s", flush=True)
    if kind == "time":
        yield group[0][0], milliseconds(lanes[0], rounds=2 if asked.smoke else 5)
        return
    for ended in side_by_side(lanes):
        for k, case in enumerate(group[ended]):
            if kind == "start":
                keep(lanes[ended].models[k], start_file(case))
            yield case, {**lanes[ended].figures(k), "beside": len(group)}


def lane_cases(left: Sequence[Case]) -> list[list[Case]]:
    """Cases that differ in the contender alone share a lane; one that is timed has its own."""
    lanes: dict[str, list[Case]] = {}
    for case in left:
        shared = case if case["kind"] == "time" else {n: v for n, v in case.items() if n != "arm"}
        lanes.setdefault(record.key(shared), []).append(case)
    return list(lanes.values())


def side_groups(lanes: Sequence[list[Case]], jobs: int) -> Iterator[list[list[Case]]]:
    """Lanes of one kind and width, as many as run at the same time."""
    for (kind, _), same in groupby(lanes, lambda own: (own[0]["kind"], own[0]["hidden"])):
        own, size = list(same), 1 if kind == "time" else jobs
        yield from (own[k : k + size] for k in range(0, len(own), size))


def lane(same: Sequence[Case], asked: argparse.Namespace, data: Corpus) -> Lane:
    """For cases that differ in the contender alone; one that is timed is not stacked."""
    case, arms = same[0], [each["arm"] for each in same]
    timed = case["kind"] == "time"
    shown = {**case, "arm": "+".join(arms)}
    return Lane(
        [first(each) for each in same],
        data,
        Recipe(case.get("epochs", 1), case.get("rate", 1e-4)),
        seed=case.get("seed", 0),
        device=asked.device,
        stacked=not timed,
        kept=None if asked.smoke or timed else record.checkpoint(NAME, {**case, "arm": arms}),
        before=case.get("before", 0),
        name=" ".join(
            str(shown[n]) for n in ("kind", "hidden", "arm", "seed", "rate") if n in shown
        ),
    )


def first(case: Case) -> Listener:
    """The network that a run starts from."""
    torch.manual_seed(case.get("seed", 0))  # gates draw nothing: all contenders start alike
    model = Listener(case["hidden"], ARMS[case["arm"]])
    if case["kind"] == "continued":
        begin(model, start_file(case))
    return model


def keep(model: Listener, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # cloned, for a tensor that is part of a stack would take all of it along
    torch.save({name: t.clone() for name, t in model.state_dict().items()}, file)


def start_file(case: Case) -> Path:
    """The same for a start and for what goes on from it: width, seed, epochs and rate."""
    own = (case["hidden"], case["seed"], case.get("before", case["epochs"]), case["rate"])
    return record.CHECKPOINTS / NAME / f"start-{'-'.join(map(str, own))}.pt"


def begin(model: Listener, file: Path) -> None:
    """The weights of a trained standard network; gates start where they compute the same."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: kind=start of the same seed makes it")
    found = model.load_state_dict(torch.load(file, weights_only=True), strict=False)
    strangers = [n for n in found.missing_keys if ".gate_" not in n] + found.unexpected_keys
    if strangers:
        raise ValueError(f"{file} is of another network: {', '.join(strangers)}")


def made_up() -> Spoken:
    """Texts whose letters are vectors of their own, with noise; for `--smoke`."""
    generator = torch.Generator().manual_seed(0)
    voices = torch.randn(27, 13, generator=generator)
    texts = [f"{'ABCDE'[k % 5]} {'FGHIJ'[k % 3]}{'KLMNO'[k % 4]}" for k in range(24)]
    letters = [[" ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(letter) for letter in t] for t in texts]
    frames = [voices[own].repeat_interleave(10, 0) for own in letters]
    noisy = [x + 0.1 * torch.randn(x.shape, generator=generator) for x in frames]
    return Spoken((noisy[:20], texts[:20]), (noisy[20:], texts[20:]), "made up")


def main(argv: list[str] | None = None) -> list[Row]:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues for as many streams
    parser = record.options(NAME, __doc__)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--epochs", type=int, default=None, help=f"of a run ({EPOCHS})")
    parser.add_argument("--after", type=int, default=None, help=f"from a checkpoint ({AFTER})")
    asked = parser.parse_args(argv)
    asked.epochs = asked.epochs or (2 if asked.smoke else EPOCHS)
    asked.after = asked.after or (2 if asked.smoke else AFTER)
    if asked.data is None and not asked.smoke:
        raise SystemExit("--data DIR or TG_DATA has to name the folder with AN4")
    spoken = made_up() if asked.smoke else an4(asked.data)
    run_all = partial(run, data=corpus(spoken, asked.device))
    found: list[Row] = []
    for stage in (stage for stage in STAGES if stage in asked.stage):
        known = [*record.rows(record.file_of(NAME)), *record.rows(record.file_of(NAME, asked))]
        own = cases(stage, asked, known)
        found += record.complete(NAME, own, None, asked, data=spoken.sha256, run_all=run_all)
    return found


if __name__ == "__main__":
    main()
