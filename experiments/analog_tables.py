"""The tables and pictures of docs/analog_networks.md, from the rows that were measured.

    python -m experiments.analog_tables                     write them again from the rows kept
    python -m experiments.analog_tables --gather FOLDER     keep the rows of analog_networks first

Rows are kept in docs/analog_networks.json: the figure of every chip, by network and section. A
cell of a table is the mean over chips, with the lowest and the highest in brackets.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.analog_networks import CELSIUS, PRESETS, TIMES
from experiments.evidence.common import ROOT

PAGE, KEPT = ROOT / "docs" / "analog_networks.md", ROOT / "docs" / "analog_networks.json"
IMAGES = ROOT / "docs" / "images"
TITLES = {
    "resnet20": "ResNet-20",
    "mobilenet-v2": "MobileNetV2",
    "char-lstm": "character LSTM",
    "memory-gru": "memory GRU",
    "nsnet2": "NSNet2",
    "stories260k": "stories260K",
    "smollm2": "SmolLM2",
}
MARK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
Rows = dict[str, Any]


# Rows


def gathered(folder: Path) -> Rows:
    """What `analog_networks` wrote, a network a file; rows that failed are left out, and named."""
    found: Rows = {}
    for name in TITLES:
        path = folder / f"{name}.jsonl"
        for row in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
            net = found.setdefault(name, {"metric": row["metric"], "rows": {}, "sites": {}})
            if row["section"] == "sites":
                net |= {"samples": row["samples"], "device": row["device"]}
                net["sites"][row["what"]] = [_site(site) for site in row["sites"]]
            elif "error" in row:
                print(f"left out: {name}, {row['what']}: {row['error']}")
            else:
                section = net["rows"].setdefault(row["section"], {})
                section[row["what"]] = [float(f"{value:.5g}") for value in row["values"]]
                if "numbers" in row:
                    net.setdefault("storage", {})[row["what"]] = row["numbers"]
    return found


def _site(site: Rows) -> Rows:
    keys = ("name", "kind", "gates", "rms", "largest", "volts", "sharpness", "sigma_theta")
    return {k: _short(site[k]) for k in (*keys, "clipped")}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Found:
    """The rows of one network."""

    def __init__(self, name: str, held: Rows) -> None:
        self.name, self.held = name, held
        self.title = TITLES[name]
        self.digits = 1 if "%" in held["metric"] else 2 if "dB" in held["metric"] else 3

    def values(self, section: str, what: str) -> list[float] | None:
        return self.held["rows"].get(section, {}).get(what)

    def cell(self, section: str, what: str) -> str:
        """The mean and the band; a dash where it was not measured."""
        values = self.values(section, what)
        if not values:
            return "-"
        mean = self.said(sum(values) / len(values))
        low, high = self.said(min(values)), self.said(max(values))
        return mean if low == high else f"{mean} ({low} to {high})"

    def said(self, value: float) -> str:
        """With the digits of the metric; fewer of a perplexity that has gone."""
        if abs(value) >= 10_000:
            return f"{value:.0e}"
        return f"{value:.0f}" if abs(value) >= 100.5 else f"{value:.{self.digits}f}"

    @property
    def ideal(self) -> str:
        return self.cell("errors", "ideal")

    @property
    def is_hard(self) -> bool:
        return self.values("errors", "tau RMS = 8") is not None


# Tables

Table = list[list[str]]


def errors(kept: Sequence[Found]) -> Table:
    sizes = (("theta", (0.05, 0.1, 0.2, 0.4)), ("offset", (0.02, 0.05, 0.1, 0.2)))
    asked = [f"{kind} {size:g}" for kind, every in sizes for size in every]
    lines = [["network", "ideal", *asked]]
    return lines + [[f.title, f.ideal, *(f.cell("errors", a) for a in asked)] for f in kept]


def others(kept: Sequence[Found]) -> Table:
    sizes = (("noise", (0.05, 0.1, 0.2)), ("tail", (0.02, 0.05, 0.1)))
    asked = [f"{kind} {size:g}" for kind, every in sizes for size in every]
    asked += [f"tau RMS = {n}" for n in (16, 8, 4)]
    lines = [["network", *asked]]
    return lines + [[f.title, *(f.cell("errors", a) for a in asked)] for f in kept]


def presets(kept: Sequence[Found]) -> Table:
    lines = [["network", "preset", "largest input of hard gates", "curve alone", "all errors"]]
    for f in kept:
        for name in PRESETS:
            for level in ("400 mV", "900 mV") if f.is_hard else ("",):
                what = f"{name}, {level}" if level else name
                cells = [f.cell("presets", x) for x in (f"{what}: curve alone", what)]
                lines.append([f.title, f"`{name}`", level or "no hard gate", *cells])
    return lines


def millivolts(kept: Sequence[Found]) -> Table:
    asked = [(kind, size) for kind in ("theta", "offset") for size in (2, 5, 10, 20, 50)]
    lines = [["network", "preset", *(f"{kind} {size} mV" for kind, size in asked)]]
    for f in kept:
        for name in PRESETS:
            cells = [f.cell("millivolts", f"{name}, {kind} {size} mV") for kind, size in asked]
            lines.append([f.title, f"`{name}`", *cells])
    return lines


def temperature(kept: Sequence[Found]) -> Table:
    lines = [["network", "preset", *(f"{c:g} C" for c in CELSIUS)]]
    for f in kept:
        for name in PRESETS:
            cells = [f.cell("temperature", f"{name}, {c:g} C") for c in CELSIUS]
            lines.append([f.title, f"`{name}`", *cells])
    return lines


def converters(kept: Sequence[Found]) -> Table:
    bits = (4, 5, 6, 7, 8)
    lines = [["network", "chip", *(f"{n} bits" for n in bits)]]
    for f in [f for f in kept if "converters" in f.held["rows"]]:
        for chip, before in (("ideal", ""), ("`sky130-npn`, cells 2 %", _NPN)):
            cells = [f.cell("converters", f"{before}ADC {n} bits") for n in bits]
            lines.append([f.title, chip, *cells])
    return lines


_NPN = "sky130-npn, programming 0.02, "


def cells(kept: Sequence[Found]) -> Table:
    sizes = [f"programming {size:g} g_max" for size in (0.01, 0.02, 0.05)]
    times = [f"programming 0.01, drift {name}" for name in TIMES]
    lines = [["network", "cells 1 %", "2 %", "5 %", *(f"1 %, after {t}" for t in TIMES)]]
    with_cells = [f for f in kept if "cells" in f.held["rows"]]
    return lines + [[f.title, *(f.cell("cells", a) for a in (*sizes, *times))] for f in with_cells]


def tuning(kept: Sequence[Found]) -> Table:
    lines = [["network", "chips", "as made", "theta tuned", "tau and theta tuned", "ideal"]]
    for f in kept:
        rows = f.held["rows"].get("tuning", {})
        for what in [what for what in rows if "tuned" not in what]:
            tuned = [f.cell("tuning", f"{what}: {p} tuned") for p in ("theta", "tau and theta")]
            lines.append([f.title, what, f.cell("tuning", what), *tuned, f.ideal])
    return lines


def bits(kept: Sequence[Found]) -> Table:
    trims = ("no trim", *(f"{n} bits" for n in (1, 2, 3, 4, 6)))
    lines = [["network", "one gate a", *trims, "numbers to store"]]
    for f in kept:
        for share in ("layer", "channel", "neuron"):
            asked = [f"theta 0.4, one gate a {share}, {trim}" for trim in trims]
            if any(f.values("bits", a) for a in asked):
                stored = f.held.get("storage", {}).get(asked[-1])
                count = "-" if stored is None else f"{stored:,}"
                lines.append([f.title, share, *(f.cell("bits", a) for a in asked), count])
    return lines


def sensitivity(kept: Sequence[Found]) -> Table:
    lines = [["network", "the most sensitive sites", "the least"]]
    for f in kept:
        rows = f.held["rows"].get("sensitivity", {})
        better = -1 if f.held["metric"] in ("perplexity", "bits/char") else 1
        order = sorted(rows, key=lambda name: better * sum(rows[name]) / len(rows[name]))
        said = [f"`{name}` {f.cell('sensitivity', name)}" for name in order]
        if said:
            lines.append([f.title, ", ".join(said[:4]), ", ".join(said[:3:-1][:2])])
    return lines


def attention(kept: Sequence[Found]) -> Table:
    sizes = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2)
    lines = [["network", "what is off", *(f"{size:g} RMS" for size in sizes)]]
    asked = ("cells of the tree {}", "theta {}, attention", "theta {}, not attention")
    for f in kept:
        for what in asked:
            cells = [f.cell("attention", what.format(f"{size:g}")) for size in sizes]
            lines.append([f.title, what.replace(" {}", ""), *cells])
    return lines


def tree(kept: Sequence[Found]) -> Table:
    kinds = ("theta", "noise", "tree")
    head = ("its theta", "its noise", "its tree", *(f"tree {size} mV" for size in (1, 2, 5, 10)))
    lines = [["network", "preset", *head]]
    for f in kept:
        for name in PRESETS:
            asked = [f"{name}, {kind} of attention alone" for kind in kinds]
            asked += [f"{name}, cells of the tree {size} mV" for size in (1, 2, 5, 10)]
            lines.append([f.title, f"`{name}`", *(f.cell("attention", a) for a in asked)])
    return lines


TABLES: dict[str, Callable[[Sequence[Found]], Table]] = {
    f.__name__: f
    for f in (
        *(errors, others, presets, millivolts, temperature, converters, cells),
        *(tuning, bits, sensitivity, attention, tree),
    )
}


def written(table: Table) -> str:
    """As Markdown, without lines of which nothing was measured."""
    head, *rows = table
    rows = [row for row in rows if set(row[2:]) != {"-"} and set(row[1:]) != {"-"}]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str, kept: Sequence[Found]) -> str:
    """The page with every table between its marks written anew."""

    def block(found: re.Match[str]) -> str:
        table = written(TABLES[found[1]](kept))
        return f"<!-- table: {found[1]} -->\n\n{table}\n\n<!-- end -->"

    return MARK.sub(block, text)


def networks() -> list[Found]:
    held = json.loads(KEPT.read_text("utf-8"))
    return [Found(name, held[name]) for name in TITLES if name in held]


# Pictures


def drawn(found: Found) -> Any:
    """Errors in units of RMS and in millivolts, and temperature, each with its band over chips."""
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": found.name, "svg.fonttype": "none", "font.size": 8})
    lines = [*_rms(found), *_volts(found, "theta"), *_volts(found, "offset"), *_warmth(found)]
    under = sorted({panel for panel, _, line in lines if line}, key=PANELS.index)
    figure, every = plt.subplots(
        1, len(under), figsize=(2.8 * len(under), 2.6), sharey=True, layout="constrained"
    )
    axes = dict(zip(under, [every] if len(under) == 1 else every, strict=True))
    for panel, label, line in lines:
        x, values = [x for x, _ in line], [v for _, v in line]
        mean = [sum(v) / len(v) for v in values]
        axes[panel].plot(x, mean, marker=".", label=label, linewidth=1)
        axes[panel].fill_between(x, [*map(min, values)], [*map(max, values)], alpha=0.25)
    for text, axis in axes.items():
        axis.set_xlabel(text)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    first = axes[under[0]]
    first.set_ylabel(found.held["metric"])
    if found.held["metric"] == "perplexity":
        first.set_yscale("log")
    return figure


PANELS = ("error, RMS of the input", "theta off, mV", "input off, mV", "temperature, C")
Line = list[tuple[float, list[float]]]


def _line(found: Found, section: str, asked: Sequence[tuple[float, str]]) -> Line:
    return [(x, values) for x, what in asked if (values := found.values(section, what))]


def _rms(found: Found) -> Iterator[tuple[str, str, Line]]:
    start = _line(found, "errors", [(0.0, "ideal")])
    for kind in ("theta", "offset", "noise"):
        sizes = (0.02, 0.05, 0.1, 0.2, 0.4)
        yield PANELS[0], kind, start + _line(found, "errors", [(s, f"{kind} {s:g}") for s in sizes])


def _volts(found: Found, kind: str) -> Iterator[tuple[str, str, Line]]:
    for name in PRESETS:
        asked = [(float(s), f"{name}, {kind} {s} mV") for s in (1, 2, 5, 10, 20, 50)]
        if line := _line(found, "millivolts", asked):
            yield PANELS[1 if kind == "theta" else 2], name, line


def _warmth(found: Found) -> Iterator[tuple[str, str, Line]]:
    for name in PRESETS:
        if line := _line(found, "temperature", [(c, f"{name}, {c:g} C") for c in CELSIUS]):
            yield PANELS[3], name, line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gather", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.gather is not None:
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in gathered(args.gather).items()]
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    kept = networks()
    PAGE.write_text(page(PAGE.read_text("utf-8"), kept), "utf-8")
    for found in kept:
        figure = drawn(found)
        figure.savefig(IMAGES / f"analog_{found.name}.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
