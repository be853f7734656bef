"""Cells, area and delay of a circuit: yosys and abc on the cells of a foundry, and on an FPGA.

No cells are shipped. `TG_PDK` names a folder with Liberty files, as `hardware.models` says; those
of SkyWater 130 nm are sky130_fd_sc_hd at 25 C and 1.8 V. Delays are those of the mapped gates
without wires: abc's own, and OpenSTA's where it is installed.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from threshold_gating.hardware.digital.bench import run_tool, tool
from threshold_gating.hardware.models import PDK, ModelsMissingError, roots

LIBERTY = {
    "sky130": "sky130_fd_sc_hd__tt_025C_1v80.lib",
    "sg13g2": "sg13g2_stdcell_typ_1p20V_25C.lib",
}
# yosys' own script for Liberty cells, and the delay of what came out.
_ABC = "+strash;ifraig;scorr;dc2;dretime;strash;&get,-n;&dch,-f;&nf;&put;topo;stime,-p"


class Netlist(NamedTuple):
    """What synthesis made of a module."""

    cells: int
    flops: int
    area: float  # um^2, of cells
    delay: float  # ns, of the longest path between registers, by abc
    by_sta: float | None  # ns, of all of it, by OpenSTA


class Fpga(NamedTuple):
    """iCE40: 4-input tables, flip-flops, carries and multipliers; without `dsp` all is tables."""

    luts: int
    flops: int
    carries: int
    dsps: int


def liberty(cells: str) -> Path:
    """The Liberty file of a set of cells, plain or packed."""
    if cells not in LIBERTY:
        raise ValueError(f"no cells {cells!r}; there are {', '.join(LIBERTY)}.")
    for root in roots():
        for name in (LIBERTY[cells], f"{LIBERTY[cells]}.gz"):
            found = next(iter(sorted(root.rglob(name))), None)
            if found is not None:
                return found
    where = f"{PDK}={os.environ[PDK]}" if os.environ.get(PDK) else f"{PDK} is not set"
    raise ModelsMissingError(
        f"the cells {cells} were not found: {where}, and there is no {LIBERTY[cells]} there. Set "
        f"{PDK} to a folder that holds it, also as .gz."
    )


def synthesise(
    text: str, top: str, parameters: dict[str, int] | None = None, cells: str = "sky130"
) -> Netlist:
    """Area and delay of a module on standard cells."""
    with tempfile.TemporaryDirectory(prefix="tg-rtl-") as name:
        folder = Path(name)
        library = _unpacked(liberty(cells), folder)
        (folder / "in.v").write_text(text, "utf-8")
        script = (
            f"{_read(top, parameters)}; synth -flatten; rename -top {top}; "
            f"dfflibmap -liberty {library}; abc -liberty {library} -script {_ABC}; opt_clean; "
            f"stat -liberty {library}; splitnets; opt_clean -purge; "
            "write_verilog -noattr out.v"
        )
        said = run_tool([tool("yosys"), "-p", script], folder)
        area = float(re.findall(r"Chip area for .*?: ([\d.]+)", said)[-1])
        delays = re.findall(r"Delay = *([\d.]+) ps", said)
        report = said[said.rindex("Number of cells:") :]
        flops = sum(int(n) for n in re.findall(r"\S*_df\S* +(\d+)", report))
        return Netlist(
            int(re.findall(r"Number of cells: +(\d+)", report)[0]),
            flops,
            area,
            float(delays[-1]) / 1000 if delays else 0.0,
            _timed(folder, library, top, bool(flops)),
        )


def _read(top: str, parameters: dict[str, int] | None) -> str:
    """Modules are made when they are used: a unit of hard gates comes without a sigmoid."""
    given = " ".join(f"-chparam {key} {value}" for key, value in (parameters or {}).items())
    return f"read_verilog -sv -defer in.v; hierarchy -top {top} {given}"


def _unpacked(path: Path, folder: Path) -> str:
    if path.suffix != ".gz":
        return str(path)
    out = folder / path.stem
    with gzip.open(path) as packed, out.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return out.name


def _timed(folder: Path, library: str, top: str, clocked: bool) -> float | None:
    """The longest path by OpenSTA, with flip-flops' own times; None where it is not installed."""
    program = shutil.which("sta")
    if program is None:
        return None
    on = "[get_ports clk]" if clocked else ""  # without one the clock is only for reference
    commands = f"""read_liberty {library}
read_verilog out.v
link_design {top}
create_clock -name tick -period 1000 {on}
set_input_delay 0 -clock tick [all_inputs]
set_output_delay 0 -clock tick [all_outputs]
report_checks -path_delay max -format full -digits 4
exit
"""
    (folder / "sta.tcl").write_text(commands)
    said = run_tool([program, "-no_splash", "-exit", "sta.tcl"], folder)
    found = re.search(r"([-\d.]+) +slack \(MET\)", said)
    return 1000 - float(found[1]) if found else None


def on_ice40(
    text: str, top: str, parameters: dict[str, int] | None = None, dsp: bool = False
) -> Fpga:
    """Parts of an iCE40 FPGA that a module takes."""
    with tempfile.TemporaryDirectory(prefix="tg-rtl-") as name:
        folder = Path(name)
        (folder / "in.v").write_text(text, "utf-8")
        script = (
            f"{_read(top, parameters)}; rename -top {top}; "
            f"synth_ice40 {'-dsp ' if dsp else ''}-top {top}; stat"
        )
        said = run_tool([tool("yosys"), "-p", script], folder)
    report = said[said.rindex("Number of cells:") :]
    parts = ("LUT4", "DFF", "CARRY", "MAC16")  # as in `Fpga`
    return Fpga(*(sum(map(int, re.findall(rf"SB_{p}\S* +(\d+)", report))) for p in parts))
