"""Gates with values of their own for each unit of a recurrent layer, learned: [sites, H].

tau = tau0 exp(rho), with rho within +-7 so that tau stays positive whatever the optimiser does, and
theta = theta0 + dtheta; both start at 0, exactly at the instance. Slopes and intercepts stay as
they are, so that a gate of the constant family stays in it, unless the family is "free".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.instance import TG
from threshold_gating.nn.spec import MEASURED, Role, Share, distance, found
from threshold_gating.primitive import Value

FAMILIES = ("constant", "free")
# What is learned, and the parameter that holds it.
HELD_BY = {"tau": "rho", "theta": "dtheta", "s": "s", "c": "c"}


class Learned(NamedTuple):
    """An instance of two branches with tensors [H] for the numbers of `start` it learns.

    A hard one keeps its values at the threshold, so that c moves with theta.
    """

    start: TG
    tau: Value
    theta: Value
    s: tuple[Value, ...]
    c: tuple[Value, ...]


class Learning(NamedTuple):
    """What a layer learns of its gates: which numbers, in which family, at which sites."""

    train: tuple[str, ...] = ()
    family: str = "constant"
    sites: tuple[str, ...] = ()


def learning(
    name: str, known: Sequence[str], train: Iterable[str], family: str, sites: Iterable[str] | None
) -> Learning:
    """What the layer `name` with the sites `known` is asked to learn, checked and in order."""
    asked = {train} if isinstance(train, str) else set(train)
    if unknown := asked - {"tau", "theta"}:
        raise ValueError(
            f"{name}: train takes tau, theta; got {', '.join(map(repr, sorted(unknown)))}. "
            "The branches, s and c, are learned beside them with family='free'."
        )
    if family not in FAMILIES:
        raise ValueError(f"{name}: family is 'constant' or 'free'; got {family!r}.")
    wanted = {sites} if isinstance(sites, str) else set(known if sites is None else sites)
    if not wanted or not wanted <= set(known):
        given = ", ".join(map(repr, sorted(wanted))) or "none"
        raise ValueError(f"{name}: sites are some of {', '.join(known)}; got {given}.")
    if family == "free":
        asked |= {"s", "c"}
    if not asked:
        return Learning()
    ordered = tuple(what for what in HELD_BY if what in asked)
    return Learning(ordered, family, tuple(site for site in known if site in wanted))


def start(what: str, instances: Sequence[TG], units: int) -> Tensor:
    """Where the parameter of `what` starts: [sites, H], for the branches [sites, 2, H]."""
    if what in ("tau", "theta"):
        return torch.zeros(len(instances), units)
    anchored = kernels.Structure.anchored_values
    values = [anchored(t) if what == "c" and t.hard else getattr(t, what) for t in instances]
    rows = torch.tensor(values)
    return rows.unsqueeze(-1).repeat(1, 1, units)


def values(gates: Mapping[str, TG], held: Mapping[str, Tensor]) -> dict[str, Learned]:
    """The learned gates as they are; `held` are the parameters, by what they hold."""
    sharpening = kernels.Structure.sharpening
    rows = {k: (sharpening(v) if k == "tau" else v).unbind(0) for k, v in held.items()}
    now = {}
    for k, (site, t) in enumerate(gates.items()):
        if t.K != 2 or t.q is not None or (t.hard and "tau" in rows):
            raise ValueError(
                f"a learned gate starts from a soft instance of two affine branches; {site!r} is "
                f"{t!r}."
            )
        tau = sharpness(t)
        theta: Value = t.theta[0] + rows["theta"][k] if "theta" in rows else t.theta[0]
        s: tuple[Value, ...] = tuple(rows["s"][k].unbind(0)) if "s" in rows else t.s
        c: tuple[Value, ...] = tuple(rows["c"][k].unbind(0)) if "c" in rows else t.c
        if t.hard:
            values = c if "c" in rows else kernels.Structure.anchored_values(t)
            c = tuple(kernels.Structure.intercepts(values, s, [theta]))
        now[site] = Learned(t, tau * rows["tau"][k] if "tau" in rows else tau, theta, s, c)
    return now


def before(t: Learned, units: int) -> tuple[Tensor, Tensor]:
    """(e, d), float64 [H], with which the start at e a + d equals a constant-family gate at a.

    tau0 (e a + d - theta0) = tau (a - theta), so e = tau / tau0 and d = theta0 - e theta.
    """
    tau, theta = (
        w.detach().double() if isinstance(w, Tensor) else torch.full((units,), w).double()
        for w in (t.tau, t.theta)
    )
    scale = tau / sharpness(t.start)
    return scale, t.start.theta[0] - scale * theta


def sharpness(t: TG) -> float:
    """tau of an instance with one threshold."""
    return t.tau if isinstance(t.tau, float) else t.tau[0]


@dataclass(frozen=True)
class Units:
    """What a recurrent call learns of the gates of its step: [layers and directions, gates, H].

    `share` is "layer" (one value for each gate of a layer and direction, H = 1) or per unit.
    """

    gates: tuple[tuple[str, TG], ...]  # of one step, by name
    learned: tuple[str, ...]
    layers: int = 1  # times directions
    share: Share = "layer"
    group: tuple[int, ...] = (1,)
    axis: int = -1

    def roles(self) -> dict[str, Role]:
        """A parameter for each of what is learned."""
        return {HELD_BY[what]: "parameter" for what in self.learned}

    def start(self, name: str, device: Any, dtype: torch.dtype) -> Tensor:
        """The numbers of the instances, the same for all layers and units."""
        what = next(what for what, held in HELD_BY.items() if held == name)
        one = start(what, [t for _, t in self.gates], self.group[0])
        return one.to(device, dtype).repeat(self.layers, *(1 for _ in one.shape))

    def fixed(self) -> dict[str, Any]:
        """The instances, but for what is learned."""
        each = {name: t.to_dict() for name, t in self.gates}
        return {n: {k: v for k, v in t.items() if k not in self.learned} for n, t in each.items()}

    def moved(self, holder: nn.Module, prefix: str) -> dict[str, float]:
        """How far the furthest of what is learned is from its start: log tau, theta, s, c."""
        far = {}
        for what in self.learned:
            now = found(holder, prefix + HELD_BY[what])
            then = self.start(HELD_BY[what], now.device, now.dtype)
            if what == "tau":
                now, then = kernels.Structure.sharpening(now), then.exp()
            far[MEASURED.get(what, what)] = distance(now, then, what)
        return far

    def held(self, holder: nn.Module, prefix: str, units: int) -> list[dict[str, Tensor]]:
        """The parameters of each layer and direction by what they hold, for so many units."""
        if self.group not in ((1,), (units,)):
            raise ValueError(
                f"{self.group[0]} units have gates of their own, and the layer has {units}; "
                "convert a network of that size."
            )
        held = {what: found(holder, prefix + HELD_BY[what]) for what in self.learned}
        wide = {what: t.expand(*t.shape[:-1], units) for what, t in held.items()}
        return [{what: t[k] for what, t in wide.items()} for k in range(self.layers)]

    def now(self, holder: nn.Module, prefix: str, units: int) -> list[dict[str, Learned]]:
        """The gates of each layer and direction as they are, for layers of this many units."""
        known = dict(self.gates)
        return [values(known, held) for held in self.held(holder, prefix, units)]
