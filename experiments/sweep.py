"""Experiments that choose a rate for each arm first: a sweep, whose rows are kept, then the rest.

Cases of the sweep have `part` "sweep", an arm and a rate; the best by `metric` is that arm's rate.
Cases with `part` "beyond" try a higher rate afterwards, in the same way. They choose nothing: they
say whether a sweep that ends at its edge has missed something.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable

from experiments import record
from experiments.record import Case, Cost, Row, Run

Rates = dict[str, float]


def best_rates(rows: Iterable[Row], metric: str) -> Rates:
    """The rate of each arm with the highest `metric`; a run that failed has none."""
    return {arm: rate for arm, (_, rate) in _best(rows, metric).items()}


def _best(rows: Iterable[Row], metric: str) -> dict[str, tuple[float, float]]:
    """The highest `metric` that the sweep found of each arm, and its rate."""
    best: dict[str, tuple[float, float]] = {}
    for row in rows:
        value = _value(row, metric)
        if row.case["part"] == "sweep" and value is not None:
            arm, found = row.case["arm"], (value, row.case["rate"])
            best[arm] = max(best.get(arm, found), found)
    return best


def _value(row: Row, metric: str) -> float | None:
    """None for a run that failed or diverged; rows have NaN as a word."""
    value = row.figures.get(metric)
    return float(value) if value is not None and math.isfinite(float(value)) else None


def counting(rows: list[Row], metric: str, own: Callable[[Case], Rates]) -> list[Row]:
    """The runs of the usual length at the rates that the sweep chooses: no others are mixed in.

    `own` has the rates of a case, each with the arm whose sweep chose it.
    """
    best = best_rates(rows, metric)
    main = [row for row in rows if row.case["part"] == "main"]
    lengths = Counter(row.case["steps"] for row in main)
    usual = max(lengths, key=lambda steps: lengths[steps], default=0)
    return [
        row
        for row in main
        if row.case["steps"] == usual
        and all(best.get(arm, rate) == rate for arm, rate in own(row.case).items())
    ]


def complete(
    name: str,
    asked: argparse.Namespace,
    run: Run,
    sweeps: Callable[[set[str]], list[Case]],
    cases: Callable[[Rates], list[Case]],
    *,
    metric: str,
    data: str,
    cost: Cost | None = None,
) -> list[Row]:
    """Sweep for the arms that were asked for, run the cases with the best rates; return all rows.

    `--only` chooses among the cases, never among the rates. Where a run of the sweep fails, the
    arms that have all of their rates are run nevertheless, and the error is raised in the end.
    """
    file = record.file_of(name, asked)
    known = cases(best_rates(record.rows(file), metric))
    if asked.list:
        return record.complete(name, known, run, asked)
    chosen = record.matching(known, asked.only)
    wanted, tried = {_of_any_rate(case) for case in chosen}, sweeps({c["arm"] for c in chosen})
    every = argparse.Namespace(**{**vars(asked), "only": []})

    def swept() -> None:
        record.complete(name, tried, run, every, data=data, cost=cost)

    def rest() -> None:
        ready = cases(best_rates(_whole(tried, record.rows(file)), metric))
        known = [c for c in ready if all(c[n] is not None for n in c if n.startswith("rate"))]
        own = [c for c in known if _of_any_rate(c) in wanted]
        if own:
            record.complete(name, own, run, every, data=data, cost=cost)

    record.in_turn({"sweep": swept, "main": rest})
    return record.rows(file)


def _whole(tried: list[Case], rows: list[Row]) -> list[Row]:
    """The sweep's rows of the arms of which no run is missing."""
    found = {record.key(row.case): row for row in rows}
    lost = {case["arm"] for case in tried if record.key(case) not in found}
    return [found[record.key(case)] for case in tried if case["arm"] not in lost]


def _of_any_rate(case: Case) -> str:
    return record.key({n: value for n, value in case.items() if not n.startswith("rate")})


def said(rates: Rates, tried: Iterable[float], titles: dict[str, str]) -> str:
    tried = list(tried)
    chosen = ", ".join(f"{rate:g} for {titles[arm]}" for arm, rate in sorted(rates.items()))
    among = ", ".join(f"{rate:g}" for rate in tried)
    if not chosen:
        return "No rate was swept."
    return f"Of the rates {among} the sweep chose {chosen}.{edge(rates, tried, titles)}"


def edge(rates: Rates, tried: Iterable[float], titles: dict[str, str]) -> str:
    """Which arms have the lowest or highest rate that was tried: a better one may lie beyond."""
    words = ""
    for name, end in (("highest", max(tried := list(tried))), ("lowest", min(tried))):
        arms = [titles.get(arm, arm) for arm, rate in sorted(rates.items()) if rate == end]
        if arms:
            all_of = "every arm" if len(arms) == len(rates) > 1 else ", ".join(arms)
            words += (
                f" {end:g}, the {name} that was tried, is the best for {all_of}: the sweep ends at "
                "its edge, and a better rate may lie beyond it."
            )
    return words


def beyond(rows: Iterable[Row], metric: str, titles: dict[str, str]) -> str:
    """What rates past the sweep's edge give each arm, beside the best of the sweep."""
    rows = list(rows)
    tried: dict[str, dict[float, float | None]] = {}
    for row in (row for row in rows if row.case["part"] == "beyond"):
        tried.setdefault(row.case["arm"], {})[row.case["rate"]] = _value(row, metric)
    if not tried:
        return ""
    best, words, higher = _best(rows, metric), [], []
    for arm, values in tried.items():
        name, level = titles.get(arm, arm), best[arm][0] if arm in best else -math.inf
        each = ", ".join(
            f"{'diverged' if value is None else f'{value:.2f}'} at {rate:g}"
            for rate, value in sorted(values.items())
        )
        words.append(f"{name} {each} ({f'{level:.2f}' if arm in best else 'none'} in the sweep)")
        gained = max((v for v in values.values() if v is not None), default=-math.inf) - level
        higher += [f"{name} by {gained:.2f}"] if gained > 0 else []
    end = f"Better than in the sweep: {', '.join(higher)}." if higher else "No arm is better there."
    return f"Tried afterwards, which chose nothing: {'; '.join(words)}. {end}"
