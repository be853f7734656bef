"""What is exported of a network: all of it as gates (`converted`), or torch's own op at approximate
sites that are near enough (`gated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from threshold_gating import conversion
from threshold_gating.conversion.config import Choice
from threshold_gating.conversion.plan import Plan, make_plan
from threshold_gating.conversion.site import Site
from threshold_gating.export.graph import gates_of, graph


class Within(NamedTuple):
    """A network, and the approximate sites where it has torch's own op, with their errors."""

    model: nn.Module
    native: Mapping[str, float]


def gated(
    model: nn.Module, inputs: Any, error: float, sites: Mapping[str, Choice] | None = None
) -> Within:
    """Convert `model`, but leave approximate sites as they are whose error is at most `error`.

    The error of a site is the largest of its instance over the line, |gates(x) - f(x)|, which the
    conversion states. A site without one (softmax, attention) is exact and becomes a gate, as does
    every other exact site.
    """
    plan = make_plan(model, sites, inputs)
    every = _by_choice(plan)
    near = {
        name: max(site.sup for site in found)
        for name, found in every.items()
        if all(not site.exact and site.sup <= error for site in found)
    }
    if near and len(near) == len(every):
        return Within(model, near)  # no gate is left
    chosen = {**(sites or {}), **dict.fromkeys(near)}
    return Within(converted(model, inputs, chosen), near)


def converted(
    model: nn.Module, inputs: Any, sites: Mapping[str, Choice] | None = None
) -> nn.Module:
    """`tg.convert`, but a network whose every nonlinearity is a gate already is taken as it is."""
    if make_plan(model, sites, inputs).is_empty and gates_of(graph(model, inputs), model):
        return model
    return conversion.convert(model, sites, inputs=inputs)


def _by_choice(plan: Plan) -> dict[str, list[Site]]:
    """Sites by the name they are chosen by: all calls of a module have one choice."""
    calls = [[site] for each in (plan.calls or {}).values() for site in each.values()]
    made = [
        [site for site in group if site is not None] for group in (*plan.modules.values(), *calls)
    ]
    return {group[0].name: group for group in made if group}
