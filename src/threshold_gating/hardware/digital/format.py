"""What a circuit's integers mean: the format of a site, the gate unit, and its register values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from threshold_gating.hardware.digital.segments import Segments
from threshold_gating.instance import TG


class FormatError(ValueError):
    """An instance does not fit a format; the message says which format would do."""


def check_whole(what: str, value: object) -> None:
    """Refuse what is no whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{what} must be a whole number, such as 8; got {value!r}.")


@dataclass(frozen=True)
class Format:
    """Codes of one site: x = code / 2^fraction and y = code / 2^out, signed, of `bits` bits.

    A code beyond the range is the nearest that there is.
    """

    bits: int = 16
    fraction: int = 11
    out: int = 11

    def __post_init__(self) -> None:
        for name in ("bits", "fraction", "out"):
            check_whole(f"Format: {name}", getattr(self, name))
        if not 4 <= self.bits <= 16:
            raise FormatError(f"Format: bits must be from 4 to 16; got {self.bits}.")

    @property
    def reach(self) -> float:
        """The x that is just too large."""
        return 2.0 ** (self.bits - 1 - self.fraction)

    def __str__(self) -> str:
        return f"{self.bits} bits, x / 2^{self.fraction}, y / 2^{self.out}"


# What `search.choose` finds: the error in last bits that is asked for, and the segments, for units
# of so many bits. |u| goes to 16, where the sigmoid is 0 in 15 bits. Tests search again.
WITHIN = {8: (1.5, 1.5), 10: (1.5, 1.5), 12: (2.1, 2.1), 16: (6.0, 3.0)}
CHOSEN = {
    8: (Segments("sigmoid", 4, 6, 5, 3, 4, 7), Segments("softplus", 4, 6, 5, 3, 3, 6)),
    10: (Segments("sigmoid", 4, 8, 6, 4, 5, 9), Segments("softplus", 4, 8, 6, 4, 5, 8)),
    12: (Segments("sigmoid", 4, 10, 6, 5, 8, 11), Segments("softplus", 4, 10, 6, 5, 8, 10)),
    16: (Segments("sigmoid", 4, 12, 7, 7, 8, 15), Segments("softplus", 4, 12, 7, 5, 7, 12)),
}
GATE, LOG = CHOSEN[16]
_POINTS = 4097  # of x, at which branches that end are looked at: gates are smooth between them


@dataclass(frozen=True)
class Unit:
    """One gate unit: the widths in its Verilog. Everything else is a register.

    A tau is m 2^-e and a slope +-m 2^-e, so that one circuit serves every scale of x and y.

    Args:
        bits: of x and y.
        branches: K, the most that it can do.
        tau: bits of a tau's m; 1 for powers of two.
        slope: bits of a slope's m with its sign; 2 for 0 and powers of two.
        shift: bits of each e.
        guard: bits of branches and sums below the last of y.
        headroom: bits of branches and sums above the first of y.
        finer: bits of theta below the last of x.
        gate: segments of the sigmoid; None for a unit of hard gates alone.
        log: segments of log(1 + exp(-|u|)), of units with three branches and more.
        square: whether branches have a term in x^2.
    """

    bits: int = 16
    branches: int = 2
    tau: int = 10
    slope: int = 12
    shift: int = 5
    guard: int = 2
    headroom: int = 2
    finer: int = 2
    gate: Segments | None = GATE
    log: Segments | None = LOG
    square: bool = False

    def __post_init__(self) -> None:
        for name in ("bits", "branches", "tau", "slope", "shift", "guard", "headroom", "finer"):
            check_whole(f"Unit: {name}", getattr(self, name))
        if self.guard < 1 or self.headroom < 0 or self.finer < 0:
            raise FormatError(
                f"Unit: guard must be 1 or more, headroom and finer 0 or more; got {self}."
            )
        if self.branches < 1 or self.tau < 1 or self.slope < 2 or self.shift < 1:
            raise FormatError(f"Unit: branches, tau and shift from 1 on, slope from 2; got {self}.")
        self._check_products()
        if self.gate and self.branches > 2:
            if self.log is None:
                raise FormatError("Unit: soft gates of three and more branches need log=LOG.")
            same = (self.log.top, self.log.fraction, self.log.out)
            if same != (self.gate.top, self.gate.fraction, self.gate.fraction):
                raise FormatError(
                    "Unit: log works on the u of gate, and gives a u: its top, fraction and out "
                    f"must be {self.gate.top}, {self.gate.fraction}, {self.gate.fraction}; got "
                    f"{same}."
                )

    def _check_products(self) -> None:
        """Refuse what integers of 64 bits cannot follow."""
        first = max(self.slope, self.bits if self.square else 0)
        products = {
            "x - theta and tau": self.bits + self.finer + 1 + self.tau,
            "x, a slope and guard": self.bits + first + self.guard,
            "branches and a gate": self.sum_bits + 2 + (self.gate.out if self.gate else 0),
        }
        if self.log:
            products["thresholds of a softmax"] = 2 * self.log.bits + self.bits + self.finer + 2
        name, widest = max(products.items(), key=lambda item: item[1])
        if widest > 63 or self.shift > 6:
            raise FormatError(
                f"Unit: products have up to 63 bits, and shift up to 6; got {widest} for {name}, "
                f"and shift = {self.shift}."
            )

    @property
    def sum_bits(self) -> int:
        """Of branches and sums."""
        return self.bits + self.guard + self.headroom


def unit_for(*instances: TG, bits: int = 16, **more: Any) -> Unit:
    """The unit that can be any of the instances; `more` are fields of `Unit` to be set."""
    gate, log = CHOSEN[next((each for each in CHOSEN if each >= bits), max(CHOSEN))]
    soft = any(not t.hard and t.K > 1 for t in instances)
    own = {
        "branches": max(t.K for t in instances),
        "tau": max(min(bits, 10), 8),
        "slope": max(min(bits, 12), 8),
        "gate": gate if soft else None,
        "log": log if soft and any(t.K > 2 and not t.hard for t in instances) else None,
        "square": any(t.q is not None for t in instances),
    }
    return Unit(bits, **{**own, **more})


class Scaled(NamedTuple):
    """m 2^-e."""

    m: int
    e: int


class Registers(NamedTuple):
    """What is written into a unit to make it an activation: integers, low to high in x."""

    theta: tuple[int, ...]
    tau: tuple[Scaled, ...]
    s: tuple[Scaled, ...]
    c: tuple[int, ...]
    q: tuple[Scaled, ...]  # of x^2; with them, s is in the format of x
    hard: bool
    closed: tuple[bool, ...]  # whether x = theta lies above
    low: int  # bounds of y
    high: int


def scaled(value: float, bits: int, offset: int, most: int) -> Scaled:
    """`value` 2^offset as m 2^-e, |m| < 2^bits and 0 <= e <= most, as near as can be."""
    if value == 0:
        return Scaled(0, 0)
    exponent = math.frexp(value)[1] + offset
    e = min(max(bits - exponent, 0), most)
    m = round(math.ldexp(value, offset + e))
    if abs(m) == 2**bits and e > 0:  # rounded up to one bit more
        e, m = e - 1, m // 2
    return Scaled(m, e)


def registers(t: TG, f: Format, unit: Unit) -> Registers:
    """The register values of an instance, or why it does not fit and which format would do."""
    try:
        return _registers(t, f, unit)
    except NarrowError as error:
        raise FormatError(f"{error}; {_instead(t, f, unit)}.") from None


class NarrowError(ValueError):
    """A number of an instance does not fit; another format may do."""


def _instead(t: TG, f: Format, unit: Unit) -> str:
    """The format nearest to `f` that holds the instance, found by trying."""
    for bits in range(f.bits, 17):
        fractions = sorted(range(f.fraction - 8, f.fraction + 9), key=lambda n: abs(n - f.fraction))
        for out in range(f.out, f.out - 5, -1):
            for fraction in fractions:
                other = Format(bits, fraction, out)
                try:
                    _registers(t, other, replace(unit, bits=bits))
                except NarrowError:
                    continue
                return f"Format({bits}, fraction={fraction}, out={out}) would do"
    return (
        "no format near it of up to 16 bits would do in this unit; take another row of "
        "`tg table --all` for it, or a Unit with more bits of tau, slope and shift"
    )


def _registers(t: TG, f: Format, unit: Unit) -> Registers:
    t = _plain(t)
    if f.bits != unit.bits:
        raise FormatError(
            f"the format has {f.bits} bits and the unit {unit.bits}: they must agree."
        )
    if unit.branches < t.K:
        raise FormatError(f"{t!r} has K = {t.K} branches; give Unit(branches={t.K}).")
    if t.q is not None and not unit.square:
        raise FormatError(f"{t!r} has a branch with x^2; give Unit(square=True).")
    if not t.hard and t.K > 1 and unit.gate is None:
        raise FormatError(f"{t!r} has soft gates; give a Unit with gate=GATE.")
    tau = () if t.hard else tuple(_tau(tau, f, unit) for tau in _each(t.tau, t.K - 1))
    owners = t.owner or ("",) * len(t.theta)
    theta = tuple(_theta(at, owner, f, unit) for at, owner in zip(t.theta, owners, strict=True))
    if t.hard:
        _check_distinct(t.theta, [at >> unit.finer for at in theta], owners, f)
    else:
        _check_order(t, unit)
    c = tuple(_constant(c, f, unit) for c in t.c)
    low, high = -(2 ** (f.bits - 1)), 2 ** (f.bits - 1) - 1
    if t.clamp is not None:
        low, high = (min(max(round(math.ldexp(b, f.out)), low), high) for b in t.clamp)
    s, q = _slopes(t, f, unit)
    if lost := saturates(t, f, unit):
        raise NarrowError(
            f"a branch s x + c leaves the {unit.headroom} bits above y where its gate is open, and "
            f"y is off by {lost:.3g} last bits, in {f}"
        )
    return Registers(theta, tau, s, c, q, t.hard, tuple(o == "hi" for o in owners), low, high)


def saturates(t: TG, f: Format, unit: Unit) -> float:
    """How many last bits y is off where branches end at the range of sums; 0 for less than half.

    A branch may end there where its gate is shut, or where y ends at its own range as well.
    """
    limit = math.ldexp(2.0 ** (unit.bits - 1 + unit.headroom), -f.out)
    curves = t.q or (0.0,) * t.K
    steepest = [abs(q) * f.reach + abs(s) for q, s in zip(curves, t.s, strict=True)]
    most = max(a * f.reach + abs(c) for a, c in zip(steepest, t.c, strict=True))
    if most <= limit and (not unit.square or max(steepest) <= f.reach):
        return 0.0
    near = [at + d for at in t.theta for d in (-1e-9, 0.0, 1e-9)]  # hard gates open there
    even = torch.linspace(-f.reach, f.reach, _POINTS, dtype=torch.float64)
    x = torch.cat([even, torch.tensor(near, dtype=torch.float64)])
    slopes = [q * x + s for q, s in zip(curves, t.s, strict=True)]
    narrow = [a.clamp(-f.reach, f.reach) if unit.square else a for a in slopes]
    exact, kept = ([a * x + c for a, c in zip(row, t.c, strict=True)] for row in (slopes, narrow))
    gates = TG(t.tau, t.theta, (1,) * t.K, (0,) * t.K, form=t.form, owner=t.owner, clamp=t.clamp)
    wanted = gates(x, v=exact)
    found = gates(x, v=[branch.clamp(-limit, limit) for branch in kept])
    end = limit / 2**unit.headroom
    off = (wanted.clamp(-end, end) - found.clamp(-end, end)).abs().max().item()
    bits = math.ldexp(off, f.out)
    return bits if bits > 0.5 else 0.0


def _plain(t: TG) -> TG:
    if t.form == "product":
        try:
            return t.as_form("softmax")
        except ValueError as error:
            raise FormatError(f"the unit has softmax gates; {error}") from error
    return t


def _check_order(t: TG, unit: Unit) -> None:
    """Refuse soft thresholds that fall so far that log odds between them leave the range of u.

    Up to half of that range, one u ends there only where the other has settled.
    """
    fall = max((a - b for k, a in enumerate(t.theta) for b in t.theta[k + 1 :]), default=0.0)
    sharpest = max(_each(t.tau, t.K - 1), default=0.0)
    if unit.gate and fall * sharpest > 2 ** (unit.gate.top - 1):
        raise FormatError(
            f"theta = {t.theta} falls by {fall:g}, and the unit has room for "
            f"{2 ** (unit.gate.top - 1) / sharpest:.3g} at tau = {sharpest:g}; take "
            "an instance whose thresholds rise: tg.convert(..., sites={SITE: K}) fits one."
        )


def _each(tau: float | Sequence[float], n: int) -> tuple[float, ...]:
    return tuple(tau) if isinstance(tau, Sequence) else (tau,) * n


def _tau(tau: float, f: Format, unit: Unit) -> Scaled:
    """u = (x - theta) tau: from the fraction of theta to that of u."""
    assert unit.gate is not None
    most = 2**unit.shift - 1
    offset = unit.gate.fraction - f.fraction - unit.finer
    found = scaled(tau, unit.tau, offset, most)
    if found.m >= 2**unit.tau:
        raise NarrowError(f"tau = {tau:g} is too large for {f} and {unit.tau} bits of tau")
    if _off(found, math.ldexp(tau, offset)) > 2.0**-6:
        why = f"too small for {f} and shifts up to {most}"
        if found.e < most:
            why = f"not within 2^-6 of any with {unit.tau} bits of tau"
        raise NarrowError(f"tau = {tau:g} is {why}")
    return found


def _off(found: Scaled, wanted: float) -> float:
    """The relative error of a number that was rounded to a few bits."""
    return abs(math.ldexp(found.m, -found.e) / wanted - 1)


def _theta(at: float, owner: str, f: Format, unit: Unit) -> int:
    """In bits finer than x: a soft gate's is off by half of the last of them, near 0 or not.

    A hard gate compares codes, so a theta between two of them is exact.
    """
    code = math.ldexp(at, f.fraction)
    if not -(2 ** (f.bits - 1)) <= code <= 2 ** (f.bits - 1) - 1:
        raise NarrowError(f"theta = {at:g} lies outside of {f}, where |x| < {f.reach:g}")
    if owner:
        return (math.ceil(code) if owner == "hi" else math.floor(code)) << unit.finer
    return round(math.ldexp(code, unit.finer))


def _check_distinct(
    theta: Sequence[float], codes: Sequence[int], owners: Sequence[str], f: Format
) -> None:
    """Refuse a format in which no code lies between two thresholds of hard gates."""
    above = [code + (owner != "hi") for code, owner in zip(codes, owners, strict=True)]  # the first
    for k in range(len(theta) - 1):
        if theta[k] != theta[k + 1] and above[k] >= above[k + 1]:
            raise NarrowError(
                f"theta = {theta[k]:g} and {theta[k + 1]:g} have no code between them in {f}"
            )


def _constant(c: float, f: Format, unit: Unit) -> int:
    code = round(math.ldexp(c, f.out + unit.guard))
    if not -(2 ** (unit.sum_bits - 1)) <= code < 2 ** (unit.sum_bits - 1):
        raise NarrowError(f"c = {c:g} is too large for {f}")
    return code


def _slopes(t: TG, f: Format, unit: Unit) -> tuple[tuple[Scaled, ...], tuple[Scaled, ...]]:
    """Slopes, from the fraction of x to that of y, and the factors of x^2 where a unit has them.

    There a branch is (q x + s) x + c, and the bracket has the bits and the fraction of x.
    """
    if not unit.square:
        return tuple(slope("s", s, f.out - f.fraction, f, unit) for s in t.s), ()
    shift = 2 * f.fraction - f.out
    if not 0 <= shift < 2**unit.shift:
        raise NarrowError(f"x^2 with {2 * f.fraction} fraction bits does not shift into {f}")
    codes = [round(math.ldexp(s, f.fraction)) for s in t.s]
    for s, code in zip(t.s, codes, strict=True):
        if not -(2 ** (f.bits - 1)) <= code < 2 ** (f.bits - 1):
            raise NarrowError(f"s = {s:g} is too large for {f}")
    q = tuple(slope("q", q, 0, f, unit) for q in t.q or (0.0,) * t.K)
    return tuple(Scaled(code, shift) for code in codes), q


def slope(name: str, value: float, offset: int, f: Format, unit: Unit) -> Scaled:
    """m and e of a slope, which may be off where no code of x shows it."""
    most = 2**unit.shift - 1
    if not math.isfinite(value):
        raise NarrowError(f"{name} = {value:g} is no number")
    found = scaled(value, unit.slope - 1, offset, most)
    if abs(found.m) >= 2 ** (unit.slope - 1):
        raise NarrowError(f"{name} = {value:g} is too large for {f} and {unit.slope} bits of slope")
    shown = abs(math.ldexp(found.m, -found.e) - math.ldexp(value, offset)) * 2 ** (f.bits - 1)
    if shown <= 0.5:  # last bits, at the largest x
        return found
    if value and not found.m:
        raise NarrowError(f"{name} = {value:g} would be 0 in {f} and shifts up to {most}")
    if value and _off(found, math.ldexp(value, offset)) > 2.0**-4:
        raise NarrowError(
            f"{name} = {value:g} is not within 2^-4 of any with {unit.slope} bits of slope in {f}"
        )
    return found
