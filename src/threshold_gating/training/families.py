"""Family guard: channels whose learned slopes left their family (Table 3), found and put back.

A family is a statement about slopes (`taxonomy.family`): some must be flat, of others one must not
be. Sharpness, thresholds and constants never change it, nor do the weights of the tiers below A, so
only an activation or a recurrent layer (a module or a call) whose slopes "s" are learned can leave.
Slopes within `tol` count as flat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import taxonomy
from threshold_gating.conversion.learn import learned_gates
from threshold_gating.conversion.site import site_name
from threshold_gating.conversion.text import some
from threshold_gating.instance import TG
from threshold_gating.nn.rnn import GRU, LSTM
from threshold_gating.nn.spec import gates_of
from threshold_gating.nn.unitwise import Learned, Units

TOLERANCE = 1e-3  # of a slope that counts as flat


class Slopes(NamedTuple):
    """Learned slopes, and what its start says of them."""

    name: str
    slopes: list[Tensor]  # K of [G], views of the parameter
    flat: list[int]  # branches that stay flat
    carrying: list[int]  # branches one of which does not
    lead: int  # of these the steepest at the start
    sign: float  # the sign it had

    @classmethod
    def of(cls, name: str, start: TG, slopes: list[Tensor], tol: float) -> Slopes:
        every, word = range(start.K), taxonomy.family(start, tol)
        outer = sorted({0, start.K - 1})
        inner = [k for k in every if k not in outer]
        if word == "constant":
            flat, carrying = list(every), []
        elif start.clamp is not None:
            flat, carrying = [], list(every)
        else:
            flat, carrying = (outer, inner) if word == "saturating" else ([], outer)
        lead = max(carrying, key=lambda k: abs(start.s[k]), default=0)
        return cls(name, slopes, flat, carrying, lead, 1.0 if start.s[lead] >= 0 else -1.0)

    def steepness(self) -> Tensor:
        """How steep the steepest branch is that must not be flat, [G]."""
        led = self.sign * self.slopes[self.lead]  # has a gradient where every slope is 0
        return torch.stack([led, *(self.slopes[k].abs() for k in self.carrying)]).amax(0)

    def left(self, tol: float) -> Tensor:
        """Which channels have left, bool [G]."""
        out = torch.zeros_like(self.slopes[0], dtype=torch.bool)
        for k in self.flat:
            out = out | (self.slopes[k].abs() > tol)
        return out | (self.steepness() <= tol) if self.carrying else out


def left_family(model: nn.Module, tol: float = TOLERANCE) -> dict[str, list[int]]:
    """The channels that have left the family they started in, by site.

    >>> from threshold_gating import Activation
    >>> act = Activation("sigmoid", share="channel", channels=3, train=("s",))
    >>> with torch.no_grad():
    ...     act.s[1, 2] = 0.1
    >>> left_family(nn.Sequential(act))
    {'0': [2]}
    """
    with torch.no_grad():
        found = {s.name: s.left(tol).nonzero().flatten().tolist() for s in _sites(model, tol)}
    return {name: channels for name, channels in found.items() if channels}


@dataclass(frozen=True)
class FamilyReport:
    """Learned gates by the family (Table 3) they started in and those their groups are in now.

    `sites` has for each the family of the start, how many groups (channels, units) are in which
    family now, and the groups that left.
    """

    sites: dict[str, tuple[str, dict[str, int], list[int]]]

    def __str__(self) -> str:
        rows = []
        for name, (start, now, left) in self.sites.items():
            counts = ", ".join(f"{n} {word}" for word, n in now.items())
            gone = f"; left: {some([str(group) for group in left], 8)}" if left else ""
            rows.append(f"{name}: {start} at the start; now {counts}{gone}")
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: {"start": start, "now": now, "left": left}
            for name, (start, now, left) in self.sites.items()
        }


@torch.no_grad()
def family_report(model: nn.Module, tol: float = TOLERANCE) -> FamilyReport:
    """The families of all learned gates, as they were at the start and as they are.

    >>> from threshold_gating import Activation
    >>> print(family_report(nn.Sequential(Activation("silu", train=("tau", "s")))))
    0: multiplicative at the start; now 1 multiplicative
    """
    from threshold_gating.training.telemetry import learned_sites  # it imports this module

    found = {}
    for site in learned_sites(model):
        if site.start is None:
            continue  # a temperature of attention is in no family
        words = families_of(site, tol)
        start = taxonomy.family(site.start, tol)
        left = [group for group, word in enumerate(words) if word != start]
        found[site.name] = start, dict(Counter(words)), left
    return FamilyReport(found)


def families_of(site: Any, tol: float = TOLERANCE) -> list[str]:
    """The family of each group of a gate (`telemetry.LearnedSite`) as it is now."""
    words = [taxonomy.family(site.start, tol)] * site.groups
    if "s" in site.learned:
        slopes = [torch.as_tensor(w, dtype=torch.float64).expand(site.groups) for w in site.s]
        left = Slopes.of(site.name, site.start, slopes, tol).left(tol)
        for group in left.nonzero().flatten().tolist():
            own = tuple(float(w[group]) for w in slopes)
            words[group] = taxonomy.family(replace(site.start, s=own, anchor=None), tol)
    return words


@torch.no_grad()
def project_families_(model: nn.Module, tol: float = TOLERANCE) -> dict[str, list[int]]:
    """Put channels that have left their family back, in place; return which these were.

    To be called after `optimizer.step()`. Slopes that must be flat become 0; where none is left
    that carries the input on, the one that was steepest at the start becomes 2 tol, with its sign.
    """
    report = left_family(model, tol)
    for site in _sites(model, tol):
        for k in site.flat:
            site.slopes[k].masked_fill_(site.slopes[k].abs() > tol, 0.0)
        if site.carrying:
            site.slopes[site.lead].masked_fill_(site.steepness() <= tol, 2 * tol * site.sign)
    return report


def family_penalty(model: nn.Module, tol: float = TOLERANCE) -> Tensor:
    """How far the slopes are out of their families, squared and summed, to be added to the loss.

    0 while every slope that must be flat is within tol and the steepest of those that must not be
    is 2 tol or steeper.
    """
    parts = []
    for site in _sites(model, tol):
        parts += [(site.slopes[k].abs() - tol).relu().square().sum() for k in site.flat]
        if site.carrying:
            parts.append((2 * tol - site.steepness()).relu().square().sum())
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())


def _sites(model: nn.Module, tol: float) -> Iterator[Slopes]:
    for name, act in learned_gates(model):
        if "s" in act.learned:
            yield Slopes.of(name, act.init, list(act.s.flatten(1).unbind(0)), tol)
    for _, path, gate, learned, t in recurrent_gates(model):
        if "s" in learned:
            slopes = [s for s in t.s if isinstance(s, Tensor)]
            yield Slopes.of(f"{path}.{gate}" if path else gate, t.start, slopes, tol)


def recurrent_gates(
    model: nn.Module,
) -> Iterator[tuple[nn.Module, str, str, tuple[str, ...], Learned]]:
    """(module, site, gate, what is learned, the gate as it is) of recurrent layers and calls."""
    for path, module in model.named_modules():
        if isinstance(module, LSTM | GRU):
            for gate, t in module.learned_gates().items():
                yield module, path, gate, module.learning.train, t
        for prefix, spec in gates_of(module).items():
            if isinstance(spec, Units):
                for k, gates in enumerate(spec.now(module, prefix, *spec.group)):
                    for gate, t in gates.items():
                        yield module, site_name(path, prefix), f"{gate}_{k}", spec.learned, t
