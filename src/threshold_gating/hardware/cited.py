"""Numbers of others that the energy model rests on: each with unit, source and how it was checked.

`python -m threshold_gating.hardware.cited` prints them.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

# How a number was checked, the surest first.
CERTAINTY = {
    "abstract": "read in the abstract of the paper",
    "quoted": "read as a quotation of the paper",
    "transcribed": "read in a transcription of the paper's table, in the code of another project",
    "listed": "read in lists that cite the maker's data sheet",
    "unconfirmed": "from memory of the paper; no copy was found to check it against",
}


class Cited(NamedTuple):
    """A published number; `value` is in `unit`, as the source has it."""

    value: float
    unit: str
    source: str
    certainty: str

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.certainty})"


ISAAC = "Shafiee et al., ISAAC, ISCA 2016, Table I (a model, no silicon)"
_COPY = f"{ISAAC}, as in Accelergy-Project/hwcomponents-library, isaac.py"
_HERMES = "Khaddam-Aljameh et al., HERMES-Core, JSSC 2022 (silicon, 14 nm)"
_CHIP = "Le Gallo et al., A 64-core chip, Nature Electronics 2023 (silicon, 14 nm)"
_LEROUX = "Leroux et al., Nature Computational Science 5, 2025"

NUMBERS = {
    "ISAAC ADC power": Cited(16.0, "mW for 8 of 8 bits at 1.2 GHz", _COPY, "transcribed"),
    "ISAAC ADC area": Cited(9600.0, "um^2 for 8", _COPY, "transcribed"),
    "ISAAC DAC power": Cited(4.0, "mW for 1024 of one bit, each 100 ns", _COPY, "transcribed"),
    "ISAAC DAC area": Cited(170.0, "um^2 for 1024", _COPY, "transcribed"),
    "ISAAC array power": Cited(2.4, "mW for 8 of 128 x 128", ISAAC, "unconfirmed"),
    "ISAAC array area": Cited(200.0, "um^2 for 8", ISAAC, "unconfirmed"),
    "ISAAC sigmoid power": Cited(0.52, "mW for 2", ISAAC, "unconfirmed"),
    "ISAAC sigmoid area": Cited(600.0, "um^2 for 2", ISAAC, "unconfirmed"),
    "ISAAC chip power": Cited(65.8, "W for 168 tiles of 12 units", ISAAC, "unconfirmed"),
    "HERMES efficiency": Cited(10.5, "TOPS/W, 256 x 256", _HERMES, "abstract"),
    "chip efficiency, one phase": Cited(9.76, "TOPS/W, 8-bit input and output", _CHIP, "abstract"),
    "chip efficiency, four phases": Cited(
        2.48, "TOPS/W, 8-bit input and output", _CHIP, "abstract"
    ),
    "HBM2 access": Cited(
        3.92, "pJ a bit", "O'Connor et al., Fine-Grained DRAM, MICRO 2017", "quoted"
    ),
    "H100 bandwidth": Cited(3.35e12, "bytes a second, SXM, HBM3", "NVIDIA, H100", "listed"),
    "Leroux latency": Cited(2.0, "orders below a GPU, up to", _LEROUX, "abstract"),
    "Leroux energy": Cited(4.0, "orders below a GPU, up to", _LEROUX, "abstract"),
}


def cited(name: str) -> float:
    """The value of a number."""
    return NUMBERS[name].value


def source(*names: str) -> str:
    """Where numbers of one source come from, and how they were checked."""
    kinds = sorted({NUMBERS[name].certainty for name in names})
    (origin,) = {NUMBERS[name].source for name in names}
    return f"{origin}; {', '.join(kinds)}"


def main() -> None:
    """Print every number with its source."""
    for name, number in NUMBERS.items():
        print(f"{name:<29} {number.value:<10g} {number.unit}")
        said = f"{number.source}: {CERTAINTY[number.certainty]}"
        print(textwrap.fill(said, 96, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    main()
