"""Ways to write GELU as gates that Tables 4, 5 and 6 are measured with, from the paper's on.

Calibrated ones are fitted to what each site sees on inputs that are no test inputs. Under
`recipe="paper"` (App. F: nine free parameters a site by Nelder-Mead, 100,000 values of the first
640 inputs) every site takes what the recipe finds, also where our own gate would be closer;
elsewhere `tg.calibrate` decides by values that were not fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

import threshold_gating as tg
from experiments.record import Row
from threshold_gating.conversion.config import Choice


class Way(NamedTuple):
    """K branches: a row of the taxonomy (a number: the best over the line) or how to calibrate."""

    K: int
    said: str
    row: str | int | None = None
    fit: dict[str, Any] | None = None


WAYS = {
    "k2-paper": Way(2, "tau = 1.702, as the paper", "gelu_paper"),
    "k2-calibrated": Way(2, "fitted to each layer", fit={"K": 2}),
    "k3-recipe": Way(3, "the paper's recipe (App. F)", fit={"recipe": "paper"}),
    "k3-free": Way(
        3, "free tails, our search, fitted to each layer", fit={"K": 3, "tails": "free"}
    ),
    "k3-exact": Way(3, "exact tails, fitted to each layer", fit={"K": 3}),
    "k3": Way(3, "best over the line", 3),
    "k4": Way(4, "best over the line", 4),
    "k5": Way(5, "best over the line, the default", 5),
    "k8": Way(8, "best over the line", 8),
}


def chosen(
    way: str,
    model: nn.Module,
    inputs: tuple[Any, ...],
    batches: Iterable[Any],
    values: int = 100_000,
) -> tuple[dict[str, Choice], dict[str, Any]]:
    """Gates for every approximate site of a network as `convert` takes them, and facts of the fits.

    `inputs` is what the network is converted with, `batches` what it is calibrated on.
    """
    K, _, row, fit = WAYS[way]
    if fit is None:
        names = approximate(model, inputs)
        return dict.fromkeys(names, row), {"K": K, "approximate": len(names)}
    found = tg.calibrate(model, batches, values=values, **fit)
    whole = "recipe" in fit
    gates = {name: site.fit.t if whole else site.t for name, site in found.fits.items()}
    beaten = sum(site.chosen == "default" for site in found.fits.values())
    worst = max(site.fit.rel_rms for site in found.fits.values())
    facts = {"K": K, "approximate": len(gates), "default is closer": beaten, "rel RMS": worst}
    return gates, facts


def approximate(model: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """The names of the sites that gates do not compute exactly."""
    with tg.kernels.use("reference"):
        sites = tg.audit(tg.convert(model, inputs=inputs), *inputs).sites
    found = [site.name for site in sites if site.exact is False]
    return list(dict.fromkeys(n if ":" in n else n.partition("#")[0] for n in found))


def alone(way: str) -> dict[str, Any]:
    """Errors of GELU itself, outside any network: relative RMS under N(0, 1) and the largest on
    [-5, 5]. What is calibrated in a network is fitted to N(0, 1) here, free tails without the
    condition TG(0) = 0: so they reach the paper's "0.04 %", whose norm is not stated. The recipe
    fits random values, and where it ends depends on them: three draws, of which the middle counts.
    """
    K, _, row, fit = WAYS[way]
    f = torch.nn.functional.gelu
    if fit is None:
        key = row if isinstance(row, str) else f"gelu_k{row}"
        found = [tg.TAXONOMY[key] if key in tg.TAXONOMY else tg.fit(f, "line", K).t]
    else:
        options = {"K": K, "zero": "tails" not in fit} | fit
        draws = range(3 if "recipe" in fit else 1)
        found = [tg.fit(f, "normal", seed=seed, **options).t for seed in draws]
    x = torch.linspace(-5, 5, 100_001, dtype=torch.float64)
    errors = {tg.taxonomy.measure(t, f).rel_rms: (t(x) - f(x)).abs().max().item() for t in found}
    each = sorted(errors)
    middle = each[len(each) // 2]
    return {"K": K, "rel RMS": middle, "largest": errors[middle], "draws": each}


def latest(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """The last row of each network and way; of a network only those with its last weights."""
    weights = {row.case["network"]: row.case.get("weights") for row in rows}
    return {
        (row.case["network"], row.case["gates"]): row
        for row in rows
        if row.case.get("weights") == weights[row.case["network"]]
    }
