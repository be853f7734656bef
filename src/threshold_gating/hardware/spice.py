"""Netlists as text, of transistors, R, C and independent sources, and ngspice to run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from threshold_gating.hardware import models as pdk
from threshold_gating.hardware.models import Size

# A floor of 1e-15 S and 1e-16 A: the currents of weak inversion are nanoamperes.
OPTIONS = "reltol=1e-5 gmin=1e-15 abstol=1e-16 method=gear"
CELSIUS = (-55.0, 150.0)
SEEDS = 2**31 - 1  # ngspice has 32 bits for one
INSTALL = "ngspice is not installed: apt-get install ngspice (Debian), brew install ngspice (macOS)"


class SpiceError(RuntimeError):
    """ngspice is missing or did not answer; the message has its own words."""


@dataclass(frozen=True)
class Netlist:
    """Elements as lines of text, the models that they use, and the conditions of a run."""

    title: str
    elements: tuple[str, ...]
    models: str = "sky130"
    corner: str = ""
    celsius: float = 27.0
    seed: int | None = None  # draws mismatch of every device where it is given
    options: str = OPTIONS
    notes: tuple[str, ...] = ()
    parameters: tuple[tuple[str, float], ...] = ()  # of the models, in place of their own

    def __post_init__(self) -> None:
        check(self.elements, self.models)
        low, high = CELSIUS
        if not low <= self.celsius <= high:
            raise ValueError(
                f"transistor models hold from {low:g} to {high:g} C; got {self.celsius:g} C."
            )
        if self.seed is not None and not 1 <= self.seed <= SEEDS:
            raise ValueError(f"a seed of mismatch must be from 1 to {SEEDS}; got {self.seed}.")

    @property
    def at(self) -> str:
        """The corner: the typical one where none is given."""
        return self.corner or pdk.chosen(self.models).corners[0]

    def text(self) -> str:
        """What ngspice reads, whole; `tg spice -o` writes it."""
        reading = pdk.includes(self.models, self.at, mismatch=self.seed is not None)
        lines = [*self._head(), *reading, *self._parameters(), *self.elements, ".end"]
        return "\n".join(lines) + "\n"

    def _parameters(self) -> list[str]:
        return [f".param {name}={value:g}" for name, value in self.parameters]

    def deck(self, commands: Sequence[str]) -> str:
        """What ngspice is run on: the same with the models cut to what is used."""
        cut = pdk.cut(self.models, self.at, self.sizes(), mismatch=self.seed is not None)
        control = [".control", "set filetype=binary", *commands, "quit", ".endc", ".end"]
        lines = [*self._head(), cut, *self._parameters(), *self.elements, *control]
        return "\n".join(lines) + "\n"

    def _head(self) -> list[str]:
        seed = "" if self.seed is None else f" seed={self.seed}"
        notes = [f"* {note}" for note in self.notes]
        return [self.title, *notes, f".option {self.options}{seed}", f".temp {self.celsius:g}"]

    def sizes(self) -> frozenset[Size]:
        """The devices that are used, and their sizes."""
        unit = pdk.chosen(self.models).unit
        found = set()
        for line in self.elements:
            if line[0] in "xX":
                size = dict(re.findall(r"\b(w|l|nf)=([-+.\dea-z]+)", line))
                given = (number(size.get(key, "1"), "m") for key in ("l", "w", "nf"))
                length, width, fingers = given
                found.add(Size(_device(line), width * unit / fingers, length * unit))
        return frozenset(found)

    def count(self) -> dict[str, int]:
        """How many of each device there are, by our names; sources are not counted."""
        names = {model: kind for kind, model in pdk.chosen(self.models).devices.items()}
        parts = [(line[0].lower(), line) for line in self.elements]
        kinds = [names[_device(line)] for letter, line in parts if letter == "x"]
        kinds += [{"r": "res", "c": "cap"}[letter] for letter, _ in parts if letter in "rc"]
        return {kind: kinds.count(kind) for kind in sorted({*kinds})}


def number(text: str, unit: str = "") -> float:
    """A number as SPICE writes it (10n, 1.5meg, 5u), with or without the letter of its unit.

    SPICE itself reads past any letters, so that 10x is 10 and 10nV a current of 10 nA.
    """
    found = re.fullmatch(rf"{_DECIMAL}({'|'.join(_POWER)})?(?:{unit.lower()})?", text.lower())
    if not found:
        raise ValueError(
            f"a number such as 10n, 2.5meg or 1e-7 was expected{f', in {unit}' * bool(unit)}; got "
            f"{text!r}."
        )
    # Decimal: 100 * 1e-9 would be a little more than 1e-7, and beyond a limit of 1e-7.
    return float(Decimal(found[1]).scaleb(_POWER.get(found[2], 0)))


_DECIMAL = r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]{1,3})?)"
_POWER = {"t": 12, "g": 9, "meg": 6, "k": 3, "m": -3, "u": -6, "n": -9, "p": -12, "f": -15}


# Sources that move

Wave = Sequence[tuple[float, float]]  # times in s, and where an input stands, from -1 to 1


def follows(wave: Wave, value: Callable[[float], float]) -> str:
    """The value of a source that is `value` of the wave: a number where it stands still."""
    points = [(t, f"{value(side):.8g}") for t, side in wave]
    if len({level for _, level in points}) == 1:
        return points[0][1]
    return f"pwl({' '.join(f'{t:.9g} {level}' for t, level in points)})"


# What a cell may be made of

_KINDS = {
    "b": "a behavioural source",
    "e": "a controlled voltage source",
    "f": "a controlled current source",
    "g": "a controlled current source",
    "h": "a controlled voltage source",
    "a": "a code model",
    "s": "a switch",
    "w": "a switch",
    "n": "a Verilog-A model",
    "p": "a code model",
    ".": "a directive",
}


def check(elements: Sequence[str], models: str = "sky130") -> None:
    """Refuse whatever would compute in place of a device.

    Allowed are devices of the models (X), R, C, and V and I of numbers. A resistor whose value is
    an expression is a controlled source by another name, and is refused as one.
    """
    devices = set(pdk.chosen(models).devices.values())
    for line in elements:
        kind = line[:1].lower()
        if not line.strip() or "\n" in line:
            raise ValueError(f"one element a line; got {line!r}.")
        if kind == "x" and _device(line) not in devices:
            raise ValueError(
                f"{line!r} calls {_device(line)}, which is no device of {models}; there are "
                f"{', '.join(sorted(devices))}."
            )
        if kind not in "xrcvi":
            what = _KINDS.get(kind, "no device")
            raise ValueError(
                f"{line!r} is {what}; a cell has transistors, R, C and independent sources only."
            )
        if re.search(r"['{}\"]|\b[vi]\s*\(", line.lower()):
            raise ValueError(
                f"{line!r} has an expression for a value; give a number, or it would compute what "
                "the cell is to compute."
            )


def _device(line: str) -> str:
    return [word for word in line.split()[1:] if "=" not in word][-1]


# Running


# What one analysis gave: vectors by the names that were asked for, and the scale as "scale".
Plot = Mapping[str, Tensor]


class Analysis(NamedTuple):
    """A command of ngspice, what to keep of it, and commands before it (such as alter)."""

    command: str
    keep: tuple[str, ...]
    before: tuple[str, ...] = ()


def ngspice() -> str | None:
    """Where ngspice is, or None."""
    return shutil.which("ngspice")


def run(netlist: Netlist, *analyses: Analysis, timeout: float = 1800) -> list[Plot]:
    """Run ngspice on a netlist; one plot for each analysis."""
    program = ngspice()
    if program is None:
        raise SpiceError(f"{INSTALL}.")
    commands: list[str] = []
    files: list[list[tuple[str, tuple[str, ...]]]] = []  # of each analysis: names and their vectors
    for k, (command, keep, before) in enumerate(analyses):
        parts = [keep[n : n + _AT_ONCE] for n in range(0, len(keep), _AT_ONCE)]
        files.append([(f"{k}_{n}.raw", part) for n, part in enumerate(parts)])
        commands += [*before, command, *(f"write {f} {' '.join(part)}" for f, part in files[-1])]
    with tempfile.TemporaryDirectory(prefix="tg-spice-") as folder:
        said = _run(program, Path(folder), netlist.deck(commands), netlist.title, timeout)
        every = [Path(folder, name) for parts in files for name, _ in parts]
        # ngspice ends with 0 whatever happened: what it wrote and said is looked at.
        bad = [line.strip() for line in said.splitlines() if _BAD.search(line)]
        if bad or not all(path.is_file() for path in every):
            words = " / ".join(bad[:4]) or said[-300:].strip()
            raise SpiceError(f"ngspice failed on {netlist.title}: {words}")
        return [
            {key: v for name, keep in parts for key, v in _plot(Path(folder, name), keep).items()}
            for parts in files
        ]


_AT_ONCE = 200  # vectors; `write` refuses a thousand


def batches(copies: int, seed: int) -> list[tuple[int, int]]:
    """Copies of a whole cell as netlists of at most 20: how many each has, and its seed.

    ngspice's time grows with the square of such a netlist, or faster; 20 cells are near the least
    time a cell.
    """
    sizes = [min(_CELLS_AT_ONCE, copies - n) for n in range(0, copies, _CELLS_AT_ONCE)]
    return [(size, seed + k * _NEXT_SEED) for k, size in enumerate(sizes)]


_CELLS_AT_ONCE = 20
_NEXT_SEED = 100_003  # from batch to batch: no seed near the user's own is drawn twice


def _run(program: str, folder: Path, deck: str, title: str, timeout: float) -> str:
    (folder / "deck.cir").write_text(deck, "utf-8")
    words = [program, "-n", "-b", "deck.cir"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise SpiceError(f"ngspice took longer than {timeout:g} s on {title}.") from None
    return done.stdout + done.stderr


_BAD = re.compile(
    r"(?i)^\s*(fatal|error)|singular matrix|no convergence|timestep too small|doanalyses|"
    r"could not find a valid modelname|no such vector|is not available or has|"
    r"run simulation.s. aborted"
)


def _plot(path: Path, names: Sequence[str]) -> Plot:
    """A raw file: a header of text, then rows of doubles (pairs of them where complex)."""
    head, _, data = path.read_bytes().partition(b"Binary:\n")
    text = head.decode()
    columns = int(re.search(r"No\. Variables:\s*(\d+)", text)[1])  # type: ignore[index]
    points = int(re.search(r"No\. Points:\s*(\d+)", text)[1])  # type: ignore[index]
    kind = torch.complex128 if "complex" in text else torch.float64
    values = torch.frombuffer(bytearray(data), dtype=kind)[: columns * points]
    table = values.view(points, columns).T
    if columns == len(names) + 1:
        return dict(zip(("scale", *names), table, strict=True))
    return dict(zip(names, table, strict=True))
