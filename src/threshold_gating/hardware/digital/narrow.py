"""The fewest bits of each site with which a network is as good as asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from threshold_gating.hardware.digital.format import FormatError
from threshold_gating.hardware.digital.network import FixedPoint


def narrowest(
    made: FixedPoint,
    score: Callable[[nn.Module], float],
    least: float,
    bits: Sequence[int] = (16, 12, 10, 8, 6),
) -> dict[str, int]:
    """The fewest bits for each site with which `score` stays at `least` or above; set in `made`.

    First the fewest for all together, then each site on its own, as narrow as it can be with the
    others as found so far. What no width reaches is refused.
    """
    widths = sorted(bits, reverse=True)
    made.fix(widths[0])
    best = score(made)
    if best < least:
        raise ValueError(
            f"fixed_point.narrowest: {least:g} is not reached with {widths[0]} bits at every site, "
            f"which give {best:g}; ask for less, or give more bits."
        )
    found = {gate.name: widths[0] for gate in made.gates()}
    for width in widths[1:]:
        trial = dict.fromkeys(found, width)
        if not _reaches(made, trial, score, least):
            break
        found = trial
    made.fix(dict(found))
    for name in found:
        for width in widths[widths.index(found[name]) + 1 :]:
            if not _reaches(made, {**found, name: width}, score, least):
                break
            found[name] = width
    made.fix(dict(found))
    return found


def _reaches(
    made: FixedPoint, trial: Mapping[str, int], score: Callable[[nn.Module], float], least: float
) -> bool:
    try:
        made.fix(dict(trial))
    except FormatError:
        return False
    return score(made) >= least
