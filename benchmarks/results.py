"""Write RESULTS.md and its picture from the JSON of `tg bench` and of the other GPU benchmarks.

    python -m benchmarks.results [FOLDER]

The folder (default: benchmarks/h200) has bench.json from `tg bench --json`, attention.json from
`python -m benchmarks.attention --json` and llm.json from `python -m benchmarks.llm --json`.
"""

import json
import sys
from pathlib import Path

from benchmarks.attention import SHAPES, limits
from threshold_gating.benchmarking import picture, report

HERE = Path(__file__).parent


def attention(data):
    """Every limit of the attention benchmark beside what was measured."""
    lines = [f"## attention, {data['device']}, torch {data['torch']}, bf16, causal", ""]
    lines += ["| B, H, S, D | way | pass | ms | of | ratio | limit | |", "| --- " * 8 + "|"]
    for part in data["shapes"]:
        for (name, stage), (to, limit) in limits(SHAPES[tuple(part["shape"])]).items():
            ms = part["ms"][stage]
            ratio = ms[name] / ms[to]
            verdict = "ok" if ratio <= limit else "MISSED"
            place = ", ".join(map(str, part["shape"]))
            what = "forward" if stage == "forward" else "+ backward"
            figures = f"{ms[name]:.3f} | {to} {ms[to]:.3f} | {ratio:.2f} | {limit}"
            lines.append(f"| {place} | {name} | {what} | {figures} | {verdict} |")
    mib = [round(b / 2**20, 1) for b in data["memory"]["fused"]]
    lines += ["", f"Memory of both passes from 2k to 16k tokens, MiB: {', '.join(map(str, mib))}."]
    return "\n".join(lines) + "\n"


def language_model(data):
    """Tokens a second of a converted network over the original's."""
    lines = [f"## Llama, 1.1 G parameters, bf16, {data['device']}, torch {data['torch']}", ""]
    lines += ["| work | tokens/s | original | ratio | limit | |", "| --- " * 6 + "|"]
    for name, row in data.items():
        if isinstance(row, dict):
            verdict = "ok" if row["ratio"] >= row["limit"] else "MISSED"
            speeds = f"{row['ours']:.0f} | {row['theirs']:.0f}"
            lines.append(f"| {name} | {speeds} | {row['ratio']:.3f} | {row['limit']} | {verdict} |")
    return "\n".join(lines) + "\n"


def main(folder=HERE / "h200", out=HERE):
    found = {p.stem: json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))}
    try:
        parts = [report(found["bench"]) + "\n![Cost as the work grows](growth.svg)\n"]
    except ValueError as error:
        raise SystemExit(f"benchmarks.results: {Path(folder) / 'bench.json'}: {error}") from None
    parts += [make(found[name]) for name, make in PAGES.items() if name in found]
    (out / "RESULTS.md").write_text("\n".join(parts))
    picture(found["bench"], out / "growth.svg")


PAGES = {"attention": attention, "llm": language_model}

if __name__ == "__main__":
    main(*sys.argv[1:])
