"""A converted network whose every nonlinearity is computed by the gate unit, in integers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating.conversion.plan import run as run_network
from threshold_gating.conversion.watch import Running, copied, evaluating, fresh
from threshold_gating.hardware.devices import LOGISTIC
from threshold_gating.hardware.digital import segments, unit
from threshold_gating.hardware.digital.format import (
    Format,
    FormatError,
    Registers,
    Scaled,
    Unit,
    check_whole,
    registers,
    slope,
    unit_for,
)
from threshold_gating.hardware.physical import AnalogGate, Chip, Errors, Seen
from threshold_gating.hardware.placement import (
    Body,
    Chosen,
    calibrate,
    check,
    matches,
    place_calls,
    place_modules,
)
from threshold_gating.hardware.wholes import _OFF, KeyGates, _power
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation
from threshold_gating.primitive import wide

COARSER = 6  # formats that are tried, each with a bit less below the point of y
MOVED = 0.1  # of the weights of a softmax, by rounding: beyond it is said


class _Digital(Chip):
    """What is put into a network here."""

    __slots__ = ()

    def gate(self, name: str, kind: str, gate: Activation | TG) -> FixedGate:
        return FixedGate(name, kind, gate, self)

    def keys(self, name: str, kind: str) -> FixedKeys:
        return FixedKeys(name, kind, self)


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
        self.mass, self.moved = 0.0, [0.0] * 17  # of a softmax; by rounding to so many bits

    def weigh(self, p: Tensor) -> None:
        """Note how much of p rounding moves, for each number of fraction bits."""
        self.mass += p.double().sum().item()
        for n in range(len(self.moved)):
            codes = torch.ldexp(p.double(), torch.tensor(n, device=p.device))
            self.moved[n] += (codes.round() - codes).abs().sum().item() / 2**n


class FixedGate(AnalogGate):
    """One site in integers: x to the nearest code, y as the unit gives it."""

    def __init__(self, name: str, kind: str, gate: Activation | TG, chip: Chip) -> None:
        AnalogGate.__init__(
            self, name, kind, gate, chip
        )  # not `super`: keys are gates of two kinds
        self.given = Given()  # what came out, where it was watched
        self.format, self.unit = Format(), Unit()
        self.written: list[Registers] = []
        self.kept: list[Kept] | None = None  # what comes and goes, to be compared

    @property
    def instances(self) -> list[TG]:
        """One, or one for each group of a layer with parameters of its own."""
        return self.gate.instances() if isinstance(self.gate, Activation) else [self.gate]

    def fix(self, wanted: Format | int, units: Mapping[str, Any] | None = None) -> None:
        """Take a format, or the one of so many bits that has room for what was seen."""
        bits = _bits(wanted)
        if not isinstance(wanted, Format):
            self._check_seen()
        self.unit = unit_for(*self.instances, bits=bits, **(units or {}))
        fraction, out = room(bits, self._reach()), room(bits, self._size())
        if self.unit.square:
            out = min(out, 2 * fraction)  # x^2 has no more
        formats = [Format(bits, fraction, out - less) for less in range(COARSER)]
        self._take([wanted] if isinstance(wanted, Format) else formats)

    @property
    def reached(self) -> bool:
        """Whether anything came in calibration; what was not reached stays float."""
        return self.seen.numbers > 0

    def _check_seen(self) -> None:
        """Refuse to choose a format from what has no size."""
        if self.seen.nans or self.given.infinite or not self.seen.largest:
            what = f"NaN {self.seen.nans} times" if self.seen.nans else "nothing but zeros"
            what = "+inf" if self.given.infinite else what
            raise ValueError(
                f"fixed_point: {self.name} saw {what} in calibration, "
                "so that no format can be chosen; give inputs for which the network computes "
                f"numbers, or a Format for it: {{{self.name!r}: Format(...), '*': ...}}."
            )

    def _take(self, formats: Sequence[Format]) -> None:
        """The first format that holds every instance: a steep branch needs a coarser y."""
        first: FormatError | None = None
        for f in formats:
            try:
                self.written = [registers(t, f, self.unit) for t in self.instances]
            except FormatError as error:
                first = first or error
            else:
                self.format = f
                return
        raise FormatError(f"{self.name}: {first}") from first

    def _reach(self) -> float:
        """The largest x, or threshold, whichever is further: both need a code."""
        inside = [abs(at) for t in self.instances for at in t.theta]
        return max(self.seen.largest, *inside, 2.0**-8)

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
            codes = quantise(wide(x), f.fraction, f.bits)
            other = None if v is None else quantise(wide(v), f.fraction, f.bits)
            y = unit.run(r, codes, self.unit, other)
            if self.kept is not None:
                self._keep(codes, other, y, r, s)
            y = torch.ldexp(y.to(wide(x).dtype), torch.tensor(-f.out, device=x.device))
            # What is not a number has no code; it stays visible.
            return torch.where(x.isnan(), wide(x), y).to(x.dtype)

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
        real, other = (None if z is None else real_of(z, self.format.fraction) for z in (x, v))
        assert real is not None
        values = self._values(real)
        values = values if s is None else values._replace(s=list(s))
        wanted = self._blend(real, values, other, LOGISTIC)
        self.kept.append(Kept(x, x if v is None else v, y, r, wanted))

    def _registers(self, x: Tensor, s: Sequence[Any] | None) -> Registers:
        found = self.written[0]
        if len(self.written) > 1:
            assert isinstance(self.gate, Activation)
            found = _side_by_side(self.written, self.gate._held(wide(x))[1], x.device)
        if s is None:
            return found
        offset = self.format.out - self.format.fraction
        return found._replace(s=tuple(_slopes(w, offset, self.format, self.unit) for w in s))


def _side_by_side(rows: Sequence[Registers], shape: Sequence[int], device: Any) -> Registers:
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


class FixedKeys(FixedGate, KeyGates):
    """A softmax in integers: the pairwise tree gives each key its threshold, the unit its gate.

    The tree's cell is max(a, b) + log(1 + exp(-|a - b|)), by the segments that a unit of three
    branches has. The threshold of a key is data, written where the register of theta is.
    """

    def __init__(self, name: str, kind: str, chip: Chip) -> None:
        FixedGate.__init__(self, name, kind, _SIGMOID, chip)

    def fix(self, wanted: Format | int, units: Mapping[str, Any] | None = None) -> None:
        log = unit_for(_THREE, bits=_bits(wanted)).log
        super().fix(wanted, {"branches": 3, "log": log, **(units or {})})

    def lost(self) -> float:
        """The share of p that rounding alone moves in its format."""
        given, out = self.given, min(max(self.format.out, 0), 16)
        return given.moved[out] / given.mass if given.mass else 0.0

    @property
    def _off(self) -> int:
        """The code of a key that takes no part: the lowest."""
        lowest: int = -(2 ** (self.format.bits + self.unit.finer - 1))
        return lowest

    def _reach(self) -> float:
        """Logits are taken from the largest: twice as far, but at 16 a gate is shut."""
        largest = max(self.seen.largest, 2.0**-8)
        return max(largest, min(2 * largest, 16.0))

    def softmax(self, z: Tensor, dim: int = -1) -> Tensor:
        if self.watching:
            rows = wide(z)
            self.given.infinite |= bool((rows == math.inf).any())
            self.seen.add(torch.where(rows <= _OFF, -torch.inf, rows), -1)  # logits need codes
            p = super().softmax(z, dim)
            self.given.weigh(p)
            return p
        if not self.reached:
            return torch.softmax(z, dim)
        with torch._C.DisableTorchFunction():
            rows, f, finer = wide(z).movedim(dim, -1), self.format, self.unit.finer
            live = rows > _OFF
            codes = quantise(rows, f.fraction, f.bits).where(live, -(2 ** (f.bits - 1)))
            # From the largest down, and what is masked at the end of the range.
            codes = codes - codes.amax(-1, keepdim=True)
            codes = unit.saturated(codes, f.bits).where(live, -(2 ** (f.bits - 1)))
            theta = unit.saturated(self._codes(codes << finer), f.bits + finer)
            r = self.written[0]._replace(theta=(theta,))  # type: ignore[arg-type]
            y = unit.run(r, codes, self.unit)
            if self.kept is not None:
                apart = real_of((codes << finer) - theta, f.fraction + finer)
                self.kept.append(Kept(codes, codes, y, r, torch.sigmoid(apart)))
            p = torch.ldexp(y.to(rows.dtype), torch.tensor(-f.out, device=z.device))
            p = p.where(theta > self._off, 1).where(live, 0)  # a key with no other is all of it
            return (
                p.where(~rows.isnan().any(-1, keepdim=True), torch.nan).movedim(-1, dim).to(z.dtype)
            )

    def _codes(self, z: Tensor) -> Tensor:
        """The log-sum-exp of all others, in codes with the fraction of theta."""
        n = z.shape[-1]
        levels = [nn.functional.pad(z, (0, _power(n) - n), value=self._off)]
        while levels[-1].shape[-1] > 1:
            levels.append(self.pair(levels[-1][..., ::2], levels[-1][..., 1::2]))
        outside = torch.full_like(levels[-1], self._off)
        for level in reversed(levels[:-1]):
            other = torch.unflatten(level, -1, (-1, 2)).flip(-1).flatten(-2)
            outside = self.pair(outside.repeat_interleave(2, -1), other)
        return outside[..., :n]

    def pair(self, a: Tensor, b: Tensor) -> Tensor:
        """One cell of the tree; where one side is off, the other passes."""
        log = self.unit.log
        assert log is not None
        shift = log.fraction - self.format.fraction - self.unit.finer
        apart = unit.saturated(_shifted(a - b, shift), log.bits + 1)
        both = torch.maximum(a, b) + _shifted(segments.evaluate(log, apart), -shift)
        return torch.where(a == self._off, b, torch.where(b == self._off, a, both))


def _shifted(codes: Tensor, by: int) -> Tensor:
    """To the left, or to the right with rounding."""
    return codes << by if by >= 0 else unit.rounded(codes, -by)


_SIGMOID = TG(1, 0, (0, 0), (0, 1))
_THREE = TG(1, (0, 1), (0, 1, 1), (0, 0, 0))


def _bits(wanted: Format | int) -> int:
    if isinstance(wanted, Format):
        return wanted.bits
    check_whole("fixed_point: bits, where no Format is given,", wanted)
    return Format(wanted).bits


def quantise(x: Tensor, fraction: int, bits: int) -> Tensor:
    """Codes of real numbers: the nearest, halves to even; beyond the range its end. NaN is 0."""
    scaled = torch.ldexp(x.double(), torch.tensor(fraction, device=x.device))
    limit = 2.0**bits
    return unit.saturated(scaled.nan_to_num().clamp(-limit, limit).round().long(), bits)


def real_of(codes: Tensor, fraction: int) -> Tensor:
    """The float64 numbers of codes."""
    return torch.ldexp(codes.double(), torch.tensor(-fraction, device=codes.device))


def room(bits: int, size: float) -> int:
    """The most fraction bits with which `size` has a code, up to a last bit."""
    check_whole("fixed_point: bits", bits)
    if not 0 < size < math.inf:
        raise FormatError(f"fixed_point: reach must be a number above 0; got {size!r}.")
    return bits - 1 - math.ceil(math.log2(size) - 1e-4)


class SiteRow(NamedTuple):
    """A site, its format, and the register values of its instances."""

    name: str
    kind: str
    format: Format
    instances: int
    largest: float  # x that was seen


class FixedPoint(nn.Module):
    """A network whose nonlinearities are integers inside; everything else is as it was."""

    def __init__(self, body: Body, kept: tuple[str, ...]) -> None:
        super().__init__()
        self.body, self.kept = body, kept

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    def gates(self) -> Iterator[FixedGate]:
        """Every site that was reached."""
        return (m for m in self.body.modules() if isinstance(m, FixedGate) and m.reached)

    def notes(self) -> list[str]:
        """What the formats do that a reader of widths would not think of."""
        return [
            f"{g.name}: the weights of the softmax are so small that rounding to {g.format.bits} "
            f"bits moves {g.lost():.0%} of their sum; give it more bits"
            for g in self.gates()
            if isinstance(g, FixedKeys) and g.lost() > MOVED
        ]

    def sites(self) -> list[SiteRow]:
        """One row for each site, in the order of the network."""
        return [
            SiteRow(g.name, g.kind, g.format, len(g.instances), g.seen.largest)
            for g in self.gates()
        ]

    def fix(self, wanted: Format | int | Mapping[str, Format | int], **units: Any) -> None:
        """Give every site a format; a mapping has patterns of sites, and "*" for the others."""
        table = wanted if isinstance(wanted, Mapping) else {"*": wanted}
        used = set()
        for gate in self.gates():
            keys = [key for key in table if key != "*" and matches(key, gate.name)]
            keys += ["*"] if "*" in table else []
            if not keys:
                raise ValueError(f"fixed_point: no format for {gate.name}; add '*' for all others.")
            used.add(keys[0])
            gate.fix(table[keys[0]], units)
        if unused := [key for key in table if key not in used and key != "*"]:
            known = ", ".join(repr(g.name) for g in self.gates())
            raise ValueError(f"fixed_point: {unused[0]!r} is no site; there are {known}.")


def convert(
    model: nn.Module,
    wanted: Format | int | Mapping[str, Format | int] = 16,
    *,
    inputs: Any,
    only: str | Sequence[str] | None = None,
    **units: Any,
) -> FixedPoint:
    """A copy of a converted network with each nonlinearity in the bit-true model.

    Args:
        model: a network that `tg.convert(model, inputs=...)` made.
        wanted: bits, from which each site's format is chosen by what it sees; or a `Format`; or a
            mapping from names or patterns of sites to either, with "*" for all others.
        inputs: typical ones, by which formats are chosen, as `tg.convert` takes them.
        only: names or patterns of the sites that become integers.
        units: fields of `Unit` for every site, such as slope=2.
    """
    check(model, "fixed_point.convert")
    chosen = Chosen(only, "fixed_point.convert")
    body = Body(copied(model))
    chip = _Digital(None, Errors().of(None))
    with evaluating(body), Running(body.network, everywhere=True) as running:
        run_network(body.network, fresh(inputs))
    kept = [*place_modules(body, chip, chosen, running, True), *place_calls(body, chip, chosen)]
    chosen.check()
    calibrate(body, inputs)
    gates = [m for m in body.modules() if isinstance(m, FixedGate)]
    kept += [f"{gate.name} (not reached)" for gate in gates if not gate.reached]
    made = FixedPoint(body, tuple(kept))
    made.fix(wanted, **units)
    made.train(model.training)
    if kept:
        warnings.warn(f"fixed_point.convert: stays as it is: {', '.join(kept)}.", stacklevel=2)
    for note in made.notes():
        warnings.warn(f"fixed_point.convert: {note}.", stacklevel=2)
    return made


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
