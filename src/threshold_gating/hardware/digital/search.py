"""Search of segments: how many, with how many bits, for a small error and a small circuit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from threshold_gating.hardware.digital.segments import Function, Segments, error

COUNTS, SLOPES, STEPS = range(3, 8), range(2, 11), range(2, 11)


class Candidate(NamedTuple):
    """Segments, their largest error in units of 2^-15 or as asked, and about what they take."""

    segments: Segments
    error: float
    cost: float


def cost(s: Segments) -> float:
    """About the area in um^2 of sky130 cells; within 20 % of yosys, and only to choose by.

    An array of full adders for the product, a fifth of a cell for each bit of the table, which
    synthesis makes small, an adder for the value, and carries where opposites are exact.
    """
    entries: int = 2**s.count * (s.slope + s.out)
    return 24 * s.slope * s.step + 0.9 * entries + 30 * s.out + (300 if s.exact else 0)


def candidates(
    function: Function = "sigmoid",
    top: int = 3,
    fraction: int = 12,
    outs: tuple[int, ...] = (15,),
    exact: tuple[bool, ...] = (True,),
    unit: int = 15,
) -> Iterator[Candidate]:
    """All that make sense, with errors over every code in units of 2^-unit."""
    for count, slope, step, out, whole in product(COUNTS, SLOPES, STEPS, outs, exact):
        if count + step > top + fraction:
            continue
        s = Segments(function, top, fraction, count, slope, step, out, whole)
        # More bits below the value than these are cut off again, fewer leave the value coarse.
        if -2 <= s.shift <= 6:
            yield Candidate(s, error(s, unit), cost(s))


def front(found: Iterator[Candidate]) -> list[Candidate]:
    """Those that no cheaper one beats by error, from cheap to exact."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda c: (c.cost, c.error)):
        if not kept or each.error < kept[-1].error:
            kept.append(each)
    return kept


def choose(within: float, function: Function, top: int, fraction: int, out: int) -> Segments:
    """The cheapest of `out` bits whose error is at most `within` of their last bits."""
    every = front(candidates(function, top, fraction, (out,), unit=out))
    for each in every:
        if each.error <= within:
            return each.segments
    raise ValueError(
        f"no segments of {function} are within {within:g} of 2^-{out}; the best found is "
        f"{every[-1].error:.2f}, with {every[-1].segments}."
    )
