"""`Figure`: a number of hardware with its unit, node, rate and source; two nodes never add up."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

NODES = (3.0, 350.0)  # nm: the processes that the converters were published in


@dataclass(frozen=True)
class Figure:
    """A number that belongs to one process.

    Args:
        value, unit: the number.
        node: the process, in nm.
        source: where the number comes from.
        rate: how often a second it happens, in Hz; None where that does not matter.
        slope: it grows as node^slope. None: no rule is known, so it cannot be scaled.
        why: the reason of the slope.
    """

    value: float
    unit: str
    node: float
    source: str
    rate: float | None = None
    slope: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value >= 0):
            raise ValueError(f"Figure: the value must be 0 or more; got {self.value!r}.")
        check_node(self.node)
        if not (self.unit and self.source):
            raise ValueError(f"Figure: {self.value:g} needs a unit and a source.")

    def at(self, node: float) -> Figure:
        """The same in another process."""
        check_node(node)
        if node == self.node:
            return self
        if self.slope is None:
            raise ValueError(
                f"{self.value:g} {self.unit} is of {self.node:g} nm ({self.source}); there is no "
                f"rule to scale it to {node:g} nm."
            )
        value = self.value * (node / self.node) ** self.slope
        said = f"{self.source}; {self.value:.4g} {self.unit} at {self.node:g} nm"
        scaled = f"scaled by (node ratio)^{self.slope:.2g}: {self.why}"
        return replace(self, value=value, node=node, source=f"{said}, {scaled}")

    def __add__(self, other: Figure) -> Figure:
        if self.unit != other.unit:
            raise ValueError(f"{self.unit} and {other.unit} do not add up.")
        if self.node != other.node:
            raise ValueError(
                f"figures of {self.node:g} nm and {other.node:g} nm do not add up; scale one with "
                "Figure.at(node) first."
            )
        source = " + ".join(dict.fromkeys((self.source, other.source)))
        return Figure(self.value + other.value, self.unit, self.node, source)

    def __mul__(self, times: float) -> Figure:
        return replace(self, value=self.value * times)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_number(value: Any) -> bool:
    """Whether it is an int or a float, which True is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_node(node: float) -> None:
    """Refuse a process that no figure is known of."""
    low, high = NODES
    if not low <= node <= high:
        raise ValueError(f"the node must be from {low:g} to {high:g} nm; got {node:g}.")
