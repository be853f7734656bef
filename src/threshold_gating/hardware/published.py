"""The energy model against designs that were published, and two claims in its currency.

`python -m threshold_gating.hardware.published` prints all of it.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from threshold_gating.hardware import adc, devices
from threshold_gating.hardware.assumptions import Assumptions
from threshold_gating.hardware.cited import cited, source

_EVEN = "ours at activity 1/4: half of the bits on, mean conductance half of 25 uS, 0.2 V"
# Inputs spread evenly have mean x^2 / max x^2 = 1/3; normal weights that end at 2.4 sigma have
# mean |w| / max |w| = 1/3.
ACTIVITY = 1 / 9
KULL = "row of 2013 in the ADC survey: SAR, 6.2 effective bits, 1.2 GHz, 32 nm"


@dataclass(frozen=True)
class Check:
    """A published figure and ours."""

    what: str
    published: float
    ours: float
    unit: str
    source: str

    @property
    def off(self) -> float:
        """Ours over the published one, less one."""
        return self.ours / self.published - 1

    def __str__(self) -> str:
        numbers = f"{self.published:9.4g} {self.ours:9.4g} {self.unit:<5} {self.off:+7.0%}"
        return f"{self.what:<38} {numbers}"


def checks() -> list[Check]:
    """ISAAC's converter, cells and shares; a converter in silicon; a chip in silicon."""
    eight = adc.energy(8, 1.2e9, 32)
    adcs = 8 * 12 * 168  # in an array each, arrays of a unit, units of a tile, tiles
    ours = eight.value * 1e-12 * 1.2e9 * adcs  # W
    theirs, chip = cited("ISAAC ADC power") / 8e3 * adcs, cited("ISAAC chip power")
    converter, array = source("ISAAC ADC power", "ISAAC ADC area"), source("ISAAC array power")
    per_unit = Assumptions(adc_bits=8, dac_bits=1).figures()
    drivers = 1024 * 1e7 * per_unit["DAC"].value * 1e-9  # mW
    cells = 8 * 128**2 * 1e7 * per_unit["crossbar, converted"].value * 1e-9  # mW at activity 1
    unit = 8 * eight.value * 1.2  # mW
    parts = [cited(f"ISAAC {part} power") for part in ("ADC", "DAC", "array")]
    return [
        Check(
            "ADC, 8 bits, 1.2 GHz, 32 nm",
            *(cited("ISAAC ADC power") / 8 / 1.2, eight.value, "pJ", converter),
        ),
        Check(
            "ADC share of chip power",
            *(theirs / chip, ours / (chip - theirs + ours), ""),
            f"{source('ISAAC chip power')}; the rest of the chip as published",
        ),
        Check(
            "cells of a unit, 8 x 128 x 128",
            *(cited("ISAAC array power"), cells / 4, "mW", f"{array}; {_EVEN}"),
        ),
        Check(
            "ADC share of ADC, DAC and cells",
            *(parts[0] / sum(parts), unit / (unit + drivers + cells / 4), "", f"{array}; {_EVEN}"),
        ),
        Check(
            "ADC area, same",
            *(cited("ISAAC ADC area") / 8, adc.area(8, 1.2e9, 32).value, "um^2", converter),
        ),
        Check("ADC, 6 bits, 1.2 GHz, 32 nm", 2.55, adc.energy(6, 1.2e9, 32).value, "pJ", KULL),
        *(
            Check(
                f"256 x 256 product, {what}",
                *(2 * 256**2 / cited(name) / 1e3, _hermes(), "nJ", source(name)),
            )
            for what, name in _SILICON.items()
        ),
    ]


_SILICON = {
    "HERMES, 14 nm": "HERMES efficiency",
    "64 cores, 1 phase": "chip efficiency, one phase",
    "64 cores, 4 phases": "chip efficiency, four phases",
}


def _hermes() -> float:
    """nJ of one product: a converter a column, inputs as pulses of up to 127 ns."""
    settings = Assumptions(
        node=14, rows=256, columns=256, adc_bits=8, dac_bits=8, adc_rate=7.7e6, read=127e-9
    )
    f = settings.figures()
    cells = 256**2 * ACTIVITY * f["crossbar, converted"].value
    return (256 * (f["ADC, regression"].value + f["DAC"].value) + cells) / 1e3


@dataclass(frozen=True)
class TierW:
    """A square layer of `width` with K branches against one dense layer, on tiles of `rows`."""

    width: int
    K: int
    rows: int

    @property
    def dense(self) -> int:
        """Conversions of a vector by a dense layer."""
        return self.width * math.ceil(self.width / self.rows)

    @property
    def branches(self) -> int:
        """Conversions by tier W, which has K rows for each input."""
        return self.width * math.ceil(self.K * self.width / self.rows)

    @property
    def equal_width(self) -> int:
        """The widest dense square layer that converts no more than tier W."""
        width = self.width
        while (width + 1) * math.ceil((width + 1) / self.rows) <= self.branches:
            width += 1
        return width


def tier_w(widths: tuple[int, ...] = (32, 64, 128, 256, 512, 768), K: int = 2) -> list[TierW]:
    """At tiles of 128 and 512 rows."""
    return [TierW(width, K, rows) for rows in (128, 512) for width in widths]


HBM = cited("HBM2 access")
BANDWIDTH = cited("H100 bandwidth")


@dataclass(frozen=True)
class Attention:
    """One head, one new token, `keys` of them, `width` numbers each; energies in pJ."""

    gpu: float  # reading keys and values from memory once in 16 bits: the least a GPU can do
    digital: float  # crossbars, scores converted, softmax in activation units
    analog: float  # crossbars, gates and tree of softplus cells analog
    gpu_seconds: float
    analog_seconds: float

    @property
    def orders(self) -> tuple[float, float]:
        """Of energy and of time that analog is below the GPU's least."""
        return (
            math.log10(self.gpu / self.analog),
            math.log10(self.gpu_seconds / self.analog_seconds),
        )


def attention(
    keys: int = 1024, width: int = 64, heads: int = 12, settings: Assumptions | None = None
) -> Attention:
    """Leroux et al. (2025, gain cells against GPUs) with the figures of `settings`.

    Keys and values are cells like any others; writing them costs a DAC each.
    """
    a = settings or Assumptions()
    f = {name: figure.value for name, figure in a.figures().items()}
    depth, across = math.ceil(keys / a.rows), math.ceil(keys / a.columns)
    below = math.ceil(width / a.rows)
    macs = keys * width * ACTIVITY  # of each of the two products; converters read the second
    ends = (2 * width + width * across) * f["DAC"] + width * depth * f["ADC, survey median"]
    between = keys * below * f["ADC, survey median"] + keys * f["DAC"] * math.ceil(
        width / a.columns
    )
    bits = 2 * keys * width * 16
    steps = 2 + 2 * math.ceil(math.log2(keys))  # a product, gates, and the tree up and down
    return Attention(
        gpu=bits * HBM,
        digital=ends + between + keys * f["activation unit"] + 2 * macs * f["crossbar, converted"],
        analog=ends
        + 4 * keys * f["gate"]
        + macs * (f["crossbar, gated"] + f["crossbar, converted"]),
        gpu_seconds=heads * bits / 8 / BANDWIDTH,
        analog_seconds=steps * a.settling + a.read,
    )


def main() -> None:
    """Print every comparison."""
    print(f"{'what':<38} {'published':>9} {'ours':>9} {'':<5} {'off':>7}")
    for check in checks():
        print(check)
        print(textwrap.fill(check.source, 96, initial_indent="    ", subsequent_indent="    "))
    print("\ntier W, K = 2: conversions of a vector, and the dense width that converts as much")
    print("rows  width   dense  tier W  dense width  in cells of tier W")
    for t in tier_w():
        cells = t.equal_width**2 / (t.K * t.width**2)
        print(f"{t.rows:4} {t.width:6} {t.dense:7} {t.branches:7} {t.equal_width:12} {cells:12.2f}")
    print(
        "\nattention, 1024 keys of 64: pJ for a token and head; orders below a GPU's memory reads"
    )
    print(
        f"Leroux et al.: energy {cited('Leroux energy'):g}, time {cited('Leroux latency'):g} "
        f"orders; {source('Leroux energy')}"
    )
    for name in devices.presets():
        found = attention(settings=Assumptions(preset=name))
        energy, time = found.orders
        print(
            f"{name:<16} GPU {found.gpu:9.3g}  digital {found.digital:8.3g}  analog "
            f"{found.analog:8.3g}  energy {energy:4.1f}  time {time:5.1f}"
        )


if __name__ == "__main__":
    main()
