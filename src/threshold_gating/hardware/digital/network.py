"""A converted network whose every nonlinearity is computed by the gate unit, in integers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from torch import nn

from threshold_gating.conversion.plan import arguments
from threshold_gating.conversion.plan import run as run_network
from threshold_gating.conversion.watch import Running, copied, evaluating, fresh
from threshold_gating.hardware.digital.format import Format, Unit
from threshold_gating.hardware.digital.keys import FixedKeys
from threshold_gating.hardware.digital.site import FixedGate
from threshold_gating.hardware.physical import Chip, Errors
from threshold_gating.hardware.placement import (
    Body,
    Chosen,
    calibrate,
    check,
    matches,
    place_calls,
    place_modules,
)
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation


class _Digital(Chip):
    """What is put into a network here."""

    __slots__ = ()

    def gate(self, name: str, kind: str, gate: Activation | TG) -> FixedGate:
        return FixedGate(name, kind, gate, self)

    def keys(self, name: str, kind: str) -> FixedKeys:
        return FixedKeys(name, kind, self)


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

    def measure(self, inputs: Any) -> None:
        """Run on inputs and note how far each site's y is from float; `notes` says what is far."""
        args, kwargs = arguments(fresh(inputs))
        for gate in self.gates():
            gate.measured = True
        try:
            with evaluating(self), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # notes say it
                self(*args, **kwargs)
        finally:
            for gate in self.gates():
                gate.measured = False

    def notes(self) -> list[str]:
        """Sites whose y was cut off in any run, or moved far by rounding where it was measured."""
        return [note for gate in self.gates() for note in gate.notes()]

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


_FIELDS = {field.name for field in fields(Unit)} - {"bits"}


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
    if unknown := sorted(set(units) - _FIELDS):
        raise ValueError(
            f"fixed_point.convert: {unknown[0]} is no field of Unit that all sites may be given; "
            f"these are {', '.join(sorted(_FIELDS))}. The bits of x and y are the second argument: "
            "fixed_point.convert(model, 12, inputs=x)."
        )
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
    made.measure(inputs)
    made.train(model.training)
    if kept:
        warnings.warn(f"fixed_point.convert: stays as it is: {', '.join(kept)}.", stacklevel=2)
    for note in made.notes():
        warnings.warn(f"fixed_point.convert: {note}.", stacklevel=2)
    return made
