"""`tg demo`: five small networks trained, converted to gates and compared.

Every figure is measured as it runs, with native ops off: the gates are really evaluated.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from textwrap import dedent, fill
from typing import NamedTuple

import torch
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating._version import __version__
from threshold_gating.cli.demo.networks import RECIPES, Digits, digits, train
from threshold_gating.cli.printing import Tell, missing, progress, say, write_json
from threshold_gating.conversion import ConversionError, audit, calibrate, convert, verify
from threshold_gating.conversion.config import Choice
from threshold_gating.conversion.text import WIDTH, columns
from threshold_gating.instance import TG
from threshold_gating.show import page
from threshold_gating.show.demo import HEADER, LEGEND, Report, Row, cells, html, meaning
from threshold_gating.show.panel import Panel, line, panel
from threshold_gating.show.seen import Seen, look

AUDITED_AS = "network"  # see conversion.audit

FILE = "tg_demo.html"
_GELU = r"re:blocks\.\d+\.act"
_TWO = "K = 2"
_CALIBRATED = 20_000  # values of each site; the fit does not change visibly with more
Say = Callable[[str], None]

_INTRODUCTION = """
    A neural network alternates sums with nonlinearities: functions such as ReLU, SiLU, GELU, tanh
    or softmax that bend what passes through. They look like many unrelated formulas. This demo puts
    one part in the place of them all, the gate: a few straight lines, and soft or hard switches
    that say which line counts where. Then it asks whether the networks still answer the same.
"""


class Converted(NamedTuple):
    """A network that was converted in one way: a label for its gates, "" where there is one way."""

    label: str
    model: nn.Module


def demo(args: argparse.Namespace) -> int:
    """`tg demo`."""
    try:
        report = run(args.out, seed=args.seed)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "jinja2":
            say(f"tg demo: {error}")
            return 1
        if package not in ("sklearn", "numpy", "scipy"):
            raise
        package = package.replace("sklearn", "scikit-learn")
        say(f"tg demo: {missing('the images need', package, 'demo')}")
        return 1
    except (OSError, ConversionError) as error:
        say(f"tg demo: {error}")
        return 1
    if args.json is not None:
        rows = [asdict(row) | {"delta": row.delta, "holds": row.holds} for row in report.rows]
        page = str((args.out / FILE).resolve())
        write_json(args, {"rows": rows, "facts": dict(report.facts), "page": page})
    if wrong := [row.name for row in report.rows if not row.holds]:
        say(f"tg demo: these should be exact and are not: {', '.join(wrong)}.")
    return 1 if wrong else 0


def run(
    out: Path,
    *,
    seed: int = 0,
    networks: Sequence[str] = tuple(RECIPES),
    epochs: int | None = None,
    tell: Say = print,
) -> Report:
    """Train, convert, compare; print the story and write the report into the folder `out`.

    Args:
        out: where `FILE` is written; made if it is missing.
        seed: of the training; the same seed gives the same table.
        networks: which of `RECIPES`.
        epochs: rounds of training, instead of each network's own.
        tell: what prints a piece of text.
    """
    started = time.perf_counter()
    page.needed()  # before the work
    tell(dedent(_INTRODUCTION).strip("\n") + "\n")
    data = digits()
    tell(
        f"1. The task: read handwritten digits, images of 8 x 8 pixels that scikit-learn brings; "
        f"{len(data.train):,} to\n   learn from, {len(data.test)} others to be tested on.\n"
    )
    out.mkdir(parents=True, exist_ok=True)  # if it cannot be made, better before the work
    rows: list[Row] = []
    panels: list[Panel] = []
    with _one_thread():
        trained = _train_all(data, seed, networks, epochs, tell)
        tell("\n3. Each nonlinearity is replaced by a gate; the weights stay as they are:")
        for name, model in trained.items():
            with progress(name) as show:
                ways = _convert(name, model, data, show)
                rows += [compare(name, model, way, data) for way in ways]
                show("looking at each gate")
                panels += _panels(name, model, ways, data)
            sites = f"{rows[-1].sites} site{'s' if rows[-1].sites > 1 else ''}"
            tell(f"   {name:<9} {sites} converted and verified one by one")
            if any(_tol(way.label) for way in ways):
                tell(f"   {'':<9} {_TWO}: accepted as they are (tol=inf), to show how far off")
    tell("\n4. The networks before and after read the test images:\n")
    facts = _facts(seed, data, started)
    report = Report(tuple(rows), tuple(panels), _samples(data), facts, len(data.test))
    tell("\n".join(columns([HEADER, *map(cells, rows)])) + "\n")
    legend = (
        fill(f"{k}: {text}.", WIDTH, initial_indent="  ", subsequent_indent="    ")
        for k, text in LEGEND.items()
    )
    tell("\n".join(legend) + "\n")
    tell("\n\n".join(fill(text, WIDTH) for text in meaning(report)))
    path = out / FILE
    page.write(path, html(report))
    tell("\nThe curves of all gates, and the inputs that each one really gets, are in the report:")
    tell(str(path.resolve()))
    return report


def _train_all(
    data: Digits, seed: int, names: Sequence[str], epochs: int | None, tell: Say
) -> dict[str, nn.Module]:
    tell("2. Networks learn to read them:")
    trained = {}
    for name in names:
        recipe = RECIPES[name]
        began = time.perf_counter()
        with progress(name) as show:
            trained[name] = train(recipe, data, seed, show, epochs)
        took = time.perf_counter() - began
        tell(f"   {name:<9} {recipe.words} ({took:.1f} s)")
    return trained


def _convert(name: str, model: nn.Module, data: Digits, show: Tell) -> list[Converted]:
    """The network by gates, in every way that is shown; each conversion is verified.

    Two branches move the scores by more than `convert` allows. That is what those rows show, so
    they are accepted here (tol=inf); the others keep to its bounds.
    """
    ways: dict[str, dict[str, Choice] | None] = {"": None}
    if name == "ViT":
        batches = torch.split(data.train, 256)
        fitted = calibrate(
            model,
            batches,
            K=2,
            values=_CALIBRATED,
            progress=lambda text, share: show(text),  # what comes then has no share
        )
        ways = {
            f"{_TWO} paper": {_GELU: "gelu_paper"},
            f"{_TWO} calibrated": {**fitted},
            "K = 3": {_GELU: 3},
            "K = 5": {_GELU: 5},
        }
    show("converting")
    sample = data.train[:32]
    return [
        Converted(label, convert(model, at, inputs=sample, tol=_tol(label)))
        for label, at in ways.items()
    ]


def _tol(label: str) -> float | None:
    return math.inf if label.startswith(_TWO) else None


def compare(name: str, model: nn.Module, way: Converted, data: Digits) -> Row:
    """Original and converted network on the test images, with the gates evaluated."""
    with torch.no_grad(), kernels.use("reference"):
        seen = audit(way.model, data.test[:32])
        before, after = model(data.test), way.model(data.test)
    ran = [site for site in seen.sites if site.calls and not site.native]
    K = max([2, *(site.K for site in seen.sites if site.K is not None)])
    return Row(
        network=name,
        gates=way.label,
        K=K,
        sites=len(ran),
        exact=all(site.exact for site in ran) and not seen.left,
        baseline=_accuracy(before, data.test_labels),
        converted=_accuracy(after, data.test_labels),
        agreement=(before.argmax(1) == after.argmax(1)).double().mean().item(),
        difference=(before - after).abs().max().item(),
        rms=(before - after).square().mean().sqrt().item(),
        largest=before.abs().max().item(),
    )


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def _panels(
    name: str, model: nn.Module, ways: Sequence[Converted], data: Digits
) -> Iterator[Panel]:
    """A panel for each function; gates that are the same in every way are drawn once."""
    chosen = {way.label: _looked_at(way.model, data) for way in ways}
    worst = {way.label: _errors(model, way.model, data) for way in ways}
    for seen in look(model, data.test):
        gates: dict[TG, str] = {}
        for label, found in chosen.items():
            gates.setdefault(found[seen.name].gates[0], label)
        lines = [
            line(
                *(seen, t, label if len(gates) > 1 else ""),
                bool(chosen[label][seen.name].exact),
                worst[label][seen.site],
            )
            for t, label in gates.items()
        ]
        yield panel(name, seen, lines)


def _errors(model: nn.Module, converted: nn.Module, data: Digits) -> dict[str, float]:
    certificate = verify(model, converted, data.test, tol=math.inf)
    return {row.site: row.max for row in certificate.rows}


def _looked_at(model: nn.Module, data: Digits) -> dict[str, Seen]:
    return {seen.name: seen for seen in look(model, data.test)}


def _samples(data: Digits) -> tuple[tuple[int, bytes], ...]:
    """The first test image of each digit, as bytes from 0 to 255."""
    first = [int((data.test_labels == digit).nonzero()[0]) for digit in range(10)]
    grey = (255 * data.test[first]).byte().flatten(1)
    return tuple((digit, bytes(row.tolist())) for digit, row in enumerate(grey))


def _facts(seed: int, data: Digits, started: float) -> dict[str, str]:
    return {
        "made by": f"tg demo --seed {seed}",
        "threshold_gating": __version__,
        "torch": torch.__version__,
        "scikit-learn": metadata.version("scikit-learn"),
        "Python": f"{platform.python_version()} on {platform.system()}, {platform.machine()}",
        "seed of the training": str(seed),
        "images": f"{len(data.train):,} to learn from, {len(data.test)} for the test",
        "evaluated with": "native ops off (tg.kernels.use('reference')), float32, one thread",
        "time": f"{time.perf_counter() - started:.0f} s in all",
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Networks this small gain nothing from a second thread, and results stay the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
