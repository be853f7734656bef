"""Record of what `prove` found of one instance: in sentences, as a line of a table, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from textwrap import fill
from typing import Any, NamedTuple

import torch

from threshold_gating.conversion.site_error import LIMITS
from threshold_gating.conversion.text import WIDTH, columns, jsonable


def vector(device: torch.device) -> str:
    """What torch's kernels are made for: the instruction set of a CPU, or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "none"
    return str(torch.backends.cpu.get_cpu_capability())


class Worst(NamedTuple):
    """The largest error, and the input where it happens."""

    value: float = 0.0
    at: float = 0.0


_NONE = Worst()


@dataclass(frozen=True)
class Proof:
    """What was found of one instance in one type.

    Attributes:
        name: of the instance, or of what it replaces.
        dtype, device, backend, torch: how it was evaluated.
        vector: what torch's kernels are made for: a CPU's instruction set, or the GPU.
        inputs: how many finite inputs were tried.
        complete: whether these are all there are. What is not complete proves nothing.
        interrupted: whether fewer were tried than asked for.
        sup: the error that the instance claims; 0.0 claims to be the function.
        differs: inputs where the gates' value is not torch's (NaN is NaN, -0 is 0).
        zeros: inputs where both are zero and the sign differs.
        nan, infinite: inputs where the gates are NaN, or infinite, and torch is not.
        torch_nan, torch_infinite: inputs where torch is and the gates are not.
        loose: inputs where the gates are further from the true value than torch is, by more ulp
            than their class allows in a certificate (if approximate, and by more than `sup`).
        beyond: those of them where it is also more than the gates' own steps round: the claim
            fails there.
        error, distance: the largest difference between the gates and torch, absolute and in ulp,
            where both are finite.
        ulp, torch_ulp: the largest distance of the gates, and of torch, from the true value.
        within: a range of x: where no gate underflows, and as far beyond as the gates are no
            further off than there. Infinite where it reaches the last number; None if unknown.
        ulp_within, torch_within: `ulp` and `torch_ulp` in that range.
        special: (x, gates, torch) where x is infinite or NaN and the two differ.
    """

    name: str
    dtype: str
    device: str
    backend: str
    torch: str
    vector: str
    inputs: int
    complete: bool
    interrupted: bool
    sup: float = 0.0
    differs: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    torch_nan: int = 0
    torch_infinite: int = 0
    loose: int = 0
    beyond: int = 0
    error: Worst = _NONE
    distance: Worst = _NONE
    ulp: Worst = _NONE
    torch_ulp: Worst = _NONE
    within: tuple[float, float] | None = None
    ulp_within: Worst = _NONE
    torch_within: Worst = _NONE
    special: tuple[tuple[str, str, str], ...] = ()

    @property
    def holds(self) -> bool:
        """Whether what the instance claims was found at every input that was tried."""
        return self.inputs > 0 and not (self.beyond or self.nan)

    @property
    def made_here(self) -> bool:
        """Whether it was made with this torch on such a device, so that every digit is the same."""
        here = str(torch.__version__), vector(torch.device(self.device))
        return (self.torch, self.vector) == here

    def __str__(self) -> str:
        how = f"by {self.backend} on {self.device}, torch {self.torch}, {self.vector}"
        said = (*_said(self), how)
        lines = (fill(s, WIDTH, initial_indent="  ", subsequent_indent="    ") for s in said)
        return "\n".join([fill(self._covered, WIDTH, subsequent_indent="  "), *lines])

    def __repr__(self) -> str:
        return f"<Proof: {self._covered}, {'holds' if self.holds else 'WRONG'}>"

    @property
    def _covered(self) -> str:
        covered = f"all {self.inputs:,} finite inputs"
        if not self.complete:
            what = "interrupted" if self.interrupted else "a sample"
            covered = f"{self.inputs:,} inputs ({what}, which is no proof)"
        return f"{self.name}, {self.dtype}: {covered}"

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values; a number that JSON has not (inf, nan) is a string."""
        return {**jsonable(asdict(self)), "holds": self.holds}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Proof:
        """The inverse of `to_dict`."""
        values = {f.name: data[f.name] for f in fields(cls)}
        worst = [f.name for f in fields(cls) if isinstance(f.default, Worst)]
        values |= {name: Worst(*map(float, values[name])) for name in worst}
        values["within"] = values["within"] and tuple(map(float, values["within"]))
        values["special"] = tuple(map(tuple, values["special"]))
        return cls(**values)


def table(proofs: Sequence[Proof]) -> str:
    """One line for each proof, within 100 columns."""
    header = ("instance", "type", "inputs", "differ", "max |d|", "ulp", "torch's", "for", "holds")
    return "\n".join(columns([header, *map(_cells, proofs)]))


def _cells(p: Proof) -> tuple[str, ...]:
    inputs = "all" if p.complete else f"{p.inputs:,}"
    exact = ("", "", "") if p.sup else (_short(p.ulp_within), _short(p.torch_within), _span(p))
    holds = "yes" if p.holds else "NO"
    return p.name, p.dtype, inputs, f"{p.differs:,}", _short(p.error), *exact, holds


def _short(worst: Worst) -> str:
    return f"{worst.value:.3g}"


def _span(p: Proof) -> str:
    """The range of x that `ulp_within` is for."""
    if p.within is None:
        return "those tried" if p.interrupted else "every x"
    low, high = (f"{_exactly(x, getattr(torch, p.dtype))}" for x in p.within)
    return {
        (True, True): "every x",
        (True, False): f"x <= {high}",
        (False, True): f"x >= {low}",
        (False, False): f"{low} to {high}",
    }[math.isinf(p.within[0]), math.isinf(p.within[1])]


def _said(p: Proof) -> Iterator[str]:
    """What a proof says, in sentences."""

    def at(worst: Worst, what: str = "") -> str:
        return f"{worst.value:.3g}{what} (x = {_exactly(worst.at, getattr(torch, p.dtype))})"

    yield (
        f"The gates differ from torch on {p.differs:,} inputs ({p.differs / p.inputs:.2%}), by at "
        f"most {at(p.error)} and {at(p.distance, ' ulp')}."
        if p.differs
        else "The gates equal torch on every input."
        if p.inputs
        else "Nothing was tried."
    )
    if p.sup:
        yield f"The claim is an error of at most {p.sup:.3g}."
    elif p.inputs:
        yield (
            f"From float64, for {_span(p)}: the gates {at(p.ulp_within, ' ulp')}, "
            f"torch {at(p.torch_within, ' ulp')}."
        )
        if p.ulp.value > p.ulp_within.value or p.torch_ulp.value > p.torch_within.value:
            yield f"Elsewhere: the gates {at(p.ulp, ' ulp')}, torch {at(p.torch_ulp, ' ulp')}."
    if p.zeros:
        yield f"Inputs at which only the sign of zero differs: {p.zeros:,}."
    for who, other, what, count in (
        ("the gates are", "torch is", "NaN", p.nan),
        ("the gates are", "torch is", "infinite", p.infinite),
        ("torch is", "the gates are", "NaN", p.torch_nan),
        ("torch is", "the gates are", "infinite", p.torch_infinite),
    ):
        if count:
            yield f"On {count:,} inputs {who} {what} and {other} not."
    if p.loose:
        limit = LIMITS["element"][p.dtype != "float32"]
        claim = f"{limit} ulp" + (f" and {p.sup:.3g}" if p.sup else "")
        yield f"On {p.loose:,} inputs the gates are over {claim} further from float64 than torch."
    if p.beyond:
        yield f"WRONG: on {p.beyond:,} inputs that is more than their steps round."
    for x, gates, torchs in p.special:
        yield f"At x = {x} the gates give {gates}, torch {torchs}."


def _exactly(x: float, dtype: torch.dtype) -> str:
    """The fewest digits that mean this number of a type."""
    texts = (f"{x:.{digits}g}" for digits in range(1, 18))
    return next(s for s in texts if torch.tensor(float(s), dtype=dtype).item() == x)
