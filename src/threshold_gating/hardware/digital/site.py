"""One site of a network in integers: its format, its unit, and the register values of its gates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.hardware.devices import LOGISTIC
from threshold_gating.hardware.digital import codes, unit
from threshold_gating.hardware.digital.format import (
    Format,
    FormatError,
    NarrowError,
    Registers,
    Scaled,
    Unit,
    check_whole,
    registers,
    slope,
    unit_for,
)
from threshold_gating.hardware.physical import AnalogGate, Chip
from threshold_gating.hardware.seen import Seen
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.primitive import wide

COARSER = 6  # formats that are tried, each with a bit less below the point of y
MOVED = 0.1  # of the RMS of y, by rounding: beyond it is said
SLACK = 1.001  # of a range: `codes.room` lets what it is chosen for lie beyond it by a last bit


class Kept(NamedTuple):
    """One call of a site: codes in and out, its registers, and what float64 gives there."""

    x: Tensor
    v: Tensor
    y: Tensor
    registers: Registers
    wanted: Tensor


class Given(Seen):
    """What a site gave in calibration, and what else of that run has to do with its format."""

    def __init__(self) -> None:
        super().__init__()
        self.infinite = False  # whether +inf came
        self.branch = 0.0  # the largest that reads another input than its gate


class Moved:
    """How far a format moves y from float, over all that came, and whether any y was cut off."""

    def __init__(self) -> None:
        self.apart = self.size = 0.0  # sums of squares
        self.ended = False

    def add(self, y: Tensor, wanted: Tensor) -> None:
        known = wanted.isfinite() & y.isfinite()
        self.apart += (y - wanted).where(known, 0).double().square().sum().item()
        self.size += wanted.where(known, 0).double().square().sum().item()

    @property
    def share(self) -> float:
        """The RMS of the error over the RMS of y."""
        return math.sqrt(self.apart / self.size) if self.size else 0.0


class FixedGate(AnalogGate):
    """One site in integers: x to the nearest code, y as the unit gives it."""

    def __init__(self, name: str, kind: str, gate: Activation | TG, chip: Chip) -> None:
        # not `super`: keys are gates of two kinds
        AnalogGate.__init__(self, name, kind, gate, chip)
        self.given = Given()  # what came out, where it was watched
        self.format, self.unit = Format(), Unit()
        self.written: list[Registers] = []
        self.kept: list[Kept] | None = None  # what comes and goes, to be compared
        self.moved, self.measured = Moved(), False
        self.steep = False  # whether y leaves its range at an x that does not

    @property
    def instances(self) -> list[TG]:
        """One, or one for each group of a layer with parameters of its own."""
        return self.gate.instances() if isinstance(self.gate, Activation) else [self.gate]

    def fix(self, wanted: Format | int, units: Mapping[str, Any] | None = None) -> None:
        """Take a format, or the one of so many bits that has room for what was seen."""
        bits = bits_of(wanted)
        if not isinstance(wanted, Format):
            self._check_seen()
        self.unit = unit_for(*self.instances, bits=bits, **(units or {}))
        self.moved = Moved()
        self._take([wanted] if isinstance(wanted, Format) else self._formats(bits))

    def _formats(self, bits: int) -> Iterator[Format]:
        """From the finest that has room; coarser ones are for steep branches, and for tau."""
        finest, out = codes.room(bits, self._reach()), codes.room(bits, self._size())
        for fraction in range(finest, min(finest, codes.room(bits, 2.0**-8)) - 1, -1):
            most = min(out, 2 * fraction) if self.unit.square else out  # x^2 has no more
            yield from (Format(bits, fraction, most - less) for less in range(COARSER))

    @property
    def reached(self) -> bool:
        """Whether anything came in calibration; what was not reached stays float."""
        return self.seen.numbers > 0

    def _check_seen(self) -> None:
        """Refuse to choose a format from what has no size."""
        if self.seen.nans or self.given.infinite or not self._has_size():
            what = f"NaN {self.seen.nans} times" if self.seen.nans else "nothing but zeros"
            what = "+inf" if self.given.infinite else what
            raise ValueError(
                f"fixed_point: {self.name} saw {what} in calibration, "
                "so that no format can be chosen; give inputs for which the network computes "
                f"numbers, or a Format for it: {{{self.name!r}: Format(...), '*': ...}}."
            )

    def _has_size(self) -> bool:
        return self.seen.largest > 0

    def _take(self, formats: Iterable[Format]) -> None:
        """The first format that holds every instance: a steep branch needs a coarser y."""
        first: FormatError | None = None
        for f in formats:
            try:
                self.written = [registers(t, f, self.unit) for t in self.instances]
            except FormatError as error:
                first = first or error
            else:
                self.format = f
                x = torch.linspace(-f.reach, f.reach, 257, dtype=torch.float64)
                most = SLACK * math.ldexp(1, f.bits - 1 - f.out)
                self.steep = any(t(x).abs().max().item() > most for t in self.instances)
                return
        raise FormatError(f"{self.name}: {first}") from first

    def _reach(self) -> float:
        """The largest x, or threshold, whichever is further: both need a code."""
        inside = [abs(at) for t in self.instances for at in t.theta]
        return max(self.seen.largest, *inside) or 1.0

    def _size(self) -> float:
        """The largest y, or constant that y tends to, seen or not."""
        ends = [abs(c) for t in self.instances for c in t.c]
        return max(self.given.largest, self.given.branch / 2**self.unit.headroom, *ends) or 1.0

    def forward(self, x: Tensor, v: Any = None, s: Sequence[Any] | None = None) -> Tensor:
        if self.watching:
            y = super().forward(x, v, s)
            self._watch(x, v, s, y)
            return y
        if not self.reached:
            with torch._C.DisableTorchFunction():
                return self._blend(wide(x), self._values(wide(x), s), v, LOGISTIC).to(x.dtype)
        with torch._C.DisableTorchFunction():
            f = self.format
            r = self._registers(x, s)
            code = codes.quantise(wide(x), f.fraction, f.bits)
            other = None if v is None else codes.quantise(wide(v), f.fraction, f.bits)
            y = unit.run(r, code, self.unit, other)
            if self.kept is not None:
                self._keep(code, other, y, r, s)
            y = torch.ldexp(y.to(wide(x).dtype), torch.tensor(-f.out, device=x.device))
            # What is not a number has no code; it stays visible.
            y = torch.where(x.isnan() if v is None else x.isnan() | v.isnan(), torch.nan, y)
            self._check(wide(x), v, s, y)
            return y.to(x.dtype)

    @torch.no_grad()
    def _check(self, x: Tensor, v: Any, s: Sequence[Any] | None, y: Tensor) -> None:
        """Where it is measured, note how far y is from float; say once that it was cut off."""
        last, reach = math.ldexp(1, -self.format.out), self.format.reach
        top = last * 2 ** (self.format.bits - 1)
        far = any(bool((z.abs() > SLACK * reach).any()) for z in (x, v) if z is not None)
        high = (self.steep or v is not None or s is not None) and bool(
            (y.abs() >= top - last).any()
        )
        if not (self.measured or ((far or high) and not self.moved.ended)):
            return
        values = self._values(x, s)
        wanted = self._blend(x, values, v, LOGISTIC)
        if self.measured:
            self.moved.add(y, wanted)
        beyond = wanted.abs() > SLACK * top
        if far:  # which may change nothing, as where a gate is shut
            other = None if v is None else v.clamp(-reach, reach)
            near = self._blend(x.clamp(-reach, reach), values, other, LOGISTIC)
            beyond |= ~((near - wanted).abs() <= last) & ~wanted.isnan()
        if bool(beyond.any()):
            self._say_ends()

    def _say_ends(self) -> None:
        if not self.moved.ended:
            self.moved.ended = True
            warnings.warn(f"fixed_point: {self.ends()}.", stacklevel=2)

    def ends(self) -> str:
        """What it means that y was cut off."""
        f = self.format
        return (
            f"{self.name}: inputs leave |x| < {f.reach:g} or |y| < "
            f"{math.ldexp(1, f.bits - 1 - f.out):g}, the ranges of its format, and y ends there; "
            "convert with inputs as large as these, or give it a Format"
        )

    def notes(self) -> list[str]:
        """What the format does that a reader of widths would not think of."""
        if self.moved.ended:
            return [self.ends()]
        if self.moved.share <= MOVED:
            return []
        return [
            f"{self.name}: rounding to {self.format.bits} bits moves y by "
            f"{self.moved.share:.0%} of its RMS; give it more bits"
        ]

    def _watch(self, x: Tensor, v: Any, s: Sequence[Any] | None, y: Tensor) -> None:
        """Note what needs codes."""
        self.given.add(y, self.axis)
        self.given.infinite |= bool((x == math.inf).any())
        if isinstance(v, Tensor):
            self.seen.add(v, self.axis)  # it has the same codes as x
            self.given.infinite |= bool((v == math.inf).any())
            if not self.t.hard:  # a gate that is not shut lets branches through that y never shows
                values, read = self._values(wide(x), s), Seen()
                for slope_, constant in zip(values.s, values.c, strict=True):
                    read.add(wide(v) * slope_ + constant, -1)
                self.given.branch = max(self.given.branch, read.largest)

    def _keep(
        self, x: Tensor, v: Tensor | None, y: Tensor, r: Registers, s: Sequence[Any] | None
    ) -> None:
        """Codes, and what float64 gives at them."""
        assert self.kept is not None
        real, other = (None if z is None else codes.real(z, self.format.fraction) for z in (x, v))
        assert real is not None
        wanted = self._blend(real, self._values(real, s), other, LOGISTIC)
        self.kept.append(Kept(x, x if v is None else v, y, r, wanted))

    def _registers(self, x: Tensor, s: Sequence[Any] | None) -> Registers:
        found = self.written[0]
        if len(self.written) > 1:
            assert isinstance(self.gate, Activation)
            found = side_by_side(self.written, self.gate._held(wide(x))[1], x.device)
        if s is None:
            return found
        offset = self.format.out - self.format.fraction
        try:
            slopes = tuple(_slopes(w, offset, self.format, self.unit) for w in s)
        except NarrowError as error:
            raise FormatError(
                f"{self.name}: {error}; a slope must be a finite number, and a site of more bits, "
                "or a Format with other fraction bits, has room for more of them."
            ) from None
        return found._replace(s=slopes)


def side_by_side(rows: Sequence[Registers], shape: Sequence[int], device: Any) -> Registers:
    """Register values of all channels as tensors that broadcast against x."""

    def tensor(values: Sequence[Any]) -> Any:
        return torch.tensor(values, device=device).view(shape)

    def scaled(name: str) -> Any:
        columns = zip(*(getattr(r, name) for r in rows), strict=True)
        return tuple(Scaled(tensor([w.m for w in c]), tensor([w.e for w in c])) for c in columns)

    return rows[0]._replace(
        theta=tuple(tensor(c) for c in zip(*(r.theta for r in rows), strict=True)),
        c=tuple(tensor(c) for c in zip(*(r.c for r in rows), strict=True)),
        **{name: scaled(name) for name in ("tau", "s", "q")},
    )


def _slopes(w: Any, offset: int, f: Format, u: Unit) -> Scaled:
    """A slope that is data: of a number, or of each entry of a tensor."""
    if not isinstance(w, Tensor):
        return slope("s", float(w), offset, f, u)
    each = [slope("s", value, offset, f, u) for value in w.flatten().tolist()]
    m, e = (torch.tensor(list(c), device=w.device).view(w.shape) for c in zip(*each, strict=True))
    return Scaled(m, e)  # type: ignore[arg-type]


def bits_of(wanted: Format | int) -> int:
    if isinstance(wanted, Format):
        return wanted.bits
    check_whole("fixed_point: bits, where no Format is given,", wanted)
    return Format(wanted).bits
